"""The NVIDIA driver through NVML: the life of its session. The one importer of pynvml."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..devices import HostSnapshot
from ..errors import NoDriverError
from .nvml_devices import Inventory
from .nvml_session import LIBRARY, Fault, Session

__all__ = ["NvmlDriver", "why_missing"]

_Answer = TypeVar("_Answer")


def why_missing() -> str | None:
    """What lacks for NVML on this host, its Python module or its library; None when both are there."""
    try:
        import pynvml  # noqa: F401
    except ImportError:
        return "the Python package nvidia-ml-py is not installed"
    import ctypes

    try:
        ctypes.CDLL(LIBRARY)
    except OSError as err:
        return f"NVML cannot be loaded ({err})"
    return None


class NvmlDriver:
    """NVML as a driver. One session serves all polls; a new one is opened after a fork, or when it ends under us.

    Threads may share it. Nothing is forgotten with a session: a GPU that falls off the bus keeps its UUID and place.

    Raises:
        NoDriverError: NVML is missing, the kernel driver is not loaded, or the two do not match.
    """

    name = "nvml"
    uses_cuda = True

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._inventory = Inventory()
        self._version = ""
        self._ask(lambda session: None)

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host; see :class:`~safe_gpu.drivers.base.Driver`."""
        return HostSnapshot(self._ask(self._inventory.poll), self.name, self._version)

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """CPUs next to a GPU; a MIG instance has those of its GPU."""
        return self._ask(lambda session: self._inventory.cpus(session, uuid, scope))

    def host_topology(self) -> None:
        """None: the CPUs are those of sysfs."""
        return

    def default_placeholder(self, logger: Any = None) -> Any:
        """A minimal allocation through the CUDA driver."""
        from ..placeholders import CudaPlaceholder

        return CudaPlaceholder(logger)

    def close(self) -> None:
        """End the session; a later question opens a new one."""
        if self._pid == os.getpid():
            with self._lock:
                self._end()

    def _ask(self, question: Callable[[Session], _Answer]) -> _Answer:
        """Put a question to the session, and if that turns out to be over, once more to a new one."""
        if self._pid != os.getpid():
            # A forked child. Its parent's session and handles are not for it, not even to be shut down; and the lock
            # may be held by a thread that was not copied.
            self._pid, self._lock, self._session = os.getpid(), threading.Lock(), None
        with self._lock:
            try:
                return question(self._opened())
            except Fault as fault:
                self._end()
                if not fault.session_over:
                    raise fault.as_no_driver() from fault
            try:
                return question(self._opened())
            except Fault as fault:
                self._end()
                raise fault.as_no_driver() from fault

    def _opened(self) -> Session:
        if self._session is None:
            try:
                import pynvml
            except ImportError as err:
                raise NoDriverError(
                    "The Python package nvidia-ml-py is not installed: `pip install nvidia-ml-py`.", driver=self.name
                ) from err
            self._session = Session(pynvml)
            self._version = self._session.ask_or("", "nvmlSystemGetDriverVersion")
        return self._session

    def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
