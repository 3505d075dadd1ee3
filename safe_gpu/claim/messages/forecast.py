"""When a waiter can expect to start, from entries, without a lock."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...coordination.queue import TicketRequest, is_stopped
from ...selection.backfill import BackfillRequest, When, dates, starts, when_free
from ...selection.request import Selection
from ...wording.text import clock, format_age, gpu_ranges, not_before

if TYPE_CHECKING:
    from ...gpus.devices import Holder
    from ..host.host_view import HostView
    from ..search.queue_place import QueuePlace


class HolderGpus(NamedTuple):
    """The GPUs of one holder, by their labels. ``until`` in Unix seconds; None is unknown."""

    user: str
    gpus: tuple[str, ...]
    until: float | None


class Forecast(NamedTuple):
    """What a waiter can expect.

    Attributes:
        start: when it will probably start, in Unix seconds; None if some end is unknown.
        earliest: it does not start before that if holders keep their word; None is unknown.
        overdue: the holders whose end has passed.
        silent: the holders whose end is unknown, if that of others is known.
        passers: the holders of GPUs that this waiter wants who came after it, by when they joined the queue.
        may_move: it waits for others by turns, so who joins later may start before it.
    """

    start: float | None = None
    earliest: float | None = None
    overdue: tuple[HolderGpus, ...] = ()
    silent: tuple[HolderGpus, ...] = ()
    passers: tuple[HolderGpus, ...] = ()
    may_move: bool = False


def forecast(view: HostView, place: QueuePlace) -> Forecast:
    """Return what the claim in this place can expect now."""
    waiter, now = place.ensure_waiter(), time.time()
    holders = view.claims.holders(view.inside)
    when = _free_at(view, holders, now)
    ahead = waiter.competing()
    requests = [(TicketRequest.of(one), one.uid) for one in ahead if not is_stopped(one)]
    requests.append((waiter.request._replace(hold_for=place.hold_for()), os.geteuid()))
    wants = [
        BackfillRequest.of(*request[:4], view.snapshot.gpus, view.reserved_for_others(uid)) for request, uid in requests
    ]
    start, earliest = starts(wants, when)[-1], list(dates(wants, when))[-1][1]
    held = [(gpu, holders[gpu.uuid]) for gpu in view.snapshot.gpus if gpu.uuid in holders]
    wanted = [(gpu.label, holder) for gpu, holder in held if gpu.uuid in waiter.request.gpus]
    mine = [(label, each) for label, holder in wanted for each in holder.each]
    told = any(holder.until is not None for _, holder in mine)
    return Forecast(
        start if start < math.inf else None,
        earliest if earliest < math.inf else None,
        _by_user(one for one in mine if one[1].until is not None and one[1].until < now),
        _by_user(one for one in mine if told and one[1].until is None),
        _by_user(one for one in mine if waiter.since and (one[1].queued or one[1].since or 0.0) > waiter.since),
        place.by_turns and bool(ahead),
    )


def _free_at(view: HostView, holders: Mapping[str, Holder], now: float) -> dict[str, When]:
    return {
        verdict.gpu.uuid: when_free(verdict.gpu, holders.get(verdict.gpu.uuid), now, free=verdict.free)
        for verdict in view.judge_for(Selection(), holders)
    }


def _by_user(holders: Iterable[tuple[str, Holder]]) -> tuple[HolderGpus, ...]:
    """Group them, given with the labels of their GPUs, by user and end, those with the most GPUs first."""
    found: dict[tuple[str, float | None], list[str]] = {}
    for label, holder in holders:
        found.setdefault((holder.user or SOMEBODY, holder.until), []).append(label)
    ranked = sorted(found.items(), key=lambda item: -len(item[1]))
    return tuple(HolderGpus(user, tuple(labels), until) for (user, until), labels in ranked)


def describe_forecast(expected: Forecast, now: float) -> tuple[str, list[str]]:
    """Return when the waiter starts, "" if nothing is known; and what else there is to tell."""
    start, more = "", list[str]()
    if expected.overdue:
        share = expected.overdue[0]
        start = f"{_whose(share)} overdue by {format_age(now - (share.until or now))}"
    elif expected.start is not None and expected.start > now:
        moment = clock(expected.start, now)
        start = f"starts {moment} or later" if expected.may_move else f"starts about {moment}"
    elif expected.start is None and expected.earliest is not None and expected.earliest > now:
        start = not_before(expected.earliest, now)
    elif expected.start is None and expected.silent:
        more.append(f"no end known for {_whose(expected.silent[0])}")
    if expected.passers:
        share = expected.passers[0]
        until = f", until {clock(share.until, now)}" if share.until is not None else ""
        others = f" and {len(expected.passers) - 1} more" if len(expected.passers) > 1 else ""
        more.append(f"passed by {share.user} (GPU {gpu_ranges(share.gpus)}{until}){others}")
    return start, more


def _whose(share: HolderGpus) -> str:
    return f"{share.user}'s GPU {gpu_ranges(share.gpus)}"


SOMEBODY = "somebody"
