"""Who may go first without delaying anybody ahead (backfill). Pure functions of plain values.

Times are Unix seconds or any other clock, durations are seconds, and ``math.inf`` is "never". GPUs are named by the
stems of their lease files. A request is held back by dates, not by counts of spare GPUs: a count for each waiter allows
several requests that together delay a waiter, and lets holders that overrun starve the first waiter.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from .request import Selection

if TYPE_CHECKING:
    from ..coordination.queue import TicketRequest
    from ..devices import Gpu


class BackfillRequest(NamedTuple):
    """What one request wants: ``nb`` of ``gpus``, for ``hold_for`` seconds (``math.inf``: for an unknown time).

    If ``groups`` is not None, all must be of one of these.
    """

    nb: int
    gpus: frozenset[str]
    hold_for: float = math.inf
    groups: tuple[frozenset[str], ...] | None = None

    @classmethod
    def of(cls, demand: TicketRequest, gpus: Iterable[Gpu]) -> BackfillRequest:
        """What a ticket asks for.

        Args:
            gpus: of the host, with what the ticket's conditions need.
        """
        selection, _ = Selection.from_ticket(demand.nb_gpus, demand.conditions)
        hold_for = math.inf if demand.hold_for is None else demand.hold_for
        if not selection.together:
            return cls(demand.nb_gpus, demand.gpus, hold_for)
        stems = {gpu: stem for gpu in gpus for stem in (gpu.uuid, f"{gpu.uuid}.inner") if stem in demand.gpus}
        groups = tuple(frozenset(map(stems.__getitem__, group)) for group in selection.groups(list(stems)))
        return cls(demand.nb_gpus, demand.gpus, hold_for, groups)

    @property
    def _groups(self) -> tuple[frozenset[str], ...]:
        return (self.gpus,) if self.groups is None else self.groups

    def fits(self, gpus: Collection[str]) -> bool:
        """Whether it can have all that it wants of these."""
        return any(len(group.intersection(gpus)) >= self.nb for group in self._groups)

    def without(self, gpus: Collection[str]) -> BackfillRequest:
        """The same, but it cannot use these."""
        groups = self.groups and tuple(group.difference(gpus) for group in self.groups)
        return self._replace(gpus=self.gpus.difference(gpus), groups=groups)

    def earliest(self, free_at: Mapping[str, float]) -> tuple[float, list[str]]:
        """When enough of its GPUs are expected to be free, and the first that are; all where there never are enough."""
        best: tuple[float, list[str]] = math.inf, []
        for group in self._groups:
            first = sorted((free_at.get(gpu, math.inf), gpu) for gpu in group)[: max(0, self.nb)]
            if first and len(first) == self.nb and (not best[1] or first[-1][0] < best[0]):
                best = first[-1][0], [gpu for _, gpu in first]
        return best if best[1] else (math.inf, list(self.gpus))


def free_at(now: float, *, since: float, until: float | None) -> float:
    """When a leased GPU is expected to be free, by its holder's word.

    A holder that overruns is due now, and so is one whose record cannot be right (``until`` before ``since``).

    Args:
        until: None is unknown.
    """
    if until is None:
        return math.inf
    return now if until < since else max(now, until)


def dates(wants: Iterable[BackfillRequest], free_at: Mapping[str, float]) -> Iterator[tuple[BackfillRequest, float]]:
    """Each waiter, in the order of the queue, with the date from which on nobody may take one of its GPUs past it.

    That is the time at which enough of its GPUs are expected to be free. A waiter behind another that it cannot pass
    cannot start before the date of that one, so its own date is not earlier either.

    Args:
        wants: only the waiters that count; see :func:`open_gpus`.
        free_at: when each GPU is expected to be free, not before the present. A GPU that is missing never is.
    """
    earlier: list[tuple[BackfillRequest, float]] = []  # by date
    for want in wants:
        date = want.earliest(free_at)[0]
        for other, other_date in earlier:
            if date < other_date < math.inf and not _may_pass(want, date, other, other_date):
                date = other_date
        insort(earlier, (want, date), key=lambda waiter: waiter[1])
        yield want, date


def _may_pass(want: BackfillRequest, start: float, other: BackfillRequest, date: float) -> bool:
    """Whether a request that starts then ends before the other's date, or can do without the other's GPUs."""
    return start + want.hold_for <= date or want.fits(want.gpus - other.gpus)


def open_gpus(
    want: BackfillRequest,
    ahead: Iterable[BackfillRequest],
    free: Collection[str],
    free_at: Mapping[str, float],
    now: float,
) -> frozenset[str]:
    """The free GPUs that a request may take. It may start if they fit it.

    A GPU that somebody ahead wants is open only if the request ends by the date of that waiter, and the date is known.

    Args:
        ahead: the waiters ahead in the order of the queue, without those that releases alone cannot satisfy and those
            that are stopped. They are read one by one, and no more of them once too few GPUs are left.
        free: the GPUs that nobody holds or uses.
        free_at: see :func:`dates`.
    """
    left = want.gpus.intersection(free)
    if want.fits(left):
        for other, date in dates(ahead, free_at):
            if not now + want.hold_for <= date < math.inf:
                left -= other.gpus
                if not want.fits(left):
                    break
    return left


def starts(wants: Iterable[BackfillRequest], free_at: Mapping[str, float]) -> list[float]:
    """When each waiter can expect to start, in the order of the queue, if all hold as long as they said.

    Unlike a date this is an estimate: the first waiter starts at its date, and each of the others after those ahead of
    it, unless it may pass them all. ``math.inf``: somebody did not say for how long.
    """
    ends = dict(free_at)
    ahead: list[tuple[BackfillRequest, float]] = []
    found = []
    for want, date in dates(wants, free_at):
        start = want.earliest(free_at)[0]
        rivals = [when for other, when in ahead if not other.gpus.isdisjoint(want.gpus)]
        if not rivals or not all(start + want.hold_for <= when < math.inf for when in rivals):
            free, first = want.earliest(ends)
            start = max(date, free)
            ends.update(dict.fromkeys(first, start + want.hold_for))
        ahead.append((want, date))
        found.append(start)
    return found
