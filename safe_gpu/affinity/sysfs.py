"""The CPUs, nodes and PCI devices of a host, read from ``/sys`` and ``/proc`` under any root.

The root may be a saved tree (such as those of hwloc's tests), so any file may be missing, padded with NUL bytes or
malformed. A malformed file counts as missing. Nothing here raises because of the content of a tree.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .cpulist import LIMIT, parse_cpulist, parse_cpumask

_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_NVIDIA = "proc/driver/nvidia/gpus"
_ADDRESS = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])")
_READ_LIMIT = 1 << 20

GroupOf = Callable[[int], frozenset[int]]


def pci_address(name: str) -> tuple[int, int, int, int] | None:
    """A PCI bus id as numbers, which sort in the order of nvidia-smi; None if the name is not a bus id."""
    match = _ADDRESS.fullmatch(name)
    return None if match is None else (int(match[1], 16), int(match[2], 16), int(match[3], 16), int(match[4], 16))


@dataclass(frozen=True)
class PciGpu:
    """A GPU in sysfs; ``uuid`` is "" if the kernel driver does not list the GPU. AMD's partitions share a bus id."""

    bus_id: str
    uuid: str = ""


class Files:
    """Reads texts, numbers and names under one root directory. Nothing raises."""

    def __init__(self, root: str) -> None:
        self.root = root

    def read(self, path: str) -> str | None:
        """The text of a file without NUL bytes and outer blanks; None if it cannot be read or is empty."""
        try:
            # os.open() takes a fifth of the time of open(), and with O_NONBLOCK a FIFO in the tree cannot block it.
            fd = os.open(f"{self.root}/{path}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return None
        try:
            chunks = []
            size = 0
            while size < _READ_LIMIT and (chunk := os.read(fd, 65536)):
                chunks.append(chunk)
                size += len(chunk)
        except OSError:
            return None
        finally:
            os.close(fd)
        return b"".join(chunks).replace(b"\0", b"").decode("ascii", "replace").strip() or None

    def names(self, path: str) -> list[str]:
        """The entries of a directory, sorted; an empty list if there is no such directory."""
        try:
            return sorted(os.listdir(f"{self.root}/{path}"))
        except (OSError, ValueError):
            return []

    def numbered(self, path: str, prefix: str) -> list[int]:
        """The numbers N of the entries ``prefixN`` of a directory, in order."""
        digits = (name[len(prefix) :] for name in self.names(path) if name.startswith(prefix))
        numbers = {int(text) for text in digits if text.isascii() and text.isdigit() and len(text) < 7}
        return sorted(number for number in numbers if number < LIMIT)

    def number(self, path: str) -> int | None:
        """The decimal number in a file, with an optional minus sign; None if the file holds anything else."""
        text = self.read(path)
        return int(text) if text is not None and re.fullmatch(r"-?[0-9]{1,10}", text) else None


class Tree(Files):
    """The CPUs, nodes and PCI devices under one root directory. Most sets hold online CPUs only."""

    def siblings(self, cpu: int, *names: str) -> frozenset[int]:
        """The CPUs that share a topology level with ``cpu``; an empty set if no file has them.

        For each name in turn the files ``NAME_list`` and ``NAME`` are read. The first set that contains ``cpu`` counts.
        """
        path = f"{_CPU}/cpu{cpu}/topology"
        for name in names:
            for suffix, parse in (("_list", parse_cpulist), ("", parse_cpumask)):
                found = parse(self.read(f"{path}/{name}{suffix}"))
                if found and cpu in found:
                    return found
        return frozenset()

    def online_cpus(self) -> frozenset[int]:
        """CPUs with a topology that are not switched off, within the kernel's list of online CPUs if it exists."""
        present = frozenset(
            cpu
            for cpu in self.numbered(_CPU, "cpu")
            if os.path.isdir(f"{self.root}/{_CPU}/cpu{cpu}/topology") and self.read(f"{_CPU}/cpu{cpu}/online") != "0"
        )
        listed = parse_cpulist(self.read(f"{_CPU}/online")) or present
        return present & listed

    def cores(self, online: frozenset[int]) -> tuple[frozenset[int], ...]:
        """The hardware threads of each physical core, by lowest CPU; each group is read once."""
        return _partition(online, lambda cpu: self.siblings(cpu, "core_cpus", "thread_siblings"))

    def packages(self, online: frozenset[int], cores: Sequence[frozenset[int]]) -> dict[int, frozenset[int]]:
        """CPUs by processor socket, under the kernel's ids; sockets without an id (-1) are numbered by lowest CPU."""
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
        """The nodes that exist (not all possible ones); an empty list if the kernel has no NUMA support."""
        existing = self.numbered(_NODE, "node")
        listed = parse_cpulist(self.read(f"{_NODE}/online"))
        return [node for node in existing if node in listed] if listed else existing

    def node_cpus(self, node: int) -> frozenset[int]:
        """The CPUs of one node in the kernel's list, which may have offline CPUs; empty for a memory-only node."""
        path = f"{_NODE}/node{node}"
        found = parse_cpulist(self.read(f"{path}/cpulist"))
        if found is None:
            found = parse_cpumask(self.read(f"{path}/cpumap"))
        return frozenset(self.numbered(path, "cpu")) if found is None else found

    def node_memory(self, node: int) -> tuple[int, int] | None:
        """The memory of one node in bytes: all of it, and what is free; None if the kernel does not tell."""
        facts = dict(
            re.findall(r"(MemTotal|MemFree):\s+([0-9]{1,15}) kB", self.read(f"{_NODE}/node{node}/meminfo") or "")
        )
        return (int(facts["MemTotal"]) * 1024, int(facts["MemFree"]) * 1024) if len(facts) == 2 else None

    def nodes(self, online: frozenset[int]) -> dict[int, frozenset[int]]:
        """Online CPUs by NUMA node, nodes without CPUs included; a CPU in several nodes belongs to the first."""
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
        """The kernel's relative distances (10 is local). A row with another number of nodes is left out."""
        existing = self.numbered(_NODE, "node")
        distances: dict[int, dict[int, int]] = {}
        for node in nodes:
            text = self.read(f"{_NODE}/node{node}/distance")
            row = [] if text is None else text.split()
            columns = next((ids for ids in (sorted(nodes), existing) if len(ids) == len(row)), None)
            if not row or columns is None or not all(re.fullmatch(r"[0-9]{1,9}", value) for value in row):
                continue
            distances[node] = {to: int(value) for to, value in zip(columns, row, strict=True) if to in nodes}
        return distances

    def last_level_caches(
        self,
        online: frozenset[int],
        nodes: Mapping[int, frozenset[int]],
        packages: Mapping[int, frozenset[int]],
    ) -> tuple[frozenset[int], ...]:
        """CPUs that share the last-level data cache; without cache files, the CPUs of one package and node."""

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
            if level is None or level <= highest or self.read(f"{cache}/type") == "Instruction":
                continue
            shared = parse_cpulist(self.read(f"{cache}/shared_cpu_list")) or parse_cpumask(
                self.read(f"{cache}/shared_cpu_map")
            )
            if shared and cpu in shared:
                best, highest = shared, level
        return best

    def pci_gpus(self) -> list[PciGpu]:
        """NVIDIA GPUs in bus order: display devices of vendor 0x10de, and those that the kernel driver lists.

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
        vendor, kind = (self.read(f"{path}/{name}") or "" for name in ("vendor", "class"))
        return vendor.lower() == "0x10de" and kind.lower().startswith("0x03")

    def _uuid(self, name: str) -> str:
        match = re.search(r"GPU UUID:\s*(GPU-[0-9A-Za-z-]{1,90})", self.read(f"{_NVIDIA}/{name}/information") or "")
        return match[1] if match else ""

    def pci_node(self, bus_id: str) -> int | None:
        """The NUMA node of a PCI device, negative if the firmware does not say; None without the file."""
        return self.number(f"{_PCI}/{bus_id}/numa_node") if pci_address(bus_id) else None

    def pci_cpus(self, bus_id: str) -> tuple[frozenset[int], str] | None:
        """The CPUs near a PCI device and the name of the file that says so."""
        if not pci_address(bus_id):
            return None
        for name, parse in (("local_cpulist", parse_cpulist), ("local_cpus", parse_cpumask)):
            cpus = parse(self.read(f"{_PCI}/{bus_id}/{name}"))
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
