"""The leases of one look under host.lock: which are free, and what is taken of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ...coordination.leases.faults import read_faults
from ...coordination.leases.file_names import fault_name, inner_name
from ...coordination.leases.lease import clear_record, is_empty, probe, try_lease
from ...errors import StateDirError
from ...selection.choice import choose
from ...selection.verdicts import recent_faults
from ..held import Claim, Taken

if TYPE_CHECKING:
    from ...coordination.files.state_dir import StateDir
    from ...coordination.locks.host_lock import LockedHost
    from ...coordination.name_table import NameTable
    from ...gpus.devices import Gpu, GpuFault, GpuVerdict
    from ...selection.request import Selection
    from ..arguments import ClaimOptions
    from ..host.host_view import HostView
    from ..limits import LeasesByUser, LimitReached
    from .kernel_facts import KernelFacts
    from .names_of_look import GpuNames
    from .slots_of_look import Slots


class Leases:
    """The leases of the view's usable GPUs. Each is tried at most once, and only when it is needed.

    Args:
        part: what is taken of a GPU: the whole of it, or a slot.

    Attributes:
        held: UUID -> what was taken here.
        dropped: UUIDs of the GPUs that were not chosen because others hold their names.
        trouble: why a name could not be bound, if that was not another claim.
        holdings: which users hold what; None if there are no limits here.
        closed: UUIDs of the GPUs whose lease files cannot be opened.
    """

    def __init__(
        self, host: LockedHost, view: HostView, part: WholeGpus | Slots, options: ClaimOptions, facts: KernelFacts
    ) -> None:
        self.host = host
        self.view = view
        self.part = part
        self.held: dict[str, Taken] = {}
        self.dropped: frozenset[str] = frozenset()
        self.trouble: OSError | None = None
        self.holdings: LeasesByUser | None = None
        self._locked: set[str] = set()  # the names of these leases
        if options.quota is not None and facts.owners is not None and not view.outer:
            self.holdings = options.quota.holdings(host.leases, view.snapshot, facts.owners, tried=self._locked)
        self.closed: set[str] = set()
        self._display = view.snapshot.shared_display
        self._tried: set[str] = set()

    def all(self) -> dict[str, Taken]:
        """Try the leases of all usable GPUs, and return what is held."""
        for gpu in self.view.usable:
            self._take(gpu.uuid)
        return self.held

    def unleased(self) -> frozenset[str]:
        """Return the UUIDs of the usable GPUs that nobody holds, or that have room for a share."""
        return frozenset(filter(self.part.has_room, self.all()))

    def hand_over(self, claim: Claim, gpus: tuple[Gpu, ...], hold_for: float | None) -> None:
        """Move what is held of these GPUs into a claim, which writes its records. Errors as of ``Claim.take``."""
        if self.trouble is not None and claim.delegates:  # claims inside it would find only GPUs that have names
            for taken in self.held.values():
                taken.give_back_names()
            claim.named = False
        claim.take(self.host, gpus, self.held, hold_for, share=self.view.share)

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
            seems_free = uuid not in self._tried and is_empty(self.host.leases, self.view.outer.lease_name(uuid), files)
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
                missed |= self._take_parts(chosen)
                self.dropped |= missed
            if not missed:
                return chosen
            available = available.intersection(self.all()) - missed

    def _choose(self, free: Collection[GpuVerdict], last: Collection[str]) -> tuple[Gpu, ...] | None:
        requests = self.view.request.numbers
        if self.view.visible_limit is not None and self.view.visible_limit.frozen:
            requests = iter([self.view.request])  # CUDA is initialised with that many
        allowed = (one for one in requests if self._allows(one))
        return next(filter(None, (self.part.best(free, last, one) for one in allowed)), None)

    def _allows(self, request: Selection) -> bool:
        if request is self.view.request or self.holdings is None or self._display:
            return True
        return self.holdings.own_limit(request) is None

    def limit(self) -> LimitReached | None:
        """Return the limit of this user, if it does not allow as many GPUs more as are asked for."""
        if self.holdings is None or self._display:
            return None
        return self.holdings.own_limit(self.view.effective)

    def give_back(self) -> None:
        """Release what no claim took over."""
        for taken in self.held.values():
            taken.give_back()

    def _take_parts(self, chosen: tuple[Gpu, ...]) -> frozenset[str]:
        """Take what the claim is to have of these GPUs, whose leases are ours. Returns one of which another has it;
        then nothing is taken.

        In the order of UUIDs, up to the first that is another's: of two state directories' claims one gets all.
        """
        for uuid in sorted(gpu.uuid for gpu in chosen):
            try:
                got = self.part.take(uuid, self.held[uuid])
            except StateDirError:
                raise
            except OSError as err:
                self.trouble = err
                continue
            if not got:
                for taken in self.held.values():
                    self.part.undo(taken)
                return frozenset({uuid})
        return frozenset()

    def _take(self, uuid: str) -> bool:
        """Return whether this look has the lease of a GPU, which is tried if it was not yet.

        Raises:
            StateDirError: its file cannot be opened, and without such GPUs the request can never be met.
        """
        if uuid in self._tried:
            return uuid in self.held
        self._tried.add(uuid)
        view, shared, lease = self.view, self._display or self.view.share is not None, None
        try:
            lease = try_lease(self.host, view.outer.lease_name(uuid), shared=shared)
            if lease is None:
                return False
            if view.share is not None:
                clear_record(lease)
            # The outer claim may have exited while a claim inside it still exists.
            if view.outer or self._display or not probe(self.host, inner_name(uuid)):
                self.held[uuid] = Taken(lease)
                self._locked.add(lease.name)
        except StateDirError:
            self.closed.add(uuid)
            if len(view.usable) - len(self.closed) < view.request.nb_gpus:
                raise
        finally:
            if lease is not None and uuid not in self.held:
                lease.release()
        return uuid in self.held


class WholeGpus:
    """What a claim takes that shares nothing: whole GPUs, or all that the claim around it has of them."""

    def __init__(self, view: HostView, names: GpuNames) -> None:
        self._view = view
        self._names = names

    def has_room(self, uuid: str) -> bool:
        """Return whether it fits on a GPU whose lease is ours."""
        return True

    def watched(self) -> Iterable[str]:
        """Return the lease files besides those of held GPUs that may come free."""
        return ()

    def named(self, uuids: Collection[str], table: NameTable | None = None) -> frozenset[str]:
        """Return those of these GPUs that another process holds by name, by this table or that of the look."""
        if self._view.snapshot.shared_display:
            return frozenset()
        return self._names.held(uuids, table, inner=bool(self._view.outer))

    def best(self, free: Collection[GpuVerdict], last: Collection[str], request: Selection) -> tuple[Gpu, ...] | None:
        """Return the best of these GPUs for a request."""
        groups = request.groups if request.together else None
        return choose(free, request.nb_gpus, near=self._view.near, last=last, groups=groups, prefer=request.preferred)

    def take(self, uuid: str, taken: Taken) -> bool:
        """Take it of a GPU whose lease is ours, with its names; False where one of them is another's.

        Raises:
            OSError: the names cannot be bound.
        """
        if self._names.claim is None:
            return not self.named([uuid])
        return self._view.snapshot.shared_display or self._names.take_whole(uuid, taken.names)

    def undo(self, taken: Taken) -> None:
        """Give back what :meth:`take` took."""
        taken.give_back_names()


def _faults(
    leases: StateDir, uuids: Iterable[str], files: frozenset[str] | None
) -> tuple[Mapping[str, GpuFault], Collection[str]]:
    """Return the notes on these GPUs, and which of them are taken last. Almost always there is none."""
    if files is not None and files.isdisjoint(map(fault_name, uuids)):
        return {}, ()
    import time

    noted = read_faults(leases, uuids)
    return noted, recent_faults(noted, time.time())
