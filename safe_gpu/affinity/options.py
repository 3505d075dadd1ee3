"""What can be asked of affinity: the modes, their options, and the check of both.

Everything is text here; members of enumerations (:mod:`~safe_gpu.affinity.modes`, torch's) are taken for their values.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import GPUAffinityError

__all__ = [
    "DIVIDING_MODES",
    "MEMORY_MODES",
    "MODES",
    "MULTITHREADING",
    "SCOPES",
    "AffinityOptions",
    "check_memory_mode",
    "parse_options",
]


MODES = (
    *("node", "socket", "exclusive", "core-complex"),
    *("all", "single", "single_unique", "unique_interleaved", "unique_contiguous"),
)
"""Every mode: torch.numa's four, then gpu_affinity's."""

SCOPES = ("node", "socket")
MULTITHREADING = ("all_logical", "single_logical")

DIVIDING_MODES = frozenset({"exclusive", "single_unique", "unique_interleaved", "unique_contiguous"})
"""The modes in which a physical core goes to one GPU only."""

MEMORY_MODES = ("preferred", "bind")


def _text(value: object) -> object:
    return getattr(value, "value", value)


def _choice(what: str, value: object, choices: tuple[str, ...]) -> str:
    text = _text(value)
    if not isinstance(text, str) or text not in choices:
        raise GPUAffinityError(f"unknown {what} {text!r}: choose one of {', '.join(choices)}")
    return str(text)


def _count(what: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise GPUAffinityError(f"{what} must be a whole number, not {value!r}")
    number = int(value.__index__())
    if number < least:
        raise GPUAffinityError(f"{what}={number} is too small: it must be at least {least}")
    return number


class _Options(NamedTuple):
    mode: str
    scope: str
    multithreading: str
    balanced: bool
    min_physical_cores: int
    max_physical_cores: int | None


class AffinityOptions(_Options):
    """How a GPU's CPUs are chosen. Strings and enumeration members (gpu_affinity's own, torch's own) are both fine.

    Attributes:
        mode: one of :data:`MODES`.
        scope: "node" or "socket"; multithreading: "all_logical" or "single_logical"; balanced: an equal number of
            physical cores for every GPU; min_physical_cores, max_physical_cores: bounds per GPU, None is no bound.
            These five are gpu_affinity's and act on its modes; node, socket, exclusive and core-complex say all
            by their name and leave them aside.

    Raises:
        GPUAffinityError: a value that is none of these.
    """

    __slots__ = ()

    def __new__(
        cls,
        mode: str = "node",
        scope: str = "node",
        multithreading: str = "all_logical",
        balanced: bool = True,
        min_physical_cores: int = 1,
        max_physical_cores: int | None = None,
    ) -> AffinityOptions:
        mode = _choice("affinity mode", mode, MODES)
        scope = _choice("affinity scope", scope, SCOPES)
        multithreading = _choice("multithreading mode", multithreading, MULTITHREADING)
        if not isinstance(balanced, bool):
            raise GPUAffinityError(f"balanced must be True or False, not {balanced!r}")
        least = _count("min_physical_cores", min_physical_cores, 0)
        most = None if max_physical_cores is None else _count("max_physical_cores", max_physical_cores, 1)
        if most is not None and most < least:
            raise GPUAffinityError(f"max_physical_cores={most} is below min_physical_cores={least}")
        return super().__new__(cls, mode, scope, multithreading, balanced, least, most)


def parse_options(affinity: object, memory: object = None) -> AffinityOptions | None:
    """What a caller gave as ``affinity``: None, a mode by name, or the options themselves; ``memory`` is checked too.

    Raises:
        GPUAffinityError: it is none of these, or ``memory`` is not None, "preferred" or "bind".
    """
    check_memory_mode(memory)
    if affinity is None or isinstance(affinity, AffinityOptions):
        return affinity
    return AffinityOptions(mode=affinity)  # type: ignore[arg-type]  # checked there, with the message that names it


def check_memory_mode(memory: object) -> str | None:
    """``memory`` as given by a caller: None, "preferred" or "bind".

    Raises:
        GPUAffinityError: it is none of these.
    """
    return None if memory is None else _choice("memory policy", memory, MEMORY_MODES)
