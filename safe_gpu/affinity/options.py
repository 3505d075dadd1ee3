"""The modes of CPU binding, their options, and the checks of both.

All values are strings here. A member of an enumeration counts as its value.
"""

from dataclasses import dataclass
from typing import Any

from ..errors import GPUAffinityError
from ..topology.cpulist import parse_cpulist

MODES = (
    *("node", "socket", "exclusive", "core-complex"),
    *("all", "single", "single_unique", "unique_interleaved", "unique_contiguous"),
)
"""Every mode: the four of torch.numa, then those of gpu_affinity."""

SCOPES = ("node", "socket")
MULTITHREADING = ("all_logical", "single_logical")

DIVIDING_MODES = frozenset({"exclusive", "single_unique", "unique_interleaved", "unique_contiguous"})
"""The modes that give a physical core to one GPU only."""

MEMORY_MODES = ("preferred", "bind")


def _choice(what: str, value: object, choices: tuple[str, ...]) -> str:
    text = getattr(value, "value", value)
    if not isinstance(text, str) or text not in choices:
        raise GPUAffinityError(f"unknown {what} {text!r}: choose one of {', '.join(choices)}")
    return text


def as_count(what: str, value: object, least: int) -> int:
    """Return a whole number, of any type that has ``__index__`` (numpy's have).

    Raises:
        GPUAffinityError: it is none, or below ``least``; the text names it ``what``.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise GPUAffinityError(f"{what} must be a whole number, not {value!r}")
    number = int(value.__index__())
    if number < least:
        raise GPUAffinityError(f"{what}={number} is too small: it must be at least {least}")
    return number


def parse_cpus(text: str) -> frozenset[int]:
    """Return the CPUs of a list as the kernel writes it.

    Raises:
        ValueError: it names none.
    """
    cpus = parse_cpulist(text)
    if not cpus:
        raise ValueError(f"{text!r} names no CPU: write a list such as 0-15,128-143")
    return cpus


@dataclass(frozen=True)
class AffinityOptions:
    """How a GPU's CPUs are chosen. Takes strings and members of enumerations (those of gpu_affinity and of torch).

    The modes node, socket, exclusive and core-complex ignore every option but ``mode``; the other options belong to
    gpu_affinity and act on its modes.

    Attributes:
        mode: one of :data:`MODES`.
        scope: "node" or "socket".
        multithreading: "all_logical" or "single_logical".
        balanced: give every GPU the same number of physical cores.
        min_physical_cores: too few physical cores for this are an error.
        max_physical_cores: a share is trimmed to its first cores; None is no bound. As in gpu_affinity it wins over a
            greater minimum.

    Raises:
        GPUAffinityError: a value is not one of these.
    """

    mode: str = "node"
    scope: str = "node"
    multithreading: str = "all_logical"
    balanced: bool = True
    min_physical_cores: int = 1
    max_physical_cores: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.balanced, bool):
            raise GPUAffinityError(f"balanced must be True or False, not {self.balanced!r}")
        most = self.max_physical_cores
        vars(self).update(
            mode=_choice("affinity mode", self.mode, MODES),
            scope=_choice("affinity scope", self.scope, SCOPES),
            multithreading=_choice("multithreading mode", self.multithreading, MULTITHREADING),
            min_physical_cores=as_count("min_physical_cores", self.min_physical_cores, 0),
            max_physical_cores=None if most is None else as_count("max_physical_cores", most, 1),
        )


def parse_options(affinity: Any, memory: object = None) -> AffinityOptions | None:
    """Return the options for an argument ``affinity``: None, the name of a mode, or the options themselves.

    torch's ``NumaOptions`` counts as its ``affinity_mode``. It is known by its attributes; torch is not imported.

    Raises:
        GPUAffinityError: ``affinity`` is none of these, or ``memory`` is not None, "preferred" or "bind".
    """
    check_memory_mode(memory)
    if affinity is None or isinstance(affinity, AffinityOptions):
        return affinity
    return AffinityOptions(getattr(affinity, "affinity_mode", affinity))


def falls_back(affinity: object) -> bool:
    """Return whether an argument ``affinity`` is a ``NumaOptions`` of torch that asks for going on where binding
    fails."""
    return bool(getattr(affinity, "should_fall_back_if_binding_fails", False))


def check_memory_mode(memory: object) -> str | None:
    """Check an argument ``memory``: None, "preferred" or "bind".

    Raises:
        GPUAffinityError: it is none of these.
    """
    return None if memory is None else _choice("memory policy", memory, MEMORY_MODES)
