"""How long a claim waits for its GPUs, and for how long it will probably hold them."""

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import UnsatisfiableRequestError
from ..host import procfs
from ..host.procfs import lasting
from ..schedulers.job import JobContext
from ..settings.durations import parse_duration, parse_seconds
from ..wording.argument_style import ArgumentStyle

# Default timeouts in seconds. The scheduler has assigned a GPU to a batch job, so one will become free. Elsewhere the
# wait only covers the exit of a previous process.
_BATCH = 300.0

_INTERACTIVE = 10.0


class DefaultTimeout:
    """The type of :data:`DEFAULT`, which stands for the result of :func:`default_timeout`."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = lasting("default", DefaultTimeout())


def parse_timeout(
    timeout: object, environ: Mapping[str, str], *, in_batch_job: bool, spelling: type[ArgumentStyle] = ArgumentStyle
) -> float | None:
    """Return the seconds to wait, None for no limit. ``timeout`` is a number, None, a text for :func:`parse_duration`,
    or DEFAULT.

    Raises:
        UnsatisfiableRequestError: the value is negative, not a number, or of another type.
    """
    if timeout is DEFAULT:
        return default_timeout(environ, in_batch_job=in_batch_job)
    what = "a number of seconds: pass 0 (no wait), a positive number, or None (no limit)"
    return parse_seconds(timeout, "timeout", what, spelling=spelling)


def default_timeout(environ: Mapping[str, str], *, in_batch_job: bool) -> float | None:
    """Return ``SAFE_GPU_TIMEOUT``, else 300 s inside a batch job, else 10 s."""
    text = environ.get("SAFE_GPU_TIMEOUT")
    if text:
        return parse_duration(text, "SAFE_GPU_TIMEOUT")
    return _BATCH if in_batch_job else _INTERACTIVE


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
    hold_for: object, environ: Mapping[str, str], job: JobContext, *, spelling: type[ArgumentStyle] = ArgumentStyle
) -> HoldTime:
    """Return the meaning of ``hold_for``: seconds, a text for ``parse_duration``, None for unknown, or DEFAULT.

    The default is ``SAFE_GPU_FOR``, else the end of the batch job if that is at most a day away, else unknown.

    Raises:
        UnsatisfiableRequestError: less than a second, not a number, or of another type.
    """
    if hold_for is not DEFAULT:
        return HoldTime(_hold_seconds(hold_for, "hold_for", spelling), said=True)
    if text := environ.get("SAFE_GPU_FOR"):
        return HoldTime(_hold_seconds(text, "SAFE_GPU_FOR", ArgumentStyle))
    return HoldTime(end=_end_of(job))


def _hold_seconds(value: object, name: str, spelling: type[ArgumentStyle]) -> float | None:
    word = value.strip().lower() if isinstance(value, str) else ""
    if word == "unknown":
        return None
    what = "a time to hold GPUs: give at least a second, or unknown"
    seconds = parse_seconds(value, name, what, least=1.0, spelling=spelling)
    if name == "hold_for" and seconds is not None and seconds < _FEWEST and word.isdecimal():
        written = spelling.setting(name, spelling.value(value))
        hours, minutes, short = (spelling.value(f"{value}{unit}") for unit in "hms")
        raise UnsatisfiableRequestError(
            f"{written} means {value} seconds? write {hours}, {minutes} or {short}", value=value
        )
    return seconds


def _end_of(job: JobContext) -> float | None:
    """Return when the batch job ends, Unix seconds; None if that is not known, past, or more than a day away."""
    now = time.time()
    end: float | None = job.ends
    if end is None and job.walltime is not None:
        # The job began with its session. In a later session the end is estimated too late, which delays nobody.
        end = now - (procfs.seconds_running(os.getsid(0)) or 0.0) + job.walltime
    return end if end is not None and now < end <= now + _DAY else None
