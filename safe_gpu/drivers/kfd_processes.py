"""Which processes use AMD GPUs, by ``/sys/class/kfd/kfd/proc`` (``kfd_process.c`` in the Linux kernel).

Every process that has opened ``/dev/kfd`` has a directory with one file ``vram_<gpu_id>`` for each GPU of the host,
whether it uses the GPU or not. So only values count: a process is on a GPU if it holds memory there or has a queue
there. A process with several contexts has more such files in ``context_<number>``. The files are readable by everybody.

Not known without hardware:

* how much memory a process holds on GPUs that it has only enumerated. Any memory counts as use here, so that a GPU may
  be taken for busy that is idle, never the other way round;
* how long the directory of a process stays after its end. The kernel removes it in a work queue. Until then the GPU is
  busy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..devices import GpuProcess

if TYPE_CHECKING:
    from ..sysfs import KfdTree


_PROCESSES = "sys/class/kfd/kfd/proc"
_MOST_CONTEXTS = 1 << 10
_MOST_QUEUES = 1 << 12


class ProcessesOnGpu(NamedTuple):
    """The processes on one GPU, and why the list is incomplete, else ""."""

    processes: tuple[GpuProcess, ...] = ()
    error: str = ""


def processes(files: KfdTree, gpu_ids: Iterable[int]) -> dict[int, ProcessesOnGpu]:
    """The processes on each of these GPUs, by ``gpu_id``.

    ``pid`` is the kernel's number, that of the first PID namespace.
    """
    wanted = tuple(gpu_ids)
    found: dict[int, list[GpuProcess]] = {gpu_id: [] for gpu_id in wanted}
    errors = dict.fromkeys(wanted, "")
    if not files.exists(_PROCESSES):
        return dict.fromkeys(wanted, ProcessesOnGpu((), f"this kernel has no /{_PROCESSES}"))
    for name in files.names(_PROCESSES):
        if not re.fullmatch(r"[1-9][0-9]{0,9}", name):
            continue
        places = [f"{_PROCESSES}/{name}", *_contexts(files, f"{_PROCESSES}/{name}")]
        queues = {gpu_id for place in places for gpu_id in _queues(files, place)}
        for gpu_id in wanted:
            try:
                memory = sum(_memory(files, f"{place}/vram_{gpu_id}") for place in places)
            except (OSError, ValueError) as err:
                errors[gpu_id] = f"memory of process {name} cannot be read: {getattr(err, 'strerror', None) or err}"
                continue
            if memory or gpu_id in queues:
                found[gpu_id].append(GpuProcess(int(name), memory_used=memory))
    return {
        gpu_id: ProcessesOnGpu(tuple(sorted(listed, key=lambda process: process.pid)), errors[gpu_id])
        for gpu_id, listed in found.items()
    }


def _contexts(files: KfdTree, place: str) -> list[str]:
    names = [name for name in files.names(place) if re.fullmatch(r"context_[0-9]{1,10}", name)]
    return [f"{place}/{name}" for name in names[:_MOST_CONTEXTS]]


def _queues(files: KfdTree, place: str) -> set[int]:
    found = (files.number(f"{place}/queues/{name}/gpuid") for name in files.names(f"{place}/queues")[:_MOST_QUEUES])
    return {gpu_id for gpu_id in found if gpu_id}


def _memory(files: KfdTree, path: str) -> int:
    """Bytes; 0 if there is no such file, because the process or its context has just ended."""
    try:
        text = files.read(path)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    if not re.fullmatch(r"[0-9]{1,20}", text):
        raise ValueError(f"it is {text[:20]!r}")
    return int(text)
