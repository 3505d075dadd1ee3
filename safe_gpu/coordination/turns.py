"""Turns: the order of a queue in which users are served by turns, as in start-time fair queueing.

A turn is a number that a waiter computes when it joins and never changes, so all clients see one order. It is the
virtual time of the queue, plus what its user holds and waits for already.
"""

from collections.abc import Callable, Iterable, Iterator

from .entry import Entry
from .silicon import Silicon, silicon_of

_STEP = 1024.0  # a turn is at most this times the number of its ticket

_WINDOW = 1024  # a ticket is passed by fewer later numbers than this


def turn_of(ticket: Entry) -> float | None:
    """Return the turn that a ticket says; None of a client without turns."""
    turn = ticket.more.get("turn")
    if isinstance(turn, (int, float)) and not isinstance(turn, bool) and 0 <= turn <= _STEP * ticket.number:
        return float(turn)
    return None


def by_turn(tickets: Iterable[Entry]) -> list[tuple[float, Entry]]:
    """Return living tickets in their order, each with its turn.

    One of a client without turns stands behind all lower numbers, as in that client's own order.

    Args:
        tickets: of all living waiters, by their numbers.
    """
    found = []
    latest = 0.0
    for ticket in tickets:
        turn = turn_of(ticket)
        if turn is None:
            turn = latest
        latest = max(latest, turn)
        found.append((turn, ticket))
    return sorted(found, key=lambda one: (one[0], one[1].number))


def turn_of_newcomer(
    wanted: Silicon,
    queue: list[tuple[float, Entry]],
    number: int,
    *,
    uid: int,
    held: float,
    size: Callable[[Entry], float],
    weight: float = 1.0,
    counts: Callable[[Entry], bool] = lambda ticket: True,
) -> float:
    """Return the turn of a waiter that joins a queue.

    Args:
        wanted: what it could get.
        queue: from :func:`by_turn`, of those inside the same claim as it, or inside none as it.
        number: of the new ticket.
        uid: of its user.
        held: how many GPUs the user holds.
        size: how many GPUs a ticket asks for; a share is worth a part of one.
        weight: of the user; what it holds and waits for counts divided by this.
        counts: whether a waiter lives, and is neither stopped nor absent. It is asked only where that decides.
    """
    queue = [one for one in queue if one[1].number < number]
    turn = max(_bounds(wanted, queue, number, counts), default=0.0) + 0.5 + held / weight
    after_own = []
    for its_turn, ticket in queue:
        if ticket.uid == uid:
            after_own.append((its_turn + size(ticket) / weight, ticket.number, ticket))
    for after_it, _, ticket in sorted(after_own, reverse=True):  # the last first: it takes long to find out who counts
        if after_it <= turn:
            break
        if counts(ticket):
            turn = after_it
            break
    return min(_STEP * number, turn)


def _bounds(
    wanted: Silicon, queue: list[tuple[float, Entry]], number: int, counts: Callable[[Entry], bool]
) -> Iterator[float]:
    """Yield the turns of the competitors that a newcomer does not pass: those who wait for nobody ahead, those who
    joined long ago, and clients that know no turns."""
    ahead = Silicon()  # what those wait for who are ahead of the next one
    for turn, ticket in queue:
        is_fixed = turn_of(ticket) is None or ticket.number <= number - _WINDOW
        if ahead.contains(wanted) and not is_fixed:
            continue  # each competitor waits for somebody ahead
        theirs = silicon_of(ticket)
        if (ahead.contains(theirs) and not is_fixed) or not counts(ticket):
            continue
        if wanted.meets(theirs) and (is_fixed or not ahead.meets(theirs)):
            yield turn
        ahead.add(theirs)
