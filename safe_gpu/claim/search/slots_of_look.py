"""What a look takes of GPUs that are shared: slots beside those of others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ...coordination.leases.file_names import slot_name
from ...coordination.leases.lease import try_lease
from ...coordination.leases.slots import held_slots, holder_of_slots
from ...gpus.devices import MOST_SHARERS, Gpu, GpuVerdict
from ...selection.choice import choose_shares

if TYPE_CHECKING:
    from ...coordination.leases.record import LeaseRecord
    from ...coordination.locks.host_lock import LockedHost
    from ...coordination.name_table import NameTable
    from ...selection.request import Selection
    from ..held import Taken
    from ..host.host_view import HostView
    from .names_of_look import GpuNames


class Slots:
    """What a claim takes that shares GPUs: a slot on each, beside those of others.

    Who shares a GPU is first read from the records in its slots, which may be of dead claims. The locks of the slots
    are asked on the chosen GPUs, and on all where too few have room. The methods are those of ``WholeGpus``.
    """

    def __init__(self, host: LockedHost, view: HostView, names: GpuNames) -> None:
        assert view.share is not None
        self._host = host
        self._view = view
        self._names = names
        self._share = view.share
        view.see_sharers(host.leases)
        if len(view.unoccupied) < view.request.nb_gpus:
            for uuid in list(view.shared):
                self._ask_locks(uuid)

    def has_room(self, uuid: str) -> bool:
        return self._left(uuid) >= self._share

    def watched(self) -> Iterable[str]:
        for uuid in {**self._view.shared, **self._view.beside}:
            yield from (slot_name(uuid, slot) for slot in held_slots(self._host, uuid))

    def named(self, uuids: Collection[str], table: NameTable | None = None) -> frozenset[str]:
        return self._names.held(uuids, table, shares=False)

    def best(self, free: Collection[GpuVerdict], last: Collection[str], request: Selection) -> tuple[Gpu, ...] | None:
        rooms = {uuid: self._left(uuid) for uuid in self._view.shared}
        return choose_shares(free, request, rooms, near=self._view.near, last=last)

    def take(self, uuid: str, taken: Taken) -> bool:
        held, gpu = self._ask_locks(uuid), self._view.snapshot.by_uuid(uuid)
        slot = next((slot for slot in range(MOST_SHARERS) if slot not in held), None)
        if gpu is None or slot is None or not self._view.judge({}, [gpu])[0].free:
            return False
        if self._names.claim is not None:
            taken.slot = try_lease(self._host, slot_name(uuid, slot))
            if taken.slot is None:
                return False
        return self._names.take_slot(uuid, taken.names, slot, held, self._share)

    def undo(self, taken: Taken) -> None:
        taken.give_back_names()
        taken.give_back_slot()

    def _left(self, uuid: str) -> int:
        gpu = self._view.snapshot.by_uuid(uuid)
        return 0 if gpu is None else self._view.promised_room(gpu)

    def _ask_locks(self, uuid: str) -> Mapping[int, LeaseRecord | None]:
        """Return the slots that are held, after which ``view.shared`` has no dead claim of this GPU any more."""
        held = held_slots(self._host, uuid)
        holder = holder_of_slots(held.values())
        self._view.shared.pop(uuid, None)
        if holder is not None:
            self._view.shared[uuid] = holder
        return held
