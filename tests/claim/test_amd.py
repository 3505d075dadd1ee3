"""Claims of AMD GPUs on a fake libamdhip64 over a saved sysfs tree; simulated hosts are in tests/cli/test_amd.py."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.forks import VARIABLES, forked
from support.hip_host import HipHost, without_hip

INITIALIZE = "ctypes.CDLL('libamdhip64.so').hipGetDeviceCount(ctypes.byref(ctypes.c_int())); "


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> HipHost:
    return HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"))


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
    found = forked(host, code)
    assert found["taken"] == found["held"] == [0, 1]
    assert found["set"] == dict(zip(VARIABLES, ["0,1", f"{host.uuids[0]},{host.uuids[1]}", "0,1"], strict=False))
    assert found["free"] == ["2", "3", "4", "5", "6", "7"]
    assert found["after"] == {}
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
    found = forked(host, code, **environment)
    assert found["taken"] == taken
    assert found["set"] == dict(zip(VARIABLES, ["0", host.uuids[taken[0]], "0"], strict=False))
    assert found["after"] == environment


def test_hip_initialised_before_the_claim(host: HipHost) -> None:
    error, message, _ = forked(host, INITIALIZE + 'out["error"] = claim(1)')["error"]
    assert error == "CudaInitializedError"
    assert "HIP is already initialised in this process and sees 8 GPU(s)" in message
    assert forked(host, INITIALIZE + 'out["taken"] = claim(2)', ROCR_VISIBLE_DEVICES="5,3")["taken"] == [5, 3]


def test_another_device_than_the_claimed_one_is_caught(host: HipHost) -> None:
    """GPUs without a UUID are named by index, and HIP has another order than the kernel."""
    for file in host.kfd.glob("topology/nodes/*/properties"):
        file.write_text(re.sub("unique_id .*", "unique_id 0", file.read_text()))
    assert forked(host, 'out["taken"] = claim(1); out["set"] = variables(); safe_gpu.release_gpus()') == {
        "taken": [0],
        "set": dict.fromkeys(VARIABLES[:3], "0"),
    }
    host.uuids = ["GPU-XX"] * 8
    host.describe(order=[7, 6, 5, 4, 3, 2, 1, 0])
    error, message, _ = forked(host, 'out["error"] = claim(1)')["error"]
    assert error == "WrongDeviceError"
    assert "HIP device 0 is /0000:c8:00.0, but GPU 0 (AMD-0000:c1:00.0-0) was claimed" in message


def test_hip_refuses(host: HipHost) -> None:
    host.fail("hipMalloc", 2)
    error, message, _ = forked(host, 'out["error"] = claim(1)')["error"]
    assert error == "PlaceholderError"
    assert "hipMalloc failed with hipErrorOutOfMemory (2)" in message
    assert "HipPlaceholder" in message


def test_a_host_without_hip(host: HipHost, tmp_path: Path) -> None:
    found = forked(
        host,
        'out["error"] = claim(1); out["claimed"] = claim(1, safe_gpu.NoPlaceholder())',
        LD_LIBRARY_PATH=str(without_hip(tmp_path)),
    )
    assert found["error"][0] == "NoDriverError"
    assert "HIP" in found["error"][1]
    assert found["claimed"] == [0]


def test_a_stranger_keeps_a_gpu(host: HipHost) -> None:
    host.process(4_000_000, queues=(100,))
    host.process(4_000_001, vram_102=1 << 20)
    assert forked(host, 'out["taken"] = claim(3)')["taken"] == [1, 3, 4]
