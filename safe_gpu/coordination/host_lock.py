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

from ..errors import LockTimeout, MissingPackageError, StateDirError
from ..host import procfs
from ..host.locks import Held
from ..host.programs import program_names
from ..host.signals import DeferredSignals
from .directory import HOST_LOCK, Directory, SharedDirectory, another_place, file_at, state_dir_path
from .entries import Entries

MINIMUM_PATIENCE = 10.0
"""Seconds that host.lock is waited for even by a claim that waits for no GPU."""

# However large the crowd at host.lock, nobody pauses longer than this, times 1 to 5 ms.
_SLOWEST = 20

# Tries after the deadline. Who holds host.lock at each of them, and does not run, keeps it.
_LAST_TRIES = 5


class Host:
    """The claims and the tickets of a host, as one process gets to know them, and host.lock. Use it in ``with``.

    Args:
        path: the state directory; None is :func:`~safe_gpu.coordination.directory.state_dir_path`. It is made where it
            is missing.

    Attributes:
        claims, queue: the entries, from the first :meth:`look` on.
        directory: the state directory.

    Example::

        with DeferredSignals() as signals, Host() as host:
            host.look()
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
        directory, self.directory = self.directory, None
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

    def look(self, *, at_all: bool = False) -> None:
        """Open the directories, and those anew that were replaced. Where there may be many names, find out which claims
        live and which tickets there are, since others wait under host.lock.

        Args:
            at_all: whether all claims are asked whether they live, however few there are.

        Raises:
            StateDirError: the state directory cannot be used.
        """
        if self.directory is None or not self.is_current():
            self.close()
            self._open()
        self.claims.refresh()
        self.queue.refresh()
        if at_all or self.claims.may_be_many:
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
                self.claims, self.queue, self.directory = Entries(claims), Entries(queue), above

    def _lock(self, deadline: float | None, signals: DeferredSignals) -> Held:
        directory = self.directory
        assert directory is not None
        _, unlock = _filelock()
        while True:
            fd, status = directory.open_known(HOST_LOCK, make=True)
            # Unlocked before it is closed: a child forked meanwhile has a copy of the descriptor and would keep it.
            held = Held(fd, file=(status.st_dev, status.st_ino), unlock=unlock)
            try:
                pauses = _pauses()
                holders: list[tuple[int | None, bool]] = []
                suspicious_at = time.monotonic() + MINIMUM_PATIENCE
                while not lock_file(fd, self.path):
                    now = time.monotonic()
                    if deadline is not None and now >= deadline:
                        holders.append(_holder(fd))
                        if len(holders) == _LAST_TRIES:
                            self._refuse_if_forbidden(fd, holders[-1][0])
                            raise self._timeout(holders)
                    elif now >= suspicious_at:
                        self._refuse_if_forbidden(fd, _holder(fd)[0])
                        suspicious_at = math.inf
                    with signals.delivering():
                        time.sleep(next(pauses))
                if directory.still_has(HOST_LOCK, held.file):
                    return held
            except BaseException:
                held.release()
                raise
            held.release()  # a cleaner of /tmp took the file away meanwhile: lock what stands there now

    def _refuse_if_forbidden(self, fd: int, holder: int | None) -> None:
        """Raise where nobody is seen to hold the lock, and flock(2) is what refuses it.

        Raises:
            StateDirError: the kernel answers EACCES. filelock takes that for a lock of somebody else's, as some file
                systems say it then; a sandbox says it for good.
        """
        if holder is not None:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            if err.errno == errno.EACCES:
                raise _cannot_be_locked(self.path, errno.EACCES) from err
        else:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def _timeout(self, holders: list[tuple[int | None, bool]]) -> LockTimeout:
        """Return the error of a wait whose last tries found these holders, as of :func:`_holder`."""
        path = os.path.join(self.path, HOST_LOCK)
        pid, running = holders[-1]
        load, cpus = os.getloadavg()[0], os.cpu_count() or 1
        overloaded = running or len(set(holders)) > 1 or (pid is None and load > 2 * cpus)
        user = None
        if overloaded:
            pid = None
            what = "could not be taken in time, and no process keeps it: the host is overloaded "
            what += f"(load {load:.0f}, CPUs: {cpus}); try again, with a longer timeout"
        elif pid is None:
            what = "is locked by a process that cannot be seen from here (in another container?): try again, and if it "
            what += "stays, end that process"
        else:
            user = procfs.user_of(pid)
            command = program_names(procfs.arguments_of(pid)) or "?"  # others read it, on a page too
            way_out = ", which is stopped: continue" if procfs.is_stopped(pid) else ": try again,"
            what = f"is held by process {pid} of {user or 'unknown'} ({command}){way_out} or end it"
        return LockTimeout(f"{path} {what}", path=path, pid=pid, user=user, overloaded=overloaded)


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
        yield min(1 + 300 * waited, _SLOWEST) * uneven(0.001, 0.005)


def _holder(fd: int) -> tuple[int | None, bool]:
    """Return the living process that /proc/locks shows for a lock, None for none, and whether it runs or waits for a
    CPU."""
    inode = os.fstat(fd).st_ino
    pid = next((pid for pid in procfs.flock_holders({inode}).get(inode, ()) if not procfs.has_ended(pid)), None)
    return pid, pid is not None and procfs.is_running(pid)
