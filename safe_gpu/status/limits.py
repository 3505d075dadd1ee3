"""Which waiters cannot start because their user holds as many GPUs as the policy allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from .. import policy
from ..devices import vendor_of
from ..errors import PolicyError

if TYPE_CHECKING:
    from ..coordination.queue import Ticket
    from .facts import GpuStatus


class AtLimit(NamedTuple):
    """A user who holds ``held`` of ``most`` GPUs; ``until``: when enough of them are expected to be given back, Unix
    seconds, ``math.inf`` if that is not known."""

    held: int
    most: int
    until: float


def at_limits(tickets: Sequence[Ticket], gpus: Iterable[GpuStatus], path: str, now: float) -> dict[int, AtLimit]:
    """Number of a ticket -> the limit of its user, where that stands in its way by the policy file at ``path``.

    A file that is broken says nothing here: claims report it. Takes no lock; a directory may be asked.
    """
    try:
        rules = policy.read(path)[0] if tickets else None
    except PolicyError:
        rules = None
    if rules is None or not rules.limits_gpus:
        return {}
    most_of = cache(lambda uid: policy.limits_of_user(rules, uid).max_gpus)
    ends: dict[tuple[int | None, str], list[float]] = {}
    for one in gpus:
        if one.claim is not None and one.claim.elsewhere is None:
            ends.setdefault((one.claim.uid, one.gpu.vendor), []).append(one.claim.until or math.inf)
    found = {}
    for ticket in tickets:
        demand, most = ticket.demand, most_of(ticket.uid)
        if demand is None or most is None or any(stem.endswith(".inner") for stem in demand.gpus):
            continue
        own = sorted(ends.get((ticket.uid, vendor_of(next(iter(demand.gpus), ""))), ()))
        lacking = len(own) + demand.nb_gpus - most
        if lacking > 0:
            until = own[lacking - 1] if lacking <= len(own) else math.inf
            found[ticket.seq] = AtLimit(len(own), most, max(until, now))
    return found
