"""PBS Professional, OpenPBS and Torque: the environment of a job as a :class:`JobContext`. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .context import JobContext, count

# "1234", "1234.server", and for a task of an array "1234[5].server"
_JOB = re.compile(r"([0-9]{1,18})(?:\[([0-9]{0,18})\])?(?:\..*)?")


def parse(environ: Mapping[str, str]) -> JobContext | None:
    """The PBS job of this process; None outside one.

    ``PBS_NGPUS`` is set by many sites, not by PBS itself. PBS writes the assigned GPUs into a file or into
    CUDA_VISIBLE_DEVICES, so ``allowed`` is None.
    """
    match = _JOB.fullmatch(environ.get("PBS_JOBID", "").strip())
    if match is None:
        return None
    task = count(environ, "PBS_ARRAY_INDEX", "PBS_ARRAYID")
    return JobContext(
        scheduler="pbs",
        job_id=match[1],
        task_id=int(match[2]) if task is None and match[2] else task,
        requested_gpus=count(environ, "PBS_NGPUS"),
        walltime=count(environ, "PBS_WALLTIME"),  # Torque and PBS Professional
    )
