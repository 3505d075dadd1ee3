"""What a claim asks for: parsing, the names of GPUs, and the rules by which GPUs are judged. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..argument_style import ArgumentStyle
from ..devices import VENDORS, GpuRequest
from ..errors import UnsatisfiableRequestError

if TYPE_CHECKING:
    from ..devices import Gpu, HostSnapshot


# Parses the arguments of a claim into a :class:`~safe_gpu.devices.GpuRequest`. No device is queried.


_UNITS = {
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
_NAME = r"[0-9]{1,4}(:[0-9]{1,4})?|(GPU|MIG)-[0-9A-Za-z/-]*|AMD-[0-9a-z:.-]*"


def parse_request(
    nb_gpus: object,
    *,
    min_memory: int | str | None = None,
    model: str | None = None,
    only: object = (),
    exclude: object = (),
    vendor: object = None,
    spelling: type[ArgumentStyle] = ArgumentStyle,
) -> GpuRequest:
    """Check and parse what a claim asks for.

    Args:
        nb_gpus: a whole number, 1 or more (numpy integers too).
        min_memory: bytes that must be free on each GPU, in a form that :func:`parse_bytes` accepts; None: any. A number
            below 1 MiB without a unit is refused.
        model: a name pattern, see :func:`~safe_gpu.selection.request.matches_model`; None: any.
        only, exclude: the devices to choose from, and those to leave out: an index (``3``), or a string of indices,
            ranges, MIG labels and UUID prefixes (``"0,2"``, ``"0-3"``, ``"1:0"``, ``"GPU-8932"``), or an iterable of
            these. None or an empty iterable means no restriction.
        vendor: "nvidia" or "amd"; None: no choice.
        spelling: how messages write these arguments.

    Raises:
        UnsatisfiableRequestError: a value is invalid; the message names it and says which values are valid.
    """
    if model is not None and (not isinstance(model, str) or not model.strip()):
        way_out = f"give part of the name, such as {spelling.value('A100')}, or a pattern: {spelling.value('RTX*4090')}"
        raise _refused("model", model, way_out, spelling)
    if isinstance(vendor, str):
        vendor = vendor.strip().lower()
    if vendor is not None and vendor not in VENDORS:
        raise _refused("vendor", vendor, f"choose {' or '.join(map(spelling.value, VENDORS))}", spelling)
    return GpuRequest(
        nb_gpus=_count(nb_gpus, spelling),
        min_memory=None if min_memory is None else parse_size(min_memory, spelling=spelling),
        model=None if model is None else model.strip(),
        only=parse_names(only, "only", spelling=spelling),
        exclude=parse_names(exclude, "exclude", spelling=spelling),
        vendor=None if vendor is None else str(vendor),
        spelling=spelling,
    )


def _refused(name: str, value: object, way_out: str, spelling: type[ArgumentStyle]) -> UnsatisfiableRequestError:
    written = spelling.setting(name, spelling.value(value))
    return UnsatisfiableRequestError(f"{written} makes no sense: {way_out}", value=value)


def _count(nb_gpus: object, spelling: type[ArgumentStyle]) -> int:
    count = _index(nb_gpus)
    if count is None or count < 1:
        job = spelling.value("job")
        way_out = f"ask for a whole number of GPUs, 1 or more (or {job} for the number that the batch job asked for)"
        if isinstance(nb_gpus, (list, tuple, range, set)):
            way_out += f"; to choose GPUs by index, pass {spelling.setting('only', spelling.value(nb_gpus))}"
        raise _refused("nb_gpus", nb_gpus, way_out, spelling)
    return count


def _index(value: object) -> int | None:
    """A whole number, of numpy too; None for anything else, and for a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def parse_size(value: object, name: str = "min_memory", *, spelling: type[ArgumentStyle] = ArgumentStyle) -> int:
    """The same as :func:`parse_bytes`, but a small number without a unit is refused: 20 probably means 20 GiB.

    Raises:
        UnsatisfiableRequestError: not a size, or probably without its unit.
    """
    count = parse_bytes(value, name, spelling=spelling)
    bare = not isinstance(value, str) or value.strip().isdecimal()
    if bare and 0 < count < _FEWEST_BYTES:
        unit = "GiB" if count < 1024 and name == "min_memory" else "MiB"
        written = spelling.setting(name, spelling.value(value))
        raise UnsatisfiableRequestError(
            f"{written} means {count} bytes? write {spelling.value(f'{count}{unit}')}", value=value
        )
    return count


def parse_bytes(value: object, name: str = "min_memory", *, spelling: type[ArgumentStyle] = ArgumentStyle) -> int:
    """A number of bytes: an int, or a string such as ``"20GiB"``, ``"20G"``, ``"1.5 TiB"``, ``"20480M"``, ``"20GB"``.

    K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024, as in nvidia-smi and Grid Engine; KB, MB, GB, TB are powers of
    1000. A bare number is bytes. Letter case does not matter.

    Raises:
        UnsatisfiableRequestError: not a size; ``name`` is the name of the argument in the message.

    >>> parse_bytes("20GiB") == parse_bytes("20G") == 20 * 1024**3
    True
    """
    if isinstance(value, str):
        size = re.fullmatch(_SIZE, value)
        factor = _UNITS.get(size[2].lower()) if size else None
        if size and factor:
            return int(float(size[1]) * factor) if "." in size[1] else int(size[1]) * factor
    elif (count := _index(value)) is not None and count >= 0:
        return count
    way_out = f"give bytes as a whole number, or a size such as {spelling.value('20GiB')}"
    raise _refused(name, value, way_out, spelling)


def parse_names(value: object, argument: str, *, spelling: type[ArgumentStyle] = ArgumentStyle) -> tuple[str, ...]:
    """The entries of ``only`` or ``exclude``, as described in :func:`parse_request`; ranges are expanded.

    Raises:
        UnsatisfiableRequestError: an entry has none of the forms; ``argument`` is its name in the message.
    """
    try:
        return _names(value)
    except ValueError:
        examples = ", ".join(map(spelling.value, ("0,2", "4-7")))
        way_out = f"name GPUs by index, range or UUID, such as {examples} or {spelling.value('GPU-8932f937')}"
        raise _refused(argument, value, way_out, spelling) from None


def _names(value: object) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for item in _flat(value):
        text = item.strip()
        span = re.fullmatch(_RANGE, text)
        if span is not None and int(span[1]) <= int(span[2]):
            names.update((str(index), None) for index in range(int(span[1]), int(span[2]) + 1))
        elif re.fullmatch(_NAME, text):
            names[":".join(str(int(part)) for part in text.split(":")) if text[0].isdigit() else text] = None
        else:
            raise ValueError(text)
    return tuple(names)


def _flat(value: object) -> Iterable[str]:
    if value is None:
        return
    if isinstance(value, str):
        yield from value.split(",")
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        for item in value:
            if item is None or (isinstance(item, Iterable) and not isinstance(item, str)):
                raise ValueError(item)
            yield from _flat(item)
    elif (index := _index(value)) is not None:
        yield str(index)
    else:
        raise ValueError(value)


# The names by which requests speak of GPUs: indices, UUIDs and product names. Pure functions.


def names_device(name: str, gpu: Gpu) -> bool:
    """Whether an entry of ``only`` or ``exclude`` matches this device. The name of a GPU matches its MIG instances."""
    if name[0].isdigit():
        return name in (gpu.label, str(gpu.index))
    return gpu.uuid.startswith(name) or (gpu.mig_parent is not None and gpu.mig_parent.startswith(name))


def unknown_names(names: Iterable[str], snapshot: HostSnapshot) -> tuple[str, ...]:
    """The entries that match no device of this host, and the UUID prefixes that match several."""
    return tuple(name for name in names if not _matches_one(name, snapshot))


def _matches_one(name: str, snapshot: HostSnapshot) -> bool:
    if name[0].isdigit():
        return any(names_device(name, gpu) for gpu in snapshot.gpus)
    uuids = {gpu.uuid for gpu in snapshot.gpus}
    return name in uuids or sum(uuid.startswith(name) for uuid in uuids) == 1


def matches_model(pattern: str, name: str) -> bool:
    """Whether a product name matches ``pattern``. Letter case does not matter.

    A pattern without ``*``, ``?`` or ``[`` matches anywhere in the name. Otherwise the pattern is a glob for the whole
    name, or for the part of the name from some word to the end. Both ``"NVIDIA A100*"`` and ``"A100*80GB"`` match
    ``NVIDIA A100-SXM4-80GB``.
    """
    from fnmatch import fnmatchcase

    pattern, name = pattern.lower(), name.lower()
    if not any(sign in pattern for sign in "*?["):
        return pattern in name
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"* {pattern}")


# The rules of judging that users may change: when memory without a process makes a GPU busy, and process lists.


MEMORY_VARIABLE = "SAFE_GPU_UNEXPLAINED_MEMORY"

LEAST_LIMIT = 16 << 20
"""Bytes. The NVML driver asks for processes that only draw where more than this is in use without a process; below it
their memory would count as unexplained."""


class Rules(NamedTuple):
    """How GPUs are judged.

    Attributes:
        unexplained_limit: bytes that may be in use without a process; None: by what the driver counts as used.
        lists_optional: whether GPUs whose processes the driver can never list may be claimed, by lease and memory.
    """

    unexplained_limit: int | None = None
    lists_optional: bool = False

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rules:
        """The rules that the environment sets.

        Raises:
            UnsatisfiableRequestError: ``SAFE_GPU_UNEXPLAINED_MEMORY`` is not a size.
        """
        limit = environ.get(MEMORY_VARIABLE)
        return cls(
            max(parse_size(limit, MEMORY_VARIABLE), LEAST_LIMIT) if limit else None,
            environ.get("SAFE_GPU_PROCESS_LIST") == "optional",
        )


DEFAULT_RULES = Rules()
"""The rules where the environment sets none."""
