"""What a lease file says about its holder, for people: the lock is the truth, this is not."""

import os
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import StateDirError
from ...gpus.devices import LeaseHolder
from ...host import procfs
from ...host.commands import own_command
from ...host.decoding import as_int, as_list, as_seconds, as_text, as_time
from ...host.foreign_files import LIMIT
from .. import socket_names as names
from ..signals import DeferredSignals

if TYPE_CHECKING:
    from ..files.state_dir import StateDir

_LARGEST = (1 << 63) - 1

_own: dict[int, int | None] = {}
"""The start of this process, by its pid, since a forked child has another."""


class LeaseRecord(NamedTuple):
    """What a lease file says about its holder, for people: the lock is the truth, this is not.

    ``start`` is the holder's start in clock ticks since boot, ``since`` the claim's in Unix seconds, ``gpus`` the UUIDs
    that the claim holds, ``token`` the hash of what claims inside it carry ("" if there can be none). ``pidns`` is the
    inode of the PID namespace in which ``pid`` and ``start`` are numbers, None where it is not known. ``until`` is when
    the claim will probably end, in Unix seconds, None where it did not say. ``share`` is how much of each GPU it holds,
    in bytes, ``of`` how much there is to share; None of whole GPUs.
    ``queued`` is when it joined the queue, in Unix seconds; None of a claim that did not wait.
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
    queued: float | None = None

    @property
    def of_the_dead(self) -> bool:
        """Whether the process that wrote it has ended."""
        return procfs.has_ended(self.pid) or self.start not in (None, procfs.start_time(self.pid))

    @classmethod
    def of_this_process(cls, job: str | None, command: str | None) -> "LeaseRecord":
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

    def claiming(
        self, gpus: tuple[str, ...], token: str, hold_for: float | None = None, queued: float | None = None
    ) -> "LeaseRecord":
        """Return the record of a claim that gets these GPUs now. Everybody can read it, so it has a hash of the token.

        Args:
            hold_for: for how many seconds the claim will probably last; None is unknown.
        """
        now, code = round(time.time(), 3), names.digest(token) if token else ""
        until = hold_for and round(now + hold_for, 3)
        return self._replace(gpus=gpus, since=now, token=code, until=until, queued=queued and round(queued, 3))

    def encode(self) -> bytes:
        """Return one line of JSON."""
        import json

        keys = "v pid start uid user host job command gpus since until token pidns".split()
        keys += [key for key in ("share", "of", "queued") if getattr(self, key) is not None]
        fields = {key: getattr(self, key) for key in keys}
        for key, value in fields.items():
            if isinstance(value, str):  # an argument of a command may be any bytes
                fields[key] = procfs.well_formed(value)
        return json.dumps(fields).encode() + b"\n"

    @classmethod
    @lru_cache(128)
    def decode(cls, data: bytes) -> "LeaseRecord | None":
        """Return the record in this line, or None where it is torn, empty or somebody's nonsense.

        Anybody may have written it: text comes out printable and cut, bytes that are not UTF-8 as U+FFFD, and a time
        that cannot be as 0.
        """
        import json

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
                queued=None if raw.get("queued") is None else as_time(raw["queued"]),
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None

    def as_holder(self) -> LeaseHolder:
        """Return what it says of a claim, by its word alone."""
        namespace = procfs.namespace_text(self.pidns)
        return LeaseHolder(
            None if namespace else self.pid,
            self.user,
            self.job,
            self.command,
            self.since,
            None if namespace else self.start,
            namespace=namespace,
            until=self.until,
            uid=self.uid,
            share=self.share,
            queued=self.queued,
        )

    @property
    def here(self) -> bool:
        """Whether ``pid`` means a process of this PID namespace; True where the record does not say."""
        return not procfs.namespace_text(self.pidns)


def read_record(directory: "StateDir", name: str) -> LeaseRecord | None:
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
                return record
        return None
    except OSError:
        return None
    finally:
        os.close(fd)
