"""The CUDA driver through ctypes, against a fake libcuda.so.1, in processes of their own: waking up is for good."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from safe_gpu import cuda
from safe_gpu.errors import CudaInitializedError, NoDriverError

A, B, C = (f"GPU-00000000-0000-0000-0000-0000000000{end}" for end in ("a0", "b1", "b2"))
M0, M1 = (f"MIG-11111111-0000-0000-0000-00000000000{end}" for end in "01")

# A slow card first by bus id and two fast ones, one of them in exclusive process mode: the two orders differ.
MIXED = f"""\
uuid={A} name=NVIDIA_T4 bus=00000000:03:00.0 mem=16000000000 speed=1
uuid={B} name=NVIDIA_A100 bus=00000000:07:00.0 mem=80000000000 speed=9
uuid={C} name=NVIDIA_A100 bus=00000000:08:00.0 mem=80000000000 speed=9 mode=3
"""
SLICED = f"uuid={A} name=NVIDIA_H100 bus=00000000:03:00.0 mem=80000000000 mig=1 instances={M0},{M1}\n"

WAKE = "import ctypes; lib = ctypes.CDLL('libcuda.so.1'); assert lib.cuInit(0) == 0"
MAP = "import ctypes; lib = ctypes.CDLL('libcuda.so.1')"


def run(code: str, environment: dict[str, str]) -> Any:
    """What `code` leaves in `result`, run in a new process; an exception of ours arrives as [class, message]."""
    script = """
import json, os, sys
from safe_gpu import cuda
from safe_gpu.errors import SafeGpuError
result = None
try:
    exec(sys.argv[1])
except SafeGpuError as err:
    result = [type(err).__name__, str(err)]
print(json.dumps(result), flush=True)
"""
    environment = {**environment, "PYTHONPATH": str(Path(cuda.__file__).parents[1])}
    command = [sys.executable, "-S", "-c", script, code]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


class Host:
    """A host with fake GPUs, and Python processes on it."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.directory = directory
        self.library = library
        self.describe(MIXED)

    def describe(self, gpus: str) -> None:
        (self.directory / "gpus").write_text(gpus)

    def set_options(self, *lines: str) -> None:
        (self.directory / "options").write_text("".join(f"{line}\n" for line in lines))

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        place = {"LD_LIBRARY_PATH": str(self.library.parent), "FAKE_GPU_DIR": str(self.directory)}
        return {**kept, **place, **variables}

    def run(self, code: str, **variables: str) -> Any:
        """As the function, where libcuda is the fake one."""
        return run(code, self.environment(**variables))

    def holders(self) -> list[str]:
        """The processes that stand on a GPU, as UUID/PID."""
        return sorted(
            f"{file.parent.name}/{file.name}" for file in self.directory.glob("procs/*/[0-9]*") if file.is_file()
        )

    def calls(self) -> list[str]:
        """Every driver function called, with log=1."""
        log = self.directory / "cuda_calls"
        return [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def host(tmp_path: Path, build_library: Callable[..., Path]) -> Host:
    return Host(tmp_path, build_library("cuda.c", "libcuda.so.1"))


# ---------------------------------------------------------------------------------------------------------------------
# Is CUDA awake?


def test_asleep_where_nothing_mapped_libcuda(host: Host) -> None:
    assert host.run("result = [cuda.visible_if_awake(), cuda.uuid_of_ordinal(0), 'ctypes' in sys.modules]") == [
        None,
        None,
        False,
    ]


def test_asking_does_not_map_libcuda(host: Host) -> None:
    code = "import ctypes; cuda.visible_if_awake(); result = 'libcuda' in open('/proc/self/maps').read()"
    assert host.run(code) is False


def test_asleep_where_libcuda_is_mapped_only_and_never_woken_by_asking(host: Host) -> None:
    host.set_options("log=1")
    assert host.run(f"{MAP}; result = [cuda.visible_if_awake(), cuda.uuid_of_ordinal(0), lib.cuDeviceGet(0, 0)]") == [
        None,
        None,
        3,
    ]
    assert "cuDeviceGetCount" in host.calls()
    assert "cuInit" not in host.calls()


def test_mapping_libcuda_does_not_wake_it(host: Host) -> None:
    host.set_options("log=1")
    assert host.run("cuda.load(); result = cuda.visible_if_awake()") is None
    assert "cuInit" not in host.calls()


def test_awake_tells_uuids_in_cuda_order(host: Host) -> None:
    assert host.run(f"{WAKE}; result = cuda.visible_if_awake()") == [B, C, A]
    assert host.run(f"{WAKE}; result = cuda.visible_if_awake()", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [A, B, C]
    assert host.run(f"{WAKE}; result = cuda.visible_if_awake()", CUDA_VISIBLE_DEVICES="2,0") == [A, B]


def test_awake_is_noticed_before_anyone_has_imported_ctypes(host: Host) -> None:
    # libcuda comes with the process, as it does under a C extension that links it; a constructor would call cuInit.
    code = "result = ['ctypes' in sys.modules, cuda._mapped() is not None]"
    assert host.run(code, LD_PRELOAD=str(host.library)) == [False, True]


def test_visibility_is_frozen_once_awake(host: Host) -> None:
    code = f"{WAKE}; os.environ['CUDA_VISIBLE_DEVICES'] = '0'; lib.cuInit(0); result = cuda.visible_if_awake()"
    assert host.run(code, CUDA_VISIBLE_DEVICES="1,2") == [C, A]


def test_a_wake_up_that_found_no_gpu_left_cuda_asleep(host: Host) -> None:
    assert host.run(f"{MAP}; result = [lib.cuInit(0), cuda.visible_if_awake()]", CUDA_VISIBLE_DEVICES="") == [100, None]


class Answers:
    """A mapped libcuda whose every question fails with one code."""

    def __init__(self, code: int) -> None:
        self.code = code

    def uuids(self) -> tuple[str, ...]:
        raise cuda.CudaCallError(f"cuDeviceGetCount failed with {self.code}", code=self.code)

    def uuid(self, device_no: int) -> str:
        raise cuda.CudaCallError(f"cuDeviceGet failed with {self.code}", code=self.code)


@pytest.mark.parametrize(("code", "visible"), [(3, None), (34, None), (100, ())])
def test_answers_that_mean_asleep_or_no_gpu(
    monkeypatch: pytest.MonkeyPatch, code: int, visible: tuple[str, ...] | None
) -> None:
    monkeypatch.setattr(cuda, "_mapped", lambda: Answers(code))
    assert cuda.visible_if_awake() == visible


def test_cuda_in_trouble_is_not_taken_for_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_mapped", lambda: Answers(999))
    with pytest.raises(CudaInitializedError, match="999") as caught:
        cuda.visible_if_awake()
    assert caught.value.visible == ()


@pytest.mark.parametrize(("code", "uuid"), [(3, None), (999, None), (101, "")])
def test_uuid_of_an_ordinal_that_cannot_be_told(monkeypatch: pytest.MonkeyPatch, code: int, uuid: str | None) -> None:
    monkeypatch.setattr(cuda, "_mapped", lambda: Answers(code))
    assert cuda.uuid_of_ordinal(0) == uuid


def test_uuid_of_ordinals(host: Host) -> None:
    code = f"{WAKE}; result = [cuda.uuid_of_ordinal(number) for number in (0, 1, 2, -1)]"
    assert host.run(code, CUDA_VISIBLE_DEVICES="2,1") == [A, C, "", ""]


def test_mig_instance_has_its_own_uuid(host: Host) -> None:
    host.describe(SLICED)
    assert host.run(f"{WAKE}; result = cuda.visible_if_awake()", CUDA_VISIBLE_DEVICES=M1) == [M1]


def torch_that(**answers: object) -> types.ModuleType:
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(**{name: lambda value=value: value for name, value in answers.items()})  # type: ignore[attr-defined]
    return torch


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        (torch_that(is_initialized=True, _is_in_bad_fork=False), "PyTorch has CUDA initialised"),
        (torch_that(is_initialized=False, _is_in_bad_fork=True), "spawn"),
        (torch_that(is_initialized=False, _is_in_bad_fork=False), None),
        (torch_that(), None),
        (types.ModuleType("torch"), None),
        (MagicMock(), None),
    ],
)
def test_pytorch_is_asked_where_libcuda_says_nothing(
    monkeypatch: pytest.MonkeyPatch, torch: Any, message: str | None
) -> None:
    monkeypatch.setattr(cuda, "_mapped", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    if message is None:
        assert cuda.visible_if_awake() is None
    else:
        with pytest.raises(CudaInitializedError, match=message) as caught:
            cuda.visible_if_awake()
        assert caught.value.visible == ()


# ---------------------------------------------------------------------------------------------------------------------
# Forked children

IN_CHILD = """
out, into = os.pipe()
if os.fork() == 0:
    try:
        answer = {code}
    except SafeGpuError as err:
        answer = [type(err).__name__, str(err)]
    os.write(into, json.dumps(answer).encode())
    os._exit(0)
os.close(into)
os.wait()
result = json.loads(os.read(out, 65536))
"""


def in_child(code: str) -> str:
    return IN_CHILD.replace("{code}", code)


def test_child_forked_after_our_context_is_told_to_spawn(host: Host) -> None:
    name, message = host.run("held = cuda.PrimaryContext.retain(0)" + in_child("cuda.visible_if_awake()"))
    assert name == "CudaInitializedError"
    assert "spawn" in message


def test_child_forked_after_anyone_woke_cuda_cannot_hold_a_gpu_and_is_told_to_spawn(host: Host) -> None:
    name, message = host.run(WAKE + in_child("cuda.PrimaryContext.retain(0)"))
    assert name == "CudaInitializedError"
    assert "spawn" in message
    assert host.holders() == []


def test_child_forked_from_a_sleeping_process_is_free_to_start(host: Host) -> None:
    assert host.run(MAP + in_child("cuda.visible_if_awake()")) is None
    assert host.run(MAP + in_child("cuda.PrimaryContext.retain(0).uuid")) == B


def test_inherited_device_that_only_cuda_opens_gives_the_fork_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_mapped", lambda: Answers(3))
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia-uvm")
    with pytest.raises(CudaInitializedError, match="spawn"):
        cuda.visible_if_awake()


# ---------------------------------------------------------------------------------------------------------------------
# Asking in a child process


def test_child_process_sees_what_cuda_would_see(host: Host) -> None:
    code = "result = [cuda.visible_in_child(), cuda.visible_if_awake()]"
    assert host.run(code) == [[B, C, A], None]
    assert host.run(code, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="2,0") == [[C, A], None]
    assert host.run(code, CUDA_VISIBLE_DEVICES="") == [[], None]


def test_child_process_gets_the_environment_given(host: Host) -> None:
    code = "result = cuda.visible_in_child({**os.environ, 'CUDA_VISIBLE_DEVICES': '1'})"
    assert host.run(code, CUDA_VISIBLE_DEVICES="2") == [C]


def test_child_process_of_one_with_cuda_awake_starts_afresh(host: Host) -> None:
    code = f"{WAKE}; os.environ['CUDA_VISIBLE_DEVICES'] = '1'; result = cuda.visible_in_child()"
    assert host.run(code) == [C]


@pytest.mark.parametrize(
    ("options", "reason"), [(["cuda_init_error=999"], "CUDA_ERROR_UNKNOWN (999)"), (["cuda_init_error=803"], "803")]
)
def test_child_process_passes_the_reason_on(host: Host, options: list[str], reason: str) -> None:
    host.set_options(*options)
    name, message = host.run("result = cuda.visible_in_child()")
    assert name == "NoDriverError"
    assert reason in message


def test_child_process_without_libcuda(tmp_path: Path) -> None:
    with pytest.raises(NoDriverError, match=r"libcuda\.so\.1") as caught:
        cuda.visible_in_child({"LD_LIBRARY_PATH": str(broken_library(tmp_path))})
    assert caught.value.driver == "cuda"


def broken_library(directory: Path) -> Path:
    """A directory whose libcuda.so.1 cannot be loaded, on a machine with a driver too."""
    (directory / "libcuda.so.1").write_text("not a library")
    return directory


def test_child_process_that_hangs_is_given_up_and_killed(host: Host) -> None:
    host.set_options("cuda_init_ms=600000", "log=1")
    name, message = host.run(
        """
import subprocess
started = []
class Popen(subprocess.Popen):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        started.append(self)
subprocess.Popen = Popen
try:
    cuda.visible_in_child(timeout=0.5)
finally:
    assert started[0].wait(10) == -9
"""
    )
    assert name == "NoDriverError"
    assert "0.5 s" in message


def test_no_interpreter_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(NoDriverError, match="/nonexistent/python"):
        cuda.visible_in_child()


# ---------------------------------------------------------------------------------------------------------------------
# The primary context


def test_context_shows_on_its_gpu_while_it_is_held(host: Host) -> None:
    code = """
pid = os.getpid()
held = cuda.PrimaryContext.retain(1)
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
first, second = cuda.PrimaryContext.retain(0), cuda.PrimaryContext.retain(0)
first.release()
held = os.listdir(os.environ['FAKE_GPU_DIR'] + '/procs/' + second.uuid)
second.release()
result = str(os.getpid()) in held
"""
    assert host.run(code) is True
    assert host.holders() == []


def test_current_context_of_the_thread_stays_what_it_was(host: Host) -> None:
    code = """
other = cuda.PrimaryContext.retain(1)
import ctypes
lib = ctypes.CDLL('libcuda.so.1')
def current():
    context = ctypes.c_void_p()
    assert lib.cuCtxGetCurrent(ctypes.byref(context)) == 0
    return context.value
result = [current()]
lib.cuCtxPushCurrent_v2(other._context)
mine = current()
held = cuda.PrimaryContext.retain(0)
result.append(current() == mine)
held.release()
result.append(current() == mine)
open(os.environ['FAKE_GPU_DIR'] + '/options', 'w').write('alloc_error=2')
try:
    cuda.PrimaryContext.retain(0)
except cuda.CudaCallError as err:
    result.append([err.call, err.code, err.name, current() == mine])
"""
    assert host.run(code) == [None, True, True, ["cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY", True]]


@pytest.mark.parametrize(
    ("option", "device_no", "code"),
    [
        ("cuda_init_error=999", 0, 999),
        ("ctx_error=46", 0, 46),
        ("alloc_error=2", 0, 2),
        ("", 3, 101),
        ("", -1, 101),
    ],
)
def test_failure_leaves_nothing_on_the_gpu(host: Host, option: str, device_no: int, code: int) -> None:
    host.set_options(option, "log=1")
    result = host.run(
        f"""
try:
    cuda.PrimaryContext.retain({device_no})
except cuda.CudaCallError as err:
    result = [err.code, bool(err.call), os.listdir(os.environ['FAKE_GPU_DIR'])]
"""
    )
    assert result[:2] == [code, True]
    retained, released, _, freed = balance(host)
    assert (retained - (code == 46), freed) == (released, 0)
    assert host.holders() == []


def test_exclusive_process_mode_refuses_the_second_process(host: Host) -> None:
    second = f"result = [cuda.PrimaryContext.retain(0).uuid]  # on {C}"
    code = """
held = cuda.PrimaryContext.retain(0)
import subprocess
script = "from safe_gpu import cuda; cuda.PrimaryContext.retain(0)"
child = subprocess.run([sys.executable, '-S', '-c', script], capture_output=True, text=True)
result = [held.uuid, child.stderr.splitlines()[-1]]
"""
    uuid, message = host.run(code, CUDA_VISIBLE_DEVICES=C)
    assert uuid == C
    assert "CUDA_ERROR_DEVICE_UNAVAILABLE (46)" in message
    assert host.run(second, CUDA_VISIBLE_DEVICES=C) == [C]  # the dead do not count


def test_forked_child_leaves_its_parents_context_alone(host: Host) -> None:
    code = "held = cuda.PrimaryContext.retain(0)" + in_child("held.release()")
    look = "result = [result, os.listdir(os.environ['FAKE_GPU_DIR'] + '/procs/' + held.uuid).count(str(os.getpid()))]"
    assert host.run(code + look) == [None, 1]


def test_older_driver_without_versioned_functions(host: Host, build_library: Callable[..., Path]) -> None:
    host.library = build_library("cuda.c", "libcuda.so.1", "-DOLD")
    assert host.run("held = cuda.PrimaryContext.retain(0); held.release(); result = held.uuid") == B
    assert host.holders() == []
    name, message = host.run("cuda.PrimaryContext.retain(9)")
    assert (name, message) == ("CudaCallError", "cuDeviceGet failed with CUDA_ERROR_INVALID_DEVICE (101)")


def test_missing_libcuda_names_the_way_out(host: Host, tmp_path: Path) -> None:
    name, message = host.run("cuda.PrimaryContext.retain(0)", LD_LIBRARY_PATH=str(broken_library(tmp_path)))
    assert name == "NoDriverError"
    assert "NVIDIA_DRIVER_CAPABILITIES" in message


# ---------------------------------------------------------------------------------------------------------------------
# Names and errors


@pytest.mark.parametrize(
    ("reported", "claimed", "same"),
    [
        (A, A, True),
        (A, A.upper().replace("GPU", "gpu"), True),
        (A, B, False),
        (M0, M0, True),
        (M0.replace("MIG-", "GPU-"), M0, True),
        (A, f"MIG-{A}/7/0", True),
        (B, f"MIG-{A}/7/0", False),
        ("", A, False),
        ("", "", False),
    ],
)
def test_same_device(reported: str, claimed: str, same: bool) -> None:
    assert cuda.same_device(reported, claimed) is same


def test_call_error_survives_pickling() -> None:
    error = cuda.CudaCallError("cuInit failed", call="cuInit", code=999, name="CUDA_ERROR_UNKNOWN")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.call, copy.code, copy.name) == ("cuInit failed", "cuInit", 999, "CUDA_ERROR_UNKNOWN")


# ---------------------------------------------------------------------------------------------------------------------
# The real thing


@pytest.mark.gpu
class TestRealDriver:
    @pytest.fixture(autouse=True)
    def _needs_a_gpu(self) -> None:
        try:
            if not cuda.visible_in_child():
                pytest.skip("CUDA sees no GPU here")
        except NoDriverError as err:
            pytest.skip(f"needs a real NVIDIA GPU: {err}")

    def run(self, code: str, **variables: str) -> Any:
        return run(code, {**os.environ, **variables})

    def test_awake_only_after_the_context(self) -> None:
        before, during, uuid, after = self.run(
            "cuda.load(); before = cuda.visible_if_awake(); held = cuda.PrimaryContext.retain(0);"
            "during = cuda.visible_if_awake(); held.release();"
            "result = [before, during, held.uuid, cuda.visible_if_awake()]"
        )
        assert before is None
        assert during[0] == uuid
        assert after == during

    def test_nvidia_smi_knows_the_uuid(self) -> None:
        uuid = self.run("result = cuda.visible_in_child()[0]", CUDA_DEVICE_ORDER="PCI_BUS_ID")
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
        assert uuid in listed

    def test_nothing_visible(self) -> None:
        assert self.run("result = cuda.visible_in_child()", CUDA_VISIBLE_DEVICES="") == []

    def test_wake_up_that_finds_no_gpu_is_not_taken_for_a_fork(self) -> None:
        code = f"{MAP}; found = lib.cuInit(0); result = [found, cuda.visible_if_awake()]"
        assert self.run(code, CUDA_VISIBLE_DEVICES="") in ([100, None], [100, []])

    def test_context_takes_memory_and_gives_it_back(self) -> None:
        before, during, after = self.run(
            """
import subprocess, time
def used():
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", uuid]
    return int(subprocess.check_output(query, text=True))
uuid = cuda.visible_in_child()[0]
before = used()
held = cuda.PrimaryContext.retain(0)
during = used()
held.release()
deadline = time.monotonic() + 10
while used() >= during and time.monotonic() < deadline:
    pass
result = [before, during, used()]
"""
        )
        print(f"a context costs {during - before} MiB, {after - before} MiB stay in the process after release")
        assert during > before
        assert after < during

    def test_forked_child_is_told_to_spawn_whoever_woke_cuda(self) -> None:
        for wake in (WAKE, "held = cuda.PrimaryContext.retain(0)"):
            name, message = self.run(wake + in_child("cuda.visible_if_awake()"))
            assert name == "CudaInitializedError"
            assert "spawn" in message
