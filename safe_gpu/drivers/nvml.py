"""The NVIDIA driver through NVML: the life of its session. The one importer of pynvml."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..devices import Gpu, HostSnapshot
from ..errors import MissingPackageError, NoDriverError
from ..runtimes.runtime import CUDA
from .nvml_inventory import Inventory, KnownGpus
from .nvml_session import LIBRARY, NvmlError, Session

_Answer = TypeVar("_Answer")

# Names, UUIDs, bus ids and links never change while a process lives, so a second claim need not ask for them.
_KNOWN = KnownGpus()


def why_missing() -> str | None:
    """What lacks for NVML on this host, its Python module or its library; None when both are there."""
    try:
        import pynvml
    except ImportError:
        return "the Python package nvidia-ml-py is not installed"
    if not _is_complete(pynvml):
        return _too_old(pynvml)
    from ..runtimes import libraries

    try:
        libraries.load(LIBRARY)
    except OSError as err:
        return f"NVML cannot be loaded ({err})"
    return None


def _is_complete(pynvml: Any) -> bool:
    """Whether a module of that name is nvidia-ml-py's, or enough like it."""
    return all(hasattr(pynvml, name) for name in ("NVMLError", "c_nvmlDevice_t", "nvmlPciInfo_t"))


def _too_old(pynvml: Any) -> str:
    return (
        f"the module pynvml in {pynvml.__file__} is not that of nvidia-ml-py 12.535 or newer (pip uninstall pynvml "
        "nvidia-ml-py3, then pip install --force-reinstall nvidia-ml-py)"
    )


class NvmlDriver:
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
        self._session: Session | None = None
        self._inventory: Inventory | None = None
        self._ask(lambda inventory: None)

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`, for the next three too."""
        return HostSnapshot(self._ask(Inventory.poll), self.name, _KNOWN.version)

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about these devices only."""
        return self._ask(lambda inventory: inventory.usage(gpus))

    def linked(self, snapshot: HostSnapshot) -> HostSnapshot:
        """The same poll with NVLink."""
        return snapshot.updated(self._ask(lambda inventory: inventory.linked(snapshot.gpus)))

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """The same poll with utilisation and graphics processes."""
        return snapshot.updated(self._ask(lambda inventory: inventory.detailed(snapshot.gpus)))

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """CPUs next to a GPU; a MIG instance has those of its GPU."""
        return self._ask(lambda inventory: inventory.cpus(uuid, scope))

    def host_topology(self) -> None:
        """None: the CPUs are those of sysfs."""
        return

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
            self._session = self._inventory = None
        with self._lock:
            try:
                return question(self._opened())
            except NvmlError as fault:
                self._end()
                _KNOWN.version = ""  # the driver may have been replaced
                if not fault.session_over:
                    raise fault.as_no_driver() from fault
            try:
                return question(self._opened())
            except NvmlError as fault:
                self._end()
                raise fault.as_no_driver() from fault

    def _opened(self) -> Inventory:
        if self._session is None or self._inventory is None:
            try:
                import pynvml
            except ImportError as err:
                raise NoDriverError(
                    "The Python package nvidia-ml-py is not installed: `pip install nvidia-ml-py`.", driver=self.name
                ) from err
            if not _is_complete(pynvml):
                raise MissingPackageError(_too_old(pynvml))
            self._session = Session(pynvml)
            _KNOWN.version = _KNOWN.version or self._session.ask_or("", "nvmlSystemGetDriverVersion")
            self._inventory = Inventory(self._session, _KNOWN)
        return self._inventory

    def _end(self) -> None:
        session, self._session, self._inventory = self._session, None, None
        if session is not None:
            session.close()
