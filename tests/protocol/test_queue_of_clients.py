"""One queue for both clients: served in the order of arrival, whatever the sizes and whichever client dies in it."""

from typing import Any

import pytest

KINDS = ("c", "python")
BOTH = pytest.mark.parametrize(("first", "second"), [KINDS, KINDS[::-1]], ids=["C first", "Python first"])


class Desk:
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

    def end(self, parties: list[Any], number: int) -> None:
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
def desk(scene: Any) -> Desk:
    return Desk(scene)


def test_a_mixed_queue_is_served_in_order_of_arrival(desk: Desk, scene: Any) -> None:
    desk.arrive("c", 8)
    for number in range(60 if scene.required else 8):
        desk.arrive(KINDS[number % 2], scene.random.choice((1, 2, 4, 8)))
    assert scene.tickets() == [party.pid for party in desk.queue]
    desk.finish()


@pytest.mark.timeout(300)
def test_whoever_dies_in_the_queue_does_not_block_it(desk: Desk, scene: Any) -> None:
    for _ in range(200 if scene.required else 16):
        choice = scene.random.random()
        if choice < 0.5 or not desk.queue:
            desk.arrive(scene.random.choice(KINDS), scene.random.choice((1, 2, 4, 8)))
        elif choice < 0.75:
            desk.end(desk.queue, scene.random.randrange(len(desk.queue)))
        else:
            desk.end(desk.holders, scene.random.randrange(len(desk.holders)))
    desk.finish()


@BOTH
def test_a_large_claim_gets_its_turn_in_a_stream_of_small_ones(desk: Desk, first: str, second: str) -> None:
    for _ in range(2):
        desk.arrive(second, 4)
    large = desk.arrive(first, 8)
    for _ in range(2):
        desk.arrive(second, 4)
        desk.end(desk.holders, 0)
    assert large.pid in desk.served
    desk.finish()


def test_a_client_that_ignores_the_queue_is_seen(desk: Desk) -> None:
    desk.arrive("c", 7)
    desk.arrive("python", 8)
    desk.arrive("c", 1)
    with pytest.raises(AssertionError, match="served before"):
        desk.arrive("c", 1, flags=("-DNO_QUEUE",))


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
