"""Checks of what keeps users of one host from seeing each other, and of the others that can be seen."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from .. import procfs
from ..coordination import legacy
from ..devices import HostSnapshot
from ..status import ClaimStatus
from .check import Finding, Host, passed, skipped, warning

__all__ = ["clock", "older_package", "private_directory", "process_namespace", "suspended"]

_TOGETHER = "set SAFE_GPU_DIR, for all users and jobs, to a directory that all of them see, with mode 1777"

# The inode of the first pid namespace is a constant of the kernel (PROC_PID_INIT_INO); that of mounts is not.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"

_CONTAINER_TYPES = ("overlay", "fuse-overlayfs", "fuse.fuse-overlayfs", "aufs")
_CLOCK_SLACK = 60.0


# Mounts


class _Mount(NamedTuple):
    """A line of mountinfo, see proc(5): ``root`` is the directory of the file system that is seen at ``point``."""

    device: str
    root: str
    point: str
    kind: str
    options: str


def _mounts(text: str) -> list[_Mount]:
    found = []
    for line in text.splitlines():
        fields, _, tail = line.partition(" - ")
        parts, end = fields.split(), tail.split()
        if len(parts) >= 6 and end:
            found.append(_Mount(parts[2], _plain(parts[3]), _plain(parts[4]), end[0], end[-1]))
    return found


def _plain(name: str) -> str:
    """The kernel writes blanks in names as octal escapes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def _mount_of(path: str, mounts: list[_Mount]) -> _Mount | None:
    """The mount that a path lies on: the one with the longest mount point, the last of these."""
    best = None
    for mount in mounts:
        below = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if below and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _location(path: str, mounts: list[_Mount]) -> tuple[str, str] | None:
    """(file system, path inside it), which is the same for all who mean the same directory."""
    mount = _mount_of(path, mounts)
    if mount is None:
        return None
    inside = os.path.relpath(path, mount.point)
    return mount.device, os.path.normpath(os.path.join(mount.root, inside))


def private_directory(host: Host) -> Finding:
    """Do all jobs of this host see the same state directory?"""
    path = os.path.realpath(host.path)
    mounts = _mounts(host.read("proc/self/mountinfo") or "")
    mount = _mount_of(path, mounts)
    if mount is None:
        return skipped("/proc/self/mountinfo cannot be read")
    sign = _sign_of_privacy(mount, host)
    if sign:
        return warning(f"{path} lies on {mount.point}, which {sign}: claims elsewhere are not seen", _TOGETHER)
    own, first = host.link("proc/self/ns/mnt"), host.link("proc/1/ns/mnt")
    if own is not None and own == first:
        return passed(f"{path} is the same for all processes of this host or container")
    outside = _mounts(host.read("proc/1/mountinfo") or "")
    if not outside:
        return passed(f"no sign that {path} is private; as this user, the rest of the host cannot be compared")
    if _location(path, mounts) != _location(path, outside):
        return warning(
            f"{path} is private to this mount namespace: the rest of the host means another directory by that name",
            _TOGETHER,
        )
    return passed(f"{path} is what the rest of the host means by that name, too")


def _sign_of_privacy(mount: _Mount, host: Host) -> str:
    """What gives a private mount away, as the end of a sentence."""
    service = re.search(r"/systemd-private-[0-9a-f]+-(.+?)-[^-/]+(/|$)", mount.root)
    if service:
        return f"is private to {service[1]} (PrivateTmp of systemd)"
    job = re.search(r"/(\d+)/\.\1(/|$)", mount.root)
    if job:
        return f"is private to job {job[1]} (job_container/tmpfs of Slurm)"
    if re.search(r"[/-]tmp[.-]inst(/|$)", mount.root):
        return "is private to each user (pam_namespace)"
    if mount.kind in _CONTAINER_TYPES and mount.point == "/":
        return "is private to this container: mount a directory of the host there"
    if mount.point in ("/tmp", "/dev/shm", "/var/tmp"):
        try:
            status = os.stat(os.path.join(host.root, mount.point[1:]))
        except OSError:
            return ""
        if status.st_uid and not status.st_mode & 0o007:
            return f"belongs to {procfs.user_name(status.st_uid)} alone (as schedulers set up for one job)"
    return ""


def process_namespace(host: Host) -> Finding:
    """Can the processes be seen that the driver speaks of?"""
    snapshot = host.snapshot or HostSnapshot(())
    pids = {process.pid for gpu in snapshot.gpus for process in gpu.processes or ()}
    unseen = {pid for pid in pids if not procfs.exists(pid)}
    hidden = {pid for pid in unseen if not procfs.has_ended(pid)}
    name = host.link("proc/self/ns/pid")
    if unseen - hidden:
        return warning(
            f"{len(unseen - hidden)} of {len(pids)} processes on the GPUs cannot be seen from here (a container?): "
            "their GPUs count as busy, but nobody can say whose they are",
            "start the container with --pid=host",
        )
    mount = _mount_of("/proc", _mounts(host.read("proc/self/mountinfo") or ""))
    option = re.search(r"hidepid=(?!0|off)\w+", mount.options) if mount else None
    if option and os.geteuid() != 0:
        return warning(
            f"/proc is mounted with {option[0]}: other users' processes have no names here",
            "ask root to add you to the group of the mount option gid=, or to remount /proc without hidepid",
        )
    if name is not None and name != _FIRST_PID_NAMESPACE:
        return warning(
            "this is a process namespace of its own (a container?): claims made outside hold, but cannot be named",
            "start the container with --pid=host",
        )
    return passed("all processes of the host can be seen")


# The others


def _claims(host: Host) -> Iterator[tuple[str, ClaimStatus]]:
    for one in host.status.gpus:
        for claim in (one.claim, one.inner):
            if claim is not None:
                yield one.gpu.label, claim


def suspended(host: Host) -> Finding:
    """Is somebody who holds GPUs or waits for them stopped?"""
    stopped: dict[str, int | None] = {}
    for label, claim in _claims(host):
        if claim.stopped:
            stopped.setdefault(f"process {claim.pid} ({claim.user or 'unknown'}), which holds GPU {label}", claim.pid)
    for waiter in host.status.queue:
        if waiter.stopped:
            who = f"process {waiter.pid} ({waiter.user or 'unknown'}), which waits at place {waiter.position}"
            stopped.setdefault(who, waiter.pid)
    if stopped:
        pids = " ".join(str(pid) for pid in dict.fromkeys(stopped.values()))
        return warning(
            f"stopped: {'; '.join(stopped)}",
            f"resume the job (qmod -usj, scontrol resume), or kill -CONT {pids}, or end it",
        )
    if host.status.warnings:
        return skipped(host.status.warnings[0])
    return passed("nobody who holds or waits is stopped")


def clock(host: Host) -> Finding:
    """Were claims made in the future?"""
    latest = time.time() + _CLOCK_SLACK
    times = [(claim.since, f"the claim of GPU {label}") for label, claim in _claims(host)]
    times += [(waiter.since, f"the wait at place {waiter.position}") for waiter in host.status.queue]
    for since, what in times:
        if since is not None and since > latest:
            return warning(
                f"{what} began {round(since - time.time())} s in the future",
                "set the clock of this host (timedatectl set-ntp true); ages are wrong until then, claims are not",
            )
    return passed("no claim comes from the future")


def older_package(host: Host) -> Finding:
    """Is safe-gpu 1.x or 2.0 in use here, and can its lock be taken too?"""
    path, directory = legacy.LOCK_FILE, os.path.dirname(legacy.LOCK_FILE)
    # Never opened: with the descriptor would go a POSIX lock that this very process holds on it.
    try:
        inode = os.stat(path).st_ino
        closed = not os.access(path, os.R_OK | os.W_OK)
    except FileNotFoundError:
        return passed("safe-gpu 1.x or 2.0 has not been used here")
    except OSError:
        inode, closed = 0, True
    if closed:
        return warning(
            f"safe-gpu 1.x or 2.0 is used here, and its lock {path} is closed to you: its users may collide with you",
            f"as owner or root: chmod 1777 {directory} && chmod 666 {path}; better, upgrade its users",
        )
    if host.environ.get("SAFE_GPU_LEGACY_LOCK") == "never":
        return warning("safe-gpu 1.x or 2.0 is used here, and its lock is not taken", "unset SAFE_GPU_LEGACY_LOCK")
    holders = procfs.flock_holders({inode}).get(inode, [])
    now = f"; process {holders[0]} ({procfs.user_of(holders[0])}) holds it now" if holders else ""
    return passed(f"safe-gpu 1.x or 2.0 has been used here: claims take its lock, too{now}")
