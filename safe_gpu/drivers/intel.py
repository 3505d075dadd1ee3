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
from collections.abc import Sequence
from typing import Any

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

# PCI device ids and names of cards, from Intel's compute runtime.
_NAMES = {
    0x0B69: "Data Center GPU Max 1450",
    **dict.fromkeys((0x0BD5, 0x0BD6), "Data Center GPU Max 1550"),
    **dict.fromkeys((0x0BD7, 0x0BD8), "Data Center GPU Max 1350"),
    **dict.fromkeys((0x0BD9, 0x0BDA, 0x0BDB), "Data Center GPU Max 1100"),
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
    found = set()
    for node in files.names(_DRM):
        place = os.path.realpath(f"{files.root}/{_DRM}/{node}/device")
        bus_id = os.path.basename(place)
        driver = os.path.basename(os.path.realpath(f"{place}/driver"))
        usable = re.fullmatch(r"renderD[0-9]{1,6}", node) and bus_order(bus_id) and driver in ("i915", "xe")
        if usable and os.access(f"{files.root}/dev/dri/{node}", os.R_OK | os.W_OK):
            found.add(bus_id)
    counted = sorted(found, key=lambda bus_id: bus_order(bus_id) or ())
    placed = ((number, bus_id) for number, bus_id in enumerate(counted) if (bus_order(bus_id) or ())[:2] != (0, 0))
    return tuple(_card(files, number, bus_id) for number, bus_id in placed)


def _card(files: Files, number: int, bus_id: str) -> Gpu:
    place = f"{PCI}/{bus_id}"
    minors = [f"{place}/drm/{name}" for name in files.names(f"{place}/drm") if name.startswith("card")]
    tiles = files.numbered(place, "tile")  # xe
    parts = [files.number(f"{place}/tile{tile}/physical_vram_size_bytes") for tile in tiles]
    parts = parts or [files.number(f"{minor}/lmem_total_bytes") for minor in minors[:1]]  # i915 outside mainline
    engines = [len(files.numbered(f"{minor}/gt", "gt")) for minor in minors]  # of i915: one on each tile
    device = re.fullmatch(r"0x([0-9a-f]{1,4})", files.text(f"{place}/device") or "")
    identity = int(device[1], 16) if device else 0
    parent = os.path.basename(os.path.realpath(f"{files.root}/{place}/physfn"))  # of a virtual function
    return Gpu(
        number,  # Level Zero's
        f"{VENDORS['intel'].by_place}{bus_id}",  # its place, since sysfs has no UUID
        f"Intel {_NAMES.get(identity, f'GPU {identity:04x}')}",
        bus_id,
        numa_node(bus_id),
        place=f"{VENDORS['intel'].by_place}{parent}" if bus_order(parent) else "",
        partition=bus_order(parent) is not None,
        memory_total=total_of(parts) if parts else None,
        display_active=has_display(files, place),
        tiles=max([len(tiles), 1] if tiles else [*engines, 1]),
        vendor="intel",
    )


def _clients(files: Files) -> tuple[dict[str, list[GpuProcess]], str]:
    """Return who has files of Intel GPUs open and holds memory there, by bus id, and why the lists are incomplete, else
    ""."""
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
    return found, incomplete


def _used_by(files: Files, process: str) -> dict[str, int | None]:
    """Return, for each bus id, the bytes that a process holds there, None if the kernel does not tell; cards of which
    it holds none are left out.

    Raises:
        OSError: its open files cannot be read.
    """
    used: dict[str, dict[str, int | None]] = {}
    for number in os.listdir(f"{files.root}/{process}/fd")[:_MOST_DESCRIPTORS]:
        try:
            opened = os.readlink(f"{files.root}/{process}/fd/{number}")
            text = files.read(f"{process}/fdinfo/{number}") if "/dev/dri/" in opened else ""
        except (FileNotFoundError, ProcessLookupError):
            continue  # closed meanwhile
        client = parse_client(text)
        if client is not None:
            bus_id, identity, memory = client
            used.setdefault(bus_id, {})[identity] = memory  # a client may be open under several numbers
    return {bus_id: total_of(memory.values()) for bus_id, memory in used.items() if total_of(memory.values()) != 0}


_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def parse_client(text: str) -> tuple[str, str, int | None] | None:
    """Return bus id, client and bytes of its memory on the card, from a file of ``fdinfo``; None if it is no client of
    i915 or xe. Memory that is resident counts, or all of it in kernels that do not tell; None if they tell neither."""
    fields = dict(re.findall(r"(?m)^(drm-[\w-]+):[ \t]*(\S.*?)[ \t]*$", text))
    bus_id = fields.get("drm-pdev", "")
    if fields.get("drm-driver") not in ("i915", "xe") or not bus_order(bus_id):
        return None
    for kind in ("resident", "total"):
        sizes = [value for name, value in fields.items() if re.fullmatch(rf"drm-{kind}-(vram|local)[0-9]*", name)]
        parts = [re.fullmatch(r"([0-9]{1,18}) ?(|KiB|MiB|GiB)", size) for size in sizes]
        if parts:
            known = [int(part[1]) * _UNITS[part[2]] for part in parts if part]
            return bus_id, fields.get("drm-client-id", ""), sum(known) if len(known) == len(parts) else None
    return bus_id, fields.get("drm-client-id", ""), None


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
        if not any(map(files.exists, VENDORS["intel"].loaded)):
            raise NoDriverError(
                "the Intel GPU driver is not loaded: there is neither /sys/bus/pci/drivers/xe nor i915; load one, or "
                "use the driver of this host's GPUs (SAFE_GPU_DRIVER=auto)",
                driver=self.name,
            )

    def snapshot(self) -> HostSnapshot:
        """Poll every card of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        files = Files()
        users, incomplete = _clients(files)
        gpus = tuple(_with_usage(card, users.get(card.pci_bus_id, ()), incomplete) for card in cards(files))
        return HostSnapshot(gpus, self.name, printable(f"Linux {os.uname().release}"[:80]))

    def default_placeholder(self, logger: Any = None) -> NoPlaceholder:
        return NoPlaceholder(logger)


def _with_usage(card: Gpu, processes: Sequence[GpuProcess], incomplete: str) -> Gpu:
    used = None if incomplete else total_of(process.memory_used for process in processes)
    return card._replace(
        memory_used=used,
        memory_free=None if used is None or card.memory_total is None else max(0, card.memory_total - used),
        processes=tuple(processes),
        process_error=incomplete,
        processes_private=bool(incomplete),
    )
