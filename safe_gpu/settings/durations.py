"""Durations and times as people write them: ``90``, ``1h30m``, ``01:30:00``, ``inf``; ``Thu 9:00``, ``2026-11-01``."""

import math
import re
import time

from ..errors import UnsatisfiableRequestError
from ..wording import text as style

_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

# Compiled on first use by re's own cache, because most claims need none of these patterns.
_NUMBER = r"[0-9]{1,9}"

_SIMPLE = r"((?:[0-9]{1,24}(?:\.[0-9]{0,24})?|\.[0-9]{1,24})(?:e(?:-[0-9]{1,3}|\+?[0-9]{1,2}))?)\s*([a-z]*)"

_SPANS = rf"(?:({_NUMBER})d)?\s*(?:({_NUMBER})h)?\s*(?:({_NUMBER})m(?:in)?)?\s*(?:({_NUMBER})s(?:ec)?)?"

_CLOCK = rf"(?:({_NUMBER})-)?({_NUMBER}):({_NUMBER}):({_NUMBER})"

_DAYS = rf"({_NUMBER})-({_NUMBER})(?::({_NUMBER}))?()"

_UNCLEAR = rf"({_NUMBER}):({_NUMBER})"


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration; None for ``inf``.

    The forms are ``90``, ``90s``, ``15m``, ``1h30m``, ``2d``, ``01:30:00`` (h:m:s) and ``2-12:00:00`` (days-h:m:s, as
    in Slurm).

    Raises:
        ValueError: says what it is instead, and the valid forms.
    """
    word = text.strip().lower()
    if word in ("inf", "infinity", "infinite", "unlimited", "none", "forever"):
        return None
    simple = re.fullmatch(_SIMPLE, word)
    if simple and simple[2] in _UNITS:
        return float(simple[1]) * _UNITS[simple[2]]
    found = re.fullmatch(_CLOCK, word) or re.fullmatch(_DAYS, word) or (word and re.fullmatch(_SPANS, word))
    if not found:
        if unclear := re.fullmatch(_UNCLEAR, word):
            one, other = map(int, unclear.groups())
            raise ValueError(f"may be hours or minutes: write {one}h{other}m or {one}m{other}s")
        forms = "seconds (90 or 90s), 15m, 1h30m, 01:30:00, 2-12:00:00 (days first) or inf"
        raise ValueError(f"is not a duration: write {forms}")
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def parse_duration(text: str, name: str = "timeout") -> float | None:
    """Return the same.

    Raises:
        UnsatisfiableRequestError: names the argument ``name``, the value and the valid forms.
    """
    try:
        return seconds_of(text)
    except ValueError as err:
        raise UnsatisfiableRequestError(f"{style.written(name, text)} {err}", value=text) from None


def parse_seconds(value: object, name: str, what: str, *, least: float = 0.0) -> float | None:
    """Return the seconds of a number, or of a text as for :func:`parse_duration`; None for None and infinity.

    Args:
        what: it must be, and how to write it, for the message.
        least: seconds.

    Raises:
        UnsatisfiableRequestError: it is neither, or less than ``least``.
    """
    if value is None:
        return None
    if isinstance(value, str):
        seconds = parse_duration(value, name)
    else:
        seconds = math.nan if isinstance(value, bool) else number_of(value)
    if seconds is None or seconds >= least:
        return None if seconds == math.inf else seconds
    raise UnsatisfiableRequestError(f"{style.written(name, value)} is not {what}", value=value)


def number_of(value: object) -> float:
    """Return a number, of numpy too; NaN for anything else, text included."""
    try:
        return math.nan if isinstance(value, (str, bytes, bytearray)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


_DATES = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m")

_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_TIME_OF_DAY = rf"(?:({'|'.join(_WEEKDAYS)})[a-z]* )?([01]?[0-9]|2[0-3]):([0-5][0-9])"


def parse_moment(text: str, after: float | None = None) -> float:
    """Parse a date, a time, a word or an age, in local time, to Unix seconds.

    Args:
        after: ``18:00`` and ``Thu 9:00`` are the first such time after this one, and ``+2h`` is two hours after it;
            None: the last such time until now, and two hours from now.

    Raises:
        ValueError: it is no time.
    """
    word, now = text.strip().lower(), time.time()
    today = time.localtime(now)
    if word == "now":
        return now
    if word in ("today", "yesterday"):
        return time.mktime((today.tm_year, today.tm_mon, today.tm_mday - (word == "yesterday"), 0, 0, 0, 0, 0, -1))
    if clock := re.fullmatch(_TIME_OF_DAY, " ".join(word.split())):
        return _nearest(clock[1], int(clock[2]), int(clock[3]), now if after is None else after, after is not None)
    for form in _DATES:
        try:
            return max(0.0, time.mktime((*time.strptime(word.upper(), form)[:8], -1)))
        except (ValueError, OverflowError):
            continue
    try:
        age = seconds_of(word.removeprefix("+"))
    except ValueError:
        age = None
    if age is None or word[-1:].isdecimal():
        forms = "2026-11-01, '2026-11-01 12:00', 12:00, 'Thu 9:00', today, yesterday, 7d for seven days ago"
        raise ValueError(f"{text!r} is no time: write {forms}, or +2h for two hours from now")
    return (now if after is None else after) + age if word.startswith("+") else max(0.0, now - age)


def _nearest(day: str | None, hour: int, minute: int, base: float, later: bool) -> float:
    """Return the last such time of day, perhaps on one day of the week, up to ``base``, or the first after it."""
    first = time.localtime(base)
    dates = ((first.tm_year, first.tm_mon, first.tm_mday + shift) for shift in range(-8, 9))
    days = [time.mktime((*date, hour, minute, 0, 0, 0, -1)) for date in dates]
    found = [one for one in days if day in (None, _WEEKDAYS[time.localtime(one).tm_wday])]
    return min(one for one in found if one > base) if later else max(one for one in found if one <= base)
