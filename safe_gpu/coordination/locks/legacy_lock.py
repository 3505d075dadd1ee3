"""The lock of the older safe-gpu package (1.x, 2.0), so that its users and ours stay off each other's GPUs.

They belong to the open file description (F_OFD_SETLK in fcntl(2)), not to the process: closing another descriptor of
the same file does not end them. The kernel serves those that block in it first. Who polls beside them is never served
while two of them take turns.

That package holds a POSIX lock (fcntl.lockf) exclusively from its look at nvidia-smi until its context stands. We hold
it shared from our leases until our placeholder can be seen: theirs keeps us out and ours keep them out, while our own
claims pass side by side. flock(2) and POSIX locks do not see each other, so theirs has to be taken in its own kind.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Any

from ...errors import LockTimeout, StateDirError
from ...host import procfs
from ...settings import variables as settings
from ..directory import make_directory
from ..state_dir import under_file_lease
from .record_locks import lock_shared, unlock

if TYPE_CHECKING:
    from ..signals import DeferredSignals

LOCK_FILE = "/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users"

_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_OPEN_DIR = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class LegacyLock:
    """A shared hold of it, which a forked child does not have."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Let the older package go on; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            unlock(fd)


def legacy_mode() -> str:
    """Return what ``SAFE_GPU_LEGACY_LOCK`` says: auto, always or never.

    Raises:
        UnsatisfiableRequestError: it says something else.
    """
    settings.check({"SAFE_GPU_LEGACY_LOCK": os.environ.get("SAFE_GPU_LEGACY_LOCK", "")})
    return os.environ.get("SAFE_GPU_LEGACY_LOCK") or "auto"


def take_legacy_lock(deadline: float | None, logger: Any, signals: DeferredSignals | None = None) -> LegacyLock | None:
    """Take it shared where the older package is present (``SAFE_GPU_LEGACY_LOCK`` = auto, always or never).

    Args:
        deadline: ``time.monotonic()`` value; None waits without limit. It is always tried once.
        signals: held back by the caller, who stores the lock before it lets them go; they pass while this waits.

    Returns:
        The lock, or None where the package is not present or its lock cannot be reached (which is warned of).

    Raises:
        LockTimeout: the older package held it until the deadline.
        StateDirError: its file is kept under a file lease.
        UnsatisfiableRequestError: an unknown value of the variable.
    """
    mode = legacy_mode()
    if mode == "never":
        return None
    try:
        fd = _open(create=mode == "always")
    except StateDirError:
        raise
    except OSError as err:
        logger.warning(
            "The lock of the older safe-gpu package (%s) cannot be taken (%s), so its users may collide with us: "
            "ask its owner to open it and its directory to all (modes 0666 and 1777), or root to remove the directory",
            LOCK_FILE,
            err.strerror,
        )
        return None
    if fd is None:
        return None

    inode = os.fstat(fd).st_ino
    held = lock_shared(fd, deadline, signals)
    if held is None:
        raise _timeout(inode)
    return LegacyLock(held)


def _open(create: bool) -> int | None:
    path, name = os.path.split(LOCK_FILE)
    try:
        directory = os.open(path, _OPEN_DIR)
    except FileNotFoundError:
        if not create:
            return None

        make_directory(path, path, None)
        directory = os.open(path, _OPEN_DIR)
    try:
        try:
            return _open_in(directory, name)
        except FileNotFoundError:
            if not create:
                return None
        try:
            fd = os.open(name, _OPEN | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=directory)
        except FileExistsError:
            return _open_in(directory, name)
        os.fchmod(fd, 0o666)
        return fd
    finally:
        os.close(directory)


def _open_in(directory: int, name: str) -> int:
    status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):  # a device or a FIFO is not even opened
        raise OSError(errno.EINVAL, "it is not a regular file")
    try:
        return os.open(name, _OPEN, dir_fd=directory)
    except BlockingIOError as err:
        raise under_file_lease(LOCK_FILE, status) from err


def _timeout(inode: int) -> LockTimeout:
    pids = procfs.flock_holders({inode}).get(inode, [])
    holder = f"process {pids[0]} of user {procfs.user_of(pids[0]) or 'unknown'}" if pids else "another process"
    return LockTimeout(
        f"the lock of the older safe-gpu package ({LOCK_FILE}) is held by {holder}, which is claiming a GPU: "
        "try again, with a longer timeout",
        path=LOCK_FILE,
        pid=pids[0] if pids else None,
        user=procfs.user_of(pids[0]) if pids else None,
    )
