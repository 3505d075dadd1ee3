"""Notes of GPUs on which a claim failed, for the claims that come next.

Every user may write every note (mode 0666). The note of another user cannot be unlinked in a sticky directory; it is
emptied instead. A note proves nothing: it only makes other GPUs the better choice for some minutes. Who holds the lease
of a GPU writes and clears its note, so no lock is needed.
"""

import os
from collections.abc import Iterable

from ...gpus.devices import GpuFault
from ...host import procfs
from ...host.decoding import as_time, read_bounded
from ..files.state_dir import StateDir, write_all
from .file_names import fault_name

_MOST_BYTES = 4096

_MOST_CHARACTERS = 400


def read_faults(leases: StateDir, uuids: Iterable[str]) -> dict[str, GpuFault]:
    """Return UUID -> note, for the devices that have one that can be read, however old it is."""
    found = {}
    for uuid in uuids:
        fault = _decode(read_bounded(leases.fd, fault_name(uuid), _MOST_BYTES))
        if fault is not None:
            found[uuid] = fault
    return found


def _decode(data: bytes) -> GpuFault | None:
    """Return the note in this line; None if it is empty, torn or makes no sense. Anybody may have written it."""
    if not data:
        return None
    import json

    try:
        raw = json.loads(data.decode("utf-8", "replace"))
        return GpuFault(as_time(raw["when"]), procfs.printable(str(raw["error"]))[:_MOST_CHARACTERS])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def write_fault(leases: StateDir, uuid: str, fault: GpuFault) -> None:
    """Note that a claim failed on this device, in place of any earlier note.

    Raises:
        StateDirError: the file cannot be opened or written.
    """
    import json

    error = procfs.printable(procfs.well_formed(fault.error))[:_MOST_CHARACTERS]
    line = json.dumps({"when": round(fault.when, 3), "error": error}, ensure_ascii=False).encode() + b"\n"
    name = fault_name(uuid)
    fd = leases.open_or_create(name)
    try:
        write_all(fd, line, os.path.join(leases.path, name))
    finally:
        os.close(fd)


def clear_fault(leases: StateDir, uuid: str) -> None:
    """Remove the note on a device, if there is one; empty it if only its owner may remove it.

    Raises:
        StateDirError: the file cannot be opened. OSError: it cannot be emptied.
    """
    if leases.unlink(fault_name(uuid)):
        return
    fd = leases.open(fault_name(uuid))
    if fd is None:
        return
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
