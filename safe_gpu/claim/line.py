"""A claim's place in the queue. The queue's code is loaded only if the claim or another process waits."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from ..coordination.files import StateDir, state_dir_path
from ..coordination.signals import DeferredSignals
from .nested import end_of_outer

if TYPE_CHECKING:
    from ..coordination.locks import LockedHost
    from ..coordination.queue import Listing, Waiter
    from .hold_for import HoldTime
    from .host_view import HostView
    from .quota import Quota


class QueuePlace:
    """The place of one claim. ``waiter`` is None until another process is found waiting or this claim waits."""

    def __init__(self, view: HostView, hold: HoldTime, quota: Quota | None = None) -> None:
        self.waiter: Waiter | None = None
        self._listed: Listing | None = None
        self._view = view
        self._hold = hold
        self._quota = quota

    def stand(self) -> Waiter:
        """The waiter of this claim, created on the first call. It holds a ticket only after ``join``."""
        if self.waiter is None:
            from ..coordination.queue import TicketRequest, Waiter

            view = self._view
            stems = (f"{gpu.uuid}.inner" if view.outer else gpu.uuid for gpu in view.usable)
            demand = TicketRequest(view.request.nb_gpus, frozenset(stems), view.request.min_memory, self.hold_for())
            self.waiter = Waiter(demand, self._listing())
        return self.waiter

    def hold_for(self) -> float | None:
        """For how long this claim will probably hold its GPUs from now on, in seconds; None is unknown."""
        seconds = self._hold.at(time.time(), end_of_outer(self._view.outer))
        if self._quota is None or self._view.outer:
            return seconds
        from .quota import hold_within

        return hold_within(seconds, self._quota.limits, said=self._hold.said)

    def prepare(self) -> None:
        """List those who wait before host.lock is taken, for others wait meanwhile."""
        if self.waiter is not None and self.waiter.queued:
            return
        with (
            DeferredSignals(),
            suppress(FileNotFoundError),
            StateDir(state_dir_path(), make=False) as root,
            StateDir("queue", root, make=False) as queue,
        ):
            if not queue.is_empty():
                from ..coordination.queue import Waiter  # noqa: F401 - while no lock is held

                self._listing().update(queue)

    def _listing(self) -> Listing:
        if self._listed is None:
            from ..coordination.queue import Listing

            self._listed = Listing()
        return self._listed

    @property
    def position(self) -> int:
        """Position among the waiters that compete for the same GPUs; 1 is the head."""
        return 1 if self.waiter is None else self.waiter.position()

    def among_first(self, number: int) -> bool:
        """Whether this claim is certainly one of the first ``number`` waiters."""
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
