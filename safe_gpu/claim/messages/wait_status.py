"""The state of a wait, as facts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...coordination.holders import lives_here
from ...coordination.queue import is_stopped
from ...coordination.signals import DeferredSignals
from ...gpus.devices import Gpu, GpuVerdict, Holder
from ...host.procfs import user_name
from ...selection.sharing import part_of
from .forecast import Forecast

if TYPE_CHECKING:
    from ...coordination.entry import Entry
    from ..host.host_view import HostView
    from ..limits import LimitReached


class ClaimAhead(NamedTuple):
    """The nearest waiter ahead that wants some of the same GPUs.

    ``since`` is in Unix seconds. ``stopped`` is True if its process is stopped or frozen (a suspended job). ``pid`` is
    0 if no process of the ticket's owner with this pid lives here. If it came later and stands ahead by its turn,
    ``in_turn`` is how many GPUs its user holds.
    """

    pid: int
    user: str | None
    nb_gpus: int
    since: float
    stopped: bool = False
    in_turn: float | None = None

    @classmethod
    def of(cls, ticket: Entry) -> ClaimAhead:
        """Return the claim that a ticket describes. /proc tells whether its process is stopped."""
        with DeferredSignals():  # an exception that comes in the midst of getpwuid(3) is lost if it knows no such user
            user = user_name(ticket.uid) if ticket.uid >= 0 else None
        pid = ticket.pid if lives_here(ticket) else 0
        return cls(pid, user, ticket.nb_gpus, ticket.since or 0.0, is_stopped(ticket))


class WaitStatus(NamedTuple):
    """The state of a wait, for a report to the user.

    Attributes:
        position: 1 for the first of the waiters that compete for the same GPUs, 0 if it was not counted.
        free: how many GPUs are free; None if they were not judged.
        needed: how many GPUs it waits for.
        verdicts: one for each GPU; empty if they were not judged.
        ahead: the nearest claim ahead in the queue, if there is one.
        expected: when it can expect to start; None if that was not looked up.
        spent: the limit of the user, if it stands in the way. Then the GPUs are not judged.
        asked: all that is asked for, in words; "" if that is only ``needed`` GPUs.
    """

    position: int
    free: int | None
    needed: int
    verdicts: tuple[GpuVerdict, ...] = ()
    ahead: ClaimAhead | None = None
    expected: Forecast | None = None
    spent: LimitReached | None = None
    asked: str = ""


def wait_status(
    view: HostView,
    ticket: Entry | None,
    position: int,
    elsewhere: Collection[str] = (),
    spent: LimitReached | None = None,
    *,
    came_later: bool = False,
) -> WaitStatus:
    """Return the state of a wait after the latest look. It takes no lock and does not poll the driver.

    Args:
        ticket: the nearest ticket ahead that may not be passed, if any.
        position: in the queue, or 0 if it was not counted. Behind a ticket the GPUs are not judged then, because
            hundreds may wait.
        elsewhere: UUIDs of the GPUs that only another state directory's claims hold.
        spent: the limit of this user, if it stands in the way.
        came_later: whether that ticket came later, and stands ahead by its turn.
    """
    ahead = None if ticket is None else ClaimAhead.of(ticket)
    status = WaitStatus(position, None, view.request.nb_gpus, ahead=ahead, spent=spent, asked=view.request.text)
    if spent is not None or (ticket is not None and not position):
        return status
    holders = view.claims.holders(view.inside)
    verdicts = view.judge({**dict.fromkeys(elsewhere, Holder(elsewhere=True)), **holders})
    if came_later and ahead is not None:
        status = status._replace(ahead=ahead._replace(in_turn=_held_by(ahead.user, view.snapshot.gpus, holders)))
    return status._replace(free=sum(verdict.free for verdict in verdicts), verdicts=verdicts)


def _held_by(user: str | None, gpus: Iterable[Gpu], holders: Mapping[str, Holder]) -> float:
    """Return how many GPUs a user holds; a share counts as its part."""
    held = ((gpu, one) for gpu in gpus if gpu.uuid in holders for one in holders[gpu.uuid].each)
    return sum(part_of(gpu, one.share) for gpu, one in held if one.user == user)
