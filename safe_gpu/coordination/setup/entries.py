"""What is to become of an entry of root's state directory, by what stands there now. Pure."""

import os
import stat
from typing import NamedTuple

from ...host.procfs import user_name
from ..files.shared_directory import DIR_MODE

KEEP, MAKE, TAKE, SKIP = "keep", "make", "take over", "skip"

_FILE_MODE = 0o666


class Entry(NamedTuple):
    """A directory or file, relative to the state directory, with what is to be done there.

    Attributes:
        name: "." for the state directory itself.
        action: one of KEEP, MAKE, TAKE, SKIP.
        why: whose it is, if it is taken over; what is wrong with it, if it is skipped; else "".
    """

    name: str
    action: str
    why: str = ""


def directory_entry(name: str, status: os.stat_result | None, *, empty: bool) -> Entry:
    """Return what is to be done for a directory.

    One of another mode is taken only if it is empty: somebody may have named a home, or moved a directory here that is
    to stay closed.
    """
    if status is None:
        return Entry(name, MAKE)
    mode = stat.S_IMODE(status.st_mode)
    if mode != DIR_MODE and not empty:
        return Entry(name, SKIP, f"has mode {mode:04o} and is not empty")
    if status.st_uid == 0 and mode == DIR_MODE:
        return Entry(name, KEEP)
    return Entry(name, TAKE, f"of {user_name(status.st_uid)}, mode {mode:04o}")


def file_entry(name: str, status: os.stat_result | None) -> Entry:
    """Return what is to be done for a file.

    One of another mode, or with a second name, may be somebody's from elsewhere: it is neither opened to all nor taken.
    """
    if status is None:
        return Entry(name, MAKE)
    mode, user = stat.S_IMODE(status.st_mode), user_name(status.st_uid)
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        return Entry(name, SKIP, f"is {kind}, and belongs to {user}")
    if status.st_nlink != 1:
        return Entry(name, SKIP, f"has {status.st_nlink} names (hard links), and belongs to {user}")
    if mode != _FILE_MODE:
        return Entry(name, SKIP, f"has mode {mode:04o}, and belongs to {user}")
    return Entry(name, KEEP) if status.st_uid == 0 else Entry(name, TAKE, f"of {user}")
