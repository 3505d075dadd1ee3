"""Read the state directory at one moment: held leases and tickets, and the processes that hold them.

/proc/locks shows a flock under the pid that took it, for as long as any process has that open file description. So the
process that took the lock may have exited while a child still holds it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from .. import procfs
from ..coordination.files import LeaseDir, StateDir
from ..coordination.holders import holder_by_kernel, locked_by
from ..coordination.leases import LeaseRecord, leases_of, names_of_host, probe, read_faults, read_record
from ..coordination.locks import HostLock
from ..coordination.queue import Listing, Ticket, live_tickets
from ..coordination.socket_names import held_among
from ..devices import GpuFault
from ..errors import LockTimeout, SafeGpuError, StateDirError
from ..selection.verdicts import recent_faults

if TYPE_CHECKING:
    from ..devices import Gpu


# Who holds a lease and who waits with a ticket, for people: the kernel decides, and a record only adds to it.


@dataclass(frozen=True)
class LockedFile:
    """A locked file: its name, its device and inode, and the pids that /proc/locks shows for its inode.

    ``note`` says why a lease is closed although it is held, so that its holder is not known.
    """

    name: str
    device: int
    inode: int
    lockers: tuple[int, ...] = ()
    note: str = ""


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
    """Return the pid of a waiter, its user and a note like that of :class:`LockHolder`.

    The user is the owner of the ticket's file, whatever its content, unless only others keep that file locked.

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


# The state directory at one moment: held leases and tickets, probed under one short hold of host.lock.


# How long to wait for host.lock, seconds. It is held for microseconds, unless its holder is stopped or hundreds of
# processes want it at once.
_PATIENCE = 5.0


@dataclass
class HostFacts:
    """The leases and tickets at one moment.

    Attributes:
        files: the held leases, by name.
        records: the records of these leases, by name, as far as they can be read.
        elsewhere: UUIDs of the GPUs that are held by name only.
        faults: UUID -> note, of the GPUs that are taken last because a claim failed on them.
        closed: why a lease cannot be opened, by name.
        tickets: the tickets of all waiters.
        locks: inode -> pids that lock it, for all of these files.
        warnings: sentences that say which facts are not known, and why.
    """

    files: dict[str, LockedFile] = field(default_factory=dict)
    records: dict[str, LeaseRecord] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    faults: Mapping[str, GpuFault] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)
    locks: Mapping[int, list[int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def look(path: str, gpus: Collection[Gpu], prefix: str = "") -> HostFacts:
    """Probe every lease and ticket in a state directory. It is not created if missing. Errors become warnings.

    Args:
        prefix: what stands before the UUIDs of this host in names.
    """
    found, uuids = HostFacts(), [gpu.uuid for gpu in gpus]
    try:
        _look_under_host_lock(found, path, uuids, prefix)
    except LockTimeout as err:
        found.warnings.append(f"{err}. The queue cannot be read now, and claims are shown as in /proc/locks.")
        try:
            _look_without_host_lock(found, path, uuids)
            _find_names(found, uuids, prefix)
        except SafeGpuError as second:
            found.warnings.append(str(second))
    except SafeGpuError as err:
        found.warnings.append(f"The claims are not known: {err}")
    return found


def _look_under_host_lock(found: HostFacts, path: str, uuids: Collection[str], prefix: str) -> None:
    listing = Listing()
    try:
        with StateDir(path, make=False) as root, StateDir("queue", root, make=False) as queue:
            listing.update(queue)
        with HostLock(time.monotonic() + _PATIENCE, path, make=False) as host:
            host.leases.names_of_host = partial(names_of_host, uuids)
            found.tickets = live_tickets(host, listing)
            device = os.fstat(host.queue.fd).st_dev
            _find_leases(
                found,
                host.leases,
                uuids,
                lambda name: probe(host, name),
                dict.fromkeys((ticket.inode for ticket in found.tickets), device),
            )
            _find_names(found, uuids, prefix)
        mark_seen(path, found.files)
    except FileNotFoundError:  # nothing is claimed by file
        with (
            suppress(FileNotFoundError),
            StateDir(path, make=False) as root,
            LeaseDir("leases", root, make=False) as leases,
        ):
            _find_leases(found, leases, uuids, lambda name: False)
        _find_names(found, uuids, prefix)


def mark_seen(path: str, names: Collection[str]) -> None:
    """Set the time of these lease files, which were just seen held, to now.

    A claim that dies is then known to have lived until now.
    """
    if not names:
        return
    with (
        suppress(StateDirError, OSError),
        StateDir(path, make=False) as root,
        StateDir("leases", root, make=False) as leases,
    ):
        for name in names:
            with suppress(StateDirError, OSError):
                if (fd := leases.open(name)) is not None:
                    try:
                        os.utime(fd)
                    finally:
                        os.close(fd)


def _look_without_host_lock(found: HostFacts, path: str, uuids: Collection[str]) -> None:
    """Find held leases in /proc/locks only. That takes no lock, but does not show locks of other PID namespaces."""
    with StateDir(path, make=False) as root, LeaseDir("leases", root, make=False) as leases:
        inodes: dict[str, int] = {}
        for name in names_of_host(uuids):
            with suppress(OSError):
                inodes[name] = os.stat(name, dir_fd=leases.fd, follow_symlinks=False).st_ino
        locks = procfs.flock_holders(set(inodes.values()))
        _find_leases(found, leases, uuids, lambda name: inodes.get(name) in locks)


def _find_leases(
    found: HostFacts,
    leases: LeaseDir,
    uuids: Collection[str],
    is_held: Callable[[str], bool],
    devices: Mapping[int, int] = MappingProxyType({}),
) -> None:
    """Find held leases with their records, and who locks them and the tickets' files.

    Args:
        devices: inode -> device of the tickets' files.
    """
    held: dict[str, os.stat_result] = {}
    for name in names_of_host(uuids):
        try:
            if not is_held(name):
                continue
            status = os.stat(name, dir_fd=leases.fd, follow_symlinks=False)
        except StateDirError as err:
            found.closed[name] = str(err)
            continue
        except OSError:
            continue  # the file was removed since it was probed
        if other := leases.twin(name, status):
            found.files[name] = LockedFile(name, 0, 0, note=str(leases.linked(name, other)))
            continue
        held[name] = status
        record = read_record(leases, name)
        if record is not None:
            found.records[name] = record
    found.faults = recent_faults(read_faults(leases, list(uuids)), time.time())
    devices = {**devices, **{status.st_ino: status.st_dev for status in held.values()}}
    found.locks = procfs.flock_holders(devices, devices, b"FLOCK", held=devices)
    for name, status in held.items():
        lockers = tuple(found.locks.get(status.st_ino, ()))
        found.files[name] = LockedFile(name, status.st_dev, status.st_ino, lockers)


def _find_names(found: HostFacts, uuids: Collection[str], prefix: str) -> None:
    found.elsewhere = held_among([uuid for uuid in uuids if not found.files.keys() & leases_of([uuid])], prefix)
