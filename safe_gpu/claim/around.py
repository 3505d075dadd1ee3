"""The claim inside which this process claims, and the GPUs that its ancestors hold."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

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
from .view import HostView, owner_of

# For a rank whose script was started again by the first rank (Lightning) or by a launcher in a process that claims.
ONCE_FOR_ALL_RANKS = (
    'this is a rank that its program has started, so claim once for all: `if "LOCAL_RANK" not in os.environ: '
    "safe_gpu.claim_gpus(...)`, and let the ranks use those GPUs without claiming"
)


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
    if has_ended(around):  # all users read the names of its doors, and others may have them now
        return None
    with suppress(OSError):  # no sockets here
        return around if Doors(tree).is_inside(next(iter(around.gpus)), token) else None
    return around


def check_possible_inside(view: HostView, around: Entry, *, delegate: bool) -> None:
    """Refuse a request that the claim around can never satisfy.

    Args:
        delegate: whether the claim asks to allow claims inside it too.

    Raises:
        UnsatisfiableRequestError: too few usable GPUs, or ``delegate``.
    """
    if delegate:
        raise UnsatisfiableRequestError(
            "delegate=True is not possible inside another claim (SAFE_GPU_SCOPE): one level only; "
            + (ONCE_FOR_ALL_RANKS if "LOCAL_RANK" in os.environ else "claim without it"),
            value=True,
        )
    request, held = view.request, len(around.gpus)
    number = request.nb_gpus
    usable = {gpu.uuid for gpu in view.usable}
    if number > held:
        asked, this = f"claim_gpus({(number, request.up_to) if request.up_to else number}) runs", "claim_gpus"
        if style.option("nb_gpus") == "-n":
            asked, this = f"-n {number} is", "this one"
        problem = (
            f"{asked} inside {owner_of(around)}, which holds {plural(held)}: ask for {number} there (safe-gpu run "
        )
        problem += f"-n {number}, or claim_gpus({number}, delegate=True)), or leave {this} out"
    elif number > len(usable):
        reasons = (v for v in view.judge({}) if v.gpu.uuid in around.gpus and v.gpu.uuid not in usable and v.reason)
        listed = in_brackets("; ".join(f"GPU {verdict.gpu.label}: {verdict.reason}" for verdict in reasons))
        problem = f"{plural(number)} asked for inside {owner_of(around)}, which can give {len(usable)} of its "
        problem += f"{held}{listed}: ask for fewer{listed and ', or ask for others'}"
    else:
        return
    raise UnsatisfiableRequestError(problem, value=number)


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
    sharers = [(gpu, one) for gpu in gpus if gpu.uuid in holders for one in holders[gpu.uuid].sharers]
    ours = [(gpu.label, one.pid) for gpu, one in sharers if _is_of(one, family)]
    if ours:
        raise UnsatisfiableRequestError(
            f"process {ours[0][1]} holds a share of GPU {gpu_ranges(label for label, _ in ours)}, and no claim can be "
            "made inside a share: leave this claim out and use that share",
            value=ours[0][0],
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
    family, all_verdicts = _family(), tuple(verdicts)
    claimed = [one for one in all_verdicts if one.state == "claimed" and one.holder]
    held = [one for one in claimed if one.holder and _is_of(one.holder, family)]
    if not held or len(set(usable) - {verdict.gpu.uuid for verdict in held}) >= request.nb_gpus:
        return
    labels = gpu_ranges(verdict.gpu.label for verdict in held)
    who = "this process itself" if held[0].pid == os.getpid() else f"process {held[0].pid}, a parent of this one,"
    way_out = (
        "claims inside claims go one level deep, so use its GPUs without claiming"
        if inside
        else "claim there with delegate=True (or start this under `safe-gpu run`) so that its children may claim from "
        "it, or use its GPUs without claiming"
    )
    if "LOCAL_RANK" in os.environ and held[0].pid != os.getpid():
        way_out = ONCE_FOR_ALL_RANKS
    if imports_main():
        way_out = UNDER_MAIN
    raise NotEnoughGpusError(f"{who} holds GPU {labels}: {way_out}", nb_gpus=request.nb_gpus, verdicts=all_verdicts)
