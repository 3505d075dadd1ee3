"""The host as one request sees it: the latest poll of the driver, and the verdicts for this request."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from ..coordination import socket_names as names
from ..coordination.leases import inner_name, lease_name
from ..devices import GpuVerdict
from ..errors import NoDriverError
from ..procfs import describe_process
from ..runtimes.visible_limit import visible_limit_of
from ..selection.choice import candidates
from ..selection.request import DEFAULT_RULES, Rules
from ..selection.verdicts import judge
from .nested import judged_inside, pids_of_outer

if TYPE_CHECKING:
    from ..coordination.leases import LeaseRecord
    from ..devices import Gpu, GpuFault, GpuRequest, HostSnapshot, LeaseHolder
    from ..drivers.base import Driver
    from ..runtimes.visible_devices import VisibleLimit
    from ..selection.verdicts import Describe


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
        driver: polled only while no lock is held; snapshot: its latest poll.
        request, fence: what is asked for, and the UUIDs to choose from (None: all).
        own: pids under which the driver shows this process.
        near: NUMA nodes of the CPUs that this process may use; None if it may use all CPUs.
        scope: the value of SAFE_GPU_SCOPE, "" if it is not set.
        rules: how GPUs are judged.
        unlisted: UUIDs of the GPUs on which this process has a context that the driver does not list.

    Attributes:
        outer: UUID -> record of the claim inside which this one is made; empty if there is none.
        next_poll: ``time.monotonic()`` value before which a waiter must not poll the driver again.
        faults: UUID -> note, of the GPUs on which a claim failed and none has worked since.
        failed: UUID -> reason, of the GPUs on which this very claim has failed; it does not try them again.
    """

    def __init__(
        self,
        driver: Driver,
        snapshot: HostSnapshot,
        request: GpuRequest,
        *,
        fence: VisibleLimit | None = None,
        own: Collection[int] = (),
        near: frozenset[int] | None = None,
        scope: str = "",
        rules: Rules = DEFAULT_RULES,
        unlisted: Collection[str] = (),
    ) -> None:
        self.driver = driver
        self.snapshot = snapshot if request.nb_gpus == 1 else driver.linked(snapshot)
        self.request = request
        self.fence = fence
        self.own = set(own)
        self.near = near
        self.scope = scope
        self.rules = rules
        self.unlisted = unlisted
        self.outer: Mapping[str, LeaseRecord] = {}
        self.next_poll = 0.0
        self.faults: Mapping[str, GpuFault] = {}
        self.failed: Mapping[str, str] = {}
        self._polled = time.monotonic()
        self._usable: tuple[HostSnapshot, list[Gpu]] | None = None
        self._unoccupied: tuple[HostSnapshot, dict[str, GpuVerdict]] | None = None
        self._described: tuple[HostSnapshot, Describe] = self.snapshot, cache(describe_process)

    @classmethod
    def of(cls, driver: Driver, snapshot: HostSnapshot, request: GpuRequest) -> HostView:
        """The view of this process, limited to the GPUs that its environment and CUDA allow.

        Raises:
            NoDriverError: the driver has no GPU. CudaInitializedError, UnsatisfiableRequestError: see ``fence_of`` and
            ``Rules.of``.
        """
        if not snapshot.gpus:
            raise NoDriverError(
                f"the driver ({driver.name}) works, but there is no GPU here: pass one into the container "
                "(docker --gpus), or try SAFE_GPU_DRIVER=simulated:dgx-a100",
                driver=driver.name,
            )
        fence = visible_limit_of(snapshot, request.nb_gpus, driver.runtime)
        own = _own_pids(snapshot)
        return cls(
            driver,
            snapshot,
            request,
            fence=fence,
            own=own,
            near=_near_nodes(driver),
            scope=os.environ.get("SAFE_GPU_SCOPE", ""),
            rules=Rules.of(os.environ),
            unlisted=_unlisted(driver, snapshot, own) if fence is not None and fence.frozen else (),
        )

    def poll(self) -> None:
        """Poll the driver for the whole host."""
        began = time.monotonic()
        snapshot = self.driver.snapshot()
        self.snapshot = snapshot if self.request.nb_gpus == 1 else self.driver.linked(snapshot)
        self._polled = now = time.monotonic()
        self.next_poll = now + max(_DRIVER_PAUSE, 9 * (now - began))

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
            possible = candidates(self.snapshot, self.request, self.fence, rules=self.rules)
            self._usable = self.snapshot, [gpu for gpu in possible if gpu.uuid not in self.failed]
        if self.outer:
            return [gpu for gpu in self._usable[1] if gpu.uuid in self.outer]
        return self._usable[1]

    @property
    def unoccupied(self) -> dict[str, GpuVerdict]:
        """UUID -> verdict of the usable GPUs that are free apart from leases, computed once for each poll."""
        if self._unoccupied is None or self._unoccupied[0] is not self.snapshot:
            free = {verdict.gpu.uuid: verdict for verdict in self.judge({}, self.usable) if verdict.free}
            self._unoccupied = self.snapshot, free
        return self._unoccupied[1]

    def prepare(self) -> None:
        """Judge the GPUs before host.lock is taken, for others wait meanwhile; not inside another claim, which is known
        only under the lock."""
        if not self.scope:
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

    def lease_name(self, uuid: str) -> str:
        """Name of the lease that this request takes for a GPU."""
        return inner_name(uuid) if self.outer else lease_name(uuid)

    def name(self, uuid: str) -> str:
        """The name that this request is to take for a GPU."""
        prefix = self.snapshot.names
        return names.inner_of(uuid, prefix) if self.outer else names.name_of(uuid, prefix)

    def judge(
        self, leased: Mapping[str, LeaseHolder], gpus: Iterable[Gpu] | None = None, *, fenced: bool = True
    ) -> tuple[GpuVerdict, ...]:
        """Which GPUs the request could have now, and why not the others.

        Args:
            leased: UUID -> holder, for GPUs that others hold. gpus: the GPUs to judge; None: all of the host.
            fenced: False judges without the fence.
        """
        verdicts = self._judge(self.request, leased, self.fence if fenced else None, gpus)
        if self.failed:
            why = self.failed
            verdicts = tuple(GpuVerdict(v.gpu, "busy", why[v.gpu.uuid]) if v.gpu.uuid in why else v for v in verdicts)
        return judged_inside(self.outer, verdicts) if self.outer else verdicts

    def judge_for(self, request: GpuRequest, leased: Mapping[str, LeaseHolder]) -> tuple[GpuVerdict, ...]:
        """The verdicts for a request of another process, whose fence is unknown."""
        return self._judge(request, leased, None)

    def _judge(
        self,
        request: GpuRequest,
        leased: Mapping[str, LeaseHolder],
        fence: VisibleLimit | None,
        gpus: Iterable[Gpu] | None = None,
    ) -> tuple[GpuVerdict, ...]:
        return judge(
            self.snapshot,
            request,
            leased=leased,
            fence=fence,
            own=self.own,
            explained=self.explained,
            describe=self._describe(),
            rules=self.rules,
            gpus=gpus,
        )

    def _describe(self) -> Describe:
        """Looks each process up once for each poll: a look judges the GPUs for several requests under host.lock."""
        if self._described[0] is not self.snapshot:
            self._described = self.snapshot, cache(describe_process)
        return self._described[1]

    def remember_own_pids(self) -> None:
        """Store the driver's pids of this process for its next claim."""
        _driver_pids[os.getpid()] = frozenset(self.own)


def _near_nodes(driver: Driver) -> frozenset[int] | None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) >= _online_cpus():
        return None
    from ..affinity.cpu_shares import nodes_of_cpus

    return nodes_of_cpus(cpus, driver)


@cache
def _online_cpus() -> int:
    return os.cpu_count() or 1


def _own_pids(snapshot: HostSnapshot) -> set[int]:
    """The pids under which the driver shows this process.

    A stored pid that the driver no longer shows is dropped, because another process may get it later.
    """
    pid = os.getpid()
    shown = {process.pid for gpu in snapshot.gpus for process in gpu.processes or ()}
    _driver_pids[pid] = _driver_pids.get(pid, frozenset()) & shown
    return {pid, *_driver_pids[pid]}


def _unlisted(driver: Driver, snapshot: HostSnapshot, own: Collection[int]) -> frozenset[str]:
    """UUIDs of the GPUs on which this process has a context that the driver does not list (a hidden process list)."""
    listed = {gpu.uuid for gpu in snapshot.gpus if any(process.pid in own for process in gpu.processes or ())}
    return driver.runtime.contexts() - listed
