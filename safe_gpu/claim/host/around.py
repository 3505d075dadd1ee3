"""The claim inside which this process claims."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ...coordination.doors import Doors
from ...gpus.devices import GpuVerdict
from ...host import procfs

if TYPE_CHECKING:
    from ...coordination.entry import Entry
    from ...coordination.holders import Claims


def find_around(claims: Claims, token: str, tree: str) -> Entry | None:
    """Return this user's living claim with this token, the value of SAFE_GPU_SCOPE; None if it has ended.

    A child that its process left behind keeps its entry, and none of its doors. One that could take no doors has no
    parts either: then its entry alone counts.

    Args:
        tree: what stands before UUIDs in the names of doors.
    """
    around = claims.around(token)
    if around is None or not around.parts:
        return around
    with suppress(OSError):  # no sockets here
        return around if Doors(tree).is_inside(next(iter(around.gpus)), token) else None
    return around


def pids_of_around(around: Entry) -> tuple[int, ...]:
    """Return the processes that are those of the claim around this process, which is a descendant of them."""
    here = not procfs.namespace_text(around.pidns or None)
    return (around.pid,) if around.pid and here else tuple(procfs.ancestors(os.getpid()))


def judged_inside(around: Entry, verdicts: Iterable[GpuVerdict]) -> tuple[GpuVerdict, ...]:
    """Return the verdicts, in which every GPU that the claim around does not hold has the state ``outside``."""
    beyond = f"outside {owner_of(around)}, inside which this one is made (SAFE_GPU_SCOPE)"
    return tuple(v if v.gpu.uuid in around.gpus else GpuVerdict(v.gpu, "outside", beyond) for v in verdicts)


def owner_of(around: Entry) -> str:
    namespace = procfs.namespace_text(around.pidns or None)
    return f"the claim of process {around.pid or '?'}{namespace and f' {namespace}'}"
