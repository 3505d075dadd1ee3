"""The facts about a job and a rank that a batch scheduler and a launcher put into the environment, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class JobContext(NamedTuple):
    """The job and the rank of a process according to its environment; None means "not known".

    Attributes:
        scheduler: ``sge``, ``slurm``, ``pbs``, ``lsf`` or ``flux``; None outside a batch job.
        job_id: the job's number as its scheduler shows it, ``"1234"``; for an array, the number of the whole array.
        task_id: this task's number in an array.
        local_rank: the rank of this process, from 0, among those that its launcher started on this host.
        local_size: the number of these processes.
        allowed: the GPUs that the scheduler gave to the job on this host, in the scheduler's names. This is never
            taken from CUDA_VISIBLE_DEVICES, which counts from 0 in every job under a device cgroup.
        requested_gpus: the number of GPUs of the job on this host, for all its ranks together, if the environment has
            it; :func:`~safe_gpu.schedulers.declared_gpus` also asks the scheduler.
        ends: when the scheduler ends the job, in Unix seconds.
        walltime: for how long the scheduler lets the job run, in seconds.
    """

    scheduler: str | None = None
    job_id: str | None = None
    task_id: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    allowed: tuple[str, ...] | None = None
    requested_gpus: int | None = None
    ends: int | None = None
    walltime: int | None = None

    @property
    def job_label(self) -> str | None:
        """The job as one word for lease records and ``status``, ``sge:1234``, or ``sge:1234.5`` for an array task.

        None outside a batch job, or if the number of the job is not known.

        >>> JobContext("sge", "1234", 5).job_label
        'sge:1234.5'
        """
        if self.scheduler is None or self.job_id is None:
            return None
        task = "" if self.task_id is None else f".{self.task_id}"
        return f"{self.scheduler}:{self.job_id}{task}"


def count(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is a whole number from 0 up. Any other value counts as not set.

    >>> count({"SGE_TASK_ID": "undefined"}, "SGE_TASK_ID") is None
    True
    """
    for name in names:
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdecimal() and len(text) < 19:
            return int(text)
    return None


def words(text: str | None) -> tuple[str, ...] | None:
    """The words of a list that is separated by commas or blanks; None if it has none.

    >>> words("0,1")
    ('0', '1')
    """
    return tuple((text or "").replace(",", " ").split()) or None
