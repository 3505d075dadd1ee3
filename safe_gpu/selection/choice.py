"""The best N of the free GPUs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any

from ..gpus.devices import Gpu, GpuVerdict
from .possible import capacity

if TYPE_CHECKING:
    import re

    from .request import Selection

_EXACT_LIMIT = 192
"""Maximum number of sets to compare, which takes well under a millisecond.

Hosts with 8 GPUs, and hosts with 16 GPUs behind NVSwitch, have fewer sets.
"""

_Score = tuple[int, int, int, int]

_Rank = tuple[Any, ...]


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

    The criteria, most important first: few GPUs that are to be taken ``last``; few GPUs with an active display or a
    graphics process; whole GPUs rather than a MIG instance; few NUMA nodes; many NVLink connections among the chosen
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
    if groups is not None and nb_gpus > 1:
        sets = (
            choose([GpuVerdict(gpu, "free") for gpu in group], nb_gpus, near=near, last=last) for group in groups(free)
        )
        nodes = [gpu.numa_node for gpu in free]
        return min(filter(None, sets), key=lambda found: _rank(found, nodes, near or (), last), default=None)
    if last:
        sound = [gpu for gpu in free if gpu.uuid not in last]
        if nb_gpus <= capacity(sound):  # also if that leaves MIG instances only
            free, last = sound, ()
    whole = [gpu for gpu in free if not gpu.is_mig_instance]
    pool = whole or free
    if nb_gpus == 1:
        return (_best_one(pool, near or frozenset()),)
    return _Chooser(sorted(pool, key=_position), nb_gpus, near or frozenset(), last).best()


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


def _best_one(pool: Sequence[Gpu], near: frozenset[int]) -> Gpu:
    """Return the best by the same criteria, for a claim of one GPU, as most are: no sets have to be compared."""
    nodes = [gpu.numa_node for gpu in pool]

    def rank(gpu: Gpu) -> tuple[object, ...]:
        return gpu.draws, gpu.numa_node not in near, nodes.count(gpu.numa_node), _position(gpu)

    return min(pool, key=rank)


def _rank(gpus: Sequence[Gpu], nodes: Sequence[int | None], near: Collection[int], last: Collection[str]) -> _Rank:
    """Return the rank of a set by the criteria of :func:`choose`; ``nodes`` are those of all free GPUs."""
    used = {gpu.numa_node for gpu in gpus}
    uuids = {gpu.uuid for gpu in gpus}
    return (
        sum(gpu.uuid in last for gpu in gpus),
        sum(gpu.draws for gpu in gpus),
        len(used),
        -sum(len(uuids.intersection(gpu.nvlink_peers)) for gpu in gpus),
        -sum(gpu.numa_node in near for gpu in gpus),
        sum(map(nodes.count, used)),
        *map(_position, gpus),
    )


def _position(gpu: Gpu) -> tuple[int, int]:
    return gpu.index, -1 if gpu.mig_instance is None else gpu.mig_instance


class _Chooser:
    """One choice among ``pool`` (in index order). A set of GPUs is a bit mask of positions in the pool."""

    def __init__(self, pool: Sequence[Gpu], count: int, near: frozenset[int], last: Collection[str]) -> None:
        self.pool = pool
        self.count = count
        self.last = last
        self.nodes: dict[int | None, int] = {}
        by_uuid: dict[str, int] = {}
        for position, gpu in enumerate(pool):
            self.nodes[gpu.numa_node] = self.nodes.get(gpu.numa_node, 0) | 1 << position
            by_uuid[gpu.uuid] = position
        self.near = sum(mask for node, mask in self.nodes.items() if node in near)
        self.links = [0] * len(pool)
        for position, gpu in enumerate(pool):
            for peer in gpu.nvlink_peers:
                other = by_uuid.get(peer, position)
                if other != position:
                    self.links[position] |= 1 << other
                    self.links[other] |= 1 << position
        self.linked = any(self.links)

    def best(self) -> tuple[Gpu, ...]:
        # Each rank is taken whole before the next one is started: first GPUs that are neither bad nor draw.
        ranks = [0, 0, 0, 0]
        for position, gpu in enumerate(self.pool):
            ranks[2 * (gpu.uuid in self.last) + gpu.draws] |= 1 << position
        taken, spare = 0, ranks[0]
        for rank in ranks[1:]:
            if (taken | spare).bit_count() >= self.count:
                break
            taken, spare = taken | spare, rank
        sets = islice(self._sets(taken, spare, self.count - taken.bit_count()), _EXACT_LIMIT)
        # If the scores are equal, the set with the lower indices wins.
        best = min(sets, key=lambda mask: (self._score(mask), *_positions(mask)))
        return tuple(self.pool[position] for position in _positions(best))

    def _score(self, mask: int) -> _Score:
        """Return the score of a set by the criteria of :func:`choose`; lower is better."""
        nodes = room = links = 0
        for members in self.nodes.values():
            if members & mask:
                nodes += 1
                room += members.bit_count()
        if self.linked:
            links = sum((self.links[position] & mask).bit_count() for position in _positions(mask))
        return nodes, -links, -(mask & self.near).bit_count(), room

    def _sets(self, taken: int, spare: int, missing: int) -> Iterator[int]:
        """Yield the sets to compare: ``taken`` and ``missing`` GPUs of ``spare``, on the fewest nodes.

        A good set comes first, because :data:`_EXACT_LIMIT` may end the search early.
        """
        if not missing:
            yield taken
            return
        started = [members for members in self.nodes.values() if members & taken]
        fresh = [members for members in self.nodes.values() if not members & taken and members & spare]
        fresh.sort(key=lambda members: (-(members & spare).bit_count(), not members & self.near, members.bit_count()))
        room = sum((members & spare).bit_count() for members in started)
        extra = 0
        while room < missing:
            room += (fresh[extra] & spare).bit_count()
            extra += 1
        yield self._greedy(taken, spare & sum((*started, *fresh[:extra])), missing)
        twins = self._twins(taken | spare, spare)
        for opened in combinations(fresh, extra):
            inside = spare & sum((*started, *opened))
            if inside.bit_count() >= missing:
                groups = [group for group in twins if group[0] & inside]
                for mask in _pick(groups, missing):
                    yield taken | mask

    def _greedy(self, taken: int, spare: int, missing: int) -> int:
        """Return a good set: each step adds the GPU with the most links to those already in the set."""
        mask = taken
        for _ in range(missing):
            mask |= 1 << max(
                _positions(spare & ~mask),
                key=lambda position: ((self.links[position] & (mask or spare)).bit_count(), -position),
            )
        return mask

    def _twins(self, relevant: int, spare: int) -> list[list[int]]:
        """Return ``spare`` in groups of interchangeable GPUs: on the same node, with the same links to all others.

        Sets that take equally many members of a group differ only in indices, so only the numbers are tried.
        """
        groups: list[list[int]] = []
        for position in _positions(spare):
            bit = 1 << position
            for group in groups:
                first = group[0].bit_length() - 1
                same_node = self.pool[first].numa_node == self.pool[position].numa_node
                if same_node and not (self.links[first] ^ self.links[position]) & relevant & ~(bit | group[0]):
                    group.append(bit)
                    break
            else:
                groups.append([bit])
        return groups


def _pick(groups: Sequence[Sequence[int]], missing: int) -> Iterator[int]:
    """Yield every way to divide ``missing`` among the groups; from each group the first members are taken."""
    if not groups:
        if not missing:
            yield 0
        return
    rest = sum(map(len, groups[1:]))
    for number in range(min(missing, len(groups[0])), max(missing - rest, 0) - 1, -1):
        head = sum(groups[0][:number])
        for tail in _pick(groups[1:], missing - number):
            yield head | tail


def _positions(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
