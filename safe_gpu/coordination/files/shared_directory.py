"""A directory of mode 1777 that everyone may use: it appears finished, or not at all."""

import errno
import os
import stat
import time
from contextlib import suppress

from ...errors import StateDirError
from .refusals import refusal, refusal_of_error

# How long another's first use may take between its mkdir and its chmod.
_CREATION_PATIENCE = 1.0


def open_shared(name: str, path: str, parent: int | None, *, make: bool) -> int:
    """Open a directory that everyone may use."""
    deadline = time.monotonic() + _CREATION_PATIENCE
    while True:
        try:
            fd = os.open(name, OPEN_DIR, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
            make_directory(name, path, parent)
            continue
        except OSError as err:
            if err.errno == errno.EACCES and time.monotonic() < deadline:
                time.sleep(0.005)
                continue
            raise why_unusable(name, path, parent, err) from err
        try:
            if _is_ready(fd, make=make):
                return fd
        except OSError as err:
            os.close(fd)
            raise why_unusable(name, path, parent, err) from err
        status = os.fstat(fd)
        os.close(fd)
        if time.monotonic() >= deadline:
            what = f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and belongs to uid {status.st_uid}, so user "
            raise refusal(f"{what}{os.geteuid()} cannot work in it", path, errno.EACCES)
        time.sleep(0.005)


def _is_ready(fd: int, *, make: bool) -> bool:
    """Return whether this user may work in the directory. One of its own that is empty is opened to all, if it is to be
    made: a process may have been killed while it did that."""
    status = os.fstat(fd)
    if stat.S_IMODE(status.st_mode) == DIR_MODE:
        return True
    if status.st_uid == os.geteuid():
        if make:
            open_to_all(fd)
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK | os.X_OK, effective_ids=True)


PARTS = ("leases", "queue", "history")
"""The directories in the state directory."""

# O_NONBLOCK: the owner of a file may hold a file lease on it (F_SETLEASE), and then open(2) blocks for 45 seconds.
OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

DIR_MODE = 0o1777

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
        if parent is not None and os.geteuid() == 0 != os.fstat(parent).st_uid:  # what root needs for the files in it
            os.close(os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=parent))
        _make_finished(name, parent)
    except FileExistsError:
        pass
    except OSError as err:
        if err.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(path)):
            raise refusal(f"{os.path.dirname(path)} does not exist", path, err.errno, "create it") from err
        raise refusal_of_error(path, err, verb="created") from err


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
    """Call renameat2(2) with RENAME_NOREPLACE. Return 0 or the error number."""
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
    """Return why a directory cannot be opened, and what to do; the arguments are those of :func:`make_directory`."""
    with suppress(OSError):
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            err = OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # O_DIRECTORY answers ENOTDIR
    return refusal_of_error(path, err)
