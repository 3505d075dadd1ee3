"""What one request of this process can have of the host, by the latest poll, and the verdicts on its GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from ..affinity.binding import nodes_of_cpus
from ..coordination.doors import digest
from ..coordination.entry import Entry
from ..coordination.holders import Claims, living_claims
from ..coordination.host_lock import Host
from ..coordination.notes import has_closed_file
from ..coordination.queue import TicketRequest
from ..drivers.base import Driver
from ..errors import NoDriverError
from ..gpus.devices import Gpu, GpuFault, GpuProcess, GpuVerdict, Holder, HostSnapshot, VisibleLimit, recent_faults
from ..gpus.vendors import FIRST, VENDORS
from ..gpus.windows import Spans, Window
from ..host import procfs
from ..host.procfs import describe_process
from ..selection.backfill import BackfillRequest
from ..selection.choice import candidates
from ..selection.request import Selection
from ..selection.sharing import promised_room, strangers
from ..selection.verdicts import Rules, judge
from .claim import visible_limit_of
from .health import Health

# If the latest poll of the whole host is older than this, in seconds, the second one asks whether it still holds.
_RECENT = 5.0

# Pid of this process or of one that it was forked from -> the pids under which the driver shows that process. In a
# container the driver may show host pids. The first placeholder reveals them. A framework may keep its context after
# the release, and the next claim must then recognise this process on the GPU.
driver_pids: dict[int, frozenset[int]] = {}


class Polls:
    """The polls of the driver for one request.

    Args:
        driver: polled only while no lock is held.
        snapshot: its latest poll. Each poll replaces it.
        needs: methods of the driver that complete each poll, for this request, to choose well, and for
            those of others that it must judge.
        choices: returns the UUIDs of the GPUs of a poll among which NVLink decides, if it does.

    Attributes:
        has_waited: whether this claim has waited since the latest poll. Nobody in the queue is passed by that poll any
            more: the processes that it lists may have ended.
    """

    def __init__(
        self,
        driver: Driver,
        snapshot: HostSnapshot,
        needs: frozenset[str],
        choices: Callable[[HostSnapshot], Collection[str]],
    ) -> None:
        self.driver = driver
        self.needs = needs
        self._choices = choices
        self.snapshot = self._completed(snapshot)
        self.has_waited = False
        self._at = time.monotonic()
        self._took = 0.0

    def poll(self) -> None:
        """Poll the driver for the whole host."""
        began = time.monotonic()
        self.snapshot = self._completed(self.driver.snapshot())
        self._at = time.monotonic()
        self._took = self._at - began
        self.has_waited = False

    def leave_out(self, gone: Mapping[str, Collection[int]]) -> None:
        """Let the latest poll be as if these processes had left these GPUs: UUID -> pids."""
        if gone:
            known = [self.snapshot.by_uuid(uuid) for uuid in gone]
            self.snapshot = self.snapshot.updated(gpu.without(gone[gpu.uuid]) for gpu in known if gpu is not None)

    def next_poll(self, pause: float, longest: float) -> float:
        """Return the ``time.monotonic()`` value before which a waiter must not poll the driver again.

        Args:
            pause: seconds between two polls. It is longer where polls are slow, so that they take a tenth of the time.
            longest: seconds that it is at most.
        """
        return self._at + min(max(pause, 9 * self._took), longest)

    def poll_again(self, gpus: Sequence[Gpu]) -> None:
        """Poll the driver for these GPUs only. If the latest poll of the whole host is old, or this claim has waited
        since, and the driver shows other GPUs now, or has lost one, for the whole host."""
        is_recent = self.age <= _RECENT and not self.has_waited
        if is_recent or self.driver.shows_same(self.snapshot):
            self.snapshot = self.snapshot.updated(self.driver.usage(gpus))
        else:
            self.poll()

    @property
    def age(self) -> float:
        """Seconds since the latest poll of the whole host."""
        return time.monotonic() - self._at

    def _completed(self, snapshot: HostSnapshot) -> HostSnapshot:
        for method in sorted(self.needs):
            snapshot = getattr(self.driver, method)(snapshot)
        if "linked" in self.needs:
            return snapshot
        choices = self._choices(snapshot)
        if not choices:
            return snapshot
        return self.driver.linked(snapshot, choices)


class ByPid(dict[int, Any]):
    """What a function says of each pid, asked once for each poll: a look judges the GPUs for several requests under
    host.lock. A :func:`functools.cache` takes longer to make than to use here."""

    def __init__(self, ask: Callable[[int], object]) -> None:
        self._ask = ask

    def __missing__(self, pid: int) -> object:
        return self.setdefault(pid, self._ask(pid))


def _command_of(pid: int) -> tuple[None, str | None]:
    """As :func:`describe_process` without the user, for whose name a directory service may be asked."""
    return None, procfs.command_of(pid)


_cpu_count = cache(os.cpu_count)  # reads a file of /sys


def own_pids_in(snapshot: HostSnapshot, pid: int) -> set[int]:
    """Return the pids under which the driver shows this process.

    A stored pid that the driver no longer shows is dropped, because another process may get it later.
    """
    shown = {process.pid for gpu in snapshot.gpus for process in gpu.processes or ()}
    driver_pids[pid] = driver_pids.get(pid, frozenset()) & shown
    return {pid, *driver_pids[pid]}


class HostView:
    """What one request of this process can have of the host, by the latest poll, its environment and CUDA.

    Args:
        driver, snapshot: as of :class:`Polls`.

    Attributes:
        visible_limit: the UUIDs to choose from; None is all.
        own: pids under which the driver shows this process.
        near: NUMA nodes of the CPUs that this process may use; None if it may use all CPUs.
        unlisted: UUIDs of the GPUs on which this process has a context that the driver does not list (a
            hidden process list).
        scope: the value of SAFE_GPU_SCOPE, "" if it is not set.
        rules: how GPUs are judged, with those that are drained, and those that are reserved for others than this user.
        around: the claim inside which this one is made; None of one inside none.
        claims: the living claims, by the latest look.
        faults: UUID -> note, of the GPUs on which a claim failed and none has worked since.
        health: which GPUs seem ill.
        spare: UUIDs of the GPUs that the latest look found free, besides those that it has chosen.
        shared: UUID -> whose claims share it, of the GPUs that this claim may share, by the latest look.

    Raises:
        NoDriverError: the driver has no GPU. CudaInitializedError, UnsatisfiableRequestError: see
            ``visible_limit_of`` and ``Rules.of``.
    """

    def __init__(self, driver: Driver, snapshot: HostSnapshot, request: Selection) -> None:
        if not snapshot.gpus:
            vendor = next((one for one in VENDORS.values() if driver.name in one.drivers), VENDORS[FIRST])
            raise NoDriverError(
                f"the driver ({driver.name}) works, but there is no GPU here: {vendor.pass_in}; to try safe_gpu "
                f"without a GPU, set SAFE_GPU_DRIVER=simulated:{vendor.preset}",
                driver=driver.name,
            )
        self.visible_limit = visible_limit_of(snapshot, request.nb_gpus, driver.runtime)
        self.own = own_pids_in(snapshot, os.getpid())
        cpus = os.sched_getaffinity(0)
        self.near = nodes_of_cpus(cpus, driver) if len(cpus) < (_cpu_count() or 1) else None
        self.unlisted: frozenset[str] = frozenset()
        if self.is_frozen:
            listed = {gpu.uuid for gpu in snapshot.gpus if any(one.pid in self.own for one in gpu.processes or ())}
            self.unlisted = driver.runtime.contexts() - listed
        self.scope = os.environ.get("SAFE_GPU_SCOPE", "")
        self.rules = self._rules_for_all = self._without_closed = Rules.of(os.environ)
        self.request = request.resolved(snapshot)
        self.around: Entry | None = None
        self.claims = Claims(())
        self.polls = Polls(driver, snapshot, request.needs, self._choices)
        self.faults: Mapping[str, GpuFault] = {}
        self.health = Health(self.rules)
        self.spare: frozenset[str] = frozenset()
        self.shared: dict[str, Holder] = {}
        self._windows: tuple[Window, ...] = ()
        self._usable: tuple[HostSnapshot, list[Gpu]] | None = None
        self._unoccupied: tuple[HostSnapshot, tuple[object, ...], dict[str, GpuVerdict]] | None = None
        self._processes = self.snapshot, ByPid(_command_of), ByPid(procfs.family_of)

    @property
    def snapshot(self) -> HostSnapshot:
        """The latest poll."""
        return self.polls.snapshot

    def _choices(self, snapshot: HostSnapshot) -> list[str]:
        """Return the UUIDs of the GPUs that are free by a poll and the latest look, if a claim of several can choose
        among them: it prefers those that NVLink connects."""
        request = self.request
        if not request.several:
            return []
        free = []
        for gpu in candidates(snapshot, request, self.visible_limit, rules=self.rules):
            others = [process for process in gpu.processes or () if process.pid not in self.own]
            if not others and gpu.uuid not in self.held:
                free.append(gpu.uuid)
        if len(free) <= (request.up_to or request.nb_gpus):
            return []
        return free

    @property
    def is_frozen(self) -> bool:
        """Whether CUDA is initialised in this process, which then sees certain GPUs and no others."""
        return self.visible_limit is not None and self.visible_limit.frozen

    def see_closed(self, hold_for: float | None, host: Host, *, locked: bool = False) -> None:
        """Read which GPUs are drained, and which are reserved for others, if any.

        Args:
            hold_for: for how long this claim will hold its GPUs, in seconds; None is unknown.
            host: of those who wait, for whom GPUs may be reserved.
            locked: whether host.lock is held. Then nobody is asked for whom.
        """
        if host.directory is None or not has_closed_file(host.directory):  # as almost always, and others wait
            self.rules, self._rules_for_all, self._windows = self._without_closed, self._without_closed, ()
            return
        from ..coordination.notes import all_windows, binding, drained_gpus, find_admitted
        from ..gpus.windows import why_reserved

        drained, self._windows = drained_gpus(), all_windows()
        if self._windows and not locked:
            find_admitted(self._windows, {os.geteuid(), *(ticket.uid for ticket in host.queue.look(()))})
        reserved = why_reserved(binding(self._windows, os.geteuid()), time.time(), hold_for)
        self.rules = self._without_closed._replace(drained={**reserved, **drained})
        self._rules_for_all = self._without_closed._replace(drained=drained)

    def wish(self, request: TicketRequest, uid: int) -> BackfillRequest:
        """Return what a waiter of a user wants, for the rule who may pass whom. What is reserved for others binds no
        claim inside another."""
        reserved: Mapping[str, Spans] = {}
        if self._windows and not self.around:
            from ..coordination.notes import binding
            from ..gpus.windows import spans_of

            reserved = spans_of(binding(self._windows, uid), self.snapshot.gpus)
        return BackfillRequest.of(request, self.snapshot.gpus, reserved)

    @property
    def usable(self) -> list[Gpu]:
        """The GPUs that the request could ever get, whether they are free or not."""
        if self._usable is None or self._usable[0] is not self.snapshot:
            possible = candidates(self.snapshot, self.request, self.visible_limit, rules=self.rules)
            self._usable = self.snapshot, list(possible)
        if self.around:
            return [gpu for gpu in self._usable[1] if gpu.uuid in self.around.gpus]
        return self._usable[1]

    @property
    def wanted(self) -> list[Gpu]:
        """The GPUs that the request could ever use, those too that the driver does not reach now."""
        possible = candidates(self.snapshot, self.request, self.visible_limit, rules=self.rules, lost=True)
        return [one for one in possible if not self.around or one.uuid in self.around.gpus]

    def examine(self, gpus: Iterable[Gpu]) -> list[Gpu]:
        """Ask the driver whether these GPUs are ill, about each once in a claim. No lock may be held.

        Returns:
            Those that seemed well before, and seem ill now.

        Raises:
            NoDriverError: the driver is gone.
        """
        asked = self.health.unexamined(gpus)
        if asked:
            examined = self.polls.driver.examined(self.snapshot, {gpu.uuid for gpu in asked})
            self.health.learn(examined.by_uuid(gpu.uuid) or gpu for gpu in asked)
        return [gpu for gpu in asked if self.health.why_ill(gpu)]

    @property
    def last(self) -> frozenset[str]:
        """UUIDs of the GPUs that are taken only if the others are too few: a claim failed there, or they seem ill."""
        ill = [gpu.uuid for gpu in self.usable if self.health.why_ill(gpu)]
        return frozenset([*ill, *recent_faults(self.faults, time.time())])

    @property
    def effective(self) -> Selection:
        """The request as it is judged. Inside another claim it gets whole GPUs."""
        return self.request.whole if self.around else self.request

    @property
    def share(self) -> int | None:
        """Bytes of each GPU that the claim is to hold; None if it holds all of it."""
        share = self.effective.share
        return None if share is None or self.snapshot.shared_display else share

    @property
    def inside(self) -> str:
        """Hash of the token of the claim around; "" of a claim inside none."""
        return digest(self.scope) if self.around else ""

    def see(self, living: Iterable[Entry]) -> None:
        """Take over who holds what by a listing. Nobody is asked, since host.lock may be held."""
        self.claims, self.shared = Claims(living, self.snapshot.gpus), {}
        if self.share is not None:
            usable = {gpu.uuid for gpu in self.usable}
            self.shared = {uuid: holder for uuid, holder in self.held.items() if holder.sharers and uuid in usable}

    @property
    def held(self) -> dict[str, Holder]:
        """UUID -> who holds it, or whose claims share it, by the latest look. Nobody is asked."""
        return self.claims.holders(self.inside, told=False)

    def promised_room(self, gpu: Gpu) -> int:
        """Return the bytes of a GPU that are not promised to claims that share it."""
        return promised_room(gpu, self.shared[gpu.uuid].sharers if gpu.uuid in self.shared else ())

    def strangers(self, gpu: Gpu, processes: list[GpuProcess]) -> list[GpuProcess]:
        """Return those of these processes on a GPU of this claim that are of no claim that shares it now."""
        holder = Claims(living_claims(), [gpu]).holders(told=False).get(gpu.uuid)
        return strangers(processes, holder.sharers if holder else (), procfs.family_of)

    def unoccupied(self) -> dict[str, GpuVerdict]:
        """Return UUID -> verdict of the usable GPUs that are free apart from claims, computed once for each poll, and
        again when others have come to share them."""
        known, facts = self._unoccupied, (self.rules, self.shared)
        if known is None or known[0] is not self.snapshot or known[1] != facts:
            verdicts = self._judge(self.effective, self.shared, self.rules, self.visible_limit, self.usable)
            free = {verdict.gpu.uuid: verdict for verdict in verdicts if verdict.free}
            self._unoccupied = known = self.snapshot, (self.rules, dict(self.shared)), free
        return known[2]

    def prepare(self) -> None:
        """Judge the GPUs before host.lock is taken, since others wait meanwhile."""
        if not self.scope:  # the claim around is known only under the lock
            self.unoccupied()

    @property
    def explained(self) -> dict[str, tuple[int, ...]]:
        """UUID -> driver pids on that GPU that belong to the claim around and do not make the GPU busy.

        The GPUs of ``unlisted`` stand there too, without pids: their memory is this process's own.
        """
        pids: dict[str, tuple[int, ...]] = dict.fromkeys(self.unlisted, ())
        if self.around:
            pids.update(dict.fromkeys(self.around.gpus, pids_of_around(self.around)))
        return pids

    def leave_scope(self) -> None:
        """Ask for GPUs as outside of every claim, since the claim around has ended."""
        self.scope, self.around, self._unoccupied = "", None, None

    def judge(
        self, claimed: Mapping[str, Holder], gpus: Iterable[Gpu] | None = None, *, within_limit: bool = True
    ) -> tuple[GpuVerdict, ...]:
        """Return which GPUs the request could have now, and why not the others. Inside a claim every GPU that the claim
        around does not hold has the state ``outside``.

        Args:
            claimed: UUID -> holder, for GPUs that others hold.
            gpus: the GPUs to judge; None: all of the host.
            within_limit: False judges without the visible limit.
        """
        limit = self.visible_limit if within_limit else None
        verdicts = self._judge(self.effective, {**self.shared, **claimed}, self.rules, limit, gpus, told=True)
        if self.around is None:
            return verdicts
        beyond = f"outside {owner_of(self.around)}, inside which this one is made (SAFE_GPU_SCOPE)"
        held = self.around.gpus
        return tuple(one if one.gpu.uuid in held else GpuVerdict(one.gpu, "outside", beyond) for one in verdicts)

    def judge_for(self, request: Selection, claimed: Mapping[str, Holder]) -> tuple[GpuVerdict, ...]:
        """Return the verdicts for a request of another process, whose visible limit is unknown, as if no GPU were
        reserved."""
        return self._judge(request, claimed, self._rules_for_all)

    def _judge(
        self,
        request: Selection,
        claimed: Mapping[str, Holder],
        rules: Rules,
        visible_limit: VisibleLimit | None = None,
        gpus: Iterable[Gpu] | None = None,
        *,
        told: bool = False,
    ) -> tuple[GpuVerdict, ...]:
        """Judge GPUs. The reasons name the users of processes only if ``told``, which is for people."""
        if self._processes[0] is not self.snapshot:
            self._processes = self.snapshot, ByPid(_command_of), ByPid(procfs.family_of)
        _, commands, families = self._processes
        return judge(
            self.snapshot,
            request,
            claimed=claimed,
            visible_limit=visible_limit,
            own=self.own,
            explained=self.explained,
            describe=describe_process if told else commands.__getitem__,
            family_of=families.__getitem__,
            rules=rules,
            gpus=gpus,
        )


def pids_of_around(around: Entry) -> tuple[int, ...]:
    """Return the processes that are those of the claim around this process, which is a descendant of them."""
    here = not procfs.namespace_text(around.pidns or None)
    return (around.pid,) if around.pid and here else tuple(procfs.ancestors(os.getpid()))


def owner_of(around: Entry) -> str:
    namespace = procfs.namespace_text(around.pidns or None)
    return f"the claim of process {around.pid or '?'}{namespace and f' {namespace}'}"
