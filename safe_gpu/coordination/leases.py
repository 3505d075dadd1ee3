"""Leases: one locked file for each claimed GPU, held by the kernel for as long as the claim lives."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

from .. import procfs
from ..errors import StateDirError
from .files import StateDir, write_all
from .host_lock import LockedHost, lock_file, unlock_file

__all__ = ["Lease", "LeaseRecord", "inner_name", "lease_name", "probe", "read_record", "try_lease"]

# No time of ours is later (the year 5138); time.localtime fails on numbers that JSON allows.
_LATEST = 1e11


def lease_name(uuid: str) -> str:
    """The lease file of a device.

    >>> lease_name("GPU-12")
    'GPU-12.lock'
    """
    # Old MIG names hold slashes (MIG-GPU-uuid/1/0); a file name cannot.
    return uuid.replace("/", "_") + ".lock"


def inner_name(uuid: str) -> str:
    """The lease file of a claim made inside another claim."""
    return uuid.replace("/", "_") + ".inner.lock"


class LeaseRecord(NamedTuple):
    """What a lease file says about its holder, for people: the lock is the truth, this is not.

    ``start`` is the holder's start in clock ticks since boot, ``since`` the claim's in Unix seconds, ``gpus`` the UUIDs
    that the claim holds, ``token`` the scope for claims inside it ("" where it has none).
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

    @classmethod
    def of_this_process(cls, gpus: tuple[str, ...], job: str | None, token: str, command: str | None) -> LeaseRecord:
        """The record of a claim that this process makes now."""
        pid = os.getpid()
        return cls(
            pid=pid,
            start=procfs.start_time(pid),
            uid=os.geteuid(),
            user=procfs.user_name(os.geteuid()),
            host=os.uname().nodename,
            job=job,
            command=command or procfs.command_of(pid),
            gpus=gpus,
            since=round(time.time(), 3),
            token=token,
        )

    def encode(self) -> bytes:
        """One line of JSON."""
        import json

        keys = ("v", "pid", "start", "uid", "user", "host", "job", "command", "gpus", "since", "token")
        return json.dumps({key: getattr(self, key) for key in keys}).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> LeaseRecord | None:
        """The record in this line, or None where it is torn, empty or somebody's nonsense.

        Anybody may have written it: text comes out printable, and a time that cannot be as 0.
        """
        import json

        try:
            raw: dict[str, Any] = json.loads(data)
            pid, since = int(raw["pid"]), float(raw.get("since") or 0.0)
            if not 0 < pid < 1 << 31:
                return None
            return cls(
                pid=pid,
                start=None if raw.get("start") is None else int(raw["start"]),
                uid=int(raw.get("uid", -1)),
                user=procfs.printable(str(raw.get("user", ""))),
                host=procfs.printable(str(raw.get("host", ""))),
                job=None if raw.get("job") is None else procfs.printable(str(raw["job"])),
                command=None if raw.get("command") is None else procfs.printable(str(raw["command"])),
                gpus=tuple(str(uuid) for uuid in raw.get("gpus") or ()),
                since=since if 0 <= since < _LATEST else 0.0,
                token=str(raw.get("token") or ""),
                v=int(raw.get("v", 1)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


class Lease:
    """A lease that this process holds. It ends by :meth:`release`, or with the last copy of its descriptor."""

    def __init__(self, name: str, fd: int, path: str) -> None:
        self.name = name
        self.fd = fd
        self.path = path
        self.owner = os.getpid()

    def write(self, record: bytes) -> None:
        """Say who holds it.

        Raises:
            StateDirError: no room, or the write failed.
        """
        write_all(self.fd, record, self.path)

    def release(self) -> None:
        """Give it back; safe to call twice. In a forked child this only closes the child's copy."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            try:
                if os.getpid() == self.owner:
                    unlock_file(fd)
            finally:
                os.close(fd)

    def keep_across_exec(self) -> None:
        """Move the descriptor out of the way of shell redirections and let it survive exec(2).

        To 500 or above, or as high as RLIMIT_NOFILE allows, so that a script's ``exec 3>`` does no harm.
        """
        import fcntl

        soft = os.sysconf("SC_OPEN_MAX")  # -1 where there is no limit
        floor = 500 if soft < 0 or soft > 564 else max(soft - 64, soft // 2, 3)
        try:
            fd = fcntl.fcntl(self.fd, fcntl.F_DUPFD, floor)
        except OSError:
            os.set_inheritable(self.fd, True)  # no room up there: where it is will do
            return
        os.close(self.fd)
        self.fd = fd


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
            return Lease(name, fd, os.path.join(directory.path, name))
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


def probe(host: LockedHost, name: str) -> bool:
    """Whether somebody holds this lease."""
    fd = host.leases.open(name)
    if fd is None:
        return False
    try:
        if not lock_file(fd):
            return True
        unlock_file(fd)
        return False
    finally:
        os.close(fd)


def read_record(directory: StateDir, name: str) -> LeaseRecord | None:
    """What the lease file says; None where nothing is readable. A torn record is read again."""
    try:
        fd = directory.open(name)
    except StateDirError:
        return None
    if fd is None:
        return None
    try:
        for _ in range(5):
            record = LeaseRecord.decode(os.pread(fd, 65536, 0))
            if record is not None:
                return record
        return None
    except OSError:
        return None
    finally:
        os.close(fd)
