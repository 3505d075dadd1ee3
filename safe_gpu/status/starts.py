"""When each waiter of the queue can expect to start. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..coordination.leases.drained import binding
from ..gpus.devices import LeaseHolder
from ..gpus.windows import Window, spans_of
from ..selection.backfill import BackfillRequest, When, dates, starts, when_free
from .facts import FREE, ClaimStatus, GpuStatus

if TYPE_CHECKING:
    from ..coordination.queue.ticket import Ticket
    from .limits import AtLimit


def expected_starts(
    tickets: Sequence[Ticket],
    gpus: Iterable[GpuStatus],
    now: float,
    limited: Mapping[int, AtLimit] = MappingProxyType({}),
    windows: Collection[Window] = (),
) -> list[tuple[float | None, float | None]]:
    """Return for each ticket, in the order of the queue, when it is expected to start, and before when it probably does
    not, in Unix seconds. The first is None where a holder did not say for how long.

    A waiter that is stopped, or that no release of claims can satisfy, has no start and delays nobody. A waiter whose
    user is at a limit delays nobody either, and starts when enough claims of that user end.

    Args:
        limited: number of a ticket -> the limit of its user.
        windows: the times in which GPUs are reserved.
    """
    ends: dict[str, When] = {}
    coming: set[str] = set()
    devices = []
    for one in gpus:
        devices.append(one.gpu)
        uuid, inner, free = one.gpu.uuid, f"{one.gpu.uuid}.inner", one.state in FREE
        ends[uuid] = when_free(one.gpu, lease_holder(one.claim, one.shares), now, free=free)
        ends[inner] = when_free(one.gpu, lease_holder(one.inner), now, free=True)
        if free or one.claim is not None:
            coming |= {uuid, inner}
    wants: dict[int, BackfillRequest] = {}
    for place, ticket in enumerate(tickets):
        request = ticket.request
        if request is None:  # nobody knows what it wants, so nobody behind it knows more
            wants[place] = BackfillRequest(len(ends) + 1, frozenset(ends))
        elif ticket.seq not in limited and not ticket.is_stopped() and len(request.gpus & coming) >= request.nb_gpus:
            reserved = spans_of(binding(windows, ticket.uid), devices) if windows else {}
            wants[place] = BackfillRequest.of(*request[:4], devices, reserved)
    earliest = (date for _, date in dates(wants.values(), ends))
    found = dict(zip(wants, zip(starts(wants.values(), ends), earliest, strict=True), strict=True))
    found.update((place, (limited[one.seq].until, math.inf)) for place, one in enumerate(tickets) if one.seq in limited)
    pairs = (found.get(place, (math.inf, math.inf)) for place in range(len(tickets)))
    return [
        (None if start == math.inf else round(start, 3), None if date == math.inf else round(date))
        for start, date in pairs
    ]


def lease_holder(claim: ClaimStatus | None, shares: Iterable[ClaimStatus] = ()) -> LeaseHolder | None:
    """Return who holds a GPU, from what was found of its claim, or of the claims that share it."""
    if claim is None:
        return None
    found = [
        LeaseHolder(
            one.pid, one.user, one.job, one.command, one.since, until=one.until, uid=one.uid or 0, share=one.share
        )
        for one in (*shares, claim)
    ]
    return LeaseHolder.of_sharers(found[:-1]) if len(found) > 1 else found[0]
