"""When each waiter of the queue can expect to start, and whose user is at a limit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.closed import binding
from ..coordination.queue import TicketRequest, is_stopped
from ..gpus.devices import Holder, vendor_of
from ..gpus.windows import spans_of
from ..host.procfs import user_name
from ..selection.backfill import BackfillRequest, dates, starts, when_free
from ..selection.request import Selection
from ..selection.sharing import ROUNDING, part_of
from ..settings import config as policy
from .facts import FREE

if TYPE_CHECKING:
    from ..coordination.entry import Entry
    from ..gpus.windows import Window
    from ..selection.backfill import When
    from .facts import ClaimStatus, GpuStatus


class AtLimit(NamedTuple):
    """A user who is at a limit.

    Attributes:
        held: how many GPUs the user holds; a share counts as its part.
        most: how many are allowed.
        until: when enough of them are expected to be given back, in Unix seconds; ``math.inf`` if that is not known.
    """

    held: float
    most: int
    until: float


def most_by_user(uids: Iterable[int], path: str) -> dict[str, int]:
    """Return how many GPUs these users may hold by the policy file at ``path``, of those that it limits."""
    rules = policy.if_readable(path)
    if rules is None or not rules.limits_gpus:
        return {}
    found = {user_name(uid): policy.limits_of_user(rules, uid).max_gpus for uid in uids}
    return {user: most for user, most in found.items() if most is not None}


def at_limits(tickets: Sequence[Entry], gpus: Iterable[GpuStatus], path: str, now: float) -> dict[str, AtLimit]:
    """Return the limit of the user, by the name of the ticket, where the policy file at ``path`` makes it wait.

    It takes no lock, and may ask a directory service. A file that is broken counts as none: claims report it.
    """
    rules = policy.if_readable(path) if tickets else None
    if rules is None or not rules.limits_gpus:
        return {}
    most_of = cache(lambda uid: policy.limits_of_user(rules, uid).max_gpus)
    gpus = tuple(gpus)
    ends: dict[tuple[int | None, str], list[tuple[float, float]]] = {}  # and parts of GPUs
    for one in gpus:
        for claim in one.claims:
            end = claim.until or math.inf, part_of(one.gpu, claim.share)
            ends.setdefault((claim.uid, one.gpu.vendor), []).append(end)
    found = {}
    for ticket in tickets:
        request, most = TicketRequest.of(ticket), most_of(ticket.uid)
        if most is None or request.inside:
            continue
        own = sorted(ends.get((ticket.uid, vendor_of(next(iter(request.gpus), ""))), ()))
        held, selection = sum(part for _, part in own), Selection.from_ticket(request.nb_gpus, request.conditions)[0]
        lacking = held + selection.amount(one.gpu for one in gpus) - most
        if lacking > ROUNDING:
            freed = accumulate(part for _, part in own)
            until = next(
                (end for (end, _), sum_ in zip(own, freed, strict=True) if sum_ >= lacking - ROUNDING), math.inf
            )
            found[ticket.name] = AtLimit(round(held, 2), most, max(until, now))
    return found


def expected_starts(
    tickets: Sequence[Entry],
    gpus: Collection[GpuStatus],
    now: float,
    limited: Mapping[str, AtLimit] = MappingProxyType({}),
    windows: Collection[Window] = (),
) -> list[tuple[float | None, float | None]]:
    """Return for each ticket, in the order of the queue, when it is expected to start, and before when it probably does
    not, in Unix seconds. The first is None where a holder did not say for how long.

    A waiter that is stopped, or that no release of claims can satisfy, has no start and delays nobody. A waiter whose
    user is at a limit delays nobody either, and starts when enough claims of that user end.

    Args:
        limited: name of a ticket -> the limit of its user.
        windows: the times in which GPUs are reserved.
    """
    found: dict[str, tuple[float, float]] = {}
    devices, stopped = [one.gpu for one in gpus], dict[int | bytes, bool]()
    for inside in {ticket.inside for ticket in tickets}:
        ends, coming = _ends(gpus, now, inside)
        wants: dict[str, BackfillRequest] = {}
        for ticket in tickets:
            request = TicketRequest.of(ticket)
            if ticket.inside != inside or ticket.name in limited:
                continue
            _, known = Selection.from_ticket(request.nb_gpus, request.conditions)
            if not (known and request.known):  # nobody passes it, so nobody knows more of those behind it
                wants[ticket.name] = BackfillRequest(len(request.gpus) + 1, request.gpus)
            elif not is_stopped(ticket, stopped) and len(request.gpus & coming) >= request.nb_gpus:
                reserved = spans_of(binding(windows, ticket.uid), devices) if windows and not inside else {}
                wants[ticket.name] = BackfillRequest.of(request, devices, reserved)
        earliest = (date for _, date in dates(wants.values(), ends))
        found.update(zip(wants, zip(starts(wants.values(), ends), earliest, strict=True), strict=True))
    found.update((name, (limit.until, math.inf)) for name, limit in limited.items())
    pairs = (found.get(ticket.name, (math.inf, math.inf)) for ticket in tickets)
    return [
        (None if start == math.inf else round(start, 3), None if date == math.inf else round(date))
        for start, date in pairs
    ]


def _ends(gpus: Iterable[GpuStatus], now: float, inside: str) -> tuple[dict[str, When], set[str]]:
    """Return when each GPU is expected to be free for claims inside the one with this hash of a token ("": inside
    none), and those that releases of claims can free."""
    ends: dict[str, When] = {}
    coming = set()
    for one in gpus:
        if not inside:
            free, holder = one.state in FREE, holder_by_status(one.claim, one.shares)
        elif one.claim is not None and one.claim.token == inside:
            free, holder = True, holder_by_status(one.inner)
        else:
            continue
        ends[one.gpu.uuid] = when_free(one.gpu, holder, now, free=free)
        if free or holder is not None:
            coming.add(one.gpu.uuid)
    return ends, coming


def holder_by_status(claim: ClaimStatus | None, shares: Iterable[ClaimStatus] = ()) -> Holder | None:
    """Return who holds a GPU, from what was found of its claim, or of the claims that share it."""
    if claim is None:
        return None
    alone, *found = (
        Holder(one.pid, one.user, one.job, one.command, one.since, until=one.until, uid=one.uid or 0, share=one.share)
        for one in (claim, *shares)
    )
    return Holder.of_sharers(found) if found else alone
