"""The rows of the table of GPUs, which the terminal and the page show. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..gpus.devices import Gpu, Holder
from ..host.foreign_files import printable
from ..wording.text import format_bytes, plural, short_age
from .facts import GpuStatus, ProcessStatus

_COLOR_OF_STATE = {
    "free": "green",
    "display": "green",
    "claimed": "cyan",
    "shared": "cyan",
    "idle": "yellow",
    "at risk": "yellow",
    "drained": "magenta",
    "busy": "red",
}

_HIGH = 90  # percent of utilization


class UserCells(NamedTuple):
    """The cells that say who uses a GPU: the user, the job or else the pid, for how long it has been held and still
    will be, and the command."""

    user: str = ""
    job: str = ""
    held: str = ""
    left: str = ""
    command: str = ""


NOBODY = UserCells()
"""Where nobody uses it, or it is not known who does."""


@dataclass(frozen=True)
class TableRow:
    """One line of the table of GPUs: a GPU, one of several claims of it, or a process on it.

    Attributes:
        color: that of the state and of the bar.
        memory_used: bytes.
        memory_total: bytes that there are.
        gpu: the label of a GPU; "" for its claims and processes.
        is_loaded: whether the utilization is high.
        who: who uses it.
        text: what stands in place of the cells about who uses it; "" for nothing.
        claim: the one that they describe.
    """

    state: str
    color: str
    memory_used: int | None
    memory_total: int | None
    gpu: str = ""
    utilization: str = ""
    is_loaded: bool = False
    temperature: str = ""
    fan: str = ""
    power: str = ""
    who: UserCells = NOBODY
    text: str = ""
    claim: Holder | None = None

    @property
    def memory(self) -> str:
        """The memory used and the memory that there is."""
        if self.memory_used is None and self.memory_total is None:
            return "-"
        return f"{gib(self.memory_used)}/{gib(self.memory_total)}G"


def rows_of(one: GpuStatus, now: float) -> list[TableRow]:
    """Return the row of a GPU, and one for each claim of it where there are several."""
    shares = [_share_row(claim, now) for claim in one.shares]
    pieces = [_piece_row(claim, now) for claim in one.pieces]
    return [_gpu_row(one, now), *shares, *pieces]


def process_rows(processes: Iterable[ProcessStatus], gpu: Gpu) -> list[TableRow]:
    """Return the rows of processes on a GPU, that with the most memory first."""
    return [_process_row(process, gpu) for process in sorted(processes, key=_memory_of, reverse=True)]


def _gpu_row(one: GpuStatus, now: float) -> TableRow:
    gpu = one.gpu
    state = one.shown_state(now)
    claim = one.claim
    text = _number_of_claims(one) or _somebody(one)
    if text:
        claim = None  # each of several has its own row
    return TableRow(
        state,
        _COLOR_OF_STATE.get(state, "dim"),
        gpu.memory_used,
        gpu.memory_total,
        gpu=one.label,
        utilization=_with_unit(gpu.utilization, "%", unknown="-"),
        is_loaded=gpu.utilization is not None and gpu.utilization >= _HIGH,
        temperature=_with_unit(gpu.temperature, "C"),
        fan=_with_unit(gpu.fan, "%"),
        power=_power(gpu),
        who=_who(one, claim, now),
        text=text,
        claim=claim,
    )


def _share_row(claim: Holder, now: float) -> TableRow:
    color = "cyan"
    if is_over(claim):
        color = "red"
    return TableRow("  share", color, claim.memory_used, claim.share, who=_claim_cells(claim, now), claim=claim)


def _piece_row(claim: Holder, now: float) -> TableRow:
    return TableRow("  piece", "cyan", None, None, who=_claim_cells(claim, now), claim=claim)


def _process_row(process: ProcessStatus, gpu: Gpu) -> TableRow:
    who = _process_cells([process])
    return TableRow(f"  {process.kind}", "dim", process.memory_used, gpu.memory_total, who=who)


def _memory_of(process: ProcessStatus) -> int:
    return process.memory_used or 0


def _with_unit(number: int | None, unit: str, unknown: str = "") -> str:
    if number is None:
        return unknown
    return f"{number}{unit}"


def _power(gpu: Gpu) -> str:
    if gpu.power is None:
        return ""
    return f"{gpu.power}/{_with_unit(gpu.power_limit, 'W', unknown='?W')}"


def _number_of_claims(one: GpuStatus) -> str:
    """Return how many claims there are, and what is left for more shares; "" for one claim or none."""
    if one.pieces:
        return plural(len(one.pieces), "claim")
    if not one.shares:
        return ""
    claims = plural(len(one.shares), "claim")
    if one.share_free is None:
        return claims
    return f"{claims}, {format_bytes(one.share_free)} unclaimed"


def _somebody(one: GpuStatus) -> str:
    """Return who holds a GPU of which only the door is held; "" where more is known."""
    if one.claim is None or not one.claim.elsewhere or one.users:
        return ""
    return one.claim.name


def _who(one: GpuStatus, claim: Holder | None, now: float) -> UserCells:
    """Return who uses a GPU: its only claim, or its processes where no more is known of a claim."""
    who = NOBODY
    if claim is not None:
        who = _claim_cells(claim, now)
    if one.users and _is_told_by_processes(one):
        process = _process_cells(one.users)
        who = who._replace(user=process.user, job=process.job, command=process.command)
    return who


def _is_told_by_processes(one: GpuStatus) -> bool:
    if one.claim is None:
        return one.state == "busy"
    return one.claim.pid is None and not one.claim.since


def _process_cells(processes: Sequence[ProcessStatus]) -> UserCells:
    """Describe the process with the most memory."""
    largest = max(processes, key=_memory_of)
    command = short_command(largest.command)
    if largest.ended:
        command = "(has ended)"
    pids = {process.pid for process in processes}
    if len(pids) > 1:
        command = f"(1 of {len(pids)}) {command}"
    return UserCells(user=user_cell(largest.user), job=job_cell(None, largest.pid), command=command)


def _claim_cells(claim: Holder, now: float) -> UserCells:
    held = "?"
    if claim.since:
        held = short_age(now - claim.since)
    return UserCells(
        user=user_cell(claim.user),
        job=job_cell(claim.job, claim.pid),
        held=held,
        left=_left(claim.until, now),
        command=short_command(claim.command or "?"),
    )


def user_cell(user: str | None) -> str:
    """Return the name of a user, which may not be known."""
    return printable(user or "?")


def job_cell(job: str | None, pid: int | None) -> str:
    """Return the number of the job, or the pid where there is no job."""
    if job:
        return printable(job.rpartition(":")[2])
    return f"pid {pid or '?'}"


def short_command(command: str | None) -> str:
    """Return a command line without the directory of its program, to save columns."""
    path, blank, arguments = printable(command or "(cannot be seen here)").partition(" ")
    name = path.rpartition("/")[2]
    return (name or path) + blank + arguments


def _left(until: float | None, now: float) -> str:
    """Return ``20m`` for a claim that is to end in 20 minutes, ``-20m`` for one that was to end 20 minutes ago."""
    if until is None:
        return ""
    if until < now:
        return f"-{short_age(now - until)}"
    return short_age(until - now)


def is_over(claim: Holder) -> bool:
    """Return whether a claim uses more than its share of a GPU."""
    return claim.share is not None and (claim.memory_used or 0) > claim.share


def gib(size: int | None) -> str:
    """Return a number of bytes in GiB, without the unit; ``?`` for None."""
    if size is None:
        return "?"
    number = size / (1 << 30)
    if 0.05 <= number < 9.95:
        return f"{number:.1f}"
    return f"{number:.0f}"
