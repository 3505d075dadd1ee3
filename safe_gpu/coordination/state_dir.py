"""Where the state directory is, and why it cannot be used.

``SAFE_GPU_DIR`` may name any directory or file of the system, or a user's own. So nobody is told to remove a directory,
to open it to all, or to change what is mounted there.
"""

import errno
import os
import stat
from contextlib import suppress
from functools import cache

from ..errors import StateDirError
from ..host import procfs
from ..settings.variables import host_setting

DEFAULT_DIR = "/tmp/safe-gpu"

ADMIN_DIR = "/var/lib/safe-gpu"
"""Where ``safe-gpu setup`` makes the state directory."""


def state_dir_path() -> str:
    """Return where the state directory is: ``SAFE_GPU_DIR``, else what root's file says, else ``/tmp/safe-gpu``;
    absolute.

    Raises:
        PolicyError: root's file has a mistake.
        StateDirError: ``SAFE_GPU_DIR`` is relative, and would name another directory in every working directory.
    """
    return _absolute(host_setting("state_dir", "SAFE_GPU_DIR", os.environ) or DEFAULT_DIR)


@cache  # every claim asks several times
def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise StateDirError(
            f"SAFE_GPU_DIR={path} is relative: started elsewhere, another process would use another directory and "
            "claim the same GPUs; set it to an absolute path",
            path=path,
        )
    return os.path.abspath(path)


def refusal(what: str, path: str, code: int | None, way_out: str = "") -> StateDirError:
    """Return the error that says so, with the way out that is always there; ``code`` is an errno."""
    if not way_out and f"{path}/".startswith(f"{DEFAULT_DIR}/"):
        way_out = "ask root to run safe-gpu setup"
    way_out += ", or " if way_out else ""
    return StateDirError(f"{what}: {way_out}set SAFE_GPU_DIR to another directory", path=path, errno=code)


def refusal_of_error(path: str, err: OSError, *, verb: str = "opened", closed: str = "") -> StateDirError:
    """Return why it cannot be opened or made. ``closed`` is the way out of one that is not what it should be."""
    what, way_out = f"{path} cannot be {verb} ({err.strerror})", closed
    if err.errno in (errno.ELOOP, errno.EMLINK):
        what = f"{path} is a symbolic link, which is never followed"
    elif err.errno == errno.ENOTDIR and verb == "opened":
        what = f"{path} is not a directory, or it is a symbolic link, which is never followed"
    elif err.errno == errno.EWOULDBLOCK:
        what, way_out = f"{path} is kept under a file lease (F_SETLEASE)", "ask its owner or root to end that"
    elif err.errno in (errno.EACCES, errno.EPERM) and verb == "opened":
        what = f"{path} is closed to user {os.geteuid()} ({err.strerror})"
    elif err.errno in (errno.ENOSPC, errno.EDQUOT):
        what, way_out = f"no room for {path} ({err.strerror})", "free some space there"
    elif err.errno in (errno.EMFILE, errno.ENFILE):
        way_out = "let this process open more (ulimit -n)"
    elif err.errno == errno.EROFS:
        what, way_out = f"{path} is on a read-only file system", ""
    return refusal(what, path, err.errno, way_out)


def refusal_of_status(path: str, status: os.stat_result) -> StateDirError:
    """Return why a file of this kind, or with this mode, is not used."""
    names = f"{status.st_nlink} names (hard links) and " if status.st_nlink > 1 else ""
    what = f"{path} has {names}mode {stat.S_IMODE(status.st_mode):04o} in place of 0666, so it may be somebody's file"
    what += " from elsewhere, which is not to be written to"
    if not stat.S_ISREG(status.st_mode):
        what = f"{path} is not a regular file"
    way_out = f"ask its owner {procfs.user_name(status.st_uid)} or root to remove this name"
    return refusal(what, path, errno.EPERM, way_out)


def setup_command(path: str) -> str:
    """Return the command by which root makes a state directory its own, in place of this one or of its files."""
    from shlex import quote

    return "safe-gpu setup" + ("" if path in (ADMIN_DIR, DEFAULT_DIR) else f" --state-dir {quote(path)}")


def remover_of(path: str, user: int) -> int | None:
    """Return who can remove entries of this user, being neither that user nor root: the owner of the state directory or
    of ``claims``, sticky bit or not; None for nobody."""
    with suppress(OSError):
        owners = (os.stat(one, follow_symlinks=False).st_uid for one in (path, f"{path}/claims"))
        return next((uid for uid in owners if uid not in (0, user)), None)
    return None
