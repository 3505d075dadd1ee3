"""Entries: files that say what one process holds, or what it wants, for as long as it keeps them locked.

An entry belongs to its user, who alone can write it (mode 0644). So the owner of the file is the kernel's word for
whose it is. It is locked before it has a name and never again, so one that is not locked stays dead. To lock it needs a
descriptor that may write, which only its user has.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from ..errors import StateDirError
from ..host import procfs
from ..host.commands import own_command
from ..host.decoding import LONGEST_FILE, as_int, as_list, as_seconds, as_text
from .directory import OPEN_FILE, Directory
from .held import Held
from .locks import is_locked, lock, read_lock, unlock
from .signals import DeferredSignals
from .state_dir import refusal

MOST_NAMES = 65_536
"""Names in a directory; with more, every claim is refused."""

MOST_CLAIMS = 4096
"""Living claims; with more, every claim is refused."""

_NAME = re.compile(r"(0|[1-9][0-9]{0,17})\.([0-9a-f]{16})")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}")
_LARGEST_GAP = 10**12  # between two numbers that count: who makes a larger one ends no numbers for others
_UNFINISHED_FOR = 60.0  # seconds that an entry takes to be made at most
_FEW = 50  # names that are soon listed
_MOST_DEAD = 1000  # that are read, and removed at once
_MOST_TRIES = 100  # to make one, while somebody removes what is being made
_GPUS = 256  # of an entry
_LONGEST_CAUSE = 100  # characters of why one counts for nothing

# What open(2) answers to a file that its owner has made unreadable: such a file counts for nothing.
_NOT_AN_ENTRY = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EWOULDBLOCK)


_NONSENSE = (ValueError, TypeError, OverflowError, RecursionError)


class Entry(NamedTuple):
    """What a living process holds, or what it wants.

    Attributes:
        number: orders the entries of a directory by age.
        name: of the file, which is never used again.
        uid: the owner of the file; -1 of one whom the user namespace of this process does not know.
        file: its device and inode.
        gpus: UUID -> bytes of a share of it, None of all of it. Of a ticket: the GPUs that could ever do.
        parts: UUID -> K, of the GPUs of which it holds a part (see :mod:`~safe_gpu.coordination.doors`).
        nb_gpus: how many it wants; 0 of a claim.
        display: it shares a GPU with an active display with all claims that say so.
        token: hash of the token of a claim that allows claims inside it; "" of others.
        inside: hash of the token of the claim around it; "" of one that is inside none.
        pid, start, pidns, host: its process, as it sees itself: ``start`` in clock ticks since boot.
        since, until, queued: Unix seconds; None is unknown.
        more: what else it says, such as the conditions of a ticket.

    >>> Entry.read("7.00000000000000aa", 1000, (1, 2), b'{"v": 1, "gpus": {"GPU-5c89852c": null}}').gpus
    {'GPU-5c89852c': None}
    """

    number: int
    name: str
    uid: int
    file: tuple[int, int]
    gpus: Mapping[str, int | None]
    parts: Mapping[str, int]
    nb_gpus: int
    display: bool
    token: str
    inside: str
    pid: int
    start: int
    pidns: int
    host: str
    job: str
    command: str
    since: float | None
    until: float | None
    queued: float | None
    version: int
    more: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, uid: int, file: tuple[int, int], data: bytes) -> Entry:
        """Return what a file says.

        Raises:
            ValueError, TypeError, OverflowError, RecursionError: nonsense.
        """
        said = json.loads(data)
        if not isinstance(said, dict):
            raise TypeError("no object")
        more = {key: value for key, value in said.items() if key not in cls._fields and key != "v"}
        nb_gpus = as_int(said.get("nb_gpus", 0), 0, _GPUS)
        wanted = said.get("gpus")
        if nb_gpus:
            wanted = dict.fromkeys(map(str, as_list(wanted)))
        if not isinstance(wanted, dict) or not isinstance(said.get("parts", {}), dict) or len(wanted) > _GPUS:
            raise TypeError("no GPUs")
        return cls(
            number=int(name.partition(".")[0]),
            name=name,
            uid=uid,
            file=file,
            gpus={uuid: None if share is None else as_int(share, 1, 1 << 60) for uuid, share in wanted.items()},
            parts={uuid: as_int(part, 0, 1 << 10) for uuid, part in said.get("parts", {}).items()},
            nb_gpus=nb_gpus,
            display=said.get("display") is True,
            token=as_text(said.get("token", "")),
            inside=as_text(said.get("inside", "")),
            pid=as_int(said.get("pid", 0), 0, 1 << 62),
            start=as_int(said.get("start", 0), 0, 1 << 62),
            pidns=as_int(said.get("pidns", 0), 0, 1 << 62),
            host=as_text(said.get("host", "")),
            job=as_text(said.get("job", "")),
            command=as_text(said.get("command", "")),
            since=as_seconds(said.get("since"), 0),
            until=as_seconds(said.get("until"), 0),
            queued=as_seconds(said.get("queued"), 0),
            version=as_int(said.get("v"), 1, 1 << 30),
            more=more,
        )


class Entries:
    """The entries of a directory, as one process gets to know them. A file is read once, and asked whether it lives.

    Nothing is locked, so any process may look at any time.

    Attributes:
        directory: where they are.
        next_number: of a new entry: one above the highest that counts, as of the latest listing.
        ignored: names that count for nothing, and why. Their owners made them so, and it is told where GPUs are shown.

    Example::

        with Directory(state_dir_path(), "claims") as directory:
            held = [entry.gpus for entry in Entries(directory).look()]
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.next_number = 1
        self.ignored: dict[str, str] = {}
        self._living: dict[str, Entry] = {}
        self._unread: dict[str, int] = {}  # name -> number
        self._settled: set[str] = set()  # names of the dead, and of what is no entry
        self._dead: set[str] = set()
        self._unfinished: set[str] = set()
        self._read_once: dict[tuple[int, int], Entry] = {}  # a file of the living, which may have many names
        self._in_order: list[tuple[int, str]] | None = None

    @property
    def may_be_many(self) -> bool:
        """Whether to list and read them may take long."""
        return self.directory.is_large or len(self._settled) + len(self._living) + len(self._unread) > _FEW

    def refresh(self) -> None:
        """List the names, and open nothing.

        Raises:
            StateDirError: more names than count.
        """
        names = self.directory.names()
        if len(names) > MOST_NAMES:
            raise self._too_many(names)
        new = names - self._settled - self._living.keys() - self._unread.keys()
        if len(names) - len(new) < len(self._settled) + len(self._living) + len(self._unread):  # some are gone
            self._settled &= names
            self._dead &= names
            for name in self._living.keys() - names:
                self._forget(name)
            for known in (self._unread, self.ignored):
                for name in known.keys() - names:
                    del known[name]
            self._in_order = None
        if new:
            self._in_order = None
        self._unfinished = {name for name in new if _UNFINISHED.fullmatch(name)}
        numbers = []
        for name in new - self._unfinished:
            if match := _NAME.fullmatch(name):
                self._unread[name] = int(match[1])
                numbers.append(int(match[1]))
            else:
                self._settled.add(name)
        for number in sorted(numbers):
            if self.next_number <= number < self.next_number + _LARGEST_GAP:
                self.next_number = number + 1

    def look(self, ask: Collection[str] | None = None) -> list[Entry]:
        """List the names, read what is new, and return the living entries by number, each file once.

        Args:
            ask: names of known entries that are asked again whether they live; None asks all.

        Raises:
            StateDirError: more names or claims than count, or a file that cannot be opened though its owner allows it:
                with an entry left out, two could hold one GPU.
        """
        self.refresh()
        known = self._living.keys() | self.ignored.keys()
        for name in (
            *sorted(self._unread, key=self._unread.__getitem__),
            *(known if ask is None else known & set(ask)),
        ):
            self.ask(name)
        living = self.living
        if len(living) > MOST_CLAIMS and not living[0].nb_gpus:
            raise self._too_many(self._living)
        return living

    @property
    def living(self) -> list[Entry]:
        """The entries that lived when they were asked last. Of several names of one file the first counts."""
        return [*{entry.file: entry for entry in sorted(self._living.values(), reverse=True)}.values()][::-1]

    def leave_out(self, name: str) -> None:
        """Count an entry of this process for nothing, from when it has its name."""
        self._settled.add(name)

    def listed(self) -> list[tuple[int, str]]:
        """Return numbers and names, in order, of what may live by the latest listing."""
        if self._in_order is None:
            known = ((entry.number, name) for name, entry in self._living.items())
            self._in_order = sorted([*known, *((number, name) for name, number in self._unread.items())])
        return self._in_order

    def dead(self) -> Iterator[Entry]:
        """Yield the dead entries that can be read, as of the latest look; of very many only some."""
        for name in islice(self._dead, _MOST_DEAD):
            if (found := self._read(name)) is not None:
                yield found

    def remove_dead(self) -> list[Entry]:
        """Remove the dead entries of this user, of all users if it is root, and return them; of very many only some.

        Not under host.lock: others wait.
        """
        removed: list[Entry] = []
        most = _MOST_DEAD
        for name in self._dead | self._unfinished:
            with suppress(OSError):
                status = os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False)
                finished = name in self._dead or time.time() - status.st_mtime > _UNFINISHED_FOR
                if most and os.geteuid() in (0, status.st_uid) and finished:
                    most -= 1
                    found = self._read(name)
                    os.unlink(name, dir_fd=self.directory.fd)
                    removed += [found] if found is not None else []
        self._dead.clear()
        return removed

    def ask(self, name: str) -> Entry | None:
        """Return the living entry of this name; None if there is none, or it counts for nothing.

        Raises:
            StateDirError: it cannot be opened though its owner allows it.
        """
        self._unread.pop(name, None)
        self.ignored.pop(name, None)
        found = self._found(name)
        if found is not None:
            self._living[name] = self._read_once[found.file] = found
            self._settled.discard(name)
        else:
            self._forget(name)
            self._settled.add(name)
            self._in_order = None
        return found

    def _forget(self, name: str) -> None:
        entry = self._living.pop(name, None)
        if entry is not None:
            self._read_once.pop(entry.file, None)

    def known(self, name: str) -> Entry | None:
        """Return the entry of this name, which lived when it was asked last; it is asked if it never was."""
        return self._living.get(name) or (self.ask(name) if name in self._unread else None)

    def _found(self, name: str) -> Entry | None:
        """Return the living entry of this name; None if it is dead or gone, or counts for nothing."""
        try:
            fd = open_entry(self.directory, name)
        except FileNotFoundError:
            return None
        except OSError as err:
            if err.errno not in _NOT_AN_ENTRY:
                raise self.directory.error(name, err) from err
            self.ignored[name] = str(err.strerror)
            return None
        try:
            if is_locked(fd):
                return self._content(fd, name)
            self._dead.add(name)
        except _NONSENSE as err:
            self.ignored[name] = f"nonsense: {err}"
        finally:
            os.close(fd)
        return None

    def _read(self, name: str) -> Entry | None:
        """Return what a dead entry says; None if it cannot be read."""
        try:
            fd = open_entry(self.directory, name)
        except OSError:
            return None
        try:
            return self._content(fd, name)
        except _NONSENSE:
            return None
        finally:
            os.close(fd)

    def _content(self, fd: int, name: str) -> Entry:
        """Return what an open entry says; one of ``_NONSENSE`` if it counts for nothing."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022 or status.st_size > LONGEST_FILE:
            raise ValueError(f"mode {status.st_mode:o}, {status.st_size} bytes")
        file = status.st_dev, status.st_ino
        if (known := self._read_once.get(file)) is not None:
            return known if known.name == name else known._replace(number=int(name.partition(".")[0]), name=name)
        uid = -1 if procfs.is_unknown_user(status.st_uid) else status.st_uid
        return Entry.read(name, uid, file, os.pread(fd, LONGEST_FILE, 0))

    def _too_many(self, names: Collection[str]) -> StateDirError:
        owners: Counter[int] = Counter()
        for name in names:
            with suppress(OSError):
                owners[os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False).st_uid] += 1
        (uid, number), *_ = owners.most_common(1) or [(0, 0)]
        what = f"{self.directory.path} has {len(names)} names, of which {number} are of {procfs.user_name(uid)}, who "
        return refusal(f"{what}or root must remove them", self.directory.path, errno.EMLINK)


def living_entries(state_dir: str, name: str, ignored: list[str] | None = None) -> list[Entry]:
    """Return the living entries of a directory in a state directory, without a lock; none if it is missing.

    Args:
        ignored: takes a sentence on the names that count for nothing. Any user can make many.

    Raises:
        StateDirError: it cannot be read.
    """
    # An exception of a handler, such as Ctrl-C in a notebook, would leave the directory open.
    with suppress(FileNotFoundError), DeferredSignals(), Directory(state_dir, name, make=False) as directory:
        entries = Entries(directory)
        living = entries.look()
        if ignored is not None and entries.ignored:
            ignored.append(_ignored(directory, entries.ignored))
        return living
    return []


def _ignored(directory: Directory, ignored: Mapping[str, str]) -> str:
    name, why = min(ignored.items())
    with suppress(OSError):
        owner = os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_uid
        name += f" of {procfs.user_name(owner)}"
    more = f", as do {len(ignored) - 1} more" if len(ignored) > 1 else ""
    return procfs.printable(f"{directory.path}/{name} counts for nothing ({why[:_LONGEST_CAUSE]}){more}")


_this_process: dict[int, dict[str, Any]] = {}  # what does not change, by the pid: a forked child has another


def said_by_this_process(job: str | None, command: str | None = None) -> dict[str, Any]:
    """Return what an entry of this process says of it.

    Args:
        job: the batch job, for people.
        command: of what this process will execute, for people; None: of this process itself.
    """
    pid = os.getpid()
    if pid not in _this_process:
        _this_process.clear()
        _this_process[pid] = {
            "pid": pid,
            "start": procfs.start_time(pid) or 0,
            "pidns": procfs.pid_namespace() or 0,
            "host": os.uname().nodename,
        }
    return {
        **_this_process[pid],
        "job": procfs.well_formed(job or ""),
        "command": procfs.well_formed(command or own_command() or ""),
    }


def make_entry(directory: Directory, number: int, said: Mapping[str, Any], *, by_children: bool) -> tuple[str, Held]:
    """Make an entry and return its name and its lock. What has a name is whole and locked.

    Args:
        number: :attr:`Entries.next_number`.
        said: what it says, see :class:`Entry`.
        by_children: whether forked children keep it: that of a claim they do, since they may be using the GPUs.

    Raises:
        StateDirError: no room, a read-only file system, or somebody keeps removing what is made.
    """
    data = json.dumps({"v": 1, **said}).encode() + b"\n"
    for _ in range(_MOST_TRIES):
        temporary = f".{os.urandom(8).hex()}"
        name = f"{number}{temporary}"  # which nobody else has
        try:
            fd = os.open(temporary, OPEN_FILE | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory.fd)
        except OSError as err:
            raise directory.error(temporary, err) from err
        held = Held(fd, by_children=by_children, unlock=unlock)
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            lock(fd)
            os.fchmod(fd, 0o644)  # now that nobody else can lock it first
            os.rename(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
            if directory.still_has(name, held.file):
                return name, held
            held.release()  # the owner of the directory has put another file there
        except BaseException as err:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=directory.fd)
            held.release()
            if isinstance(err, OSError) and not isinstance(err, FileNotFoundError | FileExistsError):
                raise directory.error(temporary, err) from err
            if not isinstance(err, OSError):
                raise
    what = f"what is made in {directory.path} is removed at once, by its owner or a cleaner"
    raise refusal(what, directory.path, errno.ENOENT)


def remove_entry(directory: Directory, name: str, held: Held) -> None:
    """Remove an entry of this process and give it back; a forked child only closes its copy."""
    with suppress(OSError):
        held.release(partial(os.unlink, name, dir_fd=directory.fd))


def is_alive(directory: Directory, name: str) -> bool:
    """Return whether an entry still lives, as one who waits asks again and again."""
    try:
        fd = open_entry(directory, name)
    except OSError:
        return False
    try:
        return is_locked(fd)
    finally:
        os.close(fd)


def sleep_until_dead(directory: Directory, name: str, seconds: float | None) -> None:
    """Sleep until an entry is given back, or for that many seconds."""
    try:
        held = read_lock(open_entry(directory, name), fcntl.flock)
    except OSError:
        return
    try:
        held.wait(None if seconds is None else time.monotonic() + seconds)
    except OSError:
        pass  # no room for a lock: who waits looks again
    finally:
        held.leave()


def open_entry(directory: Directory, name: str) -> int:
    """Open an entry for reading; OSError as of open(2)."""
    return os.open(name, OPEN_FILE, dir_fd=directory.fd)
