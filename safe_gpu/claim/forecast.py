"""When a waiter can expect to start, who is overdue, and who passed it: from records and tickets, without a lock."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.holders import recorded_holders
from ..coordination.leases import inner_name
from ..devices import GpuRequest, LeaseHolder
from ..selection.backfill import BackfillRequest, dates, free_at, starts
from ..text import format_age, plural
from .passing import backfill_request, stem_of

if TYPE_CHECKING:
    from ..coordination.queue import Ticket
    from .host_view import HostView
    from .line import QueuePlace


class HolderShare(NamedTuple):
    """The GPUs of one holder. ``until`` in Unix seconds; None is unknown."""

    user: str
    nb_gpus: int
    until: float | None


class Forecast(NamedTuple):
    """What a waiter can expect.

    Attributes:
        start: when it will probably start, Unix seconds; None if somebody did not say for how long.
        earliest: before that it does not start, as far as holders keep their word; None is unknown.
        due: those whose GPUs are due at ``start``, if nobody is ahead in the queue.
        overdue: those who were to be done by now.
        silent: those who did not say for how long, if others did.
        passers: those who got GPUs that this waiter wants after it came.
    """

    start: float | None = None
    earliest: float | None = None
    due: tuple[HolderShare, ...] = ()
    overdue: tuple[HolderShare, ...] = ()
    silent: tuple[HolderShare, ...] = ()
    passers: tuple[HolderShare, ...] = ()


def forecast(view: HostView, line: QueuePlace) -> Forecast:
    """What the claim in this line can expect now."""
    waiter, now = line.stand(), time.time()
    holders = _holders(view)
    when = _free_at(view, holders, now)
    ahead = waiter.competing()
    wants = [*_wants(ahead), backfill_request(waiter.demand._replace(hold_for=line.hold_for()))]
    start, earliest = starts(wants, when)[-1], list(dates(wants, when))[-1][1]
    mine = {uuid: holder for uuid, holder in holders.items() if stem_of(view, uuid) in waiter.demand.gpus}
    told = any(holder.until is not None for holder in mine.values())
    return Forecast(
        start if start < math.inf else None,
        earliest if earliest < math.inf else None,
        _shares(holder for holder in mine.values() if not ahead and holder.until == start),
        _shares(holder for holder in mine.values() if holder.until is not None and holder.until < now),
        _shares(holder for holder in mine.values() if told and holder.until is None),
        _shares(holder for holder in mine.values() if waiter.since and (holder.since or 0.0) > waiter.since),
    )


def _wants(tickets: Iterable[Ticket]) -> Iterator[BackfillRequest]:
    return (backfill_request(one.demand) for one in tickets if one.demand is not None and not one.is_stopped())


def _holders(view: HostView) -> dict[str, LeaseHolder]:
    """UUID -> who has a record in the lease file. A lease that was released has none."""
    uuids = [gpu.uuid for gpu in view.snapshot.gpus]
    found = recorded_holders({uuid: (view.lease_name(uuid), inner_name(uuid)) for uuid in uuids})
    return {uuid: holder for uuid, holder in found.items() if holder.since is not None}


def _free_at(view: HostView, holders: Mapping[str, LeaseHolder], now: float) -> dict[str, float]:
    found = {}
    for verdict in view.judge_for(GpuRequest(), holders):
        holder = holders.get(verdict.gpu.uuid)
        when = now if verdict.free else math.inf
        if holder is not None:
            when = free_at(now, since=holder.since or 0.0, until=holder.until)
        found[stem_of(view, verdict.gpu.uuid)] = when
    return found


def _shares(holders: Iterable[LeaseHolder]) -> tuple[HolderShare, ...]:
    """Grouped by user and end, those with the most GPUs first."""
    numbers: dict[tuple[str, float | None], int] = {}
    for holder in holders:
        key = (holder.user or "somebody", holder.until)
        numbers[key] = numbers.get(key, 0) + 1
    ranked = sorted(numbers.items(), key=lambda item: -item[1])
    return tuple(HolderShare(user, number, until) for (user, until), number in ranked)


def describe_forecast(expected: Forecast, now: float) -> list[str]:
    """What to tell the user, the most important first; nothing if nobody said anything."""
    found = []
    if expected.overdue:
        share = expected.overdue[0]
        late = format_age(now - share.until) if share.until is not None else ""
        found.append(f"{_whose(share)} overdue {late}")
    elif expected.start is not None and expected.start > now:
        text = f"expected at about {_clock(expected.start, now)}"
        found.append(f"{text}, when {_whose(expected.due[0])} due" if expected.due else text)
    elif expected.start is None and expected.earliest is not None and expected.earliest > now:
        found.append(f"not before {_clock(expected.earliest, now)}")
    elif expected.start is None and expected.silent:
        found.append(f"{expected.silent[0].user} did not say for how long")
    if expected.passers:
        share = expected.passers[0]
        until = f", until {_clock(share.until, now)}" if share.until is not None else ""
        others = f" and {len(expected.passers) - 1} more" if len(expected.passers) > 1 else ""
        found.append(f"passed by {share.user} ({plural(share.nb_gpus)}{until}){others}")
    return found


def _whose(share: HolderShare) -> str:
    if share.nb_gpus == 1:
        return f"{share.user}'s GPU is"
    return f"{share.user}'s {share.nb_gpus} GPUs are"


def _clock(moment: float, now: float) -> str:
    """``14:20``, ``Sun 14:20`` or ``2026-11-30``, whichever is clear."""
    form = "%H:%M" if moment - now < 18 * 3600 else "%a %H:%M" if moment - now < 6 * 86400 else "%Y-%m-%d"
    return time.strftime(form, time.localtime(moment))
