"""Decides what a claim does next. Pure."""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..limits import LimitReached

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


class AttemptResult(NamedTuple):
    """What one look saw. At most one of the three flags is set.

    Attributes:
        enough: enough GPUs are free.
        outdated: the poll is too old, or lacks what another waiter's conditions need.
        behind: a ticket ahead competes for the same GPUs and may not be passed.
        unleased: UUIDs of the usable GPUs that nobody holds; empty if ``behind``.
        named: UUIDs of the usable GPUs whose lease is free and whose name another process holds.
        limit: the limit of this user, if it does not allow more; ``unleased`` and ``named`` are empty then.
        watched: lease files besides those of held GPUs that may come free: the slots of shared ones.
    """

    enough: bool = False
    outdated: bool = False
    behind: bool = False
    unleased: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    limit: "LimitReached | None" = None
    watched: frozenset[str] = frozenset()


class WaitState(NamedTuple):
    """The state of a claim's wait.

    Attributes:
        deadline: ``time.monotonic()`` value; ``math.inf`` waits without limit.
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
    state: WaitState
    until: float = 0.0


def decide(
    result: AttemptResult,
    state: WaitState,
    *,
    suffices: bool,
    now: float,
    next_poll: float,
    next_look: float = math.inf,
) -> Decision:
    """Return the next step of a claim.

    Args:
        suffices: whether the unleased GPUs would be enough.
        now: ``time.monotonic()`` value, as are the next two.
        next_poll: earliest time of another poll for the same unleased GPUs.
        next_look: latest time at which a sleeping waiter looks again.
    """
    if result.enough:
        return Decision(TAKE, state)
    if result.outdated:
        return Decision(POLL, state)
    if not result.named <= state.named:
        return Decision(WATCH, state._replace(named=state.named | result.named), now + _SECOND_TRY)
    if now >= state.deadline:
        if state.tried_last:
            return Decision(REFUSE, state)
        return Decision(POLL, state._replace(tried_last=True))
    if result.behind:
        return Decision(SLEEP, state, min(state.deadline, next_look))
    until = min(state.deadline, now + _FULL_LOOK)
    if result.limit is not None:
        return Decision(WATCH, state, until)
    if suffices:  # enough leases are free, but the driver shows processes on those GPUs
        if result.unleased != state.polled_for or now >= next_poll:
            return Decision(POLL, state._replace(polled_for=result.unleased))
        until = min(until, next_poll)
    return Decision(WATCH, state, until)
