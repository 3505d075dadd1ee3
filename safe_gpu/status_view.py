"""The table that ``safe-gpu status`` prints: one row a GPU, remarks below it, then the queue. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .procfs import printable

if TYPE_CHECKING:
    from .devices import Gpu
    from .status import ClaimStatus, GpuStatus, HostStatus, ProcessStatus

__all__ = ["cut", "display_width", "paint", "render", "short_age", "wrapped"]

_COLORS = {"green": "32", "yellow": "33", "red": "31", "cyan": "36", "dim": "2", "bold": "1"}
_STATE_COLORS = {"free": "green", "display": "green", "claimed": "cyan", "busy": "red", "unusable": "dim"}

_GAP = "  "
_INDENT = " " * 5


def render(status: HostStatus, *, width: int, color: bool) -> str:
    """The status as text: no line is wider than ``width`` columns; ``color`` adds ANSI colours to the state."""
    lines = _headline(status, width, color)
    lines.append("")
    lines += _gpu_table(status, width, color)
    lines += _queue(status, width, color)
    for warning in status.warnings:
        lines += ["", *(paint(line, "yellow", color) for line in wrapped(f"warning: {warning}", width))]
    return "\n".join(lines)


def _headline(status: HostStatus, width: int, color: bool) -> list[str]:
    claimable = [one for one in status.gpus if not one.gpu.mig_enabled]
    free = sum(one.state in ("free", "display") for one in claimable)
    idle = sum(one.idle for one in status.gpus)
    text = f"{status.host}: {free} of {len(claimable)} GPUs free"
    if idle:
        text += f", {idle} claimed but idle"
    if status.queue:
        text += f", {len(status.queue)} waiting"
    driver = f"{status.driver} {status.driver_version}".strip()
    lines = [paint(line, "bold", color) for line in wrapped(f"{text} ({driver})", width)]
    for names, labels in _models(status):
        lines += wrapped(f"{labels}: {names}" if labels else names, width)
    return lines


def _models(status: HostStatus) -> list[tuple[str, str]]:
    """Model names, each with the GPUs that are of it; without these where all are alike."""
    found: dict[str, list[str]] = {}
    for one in status.gpus:
        if not one.gpu.is_mig_instance:
            found.setdefault(one.gpu.name or "(no name)", []).append(one.gpu.label)
    if len(found) == 1:
        name, labels = next(iter(found.items()))
        return [(f"{len(labels)} x {name}", "")]
    return [(name, f"GPU {','.join(labels)}") for name, labels in found.items()]


# The GPUs


@dataclass(frozen=True)
class _Row:
    """The cells of one GPU; ``says`` takes the place of those from the user on."""

    label: str
    state: str
    color: str
    memory: str
    load: str
    user: str = ""
    pid: str = ""
    job: str = ""
    age: str = ""
    command: str = ""
    says: str = ""
    remarks: tuple[str, ...] = ()


def _gpu_table(status: HostStatus, width: int, color: bool) -> list[str]:
    roomy = width >= 100
    rows = [_row(one, status.taken_at, roomy) for one in status.gpus]
    columns = [
        _column("GPU", [row.label for row in rows], right=True),
        _column("STATE", [row.state for row in rows]),
        _column("MEMORY", [row.memory for row in rows], right=True),
        _column("UTIL", [row.load for row in rows], right=True),
    ]
    who = [
        _column("USER", [row.user for row in rows], most=24 if roomy else 8),
        _column("PID", [row.pid for row in rows], right=True),
        _column("JOB", [row.job for row in rows], most=30 if roomy else 12),
        _column("FOR", [row.age for row in rows], right=True),
    ]
    taken = _GAP.join(_padded(column.title, column) for column in columns)
    titles = [_padded(column.title, column) for column in who if column.width]
    room = width - display_width(taken) - len(_GAP)
    lines = [paint(cut(_GAP.join([taken, *titles, "COMMAND"]), width).rstrip(), "bold", color)]
    for number, row in enumerate(rows):
        head = [_padded(column.cells[number], column) for column in columns]
        head[1] = paint(head[1], row.color, color)
        if row.load == "idle":
            head[3] = paint(head[3], row.color, color)
        tail = [_padded(column.cells[number], column) for column in who if column.width]
        rest = row.says or _GAP.join([*tail, row.command])
        lines.append(_GAP.join([*head, cut(rest, max(0, room))]).rstrip())
        remarks = [*row.remarks]
        if row.says and display_width(row.says) > room:
            remarks.insert(0, row.says)
            lines[-1] = _GAP.join(head).rstrip()
        for remark in remarks:
            lines += [paint(line, "yellow", color) for line in wrapped(remark, width, _INDENT)]
    return lines


@dataclass(frozen=True)
class _Column:
    title: str
    cells: tuple[str, ...]
    width: int
    right: bool


def _column(title: str, cells: Sequence[str], *, right: bool = False, most: int = 40) -> _Column:
    """A column as wide as its widest cell, at most ``most``; of width 0 where all cells are empty."""
    shown = tuple(cut(cell, most) for cell in cells)
    widest = max(map(display_width, shown), default=0)
    return _Column(title, shown, max(widest, len(title)) if widest else 0, right)


def _padded(text: str, column: _Column) -> str:
    blanks = " " * (column.width - display_width(text))
    return blanks + text if column.right else text + blanks


def _row(one: GpuStatus, now: float, roomy: bool) -> _Row:
    head = (one.gpu.label, one.state, "yellow" if one.idle else _STATE_COLORS.get(one.state, "dim"))
    load = "-" if one.gpu.utilization is None else f"{one.gpu.utilization}%"
    numbers = (_memory(one.gpu), "idle" if one.idle else load)
    if one.claim is not None:
        claim = one.claim
        return _Row(
            *head,
            *numbers,
            user=printable(claim.user or "?"),
            pid=str(claim.pid or "?"),
            job=_job(claim.job or "", roomy),
            age=short_age(now - claim.since) if claim.since else "?",
            command=_short(claim.command or "?"),
            remarks=_remarks(one),
        )
    computing = [process for process in one.processes if process.kind != "graphics"]
    if one.state == "busy" and computing:
        first = max(computing, key=lambda process: process.memory_used or 0)
        number = len({process.pid for process in computing})
        return _Row(
            *head,
            *numbers,
            user=printable(first.user or "?"),
            pid=str(first.pid),
            command=(f"(1 of {number}) " if number > 1 else "") + _command_of(first),
        )
    shared = "free, shared with the display" if one.state == "display" else ""
    return _Row(*head, *numbers, says=printable(one.reason) or shared)


def _command_of(process: ProcessStatus) -> str:
    return _short(process.command or "(cannot be seen here)")


def _short(command: str) -> str:
    """A command line without the directory of its program: columns are few."""
    program, blank, arguments = printable(command).partition(" ")
    return (program.rpartition("/")[2] or program) + blank + arguments


def _job(label: str, roomy: bool) -> str:
    """``sge:1234.5``; the number alone where columns are few."""
    return printable(label if roomy else label.rpartition(":")[2])


def _remarks(one: GpuStatus) -> tuple[str, ...]:
    """What the row of a claim does not say, a line each."""
    found = list(_oddities(one.claim))
    if one.inner is not None:
        inner = one.inner
        who = " ".join(part for part in (inner.user, _short(inner.command or "")) if part)
        found.append(f"inside it: process {inner.pid or '?'} {who}".rstrip())
        found += _oddities(inner)
    if one.state not in ("claimed", "display"):
        found.append(one.reason.partition(";")[0])
    strangers = [process for process in one.processes if process.kind != "graphics"] if one.idle else []
    found += [f"on it, but not of the claim: process {p.pid} {p.user or ''} {_command_of(p)}" for p in strangers]
    return tuple(printable(text) for text in found if text)


def _oddities(claim: ClaimStatus | None) -> Iterable[str]:
    if claim is None:
        return
    if claim.stopped:
        yield f"process {claim.pid} is stopped (a suspended job?) and keeps the GPU"
    if claim.note:
        yield claim.note


def _memory(gpu: Gpu) -> str:
    """``12.3/80G``, in GiB."""
    if gpu.memory_used is None and gpu.memory_total is None:
        return "-"
    used = "?" if gpu.memory_used is None else f"{gpu.memory_used / (1 << 30):.1f}"
    total = "?" if gpu.memory_total is None else f"{gpu.memory_total / (1 << 30):.0f}"
    return f"{used}/{total}G"


# The queue


def _queue(status: HostStatus, width: int, color: bool) -> list[str]:
    if not status.queue:
        return []
    number = _column("#", [str(one.position) for one in status.queue], right=True)
    user = _column("USER", [printable(one.user or "?") for one in status.queue], most=24)
    pid = _column("PID", [str(one.pid or "?") for one in status.queue], right=True)
    gpus = _column("WANTS", [_wanted(one.nb_gpus) for one in status.queue])
    ages = [short_age(status.taken_at - one.since) if one.since else "?" for one in status.queue]
    columns = (number, user, pid, gpus, _column("FOR", ages, right=True))
    lines = ["", paint("Waiting, first come first served:", "bold", color)]
    lines.append(paint(cut(_GAP.join(_padded(column.title, column) for column in columns), width), "bold", color))
    for place, one in enumerate(status.queue):
        line = _GAP.join(_padded(column.cells[place], column) for column in columns)
        lines.append(cut(line, width))
        if one.stopped:
            text = f"process {one.pid} is stopped (a suspended job?) and keeps its place"
            lines += [paint(part, "yellow", color) for part in wrapped(text, width, _INDENT)]
        if one.note:
            lines += [paint(part, "yellow", color) for part in wrapped(printable(one.note), width, _INDENT)]
    return lines


def _wanted(nb_gpus: int | None) -> str:
    if nb_gpus is None:
        return "?"
    return "1 GPU" if nb_gpus == 1 else f"{nb_gpus} GPUs"


# Text


def short_age(seconds: float) -> str:
    """How long something lasts, in few columns: ``45s``, ``12m``, ``3h20m``, ``2d4h``.

    >>> short_age(12_000)
    '3h20m'
    """
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return f"{minutes}m"
    if hours < 24:
        return f"{hours}h{minutes % 60:02}m"
    return f"{days}d{hours % 24}h"


def display_width(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from unicodedata import combining, east_asian_width

    return sum(0 if combining(c) else 2 if east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """The text, or as much of its beginning as fits, with ``..`` at the end."""
    if display_width(text) <= width:
        return text
    kept = text[: max(0, width - 2)]
    while kept and display_width(kept) > width - 2:
        kept = kept[:-1]
    return (kept + "..")[: max(0, width)]


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """The text as printable lines of at most ``width`` columns."""
    lines: list[str] = []
    line = indent
    for word in printable(text).split():
        room = width - display_width(line) - (0 if line == indent else 1)
        if display_width(word) > room and line.strip():
            lines.append(line)
            line = indent
        line += word if not line.strip() else f" {word}"
    return [cut(line, width) for line in [*lines, line] if line.strip()]


def paint(text: str, color: str, on: bool) -> str:
    """The text in a colour, or bold, where ``on``."""
    return f"\x1b[{_COLORS[color]}m{text}\x1b[0m" if on and text else text
