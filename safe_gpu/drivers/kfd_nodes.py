"""AMD GPUs as the kernel's KFD topology describes them (``/sys/class/kfd/kfd/topology``, under ``SAFE_GPU_FSROOT``).

Names and meanings are those of ``kfd_topology.c`` and ``amdgpu`` in the Linux kernel:

* A node is a GPU if its ``simd_count`` is not 0. ROCR numbers the GPUs in the order of the nodes.
* ``location_id`` holds bus, device and function of the PCI device. A GPU that is split into compute partitions has
  several nodes with one PCI device. The number of the partition is in bits 31 to 28, or, in the first kernels with
  partitions, in place of the function, which is 0 for such a GPU.
* A device cgroup that forbids a GPU makes ``gpu_id`` and ``properties`` of its node fail with EPERM. ROCR does not
  count such a node, and neither does this module.
* ``unique_id`` is 0 on GPUs without one. Older kernels give all partitions of a GPU the same one.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_NODES = "sys/class/kfd/kfd/topology/nodes"
_PCI = "sys/bus/pci/devices"
_LARGEST_FILE = 1 << 16
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


class Tree:
    """Files below a root, read with bounds. A file that is missing or malformed is None."""

    def __init__(self, root: str) -> None:
        self.root = root

    def read(self, path: str) -> str:
        """The start of a file, without surrounding blanks and NULs. A FIFO in a saved tree does not block it.

        Raises:
            OSError: it cannot be read.
        """
        fd = os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.read(fd, _LARGEST_FILE).decode("utf-8", "replace").strip("\0 \t\r\n")
        finally:
            os.close(fd)

    def text(self, path: str) -> str | None:
        """As :meth:`read`, or None."""
        try:
            return self.read(path)
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """A file that holds one decimal number of at most 20 digits, or None."""
        text = self.text(path)
        return int(text) if text is not None and re.fullmatch(r"[0-9]{1,20}", text) else None

    def properties(self, path: str) -> dict[str, int]:
        """A file of lines "name number"; other lines are left out.

        Raises:
            OSError: it cannot be read.
        """
        return {name: int(value) for name, value in re.findall(r"(?m)^(\w{1,64}) ([0-9]{1,20})$", self.read(path))}

    def names(self, path: str) -> list[str]:
        """The names in a directory; none if it cannot be listed."""
        try:
            return os.listdir(os.path.join(self.root, path))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return os.path.exists(os.path.join(self.root, path))


def tree() -> Tree:
    """The files of this host, or of the saved host that ``SAFE_GPU_FSROOT`` names."""
    return Tree(os.environ.get("SAFE_GPU_FSROOT") or "/")


class Node(NamedTuple):
    """One GPU node. ``properties`` is empty if its file is missing or malformed."""

    number: int
    gpu_id: int
    properties: dict[str, int]

    @property
    def path(self) -> str:
        """Where its files are, below the root."""
        return f"{_NODES}/{self.number}"


class Device(NamedTuple):
    """A GPU, or one compute partition of a GPU, without what changes from poll to poll.

    Attributes:
        node: the KFD node.
        uuid: ``GPU-<16 hex digits>`` as ROCR writes ``unique_id``; else ``AMD-<bus id>-<partition>``.
        bus_id: PCI bus id; "" if the node does not tell.
        partition: number of the compute partition, 0 for a whole GPU.
        shared: several devices have this PCI device, whose memory counters are those of all of them together.
        name: product name.
        memory_total: bytes of its own memory, or None.
        integrated: it shares its node with CPU cores.
        hive: equal and not 0 for GPUs that are connected by xGMI.
        broken: why the node cannot be used, else "".
    """

    node: Node
    uuid: str
    bus_id: str = ""
    partition: int = 0
    shared: bool = False
    name: str = "AMD GPU"
    memory_total: int | None = None
    integrated: bool = False
    hive: int = 0
    broken: str = ""

    @property
    def pci(self) -> str:
        """Where the files of its PCI device are, below the root."""
        return f"{_PCI}/{self.bus_id}"


def devices(files: Tree) -> tuple[Device, ...] | None:
    """All GPUs that this process may open, in ROCR's order. None if there is no KFD topology."""
    if not files.exists(_NODES):
        return None
    nodes = list(_gpu_nodes(files))
    ids = Counter(node.properties.get("unique_id", 0) for node in nodes)
    places = [_place(files, node) for node in nodes]
    counts = Counter(bus_id for bus_id, _ in places)
    found = []
    for node, (bus_id, partition) in zip(nodes, places, strict=True):
        if not node.properties or not bus_id:
            broken = f"the kernel describes it incompletely in /{node.path}/properties"
            found.append(Device(node, f"AMD-node-{node.number}", broken=broken))
            continue
        unique_id = node.properties.get("unique_id", 0)
        addressable = 0 < unique_id < 1 << 64 and ids[unique_id] == 1
        shared = counts[bus_id] > 1
        total = _memory(files, node, bus_id, shared=shared)
        found.append(
            Device(
                node,
                f"GPU-{unique_id:016x}" if addressable else f"AMD-{bus_id}-{partition}",
                bus_id,
                partition,
                shared,
                _name(files, node, bus_id),
                total,
                node.properties.get("cpu_cores_count", 0) > 0,
                node.properties.get("hive_id", 0),
            )
        )
    return tuple(_without_doubles(found))


def _gpu_nodes(files: Tree) -> Iterator[Node]:
    numbers = sorted(int(name) for name in files.names(_NODES) if re.fullmatch(r"[0-9]{1,6}", name))
    for number in numbers[:_MOST_NODES]:
        path = f"{_NODES}/{number}"
        try:
            files.read(f"{path}/gpu_id")
        except PermissionError:
            continue
        except OSError:
            pass
        gpu_id = files.number(f"{path}/gpu_id")
        if gpu_id == 0:
            continue  # CPUs only
        try:
            properties = files.properties(f"{path}/properties")
        except PermissionError:
            continue
        except OSError:
            properties = {}
        if properties.get("simd_count") == 0 or (gpu_id is None and not properties):
            continue
        yield Node(number, gpu_id or 0, properties if gpu_id and "simd_count" in properties else {})


def _place(files: Tree, node: Node) -> tuple[str, int]:
    """Bus id and number of the partition; ("", 0) if the node does not tell."""
    location = node.properties.get("location_id")
    domain = node.properties.get("domain", 0)
    if location is None or location >= 1 << 32 or domain >= 1 << 32:
        return "", 0
    slot = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    function, partition = location & 7, location >> 28
    if function and not files.exists(f"{_PCI}/{slot}.{function}") and files.exists(f"{_PCI}/{slot}.0"):
        function, partition = 0, function
    return f"{slot}.{function}", partition


def _memory(files: Tree, node: Node, bus_id: str, *, shared: bool) -> int | None:
    """Bytes of memory: of the PCI device, or of the node's memory banks where partitions share that."""
    total = files.number(f"{_PCI}/{bus_id}/mem_info_vram_total")
    if total is not None and not shared:
        return total
    banks = 0
    for bank in files.names(f"{node.path}/mem_banks"):
        try:
            banks += files.properties(f"{node.path}/mem_banks/{bank}/properties").get("size_in_bytes", 0)
        except OSError:
            continue
    return banks or total


def _name(files: Tree, node: Node, bus_id: str) -> str:
    name = files.text(f"{_PCI}/{bus_id}/product_name")
    if name and name.isprintable():
        return name[:80]
    target = node.properties.get("gfx_target_version", 0)
    unknown = f"AMD GPU gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}" if target else "AMD GPU"
    return _NAMES.get(node.properties.get("device_id", 0), unknown)


def _without_doubles(found: list[Device]) -> Iterator[Device]:
    """The devices, where two have one key under a key each that cannot be claimed."""
    keys = Counter(device.uuid for device in found)
    for device in found:
        if keys[device.uuid] == 1:
            yield device
        else:
            broken = f"the kernel gives several GPUs the place {device.bus_id}, partition {device.partition}"
            yield device._replace(uuid=f"AMD-node-{device.node.number}", broken=broken)
