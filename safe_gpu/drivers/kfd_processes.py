"""Which processes use AMD GPUs, by ``/sys/class/kfd/kfd/proc``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..gpus.devices import GpuProcess
from ..gpus.vendors import VENDORS
from .kernel import own_namespace_pids

if TYPE_CHECKING:
    from ..topology.files import Files

_PROCESSES = "sys/class/kfd/kfd/proc"

_MOST_CONTEXTS = 1 << 10

_MOST_QUEUES = 1 << 12


class ProcessesOnGpu(NamedTuple):
    """The processes on one GPU, and why the list is incomplete, else ""."""

    processes: tuple[GpuProcess, ...] = ()
    error: str = ""


def processes(files: Files, gpu_ids: Iterable[int]) -> dict[int, ProcessesOnGpu]:
    """Return the processes on each of these GPUs, by ``gpu_id``."""
    wanted = tuple(gpu_ids)
    found: dict[int, list[GpuProcess]] = {gpu_id: [] for gpu_id in wanted}
    errors = dict.fromkeys(wanted, "")
    if not files.exists(_PROCESSES):
        return dict.fromkeys(wanted, ProcessesOnGpu((), f"this kernel has no /{_PROCESSES}"))
    for pid in sorted(int(name) for name in files.names(_PROCESSES) if re.fullmatch(r"[1-9][0-9]{0,9}", name)):
        place = f"{_PROCESSES}/{pid}"
        contexts = [name for name in files.names(place) if re.fullmatch(r"context_[0-9]{1,10}", name)]
        places = [place, *(f"{place}/{name}" for name in contexts[:_MOST_CONTEXTS])]
        queues = {
            files.number(f"{place}/queues/{name}/gpuid")
            for place in places
            for name in files.names(f"{place}/queues")[:_MOST_QUEUES]
        }
        for gpu_id in wanted:
            try:
                memory = sum(_memory(files, f"{place}/vram_{gpu_id}") for place in places)
            except (OSError, ValueError) as err:
                errors[gpu_id] = f"memory of process {pid} cannot be read: {getattr(err, 'strerror', None) or err}"
                continue
            if memory or gpu_id in queues:
                found[gpu_id].append(GpuProcess(pid, memory_used=memory))
    return {
        # A pid there is the kernel's number, that of the first PID namespace.
        gpu_id: ProcessesOnGpu(own_namespace_pids(listed, vendor=VENDORS["amd"]), errors[gpu_id])
        for gpu_id, listed in found.items()
    }


def _memory(files: Files, path: str) -> int:
    """Return the bytes; 0 if there is no such file, because the process or its context has just ended."""
    try:
        text = files.read(path)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise ValueError(f"it is {text[:20]!r}")
    return int(text)
