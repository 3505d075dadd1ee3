"""The job and the rank of this process, by the variables of its scheduler and its launcher.

Slurm's are those of sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES", Flux's those of flux-environment(7), "JOB
ENVIRONMENT", HTCondor's those of its manual, "Services for Running Jobs". Most versions of Grid Engine count GPUs but
do not assign them, so the environment rarely has the number that a job asked for. The module ``gpu_count`` asks for it.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..host.foreign_files import read_start
from ..settings.variables import host_setting


class JobContext(NamedTuple):
    """The job and the rank of a process according to its environment; None means "not known".

    Attributes:
        scheduler: its name in :data:`SCHEDULERS`; None outside a batch job.
        job_id: the job's number as its scheduler shows it, ``"1234"``; for an array, the number of the whole array.
        task_id: this task's number in an array.
        local_rank: the rank of this process, from 0, among those that its launcher started on this host.
        local_size: the number of these processes.
        requested_gpus: the number of GPUs of the job on this host, for all of these processes together, if the
            environment has it; :func:`~safe_gpu.schedulers.declared_gpus` also asks the scheduler.
        own_list: whether ``requested_gpus`` are those of this rank alone, to which its launcher gave a list.
        ends: when the scheduler ends the job, in Unix seconds.
        walltime: for how long the scheduler lets the job run, in seconds.
    """

    scheduler: str | None = None
    job_id: str | None = None
    task_id: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    requested_gpus: int | None = None
    own_list: bool = False
    ends: int | None = None
    walltime: int | None = None

    @property
    def job_label(self) -> str | None:
        """The job as one word for entries and ``status``, ``sge:1234``, or ``sge:1234.5`` for an array task.

        None outside a batch job, or if the number of the job is not known.

        >>> JobContext("sge", "1234", 5).job_label
        'sge:1234.5'
        """
        if self.scheduler is None or self.job_id is None:
            return None
        task = "" if self.task_id is None else f".{self.task_id}"
        return f"{self.scheduler}:{self.job_id}{task}"


def count(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a whole number from 0 up. Any other value counts as not set.

    >>> count({"SGE_TASK_ID": "undefined"}, "SGE_TASK_ID") is None
    True
    """
    for name in names:
        text = environ[name].strip() if name in environ else ""
        if text and text.isascii() and text.isdecimal() and len(text) < 19:
            return int(text)
    return None


def text_of(path: str) -> str:
    """Return the first MiB of a file as text; "" if it cannot be read."""
    return (read_start(path, 1 << 20) or b"").decode("utf-8", "replace")


def words(text: str | None) -> tuple[str, ...] | None:
    """Return the words of a list that is separated by commas or blanks; None if it has none.

    >>> words("0,1")
    ('0', '1')
    """
    return tuple((text or "").replace(",", " ").split()) or None


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# How schedulers write an empty list: Slurm -1 and NoDevFiles, HTCondor 10000 and none.
_NO_GPU = ("", "-1", "nodevfiles", "10000", "none", "undefined")


def gpus_in(text: str) -> int:
    """Return how many GPUs a list names.

    >>> gpus_in("GPU-1,GPU-2"), gpus_in("NoDevFiles")
    (2, 0)
    """
    return sum(entry.strip().lower() not in _NO_GPU for entry in text.split(","))


def visible_gpus(environ: Mapping[str, str]) -> int | None:
    """Return how many GPUs the variables like CUDA_VISIBLE_DEVICES name; None if none of these is set. If several lists
    name GPUs, the shortest counts."""
    lists = [gpus_in(environ[name]) for name in _VISIBLE if name in environ]
    return min(filter(None, lists), default=0) if lists else None


def lines_of_this_host(hosts: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    """Return the positions of this host in a scheduler's list of hosts; none if they are not known.

    A list of one host is of this one, whatever name the scheduler has for it. In a longer one its own name counts,
    short or full; ``HOSTNAME`` only where that fits none.
    """
    hosts = [host.lower() for host in hosts]
    if len({*hosts}) == 1:
        return [*range(len(hosts))]
    for name in (os.uname().nodename.lower(), environ.get("HOSTNAME", "").lower()):
        short = name.partition(".")[0]
        alike = [line for line, host in enumerate(hosts) if host.partition(".")[0] == short]
        mine = [line for line in alike if hosts[line] == name or "." not in hosts[line] or "." not in name] or alike
        if mine and len({hosts[line] for line in mine if "." in hosts[line]}) < 2:
            return mine
    return []


def _slurm(environ: Mapping[str, str]) -> JobContext | None:
    """Read the variables of Slurm. Those of GPUs exist only if the site has a gres for GPUs and the job asked for some.
    ``SLURM_LOCALID`` is 0 for the batch script and for every process that it starts without srun. The number of ranks
    is known only in a step."""
    job = count(environ, "SLURM_JOB_ID", "SLURM_JOBID")
    if job is None:
        return None
    array, task = count(environ, "SLURM_ARRAY_JOB_ID"), count(environ, "SLURM_ARRAY_TASK_ID")
    number, task = (job, None) if array is None or task is None else (array, task)
    tasks = _tasks_here(environ)
    requested = count(environ, "SLURM_GPUS_ON_NODE")
    if requested is None and tasks is None:  # before 20.11
        requested = gpus_in(environ.get("SLURM_JOB_GPUS", "")) or None
    ends = count(environ, "SLURM_JOB_END_TIME")  # only of later versions than 22.05
    return JobContext("slurm", str(number), task, count(environ, "SLURM_LOCALID"), tasks, requested, ends=ends)


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the entry of this node in ``SLURM_STEP_TASKS_PER_NODE``, a list such as ``2(x3),1`` in the order of the
    nodes.

    None if it is of another job's step. Slurm sets ``SLURM_GTIDS``, the ids of the tasks of this node, for batch
    scripts too. In a step, ``SLURM_TASKS_PER_NODE`` is the same list.
    """
    tasks = words(environ.get("SLURM_GTIDS"))
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if tasks is None and environ.get("SLURM_TASKS_PER_NODE", listed) != listed:
        return None
    node = count(environ, "SLURM_NODEID")
    for entry in listed.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", entry.strip())
        if node is None or match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            number = int(match[1])
            return number if number and (tasks is None or len(tasks) == number) else None
    return None


# Common names of the resource. SAFE_GPU_SGE_RESOURCE names another.
_RESOURCES = tuple("gpu gpus ngpu ngpus num_gpu num_gpus gpu_num gpu_card gpu_cards nvidia_gpu cuda".split())


def resource_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names under which the jobs of this Grid Engine site ask for GPUs."""
    return words(host_setting("sge_resource", "SAFE_GPU_SGE_RESOURCE", environ)) or _RESOURCES


def _sge(environ: Mapping[str, str]) -> JobContext | None:
    """Read the variables of Grid Engine. ``JOB_ID`` alone is not enough, because other programs use that name.
    ``SGE_ROOT`` is set on submit hosts too.

    Outside arrays ``SGE_TASK_ID`` is the word ``undefined``. If Univa's resource maps assign GPUs, ``SGE_HGR_gpu``
    lists them. The path of the spool directory has the number too: ``.../active_jobs/1234.5`` or a directory in it.
    """
    job, spool = count(environ, "JOB_ID"), environ.get("SGE_JOB_SPOOL_DIR", "")
    if not (environ.get("SGE_TASK_ID") or spool or (job is not None and environ.get("SGE_ROOT"))):
        return None
    in_path = re.search(r"/active_jobs/([0-9]{1,18})(?:[./]|$)", spool)
    number = str(job) if job is not None else in_path[1] if in_path else None
    listed = next(filter(None, (words(environ.get(f"SGE_HGR_{name}")) for name in resource_names(environ))), None)
    return JobContext("sge", number, count(environ, "SGE_TASK_ID"), requested_gpus=len(listed or ()) or None)


def _pbs(environ: Mapping[str, str]) -> JobContext | None:
    """Read the variables of PBS. ``PBS_NGPUS`` is set by many sites, not by PBS itself. Torque lists the assigned GPUs
    in a file, one "host-gpu0" on each line; PBS in CUDA_VISIBLE_DEVICES. The job's number is "1234.server", in an array
    "1234[5].server"."""
    job = environ.get("PBS_JOBID", "").strip()
    match = job and re.fullmatch(r"([0-9]{1,18})(?:\[([0-9]{0,18})\])?(?:\..*)?", job)
    if not match:
        return None
    task = count(environ, "PBS_ARRAY_INDEX", "PBS_ARRAYID")
    task = int(match[2]) if task is None and match[2] else task
    requested = count(environ, "PBS_NGPUS")
    if requested is None:
        gpus = {*re.findall(r"(?m)^(.+)-gpu/?([0-9]+)[ \r]*$", text_of(environ.get("PBS_GPUFILE", "")))}
        requested = len(lines_of_this_host([host for host, _ in gpus], environ)) or None
    walltime = count(environ, "PBS_WALLTIME")  # Torque and PBS Professional
    return JobContext("pbs", match[1], task, requested_gpus=requested, walltime=walltime)


def _lsf(environ: Mapping[str, str]) -> JobContext | None:
    """Read the variables of LSF. There is none for the number of GPUs; ``LSB_JOBINDEX`` is 0 outside arrays."""
    job = count(environ, "LSB_JOBID")
    return None if job is None else JobContext("lsf", str(job), count(environ, "LSB_JOBINDEX") or None)


def _flux(environ: Mapping[str, str]) -> JobContext | None:
    """Read the variables of Flux, which lists the GPUs of the job on this host in CUDA_VISIBLE_DEVICES, for AMD GPUs
    too, and -1 if there are none.

    With ``-o gpu-affinity=per-task`` it lists those of the task instead, which nothing tells apart. So their number is
    known only if each host runs one task. The job is in F58, such as "ƒ3ETxsR9H"; Flux takes "f" for "ƒ", too.
    """
    job = environ.get("FLUX_JOB_ID", "").strip()
    match = job and re.fullmatch(r"[ƒf]([1-9A-HJ-NP-Za-km-z]{1,12})", job)
    if not match:
        return None
    tasks, hosts = count(environ, "FLUX_JOB_SIZE"), count(environ, "FLUX_JOB_NNODES")
    alone = tasks is not None and tasks == hosts
    rank, size = count(environ, "FLUX_TASK_LOCAL_ID"), (tasks or None) if hosts == 1 else 1 if alone else None
    requested = visible_gpus(environ) if alone else None
    return JobContext("flux", f"f{match[1]}", local_rank=rank, local_size=size, requested_gpus=requested)


def _htcondor(environ: Mapping[str, str]) -> JobContext | None:
    """Read the ad of an HTCondor job, a file of lines ``Name = value``; the second number counts jobs of one
    submission.

    ``_CONDOR_AssignedGPUs`` lists the GPUs by UUIDs of eight digits, as CUDA_VISIBLE_DEVICES does. Without it the ad
    counts, where a request may be an expression. A job that asked for none has an empty list, or 10000 or ``none`` in
    CUDA_VISIBLE_DEVICES.
    """
    path = environ.get("_CONDOR_JOB_AD")
    if not path:
        return None
    text = text_of(path)
    ad = {name: int(value) for name, value in re.findall(r"(?m)^(ClusterId|ProcId|RequestGPUs) = ([0-9]{1,18})$", text)}
    assigned = environ.get("_CONDOR_AssignedGPUs")
    requested = gpus_in(assigned or "") or ad.get("RequestGPUs")
    if requested is None and (assigned is not None or visible_gpus(environ) == 0):
        requested = None if re.search(r"(?mi)^RequestGPUs = (?!undefined)", text) else 0
    job = ad.get("ClusterId")
    return JobContext("htcondor", None if job is None else str(job), ad.get("ProcId"), requested_gpus=requested)


class Scheduler(NamedTuple):
    """One scheduler.

    Attributes:
        name: as in :class:`JobContext` and in entries.
        parse: gives the job of this process by an environment, or None outside the jobs of this scheduler.
        number: the variable with the number of GPUs of the job on this host, for messages; "" if it has none.
        lists_gpus: whether it lists the assigned GPUs in CUDA_VISIBLE_DEVICES, or in AMD's variables, and may have no
            variable with their number.
    """

    name: str
    parse: Callable[[Mapping[str, str]], JobContext | None]
    number: str = ""
    lists_gpus: bool = False


# Slurm first: sbatch passes on the environment it is called in, so a Slurm job may carry another scheduler's variables.
SCHEDULERS = (
    Scheduler("slurm", _slurm, "SLURM_GPUS_ON_NODE"),
    Scheduler("sge", _sge),
    Scheduler("pbs", _pbs, "PBS_NGPUS", lists_gpus=True),
    Scheduler("lsf", _lsf, lists_gpus=True),
    Scheduler("flux", _flux),
    Scheduler("htcondor", _htcondor, "_CONDOR_AssignedGPUs"),
)
"""All that are known. ``test_a_scheduler_has_all_that_it_needs`` says what one more needs beside its row."""

# Of each launcher, innermost first: local rank, local size, whether its ranks have one list of visible GPUs together.
# mpirun and srun start torchrun, not the other way round. It is recognised only by both, because others set LOCAL_RANK.
_LAUNCHERS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE", True),  # torchrun
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", True),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", False),  # Open MPI
    ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE", False),  # MVAPICH2
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", False),  # MPICH and Intel MPI (Hydra), Platform MPI
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", False),  # Cray
    ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE", False),  # jsrun
    ("LOCAL_RANK", "LOCAL_SIZE", True),  # DeepSpeed, Accelerate and others
)


def current(environ: Mapping[str, str] | None = None) -> JobContext:
    """Return the job and the rank of this process; ``environ`` None is the process's own environment.

    The job comes from the batch scheduler, the rank from the innermost launcher: an MPI rank in a Slurm job has Slurm's
    job number and MPI's rank. A variable with an invalid value counts as not set.
    """
    if environ is None:
        environ = os.environ
    job = next(filter(None, (scheduler.parse(environ) for scheduler in SCHEDULERS)), JobContext())
    tasks, total, listed = job.local_size or 1, job.requested_gpus, visible_gpus(environ)
    rank = _rank(environ)
    if rank is not None:
        job = job._replace(local_rank=rank[0], local_size=rank[1])
    if job.scheduler is None or listed is None:
        return job

    # Whose is the list of visible GPUs? The ranks of torchrun, of one task of srun, and in a claim have one together.
    ranks = job.local_size or 1
    together = "SAFE_GPU_SCOPE" in environ or (rank is not None and rank[2])
    jsrun = count(environ, "JSM_NAMESPACE_LOCAL_RANK") is not None  # gives each rank a list
    if jsrun or total is None:
        lists_gpus = any(one.lists_gpus for one in SCHEDULERS if one.name == job.scheduler)
        counts = jsrun or (lists_gpus and (together or ranks == 1 or listed == 0))
    else:  # A shorter list is one of several. Those that do not fit into the job's overlap (--gpu-bind=closest, MPS).
        together = together or (rank is not None and tasks > 1 and tasks * listed <= total)
        counts = 0 < listed < total and (together or ranks * listed <= total)
    return job._replace(requested_gpus=listed, own_list=not together) if counts else job


def _rank(environ: Mapping[str, str]) -> tuple[int, int | None, bool] | None:
    """Return the rank that a launcher other than srun gave to this process, the number of ranks here, and whether these
    have one list of visible GPUs together; or None.

    It takes precedence over Slurm's rank: ranks that mpirun starts in a Slurm job inherit ``SLURM_LOCALID=0`` from the
    daemon of mpirun.
    """
    for rank_name, size_name, together in _LAUNCHERS:
        rank = count(environ, rank_name)
        size = None if rank is None else count(environ, size_name)
        if rank is not None and (size is not None or size_name != "LOCAL_WORLD_SIZE"):
            return rank, size or None, together
    # Old versions of MPICH set only the global rank, which equals the local rank if the job runs on one host. PMI of
    # srun and of Flux sets the variable too; their own local rank is right then.
    world = count(environ, "PMI_RANK")
    if world is not None and world not in (count(environ, "SLURM_PROCID"), count(environ, "FLUX_TASK_RANK")):
        return world, None, False
    return None
