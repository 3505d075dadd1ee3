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
from functools import partial
from itertools import chain
from typing import NamedTuple

from ..coordination.closed import all_windows, closed_now, ignored_closed, look_up_admitted_users
from ..coordination.crowds import sentence_on_crowd
from ..coordination.directory import OPEN_FILE, Directory, remover_of, state_dir_path
from ..coordination.doors import MOST_PARTS, Doors
from ..coordination.entries import living_entries
from ..coordination.entry import Entry
from ..coordination.faults import read_faults
from ..coordination.history import HistoryDir, append, is_in_history, lines_of_dead, mark_seen
from ..coordination.holders import Claims, claims_now, enclosing_claim
from ..coordination.looks import Looks, Sight, adds_looks, line_of
from ..coordination.queue import TicketRequest, waiting_tickets
from ..coordination.silicon import share_of
from ..coordination.turns import turn_of
from ..drivers import open_drivers
from ..drivers.patience import Patience
from ..errors import NoDriverError, PolicyError, StateDirError
from ..gpus.devices import (
    MOST_SHARERS,
    Gpu,
    GpuProcess,
    GpuVerdict,
    Holder,
    HostSnapshot,
    ProcessKind,
    recent_faults,
    vendor_of,
)
from ..host import procfs
from ..host.foreign_files import printable
from ..host.procfs import user_name
from ..host.signals import DeferredSignals
from ..runtimes.visible_devices import stale_indices
from ..selection.request import Selection
from ..selection.sharing import promised, used_by_sharers
from ..selection.verdicts import (
    STOPPED,
    Known,
    Rules,
    judge,
    possible_mps_servers,
    room_for_shares,
    users_of,
    why_last,
    why_memory_unexplained,
)
from ..settings import config as policy
from ..settings.config import Limits
from ..settings.variables import existing_policy
from .beside import Bystanders
from .facts import GpuStatus, HostStatus, ProcessStatus, WaiterStatus
from .processes import ProcessTable, place
from .starts import AtLimit, Moments, at_limits, expected_starts


class HeldBy(NamedTuple):
    """Who holds a GPU.

    Attributes:
        claim: the claim, or those that share it or hold pieces of it; None if there is none.
        inside: the claim inside it, if any.
    """

    claim: Holder | None = None
    inside: Holder | None = None


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
        looks: what earlier looks have seen of the claims; None where there is no history.
        warnings: sentences that say which facts are not known, and why.
        ignored: sentences on the entries that are ignored, and on directories with very many names.
        processes: what /proc says.

    Args:
        path: the state directory.
        prefix: of the UUIDs of this host in the names of doors.
    """

    def __init__(self, path: str, gpus: Iterable[Gpu], prefix: str) -> None:
        self._path = path
        self._prefix = prefix
        self.claims = Claims(())
        self.beyond: dict[str, Holder] = {}
        self.tickets: list[Entry] = []
        self.warnings: list[str] = []
        gpus = tuple(gpus)
        ignored: list[str] = []
        dead: list[Entry] = []
        try:
            # A waiter makes its claim before it leaves the queue.
            self.tickets = waiting_tickets(path, ignored)
        except StateDirError as err:
            self.warnings = [f"the queue is not known: {err}"]
        with DeferredSignals():
            living = partial(living_entries, path, "claims", ignored, dead)
            try:
                self.claims, self.beyond = claims_now(gpus, prefix, living)
            except StateDirError as err:
                self.warnings = [f"the claims are not known: {err}"]
            now = time.time()
            append(lines_of_dead(dead, now), now)
        for part in ("claims", "queue"):
            with suppress(StateDirError):  # which is told above
                ignored.append(sentence_on_crowd(path, part))
        self.ignored = list(dict.fromkeys(sentence for sentence in ignored if sentence))
        self.faults = recent_faults(read_faults(path, [gpu.uuid for gpu in gpus]), time.time())
        self.looks: Looks | None = None
        with suppress(OSError), HistoryDir() as directory:
            self.looks = Looks(directory)
        self.processes = ProcessTable([*self.claims.living, *self.tickets])
        self._holders: dict[str, Holder] = {}  # name of an entry

    def on(self, gpu: Gpu) -> HeldBy:
        """Return who holds a GPU."""
        entries = self.entries_on(gpu)
        if not entries:
            return HeldBy(self.beyond.get(gpu.uuid))
        if share_of(entries[0], gpu) is not None:
            return HeldBy(self._shared_by(gpu, entries))
        holders = [self._holder(one, gpu.uuid) for one in entries]
        inside = self._inside(entries[0], gpu.uuid)
        return HeldBy(holders[0]._replace(others=tuple(holders[1:])), inside)

    def entries_on(self, gpu: Gpu) -> list[Entry]:
        """Return the claims that are told of a GPU: those that have all of it, else those that share it, the oldest
        first."""
        holding = self.claims.in_the_way(gpu.uuid)
        whole = [one for one in holding if share_of(one, gpu) is None]
        if whole:
            return whole[:MOST_PARTS]
        oldest = sorted(holding, key=lambda one: one.since or 0.0)
        return oldest[:MOST_SHARERS]

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
        told = []
        for sharer, share, in_use in zip(sharers, sizes, used, strict=True):
            told.append(sharer._replace(share=share, memory_used=in_use))
        return Holder.of_sharers(told)

    def _holder(self, entry: Entry, uuid: str) -> Holder:
        """Return who has the entry of a claim, for people."""
        if entry.name not in self._holders:
            self._holders[entry.name] = self.processes.holder_of(entry)
        named = uuid
        if uuid not in entry.gpus:
            named, *_ = entry.gpus  # a claim of the GPU, or of pieces of it
        utilization = None
        if self.looks is not None:
            utilization = self.looks.use_of(entry, uuid).utilization
        return self._holders[entry.name]._replace(
            share=entry.gpus.get(uuid),
            removable_by=self._removable_by(entry, named),
            held_as=self.claims.held_as(entry, uuid),
            utilization=utilization,
        )

    def _removable_by(self, entry: Entry, uuid: str) -> str | None:
        """Return who can remove the entry of a claim, if it has no door to a GPU that can be seen from here."""
        uid = remover_of(self._path, entry.uid)
        if uid is None or entry.display:
            return None
        with suppress(OSError):  # no sockets here
            known = self.claims.parts(uuid) - {entry.parts.get(uuid, -1)}
            if not Doors(self._prefix).are_taken(uuid, known):
                return user_name(uid)
        return None


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
    with_gpus = [snapshot for snapshot in snapshots if snapshot.gpus]
    if not with_gpus:
        return status_of(snapshots[0], broken=broken)
    return status_of(*with_gpus, broken=broken)


def status_of(*snapshots: HostSnapshot, broken: Iterable[str] = ()) -> HostStatus:
    """Return the result of :func:`gather` for given polls.

    Args:
        snapshots: one of each vendor's driver, which should be fresh.
        broken: sentences on the drivers that do not work.
    """
    path = state_dir_path()
    all_gpus = list(chain.from_iterable(snapshot.gpus for snapshot in snapshots))
    found = HostFacts(path, all_gpus, snapshots[0].name_prefix)
    now = time.time()
    tickets = found.tickets
    limits = _limits_of({entry.uid for entry in (*found.claims.living, *tickets)})
    gpus: list[GpuStatus] = []
    for snapshot in snapshots:
        gpus += _gpus(snapshot, found, limits)
    if len(snapshots) > 1:
        gpus = [replace(one, prefix=f"{one.gpu.vendor}:") for one in gpus]
    gpus = _with_bystanders(gpus, found, snapshots)
    ignored_looks = ""
    if not found.warnings:  # nothing is marked where claims are not known
        ignored_looks = add_look(gpus, found, now)
        gpus = with_idle_times(gpus, now)
    limited = at_limits(tickets, gpus, limits, now)
    windows = all_windows()
    look_up_admitted_users(windows, {ticket.uid for ticket in tickets})
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
        doubt=_first_doubt(snapshots),
        broken=tuple(broken),
        ignored=tuple(sentence for sentence in (*ignored_closed(), *found.ignored, ignored_looks) if sentence),
        max_gpus={user_name(uid): one.max_gpus for uid, one in limits.items() if one.max_gpus is not None},
        windows=tuple(one for one in sorted(windows) if one.begin - _NOTICE < now < one.end),
    )


def _first_doubt(snapshots: Iterable[HostSnapshot]) -> str:
    for snapshot in snapshots:
        if snapshot.doubt:
            return snapshot.doubt
    return ""


def _limits_of(uids: Iterable[int]) -> dict[int, Limits]:
    """Return what the policy of this host says of these users. A directory service may be asked.

    A file that is ignored or broken counts as none: claims and ``safe-gpu policy`` report it.
    """
    path = existing_policy(os.environ)
    if path is None:
        return {}
    try:
        rules, _ = policy.read(path)
    except PolicyError:
        return {}
    if rules is None:
        return {}
    return {uid: policy.limits_of_user(rules, uid) for uid in uids if uid >= 0}


def report_after(limits: Limits | None) -> float | None:
    """Return after how many seconds without work a claim of a user with these limits is reported; None if the policy
    does not set that."""
    if limits is None:
        return None
    if limits.idle_report_after is None and "idle_report_after" in limits.sections:
        return math.inf  # "unlimited"
    return limits.idle_report_after


def _all_of(texts: Iterable[str]) -> str:
    known = [text for text in texts if text]
    return ", ".join(dict.fromkeys(known))


def _shift(snapshots: Iterable[HostSnapshot], claims: Claims) -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not value:
        return ""
    enclosing = enclosing_claim(claims.living, os.environ.get("SAFE_GPU_SCOPE", ""))
    if enclosing is None:
        return ""
    for snapshot in snapshots:
        if any(snapshot.by_uuid(uuid) is not None for uuid in enclosing.gpus):
            return stale_indices(value, os.environ.get("CUDA_DEVICE_ORDER"), enclosing.gpus, snapshot)
    return ""


def _gpus(snapshot: HostSnapshot, found: HostFacts, limits: Mapping[int, Limits]) -> Iterator[GpuStatus]:
    rules = Rules.of(os.environ)._replace(closed=closed_now())
    held = [found.on(gpu) for gpu in snapshot.gpus]
    claimed = {gpu.uuid: one.claim for gpu, one in zip(snapshot.gpus, held, strict=True) if one.claim is not None}
    verdicts = judge(snapshot, Selection(), Known(claimed, describe=found.processes.describe, rules=rules))
    mps_servers = possible_mps_servers(snapshot)
    for verdict, (claim, inside) in zip(verdicts, held, strict=True):
        gpu = verdict.gpu
        drained = rules.why_closed(gpu)
        fault = why_last(gpu, found.faults.get(gpu.uuid), rules)
        if claim is not None and drained:
            fault = drained
        one = GpuStatus(
            gpu,
            verdict.state,
            reason=_reason(verdict, claim, fault, found),
            claim=claim,
            inside=inside,
            processes=tuple(_process(process, snapshot, found.processes) for process in gpu.processes or ()),
            fault=fault,
            drained=drained != "",
        )
        if claim is not None:
            one = replace(
                one,
                idle=_is_idle(gpu, one.holders, found.processes, mps_servers),
                sights=_sights(gpu, one.claims, found.processes, mps_servers, rules),
                idle_report_after=report_after(limits.get(claim.uid)),
                share_free=_share_free(gpu, claim.sharers, found, rules),
            )
        yield one


def _with_bystanders(gpus: Iterable[GpuStatus], found: HostFacts, snapshots: Iterable[HostSnapshot]) -> list[GpuStatus]:
    """Return the same GPUs with the processes that are of no claim of theirs."""
    all_gpus = list(gpus)
    labels = {one.gpu.uuid: one.label for one in all_gpus}
    bystanders = Bystanders(found.claims, found.beyond, labels, found.processes)
    snapshot_of = {gpu.uuid: snapshot for snapshot in snapshots for gpu in snapshot.gpus}
    return [replace(one, beside=bystanders.beside(one.gpu, snapshot_of[one.gpu.uuid])) for one in all_gpus]


def _reason(verdict: GpuVerdict, claim: Holder | None, fault: str, found: HostFacts) -> str:
    """Return why a GPU is in its state, what is unusual about its claim, and why it is taken last."""
    if verdict.state == "free" and found.warnings:
        return "the driver shows no process on it; whether it is claimed is not known"
    reasons = [verdict.reason]
    if claim is not None and verdict.state != "claimed":  # else the verdict tells it
        if claim.held_as is not None:
            reasons.append(claim.held_as.text)
        if claim.stopped:
            reasons.append(STOPPED)
    if claim is not None:
        reasons.append(claim.note)
    reasons.append(fault)
    return "; ".join(reason for reason in reasons if reason)


def _share_free(gpu: Gpu, sharers: Sequence[Holder], found: HostFacts, rules: Rules) -> int | None:
    """Return how many bytes of a GPU are left for one more share; None if it is not shared."""
    if not sharers:
        return None
    if len(sharers) >= MOST_SHARERS or gpu.uuid in found.beyond:
        return 0
    return max(0, room_for_shares(gpu, sharers, rules, found.processes.family_of))


def _is_idle(
    gpu: Gpu,
    claims: Collection[Holder],
    processes: ProcessTable,
    mps_servers: Collection[int],
    others: Collection[Holder] = (),
) -> bool:
    """Return whether no process of the claim uses the GPU; False if the process list is unknown.

    A process that draws little, and is no descendant of the claim's, may be the desktop of its user.

    Args:
        others: claims of the GPU whose processes are not meant.
    """
    if not _lists_processes(gpu):
        return False
    users = users_of(gpu, gpu.processes or (), processes.describe, mps_servers=mps_servers)
    if any(processes.may_be_of(one, claims) and not processes.is_of(one, others) for one in users):
        return False
    drawing = [one for one in gpu.processes or () if one.kind == ProcessKind.GRAPHICS]
    if any(processes.is_of(one, claims) for one in drawing):
        return False
    return bool(users) or not gpu.utilization  # else the driver hides who computes


def _lists_processes(gpu: Gpu) -> bool:
    """Return whether the driver lists all processes of a device that it does not hide from this PID namespace."""
    if gpu.mig_enabled:
        return False  # they are on its instances
    return gpu.processes is not None and gpu.processes_supported and not gpu.processes_private


def _sights(
    gpu: Gpu, claims: Sequence[Holder], processes: ProcessTable, mps_servers: Collection[int], rules: Rules
) -> tuple[Sight, ...]:
    """Return what this look sees of each of these claims of a device."""
    # Memory of nobody who is visible may be of a process in a container.
    may_be_hidden = why_memory_unexplained(gpu, rules) != ""
    sights = []
    for claim in claims:
        absent = None
        if _lists_processes(gpu):
            others = [one for one in claims if one is not claim]
            absent = not may_be_hidden and _is_idle(gpu, [claim], processes, mps_servers, others)
        memory = gpu.memory_used
        if claim.share is not None:
            memory = claim.memory_used
        sights.append(Sight(gpu.utilization, memory, absent))
    return tuple(sights)


def add_look(gpus: Collection[GpuStatus], found: HostFacts, now: float) -> str:
    """Add this look to what earlier ones have seen of the claims, if those of this user are added, and write to the
    history what is due. Return a sentence if the file of earlier ones is ignored; else "".

    Args:
        now: Unix seconds.
    """
    looks = found.looks
    if looks is None:
        return ""
    with DeferredSignals(), suppress(OSError), HistoryDir() as directory:
        if not adds_looks(directory):
            return ""
        has_none = not looks.claims and looks.ignored == ""
        looks.add(_seen(gpus, found), now)
        if has_none and not looks.claims:
            return ""
        ended = looks.ended(found.claims.living)
        due = looks.due()
        if append([line_of(claim) for claim in (*ended, *due)], now):
            looks.note_told(due)
        return _written(looks, directory)
    return ""


def _written(looks: Looks, directory: Directory) -> str:
    """Write the file, and return a sentence if it was ignored, or cannot be written; else ""."""
    what = f"{printable(looks.path)} is ignored ({looks.ignored})"
    try:
        looks.write(directory)
    except OSError as err:
        if looks.ignored == "":
            return f"{printable(looks.path)} cannot be written ({err.strerror})"
        return f"{what}, and cannot be replaced ({err.strerror}): remove it"
    if looks.ignored == "":
        return ""
    return f"{what}, and was replaced"


def _seen(gpus: Collection[GpuStatus], found: HostFacts) -> list[tuple[Entry, str, Sight]]:
    """Return what this look sees of which claim on which GPU: of each GPU the first claim, then the second ones."""
    seen: list[tuple[int, Entry, str, Sight]] = []
    for one in gpus:
        if not one.sights:
            continue
        entries = found.entries_on(one.gpu)
        if not entries:
            continue  # another state directory holds it
        for rank, (entry, claim, sight) in enumerate(zip(entries, one.claims, one.sights, strict=True)):
            # An entry may name anything. One of ours names no more GPUs than there are.
            is_plain = claim.held_as is None and len(entry.gpus) <= len(gpus)
            if is_plain and is_in_history(entry):
                seen.append((rank, entry, one.gpu.uuid, sight))
    seen.sort(key=lambda sight_of_rank: sight_of_rank[0])
    return [(entry, uuid, sight) for _, entry, uuid, sight in seen]


def with_idle_times(gpus: list[GpuStatus], now: float) -> list[GpuStatus]:
    """Return the same GPUs, the claimed ones with ``idle_for``, and leave marks: for the next look, and that they were
    seen held, for the history.

    Args:
        now: Unix seconds.
    """
    with suppress(OSError), HistoryDir() as directory:
        return [replace(one, idle_for=_idle_for(directory, one, now)) for one in gpus]
    return gpus


def _idle_for(directory: Directory, one: GpuStatus, now: float) -> float | None:
    if one.claim is None or not one.claim.since:
        return None
    since = one.claim.since
    mark_seen(directory, one.gpu.uuid)
    # An entry may name anything, so only marks that are there are set anew.
    for name in one.gone[:_MOST_GONE]:
        mark_seen(directory, name, make=False)
    if one.shares:  # it is not known which of the sharers does nothing
        return None
    with suppress(OSError):
        return max(0.0, round(now - _idle_since(directory, one, since, now), 3))
    return 0.0


def _idle_since(directory: Directory, one: GpuStatus, since: float, now: float) -> float:
    """Return since when the GPU has shown no work at all looks in this claim; now if it has only now begun, or works.

    The file belongs to the user who looked first: all that others can do to its time is to write.
    """
    name = one.gpu.uuid.replace("/", "_")
    fd, _ = directory.open_known(f"{name}.idle", OPEN_FILE | os.O_RDWR, make=True)
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
    user, command = None, None
    described = processes.described(process)
    if described is not None:
        user, command = described
    ended = snapshot.has_ended(process)
    return ProcessStatus(process.pid, user, command or process.name, process.kind, process.memory_used, ended)


def _waiters(found: HostFacts, starts: Iterable[Moments], limited: Mapping[str, AtLimit]) -> Iterator[WaiterStatus]:
    for position, (ticket, moments) in enumerate(zip(found.tickets, starts, strict=True), 1):
        request = TicketRequest.of(ticket)
        selection, _ = Selection.from_ticket(1, request.conditions)
        pid = found.processes.pid_of(ticket)
        user = None
        if ticket.uid >= 0:
            user = user_name(ticket.uid)
        limit = None
        if ticket.name in limited:
            at_limit = limited[ticket.name]
            limit = (at_limit.held, at_limit.most)
        expected_start, earliest_start = moments
        yield WaiterStatus(
            position,
            pid,
            user,
            request.nb_gpus,
            ticket.since,
            share=selection.share,
            stopped=pid is not None and found.processes.is_stopped(pid),
            note=_note_on_waiter(ticket, pid, found.claims),
            hold_for=request.hold_for,
            expected_start=expected_start,
            earliest_start=earliest_start,
            vendor=_common_vendor(request.gpus),
            job=ticket.job or None,
            limit=limit,
            turn=turn_of(ticket),
        )


def _note_on_waiter(ticket: Entry, pid: int | None, claims: Claims) -> str:
    namespace = procfs.namespace_text(ticket.pidns or None)
    if namespace:
        return place(namespace, ticket, pid)
    if pid is None:
        return "its process cannot be seen from here"
    if claims.is_inside(ticket):
        return "it is inside a claim, and waits for GPUs of that claim"
    return ""


def _common_vendor(uuids: Iterable[str]) -> str | None:
    """Return the vendor of these GPUs, if all are of the same."""
    vendors = {vendor_of(uuid) for uuid in uuids}
    if len(vendors) != 1:
        return None
    return vendors.pop()
