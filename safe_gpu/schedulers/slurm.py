"""Slurm: the environment of a job or a step as a :class:`JobContext`. Pure.

The variables are those of sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .context import JobContext, count, words

_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def parse(environ: Mapping[str, str]) -> JobContext | None:
    """The Slurm job of this process; None outside one.

    GPU variables exist only if the site has a gres for GPUs and the job asked for some. ``SLURM_LOCALID`` is 0 for the
    batch script and for every process that it starts without srun. The number of ranks is known only in a step.
    """
    job = count(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    array = count(environ, "SLURM_ARRAY_JOB_ID")
    task = count(environ, "SLURM_ARRAY_TASK_ID")
    in_array = array is not None and task is not None
    allowed = words(environ.get("SLURM_STEP_GPUS")) or words(environ.get("SLURM_JOB_GPUS"))
    requested = count(environ, "SLURM_GPUS_ON_NODE")
    return JobContext(
        scheduler="slurm",
        job_id=str(array if in_array else job),
        task_id=task if in_array else None,
        local_rank=count(environ, "SLURM_LOCALID"),
        local_size=_tasks_here(environ),
        allowed=allowed,
        # Slurm before 20.11 has no SLURM_GPUS_ON_NODE.
        requested_gpus=len(allowed) if requested is None and allowed else requested,
        ends=count(environ, "SLURM_JOB_END_TIME"),  # Slurm 22.05 and later
    )


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """The entry of this node in ``SLURM_STEP_TASKS_PER_NODE``, a list such as ``2(x3),1`` in the order of the nodes."""
    node = count(environ, "SLURM_NODEID")
    if node is None:
        return None
    for entry in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        match = _TASKS.fullmatch(entry.strip())
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1]) or None
    return None
