"""The lock of the older safe-gpu package (1.x, 2.0), and the record locks that it needs.

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
import time
from typing import Any

from .. import procfs, settings
from ..errors import LockTimeout, StateDirError
from .locks import fork_guard
from .signals import DeferredSignals

# Shared record locks that conflict with ``fcntl.lockf``, waited for in the kernel's queue, with a deadline.


# Without a thread or without such locks (Linux before 3.15, gVisor) it is tried this often, in seconds.
_PAUSE = 0.01
# threading.TIMEOUT_MAX is at least this, in seconds.
_LONGEST = 4e6


def lock_shared(fd: int, deadline: float | None, signals: DeferredSignals | None = None) -> int | None:
    """Lock the whole file for as long as the descriptor is open here; forked children close theirs.

    A wait that ends early leaves a thread behind, which the kernel resumes when the lock is free. The next wait for
    that file takes it over, so there is at most one.

    Args:
        fd: of an open file description of its own, for reading. It is given up, whatever happens.
        deadline: ``time.monotonic()`` value; None waits without limit. The lock is always tried once.
        signals: held back by the caller, who stores the result before it lets them go; they pass while this waits.

    Returns:
        The descriptor that holds the lock, for :func:`unlock`; None where it was not free until the deadline.

    Raises:
        OSError: the file system has no locks.
    """
    if signals is None:
        with DeferredSignals() as signals:
            return lock_shared(fd, deadline, signals)
    blocked: _Blocked | None = None
    fork_guard.add(fd)
    try:
        free = _try(fd)
        if free:
            return fd
        if deadline is not None and time.monotonic() >= deadline:
            unlock(fd)
            return None
        blocked = None if free is None else _Blocked.on(fd)
        signals.deliver()
        held = (fd if _poll(fd, deadline) else None) if blocked is None else blocked.wait(deadline)
        signals.defer()
        if held is None and blocked is None:
            unlock(fd)
        return held
    except BaseException:
        signals.defer()
        if blocked is None:
            unlock(fd)
        else:
            blocked.leave()
        raise


def unlock(fd: int) -> None:
    """Give the lock back and close the descriptor; without effect in a forked child, where it is closed already."""
    if not fork_guard.discard(fd):
        return
    try:
        _command(fd, _F_OFD_SETLK, _F_UNLCK)  # a child between fork and exec may have a copy
    except OSError:
        pass  # no such locks: closing ends the other kind
    finally:
        os.close(fd)


class _Blocked:
    """A daemon thread that waits for the lock. ``fd`` is its caller's, or its own while nobody waits for it.

    Attributes: ``done`` is set when the lock is held, or ``error`` says why it never will be.
    """

    def __init__(self, fd: int) -> None:
        import threading

        status = os.fstat(fd)
        self.fd = fd
        self.done = threading.Event()
        self.error: OSError | None = None
        self._key = (os.getpid(), status.st_dev, status.st_ino)
        self._thread = threading.Thread(target=self._run, name="safe_gpu-older-package", daemon=True)

    @classmethod
    def on(cls, fd: int) -> _Blocked | None:
        """Wait for the file of ``fd``, whose owner this is from here on; None if no thread can be started."""
        new = cls(fd)
        for other in list(_left_behind):
            if other._key == new._key and other._take_back():
                unlock(fd)
                return other
        try:
            new._thread.start()
        except RuntimeError:  # ulimit -u, h_vmem
            return None
        return new

    def wait(self, deadline: float | None) -> int | None:
        seconds = None if deadline is None else min(max(0.0, deadline - time.monotonic()), _LONGEST)
        if not self.done.wait(seconds):
            self.leave()
            return None
        if self.error is not None:
            raise self.error
        return self.fd

    def leave(self) -> None:
        """Leave the descriptor to the thread, which closes it when it gets the lock."""
        _left_behind.append(self)
        if self.done.is_set():
            self._end()

    def _run(self) -> None:
        try:
            _command(self.fd, _F_OFD_SETLKW, _F_RDLCK)
        except OSError as err:
            self.error = err
        self.done.set()
        self._end()

    def _end(self) -> None:
        """Close the descriptor where nobody waits for it any more; both threads may come here, one at most closes."""
        if self._take_back():
            unlock(self.fd)

    def _take_back(self) -> bool:
        try:
            _left_behind.remove(self)
        except ValueError:
            return False
        return True


_left_behind: list[_Blocked] = []
"""Those that still wait although their callers went away."""


_F_RDLCK, _F_UNLCK = 0, 2
_F_OFD_SETLK, _F_OFD_SETLKW = 37, 38


def _command(fd: int, command: int, kind: int) -> None:
    import fcntl
    from struct import pack

    fcntl.fcntl(fd, command, pack("hhqqi", kind, os.SEEK_SET, 0, 0, 0))  # struct flock: all of the file


def _try(fd: int) -> bool | None:
    """Return whether it is locked now. Where the kernel has no such locks, the process's own is tried; None: not
    locked."""
    import fcntl

    try:
        try:
            _command(fd, _F_OFD_SETLK, _F_RDLCK)
        except OSError as err:
            if err.errno != errno.EINVAL:
                raise
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    except OSError as err:
        if err.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        return None if isinstance(err.__context__, OSError) else False


def _poll(fd: int, deadline: float | None) -> bool:
    while not _try(fd):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


# The lock of the older safe-gpu package (1.x, 2.0), so that its users and ours stay off each other's GPUs.


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
        from .files import make_directory

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
        from .files import under_file_lease

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
