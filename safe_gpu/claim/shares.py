"""A claim that shares GPUs: its slots and names beside those of others, and what its program is told of its share."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ..coordination import socket_names as names
from ..coordination.leases import held_slots, holder_of_slots, slot_name, try_lease
from ..devices import MOST_SHARERS, GpuVerdict
from ..selection.choice import choose_shares
from ..selection.sharing import MIB, promised_room, share_fraction
from .leasing import Leases

if TYPE_CHECKING:
    from ..coordination.leases import Lease
    from ..coordination.locks import LockedHost
    from ..devices import Gpu
    from ..selection.request import Selection
    from .claim import Claim
    from .options import ClaimOptions
    from .view import HostView


class SharedLeases(Leases):
    """The leases of GPUs that the claim may share, locked shared, and the slots of those that were chosen.

    Who shares a GPU is first read from the records in its slots, which may be of dead claims. The locks of the slots
    are asked on the chosen GPUs, and on all where too few have room.

    Attributes:
        slots: UUID -> the lease of a slot, for the GPUs that were chosen for a claim.
    """

    def __init__(self, host: LockedHost, view: HostView, claim: Claim | None, options: ClaimOptions) -> None:
        super().__init__(host, view, claim, options)
        self.slots: dict[str, Lease] = {}
        assert view.share is not None
        self._share = view.share
        view.see_sharers(host.leases)
        if len(view.unoccupied) < view.request.nb_gpus:
            for uuid in list(view.shared):
                self._ask_locks(uuid)

    def unleased(self) -> frozenset[str]:
        return frozenset(uuid for uuid in self.all() if self._left(uuid) >= self._share)

    def watched(self) -> Iterable[str]:
        for uuid in self.view.shared:
            yield from (slot_name(uuid, slot) for slot in held_slots(self.host, uuid))

    def named(self, uuids: Collection[str]) -> frozenset[str]:
        return names.held_among(uuids, self.view.snapshot.name_prefix, shares=False)

    def give_back(self) -> None:
        self._give_back_slots()
        super().give_back()

    def _give_back_slots(self) -> None:
        while self.slots:
            self.slots.popitem()[1].release()

    def hand_over(self, claim: Claim, gpus: tuple[Gpu, ...], hold_for: float | None) -> None:
        for gpu in gpus:
            self.beneath[gpu.uuid], self.held[gpu.uuid] = self.held[gpu.uuid], self.slots.pop(gpu.uuid)
        super().hand_over(claim, gpus, hold_for)

    def _best(self, free: Collection[GpuVerdict], last: Collection[str], request: Selection) -> tuple[Gpu, ...] | None:
        rooms = {uuid: self._left(uuid) for uuid in self.view.shared}
        return choose_shares(free, request, rooms, near=self.view.near, last=last)

    def _left(self, uuid: str) -> int:
        gpu, holder = self.view.snapshot.by_uuid(uuid), self.view.shared.get(uuid)
        return 0 if gpu is None else promised_room(gpu, () if holder is None else holder.sharers)

    def _ask_locks(self, uuid: str) -> Collection[int]:
        """Return the slots that are held, after which ``view.shared`` has no dead claim of this GPU any more."""
        held = held_slots(self.host, uuid)
        holder = holder_of_slots(held.values())
        self.view.shared.pop(uuid, None)
        if holder is not None:
            self.view.shared[uuid] = holder
        return held

    def _name(self, chosen: tuple[Gpu, ...]) -> frozenset[str]:
        """Take a slot and its names on each of these GPUs. Returns those on which that fails; then nothing is taken."""
        for gpu in sorted(chosen, key=lambda gpu: gpu.uuid):
            held = self._ask_locks(gpu.uuid)
            if not self.view.judge({}, [gpu])[0].free or not self._take_slot(gpu.uuid, held):
                self._give_back_names()
                self._give_back_slots()
                return frozenset({gpu.uuid})
        return frozenset()

    def _take_slot(self, uuid: str, held: Collection[int]) -> bool:
        slot = next((slot for slot in range(MOST_SHARERS) if slot not in held), None)
        if slot is None:
            return False
        if self._claim is not None:
            lease = try_lease(self.host, slot_name(uuid, slot))
            if lease is None:
                return False
            self.slots[uuid] = lease
        try:
            return self._bind_slot(uuid, slot, held)
        except OSError as err:
            self.trouble = err
            return True

    def _bind_slot(self, uuid: str, slot: int, held: Collection[int]) -> bool:
        """Take the names of a slot; False where another state directory has the GPU.

        The name of the whole GPU is held meanwhile, so that of two that come at once one sees the other.
        """
        prefix = self.view.snapshot.name_prefix
        if self._claim is None:  # who binds only to look takes a GPU from others
            return not self.named([uuid]) and self._all_here(uuid, held)
        door = names.bind(names.name_of(uuid, prefix))
        if door is None:
            return False
        try:
            if not self._is_free(names.inner_of(uuid, prefix)) or not self._all_here(uuid, held):
                return False
            wanted = [names.slot_of(uuid, slot, prefix), self._place(uuid, slot)]
            if self._claim.token:
                wanted.append(names.scope_of(uuid, self._claim.token, prefix, slot))
            return self._bind_all(uuid, wanted)
        finally:
            door.release()

    def _all_here(self, uuid: str, held: Collection[int]) -> bool:
        """Return whether all slots whose names are held are locked in this state directory, by who has the name.

        A forked child may hold the lock of a slot without its name, and a claim elsewhere may then have that name.
        """
        prefix = self.view.snapshot.name_prefix
        return all(
            slot in held
            and (names.is_held(self._place(uuid, slot)) or not names.is_held(names.slot_of(uuid, slot, prefix)))
            for slot in names.held_slots(uuid, prefix)
        )

    def _place(self, uuid: str, slot: int) -> str:
        return names.place_of(uuid, slot, os.fstat(self.host.leases.fd), self.view.snapshot.name_prefix)


# What the frameworks of the program are told, as far as the user has not told them otherwise.


def share_variables(share: int, gpus: Collection[Gpu], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep a program within its share of each GPU, in bytes."""
    fraction = f"{share_fraction(share, gpus):.6g}"
    found = {"GPU_MEMORY_LIMIT": str(share), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if "XLA_CLIENT_MEM_FRACTION" not in environ:  # JAX refuses both together
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = fraction
    if environ.get("SAFE_GPU_SHARE_TORCH") == "1":  # PyTorch before 2.10 refuses the option
        found["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{fraction}"
    pipe = environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    if os.path.exists(os.path.join(pipe, "control")):
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{gpu.uuid}={share // MIB}M" for gpu in gpus)
    found = {name: value for name, value in found.items() if name not in environ}
    return {"SAFE_GPU_SHARE": str(share), "SAFE_GPU_SHARE_FRACTION": fraction, **found}
