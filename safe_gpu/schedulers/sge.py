"""Grid Engine (Sun, Son of, Open, Univa, Altair): the environment of a job as a :class:`JobContext`. Pure.

Most versions of Grid Engine count GPUs but do not assign them, so the environment rarely has the number that a job
asked for. The module ``qstat`` asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from .context import JobContext, count, words

# Common names of the resource. SAFE_GPU_SGE_RESOURCE names another.
_RESOURCES = (
    "gpu",
    "gpus",
    "ngpu",
    "ngpus",
    "num_gpu",
    "num_gpus",
    "gpu_num",
    "gpu_card",
    "gpu_cards",
    "nvidia_gpu",
    "cuda",
)


def parse(environ: Mapping[str, str]) -> JobContext | None:
    """The Grid Engine job of this process; None outside one.

    ``JOB_ID`` alone is not enough, because other programs use that name. ``SGE_ROOT`` is set on submit hosts too.
    Outside arrays ``SGE_TASK_ID`` is the word ``undefined``. If Univa's resource maps assign GPUs, ``SGE_HGR_gpu``
    lists them.
    """
    job = count(environ, "JOB_ID")
    spool = environ.get("SGE_JOB_SPOOL_DIR", "")
    if not (environ.get("SGE_TASK_ID") or spool or (job is not None and environ.get("SGE_ROOT"))):
        return None
    allowed = next(filter(None, (words(environ.get(f"SGE_HGR_{name}")) for name in resource_names(environ))), None)
    return JobContext(
        scheduler="sge",
        job_id=_job_in(spool) if job is None else str(job),
        task_id=count(environ, "SGE_TASK_ID"),
        allowed=allowed,
        requested_gpus=len(allowed) if allowed else None,
    )


def resource_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names under which this site's jobs ask for GPUs."""
    return words(environ.get("SAFE_GPU_SGE_RESOURCE")) or _RESOURCES


def _job_in(spool: str) -> str | None:
    """The job's number from the path of its spool directory, ``.../active_jobs/1234.5`` or a directory in it."""
    _, found, rest = spool.partition("/active_jobs/")
    number = rest.split("/")[0].split(".")[0]
    return number if found and number.isascii() and number.isdecimal() and len(number) < 19 else None
