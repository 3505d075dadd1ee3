"""A claim's place in the queue.

The rule is that of :mod:`safe_gpu.selection.backfill`. This module gathers what it needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..host.outer_claim import end_of_outer

if TYPE_CHECKING:
    from ...coordination.locks.host_lock import LockedHost
    from ...coordination.queue.listing import Listing
    from ...coordination.queue.predecessors import Order
    from ...coordination.queue.ticket import Ticket
    from ...coordination.queue.waiter import Waiter
    from ..host.host_view import HostView
    from ..limits import LeasesByUser, Quota
    from ..times import HoldTime


class QueuePlace:
    """The place of one claim. ``waiter`` is None until another process is found waiting or this claim waits.

    ``by_turns`` is whether users are served by turns. While there is a waiter it stays as it was, whatever root's file
    says by then: a ticket whose turn and whose own order differ could wait for one that waits for it.
    """

    def __init__(self, view: HostView, hold: HoldTime, quota: Quota | None = None, job: str | None = None) -> None:
        self.waiter: Waiter | None = None
        self.by_turns = False
        self._listed: Listing | None = None
        self._view = view
        self._hold = hold
        self._quota = quota
        self._job = job

    def ensure_waiter(self) -> Waiter:
        """Return the waiter of this claim, created on the first call. It holds a ticket only after ``join``."""
        if self.waiter is None:
            from ...coordination.queue.ticket import TicketRequest
            from ...coordination.queue.waiter import Waiter

            view = self._view
            stems = frozenset(view.outer.stem(uuid) for uuid in view.wanted)
            request = TicketRequest(view.request.nb_gpus, stems, view.effective.ticket, self.hold_for(), self._job)
            self.by_turns = self._quota is not None and self._quota.by_turns and not view.outer
            self.waiter = Waiter(request, self._listing(), self._order())
        return self.waiter

    def _order(self) -> Order | None:
        if not self.by_turns:
            return None
        from ...coordination.queue.turns import by_turn

        return by_turn

    def join(self, host: LockedHost, holdings: LeasesByUser | None, is_absent: Callable[[Ticket], bool]) -> bool:
        """Take a ticket, if this claim has none. Returns whether it stands ahead of somebody by that.

        Args:
            holdings: which users hold what; not None where they are served by turns.
            is_absent: whether a waiter counts as absent.
        """
        waiter, turn_of = self.ensure_waiter(), None
        if self.by_turns and not waiter.queued and self._quota is not None and holdings is not None:
            from ...coordination.queue.turns import turn_of_newcomer

            turn_of = partial(
                turn_of_newcomer,
                waiter.request,
                uid=os.geteuid(),
                held=holdings.own_held(),
                size=holdings.size,
                weight=self._quota.limits.weight or 1.0,
                counts=lambda ticket: waiter.lives(host, ticket) and not is_absent(ticket),
            )
        return waiter.join(host, turn_of)

    def hold_for(self) -> float | None:
        """Return for how long this claim will probably hold its GPUs from now on, in seconds; None is unknown."""
        seconds = self._hold.at(time.time(), end_of_outer(self._view.outer))
        if self._quota is None or self._view.outer:
            return seconds
        from ..limits import hold_within

        return hold_within(seconds, self._quota.limits, said=self._hold.said)

    def prepare(self, host: LockedHost) -> None:
        """List those who wait before host.lock is taken, since others wait meanwhile."""
        if not self.queued and not host.queue.is_empty():
            from ...coordination.queue.live import read_ticket
            from ...coordination.queue.waiter import Waiter  # noqa: F401 - while no lock is held
            from .queue_snapshot import QueueSnapshot  # noqa: F401

            listing = self._listing()
            listing.update(host.queue)
            if self._quota is not None and self._quota.by_turns:
                for seq in listing.present():
                    read_ticket(host.queue, seq)  # what it says is kept

    def _listing(self) -> Listing:
        if self._listed is None:
            from ...coordination.queue.listing import Listing

            self._listed = Listing()
        return self._listed

    @property
    def queued(self) -> bool:
        """Whether this claim holds a ticket."""
        return self.waiter is not None and self.waiter.queued

    @property
    def position(self) -> int:
        """Position among the waiters that compete for the same GPUs; 1 is the head."""
        return 1 if self.waiter is None else self.waiter.position()

    def among_first(self, number: int) -> bool:
        """Return whether this claim is certainly one of the first ``number`` waiters."""
        return self.waiter is None or self.waiter.among_first(number)

    def abandon(self, host: LockedHost) -> None:
        """Remove the ticket while host.lock is held. The next ticket may compete for other GPUs."""
        if self.waiter is not None:
            self.waiter.abandon(host)
            self.waiter = None

    def leave(self) -> None:
        """Remove the ticket. Safe to call twice."""
        if self.waiter is not None:
            self.waiter.leave()
