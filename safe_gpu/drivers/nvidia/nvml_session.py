"""The session of NVML that the processes of a program share.

Every question either has an answer or raises :class:`NvmlError`, which says in words what happened and of which kind
it is: this question has no answer here, or this GPU is gone. :class:`SessionOver` says that NVML as a whole is
gone. Source: NVML API reference, nvmlReturn_t.
"""

import os
from contextlib import suppress
from typing import Any, NamedTuple

from ...errors import NoDriverError
from ...gpus.devices import ProcessKind, normalize_bus_id
from ...host import procfs
from ...runtimes.library import load_file

LIBRARY = "libnvidia-ml.so.1"

_LISTS = {
    ProcessKind.COMPUTE: "nvmlDeviceGetComputeRunningProcesses",
    ProcessKind.GRAPHICS: "nvmlDeviceGetGraphicsRunningProcesses",
    ProcessKind.MPS: "nvmlDeviceGetMPSComputeRunningProcesses",
}

_ROW = "=I4xQII"

_WIDE_ROW = f"{_ROW}8x"  # _v3 of R535 up to 535.86

_WIDEST = 32

_PATTERN = b"\xa5"

_ROOMS = (32, 256, 4096, 1 << 16)  # rows; the first suffices on nearly every GPU

_MOST_GPUS = 256

_LONGEST = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE and NVML_DEVICE_NAME_V2_BUFFER_SIZE

_SUCCESS = 0

_UNINITIALIZED = 1

_INVALID_ARGUMENT = 2

_NOT_SUPPORTED = 3

_NO_PERMISSION = 4

_INSUFFICIENT_SIZE = 7

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

_HIDDEN = 2**64 - 1  # bytes

_ABSENT = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION_MISMATCH, _DEPRECATED})

_LOST = frozenset({_GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND})

_SESSION_OVER = frozenset({_UNINITIALIZED, _DRIVER_NOT_LOADED, _LIB_RM_VERSION_MISMATCH})

_WORDS = {
    _INVALID_ARGUMENT: "invalid argument",
    _NOT_SUPPORTED: "not supported",
    _NO_PERMISSION: "no permission",
    6: "not found",
    _INSUFFICIENT_SIZE: "the answer never fitted",
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
    _FUNCTION_NOT_FOUND: "The NVIDIA driver is older than R450: upgrade it, or set SAFE_GPU_DRIVER=nvidia-smi.",
    _LIB_RM_VERSION_MISMATCH: "The NVIDIA driver was upgraded while its old kernel module is still loaded (driver and "
    "library versions differ): reboot, or unload and load the nvidia modules.",
    _GPU_NOT_FOUND: "The NVIDIA driver is loaded but finds no GPU: check `nvidia-smi -L` and lspci.",
    UNKNOWN_ERROR: "NVML fails with an unknown error: in a container that lost its access to /dev/nvidia0 restart it, "
    "elsewhere look for NVRM in dmesg.",
}


class NvmlTrouble(Exception):
    """One NVML call that failed; ``str`` is a few words for people. It never leaves the NVML driver."""

    def __init__(self, code: int) -> None:
        super().__init__(_WORDS.get(code) or f"NVML error {code}")
        self._code = code

    def as_no_driver(self) -> NoDriverError:
        """Return the error for the user when it stops NVML as a whole."""
        return NoDriverError(_NO_DRIVER.get(self._code) or f"NVML cannot be used: {self}.", driver="nvml")


class SessionOver(NvmlTrouble):
    """NVML as a whole is gone, at least for this session."""


class NvmlError(NvmlTrouble):
    """A question that was not answered.

    Attributes:
        absent: it has no answer here, now or ever.
        no_permission: this process may not ask it.
        gpu_lost: the GPU as a whole is gone.
        stale_handle: a handle that was good earlier is none: somebody else has started NVML anew meanwhile.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.absent = code in _ABSENT
        self.no_permission = code == _NO_PERMISSION
        self.gpu_lost = code in _LOST
        self.stale_handle = code == _INVALID_ARGUMENT


def _trouble(code: int) -> NvmlTrouble:
    return (SessionOver if code in _SESSION_OVER else NvmlError)(code)


class ProcessRow(NamedTuple):
    """A row of a process list: ``memory`` in bytes, the ids of a MIG instance; None where there is none, or hidden."""

    pid: int
    memory: int | None
    gpu_instance: int | None
    compute_instance: int | None


def read_rows(function: Any, handle: Any) -> tuple[int, list[ProcessRow]]:
    """Call a function that lists processes, once if there is room: NVML's return code, and the rows if that is 0.

    Reading rows with the wrong width yields plausible nonsense, so it is measured: the buffer is filled with a pattern,
    and what the driver overwrote tells the width.
    """
    import ctypes
    from struct import calcsize, iter_unpack

    code = _INSUFFICIENT_SIZE
    for room in _ROOMS:
        buffer = bytearray(_PATTERN * _WIDEST * room)
        count = ctypes.c_uint(room)
        code = function(handle, ctypes.byref(count), (ctypes.c_char * len(buffer)).from_buffer(buffer))
        if code == _SUCCESS and not count.value:  # as on every GPU that is free
            break
        if code == _SUCCESS:
            rows = min(count.value, room)
            row = _WIDE_ROW if len(buffer.rstrip(_PATTERN)) == rows * _WIDEST else _ROW
            found = iter_unpack(row, buffer[: rows * calcsize(row)])
            return code, [
                ProcessRow(
                    pid, None if memory == _HIDDEN else memory, *(None if one == 2**32 - 1 else one for one in ids)
                )
                for pid, memory, *ids in found
            ]
        if code != _INSUFFICIENT_SIZE:
            break
    return code, []


class Session:
    """NVML, initialised in this process.

    Args:
        pynvml: the module of nvidia-ml-py, or an older one of that name: what it lacks counts as absent.

    Raises:
        NvmlError, SessionOver: from every method, and nothing else.
    """

    def __init__(self, pynvml: Any) -> None:
        self.pid = os.getpid()
        self._pynvml = pynvml
        try:
            # pynvml then gets this one too, wherever the loader would have looked.
            self._library = load_file(LIBRARY)
        except OSError as err:
            raise NvmlError(_LIBRARY_NOT_FOUND) from err
        self.ask("nvmlInit")

    def ask(self, name: str, *args: Any) -> Any:
        """Call a function of pynvml by name. Text comes out printable, and no longer than NVML's own buffers."""
        function = getattr(self._pynvml, name, None)
        if function is None:
            raise NvmlError(_FUNCTION_NOT_FOUND)
        try:
            answer = function(*args)
            if not isinstance(answer, (bytes, str)):
                return answer
            text = answer.decode() if isinstance(answer, bytes) else answer
            return procfs.printable(text[:_LONGEST])
        except self._pynvml.NVMLError as err:
            raise _trouble(int(err.value)) from err
        except UnicodeDecodeError as err:
            raise NvmlError(UNKNOWN_ERROR) from err

    def ask_or(self, default: Any, name: str, *args: Any) -> Any:
        """Return the same for a question that may go unanswered, unless the GPU or the session is gone altogether."""
        try:
            return self.ask(name, *args)
        except NvmlError as fault:
            if fault.gpu_lost:
                raise
            return default

    def count(self) -> int:
        """Return how many GPUs NVML numbers, lost ones included."""
        return min(max(0, int(self.ask("nvmlDeviceGetCount"))), _MOST_GPUS)

    def bus_id(self, handle: Any) -> str:
        """Return a PCI bus id in sysfs's form; "" if NVML gives none."""
        info = self.ask_or(None, "nvmlDeviceGetPciInfo", handle)
        if info is None:
            return ""
        text = info.busId
        return normalize_bus_id(text.decode("ascii", "replace") if isinstance(text, bytes) else text)

    def memory(self, handle: Any) -> dict[str, Any]:
        """Return the memory of a device, as fields of :class:`~..devices.Gpu`.

        Version 2, where there is one, leaves what the driver reserves for itself out of "used", as nvidia-smi does.
        """
        info = None
        for version in (getattr(self._pynvml, "nvmlMemory_v2", None), None):
            info = self.ask_or(None, "nvmlDeviceGetMemoryInfo", handle, version)
            if info is not None:
                break
        figures: dict[str, Any] = {"counts_reserved": version is None}
        for name in ("total", "used", "free"):
            value = getattr(info, name, _HIDDEN)
            figures[f"memory_{name}"] = None if value == _HIDDEN else int(value)
        return figures

    def processes(self, kind: str, handle: Any) -> list[ProcessRow]:
        """Return the processes of one kind on a GPU or MIG instance, by the newest list that this driver answers."""
        code = _FUNCTION_NOT_FOUND
        for version in ("_v3", "_v2"):  # since R510, since R450
            function = getattr(self._library, _LISTS[kind] + version, None)
            if function is not None:
                code, rows = read_rows(function, handle)
                if code == _SUCCESS:
                    return rows
                if code not in _ABSENT:
                    break
        raise _trouble(code)

    def close(self) -> None:
        """End it, if it is this process's own; one that is over already is fine."""
        if self.pid == os.getpid():
            with suppress(NvmlTrouble):
                self.ask("nvmlShutdown")
