"""The hosts that can be simulated: a few lines of facts for each, and what is made of them on demand.

:func:`preset` by name, then the devices as an idle driver would report them (:meth:`Preset.gpus`) and the CPUs as the
kernel would (:attr:`Preset.topology`).
"""

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import MIG_IS_ON, Gpu, vendor_of
from ..gpus.vendors import VENDORS

if TYPE_CHECKING:
    from ..topology.host import HostTopology

MIB = 1 << 20

CONTEXT_BYTES = 400 * MIB
"""What one CUDA context costs on a data-centre GPU, roughly."""

_RESERVED = 4 * MIB

_DESKTOP = 350 * MIB

_PRIME = (1 << 128) - 159


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


class Preset:
    """One simulated host.

    Args:
        devices: its GPUs in PCI bus order, each before its MIG instances, as an idle driver reports them; their indices
            and links are set here.
        linked: whether NVLink or xGMI connects all of them.
    """

    def __init__(self, name: str, cpus: Cpus, devices: Iterable[Gpu], linked: bool = False) -> None:
        self.name = name
        self.cpus = cpus
        self.devices = tuple(devices)
        self.linked = linked

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
        return Preset(self.name, self.cpus, (one for one in self.devices if one.vendor == meant), self.linked)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all devices as the driver of an idle host reports them."""
        return self._gpus

    @cached_property
    def _gpus(self) -> tuple[Gpu, ...]:
        indices = {gpu.uuid: index for index, gpu in enumerate(one for one in self.devices if not one.is_mig_instance)}
        everyone = frozenset(indices if self.linked else ())
        return tuple(
            gpu._replace(index=indices[gpu.mig_parent or gpu.uuid], nvlink_peers=everyone - {gpu.uuid})
            for gpu in self.devices
        )

    @cached_property
    def topology(self) -> "HostTopology":
        """The CPUs of the host, and where its GPUs are among them."""
        from ..topology.host import GpuLocality, HostTopology

        cpus = self.cpus
        same, socket, remote = cpus.distances
        nodes = {node: cpus.threads(node * cpus.cores, cpus.cores) for node in range(cpus.packages * cpus.nodes)}
        in_package = cpus.nodes * cpus.cores
        packages = {package: cpus.threads(package * in_package, in_package) for package in range(cpus.packages)}
        return HostTopology(
            cpus=frozenset(range(2 * cpus.total)),
            cores=tuple(cpus.threads(core, 1) for core in range(cpus.total)),
            nodes=nodes,
            packages=packages,
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
                    gpu.index,
                    gpu.uuid,
                    node,
                    nodes[node],
                    packages[node // cpus.nodes],
                    gpu.pci_bus_id,
                    f"simulated:{self.name}",
                )
                for gpu in self.gpus()
                if not gpu.is_mig_instance and (node := gpu.numa_node) is not None
            ),
        )


def preset(name: str) -> Preset:
    """Return the simulated host of this name.

    Raises:
        UnsatisfiableRequestError: there is none; the message lists those there are.
    """
    found = PRESETS.get(name)
    if found is None:
        raise UnsatisfiableRequestError(
            f"there is no simulated host {name!r}: choose SAFE_GPU_DRIVER=simulated: with one of {', '.join(PRESETS)}",
            value=name,
        )
    return found


def _uuid(vendor: str, of: str) -> str:
    """Return a UUID in the form of its vendor, of each text another one: the text times a number of 128 mixed bits,
    which loads no module."""
    digits = f"{int.from_bytes(of.encode(), 'big') * 0x9E3779B97F4A7C15F39CC0605CEDC835 % _PRIME:032x}"
    if vendor == "AMD":
        return f"GPU-{digits[:16]}"
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _idle(mib: int, used: int = _RESERVED) -> dict[str, Any]:
    """Return the memory of an idle device as fields of a Gpu."""
    sizes = {"memory_total": mib * MIB, "memory_used": used, "memory_free": mib * MIB - used}
    return {"counts_reserved": False, **sizes}


def _cards(
    name: str, mib: int, places: str, *, display: bool = False, tiles: int = 1, partitions: int = 1
) -> tuple[Gpu, ...]:
    """Return cards of one model, whole or each in partitions, which share the bus id.

    Args:
        name: with the vendor in front.
        mib: memory of each, or of each partition.
        places: ``07:3`` for bus and NUMA node, ``10.1c:0`` with the slot too.
    """
    vendor, found = name.partition(" ")[0], []
    for place in places.split():
        address, _, node = place.partition(":")
        bus, _, slot = address.partition(".")
        bus_id = f"0000:{bus}:{slot or '00'}.0"
        for partition in range(partitions):
            uuid = f"INTEL-{bus_id}" if vendor == "Intel" else _uuid(vendor, f"{name} {address} {partition}")
            used = _RESERVED + (_DESKTOP if display else 0)
            gpu = Gpu(
                0,
                uuid,
                name,
                bus_id,
                int(node),
                utilization=0,
                temperature=34,
                display_active=display,
                vendor=vendor_of(uuid),
                tiles=tiles,
                **_idle(mib, used),
            )
            found.append(gpu)
    return tuple(found)


def _cut(gpu: Gpu, *profiles: tuple[str, int]) -> tuple[Gpu, ...]:
    """Return a GPU with MIG mode on and its instances, given by profile and MiB."""
    instances = (
        gpu._replace(
            uuid=_uuid("NVIDIA", f"MIG {number}").replace("GPU", "MIG"),
            name=f"{gpu.name} MIG {profile}",
            utilization=None,
            temperature=None,
            mig_parent=gpu.uuid,
            mig_instance=number,
            **_idle(mib),
        )
        for number, (profile, mib) in enumerate(profiles)
    )
    return gpu._replace(unusable=MIG_IS_ON, mig_enabled=True, utilization=None), *instances


_NEAR, _FAR = (10, 10, 21), (10, 10, 32)

_TO_CUT, _WHOLE = _cards("NVIDIA H100 PCIe", 81559, "17:0 ca:1")

_ALL = (
    Preset(
        "dgx-a100",
        Cpus(packages=2, nodes=4, cores=16, llc=4),  # two EPYC 7742, four NUMA nodes per socket
        _cards("NVIDIA A100-SXM4-80GB", 81920, "07:3 0f:3 47:1 4e:1 87:7 90:7 b7:5 bd:5"),
        linked=True,
    ),
    Preset(
        "dgx-h100",
        Cpus(packages=2, nodes=1, cores=56, llc=56, distances=_NEAR),  # two Xeon Platinum 8480C
        _cards("NVIDIA H100 80GB HBM3", 81559, "1b:0 43:0 52:0 61:0 9d:1 c3:1 d1:1 df:1"),
        linked=True,
    ),
    Preset(
        "p4d",
        Cpus(packages=2, nodes=1, cores=24, llc=24, distances=_NEAR),  # two Xeon Platinum 8275CL
        _cards("NVIDIA A100-SXM4-40GB", 40960, "10.1c:0 10.1d:0 20.1c:0 20.1d:0 90.1c:1 90.1d:1 a0.1c:1 a0.1d:1"),
        linked=True,
    ),
    Preset(
        "workstation-mixed",
        Cpus(packages=1, nodes=1, cores=24, llc=6),  # a Threadripper PRO 5965WX
        (
            *_cards("NVIDIA RTX A2000 12GB", 12282, "01:0", display=True),
            *_cards("NVIDIA GeForce RTX 4090", 24564, "21:0"),
            *_cards("NVIDIA GeForce RTX 3090", 24576, "41:0"),
        ),
    ),
    Preset(
        "laptop",
        Cpus(packages=1, nodes=1, cores=8, llc=8, adjacent=True),  # a Ryzen 7 7840HS
        _cards("NVIDIA GeForce RTX 4070 Laptop GPU", 8188, "01:0", display=True),
    ),
    Preset(
        "big-16",
        Cpus(packages=2, nodes=1, cores=24, llc=24, distances=_NEAR),  # two Xeon Platinum 8168, as in a DGX-2
        _cards(
            "Tesla V100-SXM3-32GB",
            32510,
            "34:0 36:0 39:0 3b:0 57:0 59:0 5c:0 5e:0 b7:1 b9:1 bc:1 be:1 e0:1 e2:1 e5:1 e7:1",
        ),
        linked=True,
    ),
    Preset(
        "mig-h100",
        Cpus(packages=2, nodes=1, cores=32, llc=32, distances=_NEAR),
        (*_cut(_TO_CUT, ("3g.40gb", 40320), ("2g.20gb", 19968), ("1g.10gb", 9856), ("1g.10gb", 9856)), _WHOLE),
    ),
    Preset(
        "mi250x",
        Cpus(packages=1, nodes=4, cores=16, llc=8),  # an EPYC 7A53, as in LUMI and Frontier: each die is next to one L3
        _cards("AMD Instinct MI250X", 65520, "c1:3 c6:3 c9:1 ce:1 d1:0 d6:0 d9:2 de:2"),
        linked=True,
    ),
    Preset(
        "mi300x-cpx",
        Cpus(packages=2, nodes=1, cores=96, llc=8, distances=_FAR),  # two EPYC 9654
        _cards("AMD Instinct MI300X", 24560, "05:0 26:0 46:0 65:0 85:1 a6:1 c6:1 e5:1", partitions=8),
        linked=True,
    ),
    Preset(
        "two-vendors",
        Cpus(packages=2, nodes=1, cores=32, llc=8, distances=_FAR),  # two EPYC 7543
        (
            *_cards("NVIDIA A100-PCIE-40GB", 40960, "21:0 24:0 a1:1 a4:1"),
            *_cards("AMD Instinct MI210", 65520, "43:0 46:0 c3:1 c6:1"),
        ),
    ),
    Preset(
        "max1550",
        Cpus(packages=2, nodes=1, cores=52, llc=52, distances=_NEAR),  # two Xeon Max 9470C, as in Aurora
        _cards("Intel Data Center GPU Max 1550", 131072, "18:0 42:0 6c:0 93:1 bd:1 e7:1", tiles=2),
        linked=True,
    ),
    Preset(
        "arc-a770",
        Cpus(packages=1, nodes=1, cores=16, llc=16, adjacent=True),
        _cards("Intel Arc A770", 16384, "03:0 07:0"),
    ),
)

PRESETS: dict[str, Preset] = {host.name: host for host in _ALL}
"""Name -> host."""
