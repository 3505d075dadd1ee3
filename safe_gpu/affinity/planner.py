"""Plans the CPUs of each GPU, and shows a plan as a table or as JSON. Pure.

They have a module of their own because creating them takes longer than most bindings: the rest of the package uses
plain strings.

The modes are those of torch.numa (node, socket, exclusive, core-complex) and of NVIDIA gpu_affinity (all, single,
single_unique, unique_interleaved, unique_contiguous). A share has only CPUs of ``allowed``. The modes that divide
cores do not split a physical core between GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from itertools import zip_longest
from typing import Any

from ..cpulist import format_cpulist
from ..errors import GPUAffinityError
from ..topology import GpuLocality, HostTopology
from .options import DIVIDING_MODES, AffinityOptions

# The enumerations of NVIDIA gpu_affinity, with the same members.


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class Mode(_Text):
    """The modes of gpu_affinity."""

    ALL = "all"
    SINGLE = "single"
    SINGLE_UNIQUE = "single_unique"
    UNIQUE_INTERLEAVED = "unique_interleaved"
    UNIQUE_CONTIGUOUS = "unique_contiguous"


class Scope(_Text):
    """Which CPUs count as near a GPU: those of its NUMA node, or those of its processor socket."""

    NODE = "node"
    SOCKET = "socket"


class Multithreading(_Text):
    """All hardware threads of a physical core, or only the lowest allowed one."""

    ALL_LOGICAL = "all_logical"
    SINGLE_LOGICAL = "single_logical"


# Plans the CPUs of each GPU. Pure: functions from a topology to sets of CPUs, which read and change nothing.


Core = tuple[int, ...]
"""The allowed hardware threads of one physical core, lowest first."""


def plan(
    topology: HostTopology,
    *,
    mode: str,
    scope: str = "node",
    multithreading: str = "all_logical",
    balanced: bool = True,
    min_physical_cores: int = 1,
    max_physical_cores: int | None = None,
    allowed: Iterable[int] | None = None,
    gpus: Iterable[int] | None = None,
) -> list[frozenset[int]]:
    """The CPUs of each GPU.

    Args:
        topology: the host.
        mode: node, socket, exclusive, core-complex (torch.numa's, with no further options), or all, single,
            single_unique, unique_interleaved, unique_contiguous (gpu_affinity's).
        scope, multithreading, balanced, min_physical_cores, max_physical_cores: options of gpu_affinity's modes, see
            :class:`~safe_gpu.affinity.options.AffinityOptions`.
        allowed: CPUs that may be used (taskset, cpuset, a scheduler's binding); None: all online CPUs.
        gpus: indices of the GPUs that divide the cores, in order of precedence; None: all GPUs of the host.

    Returns:
        One non-empty set for each GPU, in the order of ``gpus``.

    Raises:
        GPUAffinityError: an argument is wrong, or some GPU would have no share.
    """
    options = AffinityOptions(mode, scope, multithreading, balanced, min_physical_cores, max_physical_cores)
    if not isinstance(topology, HostTopology):
        raise GPUAffinityError(f"a plan needs a HostTopology, not {topology!r}")
    chosen = _chosen(topology, gpus)
    if not chosen:
        return []
    planner = _Planner(topology, chosen, _allowed(topology, allowed), options)
    shares = planner.shares()
    for gpu, share in zip(chosen, shares, strict=True):
        if not share:
            raise GPUAffinityError(f"no physical core is left for GPU {gpu.index} with mode {options.mode}")
    return shares


def is_remote(topology: HostTopology, gpu: GpuLocality, share: frozenset[int]) -> bool:
    """Whether a share has no CPU on the GPU's own node; False if that node is unknown."""
    if gpu.numa_node is None and not gpu.node_cpus:
        return False
    return not share & topology.node_set(gpu)


def _allowed(topology: HostTopology, allowed: Iterable[int] | None) -> frozenset[int]:
    if allowed is None:
        cpus = topology.cpus
    else:
        try:
            usable = frozenset(allowed)
            cpus = frozenset(cpu for cpu in topology.cpus if cpu in usable)
        except TypeError as err:
            raise GPUAffinityError(f"allowed must be a set of CPU numbers, not {allowed!r}") from err
    if not cpus:
        raise GPUAffinityError(
            f"none of the {len(topology.cpus)} online CPUs ({format_cpulist(topology.cpus)}) may be used: "
            f"the mask of allowed CPUs has none of them"
        )
    return cpus


def _chosen(topology: HostTopology, gpus: Iterable[int] | None) -> list[GpuLocality]:
    if gpus is None:
        return sorted(topology.gpus, key=lambda gpu: gpu.index)
    try:
        indices = sorted(gpus) if isinstance(gpus, (set, frozenset)) else list(gpus)
    except TypeError as err:
        raise GPUAffinityError(f"gpus must be GPU indices, not {gpus!r}") from err
    chosen = [topology.gpu(index) for index in indices]
    doubled = next((gpu.index for at, gpu in enumerate(chosen) if gpu in chosen[:at]), None)
    if doubled is not None:
        raise GPUAffinityError(f"GPU {doubled} is named twice in gpus={indices}: each GPU takes one share")
    return chosen


class _Places:
    """The input of a plan: the GPUs that take part, the CPUs that may be used, and their physical cores."""

    def __init__(
        self,
        topology: HostTopology,
        gpus: Sequence[GpuLocality],
        allowed: frozenset[int],
        options: AffinityOptions,
    ) -> None:
        self.topology = topology
        self.gpus = gpus
        self.allowed = allowed
        self.options = options
        # The key of a core is its lowest thread, allowed or not. torch.numa and gpu_affinity order cores in this way.
        self.core_of = {cpu: min(core) for core in topology.cores for cpu in core}
        self.near = [topology.node_set(gpu) & allowed for gpu in gpus]

    def _cores(self, cpus: frozenset[int]) -> list[Core]:
        """The physical cores of a set of CPUs, as their threads in the set, by the lowest thread of the core."""
        cores: dict[int, list[int]] = {}
        for cpu in sorted(cpus):
            cores.setdefault(self.core_of.get(cpu, cpu), []).append(cpu)
        return [tuple(cores[key]) for key in sorted(cores)]

    def _keys(self, cpus: frozenset[int]) -> frozenset[int]:
        return frozenset(self.core_of.get(cpu, cpu) for cpu in cpus)

    def _socket(self, gpu: GpuLocality) -> frozenset[int]:
        return self.topology.socket_set(gpu, self.allowed) & self.allowed

    def _nearest(self, gpu: GpuLocality) -> frozenset[int]:
        """Allowed CPUs of the node nearest to a GPU, for a GPU whose own node has none."""
        node = self.topology.node_of(gpu)
        row = {} if node is None else self.topology.distances.get(node, {})
        left = {other: cpus & self.allowed for other, cpus in self.topology.nodes.items()}
        nearest = min((other for other in row if left.get(other)), key=lambda other: (row[other], other), default=None)
        if nearest is None:
            raise GPUAffinityError(
                f"none of the CPUs near GPU {gpu.index} ({self._place(gpu)}) may be used, and the nearest other node "
                f"is not known; allowed are {format_cpulist(self.allowed)}"
            )
        return left[nearest]

    def _place(self, gpu: GpuLocality) -> str:
        cpus = format_cpulist(self.topology.node_set(gpu)) or "no CPUs"
        return f"CPUs {cpus}" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}, CPUs {cpus}"

    def _groups(self, sets: Sequence[frozenset[int]]) -> dict[frozenset[int], list[int]]:
        """The positions of the GPUs by their set of CPUs."""
        groups: dict[frozenset[int], list[int]] = {}
        for position, cpus in enumerate(sets):
            groups.setdefault(cpus, []).append(position)
        return groups

    def _check_disjoint(self, sets: Sequence[frozenset[int]], what: str) -> None:
        """Raise unless any two of the sets are equal or have no physical core in common."""
        owner: dict[int, frozenset[int]] = {}
        for cpus in dict.fromkeys(sets):
            for key in self._keys(cpus):
                other = owner.setdefault(key, cpus)
                if other is not cpus:
                    raise GPUAffinityError(
                        f"GPUs cannot divide cores here: the {what} sets {format_cpulist(other)} and "
                        f"{format_cpulist(cpus)} overlap without being the same (physical core of CPU {key})"
                    )

    def _key(self, core: Core) -> int:
        return self.core_of.get(core[0], core[0])

    def _too_few(self, cores: int, positions: Sequence[int], least: int) -> GPUAffinityError:
        names = ", ".join(str(self.gpus[position].index) for position in positions)
        gpus = f"GPU {names}" if len(positions) == 1 else f"{len(positions)} GPUs ({names})"
        return GPUAffinityError(
            f"{cores} physical core{'' if cores == 1 else 's'} near {gpus} may be used, and mode {self.options.mode} "
            f"needs at least {least * len(positions)} there: allow more CPUs, ask for fewer GPUs, or use mode node"
        )


class _Planner(_Places):
    """Computes one plan; each mode has a method."""

    def shares(self) -> list[frozenset[int]]:
        """One set for each GPU; empty if there is no CPU for it."""
        mode = self.options.mode
        if mode in DIVIDING_MODES:
            self._check_disjoint(self.near, "NUMA node")
        if mode == "node":
            return [near or self._nearest(gpu) for gpu, near in zip(self.gpus, self.near, strict=True)]
        if mode == "socket":
            return [self._socket(gpu) or self._nearest(gpu) for gpu in self.gpus]
        if mode == "core-complex":
            return self._core_complex()
        dealers: dict[str, Callable[[], list[list[Core]]]] = {
            "exclusive": self._exclusive,
            Mode.ALL: self._all,
            Mode.SINGLE: lambda: [self._cores(near)[:1] for near in self.near],
            Mode.SINGLE_UNIQUE: self._single_unique,
            Mode.UNIQUE_INTERLEAVED: lambda: self._unique(self._interleaved),
            Mode.UNIQUE_CONTIGUOUS: lambda: self._unique(self._contiguous),
        }
        dealt = dealers[mode]()
        threads = 1 if mode != "exclusive" and self.options.multithreading == Multithreading.SINGLE_LOGICAL else None
        return [frozenset(cpu for core in cores for cpu in core[:threads]) for cores in dealt]

    def _exclusive(self) -> list[list[Core]]:
        dealt: list[list[Core]] = [[] for _ in self.gpus]
        for cpus, positions in self._groups(self.near).items():
            cores = self._cores(cpus)
            each, more = divmod(len(cores), len(positions))
            if each < 1:
                raise self._too_few(len(cores), positions, 1)
            start = 0
            for nth, position in enumerate(positions):
                end = start + each + (nth < more)
                dealt[position] = cores[start:end]
                start = end
        return dealt

    def _core_complex(self) -> list[frozenset[int]]:
        effective = [near or self._nearest(gpu) for gpu, near in zip(self.gpus, self.near, strict=True)]
        shares = [frozenset[int]()] * len(self.gpus)
        for cpus, positions in self._groups(effective).items():
            caches = self._caches(cpus)
            for nth, position in enumerate(positions):
                shares[position] = caches[nth % len(caches)]
        return shares

    def _caches(self, cpus: frozenset[int]) -> list[frozenset[int]]:
        """Last-level cache groups, intersected with a set: the largest first, then by lowest CPU of the whole group."""
        found = [(min(group), group & cpus) for group in self.topology.llc if group & cpus]
        rest = cpus.difference(*self.topology.llc)
        for package in self.topology.packages.values():
            if rest & package:
                found.append((min(rest & package), rest & package))
                rest -= package
        if rest:
            found.append((min(rest), rest))
        return [group for _, group in sorted(found, key=lambda item: (-len(item[1]), item[0]))]

    def _all(self) -> list[list[Core]]:
        dealt = []
        local_to_any = frozenset[int]().union(*(self._keys(near) for near in self.near))
        for position, (gpu, near) in enumerate(zip(self.gpus, self.near, strict=True)):
            cores = self._cores(near)
            if self.options.scope == Scope.SOCKET:
                own = self._keys(near)
                others = [core for core in self._cores(self._socket(gpu)) if self._key(core) not in own]
                # The GPU's own node first, then the nodes of other GPUs, then the rest. gpu_affinity uses the same
                # order, except that it does not put the GPU's own node first.
                cores += sorted(others, key=lambda core: self._key(core) not in local_to_any)
            dealt.append(self._bounded(cores, [position]))
        return dealt

    def _single_unique(self) -> list[list[Core]]:
        taken: set[Core] = set()
        dealt = []
        for position, near in enumerate(self.near):
            cores = self._cores(near)
            core = next((core for core in cores if core not in taken), None)
            if core is None:
                positions = [at for at, other in enumerate(self.near) if other == near]
                raise self._too_few(len(cores), positions or [position], 1)
            taken.add(core)
            dealt.append([core])
        return dealt

    @staticmethod
    def _interleaved(cores: list[Core], gpus: int) -> list[list[Core]]:
        return [cores[nth::gpus] for nth in range(gpus)]

    @staticmethod
    def _contiguous(cores: list[Core], gpus: int) -> list[list[Core]]:
        each = len(cores) // gpus
        return [cores[nth * each : (nth + 1) * each] for nth in range(gpus)]

    def _unique(self, deal: Callable[[list[Core], int], list[list[Core]]]) -> list[list[Core]]:
        groups = {cpus: (self._cores(cpus), positions) for cpus, positions in self._groups(self.near).items()}
        dealt: list[list[Core]] = [[] for _ in self.gpus]
        common = min(len(cores) // len(positions) for cores, positions in groups.values())
        for cores, positions in groups.values():
            divided = cores[: common * len(positions)] if self.options.balanced else cores
            for position, share in zip(positions, deal(divided, len(positions)), strict=True):
                dealt[position] = share
        if not all(dealt):
            cores, positions = min(groups.values(), key=lambda group: len(group[0]) / len(group[1]))
            raise self._too_few(len(cores), positions, 1)
        if self.options.scope == Scope.SOCKET:
            dealt = self._with_socket_cores(dealt)
        return [self._bounded(cores, [position]) for position, cores in enumerate(dealt)]

    def _with_socket_cores(self, dealt: list[list[Core]]) -> list[list[Core]]:
        """Extend each share by the socket's other cores, distributed round-robin over the cores of the nodes."""
        sockets = [self._socket(gpu) | near for gpu, near in zip(self.gpus, self.near, strict=True)]
        self._check_disjoint(sockets, "socket")
        assigned = frozenset[int]().union(*(self._keys(near) for near in self.near))
        extra: dict[Core, list[Core]] = {}
        for cpus, positions in self._groups(sockets).items():
            # Cores compare by their lowest allowed thread here. This differs from the order of _cores on purpose: it
            # is the order of gpu_affinity.
            receivers = sorted({core for position in positions for core in self._cores(self.near[position])})
            others = sorted(core for core in self._cores(cpus) if self._key(core) not in assigned)
            for nth, receiver in enumerate(receivers):
                extra[receiver] = others[nth :: len(receivers)]
        extended = [
            share + [core for turn in zip_longest(*(extra[core] for core in share)) for core in turn if core]
            for share in dealt
        ]
        if self.options.balanced:
            common = min(map(len, extended))
            extended = [share[:common] for share in extended]
        return extended

    def _bounded(self, cores: list[Core], positions: list[int]) -> list[Core]:
        least = self.options.min_physical_cores
        if len(cores) < least or not cores:
            raise self._too_few(len(cores), positions, max(least, 1))
        return cores[: self.options.max_physical_cores]


# Renders an affinity plan: a table with one line for each GPU, one for each NUMA node, and a JSON document.


_HEADER = ("GPU", "BUS", "NODE", "CPUS", "CORES", "MEMORY", "SOURCE")


def affinity_json(
    topology: HostTopology,
    options: AffinityOptions,
    shares: Sequence[frozenset[int]],
    memory: Mapping[int, tuple[int, int]] | None = None,
    shown: Collection[int] | None = None,
) -> dict[str, Any]:
    """The plan and the host's NUMA nodes.

    ``{"mode", "gpus": [{"index", "uuid", "numa_node", "cpus"}],
    "nodes": [{"node", "cpus", "memory_total", "memory_free", "distances"}]}``; memory is in bytes or null, and
    ``distances`` maps a node (as text) to the kernel's relative distance.

    Args:
        shares: one for each GPU, in the host's GPU order.
        memory: node -> bytes, all and free.
        shown: indices of the GPUs to show; None for all.
    """
    known = memory or {}
    return {
        "mode": options.mode,
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "numa_node": topology.node_of(gpu),
                "cpus": format_cpulist(share),
            }
            for gpu, share in _rows(topology, shares, shown)
        ],
        "nodes": [
            {
                "node": node,
                "cpus": format_cpulist(cpus),
                "memory_total": known[node][0] if node in known else None,
                "memory_free": known[node][1] if node in known else None,
                "distances": {str(to): far for to, far in topology.distances.get(node, {}).items()},
            }
            for node, cpus in sorted(topology.nodes.items())
        ],
    }


def affinity_table(
    topology: HostTopology,
    options: AffinityOptions,
    shares: Sequence[frozenset[int]],
    shown: Collection[int] | None = None,
) -> str:
    """The plan as a table: GPU, bus, node, CPUs as ranges, physical cores, memory node, source of the GPU's place."""
    rows = [_HEADER]
    notes = []
    for gpu, share in _rows(topology, shares, shown):
        node = topology.node_of(gpu)
        cores = sum(not core.isdisjoint(share) for core in topology.cores)
        rows.append(
            (
                str(gpu.index),
                gpu.pci_bus_id or "-",
                "?" if node is None else str(node),
                format_cpulist(share),
                str(cores),
                "-" if node is None else str(node),
                gpu.source or "unknown",
            )
        )
        if is_remote(topology, gpu, share):
            notes.append(f"GPU {gpu.index}: its CPUs are on another node, because those of its own may not be used")
    return "\n".join([f"mode {options.mode}", *_aligned(rows), *notes])


def node_table(topology: HostTopology, memory: Mapping[int, tuple[int, int]]) -> str:
    """The NUMA nodes as a table: CPUs, size of the memory, what of it is free, and the distance to each node.

    Distances are the kernel's, relative to 10 for the node itself.
    """
    from ..text import format_bytes

    rows = [("NODE", "CPUS", "SIZE", "FREE", "DISTANCES")]
    for node, cpus in sorted(topology.nodes.items()):
        sizes = [format_bytes(value) for value in memory[node]] if node in memory else ["-", "-"]
        row = topology.distances.get(node, {})
        distances = " ".join(str(row.get(to, "-")) for to in sorted(topology.nodes)) if row else "-"
        rows.append((str(node), format_cpulist(cpus) or "-", sizes[0], sizes[1], distances))
    return "\n".join(_aligned(rows))


def _rows(
    topology: HostTopology, shares: Sequence[frozenset[int]], shown: Collection[int] | None
) -> Iterable[tuple[GpuLocality, frozenset[int]]]:
    for gpu, share in zip(topology.gpus, shares, strict=True):
        if shown is None or gpu.index in shown:
            yield gpu, share


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
