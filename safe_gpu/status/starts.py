"""When each waiter of the queue can expect to start, and whose user is at a limit."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..coordination.closed import windows_against
from ..coordination.entry import Entry
from ..coordination.queue import TicketRequest, is_stopped
from ..gpus.devices import Gpu, Holder, vendor_of
from ..gpus.windows import Spans, Window, spans_of
from ..selection.backfill import BackfillRequest, latest_harmless_ends, starts, when_free
from ..selection.request import Selection
from ..selection.sharing import ROUNDING, part_of
from ..settings.config import Limits
from .facts import FREE, GpuStatus


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


class _HeldPart(NamedTuple):
    """What a claim holds of a GPU: when it is expected to be free, and how much of one GPU it is."""

    end: float
    size: float


Moments = tuple[float | None, float | None]
"""When a waiter is expected to start, and before when it probably does not."""


def at_limits(
    tickets: Sequence[Entry], gpus: Collection[GpuStatus], limits: Mapping[int, Limits], now: float
) -> dict[str, AtLimit]:
    """Return the limit of the user, by the name of the ticket, where it makes the ticket wait.

    Args:
        limits: uid -> what the policy of this host allows.
    """
    held: dict[tuple[int, str], list[_HeldPart]] = {}  # by user and vendor
    for gpu, claim in _claims(gpus):
        part = _HeldPart(claim.until or math.inf, part_of(gpu, claim.share))
        held.setdefault((claim.uid, gpu.vendor), []).append(part)
    found = {}
    for ticket in tickets:
        request = TicketRequest.of(ticket)
        if ticket.uid not in limits or request.inside:
            continue
        most = limits[ticket.uid].max_gpus
        if most is None:
            continue
        vendor = vendor_of(next(iter(request.gpus), ""))
        own = sorted(held.get((ticket.uid, vendor), []))
        total = sum(part.size for part in own)
        selection, _ = Selection.from_ticket(request.nb_gpus, request.conditions)
        excess = total + selection.amount(one.gpu for one in gpus) - most
        if excess > ROUNDING:
            found[ticket.name] = AtLimit(round(total, 2), most, _when_given_back(own, excess, now))
    return found


def _when_given_back(parts: Iterable[_HeldPart], size: float, now: float) -> float:
    """Return when so much of these parts, given by their ends, is free; ``math.inf`` if never."""
    freed = 0.0
    for part in parts:
        freed += part.size
        if size - freed <= ROUNDING:
            return max(part.end, now)
    return math.inf


def _claims(gpus: Iterable[GpuStatus]) -> Iterator[tuple[Gpu, Holder]]:
    """Yield each claim with the devices that it names, and with one device of each GPU of which it names none."""
    held = [(one.gpu, claim) for one in gpus for claim in one.claims]
    named = {(gpu.whole, claim.pid, claim.since) for gpu, claim in held if claim.held_as is None}
    for gpu, claim in held:
        key = gpu.whole, claim.pid, claim.since
        if claim.held_as is None:
            yield gpu, claim
        elif key not in named:
            named.add(key)
            yield gpu, claim


def expected_starts(
    tickets: Sequence[Entry],
    gpus: Collection[GpuStatus],
    now: float,
    limited: Mapping[str, AtLimit] = MappingProxyType({}),
    windows: Collection[Window] = (),
    stopped: dict[int | bytes, bool] | None = None,
) -> list[Moments]:
    """Return for each ticket, in the order of the queue, when it is expected to start, and before when it probably does
    not, in Unix seconds. The first is None where a holder did not say for how long. Of a waiter inside a claim neither
    is known.

    A waiter that is stopped, or that no release of claims can satisfy, has no start and delays nobody. A waiter whose
    user is at a limit delays nobody either, and starts when enough claims of that user end.

    Args:
        limited: name of a ticket -> the limit of its user.
        windows: the times in which GPUs are reserved.
        stopped: as ``known`` of :func:`~safe_gpu.host.procfs.is_stopped`.
    """
    if stopped is None:
        stopped = {}
    devices = [one.gpu for one in gpus]
    ends = {one.gpu.uuid: when_free(one.gpu, one.claim, now, free=one.state in FREE) for one in gpus}
    coming = {one.gpu.uuid for one in gpus if one.state in FREE or one.claim is not None}
    wants: dict[str, BackfillRequest] = {}
    for ticket in tickets:
        request = TicketRequest.of(ticket)
        if ticket.inside or ticket.name in limited:
            continue
        _, known = Selection.from_ticket(request.nb_gpus, request.conditions)
        if not (known and request.known):  # nobody passes it, so nobody knows more of those behind it
            wants[ticket.name] = BackfillRequest.of(request, devices, {}).never()
        elif not is_stopped(ticket, stopped) and len(request.gpus & coming) >= request.nb_gpus:
            reserved: dict[str, Spans] = {}
            if windows:
                reserved = spans_of(windows_against(windows, ticket.uid), devices)
            wants[ticket.name] = BackfillRequest.of(request, devices, reserved)
    expected = {name: limit.until for name, limit in limited.items()}
    expected.update(zip(wants, starts(wants.values(), ends), strict=True))
    queued = latest_harmless_ends(wants.values(), ends)
    earliest = {name: one.latest_end for name, one in zip(wants, queued, strict=True)}
    moments = []
    for ticket in tickets:
        start = expected.get(ticket.name, math.inf)
        not_before = earliest.get(ticket.name, math.inf)
        moments.append((_rounded(start, 3), _rounded(not_before, None)))
    return moments


def _rounded(moment: float, digits: int | None) -> float | None:
    if moment == math.inf:
        return None
    return round(moment, digits)
