"""What this host can ever give a request, regardless of who uses it now. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import MIG_IS_ON
from ..gpus.vendors import VENDORS
from ..wording.text import gpu_ranges, plural
from .rules import DEFAULT_RULES, Rules
from .values import is_index
from .verdicts import UNWATCHABLE, fence_hint, judge, why_outside, why_unusable

if TYPE_CHECKING:
    from ..gpus.devices import Gpu, GpuVerdict, HostSnapshot, LeaseHolder
    from ..gpus.visible import VisibleLimit
    from .request import Selection


def candidates(
    snapshot: HostSnapshot,
    request: Selection,
    visible_limit: VisibleLimit | None = None,
    *,
    rules: Rules = DEFAULT_RULES,
    lost: bool = False,
) -> tuple[Gpu, ...]:
    """Return every device that this request could ever get, in the order of the snapshot. Requests compete for these.

    Args:
        lost: whether those count that the driver has lost and may find again.
    """
    return tuple(
        gpu
        for gpu in snapshot.gpus
        if not (request.nb_gpus > 1 and gpu.is_mig_instance)
        and not ((why_unusable(gpu) or _why_unwatchable(gpu, snapshot, rules)) and not (lost and gpu.lost))
        and not (why_outside(gpu, request, visible_limit) if gpu.lost else _why_never(gpu, request, visible_limit))
    )


def check_possible(
    snapshot: HostSnapshot,
    request: Selection,
    visible_limit: VisibleLimit | None = None,
    *,
    leased: Callable[[], Mapping[str, LeaseHolder]] = dict,
    rules: Rules = DEFAULT_RULES,
) -> None:
    """Raise if this host, or this process within its visible limit, can never satisfy the request.

    Args:
        leased: returns the holders of leases, by UUID. It is called only to say what is free outside the visible limit.

    Raises:
        UnsatisfiableRequestError: names the offending value and what to do.
    """
    for condition in request.conditions:
        for name in condition.unknown(snapshot):
            raise UnsatisfiableRequestError(
                f"{request.spelling.setting(condition.argument, name)} names no single {_title(snapshot)} GPU of this "
                f"host, which has {_inventory(snapshot.gpus, by_uuid=not is_index(name))}"
                + _unread_instances(snapshot),
                value=name,
            )
    left: Sequence[Gpu] = snapshot.gpus
    holders: Mapping[str, LeaseHolder] = {}
    problem = ""
    unwatchable = partial(_why_unwatchable, snapshot=snapshot, rules=rules)
    for why_not in (why_unusable, unwatchable, partial(_why_never, request=request, visible_limit=None)):
        left = [gpu for gpu in left if not why_not(gpu)]
        problem = problem or _too_few(request.nb_gpus, left, snapshot, why_not)
    problem = problem or _too_far_apart(request, left)
    if (
        not problem
        and visible_limit is not None
        and not fits(request, [gpu for gpu in left if gpu.uuid in visible_limit])
    ):
        holders = leased()
        hint = fence_hint(judge(snapshot, request, leased=holders, rules=rules), visible_limit)
        way_out = f", or set {visible_limit.lift} to disregard the variable" if visible_limit.lift else ""
        problem = f"{hint}: ask for its GPUs only{way_out}{_unread_instances(snapshot)}"
    if problem:
        asked = "1 GPU is" if request.nb_gpus == 1 else f"{request.nb_gpus} GPUs are"
        raise UnsatisfiableRequestError(
            f"{asked} asked for, but {problem}",
            value=request.nb_gpus,
            verdicts=judge(snapshot, request, leased=holders, visible_limit=visible_limit, rules=rules),
        )


def _title(snapshot: HostSnapshot) -> str:
    return VENDORS[snapshot.vendor].title


def _too_far_apart(request: Selection, left: Sequence[Gpu]) -> str:
    """Return why these GPUs do not suffice together, although there are enough of them."""
    most = max(map(capacity, request.groups(left)), default=0)
    if most >= request.nb_gpus:
        return ""
    if request.value_of("near") == "numa" and (unknown := [gpu.label for gpu in left if gpu.numa_node is None]):
        return f"the NUMA node of GPU {gpu_ranges(unknown)} is not known: leave {request.spelling.option('near')} out"
    return f"{f'only {most}' if most > 1 else 'no two'} of this host are {request.together}: ask for fewer"


def _why_unwatchable(gpu: Gpu, snapshot: HostSnapshot, rules: Rules) -> str:
    watchable = gpu.processes_supported or snapshot.shared_display or rules.lists_optional
    return "" if watchable else UNWATCHABLE


def _why_never(gpu: Gpu, request: Selection, visible_limit: VisibleLimit | None) -> str:
    """Return why the request can never get the device: it is outside, or whether it has the memory will never be
    known."""
    return why_outside(gpu, request, visible_limit) or request.why_unknowable(gpu)


def _too_few(nb_gpus: int, left: Sequence[Gpu], snapshot: HostSnapshot, why_not: Callable[[Gpu], str]) -> str:
    """Return why the devices in ``left`` are fewer than ``nb_gpus``; "" if they suffice."""
    most = capacity(left)
    if most >= nb_gpus:
        return ""
    total = len(snapshot.physical)
    gpus = plural(total, f"{_title(snapshot)} GPU")
    if any(gpu.is_mig_instance for gpu in left):
        text = f"CUDA shows a process one MIG instance, and no whole GPU beside it: ask for {most}"
        if most < len(left):
            text += f"{', or for 1' if most > 1 else ''} in each of up to {len(left)} processes"
        return text
    if total < nb_gpus and len(left) == len(snapshot.gpus):
        return f"this host has only {gpus}: ask for fewer" if total else "this host has none"
    reasons: dict[str, list[str]] = {}
    for gpu in snapshot.gpus:
        reasons.setdefault(why_not(gpu), []).append(gpu.label)
    listed = "; ".join(f"GPU {gpu_ranges(labels)}: {reason}" for reason, labels in reasons.items() if reason)
    return f"only {most} of the {gpus} of this host can be claimed ({listed})" if most else f"none fits ({listed})"


def _inventory(gpus: Sequence[Gpu], *, by_uuid: bool) -> str:
    if not gpus:
        return "none"
    if by_uuid:
        return ", ".join(f"{gpu.label} ({gpu.uuid})" for gpu in gpus)
    return f"GPU {gpu_ranges(gpu.label for gpu in gpus)}"


def _unread_instances(snapshot: HostSnapshot) -> str:
    """Return on which GPU this driver does not read the MIG instances, one of which may have been meant, and why."""
    found = (gpu for gpu in snapshot.gpus if gpu.mig_enabled and gpu.unusable != MIG_IS_ON)
    return next((f"; GPU {gpu.label}: {gpu.unusable}" for gpu in found), "")


def can_be_met_by_releases(
    candidate_uuids: Collection[str], request: Selection, verdicts: Iterable[GpuVerdict], leaving: Collection[str] = ()
) -> bool:
    """Return whether a waiting request would be met if every lease were released. If so, later waiters must not pass
    it.

    Args:
        candidate_uuids: the devices that the request could get (:func:`candidates`).
        request: how many of them it needs, and which together.
        verdicts: of every device, judged for this request without a visible limit.
        leaving: UUIDs of devices that are busy only with the processes of a claim that has just ended.
    """
    coming = [
        verdict.gpu
        for verdict in verdicts
        if verdict.gpu.uuid in candidate_uuids
        and (verdict.free or verdict.state == "claimed" or verdict.gpu.uuid in leaving)
    ]
    return fits(request, coming)


def fits(request: Selection, gpus: Sequence[Gpu]) -> bool:
    """Return whether the request can have all its GPUs of these."""
    return any(capacity(group) >= request.nb_gpus for group in request.groups(gpus))


def capacity(gpus: Collection[Gpu]) -> int:
    """Return how many of these devices one process can hold: all whole GPUs, or one MIG instance if there is no whole
    GPU.

    CUDA shows a process at most one MIG instance, and with many driver versions no whole GPU together with it.
    """
    whole = sum(gpu.mig_parent is None for gpu in gpus)
    return whole or min(len(gpus), 1)
