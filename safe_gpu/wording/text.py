"""Formatting of ages, sizes, plurals, lists of GPUs, and texts of a width on a terminal."""

import time
from collections.abc import Iterable

from ..host.foreign_files import printable

_MINUTE = 60
_HOUR = 60 * _MINUTE
_DAY = 24 * _HOUR

GAP = "  "
"""Between the columns of a table."""

_COLORS = {"green": "32", "yellow": "33", "red": "31", "magenta": "35", "cyan": "36", "dim": "2", "bold": "1"}


def format_age(seconds: float) -> str:
    """Return a duration in at most two units: ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``.

    >>> format_age(12_000)
    '3 h 20 min'
    """
    parts = [f"{number} {unit}" for number, unit in _largest_units(seconds) if number > 0]
    return " ".join(parts) or "0 s"


def short_age(seconds: float) -> str:
    """Return a duration in few columns: ``45s``, ``12m``, ``3h20m``, ``2d4h``.

    >>> short_age(12_000)
    '3h20m'
    """
    (number, unit), *smaller = _largest_units(seconds)
    text = f"{number}{unit[0]}"
    for number, unit in smaller:
        if unit == "min":
            text += f"{number:02}m"
        else:
            text += f"{number}{unit}"
    return text


def _largest_units(seconds: float) -> list[tuple[int, str]]:
    whole = max(0, int(seconds))
    if whole < _MINUTE:
        return [(whole, "s")]
    if whole < _HOUR:
        return [(whole // _MINUTE, "min")]
    if whole < _DAY:
        return [(whole // _HOUR, "h"), (whole % _HOUR // _MINUTE, "min")]
    return [(whole // _DAY, "d"), (whole % _DAY // _HOUR, "h")]


def clock(moment: float, now: float) -> str:
    """Return ``14:20``, ``Sun 14:20`` or ``2026-11-30``, whichever is clear."""
    away = abs(moment - now)
    form = "%Y-%m-%d"
    if away < 18 * _HOUR:
        form = "%H:%M"
    elif away < 6 * _DAY:
        form = "%a %H:%M"
    return time.strftime(form, time.localtime(moment))


def not_before(moment: float | None, now: float) -> str:
    """Return ``probably not before 14:20``, for a start that other holders' estimates put off to then; "" where that is
    past or not known."""
    if moment is None or moment <= now:
        return ""
    return f"probably not before {clock(moment, now)}"


def plural(number: int, thing: str = "GPU") -> str:
    """Return a number and its noun: ``1 GPU``, ``2 GPUs``.

    >>> plural(0, "claim")
    '0 claims'
    """
    if number == 1:
        return f"{number} {thing}"
    return f"{number} {thing}s"


def left_behind(pid: int | None, ended: int, *, reused: bool = False) -> str:
    """Return who still holds what a process claimed that has ended, so that nobody takes that number for the holder's.

    Args:
        pid: of who holds it; None if that cannot be seen.
        ended: of who claimed it.
        reused: whether another process has that number now.

    >>> left_behind(12, 7), left_behind(None, 7)
    ('still held by process 12, which process 7 left behind', 'still held by a process that process 7 left behind')
    """
    holder = "a process that"
    if pid is not None:
        holder = f"process {pid}, which"
    claimer = f"process {ended}"
    if reused:
        claimer = f"an earlier {claimer}"
    return f"still held by {holder} {claimer} left behind"


def in_brackets(*facts: str | None) -> str:
    """Return the known facts in brackets, to append to a name: `` (alice, python train.py)``; "" if none is known.

    >>> in_brackets("alice", None, "job 12")
    ' (alice, job 12)'
    """
    known = [fact for fact in facts if fact]
    if not known:
        return ""
    return f" ({', '.join(known)})"


def gpu_ranges(labels: Iterable[str]) -> str:
    """Return labels of GPUs in the given order, with three or more consecutive ones written as a range.

    Ranges of MIG instances are of one GPU.

    >>> gpu_ranges(["0", "1", "2", "5", "6", "7:0", "7:1", "7:2"])
    '0-2,5,6,7:0-2'
    """
    runs: list[tuple[str, list[int]]] = []
    for label in labels:
        gpu, colon, last = label.rpartition(":")
        prefix = gpu + colon
        number = int(last)
        if runs:
            prefix_before, numbers = runs[-1]
            if prefix == prefix_before and number == numbers[-1] + 1:
                numbers.append(number)
                continue
        runs.append((prefix, [number]))
    return ",".join(_run(prefix, numbers) for prefix, numbers in runs)


def _run(prefix: str, numbers: list[int]) -> str:
    if len(numbers) > 2:
        return f"{prefix}{numbers[0]}-{numbers[-1]}"
    return ",".join(f"{prefix}{number}" for number in numbers)


def grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the texts that stand first in these pairs, by the text that stands second.

    >>> grouped([("0", "free"), ("1", "busy"), ("2", "free")])
    {'free': ['0', '2'], 'busy': ['1']}
    """
    found: dict[str, list[str]] = {}
    for one, key in pairs:
        found.setdefault(key, []).append(one)
    return found


def gpus_by_model(gpus: Iterable[tuple[str, str]]) -> str:
    """Group GPUs, given as pairs of label and product name, by product name.

    >>> gpus_by_model([("0", "NVIDIA A100"), ("1", "NVIDIA A100"), ("4", "NVIDIA L4"), ("5", "")])
    'GPU 0,1 (NVIDIA A100), GPU 4 (NVIDIA L4), GPU 5'
    """
    groups = [f"GPU {gpu_ranges(labels)}{in_brackets(name)}" for name, labels in grouped(gpus).items()]
    return ", ".join(groups)


def format_bytes(count: int) -> str:
    """Return a number of bytes in GiB or MiB: ``31.2 GiB``, ``400 MiB``."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB".replace(".0 ", " ")
    return f"{round(count / (1 << 20))} MiB"


def most_similar(word: str, words: Iterable[str], *, least: float) -> str:
    """Return the one of these words that was probably meant; "" if none is similar enough, as difflib measures it."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(words), n=1, cutoff=least)
    if not close:
        return ""
    return close[0]


def display_width(text: str) -> int:
    """Return the number of columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return _width_of_any(text)


def _width_of_any(text: str) -> int:
    from unicodedata import combining, east_asian_width

    width = 0
    for character in text:
        if combining(character):
            continue
        if east_asian_width(character) in ("W", "F"):  # wide and full width
            width += 2
        else:
            width += 1
    return width


def cut(text: str, width: int) -> str:
    """Return the text if it fits into ``width`` columns, else its beginning with ``..`` at the end.

    Combining characters take no column, so a text may also have at most three characters for each column.
    """
    if len(text) <= 3 * width and display_width(text) <= width:
        return text
    if width < len(".."):
        return ".."[:width]
    room = width - len("..")
    kept = ""
    for character in text[: 3 * room]:
        room -= display_width(character)
        if room < 0:
            break
        kept += character
    return f"{kept}.."


def wrapped(text: str, width: int, indent: str = "", further: str | None = None) -> list[str]:
    """Return the text as printable lines of at most ``width`` columns; those after the first begin with ``further``,
    if it is given."""
    if further is None:
        further = indent
    lines = []
    line = indent
    for word in printable(text).split():
        longer = _with_word(line, word)
        if line.strip() and display_width(longer) > width:
            lines.append(line)
            longer = _with_word(further, word)
        line = longer
    lines.append(line)
    return [cut(line, width) for line in lines if line.strip()]


def _with_word(line: str, word: str) -> str:
    if not line.strip():
        return line + word
    return f"{line} {word}"


def paint(text: str, color: str, on: bool) -> str:
    """Return the text in a colour or bold, if ``on``; else the text unchanged."""
    if not on or not text:
        return text
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m"


class Column:
    """One column of a table, as wide as its widest cell. ``width`` is 0 if all cells are empty.

    Args:
        most: columns of the terminal that a cell may take; longer cells are cut.
        right: align cells to the right.
        least: columns to which it may be cut where it is the last one and the table is too wide; None: to none.
        whole: longer cells are not cut, and the table is wider by ``beyond``, which is what they take beyond ``most``.
    """

    def __init__(
        self,
        title: str,
        cells: Iterable[str],
        *,
        right: bool = False,
        most: int = 40,
        least: int | None = None,
        whole: bool = False,
    ) -> None:
        self.title = title
        self.least = least
        self.right = right
        self.cells = tuple(cells)
        if not whole:
            self.cells = tuple(cut(cell, most) for cell in self.cells)
        self.width = max((display_width(cell) for cell in self.cells), default=0)
        self.beyond = max(0, self.width - most)
        if self.width > 0:
            self.width = max(self.width, len(title))

    def padded(self, text: str) -> str:
        """Return the text, padded with blanks to the width of the column."""
        blanks = " " * (self.width - display_width(text))
        if self.right:
            return blanks + text
        return text + blanks
