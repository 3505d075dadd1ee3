"""The standard streams of a command."""

import os
import sys
from typing import TextIO

from ..host.procfs import printable_lines


def open_standard_streams() -> None:
    """Open the numbers 0 to 2 where they are closed: a lease would take one of them, and be printed to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def drop(stream: TextIO) -> None:
    """Discard what a stream still buffers and cannot write; the interpreter would try once more at exit."""
    fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, stream.fileno())
    os.close(fd)


def drop_errors() -> None:
    """Flush stderr, or discard what it buffers: with a broken stderr the interpreter would end with exit code 120."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        drop(sys.stderr)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def in_color(stream: TextIO) -> bool:
    """Return whether a stream is such a terminal, and the user wants colours."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


class Log:
    """The logger of a claim that a command makes: it prints warnings on stderr, and no steps."""

    def isEnabledFor(self, level: int) -> bool:
        """Return whether messages of a level are printed."""
        return level >= 30

    def info(self, message: str, *args: object, **_: object) -> None:
        """Do nothing."""

    def warning(self, message: str, *args: object, **_: object) -> None:
        """Print it on stderr."""
        say(f"warning: {message % args if args else message}")

    error = warning


def say(text: str) -> None:
    """Print a line, or a sentence and a list, on stderr; on a terminal its lines are broken between words."""
    lines = f"safe-gpu: {printable_lines(text)}".split("\n")
    try:
        if is_terminal(sys.stderr) and max(map(len, lines)) > (width := width_of(sys.stderr)):
            from textwrap import TextWrapper

            wrapper = TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
            lines = [part for line in lines for part in wrapper.wrap(line)]
        print("\n".join(lines), file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass  # nobody reads it


def print_json(value: object) -> None:
    """Print a document for programs; sets become sorted lists."""
    import json

    print(json.dumps(value, indent=2, default=sorted))


def columns() -> int:
    """Return the value of COLUMNS, else the width of the terminal that stdout is, else 80."""
    text = os.environ.get("COLUMNS", "")
    if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    return width_of(sys.stdout)


def width_of(stream: TextIO) -> int:
    """Return the width of the terminal that a stream is, else 80."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
