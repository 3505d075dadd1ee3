"""All clients claim the same GPUs at once, and some are killed: no GPU is ever held twice. They stand in one queue,
which is served in the order of arrival, whatever the sizes and whichever client dies in it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.real import long

KINDS = ("c", "python")
CLIENTS = (*KINDS, "minimal")
BOTH = pytest.mark.parametrize(("first", "second"), [KINDS, KINDS[::-1]], ids=["C first", "Python first"])


class CheckedQueue:
    """Eight GPUs, a queue, and the rule: the first is served as soon as it fits, and nobody before that."""

    def __init__(self, scene: Any) -> None:
        self.scene = scene
        self.queue: list[Any] = []
        self.holders: list[Any] = []
        self.served: set[int] = set()

    def arrive(self, kind: str, size: int, **options: Any) -> Any:
        """Somebody comes; returns when its place in the queue is taken, or its GPUs are."""
        at_once = not self.queue and size <= self.free
        party = self.scene.start(kind, size, **options)
        self.queue.append(party)
        if not at_once:
            self.scene.until(lambda: party.pid in self.scene.tickets() or party.pid in self.scene.served(), party)
        self.serve()
        return party

    @property
    def free(self) -> int:
        return 8 - sum(party.size for party in self.holders)

    def serve(self) -> None:
        """Wait for those whose turn it is; nobody else may be served."""
        while self.queue and self.queue[0].size <= self.free:
            party = self.queue.pop(0)
            self.holders.append(party)
            self.served.add(party.pid)
        self.scene.until(lambda: self.served <= set(self.scene.served()), *self.holders)
        early = set(self.scene.served()) - self.served
        assert not early, f"{early} were served before {self.queue[:1]}"

    def end(self, parties: list[Any], number: int = 0) -> None:
        """A holder or a waiter is killed."""
        parties.pop(number).end()
        self.serve()

    def finish(self) -> None:
        while self.holders:
            self.end(self.holders, self.scene.random.randrange(len(self.holders)))
        assert not self.queue
        assert self.scene.said("rival") == []
        self.scene.all_can_be_claimed()


@pytest.fixture
def checked_queue(scene: Any) -> CheckedQueue:
    return CheckedQueue(scene)


def test_a_mixed_queue_is_served_in_order_of_arrival(checked_queue: CheckedQueue, scene: Any) -> None:
    checked_queue.arrive("c", 8)
    for number in range(60 if scene.required else 8):
        checked_queue.arrive(CLIENTS[number % 3], scene.random.choice((1, 2, 4, 8)))
    assert scene.tickets() == [party.pid for party in checked_queue.queue]
    checked_queue.finish()


@pytest.mark.timeout(300)
def test_whoever_dies_in_the_queue_does_not_block_it(checked_queue: CheckedQueue, scene: Any) -> None:
    scene.make_state_dir()
    for _ in range(200 if scene.required else 16):
        choice = scene.random.random()
        if choice < 0.5 or not checked_queue.queue:
            checked_queue.arrive(scene.random.choice(CLIENTS), scene.random.choice((1, 2, 4, 8)))
        elif choice < 0.75:
            checked_queue.end(checked_queue.queue, scene.random.randrange(len(checked_queue.queue)))
        else:
            checked_queue.end(checked_queue.holders, scene.random.randrange(len(checked_queue.holders)))
    checked_queue.finish()


def test_a_client_that_ignores_the_queue_is_seen(checked_queue: CheckedQueue) -> None:
    checked_queue.arrive("c", 7)
    checked_queue.arrive("python", 8)
    checked_queue.arrive("c", 1)
    with pytest.raises(AssertionError, match="served before"):
        checked_queue.arrive("c", 1, broken="no queue")


@pytest.mark.parametrize("first", KINDS)
def test_a_stopped_waiter_is_passed(scene: Any, stop: Any, first: str) -> None:
    """Not by the client in C, which passes nobody, here and below."""
    holder = scene.until_holds(scene.start("python", 1))
    waiter = scene.until_waits(scene.start(first, 8))
    assert scene.start("python", 1, "now").finish()[0] == 75
    stop(waiter.pid, scene.state_dir)
    scene.until_holds(scene.start("python", 1, "now"))
    assert scene.start("c", 1, "now").finish()[0] == 75
    holder.end()


def test_a_waiter_that_a_stranger_keeps_waiting_is_passed(scene: Any) -> None:
    stranger = scene.stranger(scene.uuids[0])
    scene.until_waits(scene.start("c", 8))
    scene.until_holds(scene.start("python", 1, "now"))
    stranger.end()


def test_a_waiter_is_passed_by_dates_only_where_it_is_not_delayed(scene: Any) -> None:
    """The holder's ``until`` and the ``hold_for`` of the ticket ahead are the other client's."""
    holder = scene.until_holds(scene.start("c", 4, "an hour"))
    scene.until_waits(scene.start("c", 8, "a minute"))
    assert scene.start("python", 1, "now").finish()[0] == 75  # for ever: it would delay the one ahead
    assert scene.start("python", 1, "now", "a minute", seconds=0).finish()[0] == 0
    holder.end()


# Races


ENTRY_RACE = Path(__file__).parents[1] / "race" / "entry_race.py"
NETWORKS = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make network namespaces")
USERS = (54321, 54322, 54323)
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file tells the order")


def entry_race(client: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Let it race with claims of the package; every second process uses it."""
    command = [sys.executable, str(ENTRY_RACE), "--client", client, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


def race_in_order(client: str, way: str) -> None:
    """A race in which nothing is found."""
    done = entry_race(client, "--seconds", "4", *way.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'claimed'" in done.stdout


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("--host-lock on --shares --inside", marks=long),
        pytest.param("--host-lock off --shares --orphans", marks=long),
        pytest.param("--host-lock off --shares --inside --directories", marks=long),
        pytest.param("--shares --networks", marks=[NETWORKS, long]),
    ],
)
def test_entries_and_doors_alone_keep_both_apart(build: Callable[..., str], way: str) -> None:
    race_in_order(build("complete/for_tests.c"), way)


@long
@pytest.mark.parametrize(
    "way",
    [
        "--host-lock on --shares --orphans",
        "--host-lock off --shares --directories",
        pytest.param("--host-lock off --shares --networks", marks=NETWORKS),
    ],
)
def test_entries_and_doors_alone_keep_the_example_apart(build: Callable[..., str], way: str) -> None:
    race_in_order(build("client.c"), way)


@long
@NETWORKS
@pytest.mark.parametrize("source", ["complete/for_tests.c", "client.c"])
@pytest.mark.parametrize(
    ("broken", "way"),
    [("no second listing", "--networks"), ("not locked", "--networks"), ("no doors", "--directories")],
)
def test_a_broken_client_is_caught(build: Callable[..., str], source: str, broken: str, way: str) -> None:
    """It takes host.lock, so the others do not."""
    client = build(source, broken)
    done = entry_race(client, "--seconds", "90", "--until-found", "--host-lock", "off", way)
    assert "violation" in done.stdout, done.stdout + done.stderr


class Forked:
    """``safe-gpu run`` of a user who may not be able to read this interpreter, so it is forked."""

    def __init__(self, user: Any) -> None:
        self.pid, self.process = user.pid, self

    def poll(self) -> int | None:
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended and ended.si_status

    def finish(self) -> tuple[int | None, str, str]:
        return self.poll(), "", ""


@AS_ROOT
@pytest.mark.timeout(300)
def test_all_clients_see_one_order(scene: Any, as_user: Any) -> None:
    """Of several users, in C, and of this package with turns or without them."""
    for order in ("fair", "fifo"):
        (scene.directory / order).write_text(f"[host]\norder = {order}\n")
        (scene.directory / order).chmod(0o644)

    def start(size: int, seconds: float) -> Any:
        kind, uid = scene.random.choice(("c", "minimal", "fair", "fair", "fifo")), scene.random.choice(USERS)
        if kind in ("c", "minimal"):
            return scene.start(kind, size, seconds=seconds, user=uid)

        def work(say: Any, listen: Any) -> None:
            os.environ.update(scene.env, SAFE_GPU_POLICY=str(scene.directory / kind))
            api.main([*scene.words("python", size)[3:], *scene.job(seconds)])  # becomes the job

        return Forked(as_user(work, uid=uid))

    holder = scene.until_holds(scene.start("c", 8))
    waiters = [scene.until_waits(start(8, seconds=0.05)) for _ in range(40 if scene.required else 12)]
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
