"""Why a file of the state directory is not used."""

import errno
import os
import stat

from ...errors import StateDirError
from ...host import procfs


def refusal(what: str, path: str, code: int | None) -> StateDirError:
    """Return the error that says so, with the way out that is always there; ``code`` is an errno."""
    return StateDirError(f"{what}, or set SAFE_GPU_DIR to another directory", path=path, errno=code)


def refusal_of_error(path: str, err: OSError) -> StateDirError:
    """Return why it cannot be opened or made."""
    if err.errno in (errno.ELOOP, errno.EMLINK):
        what = f"{path} is a symbolic link, which is never followed: remove it"
    elif err.errno in (errno.EACCES, errno.EPERM):
        what = f"{path} is closed to user {os.geteuid()} ({err.strerror}): ask its owner or root to remove it"
    elif err.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"no room for {path} ({err.strerror}): free some space there"
    elif err.errno in (errno.EMFILE, errno.ENFILE):
        what = f"{path} cannot be opened ({err.strerror}): let this process open more (ulimit -n)"
    elif err.errno == errno.EROFS:
        what = f"{path} is on a read-only file system"
    else:
        what = f"{path} cannot be opened ({err.strerror})"
    return refusal(what, path, err.errno)


def refusal_of_status(path: str, status: os.stat_result) -> StateDirError:
    """Return why a file of this kind, or with this mode, is not used."""
    owner = f"its owner {procfs.user_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):
        what, code = f"{path} is a symbolic link, which is never followed: remove it", errno.ELOOP
    elif not stat.S_ISREG(status.st_mode):
        what, code = f"{path} is not a regular file: ask {owner} or root to remove it", errno.EINVAL
    else:
        mode, code = stat.S_IMODE(status.st_mode), errno.EPERM
        names = f"{status.st_nlink} names (hard links) and " if status.st_nlink > 1 else ""
        what = f"{path} has {names}mode {mode:04o} in place of 0666, so it may be somebody's file from elsewhere, which"
        what += f" is not to be written to: ask {owner} or root to remove this name"
    return refusal(what, path, code)


def linked(path: str, other: str) -> StateDirError:
    """Return why a lease is not used that is the same file as another one. Its owner need not be who linked it."""
    what = f"{path} is closed: a hard link to {os.path.basename(other)}; who made it is not known"
    return refusal(f"{what}: ask root to remove it", path, errno.EMLINK)


def to_root(path: str, uid: int) -> StateDirError:
    """Return why root makes no file here: under a name, the owner of the directory could replace it meanwhile."""
    what = f"{path} belongs to {procfs.user_name(uid)}, and root makes a file in there only before it has a name "
    what += "(O_TMPFILE, and /proc), which is not possible here: give the directory to root"
    return refusal(what, path, errno.EPERM)


def under_file_lease(path: str, status: os.stat_result) -> StateDirError:
    """Return why it cannot be opened now: a file lease (F_SETLEASE in fcntl(2)), which only its owner or root can
    take."""
    user = procfs.user_name(status.st_uid)
    pids = procfs.flock_holders({status.st_ino}).get(status.st_ino, [])
    by = f", by process {pids[0]}" if pids else ""
    what = f"{path} is kept under a file lease (F_SETLEASE) by its owner {user}{by}: ask {user} or root to end that"
    return refusal(what, path, errno.EWOULDBLOCK)
