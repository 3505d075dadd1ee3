"""Who holds which GPU, from its lease, its record and its name."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ...errors import StateDirError
from ...gpus.devices import MOST_SHARERS, Gpu, LeaseHolder
from ...host import procfs
from ..files.lease_dir import LeaseDir
from ..files.state_dir import StateDir
from ..leases.file_names import inner_name, leases_of, names_of_host, slot_name
from ..leases.lease import is_empty, probe
from ..leases.record import LeaseRecord, read_record
from ..locks.host_lock import MINIMUM_PATIENCE, HostLock
from ..name_table import NameTable, read_names
from ..signals import DeferredSignals
from ..state_dir import state_dir_path
from .by_kernel import files_and_names, holder_by_kernel, lockers_seen, owners_above, user_and_command


@dataclass(frozen=True)
class LockedFile:
    """A locked file: its name, its device and inode, and what the kernel's tables say of it.

    Attributes:
        lockers: the pids that /proc/locks shows for its inode.
        named: the user who has made the socket with the name that goes with a lease.
        confirmed: whether names confirm the share that its record says.
        note: why a lease is closed although it is held, so that its holder is not known.
        owners: those of the file, of the directory of leases and of the state directory, each of whom can remove it.
    """

    name: str
    device: int
    inode: int
    lockers: tuple[int, ...] = ()
    named: int | None = None
    confirmed: bool = False
    note: str = ""
    owners: tuple[int, ...] = ()


@dataclass
class HeldLeases:
    """The leases that are held at one moment.

    Attributes:
        files: by name.
        records: the records of these leases, by name, as far as they can be read.
        closed: why a lease cannot be opened, by name.
        locks: inode -> pids that lock it, of these files and others.
        elsewhere: UUIDs of the GPUs that are held by name only.
        heirs: device and inode -> a process that has inherited the lock, if that was looked for.
        names: the names that are held.
        directory: the directory of the leases.
    """

    files: dict[str, LockedFile] = field(default_factory=dict)
    records: dict[str, LeaseRecord] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    locks: Mapping[int, list[int]] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    heirs: Mapping[tuple[int, int], int] = field(default_factory=dict)
    names: NameTable = field(default_factory=NameTable)
    directory: os.stat_result | None = None

    def find(self, leases: LeaseDir, names: Iterable[str], is_held: Callable[[str], bool]) -> None:
        """Find those of these leases that are held, with their records. No table of the kernel is read."""
        there, above, self.directory = leases.few_names(), owners_above(leases), os.fstat(leases.fd)
        for name in names:
            if there is not None and name not in there:
                continue
            try:
                if not is_held(name):
                    continue
                status = os.stat(name, dir_fd=leases.fd, follow_symlinks=False)
            except StateDirError as err:
                self.closed[name] = str(err)
                continue
            except OSError:
                continue  # the file was removed since it was probed
            if other := leases.twin(name, status):
                self.files[name] = LockedFile(name, 0, 0, note=str(leases.linked(name, other)))
                continue
            self.files[name] = LockedFile(name, status.st_dev, status.st_ino, owners=(status.st_uid, *above))
            record = read_record(leases, name)
            if record is not None:
                self.records[name] = record

    def identify(
        self,
        uuids: Collection[str],
        prefix: str,
        before: NameTable,
        devices: Mapping[int, int] | None = None,
        *,
        inner: bool = False,
    ) -> None:
        """Ask the kernel who has locked these files, and who holds the names of these GPUs. Host.lock is not held.

        Args:
            before: the names as they were before the leases were probed: a claim of this state directory that came or
                ended meanwhile is not taken for one of another.
            devices: inode -> device of other files.
            inner: only claims inside another claim make a GPU held elsewhere.
        """
        self.names = read_names()
        inodes = {one.inode: one.device for one in self.files.values() if not one.note}
        inodes.update(devices or {})
        self.locks = procfs.flock_holders(inodes, inodes, b"FLOCK", held=inodes)
        for uuid in uuids:
            for name, socket in files_and_names(uuid, prefix).items():
                if name in self.files:
                    one, held = self.files[name], self.names.get(socket)
                    lockers, record, directory = (
                        tuple(self.locks.get(one.inode, ())),
                        self.records.get(name),
                        self.directory,
                    )
                    certain = (
                        record is not None
                        and directory is not None
                        and any(one.confirms(socket, record, directory) for one in (before, self.names))
                    )
                    self.files[name] = replace(one, lockers=lockers, named=held and held.uid, confirmed=certain)
        here = self.files.keys() | self.closed.keys()
        free = [uuid for uuid in uuids if here.isdisjoint(leases_of([uuid]))]
        self.elsewhere = before.held_among(free, prefix, inner=inner)
        self.elsewhere &= self.names.held_among(self.elsewhere, prefix, inner=inner)

    def holder(self, name: str) -> LeaseHolder:
        """Return who holds a lease."""
        file, record = self.files[name], self.records.get(name)
        if file.note or record is None:
            return LeaseHolder()
        return _holder(record, file, self.heirs.get((file.device, file.inode)))

    def holder_of(self, uuid: str, names: Iterable[str]) -> LeaseHolder | None:
        """Return who shares a GPU, else who holds the first of these leases that is held; None if nobody does."""
        slots = (slot_name(uuid, slot) for slot in range(MOST_SHARERS))
        sharers = [self.holder(name) for name in slots if name in self.files]
        if sharers:
            return LeaseHolder.of_sharers(sharers)
        held = next((name for name in names if name in self.files), None)
        return None if held is None else self.holder(held)


def lease_holders(gpus: Collection[Gpu], *, inner: bool = False, prefix: str) -> dict[str, LeaseHolder]:
    """Return who holds which of these GPUs' leases or names: UUID -> holder, for those that are held or cannot be
    opened.

    A GPU counts as held by a claim inside another one when the outer claim is gone and the inner one lives.

    Args:
        inner: look at the leases of claims inside another claim only.
        prefix: what stands before UUIDs in names.

    Raises:
        LockTimeout, StateDirError: the leases cannot be read.
    """
    files = {gpu.uuid: (inner_name(gpu.uuid),) if inner else leases_of([gpu.uuid]) for gpu in gpus}
    found, before = HeldLeases(), read_names()
    with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
        host.leases.names_of_host = partial(names_of_host, files)
        wanted = (name for names in files.values() for name in names) if inner else names_of_host(files)
        found.find(host.leases, wanted, partial(probe, host))
    found.identify(files, prefix, before, inner=inner)
    if any(record.here and record.of_the_dead for record in found.records.values()):
        found.heirs = lockers_seen(found.files)
    whole = found.names.held_among(found.elsewhere, prefix, inner=inner, shares=False)
    holders = {}
    for uuid, names in files.items():
        closed = next((found.closed[name] for name in names if name in found.closed), "")
        held = found.holder_of(uuid, names) or (LeaseHolder(closed=closed) if closed else None)
        if held is None and uuid in found.elsewhere:
            elsewhere = LeaseHolder(elsewhere=True)
            held = elsewhere if uuid in whole else elsewhere._replace(sharers=(elsewhere,))
        if held is not None:
            holders[uuid] = held
    return holders


def recorded_holders(leases: Mapping[str, Iterable[str]], prefix: str) -> dict[str, LeaseHolder]:
    """Return UUID -> who has claimed it, by the first readable of the lease files with these names. It takes no lock.

    Whether a lease is still held is not asked. A directory service may be.

    Raises:
        StateDirError: the state directory cannot be used.
    """
    found = HeldLeases()
    with DeferredSignals(), StateDir(state_dir_path()) as root, LeaseDir("leases", root) as directory:
        found.find(directory, names_of_host(leases), lambda name: not is_empty(directory, name))
    found.identify(leases, prefix, NameTable())
    holders = {}
    for uuid, names in leases.items():
        said = next((found.holder(name) for name in names if name in found.records), None)
        holders[uuid] = said or found.holder_of(uuid, ()) or LeaseHolder()
    return holders


def _holder(record: LeaseRecord, file: LockedFile, heir: int | None) -> LeaseHolder:
    pid, uid = holder_by_kernel(record, file.lockers, file.named)
    if pid is None and heir is not None:
        pid, uid = heir, procfs.real_uid_of(heir)
    user, command = user_and_command(record, pid, uid)
    said = record.as_holder()
    left_by = record.pid if not said.namespace and pid != record.pid and procfs.has_ended(record.pid) else None
    pid = record.pid if said.namespace else pid  # its own number there
    return said._replace(pid=pid, user=user, command=command, left_by=left_by)
