"""NVML between nvmlInit and nvmlShutdown: calls, return codes, and the layouts of process lists.

The rows of these lists changed more often than the names of the calls: 16 bytes without a suffix, 24 for ``_v2``
(R450) and ``_v3`` (R510), 32 for ``_v3`` of R535 up to 535.86 and 24 again from 535.104 on. Reading them with the
wrong stride yields plausible nonsense, so the stride is measured: the buffer is filled with a pattern first, and what
the driver overwrote tells the size of its rows. The buffer is large enough for the widest.

Every question either has an answer or raises :class:`Fault`, which says in words what happened and which of three
kinds it is: this question has no answer here, this GPU is gone, or NVML as a whole is. Calls that newer drivers
renamed fall back to their older names. Source: NVML API reference, nvmlReturn_t.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

from .. import procfs
from ..devices import GpuProcess, ProcessKind, normalize_bus_id
from ..errors import NoDriverError
from ..runtimes import libraries
from . import kernel as pci

# NVML's lists of processes, over all the layouts that drivers have given them.


_CALLS = {
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses",
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses",
}
_SUFFIXES = (("_v3", 24), ("_v2", 24), ("", 16))

_WIDEST = 32
_STRIDES = (16, 24, _WIDEST)
_PATTERN = b"\xa5"
_FILLING = _PATTERN * _WIDEST
_ROOM = 32  # rows at first: one call is enough on nearly every GPU
_MOST = 1 << 16  # rows: a driver that says there are more is not believed
_TRIES = 8  # each doubles the room

_SUCCESS = 0
_INSUFFICIENT_SIZE = 7
_NO_INSTANCE = 0xFFFFFFFF
_NO_MEMORY = 0xFFFFFFFFFFFFFFFF


class ProcessRow(NamedTuple):
    """One row: ``memory`` in bytes or None; the ids name a MIG instance, None where there is none or it is hidden."""

    pid: int
    memory: int | None
    gpu_instance: int | None
    compute_instance: int | None


def symbols(kind: str) -> tuple[tuple[str, int], ...]:
    """The functions that list processes of a kind, newest first, each with the row size that its header promises."""
    return tuple((_CALLS[kind] + suffix, stride) for suffix, stride in _SUFFIXES)


def read_rows(function: Any, handle: Any, stride: int) -> tuple[int, list[ProcessRow]]:
    """Call one of these functions: NVML's return code, and the rows when that is 0.

    Processes may start between two calls, so the room grows until it suffices.
    """
    import ctypes

    room = _ROOM
    code = _INSUFFICIENT_SIZE
    for _ in range(_TRIES):
        buffer = ctypes.create_string_buffer(_FILLING * room, room * _WIDEST)
        count = ctypes.c_uint(room)
        code = function(handle, ctypes.byref(count), buffer)
        if code == _SUCCESS:
            return code, _parse(buffer.raw, min(count.value, room), stride) if count.value else []
        if code != _INSUFFICIENT_SIZE:
            break
        room = min(max(2 * room, count.value + _ROOM), _MOST)
    return code, []


def _parse(raw: bytes, count: int, promised: int) -> list[ProcessRow]:
    from struct import unpack_from

    written = len(raw.rstrip(_PATTERN))
    stride = next((size for size in _STRIDES if size * count == written), promised)
    rows = []
    for offset in range(0, count * stride, stride):
        (pid,) = unpack_from("=I", raw, offset)
        (memory,) = unpack_from("=Q", raw, offset + 8)
        instances = unpack_from("=II", raw, offset + 16) if stride > _STRIDES[0] else (_NO_INSTANCE, _NO_INSTANCE)
        rows.append(
            ProcessRow(
                pid,
                None if memory == _NO_MEMORY else memory,
                *(None if instance == _NO_INSTANCE else instance for instance in instances),
            )
        )
    return rows


def merge(rows: Iterable[tuple[str, ProcessRow]], names: dict[int, str | None]) -> tuple[GpuProcess, ...]:
    """Processes from (kind, row) pairs: each pid once per kind, its memory the largest figure that was given."""
    merged: dict[tuple[str, int], int | None] = {}
    for kind, row in rows:
        known = merged.get((kind, row.pid))
        merged[kind, row.pid] = row.memory if known is None else max(known, row.memory or 0)
    return tuple(GpuProcess(pid, kind, memory, names.get(pid)) for (kind, pid), memory in merged.items())


# NVML between nvmlInit and nvmlShutdown: the boundary behind which its return codes stay.


LIBRARY = "libnvidia-ml.so.1"

_MOST_GPUS = 256
_LONGEST = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE and NVML_DEVICE_NAME_V2_BUFFER_SIZE

_UNINITIALIZED = 1
_INVALID_ARGUMENT = 2
_NOT_SUPPORTED = 3
_NO_PERMISSION = 4
_DRIVER_NOT_LOADED = 9
_LIBRARY_NOT_FOUND = 12
_FUNCTION_NOT_FOUND = 13
_GPU_IS_LOST = 15
_RESET_REQUIRED = 16
_LIB_RM_VERSION_MISMATCH = 18
_ARGUMENT_VERSION_MISMATCH = 25
_DEPRECATED = 26
_GPU_NOT_FOUND = 28
UNKNOWN_ERROR = 999

_ABSENT = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED})
_LOST = frozenset({_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND})
_SESSION_OVER = frozenset({_UNINITIALIZED, _DRIVER_NOT_LOADED, _LIB_RM_VERSION_MISMATCH})

_WORDS = {
    _INVALID_ARGUMENT: "invalid argument",
    _NOT_SUPPORTED: "not supported",
    _NO_PERMISSION: "no permission",
    6: "not found",
    7: "the answer never fitted",
    8: "its power cables are not properly attached",
    10: "the driver timed out",
    11: "interrupt trouble",
    _FUNCTION_NOT_FOUND: "unknown to this driver",
    14: "its infoROM is corrupted",
    _GPU_IS_LOST: "it fell off the bus",
    _RESET_REQUIRED: "it needs a reset",
    17: "the operating system refused",
    19: "in use",
    _ARGUMENT_VERSION_MISMATCH: "unknown to this driver",
    _DEPRECATED: "no longer supported by this driver",
    _GPU_NOT_FOUND: "no such GPU",
    UNKNOWN_ERROR: "unknown error",
}

_NO_DRIVER = {
    _UNINITIALIZED: "The NVML session keeps ending: something else in this process calls nvmlShutdown once too often.",
    _NO_PERMISSION: "This user may not open the NVIDIA devices: check the permissions of /dev/nvidiactl.",
    _DRIVER_NOT_LOADED: "The NVIDIA kernel driver is not loaded: run `modprobe nvidia`, or start the container with "
    "GPUs, until nvidia-smi works.",
    _LIBRARY_NOT_FOUND: "NVML is missing: install the NVIDIA driver (libnvidia-ml.so.1) and the Python package "
    "nvidia-ml-py.",
    _LIB_RM_VERSION_MISMATCH: "The NVIDIA driver was upgraded while its old kernel module is still loaded (driver and "
    "library versions differ): reboot, or unload and load the nvidia modules.",
    _GPU_NOT_FOUND: "The NVIDIA driver is loaded but finds no GPU: check `nvidia-smi -L` and lspci.",
    UNKNOWN_ERROR: "NVML fails with an unknown error: in a container that lost its access to /dev/nvidia0 restart it, "
    "elsewhere look for NVRM in dmesg.",
}


class NvmlError(Exception):
    """One NVML call that failed; ``str`` is a few words for people. It never leaves the NVML driver."""

    def __init__(self, code: int) -> None:
        super().__init__(_WORDS.get(code) or f"NVML error {code}")
        self._code = code

    @property
    def absent(self) -> bool:
        """This question has no answer here, now or ever."""
        return self._code in _ABSENT

    @property
    def no_permission(self) -> bool:
        """This process may not ask."""
        return self._code == _NO_PERMISSION

    @property
    def gpu_lost(self) -> bool:
        """The GPU as a whole is gone."""
        return self._code in _LOST

    @property
    def stale_handle(self) -> bool:
        """A handle that was good earlier is none: somebody else has started NVML anew meanwhile."""
        return self._code == _INVALID_ARGUMENT

    @property
    def session_over(self) -> bool:
        """NVML as a whole is gone, at least for this session."""
        return self._code in _SESSION_OVER

    def as_no_driver(self) -> NoDriverError:
        """The error for the user when it stops NVML as a whole."""
        return NoDriverError(_NO_DRIVER.get(self._code) or f"NVML cannot be used: {self}.", driver="nvml")


class Memory(NamedTuple):
    """Bytes of a device, None where the driver does not say; ``counts_reserved`` as in :class:`~..devices.Gpu`."""

    total: int | None = None
    used: int | None = None
    free: int | None = None
    counts_reserved: bool = True


class Session:
    """NVML, initialised in this process.

    Args:
        pynvml: the module of nvidia-ml-py, or an older one of that name: what it lacks counts as absent.

    Raises:
        Fault: from every method, and nothing else.
    """

    def __init__(self, pynvml: Any) -> None:
        import ctypes

        self.pid = os.getpid()
        self._ctypes = ctypes
        self._pynvml = pynvml
        try:
            # pynvml binds the newest calls only. The older ones go through a handle of our own on the same library,
            # which is loaded first: pynvml then gets this one, wherever the loader would have looked.
            self._library = libraries.load(LIBRARY)
        except OSError as err:
            raise NvmlError(_LIBRARY_NOT_FOUND) from err
        self._lists = {
            kind: [(function, stride) for name, stride in symbols(kind) if (function := self._symbol(name))]
            for kind in (ProcessKind.COMPUTE, ProcessKind.GRAPHICS, ProcessKind.MPS)
        }
        self._newest("nvmlInit", ("nvmlInit_v2", "nvmlInit"))

    def ask(self, name: str, *args: Any) -> Any:
        """Call a function of pynvml by name. Text comes out printable, and no longer than NVML's own buffers."""
        function = getattr(self._pynvml, name, None)
        if function is None:
            raise NvmlError(_FUNCTION_NOT_FOUND)
        try:
            answer = function(*args)
            if isinstance(answer, bytes):
                answer = answer.decode()
            return procfs.printable(answer[:_LONGEST]) if isinstance(answer, str) else answer
        except self._pynvml.NVMLError as err:
            raise NvmlError(int(err.value)) from err
        except UnicodeDecodeError as err:
            raise NvmlError(UNKNOWN_ERROR) from err

    def ask_or(self, default: Any, name: str, *args: Any) -> Any:
        """The same for a question that may go unanswered, unless the GPU or the session is gone altogether."""
        try:
            return self.ask(name, *args)
        except NvmlError as fault:
            if fault.gpu_lost or fault.session_over:
                raise
            return default

    def count(self) -> int:
        """How many GPUs NVML numbers, lost ones included."""
        number = self._ctypes.c_uint(0)
        answer = self._newest("nvmlDeviceGetCount", ("nvmlDeviceGetCount",), result=number)
        return min(max(0, int(number.value if answer is number else answer)), _MOST_GPUS)

    def handle(self, number: int) -> Any:
        """The GPU with this number."""
        handle = self._pynvml.c_nvmlDevice_t()
        return self._newest("nvmlDeviceGetHandleByIndex", ("nvmlDeviceGetHandleByIndex",), number, result=handle)

    def handle_of(self, uuid: str) -> Any:
        """The GPU with this UUID; one question, where number and UUID are two."""
        return self.ask("nvmlDeviceGetHandleByUUID", uuid)

    def bus_id(self, handle: Any) -> str:
        """PCI bus id in sysfs's form; "" if what NVML says is none."""
        # Newer layouts only append to older ones, so the newest has room for all.
        info = self._pynvml.nvmlPciInfo_t()
        older = ("nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo")
        info = self._newest("nvmlDeviceGetPciInfo", older, handle, result=info)
        for text in (info.busId, getattr(info, "busIdLegacy", "")):
            if text:
                break
        else:
            text = f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"
        bus_id = normalize_bus_id(text.decode("ascii", "replace") if isinstance(text, bytes) else text)
        return bus_id if pci.bus_order(bus_id) else ""

    def memory(self, handle: Any) -> Memory:
        """The memory of a device.

        Version 2, where there is one, leaves what the driver reserves for itself out of "used", as nvidia-smi does.
        """
        info = None
        version = getattr(self._pynvml, "nvmlMemory_v2", None)
        if version is not None:
            info = self.ask_or(None, "nvmlDeviceGetMemoryInfo", handle, version)
        counts_reserved = info is None
        if info is None:
            info = self.ask_or(None, "nvmlDeviceGetMemoryInfo", handle)
        if info is None:
            return Memory()
        total, used, free = (None if value == 2**64 - 1 else int(value) for value in (info.total, info.used, info.free))
        return Memory(total, used, free, counts_reserved)

    def memory_is_node(self, handle: Any) -> bool:
        """Whether the device's memory is a NUMA node of the kernel (GH200, GB200), whose page cache counts as used."""
        try:
            node = self._ctypes.c_uint(0)
            self._newest("nvmlDeviceGetNumaNodeId", ("nvmlDeviceGetNumaNodeId",), handle, result=node)
        except NvmlError as fault:
            if fault.gpu_lost or fault.session_over:
                raise
            return False
        return True

    def processes(self, kind: str, handle: Any) -> list[ProcessRow]:
        """The processes of one kind on a GPU or MIG instance, by the newest list that this driver answers."""
        code = _FUNCTION_NOT_FOUND
        for function, stride in self._lists[kind]:
            code, rows = read_rows(function, handle, stride)
            if code == 0:
                return rows
            if code not in _ABSENT:
                break
        raise NvmlError(code)

    def close(self) -> None:
        """End it, if it is this process's own; one that is over already is fine."""
        if self.pid == os.getpid():
            try:
                self.ask("nvmlShutdown")
            except NvmlError:
                pass

    def _symbol(self, name: str) -> Any:
        return getattr(self._library, name, None)

    def _newest(self, name: str, older: tuple[str, ...], *args: Any, result: Any = None) -> Any:
        """pynvml's answer, else ``result`` as filled in by the first of the older functions that exists."""
        try:
            return self.ask(name, *args)
        except NvmlError as fault:
            function = next((found for symbol in older if (found := self._symbol(symbol))), None)
            if fault._code != _FUNCTION_NOT_FOUND or function is None:
                raise
        code = function(*args) if result is None else function(*args, self._ctypes.byref(result))
        if code:
            raise NvmlError(int(code))
        return result
