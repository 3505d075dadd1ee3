"""Claims of AMD GPUs on a fake libamdhip64 over a saved sysfs tree; simulated hosts are in tests/cli/test_amd.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hip_host import HipHost, without_hip

VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
PRELUDE = """
import ctypes, json, os, sys
import safe_gpu
out = {}
def initialize():
    lib = ctypes.CDLL("libamdhip64.so")
    lib.hipGetDeviceCount(ctypes.byref(ctypes.c_int()))
def claim(*arguments, **options):
    try:
        owner = safe_gpu.claim_gpus(*arguments, **{"timeout": 0, "affinity": None, **options})
    except safe_gpu.SafeGpuError as err:
        return [type(err).__name__, str(err)]
    return owner.devices_taken
def variables():
    return [os.environ.get(n) for n in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")]
"""


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> HipHost:
    return HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"))


def run(host: HipHost, code: str, **environment: str) -> Any:
    """What `code` leaves in `out`."""
    return json.loads(host.python(f"{PRELUDE}\n{code}\nprint(json.dumps(out))", **environment).splitlines()[-1])


def test_a_claim_holds_its_gpus_and_lets_them_go(host: HipHost) -> None:
    code = """
owner = safe_gpu.claim_gpus(2, timeout=0, affinity=None)
out["taken"], out["set"] = owner.devices_taken, variables()
out["free"] = safe_gpu.get_free_gpus()
proc = os.environ["SAFE_GPU_FSROOT"] + f"/sys/class/kfd/kfd/proc/{os.getpid()}/vram_"
out["held"] = [n for n in range(8) if os.path.exists(proc + str(100 + n))]
safe_gpu.release_gpus()
out["after"] = variables()
"""
    found = run(host, code)
    assert found["taken"] == found["held"] == [0, 1]
    assert found["set"] == [f"{host.uuids[0]},{host.uuids[1]}", "0,1", "0,1"]
    assert found["free"] == ["2", "3", "4", "5", "6", "7"]
    assert found["after"] == [None, None, None]
    assert host.users() == {}


@pytest.mark.parametrize(
    ("environment", "taken"),
    [
        ({"ROCR_VISIBLE_DEVICES": "5,3"}, [3]),
        ({"HIP_VISIBLE_DEVICES": "6"}, [6]),
        ({"ROCR_VISIBLE_DEVICES": "5,3", "HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, [3]),
    ],
)
def test_inherited_variables_come_back(host: HipHost, environment: dict[str, str], taken: list[int]) -> None:
    code = 'out["taken"] = claim(1); out["set"] = variables(); safe_gpu.release_gpus(); out["after"] = variables()'
    found = run(host, code, **environment)
    assert found["taken"] == taken
    assert found["set"] == [host.uuids[taken[0]], "0", "0"]
    assert found["after"] == [environment.get(name) for name in VARIABLES]


def test_hip_initialised_before_the_claim(host: HipHost) -> None:
    error, message = run(host, 'initialize(); out["error"] = claim(1)')["error"]
    assert error == "CudaInitializedError"
    assert "HIP is already initialised in this process and sees 8 GPU(s)" in message
    assert run(host, 'initialize(); out["taken"] = claim(2)', ROCR_VISIBLE_DEVICES="5,3")["taken"] == [5, 3]


def test_a_second_claim_is_of_the_same_gpus(host: HipHost) -> None:
    code = """
out["first"] = claim(2); safe_gpu.release_gpus()
out["more"] = claim(3)
out["second"] = claim(2)
"""
    found = run(host, code)
    assert found["first"] == found["second"] == [0, 1]
    assert found["more"][0] == "CudaInitializedError"
    assert "(HipPlaceholder)" in found["more"][1]


def test_another_device_than_the_claimed_one_is_caught(host: HipHost) -> None:
    """GPUs without a UUID are named by index, and HIP has another order than the kernel."""
    for file in host.kfd.glob("topology/nodes/*/properties"):
        file.write_text(re.sub("unique_id .*", "unique_id 0", file.read_text()))
    assert run(host, 'out["taken"] = claim(1); out["set"] = variables(); safe_gpu.release_gpus()') == {
        "taken": [0],
        "set": ["0", "0", "0"],
    }
    host.uuids = ["GPU-XX"] * 8
    host.describe(order=[7, 6, 5, 4, 3, 2, 1, 0])
    error, message = run(host, 'out["error"] = claim(1)')["error"]
    assert error == "WrongDeviceError"
    assert "HIP device 0 is /0000:c8:00.0, but GPU 0 (AMD-0000:c1:00.0-0) was claimed" in message


def test_hip_refuses(host: HipHost) -> None:
    host.fail("hipMalloc", 2)
    error, message = run(host, 'out["error"] = claim(1)')["error"]
    assert error == "PlaceholderError"
    assert "hipMalloc failed with hipErrorOutOfMemory (2)" in message
    assert "HipPlaceholder" in message


def test_a_host_without_hip(host: HipHost, tmp_path: Path) -> None:
    found = run(
        host,
        'out["error"] = claim(1); out["leased"] = claim(1, safe_gpu.NoPlaceholder())',
        LD_LIBRARY_PATH=str(without_hip(tmp_path)),
    )
    assert found["error"][0] == "NoDriverError"
    assert "HIP" in found["error"][1]
    assert found["leased"] == [0]


def test_a_stranger_keeps_a_gpu(host: HipHost) -> None:
    host.process(4_000_000, queues=(100,))
    host.process(4_000_001, vram_102=1 << 20)
    assert run(host, 'out["taken"] = claim(3)')["taken"] == [1, 3, 4]
