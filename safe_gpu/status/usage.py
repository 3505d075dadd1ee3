"""GPU-hours: how long claims held GPUs, summed up by user, GPU, job or day. Pure.

A claim that died ended between two moments, so each sum has a least and a most.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from .past import PastClaim

KEYS = ("user", "gpu", "job", "day")
"""What can be summed up by."""


class GpuHours(NamedTuple):
    """What claims with the same ``key`` used: their number, and GPU-hours between ``least`` and ``most``."""

    key: str
    claims: int
    least: float
    most: float


def hours_held(claim: PastClaim, since: float, until: float) -> tuple[float, float]:
    """For how many seconds a claim held each of its GPUs between these moments, at least and at most.

    ``until`` is at most now: a claim that runs holds them up to then.
    """
    begin = max(claim.since, since)
    last = until if claim.running or claim.ended is None else min(claim.ended, until)
    sure = until if claim.running else min(claim.seen, until)
    return max(0.0, sure - begin), max(0.0, last - begin)


def gpu_hours_by(claims: Iterable[PastClaim], by: str, since: float, until: float) -> list[GpuHours]:
    """The sums, the largest first; by day in their order."""
    claims = list(claims)
    labels = {uuid: label for claim in claims for uuid, label in zip(claim.gpus, claim.labels, strict=False)}
    sums: dict[str, list[float]] = {}
    for claim in claims:
        for key, least, most in _shares(claim, by, since, until, labels):
            one = sums.setdefault(key, [0, 0.0, 0.0])
            one[0] += 1
            one[1] += least / 3600
            one[2] += most / 3600
    found = [GpuHours(key, int(number), least, most) for key, (number, least, most) in sums.items()]
    if by == "day":
        return sorted(found)
    return sorted(found, key=lambda use: (-use.most, use.key))


def _shares(
    claim: PastClaim, by: str, since: float, until: float, labels: Mapping[str, str]
) -> Iterator[tuple[str, float, float]]:
    """The keys that a claim counts for, each with seconds of GPUs."""
    if by == "day":
        for day, begin, end in _days(
            max(claim.since, since), until if claim.running else min(claim.ended or until, until)
        ):
            least, most = hours_held(claim, begin, end)
            yield day, least * len(claim.gpus), most * len(claim.gpus)
        return
    least, most = hours_held(claim, since, until)
    if by == "gpu":
        for uuid in claim.gpus:
            yield f"{labels[uuid]} {uuid}" if uuid in labels else uuid, least, most
        return
    key = (claim.user or "?") if by == "user" else (claim.job or "(no job)")
    yield key, least * len(claim.gpus), most * len(claim.gpus)


def _days(begin: float, end: float) -> Iterator[tuple[str, float, float]]:
    """The days of local time in a span: name, beginning and end. A moment is a span too."""
    while begin <= end:
        day = time.localtime(begin)
        midnight = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + 1, 0, 0, 0, 0, 0, -1))
        if midnight <= begin:
            return
        yield time.strftime("%Y-%m-%d", day), begin, min(midnight, end)
        if midnight >= end:
            return
        begin = midnight
