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
from collections.abc import Collection, Sequence
from typing import NamedTuple

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
        return HostSnapshot(_Host(files, found).gpus(), self.name, printable(version[:_LONGEST_NAME]))

    def linked(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with the GPUs connected by xGMI as ``nvlink_peers``: those of one hive."""
        hives: dict[int, set[str]] = {}
        hive_of: dict[str, int] = {}
        for device in self._devices():
            hives.setdefault(device.hive, set()).add(device.uuid)
            hive_of[device.uuid] = device.hive
        linked = []
        for gpu in snapshot.gpus:
            peers: set[str] = set()
            hive = hive_of.get(gpu.uuid, 0)
            if hive != 0:
                peers = hives[hive] - {gpu.uuid}
            linked.append(gpu._replace(nvlink_peers=frozenset(peers)))
        return snapshot.updated(linked)

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with ``utilization``, of whole GPUs only: the kernel does not count it for
        partitions."""
        files = Files()
        devices_by_uuid = {device.uuid: device for device in self._devices()}
        detailed = []
        for gpu in snapshot.gpus:
            device = devices_by_uuid.get(gpu.uuid)
            if device is None or not device.bus_id or device.shared:
                continue
            percent = files.number(f"{device.pci}/gpu_busy_percent")
            if percent is not None and percent > 100:
                percent = None
            detailed.append(gpu._replace(utilization=percent))
        return snapshot.updated(detailed)

    def _devices(self) -> tuple[Device, ...]:
        found = devices(Files())
        if found is None:
            raise NoDriverError(
                "the AMD GPU driver is not loaded: there is no /sys/class/kfd/kfd/topology; load amdgpu, or use the "
                "driver of this host's GPUs (SAFE_GPU_DRIVER=auto)",
                driver=self.name,
            )
        return found


class _Use(NamedTuple):
    """The processes on a device, and why the list is incomplete, else ""."""

    processes: tuple[GpuProcess, ...]
    error: str = ""

    @property
    def memory(self) -> int:
        """Bytes that they hold, as far as that is known."""
        return sum(process.memory_used or 0 for process in self.processes)


class _Host:
    """What the kernel says of these devices and of their processes at one poll."""

    def __init__(self, files: Files, found: tuple[Device, ...]) -> None:
        self._files = files
        self._devices = found
        # Read before the processes, or the memory of one that starts in between would belong to no visible process.
        self._counters: dict[str, int | None] = {}
        for device in found:
            if not device.broken:
                self._counters[device.pci] = files.number(f"{device.pci}/mem_info_vram_used")
        self._uses = _processes(files, [device.gpu_id for device in found if device.gpu_id])
        self._largest = max((device.memory_total or 0 for device in found), default=0)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the devices as records."""
        return tuple(self._gpu(index, device) for index, device in enumerate(self._devices))

    def _gpu(self, index: int, device: Device) -> Gpu:
        gpu = Gpu(index, device.uuid, device.name, device.bus_id, numa_node(device.bus_id), vendor="amd")
        if device.bus_id:
            place = f"{VENDORS['amd'].by_place}{device.bus_id}"
            gpu = gpu._replace(place=place, partition=bool(device.mode), mode=device.mode)
        if device.broken:
            return gpu.unreachable(device.broken, lost=False)
        use = self._uses[device.gpu_id]
        processes: tuple[GpuProcess, ...] | None = use.processes
        if use.error:
            processes = None
        used = self._memory_used(device)
        free = None
        if device.memory_total is not None and used is not None:
            free = max(0, device.memory_total - used)
        unusable = None
        if self._is_integrated(device):
            unusable = _INTEGRATED
        return gpu._replace(
            memory_total=device.memory_total,
            memory_used=used,
            memory_free=free,
            processes=processes,
            process_error=use.error,
            display_active=has_display(self._files, device.pci),
            unusable=unusable,
        )

    def _memory_used(self, device: Device) -> int | None:
        """Return the bytes in use.

        Partitions of one GPU share its counter. Memory that no process on any of them accounts for may be on each of
        them, so it counts on all.
        """
        counter = self._counters[device.pci]
        if counter is None or not device.shared:
            return counter
        of_processes = 0
        for one in self._devices:
            if one.pci == device.pci:
                of_processes += self._uses[one.gpu_id].memory
        return self._uses[device.gpu_id].memory + max(0, counter - of_processes)

    def _is_integrated(self, device: Device) -> bool:
        """Return whether it looks like the integrated graphics of a processor beside GPUs with more memory."""
        return may_be_integrated(device) and self._largest >= _TIMES_LARGER * max(device.memory_total or 0, 1)


def may_be_integrated(device: Device) -> bool:
    """Return whether it looks like the integrated graphics of a processor. GPUs of another vendor tell whether it
    matters."""
    return device.integrated or (device.memory_total or 0) < _LARGEST_CARVE_OUT


def _processes(files: Files, gpu_ids: Sequence[int]) -> dict[int, _Use]:
    """Return who is on each of these GPUs, by ``gpu_id``."""
    if not files.exists(_PROCESSES):
        return dict.fromkeys(gpu_ids, _Use((), f"this kernel has no /{_PROCESSES}"))
    found: dict[int, list[GpuProcess]] = {gpu_id: [] for gpu_id in gpu_ids}
    errors: dict[int, str] = dict.fromkeys(gpu_ids, "")
    for pid in _pids(files):
        places = _places(files, pid)
        queues = _gpus_of_queues(files, places)
        for gpu_id in gpu_ids:
            memory = total_of(_memory(files, f"{place}/vram_{gpu_id}") for place in places)
            if memory is None:
                errors[gpu_id] = f"memory of process {pid} cannot be read"
            elif memory or gpu_id in queues:
                found[gpu_id].append(GpuProcess(pid, memory_used=memory))
    uses = {}
    for gpu_id, listed in found.items():
        # A pid there is the kernel's number, that of the first PID namespace.
        uses[gpu_id] = _Use(own_namespace_pids(listed, vendor=VENDORS["amd"]), errors[gpu_id])
    return uses


def _pids(files: Files) -> list[int]:
    """Return the numbers of the processes that have opened ``/dev/kfd``, in order."""
    return sorted(int(name) for name in files.names(_PROCESSES) if re.fullmatch(r"[1-9][0-9]{0,9}", name))


def _places(files: Files, pid: int) -> list[str]:
    """Return the directories of a process: its own, and those of its other contexts."""
    own = f"{_PROCESSES}/{pid}"
    contexts = [name for name in files.names(own) if re.fullmatch(r"context_[0-9]{1,10}", name)]
    return [own, *(f"{own}/{name}" for name in contexts[:_MOST_CONTEXTS])]


def _gpus_of_queues(files: Files, places: Sequence[str]) -> set[int | None]:
    """Return the ``gpu_id`` of each GPU on which a process with these directories has a queue."""
    found = set()
    for place in places:
        for name in files.names(f"{place}/queues")[:_MOST_QUEUES]:
            found.add(files.number(f"{place}/queues/{name}/gpuid"))
    return found


def _memory(files: Files, path: str) -> int | None:
    """Return the bytes; 0 if there is no such file, because the process or its context has just ended. None if they
    cannot be read."""
    try:
        text = files.read(path)
    except (FileNotFoundError, ProcessLookupError):
        return 0
    except OSError:
        return None
    if not re.fullmatch(r"[0-9]{1,20}", text):
        return None
    return int(text)
