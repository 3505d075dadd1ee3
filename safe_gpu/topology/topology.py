"""Reads the topology of a host from sysfs and the driver, as frozen records."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..errors import GPUAffinityError, as_affinity_error
from ..gpus.devices import HostSnapshot, normalize_bus_id
from .fsroot import fsroot_or_default
from .kfd_topology import devices
from .sysfs import SysfsTree, node_of_cpus


def _cpu_set(what: str, cpus: Iterable[int]) -> frozenset[int]:
    try:
        found = frozenset(cpus)
        if all(type(cpu) is int or hasattr(cpu, "__index__") for cpu in found):
            return found
    except TypeError:
        pass
    raise GPUAffinityError(f"{what} must be a set of CPU numbers, not {cpus!r}")


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

    @property
    def is_known(self) -> bool:
        """Whether it is known which CPUs are next to it."""
        return self.numa_node is not None or bool(self.node_cpus)

    def __post_init__(self) -> None:
        for name in ("node_cpus", "socket_cpus"):
            object.__setattr__(self, name, _cpu_set(name, getattr(self, name) or ()))


@dataclass(frozen=True)
class HostTopology:
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

    Raises:
        GPUAffinityError: a field has the wrong type.
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

    def __post_init__(self) -> None:
        shapes: dict[str, Callable[[Any], object]] = {
            "cpus": lambda cpus: _cpu_set("cpus", cpus),
            "cores": lambda cores: tuple(_cpu_set("cores", core) for core in cores),
            "nodes": lambda nodes: {node: _cpu_set("nodes", cpus) for node, cpus in nodes.items()},
            "packages": lambda packages: {package: _cpu_set("packages", cpus) for package, cpus in packages.items()},
            "llc": lambda groups: tuple(_cpu_set("llc", group) for group in groups),
            "distances": lambda rows: {node: dict(row) for node, row in rows.items()},
            "gpus": tuple,
            "memoryless": lambda nodes: _cpu_set("memoryless", nodes),
            "isolated": lambda cpus: _cpu_set("isolated", cpus),
        }
        for name, shaped in shapes.items():
            try:
                object.__setattr__(self, name, shaped(getattr(self, name)))
            except GPUAffinityError:
                raise
            except (TypeError, ValueError, AttributeError) as err:
                raise GPUAffinityError(f"{name} of a host topology has the wrong shape: {err}") from err
        if not all(isinstance(gpu, GpuLocality) for gpu in self.gpus):
            raise GPUAffinityError(f"gpus of a host topology must be GpuLocality records, not {self.gpus!r}")

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
        raise GPUAffinityError(
            f"there is no GPU {index!r} on this host: it has "
            + (f"{len(self.gpus)}, {', '.join(str(gpu.index) for gpu in self.gpus)}" if self.gpus else "none")
        )

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

    def socket_set(self, gpu: GpuLocality, allowed: frozenset[int] | None = None) -> frozenset[int]:
        """Return the online CPUs of a GPU's processor socket. If a node spans several sockets, ``allowed`` decides
        which."""
        if gpu.socket_cpus:
            return gpu.socket_cpus & self.cpus
        return socket_around(self.node_set(gpu), self.nodes, self.packages, allowed) & self.cpus


def socket_around(
    near: frozenset[int],
    nodes: Mapping[int, frozenset[int]],
    packages: Mapping[int, frozenset[int]],
    allowed: frozenset[int] | None = None,
) -> frozenset[int]:
    """Return the CPUs of the package around ``near``: the nodes of that package, and its CPUs that are in no node.

    The package is that of the lowest CPU of ``near``. A node belongs to the package of its lowest CPU, so that a node
    that spans two packages is not split. "Lowest" means the lowest CPU in ``allowed``, if any is allowed.
    """

    def lowest(cpus: frozenset[int]) -> int:
        return min((cpus & allowed if allowed is not None else cpus) or cpus)

    if not near:
        return near
    first = lowest(near)
    package = next((cpus for cpus in packages.values() if first in cpus), None)
    if package is None:
        return near
    with_node: set[int] = set()
    found = set(near)
    for cpus in nodes.values():
        with_node |= cpus
        if cpus and lowest(cpus) in package:
            found |= cpus
    return frozenset(found | (package - with_node))


class GpuLocator(Protocol):
    """What is asked of a driver here; every :class:`~safe_gpu.drivers.base.Driver` is one."""

    @property
    def name(self) -> str: ...
    def snapshot(self) -> HostSnapshot: ...
    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None: ...
    def host_topology(self) -> HostTopology | None: ...


def read_topology(fsroot: str | os.PathLike[str] | None = None, driver: GpuLocator | None = None) -> HostTopology:
    """Read a whole host. Takes tens of milliseconds for 256 CPUs.

    Args:
        fsroot: the directory that has ``sys`` and ``proc``, ``/`` for this host; None takes ``SAFE_GPU_FSROOT``,
            else ``/``. It may be a saved sysfs tree.
        driver: the driver whose GPUs are located, in its order. None finds NVIDIA GPUs in sysfs by PCI bus order, or,
            where there are none, AMD GPUs in the kernel's order. A driver with its own host topology (a simulated one)
            returns that, unless another root is given.

    Raises:
        GPUAffinityError: there is no online CPU under the root, or the driver does not answer.
    """
    root = fsroot_or_default(fsroot)
    if driver is not None and root == "/":
        own = as_affinity_error(driver, lambda: driver.host_topology())
        if own is not None:
            return own
    tree = SysfsTree(root)
    online = tree.online_cpus()
    if not online:
        raise GPUAffinityError(
            f"there is no online CPU with a topology under {root.rstrip('/')}/sys/devices/system/cpu: "
            "give the root of a host's /sys (SAFE_GPU_FSROOT), or claim with affinity=None"
        )
    cores = tree.cores(online)
    nodes = tree.nodes(online)
    packages = tree.packages(online, cores)
    host = HostTopology(
        cpus=online,
        cores=cores,
        nodes=nodes,
        packages=packages,
        llc=tree.last_level_caches(online, nodes, packages),
        distances=tree.distances(nodes),
        memoryless=tree.memoryless(nodes),
        isolated=tree.isolated_cpus() & online,
    )
    return replace(host, gpus=tuple(_located_gpus(tree, host, driver)))


def _located_gpus(tree: SysfsTree, host: HostTopology, driver: GpuLocator | None) -> Iterable[GpuLocality]:
    if driver is None:
        found = [(gpu.bus_id, gpu.uuid) for gpu in tree.pci_gpus()]
        for index, (bus_id, uuid) in enumerate(found or [(gpu.bus_id, gpu.uuid) for gpu in devices(tree) or ()]):
            yield _by_pci(tree, host, index, uuid, bus_id, None)
        return
    for gpu in as_affinity_error(driver, lambda: driver.snapshot()).physical:
        bus_id = normalize_bus_id(gpu.pci_bus_id)
        by_pci = _by_pci(tree, host, gpu.index, gpu.uuid, bus_id, gpu.numa_node)
        yield _by_driver(tree, host, driver, by_pci)


def _by_driver(tree: SysfsTree, host: HostTopology, driver: GpuLocator, by_pci: GpuLocality) -> GpuLocality:
    """Return the place of a GPU according to the driver; ``by_pci`` if the driver does not know it."""

    def told(scope: str) -> frozenset[int]:
        return (as_affinity_error(driver, lambda: driver.cpu_affinity(by_pci.uuid, scope)) or frozenset()) & host.cpus

    near = told("node")
    if not near:
        return by_pci
    socket = told("socket")
    if tree.root == "/":
        near, socket = _unfiltered(near, host.nodes), _unfiltered(socket, host.packages)
    node = node_of_cpus(near, host.nodes)
    if node is None and near & host.nodes.get(-1 if by_pci.numa_node is None else by_pci.numa_node, frozenset()):
        node = by_pci.numa_node
    socket = socket | near if socket else socket_around(near, host.nodes, host.packages)
    return GpuLocality(
        by_pci.index, by_pci.uuid, node, near, socket, by_pci.pci_bus_id, driver.name.partition(":")[0] or "driver"
    )


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


def _by_pci(
    tree: SysfsTree, host: HostTopology, index: int, uuid: str, bus_id: str, told_node: int | None
) -> GpuLocality:
    """Return the place of a GPU from its PCI device; ``told_node`` is the driver's node, for a device that sysfs
    lacks."""
    node, near, source = tree.pci_place(bus_id, told_node, host.nodes)
    return GpuLocality(index, uuid, node, near, socket_around(near, host.nodes, host.packages), bus_id, source)
