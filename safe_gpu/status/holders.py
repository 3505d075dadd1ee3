"""Who holds a lease and who waits with a ticket, for people: by the kernel's word, to which a record only adds.

/proc/locks shows a flock under the pid that took it, for as long as any process has that open file description. So the
process that took the lock may have exited while a child still holds it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from .. import procfs
from ..coordination.holders import holder_by_kernel, locked_by

if TYPE_CHECKING:
    from ..coordination.leases import LeaseRecord
    from ..coordination.queue import Ticket


@dataclass(frozen=True)
class LockedFile:
    """A locked file: its name, its device and inode, and the pids that /proc/locks shows for its inode."""

    name: str
    device: int
    inode: int
    lockers: tuple[int, ...] = ()


class LockHolder(NamedTuple):
    """The result of :func:`who_holds`.

    Attributes:
        pid: a process that holds the lock, by the kernel; None if none can be seen from this process.
        uid: its real uid; None if another process may have that pid by now.
        note: a clause about anything unusual, for users; "" in the usual case.
    """

    pid: int | None
    uid: int | None
    note: str = ""


class ProcessTable:
    """What /proc says of processes: each is asked once, however many files name it.

    Args:
        names: the names (without directories) of the leases whose holders will be looked for.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._holders: dict[tuple[int, int], int] | None = None
        self.has_ended = cache(procfs.has_ended)
        self.is_stopped = cache(procfs.is_stopped)
        self.real_uid_of = cache(procfs.real_uid_of)
        self.describe = cache(procfs.describe_process)
        self.ancestors = cache(procfs.ancestors)

    def holder_of(self, file: LockedFile) -> int | None:
        """A process that has this file open and locked, as far as this user may see. The first query reads all of
        /proc."""
        if self._holders is None:
            self._holders = {identity: pid for pid in procfs.pids() for identity in locked_by(pid, self._names)}
        return self._holders.get((file.device, file.inode))


def who_holds(file: LockedFile, record: LeaseRecord | None, processes: ProcessTable) -> LockHolder:
    """The process that holds a lease.

    Args:
        record: of the lease; None if it cannot be read.
    """
    pid, uid = holder_by_kernel(record, file.lockers)
    place = procfs.place_of(record.pidns) if record is not None else ""
    if record is not None and uid is not None:
        return LockHolder(pid, uid, f"{place}, as process {record.pid} there" if place else "")
    heir = processes.holder_of(file)
    if heir is not None:
        pid, uid = heir, processes.real_uid_of(heir)
    if record is None:
        known = f"process {pid} holds the lock" if pid else "its holder cannot be seen from here"
        return LockHolder(pid, uid, f"its record cannot be read; {known}")
    named = f"process {record.pid}{place and f' {place}'}"
    if not place and record.of_the_dead:
        still = f"process {pid}" if uid is not None else "a process that it started"
        note = f"{named}, which claimed it, has ended; {still} still holds it"
    elif uid is not None:
        note = f"its record names {named}, which does not hold the lock; process {pid} does"
    elif pid is not None:
        note = f"its record, of {named}, does not fit process {pid}, which /proc/locks names"
    elif place:
        note = f"{place}, as process {record.pid} there, which cannot be seen from here"
    else:
        note = "its holder cannot be seen from here (in another container?): this is from its record"
    return LockHolder(pid, uid, note)


def who_waits(ticket: Ticket, lockers: Collection[int], processes: ProcessTable) -> tuple[int | None, str | None, str]:
    """The pid of a waiter, its user and a note like that of :class:`Holding`.

    The user is the owner of the ticket's file, whatever stands in it, unless only others keep that file locked.

    Args:
        lockers: pids that /proc/locks shows for the ticket.
    """
    living = [pid for pid in lockers if not processes.has_ended(pid)]
    pid = next((pid for pid in living if processes.real_uid_of(pid) == ticket.uid), None)
    user = procfs.user_name(ticket.uid) if pid or not living else None
    place = procfs.place_of(ticket.pidns)
    notes = [f"{place}, as process {ticket.pid} there"] if place else []
    if pid is None:
        notes.append("which cannot be seen from here" if place else "its process cannot be seen from here")
    return pid, user, ", ".join(notes)
