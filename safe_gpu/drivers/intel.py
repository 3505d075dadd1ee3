"""Intel GPUs through the kernel's files, and the processes on them.

The drivers are i915 and xe. A GPU is a PCI device with a render node (``/sys/class/drm/renderD*``) that this process
may open: Level Zero counts no other. ``index`` is Level Zero's number of the card under
``ZE_ENABLE_PCI_ID_DEVICE_ORDER=1``. Integrated GPUs have such numbers too and are not listed, so
numbers may be missing.

A process is on a GPU if one of its open files is a DRM client of it that holds memory there (``/proc/PID/fdinfo``, see
``Documentation/gpu/drm-usage-stats.rst`` of the Linux kernel). Only root can read those of other users. Without them
the list of processes is incomplete, and how much memory is in use is not known.

Not known without hardware:

* whether a process that has only started Level Zero holds memory on every GPU that it sees. Any memory counts as use,
  so that a GPU may be taken for busy that is idle, never the other way round;
* on which GPUs the kernel shows processes without the memory that they hold. They count as users of the GPU.
"""

import os
import re
from typing import Any, NamedTuple

from ..errors import NoDriverError
from ..gpus.devices import Gpu, GpuProcess, HostSnapshot, bus_order
from ..gpus.vendors import VENDORS
from ..host import procfs
from ..host.foreign_files import printable
from ..runtimes.library import Runtime
from ..runtimes.placeholders import NoPlaceholder
from ..topology.files import PCI, Files
from .base import Driver, has_display, numa_node, total_of

_DRM = "sys/class/drm"
_MOST_DESCRIPTORS = 1 << 16
_DRIVERS = ("i915", "xe")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

# PCI device ids and names of cards, from Intel's compute runtime.
_NAMES = {
    0x0B69: "Data Center GPU Max 1450",
    0x0BD5: "Data Center GPU Max 1550",
    0x0BD6: "Data Center GPU Max 1550",
    0x0BD7: "Data Center GPU Max 1350",
    0x0BD8: "Data Center GPU Max 1350",
    0x0BD9: "Data Center GPU Max 1100",
    0x0BDA: "Data Center GPU Max 1100",
    0x0BDB: "Data Center GPU Max 1100",
    0x56C0: "Data Center GPU Flex 170",
    0x56C1: "Data Center GPU Flex 140",
    0x56A0: "Arc A770",
    0x56A1: "Arc A750",
    0x56A5: "Arc A380",
    0x56A6: "Arc A310",
}

PRIVATE = "the kernel shows the processes of other users on Intel GPUs to root only"
_OUTSIDE = "the processes outside this container are not visible"


def cards(files: Files) -> tuple[Gpu, ...]:
    """Return the cards that this process may open, in the order of their bus ids and without what changes from poll to
    poll; integrated GPUs, which are on the root bus, are left out. Cards are behind a bridge."""
    bus_ids = {_bus_id_of_node(files, node) for node in files.names(_DRM)} - {""}
    found = []
    for number, bus_id in enumerate(sorted(bus_ids, key=lambda bus_id: bus_order(bus_id) or ())):
        if not _is_on_root_bus(bus_id):
            found.append(_card(files, number, bus_id))
    return tuple(found)


def _bus_id_of_node(files: Files, node: str) -> str:
    """Return the bus id of the GPU that an entry of ``/sys/class/drm`` belongs to; "" if it is no render node of an
    Intel GPU that this process may open."""
    if not re.fullmatch(r"renderD[0-9]{1,6}", node):
        return ""
    place = os.path.realpath(f"{files.root}/{_DRM}/{node}/device")
    bus_id = os.path.basename(place)
    driver = os.path.basename(os.path.realpath(f"{place}/driver"))
    if bus_order(bus_id) is None or driver not in _DRIVERS:
        return ""
    if not os.access(f"{files.root}/dev/dri/{node}", os.R_OK | os.W_OK):
        return ""
    return bus_id


def _is_on_root_bus(bus_id: str) -> bool:
    order = bus_order(bus_id)
    return order is not None and order[:2] == (0, 0)  # domain and bus


def _card(files: Files, number: int, bus_id: str) -> Gpu:
    """Return a card; ``number`` is Level Zero's."""
    path = f"{PCI}/{bus_id}"
    by_place = VENDORS["intel"].by_place
    parent = os.path.basename(os.path.realpath(f"{files.root}/{path}/physfn"))
    is_function = bus_order(parent) is not None  # a virtual function
    place = ""
    if is_function:
        place = f"{by_place}{parent}"
    device = _CardFiles(files, path)
    return Gpu(
        index=number,
        uuid=f"{by_place}{bus_id}",  # its place, since sysfs has no UUID
        name=f"Intel {device.name()}",
        pci_bus_id=bus_id,
        numa_node=numa_node(bus_id),
        place=place,
        partition=is_function,
        memory_total=device.memory(),
        display_active=has_display(files, path),
        tiles=device.number_of_tiles(),
        vendor="intel",
    )


class _CardFiles:
    """The files of a card's PCI device, whose directory is ``path``."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._tiles = files.numbered(path, "tile")  # of xe
        names = files.names(f"{path}/drm")
        self._minors = [f"{path}/drm/{name}" for name in names if name.startswith("card")]

    def name(self) -> str:
        """Return what the card is called, or its number if that is not known here."""
        found = re.fullmatch(r"0x([0-9a-f]{1,4})", self._files.text(f"{self._path}/device") or "")
        number = 0
        if found is not None:
            number = int(found[1], 16)
        return _NAMES.get(number, f"GPU {number:04x}")

    def memory(self) -> int | None:
        """Return the bytes of the card's memory; None if they are not reported."""
        sizes = [self._files.number(f"{self._path}/tile{tile}/physical_vram_size_bytes") for tile in self._tiles]
        if not sizes:
            sizes = [self._files.number(f"{minor}/lmem_total_bytes") for minor in self._minors[:1]]  # i915 of Intel
        if not sizes:
            return None
        return total_of(sizes)

    def number_of_tiles(self) -> int:
        """Return how many tiles it has; at least one."""
        if self._tiles:
            return len(self._tiles)
        engines = [len(self._files.numbered(f"{minor}/gt", "gt")) for minor in self._minors]  # i915: one on each tile
        return max([*engines, 1])


class _Clients(NamedTuple):
    """Who has files of Intel GPUs open and holds memory there, by bus id, and why the lists are incomplete, else ""."""

    by_bus_id: dict[str, list[GpuProcess]]
    incomplete: str


def _clients(files: Files) -> _Clients:
    found: dict[str, list[GpuProcess]] = {}
    incomplete = ""
    if files.root == "/" and procfs.pid_namespace() != procfs.FIRST_PID_NAMESPACE:
        incomplete = _OUTSIDE
    for pid in sorted(int(name) for name in files.names("proc") if re.fullmatch(r"[1-9][0-9]{0,9}", name)):
        try:
            used = _used_by(files, f"proc/{pid}")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            incomplete = incomplete or PRIVATE
            continue
        for bus_id, memory in used.items():
            found.setdefault(bus_id, []).append(GpuProcess(pid, memory_used=memory))
    return _Clients(found, incomplete)


def _used_by(files: Files, process: str) -> dict[str, int | None]:
    """Return, for each bus id, the bytes that a process holds there, None if the kernel does not report them; cards of
    which it holds none are left out.

    Raises:
        OSError: its open files cannot be read.
    """
    sizes: dict[str, dict[str, int | None]] = {}  # bus id -> client -> bytes
    for number in os.listdir(f"{files.root}/{process}/fd")[:_MOST_DESCRIPTORS]:
        try:
            opened = os.readlink(f"{files.root}/{process}/fd/{number}")
            if "/dev/dri/" not in opened:
                continue
            text = files.read(f"{process}/fdinfo/{number}")
        except (FileNotFoundError, ProcessLookupError):
            continue  # closed meanwhile
        client = parse_client(text)
        if client is not None:
            bus_id, identity, memory = client
            sizes.setdefault(bus_id, {})[identity] = memory  # a client may be open under several numbers
    used = {}
    for bus_id, of_clients in sizes.items():
        total = total_of(of_clients.values())
        if total != 0:
            used[bus_id] = total
    return used


class Client(NamedTuple):
    """A DRM client of an Intel GPU, as a file of ``fdinfo`` shows it.

    Attributes:
        bus_id: that of the GPU.
        identity: the kernel's name of the client.
        memory: bytes that it holds on the card; None if the kernel does not report them.
    """

    bus_id: str
    identity: str
    memory: int | None


def parse_client(text: str) -> Client | None:
    """Return the client that a file of ``fdinfo`` shows; None if it is none of i915 or xe. Memory that is resident
    counts, or all of it in kernels that do not report that."""
    fields = dict(re.findall(r"(?m)^(drm-[\w-]+):[ \t]*(\S.*?)[ \t]*$", text))
    bus_id = fields.get("drm-pdev", "")
    if fields.get("drm-driver") not in _DRIVERS or bus_order(bus_id) is None:
        return None
    memory = None
    for kind in ("resident", "total"):
        sizes = [value for name, value in fields.items() if re.fullmatch(rf"drm-{kind}-(vram|local)[0-9]*", name)]
        if sizes:
            memory = total_of(_in_bytes(size) for size in sizes)
            break
    return Client(bus_id, fields.get("drm-client-id", ""), memory)


def _in_bytes(size: str) -> int | None:
    found = re.fullmatch(r"([0-9]{1,18}) ?(|KiB|MiB|GiB)", size)
    if found is None:
        return None
    return int(found[1]) * _UNITS[found[2]]


class IntelDriver(Driver, Runtime):
    """The kernel's drivers i915 and xe as a driver. A device is a whole card, or a virtual function of one.

    Level Zero is not asked. Nothing is put on a card: the kernel shows to root only who uses it.

    Raises:
        NoDriverError: neither is loaded.
    """

    name = "intel"
    title = "Level Zero"

    def __init__(self) -> None:
        self.runtime = self
        files = Files()
        if not any(files.exists(path) for path in VENDORS["intel"].loaded):
            raise NoDriverError(
                "the Intel GPU driver is not loaded: there is neither /sys/bus/pci/drivers/xe nor i915; load one, or "
                "use the driver of this host's GPUs (SAFE_GPU_DRIVER=auto)",
                driver=self.name,
            )

    def snapshot(self) -> HostSnapshot:
        """Poll every card of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        files = Files()
        clients = _clients(files)
        gpus = tuple(_with_usage(card, clients) for card in cards(files))
        return HostSnapshot(gpus, self.name, printable(f"Linux {os.uname().release}"[:80]))

    def default_placeholder(self, logger: Any = None) -> NoPlaceholder:
        return NoPlaceholder(logger)


def _with_usage(card: Gpu, clients: _Clients) -> Gpu:
    """Return a card with its processes, and with the memory in use if all processes are known."""
    processes = tuple(clients.by_bus_id.get(card.pci_bus_id, ()))
    used = None
    if not clients.incomplete:
        used = total_of(process.memory_used for process in processes)
    free = None
    if used is not None and card.memory_total is not None:
        free = max(0, card.memory_total - used)
    return card._replace(
        memory_used=used,
        memory_free=free,
        processes=processes,
        process_error=clients.incomplete,
        processes_private=bool(clients.incomplete),
    )
