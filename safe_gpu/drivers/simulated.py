"""A driver without GPUs: the preset hosts, whose processes are locked files in the state directory.

A preset is a few lines of text, which are read when that host is asked for: :func:`find_preset` by name, then the
devices as an idle driver would report them (:attr:`Preset.gpus`), and the CPUs as the kernel would
(:attr:`Preset.topology`).

A card of a preset can be divided while the host runs, as an administrator divides a real one, even in use
(:meth:`SimulatedDriver.divide`). Its **mode** is a few words:

* ``whole``: it is one GPU.
* ``mig 3g.40gb 40320 1g.10gb 9856``: MIG is on, with these instances, each with its MiB. ``3g.40gb/2`` is one
  that is divided into two compute instances, which have its memory together.
* ``partitions 8``: AMD's compute partitions.
* ``functions 2``: Intel's virtual functions, beside the card.

Names are those that real drivers give: the same instance of a GPU has the same UUID whenever it is made, the first
partition of a card has the UUID of the whole card, and a virtual function is known by its bus id.

Nothing is guessed from pids, which may be recycled or belong to another container.

It simulates the driver only. Who is on which GPU is as real as elsewhere: a context is an open, locked file, and the
kernel closes it when its process ends in whatever way, or becomes another program.

    <tree>/<preset>/<uuid>.<pid>-<bytes>-<kind>-<number>     empty, mode 0644, flocked while alive
    <tree>/<preset>/<uuid>.bad                               a GPU that refuses contexts with the error that stands here
    <tree>/<preset>/<uuid>.ill                               a GPU against which the driver says what stands here
    <tree>/<preset>/<card>.mode                              the mode of a card, by its name in all modes

The tree is ``SAFE_GPU_SIMULATED_DIR``, else ``simulated`` in the state directory. All users of a host share one
directory of mode 1777. Files that nobody locks were left by processes that have ended: they do not count, and a poll
unlinks those that it may. It finds out by trying a shared lock for a moment. So who makes a file locks it without
blocking, and makes another one where it is locked or has been unlinked meanwhile. ``kind`` is ``compute``, ``graphics``
or ``mps``.
"""

import fcntl
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cache, cached_property, partial
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple

from ..coordination.directory import OPEN_DIR, OPEN_FILE, SharedDirectory, refusal_of_error, state_dir_path
from ..coordination.doors import simulated_tree
from ..errors import PlaceholderError, StateDirError, UnsatisfiableRequestError
from ..gpus.devices import MIG_IS_ON, Gpu, GpuProcess, HostSnapshot, ProcessKind, vendor_of
from ..gpus.vendors import VENDORS
from ..host.foreign_files import as_text, open_to_read
from ..host.locks import Held
from ..host.signals import DeferredSignals
from ..runtimes.library import Runtime
from ..runtimes.visible_devices import read_visible
from ..topology.host import GpuLocality, HostTopology
from .base import Driver, own_namespace_pids

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


WHOLE = "whole"
"""The mode of a card that is not divided."""


class Card(NamedTuple):
    """A card of a simulated host.

    Attributes:
        gpu: all of it, as an idle driver reports it; its index and links are set by its host.
        seed: from which the UUIDs of its partitions are made.
        mode: its mode where nobody has divided it.
    """

    gpu: Gpu
    seed: str
    mode: str = WHOLE

    def devices(self, mode: str) -> list[Gpu]:
        """Return what an idle driver reports of it in a mode; a GPU before its instances.

        Raises:
            ValueError: there is no such mode of this card.
        """
        kind, *values = mode.split() or [""]
        if len(values) > 2 * _MOST_PARTS:
            raise ValueError(f"{len(values)} words")
        if kind == WHOLE and not values:
            return [self.gpu]
        if kind == "mig" and self.gpu.vendor == "nvidia":
            whole = self.gpu._replace(unusable=MIG_IS_ON, mig_enabled=True, utilization=None)
            return [whole, *(one for instance in self.gpu_instances(mode) for one in instance)]
        number = _number(" ".join(values))
        if kind == "partitions" and self.gpu.vendor == "amd" and number in _PARTITION_MODES:
            return self._partitions(number)
        if kind == "functions" and self.gpu.vendor == "intel":
            return [self.gpu, *self._functions(number)]
        raise ValueError(f"{self.gpu.name} has no mode {mode!r}")

    def gpu_instances(self, mode: str) -> list[list[Gpu]]:
        """Return the GPU instances of a card in a mode that :meth:`devices` accepts: of each its compute instances,
        which are the devices."""
        kind, *values = mode.split()
        if kind != "mig":
            return []
        found: list[list[Gpu]] = []
        number = count()
        for place, (profile, mib) in enumerate(zip(values[::2], values[1::2], strict=True)):
            name, _, parts = profile.partition("/")
            compute_instances = []
            for part in range(_number(parts or "1")):
                uuid = _uuid("NVIDIA", f"{self.gpu.uuid} {name} {place} {part}").replace("GPU", "MIG")
                one = self.gpu._replace(uuid=uuid, name=f"{self.gpu.name} MIG {f'1c.{name}' if parts else name}")
                one = one._replace(mig_parent=self.gpu.uuid, mig_instance=next(number), divided=bool(parts))
                compute_instances.append(one._replace(utilization=None, temperature=None, **_idle(int(mib))))
            found.append(compute_instances)
        return found

    def _partitions(self, number: int) -> list[Gpu]:
        size = (self.gpu.memory_total or 0) // MIB // number
        mode = _PARTITION_MODES[number]
        found = []
        for partition in range(number):
            first_core = partition * _CORES // number
            uuid = _uuid("AMD", f"{self.seed} {first_core}")
            found.append(self.gpu._replace(uuid=uuid, partition=True, mode=mode, **_idle(size)))
        return found

    def _functions(self, number: int) -> list[Gpu]:
        size = (self.gpu.memory_total or 0) // MIB // number
        found = []
        for function in range(1, number + 1):
            bus_id = f"{self.gpu.pci_bus_id.rpartition('.')[0]}.{function}"
            uuid = f"INTEL-{bus_id}"
            one = self.gpu._replace(uuid=uuid, pci_bus_id=bus_id, place=self.gpu.uuid, partition=True, tiles=1)
            found.append(one._replace(**_idle(size)))
        return found


def _number(text: str) -> int:
    """Return a number of parts; ValueError where a card never has that many."""
    number = int(text)
    if not 1 <= number <= _MOST_PARTS:
        raise ValueError(f"{number} parts")
    return number


_MOST_PARTS = 63  # as of an Intel card

_CORES = 8  # of an AMD card that can be divided

_PARTITION_MODES = {2: "DPX", 4: "QPX", 8: "CPX"}


class Preset:
    """One simulated host.

    Args:
        cards: in PCI bus order.
        linked: whether NVLink or xGMI connects all of them.
        modes: of the cards that are divided otherwise than at first, by :attr:`Gpu.whole`.
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

    @cached_property
    def devices(self) -> tuple[Gpu, ...]:
        """All devices as the driver of an idle host reports them, but for their indices and links."""
        found: list[Gpu] = []
        for card in self.cards:
            found += card.devices(self._modes.get(card.gpu.whole, card.mode))
        return tuple(found)

    @cached_property
    def vendors(self) -> tuple[str, ...]:
        """The vendors of its GPUs, in the order of the table."""
        found = {card.gpu.vendor for card in self.cards}
        return tuple(vendor for vendor in VENDORS if vendor in found)

    def of(self, vendor: str | None) -> "Preset":
        """Return the host as the driver of this vendor shows it; its first vendor if that is None, or has no GPUs
        here."""
        if len(self.vendors) == 1:
            return self
        meant = vendor if vendor in self.vendors else self.vendors[0]
        cards = [card for card in self.cards if card.gpu.vendor == meant]
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
        indices = {gpu.uuid: index for index, gpu in enumerate(one for one in self.devices if not one.is_mig_instance)}
        everyone = frozenset(indices if self.linked else ())
        return tuple(
            gpu._replace(index=indices[gpu.mig_parent or gpu.uuid], nvlink_peers=everyone - {gpu.uuid})
            for gpu in self.devices
        )

    @cached_property
    def together(self) -> dict[str, tuple[str, ...]]:
        """UUID -> the devices that have the memory of one together, itself among them: compute instances of one GPU
        instance. A device that has its memory alone is not there."""
        found = {}
        for card in self.cards:
            for instance in card.gpu_instances(self._modes.get(card.gpu.whole, card.mode)):
                uuids = tuple(one.uuid for one in instance)
                if len(uuids) > 1:
                    found.update(dict.fromkeys(uuids, uuids))
        return found

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
def find_preset(name: str) -> Preset:
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
    return Preset(name, cpus, [card for row in rows for card in _cards(*row)], "linked" in facts)


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


def _cards(name: str, mib: str, places: str, more: str = "") -> Iterator[Card]:
    """Yield the cards of a line of the table, which are of one model.

    Args:
        name: with the vendor in front.
        mib: memory of each.
        places: ``07:3`` for bus and NUMA node, ``10.1c:0`` with the slot too.
        more: ``display``, ``tiles 2``, or a mode, as at the top of this module.
    """
    vendor = name.partition(" ")[0]
    kind, *values = more.split() or [""]
    used = _RESERVED + (_DESKTOP if kind == "display" else 0)
    for place in places.split():
        address, _, node = place.partition(":")
        bus, _, slot = address.partition(".")
        bus_id = f"0000:{bus}:{slot or '00'}.0"
        seed = f"{name} {address}"
        uuid = f"INTEL-{bus_id}" if vendor == "Intel" else _uuid(vendor, f"{seed} 0")
        gpu = Gpu(0, uuid, name, bus_id, int(node), utilization=0, temperature=34, vendor=vendor_of(uuid))
        gpu = gpu._replace(display_active=kind == "display", **_idle(int(mib), used))
        if vendor == "AMD":
            gpu = gpu._replace(place=f"AMD-{bus_id}")
        if kind == "tiles":
            gpu = gpu._replace(tiles=int(values[0]))
        yield Card(gpu, seed, more if kind in ("mig", "partitions", "functions") else WHOLE)


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


_numbers = count()


def is_alive(name: str, directory: int) -> bool:
    """Return whether somebody holds the lock of this entry; if nobody does, it is removed where this user may."""
    try:
        fd = os.open(name, OPEN_FILE, dir_fd=directory)
    except OSError:
        return False  # gone meanwhile, or not an entry at all
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        # Under our shared lock: its maker, if this is a context in the making, sees that the name is gone.
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
        return False
    finally:
        os.close(fd)


class SimulatedContext:
    """A live process on a simulated GPU; made by :meth:`SimulatedDriver.occupy`.

    It lives until it is closed (``with`` does), or its process ends or executes another program.

    Attributes: ``uuid`` of the device, ``pid`` as the driver shows it, ``memory`` in bytes.
    """

    def __init__(self, directory: Held, uuid: str, memory: int, kind: str, pid: int) -> None:
        self.uuid = uuid
        self.pid = pid
        self.memory = memory
        self._directory = directory
        self._name, self._lock = _enter(directory.fd, f"{uuid}.{pid}-{memory}-{kind}")

    def close(self) -> None:
        """Leave the GPU; safe to call twice, and without effect in a forked child, whose context it is not."""
        with suppress(OSError):
            self._lock.release(first=partial(os.unlink, self._name, dir_fd=self._directory.fd))
        self._directory.release()

    def __enter__(self) -> "SimulatedContext":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _enter(directory: int, stem: str) -> tuple[str, Held]:
    """Make the entry of a context and take its lock; return its name and its lock."""
    while True:
        name = f"{stem}-{next(_numbers)}"
        try:
            fd = os.open(name, OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory)
        except FileExistsError:
            continue  # left by a dead process with our pid, of a user whose files we cannot remove
        lock = Held(fd)
        try:
            os.fchmod(fd, 0o644)
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return name, lock
        except BaseException:
            lock.release()
            raise
        lock.release()  # a poll came between, took it for a dead one's and removes it


_GONE = "this host has no such device"
_ENTRY = r"(.+)\.([0-9]{1,10})-([0-9]{1,15})-(compute|graphics|mps)-[0-9]+"


class _State:
    """What is not as on an idle device: ``used``, (pid, kind) -> bytes, and ``illness``."""

    def __init__(self) -> None:
        self.used: dict[tuple[int, str], int] = {}
        self.illness = ""


class SimulatedDriver(Driver, Runtime):
    """The driver of a simulated host. NVLink is part of the preset, a poll lists all processes, and utilisation is not
    simulated. Nothing is open between polls; contexts belong to their process, as with a real driver.

    Args:
        preset: name of the host, a key of ``PRESETS``.
        state_dir: where the processes are kept, in ``simulated``; None: in ``SAFE_GPU_SIMULATED_DIR``, else in
            ``simulated`` in the state directory. It is made when the first process comes.
        vendor: whose GPUs it has, on a host with those of several; None: of the first there.

    Attributes:
        idle: the host with nobody on it.

    Raises:
        UnsatisfiableRequestError: no such preset. StateDirError: a relative path.
    """

    is_simulated = True

    def __init__(self, preset: str, state_dir: str | None = None, *, vendor: str | None = None) -> None:
        self._host = find_preset(preset).of(vendor)
        self._place = (*_tree_of(state_dir), self._host.name)
        self._tree = os.path.join(*self._place[:-1])
        self.name = f"simulated:{self._host.name}"
        self.runtime = self  # no library knows these GPUs
        self.idle = self._idle(self._host)

    def snapshot(self) -> HostSnapshot:
        """Poll: the host with the processes that live now.

        Raises:
            StateDirError: the tree of processes cannot be read.
        """
        host, states = self._look()
        idle = self.idle
        if host is not self._host:
            idle = self._idle(host)
        if not states:
            return idle
        return idle.updated(_in_state(gpu, states, host) for gpu in idle.gpus)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Return these devices with the processes that live now; the same errors as :meth:`snapshot`."""
        host, states = self._look({gpu.uuid for gpu in gpus})
        shown = {gpu.uuid: gpu for gpu in host.gpus}
        found = []
        for gpu in gpus:
            if gpu.uuid in shown:
                found.append(_in_state(shown[gpu.uuid], states, host))
            else:
                found.append(gpu.unreachable(_GONE))
        return tuple(found)

    def _idle(self, host: Preset) -> HostSnapshot:
        version = VENDORS[host.gpus[0].vendor].version
        return HostSnapshot(host.gpus, self.name, version, simulated_tree(self._tree))

    def _look(self, uuids: Collection[str] | None = None) -> tuple[Preset, dict[str, _State]]:
        """Return the host as its cards are divided now, and the states of these devices and of those that share their
        memory, None for all; those that are idle and well are left out."""
        host = self._host
        states: dict[str, _State] = {}
        try:
            os.lstat(self._tree)
        except OSError as err:
            if isinstance(err, FileNotFoundError):  # nobody has used it: nothing is opened
                return host, states
        with DeferredSignals(), suppress(FileNotFoundError):
            tree = self._open()
            try:
                names = os.listdir(tree)
                host = self._divided(tree, names)
                asked = uuids
                if asked is None:
                    asked = [gpu.uuid for gpu in host.gpus]
                wanted = {one for uuid in asked for one in host.together.get(uuid, (uuid,))}
                for name in names:
                    uuid, _, kind = name.rpartition(".")
                    if uuid not in wanted:
                        continue
                    entry = re.fullmatch(_ENTRY, name)
                    if kind == "ill":
                        states.setdefault(uuid, _State()).illness = _text_of(name, tree)
                    elif entry and is_alive(name, tree):
                        used = states.setdefault(uuid, _State()).used
                        key = int(entry[2]), entry[4]
                        used[key] = used.get(key, 0) + int(entry[3])
            finally:
                os.close(tree)
        return host, states

    def _now(self) -> Preset:
        """Return the host as its cards are divided now."""
        return self._look(())[0]

    def _divided(self, tree: int, names: Collection[str]) -> Preset:
        modes = {}
        for card in self._host.cards:
            name = f"{card.gpu.whole}.mode"
            if name not in names:
                continue
            with suppress(OSError, ValueError), open_to_read(name, os.O_NOFOLLOW, tree) as file:
                mode = (file.read(4096) or b"").decode().strip()
                card.devices(mode)  # or it is no mode of this card, and is ignored
                modes[card.gpu.whole] = mode
        return self._host.divided(modes) if modes else self._host

    def divide(self, card: str, mode: str) -> None:
        """Divide a card as an administrator does, even one in use. It stays so.

        Args:
            card: its name in all modes (:attr:`Gpu.whole`).
            mode: as at the top of this module.

        Raises:
            ValueError: there is no such card or mode.
            StateDirError: the state directory cannot be written.
        """
        self._host.divided({card: mode})
        temporary = f".{os.urandom(8).hex()}"
        tree = Held(self._make())
        try:
            fd = os.open(temporary, OPEN_FILE | os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=tree.fd)
            try:
                os.write(fd, f"{mode}\n".encode())
                os.fchmod(fd, 0o644)
            finally:
                os.close(fd)
            os.rename(temporary, f"{card}.mode", src_dir_fd=tree.fd, dst_dir_fd=tree.fd)
        except OSError as err:
            raise refusal_of_error(os.path.join(*self._place), err) from err
        finally:
            tree.release()

    def _open(self) -> int:
        """Return a descriptor of the directory of this host's processes, to which no link leads; FileNotFoundError if
        it is missing."""
        tree = None
        try:
            for part in self._place:
                above, tree = tree, os.open(part, OPEN_DIR, dir_fd=tree)
                if above is not None:
                    os.close(above)
            assert tree is not None
            return tree
        except OSError as err:
            if tree is not None:
                os.close(tree)
            if isinstance(err, FileNotFoundError):
                raise
            raise refusal_of_error(os.path.join(*self._place), err) from err

    def _make(self) -> int:
        """Return the same, and make what is missing."""
        while True:
            with suppress(FileNotFoundError):
                return self._open()
            with ExitStack() as stack:
                directory = stack.enter_context(SharedDirectory(self._place[0]))
                for name in self._place[1:]:
                    directory = stack.enter_context(SharedDirectory(name, directory))

    def occupy(
        self, uuid: str, *, memory: int = CONTEXT_BYTES, kind: str = ProcessKind.COMPUTE, pid: int | None = None
    ) -> SimulatedContext:
        """Put a process on a device: it shows there until the context is closed or this process ends.

        Args:
            uuid: the device.
            memory: bytes that it uses.
            kind: one of :class:`~safe_gpu.gpus.devices.ProcessKind`.
            pid: the number to show; None is this process's own. Another one plays a process whose pid means nothing
                here, such as one in a container.

        Raises:
            PlaceholderError: the host has no such device, or MIG is on and it is to be used by its instances.
            StateDirError: the state directory cannot be written.
        """
        gpu = next((one for one in self._now().gpus if one.uuid == uuid), None)
        if gpu is None or gpu.unusable:
            reason = gpu.unusable if gpu else "no such device"
            raise PlaceholderError(f"{self.name} cannot run anything on {uuid}: {reason}", uuid=uuid)
        directory = Held(self._make())
        try:
            trouble = _text_of(f"{uuid}.bad", directory.fd)
            if trouble:
                raise PlaceholderError(f"{self.name} cannot make a context on {uuid}: {trouble}", uuid=uuid)
            return SimulatedContext(directory, uuid, memory, kind, os.getpid() if pid is None else pid)
        except BaseException as err:
            directory.release()
            if isinstance(err, OSError):
                raise refusal_of_error(os.path.join(*self._place), err) from err
            raise

    def visible(self) -> tuple[str, ...]:
        """Return the UUIDs that CUDA would show this process now, by ordinal, as its environment says."""
        shown = self._idle(self._now())
        visible_limit = read_visible(os.environ, shown)
        if visible_limit is not None:
            return visible_limit.uuids
        return tuple(gpu.uuid for gpu in shown.gpus if not gpu.unusable)

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        host = self._now()
        gpu = next((one for one in host.gpus if one.uuid == uuid), None)
        if gpu is None:
            return None
        place = host.topology.gpu(gpu.index)
        return place.socket_cpus if scope == "socket" else place.node_cpus

    def host_topology(self) -> HostTopology:
        return self._now().topology

    def default_placeholder(self, logger: Any = None) -> "SimulatedPlaceholder":
        return SimulatedPlaceholder(logger, driver=self)


def _in_state(gpu: Gpu, states: Mapping[str, _State], host: Preset) -> Gpu:
    """Return an idle device with its processes and its illness."""
    own = states.get(gpu.uuid, _State())
    others = [states[uuid] for uuid in host.together.get(gpu.uuid, ()) if uuid != gpu.uuid and uuid in states]
    beside = sum(sum(other.used.values()) for other in others)
    total = gpu.memory_total or 0
    taken = min((gpu.memory_used or 0) + sum(own.used.values()) + beside, total)
    listed = (GpuProcess(pid, kind, memory) for (pid, kind), memory in sorted(own.used.items()))
    return gpu._replace(
        memory_used=taken,
        memory_free=total - taken,
        memory_beside=beside,
        processes=own_namespace_pids(listed, vendor=None),
        illness=own.illness,
    )


def _text_of(name: str, directory: int) -> str:
    """Return the beginning of the text in a file; "" if it cannot be read."""
    with suppress(OSError), open_to_read(name, os.O_NOFOLLOW, directory) as file:
        return as_text((file.read(4096) or b"").decode(errors="replace").strip())
    return ""


def _tree_of(state_dir: str | None) -> tuple[str, ...]:
    """Return where the processes of simulated hosts are: a directory, and what is below it. Its path is the host's
    identity: processes with two state directories and one tree are on one host."""
    tree = os.environ.get("SAFE_GPU_SIMULATED_DIR") if state_dir is None else None
    if not tree:
        return state_dir or state_dir_path(), "simulated"
    if not os.path.isabs(tree):
        raise StateDirError(f"SAFE_GPU_SIMULATED_DIR={tree} is relative: set it to an absolute path", path=tree)
    return (os.path.abspath(tree),)


class SimulatedPlaceholder:
    """Holds a simulated GPU by a context of this process, as the other placeholders hold real ones.

    Args:
        logger: where trouble on release is told.
        driver: the simulated host.
    """

    own_context = True

    def __init__(self, logger: Any = None, *, driver: SimulatedDriver) -> None:
        self.logger = logger
        self._driver = driver

    def __call__(self, device_no: int) -> SimulatedContext:
        """Start a context on the device that CUDA_VISIBLE_DEVICES shows as ``device_no``.

        Raises:
            PlaceholderError: it shows fewer devices.
            StateDirError: the state directory cannot be written.
        """
        visible = self._driver.visible()
        if not 0 <= device_no < len(visible):
            raise PlaceholderError(
                f"there is no simulated CUDA device {device_no}: CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES')} shows {len(visible)} of {self._driver.name}",
                device_no=device_no,
            )
        return self._driver.occupy(visible[device_no])

    def release(self, thing: SimulatedContext) -> None:
        """Leave the GPU."""
        thing.close()
