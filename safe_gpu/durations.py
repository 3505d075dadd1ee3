"""How long to wait: durations as people write them, and the default that fits where the process runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .errors import UnsatisfiableRequestError

__all__ = ["DEFAULT", "DefaultTimeout", "default_timeout", "parse_duration", "parse_timeout"]

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

# A batch job has declared its GPU, so one is owed to it; elsewhere only the job before may still be dying.
_BATCH = 300.0
_INTERACTIVE = 10.0


class DefaultTimeout:
    """Stands for "whatever fits here", see :func:`default_timeout`."""

    def __repr__(self) -> str:
        return "<default>"


DEFAULT = DefaultTimeout()


def parse_duration(text: str, name: str = "timeout") -> float | None:
    """Seconds in ``90``, ``90s``, ``15m``, ``2h``, ``1d``; None for ``inf``.

    Raises:
        UnsatisfiableRequestError: naming ``name``, the value and the forms that are understood.
    """
    word = text.strip().lower()
    if word in ("inf", "infinity", "none", "forever"):
        return None
    unit = _UNITS.get(word[-1:])
    number = word[:-1] if unit is not None else word
    try:
        seconds = float(number) * (unit or 1.0)
    except ValueError:
        seconds = math.nan
    if not (0 <= seconds < math.inf) or "_" in number:
        raise UnsatisfiableRequestError(
            f"{name}={text!r} is no duration: write seconds (90 or 90s), 15m, 2h, 1d or inf", value=text
        )
    return seconds


def parse_timeout(timeout: object, environ: Mapping[str, str], *, in_batch_job: bool) -> float | None:
    """Seconds to wait, None for ever, of what a caller passed (a number, None, text as above, or DEFAULT).

    Raises:
        UnsatisfiableRequestError: negative, not a number, or of another kind.
    """
    if isinstance(timeout, DefaultTimeout):
        return default_timeout(environ, in_batch_job=in_batch_job)
    if timeout is None:
        return None
    if isinstance(timeout, str):
        return parse_duration(timeout)
    try:
        seconds = float(timeout)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if isinstance(timeout, (bool, bytes, bytearray)) or math.isnan(seconds) or seconds < 0:
        raise UnsatisfiableRequestError(
            f"timeout={timeout!r} is not a number of seconds: pass 0 (no wait), a positive number, or None (for ever)",
            value=timeout,
        )
    return None if math.isinf(seconds) else seconds


def default_timeout(environ: Mapping[str, str], *, in_batch_job: bool) -> float | None:
    """``SAFE_GPU_TIMEOUT``, else 300 s inside a batch job, else 10 s."""
    text = environ.get("SAFE_GPU_TIMEOUT")
    if text:
        return parse_duration(text, "SAFE_GPU_TIMEOUT")
    return _BATCH if in_batch_job else _INTERACTIVE
