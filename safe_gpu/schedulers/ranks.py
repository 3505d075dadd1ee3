"""Launchers: which of the processes on this host is this one, and how many are there? Pure."""

from __future__ import annotations

from collections.abc import Mapping

from .context import JobContext, count

__all__ = ["parse"]

# Local rank and local size of each launcher, innermost first: mpirun and srun start torchrun, not the other way round.
# It alone is known by both of its variables, since LOCAL_RANK is set by many.
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


def parse(environ: Mapping[str, str]) -> JobContext | None:
    """The rank that a launcher other than srun gave to this process, or None.

    Ranks that mpirun starts inside a Slurm job inherit ``SLURM_LOCALID=0`` from its daemon, so this goes first.
    """
    if all(count(environ, name) is not None for name in _TORCHRUN):
        return _rank(environ, *_TORCHRUN)
    for rank, size in _LAUNCHERS:
        if count(environ, rank) is not None:
            return _rank(environ, rank, size)
    # The rank in the world is the one on the host only where the world is one host; it is all that an old MPICH tells.
    # srun's PMI sets it too, but then SLURM_LOCALID is this process's own.
    world = count(environ, "PMI_RANK")
    if world is not None and world != count(environ, "SLURM_PROCID"):
        return JobContext(local_rank=world)
    return None


def _rank(environ: Mapping[str, str], rank: str, size: str) -> JobContext:
    return JobContext(local_rank=count(environ, rank), local_size=count(environ, size) or None)
