"""Values as people write them: durations such as ``1h30m``, times such as ``Thu 9:00``, sizes such as ``20GiB``."""

import math
import operator
import re
import time
from collections.abc import Iterable

from ..errors import UnsatisfiableRequestError
from ..gpus.devices import Gpu, HostSnapshot
from ..gpus.vendors import BARE_UUID, VENDORS
from ..wording import style

_SECONDS = {"": 1.0, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

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
    if simple and simple[2] in _SECONDS:
        return float(simple[1]) * _SECONDS[simple[2]]
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


_BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}{tail}": 1 << (10 * power) for power, letter in enumerate("kmgt", 1) for tail in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}

# Nobody needs to ask for less memory than this, so a number below it probably lacks its unit.
_FEWEST_BYTES = 1 << 20

# Compiled on first use by re's own cache, because most claims need none of these patterns.
_SIZE = r"\s*([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*([a-zA-Z]{0,9})\s*"

_RANGE = r"([0-9]{1,4})-([0-9]{1,4})"

_BY_PLACE = "|".join(one.by_place for one in VENDORS.values() if one.by_place)

_NAME = rf"[0-9]{{1,4}}(:[0-9]{{1,4}})?|(GPU|MIG)-[0-9A-Za-z/-]*|({_BY_PLACE})[0-9a-z:.-]*|{BARE_UUID}"


def refused(name: str, value: object, way_out: str) -> UnsatisfiableRequestError:
    """Return the error about a value that makes no sense."""
    return UnsatisfiableRequestError(f"{style.written(name, value)} makes no sense: {way_out}", value=value)


def as_index(value: object) -> int | None:
    """Return a whole number, of numpy too; None for anything else, and for a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def parse_size(value: object, name: str = "min_memory") -> int:
    """Return a number of bytes: an int, or a string such as ``"20GiB"``, ``"20G"``, ``"1.5 TiB"``, ``"20480M"``,
    ``"20GB"``.

    K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024, as in nvidia-smi and Grid Engine; KB, MB, GB, TB are powers of
    1000. A bare number is bytes. Letter case does not matter.

    Raises:
        UnsatisfiableRequestError: not a size, or a small number without its unit: 20 probably means 20 GiB. ``name`` is
            the name of the argument in the message.

    >>> parse_size("20GiB") == parse_size("20G") == 20 * 1024**3
    True
    """
    size = re.fullmatch(_SIZE, value) if isinstance(value, str) else None
    factor = _BYTES.get(size[2].lower()) if size else None
    count = as_index(value)
    if size and factor:
        count = int(float(size[1]) * factor) if "." in size[1] else int(size[1]) * factor
    if count is None or count < 0:
        raise refused(name, value, f"give bytes as a whole number, or a size such as {style.value('20GiB')}")
    bare = not isinstance(value, str) or value.strip().isdecimal()
    if bare and 0 < count < _FEWEST_BYTES:
        unit = "GiB" if count < 1024 and name in ("min_memory", "share") else "MiB"
        units = [unit, "%"] if name == "share" and count <= 100 else [unit]
        written = style.written(name, value)
        way_out = " or ".join(style.value(f"{count}{unit}") for unit in units)
        raise UnsatisfiableRequestError(f"{written} means {count} bytes? write {way_out}", value=value)
    return count


def parse_names(value: object, argument: str) -> tuple[str, ...]:
    """Return the entries of ``only`` or ``exclude``, as described in :func:`parse_request`; ranges are expanded.

    Raises:
        UnsatisfiableRequestError: an entry has none of the forms; ``argument`` is its name in the message.
    """
    names: dict[str, None] = {}
    try:
        for item in _flat(value):
            text = item.strip()
            span = re.fullmatch(_RANGE, text)
            if span is not None and int(span[1]) <= int(span[2]):
                names.update((str(index), None) for index in range(int(span[1]), int(span[2]) + 1))
            elif re.fullmatch(_NAME, text):
                names[":".join(str(int(part)) for part in text.split(":")) if is_index(text) else text] = None
            else:
                raise ValueError(text)
    except ValueError:
        examples = ", ".join(map(style.value, ("0,2", "4-7")))
        way_out = f"name GPUs by index, range or UUID, such as {examples} or {style.value('GPU-8932f937')}"
        raise refused(argument, value, way_out) from None
    return tuple(names)


def is_index(name: str) -> bool:
    """Return whether a name is an index, or that of a MIG instance (``3:1``); UUIDs may begin with a digit too."""
    return name.replace(":", "").isdigit()


def _flat(value: object) -> Iterable[str]:
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray))
    for item in value if several else (value,):  # type: ignore[attr-defined]
        if isinstance(item, str):
            yield from item.split(",")
        elif (index := as_index(item)) is not None:
            yield str(index)
        else:
            raise ValueError(item)


def names_device(name: str, gpu: Gpu) -> bool:
    """Return whether an entry of ``only`` or ``exclude`` matches this device. The name of a GPU matches its MIG
    instances."""
    if is_index(name):
        return name in (gpu.label, str(gpu.index))
    return gpu.uuid.startswith(name) or (gpu.mig_parent is not None and gpu.mig_parent.startswith(name))


def unknown_names(names: Iterable[str], snapshot: HostSnapshot) -> tuple[str, ...]:
    """Return the entries that match no device of this host, and the UUID prefixes that match several."""
    uuids = {gpu.uuid for gpu in snapshot.gpus}

    def matches_one(name: str) -> bool:
        if is_index(name):
            return any(names_device(name, gpu) for gpu in snapshot.gpus)
        return name in uuids or sum(uuid.startswith(name) for uuid in uuids) == 1

    return tuple(name for name in names if not matches_one(name))


def model_pattern(text: str, names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern whose ``match`` tells whether a product name is meant on a host that has GPUs of these names.

    Letter case does not matter. A text without ``*``, ``?`` or ``[`` means the names in which it stands as whole words:
    ``A10`` is no A100. If no GPU of the host has such a name, it may be any part of a name. Other texts are globs for
    the whole name, or for the part of the name from some word to the end. Both ``NVIDIA A100*`` and ``A100*80GB`` mean
    ``NVIDIA A100-SXM4-80GB``.
    """
    if any(sign in text for sign in "*?["):
        from fnmatch import translate

        return re.compile(f"(?:.* )?{translate(text)}", re.IGNORECASE)
    part = re.escape(text)
    words = re.compile(rf".*(?<!\w){part}(?!\w)", re.IGNORECASE)
    return words if any(map(words.match, names)) else re.compile(f".*{part}", re.IGNORECASE)
