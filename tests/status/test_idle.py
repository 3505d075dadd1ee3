"""How long a claimed GPU has shown no work, from one look to the next."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ground import write_for_all

from safe_gpu.gpus.devices import Gpu
from safe_gpu.status.facts import ClaimStatus, GpuStatus, HostStatus
from safe_gpu.status.idle import sets_a_limit, whom_to_ask, with_idle_times, with_reports
from safe_gpu.status.render import render

SINCE = time.time() - 1000.0
BUSY = GpuStatus(Gpu(0, "GPU-a", utilization=50), "claimed", claim=ClaimStatus(7, "anna", since=SINCE))
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


def test_another_claim_begins_anew(marks: Path) -> None:
    assert [idle(STILL), idle(STILL, 100)] == [0, about(100)]
    os.utime(marks / "GPU-a.idle", (SINCE - 1, SINCE - 1))
    assert [idle(STILL, 50), idle(STILL, 70)] == [0, about(70)]


def test_a_gpu_that_is_held_is_marked_at_each_look(marks: Path) -> None:
    idle(BUSY)
    os.utime(marks / "GPU-a.seen", (SINCE, SINCE))
    before = time.time() - 1
    idle(replace(BUSY, shares=(BUSY.claim, BUSY.claim)))
    assert (marks / "GPU-a.seen").stat().st_mtime > before
    assert {path.stat().st_mode & 0o7777 for path in marks.iterdir()} == {0o666}


def test_a_gpu_without_a_claim_has_no_time(marks: Path) -> None:
    assert idle(replace(STILL, claim=None)) is None
    assert list(marks.iterdir()) == []


def test_a_mark_from_the_future_makes_no_negative_time(marks: Path) -> None:
    write_for_all(marks / "GPU-a.idle", "x")
    os.utime(marks / "GPU-a.idle", (9e9, 9e9))
    assert idle(STILL) == 0


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


# Which are reported, by the policy for the user of the claim

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")

POLICY = """\
[default]
idle_report_after = 30m
[user 4711]
idle_report_after = 2h
[group 4712]
idle_report_after = unlimited
[user 4713]
max_gpus = 1
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = tmp_path / "policy.ini"
    path.write_text(POLICY)
    path.chmod(0o644)
    return str(path)


def gpu(index: int, uid: int | None, idle_for: float | None, user: str = "anna", pid: int = 7) -> GpuStatus:
    claim = ClaimStatus(pid, user, since=1.0, uid=uid)
    return GpuStatus(Gpu(index, f"GPU-{index}"), "claimed", claim=claim, idle_for=idle_for)


@pytest.mark.parametrize(
    ("uid", "idle_for", "expected"),
    [
        (4711, 7199.0, False),
        (4711, 7200.0, True),
        (4713, 1799.0, False),  # the section of the user does not set it, so the default counts
        (4713, 1800.0, True),
        (9999, 1800.0, True),
        (9999, None, None),
        (None, 1800.0, None),
        (0, 9e9, None),  # root is exempt
    ],
)
@as_root
def test_the_limit_is_that_of_the_user_of_the_claim(path: str, uid: Any, idle_for: Any, expected: Any) -> None:
    other = gpu(1, 9999, 1.0)
    assert with_reports((gpu(0, uid, idle_for), other), path)[0].idle_report is expected


@as_root
def test_a_group_without_a_limit_is_never_reported(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_gpu.settings.config._gids_of", lambda uid: {4712} if uid == 5000 else set())
    assert [one.idle_report for one in with_reports((gpu(0, 5000, 9e9), gpu(1, 5001, 9e9)), path)] == [False, True]


@as_root
def test_a_file_that_does_not_count_reports_nothing(path: str) -> None:
    gpus = (gpu(0, 9999, 9e9),)
    assert sets_a_limit(path)
    Path(path).write_text("[default]\nidle_report_after = soon")
    assert with_reports(gpus, path) == gpus
    Path(path).write_text(POLICY)
    Path(path).chmod(0o666)
    assert with_reports(gpus, path) == gpus
    assert not sets_a_limit(path)


@as_root
def test_no_limit_in_a_policy(path: str) -> None:
    Path(path).write_text("[default]\nmax_gpus = 4\n[user anna]\nidle_report_after = unlimited")
    assert not sets_a_limit(path)
    assert [one.idle_report for one in with_reports((gpu(0, 9999, 9e9),), path)] == [None]


def test_whom_to_ask_the_longest_idle_first() -> None:
    def idle(one: GpuStatus) -> GpuStatus:
        return replace(one, idle_report=True)

    gpus = [
        idle(gpu(0, 4711, 3600.0)),
        idle(gpu(1, 4712, 9000.0, "ben", 8)),
        gpu(2, 4713, 1e6, "carla", 9),
        idle(gpu(3, 4711, 7200.0)),
    ]
    assert list(whom_to_ask(gpus, 1000).values()) == [
        "no work on GPU 1 for 2 h 30 min: ask ben (pid 8)",
        "no work on GPU 0,3 for 1 h: ask anna (pid 7)",
    ]
    assert whom_to_ask(gpus, 4712)[8, 1.0] == "no work on GPU 1 for 2 h 30 min: it is yours (pid 8)"


def test_the_table_marks_them() -> None:
    def table(one: GpuStatus) -> list[str]:
        return render(HostStatus("h", "nvml", "", "/s", 1e9, (one,)), width=80, color=False).splitlines()

    one = gpu(0, 4711, 7200.0)
    assert table(replace(one, idle_report=True))[-1] == "GPU 0: no work for 2 h"
    for report in (None, False):
        assert "no work" not in "\n".join(table(replace(one, idle_report=report)))
