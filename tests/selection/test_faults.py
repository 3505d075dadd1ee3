"""How long a note on a GPU counts, and what people read of it."""

from __future__ import annotations

import math
import time

import pytest

from safe_gpu.devices import GpuFault
from safe_gpu.selection.verdicts import recent_faults, why_last


@pytest.mark.parametrize(
    ("when", "counts"),
    [(1000.0, True), (401.0, True), (400.0, False), (0.0, False), (1001.0, True), (1600.0, False), (math.inf, False)],
)
def test_a_note_counts_for_ten_minutes(when: float, counts: bool) -> None:
    faults = {"GPU-1": GpuFault(when, "bad")}
    assert recent_faults(faults, 1000.0) == (faults if counts else {})


def test_not_a_number_does_not_count() -> None:
    assert recent_faults({"GPU-1": GpuFault(math.nan, "bad")}, 1000.0) == {}


def test_people_read_until_when_and_why() -> None:
    until = time.strftime("%H:%M", time.localtime(1600))
    assert why_last(GpuFault(1000.0, "ECC")) == f"taken last until {until}, since a claim failed on it: ECC"
