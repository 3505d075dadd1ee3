"""What a claim has of a device that it does not name: all of the GPU, or pieces of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..gpus.devices import Gpu, HeldAs
from ..host import procfs
from .entry import Entry


def held_as(entry: Entry, gpu: Gpu, shown: Mapping[str, Gpu]) -> HeldAs | None:
    """Return as what a claim holds a device; None if it names the device as it is, or keeps nobody off it.

    Args:
        shown: UUID -> device, of all that the driver shows.
    """
    pieces = entry.pieces.get(gpu.whole)
    if pieces:
        return _held_as_pieces(entry, gpu, pieces, shown)
    if pieces is None and gpu.whole not in entry.gpus:
        return None
    if gpu.uuid in entry.gpus and not gpu.is_piece:
        return None
    part = "a share"
    if None in entry.gpus.values():
        part = "all"
    is_virtual_function = gpu.partition and not gpu.mode  # those stand beside their card
    if gpu.is_piece and not is_virtual_function:
        return HeldAs(f"held with {part} of its GPU since before the mode changed", outdated=True)
    return HeldAs(f"held with {part} of its GPU")


def _held_as_pieces(entry: Entry, gpu: Gpu, pieces: Sequence[str], shown: Mapping[str, Gpu]) -> HeldAs | None:
    mode = entry.modes.get(gpu.whole, "")
    if gpu.is_piece and mode == gpu.mode:
        return None  # of two pieces neither is in the other's way
    gone = tuple(name for name in pieces if name not in shown or shown[name].mode != mode)
    if gone:
        return _held_as_gone(gpu, gone, mode)
    if gpu.mig_enabled:
        return None  # the instances tell
    return HeldAs(f"held as {pieces[0]}, a part of it")


def _held_as_gone(gpu: Gpu, gone: tuple[str, ...], mode: str) -> HeldAs:
    name = gone[0]
    is_or_are = "is"
    if len(gone) > 1:
        name = f"{name} and {len(gone) - 1} more"
        is_or_are = "are"
    if mode:
        name = f"{name} of mode {mode}"
    is_mig_off = gone[0].startswith("MIG-") and not gpu.mig_enabled and not gpu.lost
    if is_mig_off or mode != gpu.mode:
        return HeldAs(f"held as {name}, which {is_or_are} gone since the mode changed", gone, outdated=True)
    # A container is shown some pieces of a GPU, and nobody is shown those of one that is lost.
    if gpu.lost or procfs.pid_namespace() not in (None, procfs.FIRST_PID_NAMESPACE):
        return HeldAs(f"held as {name}, which the driver does not show here", gone)
    return HeldAs(f"held as {name}, which {is_or_are} gone", gone, outdated=True)
