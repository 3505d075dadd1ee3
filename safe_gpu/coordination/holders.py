"""Who holds a lease, a name or a claim: by the kernel's word, and by the records.

Everybody may write into records, so a record alone does not say whose claim it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial

from .. import procfs
from ..devices import Gpu, LeaseHolder
from ..errors import LockTimeout, StateDirError
from ..foreign_files import read_start
from . import socket_names as names
from .files import HOST_LOCK, StateDir, is_everybodys, state_dir_path
from .leases import LeaseRecord, inner_name, leases_of, names_of_host, probe, read_record, recorded_slots, slot_name
from .locks import MINIMUM_PATIENCE, HostLock, opened
from .records import LONGEST, command_of
from .socket_names import digest

# Who holds a lease or a name, by the kernel's word.


# An exclusive lock has one locker. Of a lease that somebody keeps locked shared, no more than these are looked at.
_MOST_LOCKERS = 16

_known: set[tuple[int, object]] = set()
"""(pid of this process, lease or socket): what a walk through /proc has found to be this user's."""


def holder_by_kernel(record: LeaseRecord | None, lockers: Sequence[int]) -> tuple[int | None, int | None]:
    """Return the pid and real uid of the process that /proc/locks names for a lease.

    Pids are used again, so it is certain only where its start is that of the record (the same number in all PID
    namespaces). Else there is no uid, and the pid is of a process that may hold the lock; None if none can be seen.

    Args:
        record: of the lease; None if it cannot be read.
        lockers: as from :func:`lockers_of`.
    """
    living = [pid for pid in lockers[:_MOST_LOCKERS] if not procfs.has_ended(pid)]
    if record is None:
        return next(iter(living), None), None
    for pid in living:
        if record.start is not None and record.start == procfs.start_time(pid):
            uid = procfs.real_uid_of(pid)
            if uid is not None:
                return pid, uid
    return next((pid for pid in living if pid != record.pid or record.start is None), None), None


def user_and_command(record: LeaseRecord | None, pid: int | None, uid: int | None) -> tuple[str | None, str | None]:
    """Return the user and command of a holder, for people. Without a uid the record says them, and the user is
    marked."""
    said = record.command if record is not None else None
    if pid is not None and uid is not None:
        return procfs.user_name(uid), command_of(pid, said)
    return f"says: {record.user}" if record is not None and record.user else None, said


def lockers_of(files: Collection[os.stat_result]) -> Mapping[int, list[int]]:
    """Return inode -> pids that took a lock (flock) on that file, as /proc/locks shows them. Some may have ended."""
    devices = {status.st_ino: status.st_dev for status in files}
    return procfs.flock_holders(devices, devices, b"FLOCK", [one.st_ino for one in files if one.st_size > LONGEST])


def lease_owners(directory: StateDir, names: Iterable[str]) -> dict[str, int]:
    """Return name of a lease -> real uid of who holds it, for those of these leases whose holder the kernel names.

    Each file counts once, whatever names it has; host.lock and a file of another mode, such as a ticket, are no lease.
    """
    host_lock = _status(directory, HOST_LOCK)
    files: dict[str, os.stat_result] = {}
    for name in names:
        status = _status(directory, name)
        if status is None:
            continue
        others = [host_lock, *files.values()] if status.st_nlink > 1 else []
        if not any(other and os.path.samestat(other, status) for other in others) and is_everybodys(status):
            files[name] = status
    lockers = lockers_of(files.values())
    owners = {}
    for name, status in files.items():
        if status.st_ino in lockers:
            _, uid = holder_by_kernel(read_record(directory, name), lockers[status.st_ino])
            if uid is not None:
                owners[name] = uid
    return owners


def leases_of_this_user(directory: StateDir, recorded: Mapping[str, int]) -> frozenset[str]:
    """Return those of these held leases that a process with the effective uid of this one holds.

    /proc/locks names the process that took a lock. If that one has ended, a process that inherited the lock is looked
    for. The record counts only if the kernel shows no holder, as for those in another PID namespace.

    Args:
        recorded: name of the lease -> uid in its record.
    """
    inodes = {name: status for name in recorded if (status := _status(directory, name)) is not None}
    lockers = procfs.flock_holders({status.st_ino for status in inodes.values()})
    found = set()
    for name, status in inodes.items():
        pids = lockers.get(status.st_ino, [])
        living = [pid for pid in pids if not procfs.has_ended(pid)]
        if living:
            ours = any(procfs.uid_of(pid) == os.geteuid() for pid in living)
        else:  # in a PID namespace /proc/locks leaves out locks of processes that have ended
            ours = _inherited(name, status, tuple(pids)) or (not pids and recorded[name] == os.geteuid())
        if ours:
            found.add(name)
    return frozenset(found)


def socket_of_this_user(inode: int) -> bool:
    """Return whether a process with the effective uid of this one has the socket with this inode."""
    key, socket = (os.getpid(), inode), f"socket:[{inode}]"
    if key not in _known and any(socket in (procfs.open_files(pid) or {}).values() for pid in _own_processes()):
        _known.add(key)
    return key in _known


def _status(directory: StateDir, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except OSError:
        return None


def _inherited(name: str, status: os.stat_result, lockers: tuple[int, ...]) -> bool:
    file = status.st_dev, status.st_ino
    key = os.getpid(), (*file, lockers)
    if key not in _known and any(file in locked_by(pid, (name,)) for pid in _own_processes()):
        _known.add(key)
    return key in _known


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


def _own_processes() -> Iterator[int]:
    """Yield the processes of this user, ancestors first."""
    for pid in dict.fromkeys([*procfs.ancestors(os.getpid()), *procfs.pids()]):
        if procfs.uid_of(pid) == os.geteuid():
            yield pid


# Who holds which GPU, from its lease, its record and its name.


def lease_holders(
    gpus: Collection[Gpu], *, inner: bool = False, slots: Mapping[str, int] | None = None, prefix: str | None = None
) -> dict[str, LeaseHolder]:
    """Return who holds which of these GPUs' leases: UUID -> holder, for those that are held or cannot be opened.

    A GPU counts as held by a claim inside another one when the outer claim is gone and the inner one lives.

    Args:
        inner: look at the leases of claims inside another claim only.
        slots: UUID -> slot of that other claim, of GPUs that it shares.
        prefix: what stands before UUIDs in names: GPUs that are held by name only are told too. None: they are not.

    Raises:
        LockTimeout, StateDirError: the leases cannot be read.
    """
    files = {gpu.uuid: [inner_name(gpu.uuid)] if inner else leases_of([gpu.uuid]) for gpu in gpus}
    files.update((uuid, [slot_name(uuid, slot, inner=True)]) for uuid, slot in (slots or {}).items())
    held: dict[str, str] = {}
    found: dict[str, LeaseHolder] = {}
    with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
        host.leases.names_of_host = partial(names_of_host, files)
        # Read first: while host.lock is held nobody takes a lease, so who is found to hold one held it here.
        claims = _claims(host.leases, {name: (name,) for names_of_gpu in files.values() for name in names_of_gpu})
        shared = {} if inner else _sharers(host.leases, files, lambda name: probe(host, name))
        for uuid, names_of_gpu in files.items():
            for name in names_of_gpu:
                try:
                    if probe(host, name):
                        held[uuid] = name
                        break
                except StateDirError as err:
                    found[uuid] = LeaseHolder(closed=str(err))
        if prefix is not None:
            rest = [uuid for uuid in files if uuid not in held and uuid not in found]
            whole = names.held_among(rest, prefix, inner=inner, shares=False)
            for uuid in names.held_among(rest, prefix, inner=inner):
                found[uuid] = elsewhere = LeaseHolder(elsewhere=True)
                if uuid not in whole:
                    found[uuid] = elsewhere._replace(sharers=(elsewhere,))
        linked = {uuid for uuid, name in held.items() if host.leases.twin(name)}  # its lock does not say which is held
    return {
        **found,
        **{uuid: LeaseHolder() if uuid in linked else _holder(*claims[name]) for uuid, name in held.items()},
        **shared,
    }


def _sharers(
    directory: StateDir, uuids: Iterable[str], is_held: Callable[[str], bool] = lambda name: True
) -> dict[str, LeaseHolder]:
    """Return who shares which of these GPUs, by the records in their slots."""
    slots = {uuid: [slot_name(uuid, slot) for slot in recorded_slots(directory, uuid)] for uuid in uuids}
    claims = _claims(directory, {name: (name,) for files in slots.values() for name in files})
    held = {uuid: [_holder(*claims[name]) for name in files if is_held(name)] for uuid, files in slots.items()}
    return {uuid: LeaseHolder.of_sharers(holders) for uuid, holders in held.items() if holders}


def recorded_holders(leases: Mapping[str, Iterable[str]]) -> dict[str, LeaseHolder]:
    """Return UUID -> who has claimed it, by the first readable of the lease files with these names. It takes no lock.

    Whether a lease is still held is not asked. A directory service may be.

    Raises:
        StateDirError: the state directory cannot be used.
    """
    with opened("leases") as directory:
        claims = _claims(directory, leases)
        shared = _sharers(directory, [uuid for uuid, (record, _) in claims.items() if record is None])
        return {uuid: shared.get(uuid) or _holder(*claim) for uuid, claim in claims.items()}


def _claims(
    directory: StateDir, leases: Mapping[str, Iterable[str]]
) -> dict[str, tuple[LeaseRecord | None, Sequence[int]]]:
    """Return UUID -> record of its claim, and the processes that locked its file."""
    records: dict[str, LeaseRecord | None] = {}
    files: dict[str, os.stat_result] = {}
    for uuid, candidates in leases.items():
        records[uuid] = None
        for name in candidates:
            with suppress(OSError):
                files[uuid] = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                records[uuid] = read_record(directory, name)
            if records[uuid] is not None:
                break
    lockers = lockers_of(files.values())
    return {
        uuid: (record, lockers.get(files[uuid].st_ino, ()) if uuid in files else ()) for uuid, record in records.items()
    }


def _holder(record: LeaseRecord | None, lockers: Sequence[int]) -> LeaseHolder:
    if record is None:
        return LeaseHolder()
    pid, uid = holder_by_kernel(record, lockers)
    user, command = user_and_command(record, pid, uid)
    said = record.as_holder()
    # Its own number there, or of one that ended a moment ago: by neither is another process blamed.
    recorded = said.place or (pid is None and procfs.has_ended(record.pid))
    return said._replace(pid=record.pid if recorded else pid, user=user, command=command)


# The claim inside which this process runs, as the records of leases tell.


# More leases than this are not looked at, because everybody can create some.
_MOST_LEASES = 512


def outer_claim_of_process(records: Iterable[LeaseRecord], scope: str) -> LeaseRecord | None:
    """Return the record of this process, else that of its nearest ancestor, else the one with this scope; None without
    any.

    Args:
        records: of held leases.
        scope: the value of SAFE_GPU_SCOPE, "" if it is not set.
    """
    known = list(records)
    for pid in (os.getpid(), *procfs.ancestors(os.getpid())):
        for record in known:
            if record.pid == pid and record.start == procfs.start_time(pid):
                return record
    return next((record for record in known if scope and record.token == digest(scope)), None)


def gpus_of_scope(scope: str) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs of this user's living claim with this value of SAFE_GPU_SCOPE, whichever driver
    knows them.

    Empty if there is no such claim, and if the leases cannot be read.
    """
    import time
    from itertools import islice

    from .files import LeaseDir, StateDir
    from .leases import is_empty, may_be_held, read_record
    from .locks import MINIMUM_PATIENCE, HostLock

    if not scope:
        return ()
    secret = digest(scope)
    try:
        with StateDir(state_dir_path(), make=False) as root, LeaseDir("leases", root, make=False) as leases:
            files = (name for name in leases.names() if name.endswith(".lock") and not name.endswith(".inner.lock"))
            records = ((name, read_record(leases, name)) for name in files if not is_empty(leases, name))
            carriers = {name: record.uid for name, record in records if record is not None and record.token == secret}
        with HostLock(time.monotonic() + MINIMUM_PATIENCE, make=False) as host:
            held = {name: uid for name, uid in islice(carriers.items(), _MOST_LEASES) if may_be_held(host, name)}
            ours = leases_of_this_user(host.leases, held)
    except (LockTimeout, StateDirError, OSError):
        return ()  # the claim itself meets the same error
    return tuple(sorted(name.removesuffix(".lock").partition(".share.")[0] for name in ours))
