"""The state of a host at one moment: every GPU, who has it, and who waits.

The driver is polled first, with no lock held; then all leases and tickets are probed under one short hold of host.lock.
The lock is the truth: what a record says is shown only where it fits the lock's holder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from . import procfs
from .claims import describe_process
from .coordination.files import state_dir_path
from .devices import Gpu, GpuProcess, GpuRequest, Holder, HostSnapshot, ProcessKind
from .holders import LockedFile, Openers, who_holds
from .host_facts import HostFacts, look, names_of
from .selection import judge

if TYPE_CHECKING:
    from .coordination.leases import LeaseRecord
    from .coordination.waiting import Ticket
    from .drivers.base import Driver

__all__ = ["ClaimStatus", "GpuStatus", "HostStatus", "ProcessStatus", "WaiterStatus", "gather", "status_of"]


@dataclass(frozen=True)
class ClaimStatus:
    """A held lease, and what is known of its holder; None is "not known".

    Attributes:
        pid: a process that really holds it, as numbered here.
        user, job, command: for people. since: Unix seconds.
        token: what claims made inside it carry; "" for none.
        stopped: the process is stopped or frozen, as schedulers do to a suspended job.
        note: what is odd about the holder, such as a record that names somebody else; else "".
    """

    pid: int | None = None
    user: str | None = None
    job: str | None = None
    command: str | None = None
    since: float | None = None
    token: str = ""
    stopped: bool = False
    note: str = ""


@dataclass(frozen=True)
class ProcessStatus:
    """A process that the driver reports on a GPU; ``user`` and ``command`` are None where the pid does not resolve."""

    pid: int
    user: str | None
    command: str | None
    kind: str
    memory_used: int | None


@dataclass(frozen=True)
class GpuStatus:
    """One device. ``state`` and ``reason`` are as in :class:`~safe_gpu.devices.GpuVerdict`.

    ``idle``: claimed, and the driver shows no compute process of the claim on it. ``claim`` is None where nobody holds
    the lease; ``inner`` is the claim made inside it, if any.
    """

    gpu: Gpu
    state: str
    idle: bool = False
    reason: str = ""
    claim: ClaimStatus | None = None
    inner: ClaimStatus | None = None
    processes: tuple[ProcessStatus, ...] = ()


@dataclass(frozen=True)
class WaiterStatus:
    """One who waits. ``position`` counts all who wait on this host from 1; ``since`` is in Unix seconds."""

    position: int
    pid: int | None
    user: str | None
    nb_gpus: int | None
    since: float | None
    stopped: bool = False
    note: str = ""


@dataclass(frozen=True)
class HostStatus:
    """What :func:`gather` found.

    Attributes:
        host: its name. driver, driver_version: as in :class:`~safe_gpu.devices.HostSnapshot`.
        state_dir: where claims are kept. taken_at: Unix seconds.
        gpus: every device, in the driver's order. queue: in order of arrival.
        warnings: sentences on what could not be found out.
    """

    host: str
    driver: str
    driver_version: str
    state_dir: str
    taken_at: float
    gpus: tuple[GpuStatus, ...]
    queue: tuple[WaiterStatus, ...] = ()
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For JSON: bytes, percent and Unix seconds; null is "not known"."""
        return {
            "host": self.host,
            "driver": self.driver,
            "state_dir": self.state_dir,
            "gpus": [_gpu_dict(one) for one in self.gpus],
            "queue": [
                {name: getattr(one, name) for name in ("position", "pid", "user", "nb_gpus", "since")}
                for one in self.queue
            ],
        }


def _gpu_dict(one: GpuStatus) -> dict[str, Any]:
    facts = "index uuid name pci_bus_id numa_node memory_total memory_used utilization".split()
    claim = one.claim
    return {
        **{name: getattr(one.gpu, name) for name in facts},
        "state": one.state,
        "idle": one.idle,
        "reason": one.reason,
        "claim": claim and {name: getattr(claim, name) for name in ("pid", "user", "job", "command", "since")},
        "processes": [asdict(process) for process in one.processes],
    }


def gather(driver: Driver | None = None) -> HostStatus:
    """Look at this host, as any user may; nothing is claimed, and no state directory is made.

    Args:
        driver: None opens the one that ``SAFE_GPU_DRIVER`` names, and closes it again.

    Raises:
        NoDriverError, UnsatisfiableRequestError: there is no such driver. Trouble with the state directory does not
            raise: it is among the warnings, and the GPUs are shown as the driver knows them.
    """
    if driver is None:
        from .drivers import open_driver

        opened = open_driver()
        try:
            snapshot = opened.snapshot()
        finally:
            opened.close()
    else:
        snapshot = driver.snapshot()
    return status_of(snapshot)


def status_of(snapshot: HostSnapshot) -> HostStatus:
    """What :func:`gather` answers, for a poll of the driver that was just taken."""
    path = state_dir_path()
    found = look(path, snapshot.gpus)
    openers = Openers([*found.files, *(_ticket_name(ticket) for ticket in found.tickets)])
    claims = {name: _claim(file, found.records.get(name), openers) for name, file in found.files.items()}
    return HostStatus(
        host=os.uname().nodename,
        driver=snapshot.driver,
        driver_version=snapshot.driver_version,
        state_dir=path,
        taken_at=time.time(),
        gpus=_gpus(snapshot, claims, found),
        queue=tuple(
            _waiter(place, ticket, found, openers) for place, ticket in enumerate(sorted(found.tickets, key=_seq), 1)
        ),
        warnings=tuple(found.warnings),
    )


def _claim(file: LockedFile, record: LeaseRecord | None, openers: Openers) -> ClaimStatus:
    named, start = (record.pid, record.start) if record else (None, None)
    holding = who_holds(file, named, start, openers)
    stopped = holding.pid is not None and procfs.is_stopped(holding.pid)
    if record is not None and holding.believed:
        return ClaimStatus(
            holding.pid,
            record.user or None,
            record.job,
            record.command,
            record.since or None,
            record.token,
            stopped,
            holding.note,
        )
    user, command = (describe_process(holding.pid) if holding.pid else None) or (None, None)
    return ClaimStatus(holding.pid, user, command=command or None, stopped=stopped, note=holding.note)


def _gpus(snapshot: HostSnapshot, claims: Mapping[str, ClaimStatus], found: HostFacts) -> tuple[GpuStatus, ...]:
    pairs = [(claims.get(outer), claims.get(inner)) for outer, inner in map(names_of, snapshot.gpus)]
    leased = {gpu.uuid: _holder(outer or inner) for gpu, (outer, inner) in zip(snapshot.gpus, pairs, strict=True)}
    verdicts = judge(
        snapshot,
        GpuRequest(),
        leased={uuid: holder for uuid, holder in leased.items() if holder},
        describe=describe_process,
    )
    rows = []
    for verdict, (outer, inner) in zip(verdicts, pairs, strict=True):
        gpu, state = verdict.gpu, verdict.state
        claim = outer or inner  # an inner claim outlives an outer one that died
        inner = inner if outer else None
        reasons = [verdict.reason, *_remarks(claim), *_inside(inner)]
        trouble = next((found.closed[name] for name in names_of(gpu) if name in found.closed), "")
        if trouble:
            state, reasons = "unusable", [trouble]
        elif state == "free" and found.warnings:
            reasons = ["the driver shows nobody on it; claims are not known for sure"]
        rows.append(
            GpuStatus(
                gpu,
                state,
                idle=claim is not None and _is_idle(gpu, [one for one in (claim, inner) if one]),
                reason="; ".join(filter(None, reasons)),
                claim=claim,
                inner=inner,
                processes=tuple(_process(process) for process in gpu.processes or ()),
            )
        )
    return tuple(rows)


def _holder(claim: ClaimStatus | None) -> Holder | None:
    return Holder(claim.pid, claim.user, claim.job, claim.command, claim.since) if claim else None


def _remarks(claim: ClaimStatus | None) -> list[str]:
    if claim is None:
        return []
    return [claim.note, "stopped (a suspended job?)" if claim.stopped else ""]


def _inside(inner: ClaimStatus | None) -> list[str]:
    if inner is None:
        return []
    who = ", ".join(part for part in (inner.user, inner.command) if part)
    return [f"inside it claimed by process {inner.pid or '?'}{f' ({who})' if who else ''}", *_remarks(inner)]


def _is_idle(gpu: Gpu, claims: Collection[ClaimStatus]) -> bool:
    """Whether none of the claim's processes computes there; unknown is not idle."""
    if gpu.processes is None or not gpu.processes_supported:
        return False
    return not any(_computes(process) and _may_belong(process.pid, claims) for process in gpu.processes)


def _computes(process: GpuProcess) -> bool:
    if process.kind == ProcessKind.GRAPHICS:
        return False
    name = process.name or procfs.command_of(process.pid) or ""
    # The server of CUDA's Multi-Process Service sits on every GPU, whether it has clients or not.
    return name.split(" ")[0].rpartition("/")[2] != "nvidia-cuda-mps-server"


def _may_belong(pid: int, claims: Collection[ClaimStatus]) -> bool:
    """Whether a process may be the claim's own: a descendant, the same user's, or one that cannot be seen from here."""
    user = procfs.user_of(pid)
    if user is None:
        return True
    family = {pid, *procfs.ancestors(pid)}
    return any(claim.pid is None or claim.pid in family or claim.user == user for claim in claims)


def _process(process: GpuProcess) -> ProcessStatus:
    user, command = describe_process(process.pid) or (None, None)
    return ProcessStatus(process.pid, user, command or process.name, process.kind, process.memory_used)


def _seq(ticket: Ticket) -> int:
    return ticket.seq


def _ticket_name(ticket: Ticket) -> str:
    return f"{ticket.seq}.ticket"


def _waiter(position: int, ticket: Ticket, found: HostFacts, openers: Openers) -> WaiterStatus:
    file = LockedFile(_ticket_name(ticket), found.queue_device, ticket.inode, tuple(found.locks.get(ticket.inode, ())))
    holding = who_holds(file, ticket.pid or None, None, openers)
    user: str | None = ticket.user
    if not holding.believed:
        user = procfs.user_of(holding.pid) if holding.pid else None
    return WaiterStatus(
        position,
        holding.pid,
        user,
        ticket.demand.nb_gpus if ticket.demand else None,
        ticket.since or None,
        stopped=holding.pid is not None and procfs.is_stopped(holding.pid),
        note=holding.note,
    )
