"""When each waiter of the queue can expect to start. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..selection.backfill import BackfillRequest, free_at, starts

if TYPE_CHECKING:
    from ..coordination.queue import Ticket


class _Claim(Protocol):
    @property
    def since(self) -> float | None: ...
    @property
    def until(self) -> float | None: ...


class Occupancy(NamedTuple):
    """One device: whether it is free, the claim that holds it, and the claim inside that one."""

    uuid: str
    free: bool
    claim: _Claim | None
    inner: _Claim | None


def expected_starts(tickets: Sequence[Ticket], gpus: Iterable[Occupancy], now: float) -> list[float | None]:
    """Unix seconds for each ticket, in the order of the queue; None where somebody did not say for how long.

    A waiter that is stopped, or that no release of claims can satisfy, has none and keeps nobody waiting.
    """
    ends: dict[str, float] = {}
    coming: set[str] = set()
    for gpu in gpus:
        inner = f"{gpu.uuid}.inner"
        ends[gpu.uuid] = now if gpu.free else _end(gpu.claim, now)
        ends[inner] = now if gpu.inner is None else _end(gpu.inner, now)
        if gpu.free or gpu.claim is not None:
            coming |= {gpu.uuid, inner}
    wants: dict[int, BackfillRequest] = {}
    for place, ticket in enumerate(tickets):
        demand = ticket.demand
        if demand is None:  # nobody knows what it wants, so nobody behind it knows more
            wants[place] = BackfillRequest(len(ends) + 1, frozenset(ends))
        elif not ticket.is_stopped() and len(demand.gpus & coming) >= demand.nb_gpus:
            hold_for = math.inf if demand.hold_for is None else demand.hold_for
            wants[place] = BackfillRequest(demand.nb_gpus, demand.gpus, hold_for)
    found = dict(zip(wants, starts(wants.values(), ends), strict=True))
    return [_known(found.get(place, math.inf)) for place in range(len(tickets))]


def _end(claim: _Claim | None, now: float) -> float:
    return math.inf if claim is None else free_at(now, since=claim.since or 0.0, until=claim.until)


def _known(moment: float) -> float | None:
    return None if moment == math.inf else round(moment, 3)
