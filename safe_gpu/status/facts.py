"""The state of a host as records, and the part of it that concerns one user or one vendor. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..gpus.devices import FIRST_MINUTE, Gpu, ProcessKind
from ..selection.verdicts import drawing

if TYPE_CHECKING:
    from ..gpus.windows import Window

# Version of the JSON document.
SCHEMA = 2

_QUEUE = (
    "position", "pid", "user", "nb_gpus", "share", "vendor", "since", "hold_for", "expected_start", "earliest_start",
    "job", "limit",
)  # fmt: skip

_CLAIM = ("pid", "uid", "user", "job", "command", "since", "until", "removable_by")

_MOST_WAITERS = 1000  # in the JSON document: any user can make more


@dataclass(frozen=True)
class ClaimStatus:
    """A claim and who made it; None means "not known".

    Attributes:
        pid: its process, or one that this has left behind; None if none can be seen from here.
        user: the owner of its entry.
        command: as /proc shows it; of a process that cannot be seen, as its entry says.
        job: the batch job, as its entry says.
        since: when it was claimed, in Unix seconds, as its entry says.
        token: the hash of the token that claims inside this claim carry; "" for none.
        stopped: the process is stopped or frozen, such as the processes of a suspended job.
        note: anything unusual about the holder, such as a process that has ended; else "".
        uid: the user id of ``user``; None: it is not known whom to ask about the claim.
        until: when the holder expects it to end, in Unix seconds.
        share: bytes of the GPU that it holds; None of a whole GPU.
        memory_used: bytes of it that its process and their descendants use; None of a whole GPU.
        elsewhere: whether another state directory has its entry, so that nothing more is known of it.
        removable_by: the user who can remove its entry, if it has no door that keeps its GPU without one; else None.
    """

    pid: int | None = None
    user: str | None = None
    job: str | None = None
    command: str | None = None
    since: float | None = None
    token: str = ""
    stopped: bool = False
    note: str = ""
    uid: int | None = None
    until: float | None = None
    share: int | None = None
    memory_used: int | None = None
    elsewhere: bool = False
    removable_by: str | None = None


@dataclass(frozen=True)
class ProcessStatus:
    """A process that the driver reports on a GPU.

    ``user`` and ``command`` are None if its pid is not of this PID namespace.
    """

    pid: int
    user: str | None
    command: str | None
    kind: str
    memory_used: int | None


@dataclass(frozen=True)
class GpuStatus:
    """One device. ``state`` and ``reason`` are as in :class:`~safe_gpu.gpus.devices.GpuVerdict`.

    Attributes:
        idle: claimed, and the driver shows no process of the claim on it that computes or draws.
        claim: None if there is none; of a shared GPU the oldest claim.
        shares: the claims that share it, the oldest first.
        share_free: bytes available to one more share; None if the GPU is not shared.
        inner: the claim inside ``claim``, if any.
        idle_for: for how many seconds it has shown no work while claimed, as far as looks tell; None if not known.
        idle_report: whether ``idle_for`` has reached the policy's ``idle_report_after`` for the user of the claim; None
            if the policy does not set it.
        fault: why it is taken last, if a claim failed on it in the last day; why it is not claimed again, if it
            is claimed and drained; else "".
        drained: whether an administrator has closed it to new claims.
        prefix: "amd:" or "nvidia:" on a host with GPUs of both, where an index alone is ambiguous; else "".
    """

    gpu: Gpu
    state: str
    idle: bool = False
    reason: str = ""
    claim: ClaimStatus | None = None
    inner: ClaimStatus | None = None
    processes: tuple[ProcessStatus, ...] = ()
    fault: str = ""
    idle_for: float | None = None
    idle_report: bool | None = None
    shares: tuple[ClaimStatus, ...] = ()
    share_free: int | None = None
    drained: bool = False
    prefix: str = ""

    @property
    def label(self) -> str:
        """The name of the GPU for people: ``3``, ``3:1``, or ``amd:3``."""
        return self.prefix + self.gpu.label

    def shown_state(self, now: float) -> str:
        """Return the word for the state that people see: ``state``, or a more exact one."""
        if self.state == "unusable" and self.drained:
            return "drained"
        if self.state != "claimed":
            return self.state
        if any(claim.removable_by for claim in (*self.claims, self.inner) if claim is not None):
            return "at risk"
        began = max((claim.since or now for claim in self.claims), default=now)
        if self.idle_report or (self.idle and now - began >= FIRST_MINUTE):
            return "idle"
        return "shared" if self.shares else "claimed"

    @property
    def users(self) -> list[ProcessStatus]:
        """The processes that compute there, and those that only draw if together they make it busy."""
        drawn = {process.pid for process in drawing(self.gpu, self.gpu.processes or ())}
        return [one for one in self.processes if one.kind != ProcessKind.GRAPHICS or one.pid in drawn]

    @property
    def claims(self) -> tuple[ClaimStatus, ...]:
        """All claims of it, except those inside others."""
        return self.shares or ((self.claim,) if self.claim is not None else ())


@dataclass(frozen=True)
class WaiterStatus:
    """One waiter; None means "not known".

    Attributes:
        position: its place among the waiters of this host, from 1.
        user: the owner of its ticket.
        since: since when it has waited, in Unix seconds.
        hold_for: for how many seconds it expects to hold its GPUs.
        expected_start: when it is expected to start, in Unix seconds.
        vendor: that of the GPUs, a key of the table of vendors.
        share: how many bytes of each GPU it wants; None for whole GPUs.
        job: the batch job, as its ticket says.
        limit: how many GPUs its user holds and may hold, if that is why it waits; else None.
        earliest_start: it probably does not start before that, in Unix seconds.
        turn: the number by which it stands in the queue, where users are served by turns.
        in_turn: how many GPUs its user holds, if by its turn it stands ahead of one who came earlier; else None.
    """

    position: int
    pid: int | None
    user: str | None
    nb_gpus: int | None
    since: float | None
    stopped: bool = False
    note: str = ""
    hold_for: float | None = None
    expected_start: float | None = None
    vendor: str | None = None
    share: int | None = None
    job: str | None = None
    limit: tuple[float, int] | None = None
    earliest_start: float | None = None
    turn: float | None = None
    in_turn: float | None = None


@dataclass(frozen=True)
class HostStatus:
    """The result of :func:`~safe_gpu.status.gather.gather`.

    Attributes:
        host: name of the host.
        driver: as in :class:`~safe_gpu.gpus.devices.HostSnapshot`; of two drivers "nvml, kfd".
        driver_version: the same of their versions.
        state_dir: the state directory.
        taken_at: Unix seconds.
        gpus: every device, in the driver's order, one vendor after the other.
        queue: the waiters, in order.
        warnings: sentences that say which facts are not known, and why.
        shift: a sentence, if the indices in CUDA_VISIBLE_DEVICES of this process no longer mean the GPUs of the claim
            around it; else "".
        doubt: as in :class:`~safe_gpu.gpus.devices.HostSnapshot`.
        max_gpus: how many GPUs each user who holds some or waits may hold, where the policy limits that.
        broken: sentences on the drivers that do not work, whose GPUs are missing here.
        ignored: sentences on the files of drained and reserved GPUs, and on entries, that do not count.
        windows: the times in which GPUs are reserved, those that have begun or begin within a day.
    """

    host: str
    driver: str
    driver_version: str
    state_dir: str
    taken_at: float
    gpus: tuple[GpuStatus, ...]
    queue: tuple[WaiterStatus, ...] = ()
    warnings: tuple[str, ...] = ()
    shift: str = ""
    doubt: str = ""
    broken: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    max_gpus: Mapping[str, int] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``status --json``; null means "not known".

        =============================  ==============================================================================
        schema                         2; it changes when a key changes its meaning or is removed, not when one is added
        host                           name of the host
        driver, driver_version         the driver that was polled (nvml, nvidia-smi, kfd, simulated:NAME); "" if
                                       unknown; "nvml, kfd" where there are GPUs of two vendors
        state_dir                      the state directory
        gpus[].index                   as nvidia-smi numbers them; a MIG instance has the index of its GPU; AMD GPUs
                                       are numbered apart
        gpus[].label                   for people: 3; 3:1 is a MIG instance; amd:3 on a host with GPUs of two vendors
        gpus[].vendor                  nvidia, amd or intel
        gpus[].uuid, name              as the driver reports them
        gpus[].pci_bus_id              as sysfs writes it: 0000:07:00.0
        gpus[].numa_node               number of its NUMA node
        gpus[].memory_total            bytes; memory_used too
        gpus[].utilization             percent
        gpus[].temperature             degrees Celsius
        gpus[].state                   free, claimed, busy (used without a claim), display (free, shared with the
                                       host's only display), unusable
        gpus[].state_shown             as in the table: state; for unusable also drained; for claimed also shared,
                                       idle, at risk
        gpus[].idle                    claimed, and no process of the claim computes or draws on it
        gpus[].idle_for                for how many seconds a claimed GPU has shown no work, as far as looks tell
        gpus[].reason                  why it is not free, or why it is taken last, a sentence; else ""
        gpus[].claim                   null if nobody has claimed it, else:
        gpus[].claim.pid               the process that claimed, or one that it left behind; null for one that cannot be
                                       seen from here, such as one outside this container
        gpus[].claim.uid, user         the owner of its entry; null for one whom this user namespace does not know, and
                                       for a claim of another state directory, of which nothing else is known either
        gpus[].claim.command           its program and script
        gpus[].claim.job               the batch job, such as sge:1234.5, as its entry says
        gpus[].claim.since, until      Unix seconds: claimed at; expected to end at; as its entry says
        gpus[].claim.removable_by      the user who can remove its entry, if nothing else keeps others off the GPU: no
                                       door that can be seen from here; else null
        gpus[].shares[]                the claims that share the GPU, the oldest first, which is gpus[].claim: its keys,
                                       and share and memory_used in bytes
        gpus[].share_free              bytes available to one more share; null if the GPU is not shared
        gpus[].processes[]             pid, user, command, kind (compute, graphics, mps), memory_used in bytes
        queue                          the first 1,000 waiters
        queue[].position               1 for the first waiter of this host
        queue[].pid                    the waiting process; null for one that cannot be seen from here
        queue[].user                   the owner of its ticket; null for one whom this user namespace does not know
        queue[].nb_gpus, since         the number of GPUs that it waits for; since when, in Unix seconds
        queue[].vendor                 nvidia, amd or intel
        queue[].share                  bytes of each GPU; null for whole GPUs
        queue[].hold_for               for how many seconds it expects to hold them
        queue[].expected_start         when it is expected to start, in Unix seconds
        queue[].earliest_start         it probably does not start before that, in Unix seconds
        queue[].job                    the batch job, such as sge:1234.5, as its ticket says
        queue[].limit                  [held, most]: GPUs that its user holds and may hold, if that is why it waits
        queue[].turn                   by which it stands in the queue, where users are served by turns
        queue[].in_turn                GPUs that its user holds, if by its turn it is ahead of one who came earlier
        windows[]                      when GPUs are reserved, from a day before it begins: from and until in Unix
                                       seconds, gpus (UUIDs), for (user:NAME, group:NAME; null is root alone), by (who
                                       reserved them), reason
        warnings[]                     sentences on what is missing or not known here
        =============================  ==============================================================================
        """
        return {
            "schema": SCHEMA,
            "host": self.host,
            "driver": self.driver,
            "driver_version": self.driver_version,
            "state_dir": self.state_dir,
            "gpus": [_gpu_dict(one, self.taken_at) for one in self.gpus],
            "queue": [_waiter_dict(one) for one in self.queue[:_MOST_WAITERS]],
            "windows": [_window_dict(one) for one in self.windows],
            "warnings": [*filter(None, [self.doubt]), *self.broken, *self.ignored, *self.warnings],
        }


def _window_dict(one: Window) -> dict[str, Any]:
    facts = {"from": one.begin, "until": one.end, "gpus": [*one.gpus], "for": one.whom or None}
    return facts | {"by": one.by, "reason": one.reason}


def _waiter_dict(one: WaiterStatus) -> dict[str, Any]:
    turns = {name: getattr(one, name) for name in ("turn", "in_turn")} if one.turn is not None else {}
    return {name: getattr(one, name) for name in _QUEUE} | turns


def _gpu_dict(one: GpuStatus, now: float) -> dict[str, Any]:
    facts = "index vendor uuid name pci_bus_id numa_node memory_total memory_used utilization temperature".split()
    claim = one.claim
    return {
        "label": one.label,
        **{name: getattr(one.gpu, name) for name in facts},
        "state": one.state,
        "state_shown": one.shown_state(now),
        "idle": one.idle,
        "idle_for": one.idle_for,
        "reason": one.reason,
        "claim": claim and {name: getattr(claim, name) for name in _CLAIM},
        "shares": [{name: getattr(each, name) for name in (*_CLAIM, "share", "memory_used")} for each in one.shares],
        "share_free": one.share_free,
        "processes": [asdict(process) for process in one.processes],
    }


FREE = ("free", "display")


def of_user(status: HostStatus, user: str) -> HostStatus:
    """Return the status with only the GPUs that a user has claimed or computes on, and that user's waiters."""
    return replace(
        status,
        gpus=tuple(one for one in status.gpus if _concerns(one, user)),
        queue=tuple(one for one in status.queue if one.user == user),
    )


def of_vendor(status: HostStatus, vendor: str) -> HostStatus:
    """Return the status with only the GPUs of a vendor, named by their indices alone, and the waiters for them."""
    return replace(
        status,
        gpus=tuple(replace(one, prefix="") for one in status.gpus if one.gpu.vendor == vendor),
        queue=tuple(one for one in status.queue if one.vendor in (vendor, None)),
    )


def _concerns(one: GpuStatus, user: str) -> bool:
    claims = [claim.user for claim in (*one.claims, one.inner) if claim is not None]
    return user in claims or any(process.user == user for process in one.users)


def free_labels(status: HostStatus) -> list[str]:
    """Return the GPUs that could be claimed now, as ``0``, ``3:1``, or ``amd:0`` on a host with GPUs of two vendors.

    The list is empty if the claims are not known.
    """
    if status.warnings:
        return []
    return [one.label for one in status.gpus if one.state in FREE]
