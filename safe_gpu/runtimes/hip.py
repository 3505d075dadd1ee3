"""The HIP runtime library through ctypes: whether it is initialised, ordinals, and an allocation.

Loading ``libamdhip64.so`` reads no variable and opens nothing. The first call does: it reads the variables that choose
the GPUs, and opens ``/dev/kfd``, which then stays open. So the functions that ask whether HIP is initialised call it
only in a process that has ``/dev/kfd`` open.

Programs may bring their own copy of the library, as PyTorch's packages do. Two copies in one process may not get along,
so the copy that is mapped already is used, and else the one that an installed PyTorch would load.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import CudaInitializedError, NoDriverError
from ..procfs import lines_of
from .cuda import CudaCallError

if TYPE_CHECKING:
    import ctypes


# The HIP runtime library, called through ctypes: whether HIP is initialised, and which AMD GPU has which ordinal.


LIBRARY = "libamdhip64.so"
_FILES = (LIBRARY, f"{LIBRARY}.7", f"{LIBRARY}.6", f"{LIBRARY}.5", f"/opt/rocm/lib/{LIBRARY}")

# hipError_t
SUCCESS = 0
NO_DEVICE = 100
INVALID_DEVICE = 101

_MOST_GPUS = 1 << 12

# Pid of the process in which safe_gpu initialised HIP; see ``cuda._initialized_in``.
_initialized_in: int | None = None

_SPAWN = (
    "HIP was initialised in the process from which this one was forked, and a forked child cannot use it: start the "
    "child with multiprocessing's 'spawn' (or 'forkserver') method, or claim before HIP is used"
)


class HipCallError(CudaCallError):
    """A call of the HIP runtime failed; attributes as of :class:`~safe_gpu.runtimes.cuda.CudaCallError`."""


class HipLibrary:
    """libamdhip64 with its functions by name. Every call initialises HIP."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        self._handle = handle

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            HipCallError: the result is not hipSuccess, or the library has no such function.
        """
        function = getattr(self._handle, name, None)
        if function is None:
            raise HipCallError(f"{LIBRARY} has no {name}: ROCm is too old", call=name)
        code = int(function(*arguments))
        if code != SUCCESS:
            title, meaning = self._text("hipGetErrorName", code), self._text("hipGetErrorString", code)
            meaning = "" if meaning == title else f": {meaning}"  # HIP 5.2 has only names
            raise HipCallError(
                f"{name} failed with {title or 'unnamed HIP error'} ({code}){meaning}",
                call=name,
                code=code,
                name=title,
            )

    def _text(self, name: str, code: int) -> str:
        import ctypes

        function = getattr(self._handle, name, None)
        if function is None:
            return ""
        function.restype = ctypes.c_char_p
        return (function(ctypes.c_int(code)) or b"").decode(errors="replace")

    def initialize(self) -> None:
        """Initialise HIP and record the pid of this process.

        Raises:
            HipCallError: it cannot be initialised, or sees no GPU.
            CudaInitializedError: this process was forked from one in which safe_gpu had initialised HIP.
        """
        global _initialized_in
        if _initialized_in not in (None, os.getpid()):
            raise CudaInitializedError(_SPAWN)
        self.count()
        _initialized_in = os.getpid()

    def count(self) -> int:
        """How many GPUs HIP sees in this process."""
        import ctypes

        number = ctypes.c_int(0)
        self.call("hipGetDeviceCount", ctypes.byref(number))
        return max(0, min(number.value, _MOST_GPUS))

    def shown(self, ordinal: int) -> str:
        """``UUID/BUS-ID`` of an ordinal. The UUID is ``GPU-<16 hex digits>``, or "" for a GPU without one.

        Raises:
            HipCallError: with code INVALID_DEVICE if there is no such GPU.
        """
        import ctypes

        bus_id = ctypes.create_string_buffer(64)
        self.call("hipDeviceGetPCIBusId", bus_id, ctypes.c_int(len(bus_id)), ctypes.c_int(ordinal))
        octets = (ctypes.c_char * 16)()
        uuid = ""
        try:
            self.call("hipDeviceGetUuid", octets, ctypes.c_int(ordinal))
            uuid = _uuid(octets.raw)
        except HipCallError:
            pass  # older than ROCm 5.2
        return f"{uuid}/{bus_id.value.decode('ascii', 'replace').lower()}"

    def all_shown(self) -> tuple[str, ...]:
        """The GPUs that HIP sees in this process, in ordinal order."""
        return tuple(self.shown(ordinal) for ordinal in range(self.count()))


def _uuid(octets: bytes) -> str:
    """HIP's 16 bytes are the hex digits of ROCR's UUID as text."""
    text = octets.decode("ascii", "replace").lower()
    is_hex = len(text) == 16 and all(digit in "0123456789abcdef" for digit in text)
    return f"GPU-{text}" if is_hex and text.strip("0") else ""


def is_same_gpu(shown: str, uuid: str, bus_id: str) -> bool:
    """Whether what :meth:`HipLibrary.shown` returned is the GPU with this UUID and bus id.

    Partitions have one bus id, and the function in it is that of the partition in some versions of HIP. So the UUID
    decides, and the bus id only for GPUs without one.
    """
    seen, _, seen_at = shown.partition("/")
    if seen and uuid.startswith("GPU-"):
        return seen.lower() == uuid.lower()
    return bool(seen_at) and seen_at.rpartition(".")[0] == bus_id.lower().rpartition(".")[0]


def load() -> HipLibrary:
    """Map libamdhip64 into this process. This does not initialise HIP.

    Raises:
        NoDriverError: this host has none.
    """
    from . import libraries

    mapped = _mapped_file()
    trouble = None
    for file in [mapped] if mapped else [*_of_pytorch(), *_FILES]:
        try:
            return HipLibrary(libraries.load(file))
        except OSError as err:
            trouble = trouble or err
    raise NoDriverError(
        f"the HIP runtime library cannot be loaded ({trouble}): install ROCm's hip-runtime-amd, or put its directory "
        "on LD_LIBRARY_PATH; `safe-gpu run` and NoPlaceholder() do without it",
        driver="hip",
    )


def _of_pytorch() -> list[str]:
    """The copy that PyTorch would load, if a build of PyTorch for ROCm is installed. PyTorch is not imported."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return []
    path = os.path.join(os.path.dirname(spec.origin), "lib", LIBRARY) if spec is not None and spec.origin else ""
    return [path] if path and os.path.exists(path) else []


def visible_if_initialized() -> tuple[str, ...] | None:
    """The GPUs that HIP sees in this process, in ordinal order; None while HIP is not initialised.

    This never initialises HIP.

    Raises:
        CudaInitializedError: HIP is initialised but its GPUs cannot be listed, or this process was forked from one in
            which it was.
    """
    from .cuda import refuse_if_torch_uses_cuda

    if not _kfd_is_open():
        refuse_if_torch_uses_cuda()
        return None
    if _initialized_in not in (None, os.getpid()):
        raise CudaInitializedError(_SPAWN)
    library = _mapped()
    if library is None:
        raise CudaInitializedError(
            "this process has /dev/kfd open, so that an AMD library has chosen its GPUs, and it is not HIP that could "
            "tell which: claim GPUs before the first use of ROCm, or in a new process"
        )
    try:
        return library.all_shown()
    except CudaCallError as err:
        if err.code == NO_DEVICE:
            return ()
        raise CudaInitializedError(
            f"HIP is in use in this process but fails ({err}): claim GPUs in a new process"
        ) from err


def shown_at(ordinal: int) -> str | None:
    """The GPU that HIP knows by this ordinal in this process; "" if there is none.

    None while HIP is not initialised or cannot be asked.
    """
    library = _mapped() if _kfd_is_open() else None
    if library is None:
        return None
    try:
        return library.shown(ordinal)
    except CudaCallError as err:
        return "" if err.code in (INVALID_DEVICE, NO_DEVICE) else None


def _kfd_is_open() -> bool:
    device = os.path.join(os.environ.get("SAFE_GPU_FSROOT") or "/", "dev/kfd")
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return _mapped_file() != ""  # nothing tells, so the library is taken to be in use
    for number in numbers:
        try:
            if os.readlink(f"/proc/self/fd/{number}") in ("/dev/kfd", device):
                return True
        except OSError:
            continue  # closed meanwhile
    return False


def _mapped_file() -> str:
    for line in lines_of("/proc/self/maps"):
        path = line.split(None, 5)[-1].strip()
        if path.rpartition(b"/")[2].startswith(LIBRARY.encode()):
            return os.fsdecode(path)
    return ""


def _mapped() -> HipLibrary | None:
    path = _mapped_file()
    if not path:
        return None
    import ctypes

    try:
        return HipLibrary(ctypes.CDLL(path, mode=os.RTLD_NOLOAD))
    except OSError:
        return None


# An allocation that holds one AMD GPU, so that the kernel shows this process there.


# The driver rounds it up to its own granularity. Any memory on a GPU shows the process there.
_HOLD_BYTES = 1 << 16


class HipMemory:
    """A small allocation on one GPU. It belongs to the process that made it: :meth:`release` in a child does nothing.

    Attributes:
        device_no: HIP's ordinal; shown: the GPU behind it, as HIP names it.
    """

    def __init__(self, device_no: int) -> None:
        """Initialise HIP if necessary, and allocate. The current device of the calling thread does not change.

        Raises:
            HipCallError: HIP refused. NoDriverError: this host has no HIP.
            CudaInitializedError: this process was forked from one in which HIP was initialised.
        """
        import ctypes

        self.device_no = device_no
        self._pid = os.getpid()
        self._library = load()
        self._library.initialize()
        self.shown = self._library.shown(device_no)
        self._memory: ctypes.c_void_p | None = None
        memory = ctypes.c_void_p()
        with _Device(self._library, device_no):
            self._library.call("hipMalloc", ctypes.byref(memory), ctypes.c_size_t(_HOLD_BYTES))
        self._memory = memory

    def release(self) -> None:
        """Free the allocation. HIP stays initialised. A second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is None or self._pid != os.getpid():
            return
        with _Device(self._library, self.device_no):
            self._library.call("hipFree", memory)


class _Device:
    """``with _Device(library, ordinal)``: that device is the calling thread's current one, for the block."""

    def __init__(self, library: HipLibrary, ordinal: int) -> None:
        import ctypes

        self._library = library
        self._ordinal = ctypes.c_int(ordinal)
        self._before = ctypes.c_int(0)

    def __enter__(self) -> None:
        import ctypes

        self._library.call("hipGetDevice", ctypes.byref(self._before))
        self._library.call("hipSetDevice", self._ordinal)

    def __exit__(self, *exc: object) -> None:
        with suppress(HipCallError):
            self._library.call("hipSetDevice", self._before)
