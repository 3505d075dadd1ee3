"""Bounded reading of files that others have written, and of the values in them.

Reading takes bounded memory, a FIFO does not block it, and an exception of a signal handler leaves no descriptor open.
"""

import os
import re
from functools import partial
from io import FileIO

MOST_BYTES = 1 << 16
"""Bytes that are read of one file of a process, or of a file that other users may write. They can make it larger."""

# O_NONBLOCK is for a FIFO, and for a file on which its owner holds a file lease (F_SETLEASE).
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# The most bytes of one read(2): who asks for very many reserves no memory before there is something to read.
_PART = 1 << 16

_LONGEST_LIST = 1024

# No time of ours is later (the year 5138); time.localtime fails on numbers that JSON allows.
_LATEST = 1e11


def open_to_read(path: str, flags: int = 0, dir_fd: int | None = None) -> FileIO:
    """Return the open file; ``flags`` are more of those of os.open(), such as O_NOFOLLOW, and ``dir_fd`` is as there.

    Raises:
        OSError: it cannot be opened, or it is a directory. ValueError: the path has a NUL.
    """
    # next() opens the file and wraps it in one call of C: a signal handler that raises between two calls, as that of
    # Ctrl-C does, would leave the descriptor open.
    open_in_directory = partial(os.open, dir_fd=dir_fd)
    descriptors = map(open_in_directory, [path], [_FLAGS | flags])
    files = map(FileIO, descriptors)
    try:
        return next(files)
    except IsADirectoryError as err:
        if isinstance(err.filename, int):  # FileIO does not close the descriptor that it refuses
            os.close(err.filename)
        raise


def read_bytes(path: str, most: int = MOST_BYTES) -> bytes:
    """Return the first ``most`` bytes of a file. The kernel returns a page or less of some files at a time.

    Raises:
        OSError: it cannot be read. ValueError: the path has a NUL.
    """
    data = bytearray()
    with open_to_read(path) as file:
        while len(data) < most:
            part = file.read(min(most - len(data), _PART))
            if not part:
                break
            data += part
    return bytes(data)


def read_start(path: str, most: int = MOST_BYTES) -> bytes | None:
    """Return the same; None if it cannot be read."""
    try:
        return read_bytes(path, most)
    except (OSError, ValueError):
        return None


def printable(text: str) -> str:
    """Make untrusted text safe for a terminal: unprintable characters, such as escape codes, become blanks."""
    if text.isprintable():
        return text
    shown = []
    for character in text:
        if not character.isprintable():
            character = " "
        shown.append(character)
    return "".join(shown)


def printable_lines(text: str, longest: int = 20_000) -> str:
    r"""Return the same for a text of several lines, which is cut if it is longer than any of ours.

    >>> printable_lines("one\x1b[2J\ntwo")
    'one [2J\ntwo'
    """
    if len(text) > longest:
        text = f"{text[:longest]} ..."
    lines = [printable(line) for line in text.split("\n")]
    return "\n".join(lines)


def well_formed(text: str) -> str:
    """Return text that every JSON parser accepts: lone surrogates, which stand for bytes that are not UTF-8, become
    U+FFFD.

    >>> well_formed("caf\\udce9")
    'caf\ufffd'
    """
    if text.isascii():
        return text
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def as_text(value: object, longest: int = 200) -> str:
    """Return printable text of at most ``longest`` characters.

    >>> as_text("a\\x1b[31m", 3)
    'a ['
    """
    return printable(str(value)[:longest])


def as_list(value: object) -> list[object]:
    """Return the first 1,024 entries of a list; none of anything else.

    >>> as_list("GPU-12")
    []
    """
    if not isinstance(value, list):
        return []
    return value[:_LONGEST_LIST]


def as_int(value: object, least: int, most: int) -> int:
    """Return a whole number within these bounds.

    Raises:
        ValueError, TypeError, OverflowError: it is none, or beyond them.

    >>> as_int(8, 1, 4096)
    8
    """
    number: int = int(value)  # type: ignore[call-overload]
    if not least <= number <= most:
        raise ValueError("out of bounds")
    return number


def as_time(value: object) -> float:
    """Return Unix seconds; 0 for a time that cannot be.

    Raises:
        ValueError, TypeError, OverflowError: it is no number.
    """
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 <= seconds < _LATEST:
        return 0.0
    return seconds


def as_seconds(value: object, least: float) -> float | None:
    """Return a number of seconds from ``least`` up; None for anything else, and for a time that cannot be.

    >>> as_seconds("soon", 1) is None
    True
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if not least <= value < _LATEST:
        return None
    return float(value)
