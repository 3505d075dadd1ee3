"""What is noted of GPUs: which are closed to new claims, and on which a claim failed.

They are closed for good or for a time, by the word of root or of the owner of the state directory. That a claim failed,
each user notes in a file of its own, ``faults/UUID.UID``, which counts if that user is its owner. It proves nothing: it
only makes other GPUs the better choice for a day, or for as long as the note says, if that is less.
"""

import json
import os
import stat
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from ..errors import StateDirError
from ..gpus.devices import LAST_CHOICE, GpuFault
from ..gpus.windows import Window, parse_closed, why_reserved
from ..host import procfs, programs
from ..host.foreign_files import MOST_BYTES, as_seconds, as_text, as_time, open_to_read, printable, well_formed
from ..settings.variables import policy_directory
from .directory import Directory, SharedDirectory, state_dir_path

_CLOSED = "closed"

_FAULTS = "faults"
_LONGEST_LINE = 1000  # characters of a file of closed GPUs that are read
_MOST_BYTES = 4096
_MOST_CHARACTERS = 400
_MOST_NAMES = 4096  # that are listed: anybody can make more
_MOST_NOTES = 64  # of a GPU that are read: anybody can make more names


class Closed(NamedTuple):
    """What a file of closed GPUs says.

    Attributes:
        user: who wrote it.
        reasons: UUID -> why it is drained.
        windows: the times in which GPUs are reserved.
        doubt: why the file, or some of its lines, are ignored; "" if all of it counts.
    """

    user: str = ""
    reasons: Mapping[str, str] = MappingProxyType({})
    windows: tuple[Window, ...] = ()
    doubt: str = ""


def closed_file(*, by_root: bool) -> str:
    """Return the path of root's file, beside its settings of the host, or of the one in the state directory."""
    return f"{policy_directory(os.environ) if by_root else state_dir_path()}/{_CLOSED}"


def has_closed_file(state_dir: SharedDirectory) -> bool:
    """Return whether one of the files is there."""
    return state_dir.has(_CLOSED) or os.access(closed_file(by_root=True), os.F_OK)


def read_closed(*, by_root: bool, state_dir: str = "") -> Closed:
    """Return what root has closed, or the owner of the state directory; nothing by the word of anybody else.

    Args:
        state_dir: another one than that of this process.
    """
    path = os.path.join(state_dir, _CLOSED) if state_dir else closed_file(by_root=by_root)
    try:
        # No path into the state directory is followed.
        above = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | (0 if by_root else os.O_NOFOLLOW))
    except OSError:
        return Closed()
    try:
        owner = 0 if by_root else os.fstat(above).st_uid
        with open_to_read(_CLOSED, os.O_NOFOLLOW, above) as file:
            status = os.fstat(file.fileno())
            user = procfs.user_name(status.st_uid)
            doubt = _doubt(status, user, owner)
            text = "" if doubt else (file.read(MOST_BYTES) or b"").decode("utf-8", "replace")
    except FileNotFoundError:
        return Closed()
    except OSError as err:
        doubt = f"cannot be read ({err.strerror})"
    finally:
        os.close(above)
    if doubt:
        return Closed(doubt=f"{path} {doubt}: it is ignored, and closes no GPU")
    lines = [printable(line[:_LONGEST_LINE]) for line in text.split("\n")]
    reasons, windows, wrong = parse_closed(lines, user)
    if wrong:
        doubt = f"{path} has a line that closes no GPU, and is ignored: {wrong[0][:100]}"
    return Closed(user, reasons, windows, doubt)


def _doubt(status: os.stat_result, user: str, owner: int) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"is no regular file, and belongs to {user}"
    if status.st_uid not in (0, owner):
        return f"belongs to {user}, and the directory does not"
    if status.st_size > MOST_BYTES:
        return f"of {user} has more than {MOST_BYTES} bytes"
    return f"of {user} can be written by others" if status.st_mode & 0o022 else ""


def drained_gpus() -> dict[str, str]:
    """Return UUID -> why nobody may claim it now: ``drained by root: a fan is broken``."""
    found = {}
    for closed in (read_closed(by_root=False), read_closed(by_root=True)):
        for uuid, reason in closed.reasons.items():
            found[uuid] = f"drained by {closed.user}" + (f": {reason}" if reason else "")
    return found


def all_windows() -> tuple[Window, ...]:
    """Return the times in which GPUs are reserved, those that are over too."""
    return read_closed(by_root=False).windows + read_closed(by_root=True).windows


_admitted: dict[tuple[str, int], bool] = {}


def find_admitted(windows: Iterable[Window], uids: Iterable[int]) -> None:
    """Find out which of these users the windows are for. A directory service may be asked, so no lock may be held."""
    for whom, uid in ((window.whom, uid) for uid in uids for window in windows):
        if (whom, uid) not in _admitted:
            from ..settings import config as policy

            kind, _, name = whom.partition(":")
            in_group = kind == "group" and policy.gid_of(name) in policy.gids_of(uid)
            is_for = in_group or (kind == "user" and policy.uid_of(name) == uid)
            _admitted[whom, uid] = is_for or (uid == 0 and (os.geteuid() != 0 or programs.is_root()))


def binding(windows: Iterable[Window], uid: int) -> list[Window]:
    """Return the windows that are not for a user, as far as :func:`find_admitted` has found out. None binds root."""
    return [window for window in windows if not _admitted.get((window.whom, uid))]


def closed_now() -> dict[str, str]:
    """Return UUID -> why this user may not claim it now: it is drained, or reserved for others at this moment."""
    windows = all_windows()
    find_admitted(windows, [os.geteuid()])
    return {**why_reserved(binding(windows, os.geteuid()), time.time(), 0.0), **drained_gpus()}


def ignored_closed() -> tuple[str, ...]:
    """Return what is ignored of these files and why, a sentence for each."""
    return tuple(filter(None, (read_closed(by_root=by_root).doubt for by_root in (False, True))))


def _stem(uuid: str) -> str:
    return uuid.replace("/", "_")


def _own_name(uuid: str) -> str:
    return f"{_stem(uuid)}.{os.geteuid()}"


def read_faults(state_dir: str | SharedDirectory, uuids: Iterable[str]) -> dict[str, GpuFault]:
    """Return UUID -> the latest note of any user, of the GPUs that have one that counts.

    A note of this user counts until it is cleared, however old it is.

    Args:
        state_dir: its path, or that directory while it is open.
    """
    found: dict[str, GpuFault] = {}
    if not (isinstance(state_dir, str) or state_dir.has(_FAULTS)):  # as almost always
        return found
    looked_at: Counter[str] = Counter()
    with suppress(StateDirError, FileNotFoundError), Directory(state_dir, _FAULTS, make=False) as directory:
        names = directory.names(_MOST_NAMES)
        wanted = {_stem(uuid): uuid for uuid in uuids} if names else {}  # almost always there are none
        for name in (*map(_own_name, wanted), *names):
            uuid = wanted.get(name.rpartition(".")[0])
            if uuid is None or looked_at[uuid] == _MOST_NOTES:
                continue
            looked_at[uuid] += 1
            fault = _read(directory, name)
            if fault is not None and (uuid not in found or fault.when > found[uuid].when):
                found[uuid] = fault
    return found


def _read(directory: Directory, name: str) -> GpuFault | None:
    """Return the note in a file; None if it is of another user than its name says, too old, or makes no sense."""
    try:
        with open_to_read(name, os.O_NOFOLLOW, directory.fd) as file:
            uid = os.fstat(file.fileno()).st_uid
            said = json.loads((file.read(_MOST_BYTES) or b"").decode("utf-8", "replace"))
        lasts = as_seconds(said.get("for"), 1) or LAST_CHOICE
        fault = GpuFault(as_time(said["when"]), as_text(said["error"], _MOST_CHARACTERS), min(lasts, LAST_CHOICE))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    counts = uid == os.geteuid() or abs(time.time() - fault.when) < fault.lasts
    return fault if counts and name.endswith(f".{uid}") else None


def write_fault(state_dir: str, uuid: str, fault: GpuFault) -> None:
    """Note that a claim of this user failed on a GPU, in place of its earlier note.

    Raises:
        StateDirError, OSError: it cannot be written.
    """
    error = printable(well_formed(fault.error))[:_MOST_CHARACTERS]
    said: dict[str, object] = {"when": round(fault.when, 3), "error": error}
    if fault.lasts != LAST_CHOICE:
        said["for"] = round(fault.lasts)
    line = json.dumps(said, ensure_ascii=False).encode() + b"\n"
    with Directory(state_dir, _FAULTS) as directory:
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
    with suppress(FileNotFoundError), Directory(state_dir, _FAULTS, make=False) as directory:
        os.unlink(_own_name(uuid), dir_fd=directory.fd)
