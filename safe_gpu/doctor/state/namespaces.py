"""Checks whether all users of a host see the same claims and processes."""

import os

from ...coordination.state_dir import doubt_of_image
from ...gpus.devices import HostSnapshot
from ...host import procfs
from ..check import CheckedHost, Finding, passed, warning
from .directory import TOGETHER


def _location(path: str, mounts: str | None) -> tuple[str, str] | None:
    """Return the device of a directory and its path on it, by a text as in /proc/PID/mountinfo; None if it does not
    tell."""
    found = None
    longest = ""
    for line in (mounts or "").split("\n"):
        device, root, point = (line.split(" ") + [""] * 5)[2:5]
        if point and f"{path}/".startswith(f"{point.rstrip('/')}/") and len(point) >= len(longest):
            longest, found = point, (device, os.path.normpath(os.path.join(root, os.path.relpath(path, point))))
    return found


def private_directory(host: CheckedHost) -> Finding:
    """Check that the rest of this host has the same state directory."""
    path = os.path.realpath(host.path)
    if doubt := doubt_of_image(path):
        return warning(doubt, f"start the container with -v {path}:{path}")
    here, outside = (_location(path, host.read(f"proc/{process}/mountinfo")) for process in ("self", "1"))
    if here is None or outside is None:
        return passed(f"no sign that {path} is private; this user may not compare it with the rest of the host")
    if here != outside:
        return warning(
            f"{path} is private to this mount namespace (a private /tmp, a container): the rest of the host has "
            "another directory at that path. Claims exclude each other by name only, and their queues do not meet",
            TOGETHER,
        )
    return passed(f"{path} is the same directory for all processes of this host or container")


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
    if os.geteuid() != 0 and host.read("proc/1/stat") is None:
        return warning(
            "/proc is mounted with hidepid: the commands and users of other users' processes are not visible",
            "ask root to add you to the group of the mount option gid=, or to remount /proc without hidepid",
        )
    if host.link("proc/self/ns/pid") not in (None, f"pid:[{procfs.FIRST_PID_NAMESPACE}]"):
        return warning(
            "this is not the initial pid namespace (a container?): claims made outside are respected, but their "
            "processes cannot be shown",
            "start the container with --pid=host",
        )
    return passed("all processes of the host can be seen")
