"""What a command writes: lines on its standard streams, errors, and files replaced whole."""

import os
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from errno import EBADF, EDQUOT, EFBIG, EIO, ENOSPC
from io import TextIOWrapper
from typing import TextIO

from ..errors import SafeGpuError
from ..host.foreign_files import printable_lines
from ..host.procfs import open_files
from ..wording.text import in_brackets

EX_USAGE = 2


class CommandError(SafeGpuError):
    """The command cannot be run; ``code`` is what shells exit with: 127 not found, 126 found and not runnable."""

    def __init__(self, message: str = "", *, code: int = 127) -> None:
        super().__init__(message)
        self.code = code


def open_standard_streams() -> None:
    """Open the numbers 0 to 2 where they are closed: an entry would take one of them, and be printed to.

    A line is one write(2), with PYTHONUNBUFFERED too, so that the lines of parallel jobs do not run together.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def drop(stream: TextIO) -> None:
    """Discard what a stream still buffers and cannot write; the interpreter would try once more at exit."""
    fd = os.open(os.devnull, os.O_WRONLY)
    os.dup2(fd, stream.fileno())
    os.close(fd)


def why_unwritten(err: OSError) -> str:
    """Return the text of an error; of a failed write without the name of a file, with that of standard output."""
    if err.filename is not None or err.errno not in (ENOSPC, EDQUOT, EFBIG, EIO, EBADF):
        return str(err)
    files = open_files(os.getpid()) or {}
    name = in_brackets(files.get(1))
    return f"standard output{name} cannot be written: {err.strerror}"


def drop_errors() -> None:
    """Flush stderr, or discard what it buffers: with a broken stderr the interpreter would end with exit code 120."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        drop(sys.stderr)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    with suppress(ValueError):  # closed
        return stream.isatty() and os.environ.get("TERM") != "dumb"
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
        if args:
            message = message % args
        say(f"warning: {message}")

    error = warning


def say(text: str) -> None:
    """Print a line, or a sentence and a list, on stderr; on a terminal its lines are broken between words."""
    lines = f"safe-gpu: {printable_lines(text)}".split("\n")
    with suppress(OSError, ValueError):  # nobody reads it
        if is_terminal(sys.stderr):
            width = width_of(sys.stderr)
            if any(len(line) > width for line in lines):
                lines = _broken(lines, width)
        print_lines("\n".join(lines), sys.stderr)


def _broken(lines: Sequence[str], width: int) -> list[str]:
    """Return these lines, broken between words where they are longer than that."""
    from textwrap import TextWrapper

    wrapper = TextWrapper(width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    broken = []
    for line in lines:
        broken += wrapper.wrap(line)
    return broken


def print_lines(text: str, stream: TextIO | None = None) -> None:
    """Print lines on stdout or this stream with one write(2), where print() makes two: text and newline."""
    (stream or sys.stdout).write(f"{text}\n")


def print_json(value: object) -> None:
    """Print a document for programs; sets become sorted lists."""
    import json

    print_lines(json.dumps(value, indent=2, default=sorted))


def columns() -> int:
    """Return the value of COLUMNS, else the width of the terminal that stdout is, else 80."""
    text = os.environ.get("COLUMNS", "")
    if text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0:
        return int(text)
    return width_of(sys.stdout)


def is_piped() -> bool:
    """Return whether another program reads what is printed, or a file takes it: names are whole there."""
    return not sys.stdout.isatty()


def width_of(stream: TextIO) -> int:
    """Return the width of the terminal that a stream is, else 80."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 80
    return 80


def write_whole(path: str, content: str | bytes) -> None:
    """Write a file of mode 0644 under another name in the same directory, and rename it into place.

    Raises:
        OSError: it cannot be written there, or would replace what is no regular file; nothing is left behind.
    """
    from tempfile import mkstemp

    if isinstance(content, str):
        content = content.encode()
    path = os.path.abspath(path)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(f"{path} exists and is not a regular file, so it is not replaced: name another file")
    directory, name = os.path.split(path)
    try:
        fd, temporary = mkstemp(".tmp", f".{name}.", directory)  # no reader takes it for a metrics file
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o644)
                file.write(content)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as err:
        raise OSError(f"{path} cannot be written: {err.strerror}") from err


def write_output(text: str, path: str | None) -> None:
    """Write a file whole, the value of ``--output``; print the text for None and ``-``.

    Raises:
        OSError: as of :func:`write_whole`.
    """
    if path in (None, "-"):
        sys.stdout.write(text)
    else:
        write_whole(path, text)
