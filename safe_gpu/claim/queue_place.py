"""The queue as one claim sees it: its own place, and the waiters ahead under one hold of host.lock.

Which waiter may pass which is decided in :mod:`safe_gpu.selection.backfill`. This module gathers what that needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.doors import Doors
from ..coordination.entry import Entry, facts_of_this_process
from ..coordination.holders import are_taken_elsewhere
from ..coordination.host_lock import Host
from ..coordination.queue import TicketRequest, Waiter, is_stopped
from ..coordination.turns import turn_of_newcomer
from ..gpus.devices import Gpu, GpuVerdict, Holder, HostSnapshot
from ..host import procfs
from ..selection.backfill import BackfillRequest, When, open_gpus, when_free
from ..selection.choice import can_be_met_by_releases, capacity
from ..selection.request import Selection
from .arguments import ClaimOptions
from .view import HostView

if TYPE_CHECKING:
    from .limits import ClaimsByUser


class QueuePlace:
    """The place of one claim. ``waiter`` is None until another process is found waiting or this claim waits."""

    def __init__(self, host: Host, view: HostView, options: ClaimOptions) -> None:
        self.waiter: Waiter | None = None
        self._asked_by: HostSnapshot | None = None  # the poll by which its ticket says which GPUs could do
        self._host = host
        self._view = view
        self._options = options

    def ensure_waiter(self) -> Waiter:
        """Return the waiter of this claim, created on the first call. It holds a ticket only after ``join``."""
        if self.waiter is None:
            view = self._view
            request = TicketRequest(
                nb_gpus=view.request.nb_gpus,
                gpus=frozenset(),
                conditions=view.effective.ticket,
                hold_for=self.hold_for(),
                inside=view.others.inside,
            )
            quota = self._options.quota
            by_turns = quota is not None and quota.rules.by_turns and view.enclosing is None
            self.waiter = Waiter(self._host, request.for_gpus(view.wanted), by_turns=by_turns)
        return self.waiter

    def join(self, by_user: ClaimsByUser | None, queue: QueueSnapshot | None) -> bool:
        """Take a ticket, if this claim has none, or has one that names other GPUs than could do now. host.lock is held.

        Args:
            by_user: which users hold what; not None where they are served by turns.
            queue: the waiters; None if nobody ahead was looked at.

        Returns:
            Whether it stands ahead of somebody by that.
        """
        waiter = self.ensure_waiter()
        if waiter.queued and not waiter.was_removed():
            if self._names_what_could_do(waiter):
                return False
            waiter.stand_aside()
        waiter.request = waiter.request.for_gpus(self._view.wanted)
        self._asked_by = self._view.snapshot
        facts = facts_of_this_process(self._options.job.job_label, self._options.command)
        if not waiter.by_turns or by_user is None:
            return waiter.join(facts)
        number = waiter.next_number

        def turn(others: list[tuple[float, Entry]]) -> float:
            return self._turn_of_newcomer(waiter.request, others, number, by_user, queue)

        return waiter.join(facts, turn)

    def _names_what_could_do(self, waiter: Waiter) -> bool:
        """Return whether a ticket names what could do by the latest poll. GPUs and pieces of them may have come or gone
        since it was made."""
        if self._asked_by is not self._view.snapshot:
            if waiter.request != waiter.request.for_gpus(self._view.wanted):
                return False
            self._asked_by = self._view.snapshot
        return True

    def _turn_of_newcomer(
        self,
        request: TicketRequest,
        others: list[tuple[float, Entry]],
        number: int,
        by_user: ClaimsByUser,
        queue: QueueSnapshot | None,
    ) -> float:
        weight = 1.0
        if self._options.quota is not None:
            weight = self._options.quota.limits.weight or 1.0

        def counts(ticket: Entry) -> bool:
            if self._host.queue.recheck(ticket.name) is None:
                return False
            return queue is None or not queue.is_absent(ticket)

        return turn_of_newcomer(
            request.silicon,
            others,
            number,
            uid=os.geteuid(),
            held=sum(by_user.held_by(os.geteuid()).values()),
            size=by_user.size,
            weight=weight,
            counts=counts,
        )

    def hold_for(self) -> float | None:
        """Return for how long this claim will probably hold its GPUs from now on, in seconds; None is unknown."""
        hold = self._options.hold
        quota = self._options.quota
        enclosing = self._view.enclosing
        if enclosing is not None:
            return hold.at(time.time(), enclosing.until)
        seconds = hold.at(time.time())
        if quota is None:
            return seconds
        return quota.hold_within(seconds, stated=hold.stated)

    @property
    def queued(self) -> bool:
        """Whether this claim holds a ticket."""
        return self.waiter is not None and self.waiter.queued

    @property
    def stands_aside(self) -> bool:
        """Whether this claim has given its ticket back, and its place is kept."""
        return self.waiter is not None and self.waiter.stands_aside

    @property
    def position(self) -> int:
        """Position among the waiters that compete for the same GPUs; 1 is the head."""
        if self.waiter is None:
            return 1
        return self.waiter.position()

    def among_first(self, number: int) -> bool:
        """Return whether this claim is certainly one of the first ``number`` waiters."""
        return self.waiter is None or self.waiter.among_first(number)

    def stand_aside(self) -> None:
        """Remove the ticket after a claim was made, so that those behind try while the driver is asked again."""
        if self.waiter is not None:
            self.waiter.stand_aside()

    def leave(self) -> None:
        """Remove the ticket. Safe to call twice. The next one may compete for other GPUs."""
        waiter = self.waiter
        self.waiter = None
        if waiter is not None:
            waiter.leave()


class QueueSnapshot:
    """The waiters and the GPUs of the host under one hold of host.lock.

    Args:
        by_user: which users hold what; None if there are no limits.

    Attributes:
        stopped: the nearest ticket that was found to be stopped.
        missing: what the poll lacks to judge the GPUs for a ticket.
    """

    def __init__(self, view: HostView, by_user: ClaimsByUser | None) -> None:
        self.stopped: Entry | None = None
        self.missing: frozenset[str] = frozenset()
        self._view = view
        self._by_user = by_user
        self._usable = view.usable
        self._judged: dict[tuple[object, ...], tuple[GpuVerdict, ...]] = {}
        self._stopped: dict[int | bytes, bool] = {}
        self._absent: dict[str, bool] = {}
        self._held = view.others.holders()
        used = [gpu for gpu in view.snapshot.gpus if gpu.processes and gpu.uuid not in self._held]
        # GPUs that may be free in a moment.
        self._exiting = {gpu.uuid for gpu in used if _has_exiting_process(gpu)}
        if view.enclosing is None:
            self._add_held_elsewhere(used)

    def _add_held_elsewhere(self, gpus: Iterable[Gpu]) -> None:
        view = self._view
        with suppress(OSError):  # no sockets here
            doors = Doors(view.snapshot.name_prefix)
            for gpu in gpus:
                if are_taken_elsewhere(doors, gpu, view.others.claims):
                    self._held[gpu.uuid] = Holder(elsewhere=True)

    def is_absent(self, ticket: Entry) -> bool:
        """Return whether a waiter counts as absent: it is stopped, its user is at a limit, or no release of claims can
        satisfy it.

        One with a condition that is not known here may be met by any release.
        """
        if ticket.name not in self._absent:
            self._absent[ticket.name] = self._find_absent(ticket)
        return self._absent[ticket.name]

    def _find_absent(self, ticket: Entry) -> bool:
        if is_stopped(ticket, self._stopped):
            self.stopped = self.stopped or ticket
            return True
        if self._by_user is not None and self._by_user.is_at_limit(ticket):
            return True
        request = TicketRequest.of(ticket)
        if not request.conditions and not self._view.snapshot.shared_display:
            held = [gpu for gpu in self._usable if gpu.uuid in request.gpus and gpu.uuid in self._held]
            if capacity(held) >= request.nb_gpus:
                return False  # its release can satisfy it, so nothing is to be judged
        asked = _TicketSelection.of(request)
        if not asked.is_known:
            return False
        verdicts = self._judge(asked.selection)
        return not can_be_met_by_releases(request.gpus, asked.selection, verdicts, self._exiting)

    def gpus_open_to(self, request: TicketRequest, ahead: Iterable[Entry], free: Set[str]) -> frozenset[str]:
        """Return the UUIDs of the free GPUs that a request may take past the waiters ahead; too few: it may not pass.

        Args:
            ahead: in the order of the queue. Only those are read that decide.
            free: UUIDs.
        """
        now = time.time()
        want = self._view.backfill_request(request, os.geteuid())
        idle = {verdict.gpu.uuid for verdict in self._judge(Selection()) if verdict.free} | self._exiting
        free_at: dict[str, When] = {}
        for gpu in self._view.snapshot.gpus:
            free_at[gpu.uuid] = when_free(gpu, self._held.get(gpu.uuid), now, free=gpu.uuid in idle)
        return open_gpus(want, self._wants(ahead), free, free_at, now)

    def _wants(self, ahead: Iterable[Entry]) -> Iterator[BackfillRequest]:
        """Yield what the waiters want, without the GPUs that nobody holds and that do not meet their conditions."""
        for ticket in ahead:
            if self.is_absent(ticket):
                continue
            request = TicketRequest.of(ticket)
            asked = _TicketSelection.of(request)
            want = self._view.backfill_request(request, ticket.uid)
            if not asked.is_known:
                want = want.never()  # so nobody passes it on these GPUs
            elif request.conditions:
                busy = {verdict.gpu.uuid for verdict in self._judge(asked.selection) if not verdict.free}
                want = want.without(busy - self._exiting - self._held.keys())
            yield want

    def _judge(self, selection: Selection) -> tuple[GpuVerdict, ...]:
        """Return which GPUs a request of another process could have."""
        self.missing |= selection.needs - self._view.polls.needs
        if selection.conditions not in self._judged:
            self._judged[selection.conditions] = self._view.judge_for(selection, self._held)
        return self._judged[selection.conditions]


def _has_exiting_process(gpu: Gpu) -> bool:
    """Return whether a process of a GPU is exiting. One that gave its claim back and lives on does not count: it
    is like one that never had a claim."""
    return any(procfs.is_exiting(process.pid) for process in gpu.processes or ())


class _TicketSelection(NamedTuple):
    """What a ticket asks for.

    Attributes:
        selection: as far as it is known here.
        is_known: whether all that it says is known here.
    """

    selection: Selection
    is_known: bool

    @classmethod
    def of(cls, request: TicketRequest) -> _TicketSelection:
        """Return what a ticket asks for."""
        selection, is_known = Selection.from_ticket(request.nb_gpus, request.conditions)
        return cls(selection, is_known and request.known)
