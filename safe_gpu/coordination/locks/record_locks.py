"""Shared record locks that conflict with ``fcntl.lockf``, waited for with a deadline."""

from __future__ import annotations

import errno
import os
import time

from ..files.descriptors import fork_guard
from ..signals import DeferredSignals

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
