"""The queue: first come, first served, without a daemon.

A ticket is a file ``queue/SEQ.ticket`` that its waiter keeps locked; the number orders, the lock says that the waiter
lives. A waiter sleeps on the nearest ticket before it that competes for the same GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from ..errors import SafeGpuError, StateDirError
from .cleaners import StateDirGuard
from .files import StateDir, state_dir_path, write_all
from .host_lock import MINIMUM_PATIENCE, HostLock, LockedHost, fork_guard, lock_file, unlock_file
from .signals import DeferredSignals
from .tickets import (
    TICKET_MODE,
    Listing,
    Ticket,
    TicketRequest,
    encode_ticket,
    open_live,
    present,
    read_ticket,
    ticket_name,
)

# How often to look where no thread can be had to sleep in.
_THREADLESS_PAUSE = 0.1


class WaiterAhead:
    """The nearest live competitor ahead, with a descriptor of its ticket to sleep on, owned by the caller."""

    def __init__(self, ticket: Ticket, fd: int) -> None:
        self.ticket = ticket
        self.fd = fd
        self.sleeper: _Sleeper | None = None

    def close(self) -> None:
        """Close the descriptor, unless a sleeper took it over; safe to call twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class _Predecessors:
    """Who stands ahead of a waiter. Nobody comes to be ahead of a ticket, so with one they only grow fewer.

    Listing the queue takes time among hundreds of waiters, so one that has a ticket lists it no more.

    Args:
        listing: of the queue, as it was before host.lock was taken.
    """

    def __init__(self, demand: TicketRequest, listing: Listing) -> None:
        self._demand = demand
        self._listing = listing
        self._before: list[int] = []  # those that may still stand in the way, in order
        self._listed: LockedHost | None = None
        self._read: dict[int, Ticket] = {}

    def refresh(self, host: LockedHost) -> None:
        """Find out who is there, once for each hold of host.lock."""
        if self._listed is not host:
            self._listed = host
            self._listing.update(host.queue)
            self._before = list(self._listing.numbers)

    def nearest(self, host: LockedHost, beyond: WaiterAhead | None) -> WaiterAhead | None:
        """The nearest live ticket that competes, or the nearest ahead of ``beyond``, which is closed."""
        if beyond is not None:
            beyond.close()
        never: set[int] = set()
        try:
            for seq in reversed(self._before):
                if beyond is not None and seq >= beyond.ticket.seq:
                    continue
                competitor = self._competitor(host, seq)
                if competitor is not None:
                    return competitor
                never.add(seq)
            return None
        finally:
            if never:
                self._before = [seq for seq in self._before if seq not in never]

    def _competitor(self, host: LockedHost, seq: int) -> WaiterAhead | None:
        """The live ticket with this number, where it competes; None where it does not, and then it never will."""
        seen = open_live(host, seq, self._read.get(seq))
        if seen is None:
            return None
        ticket, fd = seen
        if not ticket.competes_with(self._demand):
            os.close(fd)
            return None
        if ticket.demand is not None:
            self._read[seq] = ticket
        return WaiterAhead(ticket, fd)

    def everybody(self, host: LockedHost) -> Iterator[Ticket]:
        """The live tickets that compete, in the order of the queue, each as it is asked for."""
        for seq in list(self._before):
            competitor = self._competitor(host, seq)
            if competitor is not None:
                competitor.close()
                yield competitor.ticket

    def fewer_than(self, number: int) -> bool:
        """Whether fewer than this may still stand ahead, competitors or not. Lists the queue, without a lock."""
        if len(self._before) >= number:
            with DeferredSignals(), StateDir(state_dir_path()) as root, StateDir("queue", root) as queue:
                self._before = present(queue, self._before)
        return len(self._before) < number

    def standing(self) -> list[Ticket]:
        """Those that compete. Tickets are read and not probed, without a lock: one that died a moment ago may count."""
        with DeferredSignals(), StateDir(state_dir_path()) as root, StateDir("queue", root) as queue:
            tickets = [self._ticket(queue, seq) for seq in present(queue, self._before)]
        return [ticket for ticket in tickets if ticket is not None and ticket.competes_with(self._demand)]

    def _ticket(self, queue: StateDir, seq: int) -> Ticket | None:
        ticket = self._read.get(seq)
        if ticket is None:
            ticket = read_ticket(queue, seq)
            if ticket is None:
                return None
            if ticket.demand is not None:  # without host.lock, it may just not be written yet
                self._read[seq] = ticket
        return ticket


class Waiter:
    """This process's place in the queue, from the first look on; it holds a ticket only after :meth:`join`.

    Args:
        listing: of the queue, brought up to date by the caller before each host.lock until there is a ticket.
    """

    def __init__(self, demand: TicketRequest, listing: Listing | None = None) -> None:
        self.demand = demand
        self.since = 0.0  # when it took its ticket
        self._seq: int | None = None
        self._fd = -1
        self._listing = listing or Listing()
        self._ahead = _Predecessors(demand, self._listing)
        self._kept = StateDirGuard(by_children=False)

    @property
    def queued(self) -> bool:
        """Whether it holds a ticket."""
        return self._seq is not None

    def join(self, host: LockedHost) -> None:
        """Take a ticket behind everyone who is there, where it has none yet.

        Raises:
            StateDirError: no room, or the queue is closed to us.
        """
        if self.queued:
            return
        self._kept.hold(host)
        self._ahead.refresh(host)
        seq = self._listing.highest + 1
        fd = host.queue.create(name := ticket_name(seq), TICKET_MODE)
        if fd is None:  # host.lock is held and the number was free: somebody meddles
            raise StateDirError(f"{host.queue.path}/{name} appeared while host.lock was held", path=host.queue.path)
        try:
            lock_file(fd)
            write_all(fd, encode_ticket(os.getpid(), self.demand), os.path.join(host.queue.path, name))
        except BaseException:
            host.queue.unlink(name)
            os.close(fd)
            raise
        fork_guard.add(fd)
        self._seq, self._fd = seq, fd
        self.since = time.time()

    def nearest(self, host: LockedHost, *, beyond: WaiterAhead | None = None) -> WaiterAhead | None:
        """The nearest live ticket ahead that competes; without a ticket of its own, all are ahead.

        Args:
            beyond: one that may be passed: the nearest ahead of that one; it is closed.
        """
        if beyond is None and not self.queued:
            self._ahead.refresh(host)
        return self._ahead.nearest(host, beyond)

    def everybody_ahead(self, host: LockedHost) -> Iterator[Ticket]:
        """Every live ticket ahead that competes, after :meth:`nearest` under the same hold of host.lock."""
        return self._ahead.everybody(host)

    def position(self) -> int:
        """1 for the head of those who compete with it, counting itself.

        Reads tickets and probes none, so it needs no lock and holds up nobody; one that died a moment ago may count.
        """
        return 1 + len(self._ahead.standing())

    def competing(self) -> list[Ticket]:
        """The tickets ahead that compete, in order, read as :meth:`position` does."""
        return self._ahead.standing()

    def among_first(self, number: int) -> bool:
        """Whether it is certainly one of the first ``number`` in the queue. Cheaper than :meth:`position`."""
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
        return ahead.sleeper.done.wait(seconds)

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
        DeferredSignals().through(self._close_now)

    def _close_now(self) -> None:
        self._kept.release()
        fd, self._fd, self._seq = self._fd, -1, None
        if fd in fork_guard:  # in a forked child it is not: the ticket is its parent's, the descriptor is closed
            fork_guard.discard(fd)
            unlock_file(fd)
            os.close(fd)


def _put_to_sleep(ahead: WaiterAhead) -> None:
    """Give a competitor the sleeper on its ticket, with its descriptor; none where no thread can be had."""
    status = os.fstat(ahead.fd)
    key = (os.getpid(), status.st_dev, status.st_ino)
    sleeper = _sleepers.get(key)
    if sleeper is None or sleeper.done.is_set():
        fd, ahead.fd = ahead.fd, -1
        try:
            sleeper = _Sleeper(key, fd)
        except RuntimeError:
            return
    ahead.sleeper = sleeper
    ahead.close()


class _Sleeper:
    """Waits in a daemon thread for one lock: flock(2) knows no deadline, and a thread can be left behind.

    The next sleeper on that lock finds the one that was left behind, so that there is never more than one for each.
    """

    def __init__(self, key: tuple[int, int, int], fd: int) -> None:
        import threading

        self.key = key
        self.done = threading.Event()
        fork_guard.add(fd)
        try:
            threading.Thread(target=self._run, args=(fd,), name="safe_gpu-waiter", daemon=True).start()
        except RuntimeError:
            fork_guard.discard(fd)
            os.close(fd)
            raise
        _sleepers[key] = self

    def _run(self, fd: int) -> None:
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            unlock_file(fd)
        except OSError:
            pass  # the waiter looks again
        finally:
            fork_guard.discard(fd)
            os.close(fd)
            self.done.set()
            _sleepers.pop(self.key, None)


_sleepers: dict[tuple[int, int, int], _Sleeper] = {}
"""Process, device and inode -> who sleeps on that ticket."""
