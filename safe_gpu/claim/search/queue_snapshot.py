"""The waiters ahead and the GPUs, as one hold of host.lock shows them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from ...coordination.files.decoding import read_bounded
from ...coordination.leases.claim_end import LONGEST, ClaimEnd
from ...coordination.leases.file_names import slot_name
from ...coordination.leases.lease import may_be_held
from ...coordination.leases.record import read_record
from ...coordination.leases.slots import held_slots, holder_of_slots
from ...gpus.devices import MOST_SHARERS, Gpu, GpuVerdict, LeaseHolder
from ...host import procfs
from ...selection.backfill import BackfillRequest, When, open_gpus, when_free
from ...selection.choice import can_be_met_by_releases, capacity
from ...selection.request import Selection, uuid_of_stem

if TYPE_CHECKING:
    from ...coordination.files.state_dir import StateDir
    from ...coordination.locks.host_lock import LockedHost
    from ...coordination.queue.ticket import Ticket, TicketRequest
    from ..host.host_view import HostView
    from ..limits import LeasesByUser


def _last_holders(leases: StateDir, files: Iterable[str]) -> set[int]:
    """Return the pids of who holds these leases or held them last, from their records or what is left of those."""
    found = set()
    for name in files:
        last = read_record(leases, name) or ClaimEnd.decode(read_bounded(leases, name, LONGEST))
        if last is not None:
            found.add(last.pid)
    return found


def _is_leaving(last_holders: Collection[int], gpu: Gpu) -> bool:
    """Return whether one of its last holders is on the GPU and exits. One that let go and lives on is a stranger."""
    pids = {process.pid for process in gpu.processes or ()}
    return any(pid in pids and procfs.is_exiting(pid) for pid in last_holders)


def _asked(request: TicketRequest) -> tuple[Selection, bool]:
    """Return what a ticket asks for, and whether all its conditions are known here."""
    return Selection.from_ticket(request.nb_gpus, request.conditions)


def _never_met(gpus: frozenset[str]) -> BackfillRequest:
    """Return a request that nobody passes on these GPUs."""
    return BackfillRequest(len(gpus) + 1, gpus)


class QueueSnapshot:
    """The GPUs of the host under one hold of host.lock.

    Args:
        mine: UUIDs of the usable GPUs whose leases this look holds.
        named: returns those of some UUIDs that another process holds by name.
        holdings: which users hold what; None if there are no limits.

    Attributes:
        stopped: the nearest ticket that was found to be stopped.
        lacking: what the poll lacks to judge the GPUs for a ticket.
    """

    def __init__(
        self,
        host: LockedHost,
        view: HostView,
        mine: Collection[str],
        named: Callable[[Collection[str]], Collection[str]],
        holdings: LeasesByUser | None = None,
    ) -> None:
        self.stopped: Ticket | None = None
        self.lacking: frozenset[str] = frozenset()
        self._host = host
        self._view = view
        self._holdings = holdings
        self._judged: dict[tuple[object, ...], tuple[GpuVerdict, ...]] = {}
        self._leased: dict[str, LeaseHolder] = {}
        self._leaving: set[str] = set()
        self._stopped: dict[int | bytes, bool] = {}
        usable = {gpu.uuid for gpu in view.usable}
        used = set()
        for gpu in view.snapshot.gpus:
            name = view.outer.lease_name(gpu.uuid)
            if gpu.uuid in view.shared or (gpu.uuid in usable and gpu.uuid not in mine):
                self._leased[gpu.uuid] = self._holder(gpu.uuid)
                continue
            # Read first: to probe a lease replaces the record of a holder that has just gone.
            files = (name, *(slot_name(gpu.uuid, slot) for slot in range(MOST_SHARERS)))
            last = _last_holders(host.leases, files) if gpu.processes else ()
            if gpu.uuid not in usable and may_be_held(host, name):
                self._leased[gpu.uuid] = self._holder(gpu.uuid)
            elif gpu.processes:
                used.add(gpu.uuid)
                if _is_leaving(last, gpu):
                    self._leaving.add(gpu.uuid)
        if used:
            self._leased.update(dict.fromkeys(named(used), LeaseHolder(elsewhere=True)))

    def _holder(self, uuid: str) -> LeaseHolder:
        """Return who holds the lease of a GPU, by the record; of a shared one, who holds its slots."""
        name = self._view.outer.lease_name(uuid)
        record = read_record(self._host.leases, name)
        if record is None and not self._view.outer:
            return holder_of_slots(held_slots(self._host, uuid).values()) or LeaseHolder()
        return LeaseHolder() if record is None else record.as_holder()

    def is_absent(self, ticket: Ticket) -> bool:
        """Return whether a waiter counts as absent: it is stopped, its user is at a limit, or no release of leases can
        satisfy it.

        A ticket that cannot be read never does. One with a condition that is not known here may be met by any release.
        """
        if ticket.request is None:
            return False
        if ticket.is_stopped(self._stopped):
            self.stopped = self.stopped or ticket
            return True
        if self._holdings is not None and self._holdings.is_at_limit(ticket):
            return True
        wanted = set(map(uuid_of_stem, ticket.request.gpus))
        if not ticket.request.conditions and self._are_leased(wanted, ticket.request.nb_gpus):
            return False
        selection, known = _asked(ticket.request)
        return known and not can_be_met_by_releases(wanted, selection, self._verdicts(selection), self._leaving)

    def _are_leased(self, wanted: Collection[str], number: int) -> bool:
        """Return whether others hold the leases of that many of these GPUs already. Then the GPUs need not be
        judged."""
        leased = [gpu for gpu in self._view.usable if gpu.uuid in wanted and gpu.uuid in self._leased]
        return capacity(leased) >= number and not self._view.snapshot.shared_display

    def open_to(self, request: TicketRequest, ahead: Iterable[Ticket], free: Collection[str]) -> frozenset[str]:
        """Return the UUIDs of the free GPUs that a request may take past the waiters ahead; too few: it may not pass.

        Args:
            ahead: in the order of the queue. Only those are read that decide.
            free: UUIDs.
        """
        now = time.time()
        stems = {self._view.outer.stem(uuid): uuid for uuid in free}
        want = self._want(request, os.geteuid())
        left = open_gpus(want, self._wants(request, ahead), stems, self.free_at(now), now)
        return frozenset(stems[stem] for stem in left)

    def free_at(self, now: float) -> dict[str, When]:
        """Return when each GPU is expected to be free, by the stem of its lease, in Unix seconds."""
        free = {verdict.gpu.uuid for verdict in self._judge(Selection()) if verdict.free} | self._leaving
        return {
            self._view.outer.stem(gpu.uuid): when_free(gpu, self._leased.get(gpu.uuid), now, free=gpu.uuid in free)
            for gpu in self._view.snapshot.gpus
        }

    def _wants(self, request: TicketRequest, ahead: Iterable[Ticket]) -> Iterator[BackfillRequest]:
        for ticket in ahead:
            if ticket.request is None:
                yield _never_met(request.gpus)
            elif not self.is_absent(ticket):
                yield self._fitting(ticket) if _asked(ticket.request)[1] else _never_met(ticket.request.gpus)

    def _want(self, request: TicketRequest, uid: int) -> BackfillRequest:
        return BackfillRequest.of(*request[:4], self._view.snapshot.gpus, self._view.reserved_for_others(uid))

    def _fitting(self, ticket: Ticket) -> BackfillRequest:
        """Return what a waiter wants, without the GPUs that nobody holds and that do not meet its conditions."""
        assert ticket.request is not None
        want = self._want(ticket.request, ticket.uid)
        if not ticket.request.conditions:
            return want
        busy = (one.gpu.uuid for one in self._verdicts(_asked(ticket.request)[0]) if not one.free)
        coming = self._leaving.union(self._leased)
        return want.without({self._view.outer.stem(uuid) for uuid in busy if uuid not in coming})

    def _verdicts(self, selection: Selection) -> tuple[GpuVerdict, ...]:
        """Return which GPUs a request of another process could have."""
        self.lacking |= selection.needs - self._view.polls.needs
        return self._judge(selection)

    def _judge(self, selection: Selection) -> tuple[GpuVerdict, ...]:
        if selection.conditions not in self._judged:
            self._judged[selection.conditions] = self._view.judge_for(selection, self._leased)
        return self._judged[selection.conditions]
