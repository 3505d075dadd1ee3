"""What a claim inside another one can never get."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...errors import UnsatisfiableRequestError
from ...wording.text import format_bytes, in_brackets, plural
from .ancestors import ONCE_FOR_ALL_RANKS
from .outer_claim import owner_of_outer

if TYPE_CHECKING:
    from .host_view import HostView


def check_possible_inside(view: HostView, *, delegate: bool) -> None:
    """Refuse a request that the outer claim can never satisfy.

    Args:
        delegate: whether the inner claim asks to delegate too.

    Raises:
        UnsatisfiableRequestError: too few usable GPUs, or ``delegate``.
    """
    if delegate:
        raise UnsatisfiableRequestError(
            "delegate=True is not possible inside another claim (SAFE_GPU_SCOPE): one level only; "
            + (ONCE_FOR_ALL_RANKS if "LOCAL_RANK" in os.environ else "claim without it"),
            value=True,
        )
    outer, request = view.outer, view.request
    shares = [record.share for record in outer.gpus.values() if record.share is not None]
    if request.share is not None and shares and request.share > min(shares):
        raise UnsatisfiableRequestError(
            f"{format_bytes(request.share)} of each GPU asked for inside {owner_of_outer(outer)}, which has a share of "
            f"{format_bytes(min(shares))}: ask for less, or make the outer share larger",
            value=request.share,
        )
    usable = {gpu.uuid for gpu in view.usable}
    if len(usable) < request.nb_gpus:
        reasons = (v for v in view.judge({}) if v.gpu.uuid in outer.gpus and v.gpu.uuid not in usable)
        listed = in_brackets("; ".join(f"GPU {verdict.gpu.label}: {verdict.reason}" for verdict in reasons))
        way_out = "ask for others" if listed else "make the outer claim larger"
        raise UnsatisfiableRequestError(
            f"{plural(request.nb_gpus)} asked for inside {owner_of_outer(outer)}, which can give "
            f"{len(usable)} of its {len(outer.gpus)}{listed}: ask for fewer, or {way_out}",
            value=request.nb_gpus,
        )
