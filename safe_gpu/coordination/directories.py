"""Directories that everyone may use appear finished, with mode 1777: loaded only where one is missing or closed."""

from __future__ import annotations

import errno
import os
import stat
import time

from ..errors import StateDirError

__all__ = ["NO_RENAME", "make", "rename_new", "unusable"]

_MODE = 0o1777
_RENAME_NOREPLACE = 1

# What a kernel, a file system or a seccomp filter answers that has no renameat2, or not this flag.
NO_RENAME = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)


def make(name: str, path: str, parent: int | None) -> bool:
    """Make a directory of mode 1777, whatever the umask.

    It is made under another name, which begins with a dot, and renamed when it is ready. A process that is killed here
    leaves nothing with the final name that others cannot use. Where renaming without replacing is not to be had, the
    directory is made by mkdir and the caller sets its mode.

    Args:
        name: absolute, or below ``parent``, which is the descriptor of a directory.
        path: the same as an absolute path, for messages.

    Returns:
        Whether it was made; False where another process was faster.

    Raises:
        StateDirError: no room, a read-only file system, a parent that is missing or closed.
    """
    try:
        made = _make_finished(name, parent)
        if made is None:
            os.mkdir(name, 0o777, dir_fd=parent)
            made = True
    except FileExistsError:
        return False
    except OSError as err:
        if err.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(path)):
            what = f"{os.path.dirname(path)} does not exist: create it"
        elif err.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"no room for {path} ({err.strerror}): free some space there"
        else:
            what = f"{path} cannot be created ({err.strerror}): make it with mode 1777"
        raise StateDirError(f"{what}, or set SAFE_GPU_DIR to another directory", path=path, errno=err.errno) from err
    return made


def _make_finished(name: str, parent: int | None) -> bool | None:
    """True where it was made, False where the name is taken, None where it cannot be renamed into place."""
    above, _, last = name.rpartition("/")
    temporary = f"{above}/" if above or name.startswith("/") else ""
    temporary += f".{last}.{os.getpid()}.{time.monotonic_ns():x}"
    os.mkdir(temporary, 0o700, dir_fd=parent)
    try:
        os.chmod(temporary, _MODE, dir_fd=parent)
        failure = rename_new(temporary, name, parent)
    except BaseException:
        os.rmdir(temporary, dir_fd=parent)
        raise
    if failure == 0:
        return True
    os.rmdir(temporary, dir_fd=parent)
    if failure in NO_RENAME:
        return None
    if failure == errno.EEXIST:
        return False
    raise OSError(failure, os.strerror(failure))


def rename_new(source: str, target: str, parent: int | None) -> int:
    """renameat2(2) with RENAME_NOREPLACE; returns 0 or the error number."""
    try:
        import ctypes

        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (ImportError, OSError, AttributeError):
        return errno.ENOSYS
    directory = -100 if parent is None else parent  # AT_FDCWD
    if renameat2(directory, os.fsencode(source), directory, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE)) == 0:
        return 0
    return ctypes.get_errno()


def unusable(name: str, path: str, parent: int | None, err: OSError) -> StateDirError:
    """Why a directory cannot be opened, and what to do; the arguments are those of :func:`make`."""
    try:
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except OSError:
        status = None
    if status is not None and stat.S_ISLNK(status.st_mode):
        what = f"{path} is a symbolic link, which is never followed: remove it"
    elif err.errno == errno.ENOTDIR:
        what = f"{path} is not a directory: remove it"
    elif err.errno in (errno.EMFILE, errno.ENFILE):
        what = f"{path} cannot be opened ({err.strerror}): let this process open more (ulimit -n)"
    elif err.errno == errno.EACCES:
        what = f"{path} is closed to user {os.geteuid()}: ask its owner for mode 1777 or root to remove it"
    else:
        what = f"{path} cannot be opened ({err.strerror})"
    return StateDirError(f"{what}, or set SAFE_GPU_DIR to another directory", path=path, errno=err.errno)
