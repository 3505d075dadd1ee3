"""How long a claimed GPU has shown no work, from one look to the next."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from safe_gpu.devices import Gpu
from safe_gpu.status.facts import ClaimStatus, GpuStatus
from safe_gpu.status.idle import with_idle_times

SINCE = 1000.0
BUSY = GpuStatus(Gpu(0, "GPU-a", utilization=50), "claimed", claim=ClaimStatus(7, "anna", since=SINCE))
STILL = replace(BUSY, gpu=Gpu(0, "GPU-a", utilization=0))
NOBODY = replace(BUSY, idle=True)
NEXT = replace(STILL, claim=ClaimStatus(8, "ben", since=1500.0))
UNKNOWN = replace(BUSY, gpu=Gpu(0, "GPU-a"))


@pytest.fixture
def notes(state_dir: Path) -> Path:
    (state_dir / "history").mkdir(parents=True)
    for path in (state_dir, state_dir / "history"):
        path.chmod(0o1777)
    return state_dir / "history"


def idle(one: GpuStatus, now: float) -> float | None:
    return with_idle_times([one], now)[0].idle_for


def test_it_counts_from_the_first_look_without_work(notes: Path) -> None:
    looks = [(STILL, 1100), (NOBODY, 1200), (STILL, 1400), (BUSY, 1410), (STILL, 1420), (STILL, 1430), (UNKNOWN, 1440)]
    assert [idle(one, now) for one, now in looks] == [0, 100, 300, 0, 0, 10, 0]


def test_another_claim_begins_anew(notes: Path) -> None:
    assert [idle(STILL, 1100), idle(STILL, 1200), idle(NEXT, 1600), idle(NEXT, 1650)] == [0, 100, 0, 50]


def test_a_gpu_without_a_claim_has_no_time(notes: Path) -> None:
    assert idle(replace(STILL, claim=None), 1100) is None
    assert list(notes.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"claim": 1000.0}', '{"claim": 1000.0, "idle": -5}', '{"claim": 1000.0, "idle": "x"}', "[" * 9999],
)
def test_nonsense_in_a_note_counts_for_nothing(notes: Path, content: str) -> None:
    (notes / "GPU-a.idle").write_text(content)
    assert [idle(STILL, 1100), idle(STILL, 1200)] == [0, 100]


def test_a_note_from_the_future_makes_no_negative_time(notes: Path) -> None:
    (notes / "GPU-a.idle").write_text(json.dumps({"v": 1, "claim": SINCE, "idle": 9e9}))
    assert idle(STILL, 1100) == 0


def test_a_note_that_cannot_be_written_is_none(notes: Path) -> None:
    os.mkfifo(notes / "GPU-a.idle")
    assert [idle(STILL, 1100), idle(STILL, 1200)] == [0, 0]
