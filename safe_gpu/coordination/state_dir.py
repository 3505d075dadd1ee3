"""Where the state directory is, whether it can be used, and what a claim is told of it.

``SAFE_GPU_DIR`` may name any directory or file of the system, or a user's own. So nobody is told to remove a directory,
to open it to all, or to change what is mounted there.
"""

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from ..errors import StateDirError
from ..host import procfs
from ..host.foreign_files import read_start
from ..settings.variables import host_setting

DEFAULT_DIR = "/tmp/safe-gpu"

ADMIN_DIR = "/var/lib/safe-gpu"
"""Where ``safe-gpu setup`` makes the state directory."""


def state_dir_path() -> str:
    """Return where the state directory is: ``SAFE_GPU_DIR``, else what root's file says, else ``/tmp/safe-gpu``;
    absolute.

    Raises:
        PolicyError: root's file has a mistake.
        StateDirError: ``SAFE_GPU_DIR`` is relative, and would name another directory in every working directory.
    """
    return _absolute(host_setting("state_dir", "SAFE_GPU_DIR", os.environ) or DEFAULT_DIR)


@cache  # every claim asks several times
def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise StateDirError(
            f"SAFE_GPU_DIR={path} is relative: started elsewhere, another process would use another directory and "
            "claim the same GPUs; set it to an absolute path",
            path=path,
        )
    return os.path.abspath(path)


NETWORK_TYPES = frozenset(
    "9p acfs afs beegfs ceph cephfs cifs coda davfs fuse.ceph fuse.glusterfs fuse.juicefs fuse.mfs fuse.s3fs "
    "fuse.sshfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 "
    "smb2 smb3 smbfs weka wekafs".split()
)
"""File systems where flock(2) is something else: emulated by byte-range locks, local to the client, or absent."""


class FileSystem(NamedTuple):
    """A file system as it is mounted: its type, and where. Each is "" where that is hidden."""

    kind: str = ""
    point: str = ""


def file_system_of(fd: int) -> FileSystem:
    """Return the file system that an open descriptor lies on, as in /proc/self/mountinfo.

    The mount is found by its id, not by device number: those differ on overlay and btrfs file systems.
    """
    info = b"\n" + (read_start(f"/proc/self/fdinfo/{fd}", 4096) or b"")
    mount = info.partition(b"\nmnt_id:\t")[2].partition(b"\n")[0]
    for line in procfs.lines_of("/proc/self/mountinfo"):
        fields, _, tail = line.partition(b" - ")
        number, _, _, _, point, *_ = [*fields.split(b" "), *[b""] * 5]
        if number == mount:
            return FileSystem(tail.split(b" ")[0].decode("ascii", "replace"), os.fsdecode(point))
    return FileSystem()


@cache
def file_system_at(path: str, device: int) -> FileSystem:
    """Return the file system of a directory that is on this device, looked up once: that takes longer than to take
    a lock."""
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return FileSystem()  # it was removed
    try:
        return file_system_of(fd)
    finally:
        os.close(fd)


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


def under_file_lease(path: str, status: os.stat_result) -> StateDirError:
    """Return why it cannot be opened now: a file lease (F_SETLEASE in fcntl(2)), which only its owner or root can
    take."""
    user = procfs.user_name(status.st_uid)
    pids = procfs.flock_holders({status.st_ino}).get(status.st_ino, [])
    by = f", by process {pids[0]}" if pids else ""
    what = f"{path} is kept under a file lease (F_SETLEASE) by its owner {user}{by}"
    return refusal(what, path, errno.EWOULDBLOCK, f"ask {user} or root to end that")


_told: set[str] = set()
"""What a claim of this process was told of state directories."""


def not_told_yet(doubts: Iterable[str]) -> list[str]:
    """Return those of these sentences on state directories that no claim of this process was told; "" is none."""
    new = [one for one in doubts if one and one not in _told]
    _told.update(new)
    return new


_OF_IMAGES = frozenset({"overlay", "fuse-overlayfs", "fuse.fuse-overlayfs"})


@cache
def doubt_of_image(path: str) -> str:
    """Return what a claim is to be told of a state directory in the image of a container that has not the network of
    the host; "" for nothing."""
    above = path
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    kind, point = file_system_at(above, os.stat(above).st_dev)
    if point != "/" or kind not in _OF_IMAGES or sees_network_devices():
        return ""
    return (
        f"the state directory {procfs.printable_lines(path)} belongs to this container, and claims outside it are not "
        f"seen, nor do they see this one, unless it has the network of the host: start it with -v {path}:{path}"
    )


def setup_command(path: str) -> str:
    """Return the command by which root makes a state directory its own, in place of this one or of its files."""
    from shlex import quote

    return "safe-gpu setup" + ("" if path in (ADMIN_DIR, DEFAULT_DIR) else f" --state-dir {quote(path)}")


def remover_of(path: str, user: int) -> int | None:
    """Return who can remove entries of this user, being neither that user nor root: the owner of the state directory or
    of ``claims``, sticky bit or not; None for nobody."""
    with suppress(OSError):
        owners = (os.stat(one, follow_symlinks=False).st_uid for one in (path, f"{path}/claims"))
        return next((uid for uid in owners if uid not in (0, user)), None)
    return None


def doubt_of_entries(path: str, *, doors: bool) -> str:
    """Return what a claim of this process is to be told of its entry; "" for nothing.

    A claim that has doors keeps its GPUs without its entry, in its own network namespace. Those of other processes
    cannot be read, but the host's has the network interfaces that are devices.

    Args:
        path: the state directory.
        doors: whether the claim has doors.
    """
    uid = remover_of(path, os.geteuid())
    if uid is None or (doors and sees_network_devices()):
        return ""
    why = "this network namespace seems not to be the host's" if doors else "it has no doors"
    ask = "as root" if os.geteuid() == 0 else "ask root to run"
    return (
        f"{procfs.user_name(uid)} can remove the entries of this claim in {procfs.printable(path)}, and nothing else "
        f"keeps others off its GPUs, since {why}: {ask}: {setup_command(path)}"
    )


def sees_network_devices() -> bool:
    """Return whether an interface of this network namespace is a device. /sys may be of another one, so it is not
    listed."""
    from _socket import if_nameindex  # the module socket takes 15 ms to import

    try:
        return any(os.path.exists(f"/sys/class/net/{name}/device") for _, name in if_nameindex())
    except OSError:
        return False
