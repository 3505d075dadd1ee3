"""The state of a host as a table and as metrics of Prometheus. Pure.

Labels are named as NVIDIA's DCGM exporter names them (``gpu``, ``UUID``), so that both join on them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING

from ..procfs import printable
from ..text import GAP, Column, cut, display_width, format_age, gpu_ranges, paint, plural, short_age, wrapped
from ..vendors import VENDORS

if TYPE_CHECKING:
    from ..devices import Gpu
    from .facts import ClaimStatus, GpuStatus, HostStatus, ProcessStatus, WaiterStatus


# The table of ``safe-gpu status``: one row for each GPU with remarks below it, then the queue. Pure.


_STATE_COLORS = {"free": "green", "display": "green", "claimed": "cyan", "busy": "red", "unusable": "dim"}

_INDENT = " " * 5

# Waiters that are shown. Any user can make thousands.
_MOST_WAITERS = 100
_LEAST_ALIKE = 4


def render(
    status: HostStatus, *, width: int, color: bool, shown: HostStatus | None = None, verbose: bool = False
) -> str:
    """The status as text: no line is wider than ``width`` columns; ``color`` adds ANSI colours to the state.

    Args:
        verbose: whether waiters of one user have a line each.
        shown: the part of it whose GPUs and waiters are listed; None lists all.
    """
    lines = _headline(status, width, color)
    lines.append("")
    if shown is None:
        shown = status
    if shown.gpus:
        lines += _gpu_table(shown, width, color)
    else:
        lines += wrapped("none of these GPUs" if status.gpus else "no GPUs", width)
    lines += _queue(shown, width, color, verbose)
    for warning in (*filter(None, [status.shift]), *status.broken, *status.warnings):
        lines += ["", *(paint(line, "yellow", color) for line in wrapped(f"warning: {warning}", width))]
    return "\n".join(lines)


def _alike(queue: Sequence[WaiterStatus], verbose: bool) -> list[list[WaiterStatus]]:
    """The waiters; those together that follow each other, are of one user and want the same, unless they are few."""
    found: list[list[WaiterStatus]] = []
    for _, one in groupby(
        queue, lambda one: (one.user, one.nb_gpus, one.share, one.vendor, one.limit, one.stopped, one.note)
    ):
        alike = list(one)
        apart = verbose or len(alike) < _LEAST_ALIKE or alike[0].stopped or alike[0].note
        found += [[waiter] for waiter in alike] if apart else [alike]
    return found


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
    """(model, GPUs) for each model; one entry without a list of GPUs if all GPUs are of the same model."""
    found: dict[str, list[str]] = {}
    for one in status.gpus:
        if not one.gpu.is_mig_instance:
            found.setdefault(one.gpu.name or "(no name)", []).append(one.label)
    if len(found) == 1:
        name, labels = next(iter(found.items()))
        return [(f"{len(labels)} x {name}", "")]
    return [(name, f"GPU {gpu_ranges(labels)}") for name, labels in found.items()]


# The GPUs


@dataclass(frozen=True)
class _Row:
    """The cells of one GPU; ``text``, if set, replaces the cells from ``user`` on."""

    label: str
    state: str
    color: str
    memory: str
    load: str
    user: str = ""
    pid: str = ""
    job: str = ""
    age: str = ""
    left: str = ""
    command: str = ""
    text: str = ""
    remarks: tuple[str, ...] = ()


def _gpu_table(status: HostStatus, width: int, color: bool) -> list[str]:
    wide = width >= 100
    now = status.taken_at
    rows = [row for one in status.gpus for row in (_row(one, now, wide), *_share_rows(one, now, wide))]
    columns = [
        Column("GPU", [row.label for row in rows], right=True),
        Column("STATE", [row.state for row in rows]),
        Column("MEMORY", [row.memory for row in rows], right=True),
        Column("UTIL", [row.load for row in rows], right=True),
    ]
    holder = [
        Column("USER", [row.user for row in rows], most=24 if wide else 8),
        Column("PID", [row.pid for row in rows], right=True),
        Column("JOB", [row.job for row in rows], most=30 if wide else 12),
        Column("FOR", [row.age for row in rows], right=True),
        Column("LEFT", [row.left for row in rows], right=True),
    ]
    holder = [column for column in holder if column.width]
    left = GAP.join(column.padded(column.title) for column in columns)
    room = width - display_width(left) - len(GAP)
    title = GAP.join([left, *(column.padded(column.title) for column in holder), "COMMAND"])
    lines = [paint(cut(title, width).rstrip(), "bold", color)]
    for number, row in enumerate(rows):
        head = [column.padded(column.cells[number]) for column in columns]
        head[1] = paint(head[1], row.color, color)
        if row.load == "idle":
            head[3] = paint(head[3], row.color, color)
        tail = [column.padded(column.cells[number]) for column in holder]
        rest = row.text or GAP.join([*tail, row.command])
        lines.append(GAP.join([*head, cut(rest, max(0, room))]).rstrip())
        remarks = row.remarks
        if row.text and display_width(row.text) > room:
            remarks = (row.text, *remarks)
            lines[-1] = GAP.join(head).rstrip()
        for remark in remarks:
            lines += _remark(remark, width, color)
    return lines


def _share_rows(one: GpuStatus, now: float, wide: bool) -> Iterator[_Row]:
    """A row for each claim that shares the GPU, below the GPU's own."""
    for claim in one.shares:
        memory = f"{_gib(claim.memory_used)}/{_gib(claim.share)}G"
        yield _claim_row(("", "", "", memory, ""), claim, now, wide, _share_remarks(claim, now))


def _remark(text: str, width: int, color: bool) -> list[str]:
    return [paint(line, "yellow", color) for line in wrapped(text, width, _INDENT)]


def _row(one: GpuStatus, now: float, wide: bool) -> _Row:
    color = "yellow" if one.idle or one.idle_report else _STATE_COLORS.get(one.state, "dim")
    load = "idle" if one.idle else "-" if one.gpu.utilization is None else f"{one.gpu.utilization}%"
    facts = (one.label, one.state, color, _memory(one.gpu), load)
    if one.shares:
        left = "" if one.share_free is None else f", {_gib(one.share_free)} GiB left"
        return _Row(
            *facts, text=f"shared by {plural(len(one.shares), 'claim')}{left}", remarks=tuple(filter(None, [one.fault]))
        )
    if one.claim is not None:
        return _claim_row(facts, one.claim, now, wide, _remarks(one, now))
    computing = [process for process in one.processes if process.kind != "graphics"]
    if one.state == "busy" and computing:
        first = max(computing, key=lambda process: process.memory_used or 0)
        number = len({process.pid for process in computing})
        return _Row(
            *facts,
            user=printable(first.user or "?"),
            pid=str(first.pid),
            command=(f"(1 of {number}) " if number > 1 else "") + _command_of(first),
        )
    shared = "free, shared with the display" if one.state == "display" else ""
    return _Row(*facts, text=printable(one.reason) or shared)


def _claim_row(
    facts: tuple[str, str, str, str, str], claim: ClaimStatus, now: float, wide: bool, remarks: tuple[str, ...]
) -> _Row:
    return _Row(
        *facts,
        user=printable(claim.user or "?"),
        pid=str(claim.pid or "?"),
        job=printable((claim.job or "") if wide else (claim.job or "").rpartition(":")[2]),
        age=short_age(now - claim.since) if claim.since else "?",
        left=_left(claim.until, now),
        command=_short(claim.command or "?"),
        remarks=remarks,
    )


def _share_remarks(claim: ClaimStatus, now: float) -> tuple[str, ...]:
    found = [*_claim_remarks(claim), _overdue(claim, now)]
    if claim.share is not None and (claim.memory_used or 0) > claim.share:
        found.append(f"uses more than its share: {_gib(claim.memory_used)} of {_gib(claim.share)} GiB")
    return tuple(printable(text) for text in found if text)


def _overdue(claim: ClaimStatus | None, now: float) -> str:
    if claim is None or claim.until is None or claim.until >= now:
        return ""
    return f"overdue {format_age(now - claim.until)}"


def _command_of(process: ProcessStatus) -> str:
    return _short(process.command or "(cannot be seen here)")


def _short(command: str) -> str:
    """A command line without the directory of its program, to save columns."""
    program, blank, arguments = printable(command).partition(" ")
    return (program.rpartition("/")[2] or program) + blank + arguments


def _left(until: float | None, now: float) -> str:
    """``20m`` for a claim that is to end in 20 minutes, ``-20m`` for one that was to end 20 minutes ago."""
    if until is None:
        return ""
    return f"-{short_age(now - until)}" if until < now else short_age(until - now)


def _remarks(one: GpuStatus, now: float) -> tuple[str, ...]:
    """The lines below the row of a claim, for facts that have no column."""
    found = [*_claim_remarks(one.claim), _overdue(one.claim, now)]
    if one.idle_report and one.idle_for is not None:
        found.append(f"no work for {format_age(one.idle_for)}")
    if one.inner is not None:
        inner = one.inner
        who = " ".join(part for part in (inner.user, _short(inner.command or "")) if part)
        found.append(f"inside it: process {inner.pid or '?'} {who}".rstrip())
        found += _claim_remarks(inner)
    if one.state not in ("claimed", "display"):
        found.append(one.reason.partition(";")[0])
    found.append(one.fault)
    strangers = [process for process in one.processes if process.kind != "graphics"] if one.idle else []
    found += [f"on it, but not part of the claim: process {p.pid} {p.user or ''} {_command_of(p)}" for p in strangers]
    return tuple(printable(text) for text in found if text)


def _claim_remarks(claim: ClaimStatus | None) -> Iterable[str]:
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
    used = _gib(gpu.memory_used)
    total = "?" if gpu.memory_total is None else f"{gpu.memory_total / (1 << 30):.0f}"
    return f"{used}/{total}G"


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / (1 << 30):.1f}"


# The queue


def _queue(status: HostStatus, width: int, color: bool, verbose: bool) -> list[str]:
    if not status.queue:
        return []
    groups = _alike(status.queue, verbose)[:_MOST_WAITERS]
    queue = [one for one, *_ in groups]
    both, now = any(one.prefix for one in status.gpus), status.taken_at
    foreseen = any(one.expected_start is not None or one.limit for one in queue)
    columns = (
        Column("#", [gpu_ranges(str(one.position) for one in group) for group in groups], right=True),
        Column("USER", [printable(one.user or "?") for one in queue], most=24),
        Column("PID", [str(group[0].pid or "?") if len(group) < 2 else "" for group in groups], right=True),
        Column("JOB", [_job_of(group, width) for group in groups], most=30 if width >= 100 else 12),
        Column("WANTS", [f"{len(group)} x " * (len(group) > 1) + _wants(group[0], both) for group in groups]),
        Column("FOR", [short_age(now - one.since) if one.since else "?" for one in queue], right=True),
        Column("HOLDS", ["" if one.hold_for is None else short_age(one.hold_for) for one in queue], right=True),
        Column("STARTS", [_starts(one, now) if foreseen else "" for one in queue], right=True),
    )
    lines = ["", paint("Waiting, first come first served:", "bold", color)]
    title, *rows = table(columns, width)
    lines.append(paint(title, "bold", color))
    for one, row in zip(queue, rows, strict=True):
        lines.append(row)
        if one.stopped:
            text = f"process {one.pid} is stopped (a suspended job?) and keeps its place"
            lines += _remark(text, width, color)
        lines += _remark(one.note, width, color)
    shown = sum(map(len, groups))
    if len(status.queue) > shown:
        lines.append(f"... and {len(status.queue) - shown} more")
    return lines


def table(columns: Iterable[Column], width: int) -> Iterator[str]:
    """The titles and a line for each row, without the columns that are empty."""
    shown = [column for column in columns if column.width]
    rows = zip(*(column.cells for column in shown), strict=True)
    for cells in chain([[column.title for column in shown]], rows):
        yield cut(GAP.join(column.padded(cell) for column, cell in zip(shown, cells, strict=True)).rstrip(), width)


def _job_of(group: Sequence[WaiterStatus], width: int) -> str:
    """Of one waiter, to cancel it; where columns are few without the scheduler."""
    job = (group[0].job or "") if len(group) < 2 else ""
    return printable(job if width >= 100 else job.rpartition(":")[2])


def _wants(one: WaiterStatus, both: bool) -> str:
    """``2 GPUs``, or ``2 AMD GPUs`` on a host with GPUs of two vendors."""
    if one.nb_gpus is None:
        return "?"
    text = plural(one.nb_gpus, f"{VENDORS[one.vendor].title} GPU" if both and one.vendor else "GPU")
    return text if one.share is None else f"{_gib(one.share).removesuffix('.0')} GiB of {text}"


def _starts(one: WaiterStatus, now: float) -> str:
    """``in 20m``; ``now`` where the GPUs are free or overdue."""
    if one.limit is not None:
        held = f"at limit ({one.limit[0]:g} of {one.limit[1]})"
        return held if one.expected_start is None else f"{held}, in {short_age(one.expected_start - now)}"
    if one.expected_start is None:
        return "?"
    return f"in {short_age(one.expected_start - now)}" if one.expected_start > now else "now"


# The state of a host as metrics, in the text format of Prometheus. Pure.


_MOST_USERS = 100  # of waiters: whoever has many user ids can wait as each of them
_OTHERS = "other"

_STATES = ("free", "claimed", "busy", "display", "unusable")

_CLAIM_METRICS: tuple[tuple[str, str, Callable[[GpuStatus, ClaimStatus], float | None]], ...] = (
    ("claimed", "1 for a GPU that this user has claimed.", lambda one, claim: 1.0),
    ("claim_start_time_seconds", "When the claim was made, in Unix seconds.", lambda one, claim: claim.since or None),
    ("claim_idle_seconds", "How long the claimed GPU has shown no work, as far as seen.", lambda one, _: one.idle_for),
    (
        "claim_expected_end_time_seconds",
        "When the claim is expected to end, in Unix seconds.",
        lambda one, claim: claim.until,
    ),
)
"""Name, help and value of each metric of a claimed GPU."""


_SHARE_METRICS = (
    ("share_bytes", "Memory of the GPU that this claim shares with others has.", "share"),
    ("share_used_bytes", "Memory that the processes of this claim use on the shared GPU.", "memory_used"),
)


def render_metrics(status: HostStatus) -> str:
    """All metrics of a host.

    Facts that are not known have no sample. Nothing tells of claims and of the queue if they cannot be read.
    """
    gpus = status.gpus
    states = [(_of(one, state=state), float(one.state == state)) for one in gpus for state in _STATES]
    used = [(_of(one), one.gpu.memory_used) for one in gpus]
    text = _metric("up", "1 if the state of the host could be read.", [("", float(not status.warnings))])
    text += _metric("gpu_state", "1 for the state that the GPU is in, 0 for the others.", states)
    text += _metric("memory_used_bytes", "Memory in use on the GPU.", used)
    if status.warnings:
        return text
    for name, help_text, value in _CLAIM_METRICS:
        held = [(_of(one, user=claim.user or ""), value(one, claim)) for one in gpus for claim in one.claims]
        text += _metric(name, help_text, held)
    for name, help_text, fact in _SHARE_METRICS:
        shares = [
            (_of(one, user=claim.user or "", pid=str(claim.pid or "")), getattr(claim, fact))
            for one in gpus
            for claim in one.shares
        ]
        text += _metric(name, help_text, shares)
    jobs = [
        (_of(one, user=one.claim.user or "", batch_job=one.claim.job), 1.0)
        for one in gpus
        if one.claim and one.claim.job
    ]
    text += _metric("claim_info", "The batch job of a claim.", jobs)
    most = [(_labels(user=user), float(number)) for user, number in sorted(status.max_gpus.items())[:_MOST_USERS]]
    text += _metric("max_gpus", "How many GPUs a user who holds or waits may hold.", most)
    limited = Counter(one.user or "" for one in status.queue if one.limit)
    samples = [(_labels(user=user), float(number)) for user, number in sorted(limited.items())[:_MOST_USERS]]
    text += _metric("waiting_at_limit", "Waiting claims whose user holds as many GPUs as allowed.", samples)
    oldest = max((status.taken_at - one.since for one in status.queue if one.since), default=0.0)
    text += _metric("waiting", "Waiting claims.", _waiting(status))
    help_text = "How long the first waiting claim has waited; 0 without any."
    return text + _metric("oldest_wait_seconds", help_text, [("", max(0.0, oldest))])


def _waiting(status: HostStatus) -> list[tuple[str, float]]:
    users = Counter(one.user or "" for one in status.queue)
    if len(users) > _MOST_USERS:
        ranked = sorted(users, key=lambda user: (user == _OTHERS, -users[user]))
        users[_OTHERS] = sum(users.pop(user) for user in ranked[_MOST_USERS - 1 :])
    return [(_labels(user=user), number) for user, number in sorted(users.items())] or [(_labels(user=""), 0)]


def _of(one: GpuStatus, **more: str) -> str:
    return _labels(gpu=one.gpu.label, UUID=one.gpu.uuid, vendor=one.gpu.vendor, **more)


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return printable(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _metric(name: str, help_text: str, samples: Iterable[tuple[str, float | None]]) -> str:
    """A sample for each set of labels: a driver may report a device twice, and a reader refuses all then."""
    lines = [f"# HELP safe_gpu_{name} {help_text}", f"# TYPE safe_gpu_{name} gauge"]
    known = {labels: float(value) for labels, value in samples if value is not None}
    lines += (f"safe_gpu_{name}{labels} {value!r}" for labels, value in known.items())
    return "".join(f"{line}\n" for line in lines)
