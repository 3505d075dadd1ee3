"""The entries of a directory, as one process gets to know them: which of those that count live, and what they say."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice

from ..host import procfs
from ..host.foreign_files import open_to_read, printable
from ..host.locks import is_locked
from ..host.signals import DeferredSignals
from .directory import Directory, refusal
from .entry import LARGEST, LARGEST_GAP, Entry, in_order, number_of, order_of
from .listing import DEAD, LIVING, MOST_BYTES, MOST_FILES, UNREAD, UNREADABLE, File, Listing, why_no_entry

MOST_DEAD = 1000
"""Dead entries that are read, or removed, at once."""

UNFINISHED_FOR = 60.0
"""Seconds that an entry takes to be made at most."""

_FEW = 50  # names that are soon listed
_MOST_TRIES = 100  # names of one file that are gone
_LONGEST_CAUSE = 100  # characters of why one is ignored
_MOST_OWNERS = 8  # of ignored files, that are named

# What open(2) answers to what is no file, is closed to this user, or is kept under a file lease. These are ignored.
_NOT_AN_ENTRY = (errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.EWOULDBLOCK, errno.EISDIR)


class Entries:
    """The entries of a directory, as one process gets to know them. A file is read once, and its lock checked again.

    Nothing is locked, so any process may look at any time.

    Attributes:
        directory: where they are.

    Example::

        with Directory(state_dir_path(), "claims") as directory:
            held = [entry.gpus for entry in Entries(directory).look()]
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._are_tickets = os.path.basename(directory.path) == "queue"
        self._listing = Listing(directory)
        self._removed: list[Entry] = []

    @property
    def next_number(self) -> int:
        """The number of a new entry: one above the highest that counts, as of the latest listing."""
        return self._listing.next_number

    @property
    def may_be_many(self) -> bool:
        """Whether to list and read them may take long."""
        return self.directory.is_large or len(self._listing.names) > _FEW

    def refresh(self) -> None:
        """List the names, and open nothing.

        Raises:
            StateDirError: the directory, or the status of a file, cannot be read.
        """
        self._listing.refresh()

    def leave_out(self, name: str) -> None:
        """Ignore an entry of this process, from when it has its name."""
        self._listing.leave_out(name)

    def look(self, recheck: Collection[str] | None = None) -> list[Entry]:
        """List the names, read what is new, and return the living entries by number, each file once.

        Args:
            recheck: names of known entries whose locks are checked again; None checks those of all.

        Raises:
            StateDirError: the directory cannot be read, or a file that its owner allows to open: with an entry left
                out, two could hold one GPU.
        """
        self.refresh()
        return self.look_at_listed(recheck)

    def look_at_listed(self, recheck: Collection[str] | None = None) -> list[Entry]:
        """Return the same by the latest listing."""
        if recheck is None:
            self._check_all([*self._with_state(LIVING, UNREADABLE)])
        else:
            files = {self._listing.file_of(name) for name in recheck}
            self._check_all([file for file in self._with_state(LIVING) if file in files])
        self._check_all([*self._with_state(UNREAD)])
        return self.living

    def _with_state(self, *states: str) -> Iterator[File]:
        return (file for file in self._listing.files() if file.state in states)

    def _check_all(self, files: Iterable[File]) -> None:
        for file in sorted(files, key=lambda file: file.order):
            self._check(file)

    @property
    def living(self) -> list[Entry]:
        """The entries that lived when their locks were checked last, by number."""
        return sorted(file.entry for file in self._listing.files() if file.entry is not None)

    def listed(self) -> list[tuple[int, str]]:
        """Return numbers and names, in order, of what may live by the latest listing."""
        names = in_order(file.name for file in self._with_state(LIVING, UNREAD))
        return [(number_of(name), name) for name in names]

    def lists(self, name: str) -> bool:
        """Return whether the latest listing has this name, and the entry counts and was not found dead."""
        file = self._listing.file_of(name)
        return file is not None and file.state in (LIVING, UNREAD)

    def would_count(self, number: int) -> bool:
        """Return whether a new entry of this number would be taken into account."""
        return number < self.next_number + LARGEST_GAP

    def recheck(self, name: str) -> Entry | None:
        """Check the lock of an entry, and return it; None if there is none, it is dead, or it is ignored.

        Raises:
            StateDirError: it cannot be opened though its owner allows it.
        """
        file = self._listing.file_of(name)
        if file is None or file.state == DEAD:
            return None
        self._check(file)
        return self.known(name)

    def known(self, name: str) -> Entry | None:
        """Return the entry of this name, which lived when its lock was checked last; it is checked if it never was."""
        file = self._listing.file_of(name)
        if file is None:
            return None
        if file.state == UNREAD:
            self._check(file)
        return file.entry

    def _check(self, file: File) -> None:
        """Find out whether a file lives, and read it if it is new."""
        for _ in range(_MOST_TRIES):
            name = file.name
            try:
                with open_to_read(name, os.O_NOFOLLOW, self.directory.fd) as opened:
                    self._check_open(file, opened.fileno())
                return
            except FileNotFoundError:
                self._listing.forget([name])
                if self._listing.file_of(file.name) is not file:
                    return  # it was the last of its names that count
            except OSError as err:
                if err.errno not in _NOT_AN_ENTRY:
                    raise self.directory.error(name, err) from err
                _put(file, UNREADABLE, str(err.strerror))
                return

    def _check_open(self, file: File, fd: int) -> None:
        status = os.fstat(fd)
        if not file.is_that_of(status):
            self._listing.meet_apart([file.name])  # only who may remove the name can put another file there
        elif not is_locked(fd):
            _put(file, DEAD)
        elif why_no_entry(status):
            _put(file, UNREADABLE, why_no_entry(status))
        elif file.entry is None:
            try:
                entry = self._read(file, fd)
            except ValueError as err:
                _put(file, UNREADABLE, f"nonsense: {err}")
                return
            _put(file, LIVING)
            file.entry = entry

    def _read(self, file: File, fd: int) -> Entry:
        """Return what an open file says.

        Raises:
            ValueError: nonsense.
        """
        uid = file.uid
        if procfs.is_unknown_user(uid):
            uid = -1
        entry = Entry.read(file.name, uid, (file.device, file.inode), os.pread(fd, LARGEST, 0))
        if self._are_tickets != (entry.nb_gpus > 0):
            raise ValueError("an entry of another kind")
        return entry

    def dead(self) -> Iterator[Entry]:
        """Yield the dead entries that can be read, as of the latest look; of very many only some."""
        for file in islice(self._with_state(DEAD), MOST_DEAD):
            entry = self._read_dead(file)
            if entry is not None:
                yield entry

    def _read_dead(self, file: File) -> Entry | None:
        with suppress(OSError, ValueError), open_to_read(file.name, os.O_NOFOLLOW, self.directory.fd) as opened:
            if file.is_that_of(os.fstat(opened.fileno())):
                return self._read(file, opened.fileno())
        return None

    def remove_dead(self) -> list[Entry]:
        """Remove the dead entries of this user, of all users if it is root, and return them; of very many only some.

        Not under host.lock: others wait.
        """
        self._remove_dead_files()
        for name in self._listing.unfinished:
            self._remove_unfinished(name)
        removed = self._removed
        self._removed = []
        return removed

    def _remove_dead_files(self) -> None:
        for file, name in islice(self._removable(), MOST_DEAD):
            entry = None
            if name == file.name:
                entry = self._read_dead(file)
            with suppress(OSError):
                os.unlink(name, dir_fd=self.directory.fd)
                if entry is not None:
                    self._removed.append(entry)

    def _removable(self) -> Iterator[tuple[File, str]]:
        """Yield the dead files that this user may remove, with each of their names, and that of :class:`File` last."""
        for file in self._with_state(DEAD):
            if _may_remove(file.uid):
                for name in file.further:
                    yield file, name
                yield file, file.name

    def _remove_unfinished(self, name: str) -> None:
        with suppress(OSError):
            status = os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False)
            if _may_remove(status.st_uid) and time.time() - status.st_mtime > UNFINISHED_FOR:
                os.unlink(name, dir_fd=self.directory.fd)

    def make_room(self) -> None:
        """Remove dead entries of this user if, with them, one more would not count. host.lock is not held.

        Raises:
            StateDirError: as :meth:`refuse_if_full`.
        """
        left = None
        while not self._has_room() and left != len(self._listing.names):
            left = len(self._listing.names)
            self.look()
            self._remove_dead_files()
            self.refresh()
        self.refuse_if_full()

    def refuse_if_full(self) -> None:
        """Refuse a new entry of this user if others would not count it, by the latest listing.

        Raises:
            StateDirError: so it is.
        """
        if not self._has_room():
            what = f"{self.directory.path} has as many files of yours as count ({MOST_FILES}, {MOST_BYTES >> 20} MiB)"
            raise refusal(f"{what}: end or remove some", self.directory.path, None)

    def _has_room(self) -> bool:
        return self._listing.has_room(os.geteuid())

    @property
    def ignored(self) -> dict[str, str]:
        """Names that are ignored, and why. Their owners made them so. `status` shows them."""
        return {name: self._why(name) for names in self._ignored_by_owner().values() for name in names}

    def sentences_on_ignored(self) -> list[str]:
        """Return a sentence on these names for each of some of their owners."""
        return [self._sentence(uid, names) for uid, names in islice(self._ignored_by_owner().items(), _MOST_OWNERS)]

    def _ignored_by_owner(self) -> dict[int, list[str]]:
        found = self._listing.left_out()
        for file in self._with_state(UNREADABLE):
            found[file.uid].append(file.name)
        return found

    def _sentence(self, uid: int, names: list[str]) -> str:
        first = min(names, key=order_of)
        sentence = f"{self.directory.path}/{first} of {procfs.user_name(uid)} is ignored ({self._why(first)})"
        if len(names) > 1:
            sentence += f", as do {len(names) - 1} more"
        return printable(sentence)

    def _why(self, name: str) -> str:
        """Return why a name is ignored."""
        file = self._listing.file_of(name)
        if file is None:
            return self._listing.why_left_out(name)
        return file.why[:_LONGEST_CAUSE]


def _put(file: File, state: str, why: str = "") -> None:
    file.state = state
    file.why = why
    if state != LIVING:
        file.entry = None


def _may_remove(uid: int) -> bool:
    return os.geteuid() in (0, uid)


def living_entries(
    state_dir: str, name: str, ignored: list[str] | None = None, dead: list[Entry] | None = None
) -> list[Entry]:
    """Return the living entries of a directory in a state directory, without a lock; none if it is missing.

    Args:
        ignored: gets sentences on the names that are ignored. Any user can make many.
        dead: gets those of the dead that this user may remove, which are removed.

    Raises:
        StateDirError: it cannot be read.
    """
    # An exception of a handler, such as Ctrl-C in a notebook, would leave the directory open.
    with suppress(FileNotFoundError), DeferredSignals(), Directory(state_dir, name, make=False) as directory:
        entries = Entries(directory)
        living = entries.look()
        if ignored is not None:
            ignored += entries.sentences_on_ignored()
        if dead is not None:
            dead += entries.remove_dead()
        return living
    return []
