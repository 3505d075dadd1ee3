"""The state of a host as records, and the part of it that concerns one user or one vendor. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..coordination.looks import Sight
from ..gpus.devices import FIRST_MINUTE, Gpu, Holder, ProcessKind
from ..gpus.vendors import VENDORS
from ..gpus.windows import Window
from ..selection.verdicts import drawing
from ..wording.text import format_bytes, not_before, plural, short_age

# Version of the JSON document.
SCHEMA = 2

_MOST_WAITERS = 1000  # in the JSON document: any user can make more


@dataclass(frozen=True)
class ProcessStatus:
    """A process that the driver reports on a GPU.

    ``user`` and ``command`` are None if its pid is not of this PID namespace. ``ended``: it has ended, and the driver
    keeps its memory.
    """

    pid: int
    user: str | None
    command: str | None
    kind: str
    memory_used: int | None
    ended: bool = False


@dataclass(frozen=True)
class BesideStatus:
    """A process that uses a GPU beside the claims of it, or whose own claim holds other GPUs.

    ``user`` is None in a container, where it is not known who has started it. ``text`` is a clause that tells all.
    """

    pid: int
    user: str | None
    command: str | None
    memory_used: int | None
    text: str


@dataclass(frozen=True)
class GpuStatus:
    """One device. ``state`` and ``reason`` are as in :class:`~safe_gpu.gpus.devices.GpuVerdict`.

    Attributes:
        idle: claimed, and no process of the claim uses it.
        claim: who holds it, or the claims that share it; None if there is none.
        share_free: bytes available to one more share; None if the GPU is not shared.
        inside: the claim inside ``claim``, if any.
        idle_for: for how many seconds it has shown no work while claimed, as far as looks tell; None if not known.
        idle_report_after: that of the policy for the user of the claim, ``math.inf`` for never; None if the policy does
            not set it.
        fault: why it is taken last, if a claim failed on it lately or it seems ill; why it is not claimed again, if it
            is claimed and drained; else "".
        drained: whether an administrator has closed it to new claims.
        sights: what this look sees of each of ``claims``, in their order.
        beside: the processes that use it beside its claims, and those whose claim holds other GPUs, that with the most
            memory first.
        prefix: "amd:" or "nvidia:" on a host with GPUs of both, where an index alone is ambiguous; else "".
    """

    gpu: Gpu
    state: str
    idle: bool = False
    reason: str = ""
    claim: Holder | None = None
    inside: Holder | None = None
    processes: tuple[ProcessStatus, ...] = ()
    fault: str = ""
    idle_for: float | None = None
    idle_report_after: float | None = None
    share_free: int | None = None
    drained: bool = False
    sights: tuple[Sight, ...] = ()
    prefix: str = ""
    beside: tuple[BesideStatus, ...] = ()

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
        if any(claim.removable_by for claim in self.holders):
            return "at risk"
        if self.idle_report or (self.idle and now - self._last_began(now) >= FIRST_MINUTE):
            return "idle"
        if self.shares:
            return "shared"
        return "claimed"

    def _last_began(self, now: float) -> float:
        """Return when the youngest claim began; now if that of one is not known."""
        return max((claim.since or now for claim in self.claims), default=now)

    @property
    def idle_report(self) -> bool | None:
        """Whether ``idle_for`` has reached ``idle_report_after``; None if the policy does not set that."""
        if self.idle_report_after is None:
            return None
        return (self.idle_for or 0.0) >= self.idle_report_after

    @property
    def users(self) -> list[ProcessStatus]:
        """The processes that compute there, and those that only draw if together they make it busy."""
        drawn = {process.pid for process in drawing(self.gpu, self.gpu.processes or ())}
        return [one for one in self.processes if one.kind != ProcessKind.GRAPHICS or one.pid in drawn]

    @property
    def shares(self) -> tuple[Holder, ...]:
        """The claims that share it, the oldest first."""
        if self.claim is None:
            return ()
        return self.claim.sharers

    @property
    def claims(self) -> tuple[Holder, ...]:
        """All claims of it, except those inside others."""
        if self.claim is None:
            return ()
        return self.claim.each

    @property
    def holders(self) -> tuple[Holder, ...]:
        """All claims of it, with the one inside another."""
        if self.inside is None:
            return self.claims
        return (*self.claims, self.inside)

    @property
    def pieces(self) -> tuple[Holder, ...]:
        """All claims of it, if there are several that do not share it, such as those of pieces that are gone; else
        none. The first one is ``claim``."""
        if self.claim is None or not self.claim.others:
            return ()
        return self.claims

    @property
    def gone(self) -> tuple[str, ...]:
        """The names of pieces of it that its claims hold and the driver does not show."""
        names: list[str] = []
        for claim in self.claims:
            if claim.held_as is not None:
                names += claim.held_as.gone
        return tuple(names)


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

    def wants(self, of_two_vendors: bool) -> str:
        """Return ``2 GPUs``, or ``2 AMD GPUs`` on a host with GPUs of two vendors."""
        if self.nb_gpus is None:
            return "?"
        thing = "GPU"
        if of_two_vendors and self.vendor:
            thing = f"{VENDORS[self.vendor].title} GPU"
        gpus = plural(self.nb_gpus, thing)
        if self.share is None:
            return gpus
        return f"{format_bytes(self.share)} of {gpus}"

    def starts(self, now: float) -> str:
        """Return ``in 20m``, ``now`` if the GPUs are free or overdue, ``probably not before 14:20`` if some end is
        unknown, and ``at limit (1 of 1)`` if that is in the way."""
        at_limit = self._at_limit()
        if self.expected_start is None:
            return at_limit or not_before(self.earliest_start, now) or "?"
        start = "now"
        if self.expected_start >= now + 1:
            start = f"in {short_age(self.expected_start - now)}"
        if at_limit:
            return f"{start}, {at_limit}"
        return start

    def _at_limit(self) -> str:
        if self.limit is None:
            return ""
        held, most = self.limit
        return f"at limit ({held:g} of {most})"


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
        """Return the document of ``status --json``, whose keys are in README.md; None means "not known"."""
        warnings = [self.doubt, *self.broken, *self.ignored, *self.warnings]
        return {
            "schema": SCHEMA,
            "host": self.host,
            "driver": self.driver,
            "driver_version": self.driver_version,
            "state_dir": self.state_dir,
            "gpus": [_gpu_dict(one, self.taken_at) for one in self.gpus],
            "queue": [_waiter_dict(one) for one in self.queue[:_MOST_WAITERS]],
            "windows": [_window_dict(one) for one in self.windows],
            "warnings": [warning for warning in warnings if warning],
        }


def _window_dict(one: Window) -> dict[str, Any]:
    return {
        "from": one.begin,
        "until": one.end,
        "gpus": list(one.gpus),
        "for": one.whom or None,
        "by": one.by,
        "reason": one.reason,
    }


def _waiter_dict(one: WaiterStatus) -> dict[str, Any]:
    facts = asdict(one)
    del facts["stopped"]
    del facts["note"]
    if one.turn is None:
        del facts["turn"]
    return facts


def _claim_dict(one: Holder) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "pid": one.pid,
        "uid": one.uid,
        "user": one.user,
        "job": one.job,
        "command": one.command,
        "since": one.since,
        "until": one.until,
        "removable_by": one.removable_by,
        "held_as": None,
        "elsewhere": one.elsewhere,
    }
    if one.uid < 0:
        facts["uid"] = None
    if one.held_as is not None:
        facts["held_as"] = one.held_as._asdict()
    return facts


def _share_dict(one: Holder) -> dict[str, Any]:
    return {**_claim_dict(one), "share": one.share, "memory_used": one.memory_used}


def _gpu_dict(one: GpuStatus, now: float) -> dict[str, Any]:
    gpu = one.gpu
    claim = None
    if one.claim is not None:
        claim = _claim_dict(one.claim)
    return {
        "label": one.label,
        "index": gpu.index,
        "vendor": gpu.vendor,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "pci_bus_id": gpu.pci_bus_id,
        "numa_node": gpu.numa_node,
        "memory_total": gpu.memory_total,
        "memory_used": gpu.memory_used,
        "utilization": gpu.utilization,
        "temperature": gpu.temperature,
        "fan": gpu.fan,
        "power": gpu.power,
        "power_limit": gpu.power_limit,
        "state": one.state,
        "state_shown": one.shown_state(now),
        "idle": one.idle,
        "idle_for": one.idle_for,
        "reason": one.reason,
        "claim": claim,
        "shares": [_share_dict(each) for each in one.shares],
        "share_free": one.share_free,
        "pieces": [_claim_dict(each) for each in one.pieces],
        "processes": [asdict(process) for process in one.processes],
        "beside": [asdict(process) for process in one.beside],
    }


FREE = ("free", "display")


def of_user(status: HostStatus, user: str) -> HostStatus:
    """Return the status with only the GPUs that a user has claimed or computes on, and that user's waiters."""
    gpus = tuple(one for one in status.gpus if _concerns(one, user))
    queue = tuple(one for one in status.queue if one.user == user)
    return replace(status, gpus=gpus, queue=queue)


def of_vendor(status: HostStatus, vendor: str) -> HostStatus:
    """Return the status with only the GPUs of a vendor, named by their indices alone, and the waiters for them."""
    gpus = tuple(replace(one, prefix="") for one in status.gpus if one.gpu.vendor == vendor)
    queue = tuple(one for one in status.queue if one.vendor in (vendor, None))
    return replace(status, gpus=gpus, queue=queue)


def _concerns(one: GpuStatus, user: str) -> bool:
    if any(claim.user == user for claim in one.holders):
        return True
    return any(process.user == user for process in one.users)


def free_labels(status: HostStatus) -> list[str]:
    """Return the GPUs that could be claimed now, as ``0``, ``3:1``, or ``amd:0`` on a host with GPUs of two vendors.

    The list is empty if the claims are not known.
    """
    if status.warnings:
        return []
    return [one.label for one in status.gpus if one.state in FREE]
