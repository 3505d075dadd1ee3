"""Level Zero: whether it is in use, which cards it shows, and an allocation.

Loading ``libze_loader.so.1`` reads no variable and opens no GPU. ``zeInit`` does: it reads the variables that choose
the devices, and opens the render nodes below ``/dev/dri``, which then stay open. So the questions whether Level Zero is
in use go only to a process that has the library mapped and a render node open.

Under ``ZE_FLAT_DEVICE_HIERARCHY=FLAT`` every tile is a device. The ordinals here count cards: the tiles of one card,
which have one bus id, are neighbours in the list (Level Zero specification, Core Programming Guide).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import NoDriverError
from ..gpus.devices import Gpu
from ..gpus.visible import HIERARCHY
from .library import HELD_BYTES, CudaCallError, Library
from .placeholders import LevelZeroPlaceholder, NoPlaceholder

if TYPE_CHECKING:
    import ctypes

# ze_structure_type_t, ze_init_flags_t and ze_result_t of ze_api.h
_CONTEXT, _DEVICE_MEMORY, _PCI_PROPERTIES = 0x0D, 0x15, 0x10008
_GPU_ONLY = 1
_UNINITIALIZED, _NO_DRIVER, _NO_CARD = 0x78000001, 0x70020000, 0x78000004
_RESULTS = {
    0x70000001: "ZE_RESULT_ERROR_DEVICE_LOST",
    0x70000002: "ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY",
    0x70000003: "ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY",
    0x70010000: "ZE_RESULT_ERROR_INSUFFICIENT_PERMISSIONS",
    0x70010001: "ZE_RESULT_ERROR_NOT_AVAILABLE",
    _NO_DRIVER: "ZE_RESULT_ERROR_DEPENDENCY_UNAVAILABLE",
    _UNINITIALIZED: "ZE_RESULT_ERROR_UNINITIALIZED",
}


class ZeCallError(CudaCallError):
    """A call of Level Zero failed; attributes as of :class:`~safe_gpu.runtimes.library.CudaCallError`."""


class ZeLibrary(Library):
    """libze_loader. A GPU is named by its bus id."""

    title, failure = "Level Zero", ZeCallError
    names = ("libze_loader.so.1", "libze_loader.so")
    called, vendor = "the Level Zero loader", "Level Zero's loader"
    install = (
        "install level-zero (libze1), or put its directory on LD_LIBRARY_PATH; `safe-gpu run` and NoPlaceholder() do "
        "not need it"
    )
    device_files = "dev/dri/render"
    no_gpu = (_UNINITIALIZED, _NO_DRIVER)
    no_device = (*no_gpu, _NO_CARD)
    trial: ClassVar[Mapping[str, str]] = {HIERARCHY: "COMPOSITE"}  # the one in which the number of a card is its index

    def texts(self, code: int) -> tuple[str, str]:
        """Return the name of a result; the library has no texts."""
        return _RESULTS.get(code, f"ze_result_t {code:#x}"), ""

    def start(self) -> None:
        import ctypes

        self.call("zeInit", ctypes.c_uint32(_GPU_ONLY))

    def cards(self) -> list[tuple[str, ctypes.c_void_p, ctypes.c_void_p]]:
        """Return bus id, driver and first device of each card that Level Zero shows, in its order."""
        self.initialize()
        found: dict[str, tuple[str, ctypes.c_void_p, ctypes.c_void_p]] = {}
        for driver in self._handles("zeDriverGet"):
            for device in self._handles("zeDeviceGet", driver):
                bus_id = self._bus_id(device)
                found.setdefault(bus_id, (bus_id, driver, device))
        return list(found.values())

    def card(self, ordinal: int) -> tuple[str, ctypes.c_void_p, ctypes.c_void_p]:
        """Return the same of one card.

        Raises:
            ZeCallError: Level Zero shows fewer.
        """
        cards = self.cards()
        if ordinal >= len(cards):
            problem = f"Level Zero shows {len(cards)} cards, and none is number {ordinal}"
            raise ZeCallError(problem, call="zeDeviceGet", code=_NO_CARD)
        return cards[ordinal]

    def shown(self, ordinal: int) -> str:
        return self.card(ordinal)[0]

    def all_shown(self) -> tuple[str, ...]:
        return tuple(bus_id for bus_id, _, _ in self.cards())

    def is_same(self, shown: str, gpu: Gpu) -> bool:
        return shown == gpu.pci_bus_id

    def default_placeholder(self, logger: Any = None) -> LevelZeroPlaceholder | NoPlaceholder:
        placeholder = LevelZeroPlaceholder(logger)
        try:
            placeholder.prepare()
        except NoDriverError as err:
            placeholder.logger.warning(f"No placeholder is put on the GPUs, so others see them as free: {err}")
            return NoPlaceholder(logger)
        return placeholder

    def allocate(self, ordinal: int) -> Any:
        """Make a context with a small allocation on a card."""
        import ctypes

        class Descriptor(ctypes.Structure):  # ze_context_desc_t is this without the ordinal
            _fields_ = (
                ("stype", ctypes.c_uint32),
                ("next", ctypes.c_void_p),
                ("flags", ctypes.c_uint32),
                ("ordinal", ctypes.c_uint32),
            )

        _, driver, device = self.card(ordinal)
        context, memory = ctypes.c_void_p(), ctypes.c_void_p()
        wanted = Descriptor(stype=_CONTEXT)
        self.call("zeContextCreate", driver, ctypes.byref(wanted), ctypes.byref(context))
        try:
            wanted = Descriptor(stype=_DEVICE_MEMORY)
            size, alignment = ctypes.c_size_t(HELD_BYTES), ctypes.c_size_t(0)
            call = ("zeMemAllocDevice", context, ctypes.byref(wanted), size, alignment, device)
            self.call(*call, ctypes.byref(memory))
        except BaseException:
            self.ask("zeContextDestroy", context)
            raise
        return context, memory

    def free(self, held: Any) -> None:
        context, memory = held
        self.call("zeMemFree", context, memory)
        self.call("zeContextDestroy", context)

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


LEVEL_ZERO = ZeLibrary()
