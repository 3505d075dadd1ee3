"""What this host can ever give a request, and the best of the GPUs that are free now. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import MIG_IS_ON, Gpu, GpuVerdict, Holder, HostSnapshot, VisibleLimit
from ..gpus.vendors import VENDORS
from ..settings.values import is_index, unknown_names
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

    def why_not(gpu: Gpu) -> str:
        if lost and gpu.lost:
            return why_outside(gpu, request, visible_limit)
        return _why_never(gpu, snapshot, request, visible_limit, rules)

    gpus = snapshot.gpus if request.nb_gpus == 1 else snapshot.physical
    return tuple([gpu for gpu in gpus if not why_not(gpu)])


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
    for argument in ("only", "exclude"):
        for name in unknown_names(request.value_of(argument) or (), snapshot):
            kind, inventory = VENDORS[snapshot.vendor].title, _inventory(snapshot.gpus, by_uuid=not is_index(name))
            problem = f"{style.setting(argument, name)} names no single {kind} GPU of this host, which has {inventory}"
            raise UnsatisfiableRequestError(f"{problem}{_unread_instances(snapshot)}", value=name)
    holders: Mapping[str, Holder] = {}
    reasons = {gpu: _why_never(gpu, snapshot, request, None, rules) for gpu in snapshot.gpus}
    left = [gpu for gpu in reasons if not reasons[gpu]]
    problem = _too_few(request.nb_gpus, left, snapshot, reasons) or _too_far_apart(request, left)
    inside = left if visible_limit is None else [gpu for gpu in left if gpu.uuid in visible_limit]
    if not problem and visible_limit is not None and not fits(request, inside):
        holders = claimed()
        hint = fence_hint(judge(snapshot, request, Known(holders, rules=rules)), visible_limit)
        way_out = f", or set {visible_limit.lift} to disregard the variable" if visible_limit.lift else ""
        problem = f"{hint}: ask for its GPUs only{way_out}{_unread_instances(snapshot)}"
    if problem:
        asked = "1 GPU is" if request.nb_gpus == 1 else f"{request.nb_gpus} GPUs are"
        verdicts = judge(snapshot, request, Known(holders, visible_limit, rules=rules))
        raise UnsatisfiableRequestError(f"{asked} asked for, but {problem}", value=request.nb_gpus, verdicts=verdicts)


def _too_far_apart(request: Selection, left: Sequence[Gpu]) -> str:
    """Return why these GPUs do not suffice together, although there are enough of them."""
    most = max(map(capacity, request.groups(left)), default=0)
    if most >= request.nb_gpus:
        return ""
    if request.value_of("near") == "numa" and (unknown := [gpu.label for gpu in left if gpu.numa_node is None]):
        return f"the NUMA node of GPU {gpu_ranges(unknown)} is not known: leave {style.option('near')} out"
    return f"{f'only {most}' if most > 1 else 'no two'} of this host are {request.together}: ask for fewer"


def _why_never(gpu: Gpu, snapshot: HostSnapshot, request: Selection, limit: VisibleLimit | None, rules: Rules) -> str:
    """Return why the request can never get the device: nobody can claim it, it is outside, or whether it is free or has
    the memory will never be known."""
    watchable = gpu.processes_supported or snapshot.shared_display or rules.lists_optional
    never = why_unusable(gpu) or ("" if watchable else UNWATCHABLE)
    if never or (limit is None and not request.conditions):
        return never
    return why_outside(gpu, request, limit) or request.why_unknowable(gpu)


def _too_few(nb_gpus: int, left: Sequence[Gpu], snapshot: HostSnapshot, reasons: Mapping[Gpu, str]) -> str:
    """Return why the devices in ``left`` are fewer than ``nb_gpus``; "" if they suffice."""
    most = capacity(left)
    if most >= nb_gpus:
        return ""
    total = len(snapshot.physical)
    gpus = plural(total, f"{VENDORS[snapshot.vendor].title} GPU")
    if any(gpu.is_mig_instance for gpu in left):
        text = f"CUDA shows a process one MIG instance, and no whole GPU beside it: ask for {most}"
        if most < len(left):
            text += f"{', or for 1' if most > 1 else ''} in each of up to {len(left)} processes"
        return text
    if total < nb_gpus:
        return f"this host has only {gpus}: ask for fewer" if total else "this host has none"
    labels = grouped((gpu.label, reason) for gpu, reason in reasons.items() if reason)
    listed = "; ".join(f"GPU {gpu_ranges(labels[reason])}: {reason}" for reason in labels)
    return f"only {most} of the {gpus} of this host can be claimed ({listed})" if most else f"none fits ({listed})"


def _inventory(gpus: Sequence[Gpu], *, by_uuid: bool) -> str:
    if by_uuid:
        return ", ".join(f"{gpu.label} ({gpu.uuid})" for gpu in gpus) or "none"
    return f"GPU {gpu_ranges(gpu.label for gpu in gpus)}" if gpus else "none"


def _unread_instances(snapshot: HostSnapshot) -> str:
    """Return on which GPU this driver does not read the MIG instances, one of which may have been meant, and why."""
    found = (gpu for gpu in snapshot.gpus if gpu.mig_enabled and gpu.unusable != MIG_IS_ON)
    return next((f"; GPU {gpu.label}: {gpu.unusable}" for gpu in found), "")


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
    possible = (verdict for verdict in verdicts if verdict.gpu.uuid in candidate_uuids)
    coming = [one.gpu for one in possible if one.free or one.state == "claimed" or one.gpu.uuid in leaving]
    return fits(request, coming)


def fits(request: Selection, gpus: Sequence[Gpu]) -> bool:
    """Return whether the request can have all its GPUs of these."""
    return any(capacity(group) >= request.nb_gpus for group in request.groups(gpus))


def capacity(gpus: Collection[Gpu]) -> int:
    """Return how many of these devices one claim can hold: several, or one MIG instance if there is nothing else."""
    return len(_together(gpus)) or min(len(gpus), 1)


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
    near: frozenset[int] | None = None,
    last: Collection[str] = (),
    groups: Callable[[Sequence[Gpu]], list[list[Gpu]]] | None = None,
    prefer: Iterable[re.Pattern[str]] = (),
) -> tuple[Gpu, ...] | None:
    """Pick ``nb_gpus`` of the free devices: of the first model in ``prefer`` of which enough are free, else of all.

    The criteria, most important first: few GPUs that are to be taken ``last``; whole GPUs rather than a MIG instance;
    few GPUs with an active display or a graphics process; few NUMA nodes; many NVLink connections among the chosen
    GPUs; many GPUs on the ``near`` nodes; nodes with few free GPUs, so that larger requests still find room on the
    other nodes; low indices. GPUs whose NUMA node is unknown count as one more node.

    Args:
        verdicts: of :func:`~safe_gpu.selection.verdicts.judge`; only the free ones count.
        nb_gpus: how many.
        near: NUMA nodes of the CPUs that this process may use; None: no preference.
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
        model = [gpu for gpu in free if gpu.uuid not in last and pattern.match(gpu.name)]
        found = choose([GpuVerdict(gpu, "free") for gpu in model], nb_gpus, near=near, groups=groups)
        if found is not None:
            return found
    together = _together(free)
    room = [gpu.numa_node for gpu in together or free]
    drawbacks = {gpu.uuid: (gpu.uuid in last, gpu.mig_parent is not None, gpu.draws) for gpu in free}
    if nb_gpus == 1:

        def rank_alone(gpu: Gpu) -> tuple[Any, ...]:
            """Return the rank of one GPU, without the criteria that are equal for all sets of one."""
            node = gpu.numa_node
            return (*drawbacks[gpu.uuid], node not in (near or ()), room.count(node), *_position(gpu))

        return (min(free, key=rank_alone),)
    pool = sorted(together, key=_position)
    links = linked([(gpu.uuid, gpu.nvlink_peers) for gpu in pool])

    def rank(gpus: Sequence[Gpu]) -> tuple[Any, ...]:
        """Return the rank of a set by the criteria above; the lowest is the best."""
        uuids = {gpu.uuid for gpu in gpus}
        nodes = {gpu.numa_node for gpu in gpus}
        return (
            *map(sum, zip(*map(drawbacks.__getitem__, uuids), strict=True)),
            len(nodes),
            -sum([len(uuids & links[uuid]) for uuid in uuids]),
            -sum([gpu.numa_node in (near or ()) for gpu in gpus]),
            # A set that still grows takes the node with the most free GPUs, so that it needs few nodes.
            sum(map(room.count, nodes)) * (1 if len(gpus) == nb_gpus else -1),
            *map(_position, gpus),
        )

    def kind(gpu: Gpu) -> tuple[object, ...]:
        """Return a key that is equal for GPUs which differ in nothing but their index: neither in a criterion nor in a
        link to a third."""
        linked_to = links[gpu.uuid]
        return gpu.numa_node, drawbacks[gpu.uuid], frozenset(linked_to and linked_to | {gpu.uuid})

    parts = [pool] if groups is None else groups(pool)
    return min((found for part in parts for found in _sets(part, nb_gpus, kind, rank)), key=rank, default=None)


def choose_shares(
    verdicts: Iterable[GpuVerdict],
    request: Selection,
    rooms: Mapping[str, int],
    *,
    near: frozenset[int] | None = None,
    last: Collection[str] = (),
) -> tuple[Gpu, ...] | None:
    """Return the GPUs for a share: as many that are shared already as can be, those with the least room first; then as
    :func:`choose`, whose arguments these are.

    Args:
        rooms: UUID -> bytes that are left, of the GPUs that are shared.
    """
    best: tuple[Any, ...] = ()
    for group in request.groups([verdict.gpu for verdict in verdicts if verdict.free]):
        shared = [gpu for gpu in group if gpu.uuid in rooms and gpu.uuid not in last]
        first = sorted(shared, key=lambda gpu: (rooms[gpu.uuid], _position(gpu)))[: request.nb_gpus]
        missing = request.nb_gpus - len(first)
        rest: tuple[Gpu, ...] | None = ()
        if missing:
            others = [GpuVerdict(gpu, "free") for gpu in group if gpu not in first]
            rest = choose(others, missing, near=near, last=last, prefer=request.preferred)
        if rest is not None:
            chosen = tuple(sorted((*first, *rest), key=_position))
            best = max(best, (len(first), -sum(rooms[gpu.uuid] for gpu in first), chosen), key=lambda one: one[:2])
    return best[2] if best else None


def _position(gpu: Gpu) -> tuple[int, int]:
    return gpu.index, -1 if gpu.mig_instance is None else gpu.mig_instance


def _sets(
    pool: Sequence[Gpu], count: int, kind: Callable[[Gpu], object], rank: Callable[[Sequence[Gpu]], tuple[Any, ...]]
) -> Iterator[tuple[Gpu, ...]]:
    """Yield the sets of ``count`` GPUs to compare, of a pool in index order.

    Of GPUs of one kind the first are taken, since other sets of as many of them differ only in indices. If there are
    too many sets still, one is grown from each NUMA node, the best GPU first, besides those that are compared.
    """
    kinds: dict[object, list[Gpu]] = {}
    for gpu in pool:
        kinds.setdefault(kind(gpu), []).append(gpu)
    found = list(islice(_divided(count, [*kinds.values()]), _MOST_SETS + 1))
    if len(found) > _MOST_SETS:
        for node in {gpu.numa_node for gpu in pool}:
            chosen: list[Gpu] = []
            for _ in range(count):
                left = [gpu for gpu in pool if gpu not in chosen and (chosen or gpu.numa_node == node)]
                chosen.append(min(left, key=lambda gpu: rank([*chosen, gpu])))
            found.append(chosen)
    yield from (tuple(sorted(chosen, key=_position)) for chosen in found)


def _divided(count: int, kinds: Sequence[Sequence[Gpu]]) -> Iterator[list[Gpu]]:
    """Yield every way to take ``count`` GPUs, of each kind the first ones."""
    if not kinds or not count:
        if not count:
            yield []
        return
    first, *others = kinds
    least = max(0, count - sum(map(len, others)))
    for number in range(min(count, len(first)), least - 1, -1):
        for rest in _divided(count - number, others):
            yield [*first[:number], *rest]
