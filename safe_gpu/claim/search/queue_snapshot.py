"""The waiters ahead and the GPUs, as one hold of host.lock shows them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ...coordination.doors import Doors
from ...coordination.queue import TicketRequest, is_stopped
from ...gpus.devices import Gpu, GpuVerdict, Holder
from ...host import procfs
from ...selection.backfill import BackfillRequest, When, open_gpus, when_free
from ...selection.choice import can_be_met_by_releases, capacity
from ...selection.request import Selection

if TYPE_CHECKING:
    from ...coordination.entry import Entry
    from ..limits import ClaimsByUser
    from ..view import HostView


def _is_leaving(gpu: Gpu) -> bool:
    """Return whether a process on the GPU exits. One that let go of its claim and lives on is a stranger."""
    return any(procfs.is_exiting(process.pid) for process in gpu.processes or ())


def _asked(request: TicketRequest) -> tuple[Selection, bool]:
    """Return what a ticket asks for, and whether all that it says is known here."""
    selection, known = Selection.from_ticket(request.nb_gpus, request.conditions)
    return selection, known and request.known


def _never_met(gpus: frozenset[str]) -> BackfillRequest:
    """Return a request that nobody passes on these GPUs."""
    return BackfillRequest(len(gpus) + 1, gpus)


class QueueSnapshot:
    """The GPUs of the host under one hold of host.lock.

    Args:
        held: which users hold what; None if there are no limits.

    Attributes:
        stopped: the nearest ticket that was found to be stopped.
        missing: what the poll lacks to judge the GPUs for a ticket.
    """

    def __init__(self, view: HostView, held: ClaimsByUser | None = None) -> None:
        self.stopped: Entry | None = None
        self.missing: frozenset[str] = frozenset()
        self._view = view
        self._by_user = held
        self._judged: dict[tuple[object, ...], tuple[GpuVerdict, ...]] = {}
        self._stopped: dict[int | bytes, bool] = {}
        self._absent: dict[str, bool] = {}
        self._held = dict(view.held)
        used = [gpu for gpu in view.snapshot.gpus if gpu.processes and gpu.uuid not in self._held]
        self._leaving = {gpu.uuid for gpu in used if _is_leaving(gpu)}
        with suppress(OSError):  # no sockets here
            doors = Doors(view.snapshot.name_prefix)
            for gpu in used:
                if not view.around and doors.are_taken(gpu.uuid, view.claims.parts(gpu.uuid)):
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
        if not request.conditions and self._are_held(request.gpus, request.nb_gpus):
            return False
        selection, known = _asked(request)
        return known and not can_be_met_by_releases(request.gpus, selection, self._verdicts(selection), self._leaving)

    def _are_held(self, wanted: Collection[str], number: int) -> bool:
        """Return whether others hold that many of these GPUs already. Then the GPUs need not be judged."""
        held = [gpu for gpu in self._view.usable if gpu.uuid in wanted and gpu.uuid in self._held]
        return capacity(held) >= number and not self._view.snapshot.shared_display

    def open_to(self, request: TicketRequest, ahead: Iterable[Entry], free: Collection[str]) -> frozenset[str]:
        """Return the UUIDs of the free GPUs that a request may take past the waiters ahead; too few: it may not pass.

        Args:
            ahead: in the order of the queue. Only those are read that decide.
            free: UUIDs.
        """
        now = time.time()
        want = self._want(request, os.geteuid())
        return open_gpus(want, self._wants(ahead), free, self.free_at(now), now)

    def free_at(self, now: float) -> dict[str, When]:
        """Return UUID -> when each GPU is expected to be free, in Unix seconds."""
        free = {verdict.gpu.uuid for verdict in self._judge(Selection()) if verdict.free} | self._leaving
        return {
            gpu.uuid: when_free(gpu, self._held.get(gpu.uuid), now, free=gpu.uuid in free)
            for gpu in self._view.snapshot.gpus
        }

    def _wants(self, ahead: Iterable[Entry]) -> Iterator[BackfillRequest]:
        for ticket in ahead:
            if not self.is_absent(ticket):
                request = TicketRequest.of(ticket)
                known = _asked(request)[1]
                yield self._fitting(request, ticket.uid) if known else _never_met(request.gpus)

    def _want(self, request: TicketRequest, uid: int) -> BackfillRequest:
        return BackfillRequest.of(request, self._view.snapshot.gpus, self._view.reserved_for_others(uid))

    def _fitting(self, request: TicketRequest, uid: int) -> BackfillRequest:
        """Return what a waiter wants, without the GPUs that nobody holds and that do not meet its conditions."""
        want = self._want(request, uid)
        if not request.conditions:
            return want
        busy = (one.gpu.uuid for one in self._verdicts(_asked(request)[0]) if not one.free)
        coming = self._leaving.union(self._held)
        return want.without({uuid for uuid in busy if uuid not in coming})

    def _verdicts(self, selection: Selection) -> tuple[GpuVerdict, ...]:
        """Return which GPUs a request of another process could have."""
        self.missing |= selection.needs - self._view.polls.needs
        return self._judge(selection)

    def _judge(self, selection: Selection) -> tuple[GpuVerdict, ...]:
        if selection.conditions not in self._judged:
            self._judged[selection.conditions] = self._view.judge_for(selection, self._held)
        return self._judged[selection.conditions]
