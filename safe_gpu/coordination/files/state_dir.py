"""The state directory while it is open: its files are opened safely, although everybody may write there.

The directory is shared by users who do not trust each other's code: it is never a symbolic link, nothing in it is
followed, and every file is created whole (with its mode before it has a name), so that a claim killed at any instant
leaves nothing that locks others out.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from ...errors import StateDirError
from ...host import procfs
from ..directory import NO_RENAME, is_everybodys, open_shared, rename_new
from ..signals import DeferredSignals
from ..state_dir import (
    NETWORK_TYPES,
    file_system_at,
    refusal,
    refusal_of_error,
    refusal_of_status,
    state_dir_path,
    under_file_lease,
)

_FILE_MODE = 0o666

_Dir = TypeVar("_Dir", bound="StateDir")


class StateDir:
    """An open shared directory; use it in ``with`` or close it.

    Args:
        path: absolute path, or a name below ``parent``.
        parent: an open StateDir that the name is relative to.
        make: whether it is made where it is missing. Who only looks makes nothing.

    Raises:
        StateDirError: a symbolic link, not a directory, not writable, on a network file system, no room.
        FileNotFoundError: it is missing, and is not to be made.
    """

    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # of files in it

    def __init__(self, path: str, parent: StateDir | None = None, *, make: bool = True) -> None:
        self.path: str = os.path.join(parent.path, path) if parent else path
        self.fd: int = open_shared(path, self.path, parent.fd if parent else None, make=make)
        if parent is None:
            kind = file_system_at(self.path, os.fstat(self.fd).st_dev).kind
            if kind in NETWORK_TYPES:
                self.close()
                raise StateDirError(
                    f"{self.path} is on a network file system ({kind}), where locks do not work as on a local one: "
                    "set SAFE_GPU_DIR to a directory on a local disk or tmpfs that all jobs of this host share",
                    path=self.path,
                )

    def __enter__(self: _Dir) -> _Dir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_removed(self) -> bool:
        """Return whether it was removed since it was opened, by a cleaner or a user. Nothing can be created in it
        then."""
        return os.fstat(self.fd).st_nlink == 0

    def names(self) -> list[str]:
        """Return the names in it, in no order."""
        return os.listdir(self.fd)

    def few_names(self) -> frozenset[str] | None:
        """Return the names in it; None if there are more than 1000: any user can make more."""
        with os.scandir(self.fd) as entries:
            found = frozenset(entry.name for entry in islice(entries, 1001))
        return found if len(found) <= 1000 else None

    def is_empty(self) -> bool:
        """Return whether there is no name in it."""
        with os.scandir(self.fd) as entries:
            return next(entries, None) is None

    def status(self, name: str) -> os.stat_result | None:
        """Return what stands under this name, which is not followed if it is a link; None if nothing does."""
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return None

    def has(self, name: str) -> bool:
        """Return whether there is something of this name."""
        return self.status(name) is not None

    def open(self, name: str) -> int | None:
        """Return a descriptor of an existing file, for reading and writing; None where there is no such file.

        A file of mode 0666 is everybody's anyway. Another one may be somebody's from elsewhere: who owns the directory
        that it was in may move it here, and where fs.protected_hardlinks is 0, anybody may link it.

        Raises:
            StateDirError: something else in its place (a device or a FIFO is not even opened), a file of another mode,
                one that is closed to us, a file lease on it (EWOULDBLOCK).
        """
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                fd = os.open(name, self.flags, dir_fd=self.fd)
                status = os.fstat(fd)
                if is_everybodys(status):
                    return fd
                os.close(fd)
        except FileNotFoundError:
            return None
        except BlockingIOError as err:
            raise under_file_lease(os.path.join(self.path, name), status) from err
        except OSError as err:
            raise self.error(name, err) from err

        raise refusal_of_status(os.path.join(self.path, name), status)

    def open_or_create(self, name: str) -> int:
        """Open it as :meth:`open` does, and create it empty with mode 0666, whatever the umask, where it is missing."""
        while True:
            fd = self.open(name)
            if fd is None:
                fd = self.create(name)
            if fd is not None:
                return fd

    def create(self, name: str, mode: int = _FILE_MODE) -> int | None:
        """Return a descriptor of a new, empty file with this mode, whatever the umask; None where the name is taken.

        It is made without a name and linked into place, or renamed where all files have one: no one ever sees it with
        another mode, and a process that is killed here leaves nothing. O_CREAT is never used on a name that may
        exist: in a sticky directory fs.protected_regular refuses that even to root.
        """
        try:
            made = self._link(name, mode) or self._rename(name, mode)
        except FileExistsError:
            return None
        except StateDirError:
            raise
        except OSError as err:
            raise self.error(name, err) from err
        try:
            fd = os.open(name, self.flags, dir_fd=self.fd)  # /proc/PID/fd shows the first descriptor as deleted
        except FileNotFoundError:
            return None  # a cleaner was as fast as that
        except OSError as err:
            raise self.error(name, err) from err
        if os.path.samestat(os.fstat(fd), made):
            return fd
        os.close(fd)  # the owner of the directory has put another file there
        return None

    def _link(self, name: str, mode: int) -> os.stat_result | None:
        """Make it without a name first; None where that is not possible: on this file system, or without /proc."""
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode, dir_fd=self.fd)
        except OSError as err:
            if err.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                return None
            raise
        try:
            os.fchmod(fd, mode)
            os.link(f"/proc/self/fd/{fd}", name, dst_dir_fd=self.fd, follow_symlinks=True)
            return os.fstat(fd)
        except FileNotFoundError:
            return None
        finally:
            os.close(fd)

    def _rename(self, name: str, mode: int) -> os.stat_result:
        if os.geteuid() == 0 != os.fstat(self.fd).st_uid:
            raise to_root(self.path, os.fstat(self.fd).st_uid)
        temporary = f".{name}.{os.getpid()}.{time.monotonic_ns():x}"
        made = self._create_exclusively(temporary, mode)
        try:
            failure = rename_new(temporary, name, self.fd)
        finally:
            self.unlink(temporary)  # where it was not renamed
        if failure in NO_RENAME:
            return self._create_exclusively(name, mode)
        if failure:
            raise OSError(failure, os.strerror(failure))
        return made

    def _create_exclusively(self, name: str, mode: int) -> os.stat_result:
        fd = os.open(name, self.flags | os.O_CREAT | os.O_EXCL, mode, dir_fd=self.fd)
        try:
            os.fchmod(fd, mode)
            return os.fstat(fd)
        finally:
            os.close(fd)

    def is_current(self, name: str, fd: int) -> bool:
        """Return whether the name still means this open file (a cleaner of /tmp may have unlinked or replaced it)."""
        now = self.status(name)
        return now is not None and os.path.samestat(now, os.fstat(fd))

    def unlink(self, name: str) -> bool:
        """Remove a name; False where this user may not, or it was gone."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:
            return False
        return True

    def error(self, name: str, err: OSError) -> StateDirError:
        """Return why a file cannot be opened or made."""
        return refusal_of_error(os.path.join(self.path, name), err, closed="ask its owner or root to remove this name")


def to_root(path: str, uid: int) -> StateDirError:
    """Return why root makes no file here: under a name, the owner of the directory could replace it meanwhile."""
    what = f"{path} belongs to {procfs.user_name(uid)}, and root makes a file in there only before it has a name "
    what += "(O_TMPFILE, and /proc), which is not possible here"
    return refusal(what, path, errno.EPERM)


def write_all(fd: int, data: bytes, path: str) -> None:
    """Replace a small file's content so that a reader sees the old, the new, or something it recognises as torn.

    Raises:
        StateDirError: the disk is full, or the write failed.
    """
    try:
        written = os.pwrite(fd, data, 0)
        os.ftruncate(fd, written)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as err:
        raise refusal_of_error(path, err, verb="written") from err


@contextmanager
def opened(part: str, *, make: bool = True) -> Iterator[StateDir]:
    """Open a directory of the state directory for a moment, with handlers of signals held back.

    Raises:
        StateDirError, FileNotFoundError: as :class:`~safe_gpu.coordination.files.state_dir.StateDir`.
    """
    with DeferredSignals(), StateDir(state_dir_path(), make=make) as root, StateDir(part, root, make=make) as directory:
        yield directory
