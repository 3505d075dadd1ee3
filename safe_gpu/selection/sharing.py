"""How much of the memory of a shared GPU is left, and which processes stand in the way. Pure."""

from collections.abc import Callable, Collection, Sequence

from ..gpus.devices import MOST_SHARERS, ComputeMode, Gpu, GpuProcess, Holder, memory_by_pid
from ..wording.text import format_bytes, plural

MIB = 1 << 20

LEAST_SHARE = 1 << 30
"""Bytes. A CUDA context alone takes some hundred MiB, and counts inside the share."""

ROUNDING = 1e-6
"""Sums of parts of GPUs are not more exact than that."""

_CONTEXT = 512 * MIB  # of a CUDA program, beside what its framework allocates
_RESERVED = 1 << 30  # what the driver keeps for itself at most, where it counts that as used

_NAMED = 2  # holders that a reason names


FamilyOf = Callable[[int], "tuple[int, tuple[int, ...]] | None"]
"""The effective uid of a process, and the pids of it and its ancestors; None if it is not visible or in a container."""


def share_capacity(gpu: Gpu) -> int | None:
    """Return the bytes of the GPU that claims can share, whole MiB; None if the driver does not report its memory."""
    if gpu.memory_total is None:
        return None
    if gpu.counts_reserved or gpu.memory_used is None or gpu.memory_free is None:
        size = gpu.memory_total - _RESERVED
    else:
        size = gpu.memory_used + gpu.memory_free
    return max(0, size) // MIB * MIB


def part_of(gpu: Gpu, share: int | None) -> float:
    """Return how much of a GPU a share is, from 0 to 1; None is a whole GPU."""
    size = share_capacity(gpu)
    if share is None or not size:
        return 1.0
    return min(1.0, share / size)


def why_unshareable(gpu: Gpu, share: int) -> str:
    """Return why the GPU can never be shared that way; "" if it can, or its memory is not known."""
    if gpu.divided:
        return "it is one of several compute instances that have one memory, so it cannot be shared"
    if gpu.compute_mode == ComputeMode.EXCLUSIVE_PROCESS:
        return "compute mode EXCLUSIVE_PROCESS admits one process, so it cannot be shared"
    size = share_capacity(gpu)
    if size is None or size >= share:
        return ""
    return f"{format_bytes(size)} can be shared, {format_bytes(share)} asked for"


def share_fraction(share: int, gpus: Collection[Gpu]) -> float:
    """Return what frameworks may allocate of each GPU, as a fraction of its memory; of several GPUs the smallest."""
    return max(0.0, min((share - _CONTEXT) / (gpu.memory_total or share) for gpu in gpus))


def used_by_sharers(gpu: Gpu, sharers: Sequence[Holder], family_of: FamilyOf) -> list[int]:
    """Return the bytes that each sharer's process and its descendants use, as far as the driver lists them."""
    used = [0] * len(sharers)
    here = [process for process in gpu.processes or () if not process.elsewhere]
    for pid, size in memory_by_pid(here).items():
        family = family_of(pid)
        if family is None:
            continue
        _, ancestors = family
        for number, sharer in enumerate(sharers):
            if sharer.pid in ancestors:
                used[number] += size
                break
    return used


def promised(gpu: Gpu, sharers: Sequence[Holder]) -> list[int]:
    """Return the bytes that are promised to each of these claims, no more than there are; all where its share cannot be
    read."""
    size = share_capacity(gpu) or 0
    found = []
    for sharer in sharers:
        if sharer.share is None:
            found.append(size)
        else:
            found.append(min(size, sharer.share))
    return found


def promised_room(gpu: Gpu, sharers: Sequence[Holder]) -> int:
    """Return the bytes that are not promised to these claims."""
    return (share_capacity(gpu) or 0) - sum(promised(gpu, sharers))


def room(gpu: Gpu, sharers: Sequence[Holder], family_of: FamilyOf, *, unexplained: int, own: int = 0) -> int:
    """Return the bytes that are neither promised nor in use; less than 0 where a holder uses more than its share.

    Args:
        unexplained: bytes in use that count as the driver's own.
        own: bytes in use by processes that do not count.
    """
    not_promised = promised_room(gpu, sharers)
    if gpu.memory_shared:  # what is in use there may belong to nobody
        return not_promised
    for sharer, used in zip(sharers, used_by_sharers(gpu, sharers, family_of), strict=True):
        if sharer.share and used > sharer.share:
            not_promised -= used - sharer.share
    in_use = max(0, (gpu.memory_used or 0) - own - unexplained)
    not_in_use = (share_capacity(gpu) or 0) - in_use
    return min(not_promised, not_in_use)


def strangers(processes: Collection[GpuProcess], sharers: Sequence[Holder], family_of: FamilyOf) -> list[GpuProcess]:
    """Return those of the processes on a shared GPU that are certainly of none of its sharers.

    What cannot be told (a process of a container, a descendant whose parents have ended) only counts by its memory.
    """
    holders = {sharer.pid for sharer in sharers}
    users = {sharer.uid for sharer in sharers}
    found = []
    for process in processes:
        if process.elsewhere:
            continue
        family = family_of(process.pid)
        if family is None:
            continue
        uid, ancestors = family
        if uid not in users and holders.isdisjoint(ancestors):
            found.append(process)
    return found


def why_no_room(gpu: Gpu, sharers: Sequence[Holder], left: int, share: int) -> str:
    """Return why a share does not fit beside those of others; "" if it does.

    ``shared: 72 of 79.4 GiB promised to 3 claims (anna 20 GiB, ben 32 GiB, ...), 7.4 left, 20 asked for``
    """
    if len(sharers) >= MOST_SHARERS:
        return f"{MOST_SHARERS} claims share it already"
    if left >= share:
        return ""
    if not sharers:
        return f"{format_bytes(max(0, left))} of memory free, {format_bytes(share)} asked for"
    shares = promised(gpu, sharers)
    holders = [f"{sharer.user or '?'} {_gib(size)} GiB" for sharer, size in zip(sharers, shares, strict=True)]
    named = ", ".join(holders[:_NAMED])
    if len(holders) > _NAMED:
        named += ", ..."
    taken = f"{_gib(sum(shares))} of {_gib(share_capacity(gpu) or 0)} GiB promised to {plural(len(sharers), 'claim')}"
    return f"shared: {taken} ({named}), {_gib(max(0, left))} left, {_gib(share)} asked for"


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}".removesuffix(".0")
