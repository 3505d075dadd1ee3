"""The host lock: one flock(2) that is held for microseconds, and only to try and take leases and tickets."""

import errno
import os
import time
from collections.abc import Callable, Iterator

from ...errors import LockTimeout, StateDirError
from ...host import procfs
from ...host.commands import program_names
from ..files.descriptors import fork_guard
from ..files.lease_dir import LeaseDir
from ..files.state_dir import StateDir
from ..signals import DeferredSignals
from ..state_dir import state_dir_path
from .flock import lock_file, unlock_file

MINIMUM_PATIENCE = 10.0
"""Seconds that host.lock is waited for even by a claim that waits for no GPU."""

# However large the crowd at host.lock, nobody pauses longer than this, times 1 to 5 ms.
_SLOWEST = 20

# Tries after the deadline. Who holds host.lock at each of them, and does not run, keeps it.
_LAST_TRIES = 5


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


class LockedHost:
    """What may be done while host.lock is held: leases and tickets live in these directories.

    Every function that probes a lease or a ticket takes one of these, so that no probe can happen without the lock.
    """

    def __init__(self, root: StateDir, *, make: bool = True) -> None:
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


class HostLock:
    """``with HostLock(deadline) as host:`` takes host.lock, and the state directory is made where it is missing.

    Without host.lock nothing is claimed by file, so who only looks makes nothing.

    Args:
        deadline: ``time.monotonic()`` value after which LockTimeout is raised; None waits without limit.
        path: the state directory; default :func:`~safe_gpu.coordination.state_dir.state_dir_path`.
        make: whether to make what is missing.
        prepare: called with the directories before the lock is taken, since others wait meanwhile.

    Raises:
        LockTimeout: it was not free before the deadline; names the holder if one keeps it.
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
                pauses, holders = _pauses(), []
                while not lock_file(fd):
                    if self._deadline is not None and time.monotonic() >= self._deadline:
                        holders.append(_holder(fd))
                        if len(holders) == _LAST_TRIES:
                            raise self._timeout(holders)
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

    def _timeout(self, holders: list[tuple[int | None, bool]]) -> LockTimeout:
        """Return the error of a wait whose last tries found these holders, as of :func:`_holder`."""
        path = os.path.join(self._path, "host.lock")
        pid, running = holders[-1]
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
        if running or len(set(holders)) > 1 or (pid is None and load > 2 * cpus):
            cause = f"the host is overloaded (load {load:.0f}, CPUs: {cpus})"
            return LockTimeout(
                f"{path} could not be taken in time, and no process keeps it: "
                f"{cause if load > cpus else 'too many processes use it at once'}; try again, with a longer timeout",
                path=path,
                overloaded=True,
            )
        if pid is None:
            return LockTimeout(
                f"{path} is locked by a process that cannot be seen from here (in another container?): try again, and "
                "if it stays, end the process that holds it",
                path=path,
            )
        user = procfs.user_of(pid)
        stopped = ", which is stopped: continue or end it" if procfs.is_stopped(pid) else ": try again, or end it"
        command = program_names(procfs.arguments_of(pid)) or "?"  # others read it, on a page too
        return LockTimeout(
            f"{path} is held by process {pid} of {user or 'unknown'} ({command}){stopped}",
            path=path,
            pid=pid,
            user=user,
        )


def _holder(fd: int) -> tuple[int | None, bool]:
    """Return the living process that /proc/locks shows for a lock, None for none, and whether it runs or waits for a
    CPU."""
    inode = os.fstat(fd).st_ino
    pid = next((pid for pid in procfs.flock_holders({inode}).get(inode, ()) if not procfs.has_ended(pid)), None)
    return pid, pid is not None and procfs.is_running(pid)
