"""What a claim is told, once, of its state directory."""

import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

from ...host import procfs
from ..signals import DeferredSignals
from .file_system import file_system_at
from .location import DEFAULT_DIR

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


def stranger_among(owners: Iterable[int], user: int | None) -> int | None:
    """Return the first of these owners who is neither root nor this user; None if there is none. The owner of a file
    and those of the directories above may remove it, sticky bit or not."""
    return next((uid for uid in owners if uid not in (0, user)), None)


@cache
def owners_of(path: str) -> tuple[int, ...]:
    """Return the owners of a state directory and of its leases, which a process asks for once."""
    with DeferredSignals(), suppress(OSError):  # it was removed
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            return os.fstat(fd).st_uid, os.stat("leases", dir_fd=fd, follow_symlinks=False).st_uid
        finally:
            os.close(fd)
    return ()


ADMIN_DIR = "/var/lib/safe-gpu"
"""Where ``safe-gpu setup`` makes the state directory."""


def setup_command(path: str) -> str:
    """Return the command by which root makes a state directory its own, in place of this one or of its files."""
    from shlex import quote

    return "safe-gpu setup" + ("" if path in (ADMIN_DIR, DEFAULT_DIR) else f" --state-dir {quote(path)}")


def doubt_of_leases(path: str, uid: int, *, named: bool) -> str:
    """Return what a claim is to be told of its leases; "" for nothing.

    A claim that has names keeps its GPUs without its leases, in its own network namespace. Those of other processes
    cannot be read, but the host's has the network interfaces that are devices.

    Args:
        path: the state directory.
        uid: who can remove the leases, and is neither root nor this user.
        named: whether the claim has names.
    """
    if named and sees_network_devices():
        return ""
    why = "this network namespace seems not to be the host's" if named else "its names cannot be bound"
    ask = "as root" if os.geteuid() == 0 else "ask root to run"
    return (
        f"{procfs.user_name(uid)} can remove the leases of this claim in {procfs.printable(path)}, and nothing else "
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
