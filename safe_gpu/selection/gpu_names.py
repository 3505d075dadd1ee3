"""The names by which requests speak of GPUs. Pure."""

from __future__ import annotations

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


def matches_model(pattern: str, name: str) -> bool:
    """Return whether a product name matches ``pattern``. Letter case does not matter.

    A pattern without ``*``, ``?`` or ``[`` matches anywhere in the name. Otherwise the pattern is a glob for the whole
    name, or for the part of the name from some word to the end. Both ``"NVIDIA A100*"`` and ``"A100*80GB"`` match
    ``NVIDIA A100-SXM4-80GB``.
    """
    from fnmatch import fnmatchcase

    pattern, name = pattern.lower(), name.lower()
    if not any(sign in pattern for sign in "*?["):
        return pattern in name
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"* {pattern}")
