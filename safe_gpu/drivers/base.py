"""What a driver is: the few questions that safe_gpu asks of whatever knows the GPUs of this host.

Drivers share what the kernel's files say of GPUs and of a driver's answers. Device files, ``/sys`` and ``/proc/driver``
are read under ``SAFE_GPU_FSROOT``; processes always in ``/proc``.
"""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar, TypeVar

from ..gpus.devices import Gpu, GpuProcess, HostSnapshot, bus_order
from ..gpus.vendors import FIRST, VENDORS, Vendor
from ..host import procfs
from ..runtimes.library import Runtime
from ..topology.files import Files
from ..topology.host import HostTopology, SysfsHost, node_of_cpus

_Thing = TypeVar("_Thing")


class Driver:
    """A source of truth about GPUs. Chosen in one place, ``drivers.open_driver``.

    A driver may be used by one process only (NVML handles do not survive fork); implementations notice a fork and open
    a new session. All methods raise :class:`~safe_gpu.errors.NoDriverError` when the driver as a whole is gone;
    the trouble of a single GPU does not raise but shows in that GPU's record. The methods with a body
    here answer for a driver that reads the kernel's files, cannot tell more, and keeps nothing open.
    :class:`~safe_gpu.drivers.patience.AwaitedDriver` has all of them too.
    """

    name: str
    """``nvml``, ``nvidia-smi``, ``kfd`` or ``simulated:PRESET``."""

    is_simulated: bool = False
    """Whether there are no such GPUs."""

    runtime: Runtime
    """The library through which programs use its GPUs."""

    latest_call: ClassVar[str] = ""
    """What a driver of this process called last, of a library or as a program: one that hangs does so there."""

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host, whatever CUDA_VISIBLE_DEVICES says. May take seconds on a troubled host.

        It holds what decides whether a GPU is free. Utilisation and NVLink may be missing, and so may processes that
        only draw, but never where memory in use would be unexplained without them.
        """
        raise NotImplementedError

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about some devices of an earlier poll: the narrow question of a claim that holds them.

        Returns:
            Their records, in the same order: memory and processes as they are now, MIG mode too; the rest as given.
            A device that the driver has lost, or that no longer has this UUID, is ``lost``.
        """
        shown = {gpu.uuid: gpu for gpu in self.snapshot().gpus} if gpus else {}
        return tuple(shown.get(gpu.uuid) or gpu.unreachable("the kernel no longer lists it") for gpu in gpus)

    def shows_same(self, snapshot: HostSnapshot) -> bool:
        """Return whether the GPUs are certainly those of an earlier poll, in the same places, none has been lost since
        or is no longer lost, and MIG mode is on where it was: then the numbers by which CUDA knows them are the same.
        False is unknown."""
        return False

    def linked(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with ``nvlink_peers``, for claims of several GPUs: n GPUs are n * (n - 1) / 2
        questions.

        Args:
            among: UUIDs of those between which links matter; None is all.
        """
        return snapshot

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with what only people look at: utilisation, and processes that only draw."""
        return snapshot

    def examined(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with what speaks for ill GPUs: ``illness`` and utilisation, as far as the driver tells.

        Args:
            among: UUIDs of the devices that are asked about; None is all.
        """
        return snapshot

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """Return the logical CPUs next to a GPU, for ``scope`` "node" or "socket"; None when the driver cannot tell.

        NVML returns an empty set for a GPU whose CPUs are all outside this process's cpuset: that too is None.
        """
        return None

    def host_topology(self) -> HostTopology | None:
        """Return the CPUs of the host where the driver brings its own (a simulated host); None: read sysfs."""
        return None

    def rest(self) -> None:
        """End the session before a pause of a second or more, if the GPUs stay initialised without it; a later question
        opens a new one. An open session is in the way of who resets a GPU, changes its MIG mode or unloads the driver.
        """
        return

    def close(self) -> None:
        """End the session; safe to call twice."""
        return


def own_namespace_pids(
    processes: Iterable[GpuProcess], *, vendor: Vendor | None = VENDORS[FIRST]
) -> tuple[GpuProcess, ...]:
    """Return the processes under their numbers of this PID namespace, each once per kind.

    Drivers 535 to 570.144 and 575.51 list the id of the *thread* that opened the driver. gVisor, and drivers before
    535.113 in a container, list numbers of another PID namespace, which may be those of other processes here. The
    kernel does so for AMD GPUs. Such a process is ``elsewhere``, and its name is not that of the one here.

    Args:
        vendor: whose device files processes must have open; None where there are no devices.
    """
    there = tuple(processes)
    device = vendor.device if there and vendor and Files().exists(vendor.control) else ""
    found: dict[tuple[int, str], GpuProcess] = {}
    for listed in there:
        process = _resolved(listed, device)
        known = found.setdefault((process.pid, process.kind), process)
        if (known.memory_used or -1) < (process.memory_used or -1):
            found[process.pid, process.kind] = process
    return tuple(found.values())


def _resolved(process: GpuProcess, device: str) -> GpuProcess:
    own = os.getpid()
    pid = own if process.pid == own else procfs.thread_group(process.pid)
    if pid is None:
        is_first = procfs.pid_namespace() == procfs.FIRST_PID_NAMESPACE
        return process._replace(ended=is_first and procfs.has_ended(process.pid))
    if device and pid != own and _has_device(pid, device) is False:
        return process._replace(name=None, elsewhere=True)
    return process if pid == process.pid else process._replace(pid=pid)


def _has_device(pid: int, device: str) -> bool | None:
    """Return whether a descriptor or a mapping of the process is such a device; None if /proc does not tell."""
    opened = procfs.open_files(pid)
    if opened is None:
        return None
    if any(path.rpartition("/")[2].startswith(device) for path in opened.values()):
        return True
    mapped = False
    for line in procfs.lines_of(f"/proc/{pid}/maps"):
        if b"/" + device.encode() in line:
            return True
        mapped = True
    return False if mapped else None  # without a mapping it is exiting, or its main thread has ended


def is_wsl() -> bool:
    """Return whether the GPUs are those of a Windows host, whose desktop and processes are not listed here."""
    return Files().exists("dev/dxg") and not Files().exists("dev/nvidiactl")


def memory_is_node(bus_id: str) -> bool:
    """Return whether the memory of a GPU is a NUMA node of the kernel, as on GH200, by the driver's ``/proc`` files.

    NVML's ``nvmlDeviceGetNumaNodeId`` says the same; this is for drivers that do not ask NVML.
    """
    import re  # only nvidia-smi's driver asks, which has it loaded

    status = Files().text(f"proc/driver/nvidia/gpus/{bus_id}/numa_status")
    return re.search(r"Node:\s*[0-9]", status or "") is not None


def has_display(files: Files, device: str) -> bool:
    """Return whether a connector of a GPU drives a screen; ``device`` is its PCI device below the root."""
    cards = [card for card in files.names(f"{device}/drm") if card.startswith("card")]
    connectors = [f"{card}/{name}" for card in cards for name in files.names(f"{device}/drm/{card}")]
    return any(
        files.text(f"{device}/drm/{connector}/enabled") == "enabled" for connector in connectors if "/card" in connector
    )


def illness_of(*, recovery_action: str, remapping_failed: bool, remapping_pending: bool) -> str:
    """Return what NVIDIA's driver says against a GPU, a clause; "" if nothing.

    Args:
        recovery_action: what the driver recommends, in nvidia-smi's words (``Reset``); "" if nothing.
        remapping_failed: whether a row of its memory was to be replaced by a spare one, and none was left.
        remapping_pending: whether a row will be replaced at the next reset.
    """
    if recovery_action:
        return f"the driver recommends the recovery action {recovery_action}"
    if remapping_failed:
        return "a row of its memory is broken and could not be remapped"
    if remapping_pending:
        return "a row of its memory is broken and is remapped at the next reset"
    return ""


def total_of(sizes: Iterable[int | None]) -> int | None:
    """Return their sum; None if one is not known."""
    known = tuple(sizes)
    return None if None in known else sum(filter(None, known))


def in_bus_order(found: Iterable[tuple[str, int, _Thing]]) -> list[_Thing]:
    """Return GPUs by PCI bus id, as nvidia-smi numbers them. Those without one are put at the places that their numbers
    give, in the given order.

    Args:
        found: bus id, number and GPU.
    """
    given = list(found)
    placed = sorted((one for one in given if bus_order(one[0])), key=lambda one: bus_order(one[0]) or ())
    ordered = [gpu for _, _, gpu in placed]
    for bus_id, number, gpu in given:
        if not bus_order(bus_id):
            ordered.insert(number, gpu)
    return ordered


def numa_node(bus_id: str, near: Callable[[], frozenset[int] | None] = lambda: None) -> int | None:
    """Return the NUMA node of a PCI device; None is unknown.

    It is sysfs's. Where sysfs does not tell (-1), it is the only node that has CPUs, else the one that has all CPUs
    near the device.

    This is where the card is plugged in. The driver's own notion of a GPU's NUMA node (``nvmlDeviceGetNumaNodeId``) is
    the node that the GPU's *memory* forms on coherent platforms, which is no place for CPUs.

    Args:
        near: returns the driver's word for the CPUs near it, and is asked where sysfs does not tell.
    """
    node = Files().pci_node(bus_id)
    if node is not None and node >= 0:
        return node
    host = SysfsHost(Files())
    node_by_sysfs = host.place(Gpu(0, "", pci_bus_id=bus_id)).node
    return node_of_cpus(near() or frozenset(), host.nodes) if node_by_sysfs is None else node_by_sysfs
