"""The state of a host at one moment: every GPU, its holder, how long it has shown no work, and the queue.

The mark of a GPU for the next look is ``history/UUID.idle``. With a byte in it, the GPU has shown no work since the
time of the file. It proves nothing, and no claim depends on it. Where it cannot be read or written, nothing is known.
"""

import math
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import NamedTuple

from ..coordination.crowds import sentence_on_crowd
from ..coordination.directory import OPEN_FILE, Directory, remover_of, state_dir_path
from ..coordination.doors import MOST_PARTS, Doors
from ..coordination.entries import living_entries
from ..coordination.entry import Entry
from ..coordination.history import HistoryDir, append, lines_of_dead, mark_seen
from ..coordination.holders import Claims, claim_around, claims_now, heirs_of, holder_of, lives_here
from ..coordination.notes import all_windows, closed_now, find_admitted, ignored_closed, read_faults
from ..coordination.queue import TicketRequest, waiting_tickets
from ..coordination.turns import turn_of
from ..drivers import open_drivers
from ..drivers.patience import Patience
from ..errors import NoDriverError, PolicyError, StateDirError
from ..gpus.devices import MOST_SHARERS, Gpu, GpuProcess, Holder, HostSnapshot, ProcessKind, recent_faults, vendor_of
from ..host import procfs
from ..host.procfs import user_name
from ..host.signals import DeferredSignals
from ..runtimes.visible_devices import stale_indices
from ..selection.request import Selection
from ..selection.sharing import promised, used_by_sharers
from ..selection.verdicts import Rules, judge, possible_mps_servers, room_for_shares, users_of, why_last
from ..settings import config as policy
from ..settings.config import Limits
from ..settings.variables import existing_policy
from ..wording.text import left_behind
from .facts import GpuStatus, HostStatus, ProcessStatus, WaiterStatus
from .starts import AtLimit, Moments, at_limits, expected_starts


class HostFacts:
    """The claims and tickets of a state directory at one moment, and what /proc says of their processes.

    The directory is not created if it is missing. Claims that died are removed, as far as this user may, and the
    history is told. Errors become warnings.

    Attributes:
        claims: those that live.
        beyond: UUID -> why it cannot be claimed, of the GPUs that nobody here holds; see
            :func:`~safe_gpu.coordination.holders.claims_now`.
        tickets: of all waiters, in the order of the queue.
        faults: UUID -> note, of the GPUs that are taken last because a claim failed on them.
        warnings: sentences that say which facts are not known, and why.
        ignored: sentences on the entries that count for nothing, and on directories with very many names.
        processes: what /proc says.

    Args:
        path: the state directory.
        tree: what stands before the UUIDs of this host in the names of doors.
    """

    def __init__(self, path: str, gpus: Iterable[Gpu], tree: str) -> None:
        self._path, self._tree = path, tree
        self.claims, self.beyond = Claims(()), dict[str, Holder]()
        self.tickets: list[Entry] = []
        self.warnings: list[str] = []
        gpus = tuple(gpus)
        uuids, ignored, dead = [gpu.uuid for gpu in gpus], list[str](), list[Entry]()
        try:
            # A waiter makes its claim before it leaves the queue.
            self.tickets = waiting_tickets(path, ignored)
        except StateDirError as err:
            self.warnings = [f"The queue is not known: {err}"]
        with DeferredSignals():
            living = partial(living_entries, path, "claims", ignored, dead)
            try:
                self.claims, self.beyond = claims_now(gpus, tree, living)
            except StateDirError as err:
                self.warnings = [f"The claims are not known: {err}"]
            append(lines_of_dead(dead, time.time()), time.time())
        for part in ("claims", "queue"):
            with suppress(StateDirError):  # which is told above
                ignored.append(sentence_on_crowd(path, part))
        self.ignored = list(dict.fromkeys(filter(None, ignored)))
        self.faults = recent_faults(read_faults(path, uuids), time.time())
        self.processes = ProcessTable([*self.claims.living, *self.tickets])
        self._holders: dict[str, Holder] = {}  # name of an entry

    def on(self, gpu: Gpu) -> "Held":
        """Return who holds a GPU."""
        holding = self.claims.in_the_way(gpu.uuid)
        if not holding:
            return Held(self.beyond.get(gpu.uuid))
        whole = [one for one in holding if one.gpus.get(gpu.uuid) is None]
        if not whole:
            oldest = sorted(holding, key=lambda one: one.since or 0.0)
            return Held(self._shared_by(gpu, oldest[:MOST_SHARERS]))
        holders = [self._holder(one, gpu.uuid) for one in whole[:MOST_PARTS]]
        inside = self._inside(whole[0], gpu.uuid)
        return Held(holders[0]._replace(others=tuple(holders[1:])), inside)

    def _inside(self, around: Entry, uuid: str) -> Holder | None:
        """Return the claim of a device that is inside this one."""
        for one in self.claims.living:
            is_of_it = (one.inside, one.uid) == (around.token, around.uid) and self.claims.is_inside(one)
            if is_of_it and (uuid in one.gpus or self.claims.held_as(one, uuid) is not None):
                return self._holder(one, uuid)
        return None

    def _shared_by(self, gpu: Gpu, entries: Sequence[Entry]) -> Holder:
        sharers = [self._holder(one, gpu.uuid) for one in entries]
        sizes = promised(gpu, sharers)
        used = used_by_sharers(gpu, sharers, self.processes.family_of)
        shares = zip(sharers, sizes, used, strict=True)
        return Holder.of_sharers(one._replace(share=most, memory_used=in_use) for one, most, in_use in shares)

    def _holder(self, entry: Entry, uuid: str) -> Holder:
        """Return who has the entry of a claim, for people."""
        known = self._holders.get(entry.name)
        if known is None:
            known = self._holders[entry.name] = self.processes.holder_of(entry)
        held_as = self.claims.held_as(entry, uuid)
        named = uuid if uuid in entry.gpus else next(iter(entry.gpus))
        removable_by = self._removable_by(entry, named)
        return known._replace(share=entry.gpus.get(uuid), removable_by=removable_by, held_as=held_as)

    def _removable_by(self, entry: Entry, uuid: str) -> str | None:
        """Return who can remove the entry of a claim, if it has no door to a GPU that can be seen from here."""
        uid = remover_of(self._path, entry.uid)
        if uid is None or entry.display:
            return None
        with suppress(OSError):  # no sockets here
            known = self.claims.parts(uuid) - {entry.parts.get(uuid, -1)}
            return None if Doors(self._tree).are_taken(uuid, known) else user_name(uid)
        return None


class Held(NamedTuple):
    """Who holds a GPU.

    Attributes:
        claim: the claim, or those that share it or hold pieces of it; None if there is none.
        inside: the claim inside it, if any.
    """

    claim: Holder | None = None
    inside: Holder | None = None


class ProcessTable:
    """What /proc says of processes. Each is read once, however many entries there are.

    Args:
        entries: of which processes are looked for.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = [*entries]
        self.stopped: dict[int | bytes, bool] = {}
        self.is_stopped = partial(procfs.is_stopped, known=self.stopped)
        self.describe = cache(procfs.describe_process)
        self.ancestors = cache(procfs.ancestors)
        self.family_of = cache(procfs.family_of)

    @cached_property
    def _heirs(self) -> Mapping[str, int]:
        return heirs_of(self._entries)

    def heir_of(self, entry: Entry) -> int | None:
        """As :func:`~safe_gpu.coordination.holders.heir_of`. The first query reads all of /proc."""
        return self._heirs.get(entry.name) if os.geteuid() in (0, entry.uid) else None

    def holder_of(self, entry: Entry) -> Holder:
        """Return who has an entry, with a process of this PID namespace or none; a note says what is unusual."""
        holder, note = holder_of(entry, self.heir_of), ""
        if holder.namespace:
            heir = self.heir_of(entry)
            note = _place(holder.namespace, entry, heir)
            holder = holder._replace(pid=heir, namespace="")
        elif holder.left_by is not None:
            note = left_behind(holder.pid, holder.left_by, reused=not procfs.has_ended(holder.left_by))
        stopped = holder.pid is not None and self.is_stopped(holder.pid)
        return holder._replace(left_by=None, stopped=stopped, note=note)

    def is_of(self, process: GpuProcess, claims: Iterable[Holder]) -> bool:
        """Return whether a process is that of one of the claims, or a descendant of it."""
        family = () if process.elsewhere else (process.pid, *self.ancestors(process.pid))
        return any(claim.pid in family for claim in claims)

    def may_be_of(self, process: GpuProcess, claims: Collection[Holder]) -> bool:
        """Return whether a process may belong to one of the claims: a descendant, one of its user, or an unknown
        one."""
        described = None if process.elsewhere else self.describe(process.pid)
        if described is None or any(claim.uid < 0 or claim.user == described[0] for claim in claims):
            return True
        return self.is_of(process, claims)


def _place(namespace: str, entry: Entry, pid: int | None) -> str:
    return f"{namespace}, as process {entry.pid} there{', which cannot be seen from here' if pid is None else ''}"


_MOST_GONE = 64  # pieces of a GPU, of which it is noted that they are held

_NOTICE = 86400.0  # seconds before a window begins, from which on it is shown


def gather(patience: Patience | None = None) -> HostStatus:
    """Return the state of this host, for any user. It claims nothing and does not create the state directory.

    Args:
        patience: with which the drivers are awaited; see :func:`~safe_gpu.drivers.open_drivers`.

    Raises:
        NoDriverError, UnsatisfiableRequestError: there is no such driver, or none works. An error of the state
            directory does not raise: it becomes a warning, and the GPUs are shown as the driver reports them.
    """
    drivers, broken = open_drivers(patience)
    snapshots: list[HostSnapshot] = []
    for opened in drivers:
        try:
            snapshots.append(opened.examined(opened.detailed(opened.snapshot())))
        except NoDriverError as err:
            broken.append(str(err))
        finally:
            opened.close()
    if not snapshots:
        raise NoDriverError("; ".join(broken), driver="auto")
    return status_of(*([one for one in snapshots if one.gpus] or snapshots[:1]), broken=broken)


def status_of(*snapshots: HostSnapshot, broken: Iterable[str] = ()) -> HostStatus:
    """Return the result of :func:`gather` for given polls.

    Args:
        snapshots: one of each vendor's driver, which should be fresh.
        broken: sentences on the drivers that do not work.
    """
    path = state_dir_path()
    found = HostFacts(path, (gpu for snapshot in snapshots for gpu in snapshot.gpus), snapshots[0].name_prefix)
    now, tickets = time.time(), found.tickets
    limits = _limits_of({entry.uid for entry in (*found.claims.living, *tickets)})
    rows = [one for snapshot in snapshots for one in _gpus(snapshot, found, limits)]
    if len(snapshots) > 1:
        rows = [replace(one, prefix=f"{one.gpu.vendor}:") for one in rows]
    gpus = rows if found.warnings else with_idle_times(rows, now)  # nothing is marked where claims are not known
    limited = at_limits(tickets, gpus, limits, now)
    windows = all_windows()
    find_admitted(windows, {ticket.uid for ticket in tickets})
    starts = expected_starts(tickets, gpus, now, limited, windows, found.processes.stopped)
    return HostStatus(
        host=os.uname().nodename,
        driver=_all_of(snapshot.driver for snapshot in snapshots),
        driver_version=_all_of(snapshot.driver_version for snapshot in snapshots),
        state_dir=path,
        taken_at=now,
        gpus=tuple(gpus),
        queue=tuple(_waiters(found, starts, limited)),
        warnings=tuple(found.warnings),
        shift=_shift(snapshots, found.claims),
        doubt=next((snapshot.doubt for snapshot in snapshots if snapshot.doubt), ""),
        broken=tuple(broken),
        ignored=(*ignored_closed(), *found.ignored),
        max_gpus={user_name(uid): one.max_gpus for uid, one in limits.items() if one.max_gpus is not None},
        windows=tuple(one for one in sorted(windows) if one.begin - _NOTICE < now < one.end),
    )


def _limits_of(uids: Iterable[int]) -> dict[int, Limits]:
    """Return what the policy of this host says of these users. A directory service may be asked.

    A file that is ignored or broken counts as none: claims and ``safe-gpu policy`` report it.
    """
    path, rules = existing_policy(os.environ), None
    with suppress(PolicyError):
        rules = policy.read(path)[0] if path is not None else None
    return {} if rules is None else {uid: policy.limits_of_user(rules, uid) for uid in uids if uid >= 0}


def report_after(limits: Limits | None) -> float | None:
    """Return after how many seconds without work a claim of a user with these limits is reported; None if the policy
    does not set that."""
    if limits is not None and limits.idle_report_after is None and "idle_report_after" in limits.sections:
        return math.inf  # "unlimited"
    return None if limits is None else limits.idle_report_after


def _all_of(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, texts)))


def _shift(snapshots: Iterable[HostSnapshot], claims: Claims) -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    around = claim_around(claims.living, os.environ.get("SAFE_GPU_SCOPE", "")) if value else None
    if around is None:
        return ""
    order = os.environ.get("CUDA_DEVICE_ORDER")
    of_it = (one for one in snapshots if any(one.by_uuid(uuid) is not None for uuid in around.gpus))
    return next((stale_indices(value, order, around.gpus, one) for one in of_it), "")


def _gpus(snapshot: HostSnapshot, found: HostFacts, limits: Mapping[int, Limits]) -> Iterator[GpuStatus]:
    processes, rules = found.processes, Rules.of(os.environ)._replace(drained=closed_now())
    held = [found.on(gpu) for gpu in snapshot.gpus]
    claimed = {gpu.uuid: one.claim for gpu, one in zip(snapshot.gpus, held, strict=True) if one.claim is not None}
    verdicts = judge(snapshot, Selection(), claimed=claimed, describe=processes.describe, rules=rules)
    mps_servers = possible_mps_servers(snapshot)
    for verdict, (claim, inside) in zip(verdicts, held, strict=True):
        gpu, state, drained = verdict.gpu, verdict.state, rules.why_drained(verdict.gpu)
        fault = why_last(gpu, found.faults.get(gpu.uuid), rules)
        if claim is not None and drained:
            fault = drained
        remarks = [claim.note, "stopped (a suspended job?)" * claim.stopped] if claim else []
        reasons = [verdict.reason, *remarks, fault]
        if state == "free" and found.warnings:
            reasons = ["the driver shows no process on it; whether it is claimed is not known"]
        if claim is not None and claim.held_as is not None and state != "claimed":
            reasons.insert(1, claim.held_as.text)  # of one that is claimed the verdict tells it
        family = [] if claim is None else [*claim.each, *filter(None, [inside])]
        idle = claim is not None and _is_idle(gpu, family, processes, mps_servers)
        reason = "; ".join(filter(None, reasons))
        shown = tuple(_process(process, snapshot, processes) for process in gpu.processes or ())
        one = GpuStatus(gpu, state, idle, reason, claim, inside, shown, fault, drained=bool(drained))
        if claim is not None:
            free = _share_free(gpu, claim.sharers, found, rules) if claim.sharers else None
            one = replace(one, idle_report_after=report_after(limits.get(claim.uid)), share_free=free)
        yield one


def _share_free(gpu: Gpu, sharers: Sequence[Holder], found: HostFacts, rules: Rules) -> int:
    if len(sharers) >= MOST_SHARERS or gpu.uuid in found.beyond:
        return 0
    return max(0, room_for_shares(gpu, sharers, rules, found.processes.family_of))


def _is_idle(gpu: Gpu, claims: Collection[Holder], processes: ProcessTable, mps_servers: Collection[int]) -> bool:
    """Return whether none of the claim's processes computes or draws there; False if the process list is unknown.

    A process that draws little, and is no descendant of the claim's, may be the desktop of its user.
    """
    if gpu.processes is None or not gpu.processes_supported or gpu.processes_private:
        return False
    if gpu.mig_enabled:
        return False  # the processes are on its instances
    users = users_of(gpu, gpu.processes, processes.describe, mps_servers=mps_servers)
    drawing = (one for one in gpu.processes if one.kind == ProcessKind.GRAPHICS)
    computes = any(processes.may_be_of(one, claims) for one in users)
    if computes or any(processes.is_of(one, claims) for one in drawing):
        return False
    return bool(users) or not gpu.utilization  # else the driver hides who computes


def with_idle_times(gpus: Sequence[GpuStatus], now: float) -> Sequence[GpuStatus]:
    """Return the same GPUs, the claimed ones with ``idle_for``, and leave marks: for the next look, and that they were
    seen held, for the history.

    Args:
        now: Unix seconds.
    """
    with suppress(OSError), HistoryDir() as directory:
        return [replace(one, idle_for=_idle_for(directory, one, now)) for one in gpus]
    return gpus


def _idle_for(directory: Directory, one: GpuStatus, now: float) -> float | None:
    since = one.claim.since if one.claim else None
    if since:
        mark_seen(directory, one.gpu.uuid)
        # An entry may name anything, so only marks that are there are set anew.
        for name in one.gone[:_MOST_GONE]:
            mark_seen(directory, name, make=False)
    if not since or one.shares:  # it is not known which of the sharers does nothing
        return None
    with suppress(OSError):
        return max(0.0, round(now - _idle_since(directory, one, since, now), 3))
    return 0.0


def _idle_since(directory: Directory, one: GpuStatus, since: float, now: float) -> float:
    """Return since when the GPU has shown no work at all looks in this claim; now if it has only now begun, or works.

    The file belongs to the user who looked first: all that others can do to its time is to write.
    """
    fd = directory.open_known(f"{one.gpu.uuid.replace('/', '_')}.idle", OPEN_FILE | os.O_RDWR, make=True)[0]
    try:
        status = os.fstat(fd)
        if not one.idle and one.gpu.utilization != 0:
            os.ftruncate(fd, 0)
        elif status.st_size and status.st_mtime >= since:
            return status.st_mtime
        else:
            os.pwrite(fd, b"1", 0)
        return now
    finally:
        os.close(fd)


def _process(process: GpuProcess, snapshot: HostSnapshot, processes: ProcessTable) -> ProcessStatus:
    user, command = (None if process.elsewhere else processes.describe(process.pid)) or (None, None)
    ended = snapshot.has_ended(process)
    return ProcessStatus(process.pid, user, command or process.name, process.kind, process.memory_used, ended)


def _waiters(found: HostFacts, starts: Iterable[Moments], limited: Mapping[str, AtLimit]) -> Iterator[WaiterStatus]:
    for position, (ticket, (start, earliest)) in enumerate(zip(found.tickets, starts, strict=True), 1):
        request, limit = TicketRequest.of(ticket), limited.get(ticket.name)
        pid = ticket.pid if lives_here(ticket) else found.processes.heir_of(ticket)
        namespace = procfs.namespace_text(ticket.pidns or None)
        note = _place(namespace, ticket, pid) if namespace else ""
        vendors = set(map(vendor_of, request.gpus))
        yield WaiterStatus(
            position,
            pid,
            user_name(ticket.uid) if ticket.uid >= 0 else None,
            request.nb_gpus,
            ticket.since,
            share=Selection.from_ticket(1, request.conditions)[0].share,
            stopped=pid is not None and found.processes.is_stopped(pid),
            note=note or ("its process cannot be seen from here" if pid is None else ""),
            hold_for=request.hold_for,
            expected_start=start,
            earliest_start=earliest,
            vendor=vendors.pop() if len(vendors) == 1 else None,
            job=ticket.job or None,
            limit=None if limit is None else (limit.held, limit.most),
            turn=turn_of(ticket),
        )
