"""Which file system a state directory lies on, and whether locks work there."""

import os
from functools import cache
from typing import NamedTuple

NETWORK_TYPES = frozenset(
    "9p acfs afs beegfs ceph cephfs cifs coda davfs fuse.ceph fuse.glusterfs fuse.juicefs fuse.mfs fuse.s3fs "
    "fuse.sshfs gfs gfs2 glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 "
    "smb2 smb3 smbfs weka wekafs".split()
)
"""File systems where flock(2) is something else: emulated by byte-range locks, local to the client, or absent."""


class FileSystem(NamedTuple):
    """A file system as it is mounted: its type, which directory of it, and where. Each is "" where that is hidden."""

    kind: str = ""
    root: str = ""
    point: str = ""


def file_system_of(fd: int) -> FileSystem:
    """Return the file system that an open descriptor lies on, as in /proc/self/mountinfo.

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
                    return FileSystem(kind, os.fsdecode(root), os.fsdecode(point))
    except (OSError, KeyError, IndexError, ValueError):
        pass
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


DISK_TYPES = ("", "ext4", "xfs", "btrfs")
"""File systems on disks, which have a container's image only as a directory below their root."""
