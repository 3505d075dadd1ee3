"""The HIP runtime library: whether it is initialised, ordinals, and an allocation.

Loading ``libamdhip64.so`` reads no variable and opens nothing. The first call does: it reads the variables that choose
the GPUs, and opens ``/dev/kfd``, which then stays open. So the questions whether HIP is initialised go only to a
process that has ``/dev/kfd`` open.

Programs may bring their own copy of the library, as PyTorch's packages do. Two copies in one process may not get along,
so the copy that is mapped already is used, and else the one that an installed PyTorch would load.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import CudaInitializedError
from ..gpus.devices import Gpu
from .calls import CudaCallError
from .library import HELD_BYTES, Library
from .placeholders import LibraryPlaceholder

_FILE = "libamdhip64.so"


class HipLibrary(Library):
    """libamdhip64, whose every call initialises HIP. A GPU is named by UUID and bus id."""

    title = "HIP"
    names = (_FILE, f"{_FILE}.7", f"{_FILE}.6", f"{_FILE}.5", f"/opt/rocm/lib/{_FILE}")
    vendor = "ROCm"
    install = (
        "install ROCm's hip-runtime-amd, or put its directory on LD_LIBRARY_PATH; `safe-gpu run` and NoPlaceholder() "
        "do not need it"
    )
    counting = "hipGetDeviceCount"
    device_files = "dev/kfd"

    def files(self) -> Sequence[str]:
        return (*_of_pytorch(), *self.names)

    def visible_if_initialized(self) -> tuple[str, ...] | None:
        if self.has_opened() and not self.is_mapped():
            raise CudaInitializedError(
                "this process has /dev/kfd open, so that an AMD library has chosen its GPUs, and it is not HIP that "
                "could tell which: claim GPUs before the first use of ROCm, or in a new process"
            )
        return super().visible_if_initialized()

    def texts(self, code: int) -> tuple[str, str]:
        name = self._text("hipGetErrorName", code)
        meaning = self._text("hipGetErrorString", code)
        if meaning == name:  # HIP 5.2 has only names
            meaning = ""
        return name or "unnamed HIP error", meaning

    def _text(self, function: str, code: int) -> str:
        """Return what one of HIP's functions says of a result; "" if there is no such function."""
        import ctypes

        ask = getattr(self._handle, function, None)
        if ask is None:
            return ""
        ask.restype = ctypes.c_char_p
        return (ask(ctypes.c_int(code)) or b"").decode(errors="replace")

    def start(self) -> None:
        self.count()

    def shown(self, ordinal: int) -> str:
        """Return ``UUID/BUS-ID`` of an ordinal. The UUID is ``GPU-<16 hex digits>``, or "" for a GPU without one."""
        import ctypes

        bus_id = ctypes.create_string_buffer(64)
        self.call("hipDeviceGetPCIBusId", bus_id, ctypes.c_int(len(bus_id)), ctypes.c_int(ordinal))
        octets = (ctypes.c_char * 16)()
        with suppress(CudaCallError):  # older than ROCm 5.2
            self.call("hipDeviceGetUuid", octets, ctypes.c_int(ordinal))
        digits = octets.raw.decode("ascii", "replace").lower()  # those of ROCR's UUID, as text
        uuid = ""
        if re.fullmatch("(?!0*$)[0-9a-f]{16}", digits):
            uuid = f"GPU-{digits}"
        return f"{uuid}/{bus_id.value.decode('ascii', 'replace').lower()}"

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        """Return whether what :meth:`shown` returned is this GPU.

        Partitions have one bus id, and the function in it is that of the partition in some versions of HIP. So the UUID
        decides, and the bus id only for GPUs without one.
        """
        seen, _, seen_at = shown.partition("/")
        if seen and gpu.uuid.startswith("GPU-"):
            return seen.lower() == gpu.uuid.lower()
        return bool(seen_at) and seen_at.rpartition(".")[0] == gpu.pci_bus_id.lower().rpartition(".")[0]

    def default_placeholder(self, logger: Any = None) -> "HipPlaceholder":
        return HipPlaceholder(logger)

    def allocate(self, ordinal: int) -> Any:
        """Allocate on a GPU. The current device of the calling thread does not change."""
        import ctypes

        memory = ctypes.c_void_p()
        with self._current(ordinal):
            self.call("hipMalloc", ctypes.byref(memory), ctypes.c_size_t(HELD_BYTES))
        return ordinal, memory

    def free(self, held: Any) -> None:
        ordinal, memory = held
        with self._current(ordinal):
            self.call("hipFree", memory)

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Make the GPU the calling thread's current one for the block."""
        import ctypes

        before = ctypes.c_int(0)
        self.call("hipGetDevice", ctypes.byref(before))
        self.call("hipSetDevice", ctypes.c_int(ordinal))
        try:
            yield
        finally:
            with suppress(CudaCallError):
                self.call("hipSetDevice", before)


def _of_pytorch() -> list[str]:
    """Return the copy that PyTorch would load, if a build of PyTorch for ROCm is installed. PyTorch is not imported."""
    from importlib.util import find_spec

    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return []
    if spec is None or not spec.origin:
        return []
    path = os.path.join(os.path.dirname(spec.origin), "lib", _FILE)
    if not os.path.exists(path):
        return []
    return [path]


HIP = HipLibrary()


class HipPlaceholder(LibraryPlaceholder):
    """The default on AMD GPUs: a small allocation through HIP, freed on release.

    HIP stays initialised in this process, so that the kernel may list it on the GPU until it ends.
    """

    library = HIP
