"""Windows: times in which GPUs are reserved, for root alone or for a user or a group too. Pure.

Times are Unix seconds, durations are seconds.
"""

import math
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

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
    def lines(self) -> list[str]:
        """The lines of the file, one for each GPU."""
        times = f"{self.begin:.0f} {self.end:.0f}"
        return [f"{uuid} {times} {self.whom or '-'} {self.reason}".rstrip() for uuid in self.gpus]

    def covers(self, gpu: "Gpu") -> bool:
        """Return whether a device, or the one that it is an instance of, is reserved."""
        return gpu.uuid in self.gpus or gpu.mig_parent in self.gpus


_LATEST = 253_370_764_800.0  # the year 9999, after which no date can be written


def drain_line(uuid: str, reason: str) -> str:
    """Return the line of a GPU that is closed for good."""
    return f"{uuid} - - - {reason}".rstrip()


def parse_closed(lines: Iterable[str], by: str) -> tuple[dict[str, str], tuple[Window, ...], list[str]]:
    """Return what the lines of a user's file say. A line that makes no sense closes nothing, and the others count.

    Returns:
        UUID -> reason of the GPUs that are drained, the windows, and the lines that make no sense.

    >>> parse_closed(["GPU-0 - - - a fan is broken", "GPU-1 1 2 user:anna", "GPU-2"], "root")[::2]
    ({'GPU-0': 'a fan is broken'}, ['GPU-2'])
    """
    reasons: dict[str, str] = {}
    windows: dict[Window, list[str]] = {}
    wrong = []
    for line in filter(str.strip, lines):
        try:
            uuid, begin, end, whom, reason = f"{line} ".split(" ", 4)
            if uuid and (begin, end, whom) == ("-", "-", "-"):
                reasons[uuid] = reason.strip()
                continue
            window = Window(float(begin), float(end), (), whom.removeprefix("-"), reason.strip(), by)
            if not uuid or not 0 <= window.begin < window.end < _LATEST:
                raise ValueError
            if not re.fullmatch("|(user|group):.+", window.whom):
                raise ValueError
            windows.setdefault(window, []).append(uuid)
        except ValueError:
            wrong.append(line)
    return reasons, tuple(one._replace(gpus=tuple(uuids)) for one, uuids in windows.items()), wrong


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
