"""The NVIDIA driver through NVML.

No handle outlives the question for which it was got, so none can be stale. A process remembers what GPUs are called,
since a GPU that fell off the bus no longer answers.
"""

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

from ..errors import NoDriverError
from ..gpus.devices import MIG_IS_ON, ComputeMode, Gpu, HostSnapshot, ProcessKind, normalize_bus_id
from ..gpus.vendors import product_name
from ..runtimes.cuda import CUDA
from .base import Driver, Placed, in_bus_order, numa_node, total_of
from .nvml_calls import GPU_LOST, NO_PERMISSION, NO_SUCH_DEVICE, UNKNOWN, Fault, NvmlCalls, NvmlError, SessionOver
from .nvml_device import NvmlDevice
from .nvml_usage import graphics_processes, with_usage

_MOST_GPUS = 256

_COMPUTE_MODES = {1: ComputeMode.EXCLUSIVE_PROCESS, 2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}

_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK

_P2P_OK = 0  # NVML_P2P_STATUS_OK
_P2P_UNKNOWN = 6  # NVML_P2P_STATUS_UNKNOWN

_MODE_COUNTS_FOR = 60.0  # seconds for which a persistence mode is remembered; an administrator may change it

_GONE = "no longer shown by the driver: the UUID has changed, or the GPU or MIG instance was removed"

# By nvmlReturn_t.
_NO_DRIVER = {
    1: "the NVML session keeps ending: something else in this process calls nvmlShutdown once too often",
    4: "this user may not open the NVIDIA devices: check the permissions of /dev/nvidiactl",
    9: "the NVIDIA kernel driver is not loaded: run `modprobe nvidia`, or start the container with GPUs, until "
    "nvidia-smi works",
    12: "NVML is missing: install the NVIDIA driver (libnvidia-ml.so.1) and the Python package nvidia-ml-py",
    13: "the NVIDIA driver is older than R450: upgrade it, or set SAFE_GPU_DRIVER=nvidia-smi",
    18: "the NVIDIA driver was upgraded while its old kernel module is still loaded (driver and library versions "
    "differ): reboot, or unload and load the nvidia modules",
    28: "the NVIDIA driver is loaded but finds no GPU: check `nvidia-smi -L` and lspci",
    999: "NVML fails with an unknown error: in a container that lost its access to /dev/nvidia0 restart it, elsewhere "
    "look for NVRM in dmesg",
}

_Answer = TypeVar("_Answer")

KNOWN: list[Gpu] = []
"""The GPUs that this process saw at its latest poll, in NVML's order, as nothing but what never changes."""

LINKS: defaultdict[str, dict[str, bool]] = defaultdict(dict)
"""UUID -> UUID of another GPU -> whether NVLink connects them, which never changes. Among 256 devices that are 32,640
questions."""


class _Found(NamedTuple):
    """A GPU in NVML's numbering, as nothing but what never changes; with a handle, or the fault that denies one."""

    gpu: Gpu
    handle: Any = None
    fault: Fault | None = None

    def device(self, calls: NvmlCalls) -> NvmlDevice:
        """Return the GPU as one that can be asked.

        Raises:
            Fault: that which denies a handle.
        """
        if self.fault is not None:
            raise self.fault
        return NvmlDevice(calls, self.handle)


def _find_gpus(calls: NvmlCalls) -> list[_Found]:
    """Return every GPU that NVML counts."""
    count = min(max(0, int(calls.ask("nvmlDeviceGetCount"))), _MOST_GPUS)
    known = list(KNOWN)
    if len(known) == count:
        with suppress(Fault):  # one has gone, or never had a UUID
            return [_Found(gpu, calls.ask("nvmlDeviceGetHandleByUUID", gpu.uuid)) for gpu in known]
    facts = {gpu.uuid: gpu for gpu in known if gpu.name and gpu.pci_bus_id}
    found: dict[str, _Found] = {}
    for number in range(count):
        nobody = Gpu(number, f"unknown-{number}")
        try:
            one = _find_by_number(calls, number, facts)
        except Fault as fault:
            one = _Found(nobody, fault=fault)
            if len(known) == count:  # with another number of GPUs, the numbers mean other ones now
                one = _Found(known[number], fault=fault)
        if one.gpu.uuid in found:  # a claim would be of both
            gpu = one.gpu._replace(uuid=nobody.uuid)
            one = _Found(gpu, fault=Fault(UNKNOWN, "another GPU has its UUID"))
        found[one.gpu.uuid] = one
    KNOWN[:] = [one.gpu for one in found.values()]
    return list(found.values())


def _find_by_number(calls: NvmlCalls, number: int, facts: dict[str, Gpu]) -> _Found:
    """Return the GPU of a number; ``facts`` are of GPUs that need not be asked again, by UUID.

    Raises:
        Fault: it cannot be had, or has no UUID.
    """
    handle = calls.ask("nvmlDeviceGetHandleByIndex", number)
    uuid = calls.ask("nvmlDeviceGetUUID", handle)
    if not uuid.strip():
        raise Fault(UNKNOWN)
    if uuid in facts:
        return _Found(facts[uuid], handle)
    device = NvmlDevice(calls, handle)
    bus_id = normalize_bus_id(device.bus_id())
    name = product_name(device.name())
    return _Found(Gpu(0, uuid, name, bus_id, numa_node(bus_id, lambda: device.cpus("node"))), handle)


def _poll(calls: NvmlCalls) -> HostSnapshot:
    placed = []
    for number, one in enumerate(_find_gpus(calls)):
        placed.append(Placed(one.gpu.pci_bus_id, number, one))
    gpus: dict[str, Gpu] = {}
    for index, one in enumerate(in_bus_order(placed)):
        for gpu in _described(calls, one, index):
            gpus.setdefault(gpu.uuid, gpu)  # no MIG instance twice
    version = calls.ask_or("", "nvmlSystemGetDriverVersion")
    return HostSnapshot(tuple(gpus.values()), NvmlDriver.name, version)


def _described(calls: NvmlCalls, one: _Found, index: int) -> list[Gpu]:
    """Return a GPU with all that decides whether it is free, followed by its MIG instances."""
    gpu = one.gpu._replace(index=index)
    try:
        device = one.device(calls)
        described = gpu._replace(
            compute_mode=_COMPUTE_MODES.get(device.compute_mode(), ComputeMode.DEFAULT),
            display_active=device.display_active(),
        )
        described = _with_mode_and_usage(described, device)
        if described.mig_enabled:
            return [described, *_instances(described, device)]
        return [described]
    except Fault as fault:
        return [_failed(gpu, fault)]


def _with_mode_and_usage(gpu: Gpu, device: NvmlDevice) -> Gpu:
    """Return the record of a GPU with its MIG mode, memory and processes of now."""
    mig_enabled = device.mig_enabled()
    unusable = None
    if mig_enabled:
        unusable = MIG_IS_ON
    return with_usage(gpu._replace(mig_enabled=mig_enabled, unusable=unusable), device)


class _PartOfGpuInstance(NamedTuple):
    """A MIG instance, and NVML's number of the GPU instance that it is in; its UUID where that is not reported."""

    gpu_instance: int | str
    gpu: Gpu


def _instances(gpu: Gpu, device: NvmlDevice) -> list[Gpu]:
    """Return the MIG instances of a GPU as they are now."""
    parts = []
    for slot, uuid, instance in device.instances():
        described = Gpu(
            index=gpu.index,
            uuid=uuid,
            name=product_name(instance.name()) or gpu.name,
            pci_bus_id=gpu.pci_bus_id,
            numa_node=gpu.numa_node,
            compute_mode=gpu.compute_mode,
            mig_parent=gpu.uuid,
            mig_instance=slot,
        )
        gpu_instance: int | str | None = instance.gpu_instance_id()
        if gpu_instance is None:
            gpu_instance = uuid
        parts.append(_PartOfGpuInstance(gpu_instance, with_usage(described, instance)))
    found = []
    for part in parts:
        others = [one.gpu for one in parts if one.gpu_instance == part.gpu_instance and one is not part]
        beside = total_of(other.listed_memory for other in others)
        found.append(part.gpu._replace(divided=bool(others), memory_beside=beside))
    return found


def _again(calls: NvmlCalls, gpu: Gpu) -> Gpu:
    """Return a device as it is now; see :meth:`~safe_gpu.drivers.base.Driver.usage`."""
    try:
        device = _device(calls, gpu.mig_parent or gpu.uuid)
        if gpu.mig_parent is None:
            return _with_mode_and_usage(gpu, device)
        # With its siblings, whose processes use the same memory.
        for now in _instances(gpu._replace(uuid=gpu.mig_parent), device):
            if now.uuid == gpu.uuid and now.mig_instance == gpu.mig_instance:
                return now._replace(utilization=gpu.utilization, temperature=gpu.temperature)
        return gpu.unreachable(_GONE)
    except Fault as fault:
        if fault.code in NO_SUCH_DEVICE:
            return gpu.unreachable(_GONE)
        return _failed(gpu, fault)


def _device(calls: NvmlCalls, uuid: str) -> NvmlDevice:
    """Return a GPU as one that can be asked; Fault if it is gone."""
    return NvmlDevice(calls, calls.ask("nvmlDeviceGetHandleByUUID", uuid))


def _shows_same(calls: NvmlCalls, snapshot: HostSnapshot) -> bool:
    """Return the answer of :meth:`NvmlDriver.shows_same`. A handle of a GPU that is lost may be had; its memory not."""
    gpus = snapshot.physical
    if calls.ask("nvmlDeviceGetCount") != len(gpus) or any(gpu.lost for gpu in gpus):
        return False
    try:
        for gpu in gpus:
            device = _device(calls, gpu.uuid)
            calls.ask_or(None, "nvmlDeviceGetMemoryInfo", device.handle)
            if device.mig_enabled() != gpu.mig_enabled:
                return False
    except Fault:
        return False
    return True


def _stay_initialized(calls: NvmlCalls) -> bool:
    """Return whether the GPUs stay initialised when their last client leaves: all have persistence mode on, whether
    nvidia-persistenced or the kernel driver keeps it. Where the mode is not supported, as under WSL2, it is not on.

    A GPU that is lost, or that this process may not open, has no client here.
    """
    for one in _find_gpus(calls):
        try:
            if not one.device(calls).is_persistent():
                return False
        except Fault as fault:
            if fault.code not in GPU_LOST and fault.code != NO_PERMISSION:
                return False
    return True


def _detailed(calls: NvmlCalls, gpu: Gpu) -> Gpu:
    """Return the same record with utilisation and processes that only draw, as far as the device answers."""
    try:
        device = _device(calls, gpu.mig_parent or gpu.uuid)
        if gpu.mig_instance is not None:
            device = device.instance(gpu.mig_instance)
        detailed = gpu._replace(
            utilization=device.utilization(),
            temperature=device.temperature(),
            fan=device.fan(),
            power=device.power(),
            power_limit=device.power_limit(),
        )
        if _lacks_graphics(gpu):
            processes = (*(gpu.processes or ()), *graphics_processes(device))
            detailed = detailed._replace(processes=processes)
        return detailed
    except Fault as fault:
        if fault.code in NO_SUCH_DEVICE:
            return gpu
        return _failed(gpu, fault)


def _lacks_graphics(gpu: Gpu) -> bool:
    """Return whether processes that only draw may be missing in a list of others."""
    if gpu.processes is None:
        return False
    return all(process.kind != ProcessKind.GRAPHICS for process in gpu.processes)


def _examined(calls: NvmlCalls, gpu: Gpu) -> Gpu:
    """Return the same record with ``illness``, which an instance has of its GPU, and with utilisation."""
    try:
        device = _device(calls, gpu.mig_parent or gpu.uuid)
        utilization = gpu.utilization
        if utilization is None and not gpu.is_mig_instance:
            utilization = device.utilization()
        return gpu._replace(illness=device.illness(), utilization=utilization)
    except Fault as fault:
        if fault.code in NO_SUCH_DEVICE:
            return gpu
        return _failed(gpu, fault)


def _linked(calls: NvmlCalls, snapshot: HostSnapshot, among: Collection[str] | None) -> HostSnapshot:
    """Return the same poll with who reaches whom by NVLink. A GPU with MIG mode on reaches nobody."""
    gpus = []
    for gpu in snapshot.physical:
        if not gpu.lost and not gpu.mig_enabled and (among is None or gpu.uuid in among):
            gpus.append(gpu)
    _ask_links(calls, gpus)
    shown = {gpu.uuid for gpu in gpus}
    linked = []
    for gpu in gpus:
        peers = frozenset(uuid for uuid, is_linked in LINKS[gpu.uuid].items() if is_linked and uuid in shown)
        linked.append(gpu._replace(nvlink_peers=peers))
    return snapshot.updated(linked)


def _ask_links(calls: NvmlCalls, gpus: Sequence[Gpu]) -> None:
    """Ask which of these GPUs NVLink connects, as far as this process does not know it."""
    handles: dict[str, Any] = {}
    for one, other in combinations(gpus, 2):
        if other.uuid in LINKS[one.uuid]:
            continue
        with suppress(Fault):
            for gpu in (one, other):
                if gpu.uuid not in handles:
                    handles[gpu.uuid] = calls.ask("nvmlDeviceGetHandleByUUID", gpu.uuid)
            status = calls.ask("nvmlDeviceGetP2PStatus", handles[one.uuid], handles[other.uuid], _P2P_NVLINK)
            if status != _P2P_UNKNOWN:
                is_linked = status == _P2P_OK
                LINKS[one.uuid][other.uuid] = is_linked
                LINKS[other.uuid][one.uuid] = is_linked


def _cpus(calls: NvmlCalls, uuid: str, scope: str) -> frozenset[int] | None:
    with suppress(Fault):
        return _device(calls, uuid).cpus(scope)
    return None


def _failed(gpu: Gpu, fault: Fault) -> Gpu:
    if fault.code == NO_PERMISSION:
        return gpu.unreachable("closed to this process: the job or container was given other GPUs", lost=False)
    return gpu.unreachable(f"out of reach of the driver ({fault}): reset the GPU, or reboot the host")


class NvmlDriver(Driver):
    """NVML as a driver. One session serves all polls; a new one is opened after a fork, or when it ends under us.

    Threads may share it. A GPU that falls off the bus keeps its UUID and place.

    Raises:
        NoDriverError: NVML is missing, the kernel driver is not loaded, or the two do not match.
        MissingDriverPackageError: nvidia-ml-py is not installed, or the module pynvml is another one, or too old.
    """

    name = "nvml"
    runtime = CUDA

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._session: NvmlCalls | None = None
        self._stay_initialized = False  # the GPUs, without this session
        self._mode_asked = -math.inf  # time.monotonic() value
        self._ask(lambda calls: None)

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`, for the next three too."""
        return self._ask(_poll)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about these devices only."""
        return self._ask(lambda calls: tuple(_again(calls, gpu) for gpu in gpus))

    def shows_same(self, snapshot: HostSnapshot) -> bool:
        """Return whether the GPUs are those of an earlier poll: three questions for each."""
        return self._ask(lambda calls: _shows_same(calls, snapshot))

    def linked(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with NVLink."""
        return self._ask(lambda calls: _linked(calls, snapshot, among))

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with utilisation and graphics processes."""
        there = [gpu for gpu in snapshot.gpus if not gpu.lost]
        return snapshot.updated(self._ask(lambda calls: [_detailed(calls, gpu) for gpu in there]))

    def examined(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with signs of illness: four questions for each GPU."""
        asked = [gpu for gpu in snapshot.gpus if not gpu.lost and (among is None or gpu.uuid in among)]
        return snapshot.updated(self._ask(lambda calls: [_examined(calls, gpu) for gpu in asked]))

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """Return the CPUs next to a GPU."""
        return self._ask(lambda calls: _cpus(calls, uuid, scope))

    def rest(self) -> None:
        """End the session if all GPUs have persistence mode on. Elsewhere the last client to leave shuts them down, and
        the next one waits for seconds."""
        if self._session is None:
            return
        with suppress(NoDriverError):  # the next question says so
            if time.monotonic() - self._mode_asked > _MODE_COUNTS_FOR:
                self._stay_initialized = self._ask(_stay_initialized)
                self._mode_asked = time.monotonic()
            if self._stay_initialized:
                self.close()

    def close(self) -> None:
        """End the session; a later question opens a new one."""
        if self._pid == os.getpid():
            with self._lock:
                self._end()

    def _ask(self, question: Callable[[NvmlCalls], _Answer]) -> _Answer:
        """Put a question to the session, and if that turns out to be over, once more to a new one."""
        if self._pid != os.getpid():
            self._forget_parent()
        with self._lock:
            try:
                try:
                    return question(self._open())
                except SessionOver:
                    self._end()
                    return question(self._open())
            except NvmlError as err:
                self._end()
                what = _NO_DRIVER.get(err.code) or f"NVML cannot be used: {err}"
                raise NoDriverError(what, driver=self.name) from err

    def _forget_parent(self) -> None:
        """Begin again in a forked child. Its parent's session is not for it, not even to be shut down; and the lock may
        be held by a thread that was not copied."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._session = None

    def _open(self) -> NvmlCalls:
        """Return the session, a new one if there is none."""
        if self._session is None:
            self._session = NvmlCalls()
        return self._session

    def _end(self) -> None:
        session = self._session
        self._session = None
        if session is not None:
            with suppress(NvmlError):
                session.end()
