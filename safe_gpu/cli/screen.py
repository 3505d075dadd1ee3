"""A picture on a terminal's second screen, redrawn in place."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J"  # the second screen, without a cursor

_LEAVE = "\x1b[?25h\x1b[?1049l"


@contextmanager
def alternate_screen() -> Iterator[Callable[[str, str], None]]:
    """Give a function that shows a head and a text on the terminal's second screen.

    However that ends, and while it is suspended, the first screen is back, and the last text stays there.
    """
    import signal

    from ..coordination.signals import unwind_on_signals

    picture = last = ""

    def write(text: str) -> None:  # past the buffer of stdout, in which an exception would leave a part
        data = text.encode(sys.stdout.encoding, "replace")
        while data:
            data = data[os.write(1, data) :]

    def show(head: str, text: str) -> None:
        nonlocal picture, last
        picture, last = redrawn(head + text, os.get_terminal_size(1).lines or 24), text
        write(picture)

    def suspend(number: int, frame: object) -> None:
        write(_LEAVE + last)
        signal.signal(number, before)
        os.kill(os.getpid(), number)
        signal.signal(number, suspend)
        write(_ENTER + picture)

    before = signal.getsignal(signal.SIGTSTP)
    with unwind_on_signals():
        try:
            signal.signal(signal.SIGTSTP, suspend)
            write(_ENTER)
            yield show
        finally:
            write(_LEAVE + last)


def redrawn(text: str, rows: int) -> str:
    """Return what puts this text over the one before it on a terminal with that many rows, without clearing it first:
    an empty screen between two pictures flickers.
    """
    lines = text.splitlines()
    if len(lines) >= rows:
        kept = max(0, rows - 2)
        lines = [*lines[:kept], f"... {len(lines) - kept} more lines"][: rows - 1]
    return "\x1b[H" + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J"
