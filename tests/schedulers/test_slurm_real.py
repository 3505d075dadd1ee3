"""Slurm for real, with and without a gres, on two simulated nodes of 8 GPUs; and mpirun alone, without a scheduler."""

import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.real import BatchSystem, wait_for

from .conftest import bring_up, check_end, real

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300), real]

ON_NODE1 = ("-w", "n1")


class Slurm(BatchSystem):
    """The cluster, as an ordinary user sees it from the submit host."""

    name, cancel = "slurm", "scancel"

    def submit(self, *words: str) -> str:
        """sbatch with these options and the script; the job's number. Its output goes to a file of that number."""
        output = ("-o", f"{self.workdir.referee}/%A.%a", "-D", str(self.workdir.referee))
        return self.cluster.run("sbatch", "--parsable", *output, *words).strip()

    def srun(self, *words: str) -> str:
        """A job of one step, to its end."""
        return self.cluster.run("srun", "-D", str(self.workdir.referee), *words)

    def jobs(self) -> set[str]:
        """Numbers of the jobs that are not over."""
        return set(self.cluster.run("squeue", "-h", "-o", "%A %F").split())

    def output(self, job: str) -> str:
        """What a job has said; its number in no array is what sbatch writes for %a."""
        return next(self.workdir.referee.glob(f"{job}.*")).read_text()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with bring_up("slurm_up.sh", NODES="2", CPUS="32", GPUS="8") as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster: Any, workdir: Any) -> Iterator[Slurm]:
    slurm = Slurm(cluster, workdir)
    yield slurm
    slurm.end_all()


def test_jobs_with_gres_take_what_slurm_gave_them(slurm: Slurm, workdir: Any) -> None:
    """Slurm's own choice is a visible limit; what the job asked for is SLURM_GPUS_ON_NODE."""
    jobs = {}
    for number in (4, 2, 1, 1):
        script = workdir.script('echo "given $CUDA_VISIBLE_DEVICES"', "$CLAIM claim job --hold go")
        jobs[slurm.submit(*ON_NODE1, f"--gres=gpu:{number}", script)] = number
    claims = slurm.claims(4)
    workdir.go()
    slurm.finish(*jobs)
    workdir.verdict()
    assert {claim["about"]["SLURM_JOB_ID"]: len(claim["gpus"]) for claim in claims} == jobs
    assert {claim["job"] for claim in claims} == {f"slurm:{job}" for job in jobs}
    for claim in claims:
        assert f"given {','.join(claim['gpus'])}\n" in slurm.output(claim["about"]["SLURM_JOB_ID"])


def test_jobs_without_gres_wait_for_each_other(slurm: Slurm) -> None:
    slurm.check_waiting(*ON_NODE1)


def test_a_claim_ends_with_its_job(slurm: Slurm) -> None:
    """This version sets no SLURM_JOB_END_TIME: squeue is asked. A claim gets its GPUs some time after it asked."""
    check_end(slurm, 601, *ON_NODE1, "--gres=gpu:1", "--time=10")


def test_array(slurm: Slurm, workdir: Any) -> None:
    script = workdir.script("$SAFE_GPU run -n job -- $CLAIM claim")  # run lets the command claim from its claim
    job = slurm.submit(*ON_NODE1, "--array=1-8%4", "--gres=gpu:1", script)
    slurm.finish(job)
    claims = workdir.verdict()
    assert {len(claim["gpus"]) for claim in claims} == {1}
    assert sorted(claim["job"] for claim in claims) == [f"slurm:{job}.{task}" for task in range(1, 9)]


def test_tasks_of_srun_share_what_the_job_has(slurm: Slurm, workdir: Any) -> None:
    """Four tasks on each of two nodes, 8 GPUs a node: two for each task."""
    step = workdir.script("$CLAIM claim job --hold go")
    running = slurm.cluster.start("srun", "-N2", "--ntasks-per-node=4", "--gres=gpu:8", step)
    slurm.claims(8)
    workdir.go()
    output, _ = running.communicate(timeout=90)
    assert running.returncode == 0, output
    claims = workdir.verdict()
    assert sorted((claim["host"], len(claim["gpus"])) for claim in claims) == [("n1", 2)] * 4 + [("n2", 2)] * 4


@pytest.mark.parametrize("preset", ["dgx-a100", "mi250x"])
def test_tasks_that_srun_binds_to_a_gpu_each(slurm: Slurm, workdir: Any, preset: str) -> None:
    workdir.preset = preset
    slurm.srun("-N1", "-n4", "--gpus-per-task=1", workdir.script("$CLAIM claim job"))
    assert sorted(claim["indices"] for claim in workdir.verdict()) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [("-n2 --gres=gpu:4 --gpu-bind=single:1", [1, 1]), ("-n2 --gres=gpu:4 --gpu-bind=mask_gpu:0x3,0xc", [2, 2])],
)
def test_tasks_take_the_list_of_their_own(slurm: Slurm, workdir: Any, options: str, numbers: list[int]) -> None:
    slurm.srun("-N1", *options.split(), workdir.script("$CLAIM claim job --timeout 0"))
    assert [len(claim["gpus"]) for claim in workdir.verdict()] == numbers


@pytest.mark.parametrize(("options", "number"), [(["--gres=gpu:3"], 3), (["-n2", "--gres=gpu:3"], 3), ([], None)])
def test_a_job_that_a_task_submits(slurm: Slurm, workdir: Any, options: list[str], number: int | None) -> None:
    """sbatch passes on the variables of the step in which it is called."""
    out = workdir.referee / "inner"
    inner = workdir.script(
        "env | grep -c ^SLURM_STEP_", "$SAFE_GPU run -n job -- sh -c 'echo has $CUDA_VISIBLE_DEVICES.'"
    )
    sbatch = " ".join(["sbatch", "-W", "-Q", "-w", "n2", "-o", str(out), *options, inner])
    task = workdir.script(f"if [ $SLURM_PROCID = 1 ]; then {sbatch} || true; fi")
    slurm.srun("-N1", "-w", "n1", "-n2", "--ntasks-per-node=2", "--gres=gpu:4", task)
    inherited, said = out.read_text().split("\n", 1)
    assert int(inherited) > 3
    assert ("has 0,1,2." if number else "SLURM_GPUS_ON_NODE is not set") in said


SHOW_AMD = 'echo "given ${ROCR_VISIBLE_DEVICES-unset} ${CUDA_VISIBLE_DEVICES-unset} ${GPU_DEVICE_ORDINAL-unset}"'


def claims_of_three_jobs_on_amd_gpus(slurm: Slurm, workdir: Any) -> set[tuple[str, str, str]]:
    """Three jobs run at once, with 2, 2 and 1 GPU, and claim what Slurm gave them; the variables that they got."""
    workdir.preset = "mi250x"
    jobs = [
        slurm.submit(*ON_NODE1, f"--gres=gpu:{number}", workdir.script(SHOW_AMD, "$CLAIM claim job --hold go"))
        for number in (2, 2, 1)
    ]
    slurm.claims(3)
    workdir.go()
    slurm.finish(*jobs)
    given = set()
    for claim in workdir.verdict():
        words = slurm.output(claim["about"]["SLURM_JOB_ID"]).split("given ")[1].split()
        assert [str(index) for index in claim["indices"]] == words[0].split(",")
        given.add((words[0], words[1], words[2]))
    return given


def test_jobs_on_amd_gpus(slurm: Slurm, workdir: Any) -> None:
    """Without flags in gres.conf Slurm writes its list into all variables. HIP would find no GPU in the second job."""
    lists = ("0,1", "2,3", "4")
    assert claims_of_three_jobs_on_amd_gpus(slurm, workdir) == {(one, one, one) for one in lists}


def test_mpi_ranks_in_a_job(slurm: Slurm, workdir: Any, mpirun: list[str]) -> None:
    """mpirun's daemons are Slurm's tasks: every rank inherits SLURM_LOCALID=0, and has a rank of its own."""
    rank = workdir.script("$CLAIM claim job --hold go")
    script = workdir.script(f"{' '.join(mpirun)} {rank}")
    job = slurm.submit("-N2", "--ntasks-per-node=2", "--gres=gpu:4", script)
    slurm.claims(4)
    workdir.go()
    slurm.finish(job)
    claims = workdir.verdict()
    assert sorted((claim["host"], len(claim["gpus"])) for claim in claims) == [("n1", 2)] * 2 + [("n2", 2)] * 2


def test_scancel_in_mid_claim_and_in_the_queue(slurm: Slurm) -> None:
    slurm.check_cancelling("n1", *ON_NODE1)


@pytest.fixture
def alone(workdir: Any, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A cluster of one node with the setting that a test names."""
    setting = request.param
    if setting == {"CONSTRAIN": "1"} and not os.path.isdir("/sys/fs/cgroup/devices"):
        pytest.skip("ConstrainDevices is tried with cgroup v1 only, which this machine does not have")
    with bring_up("slurm_up.sh", NODES="1", CPUS="32", GPUS="8", **setting) as cluster:
        yield Slurm(cluster, workdir)


def on_a_cluster_with(**setting: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("alone", [setting], indirect=True, ids=list(setting))


@on_a_cluster_with(CONSTRAIN="1")
def test_numbers_that_count_from_0_in_every_job(alone: Slurm, workdir: Any) -> None:
    """Under ConstrainDevices each job sees CUDA_VISIBLE_DEVICES=0. Where the driver shows all GPUs nevertheless, as the
    simulated one does, that is one GPU for all: they must take turns."""
    script = workdir.script('echo "given $CUDA_VISIBLE_DEVICES of $SLURM_JOB_GPUS"', "$CLAIM claim job")
    jobs = [alone.submit("--gres=gpu:1", script) for _ in range(3)]
    alone.finish(*jobs)
    assert [claim["gpus"] for claim in workdir.verdict()] == [["0"]] * 3
    assert {alone.output(job).splitlines()[0] for job in jobs} == {f"given 0 of {gpu}" for gpu in range(3)}


@on_a_cluster_with(GRES_FLAGS="amd_gpu_env")
def test_slurm_configured_for_amd_gpus(alone: Slurm, workdir: Any) -> None:
    lists = ("0,1", "2,3", "4")
    assert claims_of_three_jobs_on_amd_gpus(alone, workdir) == {(one, "unset", "unset") for one in lists}


private_tmp = on_a_cluster_with(PRIVATE_TMP="1")


def start(slurm: Slurm, script: str, started: Callable[[], Any]) -> str:
    """Submit a job and wait until it has started; its number."""
    job = slurm.submit(script)
    wait_for(started, "start of a job")
    return job


@private_tmp
def test_jobs_with_a_private_tmp_get_no_gpu_twice(alone: Slurm, workdir: Any) -> None:
    """job_container/tmpfs: each job has a /tmp of its own, so their entries do not meet. Their doors do."""
    script = workdir.script("export SAFE_GPU_DIR=/tmp/safe-gpu", "$CLAIM claim 8 --hold go")
    first = start(alone, script, lambda: len(workdir.records("claim")) == 1)
    script = workdir.script("export SAFE_GPU_DIR=/tmp/safe-gpu", "$CLAIM claim 1 --timeout 0")
    second = start(alone, script, lambda: len(workdir.records("start")) == 2)
    alone.finish(second)
    assert "claimed in another state directory" in alone.output(second)
    workdir.go()
    alone.finish(first)
    assert len(workdir.verdict()) == 1


@private_tmp
def test_a_shared_state_directory_brings_them_together(alone: Slurm, workdir: Any) -> None:
    first = start(alone, workdir.script("$CLAIM claim 8 --hold go"), lambda: workdir.records("claim"))
    second = start(alone, workdir.script("$CLAIM claim 8"), lambda: workdir.waiting("n1") == 1)
    workdir.go()
    alone.finish(first, second)
    assert [claim["job"] for claim in workdir.verdict()] == [f"slurm:{first}", f"slurm:{second}"]


# mpirun without a batch scheduler: each rank claims a GPU of its own

# Ends the others' hold once all four have claimed.
GO_AFTER_4 = [
    'until [ "$(grep -c \'"claim"\' $REFEREE/log)" = 4 ] || ! kill -0 $pid 2>/dev/null; do sleep .05; done',
    "touch $REFEREE/go",
]


def test_each_rank_gets_its_own_gpu_and_none_waits_for_another_ones_context(
    mpirun: list[str], workdir: Any, run_as_user: Callable[..., Any]
) -> None:
    """A placeholder of any rank is ready only when those of all ranks are being made: started one by one, they hang."""
    claim = ("$CLAIM claim 1 --placeholders-meet 4 --hold go & pid=$!", *GO_AFTER_4, "wait $pid")
    done = run_as_user(*mpirun, "-np", "4", workdir.script(*claim))
    assert done.returncode == 0, done.stdout + done.stderr
    claims = workdir.verdict()
    assert sorted(gpu for claim in claims for gpu in claim["gpus"]) == ["0", "1", "2", "3"]
    assert {claim["about"]["OMPI_COMM_WORLD_LOCAL_RANK"] for claim in claims} == set("0123")


def test_ranks_claim_from_their_enclosing_claim(
    mpirun: list[str], workdir: Any, run_as_user: Callable[..., Any]
) -> None:
    """`safe-gpu run -n 4 -- mpirun -np 4 ...`: one GPU of the four for each rank, however many others are free."""
    rank = workdir.script("$CLAIM claim 1 --hold go & pid=$!", *GO_AFTER_4, "wait $pid")
    script = workdir.script(f"$SAFE_GPU run -n 4 --only 2-5 -- {shlex.join([*mpirun, '-np', '4', rank])}")
    done = run_as_user(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(gpu for claim in workdir.verdict() for gpu in claim["gpus"]) == ["2", "3", "4", "5"]


def test_a_rank_that_fails_frees_what_all_of_them_held(mpirun: list[str], workdir: Any, run_as_user: Any) -> None:
    """mpirun ends the others; at once all eight GPUs are to be had again."""
    script = workdir.script(
        'if [ "$OMPI_COMM_WORLD_RANK" = 2 ]; then',
        """  until [ "$(grep -c '"claim"' $REFEREE/log)" = 3 ]; do sleep .05; done""",
        "  exec $CLAIM claim 1 --fail",
        "fi",
        "exec $CLAIM claim 1 --hold go",
    )
    done = run_as_user(*mpirun, "-np", "4", script)
    assert done.returncode != 0
    assert len(workdir.records("claim")) == 3
    assert len(workdir.records("failing")) == 1
    killed = [claim["pid"] for claim in workdir.records("claim")]
    workdir.go()
    after = run_as_user(workdir.script("$CLAIM claim 8 --timeout 10"))
    assert after.returncode == 0, after.stdout + after.stderr
    assert [len(claim["gpus"]) for claim in workdir.verdict(killed=killed)] == [1, 1, 1, 8]
