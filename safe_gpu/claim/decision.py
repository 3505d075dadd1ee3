"""Decides what a claim does next: take, sleep, poll, watch or refuse. A pure function of a look and the time."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["POLL", "REFUSE", "SLEEP", "TAKE", "WATCH", "Decision", "Patience", "Seen", "Spent", "decide"]

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


class Spent(NamedTuple):
    """A limit of a user that stands in the way: ``held`` of ``most`` GPUs, by the leases with these names."""

    held: int
    most: int
    leases: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """``you hold 4 of your 4 GPUs``."""
        return f"you hold {self.held} of your {self.most} {'GPU' if self.most == 1 else 'GPUs'}"


class Seen(NamedTuple):
    """What one look saw. At most one of the three flags is set.

    Attributes:
        enough: enough GPUs are free.
        outdated: enough GPUs are free, but another waiter was passed on the ground of a poll that is too old.
        behind: a ticket ahead competes for the same GPUs and may not be passed.
        unleased: UUIDs of the usable GPUs that nobody holds; empty if ``behind``.
        named: UUIDs of the usable GPUs whose lease is free and whose name another process holds.
        spent: the limit of this user, if it does not allow more; ``unleased`` and ``named`` are empty then.
    """

    enough: bool = False
    outdated: bool = False
    behind: bool = False
    unleased: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    spent: Spent | None = None


class Patience(NamedTuple):
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
    patience: Patience
    until: float = 0.0


def decide(
    seen: Seen, patience: Patience, *, needed: int, now: float, next_poll: float, next_look: float = math.inf
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
