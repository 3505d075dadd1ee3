"""The line that tells a user where a wait stands."""

from __future__ import annotations

import os
import time
from _thread import allocate_lock
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from ..wording.text import cut
from .output import is_terminal, width_of

if TYPE_CHECKING:
    from threading import Event, Thread

    from ..claim.report import WaitStatus

_PROGRAM = "safe-gpu: "

_ERASE = "\r\x1b[K"

_ERASE_ABOVE = "\x1b[A\x1b[K"

_LEAST_FOR_HOLDERS = 40  # columns

_STOPPED = 3.0  # seconds without a tick, which a process has that was stopped


class WaitLine:
    """Shows the news of a wait on a stream; on a terminal as a line with a running clock, and a second one of holders
    where they do not fit, wiped at the end. A job in the background writes lines there as into a file.

    A stream that fails (a terminal that was closed, a pipe that nobody reads) costs the news, not the place in the
    queue.

    Args:
        quiet: show nothing.
        hint: mention --for once.

    Attributes:
        waited: whether there was any news.
    """

    def __init__(self, stream: TextIO, *, quiet: bool = False, hint: bool = False) -> None:
        self.waited = False
        self._stream = stream
        self._quiet = quiet
        self._hint = hint
        self._live = is_terminal(stream) and _is_in_front(stream)
        self._began = time.monotonic()
        self._drawn = self._began
        self._status: WaitStatus | None = None
        self._thread: Thread | None = None
        self._ended: Event | None = None
        self._lock = allocate_lock()  # held from erasing to writing
        self._rows = 0  # of the terminal, that show the news

    def __enter__(self) -> WaitLine:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ended is not None and self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._draw(live=False)

    @property
    def seconds(self) -> float:
        """Since the wait began."""
        return time.monotonic() - self._began

    def show(self, status: WaitStatus) -> None:
        """Tell the user where the wait stands."""
        is_first = not self.waited
        self.waited = True
        if self._quiet:
            return
        self._status = status
        if not self._live:
            self._draw(self._report())
        elif self._thread is None:
            self._start_ticking()
        # Not at once, as most waits are short; but behind another waiter it may help at once.
        if self._hint and (not is_first or status.ahead is not None):
            self._hint = False
            if _hold_is_unknown():
                self._draw(f"{_PROGRAM}tip: with --for 30m a short job may start earlier\n")

    def note(self, text: str) -> None:
        """Tell something else of the wait, such as a driver that takes long, as a line of its own."""
        if not self._quiet:
            self._draw(f"{_PROGRAM}{text}\n", live=self._status is not None)

    def _start_ticking(self) -> None:
        import threading

        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="safe_gpu-waitline", daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        assert self._ended is not None
        self._draw()
        while not self._ended.wait(1.0):
            self._draw()

    def _draw(self, note: str = "", *, live: bool = True) -> None:
        """Erase the live line where it was written, and write a note, as a line of its own, and the live line.

        A shell shares the terminal's lines with a job in the background, and has used them while a job was stopped:
        what is there then is not ours to erase.
        """
        with self._lock:
            is_in_front = self._live and _is_in_front(self._stream)
            now = time.monotonic()
            was_stopped = now - self._drawn >= _STOPPED
            erase = ""
            if is_in_front and self._rows > 0 and not was_stopped:
                erase = _ERASE + _ERASE_ABOVE * (self._rows - 1)
            line = ""
            if live and is_in_front:
                assert self._status is not None
                line = text_for_terminal(self._status, waited=self.seconds, width=width_of(self._stream) - 1)
            self._rows = 0
            if line:
                self._rows = line.count("\n") + 1
            self._drawn = now
            with suppress(OSError, ValueError):
                self._stream.write(erase + note + line)
                self._stream.flush()

    def _report(self) -> str:
        """Return where the wait stands as a line of its own."""
        from ..claim.report import waiting_message

        assert self._status is not None
        return f"{_PROGRAM}{waiting_message(self._status, waited=self.seconds)}\n"


def text_for_terminal(status: WaitStatus, *, waited: float, width: int) -> str:
    """Return what a terminal of this width shows of a wait without breaking a line: one line, or two."""
    from ..claim.report import holders_line, waiting_message

    room = width - len(_PROGRAM)
    holders = ""
    if room >= _LEAST_FOR_HOLDERS:
        holders = holders_line(status, time.time())
    if not holders or len(waiting_message(status, waited=waited)) <= room:
        line = _PROGRAM + waiting_message(status, waited=waited, width=room)
        return line[: max(0, width)]
    first = _PROGRAM + waiting_message(status, waited=waited, width=room, holders=False)
    second = " " * len(_PROGRAM) + cut(holders, room)
    return f"{first}\n{second}"


def _is_in_front(stream: TextIO) -> bool:
    """Return whether this process may use a terminal's lines: it is no job in the background of a shell there."""
    with suppress(OSError, ValueError):  # not the terminal of this session, or closed
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    return True


def _hold_is_unknown() -> bool:
    """Return whether neither a variable nor a batch job tells for how long the GPUs will be held."""
    from ..claim.arguments import DEFAULT, parse_hold_for
    from ..schedulers.job import current

    return parse_hold_for(DEFAULT, os.environ, current(os.environ)).at(time.time()) is None
