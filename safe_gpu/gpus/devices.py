"""GPUs, their processes and their host at one poll, as records.

Memory is in bytes and utilisation in percent. ``None`` means that the driver does not report the value.
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from .vendors import FIRST, VENDORS

MIG_IS_ON = "MIG mode is on: claim one of its instances"
"""Why a GPU with MIG instances cannot be claimed itself."""

MOST_SHARERS = 16
"""Claims that can share a GPU at once."""

FIRST_MINUTE = 60.0
"""Seconds in which a claim that has just begun is not called idle."""

SOMEBODY_ELSEWHERE = "somebody in another state directory"
"""Who holds a GPU of which only the door is held."""

CLAIMED_ELSEWHERE = (
    "claimed in another state directory (a private /tmp?), or its entry here was removed or cannot be read"
)
"""Why such a GPU cannot be claimed."""

_MOST_HIDDEN = 1 << 30  # bytes that a GPU may have in use while nobody computes there

PARTITION_MODES = ("DPX", "TPX", "QPX", "CPX")
"""In which an AMD GPU has several compute partitions. One of a mode has the silicon of several, or of a part of one, of
another mode."""

MASK = "ZE_AFFINITY_MASK"
HIERARCHY = "ZE_FLAT_DEVICE_HIERARCHY"
PCI_ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"

_HEX = frozenset("0123456789abcdef")

_SHORTEST_UUID = len("GPU-0123456789abcdef")


class ComputeMode:
    """Compute modes of a GPU, with nvidia-smi's meaning."""

    DEFAULT = "default"
    EXCLUSIVE_PROCESS = "exclusive_process"
    PROHIBITED = "prohibited"


class ProcessKind:
    """Which of the driver's process lists a process is in."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


class GpuProcess(NamedTuple):
    """One process that the driver reports on a GPU.

    ``pid`` is the driver's number. In a container it may be a host pid, which may not exist in the container's /proc.
    ``memory_used`` is in bytes. ``name`` is None unless the driver reports it. ``elsewhere`` is True if the process of
    this number here has no device of the vendor open, so that the driver must mean a process of another PID namespace.
    """

    pid: int
    kind: str = ProcessKind.COMPUTE
    memory_used: int | None = None
    name: str | None = None
    elsewhere: bool = False
    ended: bool = False


def memory_by_pid(processes: Iterable[GpuProcess]) -> dict[int, int]:
    """Return the bytes that each process uses, as far as that is known. It counts once, although it may be in both
    lists."""
    found: dict[int, int] = {}
    for process in processes:
        found[process.pid] = max(process.memory_used or 0, found.get(process.pid, 0))
    return found


class Gpu(NamedTuple):
    """One device: a GPU, or a MIG instance of a GPU. It may be one that cannot be claimed.

    Attributes:
        index: position by PCI bus id, as nvidia-smi shows it; a MIG instance has the index of its parent. AMD GPUs have
            ROCR's numbers.
        uuid: ``GPU-...`` or ``MIG-...``, on Jetson without ``GPU-``; of a GPU without one, its place (``AMD-...``). It
            names the device everywhere.
        name: product name.
        pci_bus_id: as in sysfs: ``0000:07:00.0``, lower case, with a 4-digit domain unless it needs more; "" if the
            driver reports none.
        numa_node: the NUMA node of the PCI device; None is unknown.
        memory_total: bytes.
        memory_used: bytes.
        memory_free: bytes.
        counts_reserved: whether ``memory_used`` includes what the driver reserves for itself (600 MiB and more).
        memory_shared: whether ``memory_used`` may belong to no process on the GPU: it is a NUMA node, where the page
            cache counts, or WSL2, where the Windows desktop does. Asked only where memory is unexplained.
        utilization: percent of time in which a kernel ran; queried for display, for a condition of a claim and for
            signs of illness (``Driver.detailed``, ``Driver.examined``).
        temperature: of the GPU's die, degrees Celsius; queried only for display, and told by NVIDIA's drivers only, as
            the next three are.
        fan: percent of its highest speed.
        power, power_limit: watts that the card draws, and that it may draw.
        compute_mode: one of :class:`ComputeMode`.
        display_active: whether a display is initialised on it (NVML ``GetDisplayActive``).
        processes: the processes on it; None if the query failed (see ``process_error``). Graphics processes may be
            left out if the others account for nearly all memory in use (``Driver.detailed`` adds them).
        process_error: why ``processes`` is None.
        processes_supported: False if this driver can never list the processes of this device.
        unusable: why the device cannot be claimed in its present state ("MIG mode is on", "lost"), else None.
        lost: the driver lost contact with it (fell off the bus, needs a reset).
        mig_enabled: MIG mode is on (for a parent GPU).
        mig_parent: UUID of the parent GPU, for a MIG instance.
        mig_instance: number of the instance on its parent, for a MIG instance.
        place: the name of the GPU, the same in all modes, where ``uuid`` is not: of an AMD device, and of a virtual
            function; "" of others.
        partition: whether it is a part of that GPU, other than a MIG instance: an AMD compute partition or a virtual
            function.
        mode: in which that GPU is divided so (``CPX``), where other modes divide it otherwise; "" of others.
        divided: whether this MIG instance is one of several compute instances of a GPU instance. They have one memory,
            and ``memory_total``, ``memory_used`` and ``memory_free`` are of that.
        memory_beside: bytes that processes on the others of these use; None is unknown.
        nvlink_peers: UUIDs of the GPUs reachable by NVLink, directly or through NVSwitch, or by xGMI; queried only for
            claims of several GPUs (``Driver.linked``).
        vendor: a key of :data:`~safe_gpu.gpus.vendors.VENDORS`.
        tiles: how many parts Intel's library may show as devices of their own.
        processes_private: ``processes`` has only those that this user may see, for the reason in ``process_error``. The
            GPU is judged by claims, and by memory where that is known.
        illness: what the driver says against it (it recommends a reset), a clause; "" if nothing, or if it was not
            asked (``Driver.examined``).
    """

    index: int  # type: ignore[assignment]  # tuple.index is not needed
    uuid: str
    name: str = ""
    pci_bus_id: str = ""
    numa_node: int | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    counts_reserved: bool = True
    memory_shared: bool = False
    utilization: int | None = None
    temperature: int | None = None
    fan: int | None = None
    power: int | None = None
    power_limit: int | None = None
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
    place: str = ""
    partition: bool = False
    mode: str = ""
    divided: bool = False
    memory_beside: int | None = 0
    nvlink_peers: frozenset[str] = frozenset()
    vendor: str = FIRST
    tiles: int = 1
    processes_private: bool = False
    illness: str = ""

    def __repr__(self) -> str:
        """Return the expression that makes it, without the fields that have their defaults."""
        fields = []
        for name, value in self._asdict().items():
            if name not in self._field_defaults or value != self._field_defaults[name]:
                fields.append(f"{name}={value!r}")
        return f"Gpu({', '.join(fields)})"

    @property
    def is_mig_instance(self) -> bool:
        """Whether this is a MIG instance rather than a whole GPU."""
        return self.mig_parent is not None

    @property
    def is_piece(self) -> bool:
        """Whether it is a MIG instance, an AMD compute partition or a virtual function, which are parts of a GPU."""
        return self.partition or self.mig_parent is not None

    @property
    def whole(self) -> str:
        """The name of the GPU of which it is all or a piece, the same in all modes of that GPU."""
        return self.mig_parent or self.place or self.uuid

    @property
    def names(self) -> tuple[str, ...]:
        """The names by whose doors it is claimed. One is its own; one is that of its GPU, if it is all of that."""
        if self.is_piece or self.whole == self.uuid:
            return (self.uuid,)
        return (self.uuid, self.whole)

    @property
    def named_by_uuid(self) -> bool:
        """Whether CUDA's variables take its UUID. One without ``GPU-`` is no name there, or is read as a number."""
        return self.uuid.startswith(("GPU-", "MIG-"))

    @property
    def label(self) -> str:
        """The short name, such as ``3``, or ``3:1`` for MIG instance 1 of GPU 3."""
        if self.is_mig_instance:
            return f"{self.index}:{self.mig_instance}"
        return str(self.index)

    @property
    def unexplained_memory(self) -> int:
        """Bytes in use that no listed process accounts for; 0 if one of the figures is unknown.

        Where the driver can never list processes, that is all memory in use.
        """
        listed = self.listed_memory
        if self.memory_used is None or self.memory_beside is None or listed is None:
            return 0
        return max(0, self.memory_used - self.memory_beside - listed)

    @property
    def listed_memory(self) -> int | None:
        """Bytes that its listed processes use; None if that of one is unknown, or the query failed."""
        if self.processes is None and self.processes_supported:
            return None
        processes = self.processes or ()
        if any(process.memory_used is None for process in processes):
            return None
        return sum(memory_by_pid(processes).values())

    @property
    def draws(self) -> bool:
        """Whether a display or a graphics process is on it. Such a GPU is taken last."""
        return self.display_active or any(process.kind == ProcessKind.GRAPHICS for process in self.processes or ())

    def without(self, pids: Collection[int]) -> "Gpu":
        """Return the record of this device as if these processes had left it, with what they used of its memory."""
        gone = [process for process in self.processes or () if process.pid in pids]
        if not gone:
            return self
        size = sum(memory_by_pid(gone).values())
        used = self.memory_used
        if used is not None:
            used = max(0, used - size)
        free = self.memory_free
        if free is not None:
            free += size
        remaining = tuple(process for process in self.processes or () if process.pid not in pids)
        return self._replace(processes=remaining, memory_used=used, memory_free=free)

    def unreachable(self, reason: str, *, lost: bool = True) -> "Gpu":
        """Return the record of this device while nothing but its identity is known."""
        return Gpu(
            index=self.index,
            uuid=self.uuid,
            name=self.name,
            pci_bus_id=self.pci_bus_id,
            numa_node=self.numa_node,
            mig_parent=self.mig_parent,
            mig_instance=self.mig_instance,
            place=self.place,
            partition=self.partition,
            mode=self.mode,
            vendor=self.vendor,
            tiles=self.tiles,
            processes=None,
            process_error=reason,
            unusable=reason,
            lost=lost,
        )


class HostSnapshot(NamedTuple):
    """One poll of a driver: all devices in index order (a MIG parent before its instances).

    Attributes:
        gpus: every device of the host, claimable or not.
        driver: name of the driver that was polled ("nvml", "nvidia-smi", "simulated:dgx-a100").
        driver_version: version of the kernel driver, "" if unknown.
        name_prefix: what stands before UUIDs in the names of claimed GPUs; "" on a real host.
        doubt: a sentence, if an index may be that of another GPU; else "".
    """

    gpus: tuple[Gpu, ...]
    driver: str = ""
    driver_version: str = ""
    name_prefix: str = ""
    doubt: str = ""

    @property
    def physical(self) -> tuple[Gpu, ...]:
        """The GPUs without their MIG instances and virtual functions. Partitions of a GPU that is not shown count."""
        shown = {gpu.uuid for gpu in self.gpus}
        return tuple(gpu for gpu in self.gpus if not (gpu.is_piece and gpu.whole in shown))

    @property
    def vendor(self) -> str:
        """The vendor of the GPUs; a snapshot has those of one only."""
        if not self.gpus:
            return FIRST
        return self.gpus[0].vendor

    @property
    def needs_uuids(self) -> bool:
        """Whether CUDA's numbers of the GPUs may differ from ``index``, so that only UUIDs are safe.

        CUDA does not count GPUs that are lost or that this process may not open, and it numbers MIG instances in its
        own order.
        """
        return bool(self.doubt) or any(gpu.unusable or gpu.lost or gpu.mig_parent for gpu in self.gpus)

    @property
    def shared_display(self) -> bool:
        """Whether the host has one GPU and a display is active on it. Claims of such a GPU are shared."""
        return len(self.gpus) > 0 and self.gpus[0].display_active and len(self.physical) == 1

    def has_ended(self, process: GpuProcess) -> bool:
        """Return whether a process that the driver lists has certainly ended, so that the driver keeps its memory.

        NVIDIA's drivers 535.113 to 570.144 and 575.51 list the thread that opened the driver, which may end before its
        process does. Up to 560 they tell the memory of processes only.
        """
        if not process.ended:
            return False
        version = self._nvidia_version
        lists_threads = (535, 113) <= version < (570, 148) or (575,) <= version < (575, 57)
        if lists_threads:
            return version < (561,) and process.memory_used is not None
        return True

    @property
    def _nvidia_version(self) -> tuple[int, ...]:
        """Major and minor version of NVIDIA's driver; () of others."""
        if self.driver not in VENDORS[FIRST].drivers:
            return ()
        parts = self.driver_version.split(".")[:2]
        return tuple(int(part) for part in parts if part.isdecimal())

    def by_uuid(self, uuid: str) -> Gpu | None:
        """Return the device with this UUID, or None."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        return None

    def updated(self, gpus: Iterable[Gpu]) -> "HostSnapshot":
        """Return this poll with the records of these devices replaced."""
        newer = {gpu.uuid: gpu for gpu in gpus}
        return self._replace(gpus=tuple(newer.get(gpu.uuid, gpu) for gpu in self.gpus))


LAST_CHOICE = 86400.0
"""Seconds for which a GPU is taken last at most after a claim failed on it."""


class GpuFault(NamedTuple):
    """A note that a claim failed on a GPU.

    Attributes:
        when: Unix seconds.
        error: as text.
        lasts: seconds for which the GPU is taken last.
    """

    when: float
    error: str
    lasts: float = LAST_CHOICE

    @property
    def why_last(self) -> str:
        """``taken last until Sun 14:32, since a claim failed there: ...``, in local time."""
        until = time.strftime("%a %H:%M", time.localtime(self.when + self.lasts))
        return f"taken last until {until}, since a claim failed there: {self.error}"


def recent_faults(faults: Mapping[str, GpuFault], now: float) -> dict[str, GpuFault]:
    """Return the notes, by UUID, that still count at ``now`` (Unix seconds).

    A note from the future (the clock was set back) counts for as long as one from the past, and no longer.
    """
    return {uuid: fault for uuid, fault in faults.items() if abs(now - fault.when) < fault.lasts}


class HeldAs(NamedTuple):
    """As what a claim holds a device that it does not name.

    Attributes:
        text: a clause, such as ``held as MIG-..., which is gone since the mode changed``.
        gone: the names of pieces of its GPU that it claims and the driver does not show.
        outdated: whether the GPU has been divided differently under the claim.
    """

    text: str
    gone: tuple[str, ...] = ()
    outdated: bool = False


class Holder(NamedTuple):
    """Who holds a device. A field is None if it is not known.

    ``uid`` and ``user`` are the owner of the entry of the claim; ``user`` is None where nobody was asked for the name.
    ``command`` is as the kernel shows it, or as the entry says; all else is as the entry says. ``since`` is in Unix
    seconds, and so is ``until``, when the claim will probably end. ``start`` is the start time of the holder in clock
    ticks since boot. It distinguishes the holder from another process that has its pid now. ``elsewhere``: only the
    door of the GPU is held, and no entry in this state directory tells more. ``namespace``: where ``pid`` is a number,
    such as "in a container"; "" if it is a process of this PID namespace. ``share`` is how many bytes of the GPU it
    holds; None for a whole GPU. ``sharers`` are the claims that share the GPU, the oldest first, and the other fields
    are those of the oldest; empty if one claim holds it alone. ``queued`` is when it joined the queue, in Unix seconds;
    None if it did not wait. ``left_by`` is the process that claimed, if it has ended: then ``pid`` is one that keeps
    the entry.

    What follows is found out for people only. ``stopped``: the process is stopped or frozen, such as those of a
    suspended job. ``note`` is a clause on anything unusual, such as a process that has ended; else "". ``memory_used``
    is how many bytes of a shared GPU its process and the descendants of that use. ``removable_by`` is the user who can
    remove its entry, if it has no door that keeps its GPU without one; else None. ``utilization`` is the mean of the
    GPU in percent since it was claimed, as far as it was looked at.

    ``held_as`` is what it claims, where that is not this device: the GPU of which this is a piece, or pieces of it;
    else None. ``others`` are further claims that are in the way as this one is: of a GPU whose pieces several claims
    hold. ``full`` is a sentence where nobody holds this piece of a GPU, but as many claims as can hold pieces of it;
    else "".
    """

    pid: int | None = None
    user: str | None = None
    job: str | None = None
    command: str | None = None
    since: float | None = None
    start: int | None = None
    elsewhere: bool = False
    namespace: str = ""
    until: float | None = None
    uid: int = -1
    share: int | None = None
    sharers: "tuple[Holder, ...]" = ()
    queued: float | None = None
    left_by: int | None = None
    stopped: bool = False
    note: str = ""
    memory_used: int | None = None
    removable_by: str | None = None
    held_as: HeldAs | None = None
    others: "tuple[Holder, ...]" = ()
    full: str = ""
    utilization: float | None = None

    @classmethod
    def of_sharers(cls, sharers: "Iterable[Holder]") -> "Holder":
        """Return the holder of a GPU that these claims share."""
        ranked = tuple(sorted(sharers, key=lambda one: one.since or 0.0))
        return ranked[0]._replace(sharers=ranked)

    @property
    def name(self) -> str:
        """Who holds it, for people: the user, or what is known instead."""
        if self.elsewhere:
            return SOMEBODY_ELSEWHERE
        return self.user or "?"

    @property
    def each(self) -> "tuple[Holder, ...]":
        """The claims on the GPU."""
        return self.sharers or (self, *self.others)


class GpuVerdict(NamedTuple):
    """Whether one GPU may be taken, and if not, why.

    ``state`` is one of ``free claimed busy display unusable`` (the condition of the GPU) or ``outside`` (the request or
    the visible limit excludes it). ``reason`` is a text for people, "" if the GPU is free. ``pid`` and ``user`` name
    the process that uses or holds the GPU, if known. ``holder`` is the claim that holds it, if there is one. ``closed``
    is whether it may not be taken because it is drained or reserved: it comes back.
    """

    gpu: Gpu
    state: str
    reason: str = ""
    pid: int | None = None
    user: str | None = None
    holder: Holder | None = None
    closed: bool = False

    @property
    def free(self) -> bool:
        """Whether the GPU may be taken."""
        return self.state in ("free", "display") and not self.reason

    def is_idle(self, now: float) -> bool:
        """Return whether the driver shows no process on it, a minute after it was claimed or later."""
        if self.holder is None or self.holder.since is None or now - self.holder.since < FIRST_MINUTE:
            return False
        gpu = self.gpu
        lists_all = gpu.processes_supported and not gpu.processes_private
        return lists_all and gpu.processes == () and gpu.unexplained_memory < _MOST_HIDDEN


class VisibleLimit(NamedTuple):
    """The devices to which an inherited CUDA_VISIBLE_DEVICES limits this process.

    Attributes:
        value: the text of the variable.
        uuids: the devices it selects, in CUDA's order; a guess if ``ambiguous``.
        ambiguous: the text alone does not say which devices are selected (see ``doubt``). Only CUDA can tell.
        uses_indices: the variable holds indices rather than UUIDs.
        doubt: why it is ambiguous, as a clause ("this host's GPUs are of different models and ..."), else "".
        frozen: CUDA is already initialised in this process, and its choice of GPUs is the limit, not the variable.
        name: the variable.
        library: which library reads it.
        lift: how to disregard the variable; "" where no message shall advise it: in a batch job, in which the GPUs
            outside may be those of other jobs, and inside a claim all of whose GPUs it selects.
    """

    value: str
    uuids: tuple[str, ...] = ()
    ambiguous: bool = False
    uses_indices: bool = False
    doubt: str = ""
    frozen: bool = False
    name: str = "CUDA_VISIBLE_DEVICES"
    library: str = "CUDA"
    lift: str = "SAFE_GPU_FENCE=ignore"

    @property
    def clear_by(self) -> str:
        """What to set so that the variable is not ambiguous."""
        if self.name == MASK:
            return f"{HIERARCHY} and {PCI_ORDER}=1 with numbers in the order of the bus ids"
        return "CUDA_DEVICE_ORDER=PCI_BUS_ID with numbers as nvidia-smi shows them, or name UUIDs"

    @property
    def title(self) -> str:
        """What limits this process, as the subject of a sentence in a message."""
        if self.frozen:
            return f"{self.library}, already initialised in this process,"
        if not self.value:
            return f"{self.name}='' (set, but empty)"
        return f"{self.name}={self.value}"

    def __contains__(self, uuid: object) -> bool:
        return uuid in self.uuids


def are_mixed(gpus: Iterable[Gpu]) -> bool:
    """Return whether GPUs are known to be of different models; one without a name counts as none."""
    return len({gpu.name for gpu in gpus if gpu.name}) > 1


def in_each_others_way(gpus: Iterable[Gpu]) -> dict[str, frozenset[str]]:
    """Return UUID -> the other devices of which nobody can have one while somebody has this one, if there are any: the
    pieces of a GPU, and the GPU of a piece."""
    shown = list(gpus)
    pieces: dict[str, set[str]] = {}
    for gpu in shown:
        if gpu.is_piece:
            pieces.setdefault(gpu.whole, set()).add(gpu.uuid)
    if not pieces:
        return {}
    found = {}
    for gpu in shown:
        if not gpu.is_piece and gpu.whole in pieces:
            found[gpu.uuid] = frozenset(pieces[gpu.whole])
            for piece in pieces[gpu.whole]:
                found[piece] = frozenset({gpu.uuid})
    return found


def vendor_of(uuid: str) -> str:
    """Return the vendor of the GPU with this UUID, by its table's grammars; the first if none fits.

    >>> vendor_of("GPU-a3f1c07e52d98b16"), vendor_of("AMD-0000:05:00.0-1")
    ('amd', 'amd')
    >>> vendor_of("GPU-4f667d77-15c7-524b-c32d-5340d78b712e")
    'nvidia'
    """
    for key, vendor in VENDORS.items():
        if re.fullmatch(vendor.uuid, uuid):
            return key
    return FIRST


def vendor_of_name(name: str) -> str | None:
    """Return the vendor of the GPU with this name, as far as it is a whole UUID."""
    by_place = tuple(vendor.by_place for vendor in VENDORS.values() if vendor.by_place)
    if len(name) < _SHORTEST_UUID and not name.startswith(by_place):
        return None
    return vendor_of(name)


def normalize_bus_id(bus_id: str) -> str:
    """Return a PCI bus id of NVML, such as ``00000000:07:00.0``, in the form of sysfs: lower case, domain of 4 digits
    or more. "" for what is none, such as ``[N/A]``.

    >>> normalize_bus_id("00000000:0F:00.0")
    '0000:0f:00.0'
    >>> normalize_bus_id("00010000:0F:00.0")
    '10000:0f:00.0'
    """
    domain, _, rest = bus_id.strip().lower().partition(":")
    normalized = f"{domain.lstrip('0').rjust(4, '0')}:{rest}"
    if bus_order(normalized) is None:
        return ""
    return normalized


def bus_order(bus_id: str) -> tuple[int, int, int, int] | None:
    """Return a PCI bus id in sysfs's form as numbers: domain, bus, device and function. They sort as nvidia-smi does;
    None if it is none.

    >>> bus_order("0000:0f:00.0") < bus_order("0000:c1:00.0") < bus_order("10000:01:00.0")
    True
    """
    # Without a regular expression, which every first claim would compile.
    address, _, function = bus_id.rpartition(".")
    parts = [*address.split(":"), function]
    if not _HEX.issuperset("".join(parts)):
        return None
    length_of_domain, *lengths = [len(part) for part in parts]
    if not 4 <= length_of_domain <= 8 or lengths != [2, 2, 1]:
        return None
    domain, bus, device, number = [int(part, 16) for part in parts]
    return domain, bus, device, number
