"""Who holds which GPU, from its lease, its record and its name."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from .. import procfs
from ..devices import Gpu, LeaseHolder
from ..errors import StateDirError
from . import names
from .files import StateDir, state_dir_path
from .host_lock import MINIMUM_PATIENCE, HostLock
from .leases import LeaseRecord, inner_name, lease_name, leases_of, probe, read_record
from .ownership import holder_by_kernel, lockers_of, user_and_command
from .signals import DeferredSignals


def lease_holders(gpus: Collection[Gpu], *, inner: bool = False, prefix: str | None = None) -> dict[str, LeaseHolder]:
    """Who holds which of these GPUs' leases: UUID -> holder, for those that are held or cannot be opened.

    A GPU counts as held by a claim inside another one when the outer claim is gone and the inner one lives.

    Args:
        prefix: what stands before UUIDs in names: GPUs that are held by name only are told too. None: they are not.

    Raises:
        LockTimeout, StateDirError: the leases cannot be read.
    """
    held: dict[str, list[str]] = {}
    found: dict[str, LeaseHolder] = {}
    with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
        host.leases.names_of_host = leases_of(gpu.uuid for gpu in gpus)
        for gpu in gpus:
            files = [inner_name(gpu.uuid)] if inner else [lease_name(gpu.uuid), inner_name(gpu.uuid)]
            for name in files:
                try:
                    if probe(host, name):
                        if host.leases.twin(name):  # its lock does not say which of the two its holder has claimed
                            found[gpu.uuid] = LeaseHolder()
                        else:
                            held[gpu.uuid] = [name]
                        break
                except StateDirError as err:
                    found[gpu.uuid] = LeaseHolder(closed=str(err))
        if prefix is not None:
            rest = [gpu.uuid for gpu in gpus if gpu.uuid not in held and gpu.uuid not in found]
            found.update(dict.fromkeys(names.held_among(rest, prefix, inner=inner), LeaseHolder(elsewhere=True)))
    return {**found, **recorded_holders(held)}


def recorded_holders(leases: Mapping[str, Iterable[str]]) -> dict[str, LeaseHolder]:
    """UUID -> who has claimed it, by the first readable of the lease files with these names. It takes no lock.

    Whether a lease is still held is not asked. A directory service may be.

    Raises:
        StateDirError: the state directory cannot be used.
    """
    records: dict[str, LeaseRecord | None] = {}
    files: dict[str, os.stat_result] = {}
    with DeferredSignals(), StateDir(state_dir_path()) as root, StateDir("leases", root) as directory:
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
            uuid: _holder(record, lockers.get(files[uuid].st_ino, []) if uuid in files else [])
            for uuid, record in records.items()
        }


def _holder(record: LeaseRecord | None, lockers: list[int]) -> LeaseHolder:
    if record is None:
        return LeaseHolder()
    pid, uid = holder_by_kernel(record, lockers)
    user, command = user_and_command(record, pid, uid)
    return LeaseHolder(
        pid,
        user,
        record.job,
        command,
        record.since,
        record.start,
        place="" if pid else procfs.place_of(record.pidns),
        until=record.until,
    )
