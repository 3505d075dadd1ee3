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
from functools import cache, lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

from ..errors import StateDirError
from ..host import procfs
from ..host.foreign_files import LIMIT, as_int, as_list, as_seconds, as_text, open_to_read, printable, well_formed
from ..host.locks import Held, NoLocksError, is_locked, lock, read_lock, unlock
from ..host.programs import own_command
from ..host.signals import DeferredSignals
from .directory import OPEN_FILE, Directory, SharedDirectory, refusal

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

# What open(2) answers to what its owner has made unreadable, and to what is no file: it counts for nothing.
_NOT_AN_ENTRY = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EWOULDBLOCK, errno.EISDIR)


_NONSENSE = (ValueError, TypeError, OverflowError, RecursionError)

_TEXTS = ("token", "inside", "host", "job", "command")
_NUMBERS = ("pid", "start", "pidns")
_TIMES = ("since", "until", "queued")


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
    @lru_cache(maxsize=256)  # most have been read before, by an earlier claim of this process
    def read(cls, name: str, uid: int, file: tuple[int, int], data: bytes) -> Entry:
        """Return what a file says.

        Raises:
            ValueError, TypeError, OverflowError, RecursionError: nonsense.
        """
        said = json.loads(data)
        if not isinstance(said, dict):
            raise TypeError("no object")
        nb_gpus, gpus, parts = as_int(said.get("nb_gpus", 0), 0, _GPUS), said.get("gpus"), said.get("parts", {})
        if nb_gpus:
            gpus = dict.fromkeys(map(str, as_list(gpus)))
        if not isinstance(gpus, dict) or not isinstance(parts, dict) or len(gpus) > _GPUS:
            raise TypeError("no GPUs")
        read: dict[str, Any] = {key: as_text(said.get(key, "")) for key in _TEXTS}
        read.update((key, as_int(said.get(key, 0), 0, 1 << 62)) for key in _NUMBERS)
        read.update((key, as_seconds(said.get(key), 0)) for key in _TIMES)
        return cls(
            number=_number(name),
            name=name,
            uid=uid,
            file=file,
            gpus={uuid: None if share is None else as_int(share, 1, 1 << 60) for uuid, share in gpus.items()},
            parts={uuid: as_int(part, 0, 1 << 10) for uuid, part in parts.items()},
            nb_gpus=nb_gpus,
            display=said.get("display") is True,
            version=as_int(said.get("v"), 1, 1 << 30),
            more={key: value for key, value in said.items() if key not in cls._fields and key != "v"},
            **read,
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
        self._unread: set[str] = set()
        self._settled: set[str] = set()  # names of the dead, and of what is no entry
        self._dead: set[str] = set()
        self._unfinished: set[str] = set()
        self._files: dict[tuple[int, int], Entry] = {}  # of the living: a file may have very many names

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
        new = names - self._settled - self._living.keys() - self._unread
        if len(names) - len(new) < len(self._settled) + len(self._living) + len(self._unread):  # some are gone
            for some in (self._settled, self._dead, self._unread):
                some &= names
            for known in (self._living, self.ignored):
                for name in known.keys() - names:
                    del known[name]
            self._files = {entry.file: entry for entry in self._living.values()}
        self._unfinished = {name for name in new if _UNFINISHED.fullmatch(name)}
        found = {name for name in new if _NAME.fullmatch(name)}
        self._unread |= found
        self._settled |= new - found - self._unfinished
        for number in sorted(map(_number, found)):
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
        for name in (*sorted(self._unread, key=_number), *(known if ask is None else known & set(ask))):
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
        return sorted((_number(name), name) for name in (*self._living, *self._unread))

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
        self._unread.discard(name)
        self.ignored.pop(name, None)
        found = self._found(name)
        if found is not None:
            self._living[name] = self._files[found.file] = found
            self._settled.discard(name)
        else:
            self._living.pop(name, None)
            self._settled.add(name)
        return found

    def known(self, name: str) -> Entry | None:
        """Return the entry of this name, which lived when it was asked last; it is asked if it never was."""
        return self._living.get(name) or (self.ask(name) if name in self._unread else None)

    def _found(self, name: str) -> Entry | None:
        """Return the living entry of this name; None if it is dead or gone, or counts for nothing."""
        try:
            with open_to_read(name, os.O_NOFOLLOW, self.directory.fd) as file:
                if is_locked(file.fileno()):
                    return self._living.get(name) or self._content(file.fileno(), name)
            self._dead.add(name)
        except FileNotFoundError:
            pass
        except OSError as err:
            if err.errno not in _NOT_AN_ENTRY:
                raise self.directory.error(name, err) from err
            self.ignored[name] = str(err.strerror)
        except _NONSENSE as err:
            self.ignored[name] = f"nonsense: {err}"
        return None

    def _read(self, name: str) -> Entry | None:
        """Return what a dead entry says; None if it cannot be read."""
        with suppress(OSError, *_NONSENSE), open_to_read(name, os.O_NOFOLLOW, self.directory.fd) as file:
            return self._content(file.fileno(), name)
        return None

    def _content(self, fd: int, name: str) -> Entry:
        """Return what an open entry says; one of ``_NONSENSE`` if it counts for nothing."""
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022 or status.st_size > LIMIT:
            raise ValueError(f"mode {status.st_mode:o}, {status.st_size} bytes")
        file = status.st_dev, status.st_ino
        if status.st_nlink > 1 and file in self._files:  # the number of a file that is gone may be used again
            return self._files[file]._replace(number=_number(name), name=name)
        uid = -1 if procfs.is_unknown_user(status.st_uid) else status.st_uid
        return Entry.read(name, uid, file, os.pread(fd, LIMIT, 0))

    def _too_many(self, names: Collection[str]) -> StateDirError:
        owners: Counter[int] = Counter()
        for name in names:
            with suppress(OSError):
                owners[os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False).st_uid] += 1
        (uid, number), *_ = owners.most_common(1) or [(0, 0)]
        what = f"{self.directory.path} has {len(names)} names, of which {number} are of {procfs.user_name(uid)}, who "
        return refusal(f"{what}or root must remove them", self.directory.path, errno.EMLINK)


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def living_entries(
    state_dir: str, name: str, ignored: list[str] | None = None, dead: list[Entry] | None = None
) -> list[Entry]:
    """Return the living entries of a directory in a state directory, without a lock; none if it is missing.

    Args:
        ignored: takes a sentence on the names that count for nothing. Any user can make many.
        dead: takes those of the dead that this user may remove, which are removed.

    Raises:
        StateDirError: it cannot be read.
    """
    # An exception of a handler, such as Ctrl-C in a notebook, would leave the directory open.
    with suppress(FileNotFoundError), DeferredSignals(), Directory(state_dir, name, make=False) as directory:
        entries = Entries(directory)
        living = entries.look()
        if ignored is not None and entries.ignored:
            ignored.append(_ignored(directory, entries.ignored))
        if dead is not None:
            dead += entries.remove_dead()
        return living
    return []


def _ignored(directory: Directory, ignored: Mapping[str, str]) -> str:
    name, why = min(ignored.items())
    with suppress(OSError):
        owner = os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_uid
        name += f" of {procfs.user_name(owner)}"
    more = f", as do {len(ignored) - 1} more" if len(ignored) > 1 else ""
    return printable(f"{directory.path}/{name} counts for nothing ({why[:_LONGEST_CAUSE]}){more}")


@cache
def _said_always(pid: int) -> dict[str, Any]:
    """Return what does not change of a process, which is this one; a forked child has another pid."""
    started, namespace = procfs.start_time(pid) or 0, procfs.pid_namespace() or 0
    return {"pid": pid, "start": started, "pidns": namespace, "host": os.uname().nodename}


def said_by_this_process(job: str | None, command: str | None = None, *, pid: int | None = None) -> dict[str, Any]:
    """Return what an entry of this process says of it.

    Args:
        job: the batch job, for people.
        command: of what this process will execute, for people; None: of this process itself.
        pid: of this process, where it is known.
    """
    return {
        **_said_always(pid or os.getpid()),
        "job": well_formed(job or ""),
        "command": well_formed(command or own_command() or ""),
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
        held, made = Held(fd, by_children=by_children, unlock=unlock), False
        try:
            if os.write(fd, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            lock(fd)
            os.fchmod(fd, 0o644)  # now that nobody else can lock it first
            os.rename(temporary, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
            made = directory.still_has(name, held.file)  # else the directory's owner has put another file there
            if made:
                return name, held
        except (FileNotFoundError, FileExistsError):
            pass
        except OSError as err:
            raise directory.error(temporary, err) from err
        finally:
            if not made:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=directory.fd)
                held.release()
    what = f"what is made in {directory.path} is removed at once, by its owner or a cleaner"
    raise refusal(what, directory.path, errno.ENOENT)


def remove_entry(directory: Directory, name: str, held: Held) -> None:
    """Remove an entry of this process and give it back; a forked child only closes its copy."""
    with suppress(OSError):
        held.release(partial(os.unlink, name, dir_fd=directory.fd))


def is_alive(directory: SharedDirectory, name: str) -> bool:
    """Return whether an entry still lives, as one who waits asks again and again."""
    with suppress(OSError), open_to_read(name, os.O_NOFOLLOW, directory.fd) as file:
        return is_locked(file.fileno())
    return False


def sleep_until_dead(directory: Directory, name: str, seconds: float | None) -> None:
    """Sleep until an entry is given back, or for that many seconds."""
    with DeferredSignals() as signals:
        try:
            held = read_lock(os.open(name, OPEN_FILE, dir_fd=directory.fd), fcntl.flock)
        except OSError:
            return
        try:
            held.wait(None if seconds is None else time.monotonic() + seconds, signals)
        except NoLocksError:
            pass  # who waits looks again
        finally:
            held.leave()
