"""This process's place in the queue, from the first look on.

A ticket is a file ``queue/SEQ.ticket`` that its waiter keeps locked; the number orders, the lock says that the waiter
lives. A waiter sleeps on the nearest ticket before it that competes for the same GPUs.
"""

import os
import time
from collections.abc import Callable, Iterator

from ...errors import SafeGpuError, StateDirError
from ..files.descriptors import fork_guard
from ..files.state_dir import write_all
from ..locks.cleaner_guard import StateDirGuard
from ..locks.flock import lock_file, unlock_file
from ..locks.host_lock import MINIMUM_PATIENCE, HostLock, LockedHost
from ..signals import DeferredSignals
from .listing import Listing
from .live import open_live
from .predecessors import Order, Predecessors, WaiterAhead
from .sleeper import Sleeper, sleepers
from .ticket import TICKET_MODE, Ticket, TicketRequest, encode_ticket, ticket_name

# How often to look where no thread to sleep in can be started.
_THREADLESS_PAUSE = 0.1


class Waiter:
    """This process's place in the queue, from the first look on; it holds a ticket only after :meth:`join`.

    Args:
        listing: of the queue, brought up to date by the caller before each host.lock until there is a ticket.
        order: returns tickets in the order of turns, each with its turn; None is the order of arrival.
    """

    def __init__(self, request: TicketRequest, listing: Listing | None = None, order: Order | None = None) -> None:
        self.request = request
        self.since = 0.0  # when it took its ticket
        self._seq: int | None = None
        self._fd = -1
        self._listing = listing or Listing()
        self._ahead = Predecessors(request, self._listing, order)
        self._kept = StateDirGuard(by_children=False)

    @property
    def queued(self) -> bool:
        """Whether it holds a ticket."""
        return self._seq is not None

    def came_before(self, ticket: Ticket) -> bool:
        """Return whether it holds a ticket with a lower number than that one."""
        return self._seq is not None and self._seq < ticket.seq

    def join(self, host: LockedHost, turn_of: Callable[[list[tuple[float, Ticket]], int], float] | None = None) -> bool:
        """Take a ticket, where it has none yet: behind everyone who is there, or with a turn.

        Args:
            turn_of: returns the turn, from the others in the order of turns and the number of the new ticket.

        Returns:
            Whether it stands ahead of somebody now. Without a ticket, all were ahead.

        Raises:
            StateDirError: no room, or the queue is closed to us.
        """
        if self.queued:
            return False
        self._kept.hold(host)
        self._ahead.refresh(host)
        seq = self._listing.highest + 1
        order = self._ahead.in_order(host.queue)
        turn = None if turn_of is None else turn_of(order, seq)
        fd = host.queue.create(name := ticket_name(seq), TICKET_MODE)
        if fd is None:  # host.lock is held and the number was free: somebody meddles
            raise StateDirError(f"{host.queue.path}/{name} appeared while host.lock was held", path=host.queue.path)
        try:
            lock_file(fd)
            write_all(fd, encode_ticket(os.getpid(), self.request, turn), os.path.join(host.queue.path, name))
        except BaseException:
            host.queue.unlink(name)
            os.close(fd)
            raise
        fork_guard.add(fd)
        self._seq, self._fd = seq, fd
        self._ahead.joined(seq, turn)
        self.since = time.time()
        return turn is not None and bool(order) and turn < order[-1][0]

    def lives(self, host: LockedHost, ticket: Ticket) -> bool:
        """Return whether the waiter with this ticket lives."""
        seen = open_live(host, ticket.seq, ticket)
        if seen is not None:
            os.close(seen[1])
        return seen is not None

    def nearest(self, host: LockedHost, *, beyond: WaiterAhead | None = None) -> WaiterAhead | None:
        """Return the nearest live ticket ahead that competes; without a ticket of its own, all are ahead.

        Args:
            beyond: one that may be passed: the nearest ahead of that one; it is closed.
        """
        if beyond is None:
            self._ahead.refresh(host)
        return self._ahead.nearest(host, beyond)

    def everybody_ahead(self, host: LockedHost) -> Iterator[Ticket]:
        """Return every live ticket ahead that competes, after :meth:`nearest` under the same hold of host.lock."""
        return self._ahead.everybody(host)

    def position(self) -> int:
        """Return 1 for the head of those who compete with it, counting itself.

        Reads tickets and probes none, so it needs no lock and holds up nobody; one that died a moment ago may count.
        """
        return 1 + len(self._ahead.standing())

    def competing(self) -> list[Ticket]:
        """Return the tickets ahead that compete, in order, read as :meth:`position` does."""
        return self._ahead.standing()

    def among_first(self, number: int) -> bool:
        """Return whether it is certainly one of the first ``number`` in the queue. Cheaper than :meth:`position`."""
        return self._ahead.fewer_than(number)

    def sleep_behind(self, ahead: WaiterAhead, seconds: float) -> bool:
        """Sleep until that ticket goes (True), or until the time has passed. Takes over the descriptor.

        May be called again for the same competitor, which goes on sleeping.
        """
        if ahead.sleeper is None:
            with DeferredSignals():
                _put_to_sleep(ahead)
            if ahead.sleeper is None:  # no room for one more thread (ulimit -u, h_vmem): look now and then
                time.sleep(min(seconds, _THREADLESS_PAUSE))
                return True
        return ahead.sleeper.wait(seconds)

    def leave(self) -> None:
        """Give the ticket back; safe to call twice, and without one."""
        if self._seq is None:
            self._close()
            return
        try:
            with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
                self.abandon(host)
        except SafeGpuError:
            pass
        finally:
            self._close()  # an unlocked file counts for nothing, and the next one who passes removes it

    def abandon(self, host: LockedHost) -> None:
        """Give the ticket back, host.lock being held already."""
        if self._seq is not None and self._fd in fork_guard:
            name = ticket_name(self._seq)
            if host.queue.is_current(name, self._fd):
                host.queue.unlink(name)
        self._close()

    def _close(self) -> None:
        DeferredSignals().run_deferred(self._close_now)

    def _close_now(self) -> None:
        self._kept.release()
        fd, self._fd, self._seq = self._fd, -1, None
        if fork_guard.discard(fd):  # in a forked child the ticket is its parent's
            unlock_file(fd)
            os.close(fd)


def _put_to_sleep(ahead: WaiterAhead) -> None:
    """Give a competitor the sleeper on its ticket, with its descriptor; none if no thread can be started."""
    status = os.fstat(ahead.fd)
    key = (os.getpid(), status.st_dev, status.st_ino)
    sleeper = sleepers.get(key)
    if sleeper is None or not sleeper.sleeps.locked():
        fd, ahead.fd = ahead.fd, -1
        try:
            sleeper = Sleeper(key, fd)
        except RuntimeError:
            return
    ahead.sleeper = sleeper
    ahead.close()
