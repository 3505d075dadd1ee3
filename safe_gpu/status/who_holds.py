"""Who holds a lease and who waits with a ticket, for people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.holders.by_kernel import holder_by_kernel, locked_by
from ..coordination.queue.waiting_process import waiting_process
from ..host import procfs

if TYPE_CHECKING:
    from ..coordination.holders.of_gpus import LockedFile
    from ..coordination.leases.record import LeaseRecord
    from ..coordination.queue.ticket import Ticket


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
    """What /proc says of processes. Each is read once, however many files name it.

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
        self.family_of = cache(procfs.family_of)

    def holder_of(self, file: LockedFile) -> int | None:
        """Return a process that has this file open and locked, as far as this user may see.

        The first query reads all of /proc.
        """
        if self._holders is None:
            self._holders = {identity: pid for pid in procfs.pids() for identity in locked_by(pid, self._names)}
        return self._holders.get((file.device, file.inode))

    def holder_of_socket(self, inode: int | None) -> tuple[int | None, Collection[str]]:
        """Return a process that has this socket, as far as this user may see, and the paths of its open files."""
        for pid in procfs.pids() if inode is not None else ():
            files = (procfs.open_files(pid) or {}).values()
            if f"socket:[{inode}]" in files:
                return pid, files
        return None, ()


def who_holds(file: LockedFile, record: LeaseRecord | None, processes: ProcessTable) -> LockHolder:
    """Return the process that holds a lease.

    Args:
        record: of the lease; None if it cannot be read.
    """
    pid, uid = holder_by_kernel(record, file.lockers)
    namespace = procfs.namespace_text(record.pidns) if record is not None else ""
    if record is not None and uid is not None:
        return LockHolder(pid, uid, f"{namespace}, as process {record.pid} there" if namespace else "")
    heir = processes.holder_of(file)
    if heir is not None:
        pid, uid = heir, processes.real_uid_of(heir)
    elif file.named is not None:
        pid, uid = holder_by_kernel(record, file.lockers, file.named)
    if record is None:
        known = f"process {pid} holds the lock" if pid else "its holder cannot be seen from here"
        return LockHolder(pid, uid, f"its record cannot be read; {known}")
    named = f"process {record.pid}{namespace and f' {namespace}'}"
    if not namespace and record.of_the_dead:
        still = f"process {pid}" if pid is not None and uid is not None else "a process that it started"
        note = f"{named}, which claimed it, has ended; {still} still holds it"
    elif uid is not None and pid is not None:
        note = f"its record names {named}, which does not hold the lock; process {pid} does"
    elif pid is not None:
        note = f"its record, of {named}, does not fit process {pid}, which /proc/locks names"
    elif namespace:
        note = f"{namespace}, as process {record.pid} there, which cannot be seen from here"
    else:
        note = "its holder cannot be seen from here (in another container?): this is from its record"
    return LockHolder(pid, uid, note)


def who_waits(ticket: Ticket, lockers: Sequence[int], processes: ProcessTable) -> tuple[int | None, str | None, str]:
    """Return the pid of a waiter, its user and a note like that of :class:`LockHolder`.

    The user is the owner of the ticket's file, whatever its content, if a process of that user keeps it locked.

    Args:
        lockers: pids that /proc/locks shows for the ticket.
    """
    pid = waiting_process(ticket, lockers, processes.has_ended, processes.real_uid_of)
    user = None if pid is None else procfs.user_name(ticket.uid)
    namespace = procfs.namespace_text(ticket.pidns)
    notes = [f"{namespace}, as process {ticket.pid} there"] if namespace else []
    if pid is None:
        notes.append("which cannot be seen from here" if namespace else "its process cannot be seen from here")
    return pid, user, ", ".join(notes)
