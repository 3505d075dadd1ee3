"""What /dev and /proc say about a driver's answers.

Device files, and ``/proc/driver`` of the driver, are read under ``SAFE_GPU_FSROOT``; processes always in ``/proc``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..gpus.devices import Gpu, GpuProcess
from ..gpus.vendors import FIRST, VENDORS, Vendor
from ..host import procfs
from ..host.foreign_files import read_start

if TYPE_CHECKING:
    from ..topology.files import Files

# A process with more descriptors than this is not searched for a device among them.
_MOST_DESCRIPTORS = 4096


def own_namespace_pids(
    processes: Iterable[GpuProcess], *, by_devices: bool = True, vendor: Vendor = VENDORS[FIRST]
) -> tuple[GpuProcess, ...]:
    """Return the processes under their numbers of this PID namespace, each once per kind.

    Drivers 535 to 570.144 and 575.51 list the id of the *thread* that opened the driver. gVisor, and drivers before
    535.113 in a container, list numbers of another PID namespace, which may be those of other processes here. The
    kernel does so for AMD GPUs. Such a process is ``elsewhere``, and its name is not that of the one here.

    Args:
        by_devices: False does not look whether a process has the driver's device open, for drivers without devices.
        vendor: whose device files are looked for.
    """
    by_devices = by_devices and _exists(vendor.control)
    found: dict[tuple[int, str], GpuProcess] = {}
    for listed in processes:
        process = _resolved(listed, vendor.device if by_devices else "")
        known = found.setdefault((process.pid, process.kind), process)
        if (known.memory_used or -1) < (process.memory_used or -1):
            found[process.pid, process.kind] = process
    return tuple(found.values())


def _resolved(process: GpuProcess, device: str) -> GpuProcess:
    own = os.getpid()
    pid = own if process.pid == own else procfs.thread_group(process.pid) or process.pid
    if device and pid != own and _has_device(pid, device) is False:
        return process._replace(name=None, elsewhere=True)
    return process if pid == process.pid else process._replace(pid=pid)


def _has_device(pid: int, device: str) -> bool | None:
    """Return whether a descriptor or a mapping of the process is such a device; None if /proc does not tell."""
    mapped = False
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
        if len(numbers) > _MOST_DESCRIPTORS:
            return None
        for number in numbers:
            try:
                if os.readlink(f"/proc/{pid}/fd/{number}").rpartition("/")[2].startswith(device):
                    return True
            except FileNotFoundError:
                continue  # closed meanwhile
        with open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                if b"/" + device.encode() in line:
                    return True
                mapped = True
    except OSError:
        return None
    return False if mapped else None  # without a mapping it is exiting, or its main thread has ended


def is_wsl() -> bool:
    """Return whether the GPUs are those of a Windows host, whose desktop and processes are not listed here."""
    return _exists("dev/dxg") and not _exists("dev/nvidiactl")


def memory_is_node(bus_id: str) -> bool:
    """Return whether the memory of a GPU is a NUMA node of the kernel, as on GH200, by the driver's ``/proc`` files.

    NVML's ``nvmlDeviceGetNumaNodeId`` says the same; this is for drivers that do not ask NVML.
    """
    import re  # only nvidia-smi's driver asks, which has it loaded

    status = read_start(under_root(f"proc/driver/nvidia/gpus/{bus_id}/numa_status"), 4096)
    return re.search(rb"Node:\s*[0-9]", status or b"") is not None


def has_display(files: Files, device: str) -> bool:
    """Return whether a connector of a GPU drives a screen; ``device`` is its PCI device below the root."""
    cards = [card for card in files.names(f"{device}/drm") if card.startswith("card")]
    connectors = [f"{card}/{name}" for card in cards for name in files.names(f"{device}/drm/{card}")]
    return any(
        files.text(f"{device}/drm/{connector}/enabled") == "enabled" for connector in connectors if "/card" in connector
    )


def _exists(path: str) -> bool:
    return os.path.exists(under_root(path))


def under_root(path: str) -> str:
    return os.path.join(os.environ.get("SAFE_GPU_FSROOT") or "/", path)


def as_shown_now(gpus: Iterable[Gpu], shown: Iterable[Gpu], gone: str) -> tuple[Gpu, ...]:
    """Return these devices with the memory and the processes of a new poll; ``gone`` is said of those that it lacks."""
    found = {gpu.uuid: gpu for gpu in shown}
    return tuple(
        gpu._replace(memory_used=now.memory_used, memory_free=now.memory_free, processes=now.processes,
                process_error=now.process_error, processes_private=now.processes_private, unusable=now.unusable)
        if (now := found.get(gpu.uuid)) is not None
        else gpu.unreachable(gone)
        for gpu in gpus
    )  # fmt: skip
