"""The simulated hosts: a few lines of text each, which are read when a host is asked for.

:func:`find_preset` finds one by name. It has the devices as an idle driver would report them (:attr:`Preset.gpus`), and
the CPUs as the kernel would (:attr:`Preset.topology`).
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from types import MappingProxyType
from typing import NamedTuple

from ...errors import UnsatisfiableRequestError
from ...gpus.devices import Gpu, vendor_of
from ...gpus.vendors import VENDORS
from ...topology.host import GpuLocality, HostTopology
from .cards import MIB, RESERVED, WHOLE, Card, uuid_of, with_memory

_DESKTOP = 350 * MIB  # that a display uses

# A host: its name; the numbers of Cpus; ``linked`` and ``adjacent`` where it is so; its processors. Indented, what
# _read_cards() takes.
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
  AMD Instinct MI300X; 196480; 05:0 26:0 46:0 65:0 85:1 a6:1 c6:1 e5:1; partitions 8
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
        first_threads = range(first, first + count)
        second_threads = range(self.total + first, self.total + first + count)
        return frozenset([*first_threads, *second_threads])

    def package_of(self, node: int) -> int:
        """Return the socket of a NUMA node."""
        return node // self.nodes

    def distance(self, one: int, other: int) -> int:
        """Return the distance of two NUMA nodes."""
        same, within_package, remote = self.distances
        if one == other:
            return same
        if self.package_of(one) == self.package_of(other):
            return within_package
        return remote


class Preset:
    """One simulated host.

    Args:
        cards: in PCI bus order.
        linked: whether NVLink or xGMI connects all of them.
        modes: of the cards that are divided differently than at first, by :attr:`Gpu.whole`.
    """

    def __init__(
        self,
        name: str,
        cpus: Cpus,
        cards: Iterable[Card],
        linked: bool = False,
        modes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.cpus = cpus
        self.cards = tuple(cards)
        self.linked = linked
        self._modes = modes

    def _mode_of(self, card: Card) -> str:
        return self._modes.get(card.gpu.whole, card.mode)

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """All devices as the driver of an idle host reports them, but for their indices and links."""
        found: list[Gpu] = []
        for card in self.cards:
            found += card.devices(self._mode_of(card))
        return tuple(found)

    @property
    def vendors(self) -> tuple[str, ...]:
        """The vendors of its GPUs, in the order of the table."""
        found = {card.gpu.vendor for card in self.cards}
        return tuple(vendor for vendor in VENDORS if vendor in found)

    def of(self, vendor: str | None) -> "Preset":
        """Return the host as the driver of this vendor shows it; its first vendor if that is None, or has no GPUs
        here."""
        vendors = self.vendors
        if len(vendors) == 1:
            return self
        if vendor not in vendors:
            vendor = vendors[0]
        cards = [card for card in self.cards if card.gpu.vendor == vendor]
        return Preset(self.name, self.cpus, cards, self.linked, self._modes)

    def divided(self, modes: Mapping[str, str]) -> "Preset":
        """Return the same host with its cards in these modes, by :attr:`Gpu.whole`; all others are as at first.

        Raises:
            ValueError: there is no such card, or it has no such mode.
        """
        cards = {card.gpu.whole: card for card in self.cards}
        for name, mode in modes.items():
            if name not in cards:
                raise ValueError(f"{self.name} has no card {name}")
            cards[name].devices(mode)
        return Preset(self.name, self.cpus, self.cards, self.linked, modes)

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """All devices as the driver of an idle host reports them."""
        devices = self.devices
        index_of: dict[str, int] = {}
        for gpu in devices:
            if not gpu.is_mig_instance:
                index_of[gpu.uuid] = len(index_of)
        linked: frozenset[str] = frozenset()
        if self.linked:
            linked = frozenset(index_of)
        found = []
        for gpu in devices:
            index = index_of[gpu.mig_parent or gpu.uuid]
            found.append(gpu._replace(index=index, nvlink_peers=linked - {gpu.uuid}))
        return tuple(found)

    @cached_property
    def together(self) -> dict[str, tuple[str, ...]]:
        """UUID -> the devices that have the memory of one together, itself among them: compute instances of one GPU
        instance. A device that has its memory alone is not there."""
        found = {}
        for card in self.cards:
            for compute_instances in card.gpu_instances(self._mode_of(card)):
                uuids = tuple(one.uuid for one in compute_instances)
                if len(uuids) > 1:
                    found.update(dict.fromkeys(uuids, uuids))
        return found

    @cached_property
    def topology(self) -> HostTopology:
        """The CPUs of the host, and where its GPUs are among them."""
        cpus = self.cpus
        nodes = {}
        for node in range(cpus.packages * cpus.nodes):
            nodes[node] = cpus.threads(node * cpus.cores, cpus.cores)
        packages = {}
        cores_of_package = cpus.nodes * cpus.cores
        for package in range(cpus.packages):
            packages[package] = cpus.threads(package * cores_of_package, cores_of_package)
        places = []
        for gpu in self.gpus:
            if not gpu.is_mig_instance:
                places.append(self._place(gpu, nodes, packages))
        return HostTopology(
            cpus=frozenset(range(2 * cpus.total)),
            cores=tuple(cpus.threads(core, 1) for core in range(cpus.total)),
            nodes=nodes,
            packages=packages,
            llc=tuple(cpus.threads(first, cpus.llc) for first in range(0, cpus.total, cpus.llc)),
            distances={one: {other: cpus.distance(one, other) for other in nodes} for one in nodes},
            gpus=tuple(places),
        )

    def _place(
        self, gpu: Gpu, nodes: Mapping[int, frozenset[int]], packages: Mapping[int, frozenset[int]]
    ) -> GpuLocality:
        """Return where a GPU is, among these CPUs of NUMA nodes and of sockets."""
        node = gpu.numa_node or 0
        return GpuLocality(
            index=gpu.index,
            uuid=gpu.uuid,
            numa_node=node,
            node_cpus=nodes[node],
            socket_cpus=packages[self.cpus.package_of(node)],
            pci_bus_id=gpu.pci_bus_id,
            source=f"simulated:{self.name}",
        )


@cache
def find_preset(name: str) -> Preset:
    """Return the simulated host of this name; of each there is one object, which makes its devices once.

    Raises:
        UnsatisfiableRequestError: there is none; the message lists those there are.
    """
    if name not in PRESETS:
        raise UnsatisfiableRequestError(
            f"there is no simulated host {name!r}: choose SAFE_GPU_DRIVER=simulated: with one of {', '.join(PRESETS)}",
            value=name,
        )
    facts, *lines = PRESETS[name]
    numbers, *words = facts.split("; ")
    packages, nodes, cores, llc, *distances = [int(number) for number in numbers.split()]
    cpus = Cpus(packages, nodes, cores, llc, tuple(distances), adjacent="adjacent" in words)
    cards: list[Card] = []
    for line in lines:
        cards += _read_cards(*line.split("; "))
    return Preset(name, cpus, cards, linked="linked" in words)


# Of an idle GPU, by its vendor. The drivers of some do not report it.
_UTILIZATION = {"nvidia": 0, "amd": 0, "intel": None}
_TEMPERATURE = {"nvidia": 34, "amd": None, "intel": None}


def _read_cards(name: str, mib: str, places: str, more: str = "") -> list[Card]:
    """Return the cards of a line of the table, which are of one model.

    Args:
        name: with the vendor in front.
        mib: memory of each.
        places: ``07:3`` for bus and NUMA node, ``10.1c:0`` with the slot too.
        more: ``display``, ``tiles 2``, or a mode (see :mod:`.cards`).
    """
    words = more.split()
    has_display = words == ["display"]
    mode = WHOLE
    tiles = 1
    if words[:1] == ["tiles"]:
        tiles = int(words[1])
    elif words and not has_display:
        mode = more
    used = RESERVED
    if has_display:
        used += _DESKTOP
    found = []
    for place in places.split():
        address, _, node = place.partition(":")
        names = _names(name, address)
        vendor = vendor_of(names.uuid)
        gpu = Gpu(
            index=0,
            uuid=names.uuid,
            name=name,
            pci_bus_id=names.bus_id,
            numa_node=int(node),
            utilization=_UTILIZATION[vendor],
            temperature=_TEMPERATURE[vendor],
            display_active=has_display,
            place=names.place,
            vendor=vendor,
            tiles=tiles,
        )
        found.append(Card(with_memory(gpu, int(mib), used), names.seed, mode))
    return found


class _Names(NamedTuple):
    """What a card is called."""

    bus_id: str
    uuid: str
    seed: str
    place: str = ""


def _names(model: str, address: str) -> _Names:
    """Return the names of a card of this model at an address of the table, ``07`` or ``10.1c``."""
    bus, _, slot = address.partition(".")
    bus_id = f"0000:{bus}:{slot or '00'}.0"
    seed = f"{model} {address}"
    vendor, _, _ = model.partition(" ")
    if vendor == "Intel":
        return _Names(bus_id, f"INTEL-{bus_id}", seed)
    uuid = uuid_of(vendor, f"{seed} 0")
    if vendor == "AMD":
        return _Names(bus_id, uuid, seed, place=f"AMD-{bus_id}")
    return _Names(bus_id, uuid, seed)
