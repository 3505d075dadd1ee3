"""Where affinity meets the claim: which CPUs and which memory go with the GPUs that this process has claimed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import GPUAffinityError

if TYPE_CHECKING:
    from .affinity.binding import BindingReport
    from .affinity.options import AffinityOptions
    from .devices import Gpu
    from .drivers.base import Driver

__all__ = ["bind_claim", "nodes_of_this_process"]


def bind_claim(
    gpus: tuple[Gpu, ...], driver: Driver, options: AffinityOptions | None, memory: str | None
) -> BindingReport:
    raise GPUAffinityError("binding is not there yet")


def nodes_of_this_process(driver: Driver) -> frozenset[int] | None:
    return None
