"""What sysfs tells of CPUs, NUMA nodes and PCI devices.

The root may be a saved tree (such as those of hwloc's tests), so any file may be missing, padded with NUL bytes or
malformed. A malformed file counts as missing. Nothing here raises because of the content of a tree.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..gpus.devices import bus_order
from ..host.foreign_files import read_bytes
from .cpulist import LIMIT, parse_cpulist, parse_cpumask

_CPU = "sys/devices/system/cpu"

_NODE = "sys/devices/system/node"

PCI = "sys/bus/pci/devices"

_NVIDIA = "proc/driver/nvidia/gpus"

_READ_LIMIT = 1 << 20

GroupOf = Callable[[int], frozenset[int]]


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

    def isolated_cpus(self) -> frozenset[int]:
        """Return the CPUs that the scheduler leaves alone (isolcpus=, isolated partitions of cpusets): it does not
        spread the threads of a process over them."""
        return parse_cpulist(self.text(f"{_CPU}/isolated")) or frozenset()

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

    def cpu_nodes(self) -> dict[int, frozenset[int]]:
        """Return the nodes that have CPUs, in the kernel's lists. A kernel without NUMA support has node 0."""
        if not (ids := self.node_ids()):
            return {0: frozenset(self.numbered(_CPU, "cpu"))} if self.exists(_CPU) else {}
        return {node: cpus for node in ids if (cpus := self.node_cpus(node))}

    def node_memory(self, node: int) -> tuple[int, int] | None:
        """Return the memory of one node in bytes: all of it, and what is free; None if the kernel does not tell."""
        facts = dict(
            re.findall(r"(MemTotal|MemFree):\s+([0-9]{1,15}) kB", self.text(f"{_NODE}/node{node}/meminfo") or "")
        )
        return (int(facts["MemTotal"]) * 1024, int(facts["MemFree"]) * 1024) if len(facts) == 2 else None

    def memoryless(self, nodes: Iterable[int]) -> frozenset[int]:
        """Return the nodes without memory, on which no memory policy can be set."""
        listed = parse_cpulist(self.text(f"{_NODE}/has_memory"))
        if listed:
            return frozenset(nodes) - listed
        sizes = {node: self.text(f"{_NODE}/node{node}/meminfo") or "" for node in nodes}
        return frozenset(node for node, text in sizes.items() if re.search(r"MemTotal:\s+0 kB", text))

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
        known = {name: self._uuid(name) for name in self.names(_NVIDIA) if bus_order(name)}
        for name in self.names(PCI):
            if name in known or not bus_order(name) or not self._is_gpu(f"{PCI}/{name}"):
                continue
            try:
                foreign = os.path.basename(os.readlink(f"{self.root}/{PCI}/{name}/driver")) != "nvidia"
            except OSError:
                foreign = False
            if not (known and foreign):
                known[name] = ""
        return [PciGpu(name, known[name]) for name in sorted(known, key=lambda name: bus_order(name) or ())]

    def _is_gpu(self, path: str) -> bool:
        vendor, kind = (self.text(f"{path}/{name}") or "" for name in ("vendor", "class"))
        return vendor.lower() == "0x10de" and kind.lower().startswith("0x03")

    def _uuid(self, name: str) -> str:
        match = re.search(r"GPU UUID:\s*(GPU-[0-9A-Za-z-]{1,90})", self.text(f"{_NVIDIA}/{name}/information") or "")
        return match[1] if match else ""

    def pci_node(self, bus_id: str) -> int | None:
        """Return the NUMA node of a PCI device, negative if the firmware does not say; None without the file."""
        return self.number(f"{PCI}/{bus_id}/numa_node", signed=True) if bus_order(bus_id) else None

    def pci_place(
        self, bus_id: str, told: int | None = None, nodes: Mapping[int, frozenset[int]] | None = None
    ) -> tuple[int | None, frozenset[int], str]:
        """Return the NUMA node of a PCI device (None is unknown), the CPUs near it, and where they were read.

        The source is "numa_node", "local_cpulist", "local_cpus", "only node", or "".

        Args:
            told: its node, if this tree lacks the device.
            nodes: the nodes with those of their CPUs that count; None: with all.
        """
        nodes = self.cpu_nodes() if nodes is None else nodes
        node = self.pci_node(bus_id)
        node = told if node is None else node
        cpus, source = self.pci_cpus(bus_id) or (frozenset[int](), "")
        cpus &= frozenset[int]().union(*nodes.values())
        if node is not None and node in nodes:
            return node, nodes[node] or cpus, "numa_node"
        with_cpus = [number for number in nodes if nodes[number]]
        if not cpus and len(with_cpus) == 1:
            return with_cpus[0], nodes[with_cpus[0]], "only node"
        return node_of_cpus(cpus, nodes), cpus, source if cpus else ""

    def pci_cpus(self, bus_id: str) -> tuple[frozenset[int], str] | None:
        """Return the CPUs near a PCI device and the name of the file that says so."""
        if not bus_order(bus_id):
            return None
        for name, parse in (("local_cpulist", parse_cpulist), ("local_cpus", parse_cpumask)):
            cpus = parse(self.text(f"{PCI}/{bus_id}/{name}"))
            if cpus:
                return cpus, name
        return None


def node_of_cpus(cpus: frozenset[int], nodes: Mapping[int, frozenset[int]]) -> int | None:
    """Return the node that has all of these CPUs; None if none has, or there are none."""
    return next((node for node, others in nodes.items() if cpus and cpus <= others), None)


def _partition(cpus: frozenset[int], group_of: GroupOf) -> tuple[frozenset[int], ...]:
    groups = []
    seen: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in seen:
            group = frozenset((group_of(cpu) & cpus) - seen) | {cpu}
            seen |= group
            groups.append(group)
    return tuple(groups)
