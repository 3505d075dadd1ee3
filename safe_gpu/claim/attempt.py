"""One look under host.lock: who is ahead in the queue, which leases are free, and whether they are enough."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.locks import HostLock
from ..procfs import printable_lines
from .leasing import Leases
from .queue_place import QueueSnapshot
from .view import check_possible_inside, outer_claim

if TYPE_CHECKING:
    from ..coordination.locks import LockedHost
    from ..coordination.queue import Ticket, WaiterAhead
    from ..devices import Gpu
    from .claim import Claim
    from .options import ClaimOptions
    from .queue_place import QueuePlace
    from .quota import LimitReached
    from .view import HostView


# Others in the queue may be passed only by a poll that is at most this old, in seconds.
_RECENT = 1.0


class AttemptResult(NamedTuple):
    """What one look saw. At most one of the three flags is set.

    Attributes:
        enough: enough GPUs are free.
        outdated: the poll is too old, or lacks what another waiter's conditions need.
        behind: a ticket ahead competes for the same GPUs and may not be passed.
        unleased: UUIDs of the usable GPUs that nobody holds; empty if ``behind``.
        named: UUIDs of the usable GPUs whose lease is free and whose name another process holds.
        spent: the limit of this user, if it does not allow more; ``unleased`` and ``named`` are empty then.
        strange: whether a ticket ahead has a condition that is not known here, so that a look soon may show more.
        watched: lease files besides those of held GPUs that may come free: the slots of shared ones.
    """

    enough: bool = False
    outdated: bool = False
    behind: bool = False
    unleased: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    spent: LimitReached | None = None
    strange: bool = False
    watched: frozenset[str] = frozenset()


class Attempt:
    """The result of one look.

    Attributes:
        result: the facts for ``decide``.
        chosen: the GPUs that the request can have. They are leased if there is a claim to hold the leases.
        ahead: the nearest ticket that may not be passed; it stays open until :meth:`close`.
        stopped: the nearest ticket that was passed because its waiter is stopped.
    """

    def __init__(self) -> None:
        self.result = AttemptResult()
        self.chosen: tuple[Gpu, ...] = ()
        self.ahead: WaiterAhead | None = None
        self.stopped: Ticket | None = None
        self._passed = False  # those ahead, by what the poll says of them
        self._strange = False
        self._lacking: frozenset[str] = frozenset()

    def close(self) -> None:
        """Close the ticket ahead. Safe to call twice."""
        if self.ahead is not None:
            self.ahead.close()

    def run(
        self, view: HostView, place: QueuePlace, claim: Claim | None, options: ClaimOptions, *, may_wait: bool
    ) -> None:
        """Look, and fill ``claim`` if enough GPUs are free; else join the queue if ``may_wait``.

        Args:
            claim: an empty claim; None takes no leases.

        Raises:
            LockTimeout, StateDirError: host.lock, a lease, a record or a ticket cannot be used.
            UnsatisfiableRequestError: the outer claim can never satisfy the request.
        """
        if options.quota is not None:
            options.quota.prepare()
        view.prepare()
        with HostLock(options.lock_deadline, prepare=place.prepare) as host:
            view.see_drained(host)
            if view.scope:
                self._enter_scope(host, view, place, options)
            if place.waiter is None and not host.queue.is_empty():
                place.ensure_waiter()
            if claim is not None:
                claim.inner = bool(view.outer)
            leases = _leases(host, view, claim, options)
            try:
                among = self._open(leases, place)
                spent = leases.spent()
                chosen = leases.choose(among) if spent is None and not self._lacking else None
                self.result = self._result(leases, chosen, spent)
                if self.result.enough and chosen is not None:
                    if claim is not None:
                        leases.hand_over(claim, chosen, place.hold_for())
                    self.chosen = chosen
            finally:
                leases.give_back()
            if not self.chosen and may_wait:
                place.ensure_waiter().join(host)
        if self.chosen and leases.trouble is not None:
            options.logger.warning(
                "the GPUs are claimed by their lease files alone, since their names cannot be bound (%s): processes "
                "with another state directory or a private /tmp do not see the claim",
                leases.trouble,
            )

    def _result(self, leases: Leases, chosen: tuple[Gpu, ...] | None, spent: LimitReached | None) -> AttemptResult:
        if self._lacking:
            leases.view.needs |= self._lacking
            return AttemptResult(outdated=True)
        if chosen is not None:
            outdated = self._passed and (leases.view.has_waited or leases.view.age > _RECENT)
            return AttemptResult(enough=not outdated, outdated=outdated)
        if self.ahead is not None or spent is not None:
            return AttemptResult(behind=self.ahead is not None, spent=spent, strange=self._strange)
        unleased = leases.unleased()
        named = leases.named(unleased) | (leases.dropped & unleased)
        return AttemptResult(unleased=unleased - named, named=named, watched=frozenset(leases.watched()))

    def _enter_scope(self, host: LockedHost, view: HostView, place: QueuePlace, options: ClaimOptions) -> None:
        """Limit the view to the GPUs of the outer claim, or ignore a scope of which no claim exists any more."""
        view.outer = outer_claim(host, view.snapshot, view.scope)
        if view.outer:
            delegate = options.delegate and options.command is None
            check_possible_inside(view, delegate=delegate)
            return
        options.logger.warning(
            "SAFE_GPU_SCOPE=%s names no living claim of this user here (it leaks through qsub -V, ssh, sudo and tmux): "
            "ignored",
            printable_lines(view.scope),
        )
        view.leave_scope()
        place.abandon(host)

    def _open(self, leases: Leases, place: QueuePlace) -> Collection[str] | None:
        """Return the UUIDs of the GPUs to choose from; None is all, if nobody ahead competes. Sets ``ahead``."""
        waiter = place.waiter
        ahead = None if waiter is None else waiter.nearest(leases.host)
        if waiter is None or ahead is None:
            return None
        leases.all()
        self._passed = True
        moment = QueueSnapshot(leases.host, leases.view, leases.held, leases.named, place.untaken, leases.holdings)
        try:
            while ahead is not None and moment.is_absent(ahead.ticket):
                ahead = waiter.nearest(leases.host, beyond=ahead)
            if ahead is None:
                return None
            free = leases.view.unoccupied.keys() & leases.held.keys()
            if len(free) < leases.view.request.nb_gpus:
                return ()
            demand = waiter.demand._replace(hold_for=place.hold_for())
            return moment.open_to(demand, waiter.everybody_ahead(leases.host), free)
        except BaseException:
            if ahead is not None:
                ahead.close()
                ahead = None
            raise
        finally:
            self.ahead, self.stopped = ahead, moment.stopped
            self._strange, self._lacking = moment.strange, moment.lacking


def _leases(host: LockedHost, view: HostView, claim: Claim | None, options: ClaimOptions) -> Leases:
    """Return the leases of one look; with code of its own for a claim that shares GPUs."""
    if view.share is None:
        return Leases(host, view, claim, options)
    from .shares import SharedLeases

    return SharedLeases(host, view, claim, options)
