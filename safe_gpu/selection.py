"""Which GPUs a claim may take, and why not the others, GPU by GPU. Pure: a snapshot goes in, verdicts come out.

Rules in one place: :func:`judge` says of every device whether it is free *now*, :func:`check_possible` whether this
host could *ever* do what is asked, :func:`candidates` on which devices a request competes with others, and
:func:`~safe_gpu.choice.choose` picks the best set among the free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .choice import capacity, choose
from .devices import ComputeMode, GpuVerdict, Holder, ProcessKind
from .errors import UnsatisfiableRequestError
from .request import format_bytes, matches_model, names_device, parse_bytes, parse_request, unknown_names

if TYPE_CHECKING:
    from .devices import Gpu, GpuProcess, GpuRequest, HostSnapshot
    from .visibility import Fence

__all__ = [
    "Holder",
    "can_be_met_by_releases",
    "candidates",
    "check_possible",
    "choose",
    "computes",
    "fence_hint",
    "judge",
    "parse_bytes",
    "parse_request",
]

UNEXPLAINED_LIMIT = 1 << 30
"""Bytes in use beyond those of visible processes that are put down to the driver (an idle card may show 0.5 GiB)."""

Describe = Callable[[int], "tuple[str | None, str | None] | None"]
"""Tells a process's user and command line from its pid; None where the pid does not resolve here."""

_MPS_SERVER = "nvidia-cuda-mps-server"


def judge(
    snapshot: HostSnapshot,
    request: GpuRequest,
    *,
    leased: Mapping[str, Holder],
    fence: Fence | None = None,
    own: Collection[int] = (),
    explained: Mapping[str, Collection[int]] | None = None,
    describe: Describe | None = None,
    unexplained_limit: int = UNEXPLAINED_LIMIT,
) -> tuple[GpuVerdict, ...]:
    """Say of every device of the host whether this request may take it now, in the order of the snapshot.

    Args:
        snapshot: one poll of the driver.
        request: what is asked for; only its limits matter here, not the number.
        leased: UUID -> who holds its lease; without leases of the caller's own.
        fence: the inherited CUDA_VISIBLE_DEVICES; None: there is none.
        own: pids whose processes and memory are disregarded on every device.
        explained: UUID -> pids that are disregarded there (an outer claim's own processes).
        describe: names a process for the reasons, and unmasks the MPS server; without it reasons carry pids only.
        unexplained_limit: bytes in use without a visible process from which on a device counts as busy.
    """
    return tuple(
        _judge_one(
            gpu,
            snapshot,
            request,
            leased.get(gpu.uuid),
            fence,
            {*own, *(explained.get(gpu.uuid, ()) if explained else ())},
            describe or _nobody,
            unexplained_limit,
        )
        for gpu in snapshot.gpus
    )


def _nobody(_pid: int) -> None:
    return None


def _judge_one(
    gpu: Gpu,
    snapshot: HostSnapshot,
    request: GpuRequest,
    holder: Holder | None,
    fence: Fence | None,
    disregarded: Collection[int],
    describe: Describe,
    unexplained_limit: int,
) -> GpuVerdict:
    unusable = _why_unusable(gpu)
    if unusable:
        return GpuVerdict(gpu, "unusable", unusable)
    outside = _why_outside(gpu, request, fence)
    if outside:
        return GpuVerdict(gpu, "outside", outside)
    if snapshot.shared_display:
        return GpuVerdict(gpu, "display", _why_prohibited(gpu) or _why_too_full(gpu, request, disregarded))
    if holder is not None:
        return GpuVerdict(gpu, "claimed", _claimed_by(holder), holder.pid, holder.user, holder)
    if not gpu.processes_supported:
        return GpuVerdict(gpu, "unusable", _why_unwatchable(gpu, snapshot))
    if gpu.processes is None:
        return GpuVerdict(gpu, "busy", f"its process list failed: {gpu.process_error or 'the driver does not say why'}")
    computing = [process for process in gpu.processes if process.pid not in disregarded and computes(process, describe)]
    if computing:
        computing.sort(key=lambda process: (-(process.memory_used or 0), process.pid))
        user, text = _name_processes(computing, describe)
        return GpuVerdict(gpu, "busy", text, computing[0].pid, user)
    reason = (
        _why_prohibited(gpu)
        or _why_too_full(gpu, request, disregarded)
        or _why_haunted(gpu, gpu.processes, unexplained_limit)
    )
    return GpuVerdict(gpu, "busy" if reason else "free", reason)


def _why_unusable(gpu: Gpu) -> str:
    if gpu.unusable:
        return gpu.unusable
    if gpu.lost:
        return "the driver lost it (fell off the bus, or needs a reset)"
    if gpu.mig_enabled and not gpu.is_mig_instance:
        return "MIG mode is on: claim one of its instances"
    return ""


def _why_outside(gpu: Gpu, request: GpuRequest, fence: Fence | None) -> str:
    if request.only and not any(names_device(name, gpu) for name in request.only):
        return f"only={','.join(request.only)} leaves it out"
    excluded = next((name for name in request.exclude if names_device(name, gpu)), None)
    if excluded is not None:
        return f"exclude={excluded} leaves it out"
    if request.model is not None and not matches_model(request.model, gpu.name):
        return f"it is a {gpu.name or 'GPU without a name'}, and model={request.model!r} was asked for"
    if request.min_memory is not None and gpu.memory_total is not None and gpu.memory_total < request.min_memory:
        return f"it has {format_bytes(gpu.memory_total)} in all, and {format_bytes(request.min_memory)} are asked for"
    if fence is not None and gpu.uuid not in fence:
        return f"{fence.title} leaves it out"
    return ""


def _why_prohibited(gpu: Gpu) -> str:
    if gpu.compute_mode == ComputeMode.PROHIBITED:
        return "its compute mode is PROHIBITED (an administrator can change that: nvidia-smi -c DEFAULT)"
    return ""


def _why_too_full(gpu: Gpu, request: GpuRequest, disregarded: Collection[int]) -> str:
    if not request.min_memory:
        return ""
    if gpu.memory_free is None:
        return f"its free memory is unknown, and {format_bytes(request.min_memory)} are asked for"
    free = gpu.memory_free + sum(
        process.memory_used or 0 for process in gpu.processes or () if process.pid in disregarded
    )
    if free < request.min_memory:
        return f"only {format_bytes(free)} of its memory are free, and {format_bytes(request.min_memory)} are asked for"
    return ""


def _why_haunted(gpu: Gpu, processes: Collection[GpuProcess], limit: int) -> str:
    """Memory in use that no visible process accounts for: a process that a container or the driver hides from us."""
    if gpu.memory_used is None or any(process.memory_used is None for process in processes):
        return ""
    # The driver shows a process with both a compute and a graphics context in both lists, with the same memory.
    largest: dict[int, int] = {}
    for process in processes:
        largest[process.pid] = max(largest.get(process.pid, 0), process.memory_used or 0)
    excess = gpu.memory_used - sum(largest.values())
    if excess > limit:
        return (
            f"{format_bytes(excess)} of its memory are in use by no process that can be seen here (one in a container?)"
        )
    return ""


def computes(process: GpuProcess, describe: Describe) -> bool:
    """Whether a process makes a device busy: all but graphics, and all but the MPS server that waits for clients."""
    if process.kind == ProcessKind.GRAPHICS:
        return False
    command = process.name
    if command is None:
        described = describe(process.pid)
        command = described[1] if described else None
    return not command or command.split()[0].rpartition("/")[2] != _MPS_SERVER


def _name_processes(processes: Collection[GpuProcess], describe: Describe) -> tuple[str | None, str]:
    """The user of the first process, and a sentence on it that counts the others."""
    first, *others = processes
    described = describe(first.pid)
    user, command = described or (None, None)
    who = ", ".join(part for part in (user, command or first.name) if part)
    amount = "an unknown amount of memory" if first.memory_used is None else format_bytes(first.memory_used)
    text = f"process {first.pid}{f' ({who})' if who else ''} uses {amount}"
    pids = {process.pid for process in others} - {first.pid}
    if pids:
        text += f", and {len(pids)} more process{'es' if len(pids) > 1 else ''}"
    return user, text


def _claimed_by(holder: Holder) -> str:
    who = ", ".join(part for part in (holder.user, holder.job and f"job {holder.job}", holder.command) if part)
    text = "claimed" if holder.pid is None else f"claimed by process {holder.pid}"
    if who:
        text += f" ({who})"
    if holder.since is not None:
        text += time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    return text


def _watchable(gpu: Gpu, snapshot: HostSnapshot) -> bool:
    return gpu.processes_supported or snapshot.shared_display


def candidates(snapshot: HostSnapshot, request: GpuRequest, fence: Fence | None = None) -> tuple[Gpu, ...]:
    """Every device that this request could ever be given, in the order of the snapshot; requests compete for these."""
    return tuple(
        gpu
        for gpu in snapshot.gpus
        if not _why_unusable(gpu)
        and _watchable(gpu, snapshot)
        and not (gpu.is_mig_instance and request.nb_gpus > 1)
        and not _why_outside(gpu, request, fence)
    )


def check_possible(
    snapshot: HostSnapshot,
    request: GpuRequest,
    fence: Fence | None = None,
    *,
    leased: Mapping[str, Holder] | None = None,
) -> None:
    """Raise if this host, or this process behind its fence, can never give what is asked, however long it waits.

    ``leased`` only lets the message count truthfully how many GPUs are free beyond the fence.

    Raises:
        UnsatisfiableRequestError: with the offending value and the way out.
    """
    for argument, names in (("only", request.only), ("exclude", request.exclude)):
        for name in unknown_names(names, snapshot):
            raise UnsatisfiableRequestError(
                f"{argument}={name} names no single GPU of this host, which has {_inventory(snapshot.gpus)}", value=name
            )
    usable = [gpu for gpu in snapshot.gpus if not _why_unusable(gpu)]
    watchable = [gpu for gpu in usable if _watchable(gpu, snapshot)]
    fitting = [gpu for gpu in watchable if not _why_outside(gpu, request, None)]
    reachable = [gpu for gpu in fitting if fence is None or gpu.uuid in fence]
    problem = (
        _too_few(request.nb_gpus, usable, snapshot, _why_unusable)
        or _too_few(request.nb_gpus, watchable, snapshot, lambda gpu: _why_unwatchable(gpu, snapshot))
        or _too_few(request.nb_gpus, fitting, snapshot, lambda gpu: _why_outside(gpu, request, None))
    )
    if not problem and fence is not None and capacity(reachable) < request.nb_gpus:
        hint = fence_hint(judge(snapshot, request, leased=leased or {}), fence)
        way_out = "" if fence.frozen else ", or set SAFE_GPU_FENCE=ignore to disregard the variable"
        problem = f"{hint}: ask for fewer GPUs or among those{way_out}"
    if problem:
        asked = "1 GPU is" if request.nb_gpus == 1 else f"{request.nb_gpus} GPUs are"
        raise UnsatisfiableRequestError(
            f"{asked} asked for, but {problem}",
            value=request.nb_gpus,
            verdicts=judge(snapshot, request, leased=leased or {}, fence=fence),
        )


def _too_few(nb_gpus: int, left: Sequence[Gpu], snapshot: HostSnapshot, why_not: Callable[[Gpu], str]) -> str:
    """How a request for ``nb_gpus`` fails with only the devices in ``left``; "" when it does not."""
    if capacity(left) >= nb_gpus:
        return ""
    if len(left) >= nb_gpus:
        return (
            "CUDA shows a process one MIG instance, and no whole GPU beside it: ask for 1, in each of several processes"
        )
    total = len(snapshot.physical)
    if total < nb_gpus and len(left) == len(snapshot.gpus):
        return f"this host has only {total}: ask for fewer" if total else "this host has none"
    reasons: dict[str, list[str]] = {}
    for gpu in snapshot.gpus:
        reason = why_not(gpu)
        if reason:
            reasons.setdefault(reason, []).append(gpu.label)
    listed = "; ".join(
        f"GPU{'s' if len(labels) > 1 else ''} {', '.join(labels)}: {reason}" for reason, labels in reasons.items()
    )
    kept = capacity(left)
    return f"only {kept} of the {total} in this host can be claimed ({listed})" if kept else f"none fits ({listed})"


def _why_unwatchable(gpu: Gpu, snapshot: HostSnapshot) -> str:
    if _watchable(gpu, snapshot):
        return ""
    return (
        "its driver cannot list processes, so nobody can tell whether it is free; update the NVIDIA driver, or try "
        "SAFE_GPU_DRIVER=nvml or SAFE_GPU_DRIVER=nvidia-smi"
    )


def _inventory(gpus: Sequence[Gpu]) -> str:
    return ", ".join(f"{gpu.label} ({gpu.uuid})" for gpu in gpus) or "none"


def fence_hint(unfenced: Sequence[GpuVerdict], fence: Fence | None) -> str:
    """How far the fence stands in the way, such as
    ``CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7 others are free``.

    ``unfenced`` are the verdicts on the same request *without* the fence. "" where the fence leaves nothing out.
    """
    if fence is None:
        return ""
    claimable = [verdict for verdict in unfenced if not verdict.gpu.mig_enabled]
    beyond = [verdict for verdict in claimable if verdict.gpu.uuid not in fence]
    if not beyond:
        return ""
    inside = len(claimable) - len(beyond)
    free = sum(verdict.free for verdict in beyond)
    others = "1 other is" if free == 1 else f"{free or 'none of the'} others are"
    return f"{fence.title} limits this process to {inside} of {len(claimable)} GPUs; {others} free"


def can_be_met_by_releases(
    candidate_uuids: Collection[str], nb_gpus: int, verdicts: Iterable[GpuVerdict], leaving: Collection[str] = ()
) -> bool:
    """Whether a waiting request would be met if every lease were released: then nobody behind it may pass it.

    Args:
        candidate_uuids: the devices that the request could be given (:func:`candidates`).
        nb_gpus: how many of them it needs.
        verdicts: the state of every device, judged without anybody's limits.
        leaving: UUIDs of devices whose only processes are those of a claim that has just ended.
    """
    coming = [
        verdict.gpu
        for verdict in verdicts
        if verdict.gpu.uuid in candidate_uuids
        and (verdict.free or verdict.state == "claimed" or verdict.gpu.uuid in leaving)
    ]
    return capacity(coming) >= nb_gpus
