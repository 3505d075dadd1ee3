"""Which process waits with a ticket, by the kernel's word."""

from collections.abc import Callable, Sequence
from contextlib import suppress

from ...errors import StateDirError
from ...host import procfs
from ..files.state_dir import opened
from ..holders.by_kernel import MOST_LOCKERS, lockers_of
from .ticket import Ticket, ticket_name


def waiting_process(
    ticket: Ticket,
    lockers: Sequence[int],
    has_ended: Callable[[int], bool] = procfs.has_ended,
    real_uid_of: Callable[[int], int | None] = procfs.real_uid_of,
) -> int | None:
    """Return the living process of the owner of a ticket that keeps it locked; None if none can be seen.

    Then no user is to be named: a process that sleeps on a ticket gets its lock when the waiter is killed.

    Args:
        lockers: pids that /proc/locks shows for the ticket.
        has_ended, real_uid_of: as in :mod:`~safe_gpu.host.procfs`, for a look at many tickets.
    """
    alike = (pid for pid in lockers[:MOST_LOCKERS] if not has_ended(pid) and real_uid_of(pid) == ticket.uid)
    return next(alike, None)


def lockers_of_ticket(ticket: Ticket) -> Sequence[int]:
    """Return the pids that /proc/locks shows for a ticket. Takes no lock."""
    with suppress(StateDirError, FileNotFoundError), opened("queue", make=False) as queue:
        if (status := queue.status(ticket_name(ticket.seq))) is not None:
            return lockers_of([status]).get(ticket.inode, ())
    return ()
