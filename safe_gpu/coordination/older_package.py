"""The lock of the older safe-gpu package (1.x, 2.0), so that its users and ours stay off each other's GPUs.

That package holds a POSIX lock (fcntl.lockf) exclusively from when it reads nvidia-smi until its CUDA context exists.
We hold it shared from our entry until our placeholder can be seen: theirs keeps us out and ours keep them out, while
our own claims pass side by side. flock(2) and POSIX locks do not see each other, so theirs has to be taken in its own
kind.

A process that only polls for this lock does not get it while two others, which block in fcntl(2), take turns. So we
block too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import Any

from ..errors import LockTimeout, StateDirError
from ..host import procfs
from ..host.locks import ReadLock, read_lock
from ..host.signals import DeferredSignals
from .directory import OPEN_FILE, make_directory, refusal_of_error

LOCK_FILE = "/tmp/safe_gpu/gpu-lock-magic-RaNdOM-This_Name-NEED_BE-THE_SAME-Across_Users"

_OPEN_DIR = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def take_older_package_lock(deadline: float | None, logger: Any, signals: DeferredSignals) -> ReadLock | None:
    """Take it shared. It is made where the package is not present if ``SAFE_GPU_LEGACY_LOCK`` says always.

    Args:
        deadline: ``time.monotonic()`` value; None waits without limit. It is always tried once.
        signals: held back by the caller, who stores the lock before it lets them go; they pass while this waits.

    Returns:
        The lock, or None where the package is not present or its lock cannot be reached (which is warned of).

    Raises:
        LockTimeout: the older package held it until the deadline.
        StateDirError: its file is kept under a file lease.
        OSError: the file system has no locks.
    """
    try:
        fd = _open(create=os.environ.get("SAFE_GPU_LEGACY_LOCK") == "always")
    except StateDirError:
        raise
    except OSError as err:
        logger.warning(
            "the lock of the older safe-gpu package (%s) cannot be taken (%s), so its users may collide with us: "
            "ask its owner to open it and its directory to all (modes 0666 and 1777), or root to remove the directory",
            LOCK_FILE,
            err.strerror,
        )
        return None
    if fd is None:
        return None
    lock = read_lock(fd, fcntl.lockf)
    taken = False
    try:
        taken = lock.wait(deadline, signals)
        if not taken:
            raise _timeout(os.fstat(lock.fd).st_ino)
        return lock
    finally:
        if not taken:
            lock.leave()


def _open(*, create: bool) -> int | None:
    """Return a descriptor of its file; None if that is missing, and is not to be made."""
    path, name = os.path.split(LOCK_FILE)
    if create and not os.path.lexists(path):
        make_directory(path, path, None)
    directory = -1
    try:
        directory = os.open(path, _OPEN_DIR)
        if create:
            with suppress(FileExistsError):
                fd = os.open(name, OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=directory)
                os.fchmod(fd, 0o666)
                return fd
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):  # a device or a FIFO is not even opened
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.open(name, OPEN_FILE, dir_fd=directory)
    except FileNotFoundError:
        return None
    except BlockingIOError as err:
        raise refusal_of_error(LOCK_FILE, err) from err
    finally:
        if directory >= 0:
            os.close(directory)


def _timeout(inode: int) -> LockTimeout:
    pid = None
    user = None
    holder = "another process"
    pids = procfs.flock_holders({inode}).get(inode)
    if pids:
        pid = pids[0]
        user = procfs.user_of(pid)
        holder = f"process {pid} of user {user or 'unknown'}"
    what = f"the lock of the older safe-gpu package ({LOCK_FILE}) is held by {holder}, which is claiming a GPU"
    return LockTimeout(f"{what}: try again, with a longer timeout", path=LOCK_FILE, pid=pid, user=user)
