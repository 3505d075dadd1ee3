"""Which processes and how much memory make a GPU busy. Pure."""

from collections.abc import Callable, Collection

from ..gpus.devices import Gpu, GpuProcess, HostSnapshot, ProcessKind
from ..wording.text import format_bytes, in_brackets
from .rules import LEAST_LIMIT, Rules

Describe = Callable[[int], "tuple[str | None, str | None] | None"]
"""Returns the user and command line of a pid; None if this host's /proc does not show it."""

# Bytes in use without a process that may be the driver's own: an idle GPU may show 0.5 GiB where what the driver
# reserves for itself counts as used, and some tens of MiB where it does not.
_LIMIT = 128 << 20

_LIMIT_WITH_RESERVED = 1 << 30

# Bytes that graphics processes may use together on a GPU without an active display: X servers, desktops that nobody
# sees and small renderers have less.
_MOST_DRAWN = 1 << 30

_MPS_SERVER = "nvidia-cuda-mps-server"

_MPS_SERVER_MEMORY = 64 << 20  # an MPS server whose clients are on other GPUs has less; a CUDA program has more

SHOWN, HIDDEN, NOT_YET, UNKNOWN = "shown", "hidden", "not yet", "unknown"


def has_mps_clients(snapshot: HostSnapshot) -> bool:
    """Return whether a process on some GPU of the host is a client of an MPS server."""
    return any(process.kind == ProcessKind.MPS for gpu in snapshot.gpus for process in gpu.processes or ())


def computes(process: GpuProcess, describe: Describe, *, mps_clients: bool = False) -> bool:
    """Return whether a process makes a device busy by itself. Graphics processes do not, nor does the MPS server.

    Args:
        describe: gives the command by which the MPS server is known.
        mps_clients: whether some GPU of the host has MPS clients (:func:`has_mps_clients`). Then a small process
            without a name is taken for the MPS server: hidepid=2 hides the names of other users' processes.
    """
    if process.kind == ProcessKind.GRAPHICS:
        return False
    words = (_command(process, describe) or "").split()
    if words:
        return words[0].rpartition("/")[2] != _MPS_SERVER
    small = process.memory_used is not None and process.memory_used <= _MPS_SERVER_MEMORY
    return not (mps_clients and small and process.kind == ProcessKind.COMPUTE)


def drawing(gpu: Gpu, processes: Collection[GpuProcess]) -> list[GpuProcess]:
    """Return those of these processes of a device that only draw, if together they make it busy; else none.

    Where a display is active they never do. Memory that the driver does not tell is not counted.
    """
    computing = {process.pid for process in processes if process.kind != ProcessKind.GRAPHICS}
    only = [process for process in processes if process.pid not in computing]
    busy = not gpu.display_active and sum(process.memory_used or 0 for process in only) > _MOST_DRAWN
    return only if busy else []


def users_of(
    gpu: Gpu, processes: Collection[GpuProcess], describe: Describe, *, mps_clients: bool = False
) -> list[GpuProcess]:
    """Return those of these processes of a device that make it busy, one entry for each pid; the rest as for
    :func:`computes`."""
    if not processes:
        return []
    computing = [process for process in processes if computes(process, describe, mps_clients=mps_clients)]
    return list({process.pid: process for process in (*drawing(gpu, processes), *computing)}.values())


def _command(process: GpuProcess, describe: Describe) -> str | None:
    if process.name is not None or process.elsewhere:
        return process.name
    described = describe(process.pid)
    return described[1] if described else None


def name_processes(processes: Collection[GpuProcess], describe: Describe) -> tuple[str | None, str]:
    """Return the user of the first process, and a text that names it and says how many others there are."""
    first, *others = processes
    user, command = (None if first.elsewhere else describe(first.pid)) or (None, None)
    amount = "an unknown amount of memory" if first.memory_used is None else format_bytes(first.memory_used)
    if first.elsewhere:
        command = "a number of another PID namespace"
    text = f"process {first.pid}{in_brackets(user, command or first.name)} uses {amount}"
    pids = {process.pid for process in others} - {first.pid}
    if pids:
        text += f", and {len(pids)} more process{'es' if len(pids) > 1 else ''}"
    return user, text


def why_memory_unexplained(gpu: Gpu, rules: Rules) -> str:
    """Return why the GPU is busy although no process is visible: a container or the driver may hide one that uses
    memory."""
    excess = gpu.unexplained_memory
    if gpu.memory_shared or excess <= unexplained_limit(gpu, rules):
        return ""
    hidden = "one in a container?" if gpu.processes_supported else "the driver lists none"
    return f"{format_bytes(excess)} of memory in use by no process that is visible here ({hidden})"


def unexplained_limit(gpu: Gpu, rules: Rules) -> int:
    if rules.unexplained_limit is not None:
        return max(rules.unexplained_limit, LEAST_LIMIT)
    # In a container the processes of a desktop are not listed, and their memory is.
    return _LIMIT_WITH_RESERVED if gpu.counts_reserved or gpu.display_active else _LIMIT


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
