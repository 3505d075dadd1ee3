"""What counts as a collision, from what both detectors saw: pure."""

from __future__ import annotations

from typing import Any

import pytest

from safe_gpu.demo.race import Collision, Intruder, RefereeReport, add_up, rule
from safe_gpu.demo.racers import Outcome, RaceResult, RacerRequest
from safe_gpu.demo.referee import Sighting, Watched

A, B = "GPU-a", "GPU-b"


def won(pid: int, *uuids: str, rivals: tuple[int, ...] = (), known_as: tuple[int, ...] = ()) -> Outcome:
    return Outcome(
        pid,
        RacerRequest(len(uuids)),
        frozenset(known_as),
        uuids,
        uuids,
        rivals or (-1,) * len(uuids),
        began=0.1,
        ended=0.2,
    )


def refused(pid: int) -> Outcome:
    return Outcome(pid, RacerRequest(), refused="none is free", began=0.1)


def seen(uuid: str, newcomers: set[int], residents: set[int] = frozenset()) -> Sighting:  # type: ignore[assignment]
    return Sighting(uuid, frozenset(newcomers), frozenset(residents))


def heat(*outcomes: Outcome, sightings: tuple[Sighting, ...] = (), shown: Any = ()) -> RaceResult:
    return RaceResult(list(outcomes), Watched(7, sightings, frozenset(shown)))


@pytest.mark.parametrize(
    ("race", "collisions", "visits"),
    [
        (heat(won(1, A), won(2, B), refused(3)), 0, 0),
        (heat(won(1, A), won(2, A, rivals=(1,))), 1, 0),
        (heat(won(1, A), won(2, A, rivals=(0,))), 1, 0),
        (heat(won(1, A), won(2, A), sightings=(seen(A, {1, 2}),)), 1, 0),
        (heat(won(1, A), won(2, A, rivals=(1,)), sightings=(seen(A, {1, 2}),)), 1, 0),
        (heat(won(1, A), won(2, A), won(3, A), sightings=(seen(A, {1, 2}), seen(A, {2, 3}))), 2, 0),
        # Somebody was there before the gun.
        (heat(won(1, A), sightings=(seen(A, {1}, {99}),)), 1, 0),
        (heat(refused(1), sightings=(seen(A, {1}, {99}),)), 0, 0),
        # Somebody came meanwhile.
        (heat(won(1, A), sightings=(seen(A, {1, 99}),)), 0, 1),
        (heat(refused(1), sightings=(seen(A, {1, 99}),)), 0, 1),
        (heat(refused(1), sightings=(seen(A, {98, 99}),)), 0, 0),
        # A container shows the host's numbers: 501 is 1.
        (heat(won(1, A, known_as=(1, 501)), sightings=(seen(A, {501, 99}),)), 0, 1),
        (heat(won(1, A, known_as=(1, 501)), sightings=(seen(A, {1, 501}),)), 0, 0),
        (heat(won(1, A, known_as=(501,)), won(2, A, known_as=(502,)), sightings=(seen(A, {501, 502}),)), 1, 0),
    ],
)
def test_collisions_and_visits(race: RaceResult, collisions: int, visits: int) -> None:
    ruling = rule(race)
    assert (ruling.collisions, len(ruling.visits)) == (collisions, visits)
    assert ruling.fails is bool(collisions)


def test_both_witnesses_are_heard() -> None:
    ruling = rule(heat(won(1, A), won(2, A, rivals=(1,)), sightings=(seen(A, {1, 2, 99}),)))
    assert ruling.clashes == (Collision(A, (2, 1), "marker"), Collision(A, (1, 2), "driver"))
    assert ruling.visits == (Intruder(A, (99,), (1, 2)),)


def test_sharing_is_no_collision() -> None:
    race = heat(won(1, A), won(2, A, rivals=(1,)), sightings=(seen(A, {1, 2}),))
    assert rule(race, shared=True) == RefereeReport(claims=2, taken=2, looks=7)


def test_failures_and_trouble() -> None:
    failed = Outcome(1, RacerRequest(), failed="it exited without a report")
    trouble = Outcome(2, RacerRequest(), trouble="CUDA cannot be initialised")
    assert rule(heat(failed, won(3, A))).fails
    assert rule(heat(trouble)).fails, "nothing was got, and that was nobody else's doing"
    assert not rule(heat(trouble, won(3, A))).fails
    assert not rule(heat(refused(1))).fails


def test_the_watch_saw_those_whom_it_saw_on_all_of_their_gpus() -> None:
    race = heat(won(1, A, B), won(2, A), won(3, B, known_as=(503,)), shown=((A, 1), (A, 2), (B, 503)))
    assert rule(race).shown == 2


def test_heats_add_up() -> None:
    first = rule(heat(won(1, A), refused(2)))
    second = rule(heat(won(3, A, B), won(4, A, rivals=(3,))))
    assert add_up([first, second])[:4] == (3, 4, 1, 1)
    assert add_up([]) == RefereeReport()
