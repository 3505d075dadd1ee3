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


@pytest.mark.timeout(180)
def test_mixed_sizes_are_served_in_their_order_and_the_dead_block_nobody(desk: Desk, track: Any) -> None:
    random = track.random
    for size in (8, *random.choices(MIXED, k=12)):
        desk.arrive(size)
    assert desk.tickets() == [racer.pid for racer, _ in desk.queue]
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
