"""Descriptors that are held, and locks of whole files: those of open file descriptions (F_OFD_SETLK in fcntl(2)), and
flock(2) where the kernel lacks them.

The kernel gives back what is held with the last copy of the descriptor. So a copy in a forked child counts: the entry
of a claim is kept there, since the child may be using the GPUs, and everything else is closed.

Such a lock belongs to the open file description, not to the process: closing another descriptor of the same file does
not end it. A write lock needs a descriptor that may write. To ask whether there is one takes nothing and disturbs
nobody (F_OFD_GETLK).
"""

import errno
import fcntl
import os
import struct
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache

from . import procfs
from .signals import DeferredSignals

_closed_in_children: "set[Held]" = procfs.process_global("closed_in_children", set())


class Held:
    """An open descriptor, until :meth:`release`, or until the program closes it as daemons do.

    Args:
        fd: belongs to this object from now on.
        file: device and inode of what is open, if they are known.
        by_children: whether forked children keep their copy.
        unlock: called with the descriptor before it is closed. A child that was forked meanwhile may still have a copy
            of it.

    Attributes:
        file: device and inode of what is open.
    """

    def __init__(
        self,
        fd: int,
        *,
        file: tuple[int, int] | None = None,
        by_children: bool = False,
        unlock: Callable[[int], None] | None = None,
    ) -> None:
        self.file = file or file_of(fd)
        self._fd = fd
        self._pid = os.getpid()  # asked each time: children that C code forks run no hook of Python
        self._unlock = unlock
        if not by_children:
            _closed_in_children.add(self)

    @property
    def fd(self) -> int:
        """The descriptor; -1 once it was closed, by :meth:`release` or by the program, whose number it may be now."""
        if self._fd < 0 or file_of(self._fd) != self.file:
            return -1
        return self._fd

    def release(self, first: Callable[[], object] | None = None) -> None:
        """Give it back; safe to call twice. A forked child only closes its copy.

        Args:
            first: called before the descriptor is closed; not in a forked child.
        """
        fd = self.fd
        self._fd = -1
        _closed_in_children.discard(self)
        if fd < 0:
            return
        is_ours = os.getpid() == self._pid
        try:
            if first is not None and is_ours:
                first()
        finally:
            try:
                if self._unlock is not None and is_ours:
                    self._unlock(fd)
            finally:
                os.close(fd)


def close_in_child() -> None:
    """Close what forked children do not keep; called in the child."""
    for held in list(_closed_in_children):
        held.release()


os.register_at_fork(after_in_child=close_in_child)


def keep_across_exec(several: Iterable[Held]) -> None:
    """Move descriptors out of the way of shell redirections, in their order, and let them survive exec(2).

    To 500 and above, or as high as RLIMIT_NOFILE allows, so that a script's ``exec 3>`` does no harm.
    """
    most = os.sysconf("SC_OPEN_MAX")  # -1 where there is no limit
    floor = 500
    if 0 <= most <= 564:
        floor = max(most - 64, most // 2, 3)
    there = [held for held in several if held.fd >= 0]
    moved: list[int] = []
    try:
        for held in there:  # none is closed before the last is moved, or a later one could get a lower number
            moved.append(fcntl.fcntl(held.fd, fcntl.F_DUPFD, floor))
    except OSError:
        for fd in moved:
            os.close(fd)
        for held in there:
            os.set_inheritable(held.fd, True)  # no room up there: they stay where they are
        return
    for held, fd in zip(there, moved, strict=True):
        os.close(held._fd)
        held._fd = fd


def file_of(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of what a descriptor has open; None where it is closed.

    A program may close what it did not open, as daemons do. Then the number is soon that of a file of its own.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


_PAUSE = 0.01  # seconds between tries, without a thread or without such locks

_LONGEST = 4e6  # seconds; threading.TIMEOUT_MAX is at least this

_STRUCT = struct.Struct("@hhqqi0q")  # struct flock, with 64-bit offsets


def _flock(kind: int) -> bytes:
    return _STRUCT.pack(kind, os.SEEK_SET, 0, 0, 0)


_QUESTION = _flock(fcntl.F_RDLCK)

# Every lock is in the way of this one, so the kernel answers with the first, however many there are.
_WHOLE = _flock(fcntl.F_WRLCK)


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
    command = fcntl.F_OFD_SETLK
    if wait:
        command = fcntl.F_OFD_SETLKW
    fcntl.fcntl(fd, command, _flock(kind))


def lock(fd: int) -> None:
    """Take a write lock; OSError where somebody else has locked the file."""
    if ofd_locks():
        set_ofd_lock(fd, fcntl.F_WRLCK)
    else:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(fd: int) -> None:
    """Give a lock back."""
    if ofd_locks():
        set_ofd_lock(fd, fcntl.F_UNLCK)
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def is_locked(fd: int) -> bool:
    """Return whether somebody has a write lock of the whole file."""
    if ofd_locks():
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE)
        return bool(_STRUCT.unpack(found)[:4] == (fcntl.F_WRLCK, os.SEEK_SET, 0, 0))
    # flock(2) can only be asked by taking it, for a moment: two who ask at once do not disturb each other.
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


class NoLocksError(OSError):
    """The kernel or the file system gives no lock at all."""


class _Bell:
    """What a thread rings once, and another one waits for.

    A handler of a signal may raise while the other one waits. Then its exception comes out, as it is: in the wait of a
    threading.Event it may become a RuntimeError, since a lock is to be given back there that is not held.
    """

    def __init__(self) -> None:
        self._silence = allocate_lock()
        self._silence.acquire()
        self.has_rung = False

    def ring(self) -> None:
        """Let the waiting thread go on."""
        self.has_rung = True
        self._silence.release()

    def wait(self, deadline: float | None) -> None:
        """Return once it has rung, or at the deadline (``time.monotonic()``)."""
        if self.has_rung:
            return
        seconds = _LONGEST
        if deadline is not None:
            seconds = min(max(0.0, deadline - time.monotonic()), _LONGEST)
        if self._silence.acquire(timeout=seconds):
            self._silence.release()


class ReadLock(Held):
    """A read lock of a file, which a forked child does not have.

    The kernel serves those first who block in it. fcntl(2) knows no deadline, so a thread blocks. A wait that ends
    early leaves the thread behind, and the next wait for the same file takes it over.

    Args:
        fd: of an open file description of its own, for reading.
        lock_with: takes the lock where the kernel has no such locks: ``fcntl.flock`` or ``fcntl.lockf``.
    """

    def __init__(self, fd: int, lock_with: Callable[[int, int], object]) -> None:
        super().__init__(fd, unlock=unlock)
        self._lock_with = lock_with
        self._thread: _Bell | None = None  # of the thread that blocks; it rings when that is done

    def wait(self, deadline: float | None, signals: DeferredSignals) -> bool:
        """Return whether it is held, at the deadline (``time.monotonic()``) at the latest. Signals, which the caller
        holds back, pass while this waits.

        Raises:
            NoLocksError: there are none, or no room for one.
        """
        while self._thread is None:
            if self._try_once():
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not self._start_thread():
                with signals.delivering():
                    time.sleep(_PAUSE)
        with signals.delivering():
            self._thread.wait(deadline)
        return self._thread.has_rung and self._try_once()

    def leave(self) -> None:
        """Give it back, or leave that to the thread, which does it when it gets the lock."""
        if self._thread is None:
            self.release()
            return
        _left_behind.append(self)
        if self._thread.has_rung:
            self._release_if_left()

    def _try_once(self) -> bool:
        try:
            if ofd_locks():
                set_ofd_lock(self.fd, fcntl.F_RDLCK)
            else:
                self._lock_with(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as err:
            raise NoLocksError(err.errno, err.strerror) from err
        return True

    def _start_thread(self) -> bool:
        import threading

        if not ofd_locks():
            return False
        self._thread = bell = _Bell()
        try:
            threading.Thread(target=self._block, args=(bell,), name="safe_gpu-waiter", daemon=True).start()
        except RuntimeError:  # ulimit -u, h_vmem
            self._thread = None
        return self._thread is not None

    def _block(self, bell: _Bell) -> None:
        with suppress(OSError):
            set_ofd_lock(self.fd, fcntl.F_RDLCK, wait=True)
        bell.ring()
        self._release_if_left()

    def _release_if_left(self) -> None:
        """Both threads may come here, and one at most removes it from the list."""
        with suppress(ValueError):
            _left_behind.remove(self)
            self.release()


_left_behind: list[ReadLock] = []
"""Those whose threads still wait although their callers went away."""


def read_lock(fd: int, lock_with: Callable[[int, int], object]) -> ReadLock:
    """Return a read lock to wait for: one of the same file that was left behind, or a new one."""
    new = ReadLock(fd, lock_with)
    for other in [*_left_behind]:
        with suppress(ValueError):
            if file_of(other.fd) == new.file:
                _left_behind.remove(other)
                new.release()
                return other
    return new
