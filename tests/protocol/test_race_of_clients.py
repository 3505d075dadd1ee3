"""Both clients claim the same GPUs at once, and some are killed: no GPU is ever held twice."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.real import long

from safe_gpu.cli.commands import main

AT_ONCE = 10
CONTENDED = 75  # EX_TEMPFAIL
ENTRY_RACE = Path(__file__).parents[1] / "race" / "entry_race.py"
NETWORKS = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
USERS = (54321, 54322, 54323)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file tells the order")


def entry_race(client: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Let it race with what the package has for entries and doors, without the rest of a claim."""
    command = [sys.executable, str(ENTRY_RACE), "--client", client, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


@long
@pytest.mark.parametrize(
    "way",
    [
        "--host-lock on --shares --inside",
        "--host-lock off --shares --orphans",
        "--host-lock off --shares --inside --directories",
        pytest.param("--shares --networks", marks=NETWORKS),
    ],
)
def test_entries_and_doors_alone_keep_both_apart(build: Callable[..., str], way: str) -> None:
    done = entry_race(build("client.c", "-O2"), "--seconds", "10", *way.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"'claimed': (\d+)", done.stdout)[1]) > 10, done.stdout


@long
@NETWORKS
@pytest.mark.parametrize(("flag", "way"), [("-DONE_LISTING", "--networks"), ("-DNO_DOORS", "--directories")])
def test_a_broken_client_is_caught(build: Callable[..., str], flag: str, way: str) -> None:
    """It takes host.lock, so the others do not."""
    done = entry_race(build("client.c", flag), "--seconds", "90", "--until-found", "--host-lock", "off", way)
    assert re.search("violation", done.stdout), done.stdout + done.stderr


def race(scene: Any, claims: int, flags: Sequence[str] = (), mixed: Mixed | None = None) -> None:
    """Let that many claims of both clients run, ten at once; kill every fifth of them, chosen at random.

    Args:
        flags: with which the C client is broken. The Python one may see it on its GPUs, and refuse.
        mixed: starts clients with and without turns.
    """
    live: list[Any] = []

    def wait_for_room(room: int) -> None:
        nonlocal live
        while len(live) > room:
            scene.until(lambda: any(party.process.poll() is not None for party in live))
            for party in [party for party in live if party.process.poll() is not None]:
                code, _, err = party.finish()
                assert code == 0 or (flags and code == CONTENDED), f"{party} ended with {code}: {err}"
                live.remove(party)

    for number in range(claims):
        wait_for_room(AT_ONCE - 1)
        kind = "python" if number % 4 == 0 else "c"
        size, seconds = scene.random.choice((1, 2, 3, 5)), scene.random.choice((0.0, 0.005, 0.02))
        if mixed is None:
            one = scene.start(kind, size, seconds=seconds, flags=flags if kind == "c" else ())
        else:
            one = mixed.start(size, seconds=10 * seconds)
        live.append(one)
        if number % 5 == 4:
            live.pop(scene.random.randrange(len(live))).end()
    wait_for_room(0)


def nothing_was_held_twice(scene: Any, claims: int) -> None:
    assert scene.said("rival") == []
    assert len(scene.served()) >= claims * 4 // 5
    scene.all_can_be_claimed()
    assert scene.tickets() == []


@pytest.mark.timeout(600)
def test_no_gpu_is_held_twice(scene: Any) -> None:
    claims = 900 if scene.required else 50
    race(scene, claims)
    nothing_was_held_twice(scene, claims)


def test_both_detectors_see_a_client_that_takes_what_others_hold(scene: Any) -> None:
    for _ in range(20):
        race(scene, 12, ["-DNO_ROOM", "-DNO_DOORS"])
        if scene.rivals("marker") and scene.rivals("list"):
            break
    assert scene.rivals("marker") > 0
    assert scene.rivals("list") > 0


class Forked:
    """``safe-gpu run`` of a user who may not be able to read this interpreter, so it is forked."""

    def __init__(self, user: Any) -> None:
        self.user, self.pid, self.process = user, user.pid, self
        self.code: int | None = None

    def poll(self) -> int | None:
        if self.code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            self.code = os.waitstatus_to_exitcode(self.user.end())
        return self.code

    def finish(self) -> tuple[int | None, str, str]:
        return self.poll(), "", ""

    def end(self) -> None:
        self.user.end()


class Mixed:
    """Clients of several users: in C, and of this package with turns or without them."""

    def __init__(self, scene: Any, as_user: Any) -> None:
        self.scene, self.as_user = scene, as_user
        for order in ("fair", "fifo"):
            (scene.directory / order).write_text(f"[host]\norder = {order}\n")
            (scene.directory / order).chmod(0o644)

    def start(self, size: int, seconds: float) -> Any:
        kind, uid = self.scene.random.choice(("c", "fair", "fair", "fifo")), self.scene.random.choice(USERS)
        if kind == "c":
            return self.scene.start("c", size, seconds=seconds, user=uid)
        words = [*self.scene.words("python", size)[3:], *self.scene.job(seconds)]

        def work(say: Any, listen: Any) -> None:
            os.environ.update(self.scene.env, SAFE_GPU_POLICY=str(self.scene.directory / kind))
            main(words)  # becomes the job

        return Forked(self.as_user(work, uid=uid))


@AS_ROOT
@pytest.mark.timeout(600)
def test_clients_with_and_without_turns_are_all_served(scene: Any, as_user: Any) -> None:
    claims = 300 if scene.required else 40
    race(scene, claims, mixed=Mixed(scene, as_user))
    nothing_was_held_twice(scene, claims)


@AS_ROOT
@pytest.mark.timeout(300)
def test_all_clients_see_one_order(scene: Any, as_user: Any) -> None:
    mixed, holder = Mixed(scene, as_user), scene.until_holds(scene.start("c", 8))
    waiters = [scene.until_waits(mixed.start(8, seconds=0.05)) for _ in range(40 if scene.required else 12)]
    order, highest = [], 0.0
    for ticket in scene.entries("queue"):
        turn = ticket.more.get("turn", highest)  # one without a turn stands behind all lower numbers
        highest = max(highest, turn)
        order.append((turn, ticket.number, ticket.pid))
    assert len({"turn" in ticket.more for ticket in scene.entries("queue")}) == 2
    holder.end()
    for one in waiters:
        scene.until(lambda one=one: one.process.poll() is not None)
        assert one.finish()[0] == 0
    assert scene.served()[1:] == [pid for _, _, pid in sorted(order)]
