"""Who may go first without delaying anybody ahead (backfill). Pure.

Times are Unix seconds or any other clock, durations are seconds, and ``math.inf`` is "never". GPUs are named by
UUID, and their memory is in bytes. A request is held back by dates, not by counts of spare GPUs
or bytes: a count for each waiter allows several requests that together delay a waiter, and lets holders that overrun
starve the first waiter.
"""

import math
from bisect import bisect, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple

from ..coordination.queue import TicketRequest
from ..gpus.devices import Gpu, Holder, in_each_others_way
from ..gpus.windows import Spans, first_open
from .request import Selection
from .sharing import share_capacity

When = float | tuple[tuple[float, float], ...]
"""When a GPU is expected to be free: all of it at one time, or each part, as (time, bytes), at its own."""


def ready(when: When, share: float) -> float:
    """Return when that much of a GPU is expected to be free; ``math.inf`` bytes are all of it."""
    if not isinstance(when, tuple):
        return when
    if share == math.inf:
        return max(time for time, _ in when)
    room = 0.0
    for time, size in sorted(when):
        room += size
        if room >= share:
            return time
    return math.inf


def _after(when: When, share: float, end: float) -> When:
    """Return the same GPU once a request has taken the part that is free first, until ``end``."""
    if share == math.inf:
        return end
    parts = [(end, share)]
    for time, size in sorted(when if isinstance(when, tuple) else ((when, math.inf),)):
        taken = min(size, share)
        share -= taken
        if size > taken:
            parts.append((time, size - taken))
    return tuple(parts)


class BackfillRequest(NamedTuple):
    """What one request wants: ``nb`` of ``gpus``, for ``hold_for`` seconds (``math.inf``: for an unknown time).

    If ``groups`` is not None, all must be of one of these. ``share`` is how much of each GPU, ``math.inf`` is all.
    ``reserved`` says when GPUs are reserved for others. ``in_the_way`` says which devices are in the way of each other,
    of a GPU and its pieces (:func:`~safe_gpu.gpus.devices.in_each_others_way`).
    """

    nb: int
    gpus: frozenset[str]
    hold_for: float = math.inf
    groups: tuple[frozenset[str], ...] | None = None
    share: float = math.inf
    reserved: "Mapping[str, Spans] | None" = None
    in_the_way: Mapping[str, frozenset[str]] = MappingProxyType({})

    @classmethod
    def of(cls, asked: "TicketRequest", devices: "Iterable[Gpu]", reserved: "Mapping[str, Spans]") -> "BackfillRequest":
        """Return what a ticket asks for.

        Args:
            devices: of the host, with what the ticket's conditions need.
            reserved: when GPUs are reserved for others than the ticket's user.
        """
        selection, _ = Selection.from_ticket(asked.nb_gpus, asked.conditions)
        hold_for = math.inf if asked.hold_for is None else asked.hold_for
        shown = tuple(devices)
        wanted = cls(
            asked.nb_gpus,
            asked.gpus,
            hold_for,
            share=selection.share or math.inf,
            reserved=reserved,
            in_the_way=in_each_others_way(shown),
        )
        if not selection.together:
            return wanted
        found = selection.groups([gpu for gpu in shown if gpu.uuid in asked.gpus])
        return wanted._replace(groups=tuple(frozenset(gpu.uuid for gpu in group) for group in found))

    @property
    def _groups(self) -> tuple[frozenset[str], ...]:
        return (self.gpus,) if self.groups is None else self.groups

    def fits(self, gpus: Collection[str]) -> bool:
        """Return whether it can have all that it wants of these."""
        return any(len(group.intersection(gpus)) >= self.nb for group in self._groups)

    def without(self, gpus: Collection[str]) -> "BackfillRequest":
        """Return the same, but it cannot use these."""
        groups = self.groups and tuple(group.difference(gpus) for group in self.groups)
        return self._replace(gpus=self.gpus.difference(gpus), groups=groups)

    def never(self) -> "BackfillRequest":
        """Return one of the same GPUs that can never have enough of them."""
        return BackfillRequest(len(self.gpus) + 1, self.gpus, in_the_way=self.in_the_way)

    def earliest(self, free_at: Mapping[str, When]) -> tuple[float, list[str]]:
        """Return when enough of its GPUs are expected to be free, and the first that are; all where there never are
        enough."""
        best: tuple[float, list[str]] = math.inf, []
        for group in self._groups:
            ends = ((ready(free_at.get(gpu, math.inf), self.share), gpu) for gpu in group)
            first = sorted((self.first_open(end, [gpu]), gpu) for end, gpu in ends)[: max(0, self.nb)]
            if first and len(first) == self.nb and (not best[1] or first[-1][0] < best[0]):
                best = first[-1][0], [gpu for _, gpu in first]
        return best if best[1] else (math.inf, list(self.gpus))

    def first_open(self, start: float, gpus: Iterable[str]) -> float:
        """Return when it may take all these GPUs, from ``start`` on."""
        if not self.reserved:
            return start
        return max(first_open(start, self.hold_for, self.reserved.get(gpu, ())) for gpu in gpus)

    def wanted_at(self, moment: float) -> frozenset[str]:
        """Return those of its GPUs that are not reserved for others then, with what is in the way of these. From the
        others it keeps nobody."""
        wanted = self.gpus
        if self.reserved:
            spans = {gpu: self.reserved.get(gpu, ()) for gpu in self.gpus}
            wanted = frozenset(gpu for gpu in spans if not any(begin <= moment < end for begin, end in spans[gpu]))
        return wanted.union(*(self.in_the_way[gpu] for gpu in wanted & self.in_the_way.keys()))

    def taken(self, gpus: Iterable[str], free_at: Mapping[str, When], end: float) -> dict[str, When]:
        """Return when these GPUs, and what is in their way, are free once it has taken them until ``end``."""
        found: dict[str, When] = {}
        for gpu in gpus:
            found[gpu] = _after(free_at.get(gpu, math.inf), self.share, end)
            for other in self.in_the_way.get(gpu, ()):
                found[other] = max(end, ready(free_at.get(other, math.inf), math.inf))
        return found


def free_at(now: float, *, since: float, until: float | None) -> float:
    """Return when a claimed GPU is expected to be free, as its holder stated.

    A holder that overruns is due now, and so is one whose entry cannot be right (``until`` before ``since``).

    Args:
        until: None is unknown.
    """
    if until is None:
        return math.inf
    return now if until < since else max(now, until)


def when_free(gpu: "Gpu", holder: "Holder | None", now: float, *, free: bool) -> When:
    """Return when a GPU, or each part of it, is expected to be free by the word of who holds it: of a GPU whose pieces
    several claims hold, when the last of these ends.

    Args:
        free: whether a GPU that nobody holds is free now; else that is not known.
    """
    size = share_capacity(gpu) or math.inf
    if holder is None:
        return ((now if free else math.inf, size),)
    ends = [free_at(now, since=one.since or 0.0, until=one.until) for one in holder.each]
    if not holder.sharers:
        return ((max(ends), size),)
    parts = [(end, min(size, one.share or size)) for end, one in zip(ends, holder.sharers, strict=True)]
    room = size - sum(share for _, share in parts)
    return (*parts, (now, max(0.0, room)))


def dates(wants: Iterable[BackfillRequest], free_at: Mapping[str, When]) -> Iterator[tuple[BackfillRequest, float]]:
    """Yield each waiter, in the order of the queue, with the date from which on nobody may take one of its GPUs past
    it.

    That is the time at which enough of its GPUs are expected to be free. A waiter behind another that it cannot pass
    cannot start before the date of that one, so its own date is not earlier either.

    Args:
        wants: only the waiters that count; see :func:`open_gpus`.
        free_at: when each GPU, or each part of it, is expected to be free, not before now. What is missing never is.
    """
    earlier: list[tuple[BackfillRequest, float]] = []  # by date
    by_date = itemgetter(1)
    for want in wants:
        date = want.earliest(free_at)[0]
        for other, other_date in earlier[bisect(earlier, date, key=by_date) :]:
            if date < other_date < math.inf and not _may_pass(want, date, other, other_date):
                date = other_date
        insort(earlier, (want, date), key=by_date)
        yield want, date


def _may_pass(want: BackfillRequest, start: float, other: BackfillRequest, date: float) -> bool:
    """Return whether a request that starts then ends before the other's date, or does not need the other's GPUs."""
    return start + want.hold_for <= date or want.fits(want.gpus - other.wanted_at(start))


def open_gpus(
    want: BackfillRequest,
    ahead: Iterable[BackfillRequest],
    free: Collection[str],
    free_at: Mapping[str, When],
    now: float,
) -> frozenset[str]:
    """Return the free GPUs that a request may take. It may start if they fit it.

    A GPU that somebody ahead wants is open only if the request ends by the date of that waiter, and the date is known.

    Args:
        ahead: the waiters ahead in the order of the queue, without those that releases alone cannot satisfy and those
            that are stopped. They are read one by one, and no more of them once too few GPUs are left.
        free: the GPUs that the request could take if nobody were ahead.
        free_at: see :func:`dates`.
    """
    left = want.gpus.intersection(free)
    if want.fits(left):
        for other, date in dates(ahead, free_at):
            if not now + want.hold_for <= date < math.inf:
                left -= other.wanted_at(now)
                if not want.fits(left):
                    break
    return left


def starts(wants: Iterable[BackfillRequest], free_at: Mapping[str, When]) -> list[float]:
    """Return when each waiter can expect to start, in the order of the queue, if all hold as long as they said.

    Unlike a date this is an estimate: the first waiter starts at its date, and each of the others after those ahead of
    it, unless it may pass them all. ``math.inf``: somebody did not say for how long.
    """
    ends = dict(free_at)
    ahead: list[tuple[BackfillRequest, float]] = []
    found = []
    for want, date in dates(wants, free_at):
        start = want.earliest(free_at)[0]
        passes = False
        for other, when in ahead:
            if not other.wanted_at(start).isdisjoint(want.gpus):
                passes = start + want.hold_for <= when < math.inf
                if not passes:
                    break
        if not passes:
            free, first = want.earliest(ends)
            start = want.first_open(max(date, free), first)
            ends.update(want.taken(first, ends, start + want.hold_for))
        ahead.append((want, date))
        found.append(start)
    return found
