"""Leases: one locked file for each claimed GPU, with its record; and the notes of GPUs that failed or are drained.

Every user may write every note (mode 0666). The note of another user cannot be unlinked in a sticky directory; it is
emptied instead. A note proves nothing: it only makes other GPUs the better choice for some minutes. Who holds the lease
of a GPU writes and clears its note, so no lock is needed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from .. import procfs
from ..devices import MOST_SHARERS, GpuFault, LeaseHolder
from ..errors import StateDirError
from ..foreign_files import LIMIT, open_to_read
from ..settings import policy_directory
from . import socket_names as names
from .files import HOST_LOCK, StateDir, state_dir_path, survive_exec, write_all
from .locks import LockedHost, file_of, lock_file, unlock_file
from .records import as_time, own_command, read_bounded
from .signals import DeferredSignals

# Leases: one locked file for each claimed GPU, held by the kernel for as long as the claim lives.


_LARGEST = (1 << 63) - 1
_INNER = ".inner.lock"
_LONGEST_ENDING = 127  # endings.LONGEST, which a claim need not import


_own: dict[int, int | None] = {}
"""The start of this process, by its pid, since a forked child has another."""


def lease_name(uuid: str) -> str:
    """Return the lease file of a device.

    >>> lease_name("GPU-12")
    'GPU-12.lock'
    """
    # Old MIG names hold slashes (MIG-GPU-uuid/1/0); a file name cannot.
    return uuid.replace("/", "_") + ".lock"


def inner_name(uuid: str) -> str:
    """Return the lease file of a claim made inside another claim."""
    return uuid.replace("/", "_") + _INNER


def names_of_host(uuids: Iterable[str]) -> Iterator[str]:
    """Yield every file that a claim of these devices may lock."""
    for uuid in uuids:
        yield from leases_of([uuid])
        for slot in range(MOST_SHARERS):
            yield from (slot_name(uuid, slot), slot_name(uuid, slot, inner=True))


def slot_name(uuid: str, slot: int, *, inner: bool = False) -> str:
    """Return the file of a share, for a claim or for one made inside it.

    >>> slot_name("GPU-12", 3)
    'GPU-12.share.3.lock'
    """
    return f"{uuid.replace('/', '_')}.share.{slot}{_INNER if inner else '.lock'}"


def _slot_in(name: str) -> int | None:
    number = name.partition(".share.")[2].partition(".")[0]
    return int(number) if number.isdecimal() and len(number) < 3 else None


def fault_name(uuid: str) -> str:
    """Return the file with the note on a device.

    >>> fault_name("GPU-12")
    'GPU-12.fault'
    """
    return uuid.replace("/", "_") + ".fault"


def leases_of(uuids: Iterable[str]) -> tuple[str, ...]:
    """Return the lease files of these devices, for claims and for claims inside them."""
    return tuple(name for uuid in uuids for name in (lease_name(uuid), inner_name(uuid)))


class LeaseRecord(NamedTuple):
    """What a lease file says about its holder, for people: the lock is the truth, this is not.

    ``start`` is the holder's start in clock ticks since boot, ``since`` the claim's in Unix seconds, ``gpus`` the UUIDs
    that the claim holds, ``token`` the hash of what claims inside it carry ("" if there can be none). ``pidns`` is the
    inode of the PID namespace in which ``pid`` and ``start`` are numbers, None where it is not known. ``until`` is when
    the claim will probably end, in Unix seconds, None where it did not say. ``share`` is how much of each GPU it holds,
    in bytes, ``of`` how much there is to share; None of whole GPUs. ``slot`` is that of the file, None of no share.
    """

    pid: int
    start: int | None
    uid: int
    user: str
    host: str
    job: str | None
    command: str | None
    gpus: tuple[str, ...]
    since: float
    token: str
    v: int = 1
    pidns: int | None = None
    until: float | None = None
    share: int | None = None
    of: int | None = None
    slot: int | None = None

    @property
    def of_the_dead(self) -> bool:
        """Whether the process that wrote it has ended."""
        return procfs.has_ended(self.pid) or self.start not in (None, procfs.start_time(self.pid))

    @classmethod
    def of_this_process(cls, job: str | None, command: str | None) -> LeaseRecord:
        """Return what a claim of this process says of it, whichever GPUs it gets.

        Args:
            command: as in records, of what this process will execute; None: of this process itself.
        """
        pid = os.getpid()
        if pid not in _own:
            _own.clear()
            _own[pid] = procfs.start_time(pid)
        with DeferredSignals():  # an exception that comes in the midst of getpwuid(3) is lost if it knows no such user
            user = procfs.user_name(os.geteuid())
        return cls(
            pid=pid,
            start=_own[pid],
            uid=os.geteuid(),
            user=user,
            host=os.uname().nodename,
            job=job,
            command=command or own_command(),
            gpus=(),
            since=0.0,
            token="",
            pidns=procfs.pid_namespace(),
        )

    def claiming(self, gpus: tuple[str, ...], token: str, hold_for: float | None = None) -> LeaseRecord:
        """Return the record of a claim that gets these GPUs now. Everybody can read it, so it has a hash of the token.

        Args:
            hold_for: for how many seconds the claim will probably last; None is unknown.
        """
        now, code = round(time.time(), 3), names.digest(token) if token else ""
        return self._replace(gpus=gpus, since=now, token=code, until=hold_for and round(now + hold_for, 3))

    def encode(self) -> bytes:
        """Return one line of JSON."""
        import json

        keys = "v pid start uid user host job command gpus since until token pidns".split()
        keys += ["share", "of"] if self.share is not None else []
        fields = {key: getattr(self, key) for key in keys}
        for key, value in fields.items():
            if isinstance(value, str):  # an argument of a command may be any bytes
                fields[key] = procfs.well_formed(value)
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    @lru_cache(128)
    def decode(cls, data: bytes) -> LeaseRecord | None:
        """Return the record in this line, or None where it is torn, empty or somebody's nonsense.

        Anybody may have written it: text comes out printable and cut, bytes that are not UTF-8 as U+FFFD, and a time
        that cannot be as 0.
        """
        import json

        from .records import as_int, as_list, as_seconds, as_text, as_time

        try:
            raw: dict[str, Any] = json.loads(data.decode("utf-8", "replace"))
            return cls(
                pid=as_int(raw["pid"], 1, _LARGEST >> 32),
                start=None if raw.get("start") is None else as_int(raw["start"], 0, _LARGEST),
                uid=as_int(raw.get("uid", -1), -1, _LARGEST >> 31),
                user=as_text(raw.get("user", ""), 64),
                host=as_text(raw.get("host", ""), 64),
                job=None if raw.get("job") is None else as_text(raw["job"], 100),
                command=None if raw.get("command") is None else as_text(raw["command"]),
                gpus=tuple(as_text(uuid, 100) for uuid in as_list(raw.get("gpus"))),
                since=as_time(raw.get("since") or 0.0),
                token=as_text(raw.get("token") or "", 64),
                v=as_int(raw.get("v", 1), 0, _LARGEST),
                pidns=None if raw.get("pidns") is None else as_int(raw["pidns"], 0, _LARGEST),
                until=as_seconds(raw.get("until"), 0),
                share=None if raw.get("share") is None else as_int(raw["share"], 1, _LARGEST),
                of=None if raw.get("of") is None else as_int(raw["of"], 1, _LARGEST),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None

    def as_holder(self) -> LeaseHolder:
        """Return what it says of a claim, by its word alone."""
        place = procfs.place_of(self.pidns)
        return LeaseHolder(
            None if place else self.pid,
            self.user,
            self.job,
            self.command,
            self.since,
            None if place else self.start,
            place=place,
            until=self.until,
            uid=self.uid,
            share=self.share,
        )

    @property
    def here(self) -> bool:
        """Whether ``pid`` means a process of this PID namespace; True where the record does not say."""
        return not procfs.place_of(self.pidns)


class PreviousRecord(NamedTuple):
    """What the file of a lease said at ``read``: its content, and when it had last been changed, in Unix seconds."""

    data: bytes = b""
    changed: float = 0.0
    read: float = 0.0

    @classmethod
    def of(cls, fd: int) -> PreviousRecord:
        """Return what an open file says; nothing if it cannot be read."""
        try:
            status = os.fstat(fd)
            return cls(os.pread(fd, LIMIT, 0), status.st_mtime, time.time()) if status.st_size else cls()
        except OSError:
            return cls()

    def record(self) -> LeaseRecord | None:
        """Return the record of a claim that left it there when it died."""
        return LeaseRecord.decode(self.data) if self.data else None

    def ending(self) -> bytes:
        """Return how the claim that it speaks of ended, as a line for the file; b"" if it speaks of none."""
        from .records import ClaimEnd, end_of_dead_claim

        if ClaimEnd.decode(self.data):
            return self.data
        record, read = self.record(), self.read
        if record is not None and record.start is not None and record.here:
            # It has lived no longer than since its process started, by the boot clock: the other may have jumped.
            age = time.clock_gettime(time.CLOCK_BOOTTIME) - record.start / os.sysconf("SC_CLK_TCK")
            if self.changed <= record.since + age:  # else it is from before a reboot
                read = min(read, record.since + age)
        ending = record and end_of_dead_claim(record.pid, record.since, round(self.changed, 3), round(read, 3))
        return ending.encode() if ending else b""


class Lease:
    """A lease that this process holds. It ends by :meth:`release`, or with the last copy of its descriptor.

    Attributes:
        shared: others may hold it too, and the record is that of the last one.
        former: what the file said before the first :meth:`write`.
        noted: pid and beginning of this claim, once the history has been told of it.
    """

    def __init__(self, name: str, fd: int, path: str, *, shared: bool = False) -> None:
        self.name = name
        self.fd = fd
        self.path = path
        self.shared = shared
        self.owner = os.getpid()
        self.former = PreviousRecord()
        self.noted: tuple[int, float] | None = None
        self._written = False
        self._began = 0.0  # by the boot clock, which does not jump
        self._file = file_of(fd)

    def write(self, record: bytes) -> None:
        """Say who holds it. What was said of the claim before is kept in ``former``.

        Raises:
            StateDirError: no room, or the write failed.
        """
        if not self._written:
            self._written = True
            self._began = time.clock_gettime(time.CLOCK_BOOTTIME)
            self.former = PreviousRecord.of(self.fd)
        write_all(self.fd, record, self.path)

    def release(self) -> None:
        """Give it back, with its record replaced by the time of its end; safe to call twice.

        In a forked child this only closes the child's copy.
        """
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            if file_of(fd) != self._file:
                return  # the program has closed it, and with it the lock
            try:
                if os.getpid() == self.owner:
                    if self._written and not self.shared:
                        _leave(fd, self._last_words())
                    elif not self.shared:
                        _clear(fd, inner=self.inner)
                    unlock_file(fd)
            finally:
                os.close(fd)

    @property
    def inner(self) -> bool:
        """Whether it is of a claim inside another claim. The history does not tell of those."""
        return self.name.endswith(_INNER)

    def _last_words(self) -> bytes:
        """Return what to leave in the file: how this claim ended, or the one before, if the history knows nothing of
        this."""
        if self.inner:
            return b""
        from .records import ClaimEnd

        if self.noted is None:
            return self.former.ending()
        pid, since = self.noted
        ended = round(since + time.clock_gettime(time.CLOCK_BOOTTIME) - self._began, 3)
        return ClaimEnd(pid, since, ended, ended).encode()

    def keep_across_exec(self) -> None:
        """Move the descriptor out of the way of shell redirections and let it survive exec(2).

        To 500 or above, or as high as RLIMIT_NOFILE allows, so that a script's ``exec 3>`` does no harm.
        """
        self.fd = survive_exec(self.fd)


def try_lease(host: LockedHost, name: str, *, shared: bool = False) -> Lease | None:
    """Take one lease without blocking; None where another holds it.

    Args:
        shared: take it beside other shared holders (a host whose only GPU drives the display).

    Raises:
        StateDirError: the file cannot be opened.
    """
    directory = host.leases
    while True:
        fd = directory.open_or_create(name)
        try:
            got = _lock_shared(fd) if shared else lock_file(fd)
            current = directory.is_current(name, fd)
        except OSError as err:
            os.close(fd)
            path = os.path.join(directory.path, name)
            raise StateDirError(f"{path} cannot be locked ({err.strerror})", path=path, errno=err.errno) from err
        if got and current:
            return Lease(name, fd, os.path.join(directory.path, name), shared=shared)
        if got:
            unlock_file(fd)
        os.close(fd)
        if current:
            return None


def _lock_shared(fd: int) -> bool:
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _leave(fd: int, line: bytes) -> None:
    """Replace the content of a lease file whose lock is ours; empty it if there is no room."""
    written = 0
    with suppress(OSError):
        written = os.pwrite(fd, line, 0) if line else 0
    with suppress(OSError):
        os.ftruncate(fd, written)


def _clear(fd: int, *, inner: bool) -> None:
    """Remove the record of a lease whose lock is ours, since it tells everybody what ran there. Its end stays.

    The record of a process that is only exiting stays too, since its memory is still on the GPU, and waiters have to
    know whose.
    """
    former = PreviousRecord.of(fd)
    if former.data:
        record = former.record()
        if record is None or record.of_the_dead:
            line = b"" if inner else former.ending()
            if line != former.data:
                _leave(fd, line)


def clear_record(lease: Lease) -> None:
    """Replace the record that a dead claim left in a lease that is locked shared. host.lock is held."""
    _clear(lease.fd, inner=False)


def is_empty(directory: StateDir, name: str, files: Collection[str] | None = None) -> bool:
    """Return whether a lease file holds no record, or does not exist: then probably nobody holds the lease.

    Records are longer than what a claim leaves when it ends (``endings.LONGEST``). ``files`` are the names in the
    directory, if they are known.
    """
    if files is not None and name not in files:
        return True
    try:
        return os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_size <= _LONGEST_ENDING
    except OSError:
        return True


def probe(host: LockedHost, name: str) -> bool:
    """Return whether somebody holds this lease. A record that its dead holder left is replaced by when that ended.

    Raises:
        StateDirError: the file cannot be opened, or it is a link to host.lock, or to another lease that is free.
    """
    fd = StateDir.open(host.leases, name)
    if fd is None:
        return False
    try:
        other = host.leases.twin(name, os.fstat(fd))
        if other != HOST_LOCK:
            if not lock_file(fd):
                return True
            if not other:
                _clear(fd, inner=name.endswith(_INNER))
            unlock_file(fd)
        if other:
            raise host.leases.linked(name, other)
        return False
    finally:
        os.close(fd)


def may_be_held(host: LockedHost, name: str) -> bool:
    """Like :func:`probe`, and True where the file cannot be opened."""
    try:
        return probe(host, name)
    except StateDirError:
        return True


def read_record(directory: StateDir, name: str) -> LeaseRecord | None:
    """Return what the lease file says; None where nothing is readable. A torn record is read again."""
    try:
        fd = directory.open(name)
    except StateDirError:
        return None
    if fd is None:
        return None
    try:
        for _ in range(5):
            record = LeaseRecord.decode(os.pread(fd, LIMIT, 0))
            if record is not None:
                return record._replace(slot=_slot_in(name))
        return None
    except OSError:
        return None
    finally:
        os.close(fd)


# Slots: what claims hold that share a GPU. Each locks a file ``UUID.share.K.lock``, and the GPU's lease shared.


def recorded_slots(leases: StateDir, uuid: str, files: Collection[str] | None = None) -> dict[int, LeaseRecord]:
    """Return slot -> record, of living claims and of dead ones. No lock is taken.

    Args:
        files: the names in the directory, if they are known: to ask for each of all GPUs takes longer than to list it.
    """
    found = {}
    for slot in range(MOST_SHARERS):
        name = slot_name(uuid, slot)
        record = None if is_empty(leases, name, files) else read_record(leases, name)
        if record is not None:
            found[slot] = record
    return found


def held_slots(host: LockedHost, uuid: str) -> dict[int, LeaseRecord | None]:
    """Return slot -> record, of the slots that claims hold, or claims inside them whose outer claim has ended.

    The record is None where it cannot be read: then the claim counts as holding the whole GPU.
    """
    found = {}
    for slot, record in ((slot, _record(host.leases, uuid, slot)) for slot in range(MOST_SHARERS)):
        # Read first: to probe a slot replaces the record of a dead claim.
        if any(may_be_held(host, slot_name(uuid, slot, inner=inner)) for inner in (False, True)):
            found[slot] = record
    return found


def _record(leases: StateDir, uuid: str, slot: int) -> LeaseRecord | None:
    names = (slot_name(uuid, slot, inner=inner) for inner in (False, True))
    records = (read_record(leases, name) for name in names if not is_empty(leases, name))
    return next((record for record in records if record is not None), None)


def holder_of_slots(slots: Iterable[LeaseRecord | None]) -> LeaseHolder | None:
    """Return the holder of a GPU in these slots, by their records alone; None if there is none."""
    found = [LeaseHolder() if record is None else record.as_holder() for record in slots]
    return LeaseHolder.of_sharers(found) if found else None


# Notes of GPUs on which a claim failed: ``leases/UUID.fault``, one line of JSON each, for the claims that come next.


_MOST_BYTES = 4096
_MOST_CHARACTERS = 400


def read_faults(leases: StateDir, uuids: Iterable[str]) -> dict[str, GpuFault]:
    """Return UUID -> note, for the devices that have one that can be read, however old it is."""
    found = {}
    for uuid in uuids:
        fault = _decode(read_bounded(leases, fault_name(uuid), _MOST_BYTES))
        if fault is not None:
            found[uuid] = fault
    return found


def _decode(data: bytes) -> GpuFault | None:
    """Return the note in this line; None if it is empty, torn or makes no sense. Anybody may have written it."""
    if not data:
        return None
    import json

    try:
        raw = json.loads(data.decode("utf-8", "replace"))
        return GpuFault(as_time(raw["when"]), procfs.printable(str(raw["error"]))[:_MOST_CHARACTERS])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def write_fault(leases: StateDir, uuid: str, fault: GpuFault) -> None:
    """Note that a claim failed on this device, in place of any earlier note.

    Raises:
        StateDirError: the file cannot be opened or written.
    """
    import json

    error = procfs.printable(procfs.well_formed(fault.error))[:_MOST_CHARACTERS]
    line = json.dumps({"when": round(fault.when, 3), "error": error}, ensure_ascii=False).encode() + b"\n"
    name = fault_name(uuid)
    fd = leases.open_or_create(name)
    try:
        write_all(fd, line, os.path.join(leases.path, name))
    finally:
        os.close(fd)


def clear_fault(leases: StateDir, uuid: str) -> None:
    """Remove the note on a device, if there is one; empty it if only its owner may remove it.

    Raises:
        StateDirError: the file cannot be opened. OSError: it cannot be emptied.
    """
    if leases.unlink(fault_name(uuid)):
        return
    fd = leases.open(fault_name(uuid))
    if fd is None:
        return
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


# Drained GPUs: no new claims there, by the word of root or of the owner of the state directory.


def drain_file(*, by_root: bool) -> str:
    """Return the file with the UUIDs of drained GPUs: root's, beside its settings of the host, or that of the owner of
    the state directory, in it."""
    return os.path.join(policy_directory(os.environ) if by_root else state_dir_path(), "drained")


def drained_gpus(*, by_root: bool | None = None) -> dict[str, str]:
    """Return UUID -> why nobody may claim it now: ``drained by root: a fan is broken``.

    Args:
        by_root: read root's file only, or only that of the owner of the state directory; None reads both.
    """
    found = {}
    for root in (False, True) if by_root is None else (by_root,):
        user, reasons = read_drained(by_root=root)
        for uuid, reason in reasons.items():
            found[uuid] = f"drained by {user}" + (f": {reason}" if reason else "")
    return found


def read_drained(*, by_root: bool) -> tuple[str, dict[str, str]]:
    """Return the user who wrote such a file, and UUID -> reason; nothing of a file that another user could have
    written."""
    try:
        if by_root:
            file, owner = open_to_read(drain_file(by_root=True), os.O_NOFOLLOW), 0
        else:
            with StateDir(state_dir_path(), make=False) as root:  # no path into it is followed
                file, owner = open_to_read("drained", os.O_NOFOLLOW, root.fd), os.fstat(root.fd).st_uid
        with file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022 or status.st_uid not in (0, owner):
                return "", {}
            text = (file.read(LIMIT) or b"").decode("utf-8", "replace")
    except (OSError, StateDirError):
        return "", {}
    lines = (line.partition(" ") for line in map(procfs.printable, text.splitlines()) if line)
    return procfs.user_name(status.st_uid), {uuid: reason for uuid, _, reason in lines}
