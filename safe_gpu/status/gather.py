"""Gather the state of a host: GPUs, claims, queue, expected starts; or what of it concerns one user.

The driver is polled first, with no lock held. Then all leases and tickets are probed under one short hold of host.lock.
Only the lock decides whether a GPU is claimed, and only the kernel whose claim it is; a record adds to it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..coordination import socket_names
from ..coordination.files import state_dir_path
from ..coordination.holders import outer_claim_of_process, user_and_command
from ..coordination.leases import drained_gpus, inner_name, lease_name, names_of_host, slot_name
from ..devices import MOST_SHARERS, Gpu, GpuProcess, HostSnapshot, LeaseHolder, vendor_of
from ..errors import NoDriverError
from ..runtimes.visible_devices import stale_indices
from ..selection.backfill import BackfillRequest, When, starts, when_free
from ..selection.request import Rules, Selection, uuid_of_stem
from ..selection.sharing import used_by_sharers
from ..selection.verdicts import computes, has_mps_clients, judge, room_for_shares, why_last
from ..settings import existing_policy
from ..text import in_brackets
from .facts import ClaimStatus, GpuStatus, HostStatus, ProcessStatus, WaiterStatus
from .idle import with_idle_times, with_reports
from .probe import HostFacts, LockedFile, ProcessTable, look, who_holds, who_waits

if TYPE_CHECKING:
    from ..coordination.leases import LeaseRecord
    from ..coordination.queue import Ticket
    from ..drivers.base import Driver
    from .limits import AtLimit


_FREE = ("free", "display")

# When each waiter of the queue can expect to start. Pure.


def expected_starts(
    tickets: Sequence[Ticket],
    gpus: Iterable[GpuStatus],
    now: float,
    limited: Mapping[int, AtLimit] = MappingProxyType({}),
) -> list[float | None]:
    """Return Unix seconds for each ticket, in the order of the queue; None where a holder did not say for how long.

    A waiter that is stopped, or that no release of claims can satisfy, has no start and delays nobody. A waiter whose
    user is at a limit delays nobody either, and starts when enough claims of that user end.

    Args:
        limited: number of a ticket -> the limit of its user.
    """
    ends: dict[str, When] = {}
    coming: set[str] = set()
    devices = []
    for one in gpus:
        devices.append(one.gpu)
        uuid, inner, free = one.gpu.uuid, f"{one.gpu.uuid}.inner", one.state in _FREE
        ends[uuid] = when_free(one.gpu, _holder(one.claim, one.shares), now, free=free)
        ends[inner] = when_free(one.gpu, _holder(one.inner), now, free=True)
        if free or one.claim is not None:
            coming |= {uuid, inner}
    wants: dict[int, BackfillRequest] = {}
    for place, ticket in enumerate(tickets):
        demand = ticket.demand
        if demand is None:  # nobody knows what it wants, so nobody behind it knows more
            wants[place] = BackfillRequest(len(ends) + 1, frozenset(ends))
        elif ticket.seq not in limited and not ticket.is_stopped() and len(demand.gpus & coming) >= demand.nb_gpus:
            wants[place] = BackfillRequest.of(demand, devices)
    found = dict(zip(wants, starts(wants.values(), ends), strict=True))
    found.update((place, limited[one.seq].until) for place, one in enumerate(tickets) if one.seq in limited)
    moments = (found.get(place, math.inf) for place in range(len(tickets)))
    return [None if moment == math.inf else round(moment, 3) for moment in moments]


def _holder(claim: ClaimStatus | None, shares: Iterable[ClaimStatus] = ()) -> LeaseHolder | None:
    """Return who holds a GPU, from what was found of its claim, or of the claims that share it."""
    if claim is None:
        return None
    found = [
        LeaseHolder(
            one.pid, one.user, one.job, one.command, one.since, until=one.until, uid=one.uid or 0, share=one.share
        )
        for one in (*shares, claim)
    ]
    return LeaseHolder.of_sharers(found[:-1]) if len(found) > 1 else found[0]


# The state of a host at one moment: every GPU, its holder, and the queue.


def gather(driver: Driver | None = None) -> HostStatus:
    """Return the state of this host, for any user. It claims nothing and does not create the state directory.

    Args:
        driver: None opens those that ``SAFE_GPU_DRIVER`` names, one for each vendor, and closes them again.

    Raises:
        NoDriverError, UnsatisfiableRequestError: there is no such driver, or none works. An error of the state
            directory does not raise: it becomes a warning, and the GPUs are shown as the driver reports them.
    """
    if driver is not None:
        return status_of(driver.detailed(driver.snapshot()))
    snapshots, broken = polls()
    return status_of(*([one for one in snapshots if one.gpus] or snapshots[:1]), broken=broken)


def polls() -> tuple[list[HostSnapshot], list[str]]:
    """Return one poll of each vendor's driver, and sentences on those that do not work.

    Raises:
        NoDriverError, UnsatisfiableRequestError: as of :func:`gather`.
    """
    from ..drivers import open_drivers

    drivers, broken = open_drivers()
    snapshots: list[HostSnapshot] = []
    for opened in drivers:
        try:
            snapshots.append(opened.detailed(opened.snapshot()))
        except NoDriverError as err:
            if len(drivers) == 1:
                raise
            broken.append(str(err))
        finally:
            opened.close()
    if not snapshots:
        raise NoDriverError("; ".join(broken), driver="auto")
    return snapshots, broken


def status_of(*snapshots: HostSnapshot, broken: Iterable[str] = ()) -> HostStatus:
    """Return the result of :func:`gather` for given polls.

    Args:
        snapshots: one of each vendor's driver, which should be fresh.
        broken: sentences on the drivers that do not work.
    """
    path = state_dir_path()
    found = look(path, [gpu for snapshot in snapshots for gpu in snapshot.gpus], snapshots[0].name_prefix)
    processes = ProcessTable(found.files)
    claims = {name: _claim(file, found.records.get(name), processes) for name, file in found.files.items()}
    now = time.time()
    rows = [
        replace(one, prefix=f"{snapshot.vendor}:") if len(snapshots) > 1 else one
        for snapshot in snapshots
        for one in _gpus(snapshot, claims, found, processes)
    ]
    gpus = with_idle_times(rows, now)
    tickets = sorted(found.tickets, key=lambda ticket: ticket.seq)
    limited: Mapping[int, AtLimit] = {}
    max_gpus: Mapping[str, int] = {}
    if rules := existing_policy(os.environ):
        from .limits import at_limits, most_by_user

        gpus = with_reports(gpus, rules)
        uids = {claim.uid for one in gpus for claim in one.claims if claim.uid is not None}
        max_gpus = most_by_user(uids | {ticket.uid for ticket in tickets}, rules)
        limited = at_limits(tickets, gpus, rules, now)
    expected = zip(tickets, expected_starts(tickets, gpus, now, limited), strict=True)
    return HostStatus(
        host=os.uname().nodename,
        driver=_all_of(snapshot.driver for snapshot in snapshots),
        driver_version=_all_of(snapshot.driver_version for snapshot in snapshots),
        state_dir=path,
        taken_at=now,
        gpus=gpus,
        queue=tuple(
            _waiter(place, ticket, found, processes, start, limited.get(ticket.seq))
            for place, (ticket, start) in enumerate(expected, 1)
        ),
        warnings=tuple(found.warnings),
        shift=_shift(snapshots, found),
        broken=tuple(broken),
        max_gpus=max_gpus,
    )


def _all_of(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, texts)))


def _shift(snapshots: Iterable[HostSnapshot], found: HostFacts) -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    around = outer_claim_of_process(found.records.values(), os.environ.get("SAFE_GPU_SCOPE", "")) if value else None
    if around is None:
        return ""
    order = os.environ.get("CUDA_DEVICE_ORDER")
    of_it = (one for one in snapshots if any(one.by_uuid(uuid) is not None for uuid in around.gpus))
    return next((stale_indices(value, order, around.gpus, one) for one in of_it), "")


def _claim(file: LockedFile, record: LeaseRecord | None, processes: ProcessTable) -> ClaimStatus:
    if file.note:
        return ClaimStatus(note=file.note)
    pid, uid, note = who_holds(file, record, processes)
    user, command = user_and_command(record, pid, uid)
    stopped = pid is not None and uid is not None and processes.is_stopped(pid)
    claim = ClaimStatus(pid, user, command=command, stopped=stopped, note=note, uid=uid)
    if record is None:
        return claim
    known = replace(claim, job=record.job, since=record.since or None, until=record.until, token=record.token)
    return replace(known, share=record.share)


def _claim_elsewhere(gpu: Gpu, prefix: str, processes: ProcessTable) -> ClaimStatus:
    """Return the claim that holds the name of a GPU; only root and its user can see its process."""
    pid, files = processes.holder_of_socket(socket_names.sockets().get(socket_names.name_of(gpu.uuid, prefix)))
    if pid is None:
        return ClaimStatus(elsewhere="")
    user, command = processes.describe(pid) or (None, None)
    lease = next((path for path in files if path.endswith(f"/leases/{lease_name(gpu.uuid)}")), "")
    directory = lease.rpartition("/leases/")[0]
    note = f"its lease is in {directory}" if directory else ""
    return ClaimStatus(pid, user, command=command, note=note, uid=processes.real_uid_of(pid), elsewhere=directory)


def _gpus(
    snapshot: HostSnapshot, claims: Mapping[str, ClaimStatus], found: HostFacts, processes: ProcessTable
) -> tuple[GpuStatus, ...]:
    pairs: list[tuple[ClaimStatus | None, ClaimStatus | None]] = []
    shares: list[tuple[ClaimStatus, ...]] = []
    leased: dict[str, LeaseHolder] = {}
    for gpu in snapshot.gpus:
        outer, inner = claims.get(lease_name(gpu.uuid)), claims.get(inner_name(gpu.uuid))
        if gpu.uuid in found.elsewhere:
            outer = _claim_elsewhere(gpu, snapshot.name_prefix, processes)
        pair = (outer, inner) if outer else (inner, None)  # an inner claim may outlive its outer claim
        shares.append(_sharers(gpu, claims, processes))
        if shares[-1]:  # they lock the lease shared, and write nothing there
            pair = shares[-1][0], None
        pairs.append(pair)
        if (holder := _holder(pair[0], shares[-1])) is not None:
            leased[gpu.uuid] = holder._replace(elsewhere=gpu.uuid in found.elsewhere)
    rules = Rules.of(os.environ)._replace(drained=drained_gpus())
    verdicts = judge(snapshot, Selection(), leased=leased, describe=processes.describe, rules=rules)
    mps_clients = has_mps_clients(snapshot)
    rows = []
    for verdict, (claim, inner), sharers in zip(verdicts, pairs, shares, strict=True):
        gpu, state = verdict.gpu, verdict.state
        fault = why_last(found.faults[gpu.uuid]) if gpu.uuid in found.faults else ""
        fault = rules.why_drained(gpu) * (claim is not None) or fault
        reasons = [verdict.reason, *_remarks(claim), *_inside(inner), fault]
        trouble = next((found.closed[name] for name in names_of_host([gpu.uuid]) if name in found.closed), "")
        if trouble:
            state, reasons = "unusable", [trouble]
        elif state == "free" and found.warnings:
            reasons = ["the driver shows no process on it; whether it is claimed is not known"]
        rows.append(
            GpuStatus(
                gpu,
                state,
                idle=claim is not None
                and _is_idle(gpu, sharers or [*filter(None, (claim, inner))], processes, mps_clients),
                reason="; ".join(filter(None, reasons)),
                claim=claim,
                inner=inner,
                processes=tuple(_process(process, processes) for process in gpu.processes or ()),
                fault=fault,
                shares=sharers,
                share_free=_share_free(gpu, leased[gpu.uuid], rules, processes) if sharers else None,
                drained=bool(rules.why_drained(gpu)),
            )
        )
    return tuple(rows)


def _share_free(gpu: Gpu, holder: LeaseHolder, rules: Rules, processes: ProcessTable) -> int:
    if len(holder.sharers) >= MOST_SHARERS:
        return 0
    return max(0, room_for_shares(gpu, holder.sharers, rules, processes.family_of))


def _sharers(gpu: Gpu, claims: Mapping[str, ClaimStatus], processes: ProcessTable) -> tuple[ClaimStatus, ...]:
    """Return the claims that share a GPU, the oldest first, with what they use of it.

    A claim inside a share that has ended takes its place.
    """
    files = ((slot_name(gpu.uuid, slot), slot_name(gpu.uuid, slot, inner=True)) for slot in range(MOST_SHARERS))
    found = [claims.get(outer) or claims.get(inner) for outer, inner in files]
    sharers = sorted((one for one in found if one is not None), key=lambda one: one.since or 0.0)
    holder = _holder(sharers[0], sharers) if sharers else None
    if holder is None:
        return ()
    used = used_by_sharers(gpu, holder.sharers, processes.family_of)
    return tuple(replace(one, memory_used=size) for one, size in zip(sharers, used, strict=True))


def _remarks(claim: ClaimStatus | None) -> list[str]:
    return [claim.note, "stopped (a suspended job?)" if claim.stopped else ""] if claim else []


def _inside(inner: ClaimStatus | None) -> list[str]:
    if inner is None:
        return []
    who = in_brackets(inner.user, inner.command)
    return [f"inside it claimed by process {inner.pid or '?'}{who}", *_remarks(inner)]


def _is_idle(gpu: Gpu, claims: Collection[ClaimStatus], processes: ProcessTable, mps_clients: bool) -> bool:
    """Return whether none of the claim's processes computes there; False if the process list is unknown."""
    if gpu.processes is None or not gpu.processes_supported or gpu.processes_private:
        return False
    return not any(
        computes(process, processes.describe, mps_clients=mps_clients) and _may_belong(process, claims, processes)
        for process in gpu.processes
    )


def _may_belong(process: GpuProcess, claims: Collection[ClaimStatus], processes: ProcessTable) -> bool:
    """Return whether a process may belong to one of the claims: a descendant, one of its user, or an unknown one."""
    pid = process.pid
    described = None if process.elsewhere else processes.describe(pid)
    if described is None:
        return True
    user, family = described[0], {pid, *processes.ancestors(pid)}
    return any(claim.uid is None or claim.pid in family or claim.user == user for claim in claims)


def _process(process: GpuProcess, processes: ProcessTable) -> ProcessStatus:
    user, command = (None if process.elsewhere else processes.describe(process.pid)) or (None, None)
    return ProcessStatus(process.pid, user, command or process.name, process.kind, process.memory_used)


def _waiter(
    position: int,
    ticket: Ticket,
    found: HostFacts,
    processes: ProcessTable,
    start: float | None,
    limit: AtLimit | None,
) -> WaiterStatus:
    pid, user, note = who_waits(ticket, found.locks.get(ticket.inode, ()), processes)
    demand = ticket.demand
    vendors = {vendor_of(uuid_of_stem(stem)) for stem in demand.gpus} if demand else set()
    return WaiterStatus(
        position,
        pid,
        user,
        demand.nb_gpus if demand else None,
        ticket.since or None,
        share=Selection.from_ticket(1, demand.conditions)[0].share if demand else None,
        stopped=pid is not None and processes.is_stopped(pid),
        note=note,
        hold_for=demand.hold_for if demand else None,
        expected_start=start,
        vendor=vendors.pop() if len(vendors) == 1 else None,
        job=demand.job if demand else None,
        limit=None if limit is None else (limit.held, limit.most),
    )


# The part of the state of a host that concerns one user, or one vendor. Pure.


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
    return user in claims or any(process.user == user for process in one.processes if process.kind != "graphics")


def free_labels(status: HostStatus) -> list[str]:
    """Return the GPUs that could be claimed now, as ``0``, ``3:1``, or ``amd:0`` on a host with GPUs of two vendors.

    The list is empty if the claims are not known.
    """
    if status.warnings:
        return []
    return [one.label for one in status.gpus if one.state in _FREE]
