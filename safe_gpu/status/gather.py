"""The state of a host at one moment: every GPU, its holder, and the queue."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.closed import all_windows, closed_now, find_admitted, ignored_closed
from ..coordination.faults import read_faults
from ..coordination.files.lease_dir import LeaseDir
from ..coordination.files.state_dir import StateDir
from ..coordination.holders.by_kernel import holder_by_kernel, lockers_seen, user_and_command
from ..coordination.holders.of_gpus import HeldLeases
from ..coordination.holders.outer_claim import outer_claim_of_process
from ..coordination.leases.file_names import inner_name, lease_name, names_of_host, slot_name
from ..coordination.leases.lease import probe
from ..coordination.locks.host_lock import HostLock
from ..coordination.name_table import read_names
from ..coordination.queue.listing import Listing
from ..coordination.queue.live import live_tickets
from ..coordination.queue.turns import by_turn
from ..coordination.queue.waiting_process import waiting_process
from ..coordination.socket_names import name_of
from ..coordination.state_dir import state_dir_path
from ..drivers import open_drivers
from ..errors import LockTimeout, NoDriverError, SafeGpuError, StateDirError
from ..gpus.devices import MOST_SHARERS, ProcessKind, vendor_of
from ..host import procfs
from ..host.procfs import user_name
from ..runtimes.visible_devices import stale_indices
from ..selection.request import Selection, uuid_of_stem
from ..selection.sharing import LEAST_SHARE, part_of, promised, used_by_sharers, without_siblings
from ..selection.verdicts import Rules, has_mps_clients, judge, recent_faults, room_for_shares, users_of, why_last
from ..settings.variables import existing_policy
from ..wording.text import in_brackets, left_behind
from .facts import ClaimStatus, GpuStatus, HostStatus, ProcessStatus, WaiterStatus
from .idle import with_idle_times, with_reports
from .starts import expected_starts, lease_holder

if TYPE_CHECKING:
    from ..coordination.holders.of_gpus import LockedFile
    from ..coordination.leases.record import LeaseRecord
    from ..coordination.name_table import NameTable
    from ..coordination.queue.ticket import Ticket
    from ..drivers.base import Driver
    from ..gpus.devices import Gpu, GpuFault, GpuProcess, HostSnapshot, LeaseHolder
    from .starts import AtLimit

# How long to wait for host.lock, seconds. It is held for microseconds, unless its holder is stopped or hundreds of
# processes want it at once.
_PATIENCE = 5.0


@dataclass
class HostFacts(HeldLeases):
    """The leases and tickets at one moment.

    Attributes:
        faults: UUID -> note, of the GPUs that are taken last because a claim failed on them.
        tickets: the tickets of all waiters.
        warnings: sentences that say which facts are not known, and why.
    """

    faults: Mapping[str, GpuFault] = field(default_factory=dict)
    tickets: list[Ticket] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def look(path: str, gpus: Collection[Gpu], prefix: str = "") -> HostFacts:
    """Probe every lease and ticket in a state directory. It is not created if missing. Errors become warnings.

    Args:
        prefix: what stands before the UUIDs of this host in names.
    """
    found, uuids, before = HostFacts(), [gpu.uuid for gpu in gpus], read_names()
    devices: dict[int, int] = {}
    try:
        devices = _look_under_host_lock(found, path, uuids)
    except LockTimeout as err:
        found.warnings.append(f"{err}. The queue cannot be read now, and claims are shown as in /proc/locks.")
        try:
            _look_without_host_lock(found, path, uuids)
        except SafeGpuError as second:
            found.warnings.append(str(second))
    except SafeGpuError as err:
        found.warnings.append(f"The claims are not known: {err}")
    found.identify(uuids, prefix, before, devices)
    return found


def _look_under_host_lock(found: HostFacts, path: str, uuids: Collection[str]) -> dict[int, int]:
    """Find tickets and held leases. Returns inode -> device of the tickets."""
    listing = Listing()
    try:
        with StateDir(path, make=False) as root, StateDir("queue", root, make=False) as queue:
            listing.update(queue)
        with HostLock(time.monotonic() + _PATIENCE, path, make=False) as host:
            host.leases.names_of_host = partial(names_of_host, uuids)
            found.tickets = [ticket for _, ticket in by_turn(live_tickets(host, listing))]
            device = os.fstat(host.queue.fd).st_dev
            _find_leases(found, host.leases, uuids, partial(probe, host))
        mark_seen(path, found.files)
        return dict.fromkeys((ticket.inode for ticket in found.tickets), device)
    except FileNotFoundError:  # nothing is claimed by file
        with (
            suppress(FileNotFoundError),
            StateDir(path, make=False) as root,
            LeaseDir("leases", root, make=False) as leases,
        ):
            _find_leases(found, leases, uuids, lambda name: False)
        return {}


def mark_seen(path: str, names: Collection[str]) -> None:
    """Set the time of these lease files, which were just seen held, to now.

    A claim that dies is then known to have lived until now.
    """
    if not names:
        return
    with (
        suppress(StateDirError, OSError),
        StateDir(path, make=False) as root,
        StateDir("leases", root, make=False) as leases,
    ):
        for name in names:
            with suppress(StateDirError, OSError):
                if (fd := leases.open(name)) is not None:
                    try:
                        os.utime(fd)
                    finally:
                        os.close(fd)


def _look_without_host_lock(found: HostFacts, path: str, uuids: Collection[str]) -> None:
    """Find held leases in /proc/locks only. That takes no lock, but does not show locks of other PID namespaces."""
    with StateDir(path, make=False) as root, LeaseDir("leases", root, make=False) as leases:
        inodes: dict[str, int] = {}
        for name in names_of_host(uuids):
            with suppress(OSError):
                inodes[name] = os.stat(name, dir_fd=leases.fd, follow_symlinks=False).st_ino
        locks = procfs.flock_holders(set(inodes.values()))
        _find_leases(found, leases, uuids, lambda name: inodes.get(name) in locks)


def _find_leases(found: HostFacts, leases: LeaseDir, uuids: Collection[str], is_held: Callable[[str], bool]) -> None:
    found.find(leases, names_of_host(uuids), is_held)
    found.faults = recent_faults(read_faults(state_dir_path(), uuids), time.time())


class LockHolder(NamedTuple):
    """The result of :func:`who_holds`.

    Attributes:
        pid: a process that holds the lock, by the kernel; None if none can be seen from this process.
        uid: its real uid; None if another process may have that pid by now.
        note: a clause about anything unusual, for users; "" in the usual case.
    """

    pid: int | None
    uid: int | None
    note: str = ""


class ProcessTable:
    """What /proc says of processes. Each is read once, however many files name it.

    Args:
        names: the names (without directories) of the leases whose holders will be looked for.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._holders: dict[tuple[int, int], int] | None = None
        self.has_ended = cache(procfs.has_ended)
        self.is_stopped = cache(procfs.is_stopped)
        self.real_uid_of = cache(procfs.real_uid_of)
        self.describe = cache(procfs.describe_process)
        self.ancestors = cache(procfs.ancestors)
        self.family_of = cache(procfs.family_of)

    def holder_of(self, file: LockedFile) -> int | None:
        """Return a process that has this file open and locked, as far as this user may see.

        The first query reads all of /proc.
        """
        if self._holders is None:
            self._holders = lockers_seen(self._names)
        return self._holders.get((file.device, file.inode))

    def holder_of_socket(self, inode: int | None) -> tuple[int | None, Collection[str]]:
        """Return a process that has this socket, as far as this user may see, and the paths of its open files."""
        for pid in procfs.pids() if inode is not None else ():
            files = (procfs.open_files(pid) or {}).values()
            if f"socket:[{inode}]" in files:
                return pid, files
        return None, ()


def who_holds(file: LockedFile, record: LeaseRecord | None, processes: ProcessTable) -> LockHolder:
    """Return the process that holds a lease.

    Args:
        record: of the lease; None if it cannot be read.
    """
    pid, uid = holder_by_kernel(record, file.lockers)
    namespace = procfs.namespace_text(record.pidns) if record is not None else ""
    if record is not None and uid is not None:
        return LockHolder(pid, uid, f"{namespace}, as process {record.pid} there" if namespace else "")
    heir = processes.holder_of(file)
    if heir is not None:
        pid, uid = heir, processes.real_uid_of(heir)
    elif file.named is not None:
        pid, uid = holder_by_kernel(record, file.lockers, file.named)
    if record is None:
        known = f"process {pid} holds the lock" if pid else "its holder cannot be seen from here"
        return LockHolder(pid, uid, f"its record cannot be read; {known}")
    named = f"process {record.pid}{namespace and f' {namespace}'}"
    if not namespace and record.of_the_dead:
        note = left_behind(None if uid is None else pid, record.pid, reused=not procfs.has_ended(record.pid))
    elif uid is not None and pid is not None:
        note = f"its record names {named}, which does not hold the lock; process {pid} does"
    elif pid is not None:
        note = f"its record, of {named}, does not fit process {pid}, which /proc/locks names"
    elif namespace:
        note = f"{namespace}, as process {record.pid} there, which cannot be seen from here"
    else:
        note = "its holder cannot be seen from here (in another container?): this is from its record"
    return LockHolder(pid, uid, note)


def who_waits(ticket: Ticket, lockers: Sequence[int], processes: ProcessTable) -> tuple[int | None, str | None, str]:
    """Return the pid of a waiter, its user and a note like that of :class:`LockHolder`.

    The user is the owner of the ticket's file, whatever its content, if a process of that user keeps it locked.

    Args:
        lockers: pids that /proc/locks shows for the ticket.
    """
    pid = waiting_process(ticket, lockers, processes.has_ended, processes.real_uid_of)
    user = None if pid is None else procfs.user_name(ticket.uid)
    namespace = procfs.namespace_text(ticket.pidns)
    notes = [f"{namespace}, as process {ticket.pid} there"] if namespace else []
    if pid is None:
        notes.append("which cannot be seen from here" if namespace else "its process cannot be seen from here")
    return pid, user, ", ".join(notes)


_NOTICE = 86400.0  # seconds before a window begins, from which on it is shown


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
    if not any(snapshot.shared_display for snapshot in snapshots):
        claims = _with_risks(claims, found, snapshots[0].name_prefix)
    now = time.time()
    rows = [
        replace(one, prefix=f"{snapshot.vendor}:") if len(snapshots) > 1 else one
        for snapshot in snapshots
        for one in _gpus(snapshot, claims, found, processes)
    ]
    gpus = with_idle_times(rows, now)
    tickets = found.tickets
    limited: Mapping[int, AtLimit] = {}
    max_gpus: Mapping[str, int] = {}
    if rules := existing_policy(os.environ):
        from .starts import at_limits, most_by_user

        gpus = with_reports(gpus, rules)
        uids = {claim.uid for one in gpus for claim in one.claims if claim.uid is not None}
        max_gpus = most_by_user(uids | {ticket.uid for ticket in tickets}, rules)
        limited = at_limits(tickets, gpus, rules, now)
    windows = all_windows()
    find_admitted(windows, {ticket.uid for ticket in tickets})
    expected = zip(tickets, expected_starts(tickets, gpus, now, limited, windows), strict=True)
    in_turn = _in_turn(tickets, gpus)
    return HostStatus(
        host=os.uname().nodename,
        driver=_all_of(snapshot.driver for snapshot in snapshots),
        driver_version=_all_of(snapshot.driver_version for snapshot in snapshots),
        state_dir=path,
        taken_at=now,
        gpus=gpus,
        queue=tuple(
            replace(
                _waiter(place, ticket, found, processes, moments, limited.get(ticket.seq)),
                turn=ticket.turn,
                in_turn=in_turn.get(ticket.seq),
            )
            for place, (ticket, moments) in enumerate(expected, 1)
        ),
        warnings=tuple(found.warnings),
        shift=_shift(snapshots, found),
        doubt=next((snapshot.doubt for snapshot in snapshots if snapshot.doubt), ""),
        broken=tuple(broken),
        ignored=ignored_closed(),
        max_gpus=max_gpus,
        windows=tuple(one for one in sorted(windows) if one.begin - _NOTICE < now < one.end),
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
    if record.share is None or file.confirmed:
        return replace(known, share=record.share)
    notes = [known.note, "its share is only what its record says"]
    return replace(known, share=record.share, share_known=False, note="; ".join(filter(None, notes)))


def _with_risks(claims: Mapping[str, ClaimStatus], found: HostFacts, prefix: str) -> dict[str, ClaimStatus]:
    """Return the claims, with who can remove the leases of those that have no name."""
    at_risk = {}
    for name, file in found.files.items() if found.names.complete else ():
        uid = next((uid for uid in file.owners if uid not in (0, claims[name].uid)), None)
        named = name_of(name.removesuffix(".lock"), prefix)
        if uid is not None and found.names.get(named) is None:
            at_risk[name] = replace(claims[name], removable_by=user_name(uid))
    return {**claims, **at_risk}


def _claim_elsewhere(gpu: Gpu, prefix: str, names: NameTable, processes: ProcessTable) -> ClaimStatus:
    """Return the claim that holds the name of a GPU; only root and its user can see its process."""
    uid, (held, *_) = names.owner(gpu.uuid, prefix), names.of_device(gpu.uuid, prefix)
    pid, files = processes.holder_of_socket(held.inode)
    if pid is None:
        return ClaimStatus(user=None if uid is None else user_name(uid), uid=uid, elsewhere="")
    uid = processes.real_uid_of(pid)
    user, command = user_and_command(None, pid, uid)
    lease = next((path for path in files if path.endswith(f"/leases/{lease_name(gpu.uuid)}")), "")
    directory = lease.rpartition("/leases/")[0]
    note = f"its lease is in {directory}" if directory else ""
    return ClaimStatus(pid, user, command=command, note=note, uid=uid, elsewhere=directory)


def _gpus(
    snapshot: HostSnapshot, claims: Mapping[str, ClaimStatus], found: HostFacts, processes: ProcessTable
) -> tuple[GpuStatus, ...]:
    pairs: list[tuple[ClaimStatus | None, ClaimStatus | None]] = []
    shares: list[tuple[ClaimStatus, ...]] = []
    leased: dict[str, LeaseHolder] = {}
    for gpu in snapshot.gpus:
        outer, inner = claims.get(lease_name(gpu.uuid)), claims.get(inner_name(gpu.uuid))
        if gpu.uuid in found.elsewhere:
            outer = _claim_elsewhere(gpu, snapshot.name_prefix, found.names, processes)
        pair = (outer, inner) if outer else (inner, None)  # an inner claim may outlive its outer claim
        shares.append(_sharers(gpu, claims, processes))
        if shares[-1]:  # they lock the lease shared, and write nothing there
            pair = shares[-1][0], None
        pairs.append(pair)
        if (holder := lease_holder(pair[0], shares[-1])) is not None:
            leased[gpu.uuid] = holder._replace(elsewhere=gpu.uuid in found.elsewhere)
    rules = Rules.of(os.environ)._replace(drained=closed_now())
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
                share_free=_share_free(
                    without_siblings(gpu, snapshot.gpus, leased, processes.family_of),
                    leased[gpu.uuid],
                    rules,
                    processes,
                )
                if sharers
                else None,
                drained=bool(rules.why_drained(gpu)),
            )
        )
    return tuple(rows)


def _share_free(gpu: Gpu, holder: LeaseHolder, rules: Rules, processes: ProcessTable) -> int:
    if len(holder.sharers) >= MOST_SHARERS:
        return 0
    return max(0, room_for_shares(gpu, holder.sharers, rules, processes.family_of))


def _sharers(gpu: Gpu, claims: Mapping[str, ClaimStatus], processes: ProcessTable) -> tuple[ClaimStatus, ...]:
    """Return the claims that share a GPU, the oldest first, with what they use of it."""
    found = filter(None, (claims.get(slot_name(gpu.uuid, slot)) for slot in range(MOST_SHARERS)))
    sharers = sorted(found, key=lambda one: one.since or 0.0)
    holder = lease_holder(sharers[0], sharers) if sharers else None
    if holder is None:
        return ()
    rows = zip(
        sharers, promised(gpu, holder.sharers), used_by_sharers(gpu, holder.sharers, processes.family_of), strict=True
    )
    return tuple(replace(one, share=one.share and most, memory_used=used) for one, most, used in rows)


def _remarks(claim: ClaimStatus | None) -> list[str]:
    return [claim.note, "stopped (a suspended job?)" if claim.stopped else ""] if claim else []


def _inside(inner: ClaimStatus | None) -> list[str]:
    if inner is None:
        return []
    who = in_brackets(inner.user, inner.command)
    return [f"inside it claimed by process {inner.pid or '?'}{who}", *_remarks(inner)]


def _is_idle(gpu: Gpu, claims: Collection[ClaimStatus], processes: ProcessTable, mps_clients: bool) -> bool:
    """Return whether none of the claim's processes computes or draws there; False if the process list is unknown.

    A process that draws little, and is no descendant of the claim's, may be the desktop of its user.
    """
    if gpu.processes is None or not gpu.processes_supported or gpu.processes_private:
        return False
    users = users_of(gpu, gpu.processes, processes.describe, mps_clients=mps_clients)
    drawing = (one for one in gpu.processes if one.kind == ProcessKind.GRAPHICS)
    computes = any(_may_belong(one, claims, processes) for one in users)
    if computes or any(_is_of(one, claims, processes) for one in drawing):
        return False
    return bool(users) or not gpu.utilization  # else the driver hides who computes


def _may_belong(process: GpuProcess, claims: Collection[ClaimStatus], processes: ProcessTable) -> bool:
    """Return whether a process may belong to one of the claims: a descendant, one of its user, or an unknown one."""
    described = None if process.elsewhere else processes.describe(process.pid)
    if described is None or any(claim.uid is None or claim.user == described[0] for claim in claims):
        return True
    return _is_of(process, claims, processes)


def _is_of(process: GpuProcess, claims: Collection[ClaimStatus], processes: ProcessTable) -> bool:
    """Return whether a process is that of one of the claims, or a descendant of it."""
    family = () if process.elsewhere else (process.pid, *processes.ancestors(process.pid))
    return any(claim.pid in family for claim in claims)


def _process(process: GpuProcess, processes: ProcessTable) -> ProcessStatus:
    user, command = (None if process.elsewhere else processes.describe(process.pid)) or (None, None)
    return ProcessStatus(process.pid, user, command or process.name, process.kind, process.memory_used)


def _in_turn(tickets: Sequence[Ticket], gpus: Iterable[GpuStatus]) -> dict[int, float]:
    """Return number of a ticket -> how many GPUs its user holds, for those ahead of a competitor that came earlier."""
    held: dict[int | None, float] = {}
    for one in gpus:
        for claim in one.claims:
            part = part_of(one.gpu, claim.share if claim.share_known else LEAST_SHARE)
            held[claim.uid] = held.get(claim.uid, 0.0) + part
    found, first = {}, dict[str, int]()  # first: of those behind who want a GPU, the lowest number
    for ticket in reversed(tickets):
        wanted = ticket.request.gpus if ticket.request else ()
        if any(first.get(gpu, ticket.seq) < ticket.seq for gpu in wanted):
            found[ticket.seq] = round(held.get(ticket.uid, 0.0), 2)
        first.update((gpu, min(first.get(gpu, ticket.seq), ticket.seq)) for gpu in wanted)
    return found


def _waiter(
    position: int,
    ticket: Ticket,
    found: HostFacts,
    processes: ProcessTable,
    moments: tuple[float | None, float | None],
    limit: AtLimit | None,
) -> WaiterStatus:
    pid, user, note = who_waits(ticket, found.locks.get(ticket.inode, ()), processes)
    request = ticket.request
    vendors = {vendor_of(uuid_of_stem(stem)) for stem in request.gpus} if request else set()
    return WaiterStatus(
        position,
        pid,
        user,
        request.nb_gpus if request else None,
        ticket.since or None,
        share=Selection.from_ticket(1, request.conditions)[0].share if request else None,
        stopped=pid is not None and processes.is_stopped(pid),
        note=note,
        hold_for=request.hold_for if request else None,
        expected_start=moments[0],
        earliest_start=moments[1],
        vendor=vendors.pop() if len(vendors) == 1 else None,
        job=request.job if request else None,
        limit=None if limit is None else (limit.held, limit.most),
    )
