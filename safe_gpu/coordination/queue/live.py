"""The tickets whose waiters live."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ..locks.flock import unlock_file
from .listing import Listing
from .ticket import Ticket, decode_file, is_ticket, ticket_name

if TYPE_CHECKING:
    from ..files.state_dir import StateDir
    from ..locks.host_lock import LockedHost

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def read_ticket(queue: StateDir, seq: int) -> Ticket | None:
    """Return what a ticket says, dead or alive; None where there is none, or it is closed to us.

    Raises:
        StateDirError: this process cannot open more files.
    """
    if (fd := _opened(queue, seq)) is None:
        return None
    try:
        return decode_file(seq, fd)
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
        ticket = decode_file(seq, fd)
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
    if is_ticket(os.fstat(fd)):
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
