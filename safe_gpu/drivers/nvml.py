"""The NVIDIA driver through NVML.

No handle outlives the question for which it was got, so none can be stale. A process remembers what GPUs are called,
since a GPU that fell off the bus no longer tells.
Source: NVML API reference.
"""

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

from ..errors import MissingPackageError, NoDriverError
from ..gpus.devices import MIG_IS_ON, ComputeMode, Gpu, GpuProcess, HostSnapshot, ProcessKind, normalize_bus_id
from ..gpus.vendors import product_name
from ..host import procfs
from ..host.foreign_files import printable
from ..runtimes.cuda import CUDA
from ..runtimes.loading import load_file
from .base import Driver, illness_of, in_bus_order, is_wsl, numa_node, own_namespace_pids, total_of

LIBRARY = "libnvidia-ml.so.1"

_COMPUTE_MODES = {1: ComputeMode.EXCLUSIVE_PROCESS, 2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}

_LISTS = {ProcessKind.COMPUTE: "Compute", ProcessKind.MPS: "MPSCompute", ProcessKind.GRAPHICS: "Graphics"}

_MOST_GPUS = 256

_MOST_INSTANCES = 64  # of a GPU; there are 7 today

_LONGEST = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE and NVML_DEVICE_NAME_V2_BUFFER_SIZE

# An idle card shows a few MiB in use. If the processes that compute do not account for all but this, those under MPS
# and those that only draw are listed too.
_IDLE_MEMORY = 16 << 20

_HIDDEN = 2**64 - 1  # bytes

_NO_INSTANCE = 2**32 - 1

_SCOPES = {"node": 0, "socket": 1}  # NVML_AFFINITY_SCOPE_*

_MASK_WORDS = 64  # of 64 bits: room for 4096 CPUs

_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK

_P2P_OK = 0  # NVML_P2P_STATUS_OK
_P2P_UNKNOWN = 6  # NVML_P2P_STATUS_UNKNOWN

_TEMPERATURE_GPU = 0  # NVML_TEMPERATURE_GPU

_ENABLED = 1  # NVML_FEATURE_ENABLED

_MODE_COUNTS_FOR = 60.0  # seconds for which a persistence mode is remembered; an administrator may change it

_GONE = "the driver no longer shows it: its UUID has changed, or the GPU or MIG instance was removed"

# nvmlReturn_t
_NO_PERMISSION = 4
_LIBRARY_NOT_FOUND = 12
_FUNCTION_NOT_FOUND = 13
_UNKNOWN = 999
_SESSION_OVER = frozenset({1, 9, 18})  # uninitialised, driver not loaded, versions differ
_NO_SUCH_DEVICE = frozenset({2, 6})  # invalid argument, not found
# No answer here, now or ever: not supported, function not found, argument version, deprecated.
_ABSENT = frozenset({3, 13, 25, 26})
_GPU_LOST = frozenset({15, 16, 28})  # lost, needs a reset, GPU not found

_NO_DRIVER = {
    1: "The NVML session keeps ending: something else in this process calls nvmlShutdown once too often.",
    4: "This user may not open the NVIDIA devices: check the permissions of /dev/nvidiactl.",
    9: "The NVIDIA kernel driver is not loaded: run `modprobe nvidia`, or start the container with GPUs, until "
    "nvidia-smi works.",
    12: "NVML is missing: install the NVIDIA driver (libnvidia-ml.so.1) and the Python package nvidia-ml-py.",
    13: "The NVIDIA driver is older than R450: upgrade it, or set SAFE_GPU_DRIVER=nvidia-smi.",
    18: "The NVIDIA driver was upgraded while its old kernel module is still loaded (driver and library versions "
    "differ): reboot, or unload and load the nvidia modules.",
    28: "The NVIDIA driver is loaded but finds no GPU: check `nvidia-smi -L` and lspci.",
    999: "NVML fails with an unknown error: in a container that lost its access to /dev/nvidia0 restart it, elsewhere "
    "look for NVRM in dmesg.",
}

_POWER = ("PowerUsage", "EnforcedPowerLimit")

# Known to R570 and nvidia-ml-py 12.570, and newer ones.
_RECOVERY_FIELD = "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"

# nvmlDeviceGpuRecoveryAction_t, in nvidia-smi's words; 0 is none.
_RECOVERY_ACTIONS = {
    1: "Reset",
    2: "Reboot",
    3: "Drain P2P",
    4: "Drain and Reset",
    5: "Recover IMEX Domain",
    6: "Bus Reset",
    7: "System Reboot",
}

_Answer = TypeVar("_Answer")

KNOWN: list[Gpu] = []
"""The GPUs that this process saw at its latest poll, in NVML's order, as nothing but what never changes."""

LINKS: defaultdict[str, dict[str, bool]] = defaultdict(dict)
"""UUID -> UUID of another GPU -> whether NVLink connects them, which never changes. Among 256 devices that are 32,640
questions."""


class _Trouble(Exception):
    """One call of NVML that failed; ``code`` is its nvmlReturn_t."""

    def __init__(self, code: int, said: str = "") -> None:
        super().__init__(said or f"NVML error {code}")
        self.code = code


class _SessionOver(_Trouble):
    """NVML as a whole is gone, at least for this session."""


class _Fault(_Trouble):
    """A question that was not answered."""


def _pynvml() -> Any:
    try:
        import pynvml
    except ImportError as err:
        what = "the Python package nvidia-ml-py is not installed (pip install nvidia-ml-py)"
        raise NoDriverError(what, driver="nvml") from err
    if all(hasattr(pynvml, name) for name in ("NVMLError", "c_nvmlDevice_t", "nvmlPciInfo_t")):
        return pynvml
    raise MissingPackageError(
        f"the module pynvml in {pynvml.__file__} is not that of nvidia-ml-py 12.535 or newer (pip uninstall pynvml "
        "nvidia-ml-py3, then pip install --force-reinstall nvidia-ml-py)"
    )


def why_missing() -> str | None:
    """Return what is missing for NVML on this host, its Python module or its library; None when both are there."""
    try:
        _pynvml()
        load_file(LIBRARY)
    except (NoDriverError, MissingPackageError) as err:
        return str(err)
    except OSError as err:
        return f"NVML cannot be loaded ({err})"
    return None


class _Session:
    """NVML, initialised in this process.

    Raises:
        _Fault, _SessionOver: from every method.
    """

    def __init__(self) -> None:
        self._pynvml = _pynvml()
        self._functions = vars(self._pynvml)
        try:
            load_file(LIBRARY)  # pynvml then gets this one too, wherever the loader would have looked
        except OSError as err:
            raise _Fault(_LIBRARY_NOT_FOUND) from err
        self.ask("nvmlInit")

    def ask(self, name: str, *args: Any) -> Any:
        """Call a function of pynvml by name. Text comes out printable, and no longer than NVML's own buffers."""
        if name not in self._functions:
            raise _Fault(_FUNCTION_NOT_FOUND)
        Driver.latest_call = name
        try:
            answer = self._functions[name](*args)
            if type(answer) not in (bytes, str):
                return answer
            text = answer.decode() if isinstance(answer, bytes) else answer
        except self._pynvml.NVMLError as err:
            code = int(err.value)
            raise (_SessionOver if code in _SESSION_OVER else _Fault)(code, str(err)) from err
        except UnicodeDecodeError as err:
            raise _Fault(_UNKNOWN) from err
        return printable(text[:_LONGEST])

    def ask_or(self, default: Any, name: str, *args: Any) -> Any:
        """Return the same for a question that may go unanswered, unless the GPU or the session is gone altogether."""
        try:
            return self.ask(name, *args)
        except _Fault as fault:
            if fault.code in _GPU_LOST:
                raise
            return default

    def memory(self, handle: Any) -> dict[str, Any]:
        """Return the memory of a device, as fields of a Gpu.

        Version 2, where there is one, leaves what the driver reserves for itself out of "used", as nvidia-smi does.
        """
        newer = self.ask_or(None, "nvmlDeviceGetMemoryInfo", handle, self._pynvml.nvmlMemory_v2)
        info = newer or self.ask_or(None, "nvmlDeviceGetMemoryInfo", handle)
        sizes = (info.total, info.used, info.free) if info else (_HIDDEN,) * 3
        total, used, free = [None if size == _HIDDEN else size for size in sizes]
        return {"counts_reserved": newer is None, "memory_total": total, "memory_used": used, "memory_free": free}

    def rows(self, handle: Any, kinds: Sequence[str]) -> list[tuple[str, Any]]:
        """Return the rows of these process lists of a GPU or MIG instance, each with its kind.

        Raises:
            _Fault: one of them fails, or there is none of processes that compute.
        """
        found: list[tuple[str, Any]] = []
        for kind in kinds:
            for version in ("_v3", "_v2"):  # the latter for drivers before R510
                try:
                    name = f"nvmlDeviceGet{_LISTS[kind]}RunningProcesses{version}"
                    found += [(kind, row) for row in self.ask(name, handle)]
                    break
                except _Fault as fault:
                    if fault.code not in _ABSENT or (version, kind) == ("_v2", ProcessKind.COMPUTE):
                        raise
        return found

    def processes(self, handle: Any, kinds: Sequence[str], parent: Any = None) -> dict[str, Any]:
        """Return what these lists say, as fields of a Gpu.

        Args:
            parent: the GPU of a MIG instance. Some drivers list processes only there, with the instance's ids.
        """
        rows, mute = [], None
        try:
            rows = self.rows(handle, kinds)
        except _Fault as fault:
            if fault.code in _GPU_LOST:
                raise
            mute = fault
        if parent is not None:
            rows = list(self._of_instance(handle, rows, unplaced=True))
            if mute is None or mute.code in _ABSENT:
                with suppress(_Fault):
                    rows += self._of_instance(handle, self.rows(parent, kinds), unplaced=mute is not None)
                    mute = None
        if mute is not None:
            what = f"the driver does not list its processes: {mute}"
            return {"processes": None, "process_error": what, "processes_supported": mute.code not in _ABSENT}
        listed = []
        for kind, row in rows:
            # NVML is asked where /proc does not show the command.
            name = procfs.command_of(row.pid) or self.ask_or(None, "nvmlSystemGetProcessName", row.pid)
            listed.append(GpuProcess(row.pid, kind, row.usedGpuMemory, name))
        processes = own_namespace_pids(listed) if listed else ()
        return {"processes": processes, "process_error": "", "processes_supported": True}

    def _of_instance(self, handle: Any, rows: list[tuple[str, Any]], *, unplaced: bool) -> Iterator[tuple[str, Any]]:
        """Yield those of these rows that are of a MIG instance.

        Args:
            unplaced: whether a row without ids is. Those of the GPU may run on any instance, so they count where the
                instance itself is mute.
        """
        if not rows:
            return
        own = [self.ask_or(None, f"nvmlDeviceGet{kind}InstanceId", handle) for kind in ("Gpu", "Compute")]
        for kind, row in rows:
            ids = [None if one == _NO_INSTANCE else one for one in (row.gpuInstanceId, row.computeInstanceId)]
            if None in (ids[0], own[0]):
                here = unplaced
            else:
                here = all(None in pair or pair[0] == pair[1] for pair in zip(ids, own, strict=True))
            if here:
                yield kind, row

    def used(self, gpu: Gpu, handle: Any, parent: Any = None, **known: Any) -> Gpu:
        """Return the device with its memory and processes of now, and with these other fields."""
        # Read before the lists, or the memory of a process that starts in between would belong to no visible process.
        memory = self.memory(handle)
        processes = self.processes(handle, [ProcessKind.COMPUTE], parent)
        gpu = gpu._replace(**known, **memory, **processes, memory_shared=False, lost=False)
        if gpu.memory_used is not None and gpu.memory_used <= _IDLE_MEMORY:
            return gpu
        if gpu.memory_used is None or gpu.memory_used - (gpu.listed_memory or 0) > _IDLE_MEMORY:
            gpu = gpu._replace(**self.processes(handle, list(_LISTS), parent))
        if gpu.unexplained_memory > _IDLE_MEMORY:
            # Memory that is a NUMA node of the kernel (GH200, GB200) has a page cache, which counts as used.
            nodes = [self.ask_or(None, "nvmlDeviceGetNumaNodeId", one) for one in (handle, parent) if one is not None]
            gpu = gpu._replace(memory_shared=is_wsl() or nodes.count(None) < len(nodes))
        return gpu

    def whole(self, gpu: Gpu, handle: Any, **known: Any) -> Gpu:
        """Return the same of a GPU, which may have MIG mode on."""
        mig = self.ask_or((0, 0), "nvmlDeviceGetMigMode", handle)[0] == 1
        return self.used(gpu, handle, mig_enabled=mig, unusable=MIG_IS_ON if mig else None, **known)

    def instances(self, gpu: Gpu, handle: Any) -> list[Gpu]:
        """Return the MIG instances of a GPU as they are now."""
        found = []
        for slot in range(min(self.ask_or(0, "nvmlDeviceGetMaxMigDeviceCount", handle), _MOST_INSTANCES)):
            part = self.ask_or(None, "nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
            uuid = "" if part is None else self.ask_or("", "nvmlDeviceGetUUID", part)
            if not uuid:
                continue  # an empty slot, or an instance that this user may not see
            name = product_name(self.ask_or("", "nvmlDeviceGetName", part)) or gpu.name
            instance = Gpu(gpu.index, uuid, name, gpu.pci_bus_id, gpu.numa_node, compute_mode=gpu.compute_mode)
            instance = instance._replace(mig_parent=gpu.uuid, mig_instance=slot)
            whole = self.ask_or(uuid, "nvmlDeviceGetGpuInstanceId", part)
            found.append((whole, self.used(instance, part, handle)))
        instances = []
        for whole, one in found:
            others = [gpu for its, gpu in found if its == whole and gpu is not one]
            beside = total_of(gpu.listed_memory for gpu in others)
            instances.append(one._replace(divided=bool(others), memory_beside=beside))
        return instances

    def recovery_action(self, handle: Any) -> str:
        """Return what the driver recommends for a GPU; "" for nothing, and where it does not say."""
        field = self._functions.get(_RECOVERY_FIELD)
        if field is None:
            return ""
        for value in self.ask_or((), "nvmlDeviceGetFieldValues", handle, [field]):
            action = int(value.value.uiVal)
            if value.nvmlReturn == 0 and action:
                return _RECOVERY_ACTIONS.get(action, f"number {action}")
        return ""

    def illness(self, handle: Any) -> str:
        """Return what the driver says against a GPU, a clause; "" if nothing."""
        action = self.recovery_action(handle)
        # Ampere and newer, and not while there are MIG instances.
        remapped = self.ask_or(None, "nvmlDeviceGetRemappedRows", handle)
        pending, failed = (False, False) if remapped is None else (bool(remapped[2]), bool(remapped[3]))
        return illness_of(recovery_action=action, remapping_failed=failed, remapping_pending=pending)

    def utilization(self, handle: Any) -> int | None:
        """Return the percentage of time in which a kernel ran; None if it is not told."""
        rates = self.ask_or(None, "nvmlDeviceGetUtilizationRates", handle)
        return None if rates is None else int(rates.gpu)

    def cpus(self, handle: Any, scope: str) -> frozenset[int] | None:
        """Return the CPUs next to a GPU. None is unknown, as where all of them lie outside this process's cpuset."""
        words = self.ask_or((), "nvmlDeviceGetCpuAffinityWithinScope", handle, _MASK_WORDS, _SCOPES[scope])
        cpus = [64 * i + bit for i, word in enumerate(words) if word for bit in range(64) if word >> bit & 1]
        return frozenset(cpus) or None


class _Found(NamedTuple):
    """A GPU in NVML's numbering, as nothing but what never changes; with a handle, or the fault that denies one."""

    gpu: Gpu
    handle: Any = None
    fault: _Fault | None = None


def _identified(session: _Session) -> list[_Found]:
    """Return every GPU that NVML counts."""
    count = min(max(0, int(session.ask("nvmlDeviceGetCount"))), _MOST_GPUS)
    known = list(KNOWN)
    if count == len(known):
        with suppress(_Fault):  # one has gone, or never had a UUID
            return [_Found(gpu, session.ask("nvmlDeviceGetHandleByUUID", gpu.uuid)) for gpu in known]
    facts = {gpu.uuid: gpu for gpu in known if gpu.name and gpu.pci_bus_id}
    found: dict[str, _Found] = {}
    for number in range(count):
        try:
            handle = session.ask("nvmlDeviceGetHandleByIndex", number)
            uuid = session.ask("nvmlDeviceGetUUID", handle)
            if not uuid.strip():
                raise _Fault(_UNKNOWN)
            one = _Found(facts.get(uuid) or _read_facts(session, handle, uuid), handle)
        except _Fault as fault:
            # With another number of GPUs, the numbers mean other ones now.
            one = _Found(known[number] if count == len(known) else Gpu(number, f"unknown-{number}"), fault=fault)
        if one.gpu.uuid in found:  # a claim would be of both
            nobody = one.gpu._replace(uuid=f"unknown-{number}")
            one = _Found(nobody, fault=_Fault(_UNKNOWN, "another GPU has its UUID"))
        found[one.gpu.uuid] = one
    KNOWN[:] = [one.gpu for one in found.values()]
    return list(found.values())


def _read_facts(session: _Session, handle: Any, uuid: str) -> Gpu:
    said = getattr(session.ask_or(None, "nvmlDeviceGetPciInfo", handle), "busId", "")
    bus_id = normalize_bus_id(said.decode("ascii", "replace") if isinstance(said, bytes) else said)
    name = product_name(session.ask_or("", "nvmlDeviceGetName", handle))
    return Gpu(0, uuid, name, bus_id, numa_node(bus_id, lambda: session.cpus(handle, "node")))


def _described(session: _Session, one: _Found, index: int) -> list[Gpu]:
    """Return a GPU with all that decides whether it is free, followed by its MIG instances."""
    handle = one.handle
    try:
        if one.fault is not None:
            raise one.fault
        mode = _COMPUTE_MODES.get(session.ask_or(0, "nvmlDeviceGetComputeMode", handle), ComputeMode.DEFAULT)
        display = session.ask_or(0, "nvmlDeviceGetDisplayActive", handle) == 1
        gpu = session.whole(one.gpu, handle, index=index, compute_mode=mode, display_active=display)
        return [gpu, *(session.instances(gpu, handle) if gpu.mig_enabled else ())]
    except _Fault as fault:
        return [_failed(one.gpu._replace(index=index), fault)]


def _poll(session: _Session) -> HostSnapshot:
    found = _identified(session)
    ordered = in_bus_order((one.gpu.pci_bus_id, number, one) for number, one in enumerate(found))
    gpus: dict[str, Gpu] = {}
    for index, one in enumerate(ordered):
        for gpu in _described(session, one, index):
            gpus.setdefault(gpu.uuid, gpu)  # no MIG instance twice
    return HostSnapshot(tuple(gpus.values()), NvmlDriver.name, session.ask_or("", "nvmlSystemGetDriverVersion"))


def _again(session: _Session, gpu: Gpu) -> Gpu:
    """Return a device as it is now; see :meth:`~safe_gpu.drivers.base.Driver.usage`."""
    try:
        handle = session.ask("nvmlDeviceGetHandleByUUID", gpu.mig_parent or gpu.uuid)
        if gpu.mig_parent is None:
            return session.whole(gpu, handle)
        # With its siblings, whose processes use the same memory.
        for now in session.instances(gpu._replace(uuid=gpu.mig_parent), handle):
            if (now.uuid, now.mig_instance) == (gpu.uuid, gpu.mig_instance):
                return now._replace(utilization=gpu.utilization, temperature=gpu.temperature)
        return gpu.unreachable(_GONE)
    except _Fault as fault:
        return gpu.unreachable(_GONE) if fault.code in _NO_SUCH_DEVICE else _failed(gpu, fault)


def _shows_same(session: _Session, snapshot: HostSnapshot) -> bool:
    """Return the answer of :meth:`NvmlDriver.shows_same`. A handle of a GPU that is lost may be had; its memory not."""
    there = snapshot.physical
    if session.ask("nvmlDeviceGetCount") != len(there) or any(gpu.lost for gpu in there):
        return False
    with suppress(_Fault):
        for gpu in there:
            handle = session.ask("nvmlDeviceGetHandleByUUID", gpu.uuid)
            session.ask_or(None, "nvmlDeviceGetMemoryInfo", handle)
            mig_enabled = session.ask_or((0, 0), "nvmlDeviceGetMigMode", handle)[0] == 1
            if mig_enabled != gpu.mig_enabled:
                return False
        return True
    return False


def _stay_initialized(session: _Session) -> bool:
    """Return whether the GPUs stay initialised when their last client leaves: all have persistence mode on, whether
    nvidia-persistenced or the kernel driver keeps it. Where the mode is not supported, as under WSL2, it is not on.

    A GPU that is lost, or that this process may not open, has no client here.
    """
    for one in _identified(session):
        try:
            if one.fault is not None:
                raise one.fault
            if session.ask("nvmlDeviceGetPersistenceMode", one.handle) != _ENABLED:
                return False
        except _Fault as fault:
            if fault.code not in _GPU_LOST and fault.code != _NO_PERMISSION:
                return False
    return True


def _detailed(session: _Session, gpu: Gpu) -> Gpu:
    """Return the same record with utilisation and processes that only draw, as far as the device answers."""
    try:
        handle = session.ask("nvmlDeviceGetHandleByUUID", gpu.mig_parent or gpu.uuid)
        if gpu.is_mig_instance:
            handle = session.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, gpu.mig_instance)
        utilization = session.utilization(handle)
        temperature = session.ask_or(None, "nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU)
        fan = session.ask_or(None, "nvmlDeviceGetFanSpeed", handle)
        power, limit = (session.ask_or(0, f"nvmlDeviceGet{one}", handle) // 1000 or None for one in _POWER)
        processes = gpu.processes
        if processes is not None and all(process.kind != ProcessKind.GRAPHICS for process in processes):
            processes += session.processes(handle, [ProcessKind.GRAPHICS])["processes"] or ()
    except _Fault as fault:
        return gpu if fault.code in _NO_SUCH_DEVICE else _failed(gpu, fault)
    gpu = gpu._replace(utilization=utilization, temperature=temperature, processes=processes)
    return gpu._replace(fan=fan, power=power, power_limit=limit)


def _examined(session: _Session, gpu: Gpu) -> Gpu:
    """Return the same record with ``illness``, which an instance has of its GPU, and with utilisation."""
    try:
        handle = session.ask("nvmlDeviceGetHandleByUUID", gpu.mig_parent or gpu.uuid)
        utilization = gpu.utilization
        if utilization is None and not gpu.is_mig_instance:
            utilization = session.utilization(handle)
        return gpu._replace(illness=session.illness(handle), utilization=utilization)
    except _Fault as fault:
        return gpu if fault.code in _NO_SUCH_DEVICE else _failed(gpu, fault)


def _linked(session: _Session, snapshot: HostSnapshot, among: Collection[str] | None) -> HostSnapshot:
    """Return the same poll with who reaches whom by NVLink. A GPU with MIG mode on reaches nobody."""
    gpus = []
    for gpu in snapshot.physical:
        if not gpu.lost and not gpu.mig_enabled and (among is None or gpu.uuid in among):
            gpus.append(gpu)
    _ask_links(session, gpus)
    shown = {gpu.uuid for gpu in gpus}
    linked = []
    for gpu in gpus:
        peers = frozenset(uuid for uuid, is_linked in LINKS[gpu.uuid].items() if is_linked and uuid in shown)
        linked.append(gpu._replace(nvlink_peers=peers))
    return snapshot.updated(linked)


def _ask_links(session: _Session, gpus: Sequence[Gpu]) -> None:
    """Ask which of these GPUs NVLink connects, as far as this process does not know it."""
    handles: dict[str, Any] = {}
    for one, other in combinations(gpus, 2):
        if other.uuid in LINKS[one.uuid]:
            continue
        with suppress(_Fault):
            for gpu in (one, other):
                if gpu.uuid not in handles:
                    handles[gpu.uuid] = session.ask("nvmlDeviceGetHandleByUUID", gpu.uuid)
            status = session.ask("nvmlDeviceGetP2PStatus", handles[one.uuid], handles[other.uuid], _P2P_NVLINK)
            if status != _P2P_UNKNOWN:
                LINKS[one.uuid][other.uuid] = LINKS[other.uuid][one.uuid] = status == _P2P_OK


def _cpus(session: _Session, uuid: str, scope: str) -> frozenset[int] | None:
    with suppress(_Fault):
        return session.cpus(session.ask("nvmlDeviceGetHandleByUUID", uuid), scope)
    return None


def _failed(gpu: Gpu, fault: _Fault) -> Gpu:
    if fault.code == _NO_PERMISSION:
        return gpu.unreachable("this process may not open it: the job or container was given other GPUs", lost=False)
    return gpu.unreachable(f"the driver cannot reach it ({fault}): reset it, or reboot the host")


class NvmlDriver(Driver):
    """NVML as a driver. One session serves all polls; a new one is opened after a fork, or when it ends under us.

    Threads may share it. A GPU that falls off the bus keeps its UUID and place.

    Raises:
        NoDriverError: NVML is missing, the kernel driver is not loaded, or the two do not match.
        MissingPackageError: the module pynvml is another than nvidia-ml-py's, or too old.
    """

    name = "nvml"
    runtime = CUDA

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._stay_initialized = False  # the GPUs, without this session
        self._mode_asked = -math.inf  # time.monotonic() value
        self._ask(lambda session: None)

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`, for the next three too."""
        return self._ask(_poll)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about these devices only."""
        return self._ask(lambda session: tuple(_again(session, gpu) for gpu in gpus))

    def shows_same(self, snapshot: HostSnapshot) -> bool:
        """Return whether the GPUs are those of an earlier poll: three questions for each."""
        return self._ask(lambda session: _shows_same(session, snapshot))

    def linked(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with NVLink."""
        return self._ask(lambda session: _linked(session, snapshot, among))

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with utilisation and graphics processes."""
        there = [gpu for gpu in snapshot.gpus if not gpu.lost]
        return snapshot.updated(self._ask(lambda session: [_detailed(session, gpu) for gpu in there]))

    def examined(self, snapshot: HostSnapshot, among: Collection[str] | None = None) -> HostSnapshot:
        """Return the same poll with signs of illness: four questions for each GPU."""
        asked = [gpu for gpu in snapshot.gpus if not gpu.lost and (among is None or gpu.uuid in among)]
        return snapshot.updated(self._ask(lambda session: [_examined(session, gpu) for gpu in asked]))

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """Return the CPUs next to a GPU."""
        return self._ask(lambda session: _cpus(session, uuid, scope))

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

    def _ask(self, question: Callable[[_Session], _Answer]) -> _Answer:
        """Put a question to the session, and if that turns out to be over, once more to a new one."""
        if self._pid != os.getpid():
            # A forked child. Its parent's session is not for it, not even to be shut down; and the lock may be held by
            # a thread that was not copied.
            self._pid, self._lock, self._session = os.getpid(), threading.Lock(), None
        with self._lock:
            try:
                try:
                    self._session = self._session or _Session()
                    return question(self._session)
                except _SessionOver:
                    self._end()
                    self._session = _Session()
                    return question(self._session)
            except _Trouble as trouble:
                self._end()
                what = _NO_DRIVER.get(trouble.code) or f"NVML cannot be used: {trouble}."
                raise NoDriverError(what, driver=self.name) from trouble

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with suppress(_Trouble):
                session.ask("nvmlShutdown")
