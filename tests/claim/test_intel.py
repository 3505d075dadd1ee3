"""Claims of Intel GPUs on a fake libze_loader over a saved sysfs tree."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forks import forked
from support.intel_host import IntelHost

from safe_gpu.cli.commands import main

MASK, HIERARCHY, ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
START = """
import glob
def ze(): return {name: value for name, value in os.environ.items() if name.startswith(("ZE_", "ONEAPI_"))}
def users():
    found = [open(path.replace("/fd/", "/fdinfo/")).read() for path in glob.glob(os.environ["SAFE_GPU_FSROOT"] + "/proc/*/fd/1*")]
    return [line.split()[1] for text in found for line in text.splitlines() if "pdev" in line]
"""  # noqa: E501


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> IntelHost:
    """An integrated GPU, and two cards of two tiles. Their names are for this test alone on the whole machine."""
    host = IntelHost(tmp_path, build_library("ze.c", "libze_loader.so.1"))
    domain = f"{int.from_bytes(os.urandom(4), 'big') | 1 << 28:08x}"
    host.gpu("0000:00:02.0", 0x46A6, driver="i915")
    host.uuids = []  # type: ignore[attr-defined]
    for bus in (0x18, 0x42):
        host.gpu(f"{domain}:{bus:02x}:00.0", tiles=2)
        host.uuids.append(f"INTEL-{domain}:{bus:02x}:00.0")  # type: ignore[attr-defined]
    host.describe(1, 2, 2)
    return host


def claim(host: IntelHost, code: str, **environment: str) -> Any:
    return forked(host, START + code, **environment)


def test_a_claim_holds_a_card_with_all_its_tiles(host: IntelHost) -> None:
    code = """
owner = safe_gpu.claim_gpus(1, timeout=0, affinity=None, vendor="intel", only="2")
out["taken"], out["set"], out["held"] = owner.devices_taken, ze(), users()
safe_gpu.release_gpus()
out["after"], out["left"] = ze(), users()
"""
    found = claim(host, code)
    assert found["taken"] == [2]
    assert found["set"] == {MASK: "3,4", HIERARCHY: "FLAT", ORDER: "1"}
    assert [f"INTEL-{bus_id}" for bus_id in found["held"]] == host.uuids[1:]  # type: ignore[attr-defined]
    assert (found["after"], found["left"]) == ({}, [])


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


def test_level_zero_initialised_before_the_claim(host: IntelHost) -> None:
    early = "ctypes.CDLL('libze_loader.so.1').zeInit(1); "
    error, message, _ = claim(host, early + 'out["error"] = claim(1)')["error"]
    assert error == "CudaInitializedError"
    assert "Level Zero is already initialised in this process and sees 2 GPU(s)" in message.replace("3 GPU", "2 GPU")


def test_level_zero_refuses(host: IntelHost) -> None:
    (host.root / "ze_error").write_text("zeMemAllocDevice 70000003\n")
    error, message, _ = claim(host, 'out["error"] = claim(1)')["error"]
    assert error == "PlaceholderError"
    assert "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY" in message


def test_a_host_without_level_zero(host: IntelHost, tmp_path: Path) -> None:
    lacking = tmp_path / "none"
    lacking.mkdir()
    for name in ("libze_loader.so.1", "libze_loader.so"):
        (lacking / name).write_text("not a library")
    code = """
import logging
told = []
logging.getLogger("safe_gpu").addHandler(type("H", (logging.Handler,), {"emit": lambda self, r: told.append(r.getMessage())})())
out["taken"], out["told"] = claim(1), told
"""  # noqa: E501
    found = claim(host, code, LD_LIBRARY_PATH=str(lacking))
    assert found["taken"] == [1]
    assert any("No placeholder is put on the GPUs" in text for text in found["told"])


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
