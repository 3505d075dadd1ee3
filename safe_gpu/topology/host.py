"""The topology of a host: CPUs, NUMA nodes, sockets, caches, and the places of its GPUs."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from ..errors import GPUAffinityError, as_affinity_error
from ..gpus.devices import Gpu, normalize_bus_id
from .files import PCI, Files

_CPU = "sys/devices/system/cpu"

_NODE = "sys/devices/system/node"


def _cpus(numbers: Iterable[int] | None) -> frozenset[int]:
    if numbers is None:
        return frozenset()
    return frozenset(operator.index(number) for number in numbers)


def _groups(groups: Iterable[Iterable[int]]) -> tuple[frozenset[int], ...]:
    return tuple(_cpus(group) for group in groups)


def _by_number(groups: Mapping[int, Iterable[int]]) -> dict[int, frozenset[int]]:
    return {number: _cpus(cpus) for number, cpus in groups.items()}


def _rows(distances: Mapping[int, Mapping[int, int]]) -> dict[int, dict[int, int]]:
    return {node: dict(row) for node, row in distances.items()}


def _copies(gpus: Iterable[GpuLocality]) -> tuple[GpuLocality, ...]:
    return tuple(replace(gpu) for gpu in gpus)


def _shape(record: object, **shapes: Callable[[Any], object]) -> None:
    """Bring fields of a frozen record into their shapes, so that it can be compared.

    Raises:
        GPUAffinityError: one has the wrong type.
    """
    for name, shape in shapes.items():
        try:
            object.__setattr__(record, name, shape(getattr(record, name)))
        except (TypeError, ValueError, AttributeError) as err:
            raise GPUAffinityError(f"{name} of a host topology has the wrong shape: {err}") from err


@dataclass(frozen=True)
class GpuLocality:
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

    def __post_init__(self) -> None:
        _shape(self, node_cpus=_cpus, socket_cpus=_cpus)

    @property
    def is_known(self) -> bool:
        """Whether it is known which CPUs are next to it."""
        return self.numa_node is not None or bool(self.node_cpus)


@dataclass(frozen=True)
class HostTopology:
    """The topology of a host. All sets hold logical CPU numbers.

    Attributes:
        cpus: CPUs that are online.
        cores: the hardware threads of each physical core. A CPU in no set is a core with one thread.
        nodes: NUMA node -> its CPUs; nodes without CPUs are included.
        packages: processor socket -> its CPUs.
        llc: sets of CPUs that share a last-level cache.
        distances: ``{a: {b: relative distance from node a to b}}``, 10 is local; {} if the kernel does not report it.
        gpus: the GPUs of the host in index order.
        memoryless: the nodes that have no memory.
        isolated: CPUs over which the kernel does not spread threads (isolcpus=).
        memory: node -> bytes of its memory: all, and free; {} if the kernel does not report it.
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

    def __post_init__(self) -> None:
        _shape(self, cpus=_cpus, cores=_groups, nodes=_by_number, packages=_by_number, llc=_groups, distances=_rows)
        _shape(self, gpus=_copies, memoryless=_cpus, isolated=_cpus, memory=dict)

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
        has = "none"
        if self.gpus:
            indices = ", ".join(str(gpu.index) for gpu in self.gpus)
            has = f"{len(self.gpus)}, {indices}"
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
        with_memory = [other for other in self.nodes if other not in self.memoryless]
        if node not in self.memoryless or not with_memory:
            return frozenset([node])
        row = self.distances.get(node, {})
        distances = {other: row.get(other, math.inf) for other in with_memory}
        nearest = min(distances.values())
        return frozenset(other for other in with_memory if distances[other] == nearest)

    def socket_around(self, near: frozenset[int], allowed: frozenset[int] | None = None) -> frozenset[int]:
        """Return the CPUs of the package around ``near``: the nodes of that package, and its CPUs that are in no node.

        The package is that of the lowest CPU of ``near``. A node belongs to the package of its lowest CPU, so that a
        node that spans two packages is not split. "Lowest" means the lowest CPU in ``allowed``, if any is allowed.
        """

        if not near:
            return near
        package = _group_with(_lowest(near, allowed), self.packages)
        if package is None:
            return near
        around = near | package.difference(*self.nodes.values())
        for cpus in self.nodes.values():
            if cpus and _lowest(cpus, allowed) in package:
                around |= cpus
        return around


class GpuPlace(NamedTuple):
    """Where a GPU is.

    Attributes:
        node: its NUMA node; None is unknown.
        cpus: the CPUs near it.
        source: the driver that says so, or in sysfs "numa_node", "local_cpulist", "local_cpus" or "only node"; "" if
            nothing is known.
    """

    node: int | None = None
    cpus: frozenset[int] = frozenset()
    source: str = ""


class SysfsHost(HostTopology):
    """A host whose facts are read when they are first asked for: most claims need the nodes only.

    Most sets hold online CPUs only.
    """

    _files: Files
    _driver: Any

    def __init__(self, files: Files, driver: Any = None) -> None:
        # A frozen record sets no attribute otherwise.
        object.__setattr__(self, "_files", files)
        object.__setattr__(self, "_driver", driver)
        object.__setattr__(self, "is_here", files.root == "/")

    @cached_property
    def cpus(self) -> frozenset[int]:
        """The CPUs with a topology that the kernel lists as online, or that are not switched off."""
        files = self._files
        present = [cpu for cpu in files.numbered(_CPU, "cpu") if files.exists(f"{_CPU}/cpu{cpu}/topology")]
        listed = files.cpulist(f"{_CPU}/online")
        # lxcfs shows a container of CPUs 24-31 the list 0-7 (lxcfs#731). All CPUs of a mask are online, so a list that
        # lacks one of them is not the kernel's.
        is_the_kernels = not self.is_here or _own_mask().intersection(present) <= listed
        if listed and is_the_kernels:
            return listed.intersection(present)
        return frozenset(cpu for cpu in present if files.text(f"{_CPU}/cpu{cpu}/online") != "0")

    @cached_property
    def isolated(self) -> frozenset[int]:
        return self._files.cpulist(f"{_CPU}/isolated") & self.cpus

    @cached_property
    def cores(self) -> Sequence[frozenset[int]]:
        return _partition(self.cpus, self._core_of)

    @cached_property
    def packages(self) -> Mapping[int, frozenset[int]]:
        """Under the kernel's ids; sockets without an id (-1) are numbered by lowest CPU."""
        package_of: dict[int, int] = {}
        for core in self.cores:
            package = self._package_id(core)
            if package is not None:
                package_of.update(dict.fromkeys(core, package))
        without_id = self.cpus - package_of.keys()
        first = max(package_of.values(), default=-1) + 1
        groups = _partition(without_id, lambda cpu: self._package_siblings(cpu) or without_id)
        for package, group in enumerate(groups, first):
            package_of.update(dict.fromkeys(group, package))
        packages = sorted(set(package_of.values()))
        return {number: frozenset(cpu for cpu in package_of if package_of[cpu] == number) for number in packages}

    @cached_property
    def nodes(self) -> Mapping[int, frozenset[int]]:
        """Those that exist, not all possible ones. A CPU in several nodes belongs to the first. Without NUMA support
        there is one node of all CPUs."""
        found: dict[int, frozenset[int]] = {}
        left = self.cpus
        for node in self._existing_nodes():
            path = f"{_NODE}/node{node}"
            told = self._files.cpulist(f"{path}/cpulist") or self._files.cpumask(f"{path}/cpumap")
            if not told:
                told = frozenset(self._files.numbered(path, "cpu"))
            found[node] = told & left
            left -= found[node]
        if len(found) == 1 and left == self.cpus:  # no CPU is told
            return dict.fromkeys(found, self.cpus)
        return found

    def _existing_nodes(self) -> list[int]:
        listed = self._files.cpulist(f"{_NODE}/online")
        existing = self._files.numbered(_NODE, "node")
        if listed:
            existing = [node for node in existing if node in listed]
        return existing or [0]

    @cached_property
    def memory(self) -> Mapping[int, tuple[int, int]]:
        found = {}
        for node in self.nodes:
            kibibytes = dict(re.findall(r"(MemTotal|MemFree):\s+([0-9]{1,15}) kB", self._meminfo(node)))
            if len(kibibytes) == 2:
                found[node] = (int(kibibytes["MemTotal"]) << 10, int(kibibytes["MemFree"]) << 10)
        return found

    @cached_property
    def memoryless(self) -> frozenset[int]:
        listed = self._files.cpulist(f"{_NODE}/has_memory")
        if listed:
            return frozenset(self.nodes) - listed
        return frozenset(node for node in self.nodes if re.search(r"MemTotal:\s+0 kB", self._meminfo(node)))

    def _meminfo(self, node: int) -> str:
        return self._files.text(f"{_NODE}/node{node}/meminfo") or ""

    @cached_property
    def distances(self) -> Mapping[int, Mapping[int, int]]:
        """A row with another number of nodes is left out."""
        existing = self._files.numbered(_NODE, "node")
        known = sorted(self.nodes)
        found = {}
        for node in self.nodes:
            row = (self._files.text(f"{_NODE}/node{node}/distance") or "").split()
            if not row or not all(re.fullmatch("[0-9]{1,9}", distance) for distance in row):
                continue
            if len(row) == len(known):
                columns = known
            elif len(row) == len(existing):
                columns = existing
            else:
                continue
            distance_to = dict(zip(columns, row, strict=True))
            found[node] = {to: int(distance_to[to]) for to in columns if to in self.nodes}
        return found

    @cached_property
    def llc(self) -> Sequence[frozenset[int]]:
        return _partition(self.cpus, self._last_level)

    @cached_property
    def gpus(self) -> Sequence[GpuLocality]:
        driver = self._driver
        if driver is not None:
            return self.located(as_affinity_error(driver, driver.snapshot).physical, sockets=True)
        found = list(self._files.nvidia_gpus().items()) or self._amd_gpus()
        gpus = [Gpu(index, uuid, pci_bus_id=bus_id) for index, (bus_id, uuid) in enumerate(found)]
        return self.located(gpus, sockets=True)

    def _amd_gpus(self) -> list[tuple[str, str]]:
        """Return bus id and UUID of each, in which several partitions have one bus id."""
        from .kfd_topology import devices

        return [(device.bus_id, device.uuid) for device in devices(self._files) or ()]

    def located(self, gpus: Iterable[Gpu], *, sockets: bool = False) -> Sequence[GpuLocality]:
        """Return the places of some GPUs, once each; a MIG instance is where its GPU is.

        Args:
            sockets: whether to read the CPUs of their sockets too.
        """
        found = {}
        for gpu in gpus:
            place = self.place(gpu)
            socket_cpus: frozenset[int] = frozenset()
            if sockets:
                socket_cpus = self.socket_around(place.cpus)
            found[gpu.index] = GpuLocality(
                gpu.index,
                gpu.mig_parent or gpu.uuid,
                numa_node=place.node,
                node_cpus=place.cpus,
                socket_cpus=socket_cpus,
                pci_bus_id=normalize_bus_id(gpu.pci_bus_id),
                source=place.source,
            )
        return tuple(found.values())

    def place(self, gpu: Gpu) -> GpuPlace:
        """Return where a GPU is.

        The driver's CPUs come before those in sysfs, and its node counts where sysfs lacks the device.
        """
        bus_id = normalize_bus_id(gpu.pci_bus_id)
        node = self._files.pci_node(bus_id)
        if node is None:
            node = gpu.numa_node
        if self._driver is not None:
            cpus = self._cpus_by_driver(gpu)
            if cpus:
                around = node_of_cpus(cpus, self.nodes)
                if around is None and node is not None and cpus & self.nodes.get(node, frozenset()):
                    around = node
                return GpuPlace(around, cpus, self._driver.name.partition(":")[0] or "driver")
        return self._place_in_sysfs(bus_id, node)

    def _cpus_by_driver(self, gpu: Gpu) -> frozenset[int]:
        driver = self._driver
        uuid = gpu.mig_parent or gpu.uuid
        told = as_affinity_error(driver, lambda: driver.cpu_affinity(uuid, "node")) or frozenset()
        cpus = self.cpus.intersection(told)
        if self.is_here:
            return _unfiltered(cpus, self.nodes)
        return cpus

    def _place_in_sysfs(self, bus_id: str, node: int | None) -> GpuPlace:
        source = "local_cpulist"
        told = self._files.cpulist(f"{PCI}/{bus_id}/local_cpulist")
        if not told:
            source = "local_cpus"
            told = self._files.cpumask(f"{PCI}/{bus_id}/local_cpus")
        cpus = told.intersection(frozenset[int]().union(*self.nodes.values()))
        if node is not None and node in self.nodes:
            return GpuPlace(node, self.nodes[node] or cpus, "numa_node")
        if cpus:
            return GpuPlace(node_of_cpus(cpus, self.nodes), cpus, source)
        with_cpus = [number for number in self.nodes if self.nodes[number]]
        if len(with_cpus) == 1:
            return GpuPlace(with_cpus[0], self.nodes[with_cpus[0]], "only node")
        return GpuPlace()

    def _core_of(self, cpu: int) -> frozenset[int]:
        return self._siblings(cpu, "core_cpus", "thread_siblings")

    def _package_siblings(self, cpu: int) -> frozenset[int]:
        return self._siblings(cpu, "package_cpus", "core_siblings")

    def _package_id(self, core: Iterable[int]) -> int | None:
        """Return the kernel's id of the socket of a core; None without one."""
        for cpu in sorted(core):
            number = self._files.number(f"{_CPU}/cpu{cpu}/topology/physical_package_id")
            if number is not None and number < 1 << 31:
                return number
        return None

    def _siblings(self, cpu: int, *names: str) -> frozenset[int]:
        """Return the CPUs that share a level with ``cpu``: the first of these files that names it counts."""
        for name in names:
            path = f"{_CPU}/cpu{cpu}/topology/{name}"
            cpus = self._files.cpulist(f"{path}_list")
            if cpu not in cpus:
                cpus = self._files.cpumask(path)
            if cpu in cpus:
                return cpus
        return frozenset()

    def _last_level(self, cpu: int) -> frozenset[int]:
        """Return the CPUs that share the last-level data cache; without cache files, those of the package and node."""
        found: dict[int, frozenset[int]] = {}
        for index in self._files.numbered(f"{_CPU}/cpu{cpu}/cache", "index"):
            path = f"{_CPU}/cpu{cpu}/cache/index{index}"
            level = self._files.number(f"{path}/level")
            shared = self._files.cpulist(f"{path}/shared_cpu_list") or self._files.cpumask(f"{path}/shared_cpu_map")
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
        object.__setattr__(host, "gpus", host.located(gpus))
    return host


def node_of_cpus(cpus: frozenset[int], nodes: Mapping[int, frozenset[int]]) -> int | None:
    """Return the node that has all of these CPUs; None if none has, or there are none."""
    if not cpus:
        return None
    for node, others in nodes.items():
        if cpus <= others:
            return node
    return None


def _lowest(cpus: frozenset[int], allowed: frozenset[int] | None) -> int:
    """Return the lowest CPU, of those that are allowed if any is."""
    if allowed is not None and cpus & allowed:
        return min(cpus & allowed)
    return min(cpus)


def _group_with(cpu: int, groups: Mapping[int, frozenset[int]]) -> frozenset[int] | None:
    for cpus in groups.values():
        if cpu in cpus:
            return cpus
    return None


def _own_mask() -> set[int]:
    """Return the CPUs that this process may use; none where a sandbox refuses to tell."""
    try:
        return os.sched_getaffinity(0)
    except OSError:
        return set()


def _unfiltered(told: frozenset[int], groups: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """Return NVML's answer before NVML intersected it with this process's cpuset.

    Cores are divided over the whole host, so that jobs in different cpusets compute the same shares. A group counts as
    whole if every CPU of it that is missing in the answer is one that this process may not use.
    """
    usable = _own_mask()
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
