"""Tables as wide as the terminal, and that of GPUs. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ..wording.text import GAP, Column, cut, paint, wrapped
from .facts import HostStatus
from .rows import TableRow, process_rows, rows_of

# Columns of a terminal from which on names of users may be longer.
_WIDE = 100

_MOST_OF_USER = 8
_MOST_OF_USER_IF_WIDE = 24

MOST_OF_JOB = 13
"""Columns of the number of a job."""

_LEAST_COMMAND = 10  # columns that the others leave


class Marks(NamedTuple):
    """The characters of memory that is used, half used, and free."""

    full: str
    half: str
    free: str


@dataclass(frozen=True)
class Screen:
    """What the text is written for.

    Attributes:
        width: columns of a line.
        color: whether to add ANSI colours.
        verbose: whether waiters of one user have a line each, and the processes on each GPU.
        marks: those of the bars of memory.
        piped: whether another program reads it, so that names of users are whole.
    """

    width: int
    color: bool
    verbose: bool
    marks: Marks
    piped: bool

    @property
    def most_of_user(self) -> int:
        """Columns of the name of a user."""
        if self.piped or self.width >= _WIDE:
            return _MOST_OF_USER_IF_WIDE
        return _MOST_OF_USER

    @property
    def bar_width(self) -> int:
        """Columns of the bars of memory; 0 where there is no room for them."""
        if self.width >= 100:
            return 10
        if self.width >= 80:
            return 4
        return 0

    def paint(self, text: str, color: str) -> str:
        """Return the text in a colour, if there are colours."""
        return paint(text, color, self.color)

    def warning(self, text: str, indent: str = "") -> list[str]:
        """Return the lines of a text that is to be noticed."""
        lines = wrapped(text, self.width, indent, f"{indent}  ")
        return [self.paint(line, "yellow") for line in lines]


def _screen_width(screen: Screen) -> int:
    return screen.width


def _most_of_user(screen: Screen) -> int:
    return screen.most_of_user


def _most_of_job(screen: Screen) -> int:
    return MOST_OF_JOB


def _no_color(row: TableRow) -> str | None:
    return None


def _state_color(row: TableRow) -> str | None:
    return row.color


def _utilization_color(row: TableRow) -> str | None:
    if row.is_loaded:
        return "bold"
    return None


@dataclass(frozen=True)
class GpuColumn:
    """A column of the table of GPUs. One that is empty in all rows is not shown.

    Attributes:
        cell: returns its text in a row.
        right: whether it is aligned to the right.
        most: returns how many columns of a screen a cell may take.
        least: columns to which it may be cut where it is the last one, before others are left out; None: to none.
        color: returns the colour of the cell in a row; None for none.
        has_bar: whether the bar of memory stands before the text.
        only_verbose: whether it is shown only with ``--verbose``.
        left_out: its rank among those that are left out where not all fit, the lowest first; None: it never is.
    """

    title: str
    cell: Callable[[TableRow], str]
    right: bool = False
    most: Callable[[Screen], int] = _screen_width
    least: int | None = None
    color: Callable[[TableRow], str | None] = _no_color
    has_bar: bool = False
    only_verbose: bool = False
    left_out: int | None = None


COLUMNS_OF_GPU = (
    GpuColumn("GPU", lambda row: row.gpu, right=True),
    GpuColumn("STATE", lambda row: row.state, color=_state_color),
    GpuColumn("MEMORY", lambda row: row.memory, right=True, has_bar=True),
    GpuColumn("UTIL", lambda row: row.utilization, right=True, color=_utilization_color),
    GpuColumn("TEMP", lambda row: row.temperature, right=True, left_out=3),
    GpuColumn("FAN", lambda row: row.fan, right=True, only_verbose=True, left_out=1),
    GpuColumn("POWER", lambda row: row.power, right=True, only_verbose=True, left_out=2),
)
"""The first columns of the table, in order."""

COLUMNS_OF_USER = (
    GpuColumn("USER", lambda row: row.who.user, most=_most_of_user),
    GpuColumn("JOB/PID", lambda row: row.who.job, most=_most_of_job, left_out=7),
    GpuColumn("HELD", lambda row: row.who.held, right=True, left_out=6),
    GpuColumn("LEFT", lambda row: row.who.left, right=True, left_out=5),
    GpuColumn("COMMAND", lambda row: row.who.command, least=_LEAST_COMMAND, left_out=4),
)
"""The columns after them, in place of which a row may have a text."""


class _ShownColumn(Column):
    """A column of the table of GPUs, as wide as its cells in these rows."""

    def __init__(self, column: GpuColumn, rows: Iterable[TableRow], screen: Screen) -> None:
        cells = [column.cell(row) for row in rows]
        most = column.most(screen)
        super().__init__(column.title, cells, right=column.right, most=most, least=column.least)
        self._column = column
        self._screen = screen
        self._most = most

    @property
    def heading(self) -> str:
        """The title, as wide as the column."""
        return self.padded(self.title)

    def drawn(self, row: TableRow) -> str:
        """Return the cell of a row in its colour, as wide as the column."""
        text = self._text(row)
        cell = self.padded(text)
        color = self._column.color(row)
        if color is None or not text:
            return cell
        return self._screen.paint(cell, color)

    def _text(self, row: TableRow) -> str:
        return cut(self._column.cell(row), self._most)


class _ColumnWithBar(_ShownColumn):
    """A column with the bar of memory before each cell, and its title above both."""

    def __init__(self, column: GpuColumn, rows: Iterable[TableRow], screen: Screen) -> None:
        super().__init__(column, rows, screen)
        if screen.bar_width:
            self.width += screen.bar_width + len(" ")

    @property
    def heading(self) -> str:
        return self.title.ljust(self.width)

    def drawn(self, row: TableRow) -> str:
        number = self._text(row).rjust(self.width - self._screen.bar_width)
        return self._bar(row) + number

    def _bar(self, row: TableRow) -> str:
        """Return how full the memory is."""
        width = self._screen.bar_width
        if row.memory_used is None or row.memory_total is None or row.memory_total <= 0:
            return " " * width
        # In integers: a driver may answer anything, also what no float holds. What is in use shows as half a mark at
        # least.
        used = max(0, min(row.memory_used, row.memory_total))
        halves = (4 * width * used + row.memory_total - 1) // (2 * row.memory_total)
        full, half = divmod(halves, 2)
        marks = self._screen.marks
        filled = marks.full * full + marks.half * half
        free = marks.free * (width - full - half)
        return self._screen.paint(filled, row.color) + self._screen.paint(free, "dim")


def _shown_column(column: GpuColumn, rows: Iterable[TableRow], screen: Screen) -> _ShownColumn:
    if column.has_bar:
        return _ColumnWithBar(column, rows, screen)
    return _ShownColumn(column, rows, screen)


def gpu_table(status: HostStatus, screen: Screen) -> list[str]:
    """Return the titles and a line for each GPU, each of several claims of one and, if they are wanted, each
    process."""
    rows = _rows(status, screen)
    wanted = [column for column in (*COLUMNS_OF_GPU, *COLUMNS_OF_USER) if screen.verbose or not column.only_verbose]
    columns = [_shown_column(column, rows, screen) for column in wanted]
    shown = _fitting(columns, screen.width, _optional_titles(wanted))
    titles_of_gpu = [column.title for column in COLUMNS_OF_GPU]
    of_gpu = [column for column in shown if column.title in titles_of_gpu]
    of_user = [column for column in shown if column.title not in titles_of_gpu]
    room_of_user = max(0, screen.width - _width(of_gpu) - len(GAP))

    headings = GAP.join(column.heading for column in shown)
    lines = [screen.paint(cut(headings.rstrip(), screen.width), "bold")]
    for row in rows:
        cells = [column.drawn(row) for column in of_gpu]
        who = row.text or GAP.join(column.drawn(row) for column in of_user)
        cells.append(cut(who.rstrip(), room_of_user))
        lines.append(GAP.join(cells).rstrip())
    return lines


def _rows(status: HostStatus, screen: Screen) -> list[TableRow]:
    rows: list[TableRow] = []
    for one in status.gpus:
        rows += rows_of(one, status.taken_at)
        if screen.verbose:
            rows += process_rows(one)
    return rows


def _optional_titles(columns: Iterable[GpuColumn]) -> list[str]:
    """Return the titles of the columns that may be left out, in the order in which they are."""
    ranks = [(column.left_out, column.title) for column in columns if column.left_out is not None]
    return [title for _, title in sorted(ranks)]


_AnyColumn = TypeVar("_AnyColumn", bound=Column)


def _fitting(columns: Iterable[_AnyColumn], width: int, optional: Iterable[str]) -> list[_AnyColumn]:
    """Return the columns that are not empty, without some that are optional if they do not fit. None is cut but the
    last, if it may be, and that only to its least width."""
    shown = [column for column in columns if column.width]
    for title in optional:
        if _least_width(shown) > width:
            shown = [column for column in shown if column.title != title]
    return shown


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width + len(GAP) for column in columns) - len(GAP)


def _least_width(columns: Sequence[Column]) -> int:
    """Return the width of these columns with the last one cut as far as it may be."""
    width = _width(columns)
    if not columns:
        return width
    last = columns[-1]
    if last.least is None or last.width <= last.least:
        return width
    return width - last.width + last.least


def table(columns: Iterable[Column], width: int, optional: Iterable[str] = ()) -> list[str]:
    """Return the titles and a line for each row, without the columns that are empty.

    Args:
        optional: titles of columns that are left out, one after the other, until the others fit.
    """
    shown = _fitting(columns, width, optional)
    titles = [column.title for column in shown]
    rows = zip(*(column.cells for column in shown), strict=True)
    lines = []
    for cells in (titles, *rows):
        padded = [column.padded(cell) for column, cell in zip(shown, cells, strict=True)]
        lines.append(cut(GAP.join(padded).rstrip(), width))
    return lines
