"""Which GPUs and pieces of GPUs claims have and waiters want, and which of them are in each other's way. Pure.

A MIG instance, an AMD compute partition and a virtual function are pieces of a GPU. Which pieces there are changes
while claims live. So an entry says of which GPUs its devices are pieces, and the rule goes by that, whatever the driver
shows:

* Two that have the same device are in each other's way.
* One that has a GPU, or a share of it, and one that has a piece of that GPU are in each other's way.
* Two that have pieces of one GPU in different modes are in each other's way. In one mode they are not.

Claims and tickets go by the same rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..gpus.devices import Gpu
from .entry import Entry


class Silicon:
    """What claims have, or waiters want; nothing at first."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # of devices, and the second name of a GPU that is claimed by two
        self._whole: set[str] = set()  # those of the names that are of whole GPUs
        self._modes: dict[str, set[str]] = {}  # GPU -> the modes of its pieces, "" where it has no modes

    @classmethod
    def of_device(cls, gpu: Gpu) -> Silicon:
        """Return that of a device that the driver shows."""
        return cls.of_keys({gpu.uuid}, **keys_of([gpu]))

    @classmethod
    def of_keys(cls, gpus: Collection[str], pieces: Mapping[str, Collection[str]], modes: Mapping[str, str]) -> Silicon:
        """Return that of an entry, by its keys of these names."""
        found = cls()
        found._names.update(gpus)
        found._whole.update(gpus)
        for gpu, names in pieces.items():
            if names:
                found._whole.difference_update(names)
                found._modes[gpu] = {modes.get(gpu, "")}
            else:
                found._names.add(gpu)
                found._whole.add(gpu)
        return found

    def add(self, other: Silicon) -> None:
        """Add what others have or want."""
        self._names |= other._names
        self._whole |= other._whole
        for gpu, modes in other._modes.items():
            self._modes.setdefault(gpu, set()).update(modes)

    def meets(self, other: Silicon) -> bool:
        """Return whether they are in each other's way."""
        if not self._names.isdisjoint(other._names):
            return True
        if not self._whole.isdisjoint(other._modes) or not other._whole.isdisjoint(self._modes):
            return True
        divided = self._modes.keys() & other._modes.keys()
        return any(len(self._modes[gpu] | other._modes[gpu]) > 1 for gpu in divided)

    def contains(self, other: Silicon) -> bool:
        """Return whether this one is in the way of all in whose way the other one is, since it has all of that."""
        if not (other._names <= self._names and other._whole <= self._whole):
            return False
        return all(modes <= self._modes.get(gpu, set()) for gpu, modes in other._modes.items())


def silicon_of(entry: Entry) -> Silicon:
    """Return what a claim has, or a ticket wants."""
    return Silicon.of_keys(entry.gpus, entry.pieces, entry.modes)


def share_of(entry: Entry, gpu: Gpu) -> int | None:
    """Return how many bytes of a device a claim in its way has; None where it has all of it.

    AMD's first partition may have the UUID of its card. So a claim that names this device counts as one that has all of
    it, unless it holds what the device is now: the card, or a partition in the same mode.
    """
    was_piece = gpu.uuid in entry.pieces.get(gpu.whole, ())
    if was_piece != gpu.is_piece or entry.modes.get(gpu.whole, "") != gpu.mode:
        return None
    return entry.gpus.get(gpu.uuid)


def keys_of(gpus: Iterable[Gpu]) -> dict[str, Any]:
    """Return the keys ``pieces`` and ``modes`` of an entry of these devices."""
    pieces: dict[str, list[str]] = {}
    modes: dict[str, str] = {}
    for gpu in gpus:
        if gpu.is_piece:
            pieces.setdefault(gpu.whole, []).append(gpu.uuid)
            if gpu.mode:
                modes[gpu.whole] = gpu.mode
        elif gpu.whole != gpu.uuid:
            pieces[gpu.whole] = []
    return {"pieces": {gpu: tuple(names) for gpu, names in pieces.items()}, "modes": modes}
