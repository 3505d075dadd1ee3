"""For how long a GPU on which a claim failed is the last choice. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..devices import GpuFault

LAST_CHOICE = 600.0
"""Seconds for which a GPU is taken last after a claim failed on it."""

LAST_CHOICE_TEXT = "ten minutes"


def recent_faults(faults: Mapping[str, GpuFault], now: float) -> dict[str, GpuFault]:
    """The notes, by UUID, that still count at ``now`` (Unix seconds).

    A note from the future (the clock was set back) counts for as long as one from the past, and no longer.
    """
    return {uuid: fault for uuid, fault in faults.items() if abs(now - fault.when) < LAST_CHOICE}


def why_last(fault: GpuFault) -> str:
    """``taken last until 14:32, since a claim failed on it: ...``, in local time."""
    until = time.strftime("%H:%M", time.localtime(fault.when + LAST_CHOICE))
    return f"taken last until {until}, since a claim failed on it: {fault.error}"
