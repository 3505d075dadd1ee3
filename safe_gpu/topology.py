"""Frozen records of a host's topology: CPUs, physical cores, NUMA nodes, sockets, caches and GPUs.

This module reads no files and asks no driver. :mod:`safe_gpu.affinity.reading` fills the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import GPUAffinityError

if TYPE_CHECKING:
    import os


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
    def from_host(cls, fsroot: str | os.PathLike[str] | None = None, driver: Any = None) -> HostTopology:
        """Read the topology of a host, for callers outside the package.

        Args:
            fsroot: the directory that contains ``sys`` and ``proc``; None takes ``SAFE_GPU_FSROOT``, else ``/``.
            driver: a :class:`~safe_gpu.drivers.base.Driver` whose GPUs to place; None finds the GPUs in sysfs.

        Raises:
            GPUAffinityError: no online CPU is found there, or the driver does not answer.
        """
        from importlib import import_module

        # read_topology is in a room above this module, and imports must point downward. It is therefore loaded by
        # name. Code inside the package calls read_topology itself.
        reading: Any = import_module(".affinity.reading", __package__)
        host: HostTopology = reading.read_topology(fsroot, driver)
        return host

    def gpu(self, index: int) -> GpuLocality:
        """The GPU with this index.

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
        """Online CPUs next to a GPU: its ``node_cpus``, else those of its NUMA node, else (node unknown) all CPUs."""
        if gpu.node_cpus:
            return gpu.node_cpus & self.cpus
        if gpu.numa_node is None:
            return self.cpus
        return self.nodes.get(gpu.numa_node, frozenset()) & self.cpus

    def node_of(self, gpu: GpuLocality) -> int | None:
        """The NUMA node of a GPU: ``numa_node`` if it is given, else derived from ``node_cpus``; None is unknown."""
        if gpu.numa_node is not None:
            return gpu.numa_node
        near = gpu.node_cpus & self.cpus
        return next((node for node, cpus in self.nodes.items() if near and near <= cpus), None)

    def socket_set(self, gpu: GpuLocality, allowed: frozenset[int] | None = None) -> frozenset[int]:
        """Online CPUs of a GPU's processor socket. If a node spans several sockets, ``allowed`` decides which."""
        if gpu.socket_cpus:
            return gpu.socket_cpus & self.cpus
        return socket_around(self.node_set(gpu), self.nodes, self.packages, allowed) & self.cpus


def socket_around(
    near: frozenset[int],
    nodes: Mapping[int, frozenset[int]],
    packages: Mapping[int, frozenset[int]],
    allowed: frozenset[int] | None = None,
) -> frozenset[int]:
    """CPUs of the package around ``near``: the nodes of that package, and its CPUs that are in no node.

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
