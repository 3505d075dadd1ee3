"""Values of what anybody may have written, within bounds."""

from . import procfs

LONGEST_FILE = 1 << 16
"""Bytes that are read of an entry at most."""

# No time of ours is later (the year 5138); time.localtime fails on numbers that JSON allows.
_LATEST = 1e11


def as_text(value: object, longest: int = 200) -> str:
    """Return printable text of at most ``longest`` characters.

    >>> as_text("a\\x1b[31m", 3)
    'a ['
    """
    return procfs.printable(str(value)[:longest])


def as_list(value: object) -> list[object]:
    """Return the first 1,024 entries of a list; none of anything else.

    >>> as_list("GPU-12")
    []
    """
    return value[:1024] if isinstance(value, list) else []


def as_int(value: object, least: int, most: int) -> int:
    """Return a whole number within these bounds.

    Raises:
        ValueError, TypeError, OverflowError: it is none, or beyond them.

    >>> as_int(8, 1, 4096)
    8
    """
    number = int(value)  # type: ignore[call-overload]
    if not least <= number <= most:
        raise ValueError("out of bounds")
    return int(number)


def as_time(value: object) -> float:
    """Return Unix seconds; 0 for a time that cannot be.

    Raises:
        ValueError, TypeError, OverflowError: it is no number.
    """
    seconds = float(value)  # type: ignore[arg-type]
    return seconds if 0 <= seconds < _LATEST else 0.0


def as_seconds(value: object, least: float) -> float | None:
    """Return a number of seconds from ``least`` up; None for anything else, and for a time that cannot be.

    >>> as_seconds("soon", 1) is None
    True
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value < _LATEST:
        return float(value)
    return None
