"""Pictures that are shown one after the other: on the terminal's second screen, or as lines."""

import os
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Thread
from typing import Any

from ..host.signals import unwind_on_signals
from ..wording.text import cut
from .output import columns, is_terminal, print_lines

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J"  # the second screen, without a cursor

_LEAVE = "\x1b[?25h\x1b[?1049l"

_LOCAL_MODES = 3  # their place in what tcgetattr() returns

_ROWS = 24  # of a terminal that does not report how many it has


def watching(interval: float, *, as_lines: bool) -> AbstractContextManager[Callable[[str], None]]:
    """Give a function that shows one picture after the other: on a terminal in place, elsewhere with a line above.

    Args:
        interval: seconds between two of them.
        as_lines: print nothing but what is given, such as documents for programs.
    """

    def head() -> str:
        return cut(f"{time.strftime('%H:%M:%S')}, every {interval:g} s (Ctrl-C ends)", columns())

    def print_with_head(text: str) -> None:
        print_lines(f"{head()}\n{text}\n")

    if as_lines:
        return nullcontext(print_lines)
    if not is_terminal(sys.stdout):
        return nullcontext(print_with_head)
    return _on_second_screen(head)


@contextmanager
def _on_second_screen(head: Callable[[], str]) -> Iterator[Callable[[str], None]]:
    """Show pictures on the terminal's second screen, where ``q`` is as Ctrl-C.

    However that ends, the first screen is back, and the last picture stays there. It cannot be suspended.
    """
    screen = _SecondScreen(head)
    with unwind_on_signals():
        try:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)
            screen.enter()
            Thread(target=_interrupt_at_q, daemon=True).start()
            yield screen.show
        finally:
            screen.leave()


class _SecondScreen:
    """The second screen of the terminal that standard output is.

    Args:
        head: returns the line above each picture.
    """

    def __init__(self, head: Callable[[], str]) -> None:
        self._head = head
        self._last = ""
        self._modes_before = termios.tcgetattr(1)

    def enter(self) -> None:
        """Show it, empty; keys that are typed are neither shown nor kept until the end of a line."""
        modes = list(self._modes_before)
        modes[_LOCAL_MODES] &= ~(termios.ICANON | termios.ECHO)
        self._switch(modes, _ENTER)

    def show(self, text: str) -> None:
        """Show a picture in place of the one before it."""
        self._last = f"{text}\n"
        rows = os.get_terminal_size(1).lines or _ROWS
        _write(redrawn(f"{self._head()}\n{text}", rows))

    def leave(self) -> None:
        """Show the first screen again, and the last picture below what was there."""
        self._switch(self._modes_before, _LEAVE + self._last)

    def _switch(self, modes: list[Any], text: str) -> None:
        with suppress(termios.error):  # in the background of a shell that has gone
            termios.tcsetattr(1, termios.TCSAFLUSH, modes)
        _write(text)


def _write(text: str) -> None:
    """Write past the buffer of stdout, in which an exception would leave a part."""
    data = text.encode(sys.stdout.encoding, "replace")
    while data:
        written = os.write(1, data)
        data = data[written:]


def _interrupt_at_q() -> None:
    """Interrupt this process as Ctrl-C does, once ``q`` is typed, or the terminal has gone."""
    with suppress(OSError):
        while os.read(1, 1) not in (b"q", b"Q", b""):
            pass
        os.kill(os.getpid(), signal.SIGINT)


def redrawn(text: str, rows: int) -> str:
    """Return what puts this text over the one before it on a terminal with that many rows, without clearing it first:
    an empty screen between two pictures flickers.
    """
    lines = text.removesuffix("\n").split("\n")
    if len(lines) >= rows:
        kept = max(0, rows - 2)
        lines = [*lines[:kept], f"... {len(lines) - kept} more lines"]
        lines = lines[: rows - 1]
    overwritten = "".join(f"{line}\x1b[K\n" for line in lines)
    return f"\x1b[H{overwritten}\x1b[J"
