"""HIP asked through a fake libamdhip64, in processes of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import cuda_host
from support.vendor_hosts import HipHost, without_hip


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> HipHost:
    return HipHost(tmp_path, build_library("hip.c", "libamdhip64.so"), count=2)


def run(host: HipHost, code: str, **environment: str) -> Any:
    return cuda_host.run(f"import ctypes\n{code}", {**host.env, **environment})


def shown(host: HipHost, number: int) -> str:
    return f"{host.uuids[number]}/0000:{0xC1 + number:02x}:00.0"


def test_loading_does_not_initialise(host: HipHost) -> None:
    assert run(host, "HIP.load(); result = [HIP.visible_if_initialized(), HIP.shown_at(0)]") == [None, None]


def test_variables_count_at_first_use_only(host: HipHost) -> None:
    code = """
library = HIP.load()
os.environ["ROCR_VISIBLE_DEVICES"] = "1,0"
library.initialize()
os.environ["ROCR_VISIBLE_DEVICES"] = "0"
result = [HIP.visible_if_initialized(), HIP.shown_at(1), HIP.shown_at(2)]
"""
    assert run(host, code) == [[shown(host, 1), shown(host, 0)], shown(host, 0), ""]


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


def test_a_forked_child_is_told(host: HipHost) -> None:
    error, message = run(host, "HIP.hold(0)" + cuda_host.in_child("HIP.visible_if_initialized()"))
    assert error == "CudaInitializedError"
    assert "spawn" in message


def test_an_open_device_without_hip(host: HipHost) -> None:
    code = 'os.open(os.environ["SAFE_GPU_FSROOT"] + "/dev/kfd", os.O_RDWR); result = HIP.visible_if_initialized()'
    error, message = run(host, code)
    assert error == "CudaInitializedError"
    assert "/dev/kfd" in message


@pytest.mark.parametrize(("variable", "value"), [("ROCR_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "1")])
def test_a_child_is_asked(host: HipHost, variable: str, value: str) -> None:
    code = f"result = [HIP.visible_in_child({{**os.environ, '{variable}': '{value}'}}), HIP.visible_if_initialized()]"
    assert run(host, code) == [[shown(host, int(value))] if value else [], None]


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
    assert error == "NoDriverError"
    assert "libamdhip64.so" in message
