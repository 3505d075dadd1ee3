"""The job and the rank of this process, by the variables of its scheduler and its launcher. Pure.

The variables are those of sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES".

Most versions of Grid Engine count GPUs but do not assign them, so the environment rarely has the number that a job
asked for. The module ``qstat`` asks for it.

The variables are those of flux-environment(7), "JOB ENVIRONMENT".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# The facts about a job and a rank that a batch scheduler and a launcher put into the environment, as frozen data.


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


# Slurm: the environment of a job or a step as a :class:`JobContext`. Pure.


_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def parse_slurm(environ: Mapping[str, str]) -> JobContext | None:
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


# Grid Engine (Sun, Son of, Open, Univa, Altair): the environment of a job as a :class:`JobContext`. Pure.


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


def parse_sge(environ: Mapping[str, str]) -> JobContext | None:
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


# PBS Professional, OpenPBS and Torque: the environment of a job as a :class:`JobContext`. Pure.


# "1234", "1234.server", and for a task of an array "1234[5].server"
_PBS_JOB = re.compile(r"([0-9]{1,18})(?:\[([0-9]{0,18})\])?(?:\..*)?")


def parse_pbs(environ: Mapping[str, str]) -> JobContext | None:
    """The PBS job of this process; None outside one.

    ``PBS_NGPUS`` is set by many sites, not by PBS itself. PBS writes the assigned GPUs into a file or into
    CUDA_VISIBLE_DEVICES, so ``allowed`` is None.
    """
    match = _PBS_JOB.fullmatch(environ.get("PBS_JOBID", "").strip())
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


# IBM Spectrum LSF: the environment of a job as a :class:`JobContext`. Pure.


def parse_lsf(environ: Mapping[str, str]) -> JobContext | None:
    """The LSF job of this process; None outside one.

    LSF has no variable for the number of GPUs; ``LSB_JOBINDEX`` is 0 outside arrays.
    """
    job = count(environ, "LSB_JOBID")
    if job is None:
        return None
    return JobContext(scheduler="lsf", job_id=str(job), task_id=count(environ, "LSB_JOBINDEX") or None)


# Flux: the environment of a task of a job as a :class:`JobContext`. Pure.


# F58, such as "ƒ3ETxsR9H"; Flux takes "f" for its first letter, too.
_FLUX_JOB = re.compile(r"[ƒf]([1-9A-HJ-NP-Za-km-z]{1,12})")


def parse_flux(environ: Mapping[str, str]) -> JobContext | None:
    """The Flux job of this process; None outside one.

    Flux lists the GPUs of the job on this host in CUDA_VISIBLE_DEVICES, for AMD GPUs too, and -1 if there are none.
    With ``-o gpu-affinity=per-task`` it lists those of the task instead, which nothing tells apart. So their number is
    known only if each host runs one task.
    """
    match = _FLUX_JOB.fullmatch(environ.get("FLUX_JOB_ID", "").strip())
    if match is None:
        return None
    tasks, hosts = count(environ, "FLUX_JOB_SIZE"), count(environ, "FLUX_JOB_NNODES")
    alone = tasks is not None and tasks == hosts
    listed = environ.get("CUDA_VISIBLE_DEVICES") if alone else None
    return JobContext(
        scheduler="flux",
        job_id=f"f{match[1]}",
        local_rank=count(environ, "FLUX_TASK_LOCAL_ID"),
        local_size=(tasks or None) if hosts == 1 else 1 if alone else None,
        requested_gpus=None if listed is None else len([one for one in listed.split(",") if one not in ("", "-1")]),
    )


# The job and the rank of this process, combined from the variables of its scheduler and its launcher.


# Slurm first: sbatch passes on the environment it is called in, so a Slurm job may carry another scheduler's variables.
_SCHEDULERS = {
    parse_slurm: ("SLURM_JOB_ID", "SLURM_JOBID"),
    parse_sge: ("SGE_TASK_ID", "SGE_JOB_SPOOL_DIR", "SGE_ROOT"),
    parse_pbs: ("PBS_JOBID",),
    parse_lsf: ("LSB_JOBID",),
    parse_flux: ("FLUX_JOB_ID",),
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
    for parse, variables in _SCHEDULERS.items():
        if any(variable in environ for variable in variables):
            yield parse(environ)


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
