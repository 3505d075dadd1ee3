"""The table of vendors, and that the rooms and the pages have what it says."""

import argparse
import re
from pathlib import Path

import pytest

from safe_gpu.cli.arguments import add_vendor
from safe_gpu.drivers.intel import IntelDriver
from safe_gpu.drivers.presets import PRESETS, preset
from safe_gpu.gpus.devices import vendor_of, vendor_of_name
from safe_gpu.gpus.vendors import FIRST, VENDORS
from safe_gpu.runtimes.cuda import CUDA
from safe_gpu.runtimes.hip import HIP
from safe_gpu.runtimes.visible_devices import hide_all
from safe_gpu.selection.request import parse_request

PAGE = Path(__file__).parents[1] / "safe_gpu" / "README.md"


@pytest.mark.parametrize("key", VENDORS)
def test_a_row_is_whole(key: str) -> None:
    vendor = VENDORS[key]
    assert preset(vendor.preset).vendors == (key,)
    uuids = [device.uuid for name in PRESETS for device in preset(name).devices if device.vendor == key]
    assert uuids
    for uuid in [*uuids, *([f"{vendor.by_place}0000:05:00.0"] if vendor.by_place else [])]:
        assert [vendor_of(uuid), vendor_of_name(uuid)] == [key, key]
        assert parse_request(only=uuid).named_vendor == key
    assert vendor.library in {runtime.title for runtime in (CUDA, HIP, IntelDriver)}
    assert all(name.startswith(tuple(p for one in VENDORS.values() for p in one.prefixes)) for name in vendor.variables)
    assert set(vendor.variables) <= set(hide_all())


def test_what_derives_from_the_table() -> None:
    parser = argparse.ArgumentParser()
    add_vendor(parser, "")
    assert [parser.parse_args(["--vendor", key.upper()]).vendor for key in VENDORS] == list(VENDORS)
    assert vendor_of_name("0") is vendor_of_name("GPU-ab") is None


def test_the_page_names_every_driver_and_simulated_host() -> None:
    row = next(line for line in PAGE.read_text().splitlines() if line.startswith("| `SAFE_GPU_DRIVER` |"))
    drivers, hosts = row.split("`simulated:`")
    assert re.findall(r"`([^`]*)`", hosts) == list(PRESETS)
    named = re.findall(r"`([^`]*)`", drivers.split("|")[2])
    assert named == ["auto", *(name for one in VENDORS.values() for name in one.drivers)]
    assert all(f"({one.title})" in drivers for key, one in VENDORS.items() if key != FIRST)
