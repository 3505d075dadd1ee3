"""A glance at the queue without host.lock: whether a claim that has just joined it certainly has to wait.

A crowd comes at once, and each look under host.lock holds up the waiter whose turn it is. Almost all of the crowd need
none: no GPU is free, or those ahead want the ones that are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..coordination.files import StateDir, state_dir_path
from ..coordination.leases import is_empty
from ..selection.possible import capacity

if TYPE_CHECKING:
    from collections.abc import Collection

    from ..coordination.queue import Ahead
    from ..coordination.tickets import Demand, Ticket
    from .host_view import HostView
    from .line import Line

__all__ = ["certain_to_wait"]


def certain_to_wait(view: HostView, line: Line) -> Ahead | None:
    """The nearest waiter ahead, open to sleep on, if this claim may not pass it; None if only a look can tell.

    The facts are as old as they are after a look: whoever sleeps on that ticket looks again when it goes. A lease whose
    holder was killed counts as held here, and a killed waiter as alive.
    """
    waiter = line.stand()
    ends = waiter.ends()
    if ends is None:
        return None
    nearest, first = ends
    waits = False
    try:
        with StateDir(state_dir_path()) as root, StateDir("leases", root) as leases:
            leased = {gpu.uuid for gpu in view.usable if not is_empty(leases, view.lease_name(gpu.uuid))}
        free = view.unoccupied.keys() - leased
        demand = waiter.demand._replace(hold_for=line.hold_for())
        waits = _is_there(view, nearest.ticket, leased | view.unoccupied.keys()) and (
            len(free) < demand.nb_gpus or _is_closed(view, demand, nearest.ticket, first, free)
        )
    finally:
        if not waits:
            nearest.close()
    return nearest if waits else None


def _is_there(view: HostView, ticket: Ticket, within_reach: Collection[str]) -> bool:
    """Whether a waiter certainly does not count as absent: it goes on, and no stranger sits on what it needs."""
    wanted = ticket.demand
    if wanted is None or wanted.min_memory is not None or ticket.is_stopped():
        return False
    return _among(view, wanted, within_reach) >= wanted.nb_gpus


def _is_closed(view: HostView, demand: Demand, nearest: Ticket, first: Ticket, free: Collection[str]) -> bool:
    """Whether all GPUs of the request are closed to it, by the rule of :mod:`safe_gpu.selection.backfill`."""
    if demand.hold_for is None:
        return nearest.demand is not None and demand.gpus <= nearest.demand.gpus
    # The first of the queue has what it needs now, so that nobody passes it however short.
    return _is_there(view, first, free) and first.demand is not None and demand.gpus <= first.demand.gpus


def _among(view: HostView, wanted: Demand, uuids: Collection[str]) -> int:
    return capacity([gpu for gpu in view.usable if gpu.uuid in wanted.gpus and gpu.uuid in uuids])
