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

_LATEST = 253_370_764_800.0  # the year 9999, after which no date can be written

_DAY_AND_TIME = "%a %Y-%m-%d %H:%M"

Spans = tuple[tuple[float, float], ...]
"""When a GPU is reserved for others: (begin, end) of each window, by begin."""


def _day(moment: time.struct_time) -> tuple[int, int, int]:
    return moment.tm_year, moment.tm_mon, moment.tm_mday


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
        begin = time.localtime(self.begin)
        end = time.localtime(self.end)
        since = time.strftime(_DAY_AND_TIME, begin)
        until = time.strftime(_DAY_AND_TIME, end)
        if _day(begin) == _day(end):
            until = time.strftime("%H:%M", end)
        text = f"reserved by {self.by}"
        if self.whom:
            text += f" for {self.whom.replace(':', ' ', 1)}"
        text += f" from {since} to {until}"
        if self.reason:
            text += f": {self.reason}"
        return text

    @property
    def lines(self) -> list[str]:
        """The lines of the file, one for each GPU."""
        times = f"{self.begin:.0f} {self.end:.0f}"
        return [f"{uuid} {times} {self.whom or '-'} {self.reason}".rstrip() for uuid in self.gpus]

    def covers(self, gpu: Gpu) -> bool:
        """Return whether a device, or the one that it is an instance of, is reserved."""
        return gpu.uuid in self.gpus or gpu.mig_parent in self.gpus


def drain_line(uuid: str, reason: str) -> str:
    """Return the line of a GPU that is drained."""
    return f"{uuid} - - - {reason}".rstrip()


def parse_closed(lines: Iterable[str], by: str) -> tuple[dict[str, str], tuple[Window, ...], list[str]]:
    """Return what the lines of a user's file say. A line that is not valid closes nothing, and the others count.

    Returns:
        UUID -> reason of the GPUs that are drained, the windows, and the lines that are not valid.

    >>> parse_closed(["GPU-0 - - - a fan is broken", "GPU-1 1 2 user:anna", "GPU-2"], "root")[::2]
    ({'GPU-0': 'a fan is broken'}, ['GPU-2'])
    """
    reasons: dict[str, str] = {}
    gpus_of: dict[Window, list[str]] = {}  # by the window without its GPUs
    wrong = []
    for line in lines:
        if not line.strip():
            continue
        try:
            uuid, begin, end, whom, reason = f"{line} ".split(" ", 4)
            if not uuid:
                raise ValueError("it names no GPU")
            if (begin, end, whom) == ("-", "-", "-"):
                reasons[uuid] = reason.strip()
                continue
            window = _window(begin, end, whom, reason, by)
        except ValueError:
            wrong.append(line)
            continue
        gpus_of.setdefault(window, []).append(uuid)
    windows = tuple(window._replace(gpus=tuple(uuids)) for window, uuids in gpus_of.items())
    return reasons, windows, wrong


def _window(begin: str, end: str, whom: str, reason: str, by: str) -> Window:
    """Return the window that the words of a line give, without its GPUs.

    Raises:
        ValueError: the words are not valid.
    """
    window = Window(float(begin), float(end), gpus=(), whom=whom.removeprefix("-"), reason=reason.strip(), by=by)
    if not 0 <= window.begin < window.end < _LATEST:
        raise ValueError("there is no such time")
    if not re.fullmatch("|(user|group):.+", window.whom):
        raise ValueError("it is neither for a user nor for a group")
    return window


def first_open(start: float, hold_for: float | None, spans: Spans) -> float:
    """Return the first time, from ``start`` on, at which a request may take a GPU that is reserved at these times.

    Args:
        hold_for: for how long it will hold the GPU; ``math.inf`` and None are unknown.
    """
    if hold_for is None or hold_for == math.inf:
        hold_for = UNSAID
    for begin, end in spans:
        if start < end and start + hold_for > begin:
            start = end
    return start


def why_reserved(windows: Iterable[Window], now: float, hold_for: float | None) -> dict[str, str]:
    """Return UUID -> why a claim that begins now may not have the GPU.

    Args:
        windows: those that bind the claim.
    """
    found: dict[str, str] = {}
    for window in windows:
        if first_open(now, hold_for, ((window.begin, window.end),)) <= now:
            continue
        reason = str(window)
        if now < window.begin:
            reason += " (until then only for claims with a shorter --for)"
        for uuid in window.gpus:
            found.setdefault(uuid, reason)
    return found


def spans_of(windows: Iterable[Window], gpus: Iterable[Gpu]) -> dict[str, Spans]:
    """Return UUID -> when it is reserved, of the devices that are.

    Args:
        windows: those that bind the request.
    """
    by_begin = sorted(windows)
    found = {}
    for gpu in gpus:
        spans = tuple((window.begin, window.end) for window in by_begin if window.covers(gpu))
        if spans:
            found[gpu.uuid] = spans
    return found
