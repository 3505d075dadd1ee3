"""What the policy never allows, however long a claim waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import UnsatisfiableRequestError
from ...wording.text import format_age

if TYPE_CHECKING:
    from ...settings.policy import Limits
    from ...wording.argument_style import ArgumentStyle
    from ..arguments import HoldTime


def check_policy_limits(nb_gpus: float, hold: HoldTime, limits: Limits, spelling: type[ArgumentStyle]) -> None:
    """Refuse a claim that is not made inside another one and that the policy never allows.

    Raises:
        UnsatisfiableRequestError: more GPUs, or a longer time, than the policy allows.
    """
    check_count(nb_gpus, limits)
    if limits.max_hold is not None and hold.seconds is not None and hold.seconds > limits.max_hold:
        name = spelling.option("hold_for") if hold.said else "SAFE_GPU_FOR"
        raise UnsatisfiableRequestError(
            f"{name} says {format_age(hold.seconds)}, and {limits.path} allows you {format_age(limits.max_hold)} "
            f"({limits.sections['max_hold']}): say less, or ask the administrator",
            value=hold.seconds,
        )


def check_count(nb_gpus: float, limits: Limits) -> None:
    """Refuse more GPUs than the user may hold at once.

    Raises:
        UnsatisfiableRequestError: says how many are allowed, and by which section of the file.
    """
    most = limits.max_gpus
    if most is not None and nb_gpus > most:
        number, way_out = (f"{most} at once", "ask for fewer, or ") if most else ("none", "")
        raise UnsatisfiableRequestError(
            f"{nb_gpus:.2g} {'GPU' if nb_gpus == 1 else 'GPUs'} asked for, and {limits.path} allows you {number} on "
            f"this host ({limits.sections['max_gpus']}): {way_out}ask the administrator",
            value=nb_gpus,
        )


def hold_within(seconds: float | None, limits: Limits, *, said: bool) -> float | None:
    """Return for how long a claim will probably hold its GPUs, by its own word and by the policy; None is unknown.

    Args:
        seconds: by its own word, or by that of the batch job.
        said: whether the claim said it. If not, and nothing is known, the default of the policy applies.
    """
    if seconds is None and not said:
        seconds = limits.default_hold
    if limits.max_hold is None:
        return seconds
    return limits.max_hold if seconds is None else min(seconds, limits.max_hold)
