"""How the head of the queue watches leases: many times a second, for hours, next to jobs that want the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress

from ...errors import StateDirError
from ..files.descriptors import fork_guard
from ..files.state_dir import StateDir
from ..locks.flock import lock_file, unlock_file
from ..signals import DeferredSignals
from ..state_dir import state_dir_path


class LeaseWatcher:
    """Leases that others hold, watched until one comes free; use it in ``with``.

    A claim's own look opens everything anew. Here the files stay open, which takes a fifth of the time, and one that
    was replaced is missed: look in full now and then.

    Args:
        names: lease files.

    Raises:
        StateDirError: the state directory cannot be used.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._fds: list[int] = []
        self._signals = DeferredSignals()

    def __enter__(self) -> LeaseWatcher:
        self._signals.defer()
        try:
            try:
                with StateDir(state_dir_path()) as root, StateDir("leases", root) as leases:
                    self._keep(root.open_or_create("host.lock"))
                    for name in self._names:
                        with suppress(StateDirError):  # the next full look judges it
                            if (fd := leases.open(name)) is not None:
                                self._keep(fd)
            finally:
                self._signals.deliver()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; safe to call twice."""
        try:
            self._signals.defer()
        finally:  # also when a signal came in the midst of that
            while self._fds:
                fd = self._fds.pop()
                if fork_guard.discard(fd):
                    os.close(fd)
            self._signals.deliver()

    def _keep(self, fd: int) -> None:
        fork_guard.add(fd)
        self._fds.append(fd)

    def any_free(self) -> bool:
        """Return whether one of them is free now; also where host.lock is busy, and it cannot be told."""
        host, *leases = self._fds
        self._signals.defer()
        try:
            if not lock_file(host):
                return True
            try:
                return any(map(_is_free, leases))
            finally:
                unlock_file(host)
        finally:
            self._signals.deliver()


def _is_free(fd: int) -> bool:
    if lock_file(fd):
        unlock_file(fd)
        return True
    return False
