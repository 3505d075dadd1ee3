"""Checks whether all users of a host see the same claims and processes, and checks the claims of other users."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

from .. import procfs
from ..coordination import legacy
from ..coordination.mounts import Mount, in_container, is_of_image, mount_of, parse_mounts, private_to
from ..devices import HostSnapshot
from ..status.facts import ClaimStatus
from .check import CheckedHost, Finding, passed, skipped, warning

_TOGETHER = "set SAFE_GPU_DIR, for all users and jobs, to a directory that all of them see, with mode 1777"

_FIRST_PID_NAMESPACE = f"pid:[{procfs.FIRST_PID_NAMESPACE}]"

_CLOCK_SLACK = 60.0
_MOST = 10  # processes that one finding names


# Mounts


def _location(path: str, mounts: list[Mount]) -> tuple[str, str] | None:
    """(device, path inside the file system): equal for two paths if they are the same directory."""
    mount = mount_of(path, mounts)
    if mount is None:
        return None
    inside = os.path.relpath(path, mount.point)
    return mount.device, os.path.normpath(os.path.join(mount.root, inside))


def private_directory(host: CheckedHost) -> Finding:
    """Do all jobs of this host see the same state directory?"""
    path = os.path.realpath(host.path)
    mounts = parse_mounts(host.read("proc/self/mountinfo") or "")
    mount = mount_of(path, mounts)
    if mount is None:
        return skipped("/proc/self/mountinfo cannot be read")
    contained = in_container(mounts, host.root)
    mount_it = f"start the container with -v {path}:{path} (docker, podman, nerdctl) or --bind {path} (apptainer)"
    if contained and is_of_image(mount):
        return warning(
            f"{path} belongs to this container and is not mounted from the host: claims outside do not see these, nor "
            "these them, unless the container has the network of the host, where claims meet by name",
            mount_it,
        )
    sign = _sign_of_privacy(mount, host)
    if sign:
        return warning(
            f"{path} is on {mount.point}, which {sign}: claims made elsewhere exclude these, but nobody sees who made "
            "them, and queues do not meet",
            _TOGETHER,
        )
    own, first = host.link("proc/self/ns/mnt"), host.link("proc/1/ns/mnt")
    if own is not None and own == first:
        if contained and mount.point != "/":
            return passed(f"{path} is mounted into this container ({mount.root} of {mount.source} at {mount.point})")
        return passed(f"{path} is the same for all processes of this host or container")
    outside = parse_mounts(host.read("proc/1/mountinfo") or "")
    if not outside:
        return passed(f"no sign that {path} is private; this user may not compare it with the rest of the host")
    if _location(path, mounts) != _location(path, outside):
        return warning(
            f"{path} is private to this mount namespace: the rest of the host has another directory at that path",
            mount_it if is_of_image(mount) else _TOGETHER,  # a container with the host's other namespaces
        )
    return passed(f"{path} is the same directory for the rest of the host")


def _sign_of_privacy(mount: Mount, host: CheckedHost) -> str:
    """Why a mount is known to be private, as the end of a sentence; "" if there is no sign of that."""
    private = private_to(mount.root)
    if private:
        return f"is {private}"
    if mount.point in ("/tmp", "/dev/shm", "/var/tmp"):
        try:
            status = os.stat(os.path.join(host.root, mount.point[1:]))
        except OSError:
            return ""
        if status.st_uid and not status.st_mode & 0o007:
            return f"only {procfs.user_name(status.st_uid)} may use (schedulers set up such directories for one job)"
    return ""


def process_namespace(host: CheckedHost) -> Finding:
    """Are the processes visible that the driver reports?"""
    snapshot = host.snapshot or HostSnapshot(())
    processes = [process for gpu in snapshot.gpus for process in gpu.processes or ()]
    pids = {process.pid for process in processes}
    elsewhere = {process.pid for process in processes if process.elsewhere}
    unseen = {pid for pid in pids if not procfs.exists(pid)} | elsewhere
    hidden = {pid for pid in unseen - elsewhere if not procfs.has_ended(pid)}
    name = host.link("proc/self/ns/pid")
    if unseen - hidden:
        return warning(
            f"{len(unseen - hidden)} of {len(pids)} processes on the GPUs cannot be seen from here (a container?): "
            "their GPUs count as busy, but their users are not known",
            "start the container with --pid=host",
        )
    mount = mount_of("/proc", parse_mounts(host.read("proc/self/mountinfo") or ""))
    option = re.search(r"hidepid=(?!0|off)\w+", mount.options) if mount else None
    if option and os.geteuid() != 0:
        return warning(
            f"/proc is mounted with {option[0]}: the commands and users of other users' processes are not visible",
            "ask root to add you to the group of the mount option gid=, or to remount /proc without hidepid",
        )
    if name is not None and name != _FIRST_PID_NAMESPACE:
        return warning(
            "this is not the initial pid namespace (a container?): claims made outside are respected, but their "
            "processes cannot be shown",
            "start the container with --pid=host",
        )
    return passed("all processes of the host can be seen")


# Claims and waiters


def _claims(host: CheckedHost) -> Iterator[tuple[str, ClaimStatus]]:
    for one in host.status.gpus:
        for claim in (one.claim, one.inner):
            if claim is not None:
                yield one.label, claim


def suspended(host: CheckedHost) -> Finding:
    """Is a process stopped that holds GPUs or waits for them?"""
    stopped: dict[int | None, str] = {}
    for label, claim in _claims(host):
        if claim.stopped:
            stopped.setdefault(claim.pid, f"process {claim.pid} ({claim.user or 'unknown'}), which holds GPU {label}")
    for waiter in host.status.queue:
        if waiter.stopped:
            text = f"process {waiter.pid} ({waiter.user or 'unknown'}), which waits at place {waiter.position}"
            stopped.setdefault(waiter.pid, text)
    if stopped:
        pids, texts = list(stopped)[:_MOST], list(stopped.values())[:_MOST]
        more = f"; and {len(stopped) - _MOST} more" if len(stopped) > _MOST else ""
        return warning(
            f"stopped: {'; '.join(texts)}{more}",
            f"resume the job (qmod -usj, scontrol resume), or kill -CONT {' '.join(map(str, pids))}, or end it",
        )
    if host.status.warnings:
        return skipped(host.status.warnings[0])
    return passed("no process that holds GPUs or waits for them is stopped")


def clock(host: CheckedHost) -> Finding:
    """Does a claim or a ticket have a time in the future?"""
    latest = time.time() + _CLOCK_SLACK
    times = [(claim.since, f"the claim of GPU {label}") for label, claim in _claims(host)]
    times += [(waiter.since, f"the wait at place {waiter.position}") for waiter in host.status.queue]
    for since, what in times:
        if since is not None and since > latest:
            return warning(
                f"{what} began {round(since - time.time())} s in the future",
                "set the clock of this host (timedatectl set-ntp true); the shown ages are wrong until then, but "
                "claims work",
            )
    return passed("no claim has a time in the future")


def older_package(host: CheckedHost) -> Finding:
    """Is safe-gpu 1.x or 2.0 in use here, and can its lock be taken too?"""
    path, directory = legacy.LOCK_FILE, os.path.dirname(legacy.LOCK_FILE)
    # The file must not be opened: closing any descriptor of it would drop a POSIX lock that this process holds on it.
    try:
        inode = os.stat(path).st_ino
        closed = not os.access(path, os.R_OK | os.W_OK)
    except FileNotFoundError:
        return passed("safe-gpu 1.x or 2.0 has not been used here")
    except OSError:
        inode, closed = 0, True
    if closed:
        return warning(
            f"safe-gpu 1.x or 2.0 is used here, and you may not open its lock {path}: its users may collide with you",
            f"have its users upgrade, and then as root: rm -r {directory}",
        )
    if host.environ.get("SAFE_GPU_LEGACY_LOCK") == "never":
        return warning("safe-gpu 1.x or 2.0 is used here, and its lock is not taken", "unset SAFE_GPU_LEGACY_LOCK")
    holders = procfs.flock_holders({inode}).get(inode, [])
    now = f"; process {holders[0]} ({procfs.user_of(holders[0])}) holds it now" if holders else ""
    return passed(f"safe-gpu 1.x or 2.0 has been used here: claims take its lock too{now}")
