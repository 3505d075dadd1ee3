"""Windows: times in which GPUs are reserved, for root alone or for a user or a group too. Pure.

Times are Unix seconds, durations are seconds.
"""

import math
import re
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .devices import Gpu

UNSAID = 86400.0
"""For so long a claim counts as holding its GPUs if neither it nor the policy says for how long."""

Spans = tuple[tuple[float, float], ...]
"""When a GPU is reserved for others: (begin, end) of each window, by begin."""


class Window(NamedTuple):
    """A time in which GPUs are reserved.

    Attributes:
        gpus: their UUIDs.
        whom: ``user:NAME`` or ``group:NAME``; "" for nobody but root.
        by: the user who reserved them.
    """

    begin: float
    end: float
    gpus: tuple[str, ...]
    whom: str = ""
    reason: str = ""
    by: str = ""

    def __str__(self) -> str:
        """Return ``reserved by root for group course from Thu 2026-11-26 09:00 to 12:00: practical course``."""
        begin, end = time.localtime(self.begin), time.localtime(self.end)
        until = time.strftime("%H:%M" if begin[:3] == end[:3] else "%a %Y-%m-%d %H:%M", end)
        whom = self.whom and f" for {self.whom.replace(':', ' ', 1)}"
        reason = self.reason and f": {self.reason}"
        return f"reserved by {self.by}{whom} from {time.strftime('%a %Y-%m-%d %H:%M', begin)} to {until}{reason}"

    @property
    def line(self) -> str:
        """The line of the file."""
        return f"{self.begin:.0f} {self.end:.0f} {','.join(self.gpus)} {self.whom or '-'} {self.reason}".rstrip()

    def covers(self, gpu: "Gpu") -> bool:
        """Return whether a device, or the one that it is an instance of, is reserved."""
        return gpu.uuid in self.gpus or gpu.mig_parent in self.gpus


MOST_WINDOWS = 100
"""Of a file with more, none counts."""

_LATEST = 253_370_764_800.0  # the year 9999, after which no date can be written


def parse_windows(lines: Collection[str], by: str) -> tuple[Window, ...]:
    """Return the windows that the lines of a user's file describe.

    Raises:
        ValueError: a line describes none, or there are too many.
    """
    fields = [f"{line} ".split(" ", 4) for line in lines]
    windows = tuple(
        Window(float(begin), float(end), tuple(gpus.split(",")), whom.removeprefix("-"), reason.strip(), by)
        for begin, end, gpus, whom, reason in fields
    )
    right = (0 <= one.begin < one.end < _LATEST and re.fullmatch("|(user|group):.+", one.whom) for one in windows)
    if len(windows) > MOST_WINDOWS or not all(right):
        raise ValueError
    return windows


def first_open(start: float, hold_for: float | None, spans: Spans) -> float:
    """Return the first time, from ``start`` on, at which a request may take a GPU that is reserved at these times.

    Args:
        hold_for: for how long it will hold the GPU; ``math.inf`` and None are unknown.
    """
    seconds = UNSAID if hold_for is None or hold_for == math.inf else hold_for
    for begin, end in spans:
        if start < end and start + seconds > begin:
            start = end
    return start


def why_reserved(windows: Iterable[Window], now: float, hold_for: float | None) -> dict[str, str]:
    """Return UUID -> why a claim that begins now may not have the GPU.

    Args:
        windows: those that bind the claim.
    """
    found: dict[str, str] = {}
    for one in windows:
        if first_open(now, hold_for, ((one.begin, one.end),)) > now:
            way_out = " (until then for claims that say a shorter --for)" * (now < one.begin)
            found.update((uuid, f"{one}{way_out}") for uuid in one.gpus if uuid not in found)
    return found


def spans_of(windows: Iterable[Window], gpus: "Iterable[Gpu]") -> dict[str, Spans]:
    """Return UUID -> when it is reserved, of the devices that are.

    Args:
        windows: those that bind the request.
    """
    ordered = sorted((one.begin, one.end, one) for one in windows)
    found = {gpu.uuid: tuple((begin, end) for begin, end, one in ordered if one.covers(gpu)) for gpu in gpus}
    return {uuid: spans for uuid, spans in found.items() if spans}
