"""How long a claimed GPU has shown no work, from one look to the next."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ground import write_for_all

from safe_gpu.gpus.devices import Gpu, Holder
from safe_gpu.settings.config import Limits
from safe_gpu.status.facts import GpuStatus
from safe_gpu.status.gather import gather, report_after, with_idle_times

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


@pytest.mark.parametrize(
    ("limits", "idle_for", "expected"),
    [
        (Limits(idle_report_after=1800.0), 1799.0, False),
        (Limits(idle_report_after=1800.0), 1800.0, True),
        (Limits(sections={"idle_report_after": "unlimited"}), 9e9, False),
        (Limits(max_gpus=4), 9e9, None),
        (None, 9e9, None),
    ],
)
def test_the_limit_is_that_of_the_user_of_the_claim(limits: Any, idle_for: Any, expected: Any) -> None:
    assert replace(BUSY, idle_for=idle_for, idle_report_after=report_after(limits)).idle_report is expected


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
