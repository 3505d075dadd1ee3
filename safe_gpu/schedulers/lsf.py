"""IBM Spectrum LSF: the environment of a job as a :class:`JobContext`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from .context import JobContext, count


def parse(environ: Mapping[str, str]) -> JobContext | None:
    """The LSF job of this process; None outside one.

    LSF has no variable for the number of GPUs; ``LSB_JOBINDEX`` is 0 outside arrays.
    """
    job = count(environ, "LSB_JOBID")
    if job is None:
        return None
    return JobContext(scheduler="lsf", job_id=str(job), task_id=count(environ, "LSB_JOBINDEX") or None)
