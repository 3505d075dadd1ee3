"""Which GPUs are closed to new claims: drained until they are resumed, or reserved for a time.

Only root and the owner of the state directory can close GPUs.
"""

import os
import stat
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ..gpus.windows import Window, parse_closed, why_reserved
from ..host import procfs, programs
from ..host.foreign_files import MOST_BYTES, open_to_read, printable
from ..settings.variables import policy_directory
from .directory import SharedDirectory, state_dir_path

_NAME = "closed"

_LONGEST_LINE = 1000  # characters that are read


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
    if by_root:
        return f"{policy_directory(os.environ)}/{_NAME}"
    return f"{state_dir_path()}/{_NAME}"


def has_closed_file(state_dir: SharedDirectory) -> bool:
    """Return whether one of the files is there."""
    return state_dir.has(_NAME) or os.access(closed_file(by_root=True), os.F_OK)


def read_closed(*, by_root: bool, state_dir: str = "") -> Closed:
    """Return what root or the owner of the state directory has closed. Files of anybody else are ignored.

    Args:
        state_dir: another one than that of this process.
    """
    path = closed_file(by_root=by_root)
    if state_dir:
        path = os.path.join(state_dir, _NAME)
    flags = os.O_PATH | os.O_DIRECTORY
    if not by_root:
        flags |= os.O_NOFOLLOW  # no path into the state directory is followed
    try:
        above = os.open(os.path.dirname(path), flags)
    except OSError:
        return Closed()
    try:
        user, text = _read(above, by_root=by_root)
    except FileNotFoundError:
        return Closed()
    except OSError as err:
        return _ignored(path, f"cannot be read ({err.strerror})")
    except _DoubtfulFileError as err:
        return _ignored(path, str(err))
    finally:
        os.close(above)
    lines = [printable(line[:_LONGEST_LINE]) for line in text.split("\n")]
    reasons, windows, wrong = parse_closed(lines, user)
    doubt = ""
    if wrong:
        doubt = f"{path} has a line that closes no GPU, and is ignored: {wrong[0][:100]}"
    return Closed(user, reasons, windows, doubt)


def _ignored(path: str, doubt: str) -> Closed:
    return Closed(doubt=f"{path} {doubt}: it is ignored, and closes no GPU")


class _DoubtfulFileError(Exception):
    """The file may be of somebody who closes no GPUs; the text says why."""


def _read(above: int, *, by_root: bool) -> tuple[str, str]:
    """Return who wrote the file in an open directory, and its text.

    Raises:
        OSError, _DoubtfulFileError: as they say.
    """
    owner = 0
    if not by_root:
        owner = os.fstat(above).st_uid
    with open_to_read(_NAME, os.O_NOFOLLOW, above) as file:
        status = os.fstat(file.fileno())
        user = procfs.user_name(status.st_uid)
        doubt = _doubt(status, user, owner)
        if doubt:
            raise _DoubtfulFileError(doubt)
        data = file.read(MOST_BYTES) or b""
    return user, data.decode("utf-8", "replace")


def _doubt(status: os.stat_result, user: str, owner: int) -> str:
    """Return why a file is ignored; "" for nothing."""
    if not stat.S_ISREG(status.st_mode):
        return f"is not a regular file, and belongs to {user}"
    if status.st_uid not in (0, owner):
        return f"belongs to {user}, and the directory does not"
    if status.st_size > MOST_BYTES:
        return f"of {user} has more than {MOST_BYTES} bytes"
    if status.st_mode & 0o022:
        return f"of {user} can be written by others"
    return ""


def drained_gpus() -> dict[str, str]:
    """Return UUID -> why nobody may claim it now: ``drained by root: a fan is broken``."""
    found = {}
    for closed in (read_closed(by_root=False), read_closed(by_root=True)):
        for uuid, reason in closed.reasons.items():
            found[uuid] = f"drained by {closed.user}"
            if reason:
                found[uuid] += f": {reason}"
    return found


def all_windows() -> tuple[Window, ...]:
    """Return the times in which GPUs are reserved, those that are over too."""
    return read_closed(by_root=False).windows + read_closed(by_root=True).windows


_admitted: dict[tuple[str, int], bool] = {}  # whom a window is for, and a user -> whether it is for that user


def look_up_admitted_users(windows: Iterable[Window], uids: Iterable[int]) -> None:
    """Find out which of these users the windows are for. A directory service may be asked, so no lock may be held."""
    whom = [window.whom for window in windows]
    for uid in uids:
        for one in whom:
            if (one, uid) not in _admitted:
                _admitted[one, uid] = _is_for(one, uid)


def _is_for(whom: str, uid: int) -> bool:
    """Return whether a window is for a user. One is for root, unless that is a user in a namespace of its own."""
    from ..settings import config as policy

    if uid == 0 and (os.geteuid() != 0 or programs.is_root()):
        return True
    kind, _, name = whom.partition(":")
    if kind == "user":
        return policy.uid_of(name) == uid
    if kind == "group":
        return policy.gid_of(name) in policy.gids_of(uid)
    return False


def windows_against(windows: Iterable[Window], uid: int) -> list[Window]:
    """Return the windows that are not for a user, as far as :func:`look_up_admitted_users` has found out. No window
    applies to root."""
    return [window for window in windows if not _admitted.get((window.whom, uid))]


def closed_now() -> dict[str, str]:
    """Return UUID -> why this user may not claim it now: it is drained, or reserved for others at this moment."""
    windows = all_windows()
    look_up_admitted_users(windows, [os.geteuid()])
    reserved = why_reserved(windows_against(windows, os.geteuid()), time.time(), 0.0)
    return {**reserved, **drained_gpus()}


def ignored_closed() -> tuple[str, ...]:
    """Return what is ignored of these files and why, a sentence for each."""
    doubts = (read_closed(by_root=False).doubt, read_closed(by_root=True).doubt)
    return tuple(doubt for doubt in doubts if doubt)
