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
    """Return slot -> record, of the slots that claims hold.

    The record is None where it cannot be read: then the claim counts as holding the whole GPU.
    """
    found = {}
    for slot in range(MOST_SHARERS):
        name = slot_name(uuid, slot)
        # Read first: to probe a slot replaces the record of a dead claim.
        record = None if is_empty(host.leases, name) else read_record(host.leases, name)
        if may_be_held(host, name):
            found[slot] = record
    return found


def holder_of_slots(slots: Iterable[LeaseRecord | None]) -> LeaseHolder | None:
    """Return the holder of a GPU in these slots, by their records alone; None if there is none."""
    found = [LeaseHolder() if record is None else record.as_holder() for record in slots]
    return LeaseHolder.of_sharers(found) if found else None
