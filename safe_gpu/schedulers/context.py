"""What a batch scheduler and a launcher tell a process about its job, as frozen data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["JobContext", "count", "words"]


class JobContext(NamedTuple):
    """The job and the rank that a process is, as far as its environment says; None is "it does not say".

    Attributes:
        scheduler: ``sge``, ``slurm``, ``pbs`` or ``lsf``; None outside a batch job.
        job_id: the job's number as its scheduler shows it, ``"1234"``; for an array, the number of the whole array.
        task_id: this task's number in an array.
        local_rank: this process's place, from 0, among those that its launcher started on this host.
        local_size: how many these are.
        allowed: the GPUs that the scheduler says it gave to the job on this host, in the scheduler's own names. It is
            never taken from CUDA_VISIBLE_DEVICES: under a device cgroup that counts from 0 in every job.
        requested_gpus: how many GPUs the job has on this host, all its ranks together, where the environment says
            it; see :func:`~safe_gpu.schedulers.declared_gpus` for the scheduler's own answer.
    """

    scheduler: str | None = None
    job_id: str | None = None
    task_id: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    allowed: tuple[str, ...] | None = None
    requested_gpus: int | None = None

    @property
    def job_label(self) -> str | None:
        """The job in one word, as lease records and ``status`` name it: ``sge:1234``, or ``sge:1234.5`` for task 5 of
        an array; None outside a batch job, or in one that does not tell its number.

        >>> JobContext("sge", "1234", 5).job_label
        'sge:1234.5'
        """
        if self.scheduler is None or self.job_id is None:
            return None
        task = "" if self.task_id is None else f".{self.task_id}"
        return f"{self.scheduler}:{self.job_id}{task}"


def count(environ: Mapping[str, str], *names: str) -> int | None:
    """The first of these variables that is a whole number from 0 up; anything else is as if it were not set.

    >>> count({"SGE_TASK_ID": "undefined"}, "SGE_TASK_ID") is None
    True
    """
    for name in names:
        text = environ.get(name, "").strip()
        if text.isascii() and text.isdecimal() and len(text) < 19:
            return int(text)
    return None


def words(text: str | None) -> tuple[str, ...] | None:
    """The words of a list with commas or blanks between them; None where there is none.

    >>> words("0,1")
    ('0', '1')
    """
    return tuple((text or "").replace(",", " ").split()) or None
