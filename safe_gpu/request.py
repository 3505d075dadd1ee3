"""From what a caller writes to a :class:`~safe_gpu.devices.GpuRequest`, and which devices it speaks of. Pure.

Nothing here looks at whether a device is free; see ``selection`` for that.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .devices import GpuRequest
from .errors import UnsatisfiableRequestError

if TYPE_CHECKING:
    from .devices import Gpu, HostSnapshot

__all__ = ["format_bytes", "matches_model", "names_device", "parse_bytes", "parse_request", "unknown_names"]

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}{tail}": 1 << (10 * power) for power, letter in enumerate("kmgt", 1) for tail in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
# Compiled when first used, by re's own cache: most claims need none of them.
_SIZE = r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*"
_RANGE = r"([0-9]{1,4})-([0-9]{1,4})"
_NAME = r"[0-9]{1,4}(:[0-9]{1,4})?|(GPU|MIG)-[0-9A-Za-z/-]*"


def parse_request(
    nb_gpus: object,
    *,
    min_memory: int | str | None = None,
    model: str | None = None,
    only: object = (),
    exclude: object = (),
) -> GpuRequest:
    """Check and read what a claim asks for.

    Args:
        nb_gpus: a whole number from 1 up (numpy integers too).
        min_memory: bytes that must be free on each GPU, as :func:`parse_bytes` reads them; None: any.
        model: a name pattern, as :func:`matches_model` reads it; None: any.
        only, exclude: the devices to choose among, and those to leave out: an index (``3``), or a string of indices,
            ranges, MIG labels and UUID prefixes (``"0,2"``, ``"0-3"``, ``"1:0"``, ``"GPU-8932"``), or an iterable of
            these; nothing at all (None or an empty iterable) means no restriction.

    Raises:
        UnsatisfiableRequestError: a value makes no sense; the message names it and says what would.
    """
    if model is not None and (not isinstance(model, str) or not model.strip()):
        raise _refused("model", model, 'give a part of the name, such as "A100", or a pattern such as "RTX*4090"')
    return GpuRequest(
        nb_gpus=_count(nb_gpus),
        min_memory=None if min_memory is None else parse_bytes(min_memory),
        model=None if model is None else model.strip(),
        only=_names("only", only),
        exclude=_names("exclude", exclude),
    )


def _refused(name: str, value: object, way_out: str) -> UnsatisfiableRequestError:
    return UnsatisfiableRequestError(f"{name}={value!r} makes no sense: {way_out}", value=value)


def _count(nb_gpus: object) -> int:
    way_out = 'ask for a whole number of GPUs, 1 or more (or "job" for the number that the batch job asked for)'
    if isinstance(nb_gpus, bool):
        raise _refused("nb_gpus", nb_gpus, way_out)
    try:
        count = operator.index(nb_gpus)  # type: ignore[arg-type]
    except TypeError:
        raise _refused("nb_gpus", nb_gpus, way_out) from None
    if count < 1:
        raise _refused("nb_gpus", nb_gpus, way_out)
    return count


def parse_bytes(value: object, *, name: str = "min_memory") -> int:
    """A number of bytes: an int, or a string such as ``"20GiB"``, ``"20G"``, ``"1.5 TiB"``, ``"20480M"``, ``"20GB"``.

    K, M, G, T and KiB, MiB, GiB, TiB are powers of 1024, as in nvidia-smi and Grid Engine; KB, MB, GB, TB are powers of
    1000. A bare number is bytes. Letter case does not matter.

    Raises:
        UnsatisfiableRequestError: not a size; ``name`` is what the message calls it.

    >>> parse_bytes("20GiB") == parse_bytes("20G") == 20 * 1024**3
    True
    """
    way_out = 'give bytes as a whole number, or a size such as "20GiB"'
    if isinstance(value, str):
        size = re.fullmatch(_SIZE, value)
        factor = _UNITS.get(size.group(2).lower()) if size else None
        if size is None or factor is None:
            raise _refused(name, value, way_out)
        return int(float(size.group(1)) * factor) if "." in size.group(1) else int(size.group(1)) * factor
    if isinstance(value, bool):
        raise _refused(name, value, way_out)
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise _refused(name, value, way_out) from None
    if count < 0:
        raise _refused(name, value, way_out)
    return count


def format_bytes(count: int) -> str:
    """Bytes as people read them, in powers of 1024: ``31.2 GiB``, ``400 MiB``."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GiB".replace(".0 ", " ")
    return f"{round(count / (1 << 20))} MiB"


def _names(argument: str, value: object) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for item in _flat(argument, value):
        text = item.strip()
        span = re.fullmatch(_RANGE, text)
        if span is not None and int(span.group(1)) <= int(span.group(2)):
            names.update((str(index), None) for index in range(int(span.group(1)), int(span.group(2)) + 1))
        elif re.fullmatch(_NAME, text):
            names[":".join(str(int(part)) for part in text.split(":")) if text[0].isdigit() else text] = None
        else:
            raise _bad_names(argument, value)
    return tuple(names)


def _flat(argument: str, value: object) -> Iterable[str]:
    if value is None:
        return
    if isinstance(value, str):
        yield from value.split(",")
    elif isinstance(value, Iterable) and not isinstance(value, (bytes, bytearray)):
        for item in value:
            if item is None or (isinstance(item, Iterable) and not isinstance(item, str)):
                raise _bad_names(argument, value)
            yield from _flat(argument, item)
    else:
        try:
            if isinstance(value, bool):
                raise TypeError
            yield str(operator.index(value))  # type: ignore[arg-type]
        except TypeError:
            raise _bad_names(argument, value) from None


def _bad_names(argument: str, value: object) -> UnsatisfiableRequestError:
    return _refused(argument, value, 'name GPUs by index, range or UUID, such as "0,2", "4-7" or "GPU-8932f937"')


def names_device(name: str, gpu: Gpu) -> bool:
    """Whether an entry of ``only`` or ``exclude`` means this device; naming a GPU means its MIG instances too."""
    if name[0].isdigit():
        return name in (gpu.label, str(gpu.index))
    return gpu.uuid.startswith(name) or (gpu.mig_parent is not None and gpu.mig_parent.startswith(name))


def unknown_names(names: Iterable[str], snapshot: HostSnapshot) -> tuple[str, ...]:
    """The entries that mean no device of this host, or (prefixes of UUIDs) several at once."""
    return tuple(name for name in names if not _means_one(name, snapshot))


def _means_one(name: str, snapshot: HostSnapshot) -> bool:
    if name[0].isdigit():
        return any(names_device(name, gpu) for gpu in snapshot.gpus)
    uuids = {gpu.uuid for gpu in snapshot.gpus}
    return name in uuids or sum(uuid.startswith(name) for uuid in uuids) == 1


def matches_model(pattern: str, name: str) -> bool:
    """Whether a product name fits ``pattern``, whatever the letter case.

    A plain pattern is looked for anywhere in the name. One with ``*``, ``?`` or ``[`` is a glob for the whole name, or
    for its rest from any word on, so that both ``"NVIDIA A100*"`` and ``"A100*80GB"`` fit ``NVIDIA A100-SXM4-80GB``.
    """
    from fnmatch import fnmatchcase

    pattern, name = pattern.lower(), name.lower()
    if not any(sign in pattern for sign in "*?["):
        return pattern in name
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"* {pattern}")
