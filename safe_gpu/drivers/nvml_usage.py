"""The memory of a GPU or MIG instance and the processes on it, as NVML lists them."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..gpus.devices import Gpu, GpuProcess, ProcessKind
from ..host import procfs
from .base import ProcessList, is_wsl, own_namespace_pids
from .nvml_calls import ABSENT, GPU_LOST, Fault
from .nvml_device import NvmlDevice

_LISTS = {ProcessKind.COMPUTE: "Compute", ProcessKind.MPS: "MPSCompute", ProcessKind.GRAPHICS: "Graphics"}

# An idle card shows a few MiB in use. If the processes that compute do not account for all but this, those under MPS
# and those that only draw are listed too.
_IDLE_MEMORY = 16 << 20

_HIDDEN = 2**64 - 1  # bytes

_NO_INSTANCE = 2**32 - 1


class _Row(NamedTuple):
    """A row of a list of processes: the kind of the list, and pynvml's structure."""

    kind: str
    info: Any


class _InstanceIds(NamedTuple):
    """NVML's numbers of a GPU instance and of a compute instance in it; None is unknown."""

    gpu: int | None
    compute: int | None


def with_usage(gpu: Gpu, device: NvmlDevice) -> Gpu:
    """Return the record of this device with its memory and processes of now."""
    # Read before the lists, or the memory of a process that starts in between would belong to no visible process.
    gpu = _with_memory(gpu, device)._replace(memory_shared=False, lost=False)
    gpu = _processes(device, [ProcessKind.COMPUTE]).put_on(gpu)
    if gpu.memory_used is None or gpu.memory_used - (gpu.listed_memory or 0) > _IDLE_MEMORY:
        gpu = _processes(device, list(_LISTS)).put_on(gpu)
    if gpu.unexplained_memory > _IDLE_MEMORY:
        gpu = gpu._replace(memory_shared=_shares_memory(device))
    return gpu


def graphics_processes(device: NvmlDevice) -> tuple[GpuProcess, ...]:
    """Return the processes that only draw, as far as the driver lists them."""
    return _processes(device, [ProcessKind.GRAPHICS]).processes or ()


def _with_memory(gpu: Gpu, device: NvmlDevice) -> Gpu:
    """Return the record with the memory of now.

    Version 2, where there is one, leaves what the driver reserves for itself out of "used", as nvidia-smi does.
    """
    function = "nvmlDeviceGetMemoryInfo"
    memory = device.calls.ask_or(None, function, device.handle, device.calls.constant("nvmlMemory_v2"))
    counts_reserved = memory is None
    if memory is None:
        memory = device.calls.ask_or(None, function, device.handle)
    if memory is None:
        return gpu._replace(counts_reserved=True, memory_total=None, memory_used=None, memory_free=None)
    return gpu._replace(
        counts_reserved=counts_reserved,
        memory_total=_known_bytes(memory.total),
        memory_used=_known_bytes(memory.used),
        memory_free=_known_bytes(memory.free),
    )


def _shares_memory(device: NvmlDevice) -> bool:
    """Return whether memory in use may belong to no process. Memory that is a NUMA node of the kernel (GH200,
    GB200) has a page cache, which counts as used; that of WSL2 is used by the Windows desktop."""
    handles = [device.handle]
    if device.parent is not None:
        handles.append(device.parent.handle)
    nodes = [device.calls.ask_or(None, "nvmlDeviceGetNumaNodeId", handle) for handle in handles]
    return is_wsl() or any(node is not None for node in nodes)


def _processes(device: NvmlDevice, kinds: Sequence[str]) -> ProcessList:
    """Return what these lists say."""
    rows: list[_Row] = []
    mute: Fault | None = None
    try:
        rows = _rows(device, kinds)
    except Fault as fault:
        if fault.code in GPU_LOST:
            raise
        mute = fault
    if device.parent is not None:
        rows = _rows_here(device, rows, count_unplaced=True)
        if mute is None or mute.code in ABSENT:
            with suppress(Fault):
                # A row of the GPU without ids may run on any instance, so it counts where the instance is mute.
                rows += _rows_here(device, _rows(device.parent, kinds), count_unplaced=mute is not None)
                mute = None
    if mute is not None:
        what = f"the driver does not list its processes: {mute}"
        return ProcessList(None, what, supported=mute.code not in ABSENT)
    if not rows:
        return ProcessList(())
    return ProcessList(own_namespace_pids([_process(device, row) for row in rows]))


def _process(device: NvmlDevice, row: _Row) -> GpuProcess:
    pid = row.info.pid
    name = procfs.command_of(pid)
    if not name:  # /proc does not show it
        name = device.calls.ask_or(None, "nvmlSystemGetProcessName", pid)
    return GpuProcess(pid, row.kind, row.info.usedGpuMemory, name)


def _rows(device: NvmlDevice, kinds: Sequence[str]) -> list[_Row]:
    """Return the rows of these process lists.

    Raises:
        Fault: one of them fails, or there is none of processes that compute.
    """
    found = []
    for kind in kinds:
        for row in _list(device, kind):
            found.append(_Row(kind, row))
    return found


def _list(device: NvmlDevice, kind: str) -> list[Any]:
    """Return one of the process lists; an empty one where the driver has none of processes that do not compute."""
    function = f"nvmlDeviceGet{_LISTS[kind]}RunningProcesses"
    for version in ("_v3", "_v2"):  # the latter for drivers before R510
        try:
            return list(device.calls.ask(f"{function}{version}", device.handle))
        except Fault as fault:
            must_be_there = kind == ProcessKind.COMPUTE and version == "_v2"
            if fault.code not in ABSENT or must_be_there:
                raise
    return []


def _rows_here(device: NvmlDevice, rows: list[_Row], *, count_unplaced: bool) -> list[_Row]:
    """Return those of these rows that are of this MIG instance.

    Args:
        count_unplaced: whether a row without ids is.
    """
    if not rows:
        return []
    own = _InstanceIds(
        gpu=device.calls.ask_or(None, "nvmlDeviceGetGpuInstanceId", device.handle),
        compute=device.calls.ask_or(None, "nvmlDeviceGetComputeInstanceId", device.handle),
    )
    found = []
    for row in rows:
        ids = _InstanceIds(gpu=_known_id(row.info.gpuInstanceId), compute=_known_id(row.info.computeInstanceId))
        if _is_here(ids, own, count_unplaced):
            found.append(row)
    return found


def _is_here(ids: _InstanceIds, own: _InstanceIds, count_unplaced: bool) -> bool:
    """Return whether a row with these ids is of the MIG instance with its own ones."""
    if ids.gpu is None or own.gpu is None:
        return count_unplaced
    if ids.gpu != own.gpu:
        return False
    return ids.compute is None or own.compute is None or ids.compute == own.compute


def _known_id(number: int | None) -> int | None:
    if number == _NO_INSTANCE:
        return None
    return number


def _known_bytes(size: int) -> int | None:
    if size == _HIDDEN:
        return None
    return size
