"""Turns: the order of a queue in which users are served by turns, as in start-time fair queueing.

A turn is a number that a waiter computes when it joins and never changes, so all clients see one order. It is the
virtual time of the queue, plus what its user holds and waits for already.
"""

from collections.abc import Callable, Iterable, Iterator

from .ticket import LATEST_TURN, Ticket, TicketRequest

_WINDOW = 1024
"""A ticket is passed by fewer later numbers than this."""


def by_turn(tickets: Iterable[Ticket]) -> list[tuple[float, Ticket]]:
    """Return the tickets of a queue in their order, each with its turn.

    One of a client without turns stands behind all lower numbers, as in that client's own order.

    Args:
        tickets: of all living waiters, by their numbers.
    """
    found, latest = [], 0.0
    for ticket in tickets:
        turn = latest if ticket.turn is None else ticket.turn
        latest = max(latest, turn)
        found.append((turn, ticket))
    return sorted(found, key=lambda one: (one[0], one[1].seq))


def turn_of_newcomer(
    request: TicketRequest,
    queue: list[tuple[float, Ticket]],
    seq: int,
    *,
    uid: int,
    held: float,
    size: Callable[[TicketRequest], float],
    weight: float = 1.0,
    counts: Callable[[Ticket], bool] = lambda ticket: True,
) -> float:
    """Return the turn of a waiter that joins a queue.

    Args:
        queue: from :func:`by_turn`.
        seq: the number of the new ticket.
        uid: of its user.
        held: how many GPUs the user holds.
        size: how many GPUs a request is worth; a share is worth a part of one.
        weight: of the user; what it holds and waits for counts divided by this.
        counts: whether a waiter lives, and is neither stopped nor absent. It is asked only where that decides.
    """
    start = max(_bounds(request, queue, seq, counts), default=0.0) + 0.5 + held / weight
    after_own = sorted(
        (turn + size(ticket.request) / weight, ticket.seq, ticket)
        for turn, ticket in queue
        if ticket.uid == uid and ticket.request is not None
    )
    # From the last one on, since it takes long to find out who counts.
    latest = next((turn for turn, _, ticket in reversed(after_own) if turn <= start or counts(ticket)), start)
    return min(LATEST_TURN, max(start, latest))


def _bounds(
    request: TicketRequest, queue: list[tuple[float, Ticket]], seq: int, counts: Callable[[Ticket], bool]
) -> Iterator[float]:
    """Yield the turns of the competitors that a newcomer does not pass: those who wait for nobody ahead, those who
    joined long ago, and clients that know no turns."""
    left = set(request.gpus)  # that nobody ahead wants
    wanted: set[str] = set()
    for turn, ticket in queue:
        fixed = ticket.turn is None or ticket.seq <= seq - _WINDOW
        if not (left or fixed):
            continue
        gpus = request.gpus if ticket.request is None else ticket.request.gpus
        if (gpus <= wanted and not fixed) or not counts(ticket):
            continue
        if ticket.competes_with(request) and (fixed or wanted.isdisjoint(gpus)):
            yield turn
        wanted |= gpus
        left -= gpus
