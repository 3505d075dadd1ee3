"""The queue: tickets in files, first come, first served, without a daemon.

A ticket is a file ``queue/SEQ.ticket`` that its waiter keeps locked; the number orders, the lock says that the waiter
lives. A waiter sleeps on the nearest ticket before it that competes for the same GPUs.
"""

from __future__ import annotations

import bisect
import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from .. import procfs
from ..errors import SafeGpuError, StateDirError
from . import records as decoding
from .files import StateDir, write_all
from .locks import MINIMUM_PATIENCE, HostLock, LockedHost, StateDirGuard, fork_guard, lock_file, opened, unlock_file
from .signals import DeferredSignals

# Tickets of the queue: files ``queue/SEQ.ticket``, each kept locked by its waiter, and what stands in them.


TICKET_MODE = 0o644
"""Nobody but its waiter writes a ticket. flock(2) asks for no permission to write."""

_SUFFIX = ".ticket"

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

# Of the tickets of one user, except root, that many count: who makes more does not hold up the others.
_MOST_OF_ONE_USER = 1000

# A longer number than this is nobody's: arithmetic on it would be slow, and other languages could not hold it.
_DIGITS = 18

# No queue gets so far by counting. A number further above the one before it was made up to use the numbers up.
_WIDEST_GAP = 10**12

# The kernel gives files the time of its latest tick, which come each 10 ms or more often; nanoseconds, to be sure.
_TICK = 20_000_000

# What no request exceeds. A ticket that does is unreadable.
_MOST_GPUS = 4096
_MOST_MEMORY = 1 << 60
_MOST_CONDITIONS = 16
_LONGEST_STEM = 100  # UUID.inner
_LONGEST_NAME = 64
_LONGEST_JOB = 100


def ticket_name(seq: int) -> str:
    """Return the file of a number.

    >>> ticket_name(7)
    '7.ticket'
    """
    return f"{seq}{_SUFFIX}"


class TicketRequest(NamedTuple):
    """What a waiter wants, as far as others must know it.

    ``gpus`` are the lease names' stems that it could use (UUIDs, or ``UUID.inner`` inside a scope); ``conditions`` are
    the names and JSON values of what else it asks of them; ``hold_for`` is for how many seconds it will probably hold
    them, None where it did not say; ``job`` is the batch job, for people.
    """

    nb_gpus: int
    gpus: frozenset[str]
    conditions: tuple[tuple[str, Any], ...] = ()
    hold_for: float | None = None
    job: str | None = None

    def competes_with(self, other: TicketRequest) -> bool:
        """Return whether both could end up wanting the same GPU."""
        return not self.gpus.isdisjoint(other.gpus)


class Ticket(NamedTuple):
    """A place in the queue as others see it.

    ``since`` in Unix seconds; ``demand`` None: unreadable; ``pidns``: the inode of the PID namespace in which ``pid``
    is a number, None where it is not known; ``uid``: the owner of the file, whatever stands in it, -1 if not known.
    """

    seq: int
    inode: int
    pid: int
    user: str
    since: float
    demand: TicketRequest | None
    pidns: int | None = None
    uid: int = -1

    def competes_with(self, demand: TicketRequest) -> bool:
        """Return whether it wants any of the same GPUs; a ticket that cannot be read is taken to."""
        return self.demand is None or self.demand.competes_with(demand)

    def is_same(self, other: Ticket) -> bool:
        """Return whether both are one waiter's. Numbers and inodes are used again within seconds, these are not."""
        return (self.since, self.pid, self.pidns) == (other.since, other.pid, other.pidns)

    def is_stopped(self, known: dict[int | bytes, bool] | None = None) -> bool:
        """Return whether its waiter is stopped or frozen (Ctrl-Z, a suspended job). In another PID namespace nobody
        knows.

        Args:
            known: as for :func:`~safe_gpu.procfs.is_stopped`, for a look at many tickets.
        """
        if not self.pid or self.pidns not in (None, procfs.pid_namespace()):
            return False
        return procfs.is_stopped(self.pid, known)


def encode_ticket(pid: int, demand: TicketRequest) -> bytes:
    import json

    request = {"nb_gpus": demand.nb_gpus, "gpus": sorted(demand.gpus), "min_memory": None, **dict(demand.conditions)}
    user = procfs.well_formed(procfs.user_name(os.geteuid()))
    fields: dict[str, Any] = {"pid": pid, "pidns": procfs.pid_namespace(), "user": user, "request": request}
    fields["hold_for"], fields["job"] = demand.hold_for, demand.job
    return json.dumps({**fields, "since": round(time.time(), 6)}).encode() + b"\n"


_SHORT = 4096
_decoded: dict[tuple[int, int], tuple[bytes, Ticket]] = {}
"""Number and inode -> content and what it says, of short tickets: waiters look at the same ones again and again."""


def _read(seq: int, fd: int) -> Ticket:
    status = os.fstat(fd)
    inode, data = status.st_ino, os.pread(fd, decoding.LONGEST_FILE, 0)
    kept = _decoded.get((seq, inode))
    if kept is not None and kept[0] == data:
        return kept[1]
    ticket = _decode(seq, inode, data)._replace(uid=status.st_uid)
    if len(data) <= _SHORT:
        if len(_decoded) >= _SHORT:
            _decoded.clear()
        _decoded[seq, inode] = data, ticket
    return ticket


def _decode(seq: int, inode: int, data: bytes) -> Ticket:
    import json

    try:
        raw: dict[str, Any] = json.loads(data.decode("utf-8", "replace"))
        request = raw["request"]
        pidns = raw.get("pidns")
        demand = TicketRequest(
            decoding.as_int(request["nb_gpus"], 1, _MOST_GPUS),
            frozenset(str(stem)[:_LONGEST_STEM] for stem in request["gpus"]),
            tuple(_conditions(request)),
            decoding.as_seconds(raw.get("hold_for"), 1),
            None if raw.get("job") is None else decoding.as_text(raw["job"], _LONGEST_JOB),
        )
        pid = int(raw["pid"])
        return Ticket(
            seq,
            inode,
            pid if 0 < pid < 1 << 31 else 0,
            decoding.as_text(raw["user"], _LONGEST_NAME),
            decoding.as_time(raw["since"]),
            demand,
            None if pidns is None else decoding.as_int(pidns, 0, 1 << 63),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Ticket(seq, inode, 0, "unknown", 0.0, None)


def _conditions(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a request has besides its number and its GPUs. A value that is no plain one makes sense to nobody."""
    for name in sorted(request.keys() - {"nb_gpus", "gpus"})[:_MOST_CONDITIONS]:
        value = request[name]
        if name == "min_memory" and value is not None:
            value = decoding.as_int(value, 0, _MOST_MEMORY)
        if value is not None:
            plain = isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= _LONGEST_NAME)
            yield decoding.as_text(name, _LONGEST_NAME), value if plain else ""


class Listing:
    """The tickets of a queue that count. It is read before host.lock is taken, since a neighbour can make many files,
    and under it only what has come since then is looked at.

    A name with leading zeros, or too long, is nobody's. No number counts after a gap that no queue makes.

    Attributes:
        numbers: of the tickets that count, in order.
        highest: of all names, 0 for none.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.highest = 0
        self._names: frozenset[str] = frozenset()
        self._unchanged: tuple[int, ...] = ()
        self._inodes: set[int] = set()
        self._of_user: dict[int, int] = {}

    def update(self, queue: StateDir) -> None:
        """Add what stands there now. What is gone stays in ``numbers``."""
        recently = time.time_ns() - _TICK
        status = os.fstat(queue.fd)
        state = status.st_dev, status.st_ino, status.st_mtime_ns
        if state == self._unchanged:
            return
        self._unchanged = state if status.st_mtime_ns < recently else ()  # a change from now on has a later time
        names = frozenset(queue.names())
        fresh = sorted(seq for name in names - self._names if (seq := _number(name)) is not None)
        self._names = names
        for seq in fresh:
            if seq - self.highest > _WIDEST_GAP:
                return
            self.highest = max(self.highest, seq)
            if len(names) <= _MOST_OF_ONE_USER or self._counts(queue, seq):
                bisect.insort(self.numbers, seq)

    def _counts(self, queue: StateDir, seq: int) -> bool:
        """Return whether it is a ticket, the first name of it, and one of the first of its user."""
        try:
            status = os.stat(ticket_name(seq), dir_fd=queue.fd, follow_symlinks=False)
        except OSError:
            return False  # gone
        if not _is_ticket(status) or status.st_ino in self._inodes:
            return False
        self._inodes.add(status.st_ino)
        self._of_user[status.st_uid] = number = self._of_user.get(status.st_uid, 0) + 1
        return number <= _MOST_OF_ONE_USER or not status.st_uid


def present(queue: StateDir, numbers: Iterable[int]) -> list[int]:
    """Return those of these numbers that still have a file, in the same order."""
    names = set(queue.names())
    return [seq for seq in numbers if ticket_name(seq) in names]


def _number(name: str) -> int | None:
    stem = name[: -len(_SUFFIX)]
    if not (name.endswith(_SUFFIX) and stem.isdecimal() and stem.isascii() and len(stem) <= _DIGITS):
        return None
    return int(stem) if stem[0] != "0" or stem == "0" else None


def _is_ticket(status: os.stat_result) -> bool:
    """Return whether a file of the queue is a ticket, by its mode. host.lock and leases have another one: links to
    these would be live tickets for as long as a claim lives, or always, since who looks at a ticket holds
    host.lock."""
    return status.st_mode == stat.S_IFREG | TICKET_MODE


def ticket_owners(queue: StateDir) -> set[int]:
    """Return the uids of the owners of all ticket files, dead ones too. Takes no lock."""
    found = set()
    for name in queue.names():
        if name.endswith(_SUFFIX):
            with suppress(OSError):  # gone
                found.add(os.stat(name, dir_fd=queue.fd, follow_symlinks=False).st_uid)
    return found


def read_ticket(queue: StateDir, seq: int) -> Ticket | None:
    """Return what a ticket says, dead or alive; None where there is none, or it is closed to us.

    Raises:
        StateDirError: this process cannot open more files.
    """
    if (fd := _opened(queue, seq)) is None:
        return None
    try:
        return _read(seq, fd)
    finally:
        os.close(fd)


def open_live(host: LockedHost, seq: int, known: Ticket | None = None) -> tuple[Ticket, int] | None:
    """Return a ticket whose waiter holds it, and a descriptor of its file, for reading. The dead are unlinked where
    this user may.

    Args:
        known: what was read of it before.

    Raises:
        StateDirError: this process cannot open more files.
    """
    import fcntl

    if (fd := _opened(host.queue, seq)) is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        ticket = _read(seq, fd)
        if known is None or ticket.is_same(known):
            return ticket, fd
        os.close(fd)  # the queue was removed and made anew: this ticket came later
        return None
    unlock_file(fd)
    os.close(fd)
    host.queue.unlink(ticket_name(seq))
    return None


def _opened(queue: StateDir, seq: int) -> int | None:
    try:
        fd = os.open(ticket_name(seq), _OPEN, dir_fd=queue.fd)
    except OSError as err:
        if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise queue.error(ticket_name(seq), err) from err
        return None
    if _is_ticket(os.fstat(fd)):
        return fd
    os.close(fd)
    return None


def live_tickets(host: LockedHost, listing: Listing | None = None) -> list[Ticket]:
    """Return everyone who waits, first come first.

    Args:
        listing: of the queue, as it was before host.lock was taken.
    """
    listing = listing or Listing()
    listing.update(host.queue)
    found: dict[int, Ticket] = {}
    for seq in listing.numbers:
        if (seen := open_live(host, seq)) is not None:
            ticket, fd = seen
            os.close(fd)
            found.setdefault(ticket.inode, ticket)
    return list(found.values())


# The queue: first come, first served, without a daemon.


# How often to look where no thread to sleep in can be started.
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
        """Return the nearest live ticket that competes, or the nearest ahead of ``beyond``, which is closed."""
        if beyond is not None:
            beyond.close()
        never: set[int] = set()
        try:
            end = None if beyond is None else bisect.bisect_left(self._before, beyond.ticket.seq)
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
        if ticket.demand is not None:
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
        """Return the nearest live ticket ahead that competes; without a ticket of its own, all are ahead.

        Args:
            beyond: one that may be passed: the nearest ahead of that one; it is closed.
        """
        if beyond is None and not self.queued:
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
    sleeper = _sleepers.get(key)
    if sleeper is None or not sleeper.sleeps.locked():
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
        # Not an Event: of two signals in a row the second may come while Event.wait() takes its lock back, and then it
        # raises an error of its own.
        self.sleeps = threading.Lock()
        self.sleeps.acquire()
        fork_guard.add(fd)
        try:
            threading.Thread(target=self._run, args=(fd,), name="safe_gpu-waiter", daemon=True).start()
        except RuntimeError:
            fork_guard.discard(fd)
            os.close(fd)
            raise
        _sleepers[key] = self

    def wait(self, seconds: float) -> bool:
        """Return whether the lock was given back within that time. Several threads may wait."""
        if not self.sleeps.acquire(timeout=seconds):
            return False
        self.sleeps.release()
        return True

    def _run(self, fd: int) -> None:
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if fd in fork_guard:
                unlock_file(fd)
        except OSError:
            pass  # the waiter looks again
        finally:
            if fork_guard.discard(fd):
                os.close(fd)
            self.sleeps.release()
            _sleepers.pop(self.key, None)


_sleepers: dict[tuple[int, int, int], _Sleeper] = {}
"""Process, device and inode -> who sleeps on that ticket."""
