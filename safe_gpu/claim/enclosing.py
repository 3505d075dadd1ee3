"""The claim inside which this process claims, and the GPUs that its ancestors hold."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from ..coordination.doors import Doors
from ..coordination.entry import Entry
from ..coordination.holders import Claims, has_ended
from ..errors import NotEnoughGpusError, UnsatisfiableRequestError
from ..gpus.devices import Gpu, GpuVerdict, Holder
from ..host import procfs
from ..selection.request import Selection
from ..wording import style
from ..wording.text import gpu_ranges, in_brackets, plural
from .arguments import UNDER_MAIN, imports_main
from .others import owner_of
from .view import HostView

# For a rank whose script was started again by the first rank (Lightning) or by a launcher in a process that claims.
ONCE_FOR_ALL_RANKS = (
    'this is a rank that its program has started, so claim once for all: `if "LOCAL_RANK" not in os.environ: '
    "safe_gpu.claim_gpus(...)`, and let the ranks use those GPUs without claiming"
)


def find_enclosing(claims: Claims, token: str, name_prefix: str) -> Entry | None:
    """Return this user's living claim with this token, the value of SAFE_GPU_SCOPE; None if it has ended.

    A child that the process of a claim left behind keeps the entry, and none of the doors: that claim has ended. One
    that could take no doors when it was made has no parts either: of that one the entry alone counts.

    Args:
        name_prefix: as of :class:`~safe_gpu.coordination.doors.Doors`.
    """
    enclosing = claims.enclosing(token)
    if enclosing is None or not enclosing.parts:
        return enclosing
    if has_ended(enclosing):  # all users read the names of its doors, and others may have them now
        return None
    first_gpu = next(iter(enclosing.gpus))
    try:
        has_doors = Doors(name_prefix).is_inside(first_gpu, token)
    except OSError:  # no sockets here
        return enclosing
    if not has_doors:
        return None
    return enclosing


def check_possible_inside(view: HostView, enclosing: Entry, *, delegate: bool) -> None:
    """Refuse a request that the enclosing claim can never satisfy.

    Args:
        delegate: whether the claim asks to allow claims inside it too.

    Raises:
        UnsatisfiableRequestError: too few usable GPUs, or ``delegate``.
    """
    if delegate:
        way_out = "claim without it"
        if "LOCAL_RANK" in os.environ:
            way_out = ONCE_FOR_ALL_RANKS
        raise UnsatisfiableRequestError(
            f"delegate=True is not possible inside another claim (SAFE_GPU_SCOPE): one level only; {way_out}",
            value=True,
        )
    number = view.request.nb_gpus
    if number > len(enclosing.gpus):
        raise UnsatisfiableRequestError(_more_than_it_holds(view.request, enclosing), value=number)
    usable = {gpu.uuid for gpu in view.usable}
    if number > len(usable):
        raise UnsatisfiableRequestError(_more_than_it_can_give(view, enclosing, usable), value=number)


def _more_than_it_holds(request: Selection, enclosing: Entry) -> str:
    number = request.nb_gpus
    if style.option("nb_gpus") == "-n":
        asked = f"-n {number} is"
        this = "this one"
    else:
        nb_gpus: object = number
        if request.up_to:
            nb_gpus = (number, request.up_to)
        asked = f"claim_gpus({nb_gpus}) runs"
        this = "claim_gpus"
    return (
        f"{asked} inside {owner_of(enclosing)}, which holds {plural(len(enclosing.gpus))}: ask for {number} there "
        f"(safe-gpu run -n {number}, or claim_gpus({number}, delegate=True)), or leave {this} out"
    )


def _more_than_it_can_give(view: HostView, enclosing: Entry, usable: Collection[str]) -> str:
    reasons = []
    for verdict in view.judge({}):
        if verdict.gpu.uuid in enclosing.gpus and verdict.gpu.uuid not in usable and verdict.reason:
            reasons.append(f"GPU {verdict.gpu.label}: {verdict.reason}")
    listed = in_brackets("; ".join(reasons))
    way_out = "ask for fewer"
    if reasons:
        way_out += ", or ask for others"
    limit = view.visible_limit
    if limit is not None and not limit.uuids:
        way_out = f"unset {limit.name}"
    return (
        f"{plural(view.request.nb_gpus)} asked for inside {owner_of(enclosing)}, which can give {len(usable)} of its "
        f"{len(enclosing.gpus)}{listed}: {way_out}"
    )


def _family() -> set[int]:
    """Return the pids of this process and of its ancestors."""
    return {os.getpid(), *procfs.ancestors(os.getpid())}


def _is_of(holder: Holder, family: set[int]) -> bool:
    """Return whether the process that holds something is one of these."""
    pid = holder.pid
    if pid is None or pid not in family:
        return False
    return procfs.is_start(holder.start, pid, procfs.start_time(pid))


def refuse_inside_share(gpus: Iterable[Gpu], holders: Mapping[str, Holder]) -> None:
    """Refuse a claim of a process that holds a share, or whose ancestor does: the program was given that share.

    Args:
        holders: UUID -> holder.

    Raises:
        UnsatisfiableRequestError: there is such a share.
    """
    family = _family()
    ours: list[tuple[str, int | None]] = []  # label of the GPU, process
    for gpu in gpus:
        if gpu.uuid not in holders:
            continue
        for sharer in holders[gpu.uuid].sharers:
            if _is_of(sharer, family):
                ours.append((gpu.label, sharer.pid))
    if not ours:
        return
    first_label, pid = ours[0]
    raise UnsatisfiableRequestError(
        f"process {pid} holds a share of GPU {gpu_ranges(label for label, _ in ours)}, and no claim can be made inside "
        "a share: leave this claim out and use that share",
        value=first_label,
    )


def refuse_gpus_of_ancestors(
    verdicts: Iterable[GpuVerdict], usable: Collection[str], request: Selection, *, inside: bool
) -> None:
    """Refuse to wait for GPUs that an ancestor holds: if the ancestor waits for this process, neither ever ends.

    Args:
        verdicts: with the holders, whose pids are of processes that live.
        usable: UUIDs that the request could ever get.
        inside: whether the claim is made inside another one.

    Raises:
        NotEnoughGpusError: without the GPUs of this process and its ancestors there are too few.
    """
    family = _family()
    judged = tuple(verdicts)
    held = []
    for verdict in judged:
        if verdict.state == "claimed" and verdict.holder and _is_of(verdict.holder, family):
            held.append(verdict)
    left = set(usable) - {verdict.gpu.uuid for verdict in held}
    if not held or len(left) >= request.nb_gpus:
        return
    first = held[0].pid
    is_own = first == os.getpid()
    who = f"process {first}, a parent of this one,"
    if is_own:
        who = "this process itself"
    labels = gpu_ranges(verdict.gpu.label for verdict in held)
    raise NotEnoughGpusError(
        f"{who} holds GPU {labels}: {_way_out_of_ancestors(is_own=is_own, inside=inside)}",
        nb_gpus=request.nb_gpus,
        verdicts=judged,
    )


def _way_out_of_ancestors(*, is_own: bool, inside: bool) -> str:
    if imports_main():
        return UNDER_MAIN
    if "LOCAL_RANK" in os.environ and not is_own:
        return ONCE_FOR_ALL_RANKS
    if inside:
        return "claims inside claims go one level deep, so use its GPUs without claiming"
    return (
        "claim there with delegate=True (or start this under `safe-gpu run`) so that its children may claim from it, "
        "or use its GPUs without claiming"
    )
