"""What the history is told when a claim begins: the claim, and how those before it on its GPUs ended."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..coordination.history import append
from ..host.commands import program_names
from ..host.procfs import printable, well_formed

if TYPE_CHECKING:
    from ..coordination.leases.lease import Lease
    from ..coordination.leases.record import LeaseRecord
    from ..gpus.devices import Gpu


def append_history(record: LeaseRecord, gpus: Sequence[Gpu], leases: Sequence[Lease], waited: float) -> None:
    """Append a claim that holds these leases to the history. No error of it reaches the claim.

    Claims inside claims and claims that are shared have no line.

    Args:
        waited: seconds from the call to the GPUs.
    """
    if any(lease.inner or lease.shared for lease in leases):
        return
    former = dict.fromkeys(line for lease in leases for line in _of_former(lease))
    line = _line(record, labels=[gpu.label for gpu in gpus], waited=round(waited, 3))
    if append([*former, line], time.time()):
        for lease in leases:
            lease.noted = (record.pid, record.since)


def _of_former(lease: Lease) -> list[bytes]:
    """Return how the claim before ended; with all that is known of it if it died, perhaps before it wrote its own
    line."""
    if not lease.former.data:
        return []
    ending = lease.former.ending()
    if ending == lease.former.data:  # written by the claim itself, as almost always
        return [ending]
    record = lease.former.record()
    return [_line(record), ending] if record is not None and ending else [ending]


def _line(record: LeaseRecord, labels: Sequence[str] = (), **known: float) -> bytes:
    fields: dict[str, Any] = {"v": 1, "claim": [record.pid, record.since], "uid": record.uid}
    for key in ("user", "host", "job"):
        value = getattr(record, key)
        fields[key] = value and well_formed(value)
    # The record may have the whole command, by the wish of its user, and is soon gone; this line stays.
    fields["command"] = record.command and printable(well_formed(program_names(record.command.split())))
    fields.update(gpus=record.gpus, labels=labels, until=record.until, **known)
    if record.share is not None:
        fields.update(share=record.share, of=record.of)
    return json.dumps(fields).encode() + b"\n"
