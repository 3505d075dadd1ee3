"""The state directory, and files in it that are opened safely although everybody may write there.

The directory is shared by users who do not trust each other's code: it is never a symbolic link, nothing in it is
followed, and every file is created whole (mode 0666 before it has a name), so that a claim killed at any instant leaves
nothing that locks others out.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from ..errors import StateDirError

__all__ = ["DEFAULT_DIR", "NETWORK_TYPES", "StateDir", "file_system_type", "state_dir_path", "write_all"]

DEFAULT_DIR = "/tmp/safe-gpu"

# How long another's first use may take between its mkdir and its chmod.
_CREATION_PATIENCE = 1.0

_OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

NETWORK_TYPES = frozenset(
    "9p acfs afs beegfs ceph cephfs cifs coda davfs fuse.ceph fuse.glusterfs fuse.juicefs fuse.mfs fuse.s3fs "
    "fuse.sshfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 "
    "smb2 smb3 smbfs weka wekafs".split()
)
"""File systems where flock(2) is something else: emulated by byte-range locks, local to the client, or absent."""


def state_dir_path() -> str:
    """Where the state directory is: ``SAFE_GPU_DIR``, else ``/tmp/safe-gpu``, as an absolute path."""
    return os.path.abspath(os.environ.get("SAFE_GPU_DIR") or DEFAULT_DIR)


class StateDir:
    """An open shared directory; use it in ``with`` or close it.

    Args:
        path: absolute path, or a name below ``parent``.
        parent: an open StateDir that the name is relative to.

    Raises:
        StateDirError: a symbolic link, not a directory, not writable, on a network file system, no room.
    """

    def __init__(self, path: str, parent: StateDir | None = None) -> None:
        self.path: str = os.path.join(parent.path, path) if parent else path
        self.fd: int = _open_shared(path, self.path, parent.fd if parent else None)
        if parent is None:
            try:
                _refuse_network(self.fd, self.path)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> StateDir:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def names(self) -> list[str]:
        """The names in it, in no order."""
        return os.listdir(self.fd)

    def open(self, name: str) -> int | None:
        """A descriptor of an existing file, for reading and writing; None where there is no such file.

        Raises:
            StateDirError: a symbolic link in its place, another user's file that is closed to us.
        """
        try:
            fd = os.open(name, _OPEN_FILE, dir_fd=self.fd)
        except FileNotFoundError:
            return None
        except OSError as err:
            raise self._error(name, err) from err
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise StateDirError(
                f"{os.path.join(self.path, name)} is not a regular file: ask its owner or root to remove it, "
                "or set SAFE_GPU_DIR to another directory",
                path=os.path.join(self.path, name),
            )
        return fd

    def open_or_create(self, name: str) -> int:
        """Like :meth:`open`, and creates it empty with mode 0666, whatever the umask, where it is missing."""
        while True:
            fd = self.open(name)
            if fd is None:
                fd = self.create(name)
            if fd is not None:
                return fd

    def create(self, name: str, prepared: int | None = None) -> int | None:
        """A descriptor of a new file with mode 0666, whatever the umask; None where the name is taken.

        It is made without a name and linked into place: no one ever sees it with a narrower mode, and a process that is
        killed here leaves nothing. O_CREAT is never used on a name that may exist: in a sticky directory
        fs.protected_regular refuses that even to root.

        Args:
            prepared: the file, from :meth:`prepare`, which is closed; None makes an empty one.
        """
        try:
            unnamed = self.prepare() if prepared is None else prepared
            if unnamed is None or not self._name(unnamed, name):
                self._create_renamed(name)
        except FileExistsError:
            return None
        except OSError as err:
            raise self._error(name, err) from err
        return self.open(name)  # /proc/PID/fd shows a descriptor that was there before the name as deleted

    def prepare(self) -> int | None:
        """A descriptor of a new, empty file with mode 0666 that has no name yet; None where there is none such.

        Raises:
            OSError: no room, a read-only file system.
        """
        try:
            fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666, dir_fd=self.fd)
        except OSError as err:
            if err.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                return None
            raise
        try:
            os.fchmod(fd, 0o666)
        except OSError:
            os.close(fd)
            raise
        return fd

    def _name(self, unnamed: int, name: str) -> bool:
        """Give the file a name and close it; False without /proc, where it can have none."""
        try:
            os.link(f"/proc/self/fd/{unnamed}", name, dst_dir_fd=self.fd, follow_symlinks=True)
        except FileNotFoundError:
            return False
        finally:
            os.close(unnamed)
        return True

    def _create_renamed(self, name: str) -> None:
        temporary = f".{name}.{os.getpid()}.{time.monotonic_ns():x}"
        fd = os.open(temporary, _OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self.fd)
        try:
            os.fchmod(fd, 0o666)
            os.link(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        finally:
            os.close(fd)
            self.unlink(temporary)

    def is_current(self, name: str, fd: int) -> bool:
        """Whether the name still means this open file (a cleaner of /tmp may have unlinked or replaced it)."""
        try:
            now = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(now, os.fstat(fd))

    def unlink(self, name: str) -> bool:
        """Remove a name; False where this user may not, or it was gone."""
        try:
            os.unlink(name, dir_fd=self.fd)
        except OSError:
            return False
        return True

    def _error(self, name: str, err: OSError) -> StateDirError:
        path = os.path.join(self.path, name)
        if err.errno in (errno.ELOOP, errno.EMLINK):
            what = f"{path} is a symbolic link, which is never followed: remove it"
        elif err.errno in (errno.EACCES, errno.EPERM):
            what = f"{path} is closed to user {os.geteuid()} ({err.strerror}): ask its owner or root for mode 0666"
        elif err.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"no room for {path} ({err.strerror}): free some space there"
        elif err.errno in (errno.EMFILE, errno.ENFILE):
            what = f"{path} cannot be opened ({err.strerror}): let this process open more (ulimit -n)"
        elif err.errno == errno.EROFS:
            what = f"{path} is on a read-only file system"
        else:
            what = f"{path} cannot be opened ({err.strerror})"
        return StateDirError(f"{what}, or set SAFE_GPU_DIR to another directory", path=path, errno=err.errno)


def write_all(fd: int, data: bytes, path: str) -> None:
    """Replace a small file's content so that a reader sees the old, the new, or something it recognises as torn.

    Raises:
        StateDirError: the disk is full, or the write failed.
    """
    try:
        written = os.pwrite(fd, data, 0)
        os.ftruncate(fd, written)
    except OSError as err:
        raise StateDirError(
            f"cannot write {path} ({err.strerror}): free some space there, or set SAFE_GPU_DIR to another directory",
            path=path,
            errno=err.errno,
        ) from err
    if written != len(data):
        raise StateDirError(
            f"no room to write {path}: free some space there, or set SAFE_GPU_DIR to another directory",
            path=path,
            errno=errno.ENOSPC,
        )


def _open_shared(name: str, path: str, parent: int | None) -> int:
    """Open a directory that everyone may use, making it with mode 1777 where it is missing."""
    patience = time.monotonic() + _CREATION_PATIENCE
    made = False
    while True:
        try:
            fd = os.open(name, _OPEN_DIR, dir_fd=parent)
        except FileNotFoundError:
            made = _make(name, path, parent)
            continue
        except OSError as err:
            if err.errno == errno.EACCES and time.monotonic() < patience:
                time.sleep(0.005)
                continue
            raise _unusable(name, path, parent, err) from err
        try:
            if _settle(fd, made, ours=parent is not None):
                return fd
        except OSError as err:
            os.close(fd)
            raise _unusable(name, path, parent, err) from err
        status = os.fstat(fd)
        os.close(fd)
        if time.monotonic() >= patience:
            raise StateDirError(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and belongs to uid {status.st_uid}, so user "
                f"{os.geteuid()} cannot work in it: ask for `chmod 1777 {path}`, or set SAFE_GPU_DIR elsewhere",
                path=path,
                errno=errno.EACCES,
            )
        time.sleep(0.005)


def _make(name: str, path: str, parent: int | None) -> bool:
    try:
        os.mkdir(name, 0o777, dir_fd=parent)
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
    return True


def _settle(fd: int, made: bool, ours: bool) -> bool:
    """Whether the directory is ready for use; sets mode 1777 where that is for us to do."""
    status = os.fstat(fd)
    if stat.S_IMODE(status.st_mode) == 0o1777:
        return True
    if status.st_uid == os.geteuid():
        # A directory that someone pointed SAFE_GPU_DIR at and that holds other things (a home!) is never opened up.
        if made or ours or not (entries := os.listdir(fd)) or "host.lock" in entries:
            os.fchmod(fd, 0o1777)
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK | os.X_OK, effective_ids=True)


def _unusable(name: str, path: str, parent: int | None, err: OSError) -> StateDirError:
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
        what = f"{path} is closed to user {os.geteuid()}: ask its owner or root for `chmod 1777 {path}`"
    else:
        what = f"{path} cannot be opened ({err.strerror})"
    return StateDirError(f"{what}, or set SAFE_GPU_DIR to another directory", path=path, errno=err.errno)


def file_system_type(fd: int) -> str:
    """The type of the file system an open descriptor lies on, as in /proc/self/mountinfo; "" where that is hidden.

    The mount is found by its id, not by device number: those differ on overlay and btrfs file systems.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb", buffering=0) as file:
            info = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
        mount = info[b"mnt_id"].strip()
        with open("/proc/self/mountinfo", "rb") as file:
            for line in file:
                if line.split(b" ", 1)[0] == mount:
                    return line.rpartition(b" - ")[2].split()[0].decode("ascii", "replace")
    except (OSError, KeyError, IndexError, ValueError):
        pass
    return ""


_local_devices: set[int] = set()
"""Where a state directory was found to be on a local file system: to find that out takes longer than to take a lock."""


def _refuse_network(fd: int, path: str) -> None:
    device = os.fstat(fd).st_dev
    if device in _local_devices:
        return
    kind = file_system_type(fd)
    if kind in NETWORK_TYPES:
        raise StateDirError(
            f"{path} is on a network file system ({kind}), where locks do not work as on a local one: "
            "set SAFE_GPU_DIR to a directory on a local disk or tmpfs that all jobs of this host share",
            path=path,
        )
    _local_devices.add(device)
