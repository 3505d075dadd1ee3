"""Decides what a claim does next: take, sleep, poll, watch or refuse. A pure function of a look and the time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .look import AttemptResult


TAKE = "take"
"""The GPUs are leased; the search ends."""
POLL = "poll"
"""Poll the driver, then look again."""
SLEEP = "sleep"
"""Sleep until the ticket ahead is gone, then look again."""
WATCH = "watch"
"""Watch the leases that others hold, then look again."""
REFUSE = "refuse"
"""Fail, because the time to wait is over."""

# The head of the queue makes a full look this often, in seconds, because the state directory may have been deleted.
_FULL_LOOK = 1.0

# A name may outlive its claim for a moment, in a child between fork and exec: it is tried once more, in seconds.
_SECOND_TRY = 0.005


class WaitState(NamedTuple):
    """The state of a claim's wait.

    Attributes:
        deadline: ``time.monotonic()`` value; ``math.inf`` waits for ever.
        tried_last: whether the last look, after the deadline, has been made.
        polled_for: the unleased GPUs at the time of the latest poll.
        named: the GPUs held by name only for which a second look was made.
    """

    deadline: float = math.inf
    tried_last: bool = False
    polled_for: frozenset[str] | None = None
    named: frozenset[str] = frozenset()


class Decision(NamedTuple):
    """A step; ``until`` is the ``time.monotonic()`` value at which SLEEP and WATCH end at the latest."""

    step: str
    patience: WaitState
    until: float = 0.0


def decide(
    seen: AttemptResult, patience: WaitState, *, needed: int, now: float, next_poll: float, next_look: float = math.inf
) -> Decision:
    """The next step of a claim.

    Args:
        needed: how many GPUs.
        now: ``time.monotonic()`` value, as are the next two.
        next_poll: earliest time of another poll for the same unleased GPUs.
        next_look: latest time at which a sleeping waiter looks again.
    """
    if seen.enough:
        return Decision(TAKE, patience)
    if seen.outdated:
        return Decision(POLL, patience)
    if not seen.named <= patience.named:
        return Decision(WATCH, patience._replace(named=patience.named | seen.named), now + _SECOND_TRY)
    if now >= patience.deadline:
        if patience.tried_last:
            return Decision(REFUSE, patience)
        return Decision(POLL, patience._replace(tried_last=True))
    if seen.behind:
        return Decision(SLEEP, patience, min(patience.deadline, next_look))
    until = min(patience.deadline, now + _FULL_LOOK)
    if seen.spent is not None:
        return Decision(WATCH, patience, until)
    if len(seen.unleased) >= needed:  # enough leases are free, but the driver shows processes on those GPUs
        if seen.unleased != patience.polled_for or now >= next_poll:
            return Decision(POLL, patience._replace(polled_for=seen.unleased))
        until = min(until, next_poll)
    return Decision(WATCH, patience, until)
