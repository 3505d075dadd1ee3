"""A CUDA context that holds one GPU, so that nvidia-smi and other tools show the GPU as in use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ..errors import NoDriverError
from .cuda import DEINITIALIZED, CudaCallError, load

if TYPE_CHECKING:
    import ctypes

    from .cuda import Library


# Any size will do; the driver rounds it up to its own granularity.
_HOLD_BYTES = 1024


def active_contexts() -> tuple[str, ...]:
    """UUIDs of the GPUs on which this process has a primary context, a framework's included; empty if CUDA fails.

    CUDA is not initialised for it.
    """
    import ctypes

    found = []
    with suppress(CudaCallError, NoDriverError):
        library = load()
        for ordinal in range(library.count()):
            flags, active = ctypes.c_uint(0), ctypes.c_int(0)
            state = (library.device(ordinal), ctypes.byref(flags), ctypes.byref(active))
            library.call("cuDevicePrimaryCtxGetState", *state)
            if active.value:
                found.append(library.uuid(ordinal))
    return tuple(found)


class PrimaryContext:
    """The primary context of one GPU, retained, with a small allocation in it. Other processes see the GPU as in use.

    Frameworks in the same process use the same context, so it costs no memory beyond theirs. It belongs to the process
    that retained it: :meth:`release` in a forked child does nothing.

    Attributes:
        device_no: the CUDA ordinal; uuid: of the GPU behind it, as CUDA reports it.
    """

    def __init__(self, library: Library, device: ctypes.c_int, device_no: int) -> None:
        self.device_no = device_no
        self.uuid = ""
        self._library = library
        self._device = device
        self._context: ctypes.c_void_p | None = None
        self._memory: ctypes.c_uint64 | None = None
        self._pid = os.getpid()

    @classmethod
    def retain(cls, device_no: int) -> PrimaryContext:
        """Initialise CUDA if necessary, and hold the GPU with this ordinal until :meth:`release`.

        The current context of the calling thread does not change. On failure nothing is retained.

        Raises:
            CudaCallError: the driver refused.
            CudaInitializedError: this process was forked from one in which CUDA was initialised.
            NoDriverError: this host has no libcuda.
        """
        import ctypes

        library = load()
        library.initialize()
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
        """Free the allocation and release the context. A second call does nothing.

        Raises:
            CudaCallError: the driver refused one of the two; the other was still attempted.
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
