"""Slots: what claims hold that share a GPU."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ...gpus.devices import MOST_SHARERS, LeaseHolder
from .file_names import slot_name
from .lease import is_empty, may_be_held
from .record import LeaseRecord, read_record

if TYPE_CHECKING:
    from ..files.state_dir import StateDir
    from ..locks.host_lock import LockedHost


def recorded_slots(leases: StateDir, uuid: str, files: Collection[str] | None = None) -> dict[int, LeaseRecord]:
    """Return slot -> record, of living claims and of dead ones. No lock is taken.

    Args:
        files: the names in the directory, if they are known: to ask for each of all GPUs takes longer than to list it.
    """
    found = {}
    for slot in range(MOST_SHARERS):
        name = slot_name(uuid, slot)
        record = None if is_empty(leases, name, files) else read_record(leases, name)
        if record is not None:
            found[slot] = record
    return found


def held_slots(host: LockedHost, uuid: str) -> dict[int, LeaseRecord | None]:
    """Return slot -> record, of the slots that claims hold, or claims inside them whose outer claim has ended.

    The record is None where it cannot be read: then the claim counts as holding the whole GPU.
    """
    found = {}
    for slot, record in ((slot, _record(host.leases, uuid, slot)) for slot in range(MOST_SHARERS)):
        # Read first: to probe a slot replaces the record of a dead claim.
        if any(may_be_held(host, slot_name(uuid, slot, inner=inner)) for inner in (False, True)):
            found[slot] = record
    return found


def _record(leases: StateDir, uuid: str, slot: int) -> LeaseRecord | None:
    names = (slot_name(uuid, slot, inner=inner) for inner in (False, True))
    records = (read_record(leases, name) for name in names if not is_empty(leases, name))
    return next((record for record in records if record is not None), None)


def holder_of_slots(slots: Iterable[LeaseRecord | None]) -> LeaseHolder | None:
    """Return the holder of a GPU in these slots, by their records alone; None if there is none."""
    found = [LeaseHolder() if record is None else record.as_holder() for record in slots]
    return LeaseHolder.of_sharers(found) if found else None
