"""All errors that safe_gpu raises, with a common base class.

A message is one sentence, or a sentence and a list, and says what the user can do. The attributes give the same facts
to programs. Errors keep their attributes when pickled, because multiprocessing, Ray and Dragon send them between
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from .procfs import printable_lines

if TYPE_CHECKING:
    from .devices import GpuProcess, GpuVerdict

__all__ = [
    "AlreadyClaimedError",
    "ClaimTimeout",
    "CudaInitializedError",
    "GPUAffinityError",
    "GpuContendedError",
    "HolderLostError",
    "LockTimeout",
    "MissingPackageError",
    "NoDriverError",
    "NotEnoughGpusError",
    "NvidiasmiError",
    "PlaceholderError",
    "PolicyError",
    "SafeGpuError",
    "StateDirError",
    "UnsatisfiableRequestError",
    "WrongDeviceError",
]


def _rebuild(cls: type[SafeGpuError], message: str, attributes: dict[str, Any]) -> SafeGpuError:
    error = cls(message)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


class SafeGpuError(Exception):
    """The base class of all errors of this package. Their text is lines that a terminal can show, whatever is in it."""

    # Names of attributes that are not in __dict__ (OSError.errno) and that pickling must keep.
    _extra: tuple[str, ...] = ()

    def __init__(self, message: str = "") -> None:
        message = printable_lines(message)
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = dict(self.__dict__)
        attributes.update((name, getattr(self, name)) for name in self._extra)
        return _rebuild, (type(self), self.message, attributes)


class NoDriverError(SafeGpuError):
    """There is no usable GPU driver, or the driver shows no GPU.

    Attributes:
        driver: the driver that was selected or tried, as in ``SAFE_GPU_DRIVER`` ("auto", "nvml", ...).
    """

    def __init__(self, message: str = "", *, driver: str = "auto") -> None:
        super().__init__(message)
        self.driver = driver


NvidiasmiError = NoDriverError
"""The name that the older package used."""


class NotEnoughGpusError(SafeGpuError, RuntimeError):
    """Too few GPUs are free now.

    Attributes:
        nb_gpus: how many were asked for.
        verdicts: one :class:`~safe_gpu.devices.GpuVerdict` for every GPU of the host, in index order.
    """

    def __init__(self, message: str = "", *, nb_gpus: int = 0, verdicts: Sequence[GpuVerdict] = ()) -> None:
        super().__init__(message)
        self.nb_gpus = nb_gpus
        self.verdicts = tuple(verdicts)


class ClaimTimeout(NotEnoughGpusError, TimeoutError):
    """The GPUs did not become free before the deadline.

    Attributes:
        timeout: seconds that the claim was allowed to wait.
    """

    def __init__(
        self, message: str = "", *, nb_gpus: int = 0, verdicts: Sequence[GpuVerdict] = (), timeout: float = 0.0
    ) -> None:
        super().__init__(message, nb_gpus=nb_gpus, verdicts=verdicts)
        self.timeout = timeout


class GpuContendedError(NotEnoughGpusError):
    """A process that does not use safe_gpu started on a GPU while this process claimed it.

    Attributes:
        uuid: the GPU; processes: those other processes, as :class:`~safe_gpu.devices.GpuProcess`.
    """

    def __init__(
        self,
        message: str = "",
        *,
        nb_gpus: int = 0,
        verdicts: Sequence[GpuVerdict] = (),
        uuid: str = "",
        processes: Sequence[GpuProcess] = (),
    ) -> None:
        super().__init__(message, nb_gpus=nb_gpus, verdicts=verdicts)
        self.uuid = uuid
        self.processes = tuple(processes)


class UnsatisfiableRequestError(SafeGpuError, ValueError, RuntimeError):
    """The request is invalid, or this host can never satisfy it. A claim does not wait before it raises this.

    Attributes:
        value: the offending value, if there is one; verdicts: as in :class:`NotEnoughGpusError`.
    """

    def __init__(self, message: str = "", *, value: object = None, verdicts: Sequence[GpuVerdict] = ()) -> None:
        super().__init__(message)
        self.value = value
        self.verdicts = tuple(verdicts)


class AlreadyClaimedError(SafeGpuError, RuntimeError):
    """This process already holds a claim. Attribute ``devices``: the indices of its GPUs."""

    def __init__(self, message: str = "", *, devices: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.devices = tuple(devices)


class _OsError(SafeGpuError, OSError):
    _extra = ("errno",)

    def __init__(self, message: str = "", *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno


class LockTimeout(_OsError, TimeoutError):
    """The host lock, or the lock of the older package, could not be taken in time.

    Attributes:
        path: the lock file; pid, user: the holder of the lock if /proc/locks shows it, else None.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str = "",
        errno: int | None = None,
        pid: int | None = None,
        user: str | None = None,
    ) -> None:
        super().__init__(message, path=path, errno=errno)
        self.pid = pid
        self.user = user


class StateDirError(_OsError):
    """The state directory, or a file in it, cannot be used.

    Attributes:
        path: the directory or file; errno: of the failed call, None if safe_gpu itself refused the path.
    """


class CudaInitializedError(SafeGpuError, RuntimeError):
    """CUDA was initialised before the claim, so its choice of GPUs can no longer be changed.

    Attribute ``visible``: UUIDs of the GPUs that CUDA sees, in its order; empty if unknown.
    """

    def __init__(self, message: str = "", *, visible: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.visible = tuple(visible)


class PlaceholderError(SafeGpuError, RuntimeError):
    """The placeholder could not be allocated on a GPU. Attributes ``device_no`` (CUDA ordinal) and ``uuid``."""

    def __init__(self, message: str = "", *, device_no: int | None = None, uuid: str = "") -> None:
        super().__init__(message)
        self.device_no = device_no
        self.uuid = uuid


class PolicyError(SafeGpuError, RuntimeError):
    """The policy file of this host cannot be read, or a line of it is wrong.

    Attributes:
        path: the file; line: the number of the line, None if it is not about a line.
    """

    def __init__(self, message: str = "", *, path: str = "", line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class WrongDeviceError(SafeGpuError, RuntimeError):
    """CUDA opened another GPU than the claimed one. Attributes ``device_no``, ``expected``, ``actual`` (UUIDs)."""

    def __init__(self, message: str = "", *, device_no: int = 0, expected: str = "", actual: str = "") -> None:
        super().__init__(message)
        self.device_no = device_no
        self.expected = expected
        self.actual = actual


class GPUAffinityError(SafeGpuError, RuntimeError):
    """CPU or memory affinity could not be planned or applied."""


class MissingPackageError(SafeGpuError, ImportError):
    """A Python package that safe_gpu needs is not installed, or too old."""

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class HolderLostError(SafeGpuError, RuntimeError):
    """The process that holds a host's GPUs for a claim across hosts could not be started there, or has exited.

    Attribute ``host``: the host, as the engine names it.
    """

    def __init__(self, message: str = "", *, host: str = "") -> None:
        super().__init__(message)
        self.host = host


_T = TypeVar("_T")


def as_affinity_error(driver: Any, question: Callable[[], _T]) -> _T:
    """The driver's answer; an error of the driver is raised as GPUAffinityError."""
    try:
        return question()
    except GPUAffinityError:
        raise
    except SafeGpuError as err:
        raise GPUAffinityError(f"the GPU driver ({driver.name}) cannot say where its GPUs are: {err}") from err
