"""What a claim inside another one can never get."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...errors import UnsatisfiableRequestError
from ...host import procfs
from ...host.foreign_files import read_start
from ...wording.text import in_brackets, plural
from .ancestors import ONCE_FOR_ALL_RANKS
from .around import owner_of

if TYPE_CHECKING:
    from ...coordination.entry import Entry
    from .host_view import HostView


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
        if os.fsencode(f"SAFE_GPU_SCOPE={token}") in began:
            return f"safe-gpu run (process {pid})", f"write safe-gpu run {option}"
    return owner_of(around), f"write {argument} there"
