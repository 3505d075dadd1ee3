"""Why a claim waits, and why it was refused: who holds the GPUs, and what else stands in the way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .claims import survey
from .coordination.host_lock import MINIMUM_PATIENCE, HostLock
from .errors import ClaimTimeout, NotEnoughGpusError
from .report import refusal_message
from .scopes import refuse_what_the_parent_holds
from .selection import fence_hint

if TYPE_CHECKING:
    from .devices import GpuRequest, GpuVerdict, Holder
    from .view import HostView
    from .visibility import Fence

__all__ = ["judge_with_holders", "refusal"]


def judge_with_holders(view: HostView, request: GpuRequest) -> tuple[GpuVerdict, ...]:
    """The view's verdicts, with the holder of every GPU that is leased.

    Raises:
        NotEnoughGpusError: a parent of this process holds what it waits for, and may wait for it in turn.
        LockTimeout, StateDirError: the leases cannot be read.
    """
    return _judge(view, request, _holders(view))


def refusal(
    view: HostView, request: GpuRequest, fence: Fence | None, *, position: int, waited: float
) -> NotEnoughGpusError:
    """The error that a claim ends with: ClaimTimeout after ``waited`` seconds, NotEnoughGpusError after none.

    Raises:
        NotEnoughGpusError, LockTimeout, StateDirError: as in :func:`judge_with_holders`.
    """
    holders = _holders(view)
    verdicts = _judge(view, request, holders)
    hint = fence_hint(view.judge(holders, fenced=False), fence)
    if hint and fence is not None and not fence.frozen:
        hint += " (SAFE_GPU_FENCE=ignore disregards it)"
    message = refusal_message(request, verdicts, hint=hint, position=position, waited=waited)
    if waited:
        return ClaimTimeout(message, nb_gpus=request.nb_gpus, verdicts=verdicts, timeout=waited)
    return NotEnoughGpusError(message, nb_gpus=request.nb_gpus, verdicts=verdicts)


def _holders(view: HostView) -> dict[str, Holder]:
    with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
        return survey(host, view.snapshot.gpus, inner=bool(view.outer))


def _judge(view: HostView, request: GpuRequest, holders: dict[str, Holder]) -> tuple[GpuVerdict, ...]:
    verdicts = view.judge(holders)
    refuse_what_the_parent_holds(verdicts, {gpu.uuid for gpu in view.usable}, request, inner=bool(view.outer))
    return verdicts
