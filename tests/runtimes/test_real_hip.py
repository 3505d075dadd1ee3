"""The real HIP runtime, on a machine without AMD GPUs: it loads, and finds none.

SAFE_GPU_REQUIRE_REAL makes its absence a failure.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gpus import PACKAGE_ROOT, run_python
from support.vendor_hosts import KfdHost

from safe_gpu.runtimes.hip import HIP

REQUIRED = os.environ.get("SAFE_GPU_REQUIRE_REAL") == "1"  # read here, as tests run without these variables

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
    links = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd") if number not in "012"
             and os.path.lexists(f"/proc/self/fd/{number}")]
    return [link for link in links if "kfd" in link or "dri" in link]
out = {}
"""


def lacking() -> str:
    """Why there is nothing to test here, or ""."""
    if os.path.exists("/dev/kfd"):
        return "this machine has AMD GPUs"
    for file in HIP.names:
        # In a child process: a library that is loaded here would stay for the tests that follow.
        probe = [sys.executable, "-S", "-c", f"import ctypes; ctypes.CDLL({file!r})"]
        if subprocess.run(probe, capture_output=True, timeout=60).returncode == 0:
            return ""
    return "needs the HIP runtime (Debian: libamdhip64-5)"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    reason = lacking()
    if reason and REQUIRED:
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


def run(code: str, **environment: str) -> Any:
    """What `code` leaves in `out`, run in a process that has not touched HIP."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **environment}
    output = run_python("-c", f"{PRELUDE}\n{code}\nprint(json.dumps(out))", env=environment, timeout=120)
    return json.loads(output.splitlines()[-1])


def test_loading_neither_initialises_nor_opens_anything() -> None:
    code = 'out["before"] = opened(); HIP.load(); out["after"] = opened(); out["seen"] = HIP.visible_if_initialized()'
    assert run(code) == {"before": [], "after": [], "seen": None}


def test_it_has_every_function_that_is_called() -> None:
    names = (
        "hipGetDeviceCount", "hipDeviceGetPCIBusId", "hipDeviceGetUuid", "hipGetDevice", "hipSetDevice", "hipMalloc",
        "hipFree", "hipGetErrorName", "hipGetErrorString",
    )  # fmt: skip
    assert run(f"handle = HIP.load()._handle; out = [hasattr(handle, name) for name in {names}]") == [True] * len(names)


def test_there_is_no_device() -> None:
    code = """
library = HIP.load()
out["count"] = told(library.count)
out["shown"] = told(library.shown, 0)
out["placeholder"] = told(HIP.default_placeholder(), 0)
out["child"] = told(HIP.visible_in_child)
out["seen"] = [HIP.visible_if_initialized(), HIP.shown_at(0)]
"""
    found = run(code)
    assert found["count"] == ["CudaCallError", "hipGetDeviceCount failed with hipErrorNoDevice (100)"]
    assert found["shown"][1].startswith("hipDeviceGetPCIBusId failed with hipErrorInvalidDevice (101)")
    assert found["placeholder"][0] == "PlaceholderError"
    assert "hipErrorNoDevice (100)" in found["placeholder"][1]
    assert "groups that own them, render and video" in found["placeholder"][1]
    assert found["child"] == [], "no GPU is an answer, not an error"
    assert found["seen"] == [None, None], "nothing is open, so that nothing keeps a later claim from choosing"


def test_a_copy_that_is_loaded_already_is_used(tmp_path: Path) -> None:
    """As that of a PyTorch for ROCm; a second copy would be another HIP."""
    copy = tmp_path / "libamdhip64.so"
    shutil.copy(run("HIP.load(); out = HIP.mapped_files()[0]"), copy)
    code = """
theirs = ctypes.CDLL(os.environ["COPY"])
out["same"] = HIP.load()._handle._handle == theirs._handle
out["copies"] = sorted({line.split()[-1] for line in open("/proc/self/maps") if "libamdhip64" in line})
"""
    assert run(code, COPY=str(copy)) == {"same": True, "copies": [str(copy)]}


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
    found = run(code, SAFE_GPU_FSROOT=str(tmp_path), SAFE_GPU_DRIVER="kfd", SAFE_GPU_DIR=str(tmp_path / "state"))
    assert found["error"][0] == "PlaceholderError"
    assert "hipErrorNoDevice" in found["error"][1]
    assert "render and video" in found["error"][1]
    assert found["left"] == [None, None, None]
    assert found["claimed"] == [0]


def test_its_names_of_errors_are_those_that_are_explained() -> None:
    code = """
from safe_gpu.runtimes.causes import likely_cause as explain
names = [HIP.load().texts(code)[0] for code in (2, 98, 100, 101, 200, 209)]
out["names"] = names
out["unexplained"] = [name for name in names if not explain(RuntimeError(name))]
"""
    found = run(code)
    assert found["names"][0] == "hipErrorOutOfMemory"
    assert found["unexplained"] == []
