"""Both clients claim the same GPUs at once, and some are killed: no GPU is ever held twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest

from safe_gpu.cli.commands import main
from safe_gpu.coordination import socket_names as names
from safe_gpu.coordination.name_table import read_names
from safe_gpu.coordination.queue.ticket import decode_file
from safe_gpu.coordination.queue.turns import by_turn

AT_ONCE = 10
CONTENDED = 75  # EX_TEMPFAIL


def race(
    scene: Any, claims: int, flags: Sequence[str] = (), directories: Sequence[str] = (), mixed: Mixed | None = None
) -> None:
    """Let that many claims of both clients run, ten at once; kill every fifth of them, chosen at random.

    Args:
        flags: with which the C client is broken. The Python one may see it on its GPUs, and refuse.
        directories: state directories; where there are some, every second claim is for a share.
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
        options, env = (), {}
        if directories:
            env["SAFE_GPU_DIR"] = str(scene.directory / scene.random.choice(directories))
        if directories and number % 2:
            kind, options, seconds = "python", ("--share", scene.random.choice(("10%", "25%", "60%"))), 2 * seconds
        if mixed is None:
            one = scene.start(kind, size, *options, seconds=seconds, flags=flags if kind == "c" else (), env=env)
        else:
            one = mixed.start(size, seconds=10 * seconds)
        live.append(one)
        if number % 5 == 4:
            live.pop(scene.random.randrange(len(live))).end()
    wait_for_room(0)


@pytest.mark.timeout(600)
def test_no_gpu_is_held_twice(scene: Any) -> None:
    claims = 900 if scene.required else 50
    race(scene, claims)
    assert scene.said("rival") == []
    assert len(scene.served()) >= claims * 4 // 5
    scene.all_can_be_claimed()
    assert scene.tickets() == []


def test_both_detectors_see_a_client_that_takes_no_leases(scene: Any) -> None:
    for _ in range(20):
        race(scene, 12, ["-DNO_LEASE"])
        if scene.rivals("marker") and scene.rivals("list"):
            break
    assert scene.rivals("marker") > 0
    assert scene.rivals("list") > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("directories", [("state",), ("state", "other")], ids=["one directory", "two directories"])
def test_no_gpu_is_held_whole_beside_a_share(scene: Any, directories: Sequence[str]) -> None:
    claims = 300 if scene.required else 30
    race(scene, claims, directories=directories)
    assert scene.said("rival") == []
    assert len(scene.served()) >= claims * 4 // 5
    scene.all_can_be_claimed()


def test_a_client_that_does_not_ask_for_shares_is_seen(scene: Any) -> None:
    last = names.slot_of(max(scene.uuids), 0, names.simulated_prefix(str(scene.tree.parent)))
    sharer = scene.start("python", 8, "--share", "10%", command=["sleep", "60"])
    scene.until(lambda: last in read_names(), sharer)
    other = {"SAFE_GPU_DIR": str(scene.directory / "other")}
    for flags, code in (((), CONTENDED), (("-DNO_SLOTS",), 0)):
        assert scene.start("c", 1, "-t", "0", command=["true"], flags=flags, env=other).finish()[0] == code


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
    """Clients of several users: in C, of an older release, and with turns. An older one is as one with fifo."""

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


USERS = (54321, 54322, 54323)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file tells the order")


@AS_ROOT
@pytest.mark.timeout(600)
def test_clients_with_and_without_turns_are_all_served(scene: Any, as_user: Any) -> None:
    claims = 300 if scene.required else 40
    race(scene, claims, mixed=Mixed(scene, as_user))
    assert scene.said("rival") == []
    assert len(scene.served()) >= claims * 4 // 5
    scene.all_can_be_claimed()
    assert scene.tickets() == []


@AS_ROOT
@pytest.mark.timeout(300)
def test_all_clients_see_one_order(scene: Any, as_user: Any) -> None:
    mixed, holder = Mixed(scene, as_user), scene.until_holds(scene.start("c", 8))
    waiters = [scene.until_waits(mixed.start(8, seconds=0.05)) for _ in range(40 if scene.required else 12)]
    tickets = []
    for path in sorted((scene.state_dir / "queue").iterdir(), key=lambda path: int(path.stem)):
        with path.open() as file:
            tickets.append(decode_file(int(path.stem), file.fileno()))
    holder.end()
    for one in waiters:
        scene.until(lambda one=one: one.process.poll() is not None)
        assert one.finish()[0] == 0
    assert scene.served()[1:] == [ticket.pid for _, ticket in by_turn(tickets)]
    assert len({ticket.turn is None for ticket in tickets}) == 2
