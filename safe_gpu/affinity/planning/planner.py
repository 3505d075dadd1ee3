"""Plans the CPUs of each GPU. Pure.

The enumerations are for callers. The rest of the package uses plain strings, because creating enumerations takes longer
than most bindings.

The modes are those of torch.numa (node, socket, exclusive, core-complex) and of NVIDIA gpu_affinity (all, single,
single_unique, unique_interleaved, unique_contiguous). A share has only CPUs of ``allowed``. The modes that divide
cores do not split a physical core between GPUs.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import TypeVar

from ...errors import GPUAffinityError
from ...topology.cpulist import format_cpulist
from ...topology.topology import GpuLocality, HostTopology
from ..options import DIVIDING_MODES, AffinityOptions
from .enumerations import Mode, Multithreading, Scope

Core = tuple[int, ...]
"""The allowed hardware threads of one physical core, lowest first."""

Deal = Callable[[Sequence[Core], int], list[Sequence[Core]]]
"""Divides the cores of a node among a number of GPUs."""

_T = TypeVar("_T")


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
    """Return the CPUs of each GPU.

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
    shares = _Planner(topology, chosen, _allowed(topology, allowed), options).shares()
    for gpu, share in zip(chosen, shares, strict=True):
        if not share:
            raise GPUAffinityError(f"no physical core is left for GPU {gpu.index} with mode {options.mode}")
    return shares


def is_remote(topology: HostTopology, gpu: GpuLocality, share: frozenset[int]) -> bool:
    """Return whether a share has no CPU on the GPU's own node; False if that node is unknown."""
    if gpu.numa_node is None and not gpu.node_cpus:
        return False
    return not share & topology.node_set(gpu)


def _allowed(topology: HostTopology, allowed: Iterable[int] | None) -> frozenset[int]:
    try:
        usable = topology.cpus if allowed is None else frozenset(allowed)
    except TypeError as err:
        raise GPUAffinityError(f"allowed must be a set of CPU numbers, not {allowed!r}") from err
    cpus = frozenset(cpu for cpu in topology.cpus if cpu in usable)
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


def divide(cores: Sequence[_T], parts: int) -> list[Sequence[_T]]:
    """Return contiguous parts; the first ones have one core more if they do not divide evenly."""
    each, more = divmod(len(cores), parts)
    ends = [nth * each + min(nth, more) for nth in range(parts + 1)]
    return [cores[start:end] for start, end in pairwise(ends)]


def _groups(sets: Sequence[frozenset[int]]) -> dict[frozenset[int], list[int]]:
    """Return the positions of the GPUs by their set of CPUs."""
    groups: dict[frozenset[int], list[int]] = {}
    for position, cpus in enumerate(sets):
        groups.setdefault(cpus, []).append(position)
    return groups


class _Planner:
    """Computes one plan for the GPUs that take part, from the CPUs that may be used."""

    def __init__(
        self, topology: HostTopology, gpus: Sequence[GpuLocality], allowed: frozenset[int], options: AffinityOptions
    ) -> None:
        self.topology = topology
        self.gpus = gpus
        self.allowed = allowed
        self.options = options
        # The key of a core is its lowest thread, allowed or not. torch.numa and gpu_affinity order cores in this way.
        self.core_of = {cpu: cpu for cpu in topology.cpus} | {cpu: min(core) for core in topology.cores for cpu in core}
        self.near = [topology.node_set(gpu) & allowed for gpu in gpus]

    def shares(self) -> list[frozenset[int]]:
        """Return one set for each GPU; empty if there is no CPU for it."""
        mode = self.options.mode
        if mode in DIVIDING_MODES:
            self._check_disjoint(self.near, "NUMA node")
        if mode == "socket":
            return [self._socket(gpu) or self._nearest(gpu) for gpu in self.gpus]
        if mode in ("node", "core-complex"):
            nodes = [near or self._nearest(gpu) for gpu, near in zip(self.gpus, self.near, strict=True)]
            return nodes if mode == "node" else self._core_complex(nodes)
        if mode == "exclusive":
            return [_union(cores) for cores in self._divided(divide, balanced=False)]
        dealers: dict[str, Callable[[], list[Sequence[Core]]]] = {
            Mode.ALL: self._all,
            Mode.SINGLE: lambda: [self._cores(near)[:1] for near in self.near],
            Mode.SINGLE_UNIQUE: self._single_unique,
            Mode.UNIQUE_INTERLEAVED: lambda: self._unique(lambda cores, n: [cores[nth::n] for nth in range(n)]),
            Mode.UNIQUE_CONTIGUOUS: lambda: self._unique(lambda cores, n: divide(cores[: len(cores) // n * n], n)),
        }
        threads = 1 if self.options.multithreading == Multithreading.SINGLE_LOGICAL else None
        return [_union(core[:threads] for core in cores) for cores in dealers[mode]()]

    def _cores(self, cpus: frozenset[int]) -> list[Core]:
        """Return the physical cores of a set of CPUs, as their threads in the set, by the lowest thread of the core."""
        cores: dict[int, list[int]] = {}
        for cpu in sorted(cpus):
            cores.setdefault(self.core_of[cpu], []).append(cpu)
        return [tuple(cores[key]) for key in sorted(cores)]

    def _keys(self, cpus: frozenset[int]) -> frozenset[int]:
        return frozenset(self.core_of[cpu] for cpu in cpus)

    def _socket(self, gpu: GpuLocality) -> frozenset[int]:
        return self.topology.socket_set(gpu, self.allowed) & self.allowed

    def _nearest(self, gpu: GpuLocality) -> frozenset[int]:
        """Return the allowed CPUs of the node nearest to a GPU whose own node has none."""
        node = self.topology.node_of(gpu)
        row = {} if node is None else self.topology.distances.get(node, {})
        left = {other: cpus & self.allowed for other, cpus in self.topology.nodes.items()}
        nearest = min((other for other in row if left.get(other)), key=lambda other: (row[other], other), default=None)
        if nearest is None:
            near = f"CPUs {format_cpulist(self.topology.node_set(gpu)) or 'no CPUs'}"
            place = near if gpu.numa_node is None else f"NUMA node {gpu.numa_node}, {near}"
            raise GPUAffinityError(
                f"none of the CPUs near GPU {gpu.index} ({place}) may be used, and the nearest other node is not "
                f"known; allowed are {format_cpulist(self.allowed)}"
            )
        return left[nearest]

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

    def _too_few(self, cores: int, positions: Sequence[int], least: int) -> GPUAffinityError:
        names = ", ".join(str(self.gpus[position].index) for position in positions)
        gpus = f"GPU {names}" if len(positions) == 1 else f"{len(positions)} GPUs ({names})"
        return GPUAffinityError(
            f"{cores} physical core{'' if cores == 1 else 's'} near {gpus} may be used, and mode {self.options.mode} "
            f"needs at least {least * len(positions)} there: allow more CPUs, ask for fewer GPUs, or use mode node"
        )

    def _core_complex(self, nodes: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        shares = list(nodes)
        for cpus, positions in _groups(nodes).items():
            caches = self._caches(cpus)
            for nth, position in enumerate(positions):
                shares[position] = caches[nth % len(caches)]
        return shares

    def _caches(self, cpus: frozenset[int]) -> list[frozenset[int]]:
        """Return the last-level cache groups, intersected with a set: the largest first, then by lowest CPU of the
        whole group."""
        found = [(min(group), group & cpus) for group in self.topology.llc if group & cpus]
        rest = cpus.difference(*self.topology.llc)
        for group in (*self.topology.packages.values(), rest):  # CPUs without a cache: by package
            found.append((min(rest & group, default=0), rest & group))
            rest -= group
        return [group for _, group in sorted(found, key=lambda item: (-len(item[1]), item[0])) if group]

    def _all(self) -> list[Sequence[Core]]:
        dealt: list[Sequence[Core]] = []
        local_to_any = self._keys(_union(self.near))
        for position, (gpu, near) in enumerate(zip(self.gpus, self.near, strict=True)):
            cores = self._cores(near)
            if self.options.scope == Scope.SOCKET:
                own = self._keys(near)
                others = [core for core in self._cores(self._socket(gpu)) if self.core_of[core[0]] not in own]
                # The GPU's own node first, then the nodes of other GPUs, then the rest. gpu_affinity uses the same
                # order, except that it does not put the GPU's own node first.
                cores += sorted(others, key=lambda core: self.core_of[core[0]] not in local_to_any)
            dealt.append(self._bounded(cores, position))
        return dealt

    def _single_unique(self) -> list[Sequence[Core]]:
        taken: list[Core] = []
        for near in self.near:
            cores = self._cores(near)
            core = next((core for core in cores if core not in taken), None)
            if core is None:
                raise self._too_few(len(cores), _groups(self.near)[near], 1)
            taken.append(core)
        return [[core] for core in taken]

    def _divided(self, deal: Deal, *, balanced: bool) -> list[Sequence[Core]]:
        """Return the cores of each node, dealt to its GPUs; ``balanced``: as many to each as where they are fewest."""
        groups = [(self._cores(cpus), positions) for cpus, positions in _groups(self.near).items()]
        fewest, sharers = min(groups, key=lambda group: len(group[0]) / len(group[1]))
        common = len(fewest) // len(sharers)
        if not common:
            raise self._too_few(len(fewest), sharers, 1)
        dealt: dict[int, Sequence[Core]] = {}
        for cores, positions in groups:
            divided = cores[: common * len(positions)] if balanced else cores
            dealt.update(zip(positions, deal(divided, len(positions)), strict=True))
        return [dealt[position] for position in range(len(self.gpus))]

    def _unique(self, deal: Deal) -> list[Sequence[Core]]:
        dealt = self._divided(deal, balanced=self.options.balanced)
        if self.options.scope == Scope.SOCKET:
            dealt = self._with_socket_cores(dealt)
        return [self._bounded(cores, position) for position, cores in enumerate(dealt)]

    def _with_socket_cores(self, dealt: list[Sequence[Core]]) -> list[Sequence[Core]]:
        """Extend each share by the socket's other cores, distributed round-robin over the cores of the nodes."""
        sockets = [self._socket(gpu) | near for gpu, near in zip(self.gpus, self.near, strict=True)]
        self._check_disjoint(sockets, "socket")
        assigned = self._keys(_union(self.near))
        extra: dict[Core, list[Core]] = {}
        for cpus, positions in _groups(sockets).items():
            # Cores compare by their lowest allowed thread here. This differs from the order of _cores on purpose: it
            # is the order of gpu_affinity.
            receivers = sorted({core for position in positions for core in self._cores(self.near[position])})
            others = sorted(core for core in self._cores(cpus) if self.core_of[core[0]] not in assigned)
            for nth, receiver in enumerate(receivers):
                extra[receiver] = others[nth :: len(receivers)]
        extended = [
            [*share, *(core for turn in zip_longest(*(extra[core] for core in share)) for core in turn if core)]
            for share in dealt
        ]
        common = min(map(len, extended)) if self.options.balanced else None
        return [share[:common] for share in extended]

    def _bounded(self, cores: Sequence[Core], position: int) -> Sequence[Core]:
        least = max(self.options.min_physical_cores, 1)
        if len(cores) < least:
            raise self._too_few(len(cores), [position], least)
        return cores[: self.options.max_physical_cores]


def _union(groups: Iterable[Iterable[int]]) -> frozenset[int]:
    return frozenset(cpu for group in groups for cpu in group)
