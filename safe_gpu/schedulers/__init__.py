"""Batch schedulers and launchers: which job and which rank this process is, according to its environment.

Each scheduler has a pure function that turns an environment into a :class:`JobContext`, or into None outside its jobs.
Only :func:`number_for_job`, :func:`declared_gpus` and :func:`with_end` ask a scheduler. Nothing here depends on GPUs or
claims.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .job import JobContext, current, in_batch_job

if TYPE_CHECKING:
    from .gpu_count import declared_gpus, number_for_job, with_end

__all__ = ["JobContext", "current", "declared_gpus", "in_batch_job", "number_for_job", "with_end"]


def __getattr__(name: str) -> Any:
    if name in ("declared_gpus", "number_for_job", "with_end"):  # imported on first use: few claims need them
        return getattr(import_module(".gpu_count", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
