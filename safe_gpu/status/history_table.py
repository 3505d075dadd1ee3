"""The tables of ``safe-gpu history``: claims as last(1) shows logins, and GPU-hours. Pure but for the time zone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ..text import GAP, Column, cut, gpu_ranges, short_age
from .past import PastClaim
from .usage import GpuHours, hours_held


def table_of_claims(claims: Sequence[PastClaim], since: float, until: float, width: int) -> Iterator[str]:
    """A title and a line for each claim; no line is wider than ``width`` columns."""
    wide = width >= 100
    facts = [
        Column("USER", [claim.user or "?" for claim in claims], most=24 if wide else 8),
        Column("GPU", [_gpus(claim) for claim in claims], most=24 if wide else 8),
        Column("JOB", [_job(claim, wide) for claim in claims], most=30 if wide else 12),
        Column("FROM", [_clock(claim.since) for claim in claims]),
        Column("TO", [_end(claim) for claim in claims]),
        Column("GPU-HOURS", [_use(claim, since, until) for claim in claims], right=True),
        Column("COMMAND", [claim.command or "?" for claim in claims], most=200),
    ]
    return _table(facts, width)


def table_of_use(found: Sequence[GpuHours], by: str, width: int) -> Iterator[str]:
    """A title, a line for each key, and the sum."""
    rows = [*found]
    if len(found) > 1:
        sums = (sum(one.least for one in found), sum(one.most for one in found))
        rows.append(
            GpuHours("total", sum(one.claims for one in found), *sums) if by == "user" else GpuHours("total", 0, *sums)
        )
    facts = [
        Column("GPU" if by == "gpu" else by.upper(), [one.key for one in rows], most=64),
        Column("CLAIMS", [str(one.claims or "") for one in rows], right=True),
        Column("GPU-HOURS", [hours(one.least, one.most) for one in rows], right=True),
    ]
    return _table(facts, width)


def hours(least: float, most: float) -> str:
    """GPU-hours; both ends where they differ.

    >>> hours(1.26, 1.26), hours(0.0, 2.5)
    ('1.3', '0.0-2.5')
    """
    low, high = f"{least:.1f}", f"{most:.1f}"
    return low if low == high else f"{low}-{high}"


def _table(facts: Iterable[Column], width: int) -> Iterator[str]:
    shown = [column for column in facts if column.width]
    rows = zip(*(column.cells for column in shown), strict=True)
    for cells in chain([[column.title for column in shown]], rows):
        line = GAP.join(column.padded(cell) for column, cell in zip(shown, cells, strict=True))
        yield cut(line.rstrip(), width)


def _gpus(claim: PastClaim) -> str:
    if not claim.labels:
        return f"{len(claim.gpus)} GPUs" if len(claim.gpus) > 1 else claim.gpus[0][:12]
    try:
        return gpu_ranges(claim.labels)
    except ValueError:  # somebody's nonsense
        return ",".join(claim.labels)


def _job(claim: PastClaim, wide: bool) -> str:
    label = claim.job or ""
    return label if wide else label.rpartition(":")[2]


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))


def _end(claim: PastClaim) -> str:
    """``12:30``, ``by 12:30`` where only that is known, ``now``, or "?"."""
    if claim.running:
        return "now"
    if claim.ended is None:
        return "?"
    same_day = time.localtime(claim.since)[:3] == time.localtime(claim.ended)[:3]
    end = time.strftime("%H:%M" if same_day else "%m-%d %H:%M", time.localtime(claim.ended))
    return end if claim.ended - claim.seen < 60 else f"by {end}"


def _use(claim: PastClaim, since: float, until: float) -> str:
    number = len(claim.gpus)
    least, most = (seconds * number / 3600 for seconds in hours_held(claim, since, until))
    if most < 0.1:
        return f"{short_age(most * 3600)}"
    return hours(least, most)
