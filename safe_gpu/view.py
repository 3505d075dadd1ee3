"""What a claim knows of the host: the latest poll of the driver, judged for its request."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from .claims import describe_process
from .coordination.leases import LeaseRecord, inner_name, lease_name
from .scopes import judged_inside
from .selection import candidates, judge

if TYPE_CHECKING:
    from .devices import Gpu, GpuRequest, GpuVerdict, Holder, HostSnapshot
    from .drivers.base import Driver
    from .visibility import Fence

__all__ = ["HostView"]

# How often the driver may be asked; a slow one takes at most a tenth of the time.
_DRIVER_PAUSE = 0.100


class HostView:
    """The host in the eyes of one request.

    Args:
        driver: polled outside every lock; snapshot: its latest poll.
        request, fence: what is asked for, and the UUIDs to choose from (None: all).
        own: driver pids that are this process.

    Attributes:
        outer: UUID -> record of the claim inside which this one is made; empty where there is none.
        next_poll: ``time.monotonic()`` value before which the driver is not to be asked again for the sake of waiting.
    """

    def __init__(
        self, driver: Driver, snapshot: HostSnapshot, request: GpuRequest, fence: Fence | None, own: Collection[int]
    ) -> None:
        self.snapshot = snapshot
        self.outer: dict[str, LeaseRecord] = {}
        self.next_poll = 0.0
        self._driver = driver
        self._request = request
        self._fence = fence
        self._own = own
        self._polled = time.monotonic()
        self._usable: tuple[HostSnapshot, list[Gpu]] | None = None

    def poll(self) -> None:
        """Ask the driver."""
        began = time.monotonic()
        self.snapshot = self._driver.snapshot()
        self._polled = now = time.monotonic()
        self.next_poll = now + max(_DRIVER_PAUSE, 9 * (now - began))

    @property
    def age(self) -> float:
        """Seconds since the latest poll."""
        return time.monotonic() - self._polled

    @property
    def usable(self) -> list[Gpu]:
        """The GPUs that the request may ever have, whoever is on them now."""
        if self._usable is None or self._usable[0] is not self.snapshot:
            self._usable = self.snapshot, list(candidates(self.snapshot, self._request, self._fence))
        return self._usable[1]

    @property
    def explained(self) -> dict[str, tuple[int, ...]]:
        """UUID -> driver pids there that are the outer claim's own, and so nobody's in the way."""
        return {uuid: (record.pid,) for uuid, record in self.outer.items()}

    def lease_name(self, uuid: str) -> str:
        """The lease that this request is to take for a GPU."""
        return inner_name(uuid) if self.outer else lease_name(uuid)

    def judge(self, leased: Mapping[str, Holder], *, fenced: bool = True) -> tuple[GpuVerdict, ...]:
        """Which GPUs the request could have now, and why not the others.

        Args:
            leased: those that others hold. fenced: False asks what there were without the fence.
        """
        verdicts = self._judge(self._request, leased, self._fence if fenced else None)
        return judged_inside(self.outer, verdicts) if self.outer else verdicts

    def judge_for(self, request: GpuRequest, leased: Mapping[str, Holder]) -> tuple[GpuVerdict, ...]:
        """The same for somebody else's request, whose fence is not known."""
        return self._judge(request, leased, None)

    def _judge(self, request: GpuRequest, leased: Mapping[str, Holder], fence: Fence | None) -> tuple[GpuVerdict, ...]:
        return judge(
            self.snapshot,
            request,
            leased=leased,
            fence=fence,
            own=self._own,
            explained=self.explained,
            describe=describe_process,
        )
