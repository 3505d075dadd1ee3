"""The job and the rank of this process, by the variables of its scheduler and its launcher.

Slurm's are those of sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES", PBS's those of qsub(1B), LSF's those of its
reference, "Environment variables set for job execution", Flux's those of flux-environment(7), "JOB ENVIRONMENT",
HTCondor's those of its manual, "Services for Running Jobs". Most versions of Grid Engine count GPUs but do not assign
them, so the environment rarely has the number that a job asked for. The module ``gpu_count`` asks for it.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

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
        label = f"{self.scheduler}:{self.job_id}"
        if self.task_id is not None:
            label += f".{self.task_id}"
        return label


def count(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the first of these variables that is a whole number from 0 up. Any other value counts as not set.

    >>> count({"SGE_TASK_ID": "undefined"}, "SGE_TASK_ID") is None
    True
    """
    for name in names:
        text = environ.get(name, "").strip()
        if re.fullmatch("[0-9]{1,18}", text):
            return int(text)
    return None


def text_of(path: str) -> str:
    """Return the first MiB of a file as text; "" if it cannot be read."""
    data = read_start(path, 1 << 20) or b""
    return data.decode("utf-8", "replace")


def words(text: str) -> list[str]:
    """Return the words of a list that is separated by commas or blanks.

    >>> words("0,1")
    ['0', '1']
    """
    return text.replace(",", " ").split()


_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# How schedulers write an empty list: Slurm -1 and NoDevFiles, HTCondor 10000 and none.
_NO_GPU = ("", "-1", "nodevfiles", "10000", "none", "undefined")


def gpus_in(text: str) -> int:
    """Return how many GPUs a list names.

    >>> gpus_in("GPU-1,GPU-2"), gpus_in("NoDevFiles")
    (2, 0)
    """
    entries = [entry.strip().lower() for entry in text.split(",")]
    return len([entry for entry in entries if entry not in _NO_GPU])


def visible_gpus(environ: Mapping[str, str]) -> int | None:
    """Return how many GPUs the variables like CUDA_VISIBLE_DEVICES name; None if none of these is set. If several lists
    name GPUs, the shortest counts."""
    numbers = [gpus_in(environ[name]) for name in _VISIBLE if name in environ]
    if not numbers:
        return None
    return min((number for number in numbers if number > 0), default=0)


def lines_of_this_host(hosts: Sequence[str], environ: Mapping[str, str]) -> list[int]:
    """Return the positions of this host in a scheduler's list of hosts; none if they are not known.

    A list of one host is of this one, whatever name the scheduler has for it. In a longer one its own name counts,
    short or full; ``HOSTNAME`` only where that fits none.
    """
    hosts = [host.lower() for host in hosts]
    if len(set(hosts)) == 1:
        return list(range(len(hosts)))
    own_name = os.uname().nodename.lower()
    return _lines_of(own_name, hosts) or _lines_of(environ.get("HOSTNAME", "").lower(), hosts)


def _lines_of(name: str, hosts: Sequence[str]) -> list[int]:
    """Return the positions of the host of this name; none if it may be one of several."""
    short = name.partition(".")[0]
    alike = [line for line, host in enumerate(hosts) if host.partition(".")[0] == short]
    lines = [line for line in alike if hosts[line] == name or "." not in hosts[line] or "." not in name]
    if not lines:
        lines = alike  # this host, in another domain
    full_names = {hosts[line] for line in lines if "." in hosts[line]}
    if len(full_names) > 1:
        return []
    return lines


class Scheduler:
    """One scheduler: which variables of its jobs have what, and what else is to be known of its jobs.

    A tuple of names means the first of these variables that is a whole number. Unless a class says more, a process is
    in a job if ``job_id`` is one.

    Attributes:
        name: as in :class:`JobContext` and in entries.
        job_id, task_id, local_rank, requested_gpus, ends, walltime: the variables with these of :class:`JobContext`.
        others: the other variables that are read here or in ``gpu_count``. One that ends with ``*`` stands for all that
            begin so.
        number: the variable with the number of GPUs of the job on this host, for messages; "" if it has none.
        lists_gpus: whether it lists the assigned GPUs in CUDA_VISIBLE_DEVICES, or in AMD's variables, and may have no
            variable with their number.
        end_can_be_asked: whether ``gpu_count.with_end`` may know when a job ends whose variables do not say.
    """

    name: ClassVar[str]
    job_id: ClassVar[tuple[str, ...]] = ()
    task_id: ClassVar[tuple[str, ...]] = ()
    local_rank: ClassVar[tuple[str, ...]] = ()
    requested_gpus: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    walltime: ClassVar[tuple[str, ...]] = ()
    others: ClassVar[tuple[str, ...]] = ()
    number: ClassVar[str] = ""
    lists_gpus: ClassVar[bool] = False
    end_can_be_asked: ClassVar[bool] = False

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables by which it tells of a job. Tests take them out of their environment."""
        numbers = (*self.job_id, *self.task_id, *self.local_rank, *self.requested_gpus, *self.ends, *self.walltime)
        return (*numbers, *self.others)

    def job(self, environ: Mapping[str, str]) -> JobContext | None:
        """Return the job of a process with this environment, or None outside the jobs of this scheduler."""
        number = count(environ, *self.job_id)
        if number is None:
            return None
        return self.context(environ, str(number))

    def context(self, environ: Mapping[str, str], job_id: str | None) -> JobContext:
        """Return this job with what the variables tell that have a whole number."""
        return JobContext(
            self.name,
            job_id,
            task_id=count(environ, *self.task_id),
            local_rank=count(environ, *self.local_rank),
            requested_gpus=count(environ, *self.requested_gpus),
            ends=count(environ, *self.ends),
            walltime=count(environ, *self.walltime),
        )


class Slurm(Scheduler):
    """The variables of GPUs exist only if the site has a gres for GPUs and the job asked for some. ``SLURM_LOCALID`` is
    0 for the batch script and for every process that it starts without srun. The number of ranks is known only in a
    step."""

    name = "slurm"
    job_id = ("SLURM_JOB_ID", "SLURM_JOBID")
    task_id = ("SLURM_ARRAY_TASK_ID",)
    local_rank = ("SLURM_LOCALID",)
    requested_gpus = ("SLURM_GPUS_ON_NODE",)
    ends = ("SLURM_JOB_END_TIME",)  # only of later versions than 22.05
    others = (
        "SLURM_ARRAY_JOB_ID", "SLURM_JOB_GPUS", "SLURM_GTIDS", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_TASKS_PER_NODE",
    )  # fmt: skip
    number = "SLURM_GPUS_ON_NODE"
    end_can_be_asked = True

    def context(self, environ: Mapping[str, str], job_id: str | None) -> JobContext:
        job = super().context(environ, job_id)._replace(local_size=_tasks_here(environ))
        array = count(environ, "SLURM_ARRAY_JOB_ID")
        if array is None or job.task_id is None:
            job = job._replace(task_id=None)
        else:
            job = job._replace(job_id=str(array))
        if job.requested_gpus is None and job.local_size is None:  # before 20.11
            listed = gpus_in(environ.get("SLURM_JOB_GPUS", ""))
            job = job._replace(requested_gpus=listed or None)
        return job


def _tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the entry of this node in ``SLURM_STEP_TASKS_PER_NODE``, a list such as ``2(x3),1`` in the order of the
    nodes.

    None if it is of another job's step. Slurm sets ``SLURM_GTIDS``, the ids of the tasks of this node, for batch
    scripts too. In a step, ``SLURM_TASKS_PER_NODE`` is the same list.
    """
    tasks = words(environ.get("SLURM_GTIDS", ""))
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    if not tasks and environ.get("SLURM_TASKS_PER_NODE", listed) != listed:
        return None
    node = count(environ, "SLURM_NODEID")
    if node is None:
        return None
    number = _entry_of_node(listed, node)
    if tasks and len(tasks) != number:
        return None
    return number


def _entry_of_node(listed: str, node: int) -> int | None:
    """Return the number for a node in a list such as ``2(x3),1``; None if there is none, or it is 0."""
    for entry in listed.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", entry.strip())
        if match is None:
            return None
        node -= int(match[2] or 1)
        if node < 0:
            return int(match[1]) or None
    return None


# Common names of the resource. SAFE_GPU_SGE_RESOURCE names another.
_RESOURCES = tuple("gpu gpus ngpu ngpus num_gpu num_gpus gpu_num gpu_card gpu_cards nvidia_gpu cuda".split())


def resource_names(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names under which the jobs of this Grid Engine site ask for GPUs."""
    given = words(host_setting("sge_resource", "SAFE_GPU_SGE_RESOURCE", environ) or "")
    return tuple(given) or _RESOURCES


class GridEngine(Scheduler):
    """``JOB_ID`` alone is not enough, because other programs use that name. ``SGE_ROOT`` is set on submit hosts too.

    Outside arrays ``SGE_TASK_ID`` is the word ``undefined``. If Univa's resource maps assign GPUs, ``SGE_HGR_gpu``
    lists them. The path of the spool directory has the number too: ``.../active_jobs/1234.5`` or a directory in it.
    """

    name = "sge"
    job_id = ("JOB_ID",)
    task_id = ("SGE_TASK_ID",)
    others = (
        "SGE_ROOT", "SGE_JOB_SPOOL_DIR", "SGE_HGR_*", "SGE_ARCH", "SGE_BINARY_PATH", "PE_HOSTFILE", "NHOSTS", "NSLOTS",
    )  # fmt: skip
    end_can_be_asked = True

    def job(self, environ: Mapping[str, str]) -> JobContext | None:
        number = count(environ, *self.job_id)
        spool = environ.get("SGE_JOB_SPOOL_DIR", "")
        is_numbered_job = number is not None and environ.get("SGE_ROOT")
        if not is_numbered_job and not spool and not environ.get("SGE_TASK_ID"):
            return None
        job_id = None
        in_path = re.search(r"/active_jobs/([0-9]{1,18})(?:[./]|$)", spool)
        if number is not None:
            job_id = str(number)
        elif in_path:
            job_id = in_path[1]
        return self.context(environ, job_id)._replace(requested_gpus=_number_in_resource_map(environ))


def _number_in_resource_map(environ: Mapping[str, str]) -> int | None:
    for name in resource_names(environ):
        listed = words(environ.get(f"SGE_HGR_{name}", ""))
        if listed:
            return len(listed)
    return None


class Pbs(Scheduler):
    """``PBS_NGPUS`` is set by many sites, not by PBS itself. Torque lists the assigned GPUs in a file, one "host-gpu0"
    on each line; PBS in CUDA_VISIBLE_DEVICES. The job's number is "1234.server", in an array "1234[5].server"."""

    name = "pbs"
    task_id = ("PBS_ARRAY_INDEX", "PBS_ARRAYID")
    requested_gpus = ("PBS_NGPUS",)
    walltime = ("PBS_WALLTIME",)  # Torque and PBS Professional
    others = ("PBS_JOBID", "PBS_GPUFILE")
    number = "PBS_NGPUS"
    lists_gpus = True

    def job(self, environ: Mapping[str, str]) -> JobContext | None:
        text = environ.get("PBS_JOBID", "").strip()
        match = re.fullmatch(r"([0-9]{1,18})(?:\[([0-9]{0,18})\])?(?:\..*)?", text)
        if match is None:
            return None
        number, task = match.groups()
        job = self.context(environ, number)
        if job.task_id is None and task:
            job = job._replace(task_id=int(task))
        if job.requested_gpus is None:
            job = job._replace(requested_gpus=_number_in_gpu_file(environ))
        return job


def _number_in_gpu_file(environ: Mapping[str, str]) -> int | None:
    text = text_of(environ.get("PBS_GPUFILE", ""))
    gpus = set(re.findall(r"(?m)^(.+)-gpu/?([0-9]+)[ \r]*$", text))
    hosts = [host for host, _ in gpus]
    return len(lines_of_this_host(hosts, environ)) or None


class Lsf(Scheduler):
    """There is no variable for the number of GPUs. ``LSB_JOBINDEX`` is 0 outside arrays."""

    name = "lsf"
    job_id = ("LSB_JOBID",)
    task_id = ("LSB_JOBINDEX",)
    lists_gpus = True

    def context(self, environ: Mapping[str, str], job_id: str | None) -> JobContext:
        job = super().context(environ, job_id)
        return job._replace(task_id=job.task_id or None)


class Flux(Scheduler):
    """It lists the GPUs of the job on this host in CUDA_VISIBLE_DEVICES, for AMD GPUs too, and -1 if there are none.

    With ``-o gpu-affinity=per-task`` it lists those of the task instead, which nothing tells apart. So their number is
    known only if each host runs one task. The job is in F58, such as "ƒ3ETxsR9H"; Flux takes "f" for "ƒ", too.
    """

    name = "flux"
    local_rank = ("FLUX_TASK_LOCAL_ID",)
    others = ("FLUX_JOB_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES", "FLUX_TASK_RANK")

    def job(self, environ: Mapping[str, str]) -> JobContext | None:
        text = environ.get("FLUX_JOB_ID", "").strip()
        match = re.fullmatch(r"[ƒf]([1-9A-HJ-NP-Za-km-z]{1,12})", text)
        if match is None:
            return None
        job = self.context(environ, f"f{match[1]}")
        tasks = count(environ, "FLUX_JOB_SIZE")
        hosts = count(environ, "FLUX_JOB_NNODES")
        if hosts == 1:
            job = job._replace(local_size=tasks or None)
        if tasks is None or tasks != hosts:
            return job
        return job._replace(local_size=job.local_size or 1, requested_gpus=visible_gpus(environ))


class HTCondor(Scheduler):
    """A job has an ad, a file of lines ``Name = value``; the second number counts the jobs of one submission.

    ``_CONDOR_AssignedGPUs`` lists the GPUs by UUIDs of eight digits, as CUDA_VISIBLE_DEVICES does. Without it the ad
    counts, where a request may be an expression. A job that asked for none has an empty list, or 10000 or ``none`` in
    CUDA_VISIBLE_DEVICES.
    """

    name = "htcondor"
    others = ("_CONDOR_JOB_AD", "_CONDOR_AssignedGPUs")
    number = "_CONDOR_AssignedGPUs"

    def job(self, environ: Mapping[str, str]) -> JobContext | None:
        path = environ.get("_CONDOR_JOB_AD")
        if not path:
            return None
        ad = text_of(path)
        found = re.findall(r"(?m)^(ClusterId|ProcId|RequestGPUs) = ([0-9]{1,18})$", ad)
        numbers = {name: int(text) for name, text in found}
        job_id = None
        if "ClusterId" in numbers:
            job_id = str(numbers["ClusterId"])
        job = self.context(environ, job_id)._replace(task_id=numbers.get("ProcId"))
        assigned = environ.get("_CONDOR_AssignedGPUs")
        number_assigned = gpus_in(assigned or "")
        if number_assigned:
            return job._replace(requested_gpus=number_assigned)
        if "RequestGPUs" in numbers:
            return job._replace(requested_gpus=numbers["RequestGPUs"])
        shows_none = assigned is not None or visible_gpus(environ) == 0
        asks_by_expression = re.search(r"(?mi)^RequestGPUs = (?!undefined)", ad) is not None
        if shows_none and not asks_by_expression:
            return job._replace(requested_gpus=0)
        return job


# Slurm first: sbatch passes on the environment it is called in, so a Slurm job may carry another scheduler's variables.
# The order of the others does not matter, as none takes a job of another for its own.
SCHEDULERS: tuple[Scheduler, ...] = (Slurm(), GridEngine(), Pbs(), Lsf(), Flux(), HTCondor())
"""All that are known. The tests of this module say what one more needs beside its class."""


def scheduler_of(job: JobContext) -> Scheduler | None:
    """Return the scheduler of a job; None outside a batch job."""
    for scheduler in SCHEDULERS:
        if scheduler.name == job.scheduler:
            return scheduler
    return None


def end_can_be_asked(job: JobContext) -> bool:
    """Return whether ``gpu_count.with_end`` may know when a job ends whose variables do not say."""
    scheduler = scheduler_of(job)
    return scheduler is not None and scheduler.end_can_be_asked


class Launcher(NamedTuple):
    """How a launcher numbers its ranks.

    Attributes:
        local_rank: the variable with the rank of this process on this host.
        local_size: the variable with the number of the ranks here.
        shares_list: whether its ranks have one list of visible GPUs together.
        sets_both: whether it is recognised only by both variables.
    """

    local_rank: str
    local_size: str
    shares_list: bool = False
    sets_both: bool = False


_JSRUN = Launcher("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")

# Innermost first. mpirun and srun start torchrun, not the other way round.
_LAUNCHERS = (
    # Others set LOCAL_RANK too.
    Launcher("LOCAL_RANK", "LOCAL_WORLD_SIZE", shares_list=True, sets_both=True),  # torchrun
    Launcher("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", shares_list=True),
    Launcher("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),  # Open MPI
    Launcher("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),  # MVAPICH2
    Launcher("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # MPICH and Intel MPI (Hydra), Platform MPI
    Launcher("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),  # Cray
    _JSRUN,
    Launcher("LOCAL_RANK", "LOCAL_SIZE", shares_list=True),  # DeepSpeed, Accelerate and others
)


class _Rank(NamedTuple):
    """The rank of this process on this host, the number of ranks here, and whether these have one list of visible GPUs
    together."""

    number: int
    size: int | None
    shares_list: bool


def current(environ: Mapping[str, str] | None = None) -> JobContext:
    """Return the job and the rank of this process; ``environ`` None is the process's own environment.

    The job comes from the batch scheduler, the rank from the innermost launcher: an MPI rank in a Slurm job has Slurm's
    job number and MPI's rank. A variable with an invalid value counts as not set.
    """
    if environ is None:
        environ = os.environ
    job = _job(environ)
    rank = _rank(environ)
    in_launcher = job
    if rank is not None:
        in_launcher = job._replace(local_rank=rank.number, local_size=rank.size)
    listed = visible_gpus(environ)
    scheduler = scheduler_of(job)
    if scheduler is None or listed is None:
        return in_launcher

    # Whose is the list of visible GPUs? The ranks of torchrun, of one task of srun, and in a claim have one together.
    together = "SAFE_GPU_SCOPE" in environ or (rank is not None and rank.shares_list)
    ranks = in_launcher.local_size or 1
    if count(environ, _JSRUN.local_rank) is not None:  # jsrun gives each rank a list
        counts = True
    elif job.requested_gpus is None:
        counts = scheduler.lists_gpus and (together or ranks == 1 or listed == 0)
    else:  # A shorter list is one of several. Those that do not fit into the job's overlap (--gpu-bind=closest, MPS).
        tasks = job.local_size or 1
        if rank is not None and tasks > 1 and tasks * listed <= job.requested_gpus:
            together = True
        fits = together or ranks * listed <= job.requested_gpus
        counts = 0 < listed < job.requested_gpus and fits
    if not counts:
        return in_launcher
    return in_launcher._replace(requested_gpus=listed, own_list=not together)


def _job(environ: Mapping[str, str]) -> JobContext:
    for scheduler in SCHEDULERS:
        job = scheduler.job(environ)
        if job is not None:
            return job
    return JobContext()


def _rank(environ: Mapping[str, str]) -> _Rank | None:
    """Return the rank that a launcher other than srun gave to this process, or None.

    It takes precedence over Slurm's rank: ranks that mpirun starts in a Slurm job inherit ``SLURM_LOCALID=0`` from the
    daemon of mpirun.
    """
    for launcher in _LAUNCHERS:
        number = count(environ, launcher.local_rank)
        size = count(environ, launcher.local_size)
        if number is None or (size is None and launcher.sets_both):
            continue
        return _Rank(number, size or None, launcher.shares_list)
    # Old versions of MPICH set only the global rank, which equals the local rank if the job runs on one host. PMI of
    # srun and of Flux sets the variable too; their own local rank is right then.
    world = count(environ, "PMI_RANK")
    if world is None or world in (count(environ, "SLURM_PROCID"), count(environ, "FLUX_TASK_RANK")):
        return None
    return _Rank(world, None, shares_list=False)
