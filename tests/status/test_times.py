"""Times: how long a claimed GPU has shown no work, and when waiters can expect to start."""

import itertools
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ground import write_for_all

from safe_gpu.coordination.closed import find_admitted
from safe_gpu.coordination.entry import Entry
from safe_gpu.gpus.devices import Gpu, Holder
from safe_gpu.gpus.windows import Window
from safe_gpu.settings.config import Limits
from safe_gpu.status.facts import GpuStatus
from safe_gpu.status.gather import gather, report_after, with_idle_times
from safe_gpu.status.starts import at_limits, expected_starts

SINCE = time.time() - 1000.0
BUSY = GpuStatus(Gpu(0, "GPU-a", utilization=50), "claimed", claim=Holder(7, "anna", since=SINCE, uid=4711))
STILL = replace(BUSY, gpu=Gpu(0, "GPU-a", utilization=0))
NOBODY = replace(BUSY, idle=True)
UNKNOWN = replace(BUSY, gpu=Gpu(0, "GPU-a"))


@pytest.fixture
def marks(state_dir: Path) -> Path:
    (state_dir / "history").mkdir(parents=True)
    for path in (state_dir, state_dir / "history"):
        path.chmod(0o1777)
    return state_dir / "history"


def idle(one: GpuStatus, later: float = 0.0) -> float | None:
    """How long a GPU has shown no work, that many seconds from now."""
    return with_idle_times([one], time.time() + later)[0].idle_for


def about(seconds: float) -> Any:
    return pytest.approx(seconds, abs=60)


def test_it_counts_from_the_first_look_without_work(marks: Path) -> None:
    assert idle(STILL) == 0
    looks = [(NOBODY, 100), (STILL, 300), (BUSY, 310), (STILL, 0), (STILL, 200), (UNKNOWN, 210)]
    assert [idle(one, later) for one, later in looks] == [about(100), about(300), 0, 0, about(200), 0]
    assert idle(STILL, 220) == 0
    os.utime(marks / "GPU-a.idle", (SINCE - 1, SINCE - 1))
    assert [idle(STILL, 50), idle(STILL, 70)] == [0, about(70)], "another claim begins anew"
    os.utime(marks / "GPU-a.idle", (9e9, 9e9))
    assert idle(STILL) == 0, "a mark from the future makes no negative time"


def test_a_gpu_that_is_held_is_marked_at_each_look(marks: Path) -> None:
    assert idle(replace(STILL, claim=None)) is None
    assert list(marks.iterdir()) == []
    idle(BUSY)
    os.utime(marks / "GPU-a.seen", (SINCE, SINCE))
    before = time.time() - 1
    idle(replace(BUSY, claim=Holder.of_sharers([BUSY.claim, BUSY.claim])))
    assert (marks / "GPU-a.seen").stat().st_mtime > before
    assert {path.stat().st_mode & 0o7777 for path in marks.iterdir()} == {0o666}


@pytest.mark.parametrize("kind", ["fifo", "link", "closed"])
def test_a_mark_that_cannot_be_written_is_none(marks: Path, kind: str) -> None:
    precious = marks.parent / "precious"
    write_for_all(precious, "x")
    os.utime(precious, (SINCE, SINCE))
    for name in ("GPU-a.idle", "GPU-a.seen"):
        if kind == "fifo":
            os.mkfifo(marks / name)
        elif kind == "link":
            (marks / name).symlink_to(precious)
        else:
            (marks / name).touch(0o600)
    assert [idle(STILL), idle(STILL, 100)] == [0, 0]
    assert (precious.read_text(), precious.stat().st_mtime) == ("x", pytest.approx(SINCE, abs=1e-3))


def test_the_limit_is_reached_to_the_second() -> None:
    """Those of policies are tried by the command."""
    limit = report_after(Limits(idle_report_after=1800.0))
    found = [replace(BUSY, idle_for=seconds, idle_report_after=limit).idle_report for seconds in (1799.0, 1800.0)]
    assert found == [False, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")
@pytest.mark.parametrize(
    ("text", "mode", "most"),
    [("max_gpus = 4", 0o644, 4), ("max_gpus = 4", 0o666, None), ("max_gpus = 4\nmax_hold = x", 0o644, None)],
)
def test_a_file_that_does_not_count_limits_nobody(ground: Any, rules: Any, text: str, mode: int, most: Any) -> None:
    ground.hold(0, uid=4711)
    rules(f"[default]\n{text}").chmod(mode)
    status = gather()
    assert (status.max_gpus.get("4711"), status.gpus[0].state) == (most, "claimed")


# The expected starts of the queue

NOW = 1000.0
TOKEN = "0123456789abcdef"  # of the claims inside which others claim

numbers = itertools.count(1)


def gpu(index: int, state: str = "claimed", until: float | None = None) -> GpuStatus:
    claim = Holder(1, since=1.0, until=until) if state == "claimed" else None
    return GpuStatus(Gpu(index, f"GPU-{index}"), state, claim=claim)


def ticket(nb_gpus: int, hold_for: float | None = None, inside: str = "", **more: Any) -> Entry:
    number = next(numbers)
    said = {"v": 1, "nb_gpus": nb_gpus, "gpus": ["GPU-0", "GPU-1"], "hold_for": hold_for, "inside": inside, **more}
    return Entry.read(f"{number}.{'0' * 16}", 0, (1, number), json.dumps(said).encode())


NEWER = ticket(1, wish="of a later version")
LEASED = [gpu(0, until=1100.0), gpu(1, until=1300.0)]


@pytest.mark.parametrize(
    ("tickets", "gpus", "expected"),
    [
        pytest.param([ticket(2, 60), ticket(1)], LEASED, [1300.0, 1360.0], id="one after the other"),
        pytest.param([ticket(2), ticket(1)], LEASED, [1300.0, None], id="behind one that did not say"),
        pytest.param([ticket(2), ticket(1, 60)], LEASED, [1300.0, 1100.0], id="passes"),
        pytest.param([ticket(2)], [gpu(0, until=1100.0), gpu(1)], [None], id="a holder did not say"),
        pytest.param([ticket(1)], [gpu(0, until=900.0), gpu(1)], [NOW], id="overdue"),
        pytest.param([ticket(2), ticket(1)], [gpu(0, "busy"), gpu(1, until=1100.0)], [None, 1100.0], id="a stranger"),
        pytest.param([NEWER, ticket(1)], LEASED, [None, None], id="one that nobody understands"),
        pytest.param([ticket(2, inside=TOKEN), ticket(2)], LEASED, [None, 1300.0], id="inside a claim"),
    ],
)
def test_when_waiters_can_expect_to_start(tickets: Any, gpus: Any, expected: Any) -> None:
    assert [start for start, _ in expected_starts(tickets, gpus, NOW)] == expected


@pytest.mark.parametrize(
    ("ticket", "gpus", "expected"),
    [
        pytest.param(ticket(1, 60), [gpu(0, "free"), gpu(1, "free")], NOW, id="ends in time"),
        pytest.param(ticket(1, 200), [gpu(0, "free"), gpu(1)], 2000.0, id="after the window"),
        pytest.param(ticket(1, 200), [gpu(0, "free"), gpu(1, until=1300.0)], 1300.0, id="another is free before"),
    ],
)
def test_a_window_puts_a_start_off(ticket: Any, gpus: Any, expected: float) -> None:
    windows = [Window(1100.0, 2000.0, ("GPU-0",), "user:4711", "", "root")]
    anna, ben = ticket._replace(uid=4711), ticket._replace(uid=4712)
    find_admitted(windows, [4711, 4712])
    assert [start for start, _ in expected_starts([ben], gpus, NOW, windows=windows)] == [expected]
    assert expected_starts([anna], gpus, NOW, windows=windows) == expected_starts([anna], gpus, NOW)


def test_before_when_a_waiter_probably_does_not_start() -> None:
    assert expected_starts([ticket(2), ticket(1)], LEASED, NOW) == [(1300.0, 1300.0), (None, 1300.0)]


@pytest.mark.parametrize(
    ("most", "share", "expected"),
    [
        (2, None, (2.0, 2, 1100.0)),  # until one of the two ends
        (1, None, (2.0, 1, 1300.0)),
        (2, 1 << 30, None),  # two halves
        (1, 1 << 30, (1.0, 1, 1300.0)),
    ],
)
def test_who_is_at_a_limit_and_until_when(most: int, share: int | None, expected: Any) -> None:
    gpus = [
        replace(one, gpu=one.gpu._replace(memory_total=3 << 30), claim=one.claim._replace(uid=4711, share=share))
        for one in LEASED
    ]
    asked = ticket(1)._replace(uid=4711)
    found = at_limits([asked, ticket(1)], gpus, {4711: Limits(max_gpus=most)}, NOW)
    assert found == ({} if expected is None else {asked.name: expected})
