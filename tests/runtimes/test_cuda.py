"""The CUDA driver through ctypes, against a fake libcuda.so.1, in new processes: initialisation cannot be undone."""

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import api, forks
from support.vendor_hosts import INITIALIZE, M0, MAP, A, B, C, Host, broken_library, in_child, run


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> Host:
    return Host(tmp_path, build_library("cuda.c", "libcuda.so.1"))


# Is CUDA initialised?


def test_neither_mapping_libcuda_nor_asking_initializes_it(host: Host) -> None:
    """Asking imports no ctypes, maps no libcuda."""
    asked = "CUDA.visible_if_initialized(), CUDA.shown_at(0)"
    assert host.run(f"result = [{asked}, 'ctypes' in sys.modules]") == [None, None, False]
    assert host.run(f"import ctypes; {asked}; result = 'libcuda' in open('/proc/self/maps').read()") is False
    host.set_options("log=1")
    for mapped in (f"{MAP}; assert lib.cuDeviceGet(0, 0) == 3", "CUDA.load()"):
        assert host.run(f"{mapped}; result = [{asked}]") == [None, None]
    assert "cuDeviceGetCount" in host.calls()
    assert "cuInit" not in host.calls()


@pytest.mark.parametrize(
    ("variables", "seen"),
    [({}, [B, C, A]), ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [A, B, C]), ({"CUDA_VISIBLE_DEVICES": "2,1"}, [A, C])],
)
def test_initialized_cuda_tells_uuids_in_cuda_order(host: Host, variables: dict[str, str], seen: list[str]) -> None:
    code = "result = [CUDA.visible_if_initialized(), [CUDA.shown_at(number) for number in range(-1, 4)]]"
    ordinals = ["", *seen, "", ""][:5]
    assert host.run(f"{INITIALIZE}; {code}", **variables) == [seen, ordinals]


def test_when_cuda_counts_as_initialized(host: Host) -> None:
    """What it shows is frozen from then on. A start that found no GPU was none.

    libcuda comes with the process, as it does under a C extension that links it; a constructor would call cuInit.
    """
    code = "result = ['ctypes' in sys.modules, CUDA.is_mapped()]"
    assert host.run(code, LD_PRELOAD=str(host.library)) == [False, True]
    code = "os.environ['CUDA_VISIBLE_DEVICES'] = '0'; lib.cuInit(0); result = CUDA.visible_if_initialized()"
    assert host.run(f"{INITIALIZE}; {code}", CUDA_VISIBLE_DEVICES="1,2") == [C, A]
    code = f"{MAP}; result = [lib.cuInit(0), CUDA.visible_if_initialized()]"
    assert host.run(code, CUDA_VISIBLE_DEVICES="") == [100, None]


class Answers(api.cuda.CudaLibrary):
    """A libcuda whose every call fails with one code; None: it is not mapped."""

    def __init__(self, code: int | None) -> None:
        super().__init__()
        self.is_mapped = lambda: code is not None  # type: ignore[method-assign]
        self.ask = lambda name, *arguments: code or 0  # type: ignore[method-assign]


def test_answers_that_mean_uninitialized_no_gpu_or_trouble() -> None:
    for code, visible, uuid in ((3, None, None), (34, None, None), (100, (), "")):
        assert (Answers(code).visible_if_initialized(), Answers(code).shown_at(0)) == (visible, uuid)
    with pytest.raises(api.CudaInitializedError, match="999") as caught:
        Answers(999).visible_if_initialized()
    assert caught.value.visible == ()
    assert Answers(999).shown_at(0) is None


def test_pytorch_is_asked_where_libcuda_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert Answers(None).visible_if_initialized() is None
    for started, forked, words in ((True, False, "PyTorch has CUDA initialised"), (False, True, "spawn")):
        torch.cuda = types.SimpleNamespace(is_initialized=lambda: started, _is_in_bad_fork=lambda: forked)  # noqa: B023
        with pytest.raises(api.CudaInitializedError, match=words) as caught:
            Answers(None).visible_if_initialized()
        assert caught.value.visible == ()
    torch.cuda = types.SimpleNamespace(is_initialized=lambda: False, _is_in_bad_fork=lambda: False)
    assert Answers(None).visible_if_initialized() is None


# Forked children


def test_child_forked_after_safe_gpu_initialized_cuda_is_told_to_spawn(host: Host) -> None:
    for woken, asked in ("CUDA.hold(0).release()", "CUDA.visible_if_initialized()"), ("CUDA.hold(0)", "CUDA.hold(0)"):
        name, message = host.run(f"held = {woken}" + in_child(asked))
        assert (name, "spawn" in message) == ("CudaInitializedError", True)


def test_child_forked_before_cuda_is_initialized_is_free_to_start(host: Host) -> None:
    assert host.run(MAP + in_child("CUDA.visible_if_initialized()")) is None
    assert host.run(MAP + in_child("CUDA.hold(0).uuid")) == B


def test_inherited_device_that_only_cuda_opens_gives_the_fork_away(monkeypatch: pytest.MonkeyPatch) -> None:
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia-uvm" if "/fd/" in path else readlink(path))
    assert Answers(3).visible_if_initialized() is None, "no process inherits by a fork what it has opened itself"
    assert forks.json_from_child(Answers(3).visible_if_initialized)[0] == "CudaInitializedError"


def test_a_driver_that_starts_in_no_process_is_not_taken_for_a_fork(host: Host) -> None:
    host.set_options("cuda_init_error=3")
    assert host.run(f"{MAP}; {in_child('CUDA.visible_if_initialized()')}") is None
    name, message = host.run(f"{MAP}; {in_child('CUDA.hold(0).uuid')}")
    assert name == "CudaCallError"
    assert "cuInit failed with CUDA_ERROR_NOT_INITIALIZED (3)" in message


# Asking in a child process


def test_a_child_sees_what_cuda_shows_in_its_environment(host: Host) -> None:
    """This process may have CUDA initialised; the child starts afresh."""
    code = "result = [CUDA.visible_in_child(), CUDA.visible_if_initialized()]"
    assert host.run(code) == [[B, C, A], None]
    assert host.run(code, CUDA_VISIBLE_DEVICES="") == [[], None]
    code = "result = CUDA.visible_in_child({**os.environ, 'CUDA_VISIBLE_DEVICES': '1'})"
    assert host.run(f"{INITIALIZE}; {code}", CUDA_VISIBLE_DEVICES="2") == [C]


def test_a_child_that_hangs_is_given_up_and_killed(host: Host) -> None:
    host.set_options("cuda_init_ms=600000")
    code = """
import subprocess
started, start = [], subprocess.Popen
subprocess.Popen = lambda *args, **kwargs: started.append(start(*args, **kwargs)) or started[0]
try:
    CUDA.patience = 0.5
    CUDA.visible_in_child()
finally:
    assert started[0].wait(10) == -9
"""
    name, message = host.run(code)
    assert (name, "0.5 s" in message, "persistence mode" in message) == ("NoDriverError", True, True)


def test_no_child_and_no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(api.NoDriverError, match=r"libcuda\.so\.1") as caught:
        api.CUDA.visible_in_child({"LD_LIBRARY_PATH": str(broken_library(tmp_path))})
    assert caught.value.driver == "cuda"
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(api.NoDriverError, match="/nonexistent/python"):
        api.CUDA.visible_in_child()


# Names and errors


def test_same_device() -> None:
    old_name = f"MIG-{A}/7/0"
    same = [(A, A), (A, A.upper().replace("GPU", "gpu")), (M0, M0), (M0.replace("MIG-", "GPU-"), M0), (A, old_name)]
    others = [(A, B), (B, old_name), ("", A), ("", "")]
    assert [api.cuda.same_device(*pair) for pair in same + others] == [True] * 5 + [False] * 4


# The real thing


@pytest.mark.gpu
class TestRealDriver:
    @pytest.fixture(autouse=True)
    def _needs_a_gpu(self) -> None:
        try:
            if not api.CUDA.visible_in_child():
                pytest.skip("needs a real NVIDIA GPU: CUDA sees none")
        except api.NoDriverError as err:
            pytest.skip(f"needs a real NVIDIA GPU: {err}")

    def run(self, code: str) -> Any:
        return run(code, dict(os.environ))

    def test_initialized_only_after_the_context(self) -> None:
        before, during, uuid, after = self.run(
            "CUDA.load(); before = CUDA.visible_if_initialized(); held = CUDA.hold(0);"
            "during = CUDA.visible_if_initialized(); held.release();"
            "result = [before, during, held.uuid, CUDA.visible_if_initialized()]"
        )
        assert before is None
        assert during[0] == uuid
        assert after == during

    def test_context_takes_memory_and_gives_it_back(self) -> None:
        before, during, after = self.run(
            """
import subprocess, time
def used():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", uuid]
    return int(subprocess.check_output(query, text=True))
uuid = CUDA.visible_in_child()[0]
before = used()
held = CUDA.hold(0)
during = used()
held.release()
deadline = time.monotonic() + 10
while used() >= during and time.monotonic() < deadline:
    pass
result = [before, during, used()]
"""
        )
        assert during > before
        assert after < during

    def test_forked_child_is_told_to_spawn_whoever_initialized_cuda(self) -> None:
        for initialize in (INITIALIZE, "held = CUDA.hold(0)"):
            name, message = self.run(initialize + in_child("CUDA.visible_if_initialized()"))
            assert name == "CudaInitializedError"
            assert "spawn" in message


def balance(host: Host) -> tuple[int, ...]:
    """How often contexts and memory were taken and given back."""
    names = ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuMemAlloc_v2", "cuMemFree_v2")
    return tuple(host.calls().count(name) for name in names)


def test_context_shows_on_its_gpu_while_it_is_held(host: Host) -> None:
    code = """
held = CUDA.hold(1)
shown = os.path.exists(f"{os.environ['FAKE_GPU_DIR']}/procs/{held.uuid}/{os.getpid()}")
held.release()
held.release()
result = [held.uuid, held.device_no, shown]
"""
    host.set_options("log=1")
    assert host.run(code, CUDA_VISIBLE_DEVICES="0,2") == [A, 1, True]
    assert host.holders() == []
    assert balance(host) == (1, 1, 1, 1)


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
lib.cuCtxPushCurrent_v2(other.allocation[1])
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
    name, message = host.run(f"CUDA.hold({device_no})")
    assert name == "CudaCallError"
    assert f"({code})" in message
    retained, released, _, freed = balance(host)
    assert (retained - (code == 46), freed) == (released, 0)
    assert host.holders() == []


def test_exclusive_process_mode_refuses_the_second_process(host: Host) -> None:
    second = "from safe_gpu.runtimes.cuda import CUDA; CUDA.hold(0)"
    code = f"""
held = CUDA.hold(0)
import subprocess
child = subprocess.run([sys.executable, '-S', '-c', {second!r}], capture_output=True, text=True)
result = [held.uuid, child.stderr.splitlines()[-1]]
"""
    uuid, message = host.run(code, CUDA_VISIBLE_DEVICES=C)
    assert (uuid, "CUDA_ERROR_DEVICE_UNAVAILABLE (46)" in message) == (C, True)
    assert host.run("result = CUDA.hold(0).uuid", CUDA_VISIBLE_DEVICES=C) == C  # the dead do not count


def test_forked_child_leaves_its_parents_context_alone(host: Host) -> None:
    code = "held = CUDA.hold(0)" + in_child("held.release()")
    look = "result = [result, os.listdir(os.environ['FAKE_GPU_DIR'] + '/procs/' + held.uuid).count(str(os.getpid()))]"
    assert host.run(code + look) == [None, 1]


def test_older_driver_without_versioned_functions(host: Host, build_library: Callable[..., Path]) -> None:
    host.library = build_library("cuda.c", "libcuda.so.1", "-DOLD")
    assert host.run("held = CUDA.hold(0); held.release(); result = held.uuid") == B
    assert host.holders() == []


def test_older_driver_without_versioned_functions_and_none(
    host: Host, tmp_path: Path, build_library: Callable[..., Path]
) -> None:
    host.library = build_library("cuda.c", "libcuda.so.1", "-DOLD")
    assert host.run("held = CUDA.hold(0); held.release(); result = held.uuid") == B
    assert host.holders() == []
    name, message = host.run("CUDA.hold(9)")
    assert (name, message) == ("CudaCallError", "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE (101)")
    name, message = host.run("CUDA.hold(0)", LD_LIBRARY_PATH=str(broken_library(tmp_path)))
    assert (name, "NVIDIA_DRIVER_CAPABILITIES" in message) == ("NoDriverError", True)
