"""Why a file or a directory is not used as the state directory or in it.

``SAFE_GPU_DIR`` may name any directory or file of the system, or a user's own. So nobody is told to remove a directory,
to open it to all, or to change what is mounted there; only files that carry the name of a lock or a lease.
"""

import errno
import os
import stat

from ...errors import StateDirError
from ...host import procfs
from .location import DEFAULT_DIR


def refusal(what: str, path: str, code: int | None, way_out: str = "") -> StateDirError:
    """Return the error that says so, with the way out that is always there; ``code`` is an errno."""
    if not way_out and f"{path}/".startswith(f"{DEFAULT_DIR}/"):
        way_out = "ask root to run safe-gpu setup"
    way_out += ", or " if way_out else ""
    return StateDirError(f"{what}: {way_out}set SAFE_GPU_DIR to another directory", path=path, errno=code)


def refusal_of_error(path: str, err: OSError, *, verb: str = "opened", closed: str = "") -> StateDirError:
    """Return why it cannot be opened or made. ``closed`` is the way out of one that is closed to this user."""
    what, way_out = f"{path} cannot be {verb} ({err.strerror})", ""
    if err.errno in (errno.ELOOP, errno.EMLINK):
        what, way_out = f"{path} is a symbolic link, which is never followed", closed
    elif err.errno == errno.ENOTDIR and verb == "opened":
        what = f"{path} is not a directory"
    elif err.errno in (errno.EACCES, errno.EPERM) and verb == "opened":
        what, way_out = f"{path} is closed to user {os.geteuid()} ({err.strerror})", closed
    elif err.errno in (errno.ENOSPC, errno.EDQUOT):
        what, way_out = f"no room for {path} ({err.strerror})", "free some space there"
    elif err.errno in (errno.EMFILE, errno.ENFILE):
        way_out = "let this process open more (ulimit -n)"
    elif err.errno == errno.EROFS:
        what = f"{path} is on a read-only file system"
    return refusal(what, path, err.errno, way_out)


def refusal_of_status(path: str, status: os.stat_result) -> StateDirError:
    """Return why a file of this kind, or with this mode, is not used."""
    way_out = f"ask its owner {procfs.user_name(status.st_uid)} or root to remove this name"
    if stat.S_ISLNK(status.st_mode):
        what, code = f"{path} is a symbolic link, which is never followed", errno.ELOOP
    elif not stat.S_ISREG(status.st_mode):
        what, code = f"{path} is not a regular file", errno.EINVAL
    else:
        mode, code = stat.S_IMODE(status.st_mode), errno.EPERM
        names = f"{status.st_nlink} names (hard links) and " if status.st_nlink > 1 else ""
        what = f"{path} has {names}mode {mode:04o} in place of 0666, so it may be somebody's file from elsewhere, which"
        what += " is not to be written to"
    return refusal(what, path, code, way_out)


def linked(path: str, other: str) -> StateDirError:
    """Return why a lease is not used that is the same file as another one. Its owner need not be who linked it."""
    what = f"{path} is closed: a hard link to {os.path.basename(other)}; who made it is not known"
    return refusal(what, path, errno.EMLINK, "ask root to remove this name")


def to_root(path: str, uid: int) -> StateDirError:
    """Return why root makes no file here: under a name, the owner of the directory could replace it meanwhile."""
    what = f"{path} belongs to {procfs.user_name(uid)}, and root makes a file in there only before it has a name "
    what += "(O_TMPFILE, and /proc), which is not possible here"
    return refusal(what, path, errno.EPERM)


def under_file_lease(path: str, status: os.stat_result) -> StateDirError:
    """Return why it cannot be opened now: a file lease (F_SETLEASE in fcntl(2)), which only its owner or root can
    take."""
    user = procfs.user_name(status.st_uid)
    pids = procfs.flock_holders({status.st_ino}).get(status.st_ino, [])
    by = f", by process {pids[0]}" if pids else ""
    what = f"{path} is kept under a file lease (F_SETLEASE) by its owner {user}{by}"
    return refusal(what, path, errno.EWOULDBLOCK, f"ask {user} or root to end that")
