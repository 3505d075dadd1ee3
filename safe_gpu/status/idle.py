"""How long a claimed GPU has shown no work, and who is told of it.

A mark is ``history/UUID.idle``. With a byte in it, the GPU has shown no work since the time of the file. It proves
nothing, and no claim depends on it. Where it cannot be read or written, nothing is known.

They are shown and left alone. The limit is that of the user of the claim.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ..coordination.directory import OPEN_FILE, Directory
from ..coordination.history import HistoryDir, mark_seen
from ..errors import StateDirError
from ..host.procfs import printable
from ..settings import config as policy
from ..wording.text import format_age, gpu_ranges

if TYPE_CHECKING:
    from .facts import ClaimStatus, GpuStatus


def shows_no_work(one: GpuStatus) -> bool:
    """Return whether a claimed GPU does nothing now: no process of the claim works there, or utilization is 0."""
    return one.idle or one.gpu.utilization == 0


def with_idle_times(gpus: Iterable[GpuStatus], now: float) -> tuple[GpuStatus, ...]:
    """Return the same GPUs, the claimed ones with ``idle_for``, and leave marks: for the next look, and that they were
    seen held, for the history.

    Args:
        now: Unix seconds.
    """
    gpus = tuple(gpus)
    if not any(one.claim and one.claim.since for one in gpus):
        return gpus
    try:
        with HistoryDir() as directory:
            return tuple(_with_idle_time(directory, one, now) for one in gpus)
    except (OSError, StateDirError):
        return gpus


def _with_idle_time(directory: Directory, one: GpuStatus, now: float) -> GpuStatus:
    since = one.claim.since if one.claim else None
    if not since:
        return one
    mark_seen(directory, one.gpu.uuid)
    if one.shares:  # it is not known which of the sharers does nothing
        return one
    try:
        began = _idle_since(directory, one, since)
    except (OSError, StateDirError):
        began = None
    return replace(one, idle_for=0.0 if began is None else max(0.0, round(now - began, 3)))


def _idle_since(directory: Directory, one: GpuStatus, since: float) -> float | None:
    """Return since when the GPU has shown no work at all looks in this claim; None if it has only now begun, or works.

    The file belongs to the user who looked first: all that others can do to its time is to write.
    """
    fd = directory.open_file(f"{one.gpu.uuid.replace('/', '_')}.idle", OPEN_FILE | os.O_RDWR, make=True)
    try:
        status = os.fstat(fd)
        if not shows_no_work(one):
            os.ftruncate(fd, 0)
        elif status.st_size and status.st_mtime >= since:
            return status.st_mtime
        else:
            os.pwrite(fd, b"1", 0)
        return None
    finally:
        os.close(fd)


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
