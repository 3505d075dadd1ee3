"""What this host can ever give a request, and the best of the GPUs that are free now. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import MIG_IS_ON, Gpu, GpuVerdict, Holder, HostSnapshot, VisibleLimit
from ..gpus.vendors import VENDORS
from ..settings.values import is_index, names_device, unknown_names
from ..wording import style
from ..wording.text import gpu_ranges, grouped, plural
from .request import Selection, linked
from .verdicts import DEFAULT_RULES, UNWATCHABLE, Known, Rules, fence_hint, judge, why_outside, why_unusable


def candidates(
    snapshot: HostSnapshot,
    request: Selection,
    visible_limit: VisibleLimit | None = None,
    *,
    rules: Rules = DEFAULT_RULES,
    lost: bool = False,
) -> tuple[Gpu, ...]:
    """Return every device that this request could ever get, in the order of the snapshot. Requests compete for these.

    Args:
        lost: whether those count that the driver has lost and may find again.
    """
    gpus = snapshot.physical
    if request.nb_gpus == 1:
        gpus = snapshot.gpus
    found = []
    for gpu in gpus:
        if lost and gpu.lost:
            reason = why_outside(gpu, request, visible_limit)
        else:
            reason = _why_never(gpu, snapshot, request, visible_limit, rules)
        if not reason:
            found.append(gpu)
    return tuple(found)


def check_possible(
    snapshot: HostSnapshot,
    request: Selection,
    visible_limit: VisibleLimit | None = None,
    *,
    claimed: Callable[[], Mapping[str, Holder]] = dict,
    rules: Rules = DEFAULT_RULES,
) -> None:
    """Raise if this host, or this process within its visible limit, can never satisfy the request.

    Args:
        claimed: returns who holds GPUs, by UUID. It is called only to say what is free outside the visible limit.

    Raises:
        UnsatisfiableRequestError: names the offending value and what to do.
    """
    _check_names(snapshot, request)
    reasons = {gpu: _why_never(gpu, snapshot, request, None, rules) for gpu in snapshot.gpus}
    possible = [gpu for gpu, reason in reasons.items() if not reason]
    holders: Mapping[str, Holder] = {}
    problem = _too_few(request.nb_gpus, possible, snapshot, reasons) or _too_far_apart(request, possible)
    if not problem and visible_limit is not None:
        visible = [gpu for gpu in possible if gpu.uuid in visible_limit]
        if not fits(request, visible):
            holders = claimed()
            unlimited = judge(snapshot, request, Known(holders, rules=rules))
            problem = _limited(unlimited, visible_limit) + _unread_instances(snapshot)
    if not problem:
        return
    asked = "1 GPU is"
    if request.nb_gpus > 1:
        asked = f"{request.nb_gpus} GPUs are"
    verdicts = judge(snapshot, request, Known(holders, visible_limit, rules=rules))
    raise UnsatisfiableRequestError(f"{asked} asked for, but {problem}", value=request.nb_gpus, verdicts=verdicts)


def _check_names(snapshot: HostSnapshot, request: Selection) -> None:
    """Raise if a GPU that the request names is not here."""
    for argument in ("only", "exclude"):
        for name in unknown_names(request.value_of(argument) or (), snapshot):
            raise UnsatisfiableRequestError(
                f"{style.setting(argument, name)}: {_why_no_device(name, snapshot)}{_unread_instances(snapshot)}",
                value=name,
            )


def _why_no_device(name: str, snapshot: HostSnapshot) -> str:
    """Return why an entry of ``only`` or ``exclude`` is not the name of one device, and which devices there are."""
    title = VENDORS[snapshot.vendor].title
    if is_index(name):
        return f"there is no {title} GPU {name} here ({_inventory(snapshot.gpus, by_uuid=False)})"
    several = [gpu for gpu in snapshot.gpus if gpu.uuid.startswith(name)]
    if several:
        return f"several GPUs match: {_inventory(several, by_uuid=True)}"
    return f"no {title} GPU here has this UUID: {_inventory(snapshot.gpus, by_uuid=True)}"


def _limited(unlimited: Sequence[GpuVerdict], visible_limit: VisibleLimit) -> str:
    """Return how the visible limit leaves too few GPUs, and the way out.

    Args:
        unlimited: the verdicts without it.
    """
    text = f"{fence_hint(unlimited, visible_limit)}: "
    if not visible_limit.uuids:
        if visible_limit.lift:
            return f"{text}unset {visible_limit.name}"
        return f"{text}ask the scheduler of the job for GPUs"
    text += "ask for its GPUs only"
    if visible_limit.lift:
        text += f", or set {visible_limit.lift} to disregard the variable"
    return text


def _too_far_apart(request: Selection, possible: Sequence[Gpu]) -> str:
    """Return why these GPUs do not suffice together, although there are enough of them."""
    most = max((capacity(group) for group in request.groups(possible)), default=0)
    if most >= request.nb_gpus:
        return ""
    if request.value_of("near") == "numa":
        unknown = [gpu.label for gpu in possible if gpu.numa_node is None]
        if unknown:
            return f"the NUMA node of GPU {gpu_ranges(unknown)} is not known: leave {style.option('near')} out"
    number = "no two"
    if most > 1:
        number = f"only {most}"
    return f"{number} of this host are {request.together}: ask for fewer"


def _why_never(
    gpu: Gpu, snapshot: HostSnapshot, request: Selection, visible_limit: VisibleLimit | None, rules: Rules
) -> str:
    """Return why the request can never get the device: nobody can claim it, it is outside, or whether it is free or has
    the memory will never be known."""
    reason = why_unusable(gpu)
    if reason:
        return reason
    is_watchable = gpu.processes_supported or snapshot.shared_display or rules.lists_optional
    if not is_watchable:
        return UNWATCHABLE
    return why_outside(gpu, request, visible_limit) or request.why_unknowable(gpu)


def _too_few(nb_gpus: int, possible: Sequence[Gpu], snapshot: HostSnapshot, reasons: Mapping[Gpu, str]) -> str:
    """Return why the devices in ``possible`` are fewer than ``nb_gpus``; "" if they suffice.

    Args:
        reasons: why the others of the host are not possible.
    """
    most = capacity(possible)
    if most >= nb_gpus:
        return ""
    if any(gpu.is_mig_instance for gpu in possible):
        return _too_few_together(most, len(possible))
    total = len(snapshot.physical)
    if total == 0:
        return "this host has none"
    gpus = plural(total, f"{VENDORS[snapshot.vendor].title} GPU")
    if total < nb_gpus:
        return f"this host has only {gpus}: ask for fewer"
    labels = grouped((gpu.label, reason) for gpu, reason in reasons.items() if reason)
    listed = "; ".join(f"GPU {gpu_ranges(labels[reason])}: {reason}" for reason in labels)
    if most == 0:
        return f"none fits ({listed})"
    return f"only {most} of the {gpus} of this host can be claimed ({listed})"


def _too_few_together(most: int, number: int) -> str:
    """Return why a process cannot have more than ``most`` of ``number`` devices, some of which are MIG instances."""
    text = f"CUDA shows a process one MIG instance, and no whole GPU beside it: ask for {most}"
    if most == number:
        return text
    if most > 1:
        text += ", or for 1"
    return f"{text} in each of up to {number} processes"


def _inventory(gpus: Sequence[Gpu], *, by_uuid: bool) -> str:
    if not gpus:
        return "none"
    if by_uuid:
        return ", ".join(f"{gpu.label} ({gpu.uuid})" for gpu in gpus)
    return f"GPU {gpu_ranges(gpu.label for gpu in gpus)}"


def _unread_instances(snapshot: HostSnapshot) -> str:
    """Return on which GPU this driver does not read the MIG instances, one of which may have been meant, and why."""
    for gpu in snapshot.gpus:
        if gpu.mig_enabled and gpu.unusable != MIG_IS_ON:
            return f"; GPU {gpu.label}: {gpu.unusable}"
    return ""


def can_be_met_by_releases(
    candidate_uuids: Collection[str], request: Selection, verdicts: Iterable[GpuVerdict], leaving: Collection[str] = ()
) -> bool:
    """Return whether a waiting request would be met if every claim were released. If so, later waiters must not pass
    it.

    Args:
        candidate_uuids: the devices that the request could get (:func:`candidates`).
        request: how many of them it needs, and which together.
        verdicts: of every device, judged for this request without a visible limit.
        leaving: UUIDs of devices that are busy only with the processes of a claim that has just ended.
    """
    coming = []
    for verdict in verdicts:
        uuid = verdict.gpu.uuid
        is_coming = verdict.free or verdict.state == "claimed" or uuid in leaving
        if uuid in candidate_uuids and is_coming:
            coming.append(verdict.gpu)
    return fits(request, coming)


def fits(request: Selection, gpus: Sequence[Gpu]) -> bool:
    """Return whether the request can have all its GPUs of these."""
    return any(capacity(group) >= request.nb_gpus for group in request.groups(gpus))


def capacity(gpus: Collection[Gpu]) -> int:
    """Return how many of these devices one claim can hold: several, or one MIG instance if there is nothing else."""
    number = len(_together(gpus))
    if number == 0 and gpus:
        return 1
    return number


def _together(gpus: Iterable[Gpu]) -> list[Gpu]:
    """Return those of these devices of which one claim can hold several.

    CUDA shows a process at most one MIG instance, and with many driver versions no whole GPU together with it. A
    virtual function is a part of its GPU, so no claim holds it beside that.
    """
    others = [gpu for gpu in gpus if not gpu.is_mig_instance]
    whole = {gpu.whole for gpu in others if not gpu.is_piece}
    return [gpu for gpu in others if not (gpu.is_piece and gpu.whole in whole)]


_MOST_SETS = 200
"""Sets to compare, while other claims wait. Hosts with 8 GPUs have fewer, and so have those with 16 that are alike."""


def choose(
    verdicts: Iterable[GpuVerdict],
    nb_gpus: int,
    *,
    near_nodes: frozenset[int] | None = None,
    last: Collection[str] = (),
    groups: Callable[[Sequence[Gpu]], list[list[Gpu]]] | None = None,
    prefer: Iterable[re.Pattern[str]] = (),
) -> tuple[Gpu, ...] | None:
    """Pick ``nb_gpus`` of the free devices: of the first model in ``prefer`` of which enough are free, else of all.

    The criteria, most important first: few GPUs that are to be taken ``last``; whole GPUs rather than a MIG instance;
    few GPUs with an active display or a graphics process; few NUMA nodes; many NVLink connections among the chosen
    GPUs; many GPUs on the ``near_nodes``; nodes with few free GPUs, so that larger requests still find room on the
    other nodes; low indices. GPUs whose NUMA node is unknown count as one more node.

    Args:
        verdicts: of :func:`~safe_gpu.selection.verdicts.judge`; only the free ones count.
        nb_gpus: how many.
        near_nodes: NUMA nodes of the CPUs that this process may use; None: no preference.
        last: UUIDs of the devices that are taken only if the others are too few.
        groups: divides the devices into sets, of one of which all must be.
        prefer: what the names of models match, as from :func:`~safe_gpu.settings.values.model_pattern`.

    Returns:
        The devices in index order, or None if fewer are free.
    """
    free = [verdict.gpu for verdict in verdicts if verdict.free]
    if nb_gpus > capacity(free):
        return None
    for pattern in prefer:
        of_model = [gpu for gpu in free if gpu.uuid not in last and pattern.match(gpu.name)]
        chosen = _best_set(of_model, nb_gpus, near_nodes=near_nodes, groups=groups)
        if chosen is not None:
            return chosen
    return _best_set(free, nb_gpus, near_nodes=near_nodes, last=last, groups=groups)


def _best_set(
    free: Collection[Gpu],
    nb_gpus: int,
    *,
    near_nodes: frozenset[int] | None,
    last: Collection[str] = (),
    groups: Callable[[Sequence[Gpu]], list[list[Gpu]]] | None,
) -> tuple[Gpu, ...] | None:
    """As :func:`choose`, of devices that are free, of any model."""
    if nb_gpus > capacity(free):
        return None
    together = _together(free)
    pool = sorted(together, key=_position)
    if nb_gpus == 1:
        pool = sorted(free, key=_position)
    parts = [pool]
    if groups is not None and nb_gpus > 1:  # one GPU is near itself
        parts = groups(pool)
    choice = _Choice(pool, nb_gpus, near_nodes=near_nodes or frozenset(), last=last, beside=together or free)
    sets: list[tuple[Gpu, ...]] = []
    for part in parts:
        sets += choice.sets(part)
    return min(sets, key=choice.rank, default=None)


def in_listed_order(
    gpus: Iterable[Gpu], request: Selection, visible_limit: VisibleLimit | None = None
) -> tuple[Gpu, ...]:
    """Return chosen GPUs in the order in which CUDA is to number them: that of ``only``, else that of the variable
    which limits this process, else as they are. An initialised library keeps its own order, and so does one whose
    variable has none.

    Args:
        gpus: of one vendor, in index order, as from :func:`choose`. Those that one entry of a list names stay so.
    """
    chosen = tuple(gpus)
    if not all(VENDORS[gpu.vendor].keeps_order for gpu in chosen):
        return chosen
    names: Sequence[str] = request.value_of("only") or ()
    if visible_limit is not None and (visible_limit.frozen or not names):
        names = visible_limit.uuids
    return tuple(sorted(chosen, key=lambda gpu: _place_in(names, gpu)))


def _place_in(names: Sequence[str], gpu: Gpu) -> int:
    """Return the number of the first of these names that means the GPU."""
    for place, name in enumerate(names):
        if names_device(name, gpu):
            return place
    return len(names)


class _Rank(NamedTuple):
    """What sets of GPUs are compared by, the most important first. The lowest is the best.

    Attributes:
        last: GPUs that are to be taken last.
        instances: MIG instances.
        drawing: GPUs with an active display or a graphics process.
        nodes: NUMA nodes.
        links: NVLink connections among the GPUs, less than 0.
        near: GPUs on nodes of this process's CPUs, less than 0.
        beside: free GPUs on the nodes of the set.
        positions: see :func:`_position`.
    """

    last: int
    instances: int
    drawing: int
    nodes: int
    links: int
    near: int
    beside: int
    positions: list[tuple[int, int]]


class _Choice:
    """The sets of GPUs that are compared for one claim, and what they are compared by.

    Args:
        pool: the GPUs to choose from, in index order.
        near_nodes: NUMA nodes to prefer.
        last: UUIDs of the GPUs to take last.
        beside: the GPUs that larger requests could have.
    """

    def __init__(
        self,
        pool: Sequence[Gpu],
        nb_gpus: int,
        *,
        near_nodes: frozenset[int],
        last: Collection[str],
        beside: Collection[Gpu],
    ) -> None:
        self._nb_gpus = nb_gpus
        self._near_nodes = near_nodes
        self._last = {gpu.uuid for gpu in pool if gpu.uuid in last}
        self._instances = {gpu.uuid for gpu in pool if gpu.is_mig_instance}
        self._drawing = {gpu.uuid for gpu in pool if gpu.draws}
        self._links = linked((gpu.uuid, gpu.nvlink_peers) for gpu in pool)
        self._free_on = Counter(gpu.numa_node for gpu in beside)

    def rank(self, gpus: Sequence[Gpu]) -> _Rank:
        """Return what a set is compared by, finished or not."""
        uuids = {gpu.uuid for gpu in gpus}
        nodes = {gpu.numa_node for gpu in gpus}
        beside = sum(self._free_on[node] for node in nodes)
        if len(gpus) < self._nb_gpus:
            # A set that still grows takes the node with the most free GPUs, so that it needs few nodes.
            beside = -beside
        return _Rank(
            last=len(uuids & self._last),
            instances=len(uuids & self._instances),
            drawing=len(uuids & self._drawing),
            nodes=len(nodes),
            links=-sum(len(uuids & self._links[uuid]) for uuid in uuids),
            near=-sum(gpu.numa_node in self._near_nodes for gpu in gpus),
            beside=beside,
            positions=[_position(gpu) for gpu in gpus],
        )

    def sets(self, part: Sequence[Gpu]) -> list[tuple[Gpu, ...]]:
        """Return the sets to compare, of a part of the pool; each in index order.

        Of GPUs of one kind the first are taken, since other sets of as many of them differ only in indices. If there
        are too many sets still, one is grown from each NUMA node, the best GPU first, besides those that are compared.
        """
        kinds: dict[object, list[Gpu]] = {}
        for gpu in part:
            kinds.setdefault(self._kind(gpu), []).append(gpu)
        found = list(islice(_divided(self._nb_gpus, list(kinds.values())), _MOST_SETS + 1))
        if len(found) > _MOST_SETS:
            for node in {gpu.numa_node for gpu in part}:
                found.append(self._grown(node, part))
        return [tuple(sorted(gpus, key=_position)) for gpus in found]

    def _kind(self, gpu: Gpu) -> object:
        """Return a key. GPUs with equal keys are interchangeable: only their indices differ."""
        connected = set(self._links[gpu.uuid])
        if connected:
            connected.add(gpu.uuid)
        return (
            gpu.numa_node,
            gpu.uuid in self._last,
            gpu.uuid in self._instances,
            gpu.uuid in self._drawing,
            frozenset(connected),
        )

    def _grown(self, node: int | None, part: Sequence[Gpu]) -> list[Gpu]:
        """Return a set that begins with the best GPU of a NUMA node, to which the best of the others is added again and
        again."""
        on_node = [gpu for gpu in part if gpu.numa_node == node]
        chosen = [min(on_node, key=lambda gpu: self.rank([gpu]))]
        while len(chosen) < self._nb_gpus:
            left = [gpu for gpu in part if gpu not in chosen]
            chosen.append(min(left, key=lambda gpu: self.rank([*chosen, gpu])))
        return chosen


def _divided(count: int, kinds: Sequence[Sequence[Gpu]]) -> Iterator[list[Gpu]]:
    """Yield every way to take ``count`` GPUs, of each kind the first ones."""
    if count == 0:
        yield []
        return
    if not kinds:
        return
    first, *others = kinds
    least = max(0, count - sum(len(kind) for kind in others))
    for number in range(min(count, len(first)), least - 1, -1):
        for rest in _divided(count - number, others):
            yield [*first[:number], *rest]


def _position(gpu: Gpu) -> tuple[int, int]:
    """Return where a device stands in index order: its index, and the number of a MIG instance."""
    if gpu.mig_instance is None:
        return gpu.index, -1
    return gpu.index, gpu.mig_instance


class _Shares(NamedTuple):
    """GPUs for a share.

    Attributes:
        shared: how many of them are shared already.
        room: bytes that are left on these.
    """

    gpus: tuple[Gpu, ...]
    shared: int
    room: int


def choose_shares(
    verdicts: Iterable[GpuVerdict],
    request: Selection,
    rooms: Mapping[str, int],
    *,
    near_nodes: frozenset[int] | None = None,
    last: Collection[str] = (),
) -> tuple[Gpu, ...] | None:
    """Return the GPUs for a share: as many that are shared already as can be, those with the least room first; then as
    :func:`choose`, whose arguments these are.

    Args:
        rooms: UUID -> bytes that are left, of the GPUs that are shared.
    """
    free = [verdict.gpu for verdict in verdicts if verdict.free]
    best: _Shares | None = None
    for group in request.groups(free):
        found = _shares_of(group, request, rooms, near_nodes=near_nodes, last=last)
        if found is None:
            continue
        if best is None or (found.shared, -found.room) > (best.shared, -best.room):
            best = found
    if best is None:
        return None
    return best.gpus


def _shares_of(
    group: Sequence[Gpu],
    request: Selection,
    rooms: Mapping[str, int],
    *,
    near_nodes: frozenset[int] | None,
    last: Collection[str],
) -> _Shares | None:
    """Return the GPUs for a share among those of one group; None if they are too few."""
    shared = [gpu for gpu in group if gpu.uuid in rooms and gpu.uuid not in last]
    shared.sort(key=lambda gpu: (rooms[gpu.uuid], _position(gpu)))
    chosen = shared[: request.nb_gpus]
    room = sum(rooms[gpu.uuid] for gpu in chosen)
    missing = request.nb_gpus - len(chosen)
    if missing == 0:
        return _Shares(tuple(sorted(chosen, key=_position)), len(chosen), room)
    others = [GpuVerdict(gpu, "free") for gpu in group if gpu not in chosen]
    rest = choose(others, missing, near_nodes=near_nodes, last=last, prefer=request.preferred)
    if rest is None:
        return None
    return _Shares(tuple(sorted([*chosen, *rest], key=_position)), len(chosen), room)
