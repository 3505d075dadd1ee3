"""How long a claim will probably hold its GPUs."""

import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ...errors import UnsatisfiableRequestError
from ...host import procfs
from ...settings.durations import parse_duration
from ...wording.argument_style import ArgumentStyle
from .timeout import DEFAULT, number_of

if TYPE_CHECKING:
    from ...schedulers import JobContext

_DAY = 86400.0

# A text as an argument that is a smaller number than this, in seconds, probably lacks its unit.
_FEWEST = 60


class HoldTime(NamedTuple):
    """How long a claim will probably hold its GPUs, from the moment that it gets them.

    Attributes:
        seconds: at least 1; None if that is not known.
        end: when the batch job ends, Unix seconds; used if ``seconds`` is None.
        said: whether the caller said it. If not, a claim inside another one ends with that one.
    """

    seconds: float | None = None
    end: float | None = None
    said: bool = False

    def at(self, now: float, outer_end: float | None = None) -> float | None:
        """Return the seconds for a claim that gets its GPUs at ``now``, at least 1; None is unknown.

        Args:
            outer_end: when the claim around this one will probably end, Unix seconds; None if there is none, or if
                that is not known.
        """
        if self.said or (self.seconds is not None and outer_end is None):
            return self.seconds
        end = self.end if outer_end is None else outer_end
        return None if end is None or end <= now else max(1.0, round(end - now, 3))


UNKNOWN = HoldTime()


def parse_hold_for(
    hold_for: object, environ: Mapping[str, str], job: "JobContext", *, spelling: type[ArgumentStyle] = ArgumentStyle
) -> HoldTime:
    """Return the meaning of ``hold_for``: seconds, a text for ``parse_duration``, None for unknown, or DEFAULT.

    The default is ``SAFE_GPU_FOR``, else the end of the batch job if that is at most a day away, else unknown.

    Raises:
        UnsatisfiableRequestError: less than a second, not a number, or of another type.
    """
    if hold_for is DEFAULT:
        text = environ.get("SAFE_GPU_FOR")
        if text:
            return HoldTime(_seconds_of(text, "SAFE_GPU_FOR", spelling=ArgumentStyle))
        return HoldTime(end=_end_of(job))
    if hold_for is None:
        return HoldTime(said=True)
    if isinstance(hold_for, str):
        return HoldTime(_seconds_of(hold_for, "hold_for", spelling=spelling), said=True)
    seconds = number_of(hold_for)
    if isinstance(hold_for, bool) or not seconds >= 1:
        raise _refused(hold_for, "hold_for", spelling)
    return HoldTime(None if math.isinf(seconds) else seconds, said=True)


def _seconds_of(text: str, name: str, *, spelling: type[ArgumentStyle]) -> float | None:
    if text.strip().lower() == "unknown":
        return None
    seconds = parse_duration(text, name, spelling=spelling)
    if seconds is not None and seconds < 1:
        raise _refused(text, name, spelling)
    if name == "hold_for" and seconds is not None and seconds < _FEWEST and text.strip().isdecimal():
        written, values = (
            spelling.setting(name, spelling.value(text)),
            [spelling.value(f"{text}{unit}") for unit in "hms"],
        )
        raise UnsatisfiableRequestError(
            f"{written} means {text} seconds? write {values[0]}, {values[1]} or {values[2]}", value=text
        )
    return seconds


def _refused(value: object, name: str, spelling: type[ArgumentStyle]) -> UnsatisfiableRequestError:
    written = spelling.setting(name, spelling.value(value))
    return UnsatisfiableRequestError(
        f"{written} is not a time to hold GPUs: give at least a second, or unknown", value=value
    )


def _end_of(job: "JobContext") -> float | None:
    """Return when the batch job ends, Unix seconds; None if that is not known, past, or more than a day away."""
    now = time.time()
    end: float | None = job.ends
    if end is None and job.walltime is not None:
        # The job began with its session. In a later session the end is estimated too late, which delays nobody.
        end = now - (procfs.seconds_running(os.getsid(0)) or 0.0) + job.walltime
    return end if end is not None and now < end <= now + _DAY else None
