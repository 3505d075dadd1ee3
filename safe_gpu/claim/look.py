"""A look: one hold of host.lock with what was seen, what was taken, and the listing after it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.doors import Doors
from ..coordination.entry import Entry
from ..coordination.history import append, lines_of_dead
from ..coordination.holders import Claims
from ..coordination.host_lock import Host
from ..coordination.notes import read_faults
from ..coordination.silicon import share_of
from ..errors import StateDirError
from ..gpus.devices import Gpu, GpuVerdict
from ..host.foreign_files import printable_lines
from ..host.signals import DeferredSignals
from ..selection.choice import choose, choose_shares
from ..selection.request import Selection
from ..selection.sharing import share_capacity
from .arguments import ClaimOptions
from .around import check_possible_inside, find_around
from .claim import Claim
from .queue_place import QueuePlace, QueueSnapshot
from .view import HostView

if TYPE_CHECKING:
    from .limits import ClaimsByUser, LimitReached

# Others in the queue may be passed only by a poll that is at most this old, in seconds.
_RECENT = 1.0

# Claims that are asked again under host.lock whether they live: more than honest users have. Others lived a moment ago.
_MOST_ASKED = 1000


TAKEN = "taken"
"""Enough GPUs are free, and the claim, if there is one, holds them."""

SHORT = "short"
"""Too few are free, or somebody ahead or a limit stands in the way."""

OUTDATED = "outdated"
"""The poll is too old, or lacks what another waiter's conditions need."""

WITHDRAWN = "withdrawn"
"""The claim was given back, since another one was made meanwhile."""


class Seen(NamedTuple):
    """What one look saw.

    Attributes:
        outcome: one of the four words above. What follows is known of SHORT, and ``gpus`` of TAKEN.
        gpus: those that the request can have.
        ahead: the nearest ticket that competes for the same GPUs and may not be passed.
        stopped: the nearest ticket that was passed because its waiter is stopped.
        limit: the limit of this user, if it does not allow more.
        free: UUIDs of the usable GPUs that nobody holds; empty if ``ahead`` or ``limit`` stands in the way, as are:
        elsewhere: UUIDs of the usable GPUs that only another state directory's claims hold.
        full: UUIDs of the usable pieces that nobody holds, but of whose GPUs as many claims as can hold pieces.
        watched: names of the claims in the way of usable GPUs.
    """

    outcome: str = SHORT
    gpus: tuple[Gpu, ...] = ()
    ahead: Entry | None = None
    stopped: Entry | None = None
    limit: LimitReached | None = None
    free: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    watched: frozenset[str] = frozenset()


class Look:
    """One look of a claim at who holds what and who waits. It takes the GPUs if they are free.

    Args:
        claim: an empty claim, which :meth:`run` fills; None takes nothing.
    """

    def __init__(
        self, host: Host, view: HostView, place: QueuePlace, claim: Claim | None, options: ClaimOptions
    ) -> None:
        self._host = host
        self._view = view
        self._place = place
        self._claim = claim
        self._options = options
        self._held: ClaimsByUser | None = None
        self._queue: QueueSnapshot | None = None
        self._ahead: Entry | None = None
        self._elsewhere: set[str] = set()  # GPUs whose doors other state directories hold
        self._full: set[str] = set()  # pieces of GPUs of which as many claims hold pieces as can
        self._trouble: OSError | None = None  # why doors could not be taken

    def run(self, *, may_wait: bool) -> Seen:
        """Look, and fill the claim if enough GPUs are free; else join the queue if ``may_wait``. Return what was seen.

        Raises:
            LockTimeout, StateDirError: host.lock, an entry or a directory cannot be used.
            UnsatisfiableRequestError: the claim around can never satisfy the request.
        """
        with DeferredSignals() as signals:
            self._prepare()
            with ExitStack() as undo:
                if self._claim is not None:
                    undo.callback(self._claim.release)
                seen = self._take_for_good(signals, may_wait=may_wait)
                if seen.outcome == TAKEN:
                    undo.pop_all()
            self._remove_dead()
            if seen.outcome == TAKEN and not self._place.queued:
                self._host.close()
        if seen.outcome == TAKEN and self._trouble is not None:
            self._options.logger.warning(
                "the GPUs are claimed by an entry alone, since their doors cannot be taken (%s): processes with "
                "another state directory or a private /tmp do not see the claim",
                self._trouble,
            )
        return seen

    def _take_for_good(self, signals: DeferredSignals, *, may_wait: bool) -> Seen:
        """Take the GPUs, and list once more whether the claim of them may stay."""
        try:
            with self._host.locked(self._options.lock_deadline, signals):
                seen = self._take(may_wait=may_wait)
            if seen.outcome == TAKEN and self._claim is not None:
                if not self._stays(self._claim, seen.gpus):
                    return Seen(WITHDRAWN)
                if self._claim.entry is not None:
                    self._claim.entry.stays = True
        except StateDirError:
            if self._host.is_current():
                raise
            return Seen(WITHDRAWN)  # a cleaner has removed a directory
        return seen

    def _remove_dead(self) -> None:
        now = time.time()
        dead = self._host.claims.remove_dead()
        self._host.queue.remove_dead()
        if dead:
            append(lines_of_dead(dead, now), now, self._host.directory)

    # Before host.lock

    def _prepare(self) -> None:
        """Find out what takes long, since others wait under host.lock."""
        view, place, host = self._view, self._place, self._host
        # Under the lock only claims on wanted GPUs are asked again. Limits, and the dates of others, go by all.
        host.look(at_all=self._options.quota is not None or place.waiter is not None)
        if self._options.quota is not None:
            self._options.quota.prepare(host)
        view.see_closed(place.hold_for(), host)
        if host.directory is not None:
            view.faults = read_faults(host.directory, [gpu.uuid for gpu in view.snapshot.gpus])
        view.prepare()

    # Under host.lock

    def _take(self, *, may_wait: bool) -> Seen:
        """Take the GPUs, or join the queue."""
        self._list_claims()
        if self._claim is not None:
            self._claim.inside = self._view.inside
            self._claim.doors = Doors(self._view.snapshot.name_prefix)
        if self._options.quota is not None and not self._view.around:
            self._held = self._options.quota.held(self._view.snapshot, self._view.claims)
        seen = self._take_doors_of_free()
        if seen.outcome == TAKEN:
            if self._claim is not None:
                self._make_entry(self._claim, seen.gpus)
            return seen
        if may_wait and self._place.join(self._held, self._queue):
            return Seen(OUTDATED)  # it found somebody ahead who is behind now
        return seen

    def _list_claims(self) -> None:
        view, host = self._view, self._host
        usable = {name for gpu in view.usable for name in (gpu.uuid, gpu.whole)}
        wanted = (
            one.name
            for one in host.claims.living
            if not (usable.isdisjoint(one.gpus) and usable.isdisjoint(one.pieces))
        )
        living = host.claims.look([*islice(wanted, _MOST_ASKED)])
        host.queue.refresh()
        view.see(living)
        if view.scope:
            self._enter_scope(living)

    def _make_entry(self, claim: Claim, gpus: tuple[Gpu, ...]) -> None:
        view, place = self._view, self._place
        claim.take(
            self._host,
            gpus,
            share=view.share,
            hold_for=place.hold_for(),
            queued=None if place.waiter is None else place.waiter.since,
            waited=time.monotonic() - self._options.began,
            display=view.snapshot.shared_display,
        )

    def _enter_scope(self, living: Collection[Entry]) -> None:
        """Limit the view to the GPUs of the claim around, or ignore a scope of which no claim exists any more."""
        view, options = self._view, self._options
        view.around = find_around(view.claims, view.scope, view.snapshot.name_prefix)
        if view.around is not None:
            view.see(living)
            check_possible_inside(view, view.around, delegate=options.delegate and options.command is None)
            return
        options.logger.warning(
            "SAFE_GPU_SCOPE=%s names no living claim of this user here (it leaks through qsub -V, ssh, sudo and tmux): "
            "ignored",
            printable_lines(view.scope),
        )
        view.leave_scope()
        view.see(living)
        self._place.leave()

    def _take_doors_of_free(self) -> Seen:
        """Return what is free for this claim; if that is enough, its doors are taken."""
        view = self._view
        among = self._open_to()
        limit = self._limit_of(view.effective)
        stopped = None
        if self._queue is not None:
            stopped = self._queue.stopped
            if self._queue.missing:
                view.polls.needs |= self._queue.missing
                return Seen(OUTDATED)
        if limit is None:
            chosen = self._choose(among)
            if chosen is not None:
                if self._queue is not None and (view.polls.has_waited or view.polls.age > _RECENT):
                    return Seen(OUTDATED)
                return Seen(TAKEN, chosen)
        if self._ahead is not None or limit is not None:
            return Seen(ahead=self._ahead, stopped=stopped, limit=limit)
        return self._too_few(stopped)

    def _too_few(self, stopped: Entry | None) -> Seen:
        """Return what nobody holds, and which claims hold the rest."""
        view = self._view
        usable = {gpu.uuid for gpu in view.usable}
        watched: set[str] = set()
        for uuid in usable:
            watched.update(claim.name for claim in view.claims.in_the_way(uuid, view.inside))
        free = usable - self._taken()
        if view.share is not None:
            free = {gpu.uuid for gpu in view.usable if gpu.uuid in free and view.promised_room(gpu) >= view.share}
        return Seen(
            stopped=stopped,
            free=frozenset(free - self._elsewhere - self._full),
            elsewhere=frozenset(self._elsewhere & usable),
            full=frozenset(self._full & usable),
            watched=frozenset(watched),
        )

    def _open_to(self) -> Collection[str] | None:
        """Return the UUIDs of the GPUs to choose from; None is all, if nobody ahead competes."""
        view, place = self._view, self._place
        if not self._host.queue.listed() and place.waiter is None:
            return None
        waiter = place.ensure_waiter()
        for ticket in waiter.ahead():
            if self._queue is None:
                self._queue = QueueSnapshot(view, self._held)
            if not self._queue.is_absent(ticket):
                self._ahead = ticket
                break
        if self._queue is None or self._ahead is None:
            return None
        free = view.unoccupied().keys() - self._taken()
        if len(free) < view.request.nb_gpus:
            return ()
        request = waiter.request._replace(hold_for=place.hold_for())
        return self._queue.open_to(request, waiter.everybody_ahead(), free)

    def _taken(self) -> set[str]:
        """Return the UUIDs of the GPUs of which others have all, or too much to share it."""
        view = self._view
        if view.snapshot.shared_display:
            return {gpu.uuid for gpu in view.usable if self._is_taken(gpu)}
        claims = view.claims  # whose holders are not described here: nobody reads that under host.lock
        held = {gpu.uuid for gpu in view.usable if claims.in_the_way(gpu.uuid, view.inside)}
        return held - view.shared.keys() | self._elsewhere | self._full

    def _choose(self, among: Collection[str] | None) -> tuple[Gpu, ...] | None:
        """Return the best GPUs that nobody holds or uses, with their doors; None if there are too few.

        Args:
            among: UUIDs to choose from; None is all.
        """
        view = self._view
        view.health.has_waited = self._place.waiter is not None
        last = view.last
        while True:
            free = {uuid: one for uuid, one in view.unoccupied().items() if among is None or uuid in among}
            taken = self._taken()
            chosen = self._best([one for uuid, one in free.items() if uuid not in taken], last)
            if chosen is None or view.snapshot.shared_display:
                return chosen
            missed = self._take_doors(chosen)
            if missed is None:
                view.spare = frozenset(free) - taken - {gpu.uuid for gpu in chosen}
                return chosen
            if self._is_full(missed):
                self._full.add(missed.uuid)
            else:
                self._elsewhere.add(missed.uuid)

    def _best(self, free: Collection[GpuVerdict], last: Collection[str]) -> tuple[Gpu, ...] | None:
        view = self._view
        requests = view.request.numbers
        if view.is_frozen:
            requests = iter([view.request])  # CUDA is initialised with that many
        for request in requests:
            if request is not view.request and self._limit_of(request) is not None:
                continue
            if view.share is None:
                groups = request.groups if request.together else None
                nb_gpus, preferred = request.nb_gpus, request.preferred
                chosen = choose(free, nb_gpus, near=view.near, last=last, groups=groups, prefer=preferred)
            else:
                rooms = {gpu.uuid: view.promised_room(gpu) for gpu in view.usable if gpu.uuid in view.shared}
                chosen = choose_shares(free, request, rooms, near=view.near, last=last)
            if chosen is not None:
                return chosen
        return None

    def _limit_of(self, request: Selection) -> LimitReached | None:
        """Return the limit of this user, if it does not allow what a request asks for."""
        if self._held is None or self._view.snapshot.shared_display:
            return None
        return self._held.limit_of(os.geteuid(), request)

    def _take_doors(self, chosen: tuple[Gpu, ...]) -> Gpu | None:
        """Take the doors of these GPUs, or only ask for them if there is no claim to fill. Return the first GPU that
        cannot be had by them, and nothing is taken; None if all can.

        Where doors cannot be taken at all the entry alone counts, and None is returned.
        """
        claim = self._claim
        doors = Doors(self._view.snapshot.name_prefix) if claim is None else claim.doors
        for gpu in sorted(chosen, key=lambda gpu: gpu.uuid):
            try:
                if claim is None:
                    can_be_had = self._can_be_taken(doors, gpu)
                else:
                    can_be_had = self._take_doors_of(doors, gpu, claim.token)
            except OSError as err:
                self._trouble = err
                doors.release()  # with those of some GPUs alone, claims inside this one would not find the others
                return None
            if not can_be_had:
                doors.release()
                return gpu
        return None

    def _can_be_taken(self, doors: Doors, gpu: Gpu) -> bool:
        """Return whether the doors of a GPU can be taken now."""
        view = self._view
        if view.around is not None:
            return True
        for name in gpu.names:
            if doors.are_taken(name, view.claims.parts_with_doors(gpu.uuid, door=name)):
                return False
        if not gpu.is_piece:
            return True
        return not (doors.is_held_against_pieces(gpu.whole, gpu.mode) or doors.has_no_part_for_pieces(gpu.whole))

    def _take_doors_of(self, doors: Doors, gpu: Gpu, token: str) -> bool:
        """Take the doors of a GPU by each of its names; of a piece a part of its GPU first."""
        view = self._view
        if view.around is not None and not view.around.parts:
            return True  # that claim could take no doors
        if gpu.is_piece and not doors.take_part_of_pieces(gpu.whole, gpu.mode):
            return False
        # In this order, and no further than the first that cannot be had.
        return all(self._take_door(doors, gpu, name, token) for name in gpu.names)

    def _take_door(self, doors: Doors, gpu: Gpu, name: str, token: str) -> bool:
        """Take the doors of a GPU that have one of its names."""
        view = self._view
        parts_here = view.claims.parts_with_doors(gpu.uuid, view.inside, door=name)
        if view.around is not None:
            return doors.take_inside(name, parts_here, view.scope)
        if view.share is None:
            return doors.take_whole(name, parts_here, token)
        if not doors.take_share(name, parts_here):
            return False
        # One of the processes may have ended since, and its door be another's.
        return parts_here == view.claims.parts_with_doors(gpu.uuid, door=name)

    def _is_full(self, gpu: Gpu) -> bool:
        """Return whether a GPU cannot be had because as many claims hold pieces of its GPU as can."""
        with suppress(OSError):
            return gpu.is_piece and Doors(self._view.snapshot.name_prefix).has_no_part_for_pieces(gpu.whole)
        return False

    # After host.lock

    def _stays(self, claim: Claim, gpus: tuple[Gpu, ...]) -> bool:
        """Return whether the claim of these GPUs may stay, by a second listing: of two entries the one that was named
        later sees the other, so two claims exclude each other even without host.lock."""
        view, host = self._view, self._host
        ask = [view.around.name] if view.around else ()
        living = [one for one in host.claims.look(ask) if one.file != claim.file]
        view.see_closed(self._place.hold_for(), host, locked=True)
        view.claims = Claims(living, view.snapshot.gpus)
        if view.around:
            if find_around(view.claims, view.scope, view.snapshot.name_prefix) is None:
                return False
        elif any(view.rules.why_drained(gpu) for gpu in gpus):
            return False  # it was drained or reserved meanwhile
        return host.is_current(queue=False) and not any(self._is_taken(gpu) for gpu in gpus)

    def _is_taken(self, gpu: Gpu) -> bool:
        """Return whether others have so much of a GPU that what this claim is to hold does not fit beside them."""
        view = self._view
        others = view.claims.in_the_way(gpu.uuid, view.inside)
        if view.snapshot.shared_display:
            return any(not one.display for one in others)
        if view.share is None:
            return len(others) > 0
        promised = 0
        for one in others:
            share = share_of(one, gpu)
            if share is None:
                return True
            promised += share
        return promised + view.share > (share_capacity(gpu) or 0)
