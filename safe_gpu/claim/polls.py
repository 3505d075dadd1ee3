"""What the driver said: the polls of one request, and the pids under which the driver shows this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

from ..drivers.base import Driver
from ..gpus.devices import Gpu, HostSnapshot
from ..host import procfs
from ..selection.verdicts import Describe

RECENT = 5.0
"""If the latest poll of the whole host is older than this, in seconds, the second one asks whether it still holds."""

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
        choices: returns the UUIDs of the GPUs of a poll among which NVLink decides, if it does.

    Attributes:
        describe: returns what /proc says of a process, for :func:`~safe_gpu.selection.verdicts.judge`.
        family_of: see :func:`~safe_gpu.host.procfs.family_of`.
        waited_since: whether this claim has waited since the latest poll. By that nobody in the queue is passed any
            more: the processes that it lists may have ended.

    ``describe`` and ``family_of`` read each process once for each poll: the GPUs are judged under host.lock for as many
    different requests as wait.
    """

    def __init__(
        self,
        driver: Driver,
        snapshot: HostSnapshot,
        needs: frozenset[str],
        choices: Callable[[HostSnapshot], Collection[str]],
    ) -> None:
        self.driver = driver
        self.needs = needs
        self._choices = choices
        self.waited_since = False
        self._at = time.monotonic()
        self._took = 0.0
        self._replace(self._completed(snapshot))

    def poll(self) -> None:
        """Poll the driver for the whole host."""
        began = time.monotonic()
        self._replace(self._completed(self.driver.snapshot()))
        self._at = time.monotonic()
        self._took = self._at - began
        self.waited_since = False

    def leave_out(self, gone: Mapping[str, Collection[int]]) -> None:
        """Let the latest poll be as if these processes had left these GPUs: UUID -> pids."""
        if not gone:
            return
        updated = []
        for uuid, pids in gone.items():
            gpu = self.snapshot.by_uuid(uuid)
            if gpu is not None:
                updated.append(gpu.without(pids))
        self._replace(self.snapshot.updated(updated))

    def next_poll(self, pause: float, longest: float) -> float:
        """Return the ``time.monotonic()`` value before which a waiter must not poll the driver again.

        Args:
            pause: seconds between two polls. It is longer where polls are slow, so that they take a tenth of the time.
            longest: seconds that it is at most.
        """
        return self._at + min(max(pause, 9 * self._took), longest)

    def poll_again(self, gpus: Sequence[Gpu]) -> None:
        """Poll the driver for these GPUs only, or for the whole host.

        For the whole host if its latest poll is no longer recent, or this claim has waited since, and the driver does
        not say that the GPUs of the host are the same.
        """
        is_recent = self.age <= RECENT and not self.waited_since
        if is_recent or self.driver.shows_same(self.snapshot):
            self._replace(self.snapshot.updated(self.driver.usage(gpus)))
        else:
            self.poll()

    @property
    def age(self) -> float:
        """Seconds since the latest poll of the whole host."""
        return time.monotonic() - self._at

    def _replace(self, snapshot: HostSnapshot) -> None:
        self.snapshot = snapshot
        self.describe: Describe = cache(_describe_without_user)
        self.family_of = cache(procfs.family_of)

    def _completed(self, snapshot: HostSnapshot) -> HostSnapshot:
        for method in sorted(self.needs):
            snapshot = getattr(self.driver, method)(snapshot)
        if "linked" in self.needs:
            return snapshot
        choices = self._choices(snapshot)
        if not choices:
            return snapshot
        return self.driver.linked(snapshot, choices)


def _describe_without_user(pid: int) -> tuple[None, str | None]:
    """As :func:`~safe_gpu.host.procfs.describe_process`, but no directory service is asked for the name of the user."""
    return None, procfs.command_of(pid)


def own_pids_in(snapshot: HostSnapshot, pid: int) -> set[int]:
    """Return the pids under which the driver shows this process.

    A stored pid that the driver no longer shows is dropped, because another process may get it later.
    """
    shown = set()
    for gpu in snapshot.gpus:
        for process in gpu.processes or ():
            shown.add(process.pid)
    driver_pids[pid] = driver_pids.get(pid, frozenset()) & shown
    return {pid, *driver_pids[pid]}
