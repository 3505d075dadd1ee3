"""The tickets of a queue that count, although a neighbour may make any number of files."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from .ticket import TICKET_SUFFIX, is_ticket, ticket_name

if TYPE_CHECKING:
    from ..files.state_dir import StateDir

# Of the tickets of one user, except root, that many count: who makes more does not hold up the others.
_MOST_OF_ONE_USER = 1000

# A longer number than this is nobody's: arithmetic on it would be slow, and other languages could not hold it.
_DIGITS = 18

# No queue gets so far by counting. A number further above the one before it was made up to use the numbers up.
_WIDEST_GAP = 10**12

# The kernel gives files the time of its latest tick, which come each 10 ms or more often; nanoseconds, to be sure.
_TICK = 20_000_000


class Listing:
    """The tickets of a queue that count. It is read before host.lock is taken, since a neighbour can make many files,
    and under it only what has come since then is looked at.

    A name with leading zeros, or too long, is nobody's. No number counts after a gap that no queue makes.

    Attributes:
        numbers: of the tickets that count, in order.
        highest: of all names, 0 for none.
    """

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.highest = 0
        self._names: frozenset[str] = frozenset()
        self._unchanged: tuple[int, ...] = ()
        self._inodes: set[int] = set()
        self._of_user: dict[int, int] = {}

    def present(self) -> list[int]:
        """Return those of ``numbers`` that had a file at the latest update."""
        return [seq for seq in self.numbers if ticket_name(seq) in self._names]

    def update(self, queue: StateDir) -> bool:
        """Add what stands there now, and return whether anything may have changed. What is gone stays in
        ``numbers``."""
        recently = time.time_ns() - _TICK
        status = os.fstat(queue.fd)
        state = status.st_dev, status.st_ino, status.st_mtime_ns
        if state == self._unchanged:
            return False
        self._unchanged = state if status.st_mtime_ns < recently else ()  # a change from now on has a later time
        names = frozenset(queue.names())
        fresh = sorted(seq for name in names - self._names if (seq := _number(name)) is not None)
        self._names = names
        for seq in fresh:
            if seq - self.highest > _WIDEST_GAP:
                break
            self.highest = max(self.highest, seq)
            if len(names) <= _MOST_OF_ONE_USER or self._counts(queue, seq):
                bisect.insort(self.numbers, seq)
        return True

    def _counts(self, queue: StateDir, seq: int) -> bool:
        """Return whether it is a ticket, the first name of it, and one of the first of its user."""
        try:
            status = os.stat(ticket_name(seq), dir_fd=queue.fd, follow_symlinks=False)
        except OSError:
            return False  # gone
        if not is_ticket(status) or status.st_ino in self._inodes:
            return False
        self._inodes.add(status.st_ino)
        self._of_user[status.st_uid] = number = self._of_user.get(status.st_uid, 0) + 1
        return number <= _MOST_OF_ONE_USER or not status.st_uid


def present(queue: StateDir, numbers: Iterable[int]) -> list[int]:
    """Return those of these numbers that still have a file, in the same order."""
    names = set(queue.names())
    return [seq for seq in numbers if ticket_name(seq) in names]


def _number(name: str) -> int | None:
    stem = name[: -len(TICKET_SUFFIX)]
    if not (name.endswith(TICKET_SUFFIX) and stem.isdecimal() and stem.isascii() and len(stem) <= _DIGITS):
        return None
    return int(stem) if stem[0] != "0" or stem == "0" else None


def ticket_owners(queue: StateDir) -> set[int]:
    """Return the uids of the owners of all ticket files, dead ones too. Takes no lock."""
    found = set()
    for name in queue.names():
        if name.endswith(TICKET_SUFFIX):
            with suppress(OSError):  # gone
                found.add(os.stat(name, dir_fd=queue.fd, follow_symlinks=False).st_uid)
    return found
