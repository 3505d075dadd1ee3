"""Directories that everybody may use, while they are open: the state directory, and those of entries in it.

Everybody may make files in them (mode 1777), and nobody but its owner removes those of others. So none is ever a
symbolic link, nothing in it is followed, and each appears finished or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import TypeVar

from ..errors import StateDirError
from .held import Held
from .state_dir import NETWORK_TYPES, file_system_at, refusal, refusal_of_error, refusal_of_status, under_file_lease

PARTS = ("claims", "queue", "faults", "history")
"""The directories in the state directory."""

# O_NONBLOCK: the owner of a file may hold a file lease on it (F_SETLEASE), and then open(2) blocks for 45 seconds.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

OPEN_DIR = OPEN_FILE | os.O_DIRECTORY

DIR_MODE = 0o1777

HOST_LOCK = "host.lock"

# What a kernel, a file system or a seccomp filter answers that has no renameat2, or not this flag.
_NO_RENAME = (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)

_RENAME_NOREPLACE = 1

_ONE_BLOCK = 4096  # bytes of a directory that has few names, on all file systems

_MOST_TRIES = 100  # to make a file, while somebody removes it

_Opened = TypeVar("_Opened", bound="SharedDirectory")


class SharedDirectory:
    """An open directory that everybody may use; use it in ``with`` or close it.

    Args:
        path: absolute path, or a name below ``above``.
        above: an open directory that the name is relative to.
        make: whether it is made where it is missing. Who only looks makes nothing.

    Raises:
        StateDirError: a symbolic link, not a directory, not writable, on a network file system, no room.
        FileNotFoundError: it is missing, and is not to be made.
    """

    def __init__(self, path: str, above: SharedDirectory | None = None, *, make: bool = True) -> None:
        self.path: str = os.path.join(above.path, path) if above else path
        self.fd: int
        self.fd, status = open_shared(path, self.path, above.fd if above else None, make=make)
        self.file = status.st_dev, status.st_ino
        kind = file_system_at(self.path, status.st_dev).kind if above is None else ""
        if kind in NETWORK_TYPES:
            self.close()
            raise StateDirError(
                f"{self.path} is on a network file system ({kind}), where locks do not work as on a local one: "
                "set SAFE_GPU_DIR to a directory on a local disk or tmpfs that all jobs of this host share",
                path=self.path,
            )

    def __enter__(self: _Opened) -> _Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; safe to call twice."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def names(self) -> set[str]:
        """Return the names in it; StateDirError if it cannot be read.

        They are read through a descriptor of their own: threads and forked children that share one share its place in
        the listing, and each would miss some names.
        """
        with suppress(OSError):  # no /proc: the longer way
            return set(os.listdir(f"/proc/self/fd/{self.fd}"))
        try:
            fd = os.open(".", OPEN_DIR, dir_fd=self.fd)
            try:
                return set(os.listdir(fd))
            finally:
                os.close(fd)
        except OSError as err:
            raise refusal_of_error(self.path, err) from err

    def still_has(self, name: str, file: tuple[int, int]) -> bool:
        """Return whether a name in it still means the file with this device and inode. A cleaner may have removed it,
        and others made it anew."""
        return file == file_at(name, self.fd)

    def is_large(self) -> bool:
        """Return whether it may have more than some dozens of names."""
        return os.fstat(self.fd).st_size > _ONE_BLOCK

    def open_file(self, name: str, flags: int = OPEN_FILE, *, make: bool = False) -> int:
        """Return a descriptor of a file in it that everybody may write.

        A file of mode 0666 is everybody's anyway. Another one may be somebody's from elsewhere. O_CREAT is never used
        on a name that may exist: in a sticky directory fs.protected_regular refuses that even to root.

        Raises:
            FileNotFoundError: it is missing, and is not to be made.
            StateDirError: something else in its place, a file of another mode, or one that is closed to us.
        """
        path = os.path.join(self.path, name)
        for _ in range(_MOST_TRIES):
            fd = -1
            try:
                status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                if is_everybodys(status):  # else, as a device or a FIFO, it is not even opened
                    fd = os.open(name, flags, dir_fd=self.fd)
                    status = os.fstat(fd)
            except FileNotFoundError:
                if not make:
                    raise
                self._make_file(name)
                continue
            except BlockingIOError as err:
                raise under_file_lease(path, status) from err
            except OSError as err:
                raise self.error(name, err) from err
            if is_everybodys(status):
                return fd
            if fd >= 0:
                os.close(fd)
            raise refusal_of_status(path, status)
        raise refusal(f"{path} is removed at once, by its owner or a cleaner", path, errno.ENOENT)

    def _make_file(self, name: str) -> None:
        """Make it empty with its mode, whatever the umask, before it has its name; another process may be faster."""
        temporary = f".{name}.{os.urandom(8).hex()}"
        try:
            fd = os.open(temporary, OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.fd)
            try:
                os.fchmod(fd, 0o666)
                _rename_file(temporary, name, self.fd)
            except FileExistsError:
                pass
            finally:
                os.close(fd)
                with suppress(OSError):  # it was renamed
                    os.unlink(temporary, dir_fd=self.fd)
        except OSError as err:
            raise self.error(name, err) from err

    def is_removed(self) -> bool:
        """Return whether it was removed since it was opened. Nothing can be made in it then."""
        return os.fstat(self.fd).st_nlink == 0

    def error(self, name: str, err: OSError) -> StateDirError:
        """Return why a file in it cannot be opened or made."""
        return refusal_of_error(os.path.join(self.path, name), err, closed="ask its owner or root to remove this name")


class Directory(SharedDirectory):
    """An open directory of the state directory, such as ``claims``.

    Args:
        state_dir: absolute path of the state directory, or that directory while it is open, which is not closed here.
        name: of the directory in it.
        make: whether they are made where they are missing.

    Raises:
        StateDirError, FileNotFoundError: as :class:`SharedDirectory`.
    """

    def __init__(self, state_dir: str | SharedDirectory, name: str, *, make: bool = True) -> None:
        self._name = name
        self._opened = isinstance(state_dir, str)
        while True:
            self._above = SharedDirectory(state_dir, make=make) if isinstance(state_dir, str) else state_dir
            try:
                super().__init__(name, self._above, make=make)
                return
            except BaseException as err:
                again = make and self._opened and self._above.is_removed() and isinstance(err, StateDirError)
                self._close_above()
                if not again:  # else a cleaner was faster
                    raise

    def close(self) -> None:
        super().close()
        self._close_above()

    def _close_above(self) -> None:
        if self._opened:
            self._above.close()

    @property
    def above(self) -> int:
        """A descriptor of the state directory."""
        return self._above.fd

    def is_current(self) -> bool:
        """Return whether its path still leads to it. If not, others do not see what is in this one."""
        return self._above.file == file_at(self._above.path) and self._above.still_has(self._name, self.file)

    def keep_from_cleaners(self, *, by_children: bool) -> Held:
        """Return a descriptor of the state directory, with a shared lock: systemd-tmpfiles skips a directory that
        somebody has locked. Nobody waits for it, so it goes without where a cleaner holds the lock just now.

        Raises:
            StateDirError: this process may open no more files.
        """
        try:
            fd = os.open(".", OPEN_DIR, dir_fd=self._above.fd)
        except OSError as err:
            raise refusal_of_error(self._above.path, err) from err
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return Held(fd, by_children=by_children, unlock=_unlock)

    def open_host_lock(self) -> int:
        """Return a descriptor of host.lock in the state directory, which is made where it is missing.

        Raises:
            StateDirError: as of :meth:`open_file`.
        """
        return self._above.open_file(HOST_LOCK, make=True)

    def is_current_file(self, name: str, file: tuple[int, int] | None) -> bool:
        """Return whether a name in the state directory still means the file with this device and inode."""
        return file is not None and self._above.still_has(name, file)


def file_at(path: str, above: int | None = None) -> tuple[int, int] | None:
    """Return the device and inode of what a path means, which is not followed if it is a link; None of nothing."""
    try:
        status = os.stat(path, dir_fd=above, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_everybodys(status: os.stat_result) -> bool:
    """Return whether it is a regular file that everybody may write."""
    return status.st_mode == stat.S_IFREG | 0o666


def unlink_in(above: int, part: str, name: str) -> None:
    """Remove a name from a directory below the one whose descriptor this is, if this user may, and if it is there."""
    with suppress(OSError):
        fd = os.open(part, OPEN_DIR, dir_fd=above)
        try:
            os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)


def open_shared(name: str, path: str, parent: int | None, *, make: bool) -> tuple[int, os.stat_result]:
    """Open a directory that everyone may use, and return its status too; arguments as of :func:`make_directory`."""
    while True:
        try:
            fd = os.open(name, OPEN_DIR, dir_fd=parent)
            break
        except FileNotFoundError:
            if not make:
                raise
            make_directory(name, path, parent)
        except OSError as err:
            raise why_unusable(name, path, parent, err) from err
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    can_work = os.W_OK | os.X_OK
    if mode == DIR_MODE or (user := os.geteuid()) == status.st_uid:
        return fd, status
    if os.access(f"/proc/self/fd/{fd}", can_work, effective_ids=True):
        return fd, status
    os.close(fd)
    what = f"{path} has mode {mode:04o} and belongs to uid {status.st_uid}, so user {user} cannot work in it"
    raise refusal(what, path, errno.EACCES)


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
    except OSError as err:
        with suppress(OSError):
            os.stat(name, dir_fd=parent, follow_symlinks=False)
            return  # another process was faster
        if err.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(path)):
            raise refusal(f"{os.path.dirname(path)} does not exist", path, err.errno, "create it") from err
        raise refusal_of_error(path, err, verb="created") from err


def _make_finished(name: str, parent: int | None) -> None:
    above, last = os.path.split(name)
    temporary = os.path.join(above, f".{last}.{os.urandom(8).hex()}")
    os.mkdir(temporary, 0o700, dir_fd=parent)
    try:
        fd = os.open(temporary, OPEN_DIR, dir_fd=parent)
        try:
            if not open_to_all(fd):
                raise PermissionError(errno.EPERM, "somebody replaced it while it was made", temporary)
        finally:
            os.close(fd)
        failure = rename_new(temporary, name, parent)
        if failure in _NO_RENAME:  # it replaces only one of this user that is empty
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
        elif failure:
            raise OSError(failure, os.strerror(failure))
    finally:
        with suppress(OSError):  # it was renamed
            os.rmdir(temporary, dir_fd=parent)


def open_to_all(fd: int) -> bool:
    """Give an open directory mode 1777. Returns False for one that is not ours or holds something, and is left alone:
    somebody may have put another directory in the place of the one just made."""
    if os.fstat(fd).st_uid != os.geteuid() or os.listdir(fd):
        return False
    os.fchmod(fd, DIR_MODE)
    return True


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


def _rename_file(source: str, target: str, parent: int) -> None:
    """Give a file its name, unless that is taken (FileExistsError), also where renameat2(2) is missing."""
    failure = rename_new(source, target, parent)
    if failure in _NO_RENAME:
        os.link(source, target, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
        os.unlink(source, dir_fd=parent)
    elif failure:
        raise OSError(failure, os.strerror(failure))


def why_unusable(name: str, path: str, parent: int | None, err: OSError) -> StateDirError:
    """Return why a directory cannot be opened, and what to do; the arguments are those of :func:`make_directory`."""
    with suppress(OSError):
        if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            err = OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # O_DIRECTORY answers ENOTDIR
    return refusal_of_error(path, err)
