"""What is asked of a host, what counts as a collision, and what a spectator reads of it: pure."""

import math
from typing import Any

import pytest

from safe_gpu.demo import report as race
from safe_gpu.demo.race_host import RaceHost
from safe_gpu.demo.racers import Outcome, plan_race
from safe_gpu.demo.referee import Collision, RefereeReport, rule
from safe_gpu.drivers.presets import preset
from safe_gpu.gpus.devices import GpuProcess, HostSnapshot
from safe_gpu.gpus.visible import VisibleLimit
from safe_gpu.selection.request import Selection
from safe_gpu.selection.verdicts import judge

A, B = GPUS = preset("dgx-a100").gpus()[:2]


def host(name: str, *indices: int, busy: int = 0, within: int | None = None) -> RaceHost:
    """The host of a preset, or so many of its GPUs; the first are busy, or behind a visible limit with so many."""
    gpus = [gpu for gpu in preset(name).gpus() if not indices or gpu.index in indices]
    stranger = (GpuProcess(1, memory_used=1 << 30),)
    gpus[:busy] = [gpu._replace(processes=stranger) for gpu in gpus[:busy]]
    visible_limit = None if within is None else VisibleLimit("", tuple(gpu.uuid for gpu in gpus[:within]))
    snapshot = HostSnapshot(tuple(gpus))
    return RaceHost(snapshot, judge(snapshot, Selection(), leased={}, visible_limit=visible_limit), visible_limit)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (host("dgx-a100", 3), (1, 1, 1, 1)),
        (host("dgx-a100", 3, 4), (1, 1, 1, 2)),
        (host("workstation-mixed"), (1, 1, 1, 2, 1, 1)),
        (host("big-16"), (1, 1, 1, 2) * 8),
        (host("mig-h100"), (1,) * 10),
        (host("dgx-a100", busy=7), (1, 1, 1, 2)),
        (host("dgx-a100", within=1), (1, 1, 1, 1)),
        (host("dgx-a100", within=2), (1, 1, 1, 2)),
        (host("dgx-a100", busy=8), ()),
        (host("laptop"), ()),  # claims share the GPU of its display
        (RaceHost(HostSnapshot(())), ()),
    ],
)
def test_twice_as_many_racers_as_free_gpus_and_pairs_where_they_are_possible(where: RaceHost, expected: Any) -> None:
    assert plan_race(where) == expected
    assert plan_race(where, 5)[:4] == (expected[:4] and (1, 1, 1, expected[3]))


def won(pid: int, *gpus: int, began: float = 0.1, ended: float = math.inf) -> Outcome:
    return Outcome(pid, len(gpus), tuple(GPUS[index] for index in gpus), began=began, ended=ended)


def refused(pid: int, began: float = 0.1, words: str = "none is free") -> Outcome:
    return Outcome(pid, 1, refused=words, began=began)


@pytest.mark.parametrize(
    ("heat", "collisions"),
    [
        ([won(1, 0), won(2, 1), refused(3)], []),
        ([won(1, 0), won(2, 0, began=0.2)], [(2, 1)]),
        ([won(1, 0, ended=0.2), won(2, 0, began=0.2)], []),
        ([won(2, 0, began=0.19), won(1, 0, ended=0.2)], [(2, 1)]),
        ([won(1, 0), won(2, 0, began=0.2, ended=0.3), won(3, 0, 1, began=0.4)], [(2, 1), (3, 1)]),
        ([won(1, 0, ended=0.2), won(2, 0, began=0.3, ended=0.4), won(3, 0, began=0.35)], [(3, 2)]),
    ],
)
def test_two_that_have_a_gpu_at_one_time_collide(heat: list[Outcome], collisions: list[tuple[int, int]]) -> None:
    ruling = rule(heat)
    assert ruling.collisions == tuple(Collision(A.label, A.uuid, pid, rival) for pid, rival in collisions)
    assert ruling.fails is bool(collisions)


def test_races_add_up_and_each_has_its_own_clock() -> None:
    ruling = rule([won(1, 0), refused(2)], [won(3, 0, 1)])
    assert ruling == RefereeReport(claims=2, taken=3, refused=1)


def test_failures_and_trouble() -> None:
    failed = Outcome(1, 1, failed="it exited without a report")
    trouble = Outcome(2, 1, trouble="CUDA cannot be initialised")
    assert rule([failed, won(3, 0)]).fails
    assert rule([trouble]).fails, "nothing was got, and that was nobody else's doing"
    assert not rule([trouble, won(3, 0)]).fails
    assert not rule([refused(1)]).fails


def test_one_line_for_each_number_of_processes() -> None:
    heat = [won(1, 0), won(2, 0), won(3, 0, 1)]
    assert race.use_lines(heat) == ["  GPU 0: 3 processes at once", "  GPU 1: 1 process"]
    assert race.use_lines([won(1, 0), won(2, 1)], color=True) == ["  GPU 0,1: \x1b[32m1 process each\x1b[0m"]
    assert race.use_lines(heat, color=True)[0] == "  GPU 0: \x1b[31m3 processes at once\x1b[0m"


def test_who_got_how_many_and_how_soon() -> None:
    failed = Outcome(5, 1, failed="it exited without a report")
    first = [won(1, 0, began=0.3), refused(2, 0.2), refused(3, 0.4), won(4, 1), failed]
    assert race.rush_lines([first]) == [
        "  GPU 0,1: 1 process each",
        "  2 processes got 2 GPUs within 300 ms.",
        "  2 refused within 400 ms, one of them with the message:",
        "    none is free",
    ]
    assert race.rush_lines([first, [won(6, 0), refused(7)], [won(8, 1)]])[1] == (
        "  2 processes got 2 GPUs within 300 ms; 2 more rounds: 2 claims, 1 refusal."
    )
    assert race.rush_lines([[failed]]) == []


def test_a_refusal_fits_a_terminal_and_cannot_move_its_cursor() -> None:
    words = "none\n  GPU 0: claimed by process 7 (root, /" + "x" * 200 + "\x1b[2J)\n" + "  GPU 1: free\n" * 20
    lines = race.rush_lines([[refused(1, 0.1, words)]])
    assert all(len(line) <= 80 for line in lines)
    assert "\x1b" not in "".join(lines)
    assert len(lines) <= 5
    assert "more lines" in lines[-1]


def test_a_gap_is_from_the_last_of_its_gpus_and_none_where_claims_overlap() -> None:
    first, second = won(1, 0, ended=0.2), won(2, 1, ended=0.4)
    assert race.turns_lines([first, second, won(3, 0, 1, began=0.41, ended=0.5)]) == [
        "  3 of 3 served; a freed GPU was idle for 10 ms (median), 10 ms at most."
    ]
    assert race.turns_lines([first, won(2, 0, began=0.15, ended=0.3)]) == ["  2 of 2 served."]


@pytest.mark.parametrize(("heat", "code"), [([won(1, 0)], 32), ([won(1, 0), won(2, 0, began=0.2)], 31)])
def test_the_verdict_is_green_or_red(heat: list[Outcome], code: int) -> None:
    plain = race.verdict_lines(rule(heat), RefereeReport())
    painted = race.verdict_lines(rule(heat), RefereeReport(), color=True)
    (verdict,) = [line for line in plain if line.startswith("Verdict:")]
    assert painted == [f"\x1b[{code}m{line}\x1b[0m" if line is verdict else line for line in plain]


def test_collisions_with_one_process_are_one_line() -> None:
    lines = race.verdict_lines(rule([won(1, 0), won(2, 0, began=0.2), won(3, 0, began=0.3)]), RefereeReport())
    text = " ".join(" ".join(lines).split())
    assert text.startswith(f"Collision: process 2, 3 got GPU 0 ({A.uuid}), which process 1 had. Verdict: 2 collisions")
