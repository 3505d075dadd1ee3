"""The CUDA driver library: whether it is initialised, here or before a fork; ordinals; a context.

CUDA reads CUDA_VISIBLE_DEVICES once, in ``cuInit``. Until then it answers NOT_INITIALIZED to every question.

Names and codes are those of the CUDA driver API (cuda.h). Drivers older than CUDA 11 lack the functions with a version
suffix.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import NoDriverError
from ..gpus.devices import Gpu
from .calls import CudaCallError
from .library import HELD_BYTES, Library
from .placeholders import LibraryPlaceholder

if TYPE_CHECKING:
    import ctypes

# CUresult
_DEINITIALIZED = 4


class CudaLibrary(Library):
    """libcuda. A GPU is named by its UUID."""

    names = ("libcuda.so.1",)
    vendor = "the NVIDIA driver"
    install = "install the NVIDIA driver, or start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    counting = "cuDeviceGetCount"
    not_initialized_codes: ClassVar = {
        3: "CUDA_ERROR_NOT_INITIALIZED",
        34: "CUDA_ERROR_STUB_LIBRARY",
    }  # a stub says 34 to all calls
    opened = "/dev/nvidia-uvm"  # not by NVML; there is none on WSL2 and Jetson

    def mapped_files(self) -> Sequence[str]:
        """Return the names of libcuda once ctypes is loaded: the dynamic linker tells faster than the maps."""
        if "ctypes" in sys.modules:
            return self.names
        return super().mapped_files()

    def texts(self, code: int) -> tuple[str, str]:
        name = self._text("cuGetErrorName", code)
        meaning = self._text("cuGetErrorString", code)
        return name or "unnamed CUDA error", meaning

    def _text(self, function: str, code: int) -> str:
        """Return what one of CUDA's functions says of a result; "" if it does not know it."""
        import ctypes

        text = ctypes.c_char_p()
        with suppress(CudaCallError):  # NULL stays where the library does not know the code
            self.ask(function, ctypes.c_int(code), ctypes.byref(text))
        return (text.value or b"").decode(errors="replace")

    def start(self) -> None:
        import ctypes

        self.call("cuInit", ctypes.c_uint(0))

    def device(self, ordinal: int) -> ctypes.c_int:
        """Return the CUdevice of an ordinal.

        Raises:
            CudaCallError: with code 101 if there is no such device.
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
        has_name = self.ask("cuDeviceGetName", name, ctypes.c_int(len(name)), device) == 0
        kind = "GPU"
        if has_name and b" MIG " in name.value:
            kind = "MIG"
        digits = bytes(octets).hex()
        return f"{kind}-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        return same_device(shown, gpu.uuid)

    def contexts(self) -> frozenset[str]:
        """Return the UUIDs of the GPUs on which this process has a primary context, a framework's included; empty if
        CUDA fails. CUDA is not initialised for it."""
        import ctypes

        found = set()
        with suppress(CudaCallError, NoDriverError):
            for ordinal in range(self.load().count()):
                flags = ctypes.c_uint(0)
                is_active = ctypes.c_int(0)
                device = self.device(ordinal)
                self.call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(is_active))
                if is_active.value:
                    found.add(self.shown(ordinal))
        return frozenset(found)

    def default_placeholder(self, logger: Any = None) -> CudaPlaceholder:
        return CudaPlaceholder(logger)

    def allocate(self, ordinal: int) -> Any:
        """Retain the primary context of a GPU, with a small allocation in it.

        Frameworks in the same process use the same context, so it costs no memory beyond theirs. The current context of
        the calling thread does not change.
        """
        import ctypes

        device = self.device(ordinal)
        context = ctypes.c_void_p()
        memory = ctypes.c_uint64(0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            with self._current(context):
                self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(HELD_BYTES))
        except BaseException:
            with suppress(CudaCallError):
                self.free((device, context, memory))
            raise
        return device, context, memory

    def free(self, held: Any) -> None:
        """Free the allocation and release the context. If the driver refuses one of the two, the other is still
        attempted."""
        device, context, memory = held
        try:
            try:
                if memory:
                    with self._current(context):
                        self.call("cuMemFree_v2", memory)
            finally:
                self.call("cuDevicePrimaryCtxRelease_v2", device)
        except CudaCallError as err:
            if err.code != _DEINITIALIZED:  # at interpreter exit CUDA may have shut down, which freed both
                raise

    @contextmanager
    def _current(self, context: ctypes.c_void_p) -> Iterator[None]:
        import ctypes

        self.call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


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


CUDA = CudaLibrary()


class CudaPlaceholder(LibraryPlaceholder):
    """The default: a primary context with a small allocation, made through the CUDA driver and freed on release."""

    library: ClassVar[Library] = CUDA
