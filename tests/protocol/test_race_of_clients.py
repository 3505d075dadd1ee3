"""Both clients claim the same GPUs at once, and some are killed: no GPU is ever held twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.real import REQUIRED, long

from safe_gpu.cli.commands import main

ENTRY_RACE = Path(__file__).parents[1] / "race" / "entry_race.py"
NETWORKS = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
USERS = (54321, 54322, 54323)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file tells the order")


def entry_race(client: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Let it race with claims of the package; every second process uses it."""
    command = [sys.executable, str(ENTRY_RACE), "--client", client, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


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
    done = entry_race(build("client.c", "-O2"), "--seconds", "6" if REQUIRED else "2", *way.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'claimed'" in done.stdout


@long
@NETWORKS
@pytest.mark.parametrize(("flag", "way"), [("-DONE_LISTING", "--networks"), ("-DNO_DOORS", "--directories")])
def test_a_broken_client_is_caught(build: Callable[..., str], flag: str, way: str) -> None:
    """It takes host.lock, so the others do not."""
    done = entry_race(build("client.c", flag), "--seconds", "90", "--until-found", "--host-lock", "off", way)
    assert "violation" in done.stdout, done.stdout + done.stderr


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
