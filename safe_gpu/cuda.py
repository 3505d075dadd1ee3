"""The CUDA driver library, through ctypes: is CUDA awake, which GPU is an ordinal, and a context that holds one.

CUDA reads CUDA_VISIBLE_DEVICES once, in ``cuInit``; from then on the choice of GPUs is frozen in the process. Asking
whether that has happened must therefore not make it happen: the questions here look at a library that is mapped
already and never call ``cuInit``. Only :meth:`PrimaryContext.retain` wakes CUDA.

Names and codes are those of the CUDA driver API (cuda.h). Entry points are looked up with their current version
suffix first, then bare, for drivers older than CUDA 11.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from .errors import CudaInitializedError, NoDriverError, SafeGpuError

if TYPE_CHECKING:
    import ctypes

__all__ = [
    "CudaCallError",
    "PrimaryContext",
    "load",
    "same_device",
    "uuid_of_ordinal",
    "visible_if_awake",
    "visible_in_child",
]

LIBRARY = "libcuda.so.1"

# CUresult
SUCCESS = 0
NOT_INITIALIZED = 3
DEINITIALIZED = 4
STUB_LIBRARY = 34
NO_DEVICE = 100
INVALID_DEVICE = 101

# What placeholders are explained by, where a library lacks cuGetErrorName.
_NAMES = {
    2: "CUDA_ERROR_OUT_OF_MEMORY",
    NOT_INITIALIZED: "CUDA_ERROR_NOT_INITIALIZED",
    46: "CUDA_ERROR_DEVICE_UNAVAILABLE",
    NO_DEVICE: "CUDA_ERROR_NO_DEVICE",
    INVALID_DEVICE: "CUDA_ERROR_INVALID_DEVICE",
    999: "CUDA_ERROR_UNKNOWN",
}

# The smallest thing that is an allocation; the driver rounds it up to its own granularity.
_HOLD_BYTES = 1024

# The process in which we called cuInit: a forked child inherits the number and can tell that CUDA is lost to it.
_woken_in: int | None = None

_SPAWN = (
    "CUDA was awake in the process from which this one was forked, and it cannot start again in a forked child: "
    "start the child with multiprocessing's 'spawn' (or 'forkserver') method, or claim before CUDA is used"
)


class CudaCallError(SafeGpuError):
    """A call of the CUDA driver failed.

    Attributes:
        call: the function, "cuInit"; code: its CUresult; name: "CUDA_ERROR_NO_DEVICE", where the driver knows one.
    """

    def __init__(self, message: str = "", *, call: str = "", code: int = 0, name: str = "") -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class _Library:
    """libcuda with its functions by name; every handle is passed as the C type that cuda.h gives it."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle = handle

    def ask(self, name: str, *arguments: Any) -> int:
        """Call it and return its CUresult, whatever that is."""
        for symbol in (name, name.removesuffix("_v2")):
            try:
                function = getattr(self._handle, symbol)
            except AttributeError:
                continue
            return int(function(*arguments))
        raise CudaCallError(f"{LIBRARY} has no {name}: the NVIDIA driver is too old", call=name)

    def call(self, name: str, *arguments: Any) -> None:
        """Call it; anything but CUDA_SUCCESS is a CudaCallError."""
        code = self.ask(name, *arguments)
        if code != SUCCESS:
            raise self.error(name, code)

    def error(self, name: str, code: int) -> CudaCallError:
        """The error that says which call failed and how."""
        title = self._text("cuGetErrorName", code) or _NAMES.get(code, "unnamed CUDA error")
        meaning = self._text("cuGetErrorString", code)
        call = name.removesuffix("_v2")
        message = f"{call} failed with {title} ({code})" + (f": {meaning}" if meaning else "")
        return CudaCallError(message, call=call, code=code, name=title)

    def _text(self, name: str, code: int) -> str:
        import ctypes

        text = ctypes.c_char_p()
        try:
            if self.ask(name, ctypes.c_int(code), ctypes.byref(text)) != SUCCESS:
                return ""
        except CudaCallError:
            return ""
        return (text.value or b"").decode(errors="replace")

    def initialize(self) -> None:
        """cuInit, and remember in which process."""
        import ctypes

        global _woken_in
        self.call("cuInit", ctypes.c_uint(0))
        _woken_in = os.getpid()

    def count(self) -> int:
        """How many GPUs CUDA sees in this process; a CudaCallError with NOT_INITIALIZED as long as CUDA sleeps."""
        import ctypes

        number = ctypes.c_int(0)
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def device(self, ordinal: int) -> ctypes.c_int:
        """The CUdevice of an ordinal; a CudaCallError with INVALID_DEVICE where there is none."""
        import ctypes

        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        return device

    def uuid(self, ordinal: int) -> str:
        """``GPU-...``, or ``MIG-...`` for a MIG instance (before CUDA 11.4 the UUID of the GPU that it is part of)."""
        import ctypes
        import uuid

        device = self.device(ordinal)
        octets = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", octets, device)
        name = ctypes.create_string_buffer(256)
        # CUDA names an instance after its profile: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
        named = self.ask("cuDeviceGetName", name, ctypes.c_int(len(name)), device) == SUCCESS
        kind = "MIG" if named and b" MIG " in name.value else "GPU"
        return f"{kind}-{uuid.UUID(bytes=bytes(octets))}"

    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of all GPUs that CUDA sees in this process, in ordinal order."""
        return tuple(self.uuid(ordinal) for ordinal in range(self.count()))


def load() -> _Library:
    """Map libcuda, which does not wake CUDA.

    Raises:
        NoDriverError: there is no such library here.
    """
    import ctypes

    try:
        return _Library(ctypes.CDLL(LIBRARY))
    except OSError as err:
        raise NoDriverError(
            f"the CUDA driver library cannot be loaded ({err}): install the NVIDIA driver, or start the container "
            "with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
            driver="cuda",
        ) from err


def visible_if_awake() -> tuple[str, ...] | None:
    """UUIDs of the GPUs that CUDA sees in this process, in ordinal order; None while CUDA is asleep here.

    Never wakes CUDA and imports nothing unless libcuda is mapped already.

    Raises:
        CudaInitializedError: CUDA is awake but does not tell what it sees (``visible`` is empty), or this process was
            forked from one in which CUDA was awake.
    """
    library = _mapped()
    if library is not None:
        try:
            return library.uuids()
        except CudaCallError as err:
            if err.code == NO_DEVICE:
                return ()
            if err.code not in (NOT_INITIALIZED, STUB_LIBRARY):
                raise CudaInitializedError(
                    f"CUDA is in use in this process and in trouble ({err}): claim GPUs in a new process"
                ) from err
            if _forked_from_awake():
                raise CudaInitializedError(_SPAWN) from err
    _ask_torch()
    return None


def uuid_of_ordinal(device_no: int) -> str | None:
    """UUID of the GPU that CUDA knows as ``device_no`` in this process.

    None while CUDA is asleep or out of reach; "" when CUDA is awake and has no such device.
    """
    library = _mapped()
    if library is None:
        return None
    try:
        return library.uuid(device_no)
    except CudaCallError as err:
        return "" if err.code in (INVALID_DEVICE, NO_DEVICE) else None


def visible_in_child(env: Mapping[str, str] | None = None, timeout: float = 20.0) -> tuple[str, ...]:
    """UUIDs of the GPUs that CUDA would see under an environment, in ordinal order, without waking CUDA here.

    Asked in a short-lived child process. ``env`` is its whole environment (None: this process's), ``timeout`` is in
    seconds.

    Raises:
        NoDriverError: the child could not tell, with its reason.
    """
    import subprocess

    # -I keeps the caller's PYTHON* variables and directory out of it, so the package must be put on its path.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    code = "import sys; sys.path.insert(0, sys.argv[1]); from safe_gpu import cuda; sys.exit(cuda._tell())"
    command = [sys.executable, "-I", "-S", "-c", code, root]
    try:
        child = subprocess.Popen(
            command,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as err:
        raise NoDriverError(f"no child process to ask CUDA in could be started: {err}", driver="cuda") from err
    try:
        answer, trouble = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as err:
        raise NoDriverError(
            f"CUDA did not answer within {timeout:g} s in a child process: the driver hangs, see dmesg", driver="cuda"
        ) from err
    finally:
        # Not waited for: a process that hangs inside the driver cannot be killed, and must not hang us.
        if child.poll() is None:
            child.kill()
    if child.returncode:
        reason = (trouble.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise NoDriverError(f"CUDA could not be asked in a child process: {reason}", driver="cuda")
    return tuple(line.removeprefix(_MARK) for line in answer.splitlines() if line.startswith(_MARK))


# Sets our lines apart from what a library may print of its own accord.
_MARK = "cuda-sees "


def _tell() -> int:
    """The child's part of visible_in_child: UUIDs on stdout, or the reason on stderr; returns an exit status."""
    try:
        library = load()
        library.initialize()
        uuids = library.uuids()
    except SafeGpuError as err:
        if not (isinstance(err, CudaCallError) and err.code == NO_DEVICE):
            print(err, file=sys.stderr)
            return 1
        uuids = ()
    print(*(_MARK + uuid for uuid in uuids), sep="\n")
    return 0


def same_device(cuda_uuid: str, claimed_uuid: str) -> bool:
    """Whether a UUID that CUDA reports is the device that was claimed.

    Prefixes and case do not matter. A MIG instance claimed under its old name (``MIG-GPU-<uuid>/<gi>/<ci>``, drivers
    before R470) is known to CUDA by the UUID of its GPU alone.

    >>> same_device("GPU-8dbeba8a-f2c8-4e3a-b4e5-9d5a2f5a6c11", "MIG-GPU-8DBEBA8A-f2c8-4e3a-b4e5-9d5a2f5a6c11/7/0")
    True
    """
    return bool(cuda_uuid) and _bare(cuda_uuid) == _bare(claimed_uuid)


def _bare(uuid: str) -> str:
    return uuid.strip().lower().removeprefix("mig-").removeprefix("gpu-").partition("/")[0]


class PrimaryContext:
    """The primary context of one GPU, retained, with a tiny allocation in it: what shows others that the GPU is taken.

    It is the context that frameworks of the same process use too, so holding it costs nothing beside them. It belongs
    to the process that retained it: :meth:`release` in a forked child does nothing.

    Attributes:
        device_no: the CUDA ordinal; uuid: of the GPU behind it, as CUDA reports it.
    """

    def __init__(self, library: _Library, device: ctypes.c_int, device_no: int) -> None:
        self.device_no = device_no
        self.uuid = ""
        self._library = library
        self._device = device
        self._context: ctypes.c_void_p | None = None
        self._memory: ctypes.c_uint64 | None = None
        self._pid = os.getpid()

    @classmethod
    def retain(cls, device_no: int) -> PrimaryContext:
        """Wake CUDA where need be, and hold the GPU with this ordinal until :meth:`release`.

        The calling thread's current context stays what it was. On failure nothing is retained.

        Raises:
            CudaCallError: the driver refused.
            CudaInitializedError: this process was forked from one in which CUDA was awake.
            NoDriverError: there is no libcuda here.
        """
        import ctypes

        library = load()
        try:
            library.initialize()
        except CudaCallError as err:
            if err.code == NOT_INITIALIZED:
                raise CudaInitializedError(_SPAWN) from err
            raise
        self = cls(library, library.device(device_no), device_no)
        self.uuid = library.uuid(device_no)
        context = ctypes.c_void_p()
        library.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self._context = context
        try:
            with self._current(context):
                memory = ctypes.c_uint64(0)
                library.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(_HOLD_BYTES))
                self._memory = memory
        except BaseException:
            with suppress(CudaCallError):
                self.release()
            raise
        return self

    def release(self) -> None:
        """Free the allocation and let the context go; the second call does nothing.

        Raises:
            CudaCallError: the driver refused, after everything that could be let go has been.
        """
        context, self._context = self._context, None
        memory, self._memory = self._memory, None
        if context is None or self._pid != os.getpid():
            return
        try:
            try:
                if memory is not None:
                    with self._current(context):
                        self._library.call("cuMemFree_v2", memory)
            finally:
                self._library.call("cuDevicePrimaryCtxRelease_v2", self._device)
        except CudaCallError as err:
            if err.code != DEINITIALIZED:  # at interpreter exit the driver may have gone, and taken everything along
                raise

    @contextmanager
    def _current(self, context: ctypes.c_void_p) -> Iterator[None]:
        import ctypes

        self._library.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._library.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def _mapped() -> _Library | None:
    """libcuda if something has mapped it into this process, else None. A maps file is read faster than ctypes loads."""
    if "ctypes" not in sys.modules:
        try:
            with open("/proc/self/maps", "rb") as maps:
                if b"/libcuda.so" not in maps.read():
                    return None
        except OSError:
            pass
    import ctypes

    try:
        return _Library(ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD))
    except OSError:
        return None


def _forked_from_awake() -> bool:
    """Whether CUDA, which says here that it is not initialised, was awake in the process that this one came from.

    Either we woke it there ourselves, or the child has inherited the device that only CUDA opens (NVML does not).
    """
    if _woken_in is not None and _woken_in != os.getpid():
        return True
    try:
        return any(_opens(number, "/dev/nvidia-uvm") for number in os.listdir("/proc/self/fd"))
    except OSError:
        return False


def _opens(number: str, path: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{number}") == path
    except OSError:
        return False


def _ask_torch() -> None:
    """PyTorch's own word, where libcuda says that CUDA sleeps. ``is True``: tests put mock modules in its place."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return
    if getattr(cuda, "_is_in_bad_fork", bool)() is True:
        raise CudaInitializedError(_SPAWN)
    if getattr(cuda, "is_initialized", bool)() is True:
        raise CudaInitializedError(
            "PyTorch has CUDA initialised in this process, so its choice of GPUs is fixed: claim GPUs before the first "
            "use of torch.cuda (is_available and device_count included)"
        )
