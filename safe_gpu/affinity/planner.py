"""The modes of CPU binding, their options, and the plan of each GPU's CPUs. Pure.

Every mode is the same three steps: the CPUs near a GPU, the GPUs that have the same CPUs near, and a deal of these CPUs
among them. The modes are those of torch.numa (node, socket, exclusive, core-complex) and of NVIDIA gpu_affinity (all,
single, single_unique, unique_interleaved, unique_contiguous). The modes that divide cores split no physical core.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any, TypeVar

from ..errors import GPUAffinityError
from ..topology.cpulist import format_cpulist, parse_cpulist
from ..topology.host import GpuLocality, HostTopology
from ..wording.text import plural

MODES = (
    *("node", "socket", "exclusive", "core-complex"),
    *("all", "single", "single_unique", "unique_interleaved", "unique_contiguous"),
)
"""Every mode: the four of torch.numa, then those of gpu_affinity."""

SCOPES = ("node", "socket")
MULTITHREADING = ("all_logical", "single_logical")

DIVIDING_MODES = frozenset({"exclusive", "single_unique", "unique_interleaved", "unique_contiguous"})
"""The modes that give a physical core to one GPU only."""

PER_GPU_MODES = DIVIDING_MODES | {"core-complex"}
"""The modes that choose among the CPUs of a node by the GPU."""

MEMORY_MODES = ("preferred", "bind")


def _choice(what: str, value: object, choices: tuple[str, ...]) -> str:
    text = getattr(value, "value", value)
    if not isinstance(text, str) or text not in choices:
        raise GPUAffinityError(f"unknown {what} {text!r}: choose one of {', '.join(choices)}")
    return text


def as_count(what: str, value: object, least: int) -> int:
    """Return a whole number, of any type that has ``__index__`` (numpy's have).

    Raises:
        GPUAffinityError: it is none, or below ``least``; the text names it ``what``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise GPUAffinityError(f"{what} must be a whole number, not {value!r}")
    number = int(value.__index__())
    if number < least:
        raise GPUAffinityError(f"{what}={number} is too small: it must be at least {least}")
    return number


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list as the kernel writes it.

    Raises:
        ValueError: it names none.
    """
    cpus = parse_cpulist(text)
    if not cpus:
        raise ValueError(f"{text!r} names no CPU: write a list such as 0-15,128-143")
    return cpus


@dataclass(frozen=True)
class AffinityOptions:
    """How a GPU's CPUs are chosen. Takes strings and members of enumerations (those of gpu_affinity and of torch).

    The modes node, socket, exclusive and core-complex ignore every option but ``mode``; the other options belong to
    gpu_affinity and act on its modes.

    Attributes:
        mode: one of :data:`MODES`.
        scope: "node" or "socket".
        multithreading: "all_logical" or "single_logical".
        balanced: give every GPU the same number of physical cores.
        min_physical_cores: too few physical cores for this are an error.
        max_physical_cores: a share is trimmed to its first cores; None is no bound. As in gpu_affinity it wins over a
            greater minimum.

    Raises:
        GPUAffinityError: a value is not one of these.
    """

    mode: str = "node"
    scope: str = "node"
    multithreading: str = "all_logical"
    balanced: bool = True
    min_physical_cores: int = 1
    max_physical_cores: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.balanced, bool):
            raise GPUAffinityError(f"balanced must be True or False, not {self.balanced!r}")
        self._set("mode", _choice("affinity mode", self.mode, MODES))
        self._set("scope", _choice("affinity scope", self.scope, SCOPES))
        self._set("multithreading", _choice("multithreading mode", self.multithreading, MULTITHREADING))
        self._set("min_physical_cores", as_count("min_physical_cores", self.min_physical_cores, 0))
        if self.max_physical_cores is not None:
            self._set("max_physical_cores", as_count("max_physical_cores", self.max_physical_cores, 1))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # as documented for frozen dataclasses


def parse_options(affinity: Any, memory: object = None) -> AffinityOptions | None:
    """Return the options for an argument ``affinity``: None, the name of a mode, or the options themselves.

    torch's ``NumaOptions`` counts as its ``affinity_mode``. It is known by its attributes; torch is not imported.

    Raises:
        GPUAffinityError: ``affinity`` is none of these, or ``memory`` is not None, "preferred" or "bind".
    """
    check_memory_mode(memory)
    if affinity is None or isinstance(affinity, AffinityOptions):
        return affinity
    return AffinityOptions(getattr(affinity, "affinity_mode", affinity))


def falls_back(affinity: object) -> bool:
    """Return whether an argument ``affinity`` is a ``NumaOptions`` of torch that asks for going on where binding
    fails."""
    return bool(getattr(affinity, "should_fall_back_if_binding_fails", False))


def check_memory_mode(memory: object) -> str | None:
    """Check an argument ``memory``: None, "preferred" or "bind".

    Raises:
        GPUAffinityError: it is none of these.
    """
    if memory is None:
        return None
    return _choice("memory policy", memory, MEMORY_MODES)


Core = tuple[int, ...]
"""The allowed hardware threads of one physical core, lowest first."""

_T = TypeVar("_T")


def divide(cores: Sequence[_T], parts: int) -> list[Sequence[_T]]:
    """Return contiguous parts; the first ones have one core more if they do not divide evenly."""
    each, more = divmod(len(cores), parts)
    ends = [nth * each + min(nth, more) for nth in range(parts + 1)]
    return [cores[start:end] for start, end in pairwise(ends)]


# How the cores of a node are dealt to a number of GPUs.
_DEALS: dict[str, Callable[[Sequence[Core], int], list[Sequence[Core]]]] = {
    "exclusive": divide,
    "single": lambda cores, parts: [cores[:1]] * parts,
    "single_unique": lambda cores, parts: [cores[nth : nth + 1] for nth in range(parts)],
    "unique_interleaved": lambda cores, parts: [cores[nth::parts] for nth in range(parts)],
    "unique_contiguous": lambda cores, parts: divide(cores[: len(cores) // parts * parts], parts),
}


def plan(
    topology: HostTopology, *, allowed: Iterable[int] | None = None, gpus: Iterable[int] | None = None, **options: Any
) -> list[frozenset[int]]:
    """Return the CPUs of each GPU: one non-empty set for each, in the order of ``gpus``.

    Args:
        topology: the host.
        allowed: CPUs that may be used (taskset, cpuset, a scheduler's binding); None: all online CPUs. Isolated CPUs
            are left out, unless there are no others.
        gpus: indices of the GPUs that divide the cores, each once, in order of precedence; None: all GPUs of the host.
        options: see :class:`~safe_gpu.affinity.planner.AffinityOptions`.

    Raises:
        GPUAffinityError: an option is wrong, there is no such GPU, or some GPU would have no share.
    """
    checked = AffinityOptions(**options)
    usable = topology.cpus
    if allowed is not None:
        usable &= frozenset(allowed)
    if not usable:
        raise GPUAffinityError(f"this process may use none of the {len(topology.cpus)} online CPUs")
    chosen = list(topology.gpus)
    if gpus is not None:
        chosen = [topology.gpu(index) for index in gpus]
    if len(set(chosen)) < len(chosen):
        raise GPUAffinityError(f"a GPU is named twice in gpus={gpus}: each GPU takes one share")
    return deal(topology, chosen, topology.unisolated(usable), checked)


def deal(
    topology: HostTopology, gpus: Sequence[GpuLocality], usable: frozenset[int], options: AffinityOptions
) -> list[frozenset[int]]:
    """Return the CPUs of each GPU, out of ``usable``.

    Raises:
        GPUAffinityError: some GPU would have none.
    """
    if not gpus:
        return []
    shares = _Planner(topology, gpus, usable, options).shares()
    for gpu, share in zip(gpus, shares, strict=True):
        if not share:
            raise GPUAffinityError(f"no physical core is left for GPU {gpu.index} with mode {options.mode}")
    return shares


def is_remote(topology: HostTopology, gpu: GpuLocality, share: frozenset[int]) -> bool:
    """Return whether a share has no CPU on the GPU's own node; False if that node is unknown."""
    return gpu.is_known and share.isdisjoint(topology.node_set(gpu))


class _Planner:
    """Computes one plan for the GPUs that take part, from the CPUs that may be used."""

    def __init__(
        self, host: HostTopology, gpus: Sequence[GpuLocality], allowed: frozenset[int], options: AffinityOptions
    ) -> None:
        self.host = host
        self.gpus = gpus
        self.allowed = allowed
        self.options = options
        self.near = [host.node_set(gpu) & allowed for gpu in gpus]

    def shares(self) -> list[frozenset[int]]:
        """Return one set for each GPU; empty if there is no CPU for it."""
        mode = self.options.mode
        if mode == "node":
            return self._nodes()
        if mode == "socket":
            return [self._socket(gpu) or self._nearest(gpu) for gpu in self.gpus]
        if mode == "core-complex":
            return self._dealt(self._nodes(), self._caches)
        if mode == "all":
            dealt = [self._all(gpu, near) for gpu, near in zip(self.gpus, self.near, strict=True)]
        else:
            dealt = self._divided()
        if mode in ("all", "unique_interleaved", "unique_contiguous"):
            dealt = [self._bounded(cores, gpu) for gpu, cores in zip(self.gpus, dealt, strict=True)]
        if mode != "exclusive" and self.options.multithreading == "single_logical":
            dealt = [[core[:1] for core in cores] for cores in dealt]
        return [union(cores) for cores in dealt]

    def _nodes(self) -> list[frozenset[int]]:
        """Return the CPUs of the node of each GPU, or of the nearest node that has some."""
        return [near or self._nearest(gpu) for gpu, near in zip(self.gpus, self.near, strict=True)]

    def _dealt(self, sets: Sequence[frozenset[int]], deal: Callable[[frozenset[int], int], Sequence[_T]]) -> list[_T]:
        """Return what each GPU gets if each set is dealt among the GPUs that have it."""
        parts = {cpus: iter(deal(cpus, sets.count(cpus))) for cpus in sets}
        return [next(parts[cpus]) for cpus in sets]

    @cached_property
    def _core_of(self) -> dict[int, int]:
        """The key of a CPU's core is its lowest thread, allowed or not: so torch.numa and gpu_affinity order cores."""
        key_of = {cpu: cpu for cpu in self.host.cpus}
        for core in self.host.cores:
            key_of.update(dict.fromkeys(core, min(core)))
        return key_of

    def _cores(self, cpus: frozenset[int]) -> list[Core]:
        """Return the physical cores of a set of CPUs, as their threads in the set, by the lowest thread of the core."""
        cores: dict[int, list[int]] = {}
        for cpu in sorted(cpus, key=lambda cpu: (self._core_of[cpu], cpu)):
            cores.setdefault(self._core_of[cpu], []).append(cpu)
        return [tuple(core) for core in cores.values()]

    def _keys(self, cpus: Iterable[int]) -> frozenset[int]:
        return frozenset(self._core_of[cpu] for cpu in cpus)

    def _socket(self, gpu: GpuLocality) -> frozenset[int]:
        socket = gpu.socket_cpus or self.host.socket_around(self.host.node_set(gpu), self.allowed)
        return socket & self.host.cpus & self.allowed

    def _nearest(self, gpu: GpuLocality) -> frozenset[int]:
        """Return the allowed CPUs of the node nearest to a GPU whose own node has none."""
        node = self.host.node_of(gpu)
        place = f"CPUs {format_cpulist(self.host.node_set(gpu)) or 'no CPUs'}"
        if node is not None:
            distances = self.host.distances.get(node, {})
            others = [other for other, cpus in self.host.nodes.items() if other in distances and cpus & self.allowed]
            if others:
                nearest = min(others, key=lambda other: (distances[other], other))
                return self.host.nodes[nearest] & self.allowed
            place = f"NUMA node {node}, {place}"
        none = f"none of the CPUs near GPU {gpu.index} ({place}) may be used, and the nearest other node is not known"
        raise GPUAffinityError(f"{none}; allowed are {format_cpulist(self.allowed)}")

    def _check_disjoint(self, groups: Iterable[frozenset[int]], what: str) -> None:
        """Raise unless any two of the sets are equal or have no physical core in common."""
        owner: dict[int, frozenset[int]] = {}
        for cpus in dict.fromkeys(groups):
            for key in sorted(self._keys(cpus)):
                other = owner.setdefault(key, cpus)
                if other is not cpus:
                    sets = f"the {what} sets {format_cpulist(other)} and {format_cpulist(cpus)}"
                    overlap = f"overlap without being the same (physical core of CPU {key})"
                    raise GPUAffinityError(f"GPUs cannot divide cores here: {sets} {overlap}")

    def _too_few(self, cores: int, gpus: Sequence[GpuLocality], least: int) -> GPUAffinityError:
        names = ", ".join(str(gpu.index) for gpu in gpus)
        place = f"GPU {names}"
        if len(gpus) > 1:
            place = f"{len(gpus)} GPUs ({names})"
        return GPUAffinityError(
            f"{plural(cores, 'physical core')} near {place} may be used, and mode {self.options.mode} needs at least "
            f"{least * len(gpus)} there: allow more CPUs, ask for fewer GPUs, or use mode node"
        )

    def _caches(self, cpus: frozenset[int], parts: int) -> list[frozenset[int]]:
        """Return groups that share a last-level cache: the largest first, then by the lowest CPU of the whole group.
        CPUs without a cache are grouped by package."""
        groups = list(self.host.llc)
        without_cache = cpus.difference(*self.host.llc)
        groups += [without_cache & package for package in self.host.packages.values()]
        groups.append(without_cache.difference(*groups))
        usable = [group for group in groups if group & cpus]
        usable.sort(key=lambda group: (-len(group & cpus), min(group)))
        return [usable[nth % len(usable)] & cpus for nth in range(parts)]

    def _all(self, gpu: GpuLocality, near: frozenset[int]) -> Sequence[Core]:
        """Return the GPU's own node first; with scope socket then the nodes of other GPUs, then the rest of it."""
        cores = self._cores(near)
        if self.options.scope == "socket":
            own = self._keys(near)
            of_any = self._keys(union(self.near))
            others = [core for core in self._cores(self._socket(gpu)) if self._core_of[core[0]] not in own]
            cores += sorted(others, key=lambda core: self._core_of[core[0]] not in of_any)
        return cores

    def _divided(self) -> list[Sequence[Core]]:
        """Return the cores of each node, dealt to its GPUs; ``balanced``: as many to each as where they are fewest."""
        mode = self.options.mode
        deal_cores = _DEALS[mode]
        if mode not in DIVIDING_MODES:
            return self._dealt(self.near, lambda cpus, parts: deal_cores(self._cores(cpus), parts))
        self._check_disjoint(self.near, "NUMA node")
        counts = {cpus: len(self._cores(cpus)) for cpus in self.near}
        scarce = min(self.near, key=lambda cpus: counts[cpus] / self.near.count(cpus))
        common = counts[scarce] // self.near.count(scarce)
        if not common:
            sharers = [gpu for gpu, near in zip(self.gpus, self.near, strict=True) if near == scarce]
            raise self._too_few(counts[scarce], sharers, 1)
        is_unique = mode.startswith("unique_")

        def dealt(cpus: frozenset[int], parts: int) -> list[Sequence[Core]]:
            cores = self._cores(cpus)
            if is_unique and self.options.balanced:
                cores = cores[: common * parts]
            return deal_cores(cores, parts)

        shares = self._dealt(self.near, dealt)
        if is_unique and self.options.scope == "socket":
            return self._with_socket_cores(shares)
        return shares

    def _with_socket_cores(self, dealt: list[Sequence[Core]]) -> list[Sequence[Core]]:
        """Extend each share by the socket's other cores, distributed round-robin over the cores of the nodes."""
        sockets = [self._socket(gpu) | near for gpu, near in zip(self.gpus, self.near, strict=True)]
        self._check_disjoint(sockets, "socket")
        assigned = self._keys(union(self.near))
        extra: dict[Core, list[Core]] = {}
        for socket in dict.fromkeys(sockets):
            # By their lowest allowed thread, not by that of the core as elsewhere: it is the order of gpu_affinity.
            inside = [near for near, own_socket in zip(self.near, sockets, strict=True) if own_socket == socket]
            receivers = sorted({core for near in inside for core in self._cores(near)})
            others = sorted(core for core in self._cores(socket) if self._core_of[core[0]] not in assigned)
            for nth, core in enumerate(receivers):
                extra[core] = others[nth :: len(receivers)]
        extended: list[Sequence[Core]] = []
        for share in dealt:
            # The first extra core of each core of the share, then the second ones, ...
            turns = zip_longest(*(extra[core] for core in share))
            extended.append([*share, *(core for turn in turns for core in turn if core)])
        if self.options.balanced:
            common = min(len(share) for share in extended)
            extended = [share[:common] for share in extended]
        return extended

    def _bounded(self, cores: Sequence[Core], gpu: GpuLocality) -> Sequence[Core]:
        least = max(self.options.min_physical_cores, 1)
        if len(cores) < least:
            raise self._too_few(len(cores), [gpu], least)
        return cores[: self.options.max_physical_cores]


def union(groups: Iterable[Iterable[int]]) -> frozenset[int]:
    """Return the CPUs of all these groups."""
    return frozenset(cpu for group in groups for cpu in group)
