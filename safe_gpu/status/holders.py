"""Finds the process that holds a locked file: first from the kernel, then from the record in the file.

/proc/locks shows a flock under the pid that took it, for as long as any process has that open file description. So the
process that took the lock may have exited while a child still holds it. The record in the file may be wrong.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from .. import procfs

__all__ = ["Holding", "LockedFile", "Processes", "who_holds"]


@dataclass(frozen=True)
class LockedFile:
    """A locked file: its name, its device and inode, and the pids that /proc/locks shows for its inode."""

    name: str
    device: int
    inode: int
    lockers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Holding:
    """The result of :func:`who_holds`.

    Attributes:
        pid: a process that holds the lock; None if none is visible from this process.
        believed: whether the record in the file fits the holder, so that the rest of the record may be shown.
        note: a clause about anything unusual, for users; "" in the usual case.
    """

    pid: int | None
    believed: bool = True
    note: str = ""


class Processes:
    """What /proc says of processes: each is asked once, however many files name it.

    Args:
        names: the names (without directories) of the files whose openers will be queried.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._openers: dict[tuple[int, int], list[int]] | None = None
        self.has_ended = cache(procfs.has_ended)
        self.is_stopped = cache(procfs.is_stopped)
        self.start_time = cache(procfs.start_time)
        self.uid_of = cache(procfs.uid_of)
        self.command_of = cache(procfs.command_of)
        self.describe = cache(procfs.describe_process)
        self.ancestors = cache(procfs.ancestors)
        self.pid_within = cache(procfs.pid_within)
        self.opened_by = cache(self._opened_by)

    def openers_of(self, file: LockedFile) -> list[int]:
        """The pids that have this file open, lowest first, as far as this user may see. The first query reads all of
        /proc."""
        if self._openers is None:
            self._openers = {}
            for pid in procfs.pids():
                for identity in self.opened_by(pid) or ():
                    self._openers.setdefault(identity, []).append(pid)
        return self._openers.get((file.device, file.inode), [])

    def _opened_by(self, pid: int) -> frozenset[tuple[int, int]] | None:
        """(device, inode) of the files with one of the names that a process has open; None if that may not be read."""
        files = procfs.open_files(pid)
        if files is None:
            return None
        found = set()
        for number, target in files.items():
            if target.removesuffix(" (deleted)").rpartition("/")[2] in self._names:
                try:
                    status = os.stat(f"/proc/{pid}/fd/{number}")
                except OSError:
                    continue
                found.add((status.st_dev, status.st_ino))
        return frozenset(found)


def who_holds(
    file: LockedFile, named: int | None, start: int | None, processes: Processes, namespace: int | None = None
) -> Holding:
    """The process that holds a lock.

    Args:
        file: the locked file.
        named: the pid in the file's record; None if there is none.
        start: the start time of that process in the record; None if there is none.
        processes: what is known of processes.
        namespace: the PID namespace in which that pid is a number; None if the record does not say.
    """
    place = procfs.place_of(namespace)
    if named is not None and place:
        return _holds_elsewhere(file, named, place, processes)
    lockers = [pid for pid in file.lockers if pid == named or _may_hold(pid, file, processes)]
    living = [pid for pid in lockers if not processes.has_ended(pid)]
    if named is not None and named in living and _is_the_same(named, start, processes):
        return Holding(named)
    if named is not None and named in lockers:
        return _inherited(named, processes.openers_of(file))
    if living:
        # A launcher may have taken the lock and passed it on.
        if named is not None and (file.device, file.inode) in (processes.opened_by(named) or ()):
            return Holding(named)
        return Holding(living[0], False, _wrong_record(named, living[0]))
    inheritors = processes.openers_of(file)
    if inheritors:
        if named is None or (named not in inheritors and not processes.has_ended(named)):
            return Holding(inheritors[0], False, _wrong_record(named, inheritors[0]))
        return Holding(named) if named in inheritors else _inherited(named, inheritors)
    if named is None:
        return Holding(None, False, "its record cannot be read, and its holder cannot be seen from here")
    return Holding(named, True, "its holder cannot be seen from here (in another container?): this is from its record")


def _holds_elsewhere(file: LockedFile, named: int, place: str, processes: Processes) -> Holding:
    """The holder of a lock whose record is of another PID namespace, where ``named`` is its number.

    The kernel shows processes of the namespaces below this one under numbers of this one.
    """
    there = f"{place}, as process {named} there"
    lockers = [pid for pid in file.lockers if not processes.has_ended(pid) and _may_hold(pid, file, processes)]
    visible = lockers or processes.openers_of(file)
    numbers = {pid: processes.pid_within(pid) for pid in visible}
    for pid, number in numbers.items():
        if number == named and number != pid:
            return Holding(pid, True, there)
    if not visible:
        return Holding(None, True, f"{there}, which cannot be seen from here")
    if procfs.pid_namespace() == procfs.FIRST_PID_NAMESPACE and all(pid == number for pid, number in numbers.items()):
        return Holding(visible[0], False, _wrong_record(named, visible[0], f" {place}"))
    return Holding(visible[0], True, f"claimed {there}; process {visible[0]} still holds it")


def _may_hold(pid: int, file: LockedFile, processes: Processes) -> bool:
    """Whether a pid in /proc/locks may hold this file: False if it locks the same inode number on another device."""
    if processes.has_ended(pid):
        return True
    identities = processes.opened_by(pid)
    return identities is None or (file.device, file.inode) in identities


def _is_the_same(pid: int, start: int | None, processes: Processes) -> bool:
    began = processes.start_time(pid)
    return start is None or began is None or began == start


def _inherited(named: int, inheritors: list[int]) -> Holding:
    ended = f"process {named}, which claimed it, has ended"
    if inheritors:
        return Holding(inheritors[0], True, f"{ended}; process {inheritors[0]} still holds it")
    return Holding(None, True, f"{ended}; a process that it started still holds it")


def _wrong_record(named: int | None, pid: int, place: str = "") -> str:
    if named is None:
        return f"its record cannot be read; process {pid} holds the lock"
    return f"its record names process {named}{place}, which does not hold the lock; process {pid} does"
