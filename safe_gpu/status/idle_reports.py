"""Claimed GPUs that have shown no work for as long as the policy allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ..host.procfs import printable
from ..settings import policy
from ..wording.text import format_age, gpu_ranges

if TYPE_CHECKING:
    from .facts import ClaimStatus, GpuStatus

_KEY = "idle_report_after"


def with_reports(gpus: tuple[GpuStatus, ...], path: str) -> tuple[GpuStatus, ...]:
    """Return the same GPUs, with ``idle_report`` by the policy file at ``path``.

    It takes no lock, and may ask a directory service. A file that is ignored or broken counts as none: claims and
    ``safe-gpu policy`` report it.
    """
    if not any(one.claim and one.claim.uid is not None and one.idle_for for one in gpus):
        return gpus
    rules = policy.if_readable(path)
    if rules is None:
        return gpus
    limits = cache(partial(policy.limits_of_user, rules))

    def report(one: GpuStatus) -> bool | None:
        if one.claim is None or one.claim.uid is None or one.idle_for is None:
            return None
        found = limits(one.claim.uid)
        if found.idle_report_after is None:
            return False if _KEY in found.sections else None
        return one.idle_for >= found.idle_report_after

    return tuple(replace(one, idle_report=report(one)) for one in gpus)


def sets_a_limit(path: str) -> bool:
    """Return whether the policy file at ``path`` has GPUs of any user reported as idle."""
    rules = policy.if_readable(path)
    return rules is not None and any(section.values.get(_KEY) is not None for section in rules.sections)


def whom_to_ask(gpus: Iterable[GpuStatus], uid: int) -> dict[tuple[int | None, float | None], str]:
    """Return a line on each claim with GPUs that are reported as idle, by (pid, since), the longest idle first.

    Args:
        uid: the user who reads it.
    """
    found: dict[ClaimStatus, list[GpuStatus]] = {}
    for one in gpus:
        if one.idle_report and one.claim is not None:
            found.setdefault(one.claim, []).append(one)
    ranked = sorted(found.items(), key=lambda item: -_idle_for(item[1]))
    return {(claim.pid, claim.since): _line(claim, idle, uid) for claim, idle in ranked}


def _idle_for(gpus: list[GpuStatus]) -> float:
    return min(one.idle_for or 0.0 for one in gpus)


def _line(claim: ClaimStatus, gpus: list[GpuStatus], uid: int) -> str:
    pid = f"pid {claim.pid}" if claim.pid else "pid not known here"
    who = f"it is yours ({pid})" if claim.uid == uid else f"ask {printable(claim.user or f'uid {claim.uid}')} ({pid})"
    return f"no work on GPU {gpu_ranges(one.label for one in gpus)} for {format_age(_idle_for(gpus))}: {who}"
