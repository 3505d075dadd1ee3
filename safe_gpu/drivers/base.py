"""What a driver is: the few questions that safe_gpu asks of whatever knows the GPUs of this host.

Drivers share what the kernel's files say of GPUs and of a driver's answers. Device files, ``/sys`` and ``/proc/driver``
are read under ``SAFE_GPU_FSROOT``; processes always in ``/proc``.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar, Generic, NamedTuple, TypeVar

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
        if not gpus:
            return ()
        shown = {gpu.uuid: gpu for gpu in self.snapshot().gpus}
        found = []
        for gpu in gpus:
            if gpu.uuid in shown:
                found.append(shown[gpu.uuid])
            else:
                found.append(gpu.unreachable("no longer listed by the kernel"))
        return tuple(found)

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
        """Return the same poll with what people look at, and conditions that need it: utilisation, and processes that
        only draw."""
        return snapshot

    def examined(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with what speaks for ill GPUs: ``illness`` and utilisation, as far as the driver
        reports.

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


class ProcessList(NamedTuple):
    """What a driver lists of a device.

    Attributes:
        processes: those on it; None if the driver does not list them.
        error: why it does not, a clause; else "".
        supported: False if it never can.
    """

    processes: tuple[GpuProcess, ...] | None
    error: str = ""
    supported: bool = True

    def put_on(self, gpu: Gpu) -> Gpu:
        """Return the record of the device with this list."""
        return gpu._replace(processes=self.processes, process_error=self.error, processes_supported=self.supported)


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
    device = ""
    if vendor is not None and Files().exists(vendor.control):
        device = vendor.device
    found: dict[tuple[int, str], GpuProcess] = {}
    for listed in processes:
        process = _in_own_namespace(listed, device)
        key = (process.pid, process.kind)
        known = found.get(key)
        if known is None or (known.memory_used or -1) < (process.memory_used or -1):
            found[key] = process
    return tuple(found.values())


def _in_own_namespace(process: GpuProcess, device: str) -> GpuProcess:
    """Return a process under its number of this PID namespace; see :func:`own_namespace_pids`.

    Args:
        device: how the names of the device files begin that processes on the GPUs have open; "" for none.
    """
    if process.pid == os.getpid():
        return process
    pid = procfs.thread_group(process.pid)
    if pid is None:
        is_first = procfs.pid_namespace() == procfs.FIRST_PID_NAMESPACE
        return process._replace(ended=is_first and procfs.has_ended(process.pid))
    if device and pid != os.getpid() and _certainly_lacks_device(pid, device):
        return process._replace(name=None, elsewhere=True)
    return process._replace(pid=pid)


def _certainly_lacks_device(pid: int, device: str) -> bool:
    """Return whether no descriptor and no mapping of the process is such a device; False where /proc does not show
    it."""
    opened = procfs.open_files(pid)
    if opened is None:
        return False
    for path in opened.values():
        if os.path.basename(path).startswith(device):
            return False
    is_running = False  # without a mapping it is exiting, or its main thread has ended
    for line in procfs.lines_of(f"/proc/{pid}/maps"):
        is_running = True
        if b"/" + device.encode() in line:
            return False
    return is_running


def is_wsl() -> bool:
    """Return whether the GPUs are those of a Windows host, whose desktop and processes are not listed here."""
    return Files().exists("dev/dxg") and not Files().exists("dev/nvidiactl")


def memory_is_node(bus_id: str) -> bool:
    """Return whether the memory of a GPU is a NUMA node of the kernel, as on GH200, by the driver's ``/proc`` files.

    NVML's ``nvmlDeviceGetNumaNodeId`` says the same; this is for drivers that do not ask NVML.
    """
    status = Files().text(f"proc/driver/nvidia/gpus/{bus_id}/numa_status") or ""
    return re.search(r"Node:\s*[0-9]", status) is not None


def has_display(files: Files, device: str) -> bool:
    """Return whether a connector of a GPU drives a screen; ``device`` is its PCI device below the root."""
    for card in files.names(f"{device}/drm"):
        if not card.startswith("card"):
            continue
        for connector in files.names(f"{device}/drm/{card}"):
            if not connector.startswith("card"):
                continue
            if files.text(f"{device}/drm/{card}/{connector}/enabled") == "enabled":
                return True
    return False


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
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


class Placed(Generic[_Thing]):
    """A GPU with its PCI bus id, "" if it has none, and the driver's number of it."""

    def __init__(self, bus_id: str, number: int, gpu: _Thing) -> None:
        self.bus_id = bus_id
        self.number = number
        self.gpu = gpu


def in_bus_order(placed: Iterable[Placed[_Thing]]) -> list[_Thing]:
    """Return GPUs by PCI bus id, as nvidia-smi numbers them. Those without one are put at the places that their numbers
    give, in the given order."""
    given = list(placed)
    on_a_bus = [one for one in given if bus_order(one.bus_id) is not None]
    on_a_bus.sort(key=lambda one: bus_order(one.bus_id) or ())
    ordered = [one.gpu for one in on_a_bus]
    for one in given:
        if bus_order(one.bus_id) is None:
            ordered.insert(one.number, one.gpu)
    return ordered


def numa_node(bus_id: str, near: Callable[[], frozenset[int] | None] = lambda: None) -> int | None:
    """Return the NUMA node of a PCI device; None is unknown.

    It is sysfs's. Where sysfs does not report it (-1), it is the only node that has CPUs, else the one that has all
    CPUs near the device.

    This is where the card is plugged in. The driver's own notion of a GPU's NUMA node (``nvmlDeviceGetNumaNodeId``) is
    the node that the GPU's *memory* forms on coherent platforms, which is no place for CPUs.

    Args:
        near: returns the CPUs near it as the driver reports them, and is called where sysfs does not report them.
    """
    node = Files().pci_node(bus_id)
    if node is not None and node >= 0:
        return node
    host = SysfsHost(Files())
    node = host.place(Gpu(0, "", pci_bus_id=bus_id)).node
    if node is not None:
        return node
    return node_of_cpus(near() or frozenset(), host.nodes)
