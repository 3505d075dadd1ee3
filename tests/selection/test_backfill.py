"""Backfill: its promises in random worlds, and its dates against a reference."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.worlds import Job, World, random_jobs

from safe_gpu.selection import backfill
from safe_gpu.selection.backfill import BackfillRequest, dates, free_at, open_gpus, starts

ALWAYS = math.inf
NAMES = tuple(f"GPU-{number}" for number in range(16))


def want(nb: int, gpus: str, hold_for: float = ALWAYS) -> BackfillRequest:
    """``want(2, "013")``: two of the GPUs 0, 1 and 3."""
    return BackfillRequest(nb, frozenset(f"GPU-{digit}" for digit in gpus), hold_for)


def times(*moments: float) -> dict[str, float]:
    return {f"GPU-{number}": moment for number, moment in enumerate(moments)}


def dated(wants: Sequence[BackfillRequest], free: Mapping[str, float]) -> list[float]:
    return [date for _, date in dates(wants, free)]


# The parts, by example


@pytest.mark.parametrize(
    ("now", "since", "until", "expected"),
    [pytest.param(10, 0, 60, 60, id="its word"), pytest.param(10, 0, None, ALWAYS, id="unknown")],
)
def test_when_a_lease_ends(now: float, since: float, until: float | None, expected: float) -> None:
    assert free_at(now, since=since, until=until) == expected


@pytest.mark.parametrize(
    ("when", "wants", "free", "expected"),
    [
        pytest.param(dated, [want(2, "09")], times(5), [ALWAYS], id="a GPU that is not here"),
        pytest.param(dated, [want(0, "01")], times(0, 0), [ALWAYS], id="none at all"),
        pytest.param(dated, [want(2, "01"), want(1, "0", 9)], times(0, 5), [5, 5], id="behind one that it cannot pass"),
        pytest.param(dated, [want(2, "01"), want(1, "0", 5)], times(0, 5), [5, 0], id="passes it"),
        pytest.param(
            dated, [want(2, "02"), want(2, "01", 5), want(1, "0", 7)], times(0, 5, 10), [10, 5, 10], id="by date"
        ),
        pytest.param(starts, [want(2, "01", 50)], times(10, 20), [20], id="the first at its date"),
        pytest.param(starts, [want(2, "01", 50), want(2, "01", 9)], times(10, 20), [20, 70], id="after those ahead"),
        pytest.param(starts, [want(2, "01"), want(1, "01", 99)], times(10, 20), [20, ALWAYS], id="behind no word"),
        pytest.param(starts, [want(2, "01", 50), want(1, "01", 9)], times(10, 20), [20, 10], id="passes"),
    ],
)
def test_the_dates_and_expected_starts_of_waiters(when: Any, wants: Any, free: Any, expected: Sequence[float]) -> None:
    assert when(wants, free) == expected


def test_no_more_waiters_are_read_than_decide() -> None:
    read: list[int] = []

    def ahead() -> Any:
        for number in range(9):
            read.append(number)
            yield want(1, "0")

    assert not open_gpus(want(1, "01"), ahead(), {"GPU-0"}, times(0, 9), 0)
    assert read == [0]
    assert not open_gpus(want(1, "1"), ahead(), {"GPU-0"}, times(0, 9), 0)
    assert read == [0]


# Any state of a host


holds = st.sampled_from([1.0, 2.0, 5.0, 9.0, 40.0, ALWAYS])
moments = st.sampled_from([0.0, 0.0, 0.0, 1.0, 3.0, 6.0, 10.0, 30.0, ALWAYS])


@st.composite
def wanted(draw: Any, number: int) -> BackfillRequest:
    gpus = draw(st.sets(st.sampled_from(NAMES[:number]), min_size=1))
    return BackfillRequest(draw(st.integers(1, len(gpus))), frozenset(gpus), draw(holds))


@st.composite
def hosts(draw: Any) -> tuple[list[BackfillRequest], dict[str, float]]:
    """Waiters in their order, and when each GPU is free. The present is 0, and GPUs that are free then are free."""
    number = draw(st.integers(2, 6))
    wants = draw(st.lists(wanted(number), min_size=1, max_size=5))
    return wants, {gpu: draw(moments) for gpu in NAMES[:number]}


def opened(wants: Sequence[BackfillRequest], place: int, free: Mapping[str, float]) -> frozenset[str]:
    idle = {gpu for gpu, when in free.items() if when == 0}
    return open_gpus(wants[place], wants[:place], idle, free, 0)


def reference(wants: Sequence[BackfillRequest], free: Mapping[str, float]) -> list[float]:
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


def check_reference(wants: Sequence[BackfillRequest], free: Mapping[str, float]) -> None:
    assert [date for _, date in dates(wants, free)] == reference(wants, free)


def check_nobody_hindered_without_a_competitor(wants: Sequence[BackfillRequest], free: Mapping[str, float]) -> None:
    for place, one in enumerate(wants):
        if all(one.gpus.isdisjoint(other.gpus) for other in wants[:place]):
            idle = frozenset(gpu for gpu in one.gpus if free[gpu] == 0)
            assert len(idle) < one.nb or opened(wants, place, free) == idle


def check_unknown_hold_takes_what_nobody_wants(wants: Sequence[BackfillRequest], free: Mapping[str, float]) -> None:
    for place, one in enumerate(wants):
        got = opened(wants, place, free)
        if one.hold_for == ALWAYS and len(got) >= one.nb:
            assert all(got.isdisjoint(other.gpus) for other in wants[:place])


def check_who_can_start_is_not_passed(wants: Sequence[BackfillRequest], free: Mapping[str, float]) -> None:
    for place, one in enumerate(wants):
        if len(opened(wants, place, free)) >= one.nb:
            for behind in range(place + 1, len(wants)):
                got = opened(wants, behind, free)
                assert len(got) < wants[behind].nb or got.isdisjoint(one.gpus)


def check_expected_starts_fit_the_dates(wants: Sequence[BackfillRequest], free: Mapping[str, float]) -> None:
    for place, (start, (_, date)) in enumerate(zip(starts(wants, free), dates(wants, free), strict=True)):
        alone = all(wants[place].gpus.isdisjoint(other.gpus) for other in wants[:place])
        assert start == date if alone else start >= 0


@settings(max_examples=100)
@given(host=hosts())
def test_in_any_state(host: tuple[list[BackfillRequest], dict[str, float]]) -> None:
    check_reference(*host)
    check_nobody_hindered_without_a_competitor(*host)
    check_unknown_hold_takes_what_nobody_wants(*host)
    check_who_can_start_is_not_passed(*host)
    check_expected_starts_fit_the_dates(*host)


# Any course of events


def live(seed: int, *, honest: bool = False, mute: bool = False, shares: Sequence[float] = (ALWAYS,)) -> World:
    """A random world, in which a promise that does not hold raises, and so does a GPU that is promised twice."""
    chance = random.Random(seed)
    gpus = NAMES[: chance.choice((2, 3, 4, 8, 16))]
    world = World(backfill, gpus, chance, honest=honest)
    world.run(random_jobs(chance, gpus, honest=honest, mute=mute, shares=shares), until=3000)
    assert not world.queue
    return world


@pytest.mark.parametrize(("honest", "most"), [(True, 100), (False, 50)])
def test_promises_are_kept_whatever_holders_do(honest: bool, most: int) -> None:
    assert sum(live(seed, honest=honest).passes for seed in range(25)) > most


def test_promises_are_kept_among_shares_whatever_holders_do() -> None:
    shares = ALWAYS, ALWAYS, 1.0, 1.0, 2.0, 3.0, 5.0, 8.0
    assert sum(live(seed, honest=seed % 2 == 0, shares=shares).passes for seed in range(50)) > 100


def test_nobody_passes_where_nobody_says_for_how_long() -> None:
    assert all(live(seed, mute=True).passes == 0 for seed in range(10))


# Reserved GPUs


def reserved(request: BackfillRequest, **spans: tuple[float, float]) -> BackfillRequest:
    """``reserved(want(1, "01"), GPU0=(5, 9))``: the same, but GPU 0 is reserved for others from 5 to 9."""
    return request._replace(reserved={f"GPU-{name[3:]}": (span,) for name, span in spans.items()})


HEAD = reserved(want(1, "0", 5), GPU0=(3, 9))
WIDE = reserved(want(2, "01"), GPU0=(0, 9))


@pytest.mark.parametrize(
    ("when", "wants", "free", "expected"),
    [
        pytest.param(dated, [HEAD], times(0), [9], id="after the window"),
        pytest.param(starts, [want(1, "0", 4), HEAD], times(0), [0, 9], id="starts after it"),
        pytest.param(dated, [HEAD, want(1, "0")], times(4), [9, 4], id="a window lets others pass"),
    ],
)
def test_when_reserved_gpus_are_free(when: Any, wants: Any, free: Any, expected: Any) -> None:
    assert list(when(wants, free)) == expected


@pytest.mark.parametrize(
    ("request_", "ahead", "now", "expected"),
    [
        pytest.param(want(1, "0", 3), [HEAD], 0, "0", id="ends when the one ahead begins at the latest"),
        pytest.param(want(1, "0"), [HEAD], 0, "", id="would delay the one ahead"),
        pytest.param(want(1, "0"), [HEAD], 4, "0", id="reserved against the one ahead now"),
    ],
)
def test_who_may_pass_one_whose_gpus_are_reserved(request_: Any, ahead: Any, now: float, expected: str) -> None:
    free = {gpu: max(now, 0) for gpu in ("GPU-0", "GPU-1")}
    assert open_gpus(request_, ahead, free, free, now) == {f"GPU-{digit}" for digit in expected}


# Worlds that other rules failed in


def test_a_third_request_waits_where_its_spare_gpu_is_promised_to_the_second() -> None:
    ahead = [want(1, "1", 1), want(2, "012", 5)]
    third = want(1, "0", 3)
    at_one = times(1, 3, 3)
    assert not open_gpus(third, ahead, {"GPU-0"}, at_one, 1)


def test_holders_that_overrun_do_not_starve_the_first_waiter() -> None:
    gpus = NAMES[:3]
    world = World(backfill, gpus, random.Random(3))
    short = [Job(number, number, BackfillRequest(1, frozenset(gpus), 10), lasts=12) for number in range(1000)]
    large = Job(-1, 5, BackfillRequest(2, frozenset(gpus), 50), lasts=50)
    world.run([large, *short], until=100)
    assert large.started is not None
    assert large.started <= 5 + 10 + 12  # its date, and the longest hold that remained then
