"""The best N of the GPUs that are free. Pure, and fast enough to run under a lock on a 16-GPU host."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import combinations, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .devices import Gpu, GpuVerdict

__all__ = ["capacity", "choose"]

_EXACT_LIMIT = 192
"""Sets compared at most, well under a millisecond; hosts of 8 GPUs, and of 16 behind NVSwitch, need fewer."""

_Score = tuple[int, int, int, int]


def capacity(gpus: Collection[Gpu]) -> int:
    """How many of these devices one process can hold: whole GPUs, or else a single MIG instance.

    CUDA shows a process one MIG instance, and on many driver versions no whole GPU beside it.
    """
    whole = sum(not gpu.is_mig_instance for gpu in gpus)
    return whole or min(len(gpus), 1)


def choose(
    verdicts: Iterable[GpuVerdict], nb_gpus: int, *, near: frozenset[int] | None = None
) -> tuple[Gpu, ...] | None:
    """Pick ``nb_gpus`` of the free devices.

    In falling order of weight: few GPUs with an active display; whole GPUs rather than a MIG instance; few NUMA nodes;
    many NVLink connections among the chosen; many GPUs on the ``near`` nodes; nodes that have few free GPUs, so that
    large requests still find room elsewhere; low indices. GPUs of unknown NUMA node count as one node of their own.

    Args:
        verdicts: of :func:`~safe_gpu.selection.judge`; only the free ones count.
        nb_gpus: how many.
        near: NUMA nodes of the CPUs that this process may use; None: no preference.

    Returns:
        The devices in index order, or None when fewer are free.
    """
    free = [verdict.gpu for verdict in verdicts if verdict.free]
    if nb_gpus > capacity(free):
        return None
    whole = [gpu for gpu in free if not gpu.is_mig_instance]
    pool = whole or free
    return _Chooser(sorted(pool, key=_position), nb_gpus, near or frozenset()).best()


def _position(gpu: Gpu) -> tuple[int, int]:
    return gpu.index, -1 if gpu.mig_instance is None else gpu.mig_instance


class _Chooser:
    """One choice among ``pool`` (in index order). Sets of GPUs are bit masks over positions in the pool."""

    def __init__(self, pool: Sequence[Gpu], count: int, near: frozenset[int]) -> None:
        self.pool = pool
        self.count = count
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
        # GPUs without a display come first: either they are enough, or all of them are taken.
        plain = sum(1 << position for position, gpu in enumerate(self.pool) if not gpu.display_active)
        everything = (1 << len(self.pool)) - 1
        if plain.bit_count() >= self.count:
            taken, spare = 0, plain
        else:
            taken, spare = plain, everything & ~plain
        best = self._least(islice(self._sets(taken, spare, self.count - taken.bit_count()), _EXACT_LIMIT))
        return tuple(self.pool[position] for position in _positions(best))

    def _least(self, sets: Iterator[int]) -> int:
        best = next(sets)
        lowest = self._score(best)
        for mask in sets:
            score = self._score(mask)
            apart = mask ^ best
            # Equally good: the one that has the lowest position in which they differ.
            if score < lowest or (score == lowest and mask & apart & -apart):
                best, lowest = mask, score
        return best

    def _score(self, mask: int) -> _Score:
        """Lower is better, in the order of the words in :func:`choose`."""
        nodes = room = links = 0
        for members in self.nodes.values():
            if members & mask:
                nodes += 1
                room += members.bit_count()
        if self.linked:
            rest = mask
            while rest:
                links += (self.links[rest.bit_length() - 1] & mask).bit_count()
                rest ^= 1 << rest.bit_length() - 1
        return nodes, -links, -(mask & self.near).bit_count(), room

    def _sets(self, taken: int, spare: int, missing: int) -> Iterator[int]:
        """Sets worth comparing: ``taken`` and ``missing`` of ``spare``, on the fewest nodes; a good one comes first."""
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
        """A good set, built GPU by GPU, each time with the most links to those already there."""
        mask = taken
        for _ in range(missing):
            mask |= 1 << max(
                _positions(spare & ~mask),
                key=lambda position: ((self.links[position] & (mask or spare)).bit_count(), -position),
            )
        return mask

    def _twins(self, relevant: int, spare: int) -> list[list[int]]:
        """``spare`` in groups of GPUs that can stand in for each other: one node, the same links to everyone else.

        Which members of a group are taken makes no difference but for their indices, so only how many is tried.
        """
        groups: list[list[int]] = []
        for position in _positions(spare):
            bit = 1 << position
            for group in groups:
                first = group[0].bit_length() - 1
                apart = relevant & ~(bit | group[0])
                if (
                    self.pool[first].numa_node == self.pool[position].numa_node
                    and self.links[first] & apart == self.links[position] & apart
                ):
                    group.append(bit)
                    break
            else:
                groups.append([bit])
        return groups


def _pick(groups: Sequence[Sequence[int]], missing: int) -> Iterator[int]:
    """Every way to take ``missing`` members of the groups, the first members of each."""
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
