"""How long a claimed GPU has shown no work.

A note is ``history/UUID.idle``, one line of JSON. It proves nothing, and no claim depends on it. Where it cannot be
read or written, nothing is known.

They are shown and left alone. The limit is that of the user of the claim.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..coordination.files.decoding import as_time, read_bounded
from ..coordination.files.location import state_dir_path
from ..coordination.files.state_dir import StateDir, write_all
from ..coordination.history import HistoryDir
from ..errors import StateDirError

if TYPE_CHECKING:
    from .facts import GpuStatus

_LONGEST = 4096


def shows_no_work(one: GpuStatus) -> bool:
    """Return whether a claimed GPU does nothing now: no process of the claim computes there, or utilization is 0."""
    return one.idle or one.gpu.utilization == 0


def with_idle_times(gpus: Iterable[GpuStatus], now: float) -> tuple[GpuStatus, ...]:
    """Return the same GPUs, the claimed ones with ``idle_for``, and leave notes for the next look.

    Args:
        now: Unix seconds.
    """
    gpus = tuple(gpus)
    if not any(one.claim and one.claim.since for one in gpus):
        return gpus
    try:
        with StateDir(state_dir_path(), make=False) as root, HistoryDir(root) as directory:
            return tuple(_with_idle_time(directory, one, now) for one in gpus)
    except (OSError, StateDirError):
        return gpus


def _with_idle_time(directory: StateDir, one: GpuStatus, now: float) -> GpuStatus:
    since = one.claim.since if one.claim else None
    if not since or one.shares:  # it is not known which of the sharers does nothing
        return one
    name, began = one.gpu.uuid.replace("/", "_") + ".idle", None
    if shows_no_work(one):
        began = min(_read(directory, name, since) or now, now)
    _write(directory, name, since, began)
    return replace(one, idle_for=0.0 if began is None else round(now - began, 3))


def _read(directory: StateDir, name: str, since: float) -> float | None:
    """Return since when the GPU had shown no work at the look before, if that was in the same claim."""
    try:
        raw: Any = json.loads(read_bounded(directory, name, _LONGEST).decode("utf-8", "replace"))
        began = as_time(raw["idle"]) if raw["claim"] == since and raw["idle"] is not None else 0.0
        return began if began >= since else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def _write(directory: StateDir, name: str, since: float, began: float | None) -> None:
    line = json.dumps({"v": 1, "claim": since, "idle": began}).encode() + b"\n"
    with suppress(StateDirError, OSError):
        fd = directory.open_or_create(name)
        try:
            if os.pread(fd, _LONGEST, 0) != line:
                write_all(fd, line, os.path.join(directory.path, name))
        finally:
            os.close(fd)
