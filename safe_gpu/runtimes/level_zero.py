"""Level Zero through ctypes: whether it is in use, which cards it shows, and an allocation.

Loading ``libze_loader.so.1`` reads no variable and opens no GPU. ``zeInit`` does: it reads the variables that choose
the devices, and opens the render nodes below ``/dev/dri``, which then stay open. So the functions that ask whether
Level Zero is in use call it only in a process that has the library mapped and a render node open.

Under ``ZE_FLAT_DEVICE_HIERARCHY=FLAT`` every tile is a device. The ordinals here count cards: the tiles of one card,
which have one bus id, are neighbours in the list (Level Zero specification, Core Programming Guide).
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import CudaInitializedError, NoDriverError
from ..host.procfs import lines_of, open_files
from .cuda import CudaCallError, Library

if TYPE_CHECKING:
    import ctypes

LIBRARY = "libze_loader.so"
_FILES = (f"{LIBRARY}.1", LIBRARY)

# ze_structure_type_t, ze_init_flags_t and ze_result_t of ze_api.h
_CONTEXT, _DEVICE_MEMORY, _PCI_PROPERTIES = 0x0D, 0x15, 0x10008
_GPU_ONLY = 1
_RESULTS = {
    0x70000001: "ZE_RESULT_ERROR_DEVICE_LOST",
    0x70000002: "ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    0x70000003: "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    0x70010000: "ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS",
    0x70010001: "ZE_RESULT_ERROR_NOT_AVAILABLE",
    0x70020000: "ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE",
    0x78000001: "ZE_RESULT_ERROR_UNINITIALIZED",
}
# The driver rounds it up to its own granularity.
_HOLD_BYTES = 1 << 16


class ZeCallError(CudaCallError):
    """A call of Level Zero failed; attributes as of :class:`~safe_gpu.runtimes.cuda.CudaCallError`."""


class ZeLibrary(Library):
    """libze_loader with its functions by name."""

    file = LIBRARY
    driver = "Level Zero's loader"
    failure = ZeCallError
    no_gpu = (0x78000001, 0x70020000)
    forked = (
        "Level Zero was initialised in the process from which this one was forked, and a forked child cannot use it: "
        "start the child with multiprocessing's 'spawn' (or 'forkserver') method, or claim before it is used"
    )

    def texts(self, code: int) -> tuple[str, str]:
        """Return the name of a result; the library has no texts."""
        return _RESULTS.get(code, f"ze_result_t {code:#x}"), ""

    def initialize(self) -> None:
        """Call zeInit and record the pid of this process.

        Raises:
            ZeCallError: there is no driver, or no GPU.
            CudaInitializedError: this process was forked from one in which safe_gpu had initialised it.
        """
        import ctypes

        self.refuse_if_forked()
        self.call("zeInit", ctypes.c_uint32(_GPU_ONLY))
        type(self).initialized_in = os.getpid()

    def cards(self) -> list[tuple[str, ctypes.c_void_p, ctypes.c_void_p]]:
        """Bus id, driver and first device of each card that Level Zero shows, in its order."""
        found: dict[str, tuple[str, ctypes.c_void_p, ctypes.c_void_p]] = {}
        for driver in self._handles("zeDriverGet"):
            for device in self._handles("zeDeviceGet", driver):
                bus_id = self._bus_id(device)
                found.setdefault(bus_id, (bus_id, driver, device))
        return list(found.values())

    def all_shown(self) -> tuple[str, ...]:
        """Return the bus ids of the cards that Level Zero shows, in its order."""
        return tuple(bus_id for bus_id, _, _ in self.cards())

    def _handles(self, name: str, *of: Any) -> list[ctypes.c_void_p]:
        import ctypes

        count = ctypes.c_uint32(0)
        self.call(name, *of, ctypes.byref(count), None)
        handles = (ctypes.c_void_p * count.value)()
        self.call(name, *of, ctypes.byref(count), handles)
        return [ctypes.c_void_p(handle) for handle in handles[: count.value]]

    def _bus_id(self, device: ctypes.c_void_p) -> str:
        import ctypes

        class Properties(ctypes.Structure):  # ze_pci_ext_properties_t
            _fields_ = (
                ("stype", ctypes.c_uint32),
                ("next", ctypes.c_void_p),
                ("address", ctypes.c_uint32 * 4),
                ("speed", ctypes.c_int64 * 2),
            )

        properties = Properties(stype=_PCI_PROPERTIES)
        self.call("zeDevicePciGetPropertiesExt", device, ctypes.byref(properties))
        domain, bus, slot, function = properties.address
        return f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"


def load() -> ZeLibrary:
    """Map libze_loader into this process. This does not initialise it.

    Raises:
        NoDriverError: this host has none.
    """
    from . import libraries

    trouble = None
    for file in _FILES:
        try:
            return ZeLibrary(libraries.load(file))
        except OSError as err:
            trouble = trouble or err
    raise NoDriverError(
        f"the Level Zero loader cannot be loaded ({trouble}): install level-zero (libze1), or put its directory on "
        "LD_LIBRARY_PATH; `safe-gpu run` and NoPlaceholder() do not need it",
        driver="level zero",
    )


def visible_if_initialized() -> tuple[str, ...] | None:
    """Return the cards that Level Zero shows in this process; None while it is not in use. This never initialises it.

    Raises:
        CudaInitializedError: it is in use but its cards cannot be listed, or this process was forked from one in which
            it was.
    """
    library = _in_use()
    if library is None:
        return None
    library.refuse_if_forked()
    try:
        return library.listed()
    except CudaCallError as err:
        problem = f"Level Zero is in use in this process but fails ({err}): claim GPUs in a new process"
        raise CudaInitializedError(problem) from err


def shown_at(ordinal: int) -> str | None:
    """Return the bus id of the card with this ordinal; "" if there is none, None if Level Zero is not in use or
    fails."""
    library = _in_use()
    with suppress(CudaCallError):
        if library is not None:
            shown = library.listed()
            return shown[ordinal] if ordinal < len(shown) else ""
    return None


def _in_use() -> ZeLibrary | None:
    """Return the library if it is mapped and a render node is open, else None."""
    import ctypes

    nodes = os.path.join(os.environ.get("SAFE_GPU_FSROOT") or "/", "dev/dri/render")
    files = open_files("self")
    if files is not None and not any(path.startswith((nodes, "/dev/dri/render")) for path in files.values()):
        return None
    for line in lines_of("/proc/self/maps"):
        path = line.rstrip(b"\n").split(None, 5)[-1]
        if path.rpartition(b"/")[2].startswith(LIBRARY.encode()):
            with suppress(OSError):
                return ZeLibrary(ctypes.CDLL(os.fsdecode(path), mode=os.RTLD_NOLOAD))
    return None


class ZeMemory:
    """A context with a small allocation on one card. It belongs to the process that made it.

    Attributes:
        device_no: the ordinal of the card.
        shown: its bus id.
    """

    def __init__(self, device_no: int) -> None:
        """Initialise Level Zero if necessary, and allocate.

        Raises:
            ZeCallError: Level Zero refused, or shows fewer cards. NoDriverError: this host has none.
            CudaInitializedError: this process was forked from one in which it was initialised.
        """
        import ctypes

        class Descriptor(ctypes.Structure):  # ze_context_desc_t is this without the ordinal
            _fields_ = (
                ("stype", ctypes.c_uint32),
                ("next", ctypes.c_void_p),
                ("flags", ctypes.c_uint32),
                ("ordinal", ctypes.c_uint32),
            )

        self.device_no = device_no
        self._pid = os.getpid()
        self._library = load()
        self._library.initialize()
        shown = self._library.cards()
        if device_no >= len(shown):
            raise ZeCallError(
                f"Level Zero shows {len(shown)} cards, and none is number {device_no}", call="zeDeviceGet"
            )
        self.shown, driver, device = shown[device_no]
        self._context, self._memory = ctypes.c_void_p(), ctypes.c_void_p()
        wanted = Descriptor(stype=_CONTEXT)
        self._library.call("zeContextCreate", driver, ctypes.byref(wanted), ctypes.byref(self._context))
        try:
            wanted = Descriptor(stype=_DEVICE_MEMORY)
            size, alignment = ctypes.c_size_t(_HOLD_BYTES), ctypes.c_size_t(0)
            call = ("zeMemAllocDevice", self._context, ctypes.byref(wanted), size, alignment, device)
            self._library.call(*call, ctypes.byref(self._memory))
        except BaseException:
            self._library.ask("zeContextDestroy", self._context)
            raise

    def release(self) -> None:
        """Free the allocation and the context. Level Zero stays initialised. A second call does nothing."""
        context, self._context = self._context, None  # type: ignore[assignment]
        if context is None or self._pid != os.getpid():
            return
        self._library.call("zeMemFree", context, self._memory)
        self._library.call("zeContextDestroy", context)


hold = ZeMemory
