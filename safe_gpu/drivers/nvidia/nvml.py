"""The NVIDIA driver through NVML.

What never changes about a GPU is asked once per process, and handles once per session. A poll therefore asks only for
what may have changed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any, TypeVar

from ...errors import MissingPackageError, NoDriverError
from ...gpus.devices import MIG_IS_ON, ComputeMode, Gpu, GpuProcess, HostSnapshot, ProcessKind
from ...gpus.vendors import product_name
from ...host import procfs
from ...runtimes.cuda import CUDA
from ...runtimes.library import load_file
from .. import pci
from ..base import Driver
from ..kernel import is_wsl, own_namespace_pids
from .nvml_session import LIBRARY, UNKNOWN_ERROR, NvmlError, NvmlTrouble, ProcessRow, Session, SessionOver

_COMPUTE_MODES = {1: ComputeMode.EXCLUSIVE_PROCESS, 2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}

_MOST_INSTANCES = 64  # of a GPU; there are 7 today

# An idle card shows a few MiB in use. If the other processes do not account for all but this, those that only draw are
# listed too.
_IDLE_MEMORY = 16 << 20


def _with_usage(session: Session, lists: _Lists, gpu: Gpu, **known: Any) -> Gpu:
    # Read before the lists, or the memory of a process that starts in between would belong to no visible process.
    memory = session.memory(lists.handle)
    known.update(memory, memory_shared=False, lost=False)
    gpu = gpu._replace(**known, **lists.read(ProcessKind.COMPUTE, ProcessKind.MPS))
    if gpu.memory_used is None or gpu.memory_used - (gpu.listed_memory or 0) > _IDLE_MEMORY:
        gpu = gpu._replace(**lists.read(ProcessKind.GRAPHICS))
    if gpu.unexplained_memory > _IDLE_MEMORY:
        gpu = gpu._replace(memory_shared=is_wsl() or lists.memory_is_node())
    return gpu


def _instances(session: Session, parent_lists: _Lists, parent: Gpu) -> list[Gpu]:
    found = []
    slots = session.ask_or(0, "nvmlDeviceGetMaxMigDeviceCount", parent_lists.handle)
    for slot in range(min(slots, _MOST_INSTANCES)):
        handle = _instance_handle(session, parent_lists.handle, slot)
        uuid = "" if handle is None else session.ask_or("", "nvmlDeviceGetUUID", handle)
        if not uuid:
            continue  # an empty slot, or an instance that this user may not see
        instance = Gpu(
            parent.index,
            uuid,
            product_name(session.ask_or("", "nvmlDeviceGetName", handle)) or parent.name,
            parent.pci_bus_id,
            parent.numa_node,
            compute_mode=parent.compute_mode,
            mig_parent=parent.uuid,
            mig_instance=slot,
            gpu_instance=session.ask_or(None, "nvmlDeviceGetGpuInstanceId", handle),
        )
        found.append(_with_usage(session, _Lists(session, handle, parent_lists), instance))
    return [one._replace(memory_beside=_listed_on(one.siblings(found))) for one in found]


def _listed_on(gpus: Sequence[Gpu]) -> int | None:
    """Return the bytes that the listed processes of these devices use; None if that of one is unknown."""
    known = [size for gpu in gpus if (size := gpu.listed_memory) is not None]
    return sum(known) if len(known) == len(gpus) else None


def _instance_handle(session: Session, parent_handle: Any, slot: int | None) -> Any:
    return session.ask_or(None, "nvmlDeviceGetMigDeviceHandleByIndex", parent_handle, slot)


class _Lists:
    """The process lists of a device, or the fault that hides them. They are read when first asked for.

    Args:
        parent: the lists of its GPU, for a MIG instance: some drivers give its rows only there, with its ids.
    """

    def __init__(self, session: Session, handle: Any, parent: _Lists | None = None) -> None:
        self.handle = handle
        self._session = session
        self._parent = parent
        self._rows: list[tuple[str, ProcessRow]] = []
        self._read: set[str] = set()
        self._fault: NvmlError | None = None

    def read(self, *kinds: str) -> dict[str, Any]:
        """Read these lists too, and tell what all of them say, as fields of a Gpu."""
        for kind in kinds:
            self._read_one(kind)
        rows, fault = self._rows, self._fault
        if self._parent is not None:
            rows = [*self._here(rows, unplaced=True)]
            if self._parent._fault is None and (fault is None or fault.absent):
                rows += self._here(self._parent._rows, unplaced=fault is not None)
                fault = None
        if fault is not None:
            return {
                "processes": None,
                "process_error": f"the driver does not list its processes: {fault}",
                "processes_supported": not fault.absent,
            }
        processes = own_namespace_pids(GpuProcess(row.pid, kind, row.memory, self._name(row.pid)) for kind, row in rows)
        return {"processes": processes, "process_error": "", "processes_supported": True}

    def memory_is_node(self) -> bool:
        """Return whether the device's memory is a NUMA node of the kernel (GH200, GB200), whose page cache counts as
        used."""
        own = self._session.ask_or(None, "nvmlDeviceGetNumaNodeId", self.handle) is not None
        return own or (self._parent is not None and self._parent.memory_is_node())

    def _read_one(self, kind: str) -> None:
        """Read one list, unless it is there already, or one has failed before."""
        if self._parent is not None:
            self._parent._read_one(kind)
        if self._fault is not None or kind in self._read:
            return
        self._read.add(kind)
        try:
            self._rows += [(kind, row) for row in self._session.processes(kind, self.handle)]
        except NvmlError as fault:
            if fault.gpu_lost:
                raise
            if not fault.absent or kind == ProcessKind.COMPUTE:
                self._fault = fault

    def _here(self, rows: list[tuple[str, ProcessRow]], *, unplaced: bool) -> Iterator[tuple[str, ProcessRow]]:
        """Yield those of these rows that are this instance's.

        Args:
            unplaced: whether a row without ids is. Those of the GPU may run on any instance, so they count where the
                instance itself is mute.
        """
        if not rows:
            return
        gpu_instance = self._session.ask_or(None, "nvmlDeviceGetGpuInstanceId", self.handle)
        compute_instance = self._session.ask_or(None, "nvmlDeviceGetComputeInstanceId", self.handle)
        for kind, row in rows:
            if None in (row.gpu_instance, gpu_instance):
                here = unplaced
            else:
                same_compute = None in (row.compute_instance, compute_instance)
                here = row.gpu_instance == gpu_instance and (same_compute or row.compute_instance == compute_instance)
            if here:
                yield kind, row

    def _name(self, pid: int) -> str | None:
        """Return the command of a process; NVML is asked where /proc does not show it."""
        name: str | None = procfs.command_of(pid) or self._session.ask_or(None, "nvmlSystemGetProcessName", pid)
        return name


_SCOPES = {"node": 0, "socket": 1}  # NVML_AFFINITY_SCOPE_*

_MASK_WORDS = 64  # of 64 bits: room for 4096 CPUs

_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK

_P2P_OK = 0

_GONE = "the driver no longer shows it: its UUID has changed, or the GPU or MIG instance was removed"


class KnownGpus:
    """What this process has learnt of the host's GPUs; it outlives sessions and drivers. Plain data, no handles.

    Attributes:
        facts: identity by UUID, as a record without anything that changes.
        uuids: UUID by NVML's number at the latest count; a GPU that never reported its UUID has ``unknown-NUMBER``.
        without_mig: UUIDs of GPUs that cannot have MIG instances.
        without_cpus: UUIDs of GPUs of which the driver cannot say which CPUs are next to them, each with the scope.
        displays: UUID -> whether a display is active on it, of a host with several GPUs. Where nothing draws, that
            decides only which GPU is taken last.
        links: UUIDs of a set of GPUs, and who of them reaches whom by NVLink.
        version: of the kernel driver; "" is to be asked.
    """

    def __init__(self) -> None:
        self.version = ""
        self.facts: dict[str, Gpu] = {}
        self.uuids: dict[int, str] = {}
        self.without_mig: set[str] = set()
        self.without_cpus: set[tuple[str, str]] = set()
        self.displays: dict[str, bool] = {}
        self.links: tuple[tuple[str, ...], dict[str, frozenset[str]]] = ((), {})


class _Entry:
    """A GPU in NVML's numbering: with a handle, or with the fault that denies one and what is remembered."""

    def __init__(self, number: int, facts: Gpu, handle: Any = None, fault: NvmlError | None = None) -> None:
        self.number = number
        self.facts = facts
        self.handle = handle
        self.fault = fault
        self.display: bool | None = None  # of the only GPU: asked once per session, which is once per claim


class Inventory:
    """The GPUs over one NVML session.

    Its methods raise :class:`NvmlTrouble` only when the session is over or NVML cannot even count.
    """

    def __init__(self, session: Session, known: KnownGpus) -> None:
        self.session = session
        self._known = known
        self._entries: list[_Entry] = []
        self._parents: dict[str, str] = {}  # of the MIG instances that the latest poll showed

    def poll(self) -> tuple[Gpu, ...]:
        """Return all devices in nvidia-smi's order, a GPU before its MIG instances."""
        gpus: list[Gpu] = []
        found = ((entry.facts.pci_bus_id, entry.number, entry) for entry in self._identified())
        for index, entry in enumerate(pci.in_bus_order(found)):
            gpus += self._describe(entry, index)
        gpus = list({gpu.uuid: gpu for gpu in reversed(gpus)}.values())[::-1]  # no MIG instance twice
        self._parents = {gpu.uuid: gpu.mig_parent for gpu in gpus if gpu.mig_parent is not None}
        return tuple(gpus)

    def again(self, gpu: Gpu) -> Gpu:
        """Return a device as it is now; see :meth:`~safe_gpu.drivers.base.Driver.usage`."""
        session = self.session
        try:
            entry = self._still(gpu.mig_parent or gpu.uuid)
            if entry is None:
                return gpu.unreachable(_GONE)
            lists = _Lists(session, entry.handle)
            if not gpu.is_mig_instance:
                return self._used(lists, gpu)
            # With its siblings, whose processes use the same memory.
            instances = _instances(session, lists, gpu._replace(uuid=entry.facts.uuid))
            now = next((one for one in instances if (one.uuid, one.label) == (gpu.uuid, gpu.label)), None)
            if now is None:
                return gpu.unreachable(_GONE)
            return now._replace(utilization=gpu.utilization, temperature=gpu.temperature)
        except NvmlError as fault:
            return _failed(gpu, fault)

    def details(self, gpu: Gpu) -> Gpu:
        """Return the same record with utilisation and processes that only draw, as far as the device answers."""
        entry = None if gpu.lost else self._find(gpu.uuid)
        if entry is None or entry.fault is not None:
            return gpu
        session, handle, processes = self.session, entry.handle, gpu.processes
        try:
            if gpu.is_mig_instance:
                handle = _instance_handle(session, handle, gpu.mig_instance)
                if handle is None:
                    return gpu
            utilization = session.ask_or(None, "nvmlDeviceGetUtilizationRates", handle)
            temperature = session.ask_or(None, "nvmlDeviceGetTemperature", handle, 0)  # NVML_TEMPERATURE_GPU
            if processes is not None and all(process.kind != ProcessKind.GRAPHICS for process in processes):
                processes += _Lists(session, handle).read(ProcessKind.GRAPHICS)["processes"] or ()
        except NvmlError as fault:
            return _failed(gpu, fault)
        return gpu._replace(
            utilization=None if utilization is None else int(utilization.gpu),
            temperature=temperature,
            processes=processes,
        )

    def cpus(self, uuid: str, scope: str) -> frozenset[int] | None:
        """Return the CPUs next to a GPU (for a MIG instance, next to its GPU), by scope "node" or "socket"; None is
        unknown."""
        entry = self._find(uuid)
        if entry is None:
            self.poll()
            entry = self._find(uuid)
        return None if entry is None or entry.fault is not None else self._cpus(entry.handle, entry.facts.uuid, scope)

    def _cpus(self, handle: Any, uuid: str, scope: str) -> frozenset[int] | None:
        if (uuid, scope) in self._known.without_cpus:
            return None
        questions: dict[str, tuple[int, ...]] = {"nvmlDeviceGetCpuAffinityWithinScope": (_SCOPES[scope],)}
        if scope == "node":
            questions["nvmlDeviceGetCpuAffinity"] = ()
        for name, args in questions.items():
            try:
                words = self.session.ask(name, handle, _MASK_WORDS, *args)
            except NvmlError as fault:
                if fault.absent:
                    continue
                return None
            # Empty: all of them lie outside this process's cpuset.
            return (
                frozenset(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1) or None
            )
        self._known.without_cpus.add((uuid, scope))
        return None

    def peers(self, gpus: Iterable[Gpu]) -> dict[str, frozenset[str]]:
        """Return who reaches whom by NVLink; asked once per process for a set of GPUs that all answer."""
        whole = [gpu.uuid for gpu in gpus if not gpu.is_mig_instance and not gpu.lost]
        entries = [entry for uuid in whole if (entry := self._find(uuid)) is not None and entry.fault is None]
        asked = tuple(entry.facts.uuid for entry in entries)
        if asked == self._known.links[0]:
            return self._known.links[1]
        peers: dict[str, set[str]] = {uuid: set() for uuid in asked}
        sure = True
        for one, other in combinations(entries, 2):
            try:
                status = self.session.ask("nvmlDeviceGetP2PStatus", one.handle, other.handle, _P2P_NVLINK)
            except NvmlError as fault:
                sure = sure and fault.absent
                continue
            if status == _P2P_OK:
                peers[one.facts.uuid].add(other.facts.uuid)
                peers[other.facts.uuid].add(one.facts.uuid)
        found = {uuid: frozenset(others) for uuid, others in peers.items()}
        if sure:
            self._known.links = asked, found
        return found

    def _find(self, uuid: str) -> _Entry | None:
        if not self._entries:
            self._identified()
        uuid = self._parents.get(uuid, uuid)
        return next((entry for entry in self._entries if entry.facts.uuid == uuid), None)

    def _identified(self) -> list[_Entry]:
        """Return every GPU that NVML counts. Handles are kept; a GPU that had none is asked again."""
        count = self.session.count()
        if count == len(self._entries):
            entries = [e if e.fault is None else self._by_number(e.number) for e in self._entries]
        else:
            if count != len(self._known.uuids):
                self._known.uuids = {}  # the numbers mean other GPUs now
            entries = self._by_uuids() or [self._by_number(number) for number in range(count)]
        self._entries = _without_doubles(entries)
        return self._entries

    def _by_uuids(self) -> list[_Entry]:
        """Return all GPUs by the UUIDs of an earlier session, one question each; empty where one is not found like
        this."""
        ask, known = self.session.ask, self._known
        try:
            return [
                _Entry(number, known.facts[uuid], ask("nvmlDeviceGetHandleByUUID", uuid))
                for number, uuid in sorted(known.uuids.items())
            ]
        except (KeyError, NvmlError):
            return []

    def _by_number(self, number: int) -> _Entry:
        known = self._known
        try:
            handle = self.session.ask("nvmlDeviceGetHandleByIndex", number)
            uuid = self.session.ask("nvmlDeviceGetUUID", handle)
            if not uuid.strip():
                raise NvmlError(UNKNOWN_ERROR)
            facts = known.facts.get(uuid) or self._read_facts(handle, uuid)
            known.uuids[number] = uuid
            return _Entry(number, facts, handle)
        except NvmlError as fault:
            uuid = known.uuids.setdefault(number, f"unknown-{number}")
            return _Entry(number, known.facts.get(uuid) or Gpu(number, uuid), fault=fault)

    def _read_facts(self, handle: Any, uuid: str) -> Gpu:
        bus_id = self.session.bus_id(handle)
        name = product_name(self.session.ask_or("", "nvmlDeviceGetName", handle))
        facts = Gpu(0, uuid, name, bus_id, pci.numa_node(bus_id, lambda: self._cpus(handle, uuid, "node")))
        if name and bus_id:
            self._known.facts[uuid] = facts
        return facts

    def _still(self, uuid: str) -> _Entry | None:
        """Return the GPU with this UUID, which its handle confirms; None where there is no such GPU any more.

        Raises:
            NvmlError: the GPU does not answer.
        """
        for again in (False, True):
            if again:
                self._known.uuids, self._entries = {}, []
            entry = self._find(uuid)
            if entry is not None and entry.fault is not None:
                self._identified()
                entry = self._find(uuid)
            if entry is None:
                continue
            if entry.fault is not None:
                raise entry.fault
            try:
                if self.session.ask("nvmlDeviceGetUUID", entry.handle) == uuid:
                    return entry
            except NvmlError as fault:
                if again or not fault.stale_handle:
                    raise
        return None

    def _describe(self, entry: _Entry, index: int) -> list[Gpu]:
        """Return a GPU with all that decides whether it is free, followed by its MIG instances."""
        session, gpu = self.session, entry.facts._replace(index=index)
        try:
            if entry.fault is not None:
                raise entry.fault
            display = self._display(entry)
            mode = _COMPUTE_MODES.get(session.ask_or(0, "nvmlDeviceGetComputeMode", entry.handle), ComputeMode.DEFAULT)
            lists = _Lists(session, entry.handle)
            gpu = self._used(lists, gpu, display_active=display, compute_mode=mode)
            if gpu.draws:  # what draws may be a desktop that has started since, or a renderer after one
                gpu = gpu._replace(display_active=self._display(entry, anew=True))
            return [gpu, *(_instances(session, lists, gpu) if gpu.mig_enabled else ())]
        except NvmlError as fault:
            return [_failed(gpu, fault)]

    def _used(self, lists: _Lists, gpu: Gpu, **known: Any) -> Gpu:
        """Return the GPU with its memory, processes and MIG mode of now."""
        mig = False
        if gpu.uuid not in self._known.without_mig:
            try:
                mig = self.session.ask("nvmlDeviceGetMigMode", lists.handle)[0] == 1
            except NvmlError as fault:
                if fault.gpu_lost:
                    raise
                if fault.absent:
                    self._known.without_mig.add(gpu.uuid)
        known.update(mig_enabled=mig, unusable=MIG_IS_ON if mig else None)
        return _with_usage(self.session, lists, gpu, **known)

    def _display(self, entry: _Entry, *, anew: bool = False) -> bool:
        """Return whether a display is active on a GPU. It decides most where the host has no other."""
        alone, known = len(self._entries) == 1, self._known.displays
        display = entry.display if alone else known.get(entry.facts.uuid)
        if display is None or anew:
            display = self.session.ask_or(0, "nvmlDeviceGetDisplayActive", entry.handle) == 1
            entry.display = known[entry.facts.uuid] = display
        return display


def _failed(gpu: Gpu, fault: NvmlError) -> Gpu:
    if fault.no_permission:
        return gpu.unreachable("this process may not open it: the job or container was given other GPUs", lost=False)
    return gpu.unreachable(f"the driver cannot reach it ({fault}): reset it, or reboot the host")


def _without_doubles(found: list[_Entry]) -> list[_Entry]:
    """Return the same, but a GPU whose UUID an earlier one has too cannot be used: a claim would be of both."""
    seen: set[str] = set()
    for place, entry in enumerate(found):
        if entry.facts.uuid in seen:
            nobody = Gpu(entry.number, f"unknown-{entry.number}", entry.facts.name, entry.facts.pci_bus_id)
            found[place] = _Entry(entry.number, nobody, fault=NvmlError(UNKNOWN_ERROR))
        seen.add(entry.facts.uuid)
    return found


_Answer = TypeVar("_Answer")

# Names, UUIDs, bus ids and links never change while a process lives, so a second claim need not ask for them.
_KNOWN = KnownGpus()


def why_missing() -> str | None:
    """Return what is missing for NVML on this host, its Python module or its library; None when both are there."""
    try:
        import pynvml
    except ImportError:
        return "the Python package nvidia-ml-py is not installed"

    try:
        load_file(LIBRARY)
    except OSError as err:
        return _why_too_old(pynvml) or f"NVML cannot be loaded ({err})"
    return _why_too_old(pynvml)


def _why_too_old(pynvml: Any) -> str | None:
    """Return why a module of that name is not nvidia-ml-py's, nor enough like it; else None."""
    if all(hasattr(pynvml, name) for name in ("NVMLError", "c_nvmlDevice_t", "nvmlPciInfo_t")):
        return None
    return (
        f"the module pynvml in {pynvml.__file__} is not that of nvidia-ml-py 12.535 or newer (pip uninstall pynvml "
        "nvidia-ml-py3, then pip install --force-reinstall nvidia-ml-py)"
    )


class NvmlDriver(Driver):
    """NVML as a driver. One session serves all polls; a new one is opened after a fork, or when it ends under us.

    Threads may share it. Facts outlive a session: a GPU that falls off the bus keeps its UUID and place.

    Raises:
        NoDriverError: NVML is missing, the kernel driver is not loaded, or the two do not match.
        MissingPackageError: the module pynvml is another than nvidia-ml-py's, or too old.
    """

    name = "nvml"
    runtime = CUDA

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._inventory: Inventory | None = None
        self._ask(lambda inventory: None)

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`, for the next three too."""
        return HostSnapshot(self._ask(Inventory.poll), self.name, _KNOWN.version)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about these devices only."""
        return self._ask(lambda inventory: tuple(map(inventory.again, gpus)))

    def linked(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with NVLink."""
        peers = self._ask(lambda inventory: inventory.peers(snapshot.gpus))
        linked = (gpu for gpu in snapshot.gpus if peers.get(gpu.uuid))
        return snapshot.updated(gpu._replace(nvlink_peers=peers[gpu.uuid]) for gpu in linked)

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with utilisation and graphics processes."""
        return snapshot.updated(self._ask(lambda inventory: tuple(map(inventory.details, snapshot.gpus))))

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """Return the CPUs next to a GPU; a MIG instance has those of its GPU."""
        return self._ask(lambda inventory: inventory.cpus(uuid, scope))

    def close(self) -> None:
        """End the session; a later question opens a new one."""
        if self._pid == os.getpid():
            with self._lock:
                self._end()

    def _ask(self, question: Callable[[Inventory], _Answer]) -> _Answer:
        """Put a question to the session, and if that turns out to be over, once more to a new one."""
        if self._pid != os.getpid():
            # A forked child. Its parent's session and handles are not for it, not even to be shut down; and the lock
            # may be held by a thread that was not copied.
            self._pid, self._lock = os.getpid(), threading.Lock()
            self._inventory = None
        with self._lock:
            try:
                try:
                    return question(self._opened())
                except SessionOver:
                    self._end()
                    _KNOWN.version = ""  # the driver may have been replaced
                    return question(self._opened())
            except NvmlTrouble as fault:
                self._end()
                _KNOWN.version = ""
                raise fault.as_no_driver() from fault

    def _opened(self) -> Inventory:
        if self._inventory is None:
            try:
                import pynvml
            except ImportError as err:
                raise NoDriverError(
                    "The Python package nvidia-ml-py is not installed: `pip install nvidia-ml-py`.", driver=self.name
                ) from err
            if too_old := _why_too_old(pynvml):
                raise MissingPackageError(too_old)
            self._inventory = Inventory(Session(pynvml), _KNOWN)
            _KNOWN.version = _KNOWN.version or self._inventory.session.ask_or("", "nvmlSystemGetDriverVersion")
        return self._inventory

    def _end(self) -> None:
        inventory, self._inventory = self._inventory, None
        if inventory is not None:
            inventory.session.close()
