"""Tickets of the queue: files ``queue/SEQ.ticket``, each kept locked by its waiter, and what stands in them."""

from __future__ import annotations

import bisect
import errno
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from .. import procfs
from . import decoding
from .files import StateDir
from .host_lock import LockedHost, unlock_file

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
_LONGEST_STEM = 100  # UUID.inner
_LONGEST_NAME = 64


def ticket_name(seq: int) -> str:
    """The file of a number.

    >>> ticket_name(7)
    '7.ticket'
    """
    return f"{seq}{_SUFFIX}"


class TicketRequest(NamedTuple):
    """What a waiter wants, as far as others must know it.

    ``gpus`` are the lease names' stems that it could use (UUIDs, or ``UUID.inner`` inside a scope); ``min_memory`` in
    bytes, None where it does not matter; ``hold_for`` is for how many seconds it will probably hold them, None where it
    did not say.
    """

    nb_gpus: int
    gpus: frozenset[str]
    min_memory: int | None = None
    hold_for: float | None = None

    def competes_with(self, other: TicketRequest) -> bool:
        """Whether both could end up wanting the same GPU."""
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
        """Whether it wants any of the same GPUs; a ticket that cannot be read is taken to."""
        return self.demand is None or self.demand.competes_with(demand)

    def is_same(self, other: Ticket) -> bool:
        """Whether both are one waiter's. Numbers and inodes are used again within seconds, these are not."""
        return (self.since, self.pid, self.pidns) == (other.since, other.pid, other.pidns)

    def is_stopped(self, frozen: dict[bytes, bool] | None = None) -> bool:
        """Whether its waiter is stopped or frozen (Ctrl-Z, a suspended job). In another PID namespace nobody knows.

        Args:
            frozen: as for :func:`~safe_gpu.procfs.is_stopped`, for a look at many tickets.
        """
        if not self.pid or self.pidns not in (None, procfs.pid_namespace()):
            return False
        return procfs.is_stopped(self.pid, frozen)


def encode_ticket(pid: int, demand: TicketRequest) -> bytes:
    import json

    request = {"nb_gpus": demand.nb_gpus, "gpus": sorted(demand.gpus), "min_memory": demand.min_memory}
    user = procfs.well_formed(procfs.user_name(os.geteuid()))
    fields: dict[str, Any] = {"pid": pid, "pidns": procfs.pid_namespace(), "user": user, "request": request}
    fields["hold_for"] = demand.hold_for
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
        memory, pidns = request.get("min_memory"), raw.get("pidns")
        demand = TicketRequest(
            decoding.as_int(request["nb_gpus"], 1, _MOST_GPUS),
            frozenset(str(stem)[:_LONGEST_STEM] for stem in request["gpus"]),
            None if memory is None else decoding.as_int(memory, 0, _MOST_MEMORY),
            decoding.as_seconds(raw.get("hold_for"), 1),
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


class Listing:
    """The tickets of a queue that count. It is read before host.lock is taken, since a neighbour can make many files,
    and under it only what has come since then is looked at.

    A name with leading zeros, or too long, is nobody's. No number counts after a gap that no queue makes.

    Attributes:
        numbers: of the tickets that count, in order. highest: of all names, 0 for none.
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
        """Whether it is a ticket, the first name of it, and one of the first of its user."""
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
    """Those of these numbers that still have a file, in the same order."""
    names = set(queue.names())
    return [seq for seq in numbers if ticket_name(seq) in names]


def _number(name: str) -> int | None:
    stem = name[: -len(_SUFFIX)]
    if not (name.endswith(_SUFFIX) and stem.isdecimal() and stem.isascii() and len(stem) <= _DIGITS):
        return None
    return int(stem) if stem[0] != "0" or stem == "0" else None


def _is_ticket(status: os.stat_result) -> bool:
    """Whether a file of the queue is a ticket, by its mode. host.lock and leases have another one: links to these
    would be live tickets for as long as a claim lives, or for ever, since who looks at a ticket holds host.lock."""
    return status.st_mode == stat.S_IFREG | TICKET_MODE


def ticket_owners(queue: StateDir) -> set[int]:
    """Uids of the owners of all ticket files, dead ones too. Takes no lock."""
    found = set()
    for name in queue.names():
        if name.endswith(_SUFFIX):
            with suppress(OSError):  # gone
                found.add(os.stat(name, dir_fd=queue.fd, follow_symlinks=False).st_uid)
    return found


def read_ticket(queue: StateDir, seq: int) -> Ticket | None:
    """What a ticket says, dead or alive; None where there is none, or it is closed to us.

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
    """A ticket whose waiter holds it, and a descriptor of its file, for reading. The dead are unlinked where this user
    may.

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
    """Everyone who waits, first come first.

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
