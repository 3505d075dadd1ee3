"""The history of a host: one file for each month, to which claims append lines of JSON; written after host.lock.

A claim never waits for it and never fails for it: where a line cannot be written (no room, another user's file that is
closed, a symbolic link), it is lost. The files grow to a bounded size and are kept for two years.
"""

import os
import time
from collections.abc import Iterable
from contextlib import suppress

from ..errors import StateDirError
from .directory import OPEN_DIR, make_directory
from .files.state_dir import StateDir
from .state_dir import state_dir_path

NAME = "history"
"""The directory, in the state directory."""

LARGEST = 8 << 20
"""Bytes from which on nothing is appended to a file. The next part of the month is begun then."""

PARTS = 4
"""Files of a month at most; what comes after that is lost."""

_MONTHS = 24  # whose files are kept


class HistoryDir(StateDir):
    """The directory of the history. Unlike other directories of the state directory it is not waited for.

    Raises:
        StateDirError, OSError: it cannot be opened, or made.
    """

    def __init__(self, root: StateDir, *, make: bool = False) -> None:
        self.path = os.path.join(root.path, NAME)
        self.fd = -1
        try:
            self.fd = os.open(NAME, OPEN_DIR, dir_fd=root.fd)
        except FileNotFoundError:
            if not make:
                raise
            make_directory(NAME, self.path, root.fd)
            self.fd = os.open(NAME, OPEN_DIR, dir_fd=root.fd)


def month_of(when: float) -> str:
    """Return the month of a time in Unix seconds, in UTC.

    >>> month_of(0)
    '1970-01'
    """
    return time.strftime("%Y-%m", time.gmtime(when))


def months_kept(now: float) -> list[str]:
    """Return the months whose files are kept, in their order: that of a time in Unix seconds, in UTC, and those before
    it.

    >>> months_kept(0)[0], months_kept(0)[-1]
    ('1968-02', '1970-01')
    """
    year, month = time.gmtime(now)[:2]
    last = 12 * year + month - 1
    return [f"{number // 12}-{number % 12 + 1:02}" for number in range(last - _MONTHS + 1, last + 1)]


def file_names(month: str) -> list[str]:
    """Return the files of a month, in the order in which they are filled.

    >>> file_names("2026-11")
    ['2026-11.jsonl', '2026-11.1.jsonl', '2026-11.2.jsonl', '2026-11.3.jsonl']
    """
    return [f"{month}{f'.{part}' if part else ''}.jsonl" for part in range(PARTS)]


def append(lines: Iterable[bytes], now: float) -> bool:
    """Append whole lines to the file of the month; no lock is taken. Returns whether that was done. The caller holds
    handlers of signals back.

    Args:
        now: Unix seconds.
    """
    data = b"".join(lines)
    if not data:
        return True
    try:
        with StateDir(state_dir_path()) as root, HistoryDir(root, make=True) as directory:
            directory.flags |= os.O_APPEND
            return any(_append(directory, name, data, now) for name in file_names(month_of(now)))
    except (OSError, StateDirError):
        return False


def _append(directory: StateDir, name: str, data: bytes, now: float) -> bool:
    try:
        fd = directory.open(name)
        if fd is None:
            fd = directory.open_or_create(name)
            _remove_old(directory, now)
    except StateDirError:
        return False  # somebody else's, and closed: the next part takes it
    try:
        if os.fstat(fd).st_size >= LARGEST:
            return False
        return os.write(fd, data) == len(data)
    except OSError:
        return False
    finally:
        os.close(fd)


def _remove_old(directory: StateDir, now: float) -> None:
    """Remove the files of this user from months that are not kept.

    Names prove nothing and anybody can make some, so months are counted by the calendar. Root and the owner of the
    directory could remove files of others too.
    """
    import re

    oldest = months_kept(now)[0]
    for name in directory.names():
        if name < oldest and re.fullmatch(r"[0-9]{4}-(0[1-9]|1[0-2])(\.[1-3])?\.jsonl", name):
            with suppress(OSError):
                if os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_uid == os.geteuid():
                    directory.unlink(name)
