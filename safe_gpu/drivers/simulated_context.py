"""A process on a simulated GPU: an open, locked file, which the kernel closes when its process ends.

Nothing is guessed from pids, which may be recycled or belong to another container.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import ExitStack, suppress
from itertools import count

from ..coordination.files import StateDir, write_all
from ..coordination.records import read_bounded
from ..errors import StateDirError

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def is_alive(name: str, directory: int) -> bool:
    """Whether somebody holds the lock of this entry; if nobody does, it is removed where this user may."""
    try:
        fd = os.open(name, _OPEN_FILE, dir_fd=directory)
    except OSError:
        return False  # gone meanwhile, or not an entry at all
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


_contexts: set[SimulatedContext] = set()
_numbers = count()


def _forget() -> None:
    """In a forked child: the contexts are its parent's, and must not outlive that one through copies of the locks."""
    for context in _contexts:
        context._disown()
    _contexts.clear()


os.register_at_fork(after_in_child=_forget)


class SimulatedContext:
    """A live process on a simulated GPU; made by :meth:`SimulatedDriver.occupy`.

    It lives until it is closed (``with`` does), or its process ends or executes another program.

    Attributes: ``uuid`` of the device, ``pid`` as the driver shows it, ``memory`` in bytes.
    """

    def __init__(self, place: tuple[str, ...], uuid: str, memory: int, kind: str, pid: int) -> None:
        self.uuid = uuid
        self.pid = pid
        self.memory = memory
        with ExitStack() as stack:
            directory = _opened(stack, place, make=True)
            self._directory = os.dup(directory.fd)
            try:
                self._fd, self._name = _enter(directory, f"{uuid}.{pid}-{memory}-{kind}")
            except BaseException:
                os.close(self._directory)
                raise
        _contexts.add(self)

    def close(self) -> None:
        """Leave the GPU; safe to call twice, and without effect in a forked child, whose context it is not."""
        if self._fd < 0:
            return
        with suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory)
        self._disown()
        _contexts.discard(self)

    def _disown(self) -> None:
        for fd in (self._fd, self._directory):
            if fd >= 0:
                os.close(fd)
        self._fd = self._directory = -1

    def __enter__(self) -> SimulatedContext:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _enter(directory: StateDir, stem: str) -> tuple[int, str]:
    """Make the entry of a context and take its lock; returns its descriptor and name."""
    fd = -1
    try:
        while True:
            name = f"{stem}-{next(_numbers)}"
            try:
                fd = os.open(name, _OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory.fd)
            except FileExistsError:
                continue  # left by a dead process with our pid, of a user whose files we cannot remove
            os.fchmod(fd, 0o644)
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return fd, name
            # A poll came between, took it for a dead one's and removes it.
            os.close(fd)
            fd = -1
    except OSError as err:
        if fd >= 0:
            os.close(fd)
        raise StateDirError(
            f"the simulated host cannot write {directory.path} ({err.strerror}): free some space there, "
            "or set SAFE_GPU_DIR to another directory",
            path=directory.path,
            errno=err.errno,
        ) from err


def _opened(stack: ExitStack, place: tuple[str, ...], *, make: bool) -> StateDir:
    directory: StateDir | None = None
    for name in place:
        directory = stack.enter_context(StateDir(name, directory, make=make))
    assert directory is not None
    return directory


def trouble_of(place: tuple[str, ...], uuid: str) -> str:
    """The error with which a device refuses contexts; "" if it does not."""
    with suppress(OSError), ExitStack() as stack:
        return read_bounded(_opened(stack, place, make=False), f"{uuid}.bad", 4096).decode(errors="replace").strip()
    return ""


def set_trouble(place: tuple[str, ...], uuid: str, error: str) -> None:
    """Let a device refuse contexts with this error; "" makes it work again."""
    with ExitStack() as stack:
        directory = _opened(stack, place, make=True)
        if not error:
            directory.unlink(f"{uuid}.bad")
            return
        fd = directory.open_or_create(f"{uuid}.bad")
        try:
            write_all(fd, error.encode(), directory.path)
        finally:
            os.close(fd)
