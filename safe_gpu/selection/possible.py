"""What this host can ever give a request, regardless of who uses it now. Pure functions of a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import UnsatisfiableRequestError
from .naming import unknown_names
from .rules import DEFAULT_RULES, Rules
from .verdicts import UNWATCHABLE, fence_hint, judge, why_outside, why_unusable

if TYPE_CHECKING:
    from ..devices import Gpu, GpuRequest, GpuVerdict, HostSnapshot, LeaseHolder
    from ..runtimes.visible_devices import VisibleLimit


def candidates(
    snapshot: HostSnapshot, request: GpuRequest, fence: VisibleLimit | None = None, *, rules: Rules = DEFAULT_RULES
) -> tuple[Gpu, ...]:
    """Every device that this request could ever get, in the order of the snapshot. Requests compete for these."""
    return tuple(
        gpu
        for gpu in snapshot.gpus
        if not why_unusable(gpu)
        and not _why_unwatchable(gpu, snapshot, rules)
        and not (gpu.is_mig_instance and request.nb_gpus > 1)
        and not _why_never(gpu, request, fence)
    )


def check_possible(
    snapshot: HostSnapshot,
    request: GpuRequest,
    fence: VisibleLimit | None = None,
    *,
    leased: Mapping[str, LeaseHolder] | None = None,
    rules: Rules = DEFAULT_RULES,
) -> None:
    """Raise if this host, or this process within its fence, can never satisfy the request.

    ``leased`` is used only to count, in the message, the free GPUs outside the fence.

    Raises:
        UnsatisfiableRequestError: names the offending value and what to do.
    """
    for argument, names in (("only", request.only), ("exclude", request.exclude)):
        for name in unknown_names(names, snapshot):
            raise UnsatisfiableRequestError(
                f"{request.spelling.setting(argument, name)} names no single GPU of this host, which has "
                f"{_inventory(snapshot.gpus, by_uuid=not name[0].isdigit())}",
                value=name,
            )
    left: Sequence[Gpu] = snapshot.gpus
    problem = ""
    reasons: tuple[Callable[[Gpu], str], ...] = (
        why_unusable,
        lambda gpu: _why_unwatchable(gpu, snapshot, rules),
        lambda gpu: _why_never(gpu, request, None),
    )
    for why_not in reasons:
        left = [gpu for gpu in left if not why_not(gpu)]
        problem = problem or _too_few(request.nb_gpus, left, snapshot, why_not)
    if not problem and fence is not None and capacity([gpu for gpu in left if gpu.uuid in fence]) < request.nb_gpus:
        hint = fence_hint(judge(snapshot, request, leased=leased or {}, rules=rules), fence)
        way_out = "" if fence.frozen else ", or set SAFE_GPU_FENCE=ignore to disregard the variable"
        problem = f"{hint}: ask for fewer GPUs or among those{way_out}"
    if problem:
        asked = "1 GPU is" if request.nb_gpus == 1 else f"{request.nb_gpus} GPUs are"
        raise UnsatisfiableRequestError(
            f"{asked} asked for, but {problem}",
            value=request.nb_gpus,
            verdicts=judge(snapshot, request, leased=leased or {}, fence=fence, rules=rules),
        )


def _why_unwatchable(gpu: Gpu, snapshot: HostSnapshot, rules: Rules) -> str:
    watchable = gpu.processes_supported or snapshot.shared_display or rules.lists_optional
    return "" if watchable else UNWATCHABLE


def _why_never(gpu: Gpu, request: GpuRequest, fence: VisibleLimit | None) -> str:
    """Why the request can never get the device: it is outside, or whether it has the memory will never be known."""
    reason = why_outside(gpu, request, fence)
    if not reason and request.min_memory and gpu.memory_free is None:
        reason = f"the driver does not tell its memory: leave {request.spelling.option('min_memory')} out"
    return reason


def _too_few(nb_gpus: int, left: Sequence[Gpu], snapshot: HostSnapshot, why_not: Callable[[Gpu], str]) -> str:
    """Why ``nb_gpus`` cannot be had from the devices in ``left``; "" if they suffice."""
    if capacity(left) >= nb_gpus:
        return ""
    if any(gpu.is_mig_instance for gpu in left):
        most = capacity(left)
        text = f"CUDA shows a process one MIG instance, and no whole GPU beside it: ask for {most}"
        if most < len(left):
            text += f"{', or for 1' if most > 1 else ''} in each of up to {len(left)} processes"
        return text
    total = len(snapshot.physical)
    if total < nb_gpus and len(left) == len(snapshot.gpus):
        return f"this host has only {total}: ask for fewer" if total else "this host has none"
    reasons: dict[str, list[str]] = {}
    for gpu in snapshot.gpus:
        reason = why_not(gpu)
        if reason:
            reasons.setdefault(reason, []).append(gpu.label)
    from ..text import gpu_ranges  # few claims come here

    listed = "; ".join(f"GPU {gpu_ranges(labels)}: {reason}" for reason, labels in reasons.items())
    kept = capacity(left)
    return f"only {kept} of the {total} in this host can be claimed ({listed})" if kept else f"none fits ({listed})"


def _inventory(gpus: Sequence[Gpu], *, by_uuid: bool) -> str:
    if not gpus:
        return "none"
    from ..text import gpu_ranges

    if by_uuid:
        return ", ".join(f"{gpu.label} ({gpu.uuid})" for gpu in gpus)
    return f"GPU {gpu_ranges(gpu.label for gpu in gpus)}"


def can_be_met_by_releases(
    candidate_uuids: Collection[str], nb_gpus: int, verdicts: Iterable[GpuVerdict], leaving: Collection[str] = ()
) -> bool:
    """Whether a waiting request would be met if every lease were released. If so, later waiters must not pass it.

    Args:
        candidate_uuids: the devices that the request could get (:func:`candidates`).
        nb_gpus: how many of them it needs.
        verdicts: of every device, judged for this request without a fence.
        leaving: UUIDs of devices that are busy only with the processes of a claim that has just ended.
    """
    coming = [
        verdict.gpu
        for verdict in verdicts
        if verdict.gpu.uuid in candidate_uuids
        and (verdict.free or verdict.state == "claimed" or verdict.gpu.uuid in leaving)
    ]
    return capacity(coming) >= nb_gpus


def capacity(gpus: Collection[Gpu]) -> int:
    """How many of these devices one process can hold: all whole GPUs, or one MIG instance if there is no whole GPU.

    CUDA shows a process at most one MIG instance, and with many driver versions no whole GPU together with it.
    """
    whole = sum(not gpu.is_mig_instance for gpu in gpus)
    return whole or min(len(gpus), 1)
