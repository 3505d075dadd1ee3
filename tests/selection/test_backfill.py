"""Backfill: its promises in random worlds, and its dates against a reference."""

import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import api

ALWAYS = math.inf
NAMES = tuple(f"GPU-{number}" for number in range(16))


def want(nb: int, gpus: str, hold_for: float = ALWAYS) -> api.BackfillRequest:
    """``want(2, "013")``: two of the GPUs 0, 1 and 3."""
    return api.BackfillRequest(nb, frozenset(f"GPU-{digit}" for digit in gpus), hold_for)


def times(*moments: float) -> dict[str, float]:
    return {f"GPU-{number}": moment for number, moment in enumerate(moments)}


def dated(wants: Sequence[api.BackfillRequest], free: Mapping[str, float]) -> list[float]:
    return [date for _, date in api.latest_harmless_ends(wants, free)]


def reserved(request: api.BackfillRequest, **spans: tuple[float, float]) -> api.BackfillRequest:
    """``reserved(want(1, "01"), GPU0=(5, 9))``: the same, but GPU 0 is reserved for others from 5 to 9."""
    return request._replace(reserved={f"GPU-{name[3:]}": (span,) for name, span in spans.items()})


HEAD = reserved(want(1, "0", 5), GPU0=(3, 9))
HALVES = [*(want(1, "0", hold)._replace(share=40) for hold in (10, 20, 5)), want(1, "0", 5)]
SAYS, SAYS_NOTHING = (1, 20, 50.0), (2, None, 90.0)

# The parts, by example


def test_when_a_claim_ends() -> None:
    assert api.free_at(10, since=0, until=60) == 60
    assert api.free_at(10, since=0, until=None) == ALWAYS
    sharers = [
        api.Holder(pid, uid=1, share=share, since=1.0, until=until) for pid, share, until in (SAYS, SAYS_NOTHING)
    ]
    when = api.when_free(api.Gpu(0, "GPU-0"), api.Holder.of_sharers(sharers), 10.0, free=False)
    assert [api.free_time(when, share) for share in (20, 30, ALWAYS)] == [50, 90, 90], (
        "who does not say how much counts as all"
    )


@pytest.mark.parametrize(
    ("when", "wants", "free", "expected"),
    [
        pytest.param(dated, [want(2, "09")], times(5), [ALWAYS], id="a GPU that is not here"),
        pytest.param(
            api.starts, [want(2, "01", 50), want(2, "01", 9)], times(10, 20), [20, 70], id="after those ahead"
        ),
        pytest.param(api.starts, [want(2, "01", 50), want(1, "01", 9)], times(10, 20), [20, 10], id="passes"),
        pytest.param(
            api.starts, HALVES, {"GPU-0": ((0.0, 80.0),)}, [0, 0, 10, 20], id="shares fill a GPU up, no further"
        ),
        pytest.param(dated, [HEAD], times(0), [9], id="after the time for which a GPU is reserved"),
        pytest.param(dated, [HEAD, want(1, "0")], times(4), [9, 4], id="others may pass meanwhile"),
    ],
)
def test_the_dates_and_expected_starts_of_waiters(when: Any, wants: Any, free: Any, expected: Sequence[float]) -> None:
    assert list(when(wants, free)) == expected


@pytest.mark.parametrize(
    ("request_", "now", "expected"),
    [
        pytest.param(want(1, "0", 3), 0, {"GPU-0"}, id="ends when the one ahead begins at the latest"),
        pytest.param(want(1, "0"), 0, set(), id="would delay the one ahead"),
        pytest.param(want(1, "0"), 4, {"GPU-0"}, id="reserved against the one ahead now"),
    ],
)
def test_who_may_pass_one_whose_gpus_are_reserved(request_: Any, now: float, expected: set[str]) -> None:
    free = times(now, now)
    assert api.open_gpus(request_, [HEAD], free, free, now) == expected


def test_no_more_waiters_are_read_than_decide() -> None:
    read: list[int] = []

    def ahead() -> Any:
        for number in range(9):
            read.append(number)
            yield want(1, "0")

    assert not api.open_gpus(want(1, "01"), ahead(), {"GPU-0"}, times(0, 9), 0)
    assert read == [0]
    assert not api.open_gpus(want(1, "1"), ahead(), {"GPU-0"}, times(0, 9), 0)
    assert read == [0]


# Any state of a host


holds = st.sampled_from([1.0, 2.0, 5.0, 9.0, 40.0, ALWAYS])
moments = st.sampled_from([0.0, 0.0, 0.0, 1.0, 3.0, 6.0, 10.0, 30.0, ALWAYS])


@st.composite
def wanted(draw: Any, number: int) -> api.BackfillRequest:
    gpus = draw(st.sets(st.sampled_from(NAMES[:number]), min_size=1))
    return api.BackfillRequest(draw(st.integers(1, len(gpus))), frozenset(gpus), draw(holds))


@st.composite
def hosts(draw: Any) -> tuple[list[api.BackfillRequest], dict[str, float]]:
    """Waiters in their order, and when each GPU is free. The present is 0, and GPUs that are free then are free."""
    number = draw(st.integers(2, 6))
    wants = draw(st.lists(wanted(number), min_size=1, max_size=5))
    return wants, {gpu: draw(moments) for gpu in NAMES[:number]}


def opened(wants: Sequence[api.BackfillRequest], place: int, free: Mapping[str, float]) -> frozenset[str]:
    idle = {gpu for gpu, when in free.items() if when == 0}
    return api.open_gpus(wants[place], wants[:place], idle, free, 0)


def reference(wants: Sequence[api.BackfillRequest], free: Mapping[str, float]) -> list[float]:
    """The dates by the words of the rule: the earliest that no waiter ahead forbids."""
    found: list[float] = []
    for place, one in enumerate(wants):
        soonest = [when for when in free.values() if sum(free[gpu] <= when for gpu in one.gpus) >= one.nb]
        base = min(soonest, default=ALWAYS)
        allowed = [
            when
            for when in {base, *(date for date in found if base < date < ALWAYS)}
            if not any(
                when < date < ALWAYS and when + one.hold_for > date and len(one.gpus - wants[other].gpus) < one.nb
                for other, date in enumerate(found[:place])
            )
        ]
        found.append(min(allowed))
    return found


@settings(max_examples=40)
@given(host=hosts())
def test_in_any_state_the_rules_of_backfill_hold(host: tuple[list[api.BackfillRequest], dict[str, float]]) -> None:
    """Who has no competitor is not hindered, who can start is not passed, and who says nothing passes nobody."""
    wants, free = host
    found = dated(wants, free)
    assert found == reference(wants, free)
    for place, (one, date, start) in enumerate(zip(wants, found, api.starts(wants, free), strict=True)):
        got, ahead = opened(wants, place, free), wants[:place]
        idle = {gpu for gpu in one.gpus if free[gpu] == 0}
        alone = all(one.gpus.isdisjoint(other.gpus) for other in ahead)
        assert start == date if alone else start >= 0
        assert not alone or len(idle) < one.nb or got == idle
        if len(got) >= one.nb:
            assert one.hold_for < ALWAYS or all(got.isdisjoint(other.gpus) for other in ahead)
            for behind in range(place + 1, len(wants)):
                passing = opened(wants, behind, free)
                assert len(passing) < wants[behind].nb or passing.isdisjoint(one.gpus)


sizes = st.integers(1, 80)


@given(st.lists(st.tuples(st.integers(0, 50), sizes), max_size=6), sizes)
def test_whole_requests_wait_for_all_and_shares_for_what_they_need(parts: list[tuple[int, int]], share: int) -> None:
    when = (*parts, (0, 0))
    moment = api.free_time(when, share)
    assert moment == ALWAYS or sum(size for end, size in when if end <= moment) >= share
    assert all(sum(size for end, size in when if end <= earlier) < share for earlier, _ in when if earlier < moment)
    assert api.free_time(when, ALWAYS) == max(end for end, _ in when)


# Any course of events. Time goes in whole units. In each unit holds end, requests come and leave, and all waiters look,
# in any order. The referee knows holds and promises, and nothing of the rule.

CAPACITY = 8.0
"""Of each GPU, for those that share it."""


class BrokenPromise(AssertionError):
    """What the rule promises did not hold in a world."""


@dataclass
class Job:
    """A request: it holds for ``lasts``, whatever it said, and leaves the queue after ``patience`` without GPUs."""

    name: int
    arrives: float
    want: api.BackfillRequest
    lasts: float
    patience: float = ALWAYS
    started: float | None = None


@dataclass
class Hold:
    """The job of a claimed GPU, or of a share of it. ``said`` is when it is to end by its own word."""

    job: Job
    since: float
    said: float
    ends: float


@dataclass
class World:
    """A host with these GPUs. ``honest``: no hold lasts longer than said, so that dates may not move."""

    gpus: tuple[str, ...]
    chance: random.Random
    honest: bool = False
    now: float = 0.0
    held: dict[str, list[Hold]] = field(default_factory=dict)
    queue: list[Job] = field(default_factory=list)
    promised: dict[int, float] = field(default_factory=dict)  # of the waiters with no competitor ahead
    due: dict[int, float] = field(default_factory=dict)  # when such a waiter is served at the latest
    passes: int = 0

    def run(self, jobs: Iterable[Job], until: float = 300) -> None:
        """Let these jobs come and go."""
        coming = sorted(jobs, key=lambda job: job.arrives)
        while self.now < until and (coming or self.queue or self.held):
            left = {gpu: [hold for hold in holds if hold.ends > self.now] for gpu, holds in self.held.items()}
            self.held = {gpu: holds for gpu, holds in left.items() if holds}
            self.queue = [job for job in self.queue if job.arrives + job.patience > self.now]
            while coming and coming[0].arrives <= self.now:
                self.queue.append(coming.pop(0))
            self._note_promises()
            for job in self.chance.sample(self.queue, len(self.queue)):
                self.look(job)
            self._note_promises()
            for job in self.queue:
                if self.due.get(job.name, ALWAYS) < self.now:
                    raise BrokenPromise(f"{job} was due and could be served at {self.due[job.name]}, now {self.now}")
            self.now += 1

    def look(self, job: Job) -> None:
        """One look of a waiter, which starts if the rule lets it."""
        ahead = self.queue[: self.queue.index(job)]
        free = frozenset(gpu for gpu in self.gpus if _room(self.held.get(gpu, [])) >= min(job.want.share, CAPACITY))
        opened = api.open_gpus(job.want, [one.want for one in ahead], free, self._free_at(), self.now)
        if not self._competitors(job) and opened != job.want.gpus & free:
            raise BrokenPromise(f"nobody competes ahead of {job}, and it is hindered")
        if len(opened) >= job.want.nb:
            self.take(job, self.chance.sample(sorted(opened), job.want.nb))

    def take(self, job: Job, gpus: Iterable[str]) -> None:
        """Give the job these GPUs, and check whom that harms."""
        for gpu in gpus:
            assert _room(self.held.get(gpu, [])) >= min(job.want.share, CAPACITY)
            for other in self._competitors(job):
                if gpu in other.want.gpus:
                    self._check_pass(job, other)
        for gpu in gpus:
            hold = Hold(job, self.now, self.now + job.want.hold_for, self.now + job.lasts)
            self.held.setdefault(gpu, []).append(hold)
        job.started = self.now
        self.queue.remove(job)

    def _check_pass(self, job: Job, other: Job) -> None:
        self.passes += 1
        if job.want.hold_for == ALWAYS:
            raise BrokenPromise(f"{job} did not say how long, and takes a GPU that {other} wants")
        promise = self.promised.get(other.name)
        if promise is not None and not self.now + job.want.hold_for <= promise < ALWAYS:
            raise BrokenPromise(f"{job} takes a GPU past {other}, which was promised {promise}, at {self.now}")

    def _competitors(self, job: Job) -> list[Job]:
        """Those ahead that want any of the same GPUs."""
        ahead = self.queue[: self.queue.index(job)]
        return [one for one in ahead if one.want.gpus & job.want.gpus]

    def _free_at(self) -> dict[str, api.When]:
        found: dict[str, api.When] = dict.fromkeys(self.gpus, self.now)
        for gpu, holds in self.held.items():
            ends = []
            for hold in holds:
                until = None if hold.said == ALWAYS else hold.said
                ends.append(api.free_at(self.now, since=hold.since, until=until))
            parts = [(end, hold.job.want.share) for end, hold in zip(ends, holds, strict=True)]
            found[gpu] = ends[0] if _room(holds) == -ALWAYS else (*parts, (self.now, _room(holds)))
        return found

    def _said(self, gpu: str, share: float) -> float:
        """When there is that much room on a GPU, by what its holders said."""
        holds = self.held.get(gpu, [])
        moments = {self.now, *(max(self.now, hold.said) for hold in holds)}
        return min(at for at in moments if _room([one for one in holds if one.said > at]) >= min(share, CAPACITY))

    def _note_promises(self) -> None:
        """Give those that nobody is ahead of a date, by what the holders said, and hold the rule to the earliest."""
        for job in self.queue:
            if self._competitors(job):
                continue
            said = [self._said(gpu, job.want.share) for gpu in job.want.gpus]
            date = next((when for when in sorted(said) if sum(one <= when for one in said) >= job.want.nb), ALWAYS)
            earlier = self.promised.get(job.name, ALWAYS)
            if self.honest and date > max(earlier, self.now):
                raise BrokenPromise(f"the date of {job} moves from {earlier} to {date}")
            self.promised[job.name] = min(earlier, date)
            if self.promised[job.name] <= self.now and job.name not in self.due:
                # From its date on nobody takes its GPUs, so it is served when those who hold them then have ended.
                ends = [hold.ends for gpu in job.want.gpus for hold in self.held.get(gpu, [])]
                self.due[job.name] = max([self.now, *ends])


def _room(holds: Iterable[Hold]) -> float:
    return CAPACITY - sum(hold.job.want.share for hold in holds)


def random_jobs(
    chance: random.Random,
    gpus: tuple[str, ...],
    *,
    honest: bool = False,
    mute: bool = False,
    shares: Sequence[float] = (ALWAYS,),
) -> list[Job]:
    """Jobs with overlapping sets of GPUs. ``mute``: nobody says for how long. ``shares``: how much each may want."""
    jobs = []
    for name in range(40):
        among = frozenset(chance.sample(gpus, chance.randint(1, len(gpus))))
        lasts = chance.choice((1, 2, 3, 5, 8, 20))
        if mute or (not honest and chance.random() < 0.2):
            says = ALWAYS
        elif honest:
            says = lasts + chance.choice((0, 0, 1, 10))
        else:
            says = max(1, round(lasts * chance.choice((0.2, 0.8, 1, 1, 3))))
        arrives = chance.randint(0, 60)
        share = shares[0] if len(shares) == 1 else chance.choice(shares)
        want = api.BackfillRequest(chance.randint(1, len(among)), among, says, share=share)
        jobs.append(Job(name, arrives, want, lasts, patience=chance.choice((ALWAYS, ALWAYS, 10))))
    return jobs


def live(seed: int, *, honest: bool = False, mute: bool = False, shares: Sequence[float] = (ALWAYS,)) -> World:
    """A random world, in which a promise that does not hold raises, and so does a GPU that is promised twice."""
    chance = random.Random(seed)
    gpus = NAMES[: chance.choice((2, 3, 4, 8, 16))]
    world = World(gpus, chance, honest=honest)
    world.run(random_jobs(chance, gpus, honest=honest, mute=mute, shares=shares), until=3000)
    assert not world.queue
    return world


PARTS = ALWAYS, ALWAYS, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0


@pytest.mark.parametrize("shares", [(ALWAYS,), PARTS], ids=["whole", "shares"])
@pytest.mark.parametrize(("honest", "most"), [(True, 40), (False, 20)])
def test_promises_are_kept_whatever_holders_do(honest: bool, most: int, shares: Sequence[float]) -> None:
    assert sum(live(seed, honest=honest, shares=shares).passes for seed in range(10)) > most


def test_nobody_passes_where_nobody_says_for_how_long() -> None:
    assert all(live(seed, mute=True).passes == 0 for seed in range(5))


# Worlds that other rules failed in


def test_a_third_request_waits_where_its_spare_gpu_is_promised_to_the_second() -> None:
    ahead = [want(1, "1", 1), want(2, "012", 5)]
    third = want(1, "0", 3)
    at_one = times(1, 3, 3)
    assert not api.open_gpus(third, ahead, {"GPU-0"}, at_one, 1)


def test_holders_that_overrun_do_not_starve_the_first_waiter() -> None:
    gpus = NAMES[:3]
    world = World(gpus, random.Random(3))
    short = [Job(number, number, api.BackfillRequest(1, frozenset(gpus), 10), lasts=12) for number in range(1000)]
    large = Job(-1, 5, api.BackfillRequest(2, frozenset(gpus), 50), lasts=50)
    world.run([large, *short], until=100)
    assert large.started is not None
    assert large.started <= 5 + 10 + 12  # its date, and the longest hold that remained then


# A GPU and its pieces

CARD = api.Gpu(0, "INTEL-18.0")
ONE, TWO, THREE = (api.Gpu(number, f"INTEL-18.{number}", place="INTEL-18.0", partition=True) for number in (1, 2, 3))
DIVIDED = [CARD, ONE, TWO, THREE]


def wants(*gpus: api.Gpu, hold_for: float | None = None) -> api.BackfillRequest:
    """One of these devices of that card, as its ticket says it."""
    return api.BackfillRequest.of(api.TicketRequest(1, frozenset(), hold_for=hold_for).for_gpus(gpus), DIVIDED, {})


def when_all_are_free(claims: Mapping[str, float | None], now: float = 10.0) -> dict[str, api.When]:
    """When each device is free, if these pieces or the card are claimed until then; None is unknown."""
    entries = []
    for number, (uuid, until) in enumerate(claims.items(), 1):
        (gpu,) = [one for one in DIVIDED if one.uuid == uuid]
        said = {"gpus": {uuid: None}, **api.keys_of([gpu]), "since": 1.0, "until": until}
        entries.append(api.Entry.read(f"{number}.{number:016x}", 0, (1, number), json.dumps(said).encode()))
    holders = api.Claims(entries, DIVIDED).holders_as_written()
    return {gpu.uuid: api.when_free(gpu, holders.get(gpu.uuid), now, free=True) for gpu in DIVIDED}


def test_a_gpu_is_free_when_the_last_claim_of_its_pieces_ends() -> None:
    ends = when_all_are_free({ONE.uuid: 50.0, TWO.uuid: 90.0})
    assert [api.free_time(ends[gpu.uuid], ALWAYS) for gpu in DIVIDED] == [90, 50, 90, 10]
    assert api.free_time(ends[CARD.uuid], 1.0) == 90, "nor is there a share before"
    ends = when_all_are_free({ONE.uuid: 50.0, TWO.uuid: None})
    assert api.free_time(ends[CARD.uuid], ALWAYS) == ALWAYS
    ends = when_all_are_free({CARD.uuid: 70.0})
    assert [api.free_time(ends[gpu.uuid], ALWAYS) for gpu in DIVIDED] == [70] * 4


@pytest.mark.parametrize(
    ("hold_for", "open_to"), [(40.0, {THREE.uuid}), (80.0, {THREE.uuid}), (81.0, set()), (None, set())]
)
def test_a_piece_may_be_taken_until_the_last_of_its_gpu_ends(hold_for: float | None, open_to: set[str]) -> None:
    """Whoever waits for the GPU is not delayed by that."""
    ends = when_all_are_free({ONE.uuid: 50.0, TWO.uuid: 90.0})
    assert api.open_gpus(wants(THREE, hold_for=hold_for), [wants(CARD)], {THREE.uuid}, ends, 10.0) == open_to


def test_a_gpu_may_be_taken_beside_who_waits_for_a_piece_of_another_one() -> None:
    ends = when_all_are_free({ONE.uuid: 50.0})
    assert api.open_gpus(wants(TWO), [wants(ONE)], {TWO.uuid}, ends, 10.0) == {TWO.uuid}
    assert api.open_gpus(wants(CARD), [wants(ONE)], {CARD.uuid}, ends, 10.0) == set()
    assert api.open_gpus(wants(TWO), [wants(ONE).never()], {TWO.uuid}, ends, 10.0) == {TWO.uuid}
    assert api.open_gpus(wants(CARD), [wants(ONE).never()], {CARD.uuid}, ends, 10.0) == set()


def test_expected_starts_beside_pieces() -> None:
    """Who takes a piece delays who waits for the GPU, and the reverse."""
    ends = when_all_are_free({ONE.uuid: 50.0})
    waiting = [wants(ONE, hold_for=5.0), wants(CARD, hold_for=20.0), wants(TWO, hold_for=1.0), wants(TWO)]
    assert api.starts(waiting, ends) == [50, 55, 10, 75]
