"""Who stands ahead of a waiter."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..files.state_dir import StateDir, opened
from .listing import Listing, present
from .live import open_live, read_ticket
from .ticket import Ticket, TicketRequest

if TYPE_CHECKING:
    from ..locks.host_lock import LockedHost
    from .sleeper import Sleeper


class WaiterAhead:
    """The nearest live competitor ahead, with a descriptor of its ticket to sleep on, owned by the caller."""

    def __init__(self, ticket: Ticket, fd: int) -> None:
        self.ticket = ticket
        self.fd = fd
        self.sleeper: Sleeper | None = None

    def close(self) -> None:
        """Close the descriptor, unless a sleeper took it over; safe to call twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


Order = Callable[[Iterable[Ticket]], list[tuple[float, Ticket]]]


class Predecessors:
    """Who stands ahead of a waiter.

    Listing the queue takes time among hundreds of waiters. In the order of arrival nobody comes to be ahead of a
    ticket, so a waiter that has one lists the queue no more. In the order of turns somebody may.

    Args:
        listing: of the queue, as it was before host.lock was taken.
        order: of turns; None is that of arrival.
    """

    def __init__(self, request: TicketRequest, listing: Listing, order: Order | None) -> None:
        self._demand = request
        self._listing = listing
        self._order = order
        self._own: tuple[float, int] | None = None
        self._before: list[int] = []  # those that may still stand in the way, in order
        self._listed: LockedHost | None = None
        self._read: dict[int, Ticket] = {}

    def refresh(self, host: LockedHost) -> None:
        """Find out who is there, once for each hold of host.lock."""
        if self._listed is not host and (self._own is None or self._order):
            self._listed = host
            self._list(host.queue)

    def _list(self, queue: StateDir) -> None:
        changed = self._listing.update(queue)
        if self._order is None:
            self._before = list(self._listing.numbers)
        elif changed or self._own is None:
            own = self._own or (math.inf, 0)
            self._before = [ticket.seq for turn, ticket in self.in_order(queue) if (turn, ticket.seq) < own]

    def in_order(self, queue: StateDir) -> list[tuple[float, Ticket]]:
        """Return the tickets of the latest list in the order of turns, each with its turn; none by arrival."""
        if self._order is None:
            return []
        tickets = (self._ticket(queue, seq) for seq in self._listing.present())
        return self._order(ticket for ticket in tickets if ticket is not None)

    def joined(self, seq: int, turn: float | None) -> None:
        """Tell where the waiter itself stands from now on."""
        self._own = turn or 0.0, seq

    def nearest(self, host: LockedHost, beyond: WaiterAhead | None) -> WaiterAhead | None:
        """Return the nearest live ticket that competes, or the nearest ahead of ``beyond``, which is closed."""
        if beyond is not None:
            beyond.close()
        never: set[int] = set()
        try:
            end = None if beyond is None else self._before.index(beyond.ticket.seq)
            for seq in reversed(self._before[:end]):
                competitor = self._competitor(host, seq)
                if competitor is not None:
                    return competitor
                never.add(seq)
            return None
        finally:
            if never:
                self._before = [seq for seq in self._before if seq not in never]

    def _competitor(self, host: LockedHost, seq: int) -> WaiterAhead | None:
        """Return the live ticket with this number, where it competes; None where it does not, and then it never
        will."""
        seen = open_live(host, seq, self._read.get(seq))
        if seen is None:
            return None
        ticket, fd = seen
        if not ticket.competes_with(self._demand):
            os.close(fd)
            return None
        if ticket.request is not None:
            self._read[seq] = ticket
        return WaiterAhead(ticket, fd)

    def everybody(self, host: LockedHost) -> Iterator[Ticket]:
        """Yield the live tickets that compete, in the order of the queue, each as it is asked for."""
        for seq in list(self._before):
            competitor = self._competitor(host, seq)
            if competitor is not None:
                competitor.close()
                yield competitor.ticket

    def fewer_than(self, number: int) -> bool:
        """Return whether fewer than this may still stand ahead, competitors or not. Lists the queue, without a lock."""
        if len(self._before) >= number:
            with opened("queue") as queue:
                self._before = present(queue, self._before)
        return len(self._before) < number

    def standing(self) -> list[Ticket]:
        """Return those that compete. Tickets are read and not probed, without a lock: one that died a moment ago may
        count."""
        with opened("queue") as queue:
            if self._order is not None:
                self._list(queue)
            tickets = [self._ticket(queue, seq) for seq in present(queue, self._before)]
        return [ticket for ticket in tickets if ticket is not None and ticket.competes_with(self._demand)]

    def _ticket(self, queue: StateDir, seq: int) -> Ticket | None:
        ticket = self._read.get(seq)
        if ticket is None:
            ticket = read_ticket(queue, seq)
            if ticket is None:
                return None
            if ticket.request is not None:  # without host.lock, it may just not be written yet
                self._read[seq] = ticket
        return ticket
