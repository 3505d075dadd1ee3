"""Those who wait are served in the order in which they came, whatever the sizes and whoever dies."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

MIXED = (1, 2, 4, 8)


class Desk:
    """Eight GPUs, a queue of racers, and the rule: whoever fits and has nobody waiting before him is served.

    Every step waits for exactly those claims that the rule says must happen now; any other one, or one that does not
    happen, is an error.
    """

    def __init__(self, track: Any, eventually: Callable[[Callable[[], bool]], None]) -> None:
        self._track = track
        self._eventually = eventually
        self.queue: deque[tuple[Any, int]] = deque()
        self.holders: list[tuple[Any, int]] = []
        self.served: list[int] = []

    @property
    def free(self) -> int:
        return 8 - sum(size for _, size in self.holders)

    def arrive(self, size: int) -> None:
        """Somebody comes; returns when the place in the queue is taken, or the GPUs are."""
        racer = self._track.start(lambda line: self._track.claim_and_hold(line, size, timeout=None))
        at_once = not self.queue and size <= self.free
        self.queue.append((racer, size))
        if not at_once:
            self._eventually(lambda: racer.pid in self.tickets())
        self.serve()

    def tickets(self) -> list[int]:
        """The pids of those who wait, in their order."""
        found = []
        for path in sorted((self._track.state_dir / "queue").glob("*.ticket"), key=lambda path: int(path.stem)):
            try:
                found.append(int(json.loads(path.read_text())["pid"]))
            except (FileNotFoundError, ValueError):
                pass  # served, or just being written
        return found

    def serve(self) -> None:
        """Everybody whose turn it is gets their GPUs."""
        due = []
        while self.queue and self.queue[0][1] <= self.free:
            self.holders.append(self.queue.popleft())
            due.append(self.holders[-1][0])
        while due:
            racer, said = self._track.next_word([*due, *(racer for racer, _ in self.queue)])
            assert said[0] == "holds"
            assert said[2] == []
            assert racer in due, f"process {racer.pid} was served before its turn"
            due.remove(racer)
            self.served.append(racer.pid)

    def let_go(self, number: int) -> None:
        """A holder gives its GPUs back."""
        racer, _ = self.holders.pop(number)
        racer.tell("let go")
        assert racer.hear() == ("done",)
        self.serve()

    def kill_holder(self, number: int) -> None:
        racer, _ = self.holders[number]
        racer.kill()
        del self.holders[number]
        self.serve()

    def kill_waiter(self, number: int) -> None:
        racer, _ = self.queue[number]
        del self.queue[number]
        racer.kill()
        self.serve()

    def finish(self) -> None:
        while self.holders:
            self.let_go(self._track.random.randrange(len(self.holders)))
        assert not self.queue
        self._track.claim_all()
        assert self._track.files() == []


@pytest.fixture
def desk(track: Any, eventually: Callable[[Callable[[], bool]], None]) -> Desk:
    return Desk(track, eventually)


def test_15_waiters_of_mixed_sizes_are_served_in_their_order(desk: Desk, track: Any) -> None:
    desk.arrive(8)
    for _ in range(15):
        desk.arrive(track.random.choice(MIXED))
    order = [racer.pid for racer, _ in desk.queue]
    assert desk.tickets() == order
    desk.finish()
    assert sorted(desk.served[1:]) == sorted(order)


def test_a_request_for_all_is_served_in_its_turn_among_a_stream_of_small_ones(desk: Desk, track: Any) -> None:
    for _ in range(10):
        desk.arrive(1)
    desk.arrive(8)
    big = desk.queue[-1][0].pid
    before = len(desk.served) + len(desk.queue) - 1
    for _ in range(20):
        desk.arrive(1)
        desk.let_go(track.random.randrange(len(desk.holders)))
        if big in desk.served:
            break
    assert desk.served.index(big) == before
    desk.finish()


@pytest.mark.timeout(180)
def test_killing_waiters_and_holders_at_random_never_blocks_the_others(desk: Desk, track: Any) -> None:
    random = track.random
    for _ in range(10):
        desk.arrive(random.choice(MIXED))
    for _ in range(50):
        choice = random.random()
        if choice < 0.3 or not desk.queue:
            desk.arrive(random.choice(MIXED))
        elif choice < 0.6:
            desk.kill_waiter(random.randrange(len(desk.queue)))
        elif choice < 0.8:
            desk.kill_holder(random.randrange(len(desk.holders)))
        else:
            desk.let_go(random.randrange(len(desk.holders)))
    desk.finish()
