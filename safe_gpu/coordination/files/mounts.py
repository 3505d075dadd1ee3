"""Mounts that only some processes of a host see: a private /tmp, and the image of a container."""

import os
import re
from typing import NamedTuple

from ...host.procfs import FIRST_PID_NAMESPACE, lines_of


class Mount(NamedTuple):
    """A line of mountinfo, see proc(5): the directory ``root`` of a file system is mounted at ``point``."""

    device: str
    root: str
    point: str
    kind: str
    source: str
    options: str


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts of a text as in /proc/PID/mountinfo."""
    found = []
    for line in text.split("\n"):
        fields, _, tail = line.partition(" - ")
        parts, end = fields.split(" "), tail.split(" ")
        if len(parts) >= 6 and tail:
            source = _plain(end[1]) if len(end) > 2 else ""
            found.append(Mount(parts[2], _plain(parts[3]), _plain(parts[4]), end[0], source, end[-1]))
    return found


def _plain(name: str) -> str:
    """Return a name without the octal escapes that the kernel writes for blanks."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def mount_of(path: str, mounts: list[Mount]) -> Mount | None:
    """Return the mount of a path: the one with the longest mount point, and the last of these."""
    best = None
    for mount in mounts:
        below = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if below and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def private_to(root: str) -> str:
    """Return what a mount is private to, by the directory of its file system that is mounted; "" where nothing says so.

    >>> private_to("/tmp/systemd-private-0a1b-foo.service-XyZ/tmp")
    'private to foo.service (PrivateTmp of systemd)'
    >>> private_to("/var/spool/4711/.4711")
    'private to job 4711 (job_container/tmpfs of Slurm)'
    """
    service = re.search(r"/systemd-private-[0-9a-f]+-(.+?)-[^-/]+(/|$)", root)
    if service:
        return f"private to {service[1]} (PrivateTmp of systemd)"
    job = re.search(r"/(\d+)/\.\1(/|$)", root)
    if job:
        return f"private to job {job[1]} (job_container/tmpfs of Slurm)"
    if re.search(r"[/-]tmp[.-]inst(/|$)", root):
        return "private to each user (pam_namespace)"
    return ""


_MARKERS = ("run/.containerenv", ".dockerenv", "run/host/container-manager", "run/systemd/container")

# What engines mount for a container, and what runtimes hide from it. systemd hides other files of /proc.
_ENGINES_MOUNT = frozenset({"/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/proc/keys", "/proc/timer_list"})

_INITIAL = {"pid": FIRST_PID_NAMESPACE, "uts": 4026531838, "ipc": 4026531839}  # constants of the kernel

_IMAGE_TYPES = ("overlay", "fuse-overlayfs", "fuse.fuse-overlayfs", "aufs")


def in_container(mounts: list[Mount], root: str = "/") -> bool:
    """Return whether this process runs in a container.

    A marker alone does not say so: a virtual machine may have been made from an image. Nor do namespaces alone: batch
    systems and systemd use them too. Apptainer keeps all namespaces but that of mounts.

    Args:
        mounts: those of this process.
        root: the directory that has ``proc`` and the markers.
    """
    if os.path.isdir(os.path.join(root, ".singularity.d")):
        return True
    if all(_is_initial(root, name, inode) for name, inode in _INITIAL.items()):
        return False
    marked = any(os.path.exists(os.path.join(root, name)) for name in _MARKERS)
    return marked or any(mount.point in _ENGINES_MOUNT for mount in mounts)


def _is_initial(root: str, name: str, inode: int) -> bool:
    try:
        return os.readlink(os.path.join(root, "proc/self/ns", name)) == f"{name}:[{inode}]"
    except OSError:
        return False


def is_of_image(mount: Mount) -> bool:
    """Return whether this mount, in a container, is its root, from an image, and no directory that was mounted into
    it."""
    on_disk = mount.source.startswith("/dev/") and mount.root.count("/") < 2
    return mount.point == "/" and (mount.kind in _IMAGE_TYPES or not on_disk)


def privacy_of(path: str) -> str:
    """Return what is to be said of a state directory that is private to some processes, after its path; "" if nothing
    is."""
    mounts = parse_mounts(os.fsdecode(b"".join(lines_of("/proc/self/mountinfo"))))
    mount = mount_of(os.path.realpath(path), mounts)
    if mount is None:
        return ""
    private = private_to(mount.root)
    if private:
        return (
            f"is {private}: GPUs that are claimed elsewhere on this host are not taken, but queues do not meet; set "
            "SAFE_GPU_DIR, for all users and jobs, to a directory that all of them see"
        )
    if is_of_image(mount) and in_container(mounts):
        return (
            "belongs to this container, and claims outside it are not seen, nor do they see this one, unless it has "
            f"the network of the host: start it with -v {path}:{path}"
        )
    return ""
