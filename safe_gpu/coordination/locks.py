"""Every flock of the state directory: the host lock, the guard against cleaners, the watch on leases."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from .. import procfs
from ..errors import LockTimeout, MissingPackageError, StateDirError
from .files import LeaseDir, StateDir, look_at_owners, state_dir_path, survive_exec
from .signals import DeferredSignals

# The host lock: one flock(2) that is held for microseconds, and only to try and take leases and tickets.


MINIMUM_PATIENCE = 10.0
"""Seconds that host.lock is waited for even by a claim that waits for no GPU."""


def lock_file(fd: int) -> bool:
    """Try once to lock a descriptor of our own, exclusively; False where another open file holds the lock."""
    try:
        from filelock import lock_descriptor
    except ImportError as err:
        raise MissingPackageError(
            f"the Python package filelock is missing, or older than 3.30 ({err}): pip install 'filelock>=3.30'"
        ) from err
    return lock_descriptor(fd, blocking=False)


def unlock_file(fd: int) -> None:
    """Give the lock back before closing: a child forked meanwhile holds a copy of the descriptor and would keep it."""
    try:
        from filelock import unlock_descriptor
    except ImportError:
        return  # then nothing could be locked
    unlock_descriptor(fd)


# However large the crowd at host.lock, nobody pauses longer than this, times 1 to 5 ms.
_SLOWEST = 20


def _pauses() -> Iterator[float]:
    """Yield seconds between tries at host.lock: short, since it is held for microseconds, and uneven, or crowds go in
    step.

    The longer the wait, the larger the crowd: hundreds that pause for so little leave no CPU to the holder.
    """
    import random

    uneven = random.Random().uniform  # the program's own sequence of random numbers stays as it is
    began = time.monotonic()
    while True:
        waited = time.monotonic() - began
        yield min(1 + 1000 * waited, _SLOWEST) * uneven(0.001, 0.005)


def file_of(fd: int) -> tuple[int, int] | None:
    """Return the device and inode of what a descriptor has open; None where it is closed.

    A program may close what it did not open, as daemons do. Then the number is soon that of a file of its own.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    return status.st_dev, status.st_ino


class ForkGuard:
    """Descriptors whose locks must not live on in a forked child: they are closed there.

    Leases are not among them: a child that outlives its parent keeps the parent's GPUs, since it may be using them.
    """

    def __init__(self) -> None:
        self._fds: dict[int, tuple[int, int] | None] = {}
        self._registered = False

    def add(self, fd: int) -> None:
        """Close this descriptor in children forked from now on."""
        if not self._registered:
            os.register_at_fork(after_in_child=self._close_all)
            self._registered = True
        self._fds[fd] = file_of(fd)

    def discard(self, fd: int) -> bool:
        """Forget a descriptor. Whether it is still the caller's, to unlock and close: neither in a forked child nor
        where the program has closed it."""
        file = self._fds.pop(fd, None)
        return file is not None and file == file_of(fd)

    def __contains__(self, fd: int) -> bool:
        file = self._fds.get(fd)
        return file is not None and file == file_of(fd)

    def _close_all(self) -> None:
        for fd in list(self._fds):
            if self.discard(fd):
                os.close(fd)


fork_guard = procfs.lasting("fork_guard", ForkGuard())


class LockedHost:
    """What may be done while host.lock is held: leases and tickets live in these directories.

    Every function that probes a lease or a ticket takes one of these, so that no probe can happen without the lock.

    Attributes:
        drained: whether there is a file that drains GPUs.
    """

    def __init__(self, root: StateDir, *, make: bool = True) -> None:
        self.drained = root.has("drained")
        self.leases = LeaseDir("leases", root, make=make)
        try:
            self.queue = StateDir("queue", root, make=make)
        except BaseException:
            self.leases.close()
            raise

    def is_removed(self) -> bool:
        """Return whether a cleaner has removed one of the directories."""
        return self.leases.is_removed() or self.queue.is_removed()

    def close(self) -> None:
        """Close the directories."""
        self.leases.close()
        self.queue.close()


@contextmanager
def opened(part: str, *, make: bool = True) -> Iterator[StateDir]:
    """Open a directory of the state directory for a moment, with handlers of signals held back.

    Raises:
        StateDirError, FileNotFoundError: as :class:`~safe_gpu.coordination.files.StateDir`.
    """
    with DeferredSignals(), StateDir(state_dir_path(), make=make) as root, StateDir(part, root, make=make) as directory:
        yield directory


class HostLock:
    """``with HostLock(deadline) as host:`` takes host.lock, and the state directory is made where it is missing.

    Without host.lock nothing is claimed by file, so who only looks makes nothing.

    Args:
        deadline: ``time.monotonic()`` value after which LockTimeout is raised; None waits without limit.
        path: the state directory; default :func:`~safe_gpu.coordination.files.state_dir_path`.
        make: whether to make what is missing.
        prepare: called with the directories before the lock is taken, since others wait meanwhile.

    Raises:
        LockTimeout: it was not free before the deadline; names the holder where /proc/locks shows it.
        StateDirError: the state directory cannot be used.
        FileNotFoundError: host.lock or a directory is missing, and is not to be made.
    """

    def __init__(
        self,
        deadline: float | None,
        path: str | None = None,
        *,
        make: bool = True,
        prepare: Callable[[LockedHost], None] | None = None,
    ) -> None:
        self._deadline = deadline
        self._prepare = prepare
        self._path = path or state_dir_path()
        self._make = make
        self._fd = -1
        self._host: LockedHost | None = None
        self._signals = DeferredSignals()

    def __enter__(self) -> LockedHost:
        os.sched_yield()  # begin a new time slice: others wait while a holder of the lock is preempted
        self._signals.defer()
        try:
            while True:
                # Opened anew each time, by path: a directory that was cleaned away or replaced is noticed at once.
                with StateDir(self._path, make=self._make) as root:
                    try:
                        self._host = host = LockedHost(root, make=self._make)  # before, since others wait meanwhile
                        if self._make:
                            look_at_owners(root)
                        if self._prepare is not None:
                            self._prepare(host)
                        self._lock(root)
                        if not host.is_removed():  # else it is not the one that others use now
                            return host
                    except StateDirError:
                        if not root.is_removed() and (self._host is None or not self._host.is_removed()):
                            raise
                self._give_back()
                self._signals.defer()
        except BaseException:
            self._give_back()
            raise

    def __exit__(self, *exc: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        host, self._host = self._host, None
        try:
            self._unlock()
        finally:
            try:
                if host is not None:
                    host.close()
            finally:
                self._signals.deliver()

    def _unlock(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            if fork_guard.discard(fd):
                try:
                    unlock_file(fd)
                except OSError:
                    pass  # a file system that knows no locks; closing is all there is left to do
                finally:
                    os.close(fd)

    def _lock(self, root: StateDir) -> None:
        while True:
            fd = root.open_or_create("host.lock") if self._make else root.open("host.lock")
            if fd is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{root.path}/host.lock")
            self._fd = fd
            fork_guard.add(fd)
            try:
                pauses = _pauses()
                while not lock_file(fd):
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        raise self._timeout(fd)
                    self._signals.deliver()
                    time.sleep(next(pauses))
                    self._signals.defer()
                if root.is_current("host.lock", self._fd):
                    return
            except LockTimeout:
                raise
            except OSError as err:
                raise StateDirError(
                    f"{root.path}/host.lock cannot be locked ({err.strerror}): set SAFE_GPU_DIR to a directory on a "
                    "local file system",
                    path=root.path,
                    errno=err.errno,
                ) from err
            self._unlock()  # a cleaner of /tmp took the file away meanwhile: lock what stands there now

    def _timeout(self, fd: int) -> LockTimeout:
        path = os.path.join(self._path, "host.lock")
        inode = os.fstat(fd).st_ino
        pids = procfs.flock_holders({inode}).get(inode, [])
        if not pids:
            return LockTimeout(
                f"{path} is locked by a process that cannot be seen from here (another container or user): try again, "
                "and if it stays, end the process that holds it",
                path=path,
            )
        pid = pids[0]
        user = procfs.user_of(pid)
        stopped = ", which is stopped: continue or end it" if procfs.is_stopped(pid) else ": try again, or end it"
        return LockTimeout(
            f"{path} is held by process {pid} of {user or 'unknown'} ({procfs.command_of(pid) or 'gone'}){stopped}",
            path=path,
            pid=pid,
            user=user,
        )


# What keeps cleaners of /tmp away: systemd-tmpfiles skips a directory that somebody has locked, with all in it.


class StateDirGuard:
    """A shared flock on the state directory, on a descriptor of its own; made without one.

    Everybody may share it, and nobody waits for it: if a cleaner holds it just now,
    the claim goes on without it.

    Args:
        by_children: whether forked children keep it too, as they keep leases.
    """

    def __init__(self, *, by_children: bool) -> None:
        self._by_children = by_children
        self._fd = -1
        self._owner = -1
        self._file: tuple[int, int] | None = None

    def hold(self, host: LockedHost) -> None:
        """Take it, where it is not held yet."""
        import fcntl

        if self._fd >= 0:
            return
        try:
            fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=host.leases.fd)
        except OSError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return
        if not self._by_children:
            fork_guard.add(fd)
        self._fd, self._owner, self._file = fd, os.getpid(), file_of(fd)

    def release(self) -> None:
        """Give it back; safe to call twice. In a forked child this only closes the child's copy, where it has one."""
        fd, self._fd = self._fd, -1
        is_ours = fork_guard.discard(fd) if not self._by_children else fd >= 0 and file_of(fd) == self._file
        if not is_ours:
            return
        try:
            if os.getpid() == self._owner:
                unlock_file(fd)
        finally:
            os.close(fd)

    def keep_across_exec(self) -> None:
        """Let it survive exec(2)."""
        if self._fd >= 0:
            self._fd = survive_exec(self._fd)


# How the head of the queue watches leases: many times a second, for hours, next to jobs that want the CPU.


class LeaseWatcher:
    """Leases that others hold, watched until one comes free; use it in ``with``.

    A claim's own look opens everything anew. Here the files stay open, which takes a fifth of the time, and one that
    was replaced is missed: look in full now and then.

    Args:
        names: lease files.

    Raises:
        StateDirError: the state directory cannot be used.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._fds: list[int] = []
        self._signals = DeferredSignals()

    def __enter__(self) -> LeaseWatcher:
        self._signals.defer()
        try:
            try:
                with StateDir(state_dir_path()) as root, StateDir("leases", root) as leases:
                    self._keep(root.open_or_create("host.lock"))
                    for name in self._names:
                        with suppress(StateDirError):  # the next full look judges it
                            if (fd := leases.open(name)) is not None:
                                self._keep(fd)
            finally:
                self._signals.deliver()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; safe to call twice."""
        try:
            self._signals.defer()
        finally:  # also when a signal came in the midst of that
            while self._fds:
                fd = self._fds.pop()
                if fork_guard.discard(fd):
                    os.close(fd)
            self._signals.deliver()

    def _keep(self, fd: int) -> None:
        fork_guard.add(fd)
        self._fds.append(fd)

    def any_free(self) -> bool:
        """Return whether one of them is free now; also where host.lock is busy, and it cannot be told."""
        host, *leases = self._fds
        self._signals.defer()
        try:
            if not lock_file(host):
                return True
            try:
                return any(map(_is_free, leases))
            finally:
                unlock_file(host)
        finally:
            self._signals.deliver()


def _is_free(fd: int) -> bool:
    if lock_file(fd):
        unlock_file(fd)
        return True
    return False
