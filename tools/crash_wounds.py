"""Ways to break the claim code in one process, to see that crashes then leave something behind."""

from __future__ import annotations

import os
from collections.abc import Callable

from safe_gpu.coordination import files, leases, queue, signals
from safe_gpu.coordination import locks as host_lock

__all__ = ["WOUNDS"]


def _lease_kept_by_child() -> None:
    """Leases are closed and not unlocked, so that a forked child keeps them."""
    leases.unlock_file = lambda fd: None


def _ticket_kept() -> None:
    queue.Waiter.leave = lambda self: None  # type: ignore[method-assign]


def _host_lock_kept() -> None:
    host_lock.HostLock._unlock = lambda self: None  # type: ignore[method-assign]


def _handlers_not_held_back() -> None:
    """An exception comes between open(2) and the line that stores the descriptor."""
    signals.DeferredSignals.defer = lambda self: None  # type: ignore[method-assign]


def _unfinished_directories() -> None:
    """Directories have their names before they have their modes."""

    def make(name: str, path: str, parent: int | None) -> None:
        os.mkdir(name, 0o700, dir_fd=parent)
        os.chmod(name, 0o1777, dir_fd=parent)

    files.make_directory = make


WOUNDS: dict[str, Callable[[], None]] = {
    "lease-after-fork": _lease_kept_by_child,
    "ticket": _ticket_kept,
    "host-lock": _host_lock_kept,
    "handlers": _handlers_not_held_back,
    "directories": _unfinished_directories,
}
