"""One contract over every scheduler and launcher, with environments as the real ones set them."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from support.guard import OUTER_NAMES, OUTER_PREFIXES

from safe_gpu import schedulers
from safe_gpu.schedulers.job import SCHEDULERS, JobContext, Scheduler, current


def env(variables: str) -> dict[str, str]:
    return dict(variable.split("=", 1) for variable in variables.split())


SGE = env("JOB_ID=1234 SGE_TASK_ID=undefined SGE_ROOT=/var/lib/gridengine NSLOTS=1 NHOSTS=1")
FLUX = env("FLUX_JOB_ID=ƒ3ETxsR9H FLUX_JOB_SIZE=1 FLUX_JOB_NNODES=1 FLUX_TASK_RANK=0 FLUX_TASK_LOCAL_ID=0")
SLURM = env("SLURM_JOB_ID=77 SLURM_JOBID=77 SLURM_LOCALID=0 SLURM_PROCID=0 SLURM_NODEID=0")
# HTCondor 23.9, and its ad shortened.
HTCONDOR = env(
    "_CONDOR_JOB_AD=JOB_AD _CONDOR_SLOT=slot1_1 _CONDOR_AssignedGPUs=GPU-06223334,GPU-17223334"
    " CUDA_VISIBLE_DEVICES=GPU-06223334,GPU-17223334 GPU_DEVICE_ORDINAL=GPU-06223334,GPU-17223334"
)
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
    "AD_UNDEFINED": JOB_AD.replace("RequestGPUs = 2", "RequestGPUs = undefined"),
    "AD_EXPRESSION": JOB_AD.replace("RequestGPUs = 2", "RequestGPUs = ifThenElse(Big, 2, 0)"),
    "GPUFILE": "".join(f"n1-gpu{gpu}\n" for gpu in range(4)),
}
OMPI = env("OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_RANK=7")

# name: (environment, context)
CASES: dict[str, tuple[dict[str, str], JobContext]] = {
    "nothing": (env("PATH=/bin"), JobContext()),
    "sge": (SGE, JobContext("sge", "1234")),
    "sge, JOB_ID unset": (
        env("SGE_TASK_ID=undefined SGE_JOB_SPOOL_DIR=/spool/execd/h1/active_jobs/1234.1"),
        JobContext("sge", "1234"),
    ),
    "univa, resource map": ({**SGE, "SGE_HGR_gpu": "1 3"}, JobContext("sge", "1234", requested_gpus=2)),
    "univa, resource map of another name": (
        SGE | env("SGE_HGR_accel=gpu0 SAFE_GPU_SGE_RESOURCE=accel"),
        JobContext("sge", "1234", requested_gpus=1),
    ),
    "JOB_ID of something else": (env("JOB_ID=1234"), JobContext()),
    "a submit host of Grid Engine": (env("SGE_ROOT=/opt/sge SGE_CELL=default"), JobContext()),
    "flux, a task with GPUs of its own": (
        FLUX | env("CUDA_VISIBLE_DEVICES=4,5 CUDA_DEVICE_ORDER=PCI_BUS_ID"),
        JobContext("flux", "f3ETxsR9H", local_rank=0, local_size=1, requested_gpus=2),
    ),
    "flux, no GPUs": (
        FLUX | env("CUDA_VISIBLE_DEVICES=-1"),
        JobContext("flux", "f3ETxsR9H", local_rank=0, local_size=1, requested_gpus=0),
    ),
    "flux, gpu-affinity=off": (FLUX, JobContext("flux", "f3ETxsR9H", local_rank=0, local_size=1)),
    "flux, four tasks that share GPUs or not": (
        FLUX | env("FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID=3 FLUX_TASK_RANK=3 CUDA_VISIBLE_DEVICES=3"),
        JobContext("flux", "f3ETxsR9H", local_rank=3, local_size=4),
    ),
    "mpirun in a flux job": (
        FLUX | env("OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 CUDA_VISIBLE_DEVICES=0,1"),
        JobContext("flux", "f3ETxsR9H", local_rank=1, local_size=2, requested_gpus=2),
    ),
    "slurm, AMD GPUs": (
        SLURM | env("SLURM_JOB_GPUS=4,5 SLURM_GPUS_ON_NODE=2 ROCR_VISIBLE_DEVICES=4,5"),
        JobContext("slurm", "77", None, 0, None, 2),
    ),
    "slurm without gres": (SLURM, JobContext("slurm", "77", local_rank=0)),
    "slurm, batch script": (
        SLURM | env("SLURM_GPUS_ON_NODE=4 SLURM_JOB_GPUS=0,1,2,3 SLURM_TASKS_PER_NODE=2"),
        JobContext("slurm", "77", None, 0, None, 4),
    ),
    "slurm, array": (SLURM | env("SLURM_ARRAY_JOB_ID=70 SLURM_ARRAY_TASK_ID=3"), JobContext("slurm", "70", 3, 0)),
    "slurm, one of two tasks on the second node": (
        SLURM
        | env(
            "SLURM_LOCALID=1 SLURM_PROCID=4 SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=3,2(x2)"
            " SLURM_GPUS_ON_NODE=2 SLURM_STEP_GPUS=1 SLURM_JOB_GPUS=0,1"
        ),
        JobContext("slurm", "77", None, 1, 2, 2),
    ),
    # As Slurm 22.05.8 sets them.
    "slurm, two GPUs of its own for each of two tasks": (
        SLURM
        | env(
            "SLURM_LOCALID=1 SLURM_PROCID=1 SLURM_GTIDS=0,1 SLURM_STEP_TASKS_PER_NODE=2 SLURM_TASKS_PER_NODE=2"
            " SLURM_STEP_GPUS=2,3 SLURM_GPUS_ON_NODE=4 CUDA_VISIBLE_DEVICES=2,3 ROCR_VISIBLE_DEVICES=2,3"
        ),
        JobContext("slurm", "77", None, 1, 2, 2, own_list=True),
    ),
    "slurm, sbatch in a step of two tasks": (
        SLURM
        | env(
            "SLURM_GTIDS=0 SLURM_STEP_TASKS_PER_NODE=2 SLURM_TASKS_PER_NODE=1 SLURM_NTASKS_PER_NODE=2 SLURM_STEP_ID=4"
            " SLURM_STEP_GPUS=0,1,2,3 SLURM_JOB_GPUS=4,5,6 SLURM_GPUS_ON_NODE=3 CUDA_VISIBLE_DEVICES=4,5,6"
        ),
        JobContext("slurm", "77", None, 0, None, 3),
    ),
    "slurm, the same where the job has as many tasks": (
        SLURM | env("SLURM_GTIDS=0 SLURM_STEP_TASKS_PER_NODE=2 SLURM_TASKS_PER_NODE=2 SLURM_GPUS_ON_NODE=3"),
        JobContext("slurm", "77", None, 0, None, 3),
    ),
    "slurm, sbatch without GPUs in a step with some": (
        SLURM | env("SLURM_GTIDS=0 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1 SLURM_STEP_GPUS=0,1,2,3"),
        JobContext("slurm", "77", None, 0, 1),
    ),
    "slurm before 20.11": (SLURM | env("SLURM_JOB_GPUS=0,2"), JobContext("slurm", "77", None, 0, None, 2)),
    "mpirun in slurm: its daemon's SLURM_LOCALID says nothing": (
        SLURM | OMPI | env("SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_GPUS_ON_NODE=4"),
        JobContext("slurm", "77", None, 3, 4, 4),
    ),
    "an old hydra in slurm": (SLURM | env("PMI_RANK=2 PMI_SIZE=4"), JobContext("slurm", "77", None, 2)),
    "mpirun in sge": (SGE | OMPI, JobContext("sge", "1234", None, 3, 4)),
    "mpirun": (OMPI, JobContext(local_rank=3, local_size=4)),
    "mpich, intel": (
        env("MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PMI_RANK=5 PMI_SIZE=8"),
        JobContext(local_rank=1, local_size=2),
    ),
    "old mpich": (env("PMI_RANK=1 PMI_SIZE=2"), JobContext(local_rank=1)),
    "torchrun": (env("LOCAL_RANK=0 LOCAL_WORLD_SIZE=8 RANK=8 WORLD_SIZE=16"), JobContext(local_rank=0, local_size=8)),
    "torchrun in slurm": (
        SLURM | env("SLURM_STEP_TASKS_PER_NODE=1 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4"),
        JobContext("slurm", "77", None, 2, 4),
    ),
    "a bare LOCAL_RANK yields to MPI": (OMPI | env("LOCAL_RANK=2"), JobContext(local_rank=3, local_size=4)),
    "pbs": (env("PBS_JOBID=12.head.site"), JobContext("pbs", "12")),
    "pbs, gpus": (env("PBS_JOBID=12.head PBS_NGPUS=2"), JobContext("pbs", "12", requested_gpus=2)),
    "pbs, array": (env("PBS_JOBID=12[5].head PBS_ARRAY_INDEX=5"), JobContext("pbs", "12", 5)),
    "pbs, array, number in the name only": (env("PBS_JOBID=12[5].head"), JobContext("pbs", "12", 5)),
    "lsf": (env("LSB_JOBID=9 LSB_JOBINDEX=0"), JobContext("lsf", "9")),
    "htcondor": (HTCONDOR, JobContext("htcondor", "4", 0, requested_gpus=2)),
    **{
        f"htcondor, a job without GPUs: {variables}": (
            env(f"_CONDOR_JOB_AD=AD_WITHOUT {variables}"),
            JobContext("htcondor", "4", 0, requested_gpus=0),
        )
        for variables in (
            "_CONDOR_AssignedGPUs=10000 CUDA_VISIBLE_DEVICES=10000",  # 23.9
            "CUDA_VISIBLE_DEVICES=10000",
            "CUDA_VISIBLE_DEVICES=none",
            "CUDA_VISIBLE_DEVICES= _CONDOR_AssignedGPUs=",
            "_CONDOR_AssignedGPUs=undefined CUDA_VISIBLE_DEVICES=10000",
        )
    },
    "htcondor, an expression": (
        env("_CONDOR_JOB_AD=AD_EXPRESSION CUDA_VISIBLE_DEVICES=10000"),
        JobContext("htcondor", "4", 0),
    ),
    "htcondor, a pool that does not count GPUs": (env("_CONDOR_JOB_AD=AD_WITHOUT"), JobContext("htcondor", "4", 0)),
    "htcondor, no ad": (env("_CONDOR_JOB_AD=/nonexistent _CONDOR_SLOT=slot1_1"), JobContext("htcondor")),
    "jsrun in lsf": (
        env("LSB_JOBID=9 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=6"),
        JobContext("lsf", "9", None, 1, 6),
    ),
    "jsrun, a resource set for each rank": (
        env("LSB_JOBID=9 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=6 CUDA_VISIBLE_DEVICES=1"),
        JobContext("lsf", "9", None, 1, 6, 1, own_list=True),
    ),
    "torque": (env("PBS_JOBID=12.head PBS_GPUFILE=GPUFILE"), JobContext("pbs", "12", requested_gpus=4)),
}


class Asked(dict[str, str]):
    """An environment that remembers which of its variables were asked for."""

    def __init__(self, environ: dict[str, str]) -> None:
        super().__init__(environ)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names |= {name} & self.keys()
        return super().get(name, default)


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda scheduler: scheduler.name)
def test_a_scheduler_has_all_that_it_needs(scheduler: Scheduler) -> None:
    """Samples in CASES, whose variables no test inherits, and a place on the page."""
    samples = [Asked(environ) for environ, context in CASES.values() if context.scheduler == scheduler.name]
    assert len(samples) > 1
    assert all(scheduler.parse(environ) for environ in samples)
    assert any(current(dict(environ)).requested_gpus for environ in samples) or scheduler.lists_gpus
    names = set().union(*(environ.names for environ in samples))
    assert {name for name in names if not name.startswith(OUTER_PREFIXES) and name not in OUTER_NAMES} == set()
    page = Path(schedulers.__file__).with_name("README.md").read_text()
    assert re.search(rf"\b{scheduler.name}\b", page, re.IGNORECASE)


@pytest.mark.parametrize("name", CASES)
def test_environment_to_context(name: str, tmp_path: Path) -> None:
    environ, expected = CASES[name]
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    environ = {name: str(tmp_path / value) if value in FILES else value for name, value in environ.items()}
    before = dict(environ)
    context = current(environ)
    assert context == expected
    assert environ == before
    assert pickle.loads(pickle.dumps(context)) == context
    with pytest.raises(AttributeError):
        context.job_id = "other"  # type: ignore[misc]


NAMES = sorted({name for environ, _ in CASES.values() for name in environ} | {"SLURM_STEP_TASKS_PER_NODE"})
SENSELESS = [
    "", " ", "undefined", "x", "-1", "1.5", "²", "٣", "0x1", "9" * 30, "1 2,3", "(x2)", "2(x", "[]", "[7]", ",", "1;rm",
]  # fmt: skip


@pytest.mark.parametrize("value", SENSELESS)
@pytest.mark.parametrize(
    "name", ["SLURM_LOCALID", "SLURM_GPUS_ON_NODE", "SLURM_ARRAY_TASK_ID", "OMPI_COMM_WORLD_LOCAL_RANK"]
)
def test_a_senseless_value_is_as_if_unset(name: str, value: str) -> None:
    environ = {"SLURM_JOB_ID": "77", "SLURM_ARRAY_JOB_ID": "70"}
    assert current({**environ, name: value}) == current(environ)


def test_own_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert current() == JobContext()
    monkeypatch.setenv("LSB_JOBID", "31")
    assert current().job_label == "lsf:31"
