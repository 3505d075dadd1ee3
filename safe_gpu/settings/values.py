"""Values as people write them: durations such as ``1h30m``, times such as ``Thu 9:00``, sizes such as ``20GiB``."""

import math
import operator
import re
import time
from collections.abc import Iterable, Iterator

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
    for pattern in (_CLOCK, _DAYS, _SPANS):
        found = re.fullmatch(pattern, word)
        if found and word:  # _SPANS fits an empty text too
            days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
            return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    unclear = re.fullmatch(_UNCLEAR, word)
    if unclear:
        first = int(unclear[1])
        second = int(unclear[2])
        raise ValueError(f"may be hours or minutes: write {first}h{second}m or {first}m{second}s")
    forms = "seconds (90 or 90s), 15m, 1h30m, 01:30:00, 2-12:00:00 (days first) or inf"
    raise ValueError(f"is not a duration: write {forms}")


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
    elif isinstance(value, bool):
        seconds = math.nan
    else:
        seconds = number_of(value)
    if seconds is None or seconds == math.inf:
        return None
    if not seconds >= least:  # so that NaN is refused
        raise UnsatisfiableRequestError(f"{style.written(name, value)} is not {what}", value=value)
    return seconds


def number_of(value: object) -> float:
    """Return a number, of numpy too; NaN for anything else, text included."""
    if isinstance(value, (str, bytes, bytearray)):
        return math.nan
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


_DATES = ("%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m")

_WEEKDAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

_DAYS_FROM_TODAY = {"yesterday": -1, "today": 0, "tomorrow": 1}

_HOUR_AND_MINUTE = "([01]?[0-9]|2[0-3]):([0-5][0-9])"

_TIME_OF_DAY = rf"(?:({'|'.join(_WEEKDAYS)})[a-z]* )?{_HOUR_AND_MINUTE}"

_NAMED_DAY = rf"({'|'.join(_DAYS_FROM_TODAY)})(?: {_HOUR_AND_MINUTE})?"


def parse_moment(text: str, after: float | None = None) -> float:
    """Parse a date, a time, a word or an age, in local time, to Unix seconds.

    Args:
        after: ``18:00`` and ``Thu 9:00`` are the first such time after this one, and ``+2h`` is two hours after it;
            None: the last such time until now, and two hours from now. ``tomorrow 9:00`` counts from today.

    Raises:
        ValueError: it is not a time.
    """
    word = text.strip().lower()
    now = time.time()
    if word == "now":
        return now
    named_day = re.fullmatch(_NAMED_DAY, " ".join(word.split()))
    if named_day:
        day, hour, minute = named_day.groups(default="0")
        return _on_day(now, _DAYS_FROM_TODAY[day], int(hour), int(minute))
    time_of_day = re.fullmatch(_TIME_OF_DAY, " ".join(word.split()))
    if time_of_day:
        weekday, hour, minute = time_of_day.groups()
        base = now if after is None else after
        moments = _times_of_day_around(base, weekday, int(hour), int(minute))
        if after is None:
            return max(moment for moment in moments if moment <= now)
        return min(moment for moment in moments if moment > after)
    for form in _DATES:
        try:
            return max(0.0, time.mktime((*time.strptime(word.upper(), form)[:8], -1)))
        except (ValueError, OverflowError):
            continue
    distance = _distance(word.removeprefix("+"))
    if distance is None:
        forms = "2026-11-01, '2026-11-01 12:00', 12:00, 'Thu 9:00', today, yesterday, 'tomorrow 9:00'"
        raise ValueError(f"{text!r} is not a time: write {forms}, 7d for seven days ago, or +2h for two hours from now")
    if not word.startswith("+"):
        return max(0.0, now - distance)
    if after is None:
        return now + distance
    return after + distance


def _on_day(now: float, days_from_today: int, hour: int, minute: int) -> float:
    today = time.localtime(now)
    return time.mktime((today.tm_year, today.tm_mon, today.tm_mday + days_from_today, hour, minute, 0, 0, 0, -1))


def _times_of_day_around(base: float, weekday: str | None, hour: int, minute: int) -> list[float]:
    """Return this time of each day within a week of ``base`` and a day more, or of each such day of the week."""
    day = time.localtime(base)
    found = []
    for shift in range(-8, 9):
        moment = time.mktime((day.tm_year, day.tm_mon, day.tm_mday + shift, hour, minute, 0, 0, 0, -1))
        if weekday is None or weekday == _WEEKDAYS[time.localtime(moment).tm_wday]:
            found.append(moment)
    return found


def _distance(word: str) -> float | None:
    """Return the seconds of a duration with a unit; None for anything else."""
    if word[-1:].isdecimal():
        return None
    try:
        return seconds_of(word)
    except ValueError:
        return None


# K, M, G and T are powers of 1024, as in nvidia-smi and Grid Engine; KB, MB, GB and TB are powers of 1000.
_BYTES = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip

# Nobody needs to ask for less memory than this, so a number below it probably lacks its unit.
_FEWEST_BYTES = 1 << 20

# Compiled on first use by re's own cache, because most claims need none of these patterns.
_SIZE = r"\s*([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})\s*([a-zA-Z]{0,9})\s*"

_RANGE = r"([0-9]{1,4})-([0-9]{1,4})"

_BY_PLACE = "|".join(one.by_place for one in VENDORS.values() if one.by_place)

_NAME = rf"[0-9]{{1,4}}(:[0-9]{{1,4}})?|(GPU|MIG)-[0-9A-Za-z/-]*|({_BY_PLACE})[0-9a-z:.-]*|{BARE_UUID}"


def refused(name: str, value: object, way_out: str) -> UnsatisfiableRequestError:
    """Return the error about a value that is not valid."""
    return UnsatisfiableRequestError(f"{style.written(name, value)} is not valid: {way_out}", value=value)


def as_index(value: object) -> int | None:
    """Return a whole number, of numpy too; None for anything else, and for a bool."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
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
    count = _bytes_of(value) if isinstance(value, str) else as_index(value)
    if count is None or count < 0:
        raise refused(name, value, f"give bytes as a whole number, or a size such as {style.value('20GiB')}")
    is_bare = not isinstance(value, str) or value.strip().isdecimal()
    if is_bare and 0 < count < _FEWEST_BYTES:
        way_out = " or ".join(style.value(f"{count}{unit}") for unit in _units_meant(count, name))
        raise UnsatisfiableRequestError(
            f"{style.written(name, value)} means {count} bytes? write {way_out}", value=value
        )
    return count


def _bytes_of(text: str) -> int | None:
    """Return the bytes of a size; None if it is none."""
    size = re.fullmatch(_SIZE, text)
    if size is None:
        return None
    number, unit = size.groups()
    factor = _BYTES.get(unit.lower())
    if factor is None:
        return None
    if "." in number:
        return int(float(number) * factor)
    return int(number) * factor


def _units_meant(count: int, name: str) -> list[str]:
    """Return the units that a small number without one probably has."""
    if name == "share" and count <= 100:
        return ["GiB", "%"]
    if name in ("min_memory", "share") and count < 1024:
        return ["GiB"]
    return ["MiB"]


def parse_names(value: object, argument: str) -> tuple[str, ...]:
    """Return the entries of ``only`` or ``exclude``, as described in :func:`parse_request`; ranges are expanded.

    Raises:
        UnsatisfiableRequestError: an entry has none of the forms; ``argument`` is its name in the message.
    """
    names: list[str] = []
    try:
        for entry in _entries(value):
            names += _names(entry.strip())
    except ValueError:
        examples = f"{style.value('0,2')}, {style.value('4-7')}"
        way_out = f"name GPUs by index, range or UUID, such as {examples} or {style.value('GPU-8932f937')}"
        raise refused(argument, value, way_out) from None
    return tuple(dict.fromkeys(names))


def _entries(value: object) -> Iterator[str]:
    """Yield the entries of a text, a whole number, or several of these.

    Raises:
        ValueError: something is neither.
    """
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, bytearray)):
        value = [value]
    for item in value:
        if isinstance(item, str):
            yield from item.split(",")
            continue
        index = as_index(item)
        if index is None:
            raise ValueError(item)
        yield str(index)


def _names(entry: str) -> list[str]:
    """Return the names that an entry stands for: those of a range, or one.

    Raises:
        ValueError: it has none of the forms.
    """
    span = re.fullmatch(_RANGE, entry)
    if span and int(span[1]) <= int(span[2]):
        return [str(index) for index in range(int(span[1]), int(span[2]) + 1)]
    if not re.fullmatch(_NAME, entry):
        raise ValueError(entry)
    if not is_index(entry):
        return [entry]
    numbers = [str(int(part)) for part in entry.split(":")]  # without leading zeros
    return [":".join(numbers)]


def is_index(name: str) -> bool:
    """Return whether a name is an index, or that of a MIG instance (``3:1``); UUIDs may begin with a digit too."""
    return name.replace(":", "").isdigit()


def names_device(name: str, gpu: Gpu) -> bool:
    """Return whether an entry of ``only`` or ``exclude`` matches this device. The name of a GPU matches its MIG
    instances."""
    if is_index(name):
        return name in (gpu.label, str(gpu.index))
    return gpu.uuid.startswith(name) or (gpu.mig_parent is not None and gpu.mig_parent.startswith(name))


def unknown_names(names: Iterable[str], snapshot: HostSnapshot) -> tuple[str, ...]:
    """Return the entries that match no device of this host, and the UUID prefixes that match several."""
    return tuple(name for name in names if not _names_one(name, snapshot))


def _names_one(name: str, snapshot: HostSnapshot) -> bool:
    if is_index(name):
        return any(names_device(name, gpu) for gpu in snapshot.gpus)
    uuids = {gpu.uuid for gpu in snapshot.gpus}
    if name in uuids:
        return True
    return len([uuid for uuid in uuids if uuid.startswith(name)]) == 1


def model_pattern(text: str, names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern whose ``match`` tells whether a product name is meant on a host that has GPUs of these names.

    Letter case does not matter. A text without ``*``, ``?`` or ``[`` means the names in which it stands as whole words:
    ``A10`` does not match A100. It matches part of a word only if no GPU of the host has it as a whole word. Other
    texts are globs for the whole name, or for its end from some word on. Both ``NVIDIA A100*`` and ``A100*80GB`` match
    ``NVIDIA A100-SXM4-80GB``.
    """
    if any(sign in text for sign in "*?["):
        return re.compile(f"(?:.* )?{_regular_expression(text)}", re.IGNORECASE)
    part = re.escape(text)
    as_words = re.compile(rf".*(?<!\w){part}(?!\w)", re.IGNORECASE)
    if any(as_words.match(name) for name in names):
        return as_words
    return re.compile(f".*{part}", re.IGNORECASE)


def _regular_expression(glob: str) -> str:
    from fnmatch import translate

    return translate(glob)
