"""The hosts that can be simulated: a few lines of text for each, which are read when that host is asked for.

:func:`preset` by name, then the devices as an idle driver would report them (:meth:`Preset.gpus`) and the CPUs as the
kernel would (:attr:`Preset.topology`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import MIG_IS_ON, Gpu, vendor_of
from ..gpus.vendors import VENDORS
from ..topology.host import GpuLocality, HostTopology

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
    distances: tuple[int, ...]
    adjacent: bool = False

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

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """All devices as the driver of an idle host reports them."""
        indices = {gpu.uuid: index for index, gpu in enumerate(one for one in self.devices if not one.is_mig_instance)}
        everyone = frozenset(indices if self.linked else ())
        return tuple(
            gpu._replace(index=indices[gpu.mig_parent or gpu.uuid], nvlink_peers=everyone - {gpu.uuid})
            for gpu in self.devices
        )

    @cached_property
    def topology(self) -> HostTopology:
        """The CPUs of the host, and where its GPUs are among them."""
        cpus = self.cpus
        same, socket, remote = cpus.distances
        nodes = {node: cpus.threads(node * cpus.cores, cpus.cores) for node in range(cpus.packages * cpus.nodes)}
        in_package = cpus.nodes * cpus.cores
        packages = {package: cpus.threads(package * in_package, in_package) for package in range(cpus.packages)}

        def place(gpu: Gpu, node: int) -> GpuLocality:
            around, source = packages[node // cpus.nodes], f"simulated:{self.name}"
            return GpuLocality(gpu.index, gpu.uuid, node, nodes[node], around, gpu.pci_bus_id, source)

        def distance(one: int, other: int) -> int:
            return same if one == other else socket if one // cpus.nodes == other // cpus.nodes else remote

        return HostTopology(
            cpus=frozenset(range(2 * cpus.total)),
            cores=tuple(cpus.threads(core, 1) for core in range(cpus.total)),
            nodes=nodes,
            packages=packages,
            llc=tuple(cpus.threads(first, cpus.llc) for first in range(0, cpus.total, cpus.llc)),
            distances={one: {other: distance(one, other) for other in nodes} for one in nodes},
            gpus=tuple(place(gpu, gpu.numa_node or 0) for gpu in self.gpus if not gpu.is_mig_instance),
        )


@cache
def preset(name: str) -> Preset:
    """Return the simulated host of this name.

    Raises:
        UnsatisfiableRequestError: there is none; the message lists those there are.
    """
    if name not in PRESETS:
        raise UnsatisfiableRequestError(
            f"there is no simulated host {name!r}: choose SAFE_GPU_DRIVER=simulated: with one of {', '.join(PRESETS)}",
            value=name,
        )
    facts, *rows = (line.split("; ") for line in PRESETS[name])
    packages, nodes, cores, llc, *distances = map(int, facts[0].split())
    cpus = Cpus(packages, nodes, cores, llc, tuple(distances), "adjacent" in facts)
    return Preset(name, cpus, [gpu for row in rows for gpu in _cards(*row)], "linked" in facts)


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


def _cards(name: str, mib: str, places: str, more: str = "") -> Iterator[Gpu]:
    """Yield the devices of a line of the table: cards of one model, whole or each in parts.

    Args:
        name: with the vendor in front.
        mib: memory of each, or of each partition.
        places: ``07:3`` for bus and NUMA node, ``10.1c:0`` with the slot too.
        more: ``display``, ``tiles 2``, ``partitions 8``, which share the bus id, or ``mig`` with the profile and MiB of
            each instance.
    """
    vendor, (kind, *values) = name.partition(" ")[0], more.split() or [""]
    used = _RESERVED + (_DESKTOP if kind == "display" else 0)
    for place in places.split():
        address, _, node = place.partition(":")
        bus, _, slot = address.partition(".")
        bus_id = f"0000:{bus}:{slot or '00'}.0"
        for partition in range(int(values[0]) if kind == "partitions" else 1):
            uuid = f"INTEL-{bus_id}" if vendor == "Intel" else _uuid(vendor, f"{name} {address} {partition}")
            gpu = Gpu(0, uuid, name, bus_id, int(node), utilization=0, temperature=34, vendor=vendor_of(uuid))
            tiles = int(values[0]) if kind == "tiles" else 1
            gpu = gpu._replace(display_active=kind == "display", tiles=tiles, **_idle(int(mib), used))
            yield from _cut(gpu, values) if kind == "mig" else [gpu]


def _cut(gpu: Gpu, profiles: Sequence[str]) -> Iterator[Gpu]:
    """Yield a GPU with MIG mode on and its instances."""
    yield gpu._replace(unusable=MIG_IS_ON, mig_enabled=True, utilization=None)
    for number, (profile, mib) in enumerate(zip(profiles[::2], profiles[1::2], strict=True)):
        yield gpu._replace(
            uuid=_uuid("NVIDIA", f"MIG {number}").replace("GPU", "MIG"),
            name=f"{gpu.name} MIG {profile}",
            utilization=None,
            temperature=None,
            mig_parent=gpu.uuid,
            mig_instance=number,
            **_idle(int(mib)),
        )


# A host: its name; the numbers of Cpus; ``linked`` and ``adjacent`` where it is so; its processors. Indented, what
# _cards() takes.
_TABLE = """
dgx-a100; 2 4 16 4 10 12 32; linked; two EPYC 7742, four NUMA nodes per socket
  NVIDIA A100-SXM4-80GB; 81920; 07:3 0f:3 47:1 4e:1 87:7 90:7 b7:5 bd:5
dgx-h100; 2 1 56 56 10 10 21; linked; two Xeon Platinum 8480C
  NVIDIA H100 80GB HBM3; 81559; 1b:0 43:0 52:0 61:0 9d:1 c3:1 d1:1 df:1
p4d; 2 1 24 24 10 10 21; linked; two Xeon Platinum 8275CL
  NVIDIA A100-SXM4-40GB; 40960; 10.1c:0 10.1d:0 20.1c:0 20.1d:0 90.1c:1 90.1d:1 a0.1c:1 a0.1d:1
workstation-mixed; 1 1 24 6 10 12 32; a Threadripper PRO 5965WX
  NVIDIA RTX A2000 12GB; 12282; 01:0; display
  NVIDIA GeForce RTX 4090; 24564; 21:0
  NVIDIA GeForce RTX 3090; 24576; 41:0
laptop; 1 1 8 8 10 12 32; adjacent; a Ryzen 7 7840HS
  NVIDIA GeForce RTX 4070 Laptop GPU; 8188; 01:0; display
big-16; 2 1 24 24 10 10 21; linked; two Xeon Platinum 8168, as in a DGX-2
  Tesla V100-SXM3-32GB; 32510; 34:0 36:0 39:0 3b:0 57:0 59:0 5c:0 5e:0 b7:1 b9:1 bc:1 be:1 e0:1 e2:1 e5:1 e7:1
mig-h100; 2 1 32 32 10 10 21
  NVIDIA H100 PCIe; 81559; 17:0; mig 3g.40gb 40320 2g.20gb 19968 1g.10gb 9856 1g.10gb 9856
  NVIDIA H100 PCIe; 81559; ca:1
mi250x; 1 4 16 8 10 12 32; linked; an EPYC 7A53, as in LUMI and Frontier: each die is next to one L3
  AMD Instinct MI250X; 65520; c1:3 c6:3 c9:1 ce:1 d1:0 d6:0 d9:2 de:2
mi300x-cpx; 2 1 96 8 10 10 32; linked; two EPYC 9654
  AMD Instinct MI300X; 24560; 05:0 26:0 46:0 65:0 85:1 a6:1 c6:1 e5:1; partitions 8
two-vendors; 2 1 32 8 10 10 32; two EPYC 7543
  NVIDIA A100-PCIE-40GB; 40960; 21:0 24:0 a1:1 a4:1
  AMD Instinct MI210; 65520; 43:0 46:0 c3:1 c6:1
max1550; 2 1 52 52 10 10 21; linked; two Xeon Max 9470C, as in Aurora
  Intel Data Center GPU Max 1550; 131072; 18:0 42:0 6c:0 93:1 bd:1 e7:1; tiles 2
arc-a770; 1 1 16 16 10 12 32; adjacent
  Intel Arc A770; 16384; 03:0 07:0
"""

PRESETS: dict[str, list[str]] = {}
"""Name -> the rest of its line in the table, and the lines of its cards."""

for _host in re.split(r"\n(?! )", _TABLE.strip()):
    _name, _, _facts = _host.partition("; ")
    PRESETS[_name] = _facts.split("\n  ")
