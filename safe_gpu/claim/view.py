"""What one request of this process may have of the host: by the latest poll, what others hold, and what is closed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..affinity.binding import known_mask, nodes_of_cpus
from ..coordination.entry import Entry
from ..coordination.holders import Claims
from ..coordination.queue import TicketRequest
from ..drivers.base import Driver
from ..errors import NoDriverError
from ..gpus.devices import Gpu, GpuVerdict, Holder, HostSnapshot, VisibleLimit
from ..gpus.vendors import FIRST, VENDORS
from ..gpus.windows import Spans
from ..host.procfs import describe_process
from ..selection.backfill import BackfillRequest
from ..selection.choice import candidates
from ..selection.request import Selection
from ..selection.verdicts import Known, Rules, judge
from .claim import visible_limit_of
from .closed import ClosedGpus
from .health import Health
from .others import HeldByOthers, owner_of, pids_of_enclosing
from .polls import Polls, own_pids_in


class HostView:
    """What one request of this process may have.

    Args:
        driver, snapshot: as of :class:`~safe_gpu.claim.polls.Polls`.

    Attributes:
        request: with the conditions as they are meant on this host.
        polls: what the driver said.
        others: what others hold now.
        closed: what root has closed.
        health: which GPUs are taken last.
        visible_limit: the UUIDs to choose from; None is all.
        own: pids under which the driver shows this process.
        near_nodes: NUMA nodes of the CPUs that this process may use; None if it may use all CPUs.
        unlisted: UUIDs of the GPUs on which this process has a context that the driver does not list (a
            hidden process list).
        scope: the value of SAFE_GPU_SCOPE, "" if it is not set.

    Raises:
        NoDriverError: the driver has no GPU. CudaInitializedError, UnsatisfiableRequestError: see
            ``visible_limit_of`` and ``Rules.of``.
    """

    def __init__(self, driver: Driver, snapshot: HostSnapshot, request: Selection) -> None:
        if not snapshot.gpus:
            raise _no_gpu_here(driver)
        self.visible_limit = visible_limit_of(snapshot, request.nb_gpus, driver.runtime)
        self.own = own_pids_in(snapshot, os.getpid())
        self.near_nodes = _near_nodes(driver)
        self.unlisted: frozenset[str] = frozenset()
        if self.is_frozen:
            self.unlisted = driver.runtime.contexts() - _gpus_used_by(self.own, snapshot)
        self.scope = os.environ.get("SAFE_GPU_SCOPE", "")
        rules = Rules.of(os.environ)
        self.closed = ClosedGpus(rules)
        self.health = Health(rules)
        self.others = HeldByOthers()
        self.request = request.resolved(snapshot)
        self.polls = Polls(driver, snapshot, request.needs, self._choices)

    @property
    def snapshot(self) -> HostSnapshot:
        """The latest poll."""
        return self.polls.snapshot

    @property
    def is_frozen(self) -> bool:
        """Whether CUDA is initialised in this process, which then sees certain GPUs and no others."""
        return self.visible_limit is not None and self.visible_limit.frozen

    @property
    def enclosing(self) -> Entry | None:
        """The claim inside which this one is made; None of one inside none."""
        return self.others.enclosing

    @property
    def effective(self) -> Selection:
        """The request as it is judged. Inside another claim it gets whole GPUs."""
        if self.enclosing is not None:
            return self.request.whole
        return self.request

    @property
    def share(self) -> int | None:
        """Bytes of each GPU that the claim is to hold; None if it holds all of it."""
        if self.snapshot.shared_display:
            return None
        return self.effective.share

    # The GPUs that the request could get

    @property
    def usable(self) -> list[Gpu]:
        """The GPUs that the request could ever get, whether they are free or not."""
        return self._candidates(lost=False)

    @property
    def wanted(self) -> list[Gpu]:
        """The GPUs that the request could ever use, those too that the driver does not reach now."""
        return self._candidates(lost=True)

    def _candidates(self, *, lost: bool) -> list[Gpu]:
        found = candidates(self.snapshot, self.request, self.visible_limit, rules=self.closed.rules, lost=lost)
        if self.enclosing is None:
            return list(found)
        return [gpu for gpu in found if gpu.uuid in self.enclosing.gpus]

    def _choices(self, snapshot: HostSnapshot) -> list[str]:
        """Return the UUIDs of the GPUs that are free by a poll and the latest listing, if a claim of several can choose
        among them: it prefers those that NVLink connects."""
        request = self.request
        if not request.several:
            return []
        held = self.others.holders()
        free = []
        for gpu in candidates(snapshot, request, self.visible_limit, rules=self.closed.rules):
            others = [process for process in gpu.processes or () if process.pid not in self.own]
            if not others and gpu.uuid not in held:
                free.append(gpu.uuid)
        if len(free) <= (request.up_to or request.nb_gpus):
            return []
        return free

    # Others

    def update_others(self, claims: Claims, enclosing: Entry | None) -> None:
        """Take over who holds what by a listing. No directory service is asked, since host.lock may be
        held.

        Args:
            enclosing: see :attr:`enclosing`.
        """
        self.others = HeldByOthers(claims, enclosing)
        if self.share is None:
            return
        usable = {gpu.uuid for gpu in self.usable}
        shared = {}
        for uuid, holder in self.others.holders().items():
            if holder.sharers and uuid in usable:
                shared[uuid] = holder
        self.others = replace(self.others, shared=shared)

    def backfill_request(self, request: TicketRequest, uid: int) -> BackfillRequest:
        """Return what a waiter of a user wants, as a request for backfill. Reservations do not apply inside another
        claim."""
        reserved: Mapping[str, Spans] = {}
        if self.enclosing is None:
            reserved = self.closed.spans_against(uid, self.snapshot.gpus)
        return BackfillRequest.of(request, self.snapshot.gpus, reserved)

    # The verdicts

    def unoccupied(self) -> dict[str, GpuVerdict]:
        """Return UUID -> verdict of the usable GPUs that are free apart from claims."""
        verdicts = self._judge(
            self.effective, self.others.shared, self.closed.rules, gpus=self.usable, within_visible_limit=True
        )
        return {verdict.gpu.uuid: verdict for verdict in verdicts if verdict.free}

    def judge(
        self, claimed: Mapping[str, Holder], gpus: Iterable[Gpu] | None = None, *, within_visible_limit: bool = True
    ) -> tuple[GpuVerdict, ...]:
        """Return which GPUs the request could have now, and why not the others, for people. Inside a claim every GPU
        that the enclosing claim does not hold has the state ``outside``.

        Args:
            claimed: UUID -> holder, for GPUs that others hold.
            gpus: the GPUs to judge; None: all of the host.
            within_visible_limit: False judges without the visible limit.
        """
        verdicts = self._judge(
            self.effective,
            {**self.others.shared, **claimed},
            self.closed.rules,
            gpus=gpus,
            within_visible_limit=within_visible_limit,
            for_people=True,
        )
        if self.enclosing is None:
            return verdicts
        reason = f"outside {owner_of(self.enclosing)}, inside which this one is made (SAFE_GPU_SCOPE)"
        adapted = []
        for verdict in verdicts:
            if verdict.gpu.uuid in self.enclosing.gpus:
                adapted.append(verdict)
            else:
                adapted.append(GpuVerdict(verdict.gpu, "outside", reason))
        return tuple(adapted)

    def judge_for(self, request: Selection, claimed: Mapping[str, Holder]) -> tuple[GpuVerdict, ...]:
        """Return the verdicts for a request of another process, whose visible limit is unknown, as if no GPU were
        reserved."""
        return self._judge(request, claimed, self.closed.rules_for_others)

    @property
    def explained(self) -> dict[str, tuple[int, ...]]:
        """UUID -> driver pids on that GPU that belong to the enclosing claim and do not make the GPU busy.

        The GPUs of ``unlisted`` stand there too, without pids: their memory is this process's own.
        """
        pids: dict[str, tuple[int, ...]] = dict.fromkeys(self.unlisted, ())
        if self.enclosing is not None:
            pids.update(dict.fromkeys(self.enclosing.gpus, pids_of_enclosing(self.enclosing)))
        return pids

    def _judge(
        self,
        request: Selection,
        claimed: Mapping[str, Holder],
        rules: Rules,
        *,
        gpus: Iterable[Gpu] | None = None,
        within_visible_limit: bool = False,
        for_people: bool = False,
    ) -> tuple[GpuVerdict, ...]:
        """Judge GPUs. Only reasons that are for people name the users of processes."""
        visible_limit: VisibleLimit | None = None
        if within_visible_limit:
            visible_limit = self.visible_limit
        describe = self.polls.describe
        if for_people:
            describe = describe_process
        known = Known(
            claimed=claimed,
            visible_limit=visible_limit,
            own=self.own,
            explained=self.explained,
            describe=describe,
            family_of=self.polls.family_of,
            rules=rules,
        )
        return judge(self.snapshot, request, known, gpus)


def _no_gpu_here(driver: Driver) -> NoDriverError:
    vendor = VENDORS[FIRST]
    for one in VENDORS.values():
        if driver.name in one.drivers:
            vendor = one
            break
    return NoDriverError(
        f"the driver ({driver.name}) works, but there is no GPU here: {vendor.pass_in}; to try safe_gpu without a GPU, "
        f"set SAFE_GPU_DRIVER=simulated:{vendor.preset}",
        driver=driver.name,
    )


def _near_nodes(driver: Driver) -> frozenset[int] | None:
    cpus = known_mask()
    if len(cpus) >= (os.cpu_count() or 1):
        return None
    return nodes_of_cpus(cpus, driver)


def _gpus_used_by(pids: set[int], snapshot: HostSnapshot) -> set[str]:
    used = set()
    for gpu in snapshot.gpus:
        if any(process.pid in pids for process in gpu.processes or ()):
            used.add(gpu.uuid)
    return used
