"""Every placeholder keeps the same promises: a contract suite over stand-ins that behave like the frameworks; and the
likely causes of what fails.

A stand-in notes every call that would initialise CUDA, and what is on which GPU, in ``gpus``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import api
from support.gpus import PACKAGE_ROOT, run_python

import safe_gpu


class Gpus:
    """What the stand-ins share: two GPUs, what holds them, and a failure to order."""

    def __init__(self) -> None:
        self.count = 2
        self.held: list[tuple[int, object]] = []
        self.initialized = False
        self.failure: Exception | None = None
        self.events: list[str] = []

    def initialize(self) -> None:
        self.initialized = True

    def put(self, device_no: int, thing: Any) -> Any:
        self.initialize()
        if self.failure is not None:
            raise self.failure
        if device_no >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.held.append((device_no, thing))
        return thing

    def take(self, thing: object) -> None:
        assert any(one is thing for _, one in self.held), "nothing holds it any more"
        self.held = [one for one in self.held if one[1] is not thing]

    def busy(self) -> list[int]:
        return sorted(device_no for device_no, _ in self.held)


@pytest.fixture
def gpus() -> Gpus:
    return Gpus()


# Stand-ins


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: object) -> None:
    module = ModuleType(name)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def stand_in_cuda(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def hold(device_no: int) -> Any:
        if gpus.failure is not None:
            raise api.CudaCallError(f"cuInit failed with {gpus.failure}", call="cuInit", code=999)
        held = gpus.put(device_no, SimpleNamespace(release=lambda: gpus.take(held)))
        return held

    monkeypatch.setattr(api.CUDA, "hold", hold)
    monkeypatch.setattr(api.CUDA, "load", lambda: None)


def stand_in_torch(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        def set_(self) -> None:
            gpus.events.append("emptied")
            self.empty = True

    def zeros(shape: tuple[int, ...], *, device: str) -> Tensor:
        return gpus.put(int(device.removeprefix("cuda:")), Tensor())

    def empty_cache() -> None:
        gpus.held = [one for one in gpus.held if not hasattr(one[1], "empty")]

    install(monkeypatch, "torch", zeros=zeros, cuda=SimpleNamespace(empty_cache=empty_cache))


def stand_in_tensorflow(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []

    @contextmanager
    def device(name: str) -> Iterator[None]:
        current.append(int(name.split(":")[-1]))
        yield
        current.pop()

    def list_physical_devices(kind: str) -> list[str]:
        assert kind == "GPU"
        gpus.initialize()
        return [f"physical GPU {number}" for number in range(gpus.count)]

    def constant(values: list[float]) -> Any:
        gpus.events.append("started")
        name = f"/job:localhost/replica:0/task:0/device:GPU:{current[-1]}"
        return gpus.put(current[-1], SimpleNamespace(device=name))

    def set_memory_growth(gpu: str, enable: bool) -> None:
        assert enable is True
        if f"growth of {gpu}" in gpus.events:
            return
        if "started" in gpus.events:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        gpus.events.append(f"growth of {gpu}")

    config = SimpleNamespace(
        list_physical_devices=list_physical_devices, experimental=SimpleNamespace(set_memory_growth=set_memory_growth)
    )
    install(monkeypatch, "tensorflow", config=config, device=device, constant=constant)


def stand_in_pycuda(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_context(device_no: int) -> Any:
        context = gpus.put(device_no, SimpleNamespace(detach=lambda: gpus.take(context)))
        return context

    def device(device_no: int) -> Any:
        assert gpus.initialized, "cuInit was not called"
        return SimpleNamespace(make_context=lambda: make_context(device_no))

    install(monkeypatch, "pycuda")
    install(monkeypatch, "pycuda.driver", init=gpus.initialize, Device=device)


def stand_in_cupy(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = [0]
    pooled: list[tuple[int, Any]] = []

    @contextmanager
    def device(device_no: int) -> Iterator[None]:
        current.append(device_no)
        yield
        current.pop()

    def zeros(size: int, dtype: str) -> Any:
        here = current[-1]
        memory = SimpleNamespace(free=lambda: pooled.append((here, array)))
        array = gpus.put(here, SimpleNamespace(device=device(here), data=SimpleNamespace(mem=memory)))
        return array

    def free_all_blocks() -> None:
        for device_no, array in pooled:
            if device_no == current[-1]:
                gpus.take(array)

    pool = SimpleNamespace(free_all_blocks=free_all_blocks)
    install(monkeypatch, "cupy", cuda=SimpleNamespace(Device=device), zeros=zeros, get_default_memory_pool=lambda: pool)


def stand_in_jax(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def put(value: float, device: int) -> Any:
        array = gpus.put(device, SimpleNamespace(delete=lambda: gpus.take(array)))
        array.block_until_ready = lambda: array
        return array

    def local_devices(*, backend: str) -> list[int]:
        assert backend == "gpu"
        gpus.initialize()
        gpus.events.append(f"preallocate={os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE', 'true')}")
        return list(range(gpus.count))

    install(monkeypatch, "jax", local_devices=local_devices, device_put=put)


STAND_INS: dict[type[Any], Callable[[Gpus, pytest.MonkeyPatch], None]] = {
    api.CudaPlaceholder: stand_in_cuda,
    api.placeholders.PytorchPlaceholder: stand_in_torch,
    api.placeholders.TensorflowPlaceholder: stand_in_tensorflow,
    api.placeholders.PyCudaPlaceholder: stand_in_pycuda,
    api.placeholders.CupyPlaceholder: stand_in_cupy,
    api.placeholders.JaxPlaceholder: stand_in_jax,
}
FRAMEWORKS = {
    api.placeholders.PytorchPlaceholder: ("torch", "pip install torch"),
    api.placeholders.TensorflowPlaceholder: ("tensorflow", "pip install tensorflow"),
    api.placeholders.PyCudaPlaceholder: ("pycuda", "pip install pycuda"),
    api.placeholders.CupyPlaceholder: ("cupy", "pip install cupy-cuda12x"),
    api.placeholders.JaxPlaceholder: ("jax", "pip install 'jax[cuda12]'"),
}


def make(kind: type[Any], gpus: Gpus, monkeypatch: pytest.MonkeyPatch, logger: Any = None) -> Any:
    STAND_INS[kind](gpus, monkeypatch)
    return kind(logger)


# The contract


def test_each_placeholder_and_each_framework_has_its_stand_in() -> None:
    public = {getattr(safe_gpu, name) for name in safe_gpu.__all__ if name.endswith("Placeholder")}
    without = public - {api.NoPlaceholder} - set(STAND_INS)
    assert without == set(), "write a stand-in for the framework, and its row in STAND_INS of this file"
    assert set(FRAMEWORKS) == set(STAND_INS) - {api.CudaPlaceholder}, "each framework has its row in FRAMEWORKS"


@pytest.mark.parametrize("kind", FRAMEWORKS, ids=lambda kind: kind.__name__)
def test_the_placeholder_of_a_framework_says_what_it_does(kind: type[Any]) -> None:
    assert issubclass(kind, api.placeholders.Base)
    assert "release" in vars(kind), "override release(), which frees nothing otherwise"
    assert kind.__doc__, "say in the class what holds the GPU"
    assert kind.release.__doc__, "say in release() what is freed and what stays"


@pytest.mark.parametrize("kind", STAND_INS, ids=lambda kind: kind.__name__)
def test_two_devices_are_held_and_released_one_by_one(kind: Any, gpus: Gpus, monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    placeholder = make(kind, gpus, monkeypatch, logging.getLogger("mine"))
    assert make(kind, gpus, monkeypatch).logger is logging.getLogger("safe_gpu")
    api.placeholders.prepare(placeholder)
    assert not gpus.initialized, "prepare() only imports: the GPUs are not chosen yet"
    assert api.placeholders.holds_gpu(placeholder)
    things = []
    for device_no in (0, 1):
        things.append(api.placeholders.allocate(placeholder, device_no))
        assert gpus.busy() == [0, 1][: device_no + 1], "the allocation is to be on the GPU with this number"
    for device_no in (0, 1):
        api.placeholders.release(placeholder, things[device_no])
        left = [1][device_no:]
        if kind is api.placeholders.TensorflowPlaceholder:
            left = [0, 1]  # it gives nothing back
        assert gpus.busy() == left, "release() frees this object while others still refer to it, and no other one"
    assert {record.name for record in caplog.records} <= {"mine"}, "the logger that was given"
    assert caplog.records or kind is api.CudaPlaceholder, "release() logs what was freed and what stays"


@pytest.mark.parametrize("kind", STAND_INS, ids=lambda kind: kind.__name__)
def test_failure_names_device_cause_and_likely_rival(kind: Any, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    placeholder = make(kind, gpus, monkeypatch)
    for failure, hint in (("Cannot re-initialize CUDA in forked subprocess.", "spawn"), ("a thing unseen", "")):
        gpus.failure = RuntimeError(f"{failure}\nCompile with TORCH_USE_CUDA_DSA to enable device-side assertions.")
        with pytest.raises(api.PlaceholderError) as caught:
            placeholder(1)
        message = str(caught.value)
        assert f"{kind.__name__} could not hold CUDA device 1" in message
        assert hint in message
        assert "TORCH_USE_CUDA_DSA" not in message
        assert message.endswith(failure) is (hint == "")
        assert caught.value.device_no == 1
        assert gpus.busy() == []
    gpus.failure = None
    with pytest.raises(api.PlaceholderError) as caught:
        placeholder(2)
    assert "claim first" in str(caught.value), "its words are none that safe_gpu/runtimes/causes.py knows"


@pytest.mark.parametrize("kind", FRAMEWORKS, ids=lambda kind: kind.__name__)
def test_a_framework_that_is_missing_or_broken(kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing: which package, and what to do without it. Broken: what broke."""
    module, install = FRAMEWORKS[kind]
    missing = ModuleNotFoundError(f"No module named {module!r}", name=module)
    others = ModuleNotFoundError("No module named 'numpy'", name="numpy")
    for failure in (missing, others, OSError("libcudart.so.12: no such file")):
        with monkeypatch.context() as patch:
            uninstall(patch, module, failure)
            with pytest.raises(api.SafeGpuError) as caught:
                api.placeholders.prepare(kind())
        message = str(caught.value)
        if failure is missing:
            assert type(caught.value) is api.MissingPackageError
            told = f"{kind.__name__} needs {module}, which is not installed: {install}, or leave "
            assert message.startswith(told), "compare _module and _install of the class with its row in FRAMEWORKS"
        else:
            assert type(caught.value) is api.PlaceholderError
            assert "cannot import" in message
            assert str(failure) in message


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from safe_gpu.engines import ray

    with monkeypatch.context() as patch:
        uninstall(patch, "ray", ModuleNotFoundError("No module named 'ray'", name="ray"))
        with pytest.raises(api.MissingPackageError, match="Ray is not installed here: pip install"):
            ray.claim()


def uninstall(monkeypatch: pytest.MonkeyPatch, package: str, failure: Exception) -> None:
    def find_spec(name: str, path: Any, target: Any = None) -> None:
        if name.partition(".")[0] == package:
            raise failure

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])


def test_no_placeholder_holds_nothing_and_a_class_is_none() -> None:
    placeholder = api.NoPlaceholder()
    api.placeholders.prepare(placeholder)
    assert not api.placeholders.holds_gpu(placeholder)
    assert api.placeholders.allocate(placeholder, 0) is None
    api.placeholders.release(placeholder, None)
    for kind in (api.NoPlaceholder, *STAND_INS):
        with pytest.raises(api.PlaceholderError, match=rf"pass {kind.__name__}\(\) instead"):
            api.placeholders.prepare(kind)


# What is particular to one of them


def test_pytorch_memory_goes_although_others_still_refer_to_the_tensor(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    placeholder = make(api.placeholders.PytorchPlaceholder, gpus, monkeypatch)
    tensor = placeholder(0)
    placeholder.release(tensor)
    assert gpus.events == ["emptied"]
    assert "keeps its CUDA context" in caplog.text  # honest about what stays


@pytest.mark.parametrize("started", [False, True])
def test_tensorflow_grows_on_every_gpu_before_it_starts_or_warns(
    started: bool, gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.events += ["started"] * started
    make(api.placeholders.TensorflowPlaceholder, gpus, monkeypatch)(1)
    growth = ["growth of physical GPU 0", "growth of physical GPU 1"]
    assert gpus.events == (["started", "started"] if started else [*growth, "started"])
    assert [record.levelname for record in caplog.records] == ["WARNING"] * started
    assert ("CUDA device 1" in caplog.text) is started
    assert gpus.busy() == [1]


def test_tensorflow_on_the_cpu_is_no_placeholder(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    placeholder = make(api.placeholders.TensorflowPlaceholder, gpus, monkeypatch)
    monkeypatch.setattr(sys.modules["tensorflow"], "constant", lambda values: SimpleNamespace(device="/device:CPU:0"))
    with pytest.raises(api.PlaceholderError, match="on the CPU"):
        placeholder(0)


PYCUDA = """
import os, sys, types
thing = types.SimpleNamespace
driver = types.ModuleType("pycuda.driver")
driver.init = lambda: None
detach = lambda: os.write(1, b"detached ")
driver.Device = lambda device_no: thing(make_context=lambda: thing(detach=detach))
sys.modules["pycuda"], sys.modules["pycuda.driver"] = types.ModuleType("pycuda"), driver
from safe_gpu.runtimes.placeholders import PyCudaPlaceholder
placeholder = PyCudaPlaceholder()
"""


def test_pycuda_contexts_are_ended_at_exit_for_pycuda_would_abort() -> None:
    """But not in a forked child."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    for code, printed in (
        ("placeholder.release(placeholder(0)); os.write(1, b'and '); placeholder(1)", "detached and detached "),
        ("placeholder(0)\nif os.fork() == 0: sys.exit()\nos.wait()\nos.write(1, b'once ')", "once detached "),
    ):
        assert run_python("-S", "-c", PYCUDA + code, env=environment) == printed


@pytest.mark.parametrize("chosen", [None, "true"])
def test_jax_starts_without_preallocation_unless_the_user_has_chosen(chosen: Any, gpus: Gpus, monkeypatch: Any) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    if chosen is not None:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", chosen)
    make(api.placeholders.JaxPlaceholder, gpus, monkeypatch)(0)
    assert gpus.events == [f"preallocate={chosen or 'false'}"]
    assert os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == chosen


# Any callable


def raiser(err: BaseException) -> Any:
    def fail(*arguments: object) -> None:
        raise err

    return fail


def test_any_function_is_a_placeholder() -> None:
    def placeholder(device_no: int) -> Any:
        return SimpleNamespace(device_no=device_no)

    api.placeholders.prepare(placeholder)
    assert api.placeholders.holds_gpu(placeholder)
    held: Any = api.placeholders.allocate(placeholder, 3)
    assert held.device_no == 3
    api.placeholders.release(placeholder, held)


def test_what_fails_is_named_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    """Errors of ours and interrupts pass through."""
    full, fire = RuntimeError("CUDA error: out of memory"), raiser(OSError("disk on fire"))
    with pytest.raises(api.PlaceholderError, match=r"fail could not hold CUDA device 3: .*uses most of the GPU"):
        api.placeholders.allocate(raiser(full), 3)
    for err in (api.NotEnoughGpusError("none"), KeyboardInterrupt()):
        with pytest.raises(type(err)) as caught:
            api.placeholders.allocate(raiser(err), 0)
        assert caught.value is err
    placeholder: Any = SimpleNamespace(prepare=fire, release=fire)
    with pytest.raises(api.PlaceholderError, match="could not be prepared: OSError: disk on fire"):
        api.placeholders.prepare(placeholder)
    for err, told in ((ValueError(), "ValueError"), (api.CudaCallError("cuInit failed"), "cuInit failed")):
        with pytest.raises(api.PlaceholderError, match=f"CUDA device 0: {told}"):
            api.placeholders.allocate(raiser(err), 0)
    api.placeholders.release(placeholder, None)
    assert "SimpleNamespace could not release its GPU: OSError: disk on fire" in caplog.text


def test_real_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    api.placeholders.prepare(api.placeholders.pytorch_placeholder)
    tensor = torch.zeros((1,))
    api.placeholders.pytorch_placeholder.release(tensor)
    assert tensor.untyped_storage().nbytes() == 0
    if not torch.backends.cuda.is_built():
        with pytest.raises(api.PlaceholderError, match="for CPUs only"):
            api.placeholders.pytorch_placeholder(0)


# Causes of errors, from messages that CUDA, HIP and the frameworks have printed


def table(rows: str) -> list[tuple[str, str]]:
    """Of lines ``HINT | TEXT``, where "-" stands for no hint."""
    pairs = (row.split(" | ", 1) for row in rows.strip().splitlines())
    return [(text, hint.removeprefix("-")) for hint, text in pairs]


# What people have reported, word for word but for addresses; the last ones are hip_error.cpp's own texts.
OF_HIP = table("""
claim first | HIP error: hipErrorNoDevice
render and video | HIP initialization: Unexpected error from hipGetDeviceCount(). Error 101: hipErrorInvalidDevice
--device=/dev/kfd | Unable to open /dev/kfd read-write: Permission denied
--device=/dev/kfd | HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources. This \
error may also occur when the core runtime library needs to spawn threads or create internal OS-specific events.
HSA_OVERRIDE_GFX_VERSION | hipErrorNoBinaryForGpu: Unable to find code object for all current devices!
uses most of the GPU | HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB
""")

OF_CUDA = table("""
nvidia_uvm | cuInit failed with CUDA_ERROR_NOT_INITIALIZED (3): initialization error
spawn | Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the
must be reset | cuDevicePrimaryCtxRetain failed with CUDA_ERROR_DEVICE_UNAVAILABLE (46)
memory of the host | cuInit failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory
uses most of the GPU | cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory
EXCLUSIVE_PROCESS | cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable
CUDA_VISIBLE_DEVICES hides | cuInit failed with CUDA_ERROR_NO_DEVICE (100): no CUDA-capable device is detected
CPUs only | Torch not compiled with CUDA enabled
reboot | cuInit failed with CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804): forward compatibility was attempted
a container needs --gpus | Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU
lost /dev/nvidia* | cuInit failed with CUDA_ERROR_UNKNOWN (999): unknown error
hardware | CUDA_ERROR_ECC_UNCORRECTABLE
- | list index out of range
""")

OF_THE_GPU = """
HIP error: uncorrectable ECC error encountered
HW Exception by GPU node-1 (Agent handle: 0x1b0fc990) reason :GPU Hang
cuDevicePrimaryCtxRetain failed with CUDA_ERROR_DEVICE_UNAVAILABLE (46)
cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable
CUDA_ERROR_ECC_UNCORRECTABLE
Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost
""".strip().splitlines()


def test_the_likely_cause() -> None:
    """PyTorch for ROCm has some texts of CUDA too, so that the advice must do for both."""
    for text, hint in (*OF_HIP, *OF_CUDA):
        explained = api.causes.likely_cause(RuntimeError(text))
        assert hint in explained
        assert bool(explained) is bool(hint)
        assert "spawn" not in explained or "fork" in text
        if (text, hint) in OF_HIP:
            assert "nvidia" not in explained.lower()
            assert "CUDA" not in explained
    assert "ROCm" in api.causes.likely_cause(AssertionError("Torch not compiled with CUDA enabled"))
    assert "nvidia" not in api.causes.likely_cause(RuntimeError("Out of memory while trying to allocate"))


def test_which_errors_speak_of_the_gpu() -> None:
    texts = {*dict(OF_HIP), *dict(OF_CUDA), *OF_THE_GPU}
    assert {text for text in texts if api.causes.blames_gpu(RuntimeError(text))} == set(OF_THE_GPU)
    wrapped = api.PlaceholderError("X could not hold CUDA device 0; the GPU is lost? uncorrectable ECC?")
    for text in (OF_THE_GPU[0], "list index out of range"):
        wrapped.__cause__ = RuntimeError(text)
        assert api.causes.blames_gpu(wrapped) is (text in OF_THE_GPU)
    # A rival that is seen explains an unavailable GPU, but no broken one.
    assert not api.causes.blames_gpu(RuntimeError("CUDA_ERROR_DEVICE_UNAVAILABLE"), rivals=True)
    assert api.causes.blames_gpu(RuntimeError("CUDA_ERROR_ECC_UNCORRECTABLE"), rivals=True)


def context(call: str, code: int, text: str = "") -> api.PlaceholderError:
    """The error of a context of safe_gpu's own."""
    err = api.PlaceholderError("it could not hold the GPU")
    err.__cause__ = api.CudaCallError(f"{call} failed with {text} ({code})", call=call, code=code)
    return err


FREE = api.Gpu(0, "GPU-0", memory_total=80 << 30, memory_free=79 << 30)
OWN = api.causes.Circumstances(FREE, own_context=True)
FULL = OWN._replace(gpu=FREE._replace(memory_free=1023 << 20))
UNKNOWN = OWN._replace(gpu=FREE._replace(memory_free=None))
SHORT = context("cuMemAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY")


@pytest.mark.parametrize(
    ("err", "where", "seconds"),
    [
        (SHORT, OWN, 3600),
        (SHORT, UNKNOWN, 3600),
        (SHORT, FULL, 0),
        (SHORT, OWN._replace(own_context=False), 0),
        (SHORT, OWN._replace(was_initialized=True), 0),
        (context("cuDevicePrimaryCtxRetain", 719), OWN, 3600),
        (context("cuInit", 100), OWN, 3600),
        (context("hipMalloc", 2, "hipErrorOutOfMemory"), OWN, 3600),
        (context("hipGetDeviceCount", 100), OWN, 0),
        (context("cuCtxPushCurrent", 0), OWN, 0),
        (context("cuDeviceGet", 101), OWN, 0),
        (context("cuMemAlloc", 805, "CUDA_ERROR_MPS_CONNECTION_FAILED"), OWN, 0),
        (context("cuDevicePrimaryCtxRetain", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE"), OWN, 86400),
        (context("cuDevicePrimaryCtxRetain", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE"), OWN._replace(others="x"), 0),
        (context("cuMemAlloc", 214, "CUDA_ERROR_ECC_UNCORRECTABLE"), FULL._replace(own_context=False), 86400),
        (RuntimeError("a thing unseen"), OWN, 0),
        (api.PlaceholderError("simulated: a thing unseen"), OWN, 3600),
    ],
)
def test_for_how_long_a_gpu_is_taken_last(err: Exception, where: Any, seconds: int) -> None:
    assert api.causes.seconds_last(err, where) == seconds


def test_why_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(where: Any) -> str:
        return api.causes.likely_cause(api.causes.root_of(SHORT), where)

    assert why(OWN).startswith("; 79 GiB of 80 GiB of the GPU's memory are free, and nothing limits this process, so")
    assert "Xid" in why(OWN)
    assert why(OWN._replace(own_context=False)).endswith(
        ": the program asked for more than that, or the GPU has failed"
    )
    assert why(FULL) == "; 1023 MiB of 80 GiB of the GPU's memory are free: see safe-gpu status"
    assert "uses most of the GPU's memory" in why(UNKNOWN)
    monkeypatch.setattr(api.causes, "memory_left_in_cgroup", lambda: 300 << 20)
    assert why(OWN) == "; the job or container has 300 MiB of its memory left: ask for more"
    monkeypatch.setattr(api.causes, "memory_left_in_cgroup", lambda: 1 << 30)
    assert "nothing limits this process" in why(OWN)


def test_any_function_or_class_is_a_placeholder() -> None:
    class Holder:
        def __init__(self, device_no: int) -> None:
            self.device_no = device_no

    kinds: tuple[Any, ...] = (lambda device_no: SimpleNamespace(device_no=device_no), Holder)
    for placeholder in kinds:
        api.placeholders.prepare(placeholder)
        assert api.placeholders.holds_gpu(placeholder)
        held: Any = api.placeholders.allocate(placeholder, 3)
        assert held.device_no == 3
        api.placeholders.release(placeholder, held)
