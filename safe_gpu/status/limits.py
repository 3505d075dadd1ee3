"""Which waiters cannot start because their user holds as many GPUs as the policy allows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ..gpus.devices import vendor_of
from ..host.procfs import user_name
from ..selection.request import Selection
from ..selection.sharing import LEAST_SHARE, ROUNDING, part_of
from ..settings import policy

if TYPE_CHECKING:
    from ..coordination.queue.ticket import Ticket
    from .facts import GpuStatus


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


def at_limits(tickets: Sequence[Ticket], gpus: Iterable[GpuStatus], path: str, now: float) -> dict[int, AtLimit]:
    """Return the limit of the user, by the number of the ticket, where the policy file at ``path`` makes it wait.

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
            end = claim.until or math.inf, part_of(one.gpu, claim.share if claim.share_known else LEAST_SHARE)
            ends.setdefault((claim.uid, one.gpu.vendor), []).append(end)
    found = {}
    for ticket in tickets:
        request, most = ticket.request, most_of(ticket.uid)
        if request is None or most is None or request.inside:
            continue
        own = sorted(ends.get((ticket.uid, vendor_of(next(iter(request.gpus), ""))), ()))
        held, selection = sum(part for _, part in own), Selection.from_ticket(request.nb_gpus, request.conditions)[0]
        lacking = held + selection.amount(one.gpu for one in gpus) - most
        if lacking > ROUNDING:
            freed = accumulate(part for _, part in own)
            until = next(
                (end for (end, _), sum_ in zip(own, freed, strict=True) if sum_ >= lacking - ROUNDING), math.inf
            )
            found[ticket.seq] = AtLimit(round(held, 2), most, max(until, now))
    return found
