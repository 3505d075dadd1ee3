"""The job and the rank of this process, combined from the variables of its scheduler and its launcher."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import import_module

from .context import JobContext, count

# Slurm first: sbatch passes on the environment it is called in, so a Slurm job may carry another scheduler's variables.
# A scheduler is imported only if one of its variables is set, because every claim runs this code.
_SCHEDULERS = {
    "slurm": ("SLURM_JOB_ID", "SLURM_JOBID"),
    "sge": ("SGE_TASK_ID", "SGE_JOB_SPOOL_DIR", "SGE_ROOT"),
    "pbs": ("PBS_JOBID",),
    "lsf": ("LSB_JOBID",),
    "flux": ("FLUX_JOB_ID",),
}

# Local rank and local size of each launcher, innermost first: mpirun and srun start torchrun, not the other way round.
# torchrun is recognised only by both of its variables, because other launchers set LOCAL_RANK too.
_TORCHRUN = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS = (
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH2
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI (Hydra), Platform MPI
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray
    ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),  # jsrun
    ("LOCAL_RANK", "LOCAL_SIZE"),  # DeepSpeed, Accelerate and others
)


def current(environ: Mapping[str, str] | None = None) -> JobContext:
    """The job and the rank of this process; ``environ`` None is the process's own environment.

    The job comes from the batch scheduler, the rank from the innermost launcher: an MPI rank in a Slurm job has Slurm's
    job number and MPI's rank. A variable with an invalid value counts as not set.
    """
    if environ is None:
        environ = os.environ
    job = next(filter(None, _jobs(environ)), None)
    rank = _rank(environ)
    if job is None or rank is None:
        return job or rank or JobContext()
    return job._replace(local_rank=rank.local_rank, local_size=rank.local_size)


def _jobs(environ: Mapping[str, str]) -> Iterator[JobContext | None]:
    for name, variables in _SCHEDULERS.items():
        if any(variable in environ for variable in variables):
            yield import_module(f".{name}", __package__).parse(environ)


def in_batch_job(environ: Mapping[str, str] | None = None) -> bool:
    """Whether this process is part of a batch job. Claims in a batch job have a longer default timeout."""
    return current(environ).scheduler is not None


def _rank(environ: Mapping[str, str]) -> JobContext | None:
    """The rank that a launcher other than srun gave to this process, or None.

    It takes precedence over Slurm's rank: ranks that mpirun starts in a Slurm job inherit ``SLURM_LOCALID=0`` from the
    daemon of mpirun.
    """
    if all(count(environ, name) is not None for name in _TORCHRUN):
        return _of(environ, *_TORCHRUN)
    for rank, size in _LAUNCHERS:
        if count(environ, rank) is not None:
            return _of(environ, rank, size)
    # Old versions of MPICH set only the global rank, which equals the local rank if the job runs on one host. PMI of
    # srun and of Flux sets the variable too; their own local rank is right then.
    world = count(environ, "PMI_RANK")
    if world is not None and world not in (count(environ, "SLURM_PROCID"), count(environ, "FLUX_TASK_RANK")):
        return JobContext(local_rank=world)
    return None


def _of(environ: Mapping[str, str], rank: str, size: str) -> JobContext:
    return JobContext(local_rank=count(environ, rank), local_size=count(environ, size) or None)
