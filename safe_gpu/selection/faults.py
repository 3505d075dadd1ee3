"""For how long a GPU on which a claim failed is the last choice. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping

from ..devices import Fault

__all__ = ["LAST_CHOICE", "LAST_CHOICE_TEXT", "recent", "why_last"]

LAST_CHOICE = 600.0
"""Seconds for which a GPU is taken last after a claim failed on it."""

LAST_CHOICE_TEXT = "ten minutes"


def recent(faults: Mapping[str, Fault], now: float) -> dict[str, Fault]:
    """The notes, by UUID, that still count at ``now`` (Unix seconds).

    A note from the future (the clock was set back) counts for as long as one from the past, and no longer.
    """
    return {uuid: fault for uuid, fault in faults.items() if abs(now - fault.when) < LAST_CHOICE}


def why_last(fault: Fault) -> str:
    """``taken last until 14:32, since a claim failed on it: ...``, in local time."""
    until = time.strftime("%H:%M", time.localtime(fault.when + LAST_CHOICE))
    return f"taken last until {until}, since a claim failed on it: {fault.error}"
