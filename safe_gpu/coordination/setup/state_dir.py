"""Makes a state directory of root's, and removes it."""

import os
import stat
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack, suppress

from ...errors import StateDirError
from ...host.procfs import user_name
from ..directory import DIR_MODE, PARTS, is_everybodys
from ..files.state_dir import StateDir
from ..leases.lease import probe
from ..locks.host_lock import MINIMUM_PATIENCE, HostLock
from ..queue.listing import Listing
from ..queue.live import live_tickets
from ..state_dir import setup_command


def examine(path: str, leases: Iterable[str]) -> dict[str, str]:
    """Return what a state directory of root's with these lease files lacks, in the order in which it is to be made.

    Returns:
        Name, relative to the directory ("." for itself) -> "" if it is to be made, else what is wrong with the lease
        file of that name, which somebody has made.

    Raises:
        StateDirError: the directory, one in it or host.lock is not root's, or there is something else in its place.
    """
    found: dict[str, str] = {}
    opened: dict[str, StateDir | None] = {}
    with ExitStack() as stack:
        for name in (".", *PARTS):
            directory = opened[name] = None
            with suppress(FileNotFoundError):
                if name == "." or opened["."] is not None:
                    directory = opened[name] = stack.enter_context(_open(path, name, opened.get("."), make=False))
            status = None if directory is None else os.fstat(directory.fd)
            mode = None if status is None else stat.S_IMODE(status.st_mode)
            if status is not None and status.st_uid != 0:
                raise _refusal(path, name, f"belongs to {user_name(status.st_uid)}")
            if mode != DIR_MODE:  # somebody may have named a home, or moved a directory here that is to stay closed
                if mode is not None and directory is not None and not directory.is_empty():
                    raise _refusal(path, name, f"has mode {mode:04o} and is not empty")
                found[name] = ""
        for name in ("host.lock", *(f"leases/{lease}" for lease in leases)):
            directory = opened[os.path.dirname(name) or "."]
            status = directory.status(os.path.basename(name)) if directory else None
            if status is None:
                found[name] = ""
            elif status.st_uid:
                found[name] = f"belongs to {user_name(status.st_uid)}"
            elif status.st_nlink != 1 or not is_everybodys(status):
                found[name] = "is no file with mode 0666 and one name"
        if found.get("host.lock"):
            raise _refusal(path, "host.lock", found["host.lock"])
    return found


def _refusal(path: str, name: str, why: str) -> StateDirError:
    """Return the error about something that stands in the way. Nothing of another user is changed or taken over."""
    place = os.path.normpath(os.path.join(path, name))
    return StateDirError(
        f"{place} {why}: name another directory, or move this one away (mv {path} {path}.old) and run "
        f"{setup_command(path)} again",
        path=place,
    )


def make(path: str, missing: Mapping[str, str]) -> None:
    """Make what :func:`examine` has found to be missing. Look again afterwards: others may have made it meanwhile.

    Raises:
        StateDirError: a directory or a file cannot be made.
    """
    with StateDir(path) as root, ExitStack() as stack:
        parts = {part: stack.enter_context(StateDir(part, root)) for part in PARTS}
        for name in (one for one, wrong in missing.items() if not wrong and one not in (".", *PARTS)):
            part, file = os.path.split(name)
            os.close((parts[part] if part else root).open_or_create(file))


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
