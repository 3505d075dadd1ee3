"""The best N of the free GPUs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..gpus.devices import Gpu, GpuVerdict
from .possible import capacity

if TYPE_CHECKING:
    import re

    from .request import Selection

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
        prefer: what the names of models match, as from :func:`~safe_gpu.selection.gpu_names.model_pattern`.

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
    whole = [gpu for gpu in free if not gpu.is_mig_instance]
    room = Counter(gpu.numa_node for gpu in whole or free)
    pool = sorted(whole if nb_gpus > 1 else free, key=_position)
    drawbacks = {gpu.uuid: (gpu.uuid in last, gpu.is_mig_instance, gpu.draws) for gpu in pool}
    links = _links(pool)

    def rank(gpus: Sequence[Gpu]) -> tuple[Any, ...]:
        """Return the rank of a set by the criteria above; the lowest is the best."""
        uuids = {gpu.uuid for gpu in gpus}
        nodes = {gpu.numa_node for gpu in gpus}
        return (
            *map(sum, zip(*map(drawbacks.__getitem__, uuids), strict=True)),
            len(nodes),
            -sum(len(uuids & links[uuid]) for uuid in uuids),
            -sum(gpu.numa_node in (near or ()) for gpu in gpus),
            # A set that still grows takes the node with the most free GPUs, so that it needs few nodes.
            sum(room[node] for node in nodes) * (1 if len(gpus) == nb_gpus else -1),
            *map(_position, gpus),
        )

    def alike(one: Gpu, other: Gpu) -> bool:
        """Return whether two GPUs differ only in their index: in no criterion, and in no link to a third."""
        same = one.numa_node == other.numa_node and drawbacks[one.uuid] == drawbacks[other.uuid]
        return same and links[one.uuid] - {other.uuid} == links[other.uuid] - {one.uuid}

    parts = groups(pool) if groups is not None and nb_gpus > 1 else [pool]
    return min((found for part in parts for found in _sets(part, nb_gpus, alike, rank)), key=rank, default=None)


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


def _links(gpus: Sequence[Gpu]) -> dict[str, set[str]]:
    """Return the UUIDs that each GPU is linked to, or that are linked to it."""
    links: dict[str, set[str]] = {gpu.uuid: set() for gpu in gpus}
    for gpu in gpus:
        for peer in links.keys() & gpu.nvlink_peers:
            links[gpu.uuid].add(peer)
            links[peer].add(gpu.uuid)
    return links


def _sets(
    pool: Sequence[Gpu], count: int, alike: Callable[[Gpu, Gpu], bool], rank: Callable[[Sequence[Gpu]], tuple[Any, ...]]
) -> Iterator[tuple[Gpu, ...]]:
    """Yield the sets of ``count`` GPUs to compare, of a pool in index order.

    Of GPUs that are alike the first are taken, since other sets of as many of them differ only in indices. If there are
    too many sets still, one is grown from each NUMA node, the best GPU first, besides those that are compared.
    """
    kinds: list[list[Gpu]] = []
    for gpu in pool:
        kind = next((kind for kind in kinds if alike(kind[0], gpu)), None)
        if kind is None:
            kinds.append([gpu])
        else:
            kind.append(gpu)
    found = list(islice(_divided(count, kinds), _MOST_SETS + 1))
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
    if not kinds:
        if not count:
            yield []
        return
    first, *others = kinds
    least = max(0, count - sum(map(len, others)))
    for number in range(min(count, len(first)), least - 1, -1):
        for rest in _divided(count - number, others):
            yield [*first[:number], *rest]
