"""The AMD GPUs of the KFD topology in sysfs.

As in :mod:`.files` the root may be a saved tree, and nothing raises because of its content. Names and meanings are
those of ``kfd_topology.c`` and ``amdgpu`` in the Linux kernel:

* A node is a GPU if its ``simd_count`` is not 0. ROCR numbers the GPUs in the order of the nodes.
* ``location_id`` holds bus, device and function of the PCI device. A GPU that is split into compute partitions has
  several nodes with one PCI device. The number of the partition is in bits 31 to 28, or, in the first kernels with
  partitions, in place of the function, which is 0 for such a GPU.
* A device cgroup that forbids a GPU makes ``gpu_id`` and ``properties`` of its node fail with EPERM. ROCR does not
  count such a node, and neither does this module.
* ``unique_id`` is 0 on GPUs without one. Older kernels give all partitions of a GPU the same one.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from ..gpus.devices import PARTITION_MODES
from ..gpus.vendors import product_name
from .files import PCI, Files

_NODES = "sys/class/kfd/kfd/topology/nodes"

_MOST_NODES = 1 << 10

# PCI device ids and names from libdrm's amdgpu.ids, for GPUs whose board has no readable product name.
_NAMES = {
    0x738C: "AMD Instinct MI100",
    0x7408: "AMD Instinct MI250X",
    0x740C: "AMD Instinct MI250X / MI250",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A2: "AMD Instinct MI308X",
    0x74A5: "AMD Instinct MI325X",
    0x74B5: "AMD Instinct MI300X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}


class Place(NamedTuple):
    """Where a GPU is: its PCI device, and the number of the compute partition; "" and 0 if its node does not report
    them."""

    bus_id: str = ""
    partition: int = 0


class Node(NamedTuple):
    """One GPU node. ``path`` is where its files are, below the root. ``properties`` is empty if its file is missing or
    malformed."""

    number: int
    path: str
    gpu_id: int
    properties: dict[str, int]
    place: Place = Place()

    @property
    def unique_id(self) -> int:
        """What the kernel calls so, 0 if there is none."""
        return self.properties.get("unique_id", 0)


class Device(NamedTuple):
    """A GPU, or one compute partition of a GPU, without what changes from poll to poll.

    Attributes:
        gpu_id: the kernel's number of it, 0 if it is unknown.
        uuid: ``GPU-<16 hex digits>`` as ROCR writes ``unique_id``; else ``AMD-<bus id>-<partition>``.
        bus_id: PCI bus id; "" if the node does not report it.
        shared: several devices have this PCI device, whose memory counters are those of all of them together.
        mode: how its GPU is divided into compute partitions, of which others may not be shown here; "" where it is not.
        name: product name.
        memory_total: bytes of its own memory, or None.
        integrated: it shares its node with CPU cores.
        hive: equal and not 0 for GPUs that are connected by xGMI.
        broken: why it cannot be used, else "".
    """

    gpu_id: int
    uuid: str
    bus_id: str = ""
    shared: bool = False
    mode: str = ""
    name: str = "AMD GPU"
    memory_total: int | None = None
    integrated: bool = False
    hive: int = 0
    broken: str = ""

    @property
    def pci(self) -> str:
        """Where the files of its PCI device are, below the root."""
        return f"{PCI}/{self.bus_id}"


def devices(files: Files) -> tuple[Device, ...] | None:
    """Return all GPUs that this process may open, in ROCR's order. None if there is no KFD topology."""
    if not files.exists(_NODES):
        return None
    nodes = list(_gpu_nodes(files))
    same_id = Counter(node.unique_id for node in nodes)
    same_place = Counter(node.place for node in nodes)
    on_card = Counter(node.place.bus_id for node in nodes)
    found = []
    for node in nodes:
        has_own_id = 0 < node.unique_id < 1 << 64 and same_id[node.unique_id] == 1
        bus_id, partition = node.place
        broken = ""
        if not node.properties or not bus_id:
            broken = f"the kernel describes it incompletely in /{node.path}/properties"
        elif not has_own_id and same_place[node.place] > 1:
            broken = f"the kernel gives several GPUs the place {bus_id}, partition {partition}"
        if broken:
            found.append(Device(node.gpu_id, f"AMD-node-{node.number}", broken=broken))
            continue
        uuid = f"AMD-{bus_id}-{partition}"
        if has_own_id:
            uuid = f"GPU-{node.unique_id:016x}"
        found.append(_device(files, node, uuid, number_on_card=on_card[bus_id]))
    return tuple(found)


def _device(files: Files, node: Node, uuid: str, *, number_on_card: int) -> Device:
    """Return a device that can be used; ``number_on_card`` have its PCI device."""
    bus_id, partition = node.place
    is_shared = number_on_card > 1
    mode = files.text(f"{PCI}/{bus_id}/current_compute_partition") or ""
    if mode not in PARTITION_MODES:
        mode = ""
        if is_shared or partition:
            mode = str(number_on_card)
    return Device(
        gpu_id=node.gpu_id,
        uuid=uuid,
        bus_id=bus_id,
        shared=is_shared,
        mode=mode,
        name=_name(files, node),
        memory_total=_memory(files, node, shared=is_shared),
        integrated=node.properties.get("cpu_cores_count", 0) > 0,
        hive=node.properties.get("hive_id", 0),
    )


def _gpu_nodes(files: Files) -> Iterator[Node]:
    for number in files.numbered(_NODES)[:_MOST_NODES]:
        path = f"{_NODES}/{number}"
        properties: dict[str, int] = {}
        try:
            properties = files.properties(f"{path}/properties")
            files.read(f"{path}/gpu_id")
        except PermissionError:
            continue
        except OSError:
            pass
        gpu_id = files.number(f"{path}/gpu_id")
        is_of_cpus = gpu_id == 0 or properties.get("simd_count") == 0
        if is_of_cpus or (gpu_id is None and not properties):
            continue
        if not gpu_id or "simd_count" not in properties:
            properties = {}
        yield Node(number, path, gpu_id or 0, properties, _place(files, properties))


def _place(files: Files, properties: dict[str, int]) -> Place:
    location = properties.get("location_id")
    domain = properties.get("domain", 0)
    if location is None or location >= 1 << 32 or domain >= 1 << 32:
        return Place()
    slot = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    function = location & 7
    if function and not files.exists(f"{PCI}/{slot}.{function}") and files.exists(f"{PCI}/{slot}.0"):
        return Place(f"{slot}.0", partition=function)
    return Place(f"{slot}.{function}", partition=location >> 28)


def _memory(files: Files, node: Node, *, shared: bool) -> int | None:
    """Return the bytes of memory: of the PCI device, or of the node's memory banks where partitions share that."""
    total = files.number(f"{PCI}/{node.place.bus_id}/mem_info_vram_total")
    if total is not None and not shared:
        return total
    banks = 0
    for bank in files.names(f"{node.path}/mem_banks"):
        with suppress(OSError):
            banks += files.properties(f"{node.path}/mem_banks/{bank}/properties").get("size_in_bytes", 0)
    return banks or total


def _name(files: Files, node: Node) -> str:
    name = product_name(files.text(f"{PCI}/{node.place.bus_id}/product_name"))
    if name and name.isprintable():
        return name[:80]
    device_id = node.properties.get("device_id", 0)
    if device_id in _NAMES:
        return _NAMES[device_id]
    target = node.properties.get("gfx_target_version", 0)
    if target == 0:
        return "AMD GPU"
    return f"AMD GPU gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
