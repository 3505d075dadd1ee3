"""The screen of ``safe-gpu status``. Pure.

Labels are named as NVIDIA's DCGM exporter names them (``gpu``, ``UUID``), so that both join on them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from typing import NamedTuple

from ..gpus.devices import Holder
from ..host.foreign_files import printable
from ..selection.verdicts import why_kept
from ..wording.text import GAP, Column, cut, format_age, format_bytes, gpu_ranges, paint, plural, short_age, wrapped
from .facts import FREE, GpuStatus, HostStatus, ProcessStatus, WaiterStatus

_COLORS = {
    **dict.fromkeys(("free", "display"), "green"),
    **dict.fromkeys(("claimed", "shared"), "cyan"),
    **dict.fromkeys(("idle", "at risk"), "yellow"),
    "drained": "magenta",
    "busy": "red",
}

_BARS = ((100, 10), (80, 4))  # columns of a terminal, and of the bars of memory from then on

_LEAST_COMMAND = 10  # columns that the others leave

_HIGH = 90  # percent of utilization

# Waiters that are shown. Any user can make thousands.
_MOST_WAITERS = 100

_LEAST_ALIKE = 4


def render(
    status: HostStatus,
    *,
    width: int,
    color: bool,
    shown: HostStatus | None = None,
    verbose: bool = False,
    bar: str = "█▌░",
    piped: bool = False,
) -> str:
    """Return the status as text of which no line is wider than ``width`` columns.

    Args:
        color: whether to add ANSI colours.
        shown: the part of it whose GPUs and waiters are listed; None lists all.
        verbose: whether waiters of one user have a line each, and the processes on each GPU.
        bar: the characters of memory that is used, half used, and free.
        piped: whether another program reads it, so that names of users are whole.
    """
    most_of_user = 24 if piped or width >= 100 else 8
    lines = [*_headline(status, width, color), ""]
    if shown is None:
        shown = status
    if shown.gpus:
        lines += _gpu_table(shown, width, color, bar, verbose, most_of_user)
    else:
        lines += wrapped("none of these GPUs" if status.gpus else "no GPUs", width)
    lines += _queue(shown, width, color, verbose, most_of_user)
    for warning in (*filter(None, [status.shift, status.doubt]), *status.broken, *status.ignored, *status.warnings):
        lines += ["", *_warning(f"warning: {warning}", width, color)]
    return "\n".join(lines)


def _warning(text: str, width: int, color: bool, indent: str = "") -> Iterator[str]:
    return (paint(line, "yellow", color) for line in wrapped(text, width, indent, f"{indent}  "))


def _headline(status: HostStatus, width: int, color: bool) -> list[str]:
    instances = [one for one in status.gpus if one.gpu.is_mig_instance]
    whole = [one for one in status.gpus if not (one.gpu.is_mig_instance or one.gpu.mig_enabled)]
    counts = [f"{_free(whole)} of {plural(len(whole))} free"] if whole or not instances else []
    if instances:
        on = plural(len({one.gpu.mig_parent for one in instances}))
        counts.append(f"{_free(instances)} of {plural(len(instances), 'MIG instance')} on {on} free")
    states = Counter(one.shown_state(status.taken_at) for one in status.gpus)
    counts += [f"{states[state]} {state}" for state in ("idle", "at risk", "drained") if states[state]]
    counts += [f"{len(status.queue)} waiting"] if status.queue else []
    driver = f"{status.driver} {status.driver_version}".strip()
    text = f"{status.host}: {', '.join(counts)} ({driver})"
    lines = [paint(line, "bold", color) for line in wrapped(text, width)]
    for names, labels in _models(status):
        lines += wrapped(f"{labels}: {names}" if labels else names, width)
    return lines


def _free(gpus: Iterable[GpuStatus]) -> int:
    return sum(one.state in FREE for one in gpus)


def _models(status: HostStatus) -> list[tuple[str, str]]:
    """Return (model, GPUs) for each model; one entry without a list of GPUs if all GPUs are of the same model."""
    found: dict[str, list[str]] = {}
    for one in status.gpus:
        if not one.gpu.is_mig_instance:
            found.setdefault(one.gpu.name or "(no name)", []).append(one.label)
    if len(found) == 1:
        name, labels = next(iter(found.items()))
        return [(f"{len(labels)} x {name}", "")]
    return [(name, f"GPU {gpu_ranges(labels)}") for name, labels in found.items()]


class TableRow(NamedTuple):
    """One line of the table.

    Attributes:
        color: that of the state and of the bar.
        used: bytes of memory.
        total: bytes that there are.
        others: the other cells, by title.
        text: what replaces the cells from USER on.
        claim: the one that they describe.
    """

    state: str
    color: str
    used: int | None
    total: int | None
    others: Mapping[str, str]
    text: str = ""
    claim: Holder | None = None

    @property
    def cells(self) -> Mapping[str, str]:
        """The cells by title."""
        memory = "-" if self.used is self.total is None else f"{gib(self.used)}/{gib(self.total)}G"
        return {"STATE": self.state, "MEMORY": memory, **self.others}

    def bar(self, columns: int, marks: str, color: bool) -> str:
        """Return how full the memory is, that many columns wide."""
        if self.used is None or self.total is None or self.total <= 0:
            return " " * columns
        used = max(0, min(self.used, self.total))  # a driver may answer anything, also what no float holds
        full, half = divmod((4 * columns * used + self.total - 1) // (2 * self.total), 2)
        rest = marks[2] * (columns - full - half)
        return paint(marks[0] * full + marks[1] * half, self.color, color) + paint(rest, "dim", color)


_TITLES = ("GPU", "STATE", "MEMORY", "UTIL", "TEMP", "FAN", "POWER", "USER", "JOB/PID", "HELD", "LEFT", "COMMAND")

_RIGHT = ("GPU", "MEMORY", "UTIL", "TEMP", "FAN", "POWER", "HELD", "LEFT")

_OF_VERBOSE = ("FAN", "POWER")

_OF_GPU = _TITLES[: _TITLES.index("USER")]


def _gpu_table(status: HostStatus, width: int, color: bool, marks: str, verbose: bool, most_of_user: int) -> list[str]:
    rows = [*_rows(status.gpus, status.taken_at, verbose)]
    most = {"USER": most_of_user, "JOB/PID": 13}
    shown = [title for title in _TITLES if verbose or title not in _OF_VERBOSE]
    cells = {title: [row.cells.get(title, "") for row in rows] for title in shown}
    columns = [Column(title, cells[title], right=title in _RIGHT, most=most.get(title, width)) for title in shown]
    bar = next((columns for least, columns in _BARS if width >= least), 0)
    blank = " " * (bar + 1 if bar else 0)
    columns = _fitting(columns, width - len(blank), (*_OF_VERBOSE, "TEMP", "COMMAND", "LEFT", "HELD", "JOB/PID"))
    titles = [column.padded(column.title) for column in columns]
    titles[2] = "MEMORY".ljust(columns[2].width + len(blank))
    lines = [paint(cut(GAP.join(titles).rstrip(), width), "bold", color)]
    head = [column for column in columns if column.title in _OF_GPU]
    tail = columns[len(head) :]
    room = width - _width(head) - len(blank) - len(GAP)
    for number, row in enumerate(rows):
        shown = [column.padded(column.cells[number]) for column in head]
        shown[1] = paint(shown[1], row.color, color and shown[1].strip() != "")
        load = row.cells.get("UTIL", "")
        if load.removesuffix("%").isdecimal() and int(load[:-1]) >= _HIGH:
            shown[3] = paint(shown[3], "bold", color)
        shown[2] = row.bar(bar, marks, color) + blank[:1] + shown[2]
        facts = [column.padded(column.cells[number]) for column in tail]
        rest = cut(row.text or GAP.join(facts).rstrip(), max(0, room))
        lines.append(GAP.join([*shown, rest]).rstrip())
    notes = [line for note in notes_of(status) for line in _warning(note, width, color)]
    return [*lines, "", *notes] if notes else lines


def notes_of(status: HostStatus) -> Iterator[str]:
    """Yield the remarks on the GPUs and when they are reserved, each once with the GPUs that it is about."""
    notes: dict[str, list[str]] = {}
    for one in status.gpus:
        for note in _notes(one):
            notes.setdefault(printable(note), []).append(one.label)
    for window in status.windows:
        for one in status.gpus:
            if window.covers(one.gpu) and str(window) not in one.reason:
                notes.setdefault(printable(str(window)), []).append(one.label)
    yield from (f"GPU {gpu_ranges(labels)}: {note}" for note, labels in notes.items())


def _fitting(columns: Iterable[Column], width: int, optional: Iterable[str]) -> list[Column]:
    """Return the columns that are not empty, without some that are optional if they do not fit: none is cut but
    COMMAND, and that only to its least width."""
    shown = [column for column in columns if column.width]
    for title in optional:
        spare = max(0, shown[-1].width - _LEAST_COMMAND) if shown and shown[-1].title == "COMMAND" else 0
        if _width(shown) - spare > width:
            shown = [column for column in shown if column.title != title]
    return shown


def _width(columns: Collection[Column]) -> int:
    return sum(column.width + len(GAP) for column in columns) - len(GAP)


def _rows(gpus: Iterable[GpuStatus], now: float, verbose: bool) -> Iterator[TableRow]:
    for one in gpus:
        yield from rows_of(one, now)
        for process in sorted(one.processes, key=lambda process: -(process.memory_used or 0)) if verbose else ():
            used, total = process.memory_used, one.gpu.memory_total
            yield TableRow(f"  {process.kind}", "dim", used, total, _process_cells([process]))


def rows_of(one: GpuStatus, now: float) -> Iterator[TableRow]:
    """Return the row of a GPU, and one for each claim of it where there are several."""
    state, gpu, text = one.shown_state(now), one.gpu, ""
    cells = {"GPU": one.label, "UTIL": "-" if gpu.utilization is None else f"{gpu.utilization}%"}
    cells["TEMP"] = "" if gpu.temperature is None else f"{gpu.temperature}C"
    cells["FAN"] = "" if gpu.fan is None else f"{gpu.fan}%"
    cells["POWER"] = "" if gpu.power is None else f"{gpu.power}/{'?' if gpu.power_limit is None else gpu.power_limit}W"
    if one.shares:
        free = "" if one.share_free is None else f", {format_bytes(one.share_free)} unclaimed"
        text = plural(len(one.shares), "claim") + free
    elif one.pieces:
        text = plural(len(one.pieces), "claim")
    elif one.claim is not None:
        cells |= _claim_cells(one.claim, now)
    if one.users and (one.state == "busy" if one.claim is None else one.claim.pid is None and not one.claim.since):
        cells |= _process_cells(one.users)
    claim = None if one.shares or one.pieces else one.claim
    yield TableRow(state, _COLORS.get(state, "dim"), gpu.memory_used, gpu.memory_total, cells, text, claim)
    for claim in one.shares:
        color = "red" if _is_over(claim) else "cyan"
        yield TableRow("  share", color, claim.memory_used, claim.share, _claim_cells(claim, now), claim=claim)
    for claim in one.pieces:
        yield TableRow("  piece", "cyan", None, None, _claim_cells(claim, now), claim=claim)


def _process_cells(users: Collection[ProcessStatus]) -> dict[str, str]:
    """Describe the process with the most memory."""
    first = max(users, key=lambda process: process.memory_used or 0)
    number = len({process.pid for process in users})
    command = _short(first.command)
    if first.ended:
        command = "(has ended)"
    if number > 1:
        command = f"(1 of {number}) {command}"
    return _holder_cells(first.user, first.pid, None) | {"COMMAND": command}


def _claim_cells(claim: Holder, now: float) -> dict[str, str]:
    held = short_age(now - claim.since) if claim.since else "?"
    told = {"HELD": held, "LEFT": _left(claim.until, now), "COMMAND": _short(claim.command or "?")}
    return _holder_cells(claim.user, claim.pid, claim.job) | told


def _holder_cells(user: str | None, pid: int | None, job: str | None) -> dict[str, str]:
    """Return the user with the job, or the pid where there is no job."""
    number = printable(job.rpartition(":")[2]) if job else f"pid {pid or '?'}"
    return {"USER": printable(user or "?"), "JOB/PID": number}


def _short(command: str | None) -> str:
    """Return a command line without the directory of its program, to save columns."""
    program, blank, arguments = printable(command or "(cannot be seen here)").partition(" ")
    return (program.rpartition("/")[2] or program) + blank + arguments


def _left(until: float | None, now: float) -> str:
    """Return ``20m`` for a claim that is to end in 20 minutes, ``-20m`` for one that was to end 20 minutes ago."""
    if until is None:
        return ""
    return f"-{short_age(now - until)}" if until < now else short_age(until - now)


def gib(size: int | None) -> str:
    """Return a number of bytes in GiB, without the unit; ``?`` for None."""
    gib = (size or 0) / (1 << 30)
    return "?" if size is None else f"{gib:.1f}" if 0.05 <= gib < 9.95 else f"{gib:.0f}"


def _notes(one: GpuStatus) -> Iterator[str]:
    """Return the remarks on a GPU and its claims."""
    several = one.shares or one.pieces
    if several:
        for claim in several:
            yield from (f"process {claim.pid or '?'}: {note}" for note in _claim_notes(claim))
    elif one.claim is not None:
        yield from _claim_notes(one.claim)
    if one.idle_report and one.idle_for is not None:
        yield f"no work for {format_age(one.idle_for)}"
    if one.inside is not None:
        who = " ".join(filter(None, (one.inside.user, _short(one.inside.command or ""))))
        yield f"inside it: process {one.inside.pid or '?'} {who}".rstrip()
        yield from _claim_notes(one.inside)
    ended = [process.pid for process in one.users if process.ended]
    yield from (why_kept(pid) for pid in dict.fromkeys(ended))
    if one.claim is None:
        if not (one.state == "busy" and one.users):
            yield from filter(None, [one.reason or "free, shared with the display" * (one.state == "display")])
        return
    if one.reason and (one.state not in ("claimed", "display") or one.claim.elsewhere or one.claim.full):
        yield one.reason.partition(";")[0]
    if one.fault:
        yield one.fault
    for process in one.users if one.idle else []:
        who = f"{process.pid} {process.user or ''} {_short(process.command)}"
        yield f"on it, but not part of the claim: process {who}"


def _claim_notes(claim: Holder) -> Iterator[str]:
    if claim.held_as is not None:
        yield claim.held_as.text
    if claim.stopped:
        yield f"process {claim.pid} is stopped (a suspended job?) and keeps the GPU"
    if claim.note:
        yield claim.note
    if claim.removable_by:
        yield f"nothing but its entry keeps others off it, and {claim.removable_by} can remove that (safe-gpu doctor)"
    if _is_over(claim):
        yield f"uses more than its share: {format_bytes(claim.memory_used or 0)} of {format_bytes(claim.share or 0)}"


def _is_over(claim: Holder) -> bool:
    return claim.share is not None and (claim.memory_used or 0) > claim.share


def queue_of(
    status: HostStatus, verbose: bool, most_of_user: int
) -> tuple[str, list[list[WaiterStatus]], tuple[Column, ...]]:
    """Return the order in which they are served, the waiters in groups that are alike, and a column for each fact."""
    groups = _alike(status.queue, verbose)[:_MOST_WAITERS]
    queue = [one for one, *_ in groups]
    both, now = any(one.prefix for one in status.gpus), status.taken_at
    foreseen = any(one.expected_start is not None or one.earliest_start is not None or one.limit for one in queue)
    who = [_holder_cells(one.user, one.pid, one.job) for one in queue]
    who = [cells if len(group) < 2 else {"USER": cells["USER"]} for cells, group in zip(who, groups, strict=True)]
    columns = (
        Column("#", [gpu_ranges(str(one.position) for one in group) for group in groups], right=True),
        Column("USER", [cells["USER"] for cells in who], most=most_of_user),
        Column("JOB/PID", [cells.get("JOB/PID", "") for cells in who], most=13),
        Column("WANTS", [f"{len(group)} x " * (len(group) > 1) + group[0].wants(both) for group in groups]),
        Column("WAITED", [short_age(now - one.since) if one.since else "?" for one in queue], right=True),
        Column("PLANNED", ["" if one.hold_for is None else short_age(one.hold_for) for one in queue], right=True),
        Column("STARTS", [one.starts(now) if foreseen else "" for one in queue]),
    )
    order = "first come first served"
    if any(one.turn is not None for one in status.queue):
        order = "by turns; all but the first may start later than shown" if foreseen else "by turns"
    return order, groups, columns


def _queue(status: HostStatus, width: int, color: bool, verbose: bool, most_of_user: int) -> list[str]:
    if not status.queue:
        return []
    order, groups, columns = queue_of(status, verbose, most_of_user)
    queue = [one for one, *_ in groups]
    lines = ["", paint(f"Waiting, {order}:", "bold", color)]
    title, *rows = table(columns, width, optional=("PLANNED", "WAITED"))
    lines.append(paint(title, "bold", color))
    for one, row in zip(queue, rows, strict=True):
        lines.append(row)
        if one.stopped:
            text = f"process {one.pid} is stopped (a suspended job?) and keeps its place"
            lines += _warning(text, width, color, "     ")
        lines += _warning(one.note, width, color, "     ")
    shown = sum(map(len, groups))
    if len(status.queue) > shown:
        lines.append(f"... and {len(status.queue) - shown} more")
    return lines


def _alike(queue: Sequence[WaiterStatus], verbose: bool) -> list[list[WaiterStatus]]:
    """Group successive waiters of one user that want the same, unless they are few."""
    found: list[list[WaiterStatus]] = []
    for _, one in groupby(queue, attrgetter("user", "nb_gpus", "share", "vendor", "limit", "stopped", "note")):
        alike = list(one)
        apart = verbose or len(alike) < _LEAST_ALIKE or alike[0].stopped or alike[0].note
        found += [[waiter] for waiter in alike] if apart else [alike]
    return found


def table(columns: Iterable[Column], width: int, optional: Iterable[str] = ()) -> Iterator[str]:
    """Return the titles and a line for each row, without the columns that are empty.

    Args:
        optional: titles of columns that are left out, one after the other, until the others fit.
    """
    shown = _fitting(columns, width, optional)
    rows = zip(*(column.cells for column in shown), strict=True)
    for cells in chain([[column.title for column in shown]], rows):
        yield cut(GAP.join(column.padded(cell) for column, cell in zip(shown, cells, strict=True)).rstrip(), width)
