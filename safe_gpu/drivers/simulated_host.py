"""What a simulated host is made of: its CPUs, and its GPUs as the driver of an idle host reports them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ..devices import VENDORS, Gpu, vendor_of

if TYPE_CHECKING:
    from ..topology import HostTopology


MIB = 1 << 20

CONTEXT_BYTES = 400 * MIB
"""What one CUDA context costs on a data-centre GPU, roughly."""

_RESERVED = 4 * MIB
_DESKTOP = 350 * MIB


class Cpus:
    """The processors of a host: ``packages`` sockets of ``nodes`` NUMA nodes of ``cores`` cores of two threads.

    ``llc`` cores share a last-level cache. With ``adjacent`` the threads of a core have neighbouring numbers; else the
    second threads are numbered after all first ones, as servers do. ``distances`` are those of the firmware's table, to
    the same node, to another one of the socket, and to another socket.
    """

    def __init__(
        self,
        packages: int,
        nodes: int,
        cores: int,
        llc: int,
        adjacent: bool = False,
        distances: tuple[int, int, int] = (10, 12, 32),
    ) -> None:
        self.packages = packages
        self.nodes = nodes
        self.cores = cores
        self.llc = llc
        self.adjacent = adjacent
        self.distances = distances
        self.total = packages * nodes * cores

    def threads(self, first: int, count: int) -> frozenset[int]:
        """Logical CPUs of ``count`` cores from the ``first`` on."""
        if self.adjacent:
            return frozenset(range(2 * first, 2 * (first + count)))
        return frozenset(range(first, first + count)) | frozenset(range(self.total + first, self.total + first + count))

    def of_node(self, node: int) -> frozenset[int]:
        """Logical CPUs of a NUMA node."""
        return self.threads(node * self.cores, self.cores)

    def of_package(self, package: int) -> frozenset[int]:
        """Logical CPUs of a socket."""
        return self.threads(package * self.nodes * self.cores, self.nodes * self.cores)


class SimulatedInstance(NamedTuple):
    """One MIG instance: its profile ("3g.40gb") and memory in MiB."""

    uuid: str
    profile: str
    mib: int


class SimulatedGpu(NamedTuple):
    """One GPU: PCI bus number, NUMA node, memory in MiB; MIG mode is on where it has ``instances``."""

    uuid: str
    bus: int
    node: int
    name: str
    mib: int
    display: bool = False
    instances: tuple[SimulatedInstance, ...] = ()

    @property
    def vendor(self) -> str:
        """Of the GPU."""
        return vendor_of(self.uuid)


class Preset:
    """One simulated host; its GPUs stand in PCI bus order. ``nvswitch``: NVLink or xGMI connects all of them."""

    def __init__(self, name: str, cpus: Cpus, devices: tuple[SimulatedGpu, ...], nvswitch: bool = False) -> None:
        self.name = name
        self.cpus = cpus
        self.devices = devices
        self.nvswitch = nvswitch

    @cached_property
    def vendors(self) -> tuple[str, ...]:
        """The vendors of its GPUs, NVIDIA first."""
        return tuple(vendor for vendor in VENDORS if any(device.vendor == vendor for device in self.devices))

    def of(self, vendor: str | None) -> Preset:
        """The host as the driver of this vendor shows it; its first vendor if that is None, or has no GPUs here."""
        return self._parts[vendor if vendor in self.vendors else self.vendors[0]]

    @cached_property
    def _parts(self) -> dict[str | None, Preset]:
        if len(self.vendors) == 1:
            return {self.vendors[0]: self}
        parts = {vendor: [device for device in self.devices if device.vendor == vendor] for vendor in self.vendors}
        return {vendor: Preset(self.name, self.cpus, tuple(mine), self.nvswitch) for vendor, mine in parts.items()}

    def gpus(self) -> tuple[Gpu, ...]:
        """All devices as the driver of an idle host reports them, MIG instances after their GPU."""
        return self._gpus

    @cached_property
    def _gpus(self) -> tuple[Gpu, ...]:
        everyone = frozenset(device.uuid for device in self.devices) if self.nvswitch else frozenset()
        found = []
        for index, device in enumerate(self.devices):
            mig = bool(device.instances)
            used = _RESERVED + (_DESKTOP if device.display else 0)
            whole = Gpu(
                index=index,
                uuid=device.uuid,
                name=device.name,
                pci_bus_id=f"0000:{device.bus:02x}:00.0",
                numa_node=device.node,
                memory_total=device.mib * MIB,
                memory_used=used,
                memory_free=device.mib * MIB - used,
                counts_reserved=False,
                utilization=None if mig else 0,
                display_active=device.display,
                unusable="MIG mode is on: claim one of its instances" if mig else None,
                mig_enabled=mig,
                nvlink_peers=everyone - {device.uuid},
                vendor=device.vendor,
            )
            found.append(whole)
            found += [
                Gpu(
                    index=index,
                    uuid=instance.uuid,
                    name=f"{device.name} MIG {instance.profile}",
                    pci_bus_id=whole.pci_bus_id,
                    numa_node=device.node,
                    memory_total=instance.mib * MIB,
                    memory_used=_RESERVED,
                    memory_free=instance.mib * MIB - _RESERVED,
                    counts_reserved=False,
                    mig_parent=device.uuid,
                    mig_instance=number,
                )
                for number, instance in enumerate(device.instances)
            ]
        return tuple(found)

    def topology(self) -> HostTopology:
        """The CPUs of the host, and where its GPUs are among them."""
        from ..topology import GpuLocality, HostTopology

        cpus = self.cpus
        nodes = range(cpus.packages * cpus.nodes)
        same, socket, remote = cpus.distances
        return HostTopology(
            cpus=frozenset(range(2 * cpus.total)),
            cores=tuple(cpus.threads(core, 1) for core in range(cpus.total)),
            nodes={node: cpus.of_node(node) for node in nodes},
            packages={package: cpus.of_package(package) for package in range(cpus.packages)},
            llc=tuple(cpus.threads(first, cpus.llc) for first in range(0, cpus.total, cpus.llc)),
            distances={
                one: {
                    other: same if one == other else socket if one // cpus.nodes == other // cpus.nodes else remote
                    for other in nodes
                }
                for one in nodes
            },
            gpus=tuple(
                GpuLocality(
                    index=index,
                    uuid=device.uuid,
                    numa_node=device.node,
                    node_cpus=cpus.of_node(device.node),
                    socket_cpus=cpus.of_package(device.node // cpus.nodes),
                    pci_bus_id=f"0000:{device.bus:02x}:00.0",
                    source=f"simulated:{self.name}",
                )
                for index, device in enumerate(self.devices)
            ),
        )

    def node_of(self, uuid: str) -> int | None:
        """The NUMA node of a GPU or MIG instance; None for a UUID that is not of this host."""
        for device in self.devices:
            if uuid == device.uuid or any(uuid == instance.uuid for instance in device.instances):
                return device.node
        return None
