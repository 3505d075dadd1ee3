"""File systems as they are mounted, and whether this network namespace seems to be the host's."""

import os
from functools import cache
from typing import NamedTuple

from . import procfs
from .foreign_files import read_start

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


def sees_network_devices() -> bool:
    """Return whether an interface of this network namespace is a device. /sys may be of another one, so it is not
    listed."""
    from _socket import if_nameindex  # the module socket takes 15 ms to import

    try:
        return any(os.path.exists(f"/sys/class/net/{name}/device") for _, name in if_nameindex())
    except OSError:
        return False
