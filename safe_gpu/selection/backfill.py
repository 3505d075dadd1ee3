"""Who may go first without delaying anybody ahead (backfill). Pure functions of plain values.

Times are Unix seconds or any other clock, durations are seconds, and ``math.inf`` is "never". GPUs are named by the
stems of their lease files. A request is held back by dates, not by counts of spare GPUs: a count for each waiter allows
several requests that together delay a waiter, and lets holders that overrun starve the first waiter.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple


class BackfillRequest(NamedTuple):
    """What one request wants: ``nb`` of ``gpus``, for ``hold_for`` seconds (``math.inf``: for an unknown time)."""

    nb: int
    gpus: frozenset[str]
    hold_for: float = math.inf


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
        date = _nth_free(want, free_at)
        for other, other_date in earlier:
            if date < other_date < math.inf and not _may_pass(want, date, other, other_date):
                date = other_date
        insort(earlier, (want, date), key=lambda waiter: waiter[1])
        yield want, date


def _nth_free(want: BackfillRequest, free_at: Mapping[str, float]) -> float:
    """When enough of its GPUs are expected to be free."""
    moments = sorted(free_at.get(gpu, math.inf) for gpu in want.gpus)
    return moments[want.nb - 1] if 0 < want.nb <= len(moments) else math.inf


def _may_pass(want: BackfillRequest, start: float, other: BackfillRequest, date: float) -> bool:
    """Whether a request that starts then ends before the other's date, or can do without the other's GPUs."""
    return start + want.hold_for <= date or len(want.gpus - other.gpus) >= want.nb


def open_gpus(
    want: BackfillRequest,
    ahead: Iterable[BackfillRequest],
    free: Collection[str],
    free_at: Mapping[str, float],
    now: float,
) -> frozenset[str]:
    """The free GPUs that a request may take. It may start if there are ``want.nb`` of them.

    A GPU that somebody ahead wants is open only if the request ends by the date of that waiter, and the date is known.

    Args:
        ahead: the waiters ahead in the order of the queue, without those that releases alone cannot satisfy and those
            that are stopped. They are read one by one, and no more of them once too few GPUs are left.
        free: the GPUs that nobody holds or uses.
        free_at: see :func:`dates`.
    """
    left = want.gpus.intersection(free)
    if len(left) >= want.nb:
        for other, date in dates(ahead, free_at):
            if not now + want.hold_for <= date < math.inf:
                left -= other.gpus
                if len(left) < want.nb:
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
        start = _nth_free(want, free_at)
        rivals = [when for other, when in ahead if not other.gpus.isdisjoint(want.gpus)]
        if not rivals or not all(start + want.hold_for <= when < math.inf for when in rivals):
            start = max(date, _nth_free(want, ends))
            for gpu in sorted(want.gpus, key=lambda gpu: (ends.get(gpu, math.inf), gpu))[: max(0, want.nb)]:
                ends[gpu] = start + want.hold_for
        ahead.append((want, date))
        found.append(start)
    return found
