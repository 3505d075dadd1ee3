"""Who really holds a locked file: the kernel's word first, then what the holder wrote of itself.

A lock is shown under the pid that took it, for as long as any process has that open file. So the one that took it may
have ended long ago while a child lives on in its lease, and a record may name anybody.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from . import procfs

__all__ = ["Holding", "LockedFile", "Openers", "who_holds"]


@dataclass(frozen=True)
class LockedFile:
    """A file that somebody has locked: its name, its identity, and the pids that /proc/locks shows for its inode."""

    name: str
    device: int
    inode: int
    lockers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Holding:
    """The answer of :func:`who_holds`.

    Attributes:
        pid: a process that holds the lock; None where none can be seen from here.
        believed: whether what the file says of its holder fits, so that the rest of the record may be shown.
        note: what is odd about it, as a clause for people; "" for the usual case.
    """

    pid: int | None
    believed: bool = True
    note: str = ""


class Openers:
    """Which processes have these files open, as far as this user may look. All of /proc is read at the first question.

    Args:
        names: the file names (without directories) that will be asked about.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._found: dict[tuple[int, int], list[int]] | None = None

    def of(self, file: LockedFile) -> list[int]:
        """The pids that have it open, lowest first."""
        if self._found is None:
            self._found = {}
            for pid in procfs.pids():
                for identity in _identities(pid, self._names) or ():
                    self._found.setdefault(identity, []).append(pid)
        return self._found.get((file.device, file.inode), [])


def who_holds(file: LockedFile, named: int | None, start: int | None, openers: Openers) -> Holding:
    """The process behind a lock that is held.

    Args:
        named: the pid that the file names, None where it names none; start: that process's start, where it is told.
    """
    lockers = [pid for pid in file.lockers if pid == named or _may_hold(pid, file)]
    living = [pid for pid in lockers if not procfs.has_ended(pid)]
    if named is not None and named in living and _is_the_same(named, start):
        return Holding(named)
    if named is not None and named in lockers:
        return _left_behind(named, openers.of(file))
    if living:
        if named is not None and _has_open(named, file):  # a launcher locked it and passed it on
            return Holding(named)
        return Holding(living[0], False, _lie(named, living[0]))
    heirs = openers.of(file)
    if heirs:
        if named is None or (named not in heirs and not procfs.has_ended(named)):
            return Holding(heirs[0], False, _lie(named, heirs[0]))
        return Holding(named) if named in heirs else _left_behind(named, heirs)
    if named is None:
        return Holding(None, False, "its record cannot be read, and its holder cannot be seen from here")
    return Holding(named, True, "its holder cannot be seen from here (in another container?): this is what it wrote")


def _identities(pid: int, names: Collection[str]) -> set[tuple[int, int]] | None:
    """(device, inode) of the files with one of these names that a process has open; None where we may not look."""
    files = procfs.open_files(pid)
    if files is None:
        return None
    found = set()
    for number, target in files.items():
        if target.removesuffix(" (deleted)").rpartition("/")[2] in names:
            try:
                status = os.stat(f"/proc/{pid}/fd/{number}")
            except OSError:
                continue
            found.add((status.st_dev, status.st_ino))
    return found


def _may_hold(pid: int, file: LockedFile) -> bool:
    """False for a process that only locks a file with the same inode number on another file system."""
    if procfs.has_ended(pid):
        return True
    identities = _identities(pid, {file.name})
    return identities is None or (file.device, file.inode) in identities


def _has_open(pid: int, file: LockedFile) -> bool:
    return (file.device, file.inode) in (_identities(pid, {file.name}) or ())


def _is_the_same(pid: int, start: int | None) -> bool:
    began = procfs.start_time(pid)
    return start is None or began is None or began == start


def _left_behind(named: int, heirs: list[int]) -> Holding:
    ended = f"process {named}, which claimed it, has ended"
    if heirs:
        return Holding(heirs[0], True, f"{ended}; process {heirs[0]} still holds it")
    return Holding(None, True, f"{ended}; a process that it left behind still holds it")


def _lie(named: int | None, pid: int) -> str:
    if named is None:
        return f"its record cannot be read; process {pid} holds the lock"
    return f"its record names process {named}, which does not hold the lock; process {pid} does"
