"""What sysfs tells of CPUs, NUMA nodes, PCI devices and the AMD GPUs of the KFD topology.

The root may be a saved tree (such as those of hwloc's tests), so any file may be missing, padded with NUL bytes or
malformed. A malformed file counts as missing. Nothing here raises because of the content of a tree.

Names and meanings are those of ``kfd_topology.c`` and ``amdgpu`` in the Linux kernel:

* A node is a GPU if its ``simd_count`` is not 0. ROCR numbers the GPUs in the order of the nodes.
* ``location_id`` holds bus, device and function of the PCI device. A GPU that is split into compute partitions has
  several nodes with one PCI device. The number of the partition is in bits 31 to 28, or, in the first kernels with
  partitions, in place of the function, which is 0 for such a GPU.
* A device cgroup that forbids a GPU makes ``gpu_id`` and ``properties`` of its node fail with EPERM. ROCR does not
  count such a node, and neither does this module.
* ``unique_id`` is 0 on GPUs without one. Older kernels give all partitions of a GPU the same one.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..host.foreign_files import read_bytes
from .cpulist import LIMIT, parse_cpulist, parse_cpumask

_CPU = "sys/devices/system/cpu"

_NODE = "sys/devices/system/node"

_PCI = "sys/bus/pci/devices"

_NVIDIA = "proc/driver/nvidia/gpus"

_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])")

_READ_LIMIT = 1 << 20

GroupOf = Callable[[int], frozenset[int]]


def pci_address(name: str) -> tuple[int, int, int, int] | None:
    """Return a PCI bus id as numbers, which sort in the order of nvidia-smi; None if the name is not a bus id."""
    match = _ADDRESS.fullmatch(name)
    return None if match is None else (int(match[1], 16), int(match[2], 16), int(match[3], 16), int(match[4], 16))


class PciGpu(NamedTuple):
    """A GPU in sysfs; ``uuid`` is "" if the kernel driver does not list the GPU. AMD's partitions share a bus id."""

    bus_id: str
    uuid: str = ""


class Files:
    """Reads files under one root directory, with bounds. What is missing or malformed is None, or an empty list."""

    def __init__(self, root: str) -> None:
        self.root = root

    def read(self, path: str) -> str:
        """Return the text of a file without NULs and outer blanks.

        Raises:
            OSError: it cannot be read.
        """
        data = read_bytes(f"{self.root}/{path}", _READ_LIMIT)
        return data.replace(b"\0", b"").decode("utf-8", "replace").strip()

    def text(self, path: str) -> str | None:
        """Return the same; None if it is empty or cannot be read."""
        try:
            return self.read(path) or None
        except (OSError, ValueError):
            return None

    def number(self, path: str, *, signed: bool = False) -> int | None:
        """Return the decimal number in a file, of at most 20 digits; None if there is none."""
        text = self.text(path)
        pattern = "-?[0-9]{1,20}" if signed else "[0-9]{1,20}"
        return int(text) if text is not None and re.fullmatch(pattern, text) else None

    def properties(self, path: str) -> dict[str, int]:
        """Return name -> number of a file of such lines; other lines are left out.

        Raises:
            OSError: it cannot be read.
        """
        return {name: int(value) for name, value in re.findall(r"(?m)^(\w{1,64}) ([0-9]{1,20})$", self.read(path))}

    def names(self, path: str) -> list[str]:
        """Return the entries of a directory, sorted."""
        try:
            return sorted(os.listdir(f"{self.root}/{path}"))
        except (OSError, ValueError):
            return []

    def numbered(self, path: str, prefix: str = "") -> list[int]:
        """Return the numbers N of the entries ``prefixN`` of a directory, in order."""
        digits = (name[len(prefix) :] for name in self.names(path) if name.startswith(prefix))
        numbers = {int(text) for text in digits if text.isascii() and text.isdigit() and len(text) < 7}
        return sorted(number for number in numbers if number < LIMIT)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        return os.path.exists(f"{self.root}/{path}")


def tree() -> Files:
    """Return the files of this host, or of the saved host that ``SAFE_GPU_FSROOT`` names."""
    return Files(os.environ.get("SAFE_GPU_FSROOT") or "/")


class SysfsTree(Files):
    """The CPUs, nodes and PCI devices under one root directory. Most sets hold online CPUs only."""

    def siblings(self, cpu: int, *names: str) -> frozenset[int]:
        """Return the CPUs that share a topology level with ``cpu``; an empty set if no file has them.

        For each name in turn the files ``NAME_list`` and ``NAME`` are read. The first set that contains ``cpu`` counts.
        """
        path = f"{_CPU}/cpu{cpu}/topology"
        for name in names:
            for suffix, parse in (("_list", parse_cpulist), ("", parse_cpumask)):
                found = parse(self.text(f"{path}/{name}{suffix}"))
                if found and cpu in found:
                    return found
        return frozenset()

    def online_cpus(self) -> frozenset[int]:
        """Return the CPUs with a topology that are not switched off, within the kernel's list of online CPUs if it
        exists."""
        present = frozenset(
            cpu
            for cpu in self.numbered(_CPU, "cpu")
            if self.exists(f"{_CPU}/cpu{cpu}/topology") and self.text(f"{_CPU}/cpu{cpu}/online") != "0"
        )
        listed = parse_cpulist(self.text(f"{_CPU}/online")) or present
        return present & listed

    def cores(self, online: frozenset[int]) -> tuple[frozenset[int], ...]:
        """Return the hardware threads of each physical core, by lowest CPU; each group is read once."""
        return _partition(online, lambda cpu: self.siblings(cpu, "core_cpus", "thread_siblings"))

    def packages(self, online: frozenset[int], cores: Sequence[frozenset[int]]) -> dict[int, frozenset[int]]:
        """Return the CPUs by processor socket, under the kernel's ids; sockets without an id (-1) are numbered by
        lowest CPU."""
        ids: dict[int, int] = {}
        for core in cores:
            for cpu in sorted(core):
                package = self.number(f"{_CPU}/cpu{cpu}/topology/physical_package_id")
                if package is not None and 0 <= package < 1 << 31:
                    ids.update(dict.fromkeys(core, package))
                    break
        unknown = online - ids.keys()
        following = max(ids.values(), default=-1) + 1
        groups = _partition(unknown, lambda cpu: self.siblings(cpu, "package_cpus", "core_siblings") or unknown)
        for number, group in enumerate(groups, following):
            ids.update(dict.fromkeys(group, number))
        packages: dict[int, set[int]] = {}
        for cpu in sorted(online):
            packages.setdefault(ids[cpu], set()).add(cpu)
        return {package: frozenset(packages[package]) for package in sorted(packages)}

    def node_ids(self) -> list[int]:
        """Return the nodes that exist (not all possible ones); an empty list if the kernel has no NUMA support."""
        existing = self.numbered(_NODE, "node")
        listed = parse_cpulist(self.text(f"{_NODE}/online"))
        return [node for node in existing if node in listed] if listed else existing

    def node_cpus(self, node: int) -> frozenset[int]:
        """Return the CPUs of one node in the kernel's list, which may have offline CPUs; empty for a memory-only
        node."""
        path = f"{_NODE}/node{node}"
        found = parse_cpulist(self.text(f"{path}/cpulist"))
        if found is None:
            found = parse_cpumask(self.text(f"{path}/cpumap"))
        return frozenset(self.numbered(path, "cpu")) if found is None else found

    def node_memory(self, node: int) -> tuple[int, int] | None:
        """Return the memory of one node in bytes: all of it, and what is free; None if the kernel does not tell."""
        facts = dict(
            re.findall(r"(MemTotal|MemFree):\s+([0-9]{1,15}) kB", self.text(f"{_NODE}/node{node}/meminfo") or "")
        )
        return (int(facts["MemTotal"]) * 1024, int(facts["MemFree"]) * 1024) if len(facts) == 2 else None

    def nodes(self, online: frozenset[int]) -> dict[int, frozenset[int]]:
        """Return the online CPUs by NUMA node, nodes without CPUs included; a CPU in several nodes belongs to the
        first."""
        ids = self.node_ids() or [0]
        nodes: dict[int, frozenset[int]] = {}
        left = online
        for node in ids:
            nodes[node] = self.node_cpus(node) & left
            left -= nodes[node]
        if len(ids) == 1 and left == online:
            return {ids[0]: online}
        return nodes

    def distances(self, nodes: Mapping[int, frozenset[int]]) -> dict[int, dict[int, int]]:
        """Return the kernel's relative distances (10 is local). A row with another number of nodes is left out."""
        existing = self.numbered(_NODE, "node")
        distances: dict[int, dict[int, int]] = {}
        for node in nodes:
            text = self.text(f"{_NODE}/node{node}/distance")
            row = [] if text is None else text.split()
            columns = next((ids for ids in (sorted(nodes), existing) if len(ids) == len(row)), None)
            if not row or columns is None or not all(re.fullmatch(r"[0-9]{1,9}", value) for value in row):
                continue
            distances[node] = {to: int(value) for to, value in zip(columns, row, strict=True) if to in nodes}
        return distances

    def last_level_caches(
        self, online: frozenset[int], nodes: Mapping[int, frozenset[int]], packages: Mapping[int, frozenset[int]]
    ) -> tuple[frozenset[int], ...]:
        """Return the CPUs that share the last-level data cache; without cache files, the CPUs of one package and
        node."""

        def sharing(cpu: int) -> frozenset[int]:
            found = self._last_level(cpu)
            if found is not None:
                return found
            package = next(cpus for cpus in packages.values() if cpu in cpus)
            return package & next((cpus for cpus in nodes.values() if cpu in cpus), package)

        return _partition(online, sharing)

    def _last_level(self, cpu: int) -> frozenset[int] | None:
        path = f"{_CPU}/cpu{cpu}/cache"
        best: frozenset[int] | None = None
        highest = 0
        for index in self.numbered(path, "index"):
            cache = f"{path}/index{index}"
            level = self.number(f"{cache}/level")
            if level is None or level <= highest or self.text(f"{cache}/type") == "Instruction":
                continue
            shared = parse_cpulist(self.text(f"{cache}/shared_cpu_list")) or parse_cpumask(
                self.text(f"{cache}/shared_cpu_map")
            )
            if shared and cpu in shared:
                best, highest = shared, level
        return best

    def pci_gpus(self) -> list[PciGpu]:
        """Return NVIDIA GPUs in bus order: display devices of vendor 0x10de, and those that the kernel driver lists.

        If the NVIDIA driver is loaded, a card that is bound to another driver (passed through to a virtual machine) is
        left out.
        """
        known = {name: self._uuid(name) for name in self.names(_NVIDIA) if pci_address(name)}
        for name in self.names(_PCI):
            if name in known or not pci_address(name) or not self._is_gpu(f"{_PCI}/{name}"):
                continue
            try:
                foreign = os.path.basename(os.readlink(f"{self.root}/{_PCI}/{name}/driver")) != "nvidia"
            except OSError:
                foreign = False
            if not (known and foreign):
                known[name] = ""
        return [PciGpu(name, known[name]) for name in sorted(known, key=lambda name: pci_address(name) or ())]

    def _is_gpu(self, path: str) -> bool:
        vendor, kind = (self.text(f"{path}/{name}") or "" for name in ("vendor", "class"))
        return vendor.lower() == "0x10de" and kind.lower().startswith("0x03")

    def _uuid(self, name: str) -> str:
        match = re.search(r"GPU UUID:\s*(GPU-[0-9A-Za-z-]{1,90})", self.text(f"{_NVIDIA}/{name}/information") or "")
        return match[1] if match else ""

    def pci_node(self, bus_id: str) -> int | None:
        """Return the NUMA node of a PCI device, negative if the firmware does not say; None without the file."""
        return self.number(f"{_PCI}/{bus_id}/numa_node", signed=True) if pci_address(bus_id) else None

    def pci_cpus(self, bus_id: str) -> tuple[frozenset[int], str] | None:
        """Return the CPUs near a PCI device and the name of the file that says so."""
        if not pci_address(bus_id):
            return None
        for name, parse in (("local_cpulist", parse_cpulist), ("local_cpus", parse_cpumask)):
            cpus = parse(self.text(f"{_PCI}/{bus_id}/{name}"))
            if cpus:
                return cpus, name
        return None


def _partition(cpus: frozenset[int], group_of: GroupOf) -> tuple[frozenset[int], ...]:
    groups = []
    seen: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in seen:
            group = frozenset((group_of(cpu) & cpus) - seen) | {cpu}
            seen |= group
            groups.append(group)
    return tuple(groups)


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


def devices(files: Files) -> tuple[Device, ...] | None:
    """Return all GPUs that this process may open, in ROCR's order. None if there is no KFD topology."""
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
        yield Node(number, gpu_id or 0, properties if gpu_id and "simd_count" in properties else {})


def _place(files: Files, node: Node) -> tuple[str, int]:
    """Return the bus id and number of the partition; ("", 0) if the node does not tell."""
    location = node.properties.get("location_id")
    domain = node.properties.get("domain", 0)
    if location is None or location >= 1 << 32 or domain >= 1 << 32:
        return "", 0
    slot = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}"
    function, partition = location & 7, location >> 28
    if function and not files.exists(f"{_PCI}/{slot}.{function}") and files.exists(f"{_PCI}/{slot}.0"):
        function, partition = 0, function
    return f"{slot}.{function}", partition


def _memory(files: Files, node: Node, bus_id: str, *, shared: bool) -> int | None:
    """Return the bytes of memory: of the PCI device, or of the node's memory banks where partitions share that."""
    total = files.number(f"{_PCI}/{bus_id}/mem_info_vram_total")
    if total is not None and not shared:
        return total
    banks = 0
    for bank in files.names(f"{node.path}/mem_banks"):
        with suppress(OSError):
            banks += files.properties(f"{node.path}/mem_banks/{bank}/properties").get("size_in_bytes", 0)
    return banks or total


def _name(files: Files, node: Node, bus_id: str) -> str:
    name = files.text(f"{_PCI}/{bus_id}/product_name")
    if name and name.isprintable():
        return name[:80]
    target = node.properties.get("gfx_target_version", 0)
    unknown = f"AMD GPU gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}" if target else "AMD GPU"
    return _NAMES.get(node.properties.get("device_id", 0), unknown)


def _without_doubles(found: list[Device]) -> Iterator[Device]:
    """Yield the devices, where two have one key under a key each that cannot be claimed."""
    keys = Counter(device.uuid for device in found)
    for device in found:
        if keys[device.uuid] == 1:
            yield device
        else:
            broken = f"the kernel gives several GPUs the place {device.bus_id}, partition {device.partition}"
            yield device._replace(uuid=f"AMD-node-{device.node.number}", broken=broken)
