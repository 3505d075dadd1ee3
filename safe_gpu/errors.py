"""Every error that safe_gpu raises, under one root.

Each message is one sentence (or one sentence and a list) that a person can act on; the attributes carry the same
facts for programs. All of them survive pickling with their attributes, since claims cross process boundaries
(multiprocessing, Ray, Dragon).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    "NoDriverError",
    "NotEnoughGpusError",
    "NvidiasmiError",
    "PlaceholderError",
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
    """The root of all errors of this package."""

    # Where an attribute lives outside __dict__ (OSError.errno), its name stands here, so that pickling keeps it.
    _extra: tuple[str, ...] = ()

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = dict(self.__dict__)
        attributes.update((name, getattr(self, name)) for name in self._extra)
        return _rebuild, (type(self), self.message, attributes)


class NoDriverError(SafeGpuError):
    """No usable NVIDIA driver, or a driver and no GPU.

    Attributes:
        driver: the driver that was asked for or tried, as in ``SAFE_GPU_DRIVER`` ("auto", "nvml", ...).
    """

    def __init__(self, message: str = "", *, driver: str = "auto") -> None:
        super().__init__(message)
        self.driver = driver


NvidiasmiError = NoDriverError
"""The name under which the older package raised it."""


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
    """A process that does not use safe_gpu came onto a claimed GPU at the same moment.

    Attributes:
        uuid: the GPU; processes: the strangers, as :class:`~safe_gpu.devices.GpuProcess`.
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
    """The request makes no sense, or this host can never satisfy it; it is never waited for.

    Attributes:
        value: the offending value, where there is one; verdicts: as in :class:`NotEnoughGpusError`.
    """

    def __init__(self, message: str = "", *, value: object = None, verdicts: Sequence[GpuVerdict] = ()) -> None:
        super().__init__(message)
        self.value = value
        self.verdicts = tuple(verdicts)


class AlreadyClaimedError(SafeGpuError, RuntimeError):
    """This process holds a claim already. Attribute ``devices``: the indices that it holds."""

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
    """The host lock (or the older package's lock) was not to be had in time.

    Attributes:
        path: the lock file; pid, user: its holder where /proc/locks shows one, else None.
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
    """The state directory, or a file in it, cannot be used. Attributes: path, errno (None: a rule of ours)."""


class CudaInitializedError(SafeGpuError, RuntimeError):
    """CUDA was initialised before the claim, so its choice of GPUs can no longer be changed.

    Attribute ``visible``: UUIDs that CUDA sees, in its order, where it tells.
    """

    def __init__(self, message: str = "", *, visible: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.visible = tuple(visible)


class PlaceholderError(SafeGpuError, RuntimeError):
    """The placeholder could not be put on a GPU. Attributes ``device_no`` (CUDA ordinal) and ``uuid``."""

    def __init__(self, message: str = "", *, device_no: int | None = None, uuid: str = "") -> None:
        super().__init__(message)
        self.device_no = device_no
        self.uuid = uuid


class WrongDeviceError(SafeGpuError, RuntimeError):
    """CUDA opened another GPU than the claimed one. Attributes ``device_no``, ``expected``, ``actual`` (UUIDs)."""

    def __init__(self, message: str = "", *, device_no: int = 0, expected: str = "", actual: str = "") -> None:
        super().__init__(message)
        self.device_no = device_no
        self.expected = expected
        self.actual = actual


class GPUAffinityError(SafeGpuError, RuntimeError):
    """CPU or memory affinity could not be planned or applied."""


class HolderLostError(SafeGpuError, RuntimeError):
    """The process that holds a host's GPUs for a claim across hosts could not be started there, or is gone.

    Attribute ``host``: where, as the engine names it.
    """

    def __init__(self, message: str = "", *, host: str = "") -> None:
        super().__init__(message)
        self.host = host
