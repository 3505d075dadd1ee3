"""An allocation that holds one AMD GPU, so that the kernel shows this process there."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from . import hip

if TYPE_CHECKING:
    import ctypes


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
        self._library = hip.load()
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

    def __init__(self, library: hip.HipLibrary, ordinal: int) -> None:
        import ctypes

        self._library = library
        self._ordinal = ctypes.c_int(ordinal)
        self._before = ctypes.c_int(0)

    def __enter__(self) -> None:
        import ctypes

        self._library.call("hipGetDevice", ctypes.byref(self._before))
        self._library.call("hipSetDevice", self._ordinal)

    def __exit__(self, *exc: object) -> None:
        with suppress(hip.HipCallError):
            self._library.call("hipSetDevice", self._before)
