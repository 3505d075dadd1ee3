"""Ways to break the claim code in one process, to see that the soak test finds what they do."""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Callable
from typing import Any

from safe_gpu.claim import claim as recheck
from safe_gpu.claim import queue_place as passing
from safe_gpu.claim import quota
from safe_gpu.claim import view as host_view
from safe_gpu.coordination import leases, queue
from safe_gpu.coordination import locks as host_lock
from safe_gpu.coordination import queue as tickets
from safe_gpu.coordination import socket_names as names
from safe_gpu.selection.backfill import BackfillRequest

__all__ = ["SHOWN_IN_CALM", "WOUNDS"]


def _locks_nothing(fd: int) -> bool:
    return True


def _no_names() -> None:
    def refuse(name: str) -> None:
        raise PermissionError(1, "names are taken out")

    names.bind = refuse  # type: ignore[assignment]
    names.in_use = frozenset  # type: ignore[assignment]


def _no_lease() -> None:
    _no_names()
    leases.lock_file = _locks_nothing


def _lease_dropped_by_child() -> None:
    """flock(2) belongs to the open file: a child that unlocks its copy takes the lease from its parent."""
    _no_names()
    held: list[int] = []
    lock = leases.lock_file

    def lock_and_note(fd: int) -> bool:
        held.append(fd)
        return lock(fd)

    def drop() -> None:
        for fd in held:
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
            except OSError:
                continue

    leases.lock_file = lock_and_note
    os.register_at_fork(after_in_child=drop)


def _no_host_lock() -> None:
    """Some time passes between the listing of the queue and a new ticket, so that two soon take the same number."""

    def counted(found: list[int]) -> list[int]:
        time.sleep(0.005)
        return tickets.counted(found)

    host_lock.lock_file = _locks_nothing
    queue.counted = counted  # type: ignore[attr-defined]


def _no_queue() -> None:
    queue.Waiter.nearest = lambda *_, **__: None  # type: ignore[method-assign]


def _no_second_poll() -> None:
    """No look at the driver once the leases are held."""
    host_view.HostView.poll_again = lambda self, gpus: None  # type: ignore[method-assign]
    recheck._refuse_other_processes = lambda *_: True


def _ticket_kept() -> None:
    queue.Waiter.leave = lambda self: None  # type: ignore[method-assign]
    queue.Waiter.abandon = lambda self, host: None  # type: ignore[method-assign]


def _no_rule_of_backfill() -> None:
    """Every free GPU is open to everybody, whatever a waiter ahead wants."""
    passing.open_gpus = lambda request, ahead, free, *_: frozenset(free)


def _promises_broken() -> None:
    """Who says for how long may pass, whatever the waiters ahead were promised."""
    rule = passing.open_gpus

    def without_dates(want: BackfillRequest, *rest: Any) -> frozenset[str]:
        return rule(want if want.hold_for == math.inf else want._replace(hold_for=0.0), *rest)

    passing.open_gpus = without_dates


def _no_limit() -> None:
    """What a user holds already is not counted."""
    quota.LeasesByUser.own_spent = lambda *_: None  # type: ignore[method-assign]


def _limit_counts_all() -> None:
    """What others hold is counted too."""
    of_user = quota.LeasesByUser._held_by

    def of_all(self: quota.LeasesByUser, uid: int) -> frozenset[str]:
        of_user(self, uid)
        return frozenset(self._owners or ())

    quota.LeasesByUser._held_by = of_all  # type: ignore[method-assign]


def _limit_holds_up() -> None:
    """A waiter whose user is at the limit is not passed."""
    quota.LeasesByUser.is_at_limit = lambda *_: False  # type: ignore[method-assign]


WOUNDS: dict[str, Callable[[], None]] = {
    "backfill": _no_rule_of_backfill,
    "lease": _no_lease,
    "lease-after-fork": _lease_dropped_by_child,
    "host-lock": _no_host_lock,
    "queue": _no_queue,
    "promise": _promises_broken,
    "limit": _no_limit,
    "limit-of-others": _limit_counts_all,
    "limit-of-waiters": _limit_holds_up,
    "second-poll": _no_second_poll,
    "ticket": _ticket_kept,
    "names": _no_names,
}

SHOWN_IN_CALM = ("backfill", "promise", "limit", "limit-of-others", "limit-of-waiters", "queue", "ticket")
"""Those that a quiet point finds; the others need what happens before one."""
