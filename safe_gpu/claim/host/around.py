"""The claim inside which this process claims, and what a claim inside it can never get."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ...coordination.doors import Doors
from ...errors import UnsatisfiableRequestError
from ...gpus.devices import GpuVerdict
from ...host import procfs
from ...host.foreign_files import read_start
from ...wording.text import in_brackets, plural
from .ancestors import ONCE_FOR_ALL_RANKS

if TYPE_CHECKING:
    from ...coordination.entry import Entry
    from ...coordination.holders import Claims
    from .host_view import HostView


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
    number, call = request.nb_gpus, request.spelling.call
    usable = {gpu.uuid for gpu in view.usable}
    if number > held:
        owner, larger = _owner_and_larger(around, view.scope, f"-n {number}", f"claim_gpus({number}, delegate=True)")
        asked = f"{call}({(number, request.up_to) if request.up_to else number}) runs" if call else f"-n {number} is"
        problem = f"{asked} inside {owner}, which holds {plural(held)}: {larger}, or leave {call or 'this one'} out"
    elif number > len(usable):
        reasons = (v for v in view.judge({}) if v.gpu.uuid in around.gpus and v.gpu.uuid not in usable and v.reason)
        listed = in_brackets("; ".join(f"GPU {verdict.gpu.label}: {verdict.reason}" for verdict in reasons))
        problem = f"{plural(number)} asked for inside {owner_of(around)}, which can give {len(usable)} of its "
        problem += f"{held}{listed}: ask for fewer{listed and ', or ask for others'}"
    else:
        return
    raise UnsatisfiableRequestError(problem, value=number)


def _owner_and_larger(around: Entry, token: str, option: str, argument: str) -> tuple[str, str]:
    """Return whose the claim around this one is, and how to make it larger: by the option, or in Python.

    What ``safe-gpu run`` executes has had the token from its start; a process that claimed in Python has not.
    """
    pid = 0 if procfs.namespace_text(around.pidns or None) else around.pid
    if pid and procfs.uid_of(pid) == os.geteuid():
        began = (read_start(f"/proc/{pid}/environ", 1 << 22) or b"").split(b"\0")
        if os.fsencode(f"SAFE_GPU_SCOPE={token}") in began or "--supervised" in procfs.arguments_of(pid):
            return f"safe-gpu run (process {pid})", f"write safe-gpu run {option}"
    return owner_of(around), f"write {argument} there"
