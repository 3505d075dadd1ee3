"""Directories that everyone may use appear finished, with mode 1777."""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress

from .. import procfs
from ..errors import StateDirError

PARTS = ("leases", "queue", "history")
"""The directories in the state directory."""

# O_NONBLOCK: the owner of a file may hold a file lease on it (F_SETLEASE), and then open(2) blocks for 45 seconds.
OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
DIR_MODE = 0o1777

RULE = "/etc/tmpfiles.d/safe-gpu.conf"
"""Makes the state directory root's at boot."""

_RENAME_NOREPLACE = 1

# What a kernel, a file system or a seccomp filter answers that has no renameat2, or not this flag.
NO_RENAME = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)


def make_directory(name: str, path: str, parent: int | None) -> None:
    """Make a directory of mode 1777, whatever the umask, unless another process is faster.

    It is made under another name, which begins with a dot, and renamed when it is ready. A process that is killed here
    leaves nothing with the final name that others cannot use. Its mode is set through a descriptor: the owner of the
    directory above may replace names there, and a link in the place of the new directory is not followed.

    Args:
        name: absolute, or below ``parent``, which is the descriptor of a directory.
        path: the same as an absolute path, for messages.

    Raises:
        StateDirError: no room, a read-only file system, a parent that is missing or closed.
    """
    try:
        _make_finished(name, parent)
    except FileExistsError:
        pass
    except OSError as err:
        if err.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(path)):
            what = f"{os.path.dirname(path)} does not exist: create it"
        elif err.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"no room for {path} ({err.strerror}): free some space there"
        else:
            what = f"{path} cannot be created ({err.strerror}): make it with mode 1777"
        raise StateDirError(f"{what}, or set SAFE_GPU_DIR to another directory", path=path, errno=err.errno) from err


def open_to_all(fd: int) -> bool:
    """Give an open directory mode 1777. Returns False for one that is not ours or holds something, and is left alone:
    somebody may have pointed SAFE_GPU_DIR at a home, or put another directory in the place of the one just made."""
    if os.fstat(fd).st_uid != os.geteuid() or os.listdir(fd):
        return False
    os.fchmod(fd, DIR_MODE)
    return True


def _make_finished(name: str, parent: int | None) -> None:
    above, _, last = name.rpartition("/")
    temporary = f"{above}/" if above or name.startswith("/") else ""
    temporary += f".{last}.{os.getpid()}.{time.monotonic_ns():x}"
    os.mkdir(temporary, 0o700, dir_fd=parent)
    try:
        made = _open_up(temporary, parent)
        if not os.path.samestat(os.stat(temporary, dir_fd=parent, follow_symlinks=False), made):
            raise _replaced(temporary)
        failure = rename_new(temporary, name, parent)
        if failure not in (0, *NO_RENAME):
            raise OSError(failure, os.strerror(failure))
    finally:
        with suppress(OSError):  # it was renamed
            os.rmdir(temporary, dir_fd=parent)
    if failure:
        os.mkdir(name, 0o777, dir_fd=parent)
        _open_up(name, parent)


def _open_up(name: str, parent: int | None) -> os.stat_result:
    """Set the mode of a directory that was just made.

    Raises:
        PermissionError: another one stands there by now.
    """
    fd = os.open(name, OPEN_DIR, dir_fd=parent)
    try:
        if not open_to_all(fd):
            raise _replaced(name)
        return os.fstat(fd)
    finally:
        os.close(fd)


def _replaced(name: str) -> PermissionError:
    return PermissionError(errno.EPERM, "somebody replaced it while it was made", name)


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


def why_unusable(name: str, path: str, parent: int | None, err: OSError) -> StateDirError:
    """Why a directory cannot be opened, and what to do; the arguments are those of :func:`make_directory`."""
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


def risk_of_owner(path: str, uid: int) -> str:
    """What is to be said of a state directory that belongs to another user, after its path; "" if nothing is.

    Who is not root is told only where names may not protect a claim: in a network namespace of its own. Those of other
    processes cannot be read, but the host's has the network interfaces that are devices.
    """
    owner = procfs.user_name(uid)
    if os.geteuid() == 0:
        return f"belongs to {owner}, who can remove root's files in it: as root: {root_owns(path)}"
    if _sees_network_devices():
        return ""
    return (
        f"belongs to {owner}, who can remove the leases in it, and claims in a network namespace of their own, as this "
        f"one's seems to be, have nothing else: ask root to run: {root_owns(path)}"
    )


def root_owns(path: str) -> str:
    """The commands that give the state directory to root, now and at boot."""
    import shlex

    names = shlex.join([path, *(os.path.join(path, part) for part in PARTS)])
    # The owner may put a link in the place of one of them meanwhile, so -h.
    return f"chown -h root:root {names}; printf 'd %s 1777 root root -\\n' {names} > {RULE}"


def _sees_network_devices() -> bool:
    """Whether an interface of this network namespace is a device. /sys may be of another one, so it is not listed."""
    from _socket import if_nameindex  # the module socket takes 15 ms to import

    try:
        return any(os.path.exists(f"/sys/class/net/{name}/device") for _, name in if_nameindex())
    except OSError:
        return False
