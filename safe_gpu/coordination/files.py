"""The state directory: how it is made, files in it that are opened safely, and why one is refused.

The directory is shared by users who do not trust each other's code: it is never a symbolic link, nothing in it is
followed, and every file is created whole (with its mode before it has a name), so that a claim killed at any instant
leaves nothing that locks others out.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from .. import procfs
from ..errors import StateDirError
from ..settings import host_setting

# The state directory, and files in it that are opened safely although everybody may write there.


DEFAULT_DIR = "/tmp/safe-gpu"

HOST_LOCK = "../host.lock"
"""host.lock, from one of these:"""

# How long another's first use may take between its mkdir and its chmod.
_CREATION_PATIENCE = 1.0

_FILE_MODE = 0o666

NETWORK_TYPES = frozenset(
    "9p acfs afs beegfs ceph cephfs cifs coda davfs fuse.ceph fuse.glusterfs fuse.juicefs fuse.mfs fuse.s3fs "
    "fuse.sshfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 "
    "smb2 smb3 smbfs weka wekafs".split()
)
"""File systems where flock(2) is something else: emulated by byte-range locks, local to the client, or absent."""


def state_dir_path() -> str:
    """Return where the state directory is: ``SAFE_GPU_DIR``, else what root's file says, else ``/tmp/safe-gpu``;
    absolute.

    Raises:
        PolicyError: root's file has a mistake.
        StateDirError: ``SAFE_GPU_DIR`` is relative, and would name another directory in every working directory.
    """
    path = host_setting("state_dir", "SAFE_GPU_DIR", os.environ) or DEFAULT_DIR
    if not os.path.isabs(path):
        raise StateDirError(
            f"SAFE_GPU_DIR={path} is relative: started elsewhere, another process would use another directory and "
            "claim the same GPUs; set it to an absolute path",
            path=path,
        )
    return os.path.abspath(path)


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
        self.fd: int = _open_shared(path, self.path, parent.fd if parent else None, make=make)
        if parent is None:
            try:
                _refuse_network(self.fd, self.path)
            except BaseException:
                self.close()
                raise

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

        A file of mode 0666 is everybody's anyway. Another one may be somebody's from elsewhere: the owner of this
        directory may move it here, and where fs.protected_hardlinks is 0, anybody may link it.

        Raises:
            StateDirError: something else in its place (a device or a FIFO is not even opened), a file of another mode
                with several links or in a directory of another user, one that is closed to us, a file lease on it
                (EWOULDBLOCK).
        """
        try:
            status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                fd = os.open(name, self.flags, dir_fd=self.fd)
                status = os.fstat(fd)
                if is_everybodys(status) and (status.st_mode & 0o7777 == _FILE_MODE or not self._is_anothers()):
                    return fd
                os.close(fd)
        except FileNotFoundError:
            return None
        except BlockingIOError as err:
            raise under_file_lease(os.path.join(self.path, name), status) from err
        except OSError as err:
            raise self.error(name, err) from err

        raise refusal_of_status(os.path.join(self.path, name), status)

    def _is_anothers(self) -> bool:
        """Return whether another user may put files here by renaming them."""
        status = os.fstat(self.fd)
        open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        return bool(open_to_others) or status.st_uid not in (0, os.geteuid())

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

        return refusal_of_error(os.path.join(self.path, name), err)


def is_everybodys(status: os.stat_result) -> bool:
    """Return whether it is a regular file that everybody may write, or has one name only, so that it is nobody's
    elsewhere."""
    return stat.S_ISREG(status.st_mode) and (status.st_nlink < 2 or status.st_mode & 0o7777 == _FILE_MODE)


class LeaseDir(StateDir):
    """The directory of the leases, each of which is a file of its own.

    Everybody may link files of mode 0666, so host.lock or another lease may stand in the place of a lease. It would be
    held always, or whenever the other one is.

    Attributes:
        names_of_host: returns the leases of this host's GPUs, as far as the caller knows them.
    """

    names_of_host: Callable[[], Iterable[str]] = tuple

    def open(self, name: str) -> int | None:
        """Open it as every StateDir does, but refuse a link to host.lock or to another lease too."""
        fd = super().open(name)
        if fd is not None and (other := self.twin(name, os.fstat(fd))):
            os.close(fd)
            raise self.linked(name, other)
        return fd

    def linked(self, name: str, other: str) -> StateDirError:
        """Return why a lease is not used that has a twin."""

        return linked(os.path.join(self.path, name), other)

    def twin(self, name: str, status: os.stat_result | None = None) -> str:
        """Return the name of the lock or of the other lease that is the same file, relative to this directory; "" for
        none."""
        status = status or self.status(name)
        if status is None or status.st_nlink < 2:
            return ""
        for other in (HOST_LOCK, *self.names_of_host()):
            if other != name and (found := self.status(other)) and os.path.samestat(found, status):
                return other
        return ""


def write_all(fd: int, data: bytes, path: str) -> None:
    """Replace a small file's content so that a reader sees the old, the new, or something it recognises as torn.

    Raises:
        StateDirError: the disk is full, or the write failed.
    """
    try:
        written = os.pwrite(fd, data, 0)
        os.ftruncate(fd, written)
    except OSError as err:
        raise refusal(f"cannot write {path} ({err.strerror}): free some space there", path, err.errno) from err
    if written != len(data):
        raise refusal(f"no room to write {path}: free some space there", path, errno.ENOSPC)


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
        os.set_inheritable(fd, True)  # no room up there: it stays where it is
        return fd
    os.close(fd)
    return moved


def _open_shared(name: str, path: str, parent: int | None, *, make: bool) -> int:
    """Open a directory that everyone may use."""
    patience = time.monotonic() + _CREATION_PATIENCE
    while True:
        try:
            fd = os.open(name, OPEN_DIR, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
            make_directory(name, path, parent)
            continue
        except OSError as err:
            if err.errno == errno.EACCES and time.monotonic() < patience:
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
        if time.monotonic() >= patience:
            raise StateDirError(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and belongs to uid {status.st_uid}, so user "
                f"{os.geteuid()} cannot work in it: ask its owner for mode 1777 or root to remove it, or "
                "set SAFE_GPU_DIR elsewhere",
                path=path,
                errno=errno.EACCES,
            )
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


def file_system_type(fd: int) -> str:
    """Return the type of the file system an open descriptor lies on, as in /proc/self/mountinfo; "" where that is
    hidden."""
    return _mount_of(fd)[0]


def _mount_of(fd: int) -> tuple[str, str, str]:
    """Return the type of the file system, which directory of it is mounted, and where.

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
        from .mounts import privacy_of

        _doubts.append(privacy_of(path))


_DISK_TYPES = ("", "ext4", "xfs", "btrfs")
"""File systems on disks, which have a container's image only as a directory below their root."""

_doubts: list[str] = []
"""What is to be said of state directories, after their path, and nobody was told yet."""

_looked_at: set[tuple[int, int]] = set()
"""Device and inode of the state directories whose owners are known."""


def state_dir_warnings() -> list[str]:
    """Return what a claim is to be told of the state directory, after its path, once for each process."""
    told = list(filter(None, _doubts))
    _doubts.clear()
    return told


def look_at_owners(root: StateDir) -> None:
    """Find out, once, who owns the state directory: the sticky bit does not bind the owner of a directory."""
    status = os.fstat(root.fd)
    if (status.st_dev, status.st_ino) in _looked_at:
        return
    _looked_at.add((status.st_dev, status.st_ino))
    for part in (".", *PARTS):
        with suppress(OSError):  # history may be missing
            uid = os.stat(part, dir_fd=root.fd, follow_symlinks=False).st_uid
            if uid not in (0, os.geteuid()):
                _doubts.append(risk_of_owner(root.path, uid))
                return


# Directories that everyone may use appear finished, with mode 1777.


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
        if parent is not None and os.geteuid() == 0 != os.fstat(parent).st_uid:  # what root needs for the files in it
            os.close(os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=parent))
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
        raise refusal(what, path, err.errno) from err


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
    return refusal(what, path, err.errno)


def risk_of_owner(path: str, uid: int) -> str:
    """Return what is to be said of a state directory that belongs to another user, after its path; "" if nothing is.

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
    """Return the commands that give the state directory to root, now and at boot."""
    import shlex

    names = shlex.join([path, *(os.path.join(path, part) for part in PARTS)])
    # The owner may put a link in the place of one of them meanwhile, so -h.
    return f"chown -h root:root {names}; printf 'd %s 1777 root root -\\n' {names} > {RULE}"


def _sees_network_devices() -> bool:
    """Return whether an interface of this network namespace is a device. /sys may be of another one, so it is not
    listed."""
    from _socket import if_nameindex  # the module socket takes 15 ms to import

    try:
        return any(os.path.exists(f"/sys/class/net/{name}/device") for _, name in if_nameindex())
    except OSError:
        return False


# Why a file of the state directory is not used.


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
