"""The names by which requests speak of GPUs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .values import is_index

if TYPE_CHECKING:
    from ..gpus.devices import Gpu, HostSnapshot


def names_device(name: str, gpu: Gpu) -> bool:
    """Return whether an entry of ``only`` or ``exclude`` matches this device. The name of a GPU matches its MIG
    instances."""
    if is_index(name):
        return name in (gpu.label, str(gpu.index))
    return gpu.uuid.startswith(name) or (gpu.mig_parent is not None and gpu.mig_parent.startswith(name))


def unknown_names(names: Iterable[str], snapshot: HostSnapshot) -> tuple[str, ...]:
    """Return the entries that match no device of this host, and the UUID prefixes that match several."""
    return tuple(name for name in names if not _matches_one(name, snapshot))


def _matches_one(name: str, snapshot: HostSnapshot) -> bool:
    if is_index(name):
        return any(names_device(name, gpu) for gpu in snapshot.gpus)
    uuids = {gpu.uuid for gpu in snapshot.gpus}
    return name in uuids or sum(uuid.startswith(name) for uuid in uuids) == 1


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
