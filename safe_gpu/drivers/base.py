"""What a driver is: the few questions that safe_gpu asks of whatever knows the GPUs of this host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..affinity.topology import HostTopology
    from ..devices import HostSnapshot

__all__ = ["Driver"]


class Driver(Protocol):
    """A source of truth about GPUs. Chosen in one place, ``drivers.open_driver``.

    A driver may be used by one process only (NVML handles do not survive fork); implementations notice a fork and open
    a new session. All methods raise :class:`~safe_gpu.errors.NoDriverError` when the driver as a whole is gone;
    the trouble of a single GPU never raises, it shows in that GPU's record.
    """

    @property
    def name(self) -> str:
        """``nvml``, ``nvidia-smi`` or ``simulated:PRESET``."""

    @property
    def uses_cuda(self) -> bool:
        """Whether its GPUs are those that the CUDA driver library sees in this process (False when simulated)."""

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host, whatever CUDA_VISIBLE_DEVICES says. May take seconds on a troubled host."""

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """Logical CPUs next to a GPU, for ``scope`` "node" or "socket"; None when the driver cannot tell.

        NVML returns an empty set for a GPU whose CPUs are all outside this process's cpuset: that too is None.
        """

    def host_topology(self) -> HostTopology | None:
        """The CPUs of the host where the driver brings its own (a simulated host); None: read sysfs."""

    def default_placeholder(self, logger: Any = None) -> Any:
        """The placeholder that holds its GPUs when the caller names none."""

    def close(self) -> None:
        """End the session; safe to call twice."""
