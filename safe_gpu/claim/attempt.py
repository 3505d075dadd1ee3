"""One look under host.lock: who is ahead in the queue, which leases are free, and whether they are enough."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..coordination import socket_names as names
from ..coordination.leases import fault_name, inner_name, is_empty, leases_of, probe, try_lease
from ..coordination.locks import HostLock
from ..errors import StateDirError
from ..procfs import printable_lines
from ..selection.choice import choose
from .queue_place import QueueSnapshot
from .view import check_possible_inside, outer_claim

if TYPE_CHECKING:
    from ..coordination.files import StateDir
    from ..coordination.leases import Lease
    from ..coordination.locks import LockedHost
    from ..coordination.queue import Ticket, WaiterAhead
    from ..coordination.socket_names import SocketName
    from ..devices import Gpu, GpuFault
    from .claim import Claim
    from .options import ClaimOptions
    from .queue_place import QueuePlace
    from .quota import LeasesByUser, LimitReached
    from .view import HostView


# A waiter blocked by a process without a lease may be passed only if the poll is at most this old, in seconds.
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
    """

    enough: bool = False
    outdated: bool = False
    behind: bool = False
    unleased: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    spent: LimitReached | None = None
    strange: bool = False


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
        self._passed = False  # on the ground of the poll
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
        place.prepare()
        with HostLock(options.lock_deadline) as host:
            if view.scope:
                self._enter_scope(host, view, place, options)
            if place.waiter is None and not host.queue.is_empty():
                place.ensure_waiter()
            if claim is not None:
                claim.inner = bool(view.outer)
            leases = _Leases(host, view, claim, options)
            try:
                among = self._open(leases, place)
                spent = leases.spent()
                chosen = leases.choose(among) if spent is None and not self._lacking else None
                self.result = self._result(leases, chosen, spent)
                if self.result.enough and chosen is not None:
                    if claim is not None:
                        claim.take(host, chosen, leases.held, leases.names, place.hold_for())
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

    def _result(self, leases: _Leases, chosen: tuple[Gpu, ...] | None, spent: LimitReached | None) -> AttemptResult:
        if self._lacking:
            leases.view.needs |= self._lacking
            return AttemptResult(outdated=True)
        if chosen is not None:
            outdated = self._passed and leases.view.age > _RECENT
            return AttemptResult(enough=not outdated, outdated=outdated)
        if self.ahead is not None or spent is not None:
            return AttemptResult(behind=self.ahead is not None, spent=spent, strange=self._strange)
        unleased = frozenset(leases.all())
        named = leases.named(unleased) | (leases.dropped & unleased)
        return AttemptResult(unleased=unleased - named, named=named)

    def _enter_scope(self, host: LockedHost, view: HostView, place: QueuePlace, options: ClaimOptions) -> None:
        """Limit the view to the GPUs of the outer claim, or ignore a scope of which no claim exists any more."""
        view.outer = outer_claim(host, view.snapshot, view.scope)
        if view.outer:
            delegate = options.delegate and options.command is None
            check_possible_inside(view.outer, view.usable, view.request, delegate=delegate)
            return
        options.logger.warning(
            "SAFE_GPU_SCOPE=%s names no living claim of this user here (it leaks through qsub -V, ssh, sudo and tmux): "
            "ignored",
            printable_lines(view.scope),
        )
        view.scope = ""
        place.abandon(host)

    def _open(self, leases: _Leases, place: QueuePlace) -> Collection[str] | None:
        """UUIDs of the GPUs to choose from; None is all, if nobody ahead competes. Sets ``ahead``."""
        waiter = place.waiter
        ahead = None if waiter is None else waiter.nearest(leases.host)
        if waiter is None or ahead is None:
            return None
        moment = QueueSnapshot(leases.host, leases.view, leases.all(), leases.named, place.untaken, leases.holdings)
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
            self.ahead, self.stopped, self._passed = ahead, moment.stopped, moment.by_poll
            self._strange, self._lacking = moment.strange, moment.lacking


class _Leases:
    """The leases of the view's usable GPUs. Each is tried at most once, and only when it is needed.

    Attributes:
        held: UUID -> lease, for the leases that were taken here.
        names: UUID -> names, for the GPUs that were chosen for a claim.
        dropped: UUIDs of the GPUs that were not chosen because others hold their names.
        trouble: why a name could not be bound, if that was not another claim.
        holdings: which users hold what; None if there are no limits here.
        closed: UUIDs of the GPUs whose lease files cannot be opened.
    """

    def __init__(self, host: LockedHost, view: HostView, claim: Claim | None, options: ClaimOptions) -> None:
        host.leases.names_of_host = leases_of(gpu.uuid for gpu in view.snapshot.gpus)
        self.host = host
        self.view = view
        self.held: dict[str, Lease] = {}
        self.names: dict[str, list[SocketName]] = {}
        self.dropped: frozenset[str] = frozenset()
        self.trouble: OSError | None = None
        self.holdings: LeasesByUser | None = None
        if options.quota is not None and not view.outer:
            self.holdings = options.quota.holdings(host.leases, view.snapshot.gpus, self.held)
        self.closed: set[str] = set()
        self._shared = view.snapshot.shared_display
        self._claim = claim
        self._tried: set[str] = set()

    def all(self) -> dict[str, Lease]:
        """Try the leases of all usable GPUs, and return those that are held."""
        for gpu in self.view.usable:
            self._take(gpu.uuid)
        return self.held

    def choose(self, among: Collection[str] | None = None) -> tuple[Gpu, ...] | None:
        """The best GPUs that nobody holds or uses, leased; None if there are too few.

        Args:
            among: UUIDs to choose from; None is all.

        The choice depends on which other GPUs are free. An empty lease file is taken as free without trying the lease,
        because a holder writes its record into the file. The leases of the chosen GPUs are always tried.
        """
        unoccupied, count = self.view.unoccupied, self.view.request.nb_gpus
        if among is not None:
            if len(among) < count:
                return None
            unoccupied = {uuid: verdict for uuid, verdict in unoccupied.items() if uuid in among}
        groups = self.view.request.groups if self.view.request.together else None
        self.view.faults, last = _faults(self.host.leases, unoccupied)
        available = set()
        for uuid in unoccupied:
            seems_free = uuid not in self._tried and is_empty(self.host.leases, self.view.lease_name(uuid))
            if seems_free or self._take(uuid):
                available.add(uuid)
        while True:
            free = (verdict for uuid, verdict in unoccupied.items() if uuid in available)
            chosen = choose(free, count, near=self.view.near, last=last, groups=groups)
            if chosen is None:
                return None
            missed = set()
            for gpu in chosen:
                if not self._take(gpu.uuid):
                    missed.add(gpu.uuid)
            if not missed:
                missed |= self._name(chosen)
                self.dropped |= missed
            if not missed:
                return chosen
            available -= missed

    def spent(self) -> LimitReached | None:
        """The limit of this user, if it does not allow as many GPUs more as are asked for."""
        if self.holdings is None or self._shared:
            return None
        return self.holdings.own_spent(self.view.request.nb_gpus)

    def give_back(self) -> None:
        """Release the leases and names that no claim took over."""
        self._give_back_names()
        for lease in self.held.values():
            lease.release()

    def named(self, uuids: Collection[str]) -> frozenset[str]:
        """Those of these GPUs that another process holds by name."""
        if self._shared:
            return frozenset()
        return names.held_among(uuids, self.view.snapshot.name_prefix, inner=bool(self.view.outer))

    def _name(self, chosen: tuple[Gpu, ...]) -> frozenset[str]:
        """Take the names of these GPUs, whose leases are ours. Returns those that others have; then none is taken.

        In the order of UUIDs, up to the first that is another's: of two state directories' claims one gets all.
        """
        if self._claim is None:
            return self.named([gpu.uuid for gpu in chosen])
        if self._shared:
            return frozenset()
        for uuid in sorted(gpu.uuid for gpu in chosen):
            try:
                free = self._bind(uuid)
            except OSError as err:
                self.trouble = err
                continue
            if not free:
                self._give_back_names()
                return self.named([gpu.uuid for gpu in chosen]) | {uuid}
        return frozenset()

    def _bind(self, uuid: str) -> bool:
        """Take a GPU's names; False where one of them is another's.

        Raises:
            OSError: they cannot be bound.
        """
        prefix = self.view.snapshot.name_prefix
        wanted = [self.view.name(uuid)]
        if self._claim is not None and self._claim.token:
            wanted.append(names.scope_of(uuid, self._claim.token, prefix))
        mine = self.names.setdefault(uuid, [])
        for name in wanted:
            one = names.bind(name)
            if one is None:
                return False
            mine.append(one)
        if self.view.outer:
            return True
        inside = names.bind(names.inner_of(uuid, prefix))  # an outer claim died and one inside it lives on?
        if inside is None:
            return False
        inside.release()
        return True

    def _give_back_names(self) -> None:
        for uuid in list(self.names):
            for name in self.names[uuid]:
                name.release()
            del self.names[uuid]

    def _take(self, uuid: str) -> bool:
        """Whether this look has the lease of a GPU, which is tried if it was not yet.

        Raises:
            StateDirError: its file cannot be opened, and without such GPUs the request can never be met.
        """
        if uuid in self._tried:
            return uuid in self.held
        self._tried.add(uuid)
        try:
            lease = try_lease(self.host, self.view.lease_name(uuid), shared=self._shared)
            if lease is None:
                return False
            self.held[uuid] = lease
            # The outer claim may have exited while a claim inside it still exists.
            if self.view.outer or self._shared or not probe(self.host, inner_name(uuid)):
                return True
        except StateDirError:
            self.closed.add(uuid)
            if len(self.view.usable) - len(self.closed) < self.view.request.nb_gpus:
                raise
        if uuid in self.held:
            self.held.pop(uuid).release()
        return False


def _faults(leases: StateDir, uuids: Iterable[str]) -> tuple[Mapping[str, GpuFault], Collection[str]]:
    """The notes on these GPUs, and which of them are taken last. Almost always there is none."""
    if not any(leases.has(fault_name(uuid)) for uuid in uuids):
        return {}, ()
    import time

    from ..coordination.leases import read_faults
    from ..selection.verdicts import recent_faults

    noted = read_faults(leases, uuids)
    return noted, recent_faults(noted, time.time())
