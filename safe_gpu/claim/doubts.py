"""What a claim is told of a state directory that may not keep others off its GPUs."""

import os
from collections.abc import Iterable
from functools import cache

from ..coordination.state_dir import remover_of, setup_command
from ..host import file_systems, procfs

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
    kind, point = file_systems.file_system_at(above, os.stat(above).st_dev)
    if point != "/" or kind not in _OF_IMAGES or file_systems.sees_network_devices():
        return ""
    return (
        f"the state directory {procfs.printable_lines(path)} belongs to this container, and claims outside it are not "
        f"seen, nor do they see this one, unless it has the network of the host: start it with -v {path}:{path}"
    )


@cache  # every claim asks, and is told once
def doubt_of_entries(path: str, user: int, *, doors: bool) -> str:
    """Return what a claim of this process is to be told of its entry; "" for nothing.

    A claim that has doors keeps its GPUs without its entry, in its own network namespace. Those of other processes
    cannot be read, but the host's has the network interfaces that are devices.

    Args:
        path: the state directory.
        user: uid of this process.
        doors: whether the claim has doors.
    """
    uid = remover_of(path, user)
    if uid is None or (doors and file_systems.sees_network_devices()):
        return ""
    why = "this network namespace seems not to be the host's" if doors else "it has no doors"
    ask = "as root" if user == 0 else "ask root to run"
    return (
        f"{procfs.user_name(uid)} can remove the entries of this claim in {procfs.printable(path)}, and nothing else "
        f"keeps others off its GPUs, since {why}: {ask}: {setup_command(path)}"
    )
