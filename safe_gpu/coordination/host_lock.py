"""The state directory while a process claims, and host.lock: one flock(2), held for microseconds by who makes an entry.

The package filelock locks it, by a descriptor that is opened here: the directory is everybody's, and what has the name
of the file may be something else. Other programs may take the same lock by ``filelock.FileLock``.

Nothing that may take long is done under it: no driver and no directory service is asked, and nobody sleeps. Who only
reads entries does not take it.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

from ..errors import LockTimeout, MissingPackageError, StateDirError
from ..host import procfs
from ..host.locks import Held
from ..host.programs import program_names
from ..host.signals import DeferredSignals
from .directory import HOST_LOCK, Directory, SharedDirectory, another_place, file_at, state_dir_path
from .entries import Entries

MINIMUM_PATIENCE = 10.0
"""Seconds that host.lock is waited for even by a claim that waits for no GPU."""

# Seconds of a pause between two tries, at least and at most. It grows with the wait, up to the second pair.
_FIRST_PAUSE = (0.001, 0.005)
_LONGEST_PAUSE = (0.020, 0.100)
_GROWTH = 300  # of a pause, as a multiple of the first, in each second of waiting

# Tries after the deadline. A process that holds host.lock at each of them and does not run is reported as keeping it.
_LAST_TRIES = 5


class Host:
    """The claims and the tickets of a host, as one process gets to know them, and host.lock. Use it in ``with``.

    Args:
        path: the state directory; None is :func:`~safe_gpu.coordination.directory.state_dir_path`. It is made where it
            is missing.

    Attributes:
        claims, queue: the entries, from the first :meth:`prepare` on.
        directory: the state directory.

    Example::

        with DeferredSignals() as signals, Host() as host:
            host.prepare()
            with host.locked(deadline, signals):
                living = host.claims.look(())
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or state_dir_path()
        self.claims: Entries
        self.queue: Entries
        self.directory: SharedDirectory | None = None

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directories; safe to call twice."""
        directory = self.directory
        self.directory = None
        if directory is not None:
            self.claims.directory.close()
            self.queue.directory.close()
            directory.close()

    def is_current(self, *, queue: bool = True) -> bool:
        """Return whether the path of the state directory still leads to these directories, with or without that of the
        queue. A cleaner may have removed them."""
        directory = self.directory
        return (
            directory is not None
            and directory.file == file_at(directory.path)
            and directory.still_has("claims", self.claims.directory.file)
            and (not queue or directory.still_has("queue", self.queue.directory.file))
        )

    def prepare(self, *, recheck_all: bool = False) -> None:
        """Open the directories, and open again those that were replaced. Where there may be many names, find out which
        claims live and which tickets there are, since others wait under host.lock.

        Args:
            recheck_all: whether the locks of all claims are checked, however few there are.

        Raises:
            StateDirError: the state directory cannot be used.
        """
        if self.directory is None or not self.is_current():
            self.close()
            self._open()
        self.claims.refresh()
        self.queue.refresh()
        if recheck_all or self.claims.may_be_many:
            self.claims.look_at_listed()
        if self.queue.may_be_many:
            self.queue.look_at_listed(())
        self.claims.make_room()
        self.queue.make_room()

    @contextmanager
    def locked(self, deadline: float | None, signals: DeferredSignals) -> Iterator[None]:
        """Hold host.lock.

        Args:
            deadline: ``time.monotonic()`` value; None waits without limit.
            signals: held back by the caller, who stores what it takes before it lets them go; they pass while this
                waits.

        Raises:
            LockTimeout: it was not free before the deadline; names the holder if one keeps it.
            StateDirError: its file cannot be used, or the state directory was removed or replaced meanwhile.
        """
        os.sched_yield()  # begin a new time slice: others wait while a holder of the lock is preempted
        held = self._lock(deadline, signals)
        try:
            yield
        finally:
            held.release()

    def _open(self) -> None:
        while self.directory is None:
            with ExitStack() as stack:
                above = stack.enter_context(SharedDirectory(self.path))
                try:
                    claims = stack.enter_context(_claims_in(above))
                    queue = stack.enter_context(Directory(above, "queue"))
                except StateDirError:
                    if os.fstat(above.fd).st_nlink == 0:
                        continue  # a cleaner has removed it, and nothing can be made in it
                    raise
                stack.pop_all()
                self.claims = Entries(claims)
                self.queue = Entries(queue)
                self.directory = above

    def _lock(self, deadline: float | None, signals: DeferredSignals) -> Held:
        directory = self.directory
        assert directory is not None
        _, unlock = _filelock()
        while True:
            fd, status = directory.open_known(HOST_LOCK, make=True)
            # Unlocked before it is closed: a child forked meanwhile has a copy of the descriptor and would keep it.
            held = Held(fd, file=(status.st_dev, status.st_ino), unlock=unlock)
            try:
                if not lock_file(fd, self.path):
                    self._wait_for_lock(fd, deadline, signals)
                if directory.still_has(HOST_LOCK, held.file):
                    return held
            except BaseException:
                held.release()
                raise
            held.release()  # a cleaner of /tmp took the file away meanwhile: lock what stands there now

    def _wait_for_lock(self, fd: int, deadline: float | None, signals: DeferredSignals) -> None:
        """Lock the open file, which somebody else has locked; errors as of :meth:`locked`."""
        import random

        uneven = random.Random().uniform  # the program's own sequence of random numbers stays as it is
        began = time.monotonic()
        suspicious_at = began + MINIMUM_PATIENCE
        holders: list[_LockHolder] = []  # at each try after the deadline
        while True:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                holders.append(_holder_of(fd))
                if len(holders) == _LAST_TRIES:
                    self._refuse_if_forbidden(fd, holders[-1])
                    raise self._timeout(holders)
            elif now >= suspicious_at:
                self._refuse_if_forbidden(fd, _holder_of(fd))
                suspicious_at = math.inf
            with signals.delivering():
                time.sleep(uneven(*_pause_after(now - began)))
            if lock_file(fd, self.path):
                return

    def _refuse_if_forbidden(self, fd: int, holder: _LockHolder) -> None:
        """Raise where nobody is seen to hold the lock, and flock(2) is what refuses it.

        Raises:
            StateDirError: the kernel answers EACCES. filelock takes that for a lock of somebody else's, as some file
                systems say it then; a sandbox always says it.
        """
        if holder.pid is not None:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno == errno.EACCES:
                raise _cannot_be_locked(self.path, errno.EACCES) from err
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def _timeout(self, holders: list[_LockHolder]) -> LockTimeout:
        """Return the error of a wait whose last tries found these holders."""
        path = os.path.join(self.path, HOST_LOCK)
        pid = holders[-1].pid
        load = os.getloadavg()[0]
        cpus = os.cpu_count() or 1
        if holders[-1].is_running or len(set(holders)) > 1 or (pid is None and load > 2 * cpus):
            what = "could not be taken in time, and no process keeps it: the host is overloaded "
            what += f"(load {load:.0f}, CPUs: {cpus}); try again, with a longer timeout"
            return LockTimeout(f"{path} {what}", path=path, pid=None, user=None, overloaded=True)
        if pid is None:
            what = "is locked by a process that cannot be seen from here (in another container?): try again, and if it "
            what += "stays, end that process"
            return LockTimeout(f"{path} {what}", path=path, pid=None, user=None, overloaded=False)
        user = procfs.user_of(pid)
        command = program_names(procfs.arguments_of(pid)) or "?"  # others read it, on a page too
        what = f"is held by process {pid} of {user or 'unknown'} ({command})"
        if procfs.is_stopped(pid):
            what += ", which is stopped: continue or end it"
        else:
            what += ": try again, or end it"
        return LockTimeout(f"{path} {what}", path=path, pid=pid, user=user, overloaded=False)


def _claims_in(above: SharedDirectory) -> Directory:
    try:
        return Directory(above, "claims", make=False)
    except FileNotFoundError:  # the first claim here
        with suppress(StateDirError):
            Directory(above, "history").close()  # where status notes what it sees held
        return Directory(above, "claims")


def lock_file(fd: int, path: str) -> bool:
    """Try once to lock host.lock in the state directory at this path; False where another open file holds the lock, or
    where the kernel answers EACCES.

    Raises:
        StateDirError: there are no locks. MissingPackageError: filelock is missing, or older than 3.30.
    """
    lock, _ = _filelock()
    try:
        return lock(fd, blocking=False)
    except OSError as err:
        raise _cannot_be_locked(path, err.errno) from err


def _cannot_be_locked(path: str, code: int | None) -> StateDirError:
    way_out = f"{another_place(path)}, on a local file system"
    what = f"{path}/host.lock cannot be locked ({os.strerror(code or 0)}): {way_out}"
    if code in (errno.EACCES, errno.EPERM):
        what += "; in a sandbox, allow flock(2)"
    return StateDirError(what, path=path, errno=code)


def _filelock() -> tuple[Callable[..., bool], Callable[[int], None]]:
    """Return what locks a descriptor, and what unlocks it. Only claims import the package, which takes a while.

    Raises:
        MissingPackageError: it is missing, or older than 3.30.
    """
    try:
        from filelock import lock_descriptor, unlock_descriptor
    except ImportError as err:
        raise MissingPackageError(
            f"the Python package filelock is missing or too old ({err}): pip install -U filelock"
        ) from err
    return lock_descriptor, unlock_descriptor


def _pause_after(waited: float) -> tuple[float, float]:
    """Return how long to pause between tries at host.lock, at least and at most, by the seconds waited. It is drawn
    anew each time, or crowds would go in step.

    The lock is held for microseconds, so pauses are short. The longer the wait, the larger the crowd: hundreds that
    pause for so little leave no CPU to the holder.
    """
    least, most = _FIRST_PAUSE
    growth = 1 + _GROWTH * waited
    return min(growth * least, _LONGEST_PAUSE[0]), min(growth * most, _LONGEST_PAUSE[1])


class _LockHolder(NamedTuple):
    """The living process that /proc/locks shows for a lock; None for none, or none that is seen here.

    Attributes:
        is_running: whether it runs or waits for a CPU.
    """

    pid: int | None = None
    is_running: bool = False


def _holder_of(fd: int) -> _LockHolder:
    inode = os.fstat(fd).st_ino
    for pid in procfs.flock_holders({inode}).get(inode, ()):
        if not procfs.has_ended(pid):
            return _LockHolder(pid, procfs.is_running(pid))
    return _LockHolder()
