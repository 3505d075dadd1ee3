"""What a simulated host is made of."""

from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from ..gpus.devices import MIG_IS_ON, Gpu, vendor_of
from ..gpus.vendors import VENDORS

if TYPE_CHECKING:
    from ..topology.topology import HostTopology

MIB = 1 << 20

CONTEXT_BYTES = 400 * MIB
"""What one CUDA context costs on a data-centre GPU, roughly."""

_RESERVED = 4 * MIB

_DESKTOP = 350 * MIB


class Cpus(NamedTuple):
    """The processors of a host: ``packages`` sockets of ``nodes`` NUMA nodes of ``cores`` cores of two threads.

    ``llc`` cores share a last-level cache. With ``adjacent`` the threads of a core have neighbouring numbers; else the
    second threads are numbered after all first ones, as servers do. ``distances`` are those of the firmware's table, to
    the same node, to another one of the socket, and to another socket.
    """

    packages: int
    nodes: int
    cores: int
    llc: int
    adjacent: bool = False
    distances: tuple[int, int, int] = (10, 12, 32)

    @property
    def total(self) -> int:
        """How many cores there are."""
        return self.packages * self.nodes * self.cores

    def threads(self, first: int, count: int) -> frozenset[int]:
        """Return the logical CPUs of ``count`` cores from the ``first`` on."""
        if self.adjacent:
            return frozenset(range(2 * first, 2 * (first + count)))
        return frozenset(range(first, first + count)) | frozenset(range(self.total + first, self.total + first + count))

    def of_node(self, node: int) -> frozenset[int]:
        """Return the logical CPUs of a NUMA node."""
        return self.threads(node * self.cores, self.cores)

    def of_package(self, package: int) -> frozenset[int]:
        """Return the logical CPUs of a socket."""
        return self.threads(package * self.nodes * self.cores, self.nodes * self.cores)


class SimulatedInstance(NamedTuple):
    """One MIG instance: its profile ("3g.40gb") and memory in MiB."""

    uuid: str
    profile: str
    mib: int


class SimulatedGpu(NamedTuple):
    """One GPU: PCI bus and slot, NUMA node, memory in MiB; MIG mode is on where it has ``instances``."""

    uuid: str
    bus: int
    node: int
    name: str
    mib: int
    display: bool = False
    instances: tuple[SimulatedInstance, ...] = ()
    tiles: int = 1
    slot: int = 0

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
        """The vendors of its GPUs, in the order of the table."""
        found = {device.vendor for device in self.devices}
        return tuple(vendor for vendor in VENDORS if vendor in found)

    def of(self, vendor: str | None) -> "Preset":
        """Return the host as the driver of this vendor shows it; its first vendor if that is None, or has no GPUs
        here."""
        if len(self.vendors) == 1:
            return self
        meant = vendor if vendor in self.vendors else self.vendors[0]
        devices = tuple(device for device in self.devices if device.vendor == meant)
        return Preset(self.name, self.cpus, devices, self.nvswitch)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all devices as the driver of an idle host reports them, MIG instances after their GPU."""
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
                pci_bus_id=f"0000:{device.bus:02x}:{device.slot:02x}.0",
                numa_node=device.node,
                memory_total=device.mib * MIB,
                memory_used=used,
                memory_free=device.mib * MIB - used,
                counts_reserved=False,
                utilization=None if mig else 0,
                temperature=34,
                display_active=device.display,
                unusable=MIG_IS_ON if mig else None,
                mig_enabled=mig,
                nvlink_peers=everyone - {device.uuid},
                vendor=device.vendor,
                tiles=device.tiles,
            )
            found.append(whole)
            for number, (uuid, profile, mib) in enumerate(device.instances):
                instance = Gpu(index, uuid, f"{device.name} MIG {profile}", whole.pci_bus_id, device.node, mib * MIB,
                               _RESERVED, mib * MIB - _RESERVED, counts_reserved=False, mig_parent=device.uuid,
                               mig_instance=number)  # fmt: skip
                found.append(instance)
        return tuple(found)

    def topology(self) -> "HostTopology":
        """Return the CPUs of the host, and where its GPUs are among them."""
        from ..topology.topology import GpuLocality, HostTopology

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
                    index=gpu.index,
                    uuid=gpu.uuid,
                    numa_node=gpu.numa_node,
                    node_cpus=cpus.of_node(gpu.numa_node or 0),
                    socket_cpus=cpus.of_package((gpu.numa_node or 0) // cpus.nodes),
                    pci_bus_id=gpu.pci_bus_id,
                    source=f"simulated:{self.name}",
                )
                for gpu in self._gpus
                if not gpu.is_mig_instance
            ),
        )

    def node_of(self, uuid: str) -> int | None:
        """Return the NUMA node of a GPU or MIG instance; None for a UUID that is not of this host."""
        return next((gpu.numa_node for gpu in self._gpus if gpu.uuid == uuid), None)
