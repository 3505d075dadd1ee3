"""What a host was used for, by user, week and host, as rows and as plots."""

import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ..errors import SafeGpuError
from ..host.programs import Failed, call_in_child, environment, is_root
from ..wording.text import Column
from .history import GpuHours, PastClaim, calendar, gpu_hours_by, hours
from .table import table
from .usage import UseFacts, lines_after_table, sentence_on_looks

BY = ("user", "week", "host")

_MOST_USERS = 9  # that have a colour of their own

_OTHERS = "others"

_OPTIONAL = ("95% WAIT (MIN)", "MEAN WAIT (MIN)", "FREE GPU-HOURS")  # columns, where there is no room for all


class ReportRow(NamedTuple):
    """The claims of one user, week or host (``by``).

    GPU-hours are between ``gpu_hours_least`` and ``gpu_hours_most``. ``free_gpu_hours`` are those in which no claim
    held a GPU of the host, None where that is not known. ``waits`` of the claims began in this time and say how long
    they waited: ``wait_mean`` seconds, and 95 of 100 at most ``wait_95``. The last five are those of
    :class:`~safe_gpu.status.usage.UseFacts`.
    """

    by: str
    key: str
    claims: int
    gpu_hours_least: float
    gpu_hours_most: float
    free_gpu_hours: float | None
    waits: int
    wait_mean: float | None
    wait_95: float | None
    gpu_hours_looked: float = 0.0
    gpu_hours_idle: float | None = None
    gpu_hours_absent: float | None = None
    utilization: float | None = None
    memory_most: int | None = None

    @property
    def use(self) -> UseFacts:
        """What looks have seen."""
        return UseFacts(
            self.gpu_hours_looked, self.gpu_hours_idle, self.gpu_hours_absent, self.utilization, self.memory_most
        )


def report(claims: list[PastClaim], gpus: Sequence[str], host: str, since: float, until: float) -> Iterator[ReportRow]:
    """Return the rows by user, by week and by host.

    Args:
        gpus: UUIDs of the GPUs of this host; none if they are not known.
        host: its name.
    """
    free: dict[str, float] = {}
    if gpus and claims:  # before the first of them the host may have had no history
        weeks = calendar("week", max(since, min(claim.since for claim in claims)), until)
        free = {name: free_hours(claims, gpus, begin, end) for name, begin, end in weeks}
        free[host] = sum(free.values())
    for use in gpu_hours_by(claims, "user", since, until):
        yield _row("user", use, None)
    for by in ("week", "host"):
        for use in gpu_hours_by(claims, by, since, until):
            yield _row(by, use, free.get(use.key))


def _row(by: str, use: GpuHours, free: float | None) -> ReportRow:
    wait_mean = None
    wait_95 = None
    if use.waits:
        wait_mean = round(fmean(use.waits), 3)
        wait_95 = percentile_95(use.waits)
    if free is not None:
        free = round(free, 4)
    facts = UseFacts.of(use.use)
    return ReportRow(
        by,
        use.key,
        use.claims,
        gpu_hours_least=round(use.least, 4),
        gpu_hours_most=round(use.most, 4),
        free_gpu_hours=free,
        waits=len(use.waits),
        wait_mean=wait_mean,
        wait_95=wait_95,
        **facts._asdict(),
    )


def percentile_95(values: Iterable[float]) -> float:
    """Return the least of these values that 95 of 100 do not exceed.

    >>> percentile_95(range(1, 101)), percentile_95([3.0])
    (95, 3.0)
    """
    ranked = sorted(values)
    return ranked[-(-len(ranked) * 95 // 100) - 1]


def free_hours(claims: Iterable[PastClaim], gpus: Collection[str], since: float, until: float) -> float:
    """Return the GPU-hours in this time in which no claim held one of these GPUs, a claim as long as it may have."""
    held = []
    for claim in claims:
        begin, _, last = claim.held(since, until)
        if begin < last:
            held.append((begin, last, claim.gpus))
    free = 0.0
    free_since = dict.fromkeys(gpus, since)
    for begin, last, uuids in sorted(held):
        for uuid in free_since.keys() & set(uuids):
            free += max(0.0, begin - free_since[uuid])
            free_since[uuid] = max(free_since[uuid], last)
    free += sum(until - end for end in free_since.values())
    return free / 3600


class Days(NamedTuple):
    """A report by day: the days, GPU-hours of each user on each day (at most), the waits of each day in seconds, and of
    the days on which GPUs were looked at those without work, and the mean utilisation in percent where it is known."""

    names: list[str]
    used: dict[str, list[float]]
    waits: dict[str, list[float]]
    idle: dict[str, float]
    utilization: dict[str, float]


def report_by_day(claims: Sequence[PastClaim], since: float, until: float) -> Days:
    """Return the same by day, the users with the most GPU-hours first, beyond nine of them together."""
    names = [name for name, _, _ in calendar("day", since, until)]
    users = [use.key for use in gpu_hours_by(claims, "user", since, until)]
    groups: dict[str, list[PastClaim]] = {user: [] for user in users[:_MOST_USERS]}
    for claim in claims:
        user = claim.user or "?"
        if user not in groups:
            user = _OTHERS
        groups.setdefault(user, []).append(claim)
    used = {}
    for user, own in groups.items():
        hours_of = {use.key: use.most for use in gpu_hours_by(own, "day", since, until)}
        used[user] = [hours_of.get(name, 0.0) for name in names]
    days = gpu_hours_by(claims, "day", since, until)
    waits = {day.key: day.waits for day in days if day.waits}
    idle = {}
    utilization = {}
    for day in days:
        facts = UseFacts.of(day.use)
        if facts.gpu_hours_idle is not None:
            idle[day.key] = facts.gpu_hours_idle
        if facts.utilization is not None:
            utilization[day.key] = facts.utilization
    return Days(names, used, waits, idle, utilization)


MEANING_OF_95 = "95 of 100 claims waited no longer than 95% WAIT."
"""What stands below the tables of a report."""


def title_of_report(host: str, since: float, until: float) -> str:
    """Return what stands above a report: ``GPUs of gpu1, 2026-10-29 to 2026-11-28``."""
    return f"GPUs of {host}, {date.fromtimestamp(since)} to {date.fromtimestamp(until)}"


def table_of_report(rows: Iterable[ReportRow], width: int, *, whole_names: bool = False) -> Iterator[str]:
    """Return a table for users, one for weeks and one for the host, and a sentence on what was not looked at; no line
    is wider than ``width`` columns, but for whole names."""
    rows = list(rows)
    for by in BY:
        some = [row for row in rows if row.by == by]
        facts = [
            Column(by.upper(), [row.key for row in some], most=24, whole=whole_names),
            Column("CLAIMS", [str(row.claims) for row in some], right=True),
            Column("GPU-HOURS", [hours(row.gpu_hours_least, row.gpu_hours_most) for row in some], right=True),
            Column("FREE GPU-HOURS", [_number(row.free_gpu_hours, 1, 2) for row in some], right=True),
            Column("USED", [row.use.used_text() for row in some], right=True),
            Column("IDLE", [row.use.idle_text() for row in some], right=True),
            Column("MEAN WAIT (MIN)", [_number(row.wait_mean, 60, 1) for row in some], right=True),
            Column("95% WAIT (MIN)", [_number(row.wait_95, 60, 1) for row in some], right=True),
        ]
        if by != BY[0]:
            yield ""
        yield from table(facts, width, _OPTIONAL)
    held = sum(row.gpu_hours_most for row in rows if row.by == BY[0])
    looked = sum(row.gpu_hours_looked for row in rows if row.by == BY[0])
    yield from lines_after_table(sentence_on_looks(held, looked), width)


def _number(value: float | None, unit: float, digits: int) -> str:
    if value is None:
        return ""
    return f"{value / unit:.{digits}f}"


def drawn(days: Days, form: str, title: str) -> bytes:
    """Return a picture as ``svg`` or ``png``: GPU-hours by user, stacked by day, those without work, and below them how
    long claims waited. If looks have seen how much the GPUs were used, that is drawn between the two.

    A child draws it: matplotlib goes by files in the current directory, and by variables, which another user may have
    made, and starts programs for them.

    Raises:
        SafeGpuError: the child cannot draw it; the message says why.
    """
    parent = None
    if is_root():
        parent = "/tmp"  # TMPDIR may be a directory of another user's; this one is sticky
    with TemporaryDirectory(dir=parent) as place:
        Path(place, "days").write_text(json.dumps(days), encoding="utf-8")
        env = environment(os.environ) | {"MPLCONFIGDIR": place, "MATPLOTLIBRC": os.devnull, "MPLBACKEND": "agg"}
        try:
            # matplotlib looks for the fonts of the host first.
            call_in_child("safe_gpu.status.report draw", place, form, title, env=env, timeout=300.0, with_packages=True)
        except Failed as err:
            raise SafeGpuError(f"the picture cannot be drawn: {err}") from err
        return Path(place, form).read_bytes()


def draw(place: str, form: str, title: str) -> None:
    """Do the child's part: draw what is described in a directory into a file there.

    Raises:
        ImportError: matplotlib is not installed.
    """
    os.chdir("/")  # before matplotlib is imported, which reads a matplotlibrc there
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    days = Days(*json.loads(Path(place, "days").read_bytes()))
    names = [date.fromisoformat(name) for name in days.names]
    with rc_context({"text.parse_math": False}), warnings.catch_warnings():  # a user's name is no formula
        warnings.simplefilter("ignore")  # the font may lack a letter of it
        figure = Figure(figsize=(10, 6), layout="constrained")
        figure.suptitle(title)
        heights = [2, 1]
        if days.utilization:
            heights = [2, 1, 1]
        use, *middle, wait = figure.subplots(len(heights), sharex=True, height_ratios=heights)
        below = [0.0] * len(names)
        for user, hours in days.used.items():
            label = user
            if user.startswith("_"):  # legends leave such labels out
                label = f" {user}"
            use.bar(names, hours, bottom=below, label=label)
            below = [low + more for low, more in zip(below, hours, strict=True)]
        if days.idle:
            idle = [date.fromisoformat(name) for name in days.idle]
            use.bar(idle, list(days.idle.values()), color="none", edgecolor="black", hatch="///", label="without work")
        use.set_ylabel("GPU-hours a day")
        use.legend(loc="upper left", bbox_to_anchor=(1, 1))
        for utilization in middle:
            known = [date.fromisoformat(name) for name in days.utilization]
            utilization.plot(known, list(days.utilization.values()), "o")
            utilization.set_ylabel("used (%)")
            utilization.set_ylim(0, 100)
        began = [date.fromisoformat(name) for name in days.waits]
        wait.plot(began, [fmean(some) / 60 for some in days.waits.values()], "o", label="mean")
        wait.plot(began, [percentile_95(some) / 60 for some in days.waits.values()], "^", label="95 of 100 at most")
        wait.set_ylabel("wait (min)")
        wait.set_ylim(bottom=0)
        wait.legend(loc="upper left", bbox_to_anchor=(1, 1))
        wait.tick_params("x", rotation=30)
        figure.savefig(Path(place, form), format=form)
