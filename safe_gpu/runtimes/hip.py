"""The HIP runtime library through ctypes: whether it is initialised, ordinals, and an allocation.

Loading ``libamdhip64.so`` reads no variable and opens nothing. The first call does: it reads the variables that choose
the GPUs, and opens ``/dev/kfd``, which then stays open. So the functions that ask whether HIP is initialised call it
only in a process that has ``/dev/kfd`` open.

Programs may bring their own copy of the library, as PyTorch's packages do. Two copies in one process may not get along,
so the copy that is mapped already is used, and else the one that an installed PyTorch would load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ..errors import CudaInitializedError, NoDriverError
from ..host.procfs import lines_of, open_files
from .cuda import CudaCallError, Library, refuse_if_torch_uses_cuda

if TYPE_CHECKING:
    import ctypes


LIBRARY = "libamdhip64.so"
_FILES = (LIBRARY, f"{LIBRARY}.7", f"{LIBRARY}.6", f"{LIBRARY}.5", f"/opt/rocm/lib/{LIBRARY}")

# hipError_t
NO_DEVICE = 100
INVALID_DEVICE = 101


class HipCallError(CudaCallError):
    """A call of the HIP runtime failed; attributes as of :class:`~safe_gpu.runtimes.cuda.CudaCallError`."""


class HipLibrary(Library):
    """libamdhip64 with its functions by name. Every call initialises HIP."""

    file = LIBRARY
    driver = "ROCm"
    counting = "hipGetDeviceCount"
    failure = HipCallError
    forked = (
        "HIP was initialised in the process from which this one was forked, and a forked child cannot use it: start "
        "the child with multiprocessing's 'spawn' (or 'forkserver') method, or claim before HIP is used"
    )

    def texts(self, code: int) -> tuple[str, str]:
        """Return the name of a result, and what it means, "" if the library does not say."""
        import ctypes

        said = []
        for function in ("hipGetErrorName", "hipGetErrorString"):
            ask = getattr(self._handle, function, None)
            if ask is not None:
                ask.restype = ctypes.c_char_p
            said.append((ask(ctypes.c_int(code)) or b"").decode(errors="replace") if ask else "")
        name, meaning = said
        return name or "unnamed HIP error", "" if meaning == name else meaning  # HIP 5.2 has only names

    def initialize(self) -> None:
        """Initialise HIP and record the pid of this process.

        Raises:
            HipCallError: it cannot be initialised, or sees no GPU.
            CudaInitializedError: this process was forked from one in which safe_gpu had initialised HIP.
        """
        self.refuse_if_forked()
        self.count()
        type(self).initialized_in = os.getpid()

    def shown(self, ordinal: int) -> str:
        """``UUID/BUS-ID`` of an ordinal. The UUID is ``GPU-<16 hex digits>``, or "" for a GPU without one.

        Raises:
            HipCallError: with code INVALID_DEVICE if there is no such GPU.
        """
        import ctypes

        bus_id = ctypes.create_string_buffer(64)
        self.call("hipDeviceGetPCIBusId", bus_id, ctypes.c_int(len(bus_id)), ctypes.c_int(ordinal))
        octets = (ctypes.c_char * 16)()
        with suppress(HipCallError):  # older than ROCm 5.2
            self.call("hipDeviceGetUuid", octets, ctypes.c_int(ordinal))
        uuid = _uuid(octets.raw)
        return f"{uuid}/{bus_id.value.decode('ascii', 'replace').lower()}"


def _uuid(octets: bytes) -> str:
    """HIP's 16 bytes are the hex digits of ROCR's UUID as text."""
    text = octets.decode("ascii", "replace").lower()
    return f"GPU-{text}" if re.fullmatch("(?!0*$)[0-9a-f]{16}", text) else ""


def is_same_gpu(shown: str, uuid: str, bus_id: str) -> bool:
    """Return whether what :meth:`HipLibrary.shown` returned is the GPU with this UUID and bus id.

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
        "on LD_LIBRARY_PATH; `safe-gpu run` and NoPlaceholder() do not need it",
        driver="hip",
    )


def _of_pytorch() -> list[str]:
    """Return the copy that PyTorch would load, if a build of PyTorch for ROCm is installed. PyTorch is not imported."""
    from importlib.util import find_spec

    with suppress(ImportError, ValueError):
        spec = find_spec("torch")
        path = os.path.join(os.path.dirname(spec.origin), "lib", LIBRARY) if spec is not None and spec.origin else ""
        return [path] if os.path.exists(path) else []
    return []


def visible_if_initialized() -> tuple[str, ...] | None:
    """Return the GPUs that HIP sees in this process, in ordinal order; None while HIP is not initialised.

    This never initialises HIP.

    Raises:
        CudaInitializedError: HIP is initialised but its GPUs cannot be listed, or this process was forked from one in
            which it was.
    """
    if not _kfd_is_open():
        refuse_if_torch_uses_cuda()
        return None
    HipLibrary.refuse_if_forked()
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
        problem = f"HIP is in use in this process but fails ({err}): claim GPUs in a new process"
        raise CudaInitializedError(problem) from err


def shown_at(ordinal: int) -> str | None:
    """Return the GPU that HIP knows by this ordinal in this process; "" if there is none.

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
    files = open_files("self")
    if files is None:
        return _mapped_file() != ""  # nothing tells, so the library is taken to be in use
    return not {"/dev/kfd", device}.isdisjoint(files.values())


def _mapped_file() -> str:
    for line in lines_of("/proc/self/maps"):
        path = line.rstrip(b"\n").split(None, 5)[-1]
        if path.rpartition(b"/")[2].startswith(LIBRARY.encode()):
            return os.fsdecode(path)
    return ""


def _mapped() -> HipLibrary | None:
    import ctypes

    path = _mapped_file()
    with suppress(OSError):
        return HipLibrary(ctypes.CDLL(path, mode=os.RTLD_NOLOAD)) if path else None
    return None


# The driver rounds it up to its own granularity. Any memory on a GPU shows the process there.
_HOLD_BYTES = 1 << 16


class HipMemory:
    """A small allocation on one GPU. It belongs to the process that made it: :meth:`release` in a child does nothing.

    Attributes:
        device_no: HIP's ordinal.
        shown: the GPU behind it, as HIP names it.
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
        with self._current():
            self._library.call("hipMalloc", ctypes.byref(memory), ctypes.c_size_t(_HOLD_BYTES))
        self._memory = memory

    def release(self) -> None:
        """Free the allocation. HIP stays initialised. A second call does nothing."""
        memory, self._memory = self._memory, None
        if memory is None or self._pid != os.getpid():
            return
        with self._current():
            self._library.call("hipFree", memory)

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the GPU the calling thread's current one for the block."""
        import ctypes

        before = ctypes.c_int(0)
        self._library.call("hipGetDevice", ctypes.byref(before))
        self._library.call("hipSetDevice", ctypes.c_int(self.device_no))
        try:
            yield
        finally:
            with suppress(HipCallError):
                self._library.call("hipSetDevice", before)


hold = HipMemory
