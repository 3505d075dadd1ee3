"""What a driver is: the few questions that safe_gpu asks of whatever knows the GPUs of this host."""

from collections.abc import Sequence

from ..gpus.devices import Gpu, HostSnapshot
from ..runtimes.library import Runtime
from ..topology.host import HostTopology


class Driver:
    """A source of truth about GPUs. Chosen in one place, ``drivers.open_driver``.

    A driver may be used by one process only (NVML handles do not survive fork); implementations notice a fork and open
    a new session. All methods raise :class:`~safe_gpu.errors.NoDriverError` when the driver as a whole is gone;
    the trouble of a single GPU does not raise but shows in that GPU's record. The methods with a body
    here answer for a driver that reads the kernel's files, cannot tell more, and keeps nothing open.
    """

    name: str
    """``nvml``, ``nvidia-smi``, ``kfd`` or ``simulated:PRESET``."""

    is_simulated: bool = False
    """Whether there are no such GPUs."""

    runtime: Runtime
    """The library through which programs use its GPUs."""

    def snapshot(self) -> HostSnapshot:
        """Poll every GPU of the host, whatever CUDA_VISIBLE_DEVICES says. May take seconds on a troubled host.

        It holds what decides whether a GPU is free. Utilisation and NVLink may be missing, and so may processes that
        only draw, but never where memory in use would be unexplained without them.
        """
        raise NotImplementedError

    def usage(self, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
        """Ask again about some devices of an earlier poll: the narrow question of a claim that holds them.

        Returns:
            Their records, in the same order: memory and processes as they are now, MIG mode too; the rest as given.
            A device that the driver has lost, or that no longer has this UUID, is ``lost``.
        """
        shown = {gpu.uuid: gpu for gpu in self.snapshot().gpus} if gpus else {}
        return tuple(shown.get(gpu.uuid) or gpu.unreachable("the kernel no longer lists it") for gpu in gpus)

    def linked(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with ``nvlink_peers``, for claims of several GPUs: n GPUs are n * (n - 1) / 2
        questions."""
        return snapshot

    def detailed(self, snapshot: HostSnapshot) -> HostSnapshot:
        """Return the same poll with what only people look at: utilisation, and processes that only draw."""
        return snapshot

    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None:
        """Return the logical CPUs next to a GPU, for ``scope`` "node" or "socket"; None when the driver cannot tell.

        NVML returns an empty set for a GPU whose CPUs are all outside this process's cpuset: that too is None.
        """
        return None

    def host_topology(self) -> HostTopology | None:
        """Return the CPUs of the host where the driver brings its own (a simulated host); None: read sysfs."""
        return None

    def close(self) -> None:
        """End the session; safe to call twice."""
        return
