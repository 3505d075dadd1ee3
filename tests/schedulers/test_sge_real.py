"""Grid Engine for real: jobs that declare GPUs, on two simulated hosts of 8 GPUs."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.real import BatchSystem

from .conftest import bring_up, check_end, real

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300), real]

HOST1, HOST2 = "sgehost", "sgehost2"
ON_HOST1, ON_HOST2 = ("-q", f"all.q@{HOST1}"), ("-q", f"all.q@{HOST2}")


class GridEngine(BatchSystem):
    """The cluster, as an ordinary user sees it from the submit host."""

    name, cancel = "sge", "qdel"

    def submit(self, *words: str) -> str:
        """qsub with these options and the command; the job's number. Its output goes to a file of that number."""
        output = f"{self.workdir.referee}/$JOB_ID.$TASK_ID"
        said = self.cluster.run("qsub", "-terse", "-S", "/bin/bash", "-j", "y", "-o", output, *words)
        return said.split(".")[0].strip()

    def jobs(self) -> dict[str, str]:
        """States of the jobs that are not over."""
        lines = [line.split() for line in self.cluster.run("qstat").splitlines()[2:]]
        return {line[0]: line[4] for line in lines}

    def output(self, job: str, task: str = "0") -> str:
        """What a job has said."""
        return (self.workdir.referee / f"{job}.{task}").read_text()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with bring_up("sge_up.sh", HOSTS="2", SLOTS="32", GPUS="8") as cluster:
        yield cluster


@pytest.fixture
def sge(cluster: Any, workdir: Any) -> Iterator[GridEngine]:
    engine = GridEngine(cluster, workdir)
    yield engine
    engine.end_all()


def test_jobs_of_one_two_and_four_gpus(sge: GridEngine, workdir: Any) -> None:
    """Half of them claim a number, half ask Grid Engine what the job declared."""
    jobs = {}
    for round_ in range(2):
        for number in (4, 2, 1):
            script = workdir.script(f"$CLAIM claim {'job' if round_ % 2 else number}")
            jobs[sge.submit(*ON_HOST1, "-l", f"gpu={number}", script)] = number
    sge.finish(*jobs)
    claims = workdir.verdict()
    assert {claim["about"]["JOB_ID"]: len(claim["gpus"]) for claim in claims} == jobs
    assert {claim["job"] for claim in claims} == {f"sge:{job}" for job in jobs}
    assert {claim["host"] for claim in claims} == {HOST1}


def test_jobs_that_declare_nothing_wait_for_each_other(sge: GridEngine) -> None:
    sge.check_waiting(*ON_HOST1)


def test_a_claim_ends_with_its_job(sge: GridEngine) -> None:
    """h_rt stands in the answer of qstat that tells the number of GPUs."""
    check_end(sge, 661, *ON_HOST1, "-l", "gpu=1,h_rt=600")


def test_array(sge: GridEngine, workdir: Any) -> None:
    job = sge.submit(*ON_HOST1, "-t", "1-8", "-tc", "4", "-l", "gpu=2", workdir.script("$CLAIM claim job"))
    sge.finish(job)
    claims = workdir.verdict()
    assert sorted(claim["job"] for claim in claims) == [f"sge:{job}.{task}" for task in range(1, 9)]
    assert {len(claim["gpus"]) for claim in claims} == {2}


def test_parallel_environment_over_two_hosts(sge: GridEngine, workdir: Any) -> None:
    """A consumable counts per slot: 3 slots on each host are 3 GPUs there, for every task of the job."""
    task = workdir.script("$CLAIM claim job --hold go")
    script = workdir.script(
        f"for host in $(cut -d' ' -f1 $PE_HOSTFILE); do qrsh -inherit -nostdin $host {task} & done", "wait"
    )
    job = sge.submit("-pe", "mpi", "6", "-l", "gpu=1", script)
    sge.claims(2)
    workdir.go()
    sge.finish(job)
    assert {claim["host"]: len(claim["gpus"]) for claim in workdir.verdict()} == {HOST1: 3, HOST2: 3}
    assert {claim["job"] for claim in workdir.records("claim")} == {f"sge:{job}"}


@pytest.mark.parametrize("options", ["", "-V"])
def test_a_request_per_job_counts_where_the_script_runs(sge: GridEngine, workdir: Any, options: str) -> None:
    """A task that qrsh starts elsewhere has NHOSTS=1 there, and only with -V a host file."""
    task = workdir.script("$SAFE_GPU run -n job -- sh -c 'echo on $(hostname): $CUDA_VISIBLE_DEVICES.'")
    script = workdir.script(f"for host in {HOST1} {HOST2}; do qrsh -inherit {options} -nostdin $host {task}; done")
    job = sge.submit("-pe", "mpi", "2", "-masterq", f"all.q@{HOST1}", "-l", "ngpus=2", script)
    sge.finish(job)
    said = sge.output(job)
    assert f"on {HOST1}: 0,1." in said
    assert f"on {HOST2}: .\n" in said
    assert f"job sge:{job} asked for no GPU on this host" in said


def test_mpi_ranks_of_a_parallel_environment(sge: GridEngine, workdir: Any, mpirun: list[str]) -> None:
    """Open MPI starts its daemons through Grid Engine; each rank claims its share, one GPU of the 2 on its host."""
    rank = workdir.script("$CLAIM claim job --hold go")
    job = sge.submit("-pe", "mpi", "4", "-l", "gpu=1", workdir.script(f"{' '.join(mpirun)} {rank}"))
    sge.claims(4)
    workdir.go()
    sge.finish(job)
    claims = workdir.verdict()
    assert sorted((claim["host"], len(claim["gpus"])) for claim in claims) == [(HOST1, 1)] * 2 + [(HOST2, 1)] * 2
    assert len({(claim["host"], *claim["gpus"]) for claim in claims}) == 4


def test_qdel_in_mid_claim_and_in_the_queue(sge: GridEngine) -> None:
    sge.check_cancelling(HOST1, *ON_HOST1)


def test_linear_binding_is_kept(sge: GridEngine, workdir: Any) -> None:
    """Grid Engine binds each job to a core; the claim binds within that, next to its GPU or not."""
    script = workdir.script("grep Cpus_allowed_list /proc/self/status", "$CLAIM claim 1 --hold go")
    jobs = [sge.submit(*ON_HOST1, "-binding", "linear:1", "-l", "gpu=1", script) for _ in range(2)]
    claims = sge.claims(2)
    workdir.go()
    sge.finish(*jobs)
    workdir.verdict()
    bound = {claim["about"]["JOB_ID"]: claim["cpus"] for claim in claims}
    for job in jobs:
        given = re.search(r"Cpus_allowed_list:\s*(\S+)", sge.output(job))
        assert given is not None
        assert given[1].isdecimal(), "Grid Engine did not bind the job to one core"
        assert bound[job] == [int(given[1])]


def test_a_claim_larger_than_declared_warns(sge: GridEngine, workdir: Any) -> None:
    job = sge.submit(*ON_HOST1, "-l", "gpu=2", workdir.script("$CLAIM claim 3"))
    sge.finish(job)
    assert [len(claim["gpus"]) for claim in workdir.verdict()] == [3]
    assert re.search(r"WARNING .*takes 3 GPUs.*for 2", sge.output(job))


def test_a_host_that_may_not_ask(sge: GridEngine, workdir: Any) -> None:
    """Many sites let execution hosts submit nothing; a number in the environment helps."""
    root = ("root", "qconf")
    for host in (HOST1, HOST2):
        sge.cluster.tool(*root, "-ds", host)
    sge.cluster.tool(*root, "-dh", HOST2)
    try:
        sge.cluster.tool(*root, "-as", HOST1)
        job = sge.submit(*ON_HOST2, "-l", "gpu=2", workdir.script("$CLAIM claim job"))
        helped = sge.submit(*ON_HOST2, "-l", "gpu=2", workdir.script("export SAFE_GPU_NB_GPUS=2", "$CLAIM claim job"))
        sge.finish(job, helped)
    finally:
        sge.cluster.tool(*root, "-as", HOST2)
        sge.cluster.tool(*root, "-ah", HOST2)
    assert [claim["about"]["JOB_ID"] for claim in workdir.verdict()] == [helped]
    said = sge.output(job)
    assert "neither submit nor admin host" in said
    assert "set SAFE_GPU_NB_GPUS=N" in said


@pytest.fixture
def gpu_queue(sge: GridEngine, workdir: Any) -> Iterator[str]:
    """A queue whose name says that its jobs use GPUs."""
    path = workdir.path / "gpu.q"
    path.write_text(sge.cluster.tool("root", "qconf", "-sq", "all.q").stdout.replace("all.q", "gpu.q", 1))
    sge.cluster.tool("root", "qconf", "-Aq", str(path))
    yield "gpu.q"
    sge.end_all()
    sge.cluster.tool("root", "qconf", "-dq", "gpu.q")


def test_gpus_without_a_number_are_not_none(sge: GridEngine, workdir: Any, gpu_queue: str) -> None:
    script = workdir.script("$SAFE_GPU run -n job -- true; echo exit code $?")
    asked = {
        "-l has_gpu=TRUE": ("-l", "has_gpu"),
        "-l has_gpu=TRUE ": ("-soft", "-l", "has_gpu"),
        f"-q {gpu_queue}": ("-q", gpu_queue),
        f"-q {gpu_queue}@{HOST1}": ("-q", f"{gpu_queue}@{HOST1}"),
        f"-q {gpu_queue} ": ("-soft", "-q", gpu_queue),
    }
    jobs = {word: sge.submit(*options, script) for word, options in asked.items()}
    sge.finish(*jobs.values())
    for word, job in jobs.items():
        said = sge.output(job)
        assert "exit code 78" in said
        assert f"({word.strip()} gives no number of GPUs; SAFE_GPU_SGE_RESOURCE=NAME" in said


STARTER = r"""
case $1 in
  */job_scripts/*) set -- "$SGE_STARTER_SHELL_PATH" "$@" ;;
esac
if [ "$JOB_SCRIPT" = QRSH ]; then set -- "${SHELL:-/bin/sh}" -c "$*"; fi
exec $SAFE_GPU run -n job -- "$@"
"""


@pytest.fixture
def starter(sge: GridEngine, workdir: Any) -> Iterator[str]:
    """A queue that starts every job under ``safe-gpu run -n job``."""
    path = workdir.script(STARTER)
    sge.cluster.tool("root", "qconf", "-mattr", "queue", "starter_method", path, "all.q")
    yield path
    sge.cluster.tool("root", "qconf", "-mattr", "queue", "starter_method", "NONE", "all.q")


def test_starter_method_gives_gpus_to_jobs_that_know_nothing(sge: GridEngine, workdir: Any, starter: str) -> None:
    """Job scripts and programs alike see only their GPUs, and keep them as long as they run."""
    script = workdir.script("$CLAIM given --hold go")
    jobs = {sge.submit(*ON_HOST1, "-l", f"gpu={number}", script): number for number in (1, 2, 4)}
    program = [workdir.python, f"{workdir.path}/job.py", "given", "--hold", "go"]
    jobs[sge.submit(*ON_HOST1, "-l", "gpu=1", "-v", f"REFEREE={workdir.referee}", "-b", "y", *program)] = 1
    claims = sge.claims(4)
    assert {claim["about"]["JOB_ID"]: len(claim["gpus"]) for claim in claims} == jobs
    holders = {entry["pid"] for entry in workdir.entries(HOST1).values()}
    assert len(holders) == 4
    # What holds the GPUs is the shell of the job's script, or the program itself: nothing stays in between.
    assert all(holders & {claim["pid"], claim["parent"]} for claim in claims)
    workdir.go()
    sge.finish(*jobs)
    workdir.verdict()


def test_starter_method_gives_none_to_jobs_that_declare_none(sge: GridEngine, workdir: Any, starter: str) -> None:
    job = sge.submit(*ON_HOST1, workdir.script("$CLAIM given", 'echo "visible: <$CUDA_VISIBLE_DEVICES>"'))
    sge.finish(job)
    assert [claim["gpus"] for claim in workdir.verdict()] == [[]]
    assert "visible: <>" in sge.output(job)
    assert f"starts without a GPU: job sge:{job} asked for no GPU" in sge.output(job)
    assert workdir.entries(HOST1) == {}
