"""Batch schedulers and launchers: what the environment says about the job and the rank that this process is.

Each scheduler is a pure function from an environment to a :class:`JobContext`, or None where it is not the one. Nothing
is asked of a scheduler but in :func:`number_for_job` and :func:`declared_gpus`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import ranks
from .context import JobContext

if TYPE_CHECKING:
    from .number import declared_gpus, number_for_job

__all__ = ["JobContext", "current", "declared_gpus", "in_batch_job", "number_for_job"]

# Slurm first: sbatch passes on the environment it is called in, so a Slurm job may carry another scheduler's variables.
# A scheduler that has set no variable is not even imported: every claim comes here.
_SCHEDULERS = {"SLURM_": "slurm", "SGE_": "sge", "PBS_": "pbs", "LSB_": "lsf"}


def current(environ: Mapping[str, str] | None = None) -> JobContext:
    """The job and the rank that this process is; ``environ`` None is the process's own environment.

    The job comes from the batch scheduler, the rank from the innermost launcher: an MPI rank in a Slurm job has Slurm's
    job number and MPI's rank. A variable with a senseless value counts as not set.
    """
    if environ is None:
        environ = os.environ
    job = next(filter(None, _jobs(environ)), None)
    rank = ranks.parse(environ)
    if job is None or rank is None:
        return job or rank or JobContext()
    return JobContext(
        job.scheduler, job.job_id, job.task_id, rank.local_rank, rank.local_size, job.allowed, job.requested_gpus
    )


def _jobs(environ: Mapping[str, str]) -> Iterator[JobContext | None]:
    for prefix, name in _SCHEDULERS.items():
        if any(variable.startswith(prefix) for variable in environ):
            yield import_module(f".{name}", __name__).parse(environ)


def in_batch_job(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is part of a batch job, which has declared its GPUs and may wait longer for them."""
    return current(environ).scheduler is not None


def __getattr__(name: str) -> Any:
    if name in ("declared_gpus", "number_for_job"):  # few claims ask
        return getattr(import_module(".number", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
