"""The GPUs of this host as NVML numbers them: who they are, by which handle they are asked, how they are linked.

What never changes about a GPU is asked once per process, and handles once per session. A poll therefore asks only for
what may have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..devices import Gpu
from . import pci
from .nvml_devices import describe, details, instance_again, unreachable, used
from .nvml_session import UNKNOWN_ERROR, NvmlError, Session

_SCOPES = {"node": 0, "socket": 1}  # NVML_AFFINITY_SCOPE_*
_MASK_WORDS = 64  # of 64 bits: room for 4096 CPUs

_P2P_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_P2P_OK = 0

_GONE = "the driver no longer shows it: its UUID has changed, or the GPU or MIG instance was removed"


class KnownGpus:
    """What this process has learnt of the host's GPUs; it outlives sessions and drivers. Plain data, no handles.

    Attributes:
        facts: identity by UUID, as a record without anything that changes.
        uuids: UUID by NVML's number at the latest count; a GPU that never told its UUID has ``unknown-NUMBER``.
        without_mig: UUIDs of GPUs that cannot have MIG instances.
        without_cpus: UUIDs of GPUs of which the driver cannot say which CPUs are next to them, each with the scope.
        displays: UUID -> whether a display is active on it, of a host with several GPUs. There it decides only which
            GPU is taken last.
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

    Its methods raise :class:`Fault` only when the session is over or NVML cannot even count.
    """

    def __init__(self, session: Session, known: KnownGpus) -> None:
        self._session = session
        self._known = known
        self._entries: list[_Entry] = []
        self._parents: dict[str, str] = {}  # of the MIG instances that the latest poll showed

    def poll(self) -> tuple[Gpu, ...]:
        """All devices in nvidia-smi's order, a GPU before its MIG instances."""
        gpus: list[Gpu] = []
        for index, entry in enumerate(_in_bus_order(self._identified())):
            gpus += self._describe(entry, index)
        gpus = list({gpu.uuid: gpu for gpu in reversed(gpus)}.values())[::-1]  # no MIG instance twice
        self._parents = {gpu.uuid: gpu.mig_parent for gpu in gpus if gpu.mig_parent is not None}
        return tuple(gpus)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """These devices as they are now; see :meth:`~safe_gpu.drivers.base.Driver.usage`."""
        return tuple(self._again(gpu) for gpu in gpus)

    def linked(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """The same records with ``nvlink_peers``."""
        peers = self._peers([gpu.uuid for gpu in gpus if not gpu.is_mig_instance and not gpu.lost])
        return tuple(replace(gpu, nvlink_peers=peers[gpu.uuid]) if peers.get(gpu.uuid) else gpu for gpu in gpus)

    def detailed(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """The same records with utilisation and processes that only draw, as far as the GPUs answer."""
        return tuple(self._details(gpu) for gpu in gpus)

    def cpus(self, uuid: str, scope: str) -> frozenset[int] | None:
        """CPUs next to a GPU (for a MIG instance, next to its GPU), by scope "node" or "socket"; None is unknown."""
        entry = self._find(uuid)
        if entry is None:
            self.poll()
            entry = self._find(uuid)
        if entry is None or entry.fault is not None or (entry.facts.uuid, scope) in self._known.without_cpus:
            return None
        try:
            try:
                words = self._session.ask(
                    "nvmlDeviceGetCpuAffinityWithinScope", entry.handle, _MASK_WORDS, _SCOPES[scope]
                )
            except NvmlError as fault:
                if not fault.absent or scope != "node":
                    raise
                words = self._session.ask("nvmlDeviceGetCpuAffinity", entry.handle, _MASK_WORDS)
        except NvmlError as fault:
            if fault.session_over:
                raise
            if fault.absent:
                self._known.without_cpus.add((entry.facts.uuid, scope))
            return None
        # Empty: all of them lie outside this process's cpuset.
        return frozenset(64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1) or None

    # Who is who

    def _find(self, uuid: str) -> _Entry | None:
        if not self._entries:
            self._identified()
        uuid = self._parents.get(uuid, uuid)
        return next((entry for entry in self._entries if entry.facts.uuid == uuid), None)

    def _identified(self) -> list[_Entry]:
        """Every GPU that NVML counts. Handles are kept; a GPU that had none is asked again."""
        count = self._session.count()
        if count == len(self._entries):
            entries = [self._by_number(e.number) if e.handle is None else e for e in self._entries]
            self._entries = _without_doubles(entries)
            return self._entries
        if count != len(self._known.uuids):
            self._known.uuids = {}  # the numbers mean other GPUs now
        self._entries = _without_doubles(self._by_uuids() or [self._by_number(number) for number in range(count)])
        return self._entries

    def _by_uuids(self) -> list[_Entry]:
        """All GPUs by the UUIDs of an earlier session, one question each; empty where one is not found like this."""
        known = sorted(self._known.uuids.items())
        try:
            return [_Entry(number, self._known.facts[uuid], self._session.handle_of(uuid)) for number, uuid in known]
        except KeyError:
            return []
        except NvmlError as fault:
            if fault.session_over:
                raise
            return []

    def _by_number(self, number: int) -> _Entry:
        known = self._known
        try:
            handle = self._session.handle(number)
            uuid = self._session.ask("nvmlDeviceGetUUID", handle)
            if not uuid.strip():
                raise NvmlError(UNKNOWN_ERROR)
            facts = known.facts.get(uuid) or self._read_facts(handle, uuid)
            known.uuids[number] = uuid
            return _Entry(number, facts, handle)
        except NvmlError as fault:
            if fault.session_over:
                raise
            uuid = known.uuids.setdefault(number, f"unknown-{number}")
            return _Entry(number, known.facts.get(uuid) or Gpu(number, uuid), fault=fault)

    def _read_facts(self, handle: Any, uuid: str) -> Gpu:
        try:
            bus_id = self._session.bus_id(handle)
        except NvmlError as fault:
            if fault.gpu_lost or fault.session_over:
                raise
            bus_id = ""
        name = self._session.ask_or("", "nvmlDeviceGetName", handle)
        facts = Gpu(0, uuid, name, bus_id, pci.numa_node(bus_id))
        if name and bus_id:
            self._known.facts[uuid] = facts
        return facts

    def _still(self, uuid: str) -> _Entry | None:
        """The GPU with this UUID, which its handle confirms; None where there is no such GPU any more.

        Raises:
            Fault: the GPU does not answer.
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
                if self._session.ask("nvmlDeviceGetUUID", entry.handle) == uuid:
                    return entry
            except NvmlError as fault:
                if again or not fault.stale_handle:
                    raise
        return None

    # What they show

    def _describe(self, entry: _Entry, index: int) -> list[Gpu]:
        fault = entry.fault
        if fault is None:
            session, handle = self._session, entry.handle
            try:
                without_mig, display = self._known.without_mig, self._display(entry)
                return describe(session, handle, entry.facts, without_mig, index=index, display_active=display)
            except NvmlError as caught:
                if caught.session_over:
                    raise
                fault = caught
        return [unreachable(replace(entry.facts, index=index), fault)]

    def _display(self, entry: _Entry) -> bool:
        """Whether a display is active on a GPU. It decides most where the host has no other."""
        alone, known = len(self._entries) == 1, self._known.displays
        display = entry.display if alone else known.get(entry.facts.uuid)
        if display is None:
            display = self._session.ask_or(0, "nvmlDeviceGetDisplayActive", entry.handle) == 1
            entry.display = known[entry.facts.uuid] = display
        return display

    def _again(self, gpu: Gpu) -> Gpu:
        try:
            entry = self._still(gpu.mig_parent or gpu.uuid)
            if entry is not None and gpu.is_mig_instance:
                return instance_again(self._session, entry.handle, gpu) or unreachable(gpu, _GONE)
            return (
                unreachable(gpu, _GONE)
                if entry is None
                else used(self._session, entry.handle, gpu, self._known.without_mig)
            )
        except NvmlError as fault:
            if fault.session_over:
                raise
            return unreachable(gpu, fault)

    def _details(self, gpu: Gpu) -> Gpu:
        entry = None if gpu.lost else self._find(gpu.uuid)
        if entry is None or entry.handle is None:
            return gpu
        try:
            return details(self._session, entry.handle, gpu)
        except NvmlError as fault:
            if fault.session_over:
                raise
            return unreachable(gpu, fault)

    # NVLink

    def _peers(self, uuids: Iterable[str]) -> dict[str, frozenset[str]]:
        """Who reaches whom; asked once per process for a set of GPUs that all answer."""
        entries = [entry for uuid in uuids if (entry := self._find(uuid)) is not None and entry.handle is not None]
        asked = tuple(entry.facts.uuid for entry in entries)
        if asked == self._known.links[0]:
            return self._known.links[1]
        peers: dict[str, set[str]] = {uuid: set() for uuid in asked}
        sure = True
        for position, one in enumerate(entries):
            for other in entries[position + 1 :]:
                try:
                    status = self._session.ask("nvmlDeviceGetP2PStatus", one.handle, other.handle, _P2P_NVLINK)
                except NvmlError as fault:
                    if fault.session_over:
                        raise
                    sure = sure and fault.absent
                    continue
                if status == _P2P_OK:
                    peers[one.facts.uuid].add(other.facts.uuid)
                    peers[other.facts.uuid].add(one.facts.uuid)
        found = {uuid: frozenset(others) for uuid, others in peers.items()}
        if sure:
            self._known.links = asked, found
        return found


def _without_doubles(found: list[_Entry]) -> list[_Entry]:
    """The same, but a GPU whose UUID an earlier one has too cannot be used: a lease would be of both."""
    seen: set[str] = set()
    for place, entry in enumerate(found):
        if entry.facts.uuid in seen:
            nobody = Gpu(entry.number, f"unknown-{entry.number}", entry.facts.name, entry.facts.pci_bus_id)
            found[place] = _Entry(entry.number, nobody, fault=NvmlError(UNKNOWN_ERROR))
        seen.add(entry.facts.uuid)
    return found


def _in_bus_order(found: list[_Entry]) -> list[_Entry]:
    """By PCI bus id, as nvidia-smi numbers them; where it is unknown, the place that NVML's number gives."""
    keyed = [(pci.bus_order(entry.facts.pci_bus_id), entry) for entry in found]
    ordered = [entry for _, entry in sorted(((key, e) for key, e in keyed if key), key=lambda pair: pair[0])]
    for key, entry in keyed:
        if key is None:
            ordered.insert(entry.number, entry)
    return ordered
