"""Which GPUs a claim may take now, and why not the others. Pure.

:func:`judge` says for every device whether it is free *now*. :mod:`.choice` says what this host can *ever* give, and
:func:`~safe_gpu.selection.choice.choose` picks the best set of the free devices.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..gpus.devices import (
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
        drained: UUID -> why nobody may claim it now.
    """

    unexplained_limit: int | None = None
    lists_optional: bool = False
    drained: Mapping[str, str] = {}

    def why_drained(self, gpu: Gpu) -> str:
        """Return why nobody may claim a device, or the one that it is an instance of; "" if somebody may."""
        return self.drained.get(gpu.uuid) or self.drained.get(gpu.whole, "")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rules:
        """Return the rules that the environment and root's file set.

        Raises:
            UnsatisfiableRequestError: ``SAFE_GPU_UNEXPLAINED_MEMORY`` is not a size.
        """
        limit = host_setting("unexplained_memory", MEMORY_VARIABLE, environ)
        size = parse_size(limit, MEMORY_VARIABLE) if limit else None
        return cls(size, environ.get("SAFE_GPU_PROCESS_LIST") == "optional")


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

SHOWN, HIDDEN, NOT_YET, UNKNOWN = "shown", "hidden", "not yet", "unknown"


def possible_mps_servers(snapshot: HostSnapshot) -> frozenset[int]:
    """Return the pids that may be those of MPS servers: a small process without a name is taken for one
    (:func:`computes`), since hidepid=2 hides the names of other users' processes.

    Where a client of MPS is on some GPU of the host, it may be any pid. A server without clients is on every GPU of the
    host, so it is known where there are several.
    """
    processes = [process for gpu in snapshot.gpus for process in gpu.processes or ()]
    if any(process.kind == ProcessKind.MPS for process in processes):
        return frozenset(process.pid for process in processes)
    small_on_each = [
        {process.pid for process in gpu.processes if _is_as_small_as_mps_server(process)}
        for gpu in snapshot.physical
        if gpu.processes is not None
    ]
    if len(small_on_each) < 2 or VENDORS[snapshot.vendor].library != "CUDA":
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
    words = (_command(process, describe) or "").split()
    if words:
        return words[0].rpartition("/")[2] != _MPS_SERVER
    return not (process.pid in mps_servers and _is_as_small_as_mps_server(process))


def drawing(gpu: Gpu, processes: Collection[GpuProcess]) -> list[GpuProcess]:
    """Return those of these processes of a device that only draw, if together they make it busy; else none.

    Where a display is active they never do. Memory that the driver does not tell is not counted.
    """
    computing = {process.pid for process in processes if process.kind != ProcessKind.GRAPHICS}
    only = [process for process in processes if process.pid not in computing]
    busy = not gpu.display_active and sum(process.memory_used or 0 for process in only) > _MOST_DRAWN
    return only if busy else []


def users_of(
    gpu: Gpu, processes: Collection[GpuProcess], describe: Describe, *, mps_servers: Collection[int] = ()
) -> list[GpuProcess]:
    """Return those of these processes of a device that make it busy, one entry for each pid; the rest as for
    :func:`computes`."""
    if not processes:
        return []
    computing = [process for process in processes if computes(process, describe, mps_servers=mps_servers)]
    return list({process.pid: process for process in (*drawing(gpu, processes), *computing)}.values())


def _command(process: GpuProcess, describe: Describe) -> str | None:
    if process.name is not None or process.elsewhere:
        return process.name
    described = describe(process.pid)
    return described[1] if described else None


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
    pids = {process.pid for process in others} - {first.pid}
    if pids:
        text += f", and {len(pids)} more process{'es' if len(pids) > 1 else ''}"
    return user, text


def _name_process(process: GpuProcess, describe: Describe) -> tuple[str | None, str]:
    user, command = (None if process.elsewhere else describe(process.pid)) or (None, None)
    amount = "an unknown amount of memory" if process.memory_used is None else format_bytes(process.memory_used)
    if process.elsewhere:
        command = "a number of another PID namespace"
    return user, f"process {process.pid}{in_brackets(user, command or process.name)} uses {amount}"


def why_memory_unexplained(gpu: Gpu, rules: Rules) -> str:
    """Return why the GPU is busy although no process is visible: a container or the driver may hide one that uses
    memory."""
    limit = unexplained_limit(gpu, rules)
    excess = gpu.unexplained_memory if (gpu.memory_used or 0) > limit else 0
    if gpu.memory_shared or excess <= limit:
        return ""
    hidden = "one in a container?" if gpu.processes_supported else "the driver lists none"
    return f"{format_bytes(excess)} of memory in use by no process that is visible here ({hidden})"


def unexplained_limit(gpu: Gpu, rules: Rules) -> int:
    if rules.unexplained_limit is not None:
        return max(rules.unexplained_limit, LEAST_LIMIT)
    # In a container the processes of a desktop are not listed, and their memory is.
    return _LIMIT_WITH_RESERVED if gpu.counts_reserved or gpu.display_active else _LIMIT


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
    return "" if may_be_in_use else f"it shows {gpu.utilization}% utilisation without a process or memory in use"


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
    return HIDDEN if now.unexplained_memory - before.unexplained_memory >= LEAST_LIMIT else NOT_YET


UNWATCHABLE = (
    "the driver cannot list processes, so it is unknown whether the GPU is free; update the NVIDIA driver, try "
    "SAFE_GPU_DRIVER=nvml or SAFE_GPU_DRIVER=nvidia-smi, or set SAFE_GPU_PROCESS_LIST=optional to go by claims and "
    "memory alone"
)


def judge(
    snapshot: HostSnapshot,
    request: Selection,
    *,
    claimed: Mapping[str, Holder],
    visible_limit: VisibleLimit | None = None,
    own: Collection[int] = (),
    explained: Mapping[str, Collection[int]] | None = None,
    describe: Describe | None = None,
    family_of: FamilyOf | None = None,
    rules: Rules = DEFAULT_RULES,
    gpus: Iterable[Gpu] | None = None,
) -> tuple[GpuVerdict, ...]:
    """Say for every device whether this request may take it now, in the order of the snapshot.

    Args:
        snapshot: one poll of the driver.
        request: what is asked for; the number of GPUs is not used.
        claimed: UUID -> who holds it, without the claims of the caller itself.
        visible_limit: the inherited CUDA_VISIBLE_DEVICES; None: there is none.
        own: pids whose processes and memory are disregarded on every device.
        explained: UUID -> pids that are disregarded on that device (the processes of the claim around). On these
            devices memory in use without a process does not count, because it may be of processes that are not listed
            here.
        describe: gives the user and command of a process for the reasons, and identifies the MPS server. Without it
            reasons name only pids.
        family_of: tells whose processes there are on a shared GPU. Without it that cannot be told of any.
        rules: what the user has set.
        gpus: the devices of the snapshot to judge; None: all of them.
    """
    explained = explained or {}
    describe, family_of = describe or (lambda pid: None), family_of or (lambda pid: None)
    share = request.share
    mps_servers, shared_display = possible_mps_servers(snapshot), snapshot.shared_display
    limits = bool(request.conditions) or visible_limit is not None

    def verdict_on(gpu: Gpu) -> GpuVerdict:
        holder, of_outer = claimed.get(gpu.uuid), explained.get(gpu.uuid)
        disregarded = own if of_outer is None else {*own, *of_outer}
        if unusable := why_unusable(gpu):
            return GpuVerdict(gpu, "unusable", unusable)
        if limits and (outside := why_outside(gpu, request, visible_limit)):
            return GpuVerdict(gpu, "outside", outside)
        drained = rules.why_drained(gpu) if rules.drained and of_outer is None else ""
        if drained and (holder is None or (share is not None and holder.sharers)):
            return GpuVerdict(gpu, "unusable", drained)
        if shared_display:
            fits = request if share is None else request._replace(conditions=(MinMemory(share), *request.conditions))
            return GpuVerdict(gpu, "display", fits.why_not_now(gpu, disregarded))
        sharers = holder.sharers if share is not None and holder is not None else ()
        if holder is not None and not sharers:
            pid = None if holder.namespace else holder.pid
            return GpuVerdict(gpu, "claimed", _claimed_by(holder), pid, holder.user, holder)
        if not gpu.processes_supported and not rules.lists_optional:
            return GpuVerdict(gpu, "unusable", UNWATCHABLE)
        if gpu.processes is None and gpu.processes_supported:
            return GpuVerdict(gpu, "busy", f"process list failed: {gpu.process_error or 'the driver does not say why'}")
        others = [process for process in gpu.processes if process.pid not in disregarded] if gpu.processes else []
        if sharers:
            others = strangers(others, sharers, family_of)
        if others and (users := users_of(gpu, others, describe, mps_servers=mps_servers)):
            users.sort(key=lambda process: (-(process.memory_used or 0), process.pid))
            user, text = name_processes(users, describe, first_has_ended=snapshot.has_ended(users[0]))
            text += " without a share" if sharers else ""
            return GpuVerdict(gpu, "busy", text, users[0].pid, user)
        reason = request.why_not_now(gpu, disregarded) if limits else ""
        if not reason and of_outer is None and not sharers:
            reason = why_memory_unexplained(gpu, rules)
        if not reason and share is not None:
            left = room_for_shares(gpu, sharers, rules, family_of, disregarded)
            if full := why_no_room(gpu, sharers, left, share):
                return GpuVerdict(gpu, "claimed" if sharers else "busy", full, holder=holder)
        return GpuVerdict(gpu, "busy" if reason else "free", reason)

    return tuple(map(verdict_on, snapshot.gpus if gpus is None else gpus))


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
        return "the driver lost it (fell off the bus, or needs a reset)"
    if gpu.mig_enabled and not gpu.is_mig_instance:
        return "MIG mode is on: claim one of its instances"
    if gpu.compute_mode == ComputeMode.PROHIBITED:
        return "compute mode PROHIBITED (an administrator can change that: nvidia-smi -c DEFAULT)"
    return ""


def why_outside(gpu: Gpu, request: Selection, visible_limit: VisibleLimit | None) -> str:
    """Return why the request or the visible limit excludes the device; "" if neither does."""
    reason = request.why_outside(gpu)
    if not reason and visible_limit is not None and gpu.uuid not in visible_limit:
        return "not visible to CUDA in this process" if visible_limit.frozen else f"not listed in {visible_limit.title}"
    return reason


def _claimed_by(holder: Holder) -> str:
    if holder.sharers:
        return f"shared by {plural(len(holder.sharers), 'claim')}"
    if holder.full:
        return holder.full
    if holder.elsewhere:
        return "claimed in another state directory (a private /tmp?), or its entry here was removed or cannot be read"
    text = "claimed" if holder.pid is None else f"claimed by process {holder.pid}"
    text += holder.namespace and f" {holder.namespace}"
    if holder.left_by is not None:
        text = left_behind(holder.pid, holder.left_by)
    text += in_brackets(holder.user, holder.job and f"job {holder.job}", holder.command)
    if holder.since is not None:
        text += time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    if holder.held_as is not None:
        text += f", {holder.held_as.text}"
    return text


def fence_hint(unlimited: Sequence[GpuVerdict], visible_limit: VisibleLimit | None) -> str:
    """Return what the visible limit excludes, such as ``CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7
    others are free``.

    ``unlimited`` are the verdicts for the same request *without* it. The result is "" if it excludes none.
    """
    if visible_limit is None:
        return ""
    claimable = [verdict for verdict in unlimited if not verdict.gpu.mig_enabled]
    beyond = [verdict for verdict in claimable if verdict.gpu.uuid not in visible_limit]
    if not beyond:
        return ""
    inside = len(claimable) - len(beyond)
    free = sum(verdict.free for verdict in beyond)
    others = "1 other is" if free == 1 else f"{free or 'none of the'} others are"
    how = in_brackets(how_misread(visible_limit, [verdict.gpu for verdict in claimable]))
    return f"{visible_limit.title} limits this process to {inside} of {len(claimable)} GPUs{how}; {others} free"


def how_misread(visible_limit: VisibleLimit, gpus: Iterable[Gpu]) -> str:
    """Return what the library makes of a variable such as ``0 1`` that is no list of GPUs that are here, and how one is
    written; "" for a list, and for a word that hides all GPUs.

    Args:
        gpus: of the host.
    """
    value, uuids = visible_limit.value, visible_limit.uuids
    listed = [entry.strip() for entry in value.strip().removesuffix(",").split(",")]
    plain = all(entry in uuids or re.fullmatch("[+-]?[0-9]+|[A-Z].*", entry) for entry in listed)
    understood = plain and len(listed) == len(uuids) if visible_limit.library == "CUDA" else bool(uuids)
    if understood or visible_limit.frozen or value.strip().lower() in ("", "-1", "none", "void", "nodevfiles"):
        return ""
    seen = gpu_ranges(gpu.label for gpu in gpus if gpu.uuid in uuids)
    read_as = f"{visible_limit.library} reads {value!r} as {f'GPU {seen}' if seen else 'no GPU'}"
    return f"{read_as}: name GPUs of this host by index or UUID, each once, with commas between"
