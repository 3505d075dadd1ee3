"""Makes a state directory of root's, and removes it."""

import os
import stat
import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack, suppress

from ...errors import StateDirError
from ..files.shared_directory import DIR_MODE, PARTS
from ..files.state_dir import StateDir
from ..leases.lease import probe
from ..locks.host_lock import MINIMUM_PATIENCE, HostLock
from ..queue.listing import Listing
from ..queue.live import live_tickets
from .entries import SKIP, TAKE, Entry, directory_entry, file_entry


def examine(path: str, leases: Iterable[str]) -> list[Entry]:
    """Return what is to be done for a state directory of root's with these lease files, in that order.

    A directory that is to be skipped is the last entry: nothing can be done then.

    Raises:
        StateDirError: it is a link, or no directory.
    """
    found: list[Entry] = []
    opened: dict[str, StateDir | None] = {}
    with ExitStack() as stack:
        for name in (".", *PARTS):
            directory = None
            with suppress(FileNotFoundError):
                if name == "." or opened["."] is not None:
                    directory = stack.enter_context(_open(path, name, opened.get("."), make=False))
            status, empty = (os.fstat(directory.fd), directory.is_empty()) if directory else (None, True)
            opened[name] = directory
            found.append(directory_entry(name, status, empty=empty))
            if found[-1].action == SKIP:
                return found
        for name in ("host.lock", *(f"leases/{lease}" for lease in leases)):
            directory = opened[os.path.dirname(name) or "."]
            found.append(file_entry(name, directory.status(os.path.basename(name)) if directory else None))
    return found


def carry_out(path: str, entries: Iterable[Entry]) -> None:
    """Do what :func:`examine` has found. Look again afterwards: others may change what is theirs meanwhile.

    Everything is opened from the directory above it, without following links, looked at once more, and changed by its
    descriptor.

    Raises:
        StateDirError: a directory cannot be made, or was replaced.
    """
    opened: dict[str, StateDir] = {}
    with ExitStack() as stack:
        for entry in entries:
            part, name = os.path.split(entry.name)
            if name in (".", *PARTS):
                directory = opened[name] = stack.enter_context(_open(path, name, opened.get("."), make=True))
                status = os.fstat(directory.fd)
                if directory_entry(name, status, empty=directory.is_empty()).action == TAKE:
                    os.fchown(directory.fd, 0, 0)
                    os.fchmod(directory.fd, DIR_MODE)
                continue
            with suppress(StateDirError):  # the next look tells
                fd = opened[part or "."].open_or_create(name)
                if file_entry(name, os.fstat(fd)).action == TAKE:
                    os.fchown(fd, 0, 0)
                os.close(fd)


def _open(path: str, name: str, root: StateDir | None, *, make: bool) -> StateDir:
    return StateDir(path, make=make) if root is None else StateDir(name, root, make=make)


_BATCH = 500  # lease files that are tried under one hold of host.lock: others wait meanwhile


def in_use(path: str) -> tuple[list[str], int]:
    """Return the lease files there that are held, whichever GPUs they are of, and how many waiters there are.

    Raises:
        LockTimeout, StateDirError: they cannot be read.
    """
    held: list[str] = []
    listing = Listing()
    waiters: Collection[object] = ()
    try:
        with StateDir(path, make=False) as root, StateDir("leases", root, make=False) as leases:
            names = sorted(name for name in leases.names() if name.endswith(".lock"))
            with StateDir("queue", root, make=False) as queue:
                listing.update(queue)
        for start in range(0, len(names) + 1, _BATCH):
            with HostLock(time.monotonic() + MINIMUM_PATIENCE, path, make=False) as host:
                waiters = live_tickets(host, listing)
                for name in names[start : start + _BATCH]:
                    with suppress(StateDirError):  # what cannot be opened holds nothing
                        held += [name] * probe(host, name)
    except FileNotFoundError:
        pass  # nothing is claimed by file
    return held, len(waiters)


_REMOVED = {"leases": (".lock", ".fault"), "queue": (".ticket",), "history": (".idle",), ".": ("host.lock",)}
"""What goes of each directory: of what claims left, all that is of no use without it."""


def remove(path: str, *, carry_out: bool) -> list[str]:
    """Remove a state directory of root's in which nothing is held, and return what stays, relative to it.

    Args:
        carry_out: False changes nothing.

    Raises:
        FileNotFoundError, StateDirError: there is none, or it cannot be opened.
    """
    left: list[str] = []
    with StateDir(path, make=False) as root:
        for part, endings in _REMOVED.items():
            with suppress(FileNotFoundError), StateDir(part, root, make=False) as directory:
                names = {name for name in directory.names() if not _goes(directory, name, endings, carry_out)}
                stays = sorted(names - {*PARTS}) if part == "." else sorted(names)
                left += [os.path.normpath(os.path.join(part, name)) for name in stays]
                if carry_out and not stays and part != ".":
                    os.rmdir(part, dir_fd=root.fd)
    if carry_out and not left:
        os.rmdir(path)
    return left


def _goes(directory: StateDir, name: str, endings: tuple[str, ...], carry_out: bool) -> bool:
    """Return whether a file goes, which is removed if that is to be. One whose name begins with a dot was in the
    making."""
    status = directory.status(name)
    if status is None or stat.S_ISDIR(status.st_mode) or not (name.endswith(endings) or name.startswith(".")):
        return False
    return not carry_out or directory.unlink(name)
