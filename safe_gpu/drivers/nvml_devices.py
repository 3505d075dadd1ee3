"""One poll of NVML, GPU by GPU: whatever fails about one of them shows in its record and stops nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..devices import ComputeMode, Gpu, ProcessKind
from . import pci
from .nvml_processes import ProcessRow, merge
from .nvml_session import Fault, Session

__all__ = ["Inventory"]

_COMPUTE_MODES = {1: ComputeMode.EXCLUSIVE_PROCESS, 2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}
_MIG_IS_ON = "MIG mode is on: claim one of its instances"

_SCOPES = {"node": 0, "socket": 1}  # NVML_AFFINITY_SCOPE_*
_MASK_WORDS = 64  # of 64 bits: room for 4096 CPUs

_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_P2P_OK = 0


@dataclass(frozen=True)
class _Facts:
    """What never changes about a GPU."""

    uuid: str
    name: str = ""
    bus_id: str = ""
    numa_node: int | None = None


class _Found(NamedTuple):
    """A GPU as NVML numbers it: with a handle, or with the fault that denies one and what is remembered."""

    number: int
    facts: _Facts
    handle: Any = None
    fault: Fault | None = None


class Inventory:
    """What is known of the host's GPUs over the polls of a driver, and over its sessions: plain data, no handles.

    Its methods raise :class:`Fault` only when the session is over or NVML cannot even count.
    """

    def __init__(self) -> None:
        self._facts: dict[str, _Facts] = {}
        self._uuids: dict[int, str] = {}  # by NVML's number, to know a GPU again when it no longer answers
        self._numbers: dict[str, int] = {}  # of GPUs and, for MIG instances, of their GPU
        self._links: tuple[tuple[str, ...], dict[str, frozenset[str]]] = ((), {})

    def poll(self, session: Session) -> tuple[Gpu, ...]:
        """All devices in nvidia-smi's order, a GPU before its MIG instances."""
        count = session.count()
        if count != len(self._uuids):
            self._uuids.clear()  # the numbers mean other GPUs now
        found = [self._identify(session, number) for number in range(count)]
        peers = self._nvlink_peers(session, [entry for entry in found if entry.handle is not None])
        gpus: list[Gpu] = []
        numbers: dict[str, int] = {}
        for index, entry in enumerate(_in_bus_order(found)):
            facts = entry.facts
            gpu = Gpu(index, facts.uuid, facts.name, facts.bus_id, facts.numa_node)
            if entry.fault is None:
                gpu = replace(gpu, nvlink_peers=peers.get(facts.uuid, frozenset()))
                devices = _describe(session, entry.handle, gpu)
            else:
                devices = [_unreachable(gpu, entry.fault)]
            numbers.update((device.uuid, entry.number) for device in devices)
            gpus += devices
        self._numbers = numbers
        return tuple(gpus)

    def cpus(self, session: Session, uuid: str, scope: str) -> frozenset[int] | None:
        """CPUs next to a GPU (for a MIG instance, next to its GPU), by scope "node" or "socket"; None is unknown."""
        if uuid not in self._numbers:
            self.poll(session)
        number = self._numbers.get(uuid)
        if number is None:
            return None
        try:
            handle = session.handle(number)
            try:
                words = session.ask("nvmlDeviceGetCpuAffinityWithinScope", handle, _MASK_WORDS, _SCOPES[scope])
            except Fault as fault:
                if not fault.absent or scope != "node":
                    raise
                words = session.ask("nvmlDeviceGetCpuAffinity", handle, _MASK_WORDS)
        except Fault as fault:
            if fault.session_over:
                raise
            return None
        # Empty: all of them lie outside this process's cpuset.
        return frozenset(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1) or None

    def _identify(self, session: Session, number: int) -> _Found:
        try:
            handle = session.handle(number)
            uuid = session.ask("nvmlDeviceGetUUID", handle)
            if uuid not in self._facts:
                self._facts[uuid] = _read_facts(session, handle, uuid)
            self._uuids[number] = uuid
            return _Found(number, self._facts[uuid], handle)
        except Fault as fault:
            if fault.session_over:
                raise
            uuid = self._uuids.setdefault(number, f"unknown-{number}")
            return _Found(number, self._facts.get(uuid) or _Facts(uuid), fault=fault)

    def _nvlink_peers(self, session: Session, found: list[_Found]) -> dict[str, frozenset[str]]:
        """Who reaches whom by NVLink; asked once for a set of GPUs, since n of them make n * (n - 1) / 2 questions."""
        uuids = tuple(entry.facts.uuid for entry in found)
        if uuids != self._links[0]:
            peers: dict[str, set[str]] = {uuid: set() for uuid in uuids}
            for position, one in enumerate(found):
                for other in found[position + 1 :]:
                    if _linked(session, one.handle, other.handle):
                        peers[one.facts.uuid].add(other.facts.uuid)
                        peers[other.facts.uuid].add(one.facts.uuid)
            self._links = (uuids, {uuid: frozenset(others) for uuid, others in peers.items()})
        return self._links[1]


def _linked(session: Session, one: Any, other: Any) -> bool:
    try:
        return bool(session.ask("nvmlDeviceGetP2PStatus", one, other, _P2P_NVLINK) == _P2P_OK)
    except Fault as fault:
        if fault.session_over:
            raise
        return False


def _read_facts(session: Session, handle: Any, uuid: str) -> _Facts:
    try:
        bus_id = session.bus_id(handle)
    except Fault as fault:
        if fault.gpu_lost or fault.session_over:
            raise
        bus_id = ""
    return _Facts(uuid, session.ask_or("", "nvmlDeviceGetName", handle), bus_id, pci.numa_node(bus_id))


def _describe(session: Session, handle: Any, gpu: Gpu) -> list[Gpu]:
    """The GPU with all that changes, followed by its MIG instances."""
    try:
        total, used, free = session.memory(handle)
        utilization = session.ask_or(None, "nvmlDeviceGetUtilizationRates", handle)
        mode = session.ask_or(0, "nvmlDeviceGetComputeMode", handle)
        display = session.ask_or(0, "nvmlDeviceGetDisplayActive", handle)
        mig = session.ask_or((0, 0), "nvmlDeviceGetMigMode", handle)[0] == 1
        lists = _Lists(session, handle)
        gpu = replace(
            gpu,
            memory_total=total,
            memory_used=used,
            memory_free=free,
            utilization=None if utilization is None else int(utilization.gpu),
            compute_mode=_COMPUTE_MODES.get(mode, ComputeMode.DEFAULT),
            display_active=display == 1,
            unusable=_MIG_IS_ON if mig else None,
            mig_enabled=mig,
            **lists.fields(),
        )
        return [gpu, *(_instances(session, handle, gpu, lists) if mig else ())]
    except Fault as fault:
        if fault.session_over:
            raise
        return [_unreachable(gpu, fault)]


def _instances(session: Session, parent_handle: Any, parent: Gpu, parent_lists: _Lists) -> Iterator[Gpu]:
    for slot in range(session.ask_or(0, "nvmlDeviceGetMaxMigDeviceCount", parent_handle)):
        try:
            handle = session.ask("nvmlDeviceGetMigDeviceHandleByIndex", parent_handle, slot)
            uuid = session.ask("nvmlDeviceGetUUID", handle)
        except Fault as fault:
            if fault.gpu_lost or fault.session_over:
                raise
            continue  # an empty slot, or an instance that this user may not see
        total, used, free = session.memory(handle)
        lists = _Lists(session, handle)
        lists.add_from(parent_lists, handle)
        yield Gpu(
            parent.index,
            uuid,
            session.ask_or("", "nvmlDeviceGetName", handle) or parent.name,
            parent.pci_bus_id,
            parent.numa_node,
            memory_total=total,
            memory_used=used,
            memory_free=free,
            compute_mode=parent.compute_mode,
            mig_parent=parent.uuid,
            mig_instance=slot,
            **lists.fields(),
        )


class _Lists:
    """The process lists of a device, or the fault that keeps them from us."""

    def __init__(self, session: Session, handle: Any) -> None:
        self._session = session
        self._rows: list[tuple[str, ProcessRow]] = []
        self._fault: Fault | None = None
        try:
            self._read(ProcessKind.COMPUTE, handle)
            for kind in (ProcessKind.MPS, ProcessKind.GRAPHICS):
                try:
                    self._read(kind, handle)
                except Fault as fault:
                    if not fault.absent:
                        raise
        except Fault as fault:
            if fault.gpu_lost or fault.session_over:
                raise
            self._fault = fault

    def _read(self, kind: str, handle: Any) -> None:
        self._rows += [(kind, row) for row in self._session.processes(kind, handle)]

    def add_from(self, parent: _Lists, handle: Any) -> None:
        """Add an instance's rows from the lists of its GPU: some drivers give them only there, with its ids."""
        if parent._fault is not None or (self._fault is not None and not self._fault.absent):
            return
        if parent._rows:
            gpu_instance = self._session.ask_or(None, "nvmlDeviceGetGpuInstanceId", handle)
            compute_instance = self._session.ask_or(None, "nvmlDeviceGetComputeInstanceId", handle)
            for kind, row in parent._rows:
                if row.gpu_instance is None or gpu_instance is None:
                    # It may run on any instance of the GPU, so it counts where the instance itself is mute.
                    here = self._fault is not None
                else:
                    same_compute = None in (row.compute_instance, compute_instance)
                    here = row.gpu_instance == gpu_instance and (
                        same_compute or row.compute_instance == compute_instance
                    )
                if here:
                    self._rows.append((kind, row))
        self._fault = None

    def fields(self) -> dict[str, Any]:
        """What they say, as fields of a Gpu."""
        if self._fault is not None:
            return {
                "processes": None,
                "process_error": f"the driver does not list its processes: {self._fault}",
                "processes_supported": not self._fault.absent,
            }
        names = {
            row.pid: self._session.ask_or(None, "nvmlSystemGetProcessName", row.pid)
            for kind, row in self._rows
            if kind != ProcessKind.GRAPHICS
        }
        return {"processes": merge(self._rows, names)}


def _unreachable(gpu: Gpu, fault: Fault) -> Gpu:
    """A GPU of which only the identity is known."""
    if fault.no_permission:
        trouble = "this process may not open it: the job or container was given other GPUs"
    else:
        trouble = f"the driver cannot reach it ({fault}): reset it, or reboot the host"
    return Gpu(
        gpu.index,
        gpu.uuid,
        gpu.name,
        gpu.pci_bus_id,
        gpu.numa_node,
        processes=None,
        process_error=trouble,
        unusable=trouble,
        lost=not fault.no_permission,
    )


def _in_bus_order(found: list[_Found]) -> list[_Found]:
    """By PCI bus id, as nvidia-smi numbers them; where it is unknown, the place that NVML's number gives."""
    keyed = [(pci.bus_order(entry.facts.bus_id), entry) for entry in found]
    ordered = [entry for _, entry in sorted(((key, e) for key, e in keyed if key), key=lambda pair: pair[0])]
    for key, entry in keyed:
        if key is None:
            ordered.insert(entry.number, entry)
    return ordered
