"""Checks whether all users of a host see the same claims and processes."""

import os
import re

from ...coordination.files.mounts import Mount, in_container, is_of_image, mount_of, parse_mounts, private_to
from ...gpus.devices import HostSnapshot
from ...host import procfs
from ..check import CheckedHost, Finding, passed, skipped, warning
from .directory import TOGETHER


def _location(path: str, mounts: list[Mount]) -> tuple[str, str] | None:
    """Return (device, path inside the file system): equal for two paths if they are the same directory."""
    mount = mount_of(path, mounts)
    if mount is None:
        return None
    return mount.device, os.path.normpath(os.path.join(mount.root, os.path.relpath(path, mount.point)))


def private_directory(host: CheckedHost) -> Finding:
    """Check that all jobs of this host see the same state directory."""
    path = os.path.realpath(host.path)
    mounts = parse_mounts(host.read("proc/self/mountinfo") or "")
    mount = mount_of(path, mounts)
    if mount is None:
        return skipped("/proc/self/mountinfo cannot be read")
    contained = in_container(mounts, host.root)
    mount_it = f"start the container with -v {path}:{path} (docker, podman, nerdctl) or --bind {path} (apptainer)"
    if contained and is_of_image(mount):
        return warning(
            f"{path} belongs to this container and is not mounted from the host: claims inside and "
            "outside do not see each other unless the container has the network of the host, where claims meet by name",
            mount_it,
        )
    sign = _sign_of_privacy(mount, host)
    if sign:
        return warning(
            f"{path} is on {mount.point}, which {sign}: claims here and elsewhere exclude each other, but do not show "
            "who made them, and their queues do not meet",
            TOGETHER,
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
            mount_it if is_of_image(mount) else TOGETHER,  # a container with the host's other namespaces
        )
    return passed(f"{path} is the same directory for the rest of the host")


def _sign_of_privacy(mount: Mount, host: CheckedHost) -> str:
    """Return why a mount is known to be private, as the end of a sentence; "" if there is no sign of that."""
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
    """Check that the processes that the driver reports are visible."""
    snapshot = host.snapshot or HostSnapshot(())
    processes = [process for gpu in snapshot.gpus for process in gpu.processes or ()]
    unseen = {
        one.pid for one in processes if one.elsewhere or (not procfs.exists(one.pid) and procfs.has_ended(one.pid))
    }
    if unseen:
        return warning(
            f"{len(unseen)} of {len({one.pid for one in processes})} processes on the GPUs cannot be seen from here (a "
            "container?): their GPUs count as busy, but their users are not known",
            "start the container with --pid=host",
        )
    mount = mount_of("/proc", parse_mounts(host.read("proc/self/mountinfo") or ""))
    option = re.search(r"hidepid=(?!0|off)\w+", mount.options) if mount else None
    if option and os.geteuid() != 0:
        return warning(
            f"/proc is mounted with {option[0]}: the commands and users of other users' processes are not visible",
            "ask root to add you to the group of the mount option gid=, or to remount /proc without hidepid",
        )
    if host.link("proc/self/ns/pid") not in (None, f"pid:[{procfs.FIRST_PID_NAMESPACE}]"):
        return warning(
            "this is not the initial pid namespace (a container?): claims made outside are respected, but their "
            "processes cannot be shown",
            "start the container with --pid=host",
        )
    return passed("all processes of the host can be seen")
