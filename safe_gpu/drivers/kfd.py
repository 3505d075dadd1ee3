"""AMD GPUs through the kernel's own view in sysfs.

Every process that has opened ``/dev/kfd`` has a directory with one file ``vram_<gpu_id>`` for each GPU of the host,
whether it uses the GPU or not. So only values count: a process is on a GPU if it holds memory there or has a queue
there. A process with several contexts has more such files in ``context_<number>``. The files are readable by everybody.

Not known without hardware:

* how much memory a process holds on GPUs that it has only enumerated. Any memory counts as use here, so that a GPU may
  be taken for busy that is idle, never the other way round;
* how long the directory of a process stays after its end. The kernel removes it in a work queue. Until then the GPU is
  busy.

Who is on them stands in ``/sys/class/kfd/kfd/proc``, what they are in ``topology.kfd_topology``, and the rest with the
PCI device.
"""

import os
import re
from collections.abc import Collection, Iterable

from ..errors import NoDriverError
from ..gpus.devices import Gpu, GpuProcess, HostSnapshot
from ..gpus.vendors import VENDORS
from ..host.foreign_files import printable
from ..runtimes.hip import HIP
from ..topology.files import Files
from ..topology.kfd_topology import Device, devices
from .base import Driver, has_display, numa_node, own_namespace_pids, total_of

_PROCESSES = "sys/class/kfd/kfd/proc"

_MOST_CONTEXTS = 1 << 10

_MOST_QUEUES = 1 << 12

# The memory of integrated graphics is a small part of the host's that the firmware has set aside.
_LARGEST_CARVE_OUT = 4 << 30

_TIMES_LARGER = 4

_LONGEST_NAME = 80

_INTEGRATED = "it is the processor's integrated graphics beside GPUs with memory of their own"


class KfdDriver(Driver):
    """The kernel's AMD driver (amdgpu) as a driver.

    A device is a GPU, one of the two dies of an MI250X, or a compute partition. ``index`` is ROCR's number of it, which
    is the order of the kernel's list and, unlike NVIDIA's, need not be that of the bus ids.

    Raises:
        NoDriverError: it is not loaded.
    """

    name = "kfd"
    runtime = HIP

    def __init__(self) -> None:
        self._devices()

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        files = Files()
        found = self._devices()
        # The version of the amdgpu module; the kernel's, if amdgpu is the kernel's own.
        version = files.text("sys/module/amdgpu/version") or f"Linux {os.uname().release}"
        return HostSnapshot(tuple(_gpus(files, found)), self.name, printable(version[:_LONGEST_NAME]))

    def linked(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with the GPUs connected by xGMI as ``nvlink_peers``: those of one hive."""
        hives: dict[int, set[str]] = {}
        for device in self._devices():
            hives.setdefault(device.hive, set()).add(device.uuid)
        connected = {uuid: peers - {uuid} for hive, peers in hives.items() if hive for uuid in peers}
        return snapshot.updated(
            gpu._replace(nvlink_peers=frozenset(connected.get(gpu.uuid, ()))) for gpu in snapshot.gpus
        )

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with ``utilization``, of whole GPUs only: the kernel does not count it for
        partitions."""
        files = Files()
        alone = {device.uuid: device.pci for device in self._devices() if device.bus_id and not device.shared}
        return snapshot.updated(
            gpu._replace(utilization=None if busy is None or busy > 100 else busy)
            for gpu in snapshot.gpus
            if gpu.uuid in alone
            for busy in [files.number(f"{alone[gpu.uuid]}/gpu_busy_percent")]
        )

    def _devices(self) -> tuple[Device, ...]:
        found = devices(Files())
        if found is None:
            raise NoDriverError(
                "the AMD GPU driver is not loaded: there is no /sys/class/kfd/kfd/topology; load amdgpu, or use the "
                "driver of this host's GPUs (SAFE_GPU_DRIVER=auto)",
                driver=self.name,
            )
        return found


def _gpus(files: Files, found: tuple[Device, ...]) -> Iterable[Gpu]:
    # Read before the processes, or the memory of one that starts in between would belong to no visible process.
    counters = {device.pci: files.number(f"{device.pci}/mem_info_vram_used") for device in found if not device.broken}
    uses = _processes(files, [device.gpu_id for device in found if device.gpu_id])
    held = {gpu_id: sum(process.memory_used or 0 for process in listed) for gpu_id, (listed, _) in uses.items()}
    largest = max((device.memory_total or 0 for device in found), default=0)
    for index, device in enumerate(found):
        gpu = Gpu(index, device.uuid, device.name, device.bus_id, numa_node(device.bus_id), vendor="amd")
        if device.bus_id:
            place, mode = f"{VENDORS['amd'].by_place}{device.bus_id}", device.mode
            gpu = gpu._replace(place=place, partition=bool(mode), mode=mode)
        if device.broken:
            yield gpu.unreachable(device.broken, lost=False)
            continue
        processes, error = uses[device.gpu_id]
        total, memory = device.memory_total, counters[device.pci]
        if memory is not None and device.shared:
            # Partitions of one GPU share its counter. Memory that no process on any of them accounts for may be on each
            # of them, so it counts on all.
            nobodys = memory - sum(held[one.gpu_id] for one in found if one.pci == device.pci)
            memory = held[device.gpu_id] + max(0, nobodys)
        free = None if total is None or memory is None else max(0, total - memory)
        integrated = may_be_integrated(device) and largest >= _TIMES_LARGER * max(total or 0, 1)
        gpu = gpu._replace(memory_total=total, memory_used=memory, memory_free=free)
        gpu = gpu._replace(processes=None if error else processes, process_error=error)
        yield gpu._replace(display_active=has_display(files, device.pci), unusable=_INTEGRATED if integrated else None)


def may_be_integrated(device: Device) -> bool:
    """Return whether it looks like the integrated graphics of a processor. GPUs of another vendor tell whether it
    matters."""
    return device.integrated or (device.memory_total or 0) < _LARGEST_CARVE_OUT


def _processes(files: Files, gpu_ids: Iterable[int]) -> dict[int, tuple[tuple[GpuProcess, ...], str]]:
    """Return the processes on each of these GPUs, by ``gpu_id``, and why the list is incomplete, else ""."""
    wanted = tuple(gpu_ids)
    found: dict[int, list[GpuProcess]] = {gpu_id: [] for gpu_id in wanted}
    errors = dict.fromkeys(wanted, "")
    if not files.exists(_PROCESSES):
        return dict.fromkeys(wanted, ((), f"this kernel has no /{_PROCESSES}"))
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
            memory = total_of(_memory(files, f"{place}/vram_{gpu_id}") for place in places)
            if memory is None:
                errors[gpu_id] = f"memory of process {pid} cannot be read"
            elif memory or gpu_id in queues:
                found[gpu_id].append(GpuProcess(pid, memory_used=memory))
    return {
        # A pid there is the kernel's number, that of the first PID namespace.
        gpu_id: (own_namespace_pids(listed, vendor=VENDORS["amd"]), errors[gpu_id])
        for gpu_id, listed in found.items()
    }


def _memory(files: Files, path: str) -> int | None:
    """Return the bytes; 0 if there is no such file, because the process or its context has just ended. None if they
    cannot be read."""
    try:
        text = files.read(path)
    except OSError as err:
        return 0 if isinstance(err, (FileNotFoundError, ProcessLookupError)) else None
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else None
