"""Claims of NVIDIA, AMD and Intel GPUs on one host; simulated AMD hosts are in tests/cli/test_run.py."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.forks import VARIABLES, forked
from support.hip_host import HipHost, without_hip
from support.intel_host import IntelHost

import safe_gpu
from safe_gpu.claim.functions import wait_for_gpus
from safe_gpu.claim.view import HostView
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.gpus.devices import HostSnapshot, vendor_of
from safe_gpu.selection.request import Selection

UUIDS = {
    vendor: [gpu.uuid for gpu in SimulatedDriver("two-vendors", "/nowhere", vendor=vendor).idle.gpus]
    for vendor in ("nvidia", "amd")
}
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


@pytest.fixture
def two_vendors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")


def claim(nb_gpus: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    return safe_gpu.GPUOwner(nb_gpus, timeout=0, affinity=None, **options)


def visible() -> list[str | None]:
    return [os.environ.get(name) for name in VISIBLE]


PRINT = "import json, os; print(json.dumps({n: v for n, v in os.environ.items() if n.endswith('VISIBLE_DEVICES')}))"


def variables(command: Any, *arguments: str) -> dict[str, str]:
    """The variables of a command under `safe-gpu`."""
    child = command.run(*arguments, "--", sys.executable, "-c", PRINT)
    assert child.returncode == 0, child.stderr
    found: dict[str, str] = json.loads(child.stdout)
    return found


@pytest.mark.usefixtures("two_vendors")
def test_nvidia_is_the_first_and_the_variables_are_those_of_the_vendor() -> None:
    with claim(2) as owner:
        assert [gpu.uuid for gpu in owner.gpus] == UUIDS["nvidia"][:2]
        assert visible() == ["0,1", None, None]
    with claim(2, vendor="amd") as owner:
        assert [gpu.uuid for gpu in owner.gpus] == UUIDS["amd"][:2]
        assert visible() == ["0,1", ",".join(UUIDS["amd"][:2]), "0,1"]
    assert visible() == [None, None, None]


@pytest.mark.usefixtures("two_vendors")
def test_both_can_be_held_at_once_and_all_busy_is_all_busy(command: Any) -> None:
    code = "import safe_gpu; print(safe_gpu.claim_gpus(4, vendor='AMD', timeout=0).gpus[0].uuid)"
    outside = {**os.environ}
    with claim(4):
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=outside)
        assert child.stdout.strip() == UUIDS["amd"][0], child.stderr
        assert safe_gpu.get_free_gpus() == []
        assert safe_gpu.get_free_gpus(vendor="amd") == ["0", "1", "2", "3"]
        assert command.run("run", "--timeout", "0", "--", "true").returncode == 75, "no AMD GPU in place of a busy one"
        assert command.run("wait", "--timeout", "0", "--vendor", "amd").stdout == "0\n"


@pytest.mark.parametrize(
    ("driver", "words"), [("kfd", "--device /dev/kfd .*simulated:mi250x"), ("nvml", "--gpus all.*simulated:dgx-a100")]
)
def test_a_driver_without_gpus_is_told_what_its_vendor_needs(driver: str, words: str) -> None:
    with pytest.raises(safe_gpu.NoDriverError, match=rf"the driver \({driver}\) works, but .*{words}$"):
        HostView(SimpleNamespace(name=driver), HostSnapshot(()), Selection())


@pytest.mark.parametrize("vendor", ["matrox", "", "nvidia,amd", 1, ["amd"]])
@pytest.mark.usefixtures("two_vendors")
def test_a_wrong_vendor(vendor: Any) -> None:
    with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="choose 'nvidia' or 'amd' or 'intel'") as caught:
        claim(vendor=vendor)
    assert f"vendor={vendor!r}" in str(caught.value)
    for ask in (safe_gpu.get_free_gpus, wait_for_gpus):
        with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="choose 'nvidia' or 'amd' or 'intel'"):
            ask(vendor=vendor)


# Claims inside claims


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.usefixtures("two_vendors")
def test_a_claim_inside_a_claim_keeps_the_vendor(vendor: str, command: Any, monkeypatch: Any) -> None:
    """Also where the program has cleared the variable that names AMD GPUs, and where it is left from elsewhere."""
    for stale in (None, UUIDS["amd"][3]):
        with claim(2, vendor=vendor, delegate=True) as owner, monkeypatch.context() as patch:
            if vendor == "nvidia" and stale:
                patch.setenv("ROCR_VISIBLE_DEVICES", stale)
            if vendor == "amd" and stale is None:
                patch.delenv("ROCR_VISIBLE_DEVICES")
                patch.setenv("SAFE_GPU_FENCE", "ignore")
            inner = variables(command, "run", "-q")
            name = "ROCR_VISIBLE_DEVICES" if vendor == "amd" else "CUDA_VISIBLE_DEVICES"
            assert inner[name] in ("0", owner.gpus[0].uuid)
            assert ("HIP_VISIBLE_DEVICES" in inner) == (vendor == "amd")
            if stale is None:
                other = next(iter({"amd", "nvidia"} - {vendor}))
                child = command.run("run", "--vendor", other, "--", "true")
                assert child.returncode == 78
                assert f"the claim around this process (SAFE_GPU_SCOPE) holds {vendor.upper()} GPUs" in child.stderr
            token = os.environ["SAFE_GPU_SCOPE"]
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)  # of a claim that has ended, which decides nothing
    with claim() as owner:
        assert vendor_of(owner.gpus[0].uuid) == "nvidia"


# The queue


@pytest.mark.usefixtures("two_vendors")
def test_waiters_of_two_vendors_do_not_wait_for_each_other(command, child, ground, eventually) -> None:
    """A waiter for all NVIDIA GPUs keeps nobody from AMD's, and its place among NVIDIA's."""
    holder = child("import safe_gpu; say(safe_gpu.claim_gpus().devices_taken); listen()")
    assert holder.hear() == "[0]"
    waiter = command.start("run", "-q", "-n", "4", "--", "true")
    eventually(ground.tickets)
    assert command.run("run", "--timeout", "0", "--", "true").returncode == 75, "strict order among NVIDIA GPUs"
    assert variables(command, "run", "-q", "--timeout", "0", "--vendor", "amd", "-n", "4")["HIP_VISIBLE_DEVICES"]
    assert waiter.poll() is None
    holder.tell()
    assert waiter.wait(60) == 0


# AMD GPUs, on a fake libamdhip64 over a saved sysfs tree


INITIALIZE = "ctypes.CDLL('libamdhip64.so').hipGetDeviceCount(ctypes.byref(ctypes.c_int())); "


@pytest.fixture
def hip(tmp_path: Path, build_library: Callable[..., Path]) -> HipHost:
    return HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"))


def test_a_claim_holds_its_gpus_and_lets_them_go(hip: HipHost) -> None:
    code = """
owner = safe_gpu.claim_gpus(2, timeout=0, affinity=None)
out["taken"], out["set"] = owner.devices_taken, variables()
out["free"] = safe_gpu.get_free_gpus()
proc = os.environ["SAFE_GPU_FSROOT"] + f"/sys/class/kfd/kfd/proc/{os.getpid()}/vram_"
out["held"] = [n for n in range(8) if os.path.exists(proc + str(100 + n))]
safe_gpu.release_gpus()
out["after"] = variables()
"""
    found = forked(hip, code)
    assert found["taken"] == found["held"] == [0, 1]
    assert found["set"] == dict(zip(VARIABLES, ["0,1", f"{hip.uuids[0]},{hip.uuids[1]}", "0,1"], strict=False))
    assert found["free"] == ["2", "3", "4", "5", "6", "7"]
    assert found["after"] == {}
    assert hip.users() == {}


@pytest.mark.parametrize(
    ("environment", "taken"),
    [
        ({"ROCR_VISIBLE_DEVICES": "5,3"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": "5,3", "HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [3]),
    ],
)
def test_inherited_variables_come_back(hip: HipHost, environment: dict[str, str], taken: list[int]) -> None:
    code = 'out["taken"] = claim(1); out["set"] = variables(); safe_gpu.release_gpus(); out["after"] = variables()'
    found = forked(hip, code, **environment)
    assert found["taken"] == taken
    assert found["set"] == dict(zip(VARIABLES, ["0", hip.uuids[taken[0]], "0"], strict=False))
    assert found["after"] == environment


def test_another_device_than_the_claimed_one_is_caught(hip: HipHost) -> None:
    """GPUs without a UUID are named by index, and HIP has another order than the kernel."""
    for file in hip.kfd.glob("topology/nodes/*/properties"):
        file.write_text(re.sub("unique_id .*", "unique_id 0", file.read_text()))
    assert forked(hip, 'out["taken"] = claim(1); out["set"] = variables(); safe_gpu.release_gpus()') == {
        "taken": [0],
        "set": dict.fromkeys(VARIABLES[:3], "0"),
    }
    hip.uuids = ["GPU-XX"] * 8
    hip.describe(order=[7, 6, 5, 4, 3, 2, 1, 0])
    error, message, _ = forked(hip, 'out["error"] = claim(1)')["error"]
    assert error == "WrongDeviceError"
    assert "HIP device 0 is /0000:c8:00.0, but GPU 0 (AMD-0000:c1:00.0-0) was claimed" in message


def test_hip_that_is_initialised_or_refuses(hip: HipHost) -> None:
    error, message, _ = forked(hip, INITIALIZE + 'out["error"] = claim(1)')["error"]
    assert error == "CudaInitializedError"
    assert "HIP is already initialised in this process and sees 8 GPU(s)" in message
    assert forked(hip, INITIALIZE + 'out["taken"] = claim(2)', ROCR_VISIBLE_DEVICES="5,3")["taken"] == [5, 3]
    hip.fail("hipMalloc", 2)
    error, message, _ = forked(hip, 'out["error"] = claim(1)')["error"]
    assert error == "PlaceholderError"
    assert "hipMalloc failed with hipErrorOutOfMemory (2)" in message
    assert "HipPlaceholder" in message


def test_a_host_without_hip(hip: HipHost, tmp_path: Path) -> None:
    found = forked(
        hip,
        'out["error"] = claim(1); out["claimed"] = claim(1, safe_gpu.NoPlaceholder())',
        LD_LIBRARY_PATH=str(without_hip(tmp_path)),
    )
    assert found["error"][0] == "NoDriverError"
    assert "HIP" in found["error"][1]
    assert found["claimed"] == [0]


# Intel GPUs, over a saved sysfs tree


MASK, HIERARCHY, ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
START = """
def ze(): return {name: value for name, value in os.environ.items() if name.startswith(("ZE_", "ONEAPI_"))}
"""


@pytest.fixture
def intel(tmp_path: Path) -> IntelHost:
    """An integrated GPU, and two cards of two tiles. Their names are for this test alone on the whole machine."""
    host = IntelHost(tmp_path)
    domain = f"{int.from_bytes(os.urandom(4), 'big') | 1 << 28:08x}"
    host.gpu("0000:00:02.0", 0x46A6, driver="i915")
    for bus in (0x18, 0x42):
        host.gpu(f"{domain}:{bus:02x}:00.0", tiles=2)
    return host


def test_a_claim_takes_a_card_with_all_its_tiles_and_puts_nothing_on_it(intel: IntelHost) -> None:
    code = """
owner = safe_gpu.claim_gpus(1, timeout=0, affinity=None, vendor="intel", only="2")
out["taken"], out["set"], out["held"] = owner.devices_taken, ze(), owner.placeholders
safe_gpu.release_gpus()
out["after"] = ze()
"""
    assert forked(intel, START + code) == {
        "taken": [2],
        "set": {MASK: "3,4", HIERARCHY: "FLAT", ORDER: "1"},
        "held": [],
        "after": {},
    }
    for hierarchy, mask, left in (("COMPOSITE", "2", "2"), ("FLAT", "2,3,4", "3,4")):
        code = START + 'out["taken"] = claim(1); out["set"] = ze()'
        found = forked(intel, code, **{HIERARCHY: hierarchy, MASK: mask})
        assert (found["taken"], found["set"][MASK]) == ([2], left), "what is inherited is the limit"


def test_a_mask_without_a_hierarchy_is_refused_with_the_way_out(intel: IntelHost) -> None:
    error, message, _ = forked(intel, START + 'out["error"] = claim(1)', **{MASK: "1,2"})["error"]
    assert error == "UnsatisfiableRequestError"
    assert f"{MASK}=1,2 is ambiguous" in message
    assert f"set {HIERARCHY} and {ORDER}=1" in message


def test_a_claim_says_once_that_others_cannot_be_seen(intel: IntelHost) -> None:
    intel.private(1)
    code = """
import logging
told = []
logging.getLogger("safe_gpu").addHandler(type("H", (logging.Handler,), {"emit": lambda self, r: told.append(r.getMessage())})())
out["taken"], out["told"] = claim(2), told
"""  # noqa: E501
    found = forked(intel, START + code)
    assert found["taken"] == [1, 2]
    assert len([text for text in found["told"] if "to root only" in text]) == 1
