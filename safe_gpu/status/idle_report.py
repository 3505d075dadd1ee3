"""Claimed GPUs that have shown no work for as long as ``idle_report_after`` of the policy says.

They are shown, and nothing is done to them. The limit is that of the user of the claim. The module is loaded only if
there is a policy file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .. import policy
from ..errors import PolicyError
from ..procfs import printable
from ..text import format_age, gpu_ranges
from .facts import ClaimStatus, GpuStatus

_KEY = "idle_report_after"


def with_reports(gpus: tuple[GpuStatus, ...], path: str) -> tuple[GpuStatus, ...]:
    """The same GPUs, with ``idle_report`` by the policy file at ``path``. Takes no lock; a directory may be asked.

    A file that is ignored or broken says nothing here: claims and ``safe-gpu policy`` report it.
    """
    if not any(one.claim and one.claim.uid is not None and one.idle_for for one in gpus):
        return gpus
    rules = _rules(path)
    if rules is None:
        return gpus
    limits: dict[int, policy.Limits] = {}

    def report(one: GpuStatus) -> bool | None:
        if one.claim is None or one.claim.uid is None or one.idle_for is None:
            return None
        uid = one.claim.uid
        if uid not in limits:
            limits[uid] = policy.limits_of_user(rules, uid)
        after = limits[uid].idle_report_after
        if after is None:
            return False if _KEY in limits[uid].sections else None
        return one.idle_for >= after

    return tuple(replace(one, idle_report=report(one)) for one in gpus)


def sets_a_limit(path: str) -> bool:
    """Whether the policy file at ``path`` has GPUs reported as idle, of any user."""
    rules = _rules(path)
    return rules is not None and any(section.values.get(_KEY) is not None for section in rules.sections)


def _rules(path: str) -> policy.Policy | None:
    try:
        return policy.read(path)[0]
    except PolicyError:
        return None


def whom_to_ask(gpus: Iterable[GpuStatus], uid: int) -> dict[tuple[int | None, float | None], str]:
    """(pid, since) of each claim with GPUs that are reported as idle -> a line on them; the longest idle come first.

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
