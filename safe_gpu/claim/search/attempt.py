"""One look under host.lock: who is ahead in the queue, which leases are free, and whether they are enough."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from ...coordination.leases.file_names import names_of_host
from ...coordination.locks.host_lock import HostLock, LockedHost
from ...errors import NotEnoughGpusError
from ...host.procfs import TOO_LONG, printable_lines
from ..host.inside import check_possible_inside
from .decision import AttemptResult
from .kernel_facts import KernelFacts, read_facts
from .leases_of_look import Leases, WholeGpus
from .names_of_look import GpuNames

if TYPE_CHECKING:
    from ...coordination.queue.predecessors import WaiterAhead
    from ...coordination.queue.ticket import Ticket
    from ...gpus.devices import Gpu
    from ..arguments import ClaimOptions
    from ..held import Claim
    from ..host.host_view import HostView
    from ..host.outer_claim import OuterClaim
    from ..limits import LimitReached
    from .queue_place import QueuePlace

# Others in the queue may be passed only by a poll that is at most this old, in seconds.
_RECENT = 1.0


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
        self._is_absent: Callable[[Ticket], bool] = lambda ticket: False
        self._passed = False  # those ahead, by what the poll says of them
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
        facts: list[KernelFacts] = []

        def prepare(host: LockedHost) -> None:
            place.prepare(host)
            view.see_closed(place.hold_for(), host.queue)
            view.prepare()
            joins = may_wait and not place.queued
            facts[:] = [read_facts(host, view, options, taking=claim is not None, joins=joins)]

        with HostLock(options.lock_deadline, prepare=prepare) as host:
            view.see_closed(place.hold_for(), host.queue, locked=True)
            if view.scope:
                self._enter_scope(host, view, place, options, facts[0].scope)
            view.see_beside(host)
            if place.waiter is None and not host.queue.is_empty():
                place.ensure_waiter()
            if claim is not None:
                claim.inner, claim.named = bool(view.outer), not view.snapshot.shared_display
            leases = _leases(host, view, claim, options, facts[0])
            try:
                among = self._open(leases, place)
                limit = leases.limit()
                chosen = leases.choose(among) if limit is None and not self._lacking else None
                self.result = self._result(leases, chosen, limit)
                if self.result.enough and chosen is not None:
                    if claim is not None:
                        claim.queued = None if place.waiter is None else place.waiter.since or None
                        leases.hand_over(claim, chosen, place.hold_for())
                    self.chosen = chosen
                elif may_wait and place.join(host, leases.holdings, self._is_absent):
                    self.result = AttemptResult(outdated=True)  # it found somebody ahead who is behind now
            finally:
                leases.give_back()
        if may_wait and self.result.unleased:
            from ...coordination.name_table import read_names

            named = leases.part.named(self.result.unleased, read_names())
            self.result = self.result._replace(unleased=self.result.unleased - named, named=self.result.named | named)
        if self.chosen and leases.trouble is not None:
            options.logger.warning(
                "the GPUs are claimed by their lease files alone, since their names cannot be bound (%s): processes "
                "with another state directory or a private /tmp do not see the claim",
                leases.trouble,
            )

    def _result(self, leases: Leases, chosen: tuple[Gpu, ...] | None, limit: LimitReached | None) -> AttemptResult:
        if self._lacking:
            leases.view.polls.needs |= self._lacking
            return AttemptResult(outdated=True)
        if chosen is not None:
            outdated = self._passed and (leases.view.polls.has_waited or leases.view.polls.age > _RECENT)
            return AttemptResult(enough=not outdated, outdated=outdated)
        if self.ahead is not None or limit is not None:
            return AttemptResult(behind=self.ahead is not None, limit=limit)
        unleased = leases.unleased()
        named = leases.dropped & unleased
        return AttemptResult(unleased=unleased - named, named=named, watched=frozenset(leases.part.watched()))

    def _enter_scope(
        self, host: LockedHost, view: HostView, place: QueuePlace, options: ClaimOptions, around: OuterClaim
    ) -> None:
        """Limit the view to the GPUs of the outer claim, or ignore a scope of which no claim exists any more.

        Raises:
            NotEnoughGpusError: it is not known whether it exists.
        """
        view.outer = around.held(host)
        if view.outer:
            delegate = options.delegate and options.command is None
            check_possible_inside(view, delegate=delegate)
            return
        if not around.known:
            raise NotEnoughGpusError(
                f"whether the claim around this process (SAFE_GPU_SCOPE) lives is not known: {TOO_LONG}; try again, or "
                "ask the administrator",
                nb_gpus=view.request.nb_gpus,
            )
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
        from .queue_snapshot import QueueSnapshot

        leases.all()
        self._passed = True
        queue = QueueSnapshot(leases.host, leases.view, leases.held, leases.part.named, leases.holdings)
        self._is_absent = queue.is_absent
        try:
            while ahead is not None and queue.is_absent(ahead.ticket):
                ahead = waiter.nearest(leases.host, beyond=ahead)
            if ahead is None:
                return None
            free = leases.view.unoccupied.keys() & leases.held.keys()
            if len(free) < leases.view.request.nb_gpus:
                return ()
            request = waiter.request._replace(hold_for=place.hold_for())
            return queue.open_to(request, waiter.everybody_ahead(leases.host), free)
        except BaseException:
            if ahead is not None:
                ahead.close()
                ahead = None
            raise
        finally:
            self.ahead, self.stopped = ahead, queue.stopped
            self._lacking = queue.lacking


def _leases(host: LockedHost, view: HostView, claim: Claim | None, options: ClaimOptions, facts: KernelFacts) -> Leases:
    """Return the leases of one look; with code of its own for a claim that shares GPUs."""
    host.leases.names_of_host = partial(names_of_host, [gpu.uuid for gpu in view.snapshot.gpus])
    names = GpuNames(host, view, claim, facts.names)
    if view.share is None:
        return Leases(host, view, WholeGpus(view, names), options, facts)
    from .slots_of_look import Slots

    return Leases(host, view, Slots(host, view, names), options, facts)
