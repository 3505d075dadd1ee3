"""The queue: first come, first served, without a daemon.

A ticket is a file ``queue/SEQ.ticket`` that its waiter keeps locked; the number orders, the lock says that the waiter
lives. Whoever competes for the same GPUs and came later sleeps on the ticket before it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import procfs
from ..errors import SafeGpuError, StateDirError
from .files import StateDir, state_dir_path, write_all
from .host_lock import MINIMUM_PATIENCE, HostLock, LockedHost, fork_guard, lock_file, unlock_file

__all__ = ["Ahead", "Demand", "Ticket", "Waiter", "live_tickets"]

_SUFFIX = ".ticket"

# How often to look where no thread can be had to sleep in.
_THREADLESS_PAUSE = 0.1


class Demand(NamedTuple):
    """What a waiter wants, as far as others must know it.

    ``gpus`` are the lease names' stems that it could use (UUIDs, or ``UUID.inner`` inside a scope); ``min_memory`` in
    bytes, None where it does not matter.
    """

    nb_gpus: int
    gpus: frozenset[str]
    min_memory: int | None = None

    def competes_with(self, other: Demand) -> bool:
        """Whether both could end up wanting the same GPU."""
        return not self.gpus.isdisjoint(other.gpus)


class Ticket(NamedTuple):
    """A place in the queue as others see it. ``since``: Unix seconds; ``demand`` None: unreadable."""

    seq: int
    inode: int
    pid: int
    user: str
    since: float
    demand: Demand | None

    def competes_with(self, demand: Demand) -> bool:
        """Whether it wants any of the same GPUs; a ticket that cannot be read is taken to."""
        return self.demand is None or self.demand.competes_with(demand)


class Ahead:
    """The nearest live competitor ahead, with a descriptor of its ticket to sleep on, owned by whoever gets this."""

    def __init__(self, ticket: Ticket, fd: int) -> None:
        self.ticket = ticket
        self.fd = fd

    def close(self) -> None:
        """Close the descriptor, unless a sleeper took it over; safe to call twice."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def lets_pass(self, may_pass: Callable[[Demand], bool]) -> bool:
        """Whether it may be passed; it is closed then."""
        try:
            passes = self.ticket.demand is not None and may_pass(self.ticket.demand)
        except BaseException:
            self.close()
            raise
        if passes:
            self.close()
        return passes


def _encode(pid: int, demand: Demand) -> bytes:
    import json

    request = {"nb_gpus": demand.nb_gpus, "gpus": sorted(demand.gpus), "min_memory": demand.min_memory}
    user = procfs.user_name(os.geteuid())
    return json.dumps({"pid": pid, "user": user, "request": request, "since": round(time.time(), 3)}).encode() + b"\n"


def _decode(seq: int, inode: int, data: bytes) -> Ticket:
    import json

    try:
        raw: dict[str, Any] = json.loads(data)
        request = raw["request"]
        memory = request.get("min_memory")
        demand = Demand(
            int(request["nb_gpus"]), frozenset(map(str, request["gpus"])), None if memory is None else int(memory)
        )
        pid, since = int(raw["pid"]), float(raw["since"])
        if not 0 < pid < 1 << 31:
            pid = 0
        return Ticket(seq, inode, pid, procfs.printable(str(raw["user"])), since if 0 <= since < 1e11 else 0.0, demand)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Ticket(seq, inode, 0, "unknown", 0.0, None)


def _numbers(queue: StateDir) -> list[int]:
    """The number of every ticket file, in order."""
    stems = (name[: -len(_SUFFIX)] for name in queue.names() if name.endswith(_SUFFIX))
    return sorted(int(stem) for stem in stems if stem.isdecimal() and stem.isascii())


def _open(queue: StateDir, seq: int, known: Ticket | None = None) -> tuple[Ticket, int] | None:
    """A ticket and a descriptor of its file; None where it is gone or closed to us.

    A ticket that we may not open was left by a process killed while it made it: nobody else is making one now.

    Args:
        known: what was read of it before; its file is not read again.
    """
    try:
        fd = queue.open(f"{seq}{_SUFFIX}")
    except StateDirError as err:
        if err.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        return None
    if fd is None:
        return None
    inode = os.fstat(fd).st_ino
    if known is None:
        return _decode(seq, inode, os.pread(fd, 1 << 20, 0)), fd
    if known.inode != inode:  # the queue was cleaned away and began anew: whoever has the number now came later
        os.close(fd)
        return None
    return known, fd


def _is_live(host: LockedHost, seq: int, fd: int) -> bool:
    """Whether its waiter holds it; the dead are unlinked where this user may."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    unlock_file(fd)
    host.queue.unlink(f"{seq}{_SUFFIX}")
    return False


def live_tickets(host: LockedHost) -> list[Ticket]:
    """Everyone who waits, first come first."""
    found = []
    for seq in _numbers(host.queue):
        if (seen := _open(host.queue, seq)) is not None:
            ticket, fd = seen
            try:
                if _is_live(host, seq, fd):
                    found.append(ticket)
            finally:
                os.close(fd)
    return found


class Waiter:
    """This process's place in the queue, from the first look on; it holds a ticket only after :meth:`join`."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self._seq: int | None = None
        self._fd = -1
        # The numbers ahead that may still stand in the way, in order. None comes to be ahead of a ticket, so with one
        # they only grow fewer: among hundreds of waiters, to list the queue takes its time.
        self._before: list[int] = []
        self._highest = 0
        self._listed: LockedHost | None = None
        self._read: dict[int, Ticket] = {}
        self._prepared: int | None = None

    @property
    def queued(self) -> bool:
        """Whether it holds a ticket."""
        return self._seq is not None

    def join(self, host: LockedHost) -> None:
        """Take a ticket behind everyone who is there, where it has none yet.

        Raises:
            StateDirError: no room, or the queue is closed to us.
        """
        if self.queued:
            return
        self._list(host)
        seq = self._highest + 1
        prepared, self._prepared = self._prepared, None
        fd = host.queue.create(name := f"{seq}{_SUFFIX}", prepared)
        if fd is None:  # host.lock is held and the number was free: somebody meddles
            raise StateDirError(f"{host.queue.path}/{name} appeared while host.lock was held", path=host.queue.path)
        try:
            lock_file(fd)
            if not os.fstat(fd).st_size:
                write_all(fd, self._line(), os.path.join(host.queue.path, name))
        except BaseException:
            host.queue.unlink(name)
            os.close(fd)
            raise
        fork_guard.add(fd)
        self._seq, self._fd = seq, fd

    def prepare(self) -> None:
        """Make a ticket ready: to make a file takes longer than to lease a GPU, and a crowd would wait meanwhile.

        It has no name and means nothing until :meth:`join`.
        """
        if self.queued or self._prepared is not None:
            return
        with StateDir(state_dir_path()) as root, StateDir("queue", root) as queue:
            try:
                self._prepared = queue.prepare()
            except OSError:
                return  # said by join, where it still matters
            if self._prepared is not None:
                write_all(self._prepared, self._line(), queue.path)

    def _line(self) -> bytes:
        return _encode(os.getpid(), self.demand)

    def _list(self, host: LockedHost) -> None:
        """Find out who is there, once for each hold of host.lock."""
        if self._listed is not host:
            self._listed = host
            self._before = _numbers(host.queue)
            self._highest = self._before[-1] if self._before else 0

    def ahead(self, host: LockedHost, may_pass: Callable[[Demand], bool]) -> Ahead | None:
        """The nearest live ticket ahead that competes and may not be passed; without a ticket, all are ahead."""
        if not self.queued:
            self._list(host)
        never: set[int] = set()
        try:
            for seq in reversed(self._before):
                competitor = self._competitor(host, seq)
                if competitor is None:
                    never.add(seq)
                elif not competitor.lets_pass(may_pass):
                    return competitor
            return None
        finally:
            if never:
                self._before = [seq for seq in self._before if seq not in never]

    def _competitor(self, host: LockedHost, seq: int) -> Ahead | None:
        """The live ticket with this number, where it competes; None where it does not, and then it never will."""
        seen = _open(host.queue, seq, self._read.get(seq))
        if seen is None:
            return None
        ticket, fd = seen
        if not (ticket.competes_with(self.demand) and _is_live(host, seq, fd)):
            os.close(fd)
            return None
        if ticket.demand is not None:
            self._read[seq] = ticket
        return Ahead(ticket, fd)

    def position(self) -> int:
        """1 for the head of those who compete with it, counting itself.

        Reads tickets and probes none, so it needs no lock and holds up nobody; one that died a moment ago may count.
        """
        with StateDir(state_dir_path()) as root, StateDir("queue", root) as queue:
            present = set(_numbers(queue))
            return 1 + sum(self._stands(queue, seq) for seq in self._before if seq in present)

    def _stands(self, queue: StateDir, seq: int) -> bool:
        ticket = self._read.get(seq)
        if ticket is None:
            seen = _open(queue, seq)
            if seen is None:
                return False
            ticket, fd = seen
            os.close(fd)
            if ticket.demand is not None:  # without host.lock, it may just not be written yet
                self._read[seq] = ticket
        return ticket.competes_with(self.demand)

    def sleep_behind(self, ahead: Ahead, seconds: float) -> bool:
        """Sleep until that ticket goes (True), or so many seconds have passed. Takes over the descriptor."""
        status = os.fstat(ahead.fd)
        key = (os.getpid(), status.st_dev, status.st_ino)
        sleeper = _sleepers.get(key)
        if sleeper is None or sleeper.done.is_set():
            fd, ahead.fd = ahead.fd, -1
            try:
                sleeper = _Sleeper(key, fd)
            except RuntimeError:  # no room for one more thread (ulimit -u, h_vmem): look now and then
                time.sleep(min(seconds, _THREADLESS_PAUSE))
                return True
        ahead.close()
        return sleeper.done.wait(seconds)

    def leave(self) -> None:
        """Give the ticket back; safe to call twice, and without one."""
        if self._seq is None:
            self._close()
            return
        try:
            with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
                self.abandon(host)
        except SafeGpuError:
            pass
        finally:
            self._close()  # an unlocked file counts for nothing, and the next one who passes removes it

    def abandon(self, host: LockedHost) -> None:
        """Give the ticket back, host.lock being held already."""
        if self._seq is not None and self._fd in fork_guard and host.queue.is_current(self._name, self._fd):
            host.queue.unlink(self._name)
        self._close()

    @property
    def _name(self) -> str:
        return f"{self._seq}{_SUFFIX}"

    def _close(self) -> None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            os.close(prepared)
        fd, self._fd, self._seq = self._fd, -1, None
        if fd in fork_guard:  # in a forked child it is not: the ticket is its parent's, the descriptor is closed
            fork_guard.discard(fd)
            unlock_file(fd)
            os.close(fd)


class _Sleeper:
    """Waits in a daemon thread for one lock: flock(2) knows no deadline, and a thread can be left behind.

    Whoever sleeps on that lock next finds the one that was left behind, so that there is never more than one for each.
    """

    def __init__(self, key: tuple[int, int, int], fd: int) -> None:
        import threading

        self.key = key
        self.done = threading.Event()
        fork_guard.add(fd)
        try:
            threading.Thread(target=self._run, args=(fd,), name="safe_gpu-waiter", daemon=True).start()
        except RuntimeError:
            fork_guard.discard(fd)
            os.close(fd)
            raise
        _sleepers[key] = self

    def _run(self, fd: int) -> None:
        import fcntl

        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            unlock_file(fd)
        except OSError:
            pass  # looked at anew by whoever waits
        finally:
            fork_guard.discard(fd)
            os.close(fd)
            self.done.set()
            _sleepers.pop(self.key, None)


_sleepers: dict[tuple[int, int, int], _Sleeper] = {}
"""Process, device and inode -> who sleeps on that ticket."""
