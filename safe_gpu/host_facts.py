"""What the state directory shows at one moment: held leases and tickets, probed under one short hold of host.lock."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from . import procfs
from .coordination.files import StateDir
from .coordination.host_lock import HostLock
from .coordination.leases import LeaseRecord, inner_name, lease_name, probe, read_record
from .coordination.waiting import Ticket, live_tickets
from .devices import Gpu
from .errors import LockTimeout, SafeGpuError, StateDirError
from .holders import LockedFile

__all__ = ["HostFacts", "look", "names_of"]

# Seconds that host.lock is waited for: it is held for microseconds, unless its holder is stopped or 500 come at once.
_PATIENCE = 5.0


@dataclass
class HostFacts:
    """What was found, all of one moment.

    Attributes:
        files: the leases that are held, by name; records: what they say, where that can be read.
        closed: why a lease cannot be opened, by name.
        tickets: of everyone who waits. queue_device: the device number of their files.
        locks: inode -> lockers, for all of these files.
        warnings: sentences on what could not be found out.
    """

    files: dict[str, LockedFile] = field(default_factory=dict)
    records: dict[str, LeaseRecord] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)
    queue_device: int = 0
    locks: Mapping[int, list[int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def look(path: str, gpus: Collection[Gpu]) -> HostFacts:
    """Probe every lease and ticket in a state directory, never made where it is missing; trouble is a warning."""
    found = HostFacts()
    if _is_untouched(path):
        return found
    try:
        with HostLock(time.monotonic() + _PATIENCE, path) as host:
            found.tickets = live_tickets(host)
            found.queue_device = os.fstat(host.queue.fd).st_dev
            tickets = {ticket.inode for ticket in found.tickets}
            _find_leases(found, host.leases, gpus, lambda name: probe(host, name), tickets)
    except LockTimeout as err:
        found.warnings.append(f"{err}. The queue cannot be read meanwhile, and claims are as /proc/locks shows them.")
        try:
            _look_without_host_lock(found, path, gpus)
        except SafeGpuError as trouble:
            found.warnings.append(str(trouble))
    except SafeGpuError as err:
        found.warnings.append(f"Who has claimed what is unknown: {err}")
    return found


def _is_untouched(path: str) -> bool:
    """Whether nobody has claimed anything there yet: then there is nothing to lock, and nothing to be made."""
    try:
        if stat.S_ISLNK(os.lstat(path).st_mode):
            return False
        os.lstat(os.path.join(path, "leases"))
    except FileNotFoundError:
        return True
    except OSError:
        pass  # HostLock says what is wrong
    return False


def _look_without_host_lock(found: HostFacts, path: str, gpus: Collection[Gpu]) -> None:
    """Leases by /proc/locks alone, which steals nothing but does not show other containers."""
    with StateDir(path) as root, StateDir("leases", root) as leases:
        inodes = {name: _inode(leases, name) for gpu in gpus for name in names_of(gpu)}
        locks = procfs.flock_holders({inode for inode in inodes.values() if inode})
        _find_leases(found, leases, gpus, lambda name: inodes[name] in locks)


def _inode(directory: StateDir, name: str) -> int:
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_ino
    except OSError:
        return 0


def _find_leases(
    found: HostFacts,
    leases: StateDir,
    gpus: Collection[Gpu],
    is_held: Callable[[str], bool],
    other_inodes: Collection[int] = (),
) -> None:
    held: dict[str, os.stat_result] = {}
    for gpu in gpus:
        for name in names_of(gpu):
            try:
                if not is_held(name):
                    continue
                held[name] = os.stat(name, dir_fd=leases.fd, follow_symlinks=False)
            except StateDirError as err:
                found.closed[name] = str(err)
                continue
            except OSError:
                continue  # a cleaner of /tmp took it that very moment
            record = read_record(leases, name)
            if record is not None:
                found.records[name] = record
    found.locks = procfs.flock_holders({*other_inodes, *(status.st_ino for status in held.values())})
    for name, status in held.items():
        lockers = tuple(found.locks.get(status.st_ino, ()))
        found.files[name] = LockedFile(name, status.st_dev, status.st_ino, lockers)


def names_of(gpu: Gpu) -> tuple[str, str]:
    """The lease files of a device: of a claim, and of one inside it."""
    return lease_name(gpu.uuid), inner_name(gpu.uuid)
