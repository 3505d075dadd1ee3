"""A lock that keeps cleaners of /tmp away: systemd-tmpfiles skips a directory that somebody has locked."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..files.descriptors import fork_guard
from ..held import file_of, survive_exec
from .flock import unlock_file

if TYPE_CHECKING:
    from .host_lock import LockedHost


class StateDirGuard:
    """A shared flock on the state directory, on a descriptor of its own; made without one.

    Everybody may share it, and nobody waits for it: if a cleaner holds it just now,
    the claim goes on without it.

    Args:
        by_children: whether forked children keep it too, as they keep leases.
    """

    def __init__(self, *, by_children: bool) -> None:
        self._by_children = by_children
        self._fd = -1
        self._owner = -1
        self._file: tuple[int, int] | None = None

    def hold(self, host: LockedHost) -> None:
        """Take it, where it is not held yet."""
        import fcntl

        if self._fd >= 0:
            return
        try:
            fd = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=host.leases.fd)
        except OSError:
            return
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return
        if not self._by_children:
            fork_guard.add(fd)
        self._fd, self._owner, self._file = fd, os.getpid(), file_of(fd)

    def release(self) -> None:
        """Give it back; safe to call twice. In a forked child this only closes the child's copy, where it has one."""
        fd, self._fd = self._fd, -1
        is_ours = fork_guard.discard(fd) if not self._by_children else fd >= 0 and file_of(fd) == self._file
        if not is_ours:
            return
        try:
            if os.getpid() == self._owner:
                unlock_file(fd)
        finally:
            os.close(fd)

    def keep_across_exec(self) -> None:
        """Let it survive exec(2)."""
        if self._fd >= 0:
            self._fd = survive_exec(self._fd)
