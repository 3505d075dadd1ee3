"""Locks of whole files: those of open file descriptions (F_OFD_SETLK in fcntl(2)), and what does where there are none.

Such a lock belongs to the open file description, not to the process: closing another descriptor of the same file does
not end it. A write lock needs a descriptor that may write. To ask for it takes nothing and disturbs nobody.
"""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from .held import Held, file_of
from .signals import DeferredSignals

if TYPE_CHECKING:
    import threading

_PAUSE = 0.01  # seconds between tries, without a thread or without such locks

_LONGEST = 4e6  # seconds; threading.TIMEOUT_MAX is at least this

_STRUCT = struct.Struct("@hhqqi0q")  # struct flock, with 64-bit offsets


def _flock(kind: int) -> bytes:
    return _STRUCT.pack(kind, os.SEEK_SET, 0, 0, 0)


_QUESTION = _flock(fcntl.F_RDLCK)


@cache
def ofd_locks() -> bool:
    """Return whether the kernel knows such locks. Linux before 3.15 and gVisor do not, and flock(2) does for them."""
    fd = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _QUESTION)
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return False
    finally:
        os.close(fd)
    return True


def set_ofd_lock(fd: int, kind: int, *, wait: bool = False) -> None:
    """Lock a whole file, or unlock it; OSError where others have locked it.

    Args:
        kind: ``fcntl.F_WRLCK``, ``F_RDLCK`` or ``F_UNLCK``.
        wait: whether to wait for others, without limit.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _flock(kind))


def lock(fd: int) -> None:
    """Take a write lock; OSError where somebody else has locked the file."""
    _set(fd, fcntl.F_WRLCK, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """Give a lock back."""
    _set(fd, fcntl.F_UNLCK, fcntl.LOCK_UN)


def _set(fd: int, kind: int, instead: int, by: Callable[[int, int], object] = fcntl.flock) -> None:
    if ofd_locks():
        set_ofd_lock(fd, kind)
    else:
        by(fd, instead)


def is_locked(fd: int) -> bool:
    """Return whether somebody has a write lock."""
    if ofd_locks():
        return bool(_STRUCT.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _QUESTION))[0] == fcntl.F_WRLCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


class NoLocksError(OSError):
    """The kernel or the file system gives no lock at all."""


class ReadLock(Held):
    """A read lock of a file, which a forked child does not have.

    The kernel serves those first who block in it. fcntl(2) knows no deadline, so a thread blocks. A wait that ends
    early leaves the thread behind, and the next wait for the same file takes it over.

    Args:
        fd: of an open file description of its own, for reading.
        instead: takes the lock where the kernel has no such locks: ``fcntl.flock`` or ``fcntl.lockf``.
    """

    def __init__(self, fd: int, instead: Callable[[int, int], object]) -> None:
        super().__init__(fd, unlock=unlock)
        self._instead = instead
        self._thread_is_done: threading.Event | None = None

    def wait(self, deadline: float | None, signals: DeferredSignals) -> bool:
        """Return whether it is held, at the deadline (``time.monotonic()``) at the latest. Signals, which the caller
        holds back, pass while this waits.

        Raises:
            NoLocksError: there are none, or no room for one.
        """
        while self._thread_is_done is None:
            if self._try_once():
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not self._start_thread():
                with signals.delivering():
                    time.sleep(_PAUSE)
        seconds = None if deadline is None else min(deadline - time.monotonic(), _LONGEST)
        with signals.delivering():
            self._thread_is_done.wait(seconds)
        return self._thread_is_done.is_set() and self._try_once()

    def leave(self) -> None:
        """Give it back, or leave that to the thread, which does it when it gets the lock."""
        if self._thread_is_done is None:
            self.release()
            return
        _left_behind.append(self)
        if self._thread_is_done.is_set():
            self._release_if_left()

    def _try_once(self) -> bool:
        try:
            _set(self.fd, fcntl.F_RDLCK, fcntl.LOCK_SH | fcntl.LOCK_NB, self._instead)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as err:
            raise NoLocksError(err.errno, err.strerror) from err
        return True

    def _start_thread(self) -> bool:
        import threading

        if not ofd_locks():
            return False
        self._thread_is_done = done = threading.Event()
        try:
            threading.Thread(target=self._block, args=(done,), name="safe_gpu-waiter", daemon=True).start()
        except RuntimeError:  # ulimit -u, h_vmem
            self._thread_is_done = None
        return self._thread_is_done is not None

    def _block(self, done: "threading.Event") -> None:
        with suppress(OSError):
            set_ofd_lock(self.fd, fcntl.F_RDLCK, wait=True)
        done.set()
        self._release_if_left()

    def _release_if_left(self) -> None:
        """Both threads may come here, and one at most removes it from the list."""
        with suppress(ValueError):
            _left_behind.remove(self)
            self.release()


_left_behind: list[ReadLock] = []
"""Those whose threads still wait although their callers went away."""


def read_lock(fd: int, instead: Callable[[int, int], object]) -> ReadLock:
    """Return a read lock to wait for: one of the same file that was left behind, or a new one."""
    new = ReadLock(fd, instead)
    for other in [*_left_behind]:
        with suppress(ValueError):
            if file_of(other.fd) == new.file:
                _left_behind.remove(other)
                new.release()
                return other
    return new
