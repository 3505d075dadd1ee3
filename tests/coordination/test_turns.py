"""Turns in queues drawn at random, whose waiters come, are served strictly in their order, and go."""

import json
import math
import random
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support import api
from support.real import long

GPUS = [f"GPU-{number}" for number in range(8)]
SIMPLE, RESTRICTED, OLDER, SHARES, FORGED, WEIGHTS, GAPS, STOPPED = 0, 1, 2, 4, 8, 16, 32, 64
"""What a world has besides whole hosts, honest tickets and users who are alike. Gaps are numbers that came and went."""
FORGER = 9999
LATEST_TURN = 2.0**53


def ticket_of(number: int, request: api.TicketRequest, *, uid: int, turn: float | None) -> api.Entry:
    """A ticket as it is read back."""
    said = {"v": 1, "pid": 1, **request.as_facts(), **({} if turn is None else {"turn": turn})}
    return api.Entry.read(f"{number}.{number:016x}", uid, (1, number), json.dumps(said).encode())


def newcomers_turn(request: api.TicketRequest, queue: list[tuple[float, api.Entry]], number: int, **more: Any) -> float:
    return api.turn_of_newcomer(request.silicon, queue, number, size=size, **more)


def size(ticket: api.Entry) -> float:
    return ticket.nb_gpus * float(ticket.more.get("share", 1.0))


class World:
    """A queue in which whoever may start does, and who runs. Nobody holds for longer than said."""

    def __init__(self, seed: int, kinds: int) -> None:
        self.chance = random.Random(seed)
        self.kinds = kinds
        self.users = range(self.chance.randint(2, 5))
        self.waiting: list[api.Entry] = []
        self.running: list[tuple[api.Entry, list[str]]] = []
        self.last = 0
        self.stopped: set[int] = set()
        self.now = 0.0
        self.until: dict[int, float] = {}

    def request(self) -> api.TicketRequest:
        number, among, share = self.chance.choice([1, 1, 1, 2, 4, 8]), GPUS, 1.0
        if self.kinds & RESTRICTED and self.chance.random() < 0.6:
            among = self.chance.sample(GPUS, self.chance.randint(1, 8))
        if self.kinds & SHARES and self.chance.random() < 0.3:
            number, share = 1, 0.25
        says = self.chance.choice([None, 1.0, 2.0, 5.0, 9.0])
        return api.TicketRequest(
            min(number, len(among)), frozenset(among), (("share", share),) if share < 1 else (), says
        )

    def counts(self, ticket: api.Entry) -> bool:
        return ticket.number not in self.stopped

    def newcomer(self) -> api.Entry:
        """Let one join, perhaps of an older client, perhaps with a turn of its own making."""
        self.last += self.chance.choice([1, 300]) if self.kinds & GAPS else 1
        uid, request, seq = self.chance.choice(self.users), self.request(), self.last
        weight = 1.0 + uid if self.kinds & WEIGHTS else 1.0
        held = sum(size(one) for one, _ in self.running if one.uid == uid)
        turn: float | None = newcomers_turn(
            request, api.by_turn(self.waiting), seq, uid=uid, held=held, weight=weight, counts=self.counts
        )
        if self.kinds & OLDER and self.chance.random() < 0.3:
            turn = None
        elif self.kinds & FORGED and self.chance.random() < 0.05:
            turn = self.chance.choice([0.0, 1e6, LATEST_TURN])
            uid = FORGER
        ticket = ticket_of(seq, request, uid=uid, turn=turn)
        self.waiting.append(ticket)
        return ticket

    def joins(self, steps: int) -> Iterator[tuple[list[api.Entry], api.Entry]]:
        """Yield the order before each newcomer, and the newcomer."""
        for _ in range(steps):
            if self.chance.random() < 0.6:
                before = [one for _, one in api.by_turn(self.waiting)]
                yield before, self.newcomer()
            self.serve()

    def want(self, ticket: api.Entry) -> api.BackfillRequest:
        number, gpus, says = ticket.nb_gpus, frozenset(ticket.gpus), ticket.more["hold_for"]
        part = size(ticket) / number
        return api.BackfillRequest(number, gpus, says or math.inf, share=part if part < 1 else math.inf)

    def when(self) -> dict[str, api.When]:
        parts: dict[str, list[tuple[float, float]]] = {gpu: [] for gpu in GPUS}
        for one, gpus in self.running:
            for gpu in gpus:
                parts[gpu].append((self.until[one.number], min(1.0, self.want(one).share)))
        return {gpu: (*held, (self.now, 1.0 - sum(part for _, part in held))) for gpu, held in parts.items()}

    def order(self) -> list[api.Entry]:
        return [one for _, one in api.by_turn(self.waiting) if one.number not in self.stopped]

    def free(self, want: api.BackfillRequest) -> set[str]:
        when = self.when()
        return {gpu for gpu in want.gpus if api.free_time(when[gpu], want.share) <= self.now}

    def serve(self) -> None:
        self.now += self.chance.choice([0.5, 1.0, 3.0])
        self.running = [
            run for run in self.running if self.until[run[0].number] > self.now and self.chance.random() > 0.05
        ]
        while self.start_one():
            pass
        if self.kinds & STOPPED:
            self.stopped = {one.number for one in self.waiting if self.chance.random() < 0.2}

    def start_one(self) -> bool:
        order = self.order()
        for place, one in enumerate(order):
            want = self.want(one)
            ahead = [other for other in order[:place] if competes(other, one)]
            open_to = api.open_gpus(want, map(self.want, ahead), self.free(want), self.when(), self.now)
            if api.turn_of(one) is None and any(other.number < one.number and competes(other, one) for other in order):
                continue  # an older client, the simplest: it waits for all lower numbers
            if want.fits(open_to):
                self.running.append((one, sorted(open_to)[: want.nb]))
                self.until[one.number] = self.now + want.hold_for
                self.waiting.remove(one)
                return True
        return False


def competes(one: api.Entry, other: api.Entry) -> bool:
    return api.TicketRequest(one.nb_gpus, frozenset(one.gpus)).competes_with(other)


def overtaken(before: list[api.Entry], newcomer: api.Entry, world: World) -> list[api.Entry]:
    after = [one for _, one in api.by_turn(world.waiting)]
    assert [one for one in after if one is not newcomer] == before, "a newcomer changed the order of the others"
    return [one for one in after[after.index(newcomer) + 1 :] if competes(one, newcomer)]


SEEDS = st.integers(0, 2**32)


@long
@settings(max_examples=40)
@given(seed=SEEDS, kinds=st.integers(0, 63))
def test_no_newcomer_passes_the_first_an_older_client_or_1023_numbers(kinds: int, seed: int) -> None:
    world = World(seed, kinds)
    for before, newcomer in world.joins(60):
        for one in overtaken(before, newcomer, world) if newcomer.uid != FORGER else ():
            assert newcomer.number - one.number < 1024
            assert api.turn_of(one) is not None
            assert api.turn_of(newcomer) is not None
            assert any(competes(other, one) for other in before[: before.index(one)])


@long
@settings(max_examples=40)
@given(seed=SEEDS, kinds=st.sampled_from([SIMPLE, SHARES, WEIGHTS, FORGED, SHARES | WEIGHTS | FORGED | GAPS]))
def test_where_all_compete_the_first_stays_first_and_its_date_never_moves_later(kinds: int, seed: int) -> None:
    world, first, promise = World(seed, kinds), None, math.inf

    def look() -> None:
        nonlocal first, promise
        order = world.order()
        if first not in order[:1]:
            assert first not in order or order[0].uid == FORGER
            first, promise = next(iter(order), None), math.inf
        if first is not None:
            (_, date), *_ = api.latest_harmless_ends([world.want(first)], world.when())
            assert date <= promise
            promise = date

    for _, _ in world.joins(60):
        look()
    look()


@long
@settings(max_examples=40)
@given(seed=SEEDS, kinds=st.integers(0, 127))
def test_nobody_waits_for_ever_and_no_gpu_idles_beside_a_first_that_fits(kinds: int, seed: int) -> None:
    world = World(seed, kinds)
    for _ in world.joins(40):
        pass
    world.kinds &= ~STOPPED
    world.stopped.clear()
    while world.waiting:
        world.serve()
        assert world.running
        for place, one in enumerate(order := world.order()):
            want = world.want(one)
            if not any(competes(other, one) for other in order[:place]):
                assert not want.fits(world.free(want))


@settings(max_examples=12)
@given(seed=SEEDS)
def test_who_uses_least_waits_for_one_request_of_each_other_user(seed: int) -> None:
    world = World(seed, SIMPLE)
    for before, newcomer in world.joins(60):
        others = [one for one in before if one not in overtaken(before, newcomer, world)]
        if all(one.uid != newcomer.uid for one in (*before, *(one for one, _ in world.running))):
            assert len({one.uid for one in others}) == len(others)


@long
@settings(max_examples=40)
@given(seed=SEEDS, kinds=st.integers(0, 31))
def test_competitors_keep_their_order_when_others_leave(kinds: int, seed: int) -> None:
    """A sleeper sleeps on one ticket ahead of it: that must go on being ahead. Who forged its turn has no such
    promise."""
    world = World(seed, kinds)
    for _ in world.joins(40):
        if len(world.waiting) > 2:
            order = [one for _, one in api.by_turn(world.waiting)]
            world.waiting.remove(gone := world.chance.choice(world.waiting))
            order.remove(gone)
            place = {one.number: number for number, (_, one) in enumerate(api.by_turn(world.waiting))}
            for number, first in enumerate(order):
                for second in order[number + 1 :]:
                    forged = FORGER in (first.uid, second.uid)
                    assert forged or not competes(first, second) or place[first.number] < place[second.number]


def test_who_is_stopped_holds_nobody_up() -> None:
    request, one = api.TicketRequest(1, frozenset(GPUS)), api.TicketRequest(1, frozenset(GPUS[:1]))
    stopped = ticket_of(1, request, uid=1, turn=9.0)
    first = ticket_of(2, one, uid=2, turn=9.5)
    later = ticket_of(3, request, uid=2, turn=11.0)
    queue = api.by_turn([stopped, first, later])
    for absent, turn in ((), 9.5), ((1,), 10.0), ((1, 2), 11.5), ((1, 2, 3), 0.5):
        assert turn == newcomers_turn(
            request, queue, 4, uid=3, held=0, counts=lambda one, absent=absent: one.number not in absent
        )
    assert newcomers_turn(request, queue, 4, uid=1, held=0, counts=lambda one: one.number != 1) == 10.0


def test_a_turn_is_bounded_by_the_number_of_its_ticket() -> None:
    """A neighbour's turn beyond all others would be that of all who come after it."""
    request = api.TicketRequest(1, frozenset("ab"))
    assert api.turn_of(ticket_of(3, request, uid=1, turn=3072.0)) == 3072.0
    assert api.turn_of(ticket_of(3, request, uid=1, turn=3073.0)) is None
    queue = api.by_turn([ticket_of(2, request, uid=1, turn=9.0), ticket_of(7, request, uid=1, turn=1.0)])
    assert newcomers_turn(request, queue, 5, uid=2, held=0.0) == 9.5, "of lower numbers"
    assert newcomers_turn(request, queue, 5, uid=2, held=1e9) == 5 * 1024


def test_a_weight_divides_what_a_user_holds_and_waits_for() -> None:
    request = api.TicketRequest(4, frozenset(GPUS))
    own = ticket_of(1, request, uid=1, turn=10.0)
    for weight, turn in ((1.0, 14.5), (2.0, 12.5)):
        assert newcomers_turn(request, api.by_turn([own]), 2, uid=1, held=4, weight=weight) == turn
    assert newcomers_turn(request, api.by_turn([own]), 2, uid=1, held=0) == 14.0


# A GPU and its pieces

CARD = api.Gpu(0, "INTEL-18.0")
FUNCTIONS = [api.Gpu(number, f"INTEL-18.{number}", place="INTEL-18.0", partition=True) for number in (1, 2, 3)]
CORES = [api.Gpu(4, "GPU-x0", place="AMD-5", partition=True, mode=mode) for mode in ("CPX", "DPX")]
SECOND = api.Gpu(5, "GPU-x4", place="AMD-5", partition=True, mode="CPX")
DEVICES = [CARD, *FUNCTIONS, *CORES, SECOND, api.Gpu(6, "GPU-x0", place="AMD-5"), api.Gpu(7, "INTEL-42.0")]


def waits_for(*gpus: api.Gpu) -> api.TicketRequest:
    return api.TicketRequest(1, frozenset()).for_gpus(gpus)


def test_a_newcomer_does_not_pass_the_first_who_waits_for_pieces_of_its_gpu() -> None:
    queue = api.by_turn(
        [ticket_of(number, waits_for(one), uid=number, turn=turn) for number, one, turn in
         ((1, FUNCTIONS[0], 1.0), (2, FUNCTIONS[1], 7.0), (3, CARD, 8.0), (4, FUNCTIONS[2], 9.0))]
    )  # fmt: skip
    for wanted, turn in (
        (CARD, 7.5),  # each of the first two waits for nobody
        (FUNCTIONS[0], 1.5),
        (FUNCTIONS[1], 7.5),
        (FUNCTIONS[2], 0.5),  # the only one who wants that waits behind who wants the card
        (DEVICES[-1], 0.5),
    ):
        assert newcomers_turn(waits_for(wanted), queue, 5, uid=9, held=0) == turn


def test_who_waits_for_a_piece_of_two_modes_waits_for_whoever_wants_another_mode() -> None:
    """Of two pieces with one name, the second one is in the way of more than the first."""
    one, same_name_other_mode = CORES
    queue = api.by_turn(
        [ticket_of(number, waits_for(gpu), uid=number, turn=turn) for number, gpu, turn in
         ((1, one, 1.0), (2, same_name_other_mode, 3.0), (3, SECOND, 6.0))]
    )  # fmt: skip
    assert newcomers_turn(waits_for(SECOND), queue, 4, uid=9, held=0) == 0.5


@settings(max_examples=60)
@given(st.lists(st.sets(st.sampled_from(range(len(DEVICES))), min_size=1), min_size=1, max_size=8), st.data())
def test_turns_beside_pieces_are_as_by_the_definition(wanted: list[set[int]], data: Any) -> None:
    """At the front are those without a competitor ahead; of them a newcomer passes none that competes with it."""
    *waiting, newcomer = [waits_for(*(DEVICES[one] for one in sorted(some))) for some in wanted]
    turns = sorted(data.draw(st.lists(st.integers(0, 40), min_size=len(waiting), max_size=len(waiting))))
    tickets = [
        ticket_of(number, request, uid=number, turn=float(turn))
        for number, (request, turn) in enumerate(zip(waiting, turns, strict=True), 1)
    ]
    bound = 0.0
    for number, (request, turn) in enumerate(zip(waiting, turns, strict=True)):
        is_at_front = not any(request.competes_with(other) for other in tickets[:number])
        if is_at_front and newcomer.competes_with(tickets[number]):
            bound = max(bound, turn)
    assert newcomers_turn(newcomer, api.by_turn(tickets), 100, uid=999, held=0) == bound + 0.5
