"""The job and the rank of a process by its environment, as real schedulers and launchers set it, and its GPUs."""

import os
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import api
from support.guard import is_of_an_outer_job

from safe_gpu import schedulers

Environ = dict[str, str]


def env(variables: str) -> Environ:
    return dict(variable.split("=", 1) for variable in variables.split())


SGE = "JOB_ID=1234 SGE_TASK_ID=undefined SGE_ROOT=/var/lib/gridengine NSLOTS=1 NHOSTS=1"
FLUX = "FLUX_JOB_ID=ƒ3ETxsR9H FLUX_JOB_SIZE=1 FLUX_JOB_NNODES=1 FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0"
SLURM = "SLURM_JOB_ID=77 SLURM_JOBID=77 SLURM_LOCALID=0 SLURM_PROCID=0 SLURM_NODEID=0"
OMPI = "OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_RANK=7"
JSRUN = "LSB_JOBID=9 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=6"
HTCONDOR_LIST = "_CONDOR_AssignedGPUs=GPU-06223334,GPU-17223334 CUDA_VISIBLE_DEVICES=GPU-06223334,GPU-17223334"
# Slurm 22.05.8: two GPUs of its own for each of two tasks; sbatch in a step of two tasks.
SRUN_OWN = "SLURM_LOCALID=1 SLURM_PROCID=1 SLURM_GTIDS=0,1 SLURM_STEP_TASKS_PER_NODE=2 SLURM_TASKS_PER_NODE=2"
SRUN_OWN += " SLURM_STEP_GPUS=2,3 SLURM_GPUS_ON_NODE=4 CUDA_VISIBLE_DEVICES=2,3 ROCR_VISIBLE_DEVICES=2,3"
SBATCH_IN_STEP = "SLURM_GTIDS=0 SLURM_STEP_TASKS_PER_NODE=2 SLURM_TASKS_PER_NODE=1 SLURM_STEP_GPUS=0,1,2,3"
SBATCH_IN_STEP += " SLURM_JOB_GPUS=4,5,6 SLURM_GPUS_ON_NODE=3 CUDA_VISIBLE_DEVICES=4,5,6"
SECOND_NODE = "SLURM_LOCALID=1 SLURM_PROCID=4 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=3,2(x2) SLURM_GPUS_ON_NODE=2"
# HTCondor 23.9, shortened.
JOB_AD = """AutoClusterAttrs = "RequestCpus,RequestGPUs,ConcurrencyLimits"
ClusterId = 4
LastJobLeaseRenewal = 1795379909
ProcId = 0
RequestGPUs = 2
Requirements = (TARGET.Arch == "X86_64") && (TARGET.GPUs >= RequestGPUs)
"""
FILES = {
    "JOB_AD": JOB_AD,
    "AD_WITHOUT": JOB_AD.replace("RequestGPUs = 2\n", ""),
    "AD_ZERO": JOB_AD.replace("RequestGPUs = 2", "RequestGPUs = 0"),
    "AD_UNDEFINED": JOB_AD.replace("RequestGPUs = 2", "RequestGPUs = undefined"),
    "AD_EXPRESSION": JOB_AD.replace("RequestGPUs = 2", "RequestGPUs = ifThenElse(Big, 2, 0)"),
    "GPUFILE": "".join(f"n1-gpu{gpu}\n" for gpu in range(4)),
}

SGE_JOB, SLURM_JOB, LSF_JOB = (
    api.JobContext("sge", "1234"),
    api.JobContext("slurm", "77", None, 0),
    api.JobContext("lsf", "9"),
)
PBS_JOB, HTCONDOR_JOB = api.JobContext("pbs", "12"), api.JobContext("htcondor", "4", 0)
FLUX_JOB = api.JobContext("flux", "f3ETxsR9H", local_rank=0, local_size=1)

CASES: dict[str, api.JobContext] = {
    "PATH=/bin": api.JobContext(),
    SGE: SGE_JOB,
    "SGE_TASK_ID=undefined SGE_JOB_SPOOL_DIR=/spool/execd/h1/active_jobs/1234.1": SGE_JOB,
    f"{SGE} SGE_HGR_gpu=1,3": SGE_JOB._replace(requested_gpus=2),  # Univa's resource map
    f"{SGE} SGE_HGR_accel=gpu0 SAFE_GPU_SGE_RESOURCE=accel": SGE_JOB._replace(requested_gpus=1),
    "JOB_ID=1234 SGE_TASK_ID=5 SGE_ROOT=/var/lib/gridengine": SGE_JOB._replace(task_id=5),
    "JOB_ID=1234": api.JobContext(),  # of something else
    f"{FLUX} CUDA_VISIBLE_DEVICES=4,5 CUDA_DEVICE_ORDER=PCI_BUS_ID": FLUX_JOB._replace(requested_gpus=2),
    f"{FLUX} CUDA_VISIBLE_DEVICES=-1": FLUX_JOB._replace(requested_gpus=0),
    FLUX: FLUX_JOB,  # gpu-affinity=off
    f"{FLUX} {OMPI} CUDA_VISIBLE_DEVICES=0,1": FLUX_JOB._replace(local_rank=3, local_size=4, requested_gpus=2),
    SLURM: SLURM_JOB,
    f"{SLURM} SLURM_GPUS_ON_NODE=4 SLURM_JOB_GPUS=0,1,2,3": SLURM_JOB._replace(requested_gpus=4),
    f"{SLURM} SLURM_JOB_END_TIME=1800000000": SLURM_JOB._replace(ends=1800000000),
    f"{SLURM} SLURM_ARRAY_JOB_ID=70 SLURM_ARRAY_TASK_ID=3": SLURM_JOB._replace(job_id="70", task_id=3),
    f"{SLURM} {SECOND_NODE}": api.JobContext("slurm", "77", None, 1, 2, 2),
    f"{SLURM} {SRUN_OWN}": api.JobContext("slurm", "77", None, 1, 2, 2, own_list=True),
    f"{SLURM} {SBATCH_IN_STEP}": SLURM_JOB._replace(requested_gpus=3),
    f"{SLURM} SLURM_GTIDS=0 SLURM_STEP_TASKS_PER_NODE=1 SLURM_STEP_GPUS=0,1": SLURM_JOB._replace(local_size=1),
    f"{SLURM} SLURM_JOB_GPUS=0,2": SLURM_JOB._replace(requested_gpus=2),  # before 20.11
    # The SLURM_LOCALID of mpirun's daemon says nothing.
    f"{SLURM} {OMPI} SLURM_GPUS_ON_NODE=4": api.JobContext("slurm", "77", None, 3, 4, 4),
    f"{SLURM} PMI_RANK=2 PMI_SIZE=4": SLURM_JOB._replace(local_rank=2),  # an old hydra
    f"{SLURM} LOCAL_RANK=2 LOCAL_WORLD_SIZE=4": SLURM_JOB._replace(local_rank=2, local_size=4),
    OMPI: api.JobContext(local_rank=3, local_size=4),
    "MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_RANK=5 PMI_SIZE=8": api.JobContext(local_rank=1, local_size=2),
    "PMI_RANK=1 PMI_SIZE=2": api.JobContext(local_rank=1),  # an old mpich
    "PBS_JOBID=12.head PBS_NGPUS=2": PBS_JOB._replace(requested_gpus=2),
    "PBS_JOBID=12.head CUDA_VISIBLE_DEVICES=GPU-06223334,GPU-17223334": PBS_JOB._replace(
        requested_gpus=2, own_list=True
    ),
    "PBS_JOBID=12.head PBS_WALLTIME=3600": PBS_JOB._replace(walltime=3600),
    "PBS_JOBID=12[5].head PBS_ARRAY_INDEX=5": PBS_JOB._replace(task_id=5),
    "PBS_JOBID=12[].head PBS_ARRAYID=5": PBS_JOB._replace(task_id=5),  # Torque
    "PBS_JOBID=12[5].head": PBS_JOB._replace(task_id=5),
    "PBS_JOBID=12.head PBS_GPUFILE=GPUFILE": PBS_JOB._replace(requested_gpus=4),  # Torque
    "LSB_JOBID=9 LSB_JOBINDEX=0": LSF_JOB,
    "LSB_JOBID=9 LSB_JOBINDEX=3": LSF_JOB._replace(task_id=3),
    JSRUN: LSF_JOB._replace(local_rank=1, local_size=6),
    f"{JSRUN} CUDA_VISIBLE_DEVICES=1": LSF_JOB._replace(local_rank=1, local_size=6, requested_gpus=1, own_list=True),
    f"_CONDOR_JOB_AD=JOB_AD {HTCONDOR_LIST}": HTCONDOR_JOB._replace(requested_gpus=2),
    **{
        f"_CONDOR_JOB_AD=AD_WITHOUT {variables}": HTCONDOR_JOB._replace(requested_gpus=0)
        for variables in (
            "_CONDOR_AssignedGPUs=10000 CUDA_VISIBLE_DEVICES=10000",  # 23.9
            "CUDA_VISIBLE_DEVICES=none",
            "_CONDOR_AssignedGPUs=undefined CUDA_VISIBLE_DEVICES=10000",
        )
    },
    "_CONDOR_JOB_AD=AD_ZERO": HTCONDOR_JOB._replace(requested_gpus=0),
    "_CONDOR_JOB_AD=AD_UNDEFINED CUDA_VISIBLE_DEVICES=10000": HTCONDOR_JOB._replace(requested_gpus=0),
    "_CONDOR_JOB_AD=AD_EXPRESSION CUDA_VISIBLE_DEVICES=10000": HTCONDOR_JOB,
    "_CONDOR_JOB_AD=AD_WITHOUT": HTCONDOR_JOB,  # a pool that does not count GPUs
    "_CONDOR_JOB_AD=/nonexistent _CONDOR_SLOT=slot1_1": api.JobContext("htcondor"),
}


TITLES = {"sge": "Grid Engine"}  # of those whose pages do not call them by their names in entries
WITHOUT_ARRAYS = {"flux"}

EACH = pytest.mark.parametrize("scheduler", api.SCHEDULERS, ids=lambda scheduler: scheduler.name)


def samples_of(scheduler: api.Scheduler) -> list[Environ]:
    return [env(variables) for variables, context in CASES.items() if context.scheduler == scheduler.name]


class Asked(Mapping[str, str]):
    """An environment that remembers for which variables it was asked, set or not, in whichever way."""

    def __init__(self, environ: Environ) -> None:
        self._environ = environ
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:  # Mapping's get() and ``in`` come here too
        self.names.add(name)
        return self._environ[name]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("who goes through all variables reads some that no test guards")

    def __len__(self) -> int:
        return len(self._environ)


# Of no scheduler: the host, and the GPUs that are visible.
OF_NO_JOB = {"HOSTNAME", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}


def undeclared(scheduler: api.Scheduler) -> set[str]:
    """The variables that a scheduler asks for in any of the samples, and does not declare as its own."""
    names: set[str] = set()
    for variables in CASES:
        environ = Asked(env(variables))
        scheduler.job(environ)
        names |= environ.names
    asked = {name for name in names - OF_NO_JOB if not name.startswith("SAFE_GPU_")}
    return {name for name in asked if not any(fnmatchcase(name, own) for own in scheduler.variables)}


def told_in_samples() -> set[str]:
    return {name for variables in CASES for name in env(variables)}


@EACH
def test_a_scheduler_has_samples(scheduler: api.Scheduler) -> None:
    samples = samples_of(scheduler)
    assert len(samples) > 1, f"write two samples of jobs of {scheduler.name} into CASES"
    assert all(scheduler.job(environ) for environ in samples)
    contexts = [context for context in CASES.values() if context.scheduler == scheduler.name]
    with_number = [context for context in contexts if context.requested_gpus]
    assert with_number, (
        "write into CASES a job with GPUs, with its requested_gpus; a file that it names goes into FILES"
    )
    tasks = [context for context in contexts if context.task_id is not None]
    assert tasks or scheduler.name in WITHOUT_ARRAYS, (
        "write a task of an array into CASES, or the name into WITHOUT_ARRAYS"
    )
    of_lists = [environ for environ in samples if "CUDA_VISIBLE_DEVICES" in environ and number_of(environ)]
    advice = "`lists_gpus` says that CUDA_VISIBLE_DEVICES has its GPUs: write such a job into CASES, or leave it out"
    assert of_lists or not scheduler.lists_gpus, advice


def number_of(environ: Environ) -> int | None:
    return api.current(environ).requested_gpus


@EACH
def test_the_variables_of_a_scheduler_are_declared(scheduler: api.Scheduler) -> None:
    """So that no test inherits them."""
    assert undeclared(scheduler) == set(), "declare in `others` what `job` or `context` reads besides"
    inherited = [name for name in scheduler.variables if not is_of_an_outer_job(name)]
    assert inherited == [], "the tests would inherit these variables from a job that they run in"


@EACH
def test_the_variables_of_a_scheduler_are_spelt_as_in_the_samples(scheduler: api.Scheduler) -> None:
    """A misspelt one is never set, and so counts as "not known"."""
    of_job = (*scheduler.job_id, *scheduler.task_id, *scheduler.local_rank, *scheduler.requested_gpus)
    of_end = (*scheduler.ends, *scheduler.walltime)
    unknown = [name for name in (*of_job, *of_end) if name not in told_in_samples()]
    assert unknown == [], "they are misspelt, or a sample in CASES lacks them"


@EACH
def test_a_scheduler_is_described(scheduler: api.Scheduler) -> None:
    title = TITLES.get(scheduler.name, scheduler.name)
    manual = sys.modules[type(scheduler).__module__].__doc__
    named = rf"(?i)\b{re.escape(title)}\b"
    page = Path(schedulers.__file__).with_name("README.md").read_text()
    number, _, rest = page.partition("\n**The end of the job**")
    end, _, sections = rest.partition("\n## ")
    rows = "".join(re.findall(r"^\|[^|]*\|", number, re.MULTILINE))
    headings = " ".join(re.findall(r"^## .*", f"## {sections}", re.MULTILINE))
    assert re.search(named, rows), "give it a row in the first table of the schedulers' page"
    assert re.search(named, end), "say below 'The end of the job' there which variable has it, or that it is not asked"
    assert re.search(named, headings), "describe it in a section there whose heading names it"
    for_readers = (*scheduler.requested_gpus, *scheduler.ends, *scheduler.walltime)
    missing = [name for name in for_readers if name in told_in_samples() and f"`{name}`" not in page]
    assert missing == [], "say on the schedulers' page what these variables have"
    assert re.search(named, manual or ""), "cite its manual in the docstring of safe_gpu/schedulers/job.py"


@EACH
def test_messages_name_the_variable_with_the_number(scheduler: api.Scheduler) -> None:
    possible = scheduler.requested_gpus or ("", *scheduler.others)
    assert scheduler.number in possible, f"`number` is one of {possible}"


def test_every_scheduler_is_in_the_table_once() -> None:
    classes = [one for one in api.Scheduler.__subclasses__() if one.__module__.startswith("safe_gpu.")]
    in_table = sorted(one.name for one in api.SCHEDULERS)
    assert in_table == sorted(one.name for one in classes), "give each class a place in SCHEDULERS, once"
    assert len({one.name for one in classes}) == len(classes)


@EACH
def test_a_scheduler_knows_the_jobs_of_no_other(scheduler: api.Scheduler) -> None:
    """So their order in the table matters only where an environment has the variables of two."""
    others = [one for one in api.SCHEDULERS if one is not scheduler]
    strange = [environ for other in others for environ in samples_of(other) if scheduler.job(environ) is not None]
    assert strange == [], f"{scheduler.name} takes these jobs of others for its own: look for what only it sets"


@EACH
def test_a_slurm_job_that_was_submitted_in_another_job_is_of_slurm(scheduler: api.Scheduler) -> None:
    """sbatch passes on the environment in which it is called, with the variables of that job: Slurm stands first."""
    for outer in samples_of(scheduler):
        assert api.current({**outer, **env(SLURM)}).scheduler == "slurm", "Slurm() stands first in SCHEDULERS"


class NewScheduler(api.Scheduler):
    """It asks for four variables in different ways, and declares two."""

    name = "new"
    job_id = ("NEW_JOB",)
    others = ("NEW_GET",)

    def job(self, environ: Mapping[str, str]) -> api.JobContext | None:
        environ.get("NEW_GET")
        environ.get("NEW_GET_2")
        if "NEW_IN" in environ:
            return self.context(environ, environ["NEW_IN"])
        return super().job(environ)


def test_a_variable_that_a_scheduler_does_not_declare_is_noticed() -> None:
    assert undeclared(NewScheduler()) == {"NEW_GET_2", "NEW_IN"}


@pytest.mark.parametrize("variables", CASES)
def test_environment_to_context(variables: str, tmp_path: Path) -> None:
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    environ = {name: str(tmp_path / value) if value in FILES else value for name, value in env(variables).items()}
    before = dict(environ)
    context = api.current(environ)
    assert context == CASES[variables]
    assert environ == before
    assert pickle.loads(pickle.dumps(context)) == context


@pytest.mark.parametrize(
    "name", ["SLURM_LOCALID", "SLURM_GPUS_ON_NODE", "SLURM_ARRAY_TASK_ID", "OMPI_COMM_WORLD_LOCAL_RANK"]
)
def test_a_senseless_value_is_as_if_unset(name: str) -> None:
    environ = env("SLURM_JOB_ID=77 SLURM_ARRAY_JOB_ID=70")
    for value in ("", " ", "undefined", "-1", "1.5", "²", "٣", "0x1", "9" * 30, "1 2,3", "(x2)", "[7]", ",", "1;rm"):
        assert api.current({**environ, name: value}) == api.current(environ)


# The number of GPUs


def srun(tasks: int, gpus: int, visible: str) -> str:
    """A task of a step with so many tasks and GPUs on this node, as in Slurm 22.05."""
    ids = ",".join(map(str, range(tasks)))
    text = f"{SLURM} SLURM_GTIDS={ids} SLURM_STEP_TASKS_PER_NODE={tasks} SLURM_TASKS_PER_NODE={tasks}"
    return f"{text} SLURM_GPUS_ON_NODE={gpus} CUDA_VISIBLE_DEVICES={visible}"


def batch(visible: str) -> str:
    return f"{SLURM} SLURM_GTIDS=0 SLURM_TASKS_PER_NODE=4 SLURM_GPUS_ON_NODE=4 CUDA_VISIBLE_DEVICES={visible}"


def ompi(ranks: int) -> str:
    return f" OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE={ranks}"


def torchrun(ranks: int) -> str:
    return f" LOCAL_RANK=0 LOCAL_WORLD_SIZE={ranks}"


def jsrun(ranks: int, visible: str) -> str:
    return f"{JSRUN} JSM_NAMESPACE_LOCAL_SIZE={ranks} CUDA_VISIBLE_DEVICES={visible}"


PBS, TORQUE = "PBS_JOBID=1.h", "PBS_JOBID=1.h PBS_GPUFILE=4"
ONE, TWO, FOUR = (f" CUDA_VISIBLE_DEVICES={gpus}" for gpus in ("2", "2,3", "0,1,2,3"))
WAY_OUT = ".*set SAFE_GPU_NB_GPUS=N"


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ("SAFE_GPU_NB_GPUS=3", 3),
        ("SAFE_GPU_NB_GPUS=two", "SAFE_GPU_NB_GPUS='two' .*whole number"),
        (SLURM, rf"slurm:77 .*not known \(SLURM_GPUS_ON_NODE is not set\){WAY_OUT}"),
        (f"{SLURM} SLURM_GPUS_ON_NODE=0", f"slurm:77 asked for no GPU{WAY_OUT}"),
        (f"{SLURM} SLURM_GPUS_ON_NODE=2" + torchrun(4), "slurm:77 asked for 2 GPUs on this host, for 4 processes"),
        (SGE, f"sge:1234 .*not known{WAY_OUT}"),
        ("SGE_TASK_ID=undefined", f"of unknown number{WAY_OUT}"),
        (f"{FLUX} FLUX_JOB_SIZE=4", f"flux:f3ETxsR9H{WAY_OUT}"),
        (f"{SLURM} SLURM_GPUS_ON_NODE=8" + torchrun(3), 2),
        (f"{PBS} CUDA_VISIBLE_DEVICES=GPU-1,GPU-2,GPU-3", 3),
        (f"{PBS} CUDA_VISIBLE_DEVICES=0,1,2 ROCR_VISIBLE_DEVICES=4,5", 2),
        (f"{FLUX} FLUX_JOB_SIZE=2 FLUX_JOB_NNODES=2 CUDA_VISIBLE_DEVICES=4,5,6", 3),
        (srun(2, 4, "2,3"), 2),  # --gpus-per-task=2
        (srun(2, 4, "1"), 1),  # --gpu-bind=single:1, more GPUs than tasks
        (srun(2, 4, "0,1,2,3"), 2),  # one list for all
        (srun(4, 2, "1"), "asked for 2 GPUs on this host, for 4 processes"),  # --gpu-bind=single:2
        (srun(2, 4, "2,3") + torchrun(2), 1),
        (batch("0,1,2,3") + ompi(4), 1),
        (batch("2,3") + ompi(2) + " SAFE_GPU_SCOPE=x", 1),  # in a claim of two of four
        (jsrun(3, "2,3") + torchrun(2), 1),
        (TORQUE + FOUR + ompi(4), 1),
        (TORQUE + TWO + torchrun(2), 1),
        (f"{PBS} PBS_NGPUS=4" + ONE + ompi(4), 1),
        (f"{PBS} PBS_NGPUS=2" + TWO + ompi(4), "2 GPUs on this host, for 4"),  # MPS ranks
        (PBS + TWO + ompi(4), "2 GPUs visible to each of 4 processes"),  # or not
        ("LSB_JOBID=1" + ONE + ompi(4), "1 GPU visible to each of 4 processes"),  # its own list or the job's
        (PBS + FOUR + " HOROVOD_LOCAL_RANK=0 HOROVOD_LOCAL_SIZE=2", 2),
    ],
)
def test_the_number_of_a_rank(variables: str, number: int | str, tmp_path: Path) -> None:
    environ = env(variables)
    if "PBS_GPUFILE" in environ:
        gpus = [f"{host}-gpu{gpu}\n" for host in ("a-b", os.uname().nodename) for gpu in range(4)]
        (tmp_path / "gpus").write_text("".join(gpus))
        environ = {**environ, "PBS_GPUFILE": str(tmp_path / "gpus")}
    if isinstance(number, int):
        assert api.number_for_job(environ, ask=False) == number
        return
    with pytest.raises(api.UnsatisfiableRequestError, match=number) as caught:  # on one line: a dot is no line break
        api.number_for_job(environ, ask=False)
    assert "\n" not in str(caught.value)


# What Grid Engine's qstat answers

Qstat = Callable[..., Environ]


def listed(name: str, *entries: str) -> str:
    return f"<{name}>{''.join(entries)}</{name}>"


def qstat_xml(requests: str, job: str = "1234", environment: str = "") -> str:
    """An answer of ``qstat -j JOB -xml`` (Son of Grid Engine 8.1.9), shortened."""
    return f"""<?xml version='1.0'?>
<detailed_job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/detailed_job_info.xsd">
  <djob_info>
    <element>
      <JB_job_number>{job}</JB_job_number>
      <JB_job_name>gpu.sh</JB_job_name>
      {requests}
      <JB_env_list><job_sublist><VA_variable>X</VA_variable><VA_value>{environment}</VA_value></job_sublist></JB_env_list>
    </element>
  </djob_info>
</detailed_job_info>
"""


def request(name: str, value: float | str, consumable: int = 1, valtype: int = 1) -> str:
    return f"""<qstat_l_requests>
          <CE_name>{name}</CE_name>
          <CE_valtype>{valtype}</CE_valtype>
          <CE_stringval>{value if isinstance(value, str) else f"{value:g}"}</CE_stringval>
          <CE_doubleval>{float(value == "TRUE") if isinstance(value, str) else value:f}</CE_doubleval>
          <CE_relop>0</CE_relop>
          <CE_consumable>{consumable}</CE_consumable>
        </qstat_l_requests>"""


def hard(*requests: str) -> str:
    return listed("JB_hard_resource_list", *requests)


def soft(*requests: str) -> str:
    return listed("JB_soft_resource_list", *requests)


def in_queues(*names: str) -> str:
    destinations = (f"<destin_ident_list><QR_name>{name}</QR_name></destin_ident_list>" for name in names)
    return listed("JB_hard_queue_list", *destinations)


def flag(value: str = "TRUE") -> str:
    return request("gpu", value, consumable=0, valtype=5)


def sets(**scopes: str) -> str:
    """Request sets of Open Cluster Scheduler 9.1, each a list in one scope: global (0), master (1), slave (2)."""
    parts = [
        f"<ulong_sublist><JRS_scope>{scope[1:]}</JRS_scope>{listed('JRS_hard_resource_list', one)}</ulong_sublist>"
        for scope, one in scopes.items()
    ]
    return listed("JB_request_set_list", *parts)


GPU_TYPE = request("gpu_type", "a100", consumable=0, valtype=9)
REFUSAL = """<?xml version='1.0'?>
<comunication_error >
  <element>
    <AN_status>8</AN_status>
    <AN_text>denied: host &quot;n1&quot; is neither submit nor admin host</AN_text>
    <AN_quality>1</AN_quality>
  </element>
</comunication_error>
"""
"""As Son of Grid Engine 8.1.9 says it, on stdout, with exit status 0."""


@pytest.fixture
def fake_qstat(tmp_path: Path) -> Qstat:
    """A qstat that answers what it is told to, and the environment of a job that finds it."""

    def make(answer: str = "", *, status: int = 0, error: str = "", job: str = "1234") -> Environ:
        (tmp_path / "answer").write_text(answer)
        program = tmp_path / "qstat"
        program.write_text(
            f"#!{sys.executable}\nimport sys\n"
            f"assert sys.argv[1:] == ['-j', {job!r}, '-xml'], sys.argv\n"
            f"sys.stderr.write({error!r})\nsys.stdout.write(open({str(tmp_path / 'answer')!r}).read())\n"
            f"sys.exit({status})\n"
        )
        program.chmod(0o755)
        return {**env(SGE), "JOB_ID": job, "PATH": str(tmp_path)}

    return make


def test_hard_request() -> None:
    for requests, found in (
        (hard(GPU_TYPE, request("gpu", 2)) + soft(flag()), api.ResourceRequest(2, "slot")),
        (hard(request("ngpus", 2, consumable=2), request("h_rt", 100, valtype=3)), api.ResourceRequest(2, "job")),
        (hard(request("gpus", 1, consumable=3, valtype=10)), api.ResourceRequest(1, "host")),
        (hard(request("gpu", 0)) + in_queues("gpu.q"), api.ResourceRequest(0, "slot")),
        (hard(flag("FALSE")), None),
        (sets(_0=request("gpu", 2)), api.ResourceRequest(2, "slot")),
        (sets(_1=request("gpu", 2)), api.ResourceRequest(2, "job")),
        (sets(_1=request("gpu", 2), _2=request("gpu", 1)), api.ResourceRequest(1, "slot", of_slaves=True)),
        (sets(_2=request("gpu", 1, consumable=3)), api.ResourceRequest(1, "host", of_slaves=True)),
    ):
        assert api.hard_request(qstat_xml(requests, environment="a & b <\x01"), ("gpu", "gpus", "ngpus")) == found
    with pytest.raises(api.QstatError, match="cannot be read"):
        api.hard_request("<JB_hard_resource_list><CE_name>gpu</JB_hard_resource_list>", ("gpu",))


@pytest.mark.parametrize(
    ("requests", "word"),
    [
        (hard(flag()), "-l gpu=TRUE"),
        (soft(request("gpus", 7)), "-l gpus=7"),
        (in_queues("all.q", "GPU@node1"), "-q GPU@node1"),
        ("<JB_pe>gpu</JB_pe>", "-pe gpu"),
        (sets(_2=GPU_TYPE), "-l gpu_type=a100"),
        (sets(_0=request("gpu", 1)).replace("JRS_hard", "JRS_soft"), "-l gpu=1"),
    ],
)
def test_gpus_without_a_number(fake_qstat: Qstat, requests: str, word: str) -> None:
    """They are not known to be none: the claim is refused, and says what the number is missing in."""
    with api.on_command_line(), pytest.raises(api.UnsatisfiableRequestError) as caught:
        api.number_for_job(fake_qstat(qstat_xml(requests)))
    assert caught.value.value == "job"
    for part in (word, "not known", "set SAFE_GPU_NB_GPUS=N", "-n N", "SAFE_GPU_SGE_RESOURCE=NAME"):
        assert part in str(caught.value)


def test_slots_ranks_and_a_resource_of_another_name(fake_qstat: Qstat) -> None:
    environ = {**fake_qstat(qstat_xml(hard(request("accel", 1)))), "NSLOTS": "4"}
    assert api.declared_gpus(environ) == 0
    environ["SAFE_GPU_SGE_RESOURCE"] = "accel"
    assert (api.declared_gpus(environ), api.declared_gpus(environ, ask=False)) == (4, None)
    assert api.number_for_job({**environ, "SAFE_GPU_NB_GPUS": "1"}) == 1
    off_its_path = {**environ, "SGE_BINARY_PATH": environ["PATH"], "PATH": "/nowhere"}
    assert api.number_for_job(off_its_path) == 4
    assert api.number_for_job({**environ, **env(ompi(4))}) == 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"status": 1, "error": 'denied: host "n1"\n'}, 'job 1234: denied: host "n1"'),
        ({"answer": REFUSAL}, 'job 1234: denied: host "n1" is neither submit nor admin host)'),
        ({"answer": "<?xml version='1.0'?>\n<unknown_jobs >\n<ST_name>1234</ST_name></unknown_jobs>"}, "no such job"),
        ({"answer": qstat_xml("")}, "asked for no GPU on this host"),
        ({"answer": qstat_xml(sets(_2=request("gpu", 1)))}, "how many of its tasks"),
        (None, "qstat is not on PATH here"),
    ],
)
def test_qstat_that_does_not_tell(fake_qstat: Qstat, answer: dict[str, Any] | None, says: str, tmp_path: Path) -> None:
    environ = {**env(SGE), "PATH": str(tmp_path)} if answer is None else fake_qstat(**answer)
    with pytest.raises(api.UnsatisfiableRequestError, match="set SAFE_GPU_NB_GPUS=N") as caught:
        api.number_for_job(environ)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    known = 0 if "no GPU" in says else None
    assert api.declared_gpus(environ) == known
    assert caught.value.value == ("job" if known is None else 0)


# Where a job of several hosts runs


def test_request_on_this_host() -> None:
    for request_, granted, number in (
        (api.ResourceRequest(0.5, "slot"), api.Slots(4, True), 2),
        (api.ResourceRequest(2, "job"), api.Slots(4, False), 0),
        (api.ResourceRequest(1, "slot", of_slaves=True), api.Slots(3, False), 3),
        (api.ResourceRequest(1, "slot", of_slaves=True), api.Slots(3, True), None),
        (api.ResourceRequest(1, "host", of_slaves=True), api.Slots(3, False), 1),
    ):
        assert api.here(request_, granted) == number


@pytest.fixture
def call_host(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=name))


def test_which_host_of_a_list_is_this_one(call_host: Callable[[str], None]) -> None:
    for name, hostname, hosts, lines in (
        ("n1.site.org", "", "n2 n1", [1]),
        ("n1", "", "n1.a.org n1.b.org", []),
        ("n1", "n1.b.org", "n1.a.org n1.b.org", [1]),
        ("node7", "", "gpu-ib7", [0]),
        ("node7", "", "gpu-ib7 gpu-ib8", []),
        ("node7", "gpu-ib8", "gpu-ib7 gpu-ib8", [1]),
    ):
        call_host(name)
        assert api.lines_of_this_host(hosts.split(), {"HOSTNAME": hostname}) == lines


TWO_HOSTS = "n1 2 all.q@n1 UNDEFINED\nn2 3 all.q@n2 UNDEFINED\n"


@pytest.mark.parametrize(
    ("name", "variables", "files", "found"),
    [
        ("n1", "", {}, api.Slots(1, True)),
        ("n1", "NSLOTS=4 NHOSTS=2", {}, api.Slots(None, False)),
        ("n1", "NSLOTS=5 NHOSTS=2", {"7.1/pe_hostfile": TWO_HOSTS}, api.Slots(2, True)),
        ("n2", "NSLOTS=5 NHOSTS=2", {"7.1/pe_hostfile": TWO_HOSTS}, api.Slots(3, False)),
        ("n2", "NSLOTS=5 NHOSTS=2", {"7.1/pe_hostfile": "n1 2\nn2 3\n"}, api.Slots(3, False)),
        # The execution daemon knows the number whatever the host is called. The script runs in the job's own directory.
        ("m1", "NHOSTS=2", {"7.1/pe_hostfile": TWO_HOSTS, "7.1/config": "host_slots=2\n"}, api.Slots(2, True)),
        # Tasks of qrsh -inherit: on the script's host, elsewhere, elsewhere with -V.
        ("n1", "NSLOTS=5 NHOSTS=2", {"7.1/pe_hostfile": TWO_HOSTS, "7.1/1.n1/config": ""}, api.Slots(2, True)),
        ("n2", "NSLOTS=3 NHOSTS=1", {"7.1/1.n2/config": "pe_slots=3\nhost_slots=3\n"}, api.Slots(3, False)),
        ("n2", "NSLOTS=3 NHOSTS=1 PE_HOSTFILE=/nonexistent", {"7.1/2.n2/config": ""}, api.Slots(3, False)),
        ("m2", "NHOSTS=1", {"V": TWO_HOSTS, "7.1/2.n2/config": "host_slots=3\n"}, api.Slots(3, False)),
    ],
)
def test_slots_of_a_job_on_this_host(
    name: str, variables: str, files: dict[str, str], found: api.Slots, tmp_path: Path, call_host: Callable[[str], None]
) -> None:
    """As Son of Grid Engine 8.1.9 lays out its spool directory and sets its variables."""
    environ = env(variables)
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        if path.endswith("pe_hostfile") or path == "V":
            environ = {"PE_HOSTFILE": str(tmp_path / path), **environ}
        environ = {**environ, "SGE_JOB_SPOOL_DIR": str((tmp_path / path).parent)}
    call_host(name)
    assert api.slots(environ) == found


@pytest.mark.parametrize("consumable", [1, 2])
def test_a_host_that_its_job_knows_by_no_name(
    fake_qstat: Qstat, consumable: int, tmp_path: Path, call_host: Callable[[str], None]
) -> None:
    """It is not known whether the request is for this host: not none, and the message names both."""
    (tmp_path / "hosts").write_text(TWO_HOSTS)
    call_host("node7")
    environ = fake_qstat(qstat_xml(hard(request("gpu", 1, consumable))))
    with pytest.raises(api.UnsatisfiableRequestError, match=r"on this host, node7, .* names n1, n2\)") as caught:
        api.number_for_job({**environ, "PE_HOSTFILE": str(tmp_path / "hosts"), "NHOSTS": "2"})
    assert caught.value.value == "job"


# When the job ends, where its variables do not tell


def fake_squeue(tmp_path: Path, answer: str, code: int = 0) -> Environ:
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\necho \"$*\" >> {tmp_path}/asked\necho '{answer}'\nexit {code}\n")
    program.chmod(0o755)
    return {"SLURM_JOB_ID": "77", "PATH": f"{tmp_path}:{os.defpath}"}


def test_the_end_of_a_slurm_job(tmp_path: Path) -> None:
    environ = fake_squeue(tmp_path, "2026-11-22T23:40:00")
    job = api.current(environ)
    ends = int(time.mktime((2026, 11, 22, 23, 40, 0, 0, 0, -1)))
    assert api.with_end(environ, job, ask=True).ends == ends
    assert (tmp_path / "asked").read_text() == "-h -j 77 -o %e\n"
    assert api.with_end(environ, job, ask=False) == job
    for answer, code in (("N/A", 0), ("2026-11-22T23:40:00", 1)):
        assert api.with_end(fake_squeue(tmp_path, answer, code), job, ask=True).ends is None


def test_the_limit_of_a_job_of_grid_engine(fake_qstat: Qstat) -> None:
    number = "70001"  # of which no other test asks: what qstat has told of a job is kept
    answer = qstat_xml(hard(request("h_rt", 7200, valtype=3), request("gpu", 2)), job=number)
    environ = fake_qstat(answer, job=number)
    job = api.current(environ)
    assert api.with_end(environ, job, ask=True).walltime is None  # qstat is not asked for that alone
    assert api.ask_qstat(environ, number) == 2
    assert api.with_end(environ, job, ask=True).walltime == 7200


def test_a_claim_in_a_job_of_grid_engine_ends_with_the_job(fake_qstat: Qstat, monkeypatch: pytest.MonkeyPatch) -> None:
    since_begin = int(api.procfs.seconds_running(os.getsid(0)) or 0)
    requests = hard(request("h_rt", since_begin + 7200, valtype=3), request("gpu", 2))
    for name, value in fake_qstat(qstat_xml(requests)).items():
        monkeypatch.setenv(name, value)
    before = time.time()
    end = api.read_options("job").hold.end
    assert before + 7199 <= end <= time.time() + 7200


def test_array_tasks_of_one_gpu_ask_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = env("SLURM_ARRAY_JOB_ID=70 SLURM_ARRAY_TASK_ID=7")
    for name, value in (fake_squeue(tmp_path, "N/A") | array).items():
        monkeypatch.setenv(name, value)
    api.read_options(1)
    assert not (tmp_path / "asked").exists()
    api.read_options(2)
    assert (tmp_path / "asked").exists()
