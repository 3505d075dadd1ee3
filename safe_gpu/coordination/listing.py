"""Which files of a directory may be entries, by their names and status, and which of them count.

Everybody may make files there, so what one user makes must cost others little, and refuse nobody else's claims. Bounds
are by the owner of the file: of one owner the files with the lowest numbers count, dead ones too. That depends on
nothing but names and status, so all who look agree. What is beyond a bound is not opened.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Final

from ..host import procfs
from .directory import Directory
from .entry import (
    LARGEST,
    LONGEST_NAME,
    Entry,
    entry_names,
    in_order,
    is_unfinished_name,
    next_number,
    number_of,
    order_of,
)

MOST_FILES = 2048
"""Files of one owner that count in a directory. Not of root, nor where several users have one number."""

MOST_BYTES = 4 << 20
"""Bytes of these files together."""

WHY_BEYOND = f"its owner has more than {MOST_FILES} files there, or {MOST_BYTES >> 20} MiB"

UNREAD: Final = "unread"
LIVING: Final = "living"
DEAD: Final = "dead"
UNREADABLE: Final = "unreadable"

_MOST_UNFINISHED = 1000  # names

_Key = tuple[int | str, ...]


class File:
    """A file that counts.

    Attributes:
        uid, device, inode, size: by its status.
        key: what tells it from others as long as it is there. The inode number of a file that is gone is used again.
        name: of several names the one with the lowest number.
        further: its other names.
        state: what was found when it was opened: UNREAD before; LIVING; DEAD, which never changes; UNREADABLE, or
            nonsense.
        why: why it is unreadable.
        entry: what it says, while it lives.
    """

    def __init__(self, status: os.stat_result, key: _Key, name: str) -> None:
        self.uid = status.st_uid
        self.device = status.st_dev
        self.inode = status.st_ino
        self.size = status.st_size
        self.key = key
        self.name = name
        self.further: set[str] = set()
        self.state: str = UNREAD
        self.why = ""
        self.entry: Entry | None = None

    @property
    def order(self) -> tuple[int, str]:
        """What files are ordered by: the number of their names."""
        return order_of(self.name)

    def is_that_of(self, status: os.stat_result) -> bool:
        """Return whether a status is that of this file, as it was when it was met."""
        mine = (self.uid, self.device, self.inode, self.size)
        return mine == (status.st_uid, status.st_dev, status.st_ino, status.st_size)


class _Owner:
    """The files of one owner in a directory, dead ones too, and which of them count.

    Attributes:
        beyond: names that are beyond a bound, in any order. All of them stand behind all that count.
        may_have_room: whether what was in the way of those beyond may have gone.
        are_several: whether several users have this number here.
    """

    def __init__(self, uid: int) -> None:
        self.beyond: list[str] = []
        self.may_have_room = False
        self.are_several = procfs.is_unknown_user(uid)
        self._is_bounded = uid != 0 and not self.are_several
        self._files: list[File] = []  # that count, in their order
        self._bytes = 0
        self._first_beyond: tuple[int, str] | None = None

    def add(self, file: File) -> None:
        insort(self._files, file, key=_order)
        self._bytes += file.size

    def remove(self, file: File) -> None:
        del self._files[bisect_left(self._files, file.order, key=_order)]
        self._bytes -= file.size
        self.may_have_room = True

    def pop_last(self) -> File:
        """Remove the file with the highest number of those that count, and return it."""
        file = self._files.pop()
        self._bytes -= file.size
        return file

    def is_over(self) -> bool:
        """Return whether those that count are too many."""
        return self._is_bounded and (len(self._files) > MOST_FILES or self._bytes > MOST_BYTES)

    def has_room(self) -> bool:
        """Return whether one more entry, however large, would count."""
        if not self._is_bounded:
            return True
        return len(self._files) < MOST_FILES and self._bytes + LARGEST <= MOST_BYTES

    def is_beyond(self, name: str) -> bool:
        """Return whether a name stands behind one that is beyond a bound."""
        return self._first_beyond is not None and order_of(name) > self._first_beyond

    def forget_beyond(self, names: Collection[str]) -> None:
        """Forget which of those beyond a bound are gone.

        Args:
            names: that are there.
        """
        first = self._first_beyond
        self.set_beyond(name for name in self.beyond if name in names)
        if self._first_beyond != first:
            self.may_have_room = True

    def leave_out(self, file: File) -> None:
        """Take note that a file is beyond a bound, which stood before all that are."""
        self.beyond += [file.name, *file.further]
        self._first_beyond = file.order

    def set_beyond(self, names: Iterable[str]) -> None:
        """Set which names are beyond a bound."""
        self.beyond = in_order(names)
        self._first_beyond = None
        if self.beyond:
            self._first_beyond = order_of(self.beyond[0])


class Listing:
    """The files of a directory, as one process gets to know them: whose each is, and which count.

    Attributes:
        directory: where they are.
        names: all that may be of entries, or of such that are being made.
        unfinished: some of the latter.
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self._of_this_process: set[str] = set()
        self._begin()

    def _begin(self) -> None:
        self.names: set[str] = set()
        self.unfinished: set[str] = set()
        self._entry_names: set[str] = set()
        self._no_entries: dict[str, int] = {}  # names that are no entries by their status -> owner
        self._named: dict[str, File] = {}
        self._files: dict[_Key, File] = {}
        self._owners: dict[int, _Owner] = {}
        self._known_before: dict[File, str] = {}  # a file that has got another name -> a name that it had before

    def refresh(self) -> None:
        """List the names, and open nothing.

        Raises:
            StateDirError: the directory, or the status of a file, cannot be read.
        """
        names = self.directory.names(longest=LONGEST_NAME)
        if names == self.names:
            return
        gone = self.names - names
        new = names - self.names
        self.names = names
        try:
            self.forget(gone)
            if gone:
                for owner in self._owners.values():
                    owner.forget_beyond(names)
            self._meet_all(new)
            self._fill_up()
            self._verify_further_names()
        except BaseException:
            self._begin()  # some names may not have been met
            raise

    @property
    def next_number(self) -> int:
        """The number of a new entry: one above the highest that counts, as of the latest listing."""
        return next_number(self._entry_names)

    def files(self) -> Collection[File]:
        """Return the files that count."""
        return self._files.values()

    def file_of(self, name: str) -> File | None:
        """Return the file with this name, if it counts."""
        return self._named.get(name)

    def leave_out(self, name: str) -> None:
        """Ignore an entry of this process, from when it has its name."""
        self._of_this_process.add(name)

    def has_room(self, uid: int) -> bool:
        """Return whether one more entry of a user, however large, would count."""
        return uid not in self._owners or self._owners[uid].has_room()

    def left_out(self) -> dict[int, list[str]]:
        """Return owner -> names that are ignored, beyond a bound or by their status."""
        found: dict[int, list[str]] = defaultdict(list)
        for uid, owner in self._owners.items():
            if owner.beyond:
                found[uid] += owner.beyond
        for name, uid in self._no_entries.items():
            found[uid].append(name)
        return found

    def why_left_out(self, name: str) -> str:
        """Return why such a name is ignored."""
        if name not in self._no_entries:
            return WHY_BEYOND
        status = self.status_of(name)
        if status is None:
            return "it is gone"
        return why_no_entry(status) or "its status was another one"

    def status_of(self, name: str) -> os.stat_result | None:
        """Return the status of what has a name; None of nothing.

        Raises:
            StateDirError: it cannot be read.
        """
        try:
            return os.stat(name, dir_fd=self.directory.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as err:
            raise self.directory.error(name, err) from err

    def forget(self, names: Iterable[str]) -> None:
        """Take note that names are gone."""
        for name in names:
            self._entry_names.discard(name)
            self.unfinished.discard(name)
            self._no_entries.pop(name, None)
            file = self._named.pop(name, None)
            if file is None:
                continue
            if name != file.name:
                file.further.remove(name)
            elif file.further:
                first = min(file.further, key=order_of)
                file.further.remove(first)
                self._rename(file, first)
            else:
                self._owners[file.uid].remove(file)
                self._drop(file)

    def meet_apart(self, names: Collection[str]) -> None:
        """Take each of these names for a file of its own, which nobody has opened yet."""
        self.forget(names)
        self._entry_names.update(names)
        for name in names:
            self._meet(name, alone=True)

    def _meet_all(self, names: set[str]) -> None:
        """Take note of new names."""
        new_entries = entry_names(names)
        self._entry_names |= new_entries
        for name in names - new_entries:
            if is_unfinished_name(name) and len(self.unfinished) < _MOST_UNFINISHED:
                self.unfinished.add(name)
        for name in in_order(new_entries):
            if name not in self._of_this_process:
                self._meet(name)

    def _meet(self, name: str, *, alone: bool = False) -> None:
        """Take note of a new name.

        Args:
            alone: whether it counts as a file of its own, even if a known name has the same inode.
        """
        status = self.status_of(name)
        if status is None:
            return
        uid = status.st_uid
        if why_no_entry(status):
            self._no_entries[name] = uid
            return
        owner = self._owners.get(uid)
        if owner is None:
            owner = self._owners[uid] = _Owner(uid)
        if owner.is_beyond(name):
            owner.beyond.append(name)
            return
        key: _Key = (uid, status.st_dev, status.st_ino)
        if alone or owner.are_several:  # a file of another user may get the inode number of one that is gone
            key = (*key, name)
        file = self._files.get(key)
        if file is None:
            self._add(File(status, key, name), owner)
        else:
            self._known_before.setdefault(file, file.name)
            self._add_name(file, name)

    def _add(self, file: File, owner: _Owner) -> None:
        self._named[file.name] = file
        self._files[file.key] = file
        owner.add(file)
        while owner.is_over():
            self._leave_out_last(owner)

    def _leave_out_last(self, owner: _Owner) -> None:
        """Leave out the file with the highest number of those that count."""
        file = owner.pop_last()
        owner.leave_out(file)
        self._drop(file)
        for name in (file.name, *file.further):
            del self._named[name]

    def _drop(self, file: File) -> None:
        del self._files[file.key]
        file.entry = None

    def _add_name(self, file: File, name: str) -> None:
        self._named[name] = file
        if order_of(name) < file.order:
            file.further.add(file.name)
            self._rename(file, name)
        else:
            file.further.add(name)

    def _rename(self, file: File, name: str) -> None:
        """Let another one of its names stand for a file."""
        owner = self._owners[file.uid]
        owner.remove(file)
        file.name = name
        if file.entry is not None:
            file.entry = file.entry._replace(name=name, number=number_of(name))
        owner.add(file)
        if owner.is_beyond(name):
            self._leave_out_last(owner)

    def _fill_up(self) -> None:
        """Let files count that were beyond a bound, where there is room now."""
        for owner in list(self._owners.values()):
            if owner.may_have_room:
                owner.may_have_room = False
                self._meet_beyond(owner)

    def _meet_beyond(self, owner: _Owner) -> None:
        names = in_order(owner.beyond)
        owner.set_beyond(())
        for place, name in enumerate(names):
            self._meet(name)
            if owner.beyond:  # it is beyond the bound again, and so are those behind it
                owner.set_beyond([*owner.beyond, *names[place + 1 :]])
                return

    def _verify_further_names(self) -> None:
        """Separate names that may be of several files. One that is there now, and was before its new names were looked
        at, has had its inode number all along."""
        known_before = self._known_before
        self._known_before = {}
        for file, name in known_before.items():
            status = self.status_of(name)
            is_same = status is not None and file.is_that_of(status)
            if not is_same and self._files.get(file.key) is file:
                self.meet_apart([file.name, *file.further])


def _order(file: File) -> tuple[int, str]:
    return file.order


def why_no_entry(status: os.stat_result) -> str:
    """Return why a file is no entry, whatever its content; "" of one that may be."""
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        return "a symbolic link"
    if not stat.S_ISREG(mode):
        return "not a regular file"
    if mode & 0o022:
        return f"others may write it: mode {stat.S_IMODE(mode):04o}"
    if status.st_size > LARGEST:
        return f"{status.st_size} bytes, of {LARGEST} at most"
    return ""
