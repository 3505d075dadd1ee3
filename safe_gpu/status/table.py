"""Tables as wide as the terminal, and that of GPUs. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..wording.text import GAP, Column, cut, paint, wrapped
from .facts import HostStatus
from .rows import TableRow, process_rows, rows_of

# Columns of a terminal from which on names of users and bars may be longer.
_WIDE = 100

_LEAST_FOR_BARS = 80

_MOST_OF_USER = 8
_MOST_OF_USER_IF_WIDE = 24

MOST_OF_JOB = 13
"""Columns of the number of a job."""

_LEAST_COMMAND = 10  # columns that the others leave

_WORDS_OF_COMMAND = 32  # columns that bars and all columns of less interest leave


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
        piped: whether another program reads it, so that names of users are whole and commands keep their words, and
            lines are as much wider.
    """

    width: int
    color: bool
    verbose: bool
    marks: Marks
    piped: bool

    @property
    def most_of_user(self) -> int:
        """Columns of the name of a user, where it is not whole."""
        if self.width >= _WIDE:
            return _MOST_OF_USER_IF_WIDE
        return _MOST_OF_USER

    @property
    def bar_widths(self) -> Sequence[int]:
        """Columns that the bars of memory may have, the best first; 0 for none."""
        if self.width >= _WIDE:
            return 10, 4, 0
        if self.width >= _LEAST_FOR_BARS:
            return 4, 0
        return (0,)

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
        words: columns that are not cut before the bar and the columns with a lower rank are left out.
        color: returns the colour of the cell in a row; None for none.
        has_bar: whether the bar of memory stands before the text.
        has_names: whether its cells are names, which are whole where another program reads them.
        only_verbose: whether it is shown only with ``--verbose``.
        left_out: its rank among those that are left out where not all fit, the lowest first; None: it never is.
    """

    title: str
    cell: Callable[[TableRow], str]
    right: bool = False
    most: Callable[[Screen], int] = _screen_width
    least: int | None = None
    words: int = 0
    color: Callable[[TableRow], str | None] = _no_color
    has_bar: bool = False
    has_names: bool = False
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
    GpuColumn("USER", lambda row: row.who.user, most=_most_of_user, has_names=True),
    GpuColumn("JOB/PID", lambda row: row.who.job, most=_most_of_job, left_out=7),
    GpuColumn("HELD", lambda row: row.who.held, right=True, left_out=6),
    GpuColumn("LEFT", lambda row: row.who.left, right=True, left_out=5),
    GpuColumn("COMMAND", lambda row: row.who.command, least=_LEAST_COMMAND, words=_WORDS_OF_COMMAND, left_out=4),
)
"""The columns after them, in place of which a row may have a text."""


class _ShownColumn(Column):
    """A column of the table of GPUs, as wide as its cells in these rows."""

    def __init__(self, column: GpuColumn, rows: Iterable[TableRow], screen: Screen) -> None:
        cells = [column.cell(row) for row in rows]
        whole = column.has_names and screen.piped
        most = column.most(screen)
        super().__init__(column.title, cells, right=column.right, most=most, least=column.least, whole=whole)
        self._column = column
        self._screen = screen
        self._most = most + self.beyond

    @property
    def words(self) -> int:
        """Columns that it needs for its words, where it is the last one."""
        if self.least is None:
            return self.width
        return min(self.width, max(self.least, self._column.words))

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

    def __init__(self, column: GpuColumn, rows: Iterable[TableRow], screen: Screen, bar_width: int) -> None:
        super().__init__(column, rows, screen)
        self._bar_width = bar_width
        self.width += bar_width + len(" ")

    @property
    def heading(self) -> str:
        return self.title.ljust(self.width)

    def drawn(self, row: TableRow) -> str:
        number = self._text(row).rjust(self.width - self._bar_width)
        return self._bar(row) + number

    def _bar(self, row: TableRow) -> str:
        """Return how full the memory is."""
        width = self._bar_width
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


def gpu_table(status: HostStatus, screen: Screen) -> list[str]:
    """Return the titles and a line for each GPU, each of several claims of one and, if they are wanted, each
    process."""
    rows = _rows(status, screen)
    wanted = [column for column in (*COLUMNS_OF_GPU, *COLUMNS_OF_USER) if screen.verbose or not column.only_verbose]
    shown = _shown_columns(wanted, rows, screen)
    width = _room(shown, screen)
    if screen.piped and shown:
        last = shown[-1]
        width = max(width, _width(shown) - last.width + last.words)
    titles_of_gpu = [column.title for column in COLUMNS_OF_GPU]
    of_gpu = [column for column in shown if column.title in titles_of_gpu]
    of_user = [column for column in shown if column.title not in titles_of_gpu]
    room_of_user = max(0, width - _width(of_gpu) - len(GAP))

    headings = GAP.join(column.heading for column in shown)
    lines = [screen.paint(cut(headings.rstrip(), width), "bold")]
    for row in rows:
        cells = [column.drawn(row) for column in of_gpu]
        who = row.text or GAP.join(column.drawn(row) for column in of_user)
        cells.append(cut(who.rstrip(), room_of_user))
        lines.append(GAP.join(cells).rstrip())
    return lines


def _shown_columns(wanted: Sequence[GpuColumn], rows: Sequence[TableRow], screen: Screen) -> list[_ShownColumn]:
    """Return the columns that are not empty, without some where not all fit.

    The last one keeps its words: columns of a lower rank give way to them, and then the bar of memory. Where that does
    not do it is cut, and only then columns of its own rank and higher ones are left out.
    """
    last_rank = wanted[-1].left_out or 0
    ranked = sorted((column.left_out, column.title) for column in wanted if column.left_out is not None)
    shown: list[_ShownColumn] = []
    for bar_width in screen.bar_widths:
        shown = _with_bar(wanted, rows, screen, bar_width)
        for rank, title in ranked:
            if rank < last_rank and not _fit_with_words(shown, screen):
                shown = _without(shown, title)
        if _fit_with_words(shown, screen):
            return shown
    for _, title in ranked:
        if _least_width(shown) > _room(shown, screen):
            shown = _without(shown, title)
    return shown


def _with_bar(
    wanted: Iterable[GpuColumn], rows: Sequence[TableRow], screen: Screen, bar_width: int
) -> list[_ShownColumn]:
    """Return the columns that are not empty, with bars of memory of that width."""
    columns: list[_ShownColumn] = []
    for column in wanted:
        if column.has_bar and bar_width:
            columns.append(_ColumnWithBar(column, rows, screen, bar_width))
        else:
            columns.append(_ShownColumn(column, rows, screen))
    return [column for column in columns if column.width]


def _without(columns: Iterable[_ShownColumn], title: str) -> list[_ShownColumn]:
    return [column for column in columns if column.title != title]


def _fit_with_words(columns: Sequence[_ShownColumn], screen: Screen) -> bool:
    """Return whether the columns fit where the last one is cut, but not in its words."""
    if not columns:
        return True
    last = columns[-1]
    return _width(columns) - last.width + last.words <= _room(columns, screen)


def _room(columns: Iterable[_ShownColumn], screen: Screen) -> int:
    """Return how wide the lines of these columns may be."""
    return screen.width + sum(column.beyond for column in columns)


def _rows(status: HostStatus, screen: Screen) -> list[TableRow]:
    on_instances = {(one.gpu.mig_parent, process.pid) for one in status.gpus for process in one.processes}
    rows: list[TableRow] = []
    for one in status.gpus:
        rows += rows_of(one, status.taken_at)
        if screen.verbose:
            # The driver lists the processes of MIG instances on their GPU too.
            own = [process for process in one.processes if (one.gpu.uuid, process.pid) not in on_instances]
            rows += process_rows(own, one.gpu)
    return rows


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
    """Return the titles and a line for each row, without the columns that are empty. The lines are at most that wide,
    and what whole cells take beyond their columns.

    Args:
        optional: titles of columns that are left out, one after the other, until the others fit.
    """
    shown = [column for column in columns if column.width]
    width += sum(column.beyond for column in shown)
    for title in optional:
        if _least_width(shown) > width:
            shown = [column for column in shown if column.title != title]
    titles = [column.title for column in shown]
    rows = zip(*(column.cells for column in shown), strict=True)
    lines = []
    for cells in (titles, *rows):
        padded = [column.padded(cell) for column, cell in zip(shown, cells, strict=True)]
        lines.append(cut(GAP.join(padded).rstrip(), width))
    return lines
