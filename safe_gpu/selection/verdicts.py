"""Which GPUs a claim may take now, and why not the others. Pure.

:func:`judge` says for every device whether it is free *now*. :mod:`.choice` says what this host can *ever* give, and
:func:`~safe_gpu.selection.choice.choose` picks the best set of the free devices.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ..gpus.devices import (
    CLAIMED_ELSEWHERE,
    ComputeMode,
    Gpu,
    GpuFault,
    GpuProcess,
    GpuVerdict,
    Holder,
    HostSnapshot,
    ProcessKind,
    VisibleLimit,
)
from ..gpus.vendors import VENDORS
from ..settings.values import parse_size
from ..settings.variables import host_setting
from ..wording.text import format_bytes, gpu_ranges, in_brackets, left_behind, plural
from .request import MinMemory, Selection
from .sharing import FamilyOf, room, strangers, why_no_room

MEMORY_VARIABLE = "SAFE_GPU_UNEXPLAINED_MEMORY"

LEAST_LIMIT = 16 << 20
"""Bytes. The NVML driver asks for processes that only draw where more than this is in use without a process; below it
their memory would count as unexplained."""


class Rules(NamedTuple):
    """How GPUs are judged.

    Attributes:
        unexplained_limit: bytes that may be in use without a process; None: by what the driver counts as used.
        lists_optional: whether GPUs whose processes the driver can never list may be claimed, by memory alone.
        closed: UUID -> why it may not be claimed now: it is drained, or reserved for others than this user.
    """

    unexplained_limit: int | None = None
    lists_optional: bool = False
    closed: Mapping[str, str] = {}

    def why_closed(self, gpu: Gpu) -> str:
        """Return why a device, or the GPU of which it is a piece, may not be claimed; "" if neither is closed."""
        return self.closed.get(gpu.uuid) or self.closed.get(gpu.whole, "")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rules:
        """Return the rules that the environment and root's file set.

        Raises:
            UnsatisfiableRequestError: ``SAFE_GPU_UNEXPLAINED_MEMORY`` is not a size.
        """
        size = None
        text = host_setting("unexplained_memory", MEMORY_VARIABLE, environ)
        if text:
            size = parse_size(text, MEMORY_VARIABLE)
        return cls(unexplained_limit=size, lists_optional=environ.get("SAFE_GPU_PROCESS_LIST") == "optional")


DEFAULT_RULES = Rules()
"""The rules where the environment sets none."""


Describe = Callable[[int], "tuple[str | None, str | None] | None"]
"""Returns the user and command line of a pid; None if this host's /proc does not show it."""

# Bytes in use without a process that may be the driver's own: an idle GPU may show 0.5 GiB where what the driver
# reserves for itself counts as used, and some tens of MiB where it does not.
_LIMIT = 128 << 20

_LIMIT_WITH_RESERVED = 1 << 30

# Bytes that graphics processes may use together on a GPU without an active display: X servers, desktops that nobody
# sees and small renderers have less.
_MOST_DRAWN = 1 << 30

_HIGHEST_OF_IDLE = 90  # percent of utilisation that a GPU may show without a process

_MPS_SERVER = "nvidia-cuda-mps-server"

# An MPS server has less on a GPU where it has no clients (27 MiB); a CUDA program has more.
_MPS_SERVER_MEMORY = 64 << 20

# What :func:`presence` returns.
SHOWN = "shown"
HIDDEN = "hidden"
NOT_YET = "not yet"
UNKNOWN = "unknown"


def possible_mps_servers(snapshot: HostSnapshot) -> frozenset[int]:
    """Return the pids that may be those of MPS servers: a small process without a name is taken for one
    (:func:`computes`), since hidepid=2 hides the names of other users' processes.

    Where a client of MPS is on some GPU of the host, it may be any pid. A server without clients is on every GPU of the
    host, so it is known where there are several.
    """
    processes: list[GpuProcess] = []
    for gpu in snapshot.gpus:
        processes += gpu.processes or ()
    if any(process.kind == ProcessKind.MPS for process in processes):
        return frozenset(process.pid for process in processes)
    if VENDORS[snapshot.vendor].library != "CUDA":
        return frozenset()
    small_on_each = []
    for gpu in snapshot.physical:
        if gpu.processes is not None:
            small_on_each.append({process.pid for process in gpu.processes if _is_as_small_as_mps_server(process)})
    if len(small_on_each) < 2:
        return frozenset()
    return frozenset(set.intersection(*small_on_each))


def _is_as_small_as_mps_server(process: GpuProcess) -> bool:
    if process.kind != ProcessKind.COMPUTE or process.memory_used is None:
        return False
    return process.memory_used <= _MPS_SERVER_MEMORY


def computes(process: GpuProcess, describe: Describe, *, mps_servers: Collection[int] = ()) -> bool:
    """Return whether a process makes a device busy by itself. Graphics processes do not, nor does the MPS server.

    Args:
        describe: gives the command by which the MPS server is known.
        mps_servers: pids of which a small process without a name is taken for the MPS server; see
            :func:`possible_mps_servers`.
    """
    if process.kind == ProcessKind.GRAPHICS:
        return False
    command = _command(process, describe) or ""
    if command.strip():
        program = command.split()[0]
        return program.rpartition("/")[2] != _MPS_SERVER
    may_be_mps_server = process.pid in mps_servers and _is_as_small_as_mps_server(process)
    return not may_be_mps_server


def drawing(gpu: Gpu, processes: Collection[GpuProcess]) -> list[GpuProcess]:
    """Return those of these processes of a device that only draw, if together they make it busy; else none.

    Where a display is active they never do. Memory that the driver does not report is not counted.
    """
    if gpu.display_active:
        return []
    computing = {process.pid for process in processes if process.kind != ProcessKind.GRAPHICS}
    only_drawing = [process for process in processes if process.pid not in computing]
    memory = sum(process.memory_used or 0 for process in only_drawing)
    if memory <= _MOST_DRAWN:
        return []
    return only_drawing


def users_of(
    gpu: Gpu, processes: Collection[GpuProcess], describe: Describe, *, mps_servers: Collection[int] = ()
) -> list[GpuProcess]:
    """Return those of these processes of a device that make it busy, one entry for each pid; the rest as for
    :func:`computes`."""
    by_pid = {process.pid: process for process in drawing(gpu, processes)}
    for process in processes:
        if computes(process, describe, mps_servers=mps_servers):
            by_pid[process.pid] = process
    return list(by_pid.values())


def _command(process: GpuProcess, describe: Describe) -> str | None:
    if process.name is not None or process.elsewhere:
        return process.name
    described = describe(process.pid)
    if described is None:
        return None
    _, command = described
    return command


def why_kept(pid: int) -> str:
    """Return why a process that has ended makes a GPU busy. The driver may list it for a moment more."""
    return f"process {pid} has ended and the driver keeps its memory: reset the GPU if that lasts"


def name_processes(
    processes: Collection[GpuProcess], describe: Describe, *, first_has_ended: bool = False
) -> tuple[str | None, str]:
    """Return the user of the first process, and a text that names it and says how many others there are."""
    first, *others = processes
    user = None
    if first_has_ended:
        text = why_kept(first.pid)
    else:
        user, text = _name_process(first, describe)
    number_of_others = len({process.pid for process in others} - {first.pid})
    if number_of_others == 1:
        text += ", and 1 more process"
    elif number_of_others > 1:
        text += f", and {number_of_others} more processes"
    return user, text


def _name_process(process: GpuProcess, describe: Describe) -> tuple[str | None, str]:
    """Return the user of a process, if known, and a text that names it and says how much memory it uses."""
    user: str | None = None
    command: str | None = None
    if process.elsewhere:
        command = "a number of another PID namespace"
    else:
        user, command = describe(process.pid) or (None, None)
    return user, f"process {process.pid}{in_brackets(user, command or process.name)} uses {memory_text(process)}"


def memory_text(process: GpuProcess) -> str:
    """Return how much memory a process uses, for people."""
    if process.memory_used is None:
        return "an unknown amount of memory"
    return format_bytes(process.memory_used)


def why_memory_unexplained(gpu: Gpu, rules: Rules) -> str:
    """Return why the GPU is busy although no process is visible: a container or the driver may hide one that uses
    memory."""
    unexplained = gpu.unexplained_memory
    if gpu.memory_shared or unexplained <= unexplained_limit(gpu, rules):
        return ""
    hint = "the driver lists none"
    if gpu.processes_supported:
        hint = "one in a container?"
    return f"{format_bytes(unexplained)} of memory in use by no process that is visible here ({hint})"


def unexplained_limit(gpu: Gpu, rules: Rules) -> int:
    """Return the bytes that may be in use on a GPU without a process and count as the driver's own."""
    if rules.unexplained_limit is not None:
        return max(rules.unexplained_limit, LEAST_LIMIT)
    # In a container the processes of a desktop are not listed, and their memory is.
    if gpu.counts_reserved or gpu.display_active:
        return _LIMIT_WITH_RESERVED
    return _LIMIT


def why_wedged(gpu: Gpu, rules: Rules) -> str:
    """Return why a GPU seems to hang, a clause; "" if it does not: it computes, and nobody is there for whom.

    Wedged cards show that for days (lium-io#1140). A GPU whose process has just ended shows it for a second.
    """
    if gpu.utilization is None or gpu.utilization <= _HIGHEST_OF_IDLE or gpu.memory_used is None:
        return ""
    may_be_in_use = (
        gpu.processes != ()
        or gpu.processes_private
        or gpu.memory_shared
        or gpu.display_active
        or why_memory_unexplained(gpu, rules)
    )
    if may_be_in_use:
        return ""
    return f"it shows {gpu.utilization}% utilisation without a process or memory in use"


def why_last(gpu: Gpu, fault: GpuFault | None, rules: Rules) -> str:
    """Return why claims take a GPU last: clauses that begin with ``taken last``; "" if they do not.

    Args:
        fault: the note that a claim failed there; None if there is none that counts.
    """
    reasons = []
    if fault is not None:
        reasons.append(fault.why_last)
    illness = gpu.illness or why_wedged(gpu, rules)
    if illness:
        reasons.append(f"taken last while {illness}")
    return "; ".join(reasons)


def presence(before: Gpu, now: Gpu, own: Collection[int]) -> str:
    """Return whether the driver shows this process on a GPU, on which it has started a context between two polls.

    Args:
        own: the pids of this process.

    Returns:
        ``SHOWN``; ``HIDDEN`` if the driver shows its memory and not the process, or never lists processes;
        ``NOT_YET`` if it shows neither; ``UNKNOWN`` if a process list failed.
    """
    if not now.processes_supported:
        return HIDDEN
    if now.processes is None or before.processes is None:
        return UNKNOWN
    if any(process.pid in own for process in now.processes):
        return SHOWN
    if now.unexplained_memory - before.unexplained_memory >= LEAST_LIMIT:
        return HIDDEN
    return NOT_YET


STOPPED = "stopped (a suspended job?)"
"""What is said of a claim whose process is stopped."""

UNWATCHABLE = (
    "the driver cannot list processes, so it is unknown whether the GPU is free; update the NVIDIA driver, try "
    "SAFE_GPU_DRIVER=nvml or SAFE_GPU_DRIVER=nvidia-smi, or set SAFE_GPU_PROCESS_LIST=optional to go by claims and "
    "memory alone"
)


def _unknown_process(pid: int) -> None:
    """Answer every question about a process as if /proc did not show it."""


class Known(NamedTuple):
    """What is known of a host beside the poll of its driver.

    Attributes:
        claimed: UUID -> who holds it, without the claims of the caller itself.
        visible_limit: the inherited CUDA_VISIBLE_DEVICES; None: there is none.
        own: pids whose processes and memory are disregarded on every device.
        explained: UUID -> pids that are disregarded on that device (the processes of the enclosing claim). On these
            devices memory in use without a process does not count, because it may be of processes that are not listed
            here.
        describe: gives the user and command of a process for the reasons, and identifies the MPS server. Without it
            reasons name only pids.
        family_of: tells whose processes there are on a shared GPU. Without it that cannot be told of any.
        rules: what the user has set.
    """

    claimed: Mapping[str, Holder] = MappingProxyType({})
    visible_limit: VisibleLimit | None = None
    own: Collection[int] = ()
    explained: Mapping[str, Collection[int]] = MappingProxyType({})
    describe: Describe = _unknown_process
    family_of: FamilyOf = _unknown_process
    rules: Rules = DEFAULT_RULES


NOTHING_KNOWN = Known()
"""Nobody holds a GPU, and nothing limits the request."""


def judge(
    snapshot: HostSnapshot, request: Selection, known: Known = NOTHING_KNOWN, gpus: Iterable[Gpu] | None = None
) -> tuple[GpuVerdict, ...]:
    """Say for every device whether this request may take it now, in the order of the snapshot.

    Args:
        snapshot: one poll of the driver.
        request: what is asked for; the number of GPUs is not used.
        known: who holds the devices, and what limits the request.
        gpus: the devices of the snapshot to judge; None: all of them.
    """
    if gpus is None:
        gpus = snapshot.gpus
    mps_servers = possible_mps_servers(snapshot)
    return tuple(_verdict(_Case(gpu, request, known, snapshot, mps_servers)) for gpu in gpus)


class _Case:
    """One device, and what its verdict depends on.

    Args:
        mps_servers: as of :func:`possible_mps_servers`.

    Attributes:
        holder: the claim that holds it, or the claims that share it; None: there is none.
        is_ours: whether the enclosing claim holds it, or this process has a context there that the driver does not
            list.
        disregarded: pids whose processes and memory do not count.
        sharers: the claims beside which the request may have a share; empty if it is for whole GPUs.
    """

    def __init__(
        self, gpu: Gpu, request: Selection, known: Known, snapshot: HostSnapshot, mps_servers: Collection[int]
    ) -> None:
        self.gpu = gpu
        self.request = request
        self.known = known
        self.snapshot = snapshot
        self.mps_servers = mps_servers
        self.holder = known.claimed.get(gpu.uuid)
        self.is_ours = gpu.uuid in known.explained
        self.disregarded = {*known.own, *known.explained.get(gpu.uuid, ())}
        self.sharers: tuple[Holder, ...] = ()
        if self.holder is not None and request.share is not None:
            self.sharers = self.holder.sharers

    def other_processes(self) -> list[GpuProcess]:
        """Return the processes that are neither disregarded nor may be those of the sharers."""
        others = [process for process in self.gpu.processes or () if process.pid not in self.disregarded]
        if self.sharers:
            return strangers(others, self.sharers, self.known.family_of)
        return others


def _verdict(case: _Case) -> GpuVerdict:
    for reason in _REASONS:
        verdict = reason(case)
        if verdict is not None:
            return verdict
    return GpuVerdict(case.gpu, "free")


def _unusable(case: _Case) -> GpuVerdict | None:
    why = why_unusable(case.gpu)
    if not why:
        return None
    return GpuVerdict(case.gpu, "unusable", why)


def _outside(case: _Case) -> GpuVerdict | None:
    why = why_outside(case.gpu, case.request, case.known.visible_limit)
    if not why:
        return None
    return GpuVerdict(case.gpu, "outside", why)


def _closed(case: _Case) -> GpuVerdict | None:
    """A claim that holds a closed device says more, and so it is the reason, unless the request could share with it."""
    if case.is_ours:
        return None
    if case.holder is not None and not case.sharers:
        return None
    why = case.known.rules.why_closed(case.gpu)
    if not why:
        return None
    return GpuVerdict(case.gpu, "unusable", why, closed=True)


def _with_display(case: _Case) -> GpuVerdict | None:
    """The only GPU of a desktop is shared by the desktop and all claims, so only the conditions of the request
    count, and a share is a condition on its free memory."""
    if not case.snapshot.shared_display:
        return None
    request = case.request
    if request.share is not None:
        request = request._replace(conditions=(MinMemory(request.share), *request.conditions))
    return GpuVerdict(case.gpu, "display", request.why_not_now(case.gpu, case.disregarded))


def _claimed(case: _Case) -> GpuVerdict | None:
    holder = case.holder
    if holder is None or case.sharers:
        return None
    pid = holder.pid
    if holder.namespace:  # the number means another process here
        pid = None
    return GpuVerdict(case.gpu, "claimed", _claimed_by(holder), pid, holder.user, holder)


def _unwatchable(case: _Case) -> GpuVerdict | None:
    if case.gpu.processes_supported or case.known.rules.lists_optional:
        return None
    return GpuVerdict(case.gpu, "unusable", UNWATCHABLE)


def _without_process_list(case: _Case) -> GpuVerdict | None:
    gpu = case.gpu
    if gpu.processes is not None or not gpu.processes_supported:
        return None
    return GpuVerdict(gpu, "busy", f"process list failed: {gpu.process_error or 'the driver does not say why'}")


def _used(case: _Case) -> GpuVerdict | None:
    describe = case.known.describe
    users = users_of(case.gpu, case.other_processes(), describe, mps_servers=case.mps_servers)
    if not users:
        return None
    users.sort(key=lambda process: (-(process.memory_used or 0), process.pid))
    user, text = name_processes(users, describe, first_has_ended=case.snapshot.has_ended(users[0]))
    if case.sharers:
        text += " without a share"
    return GpuVerdict(case.gpu, "busy", text, users[0].pid, user)


def _not_as_asked(case: _Case) -> GpuVerdict | None:
    why = case.request.why_not_now(case.gpu, case.disregarded)
    if not why:
        return None
    return GpuVerdict(case.gpu, "busy", why)


def _used_by_nobody_visible(case: _Case) -> GpuVerdict | None:
    """Of a device that is ours, or that is shared, such memory may be that of processes which are not listed."""
    if case.is_ours or case.sharers:
        return None
    why = why_memory_unexplained(case.gpu, case.known.rules)
    if not why:
        return None
    return GpuVerdict(case.gpu, "busy", why)


def _without_room(case: _Case) -> GpuVerdict | None:
    share = case.request.share
    if share is None:
        return None
    left = room_for_shares(case.gpu, case.sharers, case.known.rules, case.known.family_of, case.disregarded)
    why = why_no_room(case.gpu, case.sharers, left, share)
    if not why:
        return None
    state = "busy"
    if case.sharers:
        state = "claimed"
    return GpuVerdict(case.gpu, state, why, holder=case.holder)


# The first that applies is the verdict, and a device to which none applies is free. So what no wait can change stands
# first, then what ends with a claim, and then what processes and memory tell.
_REASONS: tuple[Callable[[_Case], GpuVerdict | None], ...] = (
    _unusable,
    _outside,
    _closed,
    _with_display,
    _claimed,
    _unwatchable,
    _without_process_list,
    _used,
    _not_as_asked,
    _used_by_nobody_visible,
    _without_room,
)


def room_for_shares(
    gpu: Gpu, sharers: Sequence[Holder], rules: Rules, family_of: FamilyOf, disregarded: Collection[int] = ()
) -> int:
    """Return the bytes of a GPU that another share may have; see :func:`~safe_gpu.selection.sharing.room`."""
    own = sum(process.memory_used or 0 for process in gpu.processes or () if process.pid in disregarded)
    return room(gpu, sharers, family_of, unexplained=unexplained_limit(gpu, rules), own=own)


def why_unusable(gpu: Gpu) -> str:
    """Return why nobody can claim the device in its present state; "" if somebody can."""
    if gpu.unusable:
        return gpu.unusable
    if gpu.lost:
        return "lost by the driver (fell off the bus, or needs a reset)"
    if gpu.mig_enabled and not gpu.is_mig_instance:
        return "MIG mode is on: claim one of its instances"
    if gpu.compute_mode == ComputeMode.PROHIBITED:
        return "compute mode PROHIBITED (an administrator can change that: nvidia-smi -c DEFAULT)"
    return ""


def why_outside(gpu: Gpu, request: Selection, visible_limit: VisibleLimit | None) -> str:
    """Return why the request or the visible limit excludes the device; "" if neither does."""
    reason = request.why_outside(gpu)
    if reason:
        return reason
    if visible_limit is None or gpu.uuid in visible_limit:
        return ""
    if visible_limit.frozen:
        return "not visible to CUDA in this process"
    return f"not listed in {visible_limit.title}"


def _claimed_by(holder: Holder) -> str:
    """Return who holds a device, for people."""
    if holder.sharers:
        return f"shared by {plural(len(holder.sharers), 'claim')}{_stopped(holder)}"
    if holder.full:
        return holder.full
    if holder.elsewhere:
        return CLAIMED_ELSEWHERE
    if holder.left_by is not None:
        text = left_behind(holder.pid, holder.left_by)
    else:
        text = "claimed"
        if holder.pid is not None:
            text += f" by process {holder.pid}"
        if holder.namespace:
            text += f" {holder.namespace}"
    job = None
    if holder.job:
        job = f"job {holder.job}"
    text += in_brackets(holder.user, job, holder.command)
    if holder.since is not None:
        text += time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    if holder.held_as is not None:
        text += f", {holder.held_as.text}"
    return text + _stopped(holder)


def _stopped(holder: Holder) -> str:
    if not any(one.stopped for one in holder.each):
        return ""
    return f"; {STOPPED}"


def fence_hint(unlimited: Sequence[GpuVerdict], visible_limit: VisibleLimit | None) -> str:
    """Return what the visible limit excludes, such as ``CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7
    others are free``.

    ``unlimited`` are the verdicts for the same request *without* it. The result is "" if it excludes none.
    """
    if visible_limit is None:
        return ""
    claimable = [verdict for verdict in unlimited if not verdict.gpu.mig_enabled]
    beyond = [verdict for verdict in claimable if verdict.gpu.uuid not in visible_limit]
    if all(verdict.state == "outside" for verdict in beyond):
        return ""  # an option or the enclosing claim excludes them anyway
    inside = len(claimable) - len(beyond)
    free = sum(verdict.free for verdict in beyond)
    if free == 0:
        others = "none of the others are free"
    elif free == 1:
        others = "1 other is free"
    else:
        others = f"{free} others are free"
    how = in_brackets(how_misread(visible_limit, [verdict.gpu for verdict in claimable]))
    return f"{visible_limit.title} limits this process to {inside} of {len(claimable)} GPUs{how}; {others}"


def how_misread(visible_limit: VisibleLimit, gpus: Iterable[Gpu]) -> str:
    """Return what the library makes of a variable such as ``0 1`` that is no list of GPUs that are here, and how one is
    written; "" for a list, and for a word that hides all GPUs.

    Args:
        gpus: of the host.
    """
    hides_all = visible_limit.value.strip().lower() in _HIDES_ALL
    if visible_limit.frozen or hides_all or _is_read_as_meant(visible_limit):
        return ""
    read_as = "no GPU"
    shown = [gpu.label for gpu in gpus if gpu.uuid in visible_limit]
    if shown:
        read_as = f"GPU {gpu_ranges(shown)}"
    way_out = "name GPUs of this host by index or UUID, each once, with commas between"
    return f"{visible_limit.library} reads {visible_limit.value!r} as {read_as}: {way_out}"


_HIDES_ALL = ("", "-1", "none", "void", "nodevfiles")  # people write these to hide all GPUs, and they do


def _is_read_as_meant(visible_limit: VisibleLimit) -> bool:
    """Return whether each entry of a variable names a GPU that the library shows; of another library than CUDA whether
    it shows any."""
    if visible_limit.library != "CUDA":
        return len(visible_limit.uuids) > 0
    entries = [entry.strip() for entry in visible_limit.value.strip().removesuffix(",").split(",")]
    for entry in entries:
        if entry not in visible_limit and not re.fullmatch("[+-]?[0-9]+|[A-Z].*", entry):
            return False
    return len(entries) == len(visible_limit.uuids)
