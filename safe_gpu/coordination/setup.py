"""Makes a state directory of root's, replaces what has become slow in it, and removes it."""

import os
import re
import shutil
import stat
import time
from contextlib import suppress

from ..errors import StateDirError
from ..host.procfs import user_name
from ..host.signals import DeferredSignals
from .crowds import MANY, is_grown
from .directory import (
    DIR_MODE,
    HOST_LOCK,
    PARTS,
    Directory,
    SharedDirectory,
    exchange,
    is_everybodys,
    make_directory,
    refusal_of_error,
    setup_command,
)
from .entries import Entries, living_entries
from .entry import is_alive
from .host_lock import MINIMUM_PATIENCE, Host

_REMOVED = {
    "claims": r"[0-9]*\.[0-9a-f]{16}",
    "queue": r"[0-9]*\.[0-9a-f]{16}",
    "faults": r".+\.[0-9]+",
    "history": r".+\.(seen|idle)|looks|\..+",
    ".": rf"{re.escape(HOST_LOCK)}|\..+",
}
"""Names that are removed from each directory, except living entries: files of no further use, and unfinished ones."""


_OF_ENTRIES = ("claims", "queue")

_HIDDEN = re.compile(r"\.(claims|queue)\.[0-9a-f]{16}")


def examine(path: str) -> list[str]:
    """Return what a state directory of root's lacks, relative to it, in the order in which it is to be made.

    Args:
        path: below directories that nobody but root can change.

    Raises:
        StateDirError: the directory, one in it or host.lock is not root's or not open to all, or there is something
            else in its place. Nothing of another user is changed or taken over.
    """
    missing = []
    for name in (".", *PARTS, HOST_LOCK):
        place = os.path.normpath(os.path.join(path, name))
        try:
            status = os.lstat(place)
        except FileNotFoundError:
            missing.append(name)
            continue
        why = _wrong(name, status)
        if why:
            raise StateDirError(
                f"{place} {why}: name another directory, or move this one away (mv {path} {path}.old) and run "
                f"{setup_command(path)} again",
                path=place,
            )
    return missing


def _wrong(name: str, status: os.stat_result) -> str:
    if status.st_uid:
        return f"belongs to {user_name(status.st_uid)}"
    if name == HOST_LOCK:
        if not is_everybodys(status) or status.st_nlink != 1:
            return "is not a file with mode 0666 and one name"
        return ""
    if status.st_mode != stat.S_IFDIR | DIR_MODE:
        return "is not a directory with mode 1777"
    return ""


def make(path: str) -> None:
    """Make what :func:`examine` has found to be missing. Look again afterwards: others may have made it meanwhile.

    Raises:
        StateDirError: a directory or a file cannot be made.
    """
    with SharedDirectory(path) as root:
        for part in PARTS:
            Directory(root, part).close()
        os.close(root.open_known(HOST_LOCK, make=True)[0])


def slow_directories(path: str) -> list[str]:
    """Return which directories of entries have very many names, or have had them, relative to the state directory.

    Raises:
        StateDirError: they cannot be read.
    """
    slow = []
    for part in _OF_ENTRIES:
        with suppress(FileNotFoundError), Directory(path, part, make=False) as directory:
            number = len(directory.names())
            if number > MANY or is_grown(directory, number):
                slow.append(part)
    return slow


def make_anew(path: str, part: str) -> None:
    """Replace a directory of entries by one with those that live and count. Nobody waits: waiters would lose their
    places.

    All that live have both directories as long as it takes, so nobody misses one, whichever he lists.

    Raises:
        StateDirError: it cannot be made, or the file system cannot exchange directories.
        LockTimeout: host.lock is held.
    """
    hidden = f".{part}.{os.urandom(8).hex()}"
    with DeferredSignals() as signals, Host(path) as host:
        host.prepare(recheck_all=True)
        entries = {"claims": host.claims, "queue": host.queue}[part]
        with host.locked(time.monotonic() + MINIMUM_PATIENCE, signals), SharedDirectory(path) as root:
            make_directory(hidden, os.path.join(path, hidden), root.fd)
            with Directory(root, hidden) as new:
                _link_living(entries, new)
            try:
                exchange(hidden, part, root.fd)
            except OSError as err:
                raise refusal_of_error(os.path.join(path, part), err, verb="exchanged") from err


def _link_living(entries: Entries, new: Directory) -> None:
    for entry in entries.look(()):
        with suppress(FileNotFoundError):  # it has ended
            os.link(entry.name, entry.name, src_dir_fd=entries.directory.fd, dst_dir_fd=new.fd, follow_symlinks=False)


def remove_hidden(path: str) -> list[str]:
    """Remove directories of root's that were exchanged, or that a kill left before, and return the names of those that
    cannot be removed."""
    left = []
    with SharedDirectory(path, make=False) as root:
        for name in sorted(root.names()):
            if not _HIDDEN.fullmatch(name) or os.stat(name, dir_fd=root.fd, follow_symlinks=False).st_uid != 0:
                continue
            with Directory(root, name, make=False) as directory:
                os.fchmod(directory.fd, 0o700)  # who has it open can make no more files in it
            with suppress(RecursionError):  # others may have made directories, as deep as they wish
                shutil.rmtree(os.path.join(path, name), ignore_errors=True)
            if root.has(name):
                left.append(name)
    return left


def in_use(path: str) -> tuple[list[str], int]:
    """Return the UUIDs of the GPUs that are claimed there, and how many waiters there are.

    Raises:
        StateDirError: it cannot be read.
    """
    living = [*living_entries(path, "claims"), *living_entries(path, "queue")]
    claimed = {uuid for entry in living if not entry.nb_gpus for uuid in entry.gpus}
    return sorted(claimed), sum(entry.nb_gpus > 0 for entry in living)


def remove(path: str, *, carry_out: bool) -> list[str]:
    """Remove a state directory of root's in which nothing is held, and return what stays, relative to it.

    Args:
        carry_out: False changes nothing.

    Raises:
        FileNotFoundError, StateDirError: there is none, or it cannot be opened.
    """
    left: list[str] = []
    with SharedDirectory(path, make=False) as root:
        for part in PARTS:
            with suppress(FileNotFoundError), Directory(path, part, make=False) as directory:
                stays = _rest(directory, part, carry_out)
                left += [os.path.join(part, name) for name in sorted(stays)]
                if carry_out and not stays:
                    os.rmdir(part, dir_fd=root.fd)
        left += sorted(_rest(root, ".", carry_out) - {*PARTS})
    if carry_out and not left:
        os.rmdir(path)
    return left


def _rest(directory: SharedDirectory, part: str, carry_out: bool) -> set[str]:
    """Return the names that stay in a directory, and remove the others if that is to be."""
    names = directory.names()
    files = (name for name in names if re.fullmatch(_REMOVED[part], name) and _is_file(directory, name))
    gone = {name for name in files if not is_alive(directory, name)}
    if carry_out:
        for name in gone:
            os.unlink(name, dir_fd=directory.fd)
    return names - gone


def _is_file(directory: SharedDirectory, name: str) -> bool:
    return not stat.S_ISDIR(os.stat(name, dir_fd=directory.fd, follow_symlinks=False).st_mode)
