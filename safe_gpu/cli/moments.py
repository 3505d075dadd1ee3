"""Moments as people write them: ``2026-11-01``, ``18:00``, ``Thu 9:00``, ``yesterday``, ``7d``, ``+2h``."""

import argparse
import re
import time

from ..errors import SafeGpuError

_FORMS = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m")

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_CLOCK = rf"(?:({'|'.join(_DAYS)})[a-z]* )?([01]?[0-9]|2[0-3]):([0-5][0-9])"


def moment(text: str, after: float | None = None) -> float:
    """Parse a date, a time, a word or an age, in local time, to Unix seconds.

    Args:
        after: ``18:00`` and ``Thu 9:00`` are the first such time after this one, and ``+2h`` is two hours after it;
            None: the last such time until now, and two hours from now.

    Raises:
        ArgumentTypeError: it is no time.
    """
    from ..settings.durations import parse_duration

    word, now = text.strip().lower(), time.time()
    today = time.localtime(now)
    if word == "now":
        return now
    if word in ("today", "yesterday"):
        day = today.tm_mday - (word == "yesterday")
        return time.mktime((today.tm_year, today.tm_mon, day, 0, 0, 0, 0, 0, -1))
    if clock := re.fullmatch(_CLOCK, " ".join(word.split())):
        return _nearest(clock[1], int(clock[2]), int(clock[3]), now if after is None else after, after is not None)
    for form in _FORMS:
        try:
            parsed = time.strptime(word.upper(), form)
            return max(0.0, time.mktime((*parsed[:8], -1)))
        except (ValueError, OverflowError):
            continue
    try:
        age = parse_duration(word.removeprefix("+"))
    except SafeGpuError:
        age = None
    if age is None or word[-1:].isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: write 2026-11-01, '2026-11-01 12:00', 12:00, 'Thu 9:00', today, yesterday, 7d for "
            "seven days ago, or +2h for two hours from now"
        )
    return (now if after is None else after) + age if word.startswith("+") else max(0.0, now - age)


def _nearest(day: str | None, hour: int, minute: int, base: float, later: bool) -> float:
    """Return the last such time of day, perhaps on one day of the week, up to ``base``, or the first after it."""
    first = time.localtime(base)
    dates = ((first.tm_year, first.tm_mon, first.tm_mday + shift) for shift in range(-8, 9))
    days = [time.mktime((*date, hour, minute, 0, 0, 0, -1)) for date in dates]
    found = [one for one in days if day in (None, _DAYS[time.localtime(one).tm_wday])]
    return min(one for one in found if one > base) if later else max(one for one in found if one <= base)
