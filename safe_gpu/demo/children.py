"""Child processes that end with their parent, and temporary directories that are always removed."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import FrameType


# Signals that end the parent, which then ends its children. They are blocked while a child is started.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Delay before an interrupt is repeated, if an exception would have been lost, seconds.
_AGAIN = 0.01
_PR_SET_PDEATHSIG = 1  # prctl(2)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Inside this context Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt once; later signals are ignored.

    This works only in the main thread, and only for signals at their default. After the context SIGTERM and SIGHUP
    kill the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    wanted = (*_SIGNALS, signal.SIGALRM)
    before = {number: handler for number in wanted if (handler := signal.getsignal(number)) in defaults}
    caught: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            caught.append(number)
        if _in_destructor(frame):
            if signal.SIGALRM in before:  # else only a further signal can interrupt
                signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught and caught[0] != signal.SIGINT:
            os.kill(os.getpid(), caught[0])


def _in_destructor(frame: FrameType | None) -> bool:
    """Whether the frame is inside a ``__del__``. Python prints exceptions raised there and continues."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def children_end() -> Iterator[None]:
    """Kill and join at the end all children that were started inside, even if an interrupt came during a start."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        started = set(multiprocessing.active_children()) - before
        for process in started:
            process.kill()
        for process in started:
            process.join()


@contextmanager
def scratch_directory(prefix: str, parent: str | None = None) -> Iterator[str]:
    """A directory for this user only, with a random name; it is removed at the end with its content.

    ``tempfile.TemporaryDirectory`` does not remove its directory if an interrupt comes while it is created or removed.
    Here a second attempt follows, and :func:`cleaned_up` allows only one interrupt.
    """
    path = os.path.join(parent or tempfile.gettempdir(), prefix + os.urandom(8).hex())
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        try:
            shutil.rmtree(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)


class Child:
    """A forked process that runs ``work(line, *arguments)``.

    It ignores SIGINT, which a terminal sends to both processes: the parent handles it and ends the child.

    Attributes:
        line: the parent's end of a pipe to the child; EOFError there means that the child has exited.
        pid: its process id.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.line, far_end = context.Pipe()
        self._process = context.Process(target=_child_main, args=(os.getpid(), work, far_end, *arguments), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        far_end.close()
        self.pid = self._process.pid or 0

    def finish(self, seconds: float) -> int | None:
        """Wait at most ``seconds`` for its exit; returns its exit code, or None if it still runs."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it; safe to call twice, and after its exit."""
        self._process.kill()
        self._process.join()
        self.line.close()


def _child_main(parent: int, work: Callable[..., None], line: Connection[Any, Any], *arguments: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent exited before prctl
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with suppress(EOFError, BrokenPipeError):  # the parent has closed the pipe
        work(line, *arguments)
