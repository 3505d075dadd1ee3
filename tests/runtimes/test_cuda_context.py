"""The context that holds a GPU: what others see of it, and what is left when it goes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.cuda_host import A, B, C, Host, broken_library, in_child


def test_context_shows_on_its_gpu_while_it_is_held(host: Host) -> None:
    code = """
pid = os.getpid()
held = CUDA.hold(1)
during = [name for name in os.listdir(os.environ['FAKE_GPU_DIR'] + '/procs/' + held.uuid) if name[0] != '.']
held.release()
held.release()
result = [held.uuid, held.device_no, during == [str(pid)]]
"""
    host.set_options("log=1")
    assert host.run(code, CUDA_VISIBLE_DEVICES="0,2") == [A, 1, True]
    assert host.holders() == []
    assert balance(host) == (1, 1, 1, 1)


def balance(host: Host) -> tuple[int, int, int, int]:
    """How often contexts and memory were taken and given back."""
    calls = host.calls()
    names = ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuMemAlloc_v2", "cuMemFree_v2")
    return tuple(calls.count(name) for name in names)  # type: ignore[return-value]


def test_context_is_shared_with_who_else_retains_it(host: Host) -> None:
    code = """
first, second = CUDA.hold(0), CUDA.hold(0)
first.release()
held = os.listdir(os.environ['FAKE_GPU_DIR'] + '/procs/' + second.uuid)
second.release()
result = str(os.getpid()) in held
"""
    assert host.run(code) is True
    assert host.holders() == []


def test_current_context_of_the_thread_stays_what_it_was(host: Host) -> None:
    code = """
import ctypes
other = CUDA.hold(1)
lib = ctypes.CDLL('libcuda.so.1')
def current():
    context = ctypes.c_void_p()
    assert lib.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value
result = [current()]
lib.cuCtxPushCurrent_v2(other._held[1])
mine = current()
held = CUDA.hold(0)
result.append(current() == mine)
held.release()
result.append(current() == mine)
open(os.environ['FAKE_GPU_DIR'] + '/options', 'w').write('alloc_error=2')
try:
    CUDA.hold(0)
except CudaCallError as err:
    result.append([err.call, err.code, err.name, current() == mine])
"""
    assert host.run(code) == [None, True, True, ["cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", True]]


@pytest.mark.parametrize(
    ("option", "device_no", "code"),
    [("cuda_init_error=999", 0, 999), ("ctx_error=46", 0, 46), ("alloc_error=2", 0, 2), ("", 3, 101), ("", -1, 101)],
)
def test_failure_leaves_nothing_on_the_gpu(host: Host, option: str, device_no: int, code: int) -> None:
    host.set_options(option, "log=1")
    result = host.run(
        f"""
try:
    CUDA.hold({device_no})
except CudaCallError as err:
    result = [err.code, bool(err.call), os.listdir(os.environ['FAKE_GPU_DIR'])]
"""
    )
    assert result[:2] == [code, True]
    retained, released, _, freed = balance(host)
    assert (retained - (code == 46), freed) == (released, 0)
    assert host.holders() == []


def test_exclusive_process_mode_refuses_the_second_process(host: Host) -> None:
    second = f"result = [CUDA.hold(0).uuid]  # on {C}"
    code = """
held = CUDA.hold(0)
import subprocess
script = "from safe_gpu.runtimes.cuda import CUDA; CUDA.hold(0)"
child = subprocess.run([sys.executable, '-S', '-c', script], capture_output=True, text=True)
result = [held.uuid, child.stderr.splitlines()[-1]]
"""
    uuid, message = host.run(code, CUDA_VISIBLE_DEVICES=C)
    assert uuid == C
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE (46)" in message
    assert host.run(second, CUDA_VISIBLE_DEVICES=C) == [C]  # the dead do not count


def test_forked_child_leaves_its_parents_context_alone(host: Host) -> None:
    code = "held = CUDA.hold(0)" + in_child("held.release()")
    look = "result = [result, os.listdir(os.environ['FAKE_GPU_DIR'] + '/procs/' + held.uuid).count(str(os.getpid()))]"
    assert host.run(code + look) == [None, 1]


def test_older_driver_without_versioned_functions(host: Host, build_library: Callable[..., Path]) -> None:
    host.library = build_library("cuda.c", "libcuda.so.1", "-DOLD")
    assert host.run("held = CUDA.hold(0); held.release(); result = held.uuid") == B
    assert host.holders() == []
    name, message = host.run("CUDA.hold(9)")
    assert (name, message) == ("CudaCallError", "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE (101)")


def test_missing_libcuda_names_the_way_out(host: Host, tmp_path: Path) -> None:
    name, message = host.run("CUDA.hold(0)", LD_LIBRARY_PATH=str(broken_library(tmp_path)))
    assert name == "NoDriverError"
    assert "NVIDIA_DRIVER_CAPABILITIES" in message
