"""GPUs as data: the table of vendors, and times in which GPUs are reserved."""

import argparse
import math
import re
import time
from pathlib import Path

import pytest

from safe_gpu.cli.arguments import add_vendor
from safe_gpu.drivers.intel import IntelDriver
from safe_gpu.drivers.presets import PRESETS, preset
from safe_gpu.gpus.devices import Gpu, vendor_of, vendor_of_name
from safe_gpu.gpus.vendors import FIRST, VENDORS
from safe_gpu.gpus.windows import UNSAID, Window, drain_line, first_open, parse_closed, spans_of, why_reserved
from safe_gpu.runtimes.cuda import CUDA
from safe_gpu.runtimes.hip import HIP
from safe_gpu.runtimes.visible_devices import hide_all
from safe_gpu.selection.request import parse_request

HOUR = 3600.0
NINE = time.mktime((2026, 11, 26, 9, 0, 0, 0, 0, -1))
COURSE = Window(NINE, NINE + 3 * HOUR, ("GPU-0", "GPU-1"), "group:course", "practical course", "root")


def test_when_a_request_may_begin() -> None:
    for start, hold_for, spans, expected in (
        (0, 10, ((10, 20),), 0),  # it ends as the other begins
        (0, 11, ((10, 20),), 20),
        (20, math.inf, ((10, 20),), 20),
        (0, 5, ((3, 20), (22, 30)), 30),  # too little time between two
        (0, 2, ((1, 20), (22, 30)), 20),
        (0, 5, ((3, 20), (4, 9)), 20),  # one within another
        (0, math.inf, ((UNSAID, UNSAID + 1),), 0),  # it does not say how long, a day before
        (0, None, ((UNSAID - 1, UNSAID),), UNSAID),
        (math.inf, 5, ((3, 20),), math.inf),
    ):
        assert first_open(start, hold_for, spans) == expected


def test_what_binds_a_claim() -> None:
    for now, hold_for, closed in (
        (NINE - HOUR, HOUR, False),
        (NINE - HOUR, HOUR + 1, True),
        (NINE - HOUR, None, True),
        (NINE - UNSAID, None, False),
        (NINE, 1, True),
        (NINE + 3 * HOUR, None, False),
        (0.0, None, False),  # the clock fell back to 1970
    ):
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


def test_lines_are_read_as_they_were_written() -> None:
    first, two_days = COURSE._replace(begin=1), COURSE._replace(end=NINE + 30 * HOUR)
    for window in (COURSE._replace(whom="", reason=""), COURSE._replace(whom="user:anna"), two_days):
        lines = [drain_line("GPU-1", "a fan"), drain_line("GPU-2", ""), "", *first.lines, *window.lines]
        assert parse_closed(lines, "root") == ({"GPU-1": "a fan", "GPU-2": ""}, (first, window), [])
    assert str(two_days).endswith("09:00 to Fri 2026-11-27 15:00: practical course")


def test_a_line_that_says_nothing_closes_nothing_and_others_count() -> None:
    for line in (
        "GPU-0", "GPU-0 a fan", " - - - a fan", "GPU-0 - 2 -", "GPU-0 1 -", "GPU-0 1 2", "GPU-0 x 2 -", "GPU-0 2 1 -",
        "GPU-0 -5 1 -", "GPU-0 nan 2 -", "GPU-0 1 inf -", "GPU-0 1 1e300 -", "GPU-0 1 2 anna", "GPU-0 1 2 user:",
    ):  # fmt: skip
        lines = [drain_line("GPU-1", "a fan"), line, *COURSE.lines]
        assert parse_closed(lines, "root") == ({"GPU-1": "a fan"}, (COURSE,), [line])


PAGE = Path(__file__).parents[1] / "safe_gpu" / "README.md"


@pytest.mark.parametrize("key", VENDORS)
def test_a_row_is_whole(key: str) -> None:
    vendor = VENDORS[key]
    assert preset(vendor.preset).vendors == (key,)
    uuids = [device.uuid for name in PRESETS for device in preset(name).devices if device.vendor == key]
    for uuid in [*uuids, *([f"{vendor.by_place}0000:05:00.0"] if vendor.by_place else [])]:
        assert [vendor_of(uuid), vendor_of_name(uuid)] == [key, key]
        assert parse_request(only=uuid).driver["prefer"] == key
    assert vendor.library in {runtime.title for runtime in (CUDA, HIP, IntelDriver)}
    assert all(name.startswith(tuple(p for one in VENDORS.values() for p in one.prefixes)) for name in vendor.variables)
    assert set(vendor.variables) <= set(hide_all())
    parser = argparse.ArgumentParser()
    add_vendor(parser, "")
    assert parser.parse_args(["--vendor", key.upper()]).vendor == key
    assert vendor_of_name("0") is vendor_of_name("GPU-ab") is None


def test_the_page_names_every_driver_and_simulated_host() -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("| `SAFE_GPU_DRIVER` |"))
    drivers, hosts = row.split("`simulated:`")
    assert re.findall(r"`([^`]*)`", hosts) == list(PRESETS)
    named = re.findall(r"`([^`]*)`", drivers.split("|")[2])
    assert named == ["auto", *(name for one in VENDORS.values() for name in one.drivers)]
    assert all(f"({one.title})" in drivers for key, one in VENDORS.items() if key != FIRST)
