"""The host as one request sees it: the latest poll, the verdicts, and the claim around this one.

The token in ``SAFE_GPU_SCOPE`` is valid only for GPUs whose lease is held by a process of this user and whose record
contains the hash of that token. The variable also reaches processes outside that claim (``qsub -V``, ssh, tmux), so it
has no other meaning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from .. import procfs
from ..coordination import socket_names as names
from ..coordination.holders import leases_of_this_user, socket_of_this_user
from ..coordination.leases import (
    LeaseRecord,
    drained_gpus,
    holder_of_slots,
    inner_name,
    lease_name,
    may_be_held,
    read_record,
    recorded_slots,
    slot_name,
)
from ..coordination.locks import LockedHost, opened
from ..devices import MOST_SHARERS, Gpu, GpuVerdict, HostSnapshot
from ..errors import NoDriverError, NotEnoughGpusError, UnsatisfiableRequestError
from ..procfs import describe_process
from ..runtimes.visible_limit import visible_limit_of
from ..selection.choice import candidates
from ..selection.request import DEFAULT_RULES, Rules, Selection
from ..selection.sharing import strangers
from ..selection.verdicts import judge
from ..text import format_bytes, in_brackets, plural
from ..vendors import FIRST, VENDORS

if TYPE_CHECKING:
    from ..coordination.files import StateDir
    from ..devices import GpuFault, GpuProcess, LeaseHolder
    from ..drivers.base import Driver
    from ..runtimes.visible_devices import VisibleLimit


# Claims inside claims: find the outer claim by its token, and refuse waits of a child for its own parent.


def outer_claim(host: LockedHost, snapshot: HostSnapshot, token: str) -> dict[str, LeaseRecord]:
    """Return UUID -> record of this user's claim with this token, for each lease that it holds; empty if there is none.

    If a lease file is not in this state directory, the name of the claim decides. Its record is then that of another
    GPU of the claim, or has pid 0.
    """
    secret = names.digest(token)
    carriers = {}
    for gpu in snapshot.gpus:
        for name in (lease_name(gpu.uuid), *(slot_name(gpu.uuid, slot) for slot in range(MOST_SHARERS))):
            record = read_record(host.leases, name)
            if record is not None and record.token == secret and may_be_held(host, name):
                carriers[name] = gpu.uuid, record
    ours = leases_of_this_user(host.leases, {name: record.uid for name, (_, record) in carriers.items()})
    found = {uuid: record for name, (uuid, record) in carriers.items() if name in ours}
    if not found or any(uuid not in found for record in found.values() for uuid in record.gpus):
        sockets = names.sockets()
        record = next(iter(found.values()), _UNKNOWN)
        for gpu in snapshot.gpus:
            for slot in (None, *range(MOST_SHARERS)):
                inode = sockets.get(names.scope_of(gpu.uuid, token, snapshot.name_prefix, slot))
                if inode is not None and gpu.uuid not in found and socket_of_this_user(inode):
                    found[gpu.uuid] = record._replace(slot=slot)
    return found


_UNKNOWN = LeaseRecord(0, None, -1, "", "", None, None, (), 0.0, "")


def end_of_outer(outer: Mapping[str, LeaseRecord]) -> float | None:
    """Return when the outer claim will probably end, in Unix seconds; None if that is not known or there is none."""
    return next((record.until for record in outer.values() if record.until is not None), None)


def pids_of_outer(record: LeaseRecord) -> tuple[int, ...]:
    """Return the processes that are the outer claim's own: who inherited its token has them for parents."""
    return (record.pid,) if record.pid and record.here else tuple(procfs.ancestors(os.getpid()))


def check_possible_inside(view: HostView, *, delegate: bool) -> None:
    """Refuse a request that the outer claim can never satisfy.

    Args:
        delegate: whether the inner claim asks to delegate too.

    Raises:
        UnsatisfiableRequestError: too few usable GPUs, or ``delegate``.
    """
    if delegate:
        raise UnsatisfiableRequestError(
            "delegate=True is not possible inside another claim (SAFE_GPU_SCOPE): one level only; "
            + (_ONCE_FOR_ALL_RANKS if "LOCAL_RANK" in os.environ else "claim without it"),
            value=True,
        )
    outer, request = view.outer, view.request
    shares = [record.share for record in outer.values() if record.share is not None]
    if request.share is not None and shares and request.share > min(shares):
        raise UnsatisfiableRequestError(
            f"{format_bytes(request.share)} of each GPU asked for inside {_whose(outer)}, which has a share of "
            f"{format_bytes(min(shares))}: ask for less, or make the outer share larger",
            value=request.share,
        )
    usable = {gpu.uuid for gpu in view.usable}
    if len(usable) < request.nb_gpus:
        reasons = (v for v in view.judge({}) if v.gpu.uuid in outer and v.gpu.uuid not in usable)
        listed = in_brackets("; ".join(f"GPU {verdict.gpu.label}: {verdict.reason}" for verdict in reasons))
        way_out = "ask for others" if listed else "make the outer claim larger"
        raise UnsatisfiableRequestError(
            f"{plural(request.nb_gpus)} asked for inside {_whose(outer)}, which can give "
            f"{len(usable)} of its {len(outer)}{listed}: ask for fewer, or {way_out}",
            value=request.nb_gpus,
        )


# For a rank whose script was started again by the first rank (Lightning) or by a launcher in a process that claims.
_ONCE_FOR_ALL_RANKS = (
    'this is a rank that its program has started, so claim once for all: `if "LOCAL_RANK" not in os.environ: '
    "safe_gpu.claim_gpus(...)`, and let the ranks use those GPUs without claiming"
)


def judged_inside(outer: Mapping[str, LeaseRecord], verdicts: Iterable[GpuVerdict]) -> tuple[GpuVerdict, ...]:
    """Return the verdicts, in which every GPU that the outer claim does not hold has the state ``outside``."""
    beyond = f"outside {_whose(outer)}, inside which this one is made (SAFE_GPU_SCOPE)"
    return tuple(v if v.gpu.uuid in outer else GpuVerdict(v.gpu, "outside", beyond) for v in verdicts)


def _whose(outer: Mapping[str, LeaseRecord]) -> str:
    record = next(iter(outer.values()))
    place = procfs.place_of(record.pidns)
    return f"the claim of process {record.pid}{place and f' {place}'}" if record.pid else "the outer claim"


def ancestor_may_hold(gpus: Iterable[Gpu], *, inner: bool) -> bool:
    """Return whether the record of one of these leases names this process or one of its ancestors.

    A record alone does not prove that the lease is held. Reading records needs no lock.
    """
    family = {os.getpid(), *procfs.ancestors(os.getpid())}
    with opened("leases") as leases:
        files = (inner_name(gpu.uuid) if inner else lease_name(gpu.uuid) for gpu in gpus)
        records = (read_record(leases, name) for name in files)
        return any(record is not None and record.here and record.pid in family for record in records)


def refuse_gpus_of_ancestors(
    verdicts: Iterable[GpuVerdict], usable: Collection[str], request: Selection, *, inner: bool
) -> None:
    """Refuse to wait for GPUs that an ancestor holds: if the ancestor waits for this process, neither ever ends.

    Args:
        verdicts: with the holders that the kernel names: anybody may write a parent of all (process 1) into a record.
        usable: UUIDs that the request could ever get.
        inner: whether the claim is made inside another one.

    Raises:
        NotEnoughGpusError: without the GPUs of this process and its ancestors there are too few.
    """
    family = {pid: procfs.start_time(pid) for pid in (os.getpid(), *procfs.ancestors(os.getpid()))}
    all_verdicts = tuple(verdicts)
    held = [
        verdict
        for verdict in all_verdicts
        if verdict.state == "claimed"
        and verdict.pid in family
        and verdict.holder is not None
        and verdict.holder.start is not None
        and verdict.holder.start == family[verdict.pid]
    ]
    if not held or len(set(usable) - {verdict.gpu.uuid for verdict in held}) >= request.nb_gpus:
        return
    labels = ", ".join(verdict.gpu.label for verdict in held)
    who = "this process itself" if held[0].pid == os.getpid() else f"process {held[0].pid}, a parent of this one,"
    way_out = (
        "claims inside claims go one level deep, so use its GPUs without claiming"
        if inner
        else "claim there with delegate=True (or start this under `safe-gpu run`) so that its children may claim from "
        "it, or use its GPUs without claiming"
    )
    if "LOCAL_RANK" in os.environ and held[0].pid != os.getpid():
        way_out = _ONCE_FOR_ALL_RANKS
    raise NotEnoughGpusError(f"{who} holds GPU {labels}: {way_out}", nb_gpus=request.nb_gpus, verdicts=all_verdicts)


# The host as one request sees it: the latest poll of the driver, and the verdicts for this request.


# If the latest poll of the whole host is older than this, in seconds, the second poll is of the whole host again.
_RECENT = 5.0
# Minimum pause between two polls of a waiter, in seconds. If polls are slow they take at most a tenth of the time.
_DRIVER_PAUSE = 0.100

# Pid of this process or of one that it was forked from -> the pids under which the driver shows that process. In a
# container the driver may show host pids. The first placeholder reveals them. A framework may keep its context after
# the release, and the next claim must then recognise this process on the GPU.
_driver_pids: dict[int, frozenset[int]] = {}


class HostView:
    """The host as one request sees it. Each poll replaces ``snapshot``, from which the verdicts are computed.

    Args:
        driver: polled only while no lock is held.
        snapshot: its latest poll.
        request, visible_limit: what is asked for, and the UUIDs to choose from (None: all).
        own: pids under which the driver shows this process.
        near: NUMA nodes of the CPUs that this process may use; None if it may use all CPUs.
        scope: the value of SAFE_GPU_SCOPE, "" if it is not set.
        rules: how GPUs are judged.
        unlisted: UUIDs of the GPUs on which this process has a context that the driver does not list.

    Attributes:
        outer: UUID -> record of the claim inside which this one is made; empty if there is none.
        needs: methods of the driver that complete each poll, for this request, to choose well, and for
            those of others that it must judge.
        next_poll: ``time.monotonic()`` value before which a waiter must not poll the driver again.
        has_waited: whether this claim has waited since the latest poll. Nobody in the queue is passed by that poll any
            more: the processes that it lists may have ended.
        faults: UUID -> note, of the GPUs on which a claim failed and none has worked since.
        failed: UUID -> reason, of the GPUs on which this very claim has failed; it does not try them again.
        shared: UUID -> the claims that share the GPU, as far as this claim may share it with them.
    """

    def __init__(
        self,
        driver: Driver,
        snapshot: HostSnapshot,
        request: Selection,
        *,
        visible_limit: VisibleLimit | None = None,
        own: Collection[int] = (),
        near: frozenset[int] | None = None,
        scope: str = "",
        rules: Rules = DEFAULT_RULES,
        unlisted: Collection[str] = (),
    ) -> None:
        self.driver = driver
        self.needs = request.needs | ({"linked"} if request.several else frozenset())
        self.request = request.resolved(snapshot)
        self.rules = rules
        self._drained_by_root: Mapping[str, str] = {}
        self._drained_here: Mapping[str, str] = {}
        self.snapshot = self._completed(snapshot)
        self.visible_limit = visible_limit
        self.own = set(own)
        self.near = near
        self.scope = scope
        self.unlisted = unlisted
        self.outer: Mapping[str, LeaseRecord] = {}
        self.next_poll = 0.0
        self.has_waited = False
        self.faults: Mapping[str, GpuFault] = {}
        self.failed: Mapping[str, str] = {}
        self.shared: dict[str, LeaseHolder] = {}
        self._polled = time.monotonic()
        self._usable: tuple[HostSnapshot, list[Gpu]] | None = None
        self._unoccupied: tuple[HostSnapshot, dict[str, LeaseHolder], dict[str, GpuVerdict]] | None = None
        self._processes = self.snapshot, _Answers(describe_process), _Answers(procfs.family_of)

    @classmethod
    def of(cls, driver: Driver, snapshot: HostSnapshot, request: Selection) -> HostView:
        """Return the view of this process, limited to the GPUs that its environment and CUDA allow.

        Raises:
            NoDriverError: the driver has no GPU. CudaInitializedError, UnsatisfiableRequestError: see
            ``visible_limit_of`` and ``Rules.of``.
        """
        if not snapshot.gpus:
            vendor = next((one for one in VENDORS.values() if driver.name in one.drivers), VENDORS[FIRST])
            raise NoDriverError(
                f"the driver ({driver.name}) works, but there is no GPU here: {vendor.pass_in}; to try safe_gpu "
                f"without a GPU, set SAFE_GPU_DRIVER=simulated:{vendor.preset}",
                driver=driver.name,
            )
        visible_limit = visible_limit_of(snapshot, request.nb_gpus, driver.runtime)
        own = _own_pids(snapshot)
        return cls(
            driver,
            snapshot,
            request,
            visible_limit=visible_limit,
            own=own,
            near=_near_nodes(driver),
            scope=os.environ.get("SAFE_GPU_SCOPE", ""),
            rules=Rules.of(os.environ),
            unlisted=_unlisted(driver, snapshot, own) if visible_limit is not None and visible_limit.frozen else (),
        )

    def poll(self) -> None:
        """Poll the driver for the whole host."""
        began = time.monotonic()
        self.snapshot = self._completed(self.driver.snapshot())
        self._polled = now = time.monotonic()
        self.has_waited = False
        self.next_poll = now + max(_DRIVER_PAUSE, 9 * (now - began))

    def _completed(self, snapshot: HostSnapshot) -> HostSnapshot:
        for method in sorted(self.needs):
            snapshot = getattr(self.driver, method)(snapshot)
        self._see_drained(drained_gpus(by_root=True), self._drained_here)
        return snapshot

    def see_drained(self, host: LockedHost) -> None:
        """Read which GPUs the owner of the state directory has drained, if any."""
        if host.drained or self._drained_here:
            self._see_drained(self._drained_by_root, drained_gpus(by_root=False))

    def _see_drained(self, by_root: Mapping[str, str], here: Mapping[str, str]) -> None:
        if (by_root, here) != (self._drained_by_root, self._drained_here):
            self._drained_by_root, self._drained_here = by_root, here
            self.rules = self.rules._replace(drained={**here, **by_root})
            self._unoccupied = None

    def poll_again(self, gpus: Sequence[Gpu]) -> None:
        """Poll the driver for these GPUs only, or for the whole host if the latest poll of it is old."""
        if self.age > _RECENT:
            self.poll()
        else:
            self.snapshot = self.snapshot.updated(self.driver.usage(gpus))

    @property
    def age(self) -> float:
        """Seconds since the latest poll of the whole host."""
        return time.monotonic() - self._polled

    @property
    def usable(self) -> list[Gpu]:
        """The GPUs that the request could ever get, whether they are free or not."""
        if self._usable is None or self._usable[0] is not self.snapshot:
            possible = candidates(self.snapshot, self.request, self.visible_limit, rules=self.rules)
            self._usable = self.snapshot, [gpu for gpu in possible if gpu.uuid not in self.failed]
        if self.outer:
            return [gpu for gpu in self._usable[1] if gpu.uuid in self.outer]
        return self._usable[1]

    @property
    def wanted(self) -> Iterator[str]:
        """UUIDs of the GPUs that the request could ever use, those too that the driver does not reach now."""
        possible = candidates(self.snapshot, self.request, self.visible_limit, rules=self.rules, lost=True)
        return (
            one.uuid for one in possible if one.uuid not in self.failed and (not self.outer or one.uuid in self.outer)
        )

    @property
    def effective(self) -> Selection:
        """The request as it is judged. Inside another claim it gets all that this one holds of a GPU."""
        return self.request.whole if self.outer else self.request

    @property
    def share(self) -> int | None:
        """Bytes of each GPU that the claim is to hold; None if it holds all of it, or all that the outer claim has."""
        share = self.effective.share
        return None if share is None or self.snapshot.shared_display else share

    def slot(self, uuid: str) -> int | None:
        """Return the slot of the outer claim on a GPU; None if it has a whole GPU, or there is none."""
        return self.outer[uuid].slot if uuid in self.outer else None

    def see_sharers(self, leases: StateDir, gpus: Iterable[Gpu] | None = None) -> None:
        """Read who shares these GPUs (None: the usable ones), where this claim may share them. No lock is taken."""
        if self.share is None and not any(record.slot is not None for record in self.outer.values()):
            return
        files = leases.few_names()
        slots = {gpu.uuid: recorded_slots(leases, gpu.uuid, files) for gpu in (gpus or self.usable)}
        others = {
            uuid: holder_of_slots(
                record for record in found.values() if not (record.here and record.pid == os.getpid())
            )
            for uuid, found in slots.items()
        }
        self.shared = {uuid: holder for uuid, holder in others.items() if holder is not None}

    def strangers(self, leases: StateDir, gpu: Gpu, processes: list[GpuProcess]) -> list[GpuProcess]:
        """Return those of these processes on a GPU of this claim that are of no claim that shares it."""
        holder = holder_of_slots(recorded_slots(leases, gpu.uuid).values())
        return strangers(processes, holder.sharers if holder else (), procfs.family_of)

    @property
    def unoccupied(self) -> dict[str, GpuVerdict]:
        """UUID -> verdict of the usable GPUs that are free apart from leases, computed once for each poll, and again
        when others have come to share them."""
        if self._unoccupied is None or self._unoccupied[0] is not self.snapshot or self._unoccupied[1] != self.shared:
            free = {verdict.gpu.uuid: verdict for verdict in self.judge({}, self.usable) if verdict.free}
            self._unoccupied = self.snapshot, dict(self.shared), free
        return self._unoccupied[2]

    def prepare(self) -> None:
        """Judge the GPUs before host.lock is taken, since others wait meanwhile.

        Not inside another claim, which is known only under the lock.
        """
        if not self.scope:
            if self.share is not None:
                with opened("leases") as leases:
                    self.see_sharers(leases)
            self.unoccupied  # noqa: B018 - it is kept until the next poll

    @property
    def explained(self) -> dict[str, tuple[int, ...]]:
        """UUID -> driver pids on that GPU that belong to the outer claim and do not make the GPU busy.

        The GPUs of ``unlisted`` stand there too, without pids: their memory is this process's own.
        """
        pids: dict[str, tuple[int, ...]] = dict.fromkeys(self.unlisted, ())
        pids.update((uuid, pids_of_outer(record)) for uuid, record in self.outer.items())
        return pids

    def give_up(self, failed: Mapping[str, str]) -> None:
        """Do not try these GPUs (UUID -> why) again in this claim, and poll the driver for the others."""
        self.failed = {**self.failed, **failed}
        self.poll()

    def leave_scope(self) -> None:
        """Ask for GPUs as outside of every claim, since the outer claim has ended."""
        self.scope, self._unoccupied = "", None

    def lease_name(self, uuid: str) -> str:
        """Return the name of the lease that this request takes for a GPU; a claim that shares it locks that lease
        shared."""
        slot = self.slot(uuid)
        if slot is not None:
            return slot_name(uuid, slot, inner=True)
        return inner_name(uuid) if self.outer else lease_name(uuid)

    def name(self, uuid: str) -> str:
        """Return the name that this request is to take for a GPU."""
        prefix, slot = self.snapshot.name_prefix, self.slot(uuid)
        if slot is not None:
            return names.slot_of(uuid, slot, prefix, inner=True)
        return names.inner_of(uuid, prefix) if self.outer else names.name_of(uuid, prefix)

    def judge(
        self, leased: Mapping[str, LeaseHolder], gpus: Iterable[Gpu] | None = None, *, fenced: bool = True
    ) -> tuple[GpuVerdict, ...]:
        """Return which GPUs the request could have now, and why not the others.

        Args:
            leased: UUID -> holder, for GPUs that others hold.
            gpus: the GPUs to judge; None: all of the host.
            fenced: False judges without the visible limit.
        """
        leased = {**self.shared, **leased}
        verdicts = self._judge(self.effective, leased, self.visible_limit if fenced else None, gpus)
        if self.failed:
            why = self.failed
            verdicts = tuple(GpuVerdict(v.gpu, "busy", why[v.gpu.uuid]) if v.gpu.uuid in why else v for v in verdicts)
        return judged_inside(self.outer, verdicts) if self.outer else verdicts

    def judge_for(self, request: Selection, leased: Mapping[str, LeaseHolder]) -> tuple[GpuVerdict, ...]:
        """Return the verdicts for a request of another process, whose visible limit is unknown."""
        return self._judge(request, leased, None)

    def _judge(
        self,
        request: Selection,
        leased: Mapping[str, LeaseHolder],
        visible_limit: VisibleLimit | None,
        gpus: Iterable[Gpu] | None = None,
    ) -> tuple[GpuVerdict, ...]:
        if self._processes[0] is not self.snapshot:
            self._processes = self.snapshot, _Answers(describe_process), _Answers(procfs.family_of)
        _, described, families = self._processes
        return judge(
            self.snapshot,
            request,
            leased=leased,
            visible_limit=visible_limit,
            own=self.own,
            explained=self.explained,
            describe=described.__getitem__,
            family_of=families.__getitem__,
            rules=self.rules,
            gpus=gpus,
        )

    def remember_own_pids(self) -> None:
        """Store the driver's pids of this process for its next claim."""
        _driver_pids[os.getpid()] = frozenset(self.own)


class _Answers(dict[int, Any]):
    """What a function says of each pid, asked once for each poll: a look judges the GPUs for several requests under
    host.lock. A :func:`functools.cache` takes longer to make than to use here."""

    def __init__(self, ask: Callable[[int], object]) -> None:
        self._ask = ask

    def __missing__(self, pid: int) -> object:
        return self.setdefault(pid, self._ask(pid))


_cpu_count = cache(os.cpu_count)  # reads a file of /sys


def _near_nodes(driver: Driver) -> frozenset[int] | None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) >= (_cpu_count() or 1):
        return None
    from ..affinity.cpu_shares import nodes_of_cpus

    return nodes_of_cpus(cpus, driver)


def _own_pids(snapshot: HostSnapshot) -> set[int]:
    """Return the pids under which the driver shows this process.

    A stored pid that the driver no longer shows is dropped, because another process may get it later.
    """
    pid = os.getpid()
    shown = {process.pid for gpu in snapshot.gpus for process in gpu.processes or ()}
    _driver_pids[pid] = _driver_pids.get(pid, frozenset()) & shown
    return {pid, *_driver_pids[pid]}


def _unlisted(driver: Driver, snapshot: HostSnapshot, own: Collection[int]) -> frozenset[str]:
    """Return the UUIDs of the GPUs on which this process has a context that the driver does not list (a hidden process
    list)."""
    listed = {gpu.uuid for gpu in snapshot.gpus if any(process.pid in own for process in gpu.processes or ())}
    return driver.runtime.contexts() - listed
