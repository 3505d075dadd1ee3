"""What is near what on a host: CPUs, physical cores, NUMA nodes, sockets, caches and GPUs, as frozen data.

CUDA is never initialised for it: CPUs come from sysfs, a GPU's place from NVML's affinity, else from its PCI device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from ..devices import normalize_bus_id
from ..errors import GPUAffinityError
from .near import asked, fsroot_or_default
from .sysfs import Tree

if TYPE_CHECKING:
    from ..drivers.base import Driver

__all__ = ["GpuLocality", "HostTopology", "socket_around"]

_T = TypeVar("_T")


def _cpu_set(what: str, cpus: Iterable[int]) -> frozenset[int]:
    try:
        found = frozenset(cpus)
        if all(type(cpu) is int or hasattr(cpu, "__index__") for cpu in found):
            return found
    except TypeError:
        pass
    raise GPUAffinityError(f"{what} must be a set of CPU numbers, not {cpus!r}")


def _shaped(what: str, build: Callable[[], _T]) -> _T:
    try:
        return build()
    except (TypeError, ValueError, AttributeError) as err:
        raise GPUAffinityError(f"{what} of a host topology has the wrong shape: {err}") from err


@dataclass(frozen=True)
class GpuLocality:
    """Where one GPU stands.

    Attributes:
        index: position by PCI bus id, as nvidia-smi shows it.
        uuid: "" where no driver told it.
        numa_node: its NUMA node; None is unknown.
        node_cpus: CPUs of its node; empty is "look into ``nodes``", and all CPUs where ``numa_node`` is None too.
        socket_cpus: CPUs of its processor socket; empty is "work it out from ``packages``".
        pci_bus_id: ``0000:07:00.0``.
        source: which fact the place comes from: "nvml" (or another driver's name), "numa_node", "local_cpulist",
            "local_cpus", "only node", or "" for an unknown place.
    """

    index: int
    uuid: str = ""
    numa_node: int | None = None
    node_cpus: frozenset[int] = frozenset()
    socket_cpus: frozenset[int] = frozenset()
    pci_bus_id: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("node_cpus", "socket_cpus"):
            object.__setattr__(self, name, _cpu_set(name, getattr(self, name) or ()))


@dataclass(frozen=True)
class HostTopology:
    """The host as affinity sees it. All sets hold logical CPU numbers.

    Attributes:
        cpus: CPUs that are online.
        cores: hardware threads of each physical core, of any number; a CPU in none is a core of its own.
        nodes: CPUs by NUMA node, nodes without CPUs included.
        packages: CPUs by processor socket.
        llc: CPUs that share the last-level cache.
        distances: ``{a: {b: relative distance from node a to b}}``, 10 is local; {} where the kernel tells none.
        gpus: the GPUs of the host in index order.

    Raises:
        GPUAffinityError: a field of the wrong shape.
    """

    cpus: frozenset[int]
    cores: Sequence[frozenset[int]] = ()
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    packages: Mapping[int, frozenset[int]] = field(default_factory=dict)
    llc: Sequence[frozenset[int]] = ()
    distances: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    gpus: Sequence[GpuLocality] = ()

    def __post_init__(self) -> None:
        def put(name: str, build: Callable[[], object]) -> None:
            object.__setattr__(self, name, _shaped(name, build))

        put("cpus", lambda: _cpu_set("cpus", self.cpus))
        put("cores", lambda: tuple(_cpu_set("cores", core) for core in self.cores))
        put("nodes", lambda: {node: _cpu_set("nodes", cpus) for node, cpus in self.nodes.items()})
        put("packages", lambda: {package: _cpu_set("packages", cpus) for package, cpus in self.packages.items()})
        put("llc", lambda: tuple(_cpu_set("llc", group) for group in self.llc))
        put("distances", lambda: {node: dict(row) for node, row in self.distances.items()})
        put("gpus", lambda: tuple(self.gpus))
        if not all(isinstance(gpu, GpuLocality) for gpu in self.gpus):
            raise GPUAffinityError(f"gpus of a host topology must be GpuLocality records, not {self.gpus!r}")

    @classmethod
    def from_host(cls, fsroot: str | os.PathLike[str] | None = None, driver: Driver | None = None) -> HostTopology:
        """Read a whole host: tens of milliseconds for 256 CPUs.

        Args:
            fsroot: root under which ``sys`` and ``proc`` stand, ``/`` for this host; None takes ``SAFE_GPU_FSROOT``,
                else ``/``. A saved sysfs tree is as good as a real one.
            driver: whose GPUs to place, in its order. None finds NVIDIA GPUs in sysfs by PCI bus order. A driver that
                brings its own host (a simulated one) answers by itself, unless another root is given.

        Raises:
            GPUAffinityError: no online CPU stands there, or the driver does not answer.
        """
        root = fsroot_or_default(fsroot)
        if driver is not None and root == "/":
            own = asked(driver, lambda: driver.host_topology())
            if own is not None:
                return own
        tree = Tree(root)
        online = tree.online_cpus()
        if not online:
            raise GPUAffinityError(
                f"no online CPU with a topology stands under {root.rstrip('/')}/sys/devices/system/cpu: "
                "give the root of a host's /sys (SAFE_GPU_FSROOT), or claim with affinity=None"
            )
        cores = tree.cores(online)
        nodes = tree.nodes(online)
        packages = tree.packages(online, cores)
        host = cls(
            cpus=online,
            cores=cores,
            nodes=nodes,
            packages=packages,
            llc=tree.last_level_caches(online, nodes, packages),
            distances=tree.distances(nodes),
        )
        return replace(host, gpus=tuple(_located_gpus(tree, host, driver)))

    def gpu(self, index: int) -> GpuLocality:
        """The GPU with this index.

        Raises:
            GPUAffinityError: there is none.
        """
        for gpu in self.gpus:
            if gpu.index == index and not isinstance(index, bool):
                return gpu
        raise GPUAffinityError(
            f"there is no GPU {index!r} on this host: it has {len(self.gpus)}"
            + (f", {', '.join(str(gpu.index) for gpu in self.gpus)}" if self.gpus else "")
        )

    def node_set(self, gpu: GpuLocality) -> frozenset[int]:
        """CPUs next to a GPU: its own ``node_cpus``, else its node's, else (place unknown) all CPUs."""
        if gpu.node_cpus:
            return gpu.node_cpus & self.cpus
        if gpu.numa_node is None:
            return self.cpus
        return self.nodes.get(gpu.numa_node, frozenset()) & self.cpus

    def node_of(self, gpu: GpuLocality) -> int | None:
        """The NUMA node a GPU stands on, worked out from its CPUs where it is not given; None is unknown."""
        if gpu.numa_node is not None:
            return gpu.numa_node
        near = gpu.node_cpus & self.cpus
        return next((node for node, cpus in self.nodes.items() if near and near <= cpus), None)

    def socket_set(self, gpu: GpuLocality, allowed: frozenset[int] | None = None) -> frozenset[int]:
        """CPUs of a GPU's processor socket; ``allowed`` picks the socket where a node lies on several."""
        if gpu.socket_cpus:
            return gpu.socket_cpus & self.cpus
        return socket_around(self.node_set(gpu), self.nodes, self.packages, allowed) & self.cpus


def socket_around(
    near: frozenset[int],
    nodes: Mapping[int, frozenset[int]],
    packages: Mapping[int, frozenset[int]],
    allowed: frozenset[int] | None = None,
) -> frozenset[int]:
    """All nodes of the package that holds the lowest CPU of ``near``, and the package's CPUs that are in no node.

    A node belongs to the package of its lowest CPU, so that a node across two packages is never cut in half. CPUs in
    ``allowed`` decide before others do.
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


def _located_gpus(tree: Tree, host: HostTopology, driver: Driver | None) -> Iterable[GpuLocality]:
    if driver is None:
        for index, found in enumerate(tree.pci_gpus()):
            yield _by_pci(tree, host, index, found.uuid, found.bus_id, None)
        return
    for gpu in asked(driver, lambda: driver.snapshot()).physical:
        bus_id = normalize_bus_id(gpu.pci_bus_id)
        by_pci = _by_pci(tree, host, gpu.index, gpu.uuid, bus_id, gpu.numa_node)
        yield _by_driver(tree, host, driver, by_pci)


def _by_driver(tree: Tree, host: HostTopology, driver: Driver, by_pci: GpuLocality) -> GpuLocality:
    """The place as the driver tells it, else as PCI does."""

    def told(scope: str) -> frozenset[int]:
        return (asked(driver, lambda: driver.cpu_affinity(by_pci.uuid, scope)) or frozenset()) & host.cpus

    near = told("node")
    if not near:
        return by_pci
    socket = told("socket")
    if tree.root == "/":
        near, socket = _unfiltered(near, host.nodes), _unfiltered(socket, host.packages)
    node = next((node for node, cpus in host.nodes.items() if near <= cpus), None)
    if node is None and near & host.nodes.get(-1 if by_pci.numa_node is None else by_pci.numa_node, frozenset()):
        node = by_pci.numa_node
    socket = socket | near if socket else socket_around(near, host.nodes, host.packages)
    return GpuLocality(
        by_pci.index, by_pci.uuid, node, near, socket, by_pci.pci_bus_id, driver.name.partition(":")[0] or "driver"
    )


def _unfiltered(told: frozenset[int], groups: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """What NVML meant before it cut its answer to this process's cpuset.

    Cores are divided over the whole host, so that jobs in different cpusets agree on who gets which: a group of which
    only CPUs are missing that this process may not use counts as whole.
    """
    mine = os.sched_getaffinity(0)
    whole = set(told)
    for cpus in groups.values():
        if told & cpus and not (cpus - told) & mine:
            whole |= cpus
    return frozenset(whole)


def _by_pci(tree: Tree, host: HostTopology, index: int, uuid: str, bus_id: str, told_node: int | None) -> GpuLocality:
    """A place from the PCI device; ``told_node`` is the driver's word where sysfs does not show the device."""
    node = tree.pci_node(bus_id)
    if node is None:
        node = told_node
    local = tree.pci_cpus(bus_id)
    near = local[0] & host.cpus if local else frozenset()
    source = local[1] if local and near else ""
    if node is not None and node in host.nodes:
        near, source = host.nodes[node] or near, "numa_node"
    elif near:
        node = next((node for node, cpus in host.nodes.items() if near <= cpus), None)
    elif len(host.nodes) == 1:
        (node, near), source = next(iter(host.nodes.items())), "only node"
    else:
        node = None
    return GpuLocality(index, uuid, node, near, socket_around(near, host.nodes, host.packages), bus_id, source)
