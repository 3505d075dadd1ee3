"""Which paths root may rely on: those that no other user can change."""

from __future__ import annotations

import os
import stat

__all__ = ["is_root", "nobody_else_can_change"]


def is_root() -> bool:
    """Whether this process is root of the host or of a container whose root that is, rather than a user who became
    root of a user namespace and gains nothing from it."""
    if os.geteuid() != 0:
        return False
    try:
        with open("/proc/self/uid_map", "rb") as file:
            return file.read(4096).split() == [b"0", b"0", b"4294967295"]
    except OSError:
        return True


def nobody_else_can_change(path: str) -> bool:
    """Whether a path, or what exists of it, belongs to root with all directories above, and only root may write there.

    A sticky directory is one of those where others may write: they cannot replace what is root's in it.
    """
    path = os.path.realpath(path)
    last = True
    while True:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            pass
        except OSError:
            return False
        else:
            shared = status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and status.st_gid)
            sticky = status.st_mode & stat.S_ISVTX and stat.S_ISDIR(status.st_mode)
            if status.st_uid or (shared and not sticky):
                return False
            last = False
        if path == "/":
            return not last
        path = os.path.dirname(path)
