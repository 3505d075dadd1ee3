"""Decides what a claim does next. Pure."""

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..limits import LimitReached

TAKE = "take"
"""The claim holds its GPUs; the search ends."""

POLL = "poll"
"""Poll the driver, then look again."""

SLEEP = "sleep"
"""Sleep until the ticket ahead is gone, then look again."""

WATCH = "watch"
"""Watch the claims of others, then look again."""

AGAIN = "again"
"""Pause unevenly, then look again: two claims have seen each other."""

REFUSE = "refuse"
"""Fail, because the time to wait is over."""

# The head of the queue makes a full look this often, in seconds, because the state directory may have been deleted.
_FULL_LOOK = 1.0

# A dying process closes its descriptors one by one, so a door may outlive an entry: it is tried once more, in seconds.
_SECOND_TRY = 0.005

# For so long even a claim that does not wait looks again after it withdrew, in seconds.
_WITHDRAWING = 1.0


class Seen(NamedTuple):
    """What one look saw. At most one of the flags is set.

    Attributes:
        enough: enough GPUs are free.
        outdated: the poll is too old, or lacks what another waiter's conditions need.
        withdrawn: the claim was given back, since another one was made meanwhile.
        behind: a ticket ahead competes for the same GPUs and may not be passed.
        free: UUIDs of the usable GPUs that nobody holds; empty if ``behind``.
        elsewhere: UUIDs of the usable GPUs that only another state directory's claims hold.
        limit: the limit of this user, if it does not allow more; ``free`` and ``elsewhere`` are empty then.
        watched: names of the claims on usable GPUs.
    """

    enough: bool = False
    outdated: bool = False
    withdrawn: bool = False
    behind: bool = False
    free: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    limit: "LimitReached | None" = None
    watched: frozenset[str] = frozenset()


class WaitState(NamedTuple):
    """The state of a claim's wait.

    Attributes:
        deadline: ``time.monotonic()`` value; ``math.inf`` waits without limit.
        tried_last: whether the last look, after the deadline, has been made.
        polled_for: the GPUs that nobody held at the time of the latest poll.
        elsewhere: the GPUs held elsewhere for which a second look was made.
        withdrew: when the claim withdrew first, since it was not in anybody's way; 0 for never.
    """

    deadline: float = math.inf
    tried_last: bool = False
    polled_for: frozenset[str] | None = None
    elsewhere: frozenset[str] = frozenset()
    withdrew: float = 0.0


class Decision(NamedTuple):
    """A step; ``until`` is the ``time.monotonic()`` value at which SLEEP, WATCH and AGAIN end at the latest."""

    step: str
    state: WaitState
    until: float = 0.0


def decide(
    seen: Seen,
    state: WaitState,
    *,
    suffices: bool,
    now: float,
    next_poll: float,
    next_look: float = math.inf,
    pause: float = 0.0,
) -> Decision:
    """Return the next step of a claim.

    Args:
        suffices: whether the GPUs that nobody holds would be enough.
        now: ``time.monotonic()`` value, as are the next two.
        next_poll: earliest time of another poll for the same GPUs.
        next_look: latest time at which a sleeping waiter looks again.
        pause: seconds until a claim that withdrew looks again.
    """
    if seen.enough:
        return Decision(TAKE, state)
    if seen.outdated:
        return Decision(POLL, state)
    withdrew = (state.withdrew or now) if seen.withdrawn else 0.0
    state = state._replace(withdrew=withdrew)
    if seen.withdrawn and now < max(state.deadline, withdrew + _WITHDRAWING):
        return Decision(AGAIN, state, now + pause)
    if not seen.elsewhere <= state.elsewhere:
        return Decision(WATCH, state._replace(elsewhere=state.elsewhere | seen.elsewhere), now + _SECOND_TRY)
    if now >= state.deadline:
        if state.tried_last:
            return Decision(REFUSE, state)
        return Decision(POLL, state._replace(tried_last=True))
    if seen.behind:
        return Decision(SLEEP, state, min(state.deadline, next_look))
    until = min(state.deadline, now + _FULL_LOOK)
    if seen.limit is not None:
        return Decision(WATCH, state, until)
    if suffices:  # nobody holds enough of them, but the driver shows processes there
        if seen.free != state.polled_for or now >= next_poll:
            return Decision(POLL, state._replace(polled_for=seen.free))
        until = min(until, next_poll)
    return Decision(WATCH, state, until)
