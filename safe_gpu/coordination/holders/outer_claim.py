"""The claim inside which this process runs, as the records of leases tell."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...host import procfs
from ..leases.lease import is_empty
from ..leases.record import LeaseRecord, read_record
from ..socket_names import digest

if TYPE_CHECKING:
    from ..files.state_dir import StateDir


def outer_claim_of_process(records: Iterable[LeaseRecord], scope: str) -> LeaseRecord | None:
    """Return the record of this process, else that of its nearest ancestor, else the one with this scope; None without
    any.

    Args:
        records: of held leases.
        scope: the value of SAFE_GPU_SCOPE, "" if it is not set.
    """
    known = list(records)
    for pid in (os.getpid(), *procfs.ancestors(os.getpid())):
        for record in known:
            if record.pid == pid and record.start == procfs.start_time(pid):
                return record
    return next((record for record in known if scope and record.token == digest(scope)), None)


def leases_with_token(leases: StateDir, names: Iterable[str], secret: str) -> dict[str, LeaseRecord]:
    """Return name -> record, of those of these leases whose record has this hash of a token."""
    there, found = leases.few_names(), {}
    for name in names:
        record = None if is_empty(leases, name, there) else read_record(leases, name)
        if record is not None and record.token == secret:
            found[name] = record
    return found
