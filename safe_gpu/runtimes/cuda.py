"""The CUDA driver library through ctypes: whether it is initialised, here or before a fork; ordinals; a context.

CUDA reads CUDA_VISIBLE_DEVICES once, in ``cuInit``. After that call the choice of GPUs is fixed in the process. The
functions that ask whether CUDA is initialised must not initialise it, so they use only a library that is already mapped
and never call ``cuInit``. In the process of the claim, only :class:`PrimaryContext` initialises CUDA.

Names and codes are those of the CUDA driver API (cuda.h). A function is looked up with its version suffix first, then
without it, because drivers older than CUDA 11 lack the suffixed names.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import CudaInitializedError, NoDriverError, SafeGpuError
from ..host.procfs import is_forked, lines_of, open_files
from ..host.programs import Failed, TooLate, call_in_child

if TYPE_CHECKING:
    import ctypes


LIBRARY = "libcuda.so.1"

# CUresult
SUCCESS = 0
NOT_INITIALIZED = 3
DEINITIALIZED = 4
STUB_LIBRARY = 34
NO_DEVICE = 100
INVALID_DEVICE = 101

# Used where the library lacks cuGetErrorName or its own does not know the code: a stub library answers 34 to every
# call. ``placeholders`` recognises these names.
_NAMES = {
    2: "OUT_OF_MEMORY", NOT_INITIALIZED: "NOT_INITIALIZED", STUB_LIBRARY: "STUB_LIBRARY", 46: "DEVICE_UNAVAILABLE",
    NO_DEVICE: "NO_DEVICE", INVALID_DEVICE: "INVALID_DEVICE", 214: "ECC_UNCORRECTABLE", 220: "NVLINK_UNCORRECTABLE",
    714: "HARDWARE_STACK_ERROR", 721: "CONTAINED", 802: "SYSTEM_NOT_READY", 803: "SYSTEM_DRIVER_MISMATCH",
    804: "COMPAT_NOT_SUPPORTED_ON_DEVICE", 999: "UNKNOWN",
}  # fmt: skip


class CudaCallError(SafeGpuError):
    """A call of the CUDA driver failed.

    Attributes:
        call: the function, "cuInit".
        code: its CUresult.
        name: "CUDA_ERROR_NO_DEVICE", where the driver knows one.
    """

    call: str = ""
    code: int = 0
    name: str = ""


class Library:
    """libcuda with its functions by name. Every handle is passed as the C type that cuda.h declares.

    Attributes:
        initialized_in: the pid of the process in which safe_gpu initialised the library; another one in a forked child.
        no_gpu: what the library answers if it finds no GPU.
        forked: the sentence for a child that was forked from such a process.
    """

    file = LIBRARY
    driver = "the NVIDIA driver"
    counting = "cuDeviceGetCount"
    failure: type[CudaCallError] = CudaCallError
    initialized_in: int | None = None
    no_gpu: tuple[int, ...] = (NO_DEVICE,)
    forked = (
        "CUDA was initialised in the process from which this one was forked, and a forked child cannot initialise it "
        "again: start the child with multiprocessing's 'spawn' (or 'forkserver') method, or claim before CUDA is used"
    )

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle = handle

    def ask(self, name: str, *arguments: Any) -> int:
        """Call a function and return its CUresult without checking it.

        Raises:
            CudaCallError: the library has no such function.
        """
        for symbol in (name, name.removesuffix("_v2")):
            function = getattr(self._handle, symbol, None)
            if function is not None:
                return int(function(*arguments))
        raise self.failure(f"{self.file} has no {name}: {self.driver} is too old", call=name)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            CudaCallError: the result is not CUDA_SUCCESS, or the library has no such function.
        """
        code = self.ask(name, *arguments)
        if code != SUCCESS:
            raise self.error(name, code)

    def error(self, name: str, code: int) -> CudaCallError:
        """Return the error that says which call failed and how."""
        title, meaning = self.texts(code)
        call = name.removesuffix("_v2")
        message = f"{call} failed with {title} ({code})" + (f": {meaning}" if meaning else "")
        return self.failure(message, call=call, code=code, name=title)

    def texts(self, code: int) -> tuple[str, str]:
        """Return the name of a result, and what it means, "" if the library does not say."""
        import ctypes

        said = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            with suppress(CudaCallError):  # NULL stays where the library does not know the code
                self.ask(function, ctypes.c_int(code), ctypes.byref(text))
            said.append((text.value or b"").decode(errors="replace"))
        known = f"CUDA_ERROR_{_NAMES[code]}" if code in _NAMES else "unnamed CUDA error"
        return said[0] or known, said[1]

    def initialize(self) -> None:
        """Call cuInit and record the pid of this process.

        Raises:
            CudaCallError: CUDA cannot be initialised.
            CudaInitializedError: this process was forked from one in which CUDA was initialised.
        """
        import ctypes

        code = self.ask("cuInit", ctypes.c_uint(0))
        if code == NOT_INITIALIZED and _forked_from_cuda(self):
            raise CudaInitializedError(self.forked) from self.error("cuInit", code)
        if code != SUCCESS:
            raise self.error("cuInit", code)
        type(self).initialized_in = os.getpid()

    @classmethod
    def is_forked(cls) -> bool:
        """Return whether this process was forked from one in which safe_gpu had initialised the library."""
        return cls.initialized_in not in (None, os.getpid())

    @classmethod
    def refuse_if_forked(cls) -> None:
        """Refuse to use the library in such a process."""
        if cls.is_forked():
            raise CudaInitializedError(cls.forked)

    def count(self) -> int:
        """Return how many GPUs the library sees in this process.

        Raises:
            CudaCallError: with code NOT_INITIALIZED while CUDA is not initialised.
        """
        import ctypes

        number = ctypes.c_int(0)
        self.call(self.counting, ctypes.byref(number))
        return number.value

    def device(self, ordinal: int) -> ctypes.c_int:
        """Return the CUdevice of an ordinal.

        Raises:
            CudaCallError: with code INVALID_DEVICE if there is no such device.
        """
        import ctypes

        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    def shown(self, ordinal: int) -> str:
        """Return the UUID of an ordinal: ``GPU-...``, or ``MIG-...`` for a MIG instance.

        Before CUDA 11.4 a MIG instance has the UUID of its parent GPU.
        """
        import ctypes

        device = self.device(ordinal)
        octets = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", octets, device)
        name = ctypes.create_string_buffer(256)
        # CUDA names an instance after its profile: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
        named = self.ask("cuDeviceGetName", name, ctypes.c_int(len(name)), device) == SUCCESS
        kind = "MIG" if named and b" MIG " in name.value else "GPU"
        digits = bytes(octets).hex()
        return f"{kind}-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def all_shown(self) -> tuple[str, ...]:
        """Return the GPUs that the library sees in this process, in the order of its ordinals."""
        return tuple(self.shown(ordinal) for ordinal in range(self.count()))

    def listed(self) -> tuple[str, ...]:
        """Return the same; the library is initialised if it is not yet."""
        try:
            self.initialize()
            return self.all_shown()
        except CudaCallError as err:
            if err.code not in self.no_gpu:
                raise
            return ()


def load() -> Library:
    """Map libcuda into this process. This does not initialise CUDA.

    Raises:
        NoDriverError: this host has no libcuda.
    """
    from . import libraries

    if library := _mapped():
        return library
    try:
        return Library(libraries.load(LIBRARY))
    except OSError as err:
        raise NoDriverError(
            f"the CUDA driver library cannot be loaded ({err}): install the NVIDIA driver, or start the container "
            "with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            driver="cuda",
        ) from err


def visible_if_initialized() -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs that CUDA sees in this process, in ordinal order; None while CUDA is not
    initialised.

    This never initialises CUDA. It does not import ctypes unless libcuda is already mapped.

    Raises:
        CudaInitializedError: CUDA is initialised but its GPUs cannot be listed (``visible`` is empty), or this process
            was forked from one in which CUDA was initialised.
    """
    library = _mapped()
    if library is not None:
        try:
            return library.all_shown()
        except CudaCallError as err:
            if err.code == NO_DEVICE:
                return ()
            if err.code not in (NOT_INITIALIZED, STUB_LIBRARY):
                problem = f"CUDA is in use in this process but fails ({err}): claim GPUs in a new process"
                raise CudaInitializedError(problem) from err
            if _forked_from_cuda(library):
                raise CudaInitializedError(library.forked) from err
    refuse_if_torch_uses_cuda()
    return None


def shown_at(device_no: int) -> str | None:
    """Return the UUID of the GPU that CUDA knows as ``device_no`` in this process.

    None while CUDA is not initialised or cannot be asked. "" if CUDA is initialised and has no such device.
    """
    library = _mapped()
    if library is None:
        return None
    try:
        return library.shown(device_no)
    except CudaCallError as err:
        return "" if err.code in (INVALID_DEVICE, NO_DEVICE) else None


def same_device(cuda_uuid: str, claimed_uuid: str) -> bool:
    """Return whether a UUID that CUDA reports is the device that was claimed.

    Prefixes and case do not matter. For a MIG instance with an old name (``MIG-GPU-<uuid>/<gi>/<ci>``, drivers before
    R470) CUDA reports only the UUID of the parent GPU.

    >>> same_device("GPU-8dbeba8a-f2c8-4e3a-b4e5-9d5a2f5a6c11", "MIG-GPU-8DBEBA8A-f2c8-4e3a-b4e5-9d5a2f5a6c11/7/0")
    True
    """
    return bool(cuda_uuid) and _bare(cuda_uuid) == _bare(claimed_uuid)


def _bare(uuid: str) -> str:
    return uuid.strip().lower().removeprefix("mig-").removeprefix("gpu-").partition("/")[0]


def _mapped() -> Library | None:
    """libcuda if it is mapped into this process, else None."""
    if "ctypes" not in sys.modules:  # reading the maps file is faster than importing ctypes
        maps = iter(lines_of("/proc/self/maps"))
        first = next(maps, None)
        if first is not None and not any(b"/libcuda.so" in line for line in maps):
            return None
    import ctypes

    try:
        return Library(ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD))
    except OSError:
        return None


def refuse_if_torch_uses_cuda() -> None:
    """Raise if PyTorch has initialised CUDA, or cannot because this process was forked; libcuda may not show either.

    ``is True`` keeps mock modules of users' tests, whose attributes are all truthy, from being taken for PyTorch.

    Raises:
        CudaInitializedError: PyTorch reports one of these.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return
    if getattr(cuda, "_is_in_bad_fork", bool)() is True:
        raise CudaInitializedError(Library.forked)
    if getattr(cuda, "is_initialized", bool)() is True:
        raise CudaInitializedError(
            "PyTorch has CUDA initialised in this process, so its choice of GPUs is fixed: claim GPUs before the first "
            "use of torch.cuda (is_available and device_count included)"
        )


# How long a child of this process may take to call cuInit, in seconds. It sees no GPU, so CUDA starts fast in it.
_PATIENCE = 10.0


def _forked_from_cuda(library: Library) -> bool:
    """Return whether this process was forked from one in which CUDA was initialised.

    If safe_gpu did not initialise CUDA in the parent, an inherited descriptor of /dev/nvidia-uvm, which CUDA opens and
    NVML does not, tells it. There is none on WSL2 and Jetson, and a child may have closed it. So a forked process
    with libcuda mapped forks once more and calls cuInit there: after such a fork it answers NOT_INITIALIZED. A driver
    that does not work answers so too, but also in a process that no fork made.
    """
    if library.is_forked():
        return True
    if not is_forked():
        return False
    if "/dev/nvidia-uvm" in (open_files("self") or {}).values():
        return True
    return _refuses_in_fork(library) and not _refuses_anew()


def _refuses_anew() -> bool:
    """Return whether cuInit fails in the same way in a new process."""
    try:
        call_in_child("safe_gpu.runtimes.cuda _start", env=os.environ, timeout=_PATIENCE)
    except Failed as err:
        return _NAMES[NOT_INITIALIZED] in str(err)
    except (OSError, TooLate):
        pass
    return False


def _start() -> None:
    """Do the child's part: call cuInit."""
    load().listed()


def _refuses_in_fork(library: Library) -> bool:
    """Return whether cuInit fails in a forked child of this process as it does if CUDA was initialised before the
    fork."""
    import ctypes
    import signal
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of a fork beside threads; this child only calls cuInit
        pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            code = 1 if library.ask("cuInit", ctypes.c_uint(0)) == NOT_INITIALIZED else 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 1
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)  # it hangs on a lock that another thread held at the fork, or inside the driver
    os.waitpid(pid, os.WNOHANG)
    return False


# Any size will do; the driver rounds it up to its own granularity.
_HOLD_BYTES = 1024


def active_contexts() -> frozenset[str]:
    """Return the UUIDs of the GPUs on which this process has a primary context, a framework's included; empty if CUDA
    fails.

    CUDA is not initialised for it.
    """
    import ctypes

    found = set()
    with suppress(CudaCallError, NoDriverError):
        library = load()
        for ordinal in range(library.count()):
            flags, active = ctypes.c_uint(0), ctypes.c_int(0)
            state = (library.device(ordinal), ctypes.byref(flags), ctypes.byref(active))
            library.call("cuDevicePrimaryCtxGetState", *state)
            if active.value:
                found.add(library.shown(ordinal))
    return frozenset(found)


class PrimaryContext:
    """The primary context of one GPU, retained, with a small allocation in it. Other processes see the GPU as in use.

    Frameworks in the same process use the same context, so it costs no memory beyond theirs. It belongs to the process
    that retained it: :meth:`release` in a forked child does nothing.

    Attributes:
        device_no: the CUDA ordinal.
        uuid: of the GPU behind it, as CUDA reports it.
    """

    def __init__(self, device_no: int) -> None:
        """Initialise CUDA if necessary, and hold the GPU with this ordinal until :meth:`release`.

        The current context of the calling thread does not change. On failure nothing is retained.

        Raises:
            CudaCallError: the driver refused.
            CudaInitializedError: this process was forked from one in which CUDA was initialised.
            NoDriverError: this host has no libcuda.
        """
        import ctypes

        self._library = library = load()
        library.initialize()
        self.device_no, self._device = device_no, library.device(device_no)
        self.uuid = library.shown(device_no)
        self._pid = os.getpid()
        self._context: ctypes.c_void_p | None = ctypes.c_void_p()
        self._memory = ctypes.c_uint64(0)
        library.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        try:
            with self._current(self._context):
                library.call("cuMemAlloc_v2", ctypes.byref(self._memory), ctypes.c_size_t(_HOLD_BYTES))
        except BaseException:
            with suppress(CudaCallError):
                self.release()
            raise

    def release(self) -> None:
        """Free the allocation and release the context. A second call does nothing.

        Raises:
            CudaCallError: the driver refused one of the two; the other was still attempted.
        """
        context, self._context = self._context, None
        if context is None or self._pid != os.getpid():
            return
        try:
            try:
                if self._memory:
                    with self._current(context):
                        self._library.call("cuMemFree_v2", self._memory)
            finally:
                self._library.call("cuDevicePrimaryCtxRelease_v2", self._device)
        except CudaCallError as err:
            if err.code != DEINITIALIZED:  # at interpreter exit CUDA may have shut down, which freed both
                raise

    @contextmanager
    def _current(self, context: ctypes.c_void_p) -> Iterator[None]:
        import ctypes

        self._library.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._library.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


hold = PrimaryContext
