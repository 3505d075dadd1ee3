"""The polls of the driver for one request, and the pids under which it shows this process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from ...affinity.cpu_shares import nodes_of_cpus

if TYPE_CHECKING:
    from ...drivers.base import Driver
    from ...gpus.devices import Gpu, HostSnapshot

# If the latest poll of the whole host is older than this, in seconds, the second poll is of the whole host again.
_RECENT = 5.0

# Minimum pause between two polls of a waiter, in seconds. If polls are slow they take at most a tenth of the time.
_DRIVER_PAUSE = 0.100

# Pid of this process or of one that it was forked from -> the pids under which the driver shows that process. In a
# container the driver may show host pids. The first placeholder reveals them. A framework may keep its context after
# the release, and the next claim must then recognise this process on the GPU.
driver_pids: dict[int, frozenset[int]] = {}


class Polls:
    """The polls of the driver for one request.

    Args:
        driver: polled only while no lock is held.
        snapshot: its latest poll. Each poll replaces it.
        needs: methods of the driver that complete each poll, for this request, to choose well, and for
            those of others that it must judge.

    Attributes:
        next_poll: ``time.monotonic()`` value before which a waiter must not poll the driver again.
        has_waited: whether this claim has waited since the latest poll. Nobody in the queue is passed by that poll any
            more: the processes that it lists may have ended.
    """

    def __init__(self, driver: Driver, snapshot: HostSnapshot, needs: frozenset[str]) -> None:
        self.driver = driver
        self.needs = needs
        self.snapshot = self._completed(snapshot)
        self.next_poll = 0.0
        self.has_waited = False
        self._at = time.monotonic()

    def poll(self) -> None:
        """Poll the driver for the whole host."""
        began = time.monotonic()
        self.snapshot = self._completed(self.driver.snapshot())
        self._at = now = time.monotonic()
        self.has_waited = False
        self.next_poll = now + max(_DRIVER_PAUSE, 9 * (now - began))

    def poll_again(self, gpus: Sequence[Gpu]) -> None:
        """Poll the driver for these GPUs only, or for the whole host if the latest poll of it is old."""
        if self.age > _RECENT:
            self.poll()
        else:
            self.snapshot = self.snapshot.updated(self.driver.usage(gpus))

    @property
    def age(self) -> float:
        """Seconds since the latest poll of the whole host."""
        return time.monotonic() - self._at

    def _completed(self, snapshot: HostSnapshot) -> HostSnapshot:
        for method in sorted(self.needs):
            snapshot = getattr(self.driver, method)(snapshot)
        return snapshot


class ByPid(dict[int, Any]):
    """What a function says of each pid, asked once for each poll: a look judges the GPUs for several requests under
    host.lock. A :func:`functools.cache` takes longer to make than to use here."""

    def __init__(self, ask: Callable[[int], object]) -> None:
        self._ask = ask

    def __missing__(self, pid: int) -> object:
        return self.setdefault(pid, self._ask(pid))


_cpu_count = cache(os.cpu_count)  # reads a file of /sys


def near_nodes(driver: Driver) -> frozenset[int] | None:
    cpus = os.sched_getaffinity(0)
    if len(cpus) >= (_cpu_count() or 1):
        return None

    return nodes_of_cpus(cpus, driver)


def own_pids_in(snapshot: HostSnapshot) -> set[int]:
    """Return the pids under which the driver shows this process.

    A stored pid that the driver no longer shows is dropped, because another process may get it later.
    """
    pid = os.getpid()
    shown = {process.pid for gpu in snapshot.gpus for process in gpu.processes or ()}
    driver_pids[pid] = driver_pids.get(pid, frozenset()) & shown
    return {pid, *driver_pids[pid]}


def unlisted_contexts(driver: Driver, snapshot: HostSnapshot, own: Collection[int]) -> frozenset[str]:
    """Return the UUIDs of the GPUs on which this process has a context that the driver does not list (a hidden process
    list)."""
    listed = {gpu.uuid for gpu in snapshot.gpus if any(process.pid in own for process in gpu.processes or ())}
    return driver.runtime.contexts() - listed
