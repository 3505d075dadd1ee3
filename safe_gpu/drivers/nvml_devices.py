"""What NVML shows of one GPU and its MIG instances, as far as it may change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from .. import procfs
from ..devices import ComputeMode, Gpu, ProcessKind
from .nvidia_host import is_wsl, own_namespace_pids
from .nvml_processes import ProcessRow, merge
from .nvml_session import NvmlError, Session

_COMPUTE_MODES = {1: ComputeMode.EXCLUSIVE_PROCESS, 2: ComputeMode.PROHIBITED, 3: ComputeMode.EXCLUSIVE_PROCESS}
_MOST_INSTANCES = 64  # of a GPU; there are 7 today
_MIG_IS_ON = "MIG mode is on: claim one of its instances"

# An idle card shows a few MiB in use. Above this the processes that only draw are listed too, before anybody calls
# memory unexplained.
_IDLE_MEMORY = 16 << 20


def describe(session: Session, handle: Any, gpu: Gpu, without_mig: set[str], **known: Any) -> list[Gpu]:
    """The GPU with all that decides whether it is free, followed by its MIG instances.

    Args:
        gpu: its record so far. without_mig: UUIDs of GPUs that cannot have MIG instances; one that says so is added.
        known: further fields of its record.

    Raises:
        Fault: the GPU is lost, or the session is over; so too in the other functions.
    """
    mode = session.ask_or(0, "nvmlDeviceGetComputeMode", handle)
    lists = _Lists(session, handle)
    known["compute_mode"] = _COMPUTE_MODES.get(mode, ComputeMode.DEFAULT)
    gpu = _used(session, handle, gpu, lists, without_mig, known)
    return [gpu, *(_instances(session, handle, gpu, lists) if gpu.mig_enabled else ())]


def used(session: Session, handle: Any, gpu: Gpu, without_mig: set[str]) -> Gpu:
    """The GPU with its memory, processes and MIG mode of now; the rest is as in ``gpu``."""
    return _used(session, handle, gpu, _Lists(session, handle), without_mig, {})


def instance_again(session: Session, parent_handle: Any, gpu: Gpu) -> Gpu | None:
    """The same for a MIG instance; None where the GPU no longer has it."""
    assert gpu.mig_instance is not None
    handle = _instance_handle(session, parent_handle, gpu.mig_instance)
    if handle is None or session.ask_or("", "nvmlDeviceGetUUID", handle) != gpu.uuid:
        return None
    lists = _Lists(session, handle, _Lists(session, parent_handle))
    return _with_usage(session, handle, gpu, lists, {"unusable": None, "lost": False})


def details(session: Session, parent_handle: Any, gpu: Gpu) -> Gpu:
    """The device with its utilisation and with processes that only draw, as far as it answers."""
    handle = parent_handle
    if gpu.mig_instance is not None:
        handle = _instance_handle(session, parent_handle, gpu.mig_instance)
        if handle is None:
            return gpu
    utilization = session.ask_or(None, "nvmlDeviceGetUtilizationRates", handle)
    processes = gpu.processes
    if processes is not None and all(process.kind != ProcessKind.GRAPHICS for process in processes):
        processes += _Lists(session, handle, kinds=(ProcessKind.GRAPHICS,)).fields()["processes"] or ()
    return replace(gpu, utilization=None if utilization is None else int(utilization.gpu), processes=processes)


def unreachable(gpu: Gpu, trouble: NvmlError | str) -> Gpu:
    """A device of which only the identity is known."""
    if isinstance(trouble, str):
        text, lost = trouble, True
    elif trouble.no_permission:
        text, lost = "this process may not open it: the job or container was given other GPUs", False
    else:
        text, lost = f"the driver cannot reach it ({trouble}): reset it, or reboot the host", True
    return Gpu(
        gpu.index,
        gpu.uuid,
        gpu.name,
        gpu.pci_bus_id,
        gpu.numa_node,
        processes=None,
        process_error=text,
        unusable=text,
        lost=lost,
        mig_parent=gpu.mig_parent,
        mig_instance=gpu.mig_instance,
    )


def _used(session: Session, handle: Any, gpu: Gpu, lists: _Lists, without_mig: set[str], known: dict[str, Any]) -> Gpu:
    mig = gpu.uuid not in without_mig and _mig_is_on(session, handle, gpu.uuid, without_mig)
    known.update(mig_enabled=mig, unusable=_MIG_IS_ON if mig else None, lost=False)
    return _with_usage(session, handle, gpu, lists, known)


def _mig_is_on(session: Session, handle: Any, uuid: str, without_mig: set[str]) -> bool:
    try:
        return bool(session.ask("nvmlDeviceGetMigMode", handle)[0] == 1)
    except NvmlError as fault:
        if fault.gpu_lost or fault.session_over:
            raise
        if fault.absent:
            without_mig.add(uuid)
        return False


def _with_usage(session: Session, handle: Any, gpu: Gpu, lists: _Lists, known: dict[str, Any]) -> Gpu:
    # Read before the lists, or the memory of a process that starts in between would belong to no visible process.
    memory = session.memory(handle)
    gpu = replace(
        gpu,
        memory_total=memory.total,
        memory_used=memory.used,
        memory_free=memory.free,
        counts_reserved=memory.counts_reserved,
        memory_shared=False,
        **known,
        **lists.fields(),
    )
    if gpu.unexplained_memory > _IDLE_MEMORY:
        lists.read(ProcessKind.GRAPHICS)
        gpu = replace(gpu, **lists.fields())
    if gpu.unexplained_memory > _IDLE_MEMORY:
        gpu = replace(gpu, memory_shared=is_wsl() or any(map(session.memory_is_node, lists.handles)))
    return gpu


def _instances(session: Session, parent_handle: Any, parent: Gpu, parent_lists: _Lists) -> Iterator[Gpu]:
    slots = session.ask_or(0, "nvmlDeviceGetMaxMigDeviceCount", parent_handle)
    for slot in range(min(slots, _MOST_INSTANCES)):
        handle = _instance_handle(session, parent_handle, slot)
        uuid = "" if handle is None else session.ask_or("", "nvmlDeviceGetUUID", handle)
        if not uuid:
            continue  # an empty slot, or an instance that this user may not see
        instance = Gpu(
            parent.index,
            uuid,
            session.ask_or("", "nvmlDeviceGetName", handle) or parent.name,
            parent.pci_bus_id,
            parent.numa_node,
            compute_mode=parent.compute_mode,
            mig_parent=parent.uuid,
            mig_instance=slot,
        )
        yield _with_usage(session, handle, instance, _Lists(session, handle, parent_lists), {})


def _instance_handle(session: Session, parent_handle: Any, slot: int) -> Any:
    return session.ask_or(None, "nvmlDeviceGetMigDeviceHandleByIndex", parent_handle, slot)


class _Lists:
    """The process lists of a device, or the fault that keeps them from us. They are read when first asked for.

    Args:
        parent: the lists of its GPU, for a MIG instance: some drivers give its rows only there, with its ids.
        kinds: which lists are read; :meth:`read` adds others.
    """

    def __init__(
        self,
        session: Session,
        handle: Any,
        parent: _Lists | None = None,
        kinds: tuple[str, ...] = (ProcessKind.COMPUTE, ProcessKind.MPS),
    ) -> None:
        self._session = session
        self._handle = handle
        self._parent = parent
        self._kinds = kinds
        self._rows: dict[str, list[ProcessRow]] = {}
        self._fault: NvmlError | None = None

    def read(self, kind: str) -> None:
        """Read one more list, unless it is there already, or one has failed before."""
        if self._parent is not None:
            self._parent.read(kind)
        if self._fault is not None or kind in self._rows:
            return
        try:
            self._rows[kind] = self._session.processes(kind, self._handle)
        except NvmlError as fault:
            if fault.gpu_lost or fault.session_over:
                raise
            if fault.absent and kind != ProcessKind.COMPUTE:
                self._rows[kind] = []
            else:
                self._fault = fault

    @property
    def handles(self) -> tuple[Any, ...]:
        """The device, and for a MIG instance its GPU."""
        return (self._handle,) if self._parent is None else (self._handle, self._parent._handle)

    def fields(self) -> dict[str, Any]:
        """What they say, as fields of a Gpu."""
        for kind in self._kinds:
            self.read(kind)
        rows = [(kind, row) for kind, listed in self._rows.items() for row in listed]
        fault = self._fault
        if self._parent is not None and self._parent._fault is None and (fault is None or fault.absent):
            rows += self._from_parent(self._parent, mute=fault is not None)
            fault = None
        if fault is not None:
            return {
                "processes": None,
                "process_error": f"the driver does not list its processes: {fault}",
                "processes_supported": not fault.absent,
            }
        names = {row.pid: self._name(row.pid) for kind, row in rows if kind != ProcessKind.GRAPHICS}
        return {"processes": own_namespace_pids(merge(rows, names)), "process_error": "", "processes_supported": True}

    def _from_parent(self, parent: _Lists, *, mute: bool) -> Iterator[tuple[str, ProcessRow]]:
        """The rows of the GPU that are this instance's."""
        rows = [(kind, row) for kind, listed in parent._rows.items() for row in listed]
        if not rows:
            return
        gpu_instance = self._session.ask_or(None, "nvmlDeviceGetGpuInstanceId", self._handle)
        compute_instance = self._session.ask_or(None, "nvmlDeviceGetComputeInstanceId", self._handle)
        for kind, row in rows:
            if row.gpu_instance is None or gpu_instance is None:
                # It may run on any instance of the GPU, so it counts where the instance itself is mute.
                here = mute
            else:
                same_compute = None in (row.compute_instance, compute_instance)
                here = row.gpu_instance == gpu_instance and (same_compute or row.compute_instance == compute_instance)
            if here:
                yield kind, row

    def _name(self, pid: int) -> str | None:
        """The command of a process; NVML is asked where /proc does not show it."""
        name: str | None = procfs.command_of(pid) or self._session.ask_or(None, "nvmlSystemGetProcessName", pid)
        return name
