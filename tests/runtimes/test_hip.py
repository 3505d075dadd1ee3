"""HIP asked through a fake libamdhip64, and the real one on a machine without AMD GPUs: it loads, and finds none.

SAFE_GPU_REQUIRE_REAL makes the absence of the real one a failure.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.gpus import PACKAGE_ROOT, run_python
from support.real import unavailable
from support.vendor_hosts import HipHost, KfdHost, in_child, without_hip
from support.vendor_hosts import run as run_on


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> HipHost:
    return HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"), count=2)


def run(host: HipHost, code: str, **environment: str) -> Any:
    return run_on(f"import ctypes\n{code}", {**host.env, **environment})


def shown(host: HipHost, number: int) -> str:
    return f"{host.uuids[number]}/0000:{0xC1 + number:02x}:00.0"


def test_variables_count_at_first_use_only(host: HipHost) -> None:
    """Loading is none."""
    code = """
library = HIP.load()
result = [HIP.visible_if_initialized(), HIP.shown_at(0)]
os.environ["ROCR_VISIBLE_DEVICES"] = "1,0"
library.initialize()
os.environ["ROCR_VISIBLE_DEVICES"] = "0"
result += [HIP.visible_if_initialized(), HIP.shown_at(1), HIP.shown_at(2)]
"""
    assert run(host, code) == [None, None, [shown(host, 1), shown(host, 0)], shown(host, 0), ""]


def test_memory_shows_on_the_gpu_until_it_is_freed(host: HipHost) -> None:
    code = """
memory = HIP.hold(1)
file = os.environ["SAFE_GPU_FSROOT"] + f"/sys/class/kfd/kfd/proc/{os.getpid()}/vram_101"
held = int(open(file).read())
current = ctypes.c_int(-1)
HIP.load().call("hipGetDevice", ctypes.byref(current))
memory.release(); memory.release()
result = [memory.uuid, held > 0, int(open(file).read()), current.value]
"""
    assert run(host, code) == [shown(host, 1), True, 0, 0]


def test_whoever_has_started_is_told(host: HipHost) -> None:
    """A forked child of a process that used HIP, and a process that has the device open without HIP."""
    device = 'os.open(os.environ["SAFE_GPU_FSROOT"] + "/dev/kfd", os.O_RDWR); result = HIP.visible_if_initialized()'
    forked = "HIP.hold(0)" + in_child("HIP.visible_if_initialized()")
    for code, words in ((forked, "spawn"), (device, "/dev/kfd")):
        error, message = run(host, code)
        assert (error, words in message) == ("CudaInitializedError", True)


def test_a_child_is_asked(host: HipHost) -> None:
    for variable, value, answer in ("ROCR_VISIBLE_DEVICES", "", []), ("HIP_VISIBLE_DEVICES", "1", [shown(host, 1)]):
        asked = f"HIP.visible_in_child({{**os.environ, '{variable}': '{value}'}})"
        assert run(host, f"result = [{asked}, HIP.visible_if_initialized()]") == [answer, None]


def test_a_library_without_uuids(host: HipHost, build_library: Callable[..., Path]) -> None:
    host.library = build_library("hip.c", "libamdhip64.so", "-DOLD")
    code = """
from safe_gpu.drivers.kfd import KfdDriver
gpus = KfdDriver().snapshot().gpus
HIP.is_same("", gpus[0])
result = [[HIP.is_same(one, gpu) for gpu in gpus] for one in HIP.visible_in_child()]
"""
    assert run(host, code) == [[True, False], [False, True]]


def test_no_library(host: HipHost, tmp_path: Path) -> None:
    error, message = run(host, "HIP.load()", LD_LIBRARY_PATH=str(without_hip(tmp_path)))
    assert (error, "libamdhip64.so" in message) == ("NoDriverError", True)


# The real one

PRELUDE = """
import ctypes, json, os, sys
from safe_gpu.errors import SafeGpuError
from safe_gpu.runtimes.hip import HIP
def told(call, *arguments):
    try:
        return call(*arguments)
    except SafeGpuError as err:
        return [type(err).__name__, str(err)]
def opened():
    links = filter(os.path.islink, (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")))
    return [link for link in map(os.readlink, links) if "kfd" in link or "dri" in link]
out = {}
"""


@pytest.fixture(scope="module")
def real_hip() -> None:
    if os.path.exists("/dev/kfd"):
        unavailable("this machine has AMD GPUs")
    # In child processes: a library that is loaded here would stay for the tests that follow.
    probes = [[sys.executable, "-S", "-c", f"import ctypes; ctypes.CDLL({file!r})"] for file in api.HIP.names]
    if all(subprocess.run(probe, capture_output=True, timeout=60).returncode for probe in probes):
        unavailable("needs the HIP runtime (Debian: libamdhip64-5)")


def of_real(code: str, **environment: str) -> Any:
    """What `code` leaves in `out`, run in a process that has not touched HIP."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **environment}
    output = run_python("-c", f"{PRELUDE}\n{code}\nprint(json.dumps(out))", env=environment, timeout=120)
    return json.loads(output.splitlines()[-1])


@pytest.mark.usefixtures("real_hip")
def test_the_real_one_loads_and_finds_no_device() -> None:
    """Loading neither initialises nor opens anything. It has all functions, and its errors are explained."""
    code = """
from safe_gpu.runtimes.causes import likely_cause
out["before"] = opened()
library = HIP.load()
out["loaded"] = [opened(), HIP.visible_if_initialized()]
called = ("hipGetDeviceCount", "hipDeviceGetPCIBusId", "hipDeviceGetUuid", "hipGetDevice", "hipSetDevice", "hipMalloc",
          "hipFree", "hipGetErrorName", "hipGetErrorString")
out["lacks"] = [name for name in called if not hasattr(library._handle, name)]
out["count"] = told(library.count)
out["shown"] = told(library.shown, 0)
out["placeholder"] = told(HIP.default_placeholder(), 0)
out["child"] = told(HIP.visible_in_child)
out["seen"] = [HIP.visible_if_initialized(), HIP.shown_at(0)]
out["names"] = [library.texts(code)[0] for code in (2, 98, 100, 101, 200, 209)]
out["unexplained"] = [name for name in out["names"] if not likely_cause(RuntimeError(name))]
"""
    found = of_real(code)
    assert (found["before"], found["loaded"], found["lacks"]) == ([], [[], None], [])
    assert found["count"] == ["CudaCallError", "hipGetDeviceCount failed with hipErrorNoDevice (100)"]
    assert found["shown"][1].startswith("hipDeviceGetPCIBusId failed with hipErrorInvalidDevice (101)")
    assert found["placeholder"][0] == "PlaceholderError"
    assert "hipErrorNoDevice (100)" in found["placeholder"][1]
    assert "groups that own them, render and video" in found["placeholder"][1]
    assert found["child"] == [], "no GPU is an answer, not an error"
    assert found["seen"] == [None, None], "nothing is open, so that nothing keeps a later claim from choosing"
    assert (found["names"][0], found["unexplained"]) == ("hipErrorOutOfMemory", [])


@pytest.mark.usefixtures("real_hip")
def test_a_copy_that_is_loaded_already_is_used(tmp_path: Path) -> None:
    """As that of a PyTorch for ROCm; a second copy would be another HIP."""
    copy = tmp_path / "libamdhip64.so"
    shutil.copy(of_real("HIP.load(); out = HIP.mapped_files()[0]"), copy)
    code = """
theirs = ctypes.CDLL(os.environ["COPY"])
out["same"] = HIP.load()._handle._handle == theirs._handle
out["copies"] = sorted({line.split()[-1] for line in open("/proc/self/maps") if "libamdhip64" in line})
"""
    assert of_real(code, COPY=str(copy)) == {"same": True, "copies": [str(copy)]}


@pytest.mark.usefixtures("real_hip")
def test_a_claim_of_a_gpu_that_hip_does_not_see(tmp_path: Path) -> None:
    """The kernel lists a GPU, and HIP may not open it, as for a user outside the groups render and video."""
    host = KfdHost(tmp_path)
    host.gpu(0xC1, 101, int.from_bytes(os.urandom(7), "big") + 1)
    code = """
import safe_gpu
out["error"] = told(lambda: safe_gpu.claim_gpus(1, timeout=0, affinity=None))
out["left"] = [os.environ.get(name) for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")]
owner = safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), timeout=0, affinity=None)
out["claimed"] = owner.devices_taken
"""
    found = of_real(code, SAFE_GPU_FSROOT=str(tmp_path), SAFE_GPU_DRIVER="kfd", SAFE_GPU_DIR=str(tmp_path / "state"))
    error, message = found["error"]
    assert (error, "hipErrorNoDevice" in message, "render and video" in message) == ("PlaceholderError", True, True)
    assert (found["left"], found["claimed"]) == ([None, None, None], [0])
