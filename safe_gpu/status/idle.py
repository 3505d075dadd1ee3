"""How long a claimed GPU has shown no work, and whether that is to be reported.

A mark is ``history/UUID.idle``. With a byte in it, the GPU has shown no work since the time of the file. It proves
nothing, and no claim depends on it. Where it cannot be read or written, nothing is known.

Such claims are shown and left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..coordination.directory import OPEN_FILE, Directory
from ..coordination.history import HistoryDir, mark_seen
from ..errors import StateDirError

if TYPE_CHECKING:
    from ..settings.config import Limits
    from .facts import GpuStatus


def with_idle_times(gpus: Sequence[GpuStatus], now: float) -> Sequence[GpuStatus]:
    """Return the same GPUs, the claimed ones with ``idle_for``, and leave marks: for the next look, and that they were
    seen held, for the history.

    Args:
        now: Unix seconds.
    """
    if not any(one.claim and one.claim.since for one in gpus):
        return gpus
    try:
        with HistoryDir() as directory:
            return [replace(one, idle_for=_idle_for(directory, one, now)) for one in gpus]
    except (OSError, StateDirError):
        return gpus


def _idle_for(directory: Directory, one: GpuStatus, now: float) -> float | None:
    since = one.claim.since if one.claim else None
    if not since:
        return None
    mark_seen(directory, one.gpu.uuid)
    if one.shares:  # it is not known which of the sharers does nothing
        return None
    try:
        return max(0.0, round(now - _idle_since(directory, one, since, now), 3))
    except (OSError, StateDirError):
        return 0.0


def _idle_since(directory: Directory, one: GpuStatus, since: float, now: float) -> float:
    """Return since when the GPU has shown no work at all looks in this claim; now if it has only now begun, or works.

    The file belongs to the user who looked first: all that others can do to its time is to write.
    """
    fd = directory.open_file(f"{one.gpu.uuid.replace('/', '_')}.idle", OPEN_FILE | os.O_RDWR, make=True)
    try:
        status = os.fstat(fd)
        if not one.idle and one.gpu.utilization != 0:
            os.ftruncate(fd, 0)
        elif status.st_size and status.st_mtime >= since:
            return status.st_mtime
        else:
            os.pwrite(fd, b"1", 0)
        return now
    finally:
        os.close(fd)


_KEY = "idle_report_after"


def with_reports(gpus: Iterable[GpuStatus], limits: Mapping[int, Limits]) -> tuple[GpuStatus, ...]:
    """Return the same GPUs, with ``idle_report``.

    Args:
        limits: uid -> what the policy of this host says.
    """

    def report(one: GpuStatus) -> bool | None:
        found = limits.get(one.claim.uid) if one.claim is not None else None
        if found is None or one.idle_for is None:
            return None
        if found.idle_report_after is None:
            return False if _KEY in found.sections else None
        return one.idle_for >= found.idle_report_after

    return tuple(replace(one, idle_report=report(one)) for one in gpus)
