"""All errors that safe_gpu raises, with a common base class, and the logger of its warnings.

A message is one sentence, or a sentence and a list, and says what the user can do. The attributes give the same facts
to programs. Errors keep their attributes when pickled, because multiprocessing, Ray and Dragon send them between
processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from .host.foreign_files import printable_lines

if TYPE_CHECKING:
    from logging import Logger, LogRecord

    from .gpus.devices import GpuProcess, GpuVerdict


class SafeGpuError(Exception):
    """The base class of all errors of this package. Their text is lines that a terminal can show, whatever is in it."""

    def __init__(self, message: str = "") -> None:
        self.message: str = printable_lines(message)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message


class NoDriverError(SafeGpuError):
    """There is no usable driver of NVIDIA, AMD or Intel GPUs, or it shows no GPU.

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
        verdicts: one :class:`~safe_gpu.gpus.devices.GpuVerdict` for every GPU of the host, in index order.
    """

    def __init__(self, message: str = "", *, nb_gpus: int = 0, verdicts: Iterable[GpuVerdict] = ()) -> None:
        super().__init__(message)
        self.nb_gpus = nb_gpus
        self.verdicts: tuple[GpuVerdict, ...] = tuple(verdicts)


class ClaimTimeout(NotEnoughGpusError, TimeoutError):
    """The GPUs did not become free before the deadline.

    Attributes:
        timeout: seconds that the claim was allowed to wait.
    """

    def __init__(
        self, message: str = "", *, nb_gpus: int = 0, verdicts: Iterable[GpuVerdict] = (), timeout: float = 0.0
    ) -> None:
        super().__init__(message, nb_gpus=nb_gpus, verdicts=verdicts)
        self.timeout = timeout


class GpuContendedError(NotEnoughGpusError):
    """A process that does not use safe_gpu started on a GPU while this process claimed it.

    Attributes:
        uuid: the GPU.
        processes: those other processes, as :class:`~safe_gpu.gpus.devices.GpuProcess`.
    """

    def __init__(
        self,
        message: str = "",
        *,
        nb_gpus: int = 0,
        verdicts: Iterable[GpuVerdict] = (),
        uuid: str = "",
        processes: Iterable[GpuProcess] = (),
    ) -> None:
        super().__init__(message, nb_gpus=nb_gpus, verdicts=verdicts)
        self.uuid = uuid
        self.processes: tuple[GpuProcess, ...] = tuple(processes)


class UnsatisfiableRequestError(SafeGpuError, ValueError, RuntimeError):
    """The request is invalid, or this host can never satisfy it. A claim does not wait before it raises this.

    Attributes:
        value: the offending value, if there is one.
        verdicts: as in :class:`NotEnoughGpusError`.
    """

    def __init__(self, message: str = "", *, value: object = None, verdicts: Iterable[GpuVerdict] = ()) -> None:
        super().__init__(message)
        self.value = value
        self.verdicts: tuple[GpuVerdict, ...] = tuple(verdicts)


class AlreadyClaimedError(SafeGpuError, RuntimeError):
    """This process already holds a claim. Attribute ``devices``: the indices of its GPUs."""

    def __init__(self, message: str = "", *, devices: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.devices: tuple[int, ...] = tuple(devices)


class _OsError(SafeGpuError, OSError):
    errno: int | None = None  # an attribute like any other: pickling does not keep OSError's own

    def __init__(self, message: str = "", *, path: str = "", errno: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = errno


class LockTimeout(_OsError, TimeoutError):
    """The host lock, or the lock of the older package, could not be taken in time.

    Attributes:
        path: the lock file.
        pid: the process that keeps the lock, if /proc/locks shows one, else None.
        user: that process's user, else None.
        overloaded: whether no process keeps it: it changed hands, or its holder got no CPU time.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str = "",
        errno: int | None = None,
        pid: int | None = None,
        user: str | None = None,
        overloaded: bool = False,
    ) -> None:
        super().__init__(message, path=path, errno=errno)
        self.pid = pid
        self.user = user
        self.overloaded = overloaded


class StateDirError(_OsError):
    """The state directory, or a file in it, cannot be used. It is an OSError too.

    Attributes:
        path: the directory or file.
        errno: of the failed call, None if safe_gpu itself refused the path.
    """


class CudaInitializedError(SafeGpuError, RuntimeError):
    """CUDA was initialised before the claim, so its choice of GPUs can no longer be changed.

    Attribute ``visible``: UUIDs of the GPUs that CUDA sees, in its order; empty if unknown.
    """

    def __init__(self, message: str = "", *, visible: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.visible: tuple[str, ...] = tuple(visible)


class PlaceholderError(SafeGpuError, RuntimeError):
    """The placeholder could not be allocated on a GPU. Attributes ``device_no`` (CUDA ordinal) and ``uuid``."""

    def __init__(self, message: str = "", *, device_no: int | None = None, uuid: str = "") -> None:
        super().__init__(message)
        self.device_no = device_no
        self.uuid = uuid


class PolicyError(SafeGpuError, RuntimeError):
    """The policy file of this host cannot be read, or a line of it is wrong.

    Attributes:
        path: the file.
        line: the number of the line, None if it is not about a line.
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


class GPUAffinityError(SafeGpuError, ValueError, RuntimeError):
    """CPU or memory affinity could not be planned or applied. torch.numa raises one or the other of its bases."""


class MissingPackageError(SafeGpuError, ImportError):
    """A Python package that safe_gpu needs is not installed, or too old."""


class MissingDriverPackageError(NoDriverError, MissingPackageError):
    """The Python package by which the driver is asked, nvidia-ml-py, is not installed, or too old.

    Attributes:
        install: the command that installs it; "" if the error does not name one.
    """

    def __init__(self, message: str = "", *, driver: str = "auto", install: str = "") -> None:
        super().__init__(message, driver=driver)
        self.install = install


class HolderLostError(SafeGpuError, RuntimeError):
    """GPUs are no longer held: the process that holds those of a host for a claim across hosts could not be started
    there, or has exited, or this process has closed the descriptors of its claim.

    Attribute ``host``: the host, as the engine names it.
    """

    def __init__(self, message: str = "", *, host: str = "") -> None:
        super().__init__(message)
        self.host = host


def cause_to_show(err: SafeGpuError) -> BaseException | None:
    """Return what a traceback is to show above an error of this package: ``raise err from cause_to_show(err)``.

    The text of an error tells its cause. That of a placeholder may be an error of the caller's own code.
    """
    if isinstance(err, PlaceholderError):
        return err.__cause__
    return None


def package_logger() -> Logger:
    """Return the logger ``safe_gpu``, to which claims log where the caller passes no logger."""
    import logging

    logger = logging.getLogger("safe_gpu")
    logger.addFilter(_name_sender)  # which it keeps once
    return logger


def _name_sender(record: LogRecord) -> bool:
    """Begin the message with ``safe_gpu: `` where no handler is set: Python then prints the text of warnings alone."""
    if not package_logger().hasHandlers() and not str(record.msg).startswith("safe_gpu: "):
        record.msg = f"safe_gpu: {record.msg}"
    return True


_T = TypeVar("_T")


def as_affinity_error(driver: Any, question: Callable[[], _T]) -> _T:
    """Return the driver's answer; an error of the driver is raised as GPUAffinityError."""
    try:
        return question()
    except GPUAffinityError:
        raise
    except SafeGpuError as err:
        raise GPUAffinityError(f"the GPU driver ({driver.name}) cannot say where its GPUs are: {err}") from err
