"""One attempt at a claim: one hold of host.lock with what was seen, what was taken, and the listing after it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.doors import Doors
from ..coordination.entry import Entry
from ..coordination.faults import read_faults
from ..coordination.history import append, lines_of_dead
from ..coordination.holders import Claims
from ..coordination.host_lock import Host
from ..coordination.silicon import share_of
from ..errors import StateDirError
from ..gpus.devices import Gpu, GpuVerdict, Holder
from ..host.foreign_files import printable_lines
from ..host.signals import DeferredSignals
from ..selection.choice import choose, choose_shares
from ..selection.request import Selection
from ..selection.sharing import share_capacity
from .arguments import ClaimOptions
from .claim import Claim
from .enclosing import check_possible_inside, find_enclosing
from .queue_place import QueuePlace, QueueSnapshot
from .view import HostView

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .limits import ClaimsByUser, LimitReached

# Others in the queue may be passed only by a poll that is at most this old, in seconds.
_OLDEST_TO_PASS = 1.0

MOST_RECHECKED = 1000
"""Claims whose locks are checked again under host.lock: more than honest users have. Others lived a moment ago."""


TAKEN = "taken"
"""Enough GPUs are free, and the claim, if there is one, holds them."""

SHORT = "short"
"""Too few are free, or somebody ahead or a limit stands in the way."""

OUTDATED = "outdated"
"""The poll is too old, or lacks what another waiter's conditions need."""

WITHDRAWN = "withdrawn"
"""The claim was given back, since another one was made meanwhile."""


class Seen(NamedTuple):
    """What one attempt saw.

    Attributes:
        outcome: one of the four words above. What follows is known of SHORT, and ``gpus`` and ``spare`` of TAKEN.
        gpus: those that the request can have.
        spare: UUIDs of the GPUs that it could have had besides.
        ahead: the nearest ticket that competes for the same GPUs and may not be passed.
        stopped: the nearest ticket that was passed because its waiter is stopped.
        limit: the limit of this user, if it does not allow more.
        free: UUIDs of the usable GPUs that nobody holds. This and what follows are empty if ``ahead`` or ``limit``
            stands in the way.
        elsewhere: UUIDs of the usable GPUs that only another state directory's claims hold.
        full: UUIDs of the usable pieces that nobody holds, but of whose GPUs as many claims as can hold pieces.
        watched: names of the claims in the way of usable GPUs.
    """

    outcome: str = SHORT
    gpus: tuple[Gpu, ...] = ()
    spare: frozenset[str] = frozenset()
    ahead: Entry | None = None
    stopped: Entry | None = None
    limit: LimitReached | None = None
    free: frozenset[str] = frozenset()
    elsewhere: frozenset[str] = frozenset()
    full: frozenset[str] = frozenset()
    watched: frozenset[str] = frozenset()


class Attempt:
    """One attempt to get the GPUs of a request. It takes them if they are free.

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
        self._by_user: ClaimsByUser | None = None
        self._queue: QueueSnapshot | None = None
        self._ahead: Entry | None = None
        self._unoccupied: Mapping[str, GpuVerdict] = {}  # see HostView.unoccupied
        self._judged_beside: Mapping[str, Holder] | None = None  # whose claims shared GPUs then; None before
        self._elsewhere: set[str] = set()  # GPUs whose doors other state directories hold
        self._full: set[str] = set()  # pieces of GPUs of which as many claims hold pieces as can
        self._door_error: OSError | None = None  # why doors could not be taken
        self._parts_here: dict[str, set[int]] = {}  # name of a GPU -> parts that counted as those of claims here

    def run(self, *, may_wait: bool) -> Seen:
        """Fill the claim if enough GPUs are free; else join the queue if ``may_wait``. Return what was seen.

        Raises:
            LockTimeout, StateDirError: host.lock, an entry or a directory cannot be used.
            UnsatisfiableRequestError: the enclosing claim can never satisfy the request.
        """
        with DeferredSignals() as signals:
            self._prepare()
            with ExitStack() as undo:
                if self._claim is not None:
                    undo.callback(self._claim.release)  # the next attempt gets it empty again
                seen = self._take_for_good(signals, may_wait=may_wait)
                if seen.outcome == TAKEN:
                    undo.pop_all()
            self._remove_dead()
            if seen.outcome == TAKEN and not self._place.queued:
                self._host.close()
        if seen.outcome == TAKEN and self._door_error is not None:
            self._options.logger.warning(
                "this claim is visible only in this state directory, since no abstract socket can be bound (%s): "
                "processes with another one, or with a private /tmp, do not see it",
                self._door_error,
            )
        return seen

    def _take_for_good(self, signals: DeferredSignals, *, may_wait: bool) -> Seen:
        """Take the GPUs, and list once more whether the claim of them may stay."""
        try:
            with self._host.locked(self._options.lock_deadline, signals):
                seen = self._take(may_wait=may_wait)
            if seen.outcome == TAKEN and self._claim is not None:
                if not self._may_stay(self._claim, seen.gpus):
                    return Seen(WITHDRAWN)
                if self._claim.entry is not None:
                    self._claim.entry.is_final = True
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
        view = self._view
        host = self._host
        quota = self._options.quota
        # Under the lock only claims on wanted GPUs are checked again. Limits, and the dates of others, go by all.
        host.prepare(recheck_all=quota is not None or self._place.waiter is not None)
        if quota is not None:
            quota.prepare(host)
        view.closed.prepare(host, self._place.hold_for())
        if host.directory is not None:
            view.health.faults = read_faults(host.directory, [gpu.uuid for gpu in view.snapshot.gpus])
        if not view.scope:  # the enclosing claim is known only under the lock
            self._judge()

    def _judge(self) -> None:
        self._judged_beside = self._view.others.shared
        self._unoccupied = self._view.unoccupied()

    # Under host.lock

    def _take(self, *, may_wait: bool) -> Seen:
        """Take the GPUs, or join the queue."""
        view = self._view
        self._list_claims()
        if self._claim is not None:
            self._claim.inside = view.others.inside
            self._claim.doors = Doors(view.snapshot.name_prefix)
        if self._options.quota is not None and view.enclosing is None:
            self._by_user = self._options.quota.held(view.snapshot, view.others.claims)
        seen = self._take_doors_of_free()
        if seen.outcome == TAKEN:
            if self._claim is not None:
                self._make_entry(self._claim, seen.gpus)
            return seen
        if may_wait and self._place.join(self._by_user, self._queue):
            return Seen(OUTDATED)  # it found somebody ahead who is behind now
        return seen

    def _list_claims(self) -> None:
        """Take over who holds what, and who waits."""
        view = self._view
        host = self._host
        claims = Claims(host.claims.look(self._names_to_recheck()), view.snapshot.gpus)
        host.queue.refresh()
        enclosing = None
        if view.scope:
            enclosing = self._find_enclosing(claims)
        view.update_others(claims, enclosing)
        if enclosing is not None:
            delegate = self._options.delegate and self._options.command is None
            check_possible_inside(view, enclosing, delegate=delegate)
        if view.others.shared != self._judged_beside:
            self._judge()

    def _names_to_recheck(self) -> list[str]:
        """Return the names of the claims that say that they are on usable GPUs, of very many only some."""
        usable: set[str] = set()
        for gpu in self._view.usable:
            usable.update((gpu.uuid, gpu.whole))
        names = (
            claim.name
            for claim in self._host.claims.living
            if not (usable.isdisjoint(claim.gpus) and usable.isdisjoint(claim.pieces))
        )
        return list(islice(names, MOST_RECHECKED))

    def _find_enclosing(self, claims: Claims) -> Entry | None:
        """Return the enclosing claim. A scope of which no claim exists any more is ignored from now on."""
        view = self._view
        enclosing = find_enclosing(claims, view.scope, view.snapshot.name_prefix)
        if enclosing is None:
            self._options.logger.warning(
                "SAFE_GPU_SCOPE=%s names no living claim of this user here (it leaks through qsub -V, ssh, sudo and "
                "tmux): ignored",
                printable_lines(view.scope),
            )
            view.scope = ""
            self._place.leave()
        return enclosing

    def _make_entry(self, claim: Claim, gpus: tuple[Gpu, ...]) -> None:
        queued = None
        if self._place.waiter is not None:
            queued = self._place.waiter.since
        claim.make_entry(
            self._host,
            gpus,
            share=self._view.share,
            hold_for=self._place.hold_for(),
            queued=queued,
            waited=time.monotonic() - self._options.began,
            display=self._view.snapshot.shared_display,
        )

    def _take_doors_of_free(self) -> Seen:
        """Return what is free for this claim; if that is enough, its doors are taken."""
        view = self._view
        open_to_us = self._gpus_open_to_us()
        limit = self._limit_of(view.effective)
        stopped = None
        if self._queue is not None:
            stopped = self._queue.stopped
            if self._queue.missing:
                view.polls.needs |= self._queue.missing
                return Seen(OUTDATED)
        if limit is None:
            seen = self._choose_and_take_doors(open_to_us)
            if seen is not None:
                if self._queue is not None and (view.polls.waited_since or view.polls.age > _OLDEST_TO_PASS):
                    return Seen(OUTDATED)
                return seen
        if self._ahead is not None or limit is not None:
            return Seen(ahead=self._ahead, stopped=stopped, limit=limit)
        return self._too_few(stopped)

    def _too_few(self, stopped: Entry | None) -> Seen:
        """Return what nobody holds, and which claims hold the rest."""
        view = self._view
        usable = {gpu.uuid for gpu in view.usable}
        taken = self._taken() | self._elsewhere | self._full
        free = set()
        watched: set[str] = set()
        for gpu in view.usable:
            watched.update(claim.name for claim in view.others.in_the_way(gpu))
            if gpu.uuid not in taken and (view.share is None or view.others.room_of(gpu) >= view.share):
                free.add(gpu.uuid)
        return Seen(
            stopped=stopped,
            free=frozenset(free),
            elsewhere=frozenset(self._elsewhere & usable),
            full=frozenset(self._full & usable),
            watched=frozenset(watched),
        )

    def _gpus_open_to_us(self) -> Collection[str] | None:
        """Return the UUIDs of the GPUs to choose from; None is all, if nobody ahead competes."""
        if not self._host.queue.listed() and self._place.waiter is None:
            return None
        waiter = self._place.ensure_waiter()
        for ticket in waiter.ahead():
            if self._queue is None:
                self._queue = QueueSnapshot(self._view, self._by_user)
            if not self._queue.is_absent(ticket):
                self._ahead = ticket
                break
        if self._queue is None or self._ahead is None:
            return None
        free = self._unoccupied.keys() - self._taken()
        if len(free) < self._view.request.nb_gpus:
            return ()
        request = waiter.request._replace(hold_for=self._place.hold_for())
        return self._queue.gpus_open_to(request, waiter.everybody_ahead(), free)

    def _taken(self) -> set[str]:
        """Return the UUIDs of the GPUs of which others have all, or too much to share it."""
        view = self._view
        if view.snapshot.shared_display:
            return {gpu.uuid for gpu in view.usable if self._is_taken(gpu)}
        taken = self._elsewhere | self._full
        for gpu in view.usable:
            if gpu.uuid not in view.others.shared and view.others.in_the_way(gpu):
                taken.add(gpu.uuid)
        return taken

    def _choose_and_take_doors(self, open_to_us: Collection[str] | None) -> Seen | None:
        """Return the best GPUs that nobody holds or uses, with their doors; None if there are too few.

        Args:
            open_to_us: UUIDs to choose from; None is all.
        """
        view = self._view
        view.health.has_waited = self._place.waiter is not None
        last = view.health.last_choices(view.usable)
        while True:
            taken = self._taken()
            free = {}
            for uuid, verdict in self._unoccupied.items():
                if uuid not in taken and (open_to_us is None or uuid in open_to_us):
                    free[uuid] = verdict
            chosen = self._choose(free.values(), last)
            if chosen is None:
                return None
            if view.snapshot.shared_display:
                return Seen(TAKEN, chosen)
            missed = self._take_doors(chosen)
            if missed is None:
                spare = free.keys() - {gpu.uuid for gpu in chosen}
                return Seen(TAKEN, chosen, spare=frozenset(spare))
            if self._is_full(missed):
                self._full.add(missed.uuid)
            else:
                self._elsewhere.add(missed.uuid)

    def _choose(self, free: Collection[GpuVerdict], last: Collection[str]) -> tuple[Gpu, ...] | None:
        """Return the best of these GPUs, as many as the request and the limit allow; None if there are too few.

        Args:
            last: UUIDs of the GPUs that are taken only if the others are too few.
        """
        view = self._view
        if view.is_frozen:  # CUDA is initialised with that many
            return self._choose_for(view.request, free, last)
        for request in view.request.numbers:
            if request is not view.request and self._limit_of(request) is not None:
                continue
            chosen = self._choose_for(request, free, last)
            if chosen is not None:
                return chosen
        return None

    def _choose_for(
        self, request: Selection, free: Collection[GpuVerdict], last: Collection[str]
    ) -> tuple[Gpu, ...] | None:
        view = self._view
        if view.share is not None:
            rooms = {gpu.uuid: view.others.room_of(gpu) for gpu in view.usable if gpu.uuid in view.others.shared}
            return choose_shares(free, request, rooms, near_nodes=view.near_nodes, last=last)
        groups = None
        if request.together:
            groups = request.groups
        return choose(
            free, request.nb_gpus, near_nodes=view.near_nodes, last=last, groups=groups, prefer=request.preferred
        )

    def _limit_of(self, request: Selection) -> LimitReached | None:
        """Return the limit of this user, if it does not allow what a request asks for."""
        if self._by_user is None or self._view.snapshot.shared_display:
            return None
        return self._by_user.limit_of(os.geteuid(), request)

    # The doors

    def _take_doors(self, chosen: tuple[Gpu, ...]) -> Gpu | None:
        """Take the doors of these GPUs, or only ask for them if there is no claim to fill. Return the first GPU that
        cannot be had by them, and nothing is taken; None if all can.

        Where doors cannot be taken at all the entry alone counts, and None is returned.
        """
        claim = self._claim
        if claim is None:
            doors = Doors(self._view.snapshot.name_prefix)
        else:
            doors = claim.doors
        for gpu in sorted(chosen, key=lambda gpu: gpu.uuid):
            try:
                if claim is None:
                    can_be_had = self._can_be_taken(doors, gpu)
                else:
                    can_be_had = self._take_doors_of(doors, gpu, claim.token)
            except OSError as err:
                self._door_error = err
                doors.release()  # with those of some GPUs alone, claims inside this one would not find the others
                self._parts_here = {}
                return None
            if not can_be_had:
                doors.release()
                return gpu
        return None

    def _can_be_taken(self, doors: Doors, gpu: Gpu) -> bool:
        """Return whether the doors of a GPU can be taken now."""
        view = self._view
        if view.enclosing is not None:
            return True
        for name in gpu.names:
            if doors.are_taken(name, view.others.claims.parts_with_doors(gpu.uuid, door=name)):
                return False
        if not gpu.is_piece:
            return True
        return not (doors.is_held_against_pieces(gpu.whole, gpu.mode) or doors.has_no_part_for_pieces(gpu.whole))

    def _take_doors_of(self, doors: Doors, gpu: Gpu, token: str) -> bool:
        """Take the doors of a GPU by each of its names; of a piece a part of its GPU first."""
        view = self._view
        if view.enclosing is not None and not view.enclosing.parts:
            return True  # that claim could take no doors
        if gpu.is_piece and not doors.take_part_of_pieces(gpu.whole, gpu.mode):
            return False
        # In this order, and no further than the first that cannot be had.
        return all(self._take_door(doors, gpu, name, token) for name in gpu.names)

    def _take_door(self, doors: Doors, gpu: Gpu, name: str, token: str) -> bool:
        """Take the doors of a GPU that have one of its names."""
        view = self._view
        parts_here = view.others.claims.parts_with_doors(gpu.uuid, view.others.inside, door=name)
        if view.enclosing is not None:
            return doors.take_inside(name, parts_here, view.scope)
        if view.share is None:
            return doors.take_whole(name, parts_here, token)
        if not doors.take_share(name, parts_here):
            return False
        self._parts_here[name] = parts_here
        # One of the processes may have ended since, and its door be another's.
        return parts_here == view.others.claims.parts_with_doors(gpu.uuid, door=name)

    def _is_full(self, gpu: Gpu) -> bool:
        """Return whether a GPU cannot be had because as many claims hold pieces of its GPU as can."""
        with suppress(OSError):
            return gpu.is_piece and Doors(self._view.snapshot.name_prefix).has_no_part_for_pieces(gpu.whole)
        return False

    # After host.lock

    def _may_stay(self, claim: Claim, gpus: Iterable[Gpu]) -> bool:
        """Return whether the claim of these GPUs may stay, by a second listing: of two entries the one that was named
        later sees the other, so two claims exclude each other even without host.lock."""
        view = self._view
        host = self._host
        enclosing = view.enclosing
        recheck = []
        if enclosing is not None:
            recheck.append(enclosing.name)
        living = [one for one in host.claims.look(recheck) if one.file != claim.file]
        view.closed.read(host, self._place.hold_for())
        view.update_others(Claims(living, view.snapshot.gpus), enclosing)
        if enclosing is not None:
            if find_enclosing(view.others.claims, view.scope, view.snapshot.name_prefix) is None:
                return False
        elif any(view.closed.rules.why_closed(gpu) for gpu in gpus):
            return False  # it was drained or reserved meanwhile
        if not host.is_current(queue=False):
            return False
        if any(self._is_taken(gpu) for gpu in gpus):
            return False
        return not any(self._has_lost_a_sharer(claim.doors, gpu) for gpu in gpus)

    def _has_lost_a_sharer(self, doors: Doors, gpu: Gpu) -> bool:
        """Return whether a part of this GPU that counted as that of a claim here is held, and is of none here any more.
        A claim of another state directory may have taken it."""
        for name in gpu.names:
            parts_here = self._view.others.claims.parts_with_doors(gpu.uuid, door=name)
            lost = self._parts_here.get(name, set()) - parts_here
            if lost and doors.is_any_part_taken(name, lost):
                return True
        return False

    def _is_taken(self, gpu: Gpu) -> bool:
        """Return whether others have so much of a GPU that what this claim is to hold does not fit beside them."""
        view = self._view
        others = view.others.in_the_way(gpu)
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
