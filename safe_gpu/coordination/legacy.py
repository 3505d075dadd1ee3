"""The lock of the older safe-gpu package (1.x, 2.0), so that its users and ours stay off each other's GPUs.

That package holds a POSIX lock (fcntl.lockf) exclusively from its look at nvidia-smi until its context stands. We hold
it shared from our leases until our placeholder can be seen: theirs keeps us out and ours keep them out, while our own
claims pass side by side. flock(2) and POSIX locks do not see each other, so theirs has to be taken in its own kind.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Any

from .. import procfs
from ..errors import LockTimeout, UnsatisfiableRequestError

__all__ = ["LOCK_FILE", "LegacyLock", "legacy_mode", "take_legacy_lock"]

LOCK_FILE = "/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users"

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class LegacyLock:
    """A shared hold of it. Opened once: a POSIX lock vanishes when any descriptor of its file is closed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Let the older package go on; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def legacy_mode() -> str:
    """What ``SAFE_GPU_LEGACY_LOCK`` says: auto, always or never.

    Raises:
        UnsatisfiableRequestError: it says something else.
    """
    mode = os.environ.get("SAFE_GPU_LEGACY_LOCK") or "auto"
    if mode not in ("auto", "always", "never"):
        raise UnsatisfiableRequestError(
            f"SAFE_GPU_LEGACY_LOCK={mode} is unknown: set it to auto, always or never", value=mode
        )
    return mode


def take_legacy_lock(deadline: float | None, logger: Any) -> LegacyLock | None:
    """Take it shared where the older package is present (``SAFE_GPU_LEGACY_LOCK`` = auto, always or never).

    Args:
        deadline: ``time.monotonic()`` value; None waits for ever. It is always tried once.

    Returns:
        The lock, or None where the package is not present or its lock cannot be reached (which is warned of).

    Raises:
        LockTimeout: the older package held it until the deadline.
        UnsatisfiableRequestError: an unknown value of the variable.
    """
    mode = legacy_mode()
    if mode == "never":
        return None
    try:
        fd = _open(create=mode == "always")
    except OSError as err:
        logger.warning(
            "The lock of the older safe-gpu package (%s) cannot be taken (%s), so its users may collide with us: "
            "ask the owner of %s to open it to all (chmod 1777)",
            LOCK_FILE,
            err.strerror,
            os.path.dirname(LOCK_FILE),
        )
        return None
    if fd is None:
        return None
    try:
        _lock(fd, deadline)
    except BaseException:
        os.close(fd)
        raise
    return LegacyLock(fd)


def _open(create: bool) -> int | None:
    try:
        return os.open(LOCK_FILE, _OPEN)
    except FileNotFoundError:
        if not create:
            return None
    directory = os.path.dirname(LOCK_FILE)
    try:
        os.mkdir(directory)
        os.chmod(directory, 0o1777)
    except FileExistsError:
        pass
    try:
        fd = os.open(LOCK_FILE, _OPEN | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(LOCK_FILE, _OPEN)
    os.fchmod(fd, 0o666)
    return fd


def _lock(fd: int, deadline: float | None) -> None:
    import fcntl

    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except OSError as err:
            if err.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        if deadline is not None and time.monotonic() >= deadline:
            raise _timeout(fd)
        time.sleep(0.01)


def _timeout(fd: int) -> LockTimeout:
    inode = os.fstat(fd).st_ino
    pids = procfs.flock_holders({inode}).get(inode, [])
    holder = f"process {pids[0]} of user {procfs.user_of(pids[0]) or 'unknown'}" if pids else "another process"
    return LockTimeout(
        f"the lock of the older safe-gpu package ({LOCK_FILE}) is held by {holder}, which is claiming a GPU: "
        "try again, with a longer timeout",
        path=LOCK_FILE,
        pid=pids[0] if pids else None,
        user=procfs.user_of(pids[0]) if pids else None,
    )
