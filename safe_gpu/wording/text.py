"""Formatting of ages, sizes, plurals, lists of GPUs and widths on a terminal, and the names of arguments."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from ..host.foreign_files import printable

GAP = "  "
"""Between the columns of a table."""

_COLORS = {"green": "32", "yellow": "33", "red": "31", "magenta": "35", "cyan": "36", "dim": "2", "bold": "1"}


def format_age(seconds: float) -> str:
    """Return a duration in at most two units: ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 4 h``.

    >>> format_age(12_000)
    '3 h 20 min'
    """
    (number, unit), *others = _largest_units(seconds)
    return f"{number} {unit}" + "".join(f" {n} {u}" for n, u in others if n)


def short_age(seconds: float) -> str:
    """Return a duration in few columns: ``45s``, ``12m``, ``3h20m``, ``2d4h``.

    >>> short_age(12_000)
    '3h20m'
    """
    (number, unit), *others = _largest_units(seconds)
    return f"{number}{unit[0]}" + "".join(f"{n:02}m" if u == "min" else f"{n}{u}" for n, u in others)


def _largest_units(seconds: float) -> tuple[tuple[int, str], ...]:
    whole = max(0, int(seconds))
    if whole < 60:
        return ((whole, "s"),)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return ((minutes, "min"),)
    return ((hours, "h"), (minutes % 60, "min")) if hours < 24 else ((days, "d"), (hours % 24, "h"))


def clock(moment: float, now: float) -> str:
    """Return ``14:20``, ``Sun 14:20`` or ``2026-11-30``, whichever is clear."""
    away = abs(moment - now)
    form = "%H:%M" if away < 18 * 3600 else "%a %H:%M" if away < 6 * 86400 else "%Y-%m-%d"
    return time.strftime(form, time.localtime(moment))


def not_before(moment: float | None, now: float) -> str:
    """Return ``probably not before 14:20``, for a start that other holders' estimates put off to then; "" where that is
    past or not known."""
    return "" if moment is None or moment <= now else f"probably not before {clock(moment, now)}"


def plural(number: int, thing: str = "GPU") -> str:
    """Return a number and its noun: ``1 GPU``, ``2 GPUs``.

    >>> plural(0, "claim")
    '0 claims'
    """
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def left_behind(pid: int | None, ended: int, *, reused: bool = False) -> str:
    """Return who still holds what a process claimed that has ended, so that nobody takes that number for the holder's.

    Args:
        pid: of who holds it; None if that cannot be seen.
        ended: of who claimed it.
        reused: whether another process has that number now.

    >>> left_behind(12, 7), left_behind(None, 7)
    ('still held by process 12, which process 7 left behind', 'still held by a process that process 7 left behind')
    """
    holder = "a process that" if pid is None else f"process {pid}, which"
    return f"still held by {holder} {'an earlier ' if reused else ''}process {ended} left behind"


def in_brackets(*facts: str | None) -> str:
    """Return the known facts in brackets, to append to a name: `` (alice, python train.py)``; "" if none is known.

    >>> in_brackets("alice", None, "job 12")
    ' (alice, job 12)'
    """
    known = ", ".join(fact for fact in facts if fact)
    return f" ({known})" if known else ""


def gpu_ranges(labels: Iterable[str]) -> str:
    """Return labels of GPUs in the given order, with three or more consecutive ones written as a range.

    Ranges of MIG instances are of one GPU.

    >>> gpu_ranges(["0", "1", "2", "5", "6", "7:0", "7:1", "7:2"])
    '0-2,5,6,7:0-2'
    """
    runs: list[tuple[str, list[int]]] = []
    for label in labels:
        gpu, _, last = label.rpartition(":")
        if runs and runs[-1][0] == gpu and runs[-1][1][-1] + 1 == int(last):
            runs[-1][1].append(int(last))
        else:
            runs.append((gpu, [int(last)]))
    return ",".join(_run(gpu and f"{gpu}:", numbers) for gpu, numbers in runs)


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
    models = grouped(gpus).items()
    return ", ".join(f"GPU {gpu_ranges(labels)}{name and f' ({name})'}" for name, labels in models)


def _run(prefix: str, numbers: list[int]) -> str:
    if len(numbers) > 2:
        return f"{prefix}{numbers[0]}-{numbers[-1]}"
    return ",".join(f"{prefix}{number}" for number in numbers)


def format_bytes(count: int) -> str:
    """Return a number of bytes in GiB or MiB: ``31.2 GiB``, ``400 MiB``."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB".replace(".0 ", " ")
    return f"{round(count / (1 << 20))} MiB"


def display_width(text: str) -> int:
    """Return the number of columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """Return the text if it fits into ``width`` columns, else its beginning with ``..`` at the end.

    Combining characters take no column, so a text may also have at most three characters for each column.
    """
    if len(text) <= 3 * width and display_width(text) <= width:
        return text
    kept = text[: 3 * max(0, width - 2)]
    kept = kept[: sum(columns <= width - 2 for columns in accumulate(map(display_width, kept)))]
    return f"{kept}.."[:width] if width < 2 else f"{kept}.."


def wrapped(text: str, width: int, indent: str = "", further: str | None = None) -> list[str]:
    """Return the text as printable lines of at most ``width`` columns; those after the first begin with ``further``,
    if it is given."""
    lines: list[str] = []
    line = indent
    for word in printable(text).split():
        room = width - display_width(line) - bool(line.strip())
        if display_width(word) > room and line.strip():
            lines.append(line)
            line = indent if further is None else further
        line += word if not line.strip() else f" {word}"
    return [cut(line, width) for line in [*lines, line] if line.strip()]


def paint(text: str, color: str, on: bool) -> str:
    """Return the text in a colour or bold, if ``on``; else the text unchanged."""
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m" if on and text else text


class Column:
    """One column of a table, as wide as its widest cell. ``width`` is 0 if all cells are empty.

    Args:
        most: columns of the terminal that a cell may take; longer cells are cut.
        right: align cells to the right.
    """

    def __init__(self, title: str, cells: Iterable[str], *, right: bool = False, most: int = 40) -> None:
        self.title = title
        self.cells = tuple(cut(cell, most) for cell in cells)
        self.right = right
        widest = max(map(display_width, self.cells), default=0)
        self.width = max(widest, len(title)) if widest else 0

    def padded(self, text: str) -> str:
        """Return the text, padded with blanks to the width of the column."""
        blanks = " " * (self.width - display_width(text))
        return blanks + text if self.right else text + blanks


# Messages name arguments of a claim as Python writes them, or as the command line does where that runs. ``argument`` is
# always the name in Python, or a variable of the environment, whose name is upper case.

_command_lines: list[None] = []  # one while the command line runs


@contextmanager
def on_command_line() -> Iterator[None]:
    """Let messages name arguments as options meanwhile."""
    _command_lines.append(None)
    try:
        yield
    finally:
        _command_lines.pop()


def option(argument: str) -> str:
    """Return an argument without a value: ``timeout=`` or ``--timeout``, and ``-n`` for the number of GPUs."""
    return as_option(argument) if _command_lines else f"{argument}="


def as_option(argument: str) -> str:
    """Return the option of an argument: ``--timeout``."""
    return {"nb_gpus": "-n", "hold_for": "--for"}.get(argument) or f"--{argument.replace('_', '-')}"


def setting(argument: str, text: str) -> str:
    """Return an argument with a value, which is not quoted: ``exclude=0,3`` or ``--exclude 0,3``."""
    return f"{option(argument)} {text}" if _command_lines and not argument.isupper() else f"{argument}={text}"


def value(value: object) -> str:
    """Return a value as the caller writes it: ``'20GiB'``, or as a shell takes it: ``20GiB``, ``'RTX*4090'``; ``inf``
    for no limit."""
    if not _command_lines:
        return repr(value)
    from shlex import quote

    return "inf" if value is None else quote(str(value))


def written(argument: str, value_given: object) -> str:
    """Return an argument with a value, both as the caller writes them: ``model='A100'`` or ``--model A100``."""
    return setting(argument, value(value_given))
