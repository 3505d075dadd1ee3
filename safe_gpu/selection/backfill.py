"""Who may go first without delaying anybody ahead (backfill). Pure.

Times are Unix seconds or any other clock, durations are seconds, and ``math.inf`` is "never". GPUs are named by
UUID, and their memory is in bytes. A request is held back by times, not by counts of spare GPUs or bytes: a count for
each waiter allows several requests that together delay a waiter, and lets holders that overrun starve the first waiter.
"""

import math
from bisect import bisect, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from ..coordination.queue import TicketRequest
from ..gpus.devices import Gpu, Holder, in_each_others_way
from ..gpus.windows import Spans, first_open
from .request import Selection
from .sharing import share_capacity

When = float | tuple[tuple[float, float], ...]
"""When a GPU is expected to be free: all of it at one time, or each part, as (time, bytes), at its own."""


def free_time(when: When, share: float) -> float:
    """Return when that much of a GPU is expected to be free.

    Args:
        share: bytes; ``math.inf`` is the whole GPU.
    """
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


def _after_taking(when: When, share: float, end: float) -> When:
    """Return when the same GPU is free once a request has taken the part of it that is free first, until ``end``."""
    if share == math.inf:
        return end
    if not isinstance(when, tuple):
        when = ((when, math.inf),)
    parts = [(end, share)]
    missing = share
    for time, size in sorted(when):
        taken = min(size, missing)
        missing -= taken
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
    reserved: "Mapping[str, Spans]" = MappingProxyType({})
    in_the_way: Mapping[str, frozenset[str]] = MappingProxyType({})

    @classmethod
    def of(cls, asked: "TicketRequest", devices: "Iterable[Gpu]", reserved: "Mapping[str, Spans]") -> "BackfillRequest":
        """Return what a ticket asks for.

        Args:
            devices: of the host, with what the ticket's conditions need.
            reserved: when GPUs are reserved for others than the ticket's user.
        """
        selection, _ = Selection.from_ticket(asked.nb_gpus, asked.conditions)
        hold_for = asked.hold_for
        if hold_for is None:
            hold_for = math.inf
        shown = tuple(devices)
        groups = None
        if selection.together:
            found = selection.groups([gpu for gpu in shown if gpu.uuid in asked.gpus])
            groups = tuple(frozenset(gpu.uuid for gpu in group) for group in found)
        return cls(
            nb=asked.nb_gpus,
            gpus=asked.gpus,
            hold_for=hold_for,
            groups=groups,
            share=selection.share or math.inf,
            reserved=reserved,
            in_the_way=in_each_others_way(shown),
        )

    @property
    def _groups(self) -> tuple[frozenset[str], ...]:
        if self.groups is None:
            return (self.gpus,)
        return self.groups

    def fits(self, gpus: Collection[str]) -> bool:
        """Return whether it can have all that it wants of these."""
        return any(len(group.intersection(gpus)) >= self.nb for group in self._groups)

    def without(self, gpus: Collection[str]) -> "BackfillRequest":
        """Return the same, but it cannot use these."""
        left = self._replace(gpus=self.gpus.difference(gpus))
        if self.groups is None:
            return left
        return left._replace(groups=tuple(group.difference(gpus) for group in self.groups))

    def never(self) -> "BackfillRequest":
        """Return one of the same GPUs that can never have enough of them."""
        return BackfillRequest(len(self.gpus) + 1, self.gpus, in_the_way=self.in_the_way)

    def earliest(self, free_at: Mapping[str, When]) -> "Start":
        """Return when enough of its GPUs are expected to be free, and the first that are; all where there never are
        enough."""
        best: Start | None = None
        for group in self._groups:
            if not 0 < self.nb <= len(group):
                continue
            first = sorted((self._opening_of(gpu, free_at), gpu) for gpu in group)[: self.nb]
            time, _ = first[-1]
            if best is None or time < best.time:
                best = Start(time, [gpu for _, gpu in first])
        if best is None:
            return Start(math.inf, list(self.gpus))
        return best

    def _opening_of(self, gpu: str, free_at: Mapping[str, When]) -> float:
        """Return when as much of a GPU as it wants is expected to be free, and not reserved for others."""
        return self.first_open(free_time(free_at.get(gpu, math.inf), self.share), [gpu])

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
            wanted = frozenset(gpu for gpu in self.gpus if not self._is_reserved(gpu, moment))
        in_the_way = [self.in_the_way[gpu] for gpu in wanted & self.in_the_way.keys()]
        return wanted.union(*in_the_way)

    def _is_reserved(self, gpu: str, moment: float) -> bool:
        return any(begin <= moment < end for begin, end in self.reserved.get(gpu, ()))

    def taken(self, gpus: Iterable[str], free_at: Mapping[str, When], end: float) -> dict[str, When]:
        """Return when these GPUs, and what is in their way, are free once it has taken them until ``end``."""
        found: dict[str, When] = {}
        for gpu in gpus:
            found[gpu] = _after_taking(free_at.get(gpu, math.inf), self.share, end)
            for other in self.in_the_way.get(gpu, ()):
                found[other] = max(end, free_time(free_at.get(other, math.inf), math.inf))
        return found


class Start(NamedTuple):
    """When a request can have all its GPUs, and which."""

    time: float
    gpus: list[str]


def free_at(now: float, *, since: float, until: float | None) -> float:
    """Return when a claimed GPU is expected to be free, as its holder stated.

    A holder that overruns is due now, and so is one whose entry cannot be right (``until`` before ``since``).

    Args:
        until: None is unknown.
    """
    if until is None:
        return math.inf
    if until < since:
        return now
    return max(now, until)


def when_free(gpu: "Gpu", holder: "Holder | None", now: float, *, free: bool) -> When:
    """Return when a GPU, or each part of it, is expected to be free, as its holder stated: of a GPU whose pieces
    several claims hold, when the last of these ends.

    Args:
        free: whether a GPU that nobody holds is free now; else that is not known.
    """
    size = share_capacity(gpu) or math.inf
    if holder is None:
        if free:
            return ((now, size),)
        return ((math.inf, size),)
    if not holder.sharers:
        end = max(free_at(now, since=one.since or 0.0, until=one.until) for one in holder.each)
        return ((end, size),)
    parts = []
    room = size
    for sharer in holder.sharers:
        share = min(size, sharer.share or size)
        parts.append((free_at(now, since=sharer.since or 0.0, until=sharer.until), share))
        room -= share
    parts.append((now, max(0.0, room)))
    return tuple(parts)


class QueuedRequest(NamedTuple):
    """A request in the queue.

    Attributes:
        latest_end: claims on its GPUs that end by then do not delay it; ``math.inf`` is not known.
    """

    request: BackfillRequest
    latest_end: float


def latest_harmless_ends(wants: Iterable[BackfillRequest], free_at: Mapping[str, When]) -> Iterator[QueuedRequest]:
    """Yield each waiter, in the order of the queue, with the time from which on nobody may take one of its GPUs past
    it.

    That is the time at which enough of its GPUs are expected to be free. A waiter behind another that it cannot pass
    cannot start before the time of that one, so its own is not earlier either.

    Args:
        wants: only the waiters that count; see :func:`open_gpus`.
        free_at: when each GPU, or each part of it, is expected to be free, not before now. What is missing never is.
    """
    by_latest_end = attrgetter("latest_end")
    earlier: list[QueuedRequest] = []  # by latest_end
    for want in wants:
        end = want.earliest(free_at).time
        for other in earlier[bisect(earlier, end, key=by_latest_end) :]:
            if end < other.latest_end < math.inf and not _may_pass(want, end, other):
                end = other.latest_end
        queued = QueuedRequest(want, end)
        insort(earlier, queued, key=by_latest_end)
        yield queued


def _may_pass(want: BackfillRequest, start: float, other: QueuedRequest) -> bool:
    """Return whether a request that starts then does not delay another, or does not need the other's GPUs."""
    if start + want.hold_for <= other.latest_end:
        return True
    return want.fits(want.gpus - other.request.wanted_at(start))


def open_gpus(
    want: BackfillRequest,
    ahead: Iterable[BackfillRequest],
    free: Collection[str],
    free_at: Mapping[str, When],
    now: float,
) -> frozenset[str]:
    """Return the free GPUs that a request may take. It may start if they fit it.

    A GPU that somebody ahead wants is open only if the request ends by the ``latest_end`` of that waiter, and that is
    known.

    Args:
        ahead: the waiters ahead in the order of the queue, without those that releases alone cannot satisfy and those
            that are stopped. They are read one by one, and no more of them once too few GPUs are left.
        free: the GPUs that the request could take if nobody were ahead.
        free_at: see :func:`latest_harmless_ends`.
    """
    left = want.gpus.intersection(free)
    if not want.fits(left):
        return left
    for other in latest_harmless_ends(ahead, free_at):
        if now + want.hold_for <= other.latest_end < math.inf:
            continue
        left -= other.request.wanted_at(now)
        if not want.fits(left):
            break
    return left


def starts(wants: Iterable[BackfillRequest], free_at: Mapping[str, When]) -> list[float]:
    """Return when each waiter can expect to start, in the order of the queue, if all hold as long as they said.

    Unlike a ``latest_end`` this is an estimate: the first waiter starts at its own, and each of the others after those
    ahead of it, unless it may pass them all. ``math.inf``: somebody did not say for how long.
    """
    ends = dict(free_at)
    ahead: list[QueuedRequest] = []
    found = []
    for queued in latest_harmless_ends(wants, free_at):
        want = queued.request
        start = want.earliest(free_at).time
        if not _passes_all(want, start, ahead):
            free, gpus = want.earliest(ends)
            start = want.first_open(max(queued.latest_end, free), gpus)
            ends.update(want.taken(gpus, ends, start + want.hold_for))
        ahead.append(queued)
        found.append(start)
    return found


def _passes_all(want: BackfillRequest, start: float, ahead: Iterable[QueuedRequest]) -> bool:
    """Return whether a request that starts then delays none of the waiters ahead that want GPUs of its own, of which
    there is one or more."""
    passes = False
    for other in ahead:
        if other.request.wanted_at(start).isdisjoint(want.gpus):
            continue
        if not start + want.hold_for <= other.latest_end < math.inf:
            return False
        passes = True
    return passes
