"""What a GPU, a process on it, a host and a request are: frozen data, no behaviour beyond simple questions.

Memory is in bytes, utilisation in percent, and ``None`` always means "the driver does not say".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "ComputeMode",
    "Gpu",
    "GpuProcess",
    "GpuRequest",
    "GpuVerdict",
    "Holder",
    "HostSnapshot",
    "ProcessKind",
    "normalize_bus_id",
]


class _Record:
    """Equality, hash and text, which every dataclass would compile anew: a millisecond of each process that claims."""

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class ComputeMode:
    """Compute modes of a GPU, with nvidia-smi's meaning."""

    DEFAULT = "default"
    EXCLUSIVE_PROCESS = "exclusive_process"
    PROHIBITED = "prohibited"


class ProcessKind:
    """Which of the driver's process lists a process stands in."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


@dataclass(frozen=True, eq=False, repr=False)
class GpuProcess(_Record):
    """One process that the driver reports on a GPU.

    ``pid`` is as the driver numbers it: in a container that is a host pid, which may not resolve here. ``memory_used``
    is in bytes. ``name`` is filled only where the driver tells it.
    """

    pid: int
    kind: str = ProcessKind.COMPUTE
    memory_used: int | None = None
    name: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Gpu(_Record):
    """One claimable device, or one that cannot be claimed and why: a GPU, or a MIG instance of one.

    Attributes:
        index: position by PCI bus id, as nvidia-smi shows it; a MIG instance carries its parent's.
        uuid: ``GPU-...`` or ``MIG-...``; the key of everything.
        name: product name.
        pci_bus_id: ``0000:07:00.0`` form (4-digit domain where it fits, as in sysfs, lower case).
        numa_node: the NUMA node of the PCI device; None is unknown.
        memory_total, memory_used, memory_free: bytes.
        utilization: percent of time a kernel ran.
        compute_mode: one of :class:`ComputeMode`.
        display_active: whether a display is initialised on it (NVML ``GetDisplayActive``).
        processes: all processes on it, of every kind; None when the list failed this time (see ``process_error``).
        process_error: why ``processes`` is None.
        processes_supported: False when this driver can never list processes for this device.
        unusable: why the device can never be claimed as it is ("MIG mode is on", "lost"), else None.
        lost: the driver lost contact with it (fell off the bus, needs reset).
        mig_enabled: MIG mode is on (for a parent GPU).
        mig_parent: UUID of the parent GPU, for a MIG instance.
        mig_instance: number of the instance on its parent, for a MIG instance.
        nvlink_peers: UUIDs of the GPUs reachable by NVLink (directly or through NVSwitch).
    """

    index: int
    uuid: str
    name: str = ""
    pci_bus_id: str = ""
    numa_node: int | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    utilization: int | None = None
    compute_mode: str = ComputeMode.DEFAULT
    display_active: bool = False
    processes: tuple[GpuProcess, ...] | None = ()
    process_error: str = ""
    processes_supported: bool = True
    unusable: str | None = None
    lost: bool = False
    mig_enabled: bool = False
    mig_parent: str | None = None
    mig_instance: int | None = None
    nvlink_peers: frozenset[str] = frozenset()

    @property
    def is_mig_instance(self) -> bool:
        """Whether this is a MIG instance rather than a whole GPU."""
        return self.mig_parent is not None

    @property
    def label(self) -> str:
        """How people name it: ``3``, or ``3:1`` for MIG instance 1 of GPU 3."""
        return f"{self.index}:{self.mig_instance}" if self.is_mig_instance else str(self.index)


@dataclass(frozen=True, eq=False, repr=False)
class HostSnapshot(_Record):
    """One poll of a driver: all devices in index order (a MIG parent before its instances).

    Attributes:
        gpus: every device of the host, claimable or not.
        driver: name of the driver that was polled ("nvml", "nvidia-smi", "simulated:dgx-a100").
        driver_version: of the kernel driver, "" where unknown.
    """

    gpus: tuple[Gpu, ...]
    driver: str = ""
    driver_version: str = ""

    @property
    def physical(self) -> tuple[Gpu, ...]:
        """The GPUs without their MIG instances."""
        return tuple(gpu for gpu in self.gpus if not gpu.is_mig_instance)

    @property
    def needs_uuids(self) -> bool:
        """Whether CUDA numbers GPUs otherwise than we do here, so that only UUIDs are safe.

        It leaves out GPUs that are lost or that this process may not open, and counts MIG instances its own way.
        """
        return any(gpu.unusable or gpu.mig_enabled or gpu.lost or gpu.is_mig_instance for gpu in self.gpus)

    @property
    def shared_display(self) -> bool:
        """One GPU in the host and a display active on it: claims do not exclude each other."""
        return len(self.physical) == 1 and self.physical[0].display_active

    def by_uuid(self, uuid: str) -> Gpu | None:
        """The device with this UUID, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)


@dataclass(frozen=True, eq=False, repr=False)
class GpuRequest(_Record):
    """What a claim asks for, already checked and parsed (see ``selection.parse_request``).

    ``min_memory`` is in bytes. ``only`` and ``exclude`` hold indices (``"3"``), MIG labels (``"3:1"``) or (prefixes of)
    UUIDs. ``model`` is a case-insensitive name pattern: a substring, or a glob where it has ``*``, ``?`` or ``[``.
    """

    nb_gpus: int = 1
    min_memory: int | None = None
    model: str | None = None
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


class Holder(NamedTuple):
    """Who holds the lease of a device, as far as its record tells.

    ``since`` is in Unix seconds; ``start`` is the holder's start in clock ticks since boot, which tells it from a
    process of another container that has the same pid.
    """

    pid: int | None = None
    user: str | None = None
    job: str | None = None
    command: str | None = None
    since: float | None = None
    start: int | None = None


class GpuVerdict(NamedTuple):
    """Whether one GPU may be taken, and if not, why.

    ``state`` is one of ``free claimed busy display unusable`` (the GPU's own condition) or ``outside`` (the request or
    the fence leaves it out). ``reason`` is a sentence for people, "" when free. ``pid`` and ``user`` name the one in
    the way where that is known, ``holder`` the claim where it is one.
    """

    gpu: Gpu
    state: str
    reason: str = ""
    pid: int | None = None
    user: str | None = None
    holder: Holder | None = None

    @property
    def free(self) -> bool:
        """Whether nothing stands in the way of taking it."""
        return self.state in ("free", "display") and not self.reason


def normalize_bus_id(bus_id: str) -> str:
    """NVML's ``00000000:07:00.0`` as sysfs writes it, ``0000:07:00.0``; lower case; wider domains keep their digits.

    >>> normalize_bus_id("00000000:0F:00.0")
    '0000:0f:00.0'
    >>> normalize_bus_id("00010000:0F:00.0")
    '10000:0f:00.0'
    """
    domain, colon, rest = bus_id.strip().lower().partition(":")
    if not colon or ":" not in rest:
        return bus_id.strip().lower()
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"
