"""Times in which GPUs are reserved: the pure decisions, by tables."""

import math
import time

import pytest

from safe_gpu.gpus.devices import Gpu
from safe_gpu.gpus.windows import UNSAID, Window, drain_line, first_open, parse_closed, spans_of, why_reserved

HOUR = 3600.0
NINE = time.mktime((2026, 11, 26, 9, 0, 0, 0, 0, -1))
COURSE = Window(NINE, NINE + 3 * HOUR, ("GPU-0", "GPU-1"), "group:course", "practical course", "root")


@pytest.mark.parametrize(
    ("start", "hold_for", "spans", "expected"),
    [
        pytest.param(0, 10, ((10, 20),), 0, id="ends as it begins"),
        pytest.param(0, 11, ((10, 20),), 20, id="does not end in time"),
        pytest.param(20, math.inf, ((10, 20),), 20, id="over"),
        pytest.param(0, 5, ((3, 20), (22, 30)), 30, id="too little time between two"),
        pytest.param(0, 2, ((1, 20), (22, 30)), 20, id="enough time between two"),
        pytest.param(0, 5, ((3, 20), (4, 9)), 20, id="one within another"),
        pytest.param(0, math.inf, ((UNSAID, UNSAID + 1),), 0, id="unknown, a day before"),
        pytest.param(0, None, ((UNSAID - 1, UNSAID),), UNSAID, id="unknown, less than a day before"),
        pytest.param(math.inf, 5, ((3, 20),), math.inf, id="never free"),
    ],
)
def test_when_a_request_may_begin(start: float, hold_for: float | None, spans: object, expected: float) -> None:
    assert first_open(start, hold_for, spans) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "hold_for", "closed"),
    [
        pytest.param(NINE - HOUR, HOUR, False, id="ends before"),
        pytest.param(NINE - HOUR, HOUR + 1, True, id="ends too late"),
        pytest.param(NINE - HOUR, None, True, id="does not say"),
        pytest.param(NINE - UNSAID, None, False, id="does not say, a day before"),
        pytest.param(NINE, 1, True, id="during it"),
        pytest.param(NINE + 3 * HOUR, None, False, id="lapsed"),
        pytest.param(0.0, None, False, id="the clock fell back to 1970"),
    ],
)
def test_what_binds_a_claim(now: float, hold_for: float | None, closed: bool) -> None:
    found = why_reserved([COURSE], now, hold_for)
    assert sorted(found) == (["GPU-0", "GPU-1"] if closed else [])
    for why in found.values():
        text = "reserved by root for group course from Thu 2026-11-26 09:00 to 12:00: practical course"
        assert why == text + " (until then for claims that say a shorter --for)" * (now < NINE)


def test_instances_and_order() -> None:
    earlier = Window(1, 2, ("GPU-1",))
    gpus = [Gpu(0, "GPU-0"), Gpu(0, "MIG-0", mig_parent="GPU-0"), Gpu(1, "GPU-1"), Gpu(2, "GPU-2")]
    course = (COURSE.begin, COURSE.end)
    assert spans_of([COURSE, earlier], gpus) == {"GPU-0": (course,), "MIG-0": (course,), "GPU-1": ((1, 2), course)}


TWO_DAYS = COURSE._replace(end=NINE + 30 * HOUR)


@pytest.mark.parametrize("window", [COURSE._replace(whom="", reason=""), COURSE._replace(whom="user:anna"), TWO_DAYS])
def test_lines_are_read_as_they_were_written(window: Window) -> None:
    drains = [drain_line("GPU-1", "a fan"), drain_line("GPU-2", "")]
    lines = [*drains, "", *COURSE._replace(begin=1).lines, *window.lines]
    assert parse_closed(lines, "root") == ({"GPU-1": "a fan", "GPU-2": ""}, (COURSE._replace(begin=1), window), [])
    assert str(TWO_DAYS).endswith("09:00 to Fri 2026-11-27 15:00: practical course")


@pytest.mark.parametrize(
    "line",
    [
        "GPU-0", "GPU-0 a fan", " - - - a fan", "GPU-0 - 2 -", "GPU-0 1 -", "GPU-0 1 2", "GPU-0 x 2 -", "GPU-0 2 1 -",
        "GPU-0 -5 1 -", "GPU-0 nan 2 -", "GPU-0 1 inf -", "GPU-0 1 1e300 -", "GPU-0 1 2 anna", "GPU-0 1 2 user:",
    ],
)  # fmt: skip
def test_a_line_that_says_nothing_closes_nothing_and_others_count(line: str) -> None:
    lines = [drain_line("GPU-1", "a fan"), line, *COURSE.lines]
    assert parse_closed(lines, "root") == ({"GPU-1": "a fan"}, (COURSE,), [line])
