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

__all__ = [
    "DEFAULT_DIR",
    "NETWORK_TYPES",
    "OPEN_DIR",
    "StateDir",
    "file_system_type",
    "news_of_privacy",
    "state_dir_path",
    "survive_exec",
    "write_all",
]

DEFAULT_DIR = "/tmp/safe-gpu"

# How long another's first use may take between its mkdir and its chmod.
_CREATION_PATIENCE = 1.0

# O_NONBLOCK: the owner of a file may hold a file lease on it (F_SETLEASE), and then open(2) blocks for 45 seconds.
OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OPEN_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

NETWORK_TYPES = frozenset(
    "9p acfs afs beegfs ceph cephfs cifs coda davfs fuse.ceph fuse.glusterfs fuse.juicefs fuse.mfs fuse.s3fs "
    "fuse.sshfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 "
    "smb2 smb3 smbfs weka wekafs".split()
)
"""File systems where flock(2) is something else: emulated by byte-range locks, local to the client, or absent."""


def state_dir_path() -> str:
    """Where the state directory is: ``SAFE_GPU_DIR``, else ``/tmp/safe-gpu``, as an absolute path.

    Raises:
        StateDirError: ``SAFE_GPU_DIR`` is relative, and would name another directory in every working directory.
    """
    path = os.environ.get("SAFE_GPU_DIR") or DEFAULT_DIR
    if not os.path.isabs(path):
        raise StateDirError(
            f"SAFE_GPU_DIR={path} is relative: started elsewhere, another process would use another directory and "
            "claim the same GPUs; set it to an absolute path",
            path=path,
        )
    return os.path.abspath(path)


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

    def is_removed(self) -> bool:
        """Whether it was removed since it was opened, by a cleaner or a user. Nothing can be created in it then."""
        return os.fstat(self.fd).st_nlink == 0

    def names(self) -> list[str]:
        """The names in it, in no order."""
        return os.listdir(self.fd)

    def open(self, name: str) -> int | None:
        """A descriptor of an existing file, for reading and writing; None where there is no such file.

        Raises:
            StateDirError: something else in its place (a device or a FIFO is not even opened), a file with several
                links that not everybody may write, another user's file that is closed to us, a file lease on it
                (EWOULDBLOCK).
        """
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                fd = os.open(name, _OPEN_FILE, dir_fd=self.fd)
                status = os.fstat(fd)
                if stat.S_ISREG(status.st_mode) and (status.st_nlink < 2 or _is_writable_by_all(status)):
                    return fd
                os.close(fd)
        except FileNotFoundError:
            return None
        except BlockingIOError as err:
            from .refused import under_file_lease

            raise under_file_lease(os.path.join(self.path, name), status) from err
        except OSError as err:
            raise self._error(name, err) from err
        from .refused import of_status

        raise of_status(os.path.join(self.path, name), status)

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

        It is made without a name and linked into place, or renamed where all files have one: no one ever sees it with
        a narrower mode, and a process that is killed here leaves nothing. O_CREAT is never used on a name that may
        exist: in a sticky directory fs.protected_regular refuses that even to root.

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
        from .directories import NO_RENAME, rename_new

        temporary = f".{name}.{os.getpid()}.{time.monotonic_ns():x}"
        os.close(self._create_exclusively(temporary))
        try:
            failure = rename_new(temporary, name, self.fd)
        finally:
            self.unlink(temporary)  # where it was not renamed
        if failure in NO_RENAME:
            os.close(self._create_exclusively(name))
        elif failure:
            raise OSError(failure, os.strerror(failure))

    def _create_exclusively(self, name: str) -> int:
        fd = os.open(name, _OPEN_FILE | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self.fd)
        os.fchmod(fd, 0o666)
        return fd

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
        from .refused import of_error

        return of_error(os.path.join(self.path, name), err)


def _is_writable_by_all(status: os.stat_result) -> bool:
    """Whether everybody may write a file anyway, so that a second link to it gives nobody's file away. Everybody can
    make links to files of that mode, those of the state directory among them (fs.protected_hardlinks allows it)."""
    return stat.S_IMODE(status.st_mode) == 0o666


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


def survive_exec(fd: int) -> int:
    """Move a descriptor out of the way of shell redirections and let it survive exec(2); returns the new one.

    To 500 or above, or as high as RLIMIT_NOFILE allows, so that a script's ``exec 3>`` does no harm.
    """
    import fcntl

    soft = os.sysconf("SC_OPEN_MAX")  # -1 where there is no limit
    floor = 500 if soft < 0 or soft > 564 else max(soft - 64, soft // 2, 3)
    try:
        moved = fcntl.fcntl(fd, fcntl.F_DUPFD, floor)
    except OSError:
        os.set_inheritable(fd, True)  # no room up there: where it is will do
        return fd
    os.close(fd)
    return moved


def _open_shared(name: str, path: str, parent: int | None) -> int:
    """Open a directory that everyone may use, making it with mode 1777 where it is missing."""
    patience = time.monotonic() + _CREATION_PATIENCE
    made = False
    while True:
        try:
            fd = os.open(name, OPEN_DIR, dir_fd=parent)
        except FileNotFoundError:
            from .directories import make

            made = make(name, path, parent)
            continue
        except OSError as err:
            if err.errno == errno.EACCES and time.monotonic() < patience:
                time.sleep(0.005)
                continue
            from .directories import unusable

            raise unusable(name, path, parent, err) from err
        try:
            if _settle(fd, made):
                return fd
        except OSError as err:
            os.close(fd)
            from .directories import unusable

            raise unusable(name, path, parent, err) from err
        status = os.fstat(fd)
        os.close(fd)
        if time.monotonic() >= patience:
            raise StateDirError(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and belongs to uid {status.st_uid}, so user "
                f"{os.geteuid()} cannot work in it: ask its owner for mode 1777 or root to remove it, or "
                "set SAFE_GPU_DIR elsewhere",
                path=path,
                errno=errno.EACCES,
            )
        time.sleep(0.005)


def _settle(fd: int, made: bool) -> bool:
    """Whether the directory is ready for use; sets mode 1777 where this process made it, or it is ours and empty."""
    status = os.fstat(fd)
    if stat.S_IMODE(status.st_mode) == 0o1777:
        return True
    if status.st_uid == os.geteuid():
        # What someone pointed SAFE_GPU_DIR at and holds other things (a home, a `queue` in it) is never opened up.
        if made or not os.listdir(fd):
            os.fchmod(fd, 0o1777)
        return True
    return os.access(f"/proc/self/fd/{fd}", os.W_OK | os.X_OK, effective_ids=True)


def file_system_type(fd: int) -> str:
    """The type of the file system an open descriptor lies on, as in /proc/self/mountinfo; "" where that is hidden."""
    return _mount_of(fd)[0]


def _mount_of(fd: int) -> tuple[str, str, str]:
    """The type of the file system, which directory of it is mounted, and where.

    The mount is found by its id, not by device number: those differ on overlay and btrfs file systems.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb", buffering=0) as file:
            info = dict(line.split(b":", 1) for line in file.read(4096).splitlines() if b":" in line)
        mount = info[b"mnt_id"].strip()
        with open("/proc/self/mountinfo", "rb") as file:
            for line in file:
                if line.split(b" ", 1)[0] == mount:
                    kind = line.rpartition(b" - ")[2].split()[0].decode("ascii", "replace")
                    root, point = line.split()[3:5]
                    return kind, os.fsdecode(root), os.fsdecode(point)
    except (OSError, KeyError, IndexError, ValueError):
        pass
    return "", "", ""


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
    _, root, point = _mount_of(fd)
    if root not in ("", "/") or (point == "/" and kind not in _DISK_TYPES):  # a private /tmp, an image
        from .mounts import news_of

        _private.append(news_of(path))


_DISK_TYPES = ("", "ext4", "xfs", "btrfs")
"""File systems on disks, which have a container's image only as a directory below their root."""

_private: list[str] = []
"""What is to be said of state directories that only some processes see, and nobody was told yet."""


def news_of_privacy() -> str:
    """What is to be said of a private state directory, after its path, once for each process; "" otherwise."""
    told = next(filter(None, _private), "")
    _private.clear()
    return told
