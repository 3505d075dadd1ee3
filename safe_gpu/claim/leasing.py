"""The leases and names of one look under host.lock: which are free, which GPUs are best, and what is taken of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..coordination import socket_names as names
from ..coordination.leases import (
    clear_record,
    fault_name,
    inner_name,
    is_empty,
    lease_name,
    may_be_held,
    names_of_host,
    probe,
    slot_name,
    try_lease,
)
from ..devices import GpuVerdict
from ..errors import StateDirError
from ..selection.choice import choose

if TYPE_CHECKING:
    from ..coordination.files import StateDir
    from ..coordination.leases import Lease
    from ..coordination.locks import LockedHost
    from ..coordination.socket_names import SocketName
    from ..devices import Gpu, GpuFault
    from ..selection.request import Selection
    from .claim import Claim
    from .options import ClaimOptions
    from .quota import LeasesByUser, LimitReached
    from .view import HostView


class Leases:
    """The leases of the view's usable GPUs. Each is tried at most once, and only when it is needed.

    Attributes:
        held: UUID -> lease, for the leases that were taken here.
        names: UUID -> names, for the GPUs that were chosen for a claim.
        dropped: UUIDs of the GPUs that were not chosen because others hold their names.
        trouble: why a name could not be bound, if that was not another claim.
        holdings: which users hold what; None if there are no limits here.
        closed: UUIDs of the GPUs whose lease files cannot be opened.
        beneath: UUID -> the lease of the GPU, locked shared, for a claim that holds a share or is inside one.
    """

    def __init__(self, host: LockedHost, view: HostView, claim: Claim | None, options: ClaimOptions) -> None:
        host.leases.names_of_host = partial(names_of_host, [gpu.uuid for gpu in view.snapshot.gpus])
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
        self.beneath: dict[str, Lease] = {}
        self._display = view.snapshot.shared_display
        self._shared = self._display or view.share is not None
        self._claim = claim
        self._tried: set[str] = set()

    def all(self) -> dict[str, Lease]:
        """Try the leases of all usable GPUs, and return those that are held."""
        for gpu in self.view.usable:
            self._take(gpu.uuid)
        return self.held

    def unleased(self) -> frozenset[str]:
        """Return the UUIDs of the usable GPUs that nobody holds."""
        return frozenset(self.all())

    def watched(self) -> Iterable[str]:
        """Return the lease files besides those of held GPUs that may come free."""
        return ()

    def hand_over(self, claim: Claim, gpus: tuple[Gpu, ...], hold_for: float | None) -> None:
        """Move what is held of these GPUs into a claim, which writes its records. Errors as of ``Claim.take``."""
        share = self.view.share
        if self.view.outer:
            share = self.view.outer[gpus[0].uuid].share
        claim.take(self.host, gpus, self.held, self.names, self.beneath, hold_for, share=share)

    def choose(self, among: Collection[str] | None = None) -> tuple[Gpu, ...] | None:
        """Return the best GPUs that nobody holds or uses, leased; None if there are too few.

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
        files = self.host.leases.few_names()  # to ask for each takes longer, and others wait
        self.view.faults, last = _faults(self.host.leases, unoccupied, files)
        available = set()
        for uuid in unoccupied:
            seems_free = uuid not in self._tried and is_empty(self.host.leases, self.view.lease_name(uuid), files)
            if seems_free or self._take(uuid):
                available.add(uuid)
        while True:
            chosen = self._choose([verdict for uuid, verdict in unoccupied.items() if uuid in available], last)
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
            available = available.intersection(self.all()) - missed

    def _choose(self, free: Collection[GpuVerdict], last: Collection[str]) -> tuple[Gpu, ...] | None:
        requests = self.view.request.numbers
        if self.view.visible_limit is not None and self.view.visible_limit.frozen:
            requests = iter([self.view.request])  # CUDA is initialised with that many
        allowed = (one for one in requests if self._allows(one))
        return next(filter(None, (self._best(free, last, one) for one in allowed)), None)

    def _allows(self, request: Selection) -> bool:
        if request is self.view.request or self.holdings is None or self._display:
            return True
        return self.holdings.own_spent(request) is None

    def _best(self, free: Collection[GpuVerdict], last: Collection[str], request: Selection) -> tuple[Gpu, ...] | None:
        groups = request.groups if request.together else None
        prefer = request.value_of("prefer") or ()
        return choose(free, request.nb_gpus, near=self.view.near, last=last, groups=groups, prefer=prefer)

    def spent(self) -> LimitReached | None:
        """Return the limit of this user, if it does not allow as many GPUs more as are asked for."""
        if self.holdings is None or self._display:
            return None
        return self.holdings.own_spent(self.view.effective)

    def give_back(self) -> None:
        """Release the leases and names that no claim took over."""
        self._give_back_names()
        for lease in (*self.held.values(), *self.beneath.values()):
            lease.release()

    def named(self, uuids: Collection[str]) -> frozenset[str]:
        """Return those of these GPUs that another process holds by name."""
        if self._display:
            return frozenset()
        return names.held_among(uuids, self.view.snapshot.name_prefix, inner=bool(self.view.outer))

    def _name(self, chosen: tuple[Gpu, ...]) -> frozenset[str]:
        """Take the names of these GPUs, whose leases are ours. Returns those that others have; then none is taken.

        In the order of UUIDs, up to the first that is another's: of two state directories' claims one gets all.
        """
        if self._claim is None:
            return self.named([gpu.uuid for gpu in chosen])
        if self._display:
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
        if not self._bind_all(uuid, wanted):
            return False
        if self.view.outer:
            return self._outer_lives(uuid)
        return self._is_free(names.inner_of(uuid, prefix)) and not names.held_slots(uuid, prefix)

    def _bind_all(self, uuid: str, wanted: Iterable[str]) -> bool:
        mine = self.names.setdefault(uuid, [])
        for name in wanted:
            one = names.bind(name)
            if one is None:
                return False
            mine.append(one)
        return True

    def _outer_lives(self, uuid: str) -> bool:
        """Return whether the claim around this one has its lease now, or its name if that lease is not here.

        Its name of the GPU goes after both. So who comes through another state directory then sees the name of this
        claim, which has been bound.
        """
        slot = self.view.slot(uuid)
        if may_be_held(self.host, lease_name(uuid) if slot is None else slot_name(uuid, slot)):
            return True
        return not self._is_free(names.scope_of(uuid, self.view.scope, self.view.snapshot.name_prefix, slot))

    def _is_free(self, name: str) -> bool:
        """Return whether nobody has this name, which is bound for a moment."""
        bound = names.bind(name)
        if bound is not None:
            bound.release()
        return bound is not None

    def _give_back_names(self) -> None:
        for uuid in list(self.names):
            for name in self.names[uuid]:
                name.release()
            del self.names[uuid]

    def _take(self, uuid: str) -> bool:
        """Return whether this look has the lease of a GPU, which is tried if it was not yet.

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
            if self.view.slot(uuid) is not None:
                beneath = try_lease(self.host, lease_name(uuid), shared=True)
                if beneath is not None:
                    self.beneath[uuid] = beneath
                    return True
            elif self.view.share is not None:
                clear_record(lease)
            # The outer claim may have exited while a claim inside it still exists.
            elif self.view.outer or self._display:
                return True
            if not self.view.outer and not probe(self.host, inner_name(uuid)):
                return True
        except StateDirError:
            self.closed.add(uuid)
            if len(self.view.usable) - len(self.closed) < self.view.request.nb_gpus:
                raise
        if uuid in self.held:
            self.held.pop(uuid).release()
        return False


def _faults(
    leases: StateDir, uuids: Iterable[str], files: frozenset[str] | None
) -> tuple[Mapping[str, GpuFault], Collection[str]]:
    """Return the notes on these GPUs, and which of them are taken last. Almost always there is none."""
    if files is not None and files.isdisjoint(map(fault_name, uuids)):
        return {}, ()
    import time

    from ..coordination.leases import read_faults
    from ..selection.verdicts import recent_faults

    noted = read_faults(leases, uuids)
    return noted, recent_faults(noted, time.time())
