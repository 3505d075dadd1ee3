"""The topology of a host: CPUs, NUMA nodes, sockets, caches, and the places of its GPUs."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

from ..errors import GPUAffinityError, as_affinity_error
from ..gpus.devices import Gpu, normalize_bus_id
from .cpulist import parse_cpulist
from .files import PCI, Files

_CPU = "sys/devices/system/cpu"

_NODE = "sys/devices/system/node"


def _cpus(numbers: Iterable[int] | None) -> frozenset[int]:
    return frozenset(map(operator.index, () if numbers is None else numbers))


# Field -> what brings it into its shape.
_SHAPES: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(("cpus", "memoryless", "isolated", "node_cpus", "socket_cpus"), _cpus),
    **dict.fromkeys(("cores", "llc"), lambda groups: tuple(map(_cpus, groups))),
    **dict.fromkeys(("nodes", "packages"), lambda groups: {name: _cpus(cpus) for name, cpus in groups.items()}),
    "distances": lambda rows: {node: dict(row) for node, row in rows.items()},
    "gpus": lambda gpus: tuple(replace(gpu) for gpu in gpus),
    "memory": dict,
}


class _Shaped:
    """A frozen record whose fields are brought into their shapes, so that it can be compared.

    Raises:
        GPUAffinityError: one has the wrong type.
    """

    def __post_init__(self) -> None:
        for name in filter(_SHAPES.__contains__, vars(self)):
            try:
                object.__setattr__(self, name, _SHAPES[name](getattr(self, name)))
            except (TypeError, ValueError, AttributeError) as err:
                raise GPUAffinityError(f"{name} of a host topology has the wrong shape: {err}") from err


@dataclass(frozen=True)
class GpuLocality(_Shaped):
    """The place of one GPU in the host.

    Attributes:
        index: position by PCI bus id, as nvidia-smi shows it.
        uuid: "" if no driver was asked.
        numa_node: its NUMA node; None is unknown.
        node_cpus: CPUs of its node. If empty, they are those of ``numa_node``, or all CPUs if that is None.
        socket_cpus: CPUs of its processor socket. If empty, they are derived from ``packages``.
        pci_bus_id: ``0000:07:00.0``.
        source: where the place was read: "nvml" (or the name of another driver), "numa_node", "local_cpulist",
            "local_cpus", "only node", or "" if it is unknown.
    """

    index: int
    uuid: str = ""
    numa_node: int | None = None
    node_cpus: frozenset[int] = frozenset()
    socket_cpus: frozenset[int] = frozenset()
    pci_bus_id: str = ""
    source: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it is known which CPUs are next to it."""
        return self.numa_node is not None or bool(self.node_cpus)


@dataclass(frozen=True)
class HostTopology(_Shaped):
    """The topology of a host. All sets hold logical CPU numbers.

    Attributes:
        cpus: CPUs that are online.
        cores: the hardware threads of each physical core. A CPU in no set is a core with one thread.
        nodes: NUMA node -> its CPUs; nodes without CPUs are included.
        packages: processor socket -> its CPUs.
        llc: sets of CPUs that share a last-level cache.
        distances: ``{a: {b: relative distance from node a to b}}``, 10 is local; {} if the kernel does not tell.
        gpus: the GPUs of the host in index order.
        memoryless: the nodes that have no memory.
        isolated: CPUs over which the kernel does not spread threads (isolcpus=).
        memory: node -> bytes of its memory: all, and free; {} if the kernel does not tell.
        is_here: whether these are the CPUs on which this process runs.
    """

    cpus: frozenset[int]
    cores: Sequence[frozenset[int]] = ()
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    packages: Mapping[int, frozenset[int]] = field(default_factory=dict)
    llc: Sequence[frozenset[int]] = ()
    distances: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    gpus: Sequence[GpuLocality] = ()
    memoryless: frozenset[int] = frozenset()
    isolated: frozenset[int] = frozenset()
    memory: Mapping[int, tuple[int, int]] = field(default_factory=dict, compare=False)

    is_here: ClassVar[bool] = False

    @classmethod
    def from_host(cls, fsroot: str | os.PathLike[str] | None = None, driver: Any = None) -> HostTopology:
        """Read the topology of a host, for callers outside the package.

        Args:
            fsroot: the directory that contains ``sys`` and ``proc``; None takes ``SAFE_GPU_FSROOT``, else ``/``.
            driver: a :class:`~safe_gpu.drivers.base.Driver` whose GPUs to place; None finds the GPUs in sysfs.

        Raises:
            GPUAffinityError: no online CPU is found there, or the driver does not answer.
        """
        return read_topology(fsroot, driver)

    def gpu(self, index: int) -> GpuLocality:
        """Return the GPU with this index.

        Raises:
            GPUAffinityError: there is none.
        """
        for gpu in self.gpus:
            if gpu.index == index and not isinstance(index, bool):
                return gpu
        has = f"{len(self.gpus)}, {', '.join(str(gpu.index) for gpu in self.gpus)}" if self.gpus else "none"
        raise GPUAffinityError(f"there is no GPU {index!r} on this host: it has {has}")

    def node_set(self, gpu: GpuLocality) -> frozenset[int]:
        """Return the online CPUs next to a GPU: its ``node_cpus``, else those of its NUMA node, else (node unknown) all
        CPUs."""
        if gpu.node_cpus:
            return gpu.node_cpus & self.cpus
        if gpu.numa_node is None:
            return self.cpus
        return self.nodes.get(gpu.numa_node, frozenset()) & self.cpus

    def unisolated(self, cpus: frozenset[int]) -> frozenset[int]:
        """Return the CPUs that are not isolated; all of them if all are, as a mask of isolated CPUs is on purpose."""
        return cpus - self.isolated or cpus

    def node_of(self, gpu: GpuLocality) -> int | None:
        """Return the NUMA node of a GPU: ``numa_node`` if it is given, else derived from ``node_cpus``; None is
        unknown."""
        if gpu.numa_node is not None:
            return gpu.numa_node
        return node_of_cpus(gpu.node_cpus & self.cpus, self.nodes)

    def nearest_memory(self, node: int) -> frozenset[int]:
        """Return the node itself. If it has no memory, return the nearest nodes that have: all of them if the distances
        are unknown."""
        row = self.distances.get(node, {})
        far = {other: row.get(other, math.inf) for other in self.nodes if other not in self.memoryless}
        if node not in self.memoryless or not far:
            return frozenset([node])
        return frozenset(other for other in far if far[other] == min(far.values()))

    def socket_around(self, near: frozenset[int], allowed: frozenset[int] | None = None) -> frozenset[int]:
        """Return the CPUs of the package around ``near``: the nodes of that package, and its CPUs that are in no node.

        The package is that of the lowest CPU of ``near``. A node belongs to the package of its lowest CPU, so that a
        node that spans two packages is not split. "Lowest" means the lowest CPU in ``allowed``, if any is allowed.
        """

        def lowest(cpus: frozenset[int]) -> int:
            return min((cpus & allowed if allowed is not None else cpus) or cpus)

        package = next((cpus for cpus in self.packages.values() if near and lowest(near) in cpus), None)
        if package is None:
            return near
        inside = (cpus for cpus in self.nodes.values() if cpus and lowest(cpus) in package)
        return near.union(*inside, package.difference(*self.nodes.values()))


class SysfsHost(HostTopology):
    """A host whose facts are read when they are first asked for: most claims need the nodes only.

    Most sets hold online CPUs only.
    """

    _files: Files
    _driver: Any

    def __init__(self, files: Files, driver: Any = None) -> None:
        vars(self).update(_files=files, _driver=driver, is_here=files.root == "/")

    @cached_property
    def cpus(self) -> frozenset[int]:
        """The CPUs with a topology that the kernel lists as online, or that are not switched off."""
        files = self._files
        present = [cpu for cpu in files.numbered(_CPU, "cpu") if files.exists(f"{_CPU}/cpu{cpu}/topology")]
        if listed := parse_cpulist(files.text(f"{_CPU}/online")):
            return listed.intersection(present)
        return frozenset(cpu for cpu in present if files.text(f"{_CPU}/cpu{cpu}/online") != "0")

    @cached_property
    def isolated(self) -> frozenset[int]:
        return self._files.cpus(f"{_CPU}/isolated")[0] & self.cpus

    @cached_property
    def cores(self) -> Sequence[frozenset[int]]:
        return _partition(self.cpus, lambda cpu: self._siblings(cpu, "core_cpus", "thread_siblings"))

    @cached_property
    def packages(self) -> Mapping[int, frozenset[int]]:
        """Under the kernel's ids; sockets without an id (-1) are numbered by lowest CPU."""
        ids: dict[int, int] = {}
        for core in self.cores:
            told = (self._files.number(f"{_CPU}/cpu{cpu}/topology/physical_package_id") for cpu in sorted(core))
            if (package := next((one for one in told if one is not None and one < 1 << 31), None)) is not None:
                ids.update(dict.fromkeys(core, package))
        unknown = self.cpus - ids.keys()
        groups = _partition(unknown, lambda cpu: self._siblings(cpu, "package_cpus", "core_siblings") or unknown)
        for number, group in enumerate(groups, max(ids.values(), default=-1) + 1):
            ids.update(dict.fromkeys(group, number))
        return {package: frozenset(cpu for cpu in ids if ids[cpu] == package) for package in sorted(set(ids.values()))}

    @cached_property
    def nodes(self) -> Mapping[int, frozenset[int]]:
        """Those that exist, not all possible ones. A CPU in several nodes belongs to the first. Without NUMA support
        there is one node of all CPUs."""
        existing = self._files.numbered(_NODE, "node")
        listed = parse_cpulist(self._files.text(f"{_NODE}/online"))
        found: dict[int, frozenset[int]] = {}
        left = self.cpus
        for node in [node for node in existing if not listed or node in listed] or [0]:
            path = f"{_NODE}/node{node}"
            told, _ = self._files.cpus(f"{path}/cpulist", f"{path}/cpumap")
            found[node] = (told or frozenset(self._files.numbered(path, "cpu"))) & left
            left -= found[node]
        return dict.fromkeys(found, self.cpus) if len(found) == 1 and left == self.cpus else found

    @cached_property
    def memory(self) -> Mapping[int, tuple[int, int]]:
        texts = {node: self._files.text(f"{_NODE}/node{node}/meminfo") or "" for node in self.nodes}
        facts = {n: dict(re.findall(r"(MemTotal|MemFree):\s+([0-9]{1,15}) kB", text)) for n, text in texts.items()}
        return {n: (int(f["MemTotal"]) << 10, int(f["MemFree"]) << 10) for n, f in facts.items() if len(f) == 2}

    @cached_property
    def memoryless(self) -> frozenset[int]:
        if listed := parse_cpulist(self._files.text(f"{_NODE}/has_memory")):
            return frozenset(self.nodes) - listed
        sizes = {node: self._files.text(f"{_NODE}/node{node}/meminfo") or "" for node in self.nodes}
        return frozenset(node for node, text in sizes.items() if re.search(r"MemTotal:\s+0 kB", text))

    @cached_property
    def distances(self) -> Mapping[int, Mapping[int, int]]:
        """A row with another number of nodes is left out."""
        rows = {node: (self._files.text(f"{_NODE}/node{node}/distance") or "").split() for node in self.nodes}
        columns = {len(ids): ids for ids in (self._files.numbered(_NODE, "node"), sorted(self.nodes))}
        return {
            node: {to: int(far) for to, far in zip(columns[len(row)], row, strict=True) if to in self.nodes}
            for node, row in rows.items()
            if row and len(row) in columns and all(re.fullmatch("[0-9]{1,9}", far) for far in row)
        }

    @cached_property
    def llc(self) -> Sequence[frozenset[int]]:
        return _partition(self.cpus, self._last_level)

    @cached_property
    def gpus(self) -> Sequence[GpuLocality]:
        if (driver := self._driver) is not None:
            return self.located(as_affinity_error(driver, driver.snapshot).physical, sockets=True)
        found = list(self._files.nvidia_gpus().items())
        if not found:
            from .kfd_topology import devices

            found = [(device.bus_id, device.uuid) for device in devices(self._files) or ()]
        return self.located((Gpu(n, uuid, pci_bus_id=bus_id) for n, (bus_id, uuid) in enumerate(found)), sockets=True)

    def located(self, gpus: Iterable[Gpu], *, sockets: bool = False) -> Sequence[GpuLocality]:
        """Return the places of some GPUs, once each; a MIG instance is where its GPU is.

        Args:
            sockets: whether to read the CPUs of their sockets too.
        """
        found = {}
        for gpu in gpus:
            node, near, source = self.place(gpu)
            around = self.socket_around(near) if sockets else frozenset[int]()
            uuid, bus_id = gpu.mig_parent or gpu.uuid, normalize_bus_id(gpu.pci_bus_id)
            found[gpu.index] = GpuLocality(gpu.index, uuid, node, near, around, bus_id, source)
        return tuple(found.values())

    def place(self, gpu: Gpu) -> tuple[int | None, frozenset[int], str]:
        """Return the NUMA node of a GPU (None is unknown), the CPUs near it, and who says so.

        The driver's CPUs come before those in sysfs, and its node counts where sysfs lacks the device. The source in
        sysfs is "numa_node", "local_cpulist", "local_cpus", "only node", or "".
        """
        nodes, bus_id, driver = self.nodes, normalize_bus_id(gpu.pci_bus_id), self._driver
        node = self._files.pci_node(bus_id)
        node = gpu.numa_node if node is None else node
        if driver is not None:
            uuid = gpu.mig_parent or gpu.uuid
            near = (as_affinity_error(driver, lambda: driver.cpu_affinity(uuid, "node")) or frozenset()) & self.cpus
            if near:
                near = _unfiltered(near, nodes) if self.is_here else near
                around = node_of_cpus(near, nodes)
                if around is None and node is not None and near & nodes.get(node, frozenset()):
                    around = node
                return around, near, driver.name.partition(":")[0] or "driver"
        told, source = self._files.cpus(f"{PCI}/{bus_id}/local_cpulist", f"{PCI}/{bus_id}/local_cpus")
        near = told.intersection(frozenset[int]().union(*nodes.values()))
        if node is not None and node in nodes:
            return node, nodes[node] or near, "numa_node"
        with_cpus = [number for number in nodes if nodes[number]]
        if not near and len(with_cpus) == 1:
            return with_cpus[0], nodes[with_cpus[0]], "only node"
        return node_of_cpus(near, nodes), near, source if near else ""

    def _siblings(self, cpu: int, *names: str) -> frozenset[int]:
        """Return the CPUs that share a level with ``cpu``: the first of these files that names it counts."""
        for name in names:
            path = f"{_CPU}/cpu{cpu}/topology/{name}"
            for list_and_mask in ((f"{path}_list", ""), ("", path)):
                found, _ = self._files.cpus(*list_and_mask)
                if cpu in found:
                    return found
        return frozenset()

    def _last_level(self, cpu: int) -> frozenset[int]:
        """Return the CPUs that share the last-level data cache; without cache files, those of the package and node."""
        found: dict[int, frozenset[int]] = {}
        for index in self._files.numbered(f"{_CPU}/cpu{cpu}/cache", "index"):
            path = f"{_CPU}/cpu{cpu}/cache/index{index}"
            level = self._files.number(f"{path}/level")
            shared, _ = self._files.cpus(f"{path}/shared_cpu_list", f"{path}/shared_cpu_map")
            if level and cpu in shared and self._files.text(f"{path}/type") != "Instruction":
                found.setdefault(level, shared)
        if found:
            return found[max(found)]
        groups = (*self.packages.values(), *self.nodes.values())
        return frozenset.intersection(*(cpus for cpus in groups if cpu in cpus))


def read_topology(
    fsroot: str | os.PathLike[str] | None = None, driver: Any = None, gpus: Iterable[Gpu] | None = None
) -> HostTopology:
    """Return a host whose facts are read when they are first asked for: all of them take tens of milliseconds for 256
    CPUs.

    Args:
        fsroot: the directory that has ``sys`` and ``proc``, ``/`` for this host; None takes ``SAFE_GPU_FSROOT``,
            else ``/``. It may be a saved sysfs tree.
        driver: the :class:`~safe_gpu.drivers.base.Driver` whose GPUs are located, in its order. None finds NVIDIA GPUs
            in sysfs by PCI bus order, or, where there are none, AMD GPUs in the kernel's order. A driver with its own
            host topology (a simulated one) returns that, unless another root is given.
        gpus: only these of the driver's are located, and without their sockets, so that it is not polled; None: all.

    Raises:
        GPUAffinityError: there is no online CPU under the root, or the driver does not answer, which it may be asked
            for ``gpus`` only.
    """
    files = Files(fsroot)
    if driver is not None and files.root == "/":
        own: HostTopology | None = as_affinity_error(driver, driver.host_topology)
        if own is not None:
            return own
    host = SysfsHost(files, driver)
    if not host.cpus:
        where = f"{files.root.rstrip('/')}/sys/devices/system/cpu"
        way_out = "give the root of a host's /sys (SAFE_GPU_FSROOT), or claim with affinity=None"
        raise GPUAffinityError(f"there is no online CPU with a topology under {where}: {way_out}")
    if gpus is not None:
        vars(host)["gpus"] = host.located(gpus)
    return host


def node_of_cpus(cpus: frozenset[int], nodes: Mapping[int, frozenset[int]]) -> int | None:
    """Return the node that has all of these CPUs; None if none has, or there are none."""
    return next((node for node, others in nodes.items() if cpus and cpus <= others), None)


def _unfiltered(told: frozenset[int], groups: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """Return NVML's answer before NVML intersected it with this process's cpuset.

    Cores are divided over the whole host, so that jobs in different cpusets compute the same shares. A group counts as
    whole if every CPU of it that is missing in the answer is one that this process may not use.
    """
    usable = os.sched_getaffinity(0)
    whole = set(told)
    for cpus in groups.values():
        if told & cpus and not (cpus - told) & usable:
            whole |= cpus
    return frozenset(whole)


def _partition(cpus: frozenset[int], group_of: Callable[[int], frozenset[int]]) -> tuple[frozenset[int], ...]:
    groups = []
    seen: set[int] = set()
    for cpu in sorted(cpus):
        if cpu not in seen:
            group = frozenset((group_of(cpu) & cpus) - seen) | {cpu}
            seen |= group
            groups.append(group)
    return tuple(groups)
