"""What stands in files that anybody may have written: bounded, since others compute with it and show it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .. import procfs
from ..errors import StateDirError

if TYPE_CHECKING:
    from .files import StateDir


LONGEST_FILE = 1 << 16
"""Bytes that are read of a ticket or a record at most."""

# No time of ours is later (the year 5138); time.localtime fails on numbers that JSON allows.
_LATEST = 1e11


def read_bounded(directory: StateDir, name: str, most: int) -> bytes:
    """The first ``most`` bytes of a file; none if it is missing or cannot be read."""
    try:
        fd = directory.open(name)
    except StateDirError:
        return b""
    if fd is None:
        return b""
    try:
        return os.pread(fd, most, 0)
    except OSError:
        return b""
    finally:
        os.close(fd)


def as_text(value: object, longest: int = 200) -> str:
    """Printable text of at most ``longest`` characters.

    >>> text("a\\x1b[31m", 3)
    'a ['
    """
    return procfs.printable(str(value)[:longest])


def as_list(value: object) -> list[object]:
    """The first 1,024 entries of a list; none of anything else.

    >>> listed("GPU-12")
    []
    """
    return value[:1024] if isinstance(value, list) else []


def as_int(value: object, least: int, most: int) -> int:
    """A whole number within these bounds.

    Raises:
        ValueError, TypeError, OverflowError: it is none, or beyond them.

    >>> whole(8, 1, 4096)
    8
    """
    number = int(value)  # type: ignore[call-overload]
    if not least <= number <= most:
        raise ValueError("out of bounds")
    return int(number)


def as_time(value: object) -> float:
    """Unix seconds; 0 for a time that cannot be.

    Raises:
        ValueError, TypeError, OverflowError: it is no number.
    """
    seconds = float(value)  # type: ignore[arg-type]
    return seconds if 0 <= seconds < _LATEST else 0.0


def as_seconds(value: object, least: float) -> float | None:
    """A number of seconds from ``least`` up; None for anything else, and for a time that cannot be.

    >>> seconds("soon", 1) is None
    True
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < _LATEST:
        return float(value)
    return None
