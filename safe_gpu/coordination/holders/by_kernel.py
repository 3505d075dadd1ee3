"""Who holds a lease or a name, by the kernel's word.

Everybody may write into records, so a record alone does not say whose claim it is.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...gpus.devices import MOST_SHARERS
from ...host import procfs
from ...host.commands import command_of
from ...host.foreign_files import read_start
from ..directory import is_everybodys
from ..files.lease_dir import HOST_LOCK
from ..files.state_dir import StateDir
from ..leases.claim_end import LONGEST
from ..leases.file_names import inner_name, lease_name, names_of_host, slot_name
from ..leases.record import LeaseRecord, read_record
from ..name_table import NamedSocket, NameTable, read_names
from ..socket_names import inner_of, name_of, slot_of

MOST_LOCKERS = 16
"""An exclusive lock has one locker. Of a file that somebody keeps locked shared, no more than these are looked at."""


def holder_by_kernel(
    record: LeaseRecord | None, lockers: Sequence[int], named: int | None = None
) -> tuple[int | None, int | None]:
    """Return the pid and real uid of the process that /proc/locks names for a lease.

    Pids are used again, so it is certain only where its start is that of the record (the same number in all PID
    namespaces). Else the uid is that of who holds the name. Without one, the pid is of a process that may hold the
    lock; None if none can be seen.

    Args:
        record: of the lease; None if it cannot be read.
        lockers: as from :func:`lockers_of`.
        named: the user who has made the socket with the name of the GPU; None if that is not known.
    """
    living = [pid for pid in lockers[:MOST_LOCKERS] if not procfs.has_ended(pid)]
    for pid in living:
        if record is not None and record.start is not None and record.start == procfs.start_time(pid):
            uid = procfs.real_uid_of(pid)
            if uid is not None:
                return pid, uid
    if named is not None:
        return next((pid for pid in living if procfs.real_uid_of(pid) == named), None), named
    return next((pid for pid in living if record is None or pid != record.pid or record.start is None), None), None


def user_and_command(record: LeaseRecord | None, pid: int | None, uid: int | None) -> tuple[str | None, str | None]:
    """Return the user and command of a holder, for people. Without a uid the record says them, and the user is
    marked."""
    said = record.command if record is not None else None
    if uid is not None:
        return procfs.user_name(uid), said if pid is None else command_of(pid, said)
    return f"says: {record.user}" if record is not None and record.user else None, said


def lockers_of(files: Collection[os.stat_result]) -> procfs.LockTable:
    """Return inode -> pids that took a lock (flock) on that file, as /proc/locks shows them. Some may have ended."""
    devices = {status.st_ino: status.st_dev for status in files}
    return procfs.flock_holders(devices, devices, b"FLOCK", [one.st_ino for one in files if one.st_size > LONGEST])


def files_and_names(uuid: str, prefix: str) -> dict[str, str]:
    """Return lease file -> name, of all that a claim of this device, or one inside it, may hold."""
    found = {lease_name(uuid): name_of(uuid, prefix), inner_name(uuid): inner_of(uuid, prefix)}
    found.update((slot_name(uuid, slot), slot_of(uuid, slot, prefix)) for slot in range(MOST_SHARERS))
    return found


class LeaseOwners(NamedTuple):
    """Whose leases are, by what the kernel told at one moment.

    Attributes:
        users: name of a lease -> real uid of who holds it. For a GPU that is held by name only it is that of its lease.
        records: the records in the lease files before the kernel was asked, by name: what came since has another.
        known: False if others have too many locks or sockets for the kernel's tables to be read to their end.
        names: the names that were held.
    """

    users: Mapping[str, int] = {}
    records: Mapping[str, LeaseRecord | None] = {}
    known: bool = True
    names: NameTable = NameTable()


def lease_owners(directory: StateDir, uuids: Iterable[str], prefix: str = "") -> LeaseOwners:
    """Return who holds these devices, except inside other claims, as far as the kernel tells.

    That is the process that /proc/locks names for the lease, else who has made the socket with the name of the GPU,
    else this user, if a process of it has inherited the lock. Each file counts once, whatever names it has; host.lock
    and a file of another mode, such as a ticket, are no lease. Host.lock must not be held.
    """
    files = _lease_files(directory, uuids := tuple(uuids))
    records = {name: read_record(directory, name) for name in files}
    names, locks = read_names(), lockers_of(files.values())
    users: dict[str, int] = {}
    seen, heirless = set(), {}
    for uuid in uuids:
        pairs = {name: one for name, one in files_and_names(uuid, prefix).items() if name in files}
        for name, socket in pairs.items():
            status, record = files[name], records[name]
            held = names.get(socket)
            _, uid = holder_by_kernel(record, locks.get(status.st_ino, ()), held and held.uid)
            if held is not None or status.st_ino in locks:
                seen.add(name)
            if uid is not None:
                users[name] = uid
            elif record is not None:
                heirless[name] = status
        if seen.isdisjoint(pairs) and (uid := names.owner(uuid, prefix)) is not None:
            users[lease_name(uuid)] = uid
    users.update(dict.fromkeys(_inherited(heirless), os.geteuid()))
    return LeaseOwners(users, records, locks.complete and names.complete, names)


def _lease_files(directory: StateDir, uuids: Iterable[str]) -> dict[str, os.stat_result]:
    host_lock, there = directory.status(HOST_LOCK), directory.few_names()
    files: dict[str, os.stat_result] = {}
    for name in names_of_host(uuids):
        if name.endswith(".inner.lock") or (there is not None and name not in there):
            continue
        status = directory.status(name)
        if status is None:
            continue
        others = [host_lock, *files.values()] if status.st_nlink > 1 else []
        if not any(other and os.path.samestat(other, status) for other in others) and is_everybodys(status):
            files[name] = status
    return files


def leases_of_this_user(
    directory: StateDir, recorded: Mapping[str, LeaseRecord], *, inherited: bool = False
) -> tuple[frozenset[str], bool]:
    """Return those of these leases that a process with the effective uid of this one holds, and whether they are known
    for certain. Host.lock must not be held.

    /proc/locks names the process that took a lock. If that one has ended, a process that inherited the lock is looked
    for. The record counts only if the kernel shows no holder, as for those in another PID namespace.

    Args:
        recorded: name of the lease -> its record.
        inherited: only those whose lock another process took, which has ended.
    """
    files = {name: status for name in recorded if (status := directory.status(name)) is not None}
    lockers = procfs.flock_holders({status.st_ino for status in files.values()})
    found, dead = set(), {}
    for name, status in files.items():
        pids = lockers.get(status.st_ino, [])
        living = [pid for pid in pids if not procfs.has_ended(pid)]
        if not living:  # in a PID namespace /proc/locks leaves out locks of processes that have ended
            dead[name] = status
        if inherited:
            continue
        if any(procfs.uid_of(pid) == os.geteuid() for pid in living) or (
            lockers.complete and not pids and recorded[name].uid == os.geteuid()
        ):
            found.add(name)
    found |= _inherited({name: status for name, status in dead.items() if name not in found})
    return frozenset(found), lockers.complete


def socket_of_this_user(socket: NamedSocket) -> bool:
    """Return whether this socket is of the effective user of this process. Host.lock must not be held."""
    if socket.uid is not None:
        return socket.uid == os.geteuid()
    text = f"socket:[{socket.inode}]"
    return any(text in (procfs.open_files(pid) or {}).values() for pid in _own_processes())


def _inherited(files: Mapping[str, os.stat_result]) -> set[str]:
    """Return those of these leases that a process of this user has locked."""
    wanted = {(status.st_dev, status.st_ino): name for name, status in files.items()}
    found: set[str] = set()
    for pid in _own_processes() if files else ():
        found |= {wanted[one] for one in locked_by(pid, files) if one in wanted}
        if len(found) == len(files):
            break
    return found


def owners_above(leases: StateDir) -> tuple[int, ...]:
    try:
        return os.fstat(leases.fd).st_uid, os.stat("..", dir_fd=leases.fd, follow_symlinks=False).st_uid
    except OSError:
        return ()  # the state directory was removed


def locked_by(pid: int, names: Collection[str]) -> set[tuple[int, int]]:
    """Return the device and inode of the files with one of these names that a process has open and locked (flock): a
    file that is only open does not count. Only root finds those of other users' processes."""
    found = set()
    for number, target in (procfs.open_files(pid) or {}).items():
        if target.rpartition("/")[2] in names:
            try:
                status = os.stat(f"/proc/{pid}/fd/{number}")
            except OSError:
                continue
            if b"FLOCK" in (read_start(f"/proc/{pid}/fdinfo/{number}") or b""):
                found.add((status.st_dev, status.st_ino))
    return found


def lockers_seen(names: Collection[str]) -> dict[tuple[int, int], int]:
    """Return device and inode -> a process that has that file open and locked, of the files with one of these names, as
    far as this user may see. It reads all of /proc."""
    return {identity: pid for pid in procfs.pids() for identity in locked_by(pid, names)}


def is_held_by(directory: StateDir, name: str, record: LeaseRecord, uid: int) -> bool:
    """Return whether the process that the record of a lease names is of this real user and has locked it. Only root and
    that user are told, and no table that others can make long is read."""
    if not record.here or procfs.real_uid_of(record.pid) != uid:
        return False
    status = directory.status(name)
    return status is not None and (status.st_dev, status.st_ino) in locked_by(record.pid, (name,))


def _own_processes() -> Iterator[int]:
    """Yield the processes of this user, ancestors first."""
    for pid in dict.fromkeys([*procfs.ancestors(os.getpid()), *procfs.pids()]):
        if procfs.uid_of(pid) == os.geteuid():
            yield pid
