"""A claim's place in the queue.

The rule is that of :mod:`safe_gpu.selection.backfill`. This module gathers what it needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...coordination.entry import Entry
    from ...coordination.host_lock import Host
    from ...coordination.queue import Waiter
    from ..arguments import HoldTime
    from ..limits import ClaimsByUser, Quota
    from ..view import HostView


class QueuePlace:
    """The place of one claim. ``waiter`` is None until another process is found waiting or this claim waits.

    Args:
        said: returns what the ticket says of this process.
    """

    def __init__(
        self,
        host: Host,
        view: HostView,
        hold: HoldTime,
        said: Callable[[], Mapping[str, Any]],
        quota: Quota | None = None,
    ) -> None:
        self.waiter: Waiter | None = None
        self._host = host
        self._view = view
        self._hold = hold
        self._said = said
        self._quota = quota

    @property
    def by_turns(self) -> bool:
        """Whether this claim waits where users are served by turns."""
        return self.waiter is not None and self.waiter.by_turns

    @property
    def since(self) -> float | None:
        """When it joined the queue, Unix seconds; None if it did not wait."""
        return None if self.waiter is None else self.waiter.since

    def ensure_waiter(self) -> Waiter:
        """Return the waiter of this claim, created on the first call. It holds a ticket only after ``join``."""
        if self.waiter is None:
            from ...coordination.queue import TicketRequest, Waiter

            view = self._view
            wanted, conditions = frozenset(view.wanted), view.effective.ticket
            request = TicketRequest(view.request.nb_gpus, wanted, conditions, self.hold_for(), view.inside)
            by_turns = self._quota is not None and self._quota.by_turns and not view.around
            self.waiter = Waiter(self._host, request, by_turns=by_turns)
        return self.waiter

    def join(self, held: ClaimsByUser | None, is_absent: Callable[[Entry], bool]) -> bool:
        """Take a ticket, if this claim has none. Returns whether it stands ahead of somebody by that.

        Args:
            held: which users hold what; not None where they are served by turns.
            is_absent: whether a waiter counts as absent.
        """
        waiter = self.ensure_waiter()
        if waiter.queued and not waiter.was_removed():
            return False
        if not waiter.by_turns or self._quota is None or held is None:
            return waiter.join(self._said())
        from ...coordination.turns import turn_of_newcomer

        weight = self._quota.limits.weight or 1.0

        def newcomer(others: list[tuple[float, Entry]]) -> float:
            return turn_of_newcomer(
                waiter.request.competes_with,
                waiter.request.gpus,
                others,
                self._host.queue.next_number,
                uid=os.geteuid(),
                held=held.own_held(),
                size=held.size,
                weight=weight,
                counts=lambda ticket: self._host.queue.ask(ticket.name) is not None and not is_absent(ticket),
            )

        return waiter.join(self._said(), newcomer)

    def hold_for(self) -> float | None:
        """Return for how long this claim will probably hold its GPUs from now on, in seconds; None is unknown."""
        around = self._view.around
        seconds = self._hold.at(time.time(), around.until if around else None)
        if self._quota is None or around:
            return seconds
        from ..limits import hold_within

        return hold_within(seconds, self._quota.limits, said=self._hold.said)

    def prepare(self) -> None:
        """Read before host.lock is taken what the look will need of those who wait, since others wait meanwhile."""
        if self._quota is not None and self._quota.by_turns:
            self._host.queue.look(())
        if self._host.queue.listed():
            from .queue_snapshot import QueueSnapshot  # noqa: F401 - while no lock is held

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

    def leave(self) -> None:
        """Remove the ticket. Safe to call twice. The next one may compete for other GPUs."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None:
            waiter.leave()
