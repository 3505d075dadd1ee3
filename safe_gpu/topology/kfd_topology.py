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


class Node(NamedTuple):
    """One GPU node. ``path`` is where its files are, below the root. ``properties`` is empty if its file is missing or
    malformed."""

    number: int
    path: str
    gpu_id: int
    properties: dict[str, int]


class Device(NamedTuple):
    """A GPU, or one compute partition of a GPU, without what changes from poll to poll.

    Attributes:
        gpu_id: the kernel's number of it, 0 if it is unknown.
        uuid: ``GPU-<16 hex digits>`` as ROCR writes ``unique_id``; else ``AMD-<bus id>-<partition>``.
        bus_id: PCI bus id; "" if the node does not tell.
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
    places = [_place(files, node) for node in nodes]
    ids = Counter(node.properties.get("unique_id", 0) for node in nodes)
    counts, same = Counter(bus_id for bus_id, _ in places), Counter(places)
    found = []
    for node, (bus_id, partition) in zip(nodes, places, strict=True):
        unique_id = node.properties.get("unique_id", 0)
        named = 0 < unique_id < 1 << 64 and ids[unique_id] == 1
        broken = ""
        if not node.properties or not bus_id:
            broken = f"the kernel describes it incompletely in /{node.path}/properties"
        elif not named and same[bus_id, partition] > 1:
            broken = f"the kernel gives several GPUs the place {bus_id}, partition {partition}"
        if broken:
            found.append(Device(node.gpu_id, f"AMD-node-{node.number}", broken=broken))
            continue
        uuid = f"GPU-{unique_id:016x}" if named else f"AMD-{bus_id}-{partition}"
        shared, integrated = counts[bus_id] > 1, node.properties.get("cpu_cores_count", 0) > 0
        name, memory = _name(files, node, bus_id), _memory(files, node, bus_id, shared=shared)
        hive = node.properties.get("hive_id", 0)
        mode = files.text(f"{PCI}/{bus_id}/current_compute_partition") or ""
        if mode not in PARTITION_MODES:
            mode = str(counts[bus_id]) if shared or partition else ""
        found.append(Device(node.gpu_id, uuid, bus_id, shared, mode, name, memory, integrated, hive))
    return tuple(found)


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
        if gpu_id == 0 or properties.get("simd_count") == 0 or (gpu_id is None and not properties):
            continue  # CPUs only
        yield Node(number, path, gpu_id or 0, properties if gpu_id and "simd_count" in properties else {})


def _place(files: Files, node: Node) -> tuple[str, int]:
    """Return the bus id and number of the partition; ("", 0) if the node does not tell."""
    location = node.properties.get("location_id")
    domain = node.properties.get("domain", 0)
    if location is None or location >= 1 << 32 or domain >= 1 << 32:
        return "", 0
    slot = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    function, partition = location & 7, location >> 28
    if function and not files.exists(f"{PCI}/{slot}.{function}") and files.exists(f"{PCI}/{slot}.0"):
        function, partition = 0, function
    return f"{slot}.{function}", partition


def _memory(files: Files, node: Node, bus_id: str, *, shared: bool) -> int | None:
    """Return the bytes of memory: of the PCI device, or of the node's memory banks where partitions share that."""
    total = files.number(f"{PCI}/{bus_id}/mem_info_vram_total")
    if total is not None and not shared:
        return total
    banks = 0
    for bank in files.names(f"{node.path}/mem_banks"):
        with suppress(OSError):
            banks += files.properties(f"{node.path}/mem_banks/{bank}/properties").get("size_in_bytes", 0)
    return banks or total


def _name(files: Files, node: Node, bus_id: str) -> str:
    name = product_name(files.text(f"{PCI}/{bus_id}/product_name"))
    if name and name.isprintable():
        return name[:80]
    target = node.properties.get("gfx_target_version", 0)
    unknown = f"AMD GPU gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}" if target else "AMD GPU"
    return _NAMES.get(node.properties.get("device_id", 0), unknown)
