"""The state directory at one moment, probed under one short hold of host.lock.

/proc/locks shows a flock under the pid that took it, for as long as any process has that open file description. So the
process that took the lock may have exited while a child still holds it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ..coordination.files.lease_dir import LeaseDir
from ..coordination.files.state_dir import StateDir
from ..coordination.holders.of_gpus import HeldLeases
from ..coordination.leases.faults import read_faults
from ..coordination.leases.file_names import names_of_host
from ..coordination.leases.lease import probe
from ..coordination.locks.host_lock import HostLock
from ..coordination.name_table import read_names
from ..coordination.queue.listing import Listing
from ..coordination.queue.live import live_tickets
from ..coordination.queue.turns import by_turn
from ..errors import LockTimeout, SafeGpuError, StateDirError
from ..host import procfs
from ..selection.verdicts import recent_faults

if TYPE_CHECKING:
    from ..coordination.queue.ticket import Ticket
    from ..gpus.devices import Gpu, GpuFault

# How long to wait for host.lock, seconds. It is held for microseconds, unless its holder is stopped or hundreds of
# processes want it at once.
_PATIENCE = 5.0


@dataclass
class HostFacts(HeldLeases):
    """The leases and tickets at one moment.

    Attributes:
        faults: UUID -> note, of the GPUs that are taken last because a claim failed on them.
        tickets: the tickets of all waiters.
        warnings: sentences that say which facts are not known, and why.
    """

    faults: Mapping[str, GpuFault] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look(path: str, gpus: Collection[Gpu], prefix: str = "") -> HostFacts:
    """Probe every lease and ticket in a state directory. It is not created if missing. Errors become warnings.

    Args:
        prefix: what stands before the UUIDs of this host in names.
    """
    found, uuids, before = HostFacts(), [gpu.uuid for gpu in gpus], read_names()
    devices: dict[int, int] = {}
    try:
        devices = _look_under_host_lock(found, path, uuids)
    except LockTimeout as err:
        found.warnings.append(f"{err}. The queue cannot be read now, and claims are shown as in /proc/locks.")
        try:
            _look_without_host_lock(found, path, uuids)
        except SafeGpuError as second:
            found.warnings.append(str(second))
    except SafeGpuError as err:
        found.warnings.append(f"The claims are not known: {err}")
    found.identify(uuids, prefix, before, devices)
    return found


def _look_under_host_lock(found: HostFacts, path: str, uuids: Collection[str]) -> dict[int, int]:
    """Find tickets and held leases. Returns inode -> device of the tickets."""
    listing = Listing()
    try:
        with StateDir(path, make=False) as root, StateDir("queue", root, make=False) as queue:
            listing.update(queue)
        with HostLock(time.monotonic() + _PATIENCE, path, make=False) as host:
            host.leases.names_of_host = partial(names_of_host, uuids)
            found.tickets = [ticket for _, ticket in by_turn(live_tickets(host, listing))]
            device = os.fstat(host.queue.fd).st_dev
            _find_leases(found, host.leases, uuids, partial(probe, host))
        mark_seen(path, found.files)
        return dict.fromkeys((ticket.inode for ticket in found.tickets), device)
    except FileNotFoundError:  # nothing is claimed by file
        with (
            suppress(FileNotFoundError),
            StateDir(path, make=False) as root,
            LeaseDir("leases", root, make=False) as leases,
        ):
            _find_leases(found, leases, uuids, lambda name: False)
        return {}


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


def _find_leases(found: HostFacts, leases: LeaseDir, uuids: Collection[str], is_held: Callable[[str], bool]) -> None:
    found.find(leases, names_of_host(uuids), is_held)
    found.faults = recent_faults(read_faults(leases, list(uuids)), time.time())
