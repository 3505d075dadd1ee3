"""Two shares on one real card: side by side, with and without the limit of MPS."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("exclusive")]

HOLD = "owner = claim(uuid, share='2GiB'); say(owner.share); listen()"
# Two blocks of 1.5 GiB are more than a share of 2 GiB.
ALLOCATE = """
import ctypes
owner = claim(uuid, share='2GiB')
library = ctypes.CDLL("libcuda.so.1")
held = [ctypes.c_uint64(), ctypes.c_uint64()]
def error(call, *arguments):
    return getattr(library, call)(*arguments)
context = ctypes.c_void_p()
assert error("cuInit", 0) == 0
assert error("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0) == 0
assert error("cuCtxSetCurrent", context) == 0
say(*(error("cuMemAlloc_v2", ctypes.byref(one), ctypes.c_size_t(3 << 29)) for one in held))
listen()
"""
OUT_OF_MEMORY = "2"


@pytest.fixture
def mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MPS for this test alone."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or os.geteuid() != 0:
        pytest.skip("needs nvidia-cuda-mps-control and root")
    for name in ("PIPE", "LOG"):
        monkeypatch.setenv(f"CUDA_MPS_{name}_DIRECTORY", str(tmp_path / name.lower()))
        (tmp_path / name.lower()).mkdir()
    subprocess.run([control, "-d"], check=True, timeout=60)
    yield
    subprocess.run([control], input="quit\n", text=True, check=True, timeout=60)


def test_two_shares_stand_side_by_side(gpu: Any, claimer: Any) -> None:
    first, second = claimer(HOLD), claimer(HOLD)
    assert [first.hear(), second.hear()] == [str(2 << 30)] * 2
    gpu.expect(first.pid)
    gpu.expect(second.pid)
    whole = "try: claim(uuid, timeout=0)\nexcept safe_gpu.NotEnoughGpusError as err: say(err.verdicts[0].reason)"
    assert "shared by 2 claims" in claimer(whole).hear()


def test_without_mps_the_driver_allows_more(gpu: Any, claimer: Any) -> None:
    assert claimer(ALLOCATE).hear() == "0 0"


def test_with_mps_the_driver_refuses_more(gpu: Any, mps: None, claimer: Any) -> None:
    assert claimer(ALLOCATE).hear() == f"0 {OUT_OF_MEMORY}"
