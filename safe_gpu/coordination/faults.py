"""On which GPUs a claim failed.

Each user notes that in a file of its own, ``faults/UUID.UID``, which counts if that user is its owner. It proves
nothing: it only makes other GPUs the better choice for a day, or for as long as the note says, if that is less.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from ..errors import StateDirError
from ..gpus.devices import LAST_CHOICE, GpuFault
from ..host.foreign_files import as_seconds, as_text, as_time, open_to_read, printable, well_formed
from .directory import Directory, SharedDirectory

_DIRECTORY = "faults"
_MOST_BYTES = 4096
_MOST_CHARACTERS = 400
_MOST_NAMES = 4096  # that are listed: anybody can make more
_MOST_NOTES = 64  # of a GPU that are read: anybody can make more names


def read_faults(state_dir: str | SharedDirectory, uuids: Iterable[str]) -> dict[str, GpuFault]:
    """Return UUID -> the latest note of any user, of the GPUs that have one that counts.

    A note of this user counts until it is cleared, however old it is.

    Args:
        state_dir: its path, or that directory while it is open.
    """
    if isinstance(state_dir, SharedDirectory) and not state_dir.has(_DIRECTORY):
        return {}
    found: dict[str, GpuFault] = {}
    number_of_notes: Counter[str] = Counter()
    uuid_of = {_stem(uuid): uuid for uuid in uuids}
    with suppress(StateDirError, FileNotFoundError), Directory(state_dir, _DIRECTORY, make=False) as directory:
        names = directory.names(_MOST_NAMES)
        own_names = []
        if names:
            own_names = [_own_name(uuid) for uuid in uuid_of.values()]  # first: these are read however many others are
        for name in (*own_names, *names):
            uuid = uuid_of.get(name.rpartition(".")[0])
            if uuid is None or number_of_notes[uuid] == _MOST_NOTES:
                continue
            number_of_notes[uuid] += 1
            fault = _read(directory, name)
            if fault is not None and (uuid not in found or fault.when > found[uuid].when):
                found[uuid] = fault
    return found


def _stem(uuid: str) -> str:
    return uuid.replace("/", "_")


def _own_name(uuid: str) -> str:
    return f"{_stem(uuid)}.{os.geteuid()}"


def _read(directory: Directory, name: str) -> GpuFault | None:
    """Return the note in a file; None if it is of another user than its name says, too old, or not valid."""
    try:
        with open_to_read(name, os.O_NOFOLLOW, directory.fd) as file:
            uid = os.fstat(file.fileno()).st_uid
            facts = json.loads((file.read(_MOST_BYTES) or b"").decode("utf-8", "replace"))
        lasts = as_seconds(facts.get("for"), 1) or LAST_CHOICE
        fault = GpuFault(as_time(facts["when"]), as_text(facts["error"], _MOST_CHARACTERS), min(lasts, LAST_CHOICE))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    if not name.endswith(f".{uid}"):
        return None
    if uid != os.geteuid() and abs(time.time() - fault.when) >= fault.lasts:
        return None
    return fault


def write_fault(state_dir: str, uuid: str, fault: GpuFault) -> None:
    """Note that a claim of this user failed on a GPU, in place of its earlier note.

    Raises:
        StateDirError, OSError: it cannot be written.
    """
    error = printable(well_formed(fault.error))[:_MOST_CHARACTERS]
    facts: dict[str, object] = {"when": round(fault.when, 3), "error": error}
    if fault.lasts != LAST_CHOICE:
        facts["for"] = round(fault.lasts)
    line = json.dumps(facts, ensure_ascii=False).encode() + b"\n"
    with Directory(state_dir, _DIRECTORY) as directory:
        with suppress(FileNotFoundError):
            os.unlink(_own_name(uuid), dir_fd=directory.fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        fd = os.open(_own_name(uuid), flags, 0o600, dir_fd=directory.fd)
        try:
            os.fchmod(fd, 0o644)
            os.write(fd, line)
        finally:
            os.close(fd)


def clear_fault(state_dir: str, uuid: str) -> None:
    """Remove the note of this user on a GPU, if there is one. Those of others count until they are old.

    Raises:
        StateDirError, OSError: it cannot be removed.
    """
    with suppress(FileNotFoundError), Directory(state_dir, _DIRECTORY, make=False) as directory:
        os.unlink(_own_name(uuid), dir_fd=directory.fd)
