"""GPUs closed to new claims, for good or for a time, by the word of root or of the owner of the state directory."""

import os
import stat
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...errors import StateDirError
from ...gpus.windows import Window, parse_windows, why_reserved
from ...host import procfs, programs
from ...host.foreign_files import LIMIT, open_to_read
from ..files.location import CLOSING, drain_file
from ..files.state_dir import StateDir
from ..state_dir import state_dir_path


class Drains(NamedTuple):
    """What one of these files says: the user who wrote it, and UUID -> reason, or windows; or why it is ignored."""

    user: str = ""
    reasons: Mapping[str, str] = MappingProxyType({})
    windows: tuple[Window, ...] = ()
    doubt: str = ""


def drained_gpus() -> dict[str, str]:
    """Return UUID -> why nobody may claim it now: ``drained by root: a fan is broken``."""
    found = {}
    for drains in (read_drained(by_root=False), read_drained(by_root=True)):
        for uuid, reason in drains.reasons.items():
            found[uuid] = f"drained by {drains.user}" + (f": {reason}" if reason else "")
    return found


def all_windows() -> tuple[Window, ...]:
    """Return the times in which GPUs are reserved, those that are over too."""
    here, root = (read_drained(by_root=by_root, name="windows").windows for by_root in (False, True))
    return here + root


_admitted: dict[tuple[str, int], bool] = {}


def find_admitted(windows: Iterable[Window], uids: Iterable[int]) -> None:
    """Find out which of these users the windows are for. A directory service may be asked, so no lock may be held."""
    for whom, uid in ((window.whom, uid) for uid in uids for window in windows):
        if (whom, uid) not in _admitted:
            from ...settings import policy

            kind, _, name = whom.partition(":")
            is_for = policy.is_in_group(uid, name) if kind == "group" else kind != "" and policy.uid_of(name) == uid
            _admitted[whom, uid] = is_for or (uid == 0 and (os.geteuid() != 0 or programs.is_root()))


def binding(windows: Iterable[Window], uid: int) -> list[Window]:
    """Return the windows that are not for a user, as far as :func:`find_admitted` has found out. None binds root."""
    return [window for window in windows if not _admitted.get((window.whom, uid))]


def closed_now() -> dict[str, str]:
    """Return UUID -> why this user may not claim it now: it is drained, or reserved for others at this moment."""
    windows = all_windows()
    find_admitted(windows, [os.geteuid()])
    return {**why_reserved(binding(windows, os.geteuid()), time.time(), 0.0), **drained_gpus()}


def ignored_drains() -> tuple[str, ...]:
    """Return why files of drained or reserved GPUs are ignored, a sentence for each that is."""
    files = ((root, name) for root in (False, True) for name in CLOSING)
    return tuple(filter(None, (read_drained(by_root=root, name=name).doubt for root, name in files)))


def read_drained(*, by_root: bool, state_dir: str = "", name: str = "drained") -> Drains:
    """Return what root has drained, or the owner of the state directory; nothing by the word of anybody else.

    Args:
        state_dir: another one than that of this process.
        name: of the file: ``windows`` has the reserved GPUs.
    """
    path = drain_file(by_root=True, name=name) if by_root else os.path.join(state_dir or state_dir_path(), name)
    if by_root and not os.path.lexists(path):
        return Drains()
    try:
        if by_root:
            file, owner = open_to_read(path, os.O_NOFOLLOW), 0
        else:
            with StateDir(os.path.dirname(path), make=False) as root:  # no path into it is followed
                file, owner = open_to_read(name, os.O_NOFOLLOW, root.fd), os.fstat(root.fd).st_uid
        with file:
            status = os.fstat(file.fileno())
            user = procfs.user_name(status.st_uid)
            doubt = _doubt_of_drains(status, user, owner)
            text = "" if doubt else (file.read(LIMIT) or b"").decode("utf-8", "replace")
        if not doubt:
            lines = [line for line in map(procfs.printable, text.split("\n")) if line]
            if name == "windows":
                return Drains(user, windows=parse_windows(lines, user))
            return Drains(user, {uuid: reason for uuid, _, reason in (line.partition(" ") for line in lines)})
    except (FileNotFoundError, NotADirectoryError, StateDirError):
        return Drains()
    except ValueError:
        doubt = "has a line that is no window, or too many of them"
    except OSError as err:
        doubt = f"cannot be read ({err.strerror})"
    return Drains(doubt=f"{path} {doubt}: it is ignored, and {'drains' if name == 'drained' else 'reserves'} no GPU")


def _doubt_of_drains(status: os.stat_result, user: str, owner: int) -> str:
    if not stat.S_ISREG(status.st_mode):
        return f"is no regular file, and belongs to {user}"
    if status.st_uid not in (0, owner):
        return f"belongs to {user}, and the directory does not"
    if status.st_size > LIMIT:
        return f"of {user} has more than {LIMIT} bytes"
    return f"of {user} can be written by others" if status.st_mode & 0o022 else ""
