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
from typing import Any, NamedTuple, TypeVar

from ..errors import StateDirError
from ..host import procfs
from ..host.foreign_files import as_list, as_seconds, as_text, open_to_read, printable, well_formed
from ..host.locks import Held, NoLocksError, is_locked, lock, read_lock, unlock
from ..host.programs import own_command
from ..host.signals import DeferredSignals
from .directory import OPEN_FILE, Directory, SharedDirectory, refusal
from .doors import MOST_PARTS

MOST_NAMES = 65_536
"""Names in a directory; with more, every claim is refused."""

MOST_FILES = 4096
"""Files of one user in a directory that are opened."""

MOST_CLAIMS = 1024
"""Living claims of one user."""

MOST_BYTES = 2 << 20
"""Of the living entries of one user in a directory."""

LARGEST = 1 << 15
"""Bytes of an entry."""

_NAME = re.compile(r"(0|[1-9][0-9]{0,17})\.([0-9a-f]{16})")
_UNFINISHED = re.compile(r"\.[0-9a-f]{16}")
_LARGEST_GAP = 10**7  # between two numbers that count: who makes a larger one ends no numbers for others
_UNFINISHED_FOR = 60.0  # seconds that an entry takes to be made at most
_FEW = 50  # names that are soon listed
_MOST_DEAD = 1000  # that are read, and removed at once
_MOST_TRIES = 100  # to make one, while somebody removes what is being made
_GPUS = 256  # of an entry
_LONGEST_UUID = 100
_LONGEST_MODE = 8
_LONGEST_TEXT = 200  # characters, more are not read
_MOST_MORE = 24  # keys of a ticket beyond those of all entries
_LONGEST_MORE = 64
_LONGEST_CAUSE = 100  # characters of why one counts for nothing

# What open(2) answers to what is no file, is closed to this user, or kept under a file lease: it counts for nothing.
_NOT_AN_ENTRY = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EWOULDBLOCK, errno.EISDIR)


_NONSENSE = (ValueError, TypeError, OverflowError, RecursionError)

STRANGE = object()
"""Stands for a value of a ticket that no version of this package has written."""

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
        pieces: GPU -> those of ``gpus`` that are pieces of it; none where it has all of a GPU that has another name.
        modes: GPU -> the mode that divides it into such pieces, where there are several.
        nb_gpus: how many it wants; 0 of a claim.
        display: it shares a GPU with an active display with all claims that say so.
        token: hash of the token of a claim that allows claims inside it; "" of others.
        inside: hash of the token of the claim around it; "" of one that is inside none.
        pid, start, pidns, host: its process, as it sees itself: ``start`` in clock ticks since boot.
        since, until, queued: Unix seconds; None is unknown.
        more: what else it says: the conditions of a ticket, and of a claim what only the history tells.

    >>> Entry.read("7.00000000000000aa", 1000, (1, 2), b'{"v": 1, "gpus": {"GPU-5c89852c": null}}').gpus
    {'GPU-5c89852c': None}
    """

    number: int
    name: str
    uid: int
    file: tuple[int, int]
    gpus: Mapping[str, int | None]
    parts: Mapping[str, int]
    pieces: Mapping[str, tuple[str, ...]]
    modes: Mapping[str, str]
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
        nb_gpus, gpus = _whole(said.get("nb_gpus"), 0, 0, _GPUS), said.get("gpus")
        if nb_gpus and isinstance(gpus, list):
            gpus = dict.fromkeys(one for one in gpus if isinstance(one, str))
        parts, pieces, modes = (_object(said.get(key)) for key in ("parts", "pieces", "modes"))
        if not isinstance(gpus, dict) or max(len(gpus), len(pieces)) > _GPUS:
            raise TypeError("no GPUs")
        named = {uuid: share for uuid, share in gpus.items() if _is_uuid(uuid)}
        pieces = {
            gpu: tuple(one for one in as_list(names) if isinstance(one, str) and one in named)
            for gpu, names in pieces.items()
            if _is_uuid(gpu)
        }
        known = {
            one: _part(parts.get(one), of_pieces=one not in named and bool(pieces[one])) for one in {**named, **pieces}
        }
        read: dict[str, Any] = {key: as_text(said[key]) if isinstance(said.get(key), str) else "" for key in _TEXTS}
        read.update((key, _whole(said.get(key), 0, 0, 1 << 62)) for key in _NUMBERS)
        read.update((key, as_seconds(said.get(key), 0)) for key in _TIMES)
        return cls(
            number=_number(name),
            name=name,
            uid=uid,
            file=file,
            gpus={uuid: _whole(share, None, 1, 1 << 60) for uuid, share in named.items()},
            parts={one: part for one, part in known.items() if part is not None},
            pieces=pieces,
            modes={gpu: as_text(modes[gpu], _LONGEST_MODE) for gpu in pieces if isinstance(modes.get(gpu), str)},
            nb_gpus=nb_gpus,
            display=said.get("display") is True,
            version=_whole(said.get("v"), 1, 1, 1 << 30),
            more=_conditions(said) if nb_gpus else _for_history(said),
            **read,
        )


_Else = TypeVar("_Else")


def _whole(value: object, otherwise: _Else, least: int, most: int) -> int | _Else:
    """Return a whole number within these bounds, else what stands for one that is missing or makes no sense."""
    return value if type(value) is int and least <= value <= most else otherwise


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_uuid(name: str) -> bool:
    return len(name) <= _LONGEST_UUID and name.isprintable()


def _part(value: object, *, of_pieces: bool) -> int | None:
    """Return the number of a part; None of one that nobody has. One of a piece is no share, and vouches for no door."""
    least = MOST_PARTS if of_pieces else 0
    return _whole(value, None, least, least + MOST_PARTS - 1)


def _conditions(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a ticket says beyond other entries, of bounded size."""
    more = [one for one in said.items() if one[0] not in Entry._fields and one[0] != "v"]
    found = {key[:_LONGEST_MORE]: value if is_plain(value) else STRANGE for key, value in more[:_MOST_MORE]}
    return found if len(found) == len(more) else {**found, "": STRANGE}


def is_plain(value: object) -> bool:
    """Return whether a value may be that of a condition."""
    if isinstance(value, str):
        return len(value) <= _LONGEST_MORE
    return value is None or isinstance(value, (bool, int, float))


def _for_history(said: Mapping[str, Any]) -> dict[str, Any]:
    labels = [as_text(label, 16) for label in as_list(said.get("labels"))[:_GPUS] if isinstance(label, str)]
    found = {"waited": as_seconds(said.get("waited"), 0), "of": _whole(said.get("of"), None, 1, 1 << 60)}
    return {**found, "labels": labels} if labels else found


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
        self._has_tickets = directory.path.endswith("/queue")
        self._numbers: dict[str, int] = {}  # of all names that may be of entries, as of the latest listing
        self._living: dict[str, Entry] = {}
        self._sizes: dict[str, tuple[int, int]] = {}  # owner and bytes of what is locked
        self._locked, self._bytes = Counter[int](), Counter[int]()  # of an owner, by these
        self._files: dict[str, int] = {}  # owner of what was opened, or is to be, where there are many
        self._over: dict[str, int] = {}  # owner of what counts for nothing since he has too many
        self._others: dict[str, list[str]] = {}  # a name -> further ones of its file, which are settled
        self._left_out: dict[str, str] = {}  # of ``ignored``, what is not asked again
        self._unread: set[str] = set()
        self._settled: set[str] = set()  # names of the dead, and of what is no entry
        self._dead: set[str] = set()
        self._unfinished: set[str] = set()

    @property
    def may_be_many(self) -> bool:
        """Whether to list and read them may take long."""
        return self.directory.is_large or len(self._settled) + len(self._living) + len(self._unread) > _FEW

    def refresh(self) -> None:
        """List the names, and open nothing.

        Raises:
            StateDirError: more names than count.
        """
        names = self.directory.names(MOST_NAMES)
        if len(names) > MOST_NAMES:
            raise self._too_many(names)
        new = names - self._settled - self._living.keys() - self._unread
        if len(names) - len(new) < len(self._settled) + len(self._living) + len(self._unread):  # some are gone
            for some in (self._settled, self._dead, self._unread):
                some &= names
            known: dict[str, Any]
            again = {*self._over}
            for name in self._others.keys() - names:
                again.update(self._others[name])
            for known in (
                self._living,
                self.ignored,
                self._numbers,
                self._sizes,
                self._files,
                self._over,
                self._others,
                self._left_out,
            ):
                for name in known.keys() - names:
                    del known[name]
            self._locked, self._bytes = Counter(), Counter()
            for uid, size in self._sizes.values():
                self._charge(uid, size)
            self._settled -= again
            self._unread |= again & names
        self._unfinished = {name for name in new if _UNFINISHED.fullmatch(name)}
        found = {name for name in new if _NAME.fullmatch(name)}
        self._unread |= found
        self._settled |= new - found - self._unfinished
        self._numbers.update((name, _number(name)) for name in found)
        # Anew: what stood between may be gone.
        self.next_number = 1
        for number in sorted(self._numbers.values()):
            if number >= self.next_number + _LARGEST_GAP:
                break
            self.next_number = max(self.next_number, number + 1)

    def look(self, ask: Collection[str] | None = None) -> list[Entry]:
        """List the names, read what is new, and return the living entries by number, each file once.

        Args:
            ask: names of known entries that are asked again whether they live; None asks all.

        Raises:
            StateDirError: more names than count, or a file that cannot be opened though its owner allows it: with an
                entry left out, two could hold one GPU.
        """
        self.refresh()
        known = self._living.keys() | self.ignored.keys() - self._left_out.keys()
        for name in sorted(known if ask is None else known & set(ask), key=_number):
            self.ask(name)
        if len(self._unread) > _FEW:
            self._sort_out()
        for name in sorted(self._unread, key=_number):
            self.ask(name)
        return self.living

    def _sort_out(self) -> None:
        """Count for nothing, before it is opened, what is no entry by its status, and what a user has beyond his bound;
        of several names of a file only the first is opened. The others are the same file as long as they are there: an
        entry has its name for all its life."""
        first: dict[tuple[int, int, int], str] = {}
        files = Counter(self._files.values())
        for name in sorted(self._unread, key=_number):
            try:
                status = os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False)
            except OSError:
                self._unread.discard(name)
                continue
            file, why = (status.st_uid, status.st_dev, status.st_ino), _why_no_entry(status)
            if not why and file in first:
                self._others.setdefault(first[file], []).append(name)
            elif not why and files[status.st_uid] >= MOST_FILES and _is_bounded(status.st_uid):
                why = f"its owner has more than {MOST_FILES}"
                self._over[name] = status.st_uid
            elif not why:
                first[file] = name
                files[status.st_uid] += 1
                self._files[name] = status.st_uid
                continue
            if why:
                self._left_out[name] = self.ignored[name] = why
            self._unread.discard(name)
            self._settled.add(name)

    def is_over(self, uid: int) -> bool:
        """Return whether a user has more than counts, by the latest look."""
        return uid in self._over.values()

    @property
    def living(self) -> list[Entry]:
        """The entries that lived when they were asked last. Of several names of one file of a user the first counts.

        The numbers of files come again, but not with another user's file, whose owner is another one.
        """
        found: dict[object, Entry] = {}
        for entry in sorted(self._living.values()):
            found.setdefault((entry.uid, entry.file) if entry.uid >= 0 else entry.name, entry)
        return [*found.values()]

    def leave_out(self, name: str) -> None:
        """Count an entry of this process for nothing, from when it has its name."""
        self._settled.add(name)
        self._numbers[name] = _number(name)

    def would_count(self, number: int) -> bool:
        """Return whether a new entry of this number would be taken into account."""
        return number < self.next_number + _LARGEST_GAP

    def lists(self, name: str) -> bool:
        """Return whether the latest listing has this name, and the entry was not found dead."""
        return name in self._living or name in self._unread

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
        self._left_out.pop(name, None)
        self._over.pop(name, None)
        found = self._found(name)
        if found is not None:
            self._living[name] = found
            self._settled.discard(name)
        else:
            self._living.pop(name, None)
            if name not in self.ignored:  # it is dead; nonsense takes as long to read
                self._uncharge(name)
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
                    return self._lives(file.fileno(), name)
                self._dead.update([name, *self._others.pop(name, ())])
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
            return self._content(file.fileno(), name, os.fstat(file.fileno()))
        return None

    def _lives(self, fd: int, name: str) -> Entry:
        """Return a living entry, which is read once as long as its name is that of the same file."""
        known, status = self._living.get(name), os.fstat(fd)
        if known is None or known.file != (status.st_dev, status.st_ino):
            self._uncharge(name)
            if why := _why_no_entry(status):  # before it counts for its owner: others can link what all may write
                raise ValueError(why)
            if self._has_room(status):
                self._sizes[name] = status.st_uid, status.st_size
                self._charge(status.st_uid, status.st_size)
            else:
                self._over[name] = status.st_uid
                raise ValueError("its owner has too many")
            known = self._content(fd, name, status)
            if self._has_tickets != bool(known.nb_gpus):
                raise ValueError("an entry of another kind")
        return known

    def _content(self, fd: int, name: str, status: os.stat_result) -> Entry:
        """Return what an open entry says; one of ``_NONSENSE`` if it counts for nothing."""
        if why := _why_no_entry(status):
            raise ValueError(why)
        uid = -1 if procfs.is_unknown_user(status.st_uid) else status.st_uid
        return Entry.read(name, uid, (status.st_dev, status.st_ino), os.pread(fd, LARGEST, 0))

    def _has_room(self, status: os.stat_result) -> bool:
        """Return whether one more entry of its owner counts."""
        uid = status.st_uid
        few = self._has_tickets or self._locked[uid] < MOST_CLAIMS
        return not _is_bounded(uid) or (few and self._bytes[uid] + status.st_size <= MOST_BYTES)

    def _charge(self, uid: int, size: int, sign: int = 1) -> None:
        self._locked[uid] += sign
        self._bytes[uid] += sign * size

    def _uncharge(self, name: str) -> None:
        if name in self._sizes:
            self._charge(*self._sizes.pop(name), -1)

    def _too_many(self, names: Collection[str]) -> StateDirError:
        owners: Counter[int] = Counter()
        for name in names:
            with suppress(OSError):
                owners[os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False).st_uid] += 1
        (uid, number), *_ = owners.most_common(1) or [(0, 0)]
        what = f"{self.directory.path} has more than {MOST_NAMES} names, of which {number} are of "
        what += f"{procfs.user_name(uid)}, who or root must remove them"
        return refusal(what, self.directory.path, errno.EMLINK)

    def refuse_if_over(self) -> None:
        """Refuse a new entry of this user, who has more already than others count.

        Raises:
            StateDirError: so it is.
        """
        if self.is_over(os.geteuid()):
            what = (
                f"{self.directory.path} has more entries of yours than count ({MOST_CLAIMS} claims, {MOST_BYTES >> 20} "
            )
            raise refusal(f"{what}MiB, {MOST_FILES} files): end or remove some", self.directory.path, None)


def _why_no_entry(status: os.stat_result) -> str:
    """Return why a file is no entry, whatever its content; "" of one that may be."""
    if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022 or status.st_size > LARGEST:
        return f"mode {status.st_mode:o}, {status.st_size} bytes"
    return ""


def _is_bounded(uid: int) -> bool:
    """Return whether there are bounds for an owner: not for root, nor where several users have one number."""
    return uid != 0 and not procfs.is_unknown_user(uid)


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
        "job": well_formed(job or "")[:_LONGEST_TEXT],
        "command": well_formed(command or own_command() or "")[:_LONGEST_TEXT],
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
    if len(data) > LARGEST:  # nobody would count it
        raise refusal(f"an entry of {len(data)} bytes is larger than {LARGEST}", directory.path, errno.EFBIG)
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
