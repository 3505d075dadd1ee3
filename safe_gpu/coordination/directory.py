"""A directory of entries while it is open: ``claims`` or ``queue`` below the state directory.

Everybody may make files in it (mode 1777), and nobody but its owner removes those of others. It is never a symbolic
link, and nothing in it is followed.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from ..errors import StateDirError
from .files.file_system import NETWORK_TYPES, file_system_at
from .files.refusals import refusal_of_error
from .files.shared_directory import open_shared
from .held import Held


class Directory:
    """An open directory of entries; use it in ``with`` or close it.

    Args:
        state_dir: absolute path of the state directory.
        name: of the directory in it.
        make: whether they are made where they are missing. Who only looks makes nothing.

    Raises:
        StateDirError: a symbolic link, not a directory, not writable, on a network file system, no room.
        FileNotFoundError: it is missing, and is not to be made.
    """

    def __init__(self, state_dir: str, name: str, *, make: bool = True) -> None:
        self.path: str = os.path.join(state_dir, name)
        self.fd: int = -1
        self._name, self._state_dir, self._above = name, state_dir, -1
        while self.fd < 0:
            try:
                self._open(make)
            except BaseException as err:
                removed = self._above >= 0 and os.fstat(self._above).st_nlink == 0
                self.close()
                if not (make and removed and isinstance(err, StateDirError)):  # else a cleaner was faster
                    raise

    def _open(self, make: bool) -> None:
        self._above = open_shared(self._state_dir, self._state_dir, None, make=make)
        kind = file_system_at(self._state_dir, os.fstat(self._above).st_dev).kind
        if kind in NETWORK_TYPES:
            raise StateDirError(
                f"{self._state_dir} is on a network file system ({kind}), where locks do not work as on a local one: "
                "set SAFE_GPU_DIR to a directory on a local disk or tmpfs that all jobs of this host share",
                path=self._state_dir,
            )
        self.fd = open_shared(self._name, self.path, self._above, make=make)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it; safe to call twice."""
        above, fd, self._above, self.fd = self._above, self.fd, -1, -1
        for one in (above, fd):
            if one >= 0:
                os.close(one)

    def names(self) -> set[str]:
        """Return the names in it; StateDirError if it cannot be read.

        They are read through a descriptor of their own: threads and forked children that share one share its place in
        the listing, and each would miss some names.
        """
        try:
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                return set(os.listdir(fd))
            finally:
                os.close(fd)
        except OSError as err:
            raise refusal_of_error(self.path, err) from err

    def is_current(self) -> bool:
        """Return whether its path still leads to it. A cleaner may have removed it, and others made it anew: then they
        do not see what is in this one."""
        try:
            above = os.stat(self._state_dir, follow_symlinks=False)
            here = os.stat(self._name, dir_fd=self._above, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(above, os.fstat(self._above)) and os.path.samestat(here, os.fstat(self.fd))

    def keep_from_cleaners(self, *, by_children: bool) -> Held | None:
        """Lock the state directory, as systemd-tmpfiles skips a directory that somebody has locked; None where a
        cleaner holds it just now. Everybody may share the lock, and nobody waits for it."""
        with suppress(OSError):
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._above)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
            else:
                return Held(fd, by_children=by_children, unlock=_unlock)
        return None

    def error(self, name: str, err: OSError) -> StateDirError:
        """Return why a file in it cannot be opened or made."""
        return refusal_of_error(os.path.join(self.path, name), err)


def _unlock(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)
