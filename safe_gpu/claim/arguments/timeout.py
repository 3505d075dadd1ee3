"""The timeout of a claim, and its default inside and outside batch jobs."""

import math
from collections.abc import Mapping

from ...errors import UnsatisfiableRequestError
from ...host.procfs import lasting
from ...settings.durations import parse_duration
from ...wording.argument_style import ArgumentStyle

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
    if timeout is None:
        return None
    if isinstance(timeout, str):
        return parse_duration(timeout, spelling=spelling)
    seconds = number_of(timeout)
    if isinstance(timeout, bool) or not seconds >= 0:
        raise UnsatisfiableRequestError(
            f"{spelling.setting('timeout', spelling.value(timeout))} is not a number of seconds: pass 0 (no wait), "
            "a positive number, or None (no limit)",
            value=timeout,
        )
    return None if math.isinf(seconds) else seconds


def number_of(value: object) -> float:
    """Return a number, of numpy too; NaN for anything else, text included."""
    try:
        return math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def default_timeout(environ: Mapping[str, str], *, in_batch_job: bool) -> float | None:
    """Return ``SAFE_GPU_TIMEOUT``, else 300 s inside a batch job, else 10 s."""
    text = environ.get("SAFE_GPU_TIMEOUT")
    if text:
        return parse_duration(text, "SAFE_GPU_TIMEOUT")
    return _BATCH if in_batch_job else _INTERACTIVE
