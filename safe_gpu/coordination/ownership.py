"""Who holds a lease or a name, by the kernel's word.

Everybody may write into records, so a record alone does not say whose claim it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from .. import procfs
from ..errors import StateDirError
from .files import StateDir
from .host_lock import LockedHost, lock_file, unlock_file
from .leases import read_record

__all__ = ["lease_owners", "leases_of_this_user", "socket_of_this_user"]

# More lease files than this are not looked at, because everybody can create some.
_MOST_LEASES = 512

_known: set[tuple[int, object]] = set()
"""(pid of this process, lease or socket): what a walk through /proc has found to be this user's."""


def leases_of_this_user(directory: StateDir, recorded: Mapping[str, int]) -> frozenset[str]:
    """Those of these held leases that a process with the effective uid of this one holds.

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


def lease_owners(
    host: LockedHost, named: Collection[str] = (), mine: Collection[str] = ()
) -> dict[str, frozenset[int]]:
    """Name of a lease -> uids of those who hold it, for all leases of this state directory that are held.

    /proc/locks names the process that took a lock. Where it names none that lives (a child inherited the lock, another
    PID namespace), the record counts, but only for ``named`` leases: anybody can make up others.

    Args:
        mine: leases that this process has just taken to try them. They are left out.
    """
    everything = (name for name in host.leases.names() if name.endswith(".lock") and not name.endswith(".inner.lock"))
    names = {*named, *islice(everything, _MOST_LEASES)}.difference(mine)
    found: dict[str, os.stat_result] = {}
    for name in names:
        status = _status(host.leases, name)
        if status is not None:
            found[name] = status
    devices = {status.st_ino: status.st_dev for status in found.values()}
    lockers = procfs.flock_holders(devices, devices)
    owners = {}
    for name, status in found.items():
        pids = lockers.get(status.st_ino, ())
        if not (pids or (status.st_size and name in named)) or not _is_held(host.leases, name):
            continue
        uids = frozenset(uid for pid in pids if not procfs.has_ended(pid) and (uid := procfs.uid_of(pid)) is not None)
        if not uids and name in named and (record := read_record(host.leases, name)) is not None:
            uids = frozenset((record.uid,))
        owners[name] = uids
    return owners


def _is_held(directory: StateDir, name: str) -> bool:
    """Like ``leases.probe``, but the record of a holder that has just ended stays."""
    try:
        fd = directory.open(name)
    except StateDirError:
        return False  # not a lease that a claim could take
    if fd is None:
        return False
    try:
        if not lock_file(fd):
            return True
        unlock_file(fd)
        return False
    finally:
        os.close(fd)


def socket_of_this_user(inode: int) -> bool:
    """Whether a process with the effective uid of this one has the socket with this inode."""
    key = os.getpid(), inode
    if key not in _known and any(f"socket:[{inode}]" in files.values() for _, files in _own_files()):
        _known.add(key)
    return key in _known


def _status(directory: StateDir, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
    except OSError:
        return None


def _inherited(name: str, status: os.stat_result, lockers: tuple[int, ...]) -> bool:
    key = os.getpid(), (status.st_dev, status.st_ino, lockers)
    if key not in _known and any(
        _holds(pid, number, status)
        for pid, files in _own_files()
        for number, target in files.items()
        if target.endswith(f"/{name}")
    ):
        _known.add(key)
    return key in _known


def _holds(pid: int, number: int, status: os.stat_result) -> bool:
    """Whether this descriptor is of that file and has the lock: a file that is merely open says nothing."""
    try:
        same = os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), status)
    except OSError:
        return False
    return same and b"FLOCK" in (procfs.read_start(f"/proc/{pid}/fdinfo/{number}") or b"")


def _own_files() -> Iterator[tuple[int, dict[int, str]]]:
    """The open files of each process of this user, those of ancestors first."""
    near = procfs.ancestors(os.getpid())
    for pid in dict.fromkeys([*near, *procfs.pids()]):
        if procfs.uid_of(pid) == os.geteuid() and (files := procfs.open_files(pid)):
            yield pid, files
