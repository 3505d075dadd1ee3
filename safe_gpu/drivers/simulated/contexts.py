"""The processes on the GPUs of a simulated host: files that each of them keeps locked.

A file is empty, of mode 0644, and named ``<uuid>.<pid>-<bytes>-<kind>-<number>``; ``kind`` is ``compute``, ``graphics``
or ``mps``. Files that nobody locks were left by processes that have ended: they do not count, and a poll unlinks those
that it may. It finds out by trying a shared lock for a moment. So who makes a file locks it without blocking, and makes
another one where it is locked or has been unlinked meanwhile. Nothing is guessed from pids, which may be recycled or
belong to another container.
"""

import fcntl
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import count
from typing import NamedTuple

from ...coordination.directory import OPEN_FILE
from ...gpus.devices import GpuProcess
from ...host.locks import Held
from .tree import text_of

_NAME = re.compile(r"(.+)\.([0-9]{1,10})-([0-9]{1,15})-(compute|graphics|mps)-[0-9]+")

_numbers = count()  # of the contexts that this process makes


class ContextName(NamedTuple):
    """What the name of a file says of a process: the device, the number to show, bytes that it uses, and how."""

    uuid: str
    pid: int
    memory: int
    kind: str

    @classmethod
    def parse(cls, name: str) -> "ContextName | None":
        """Return what the name of a file says; None if the file is no process."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        return cls(uuid=found[1], pid=int(found[2]), memory=int(found[3]), kind=found[4])

    @property
    def stem(self) -> str:
        """The name of its files without the number."""
        return f"{self.uuid}.{self.pid}-{self.memory}-{self.kind}"


class DeviceState:
    """What is not as on an idle device.

    Attributes:
        illness: what the driver says against it; "" for nothing.
    """

    def __init__(self) -> None:
        self.illness = ""
        self._used: Counter[tuple[int, str]] = Counter()  # (pid, kind) -> bytes

    def add(self, context: ContextName) -> None:
        """Put a process there, or more memory of one."""
        self._used[context.pid, context.kind] += context.memory

    @property
    def memory(self) -> int:
        """Bytes that all of its processes use."""
        return self._used.total()

    @property
    def processes(self) -> list[GpuProcess]:
        """The processes on it, sorted by number."""
        return [GpuProcess(pid, kind, memory) for (pid, kind), memory in sorted(self._used.items())]


def read_states(directory: int, names: Iterable[str], uuids: Collection[str]) -> dict[str, DeviceState]:
    """Return the states of these devices, without those that are idle and well.

    Args:
        directory: that of the host, open.
        names: the files there.
    """
    states: dict[str, DeviceState] = {}
    for name in names:
        uuid, _, kind = name.rpartition(".")
        if uuid not in uuids:
            continue
        if kind == "ill":
            states.setdefault(uuid, DeviceState()).illness = text_of(name, directory)
            continue
        context = ContextName.parse(name)
        if context is not None and is_alive(name, directory):
            states.setdefault(uuid, DeviceState()).add(context)
    return states


def is_alive(name: str, directory: int) -> bool:
    """Return whether somebody holds the lock of this file; if nobody does, it is removed where this user may."""
    try:
        fd = os.open(name, OPEN_FILE, dir_fd=directory)
    except OSError:
        return False  # gone meanwhile, or not a file of a process at all
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        # Under our shared lock: its maker, if this is a context in the making, sees that the name is gone.
        with suppress(OSError):
            os.unlink(name, dir_fd=directory)
        return False
    finally:
        os.close(fd)


class SimulatedContext:
    """A live process on a simulated GPU; made by :meth:`~safe_gpu.drivers.simulated.driver.SimulatedDriver.occupy`.

    It lives until it is closed (``with`` does), or its process ends or executes another program.

    Args:
        directory: that of the host; belongs to this object from now on.

    Attributes: ``uuid`` of the device, ``pid`` as the driver shows it, ``memory`` in bytes.
    """

    def __init__(self, directory: Held, context: ContextName) -> None:
        self.uuid = context.uuid
        self.pid = context.pid
        self.memory = context.memory
        self._directory = directory
        self._name, self._lock = _make_locked(directory.fd, context.stem)

    def close(self) -> None:
        """Leave the GPU; safe to call twice, and without effect in a forked child, whose context it is not."""
        with suppress(OSError):
            self._lock.release(first=self._remove)
        self._directory.release()

    def _remove(self) -> None:
        os.unlink(self._name, dir_fd=self._directory.fd)

    def __enter__(self) -> "SimulatedContext":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _make_locked(directory: int, stem: str) -> tuple[str, Held]:
    """Make the file of a context and take its lock; return its name and its lock."""
    while True:
        name = f"{stem}-{next(_numbers)}"
        try:
            fd = os.open(name, OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory)
        except FileExistsError:
            continue  # left by a dead process with our pid, of a user whose files we cannot remove
        lock = Held(fd)
        try:
            os.fchmod(fd, 0o644)
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return name, lock
        except BaseException:
            lock.release()
            raise
        lock.release()  # a poll came between, took it for a dead one's and removes it
