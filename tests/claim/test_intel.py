"""Claims of Intel GPUs over a saved sysfs tree."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.forks import forked
from support.intel_host import IntelHost

from safe_gpu.cli.commands import main

MASK, HIERARCHY, ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
START = """
def ze(): return {name: value for name, value in os.environ.items() if name.startswith(("ZE_", "ONEAPI_"))}
"""


@pytest.fixture
def host(tmp_path: Path) -> IntelHost:
    """An integrated GPU, and two cards of two tiles. Their names are for this test alone on the whole machine."""
    host = IntelHost(tmp_path)
    domain = f"{int.from_bytes(os.urandom(4), 'big') | 1 << 28:08x}"
    host.gpu("0000:00:02.0", 0x46A6, driver="i915")
    for bus in (0x18, 0x42):
        host.gpu(f"{domain}:{bus:02x}:00.0", tiles=2)
    return host


def claim(host: IntelHost, code: str, **environment: str) -> Any:
    return forked(host, START + code, **environment)


def test_a_claim_takes_a_card_with_all_its_tiles_and_puts_nothing_on_it(host: IntelHost) -> None:
    code = """
owner = safe_gpu.claim_gpus(1, timeout=0, affinity=None, vendor="intel", only="2")
out["taken"], out["set"], out["held"] = owner.devices_taken, ze(), owner.placeholders
safe_gpu.release_gpus()
out["after"] = ze()
"""
    found = claim(host, code)
    assert found == {"taken": [2], "set": {MASK: "3,4", HIERARCHY: "FLAT", ORDER: "1"}, "held": [], "after": {}}


@pytest.mark.parametrize(
    ("environment", "mask"), [({HIERARCHY: "COMPOSITE", MASK: "2"}, "2"), ({HIERARCHY: "FLAT", MASK: "2,3,4"}, "3,4")]
)
def test_an_inherited_mask_is_the_limit(host: IntelHost, environment: dict[str, str], mask: str) -> None:
    found = claim(host, 'out["taken"] = claim(1); out["set"] = ze()', **environment)
    assert found["taken"] == [2]
    assert found["set"][MASK] == mask


def test_a_mask_without_a_hierarchy_is_refused_with_the_way_out(host: IntelHost) -> None:
    error, message, _ = claim(host, 'out["error"] = claim(1)', **{MASK: "1,2"})["error"]
    assert error == "UnsatisfiableRequestError"
    assert f"{MASK}=1,2 is ambiguous" in message
    assert f"set {HIERARCHY} and {ORDER}=1" in message


def test_a_claim_says_once_that_others_cannot_be_seen(host: IntelHost) -> None:
    host.private(1)
    code = """
import logging
told = []
logging.getLogger("safe_gpu").addHandler(type("H", (logging.Handler,), {"emit": lambda self, r: told.append(r.getMessage())})())
out["taken"], out["told"] = claim(2), told
"""  # noqa: E501
    found = claim(host, code)
    assert found["taken"] == [1, 2]
    assert len([text for text in found["told"] if "to root only" in text]) == 1


def test_status_and_wait(host: IntelHost, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in host.env.items():
        monkeypatch.setenv(name, value)
    assert main(["status", "--vendor", "intel", "--free"]) == 0
    assert capsys.readouterr().out.split() == ["1", "2"]
    assert main(["wait", "--vendor", "INTEL", "-n", "2", "-t", "0"]) == 0
    assert main(["wait", "--vendor", "amd", "-t", "0"]) == 78
