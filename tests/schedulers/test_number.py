"""What nb_gpus="job" means."""

import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safe_gpu.claim.arguments import read_options
from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.schedulers.gpu_count import (
    QstatError,
    ResourceRequest,
    Slots,
    ask_qstat,
    declared_gpus,
    hard_request,
    here,
    number_for_job,
    slots,
    with_end,
)
from safe_gpu.schedulers.job import current, lines_of_this_host
from safe_gpu.wording.text import on_command_line

Qstat = Callable[..., dict[str, str]]
SLURM = {"SLURM_JOB_ID": "77"}
FLUX = {"FLUX_JOB_ID": "ƒABC"}


# As Son of Grid Engine 8.1.9 says it, on stdout, with exit status 0.
REFUSAL = """<?xml version='1.0'?>
<comunication_error >
  <element>
    <AN_status>8</AN_status>
    <AN_text>denied: host &quot;n1&quot; is neither submit nor admin host</AN_text>
    <AN_quality>1</AN_quality>
  </element>
</comunication_error>
"""


def qstat_xml(requests: str, job: str = "1234", environment: str = "") -> str:
    """An answer of ``qstat -j JOB -xml`` (Son of Grid Engine 8.1.9), shortened."""
    return f"""<?xml version='1.0'?>
<detailed_job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/detailed_job_info.xsd">
  <djob_info>
    <element>
      <JB_job_number>{job}</JB_job_number>
      <JB_owner>gpujobs</JB_owner>
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


def queue(name: str) -> str:
    return f"<destin_ident_list><QR_name>{name}</QR_name></destin_ident_list>"


def flag(name: str, value: str = "TRUE") -> str:
    return request(name, value, consumable=0, valtype=5)


def listed(name: str, *entries: str) -> str:
    return f"<{name}>{''.join(entries)}</{name}>"


def sets(*lists: str) -> str:
    """Request sets of Open Cluster Scheduler 9.1, each a list in one scope: global (0), master (1), slave (2)."""
    parts = (f"<ulong_sublist><JRS_scope>{text[0]}</JRS_scope>{text[1:]}</ulong_sublist>" for text in lists)
    return listed("JB_request_set_list", *parts)


def hard_set(scope: int, *requests: str) -> str:
    return f"{scope}{listed('JRS_hard_resource_list', *requests)}"


GPU_TYPE = request("gpu_type", "a100", consumable=0, valtype=9)


def test_the_number() -> None:
    for environ, number in (
        ({"SAFE_GPU_NB_GPUS": "3"}, 3),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "4"}, 4),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "4", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}, 1),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}, 2),
        ({"PBS_JOBID": "1.h", "PBS_NGPUS": "2"}, 2),
        ({"PBS_JOBID": "1.h", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"}, 3),
        ({"LSB_JOBID": "1", "CUDA_VISIBLE_DEVICES": "0,3"}, 2),
        # AMD hosts
        ({"PBS_JOBID": "1.h", "HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"PBS_JOBID": "1.h", "CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": "4,5"}, 2),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "2", "ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "4,5"}, 2),
        ({**FLUX, "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "2", "CUDA_VISIBLE_DEVICES": "4,5,6"}, 3),
        ({"SGE_TASK_ID": "undefined", "JOB_ID": "4", "SGE_HGR_gpu": "2 5"}, 2),
    ):
        assert number_for_job(environ, ask=False) == number


def test_no_number_names_the_way_out() -> None:
    for environ, names in (
        ({"SAFE_GPU_NB_GPUS": "two"}, ["SAFE_GPU_NB_GPUS='two'", "whole number"]),
        ({}, ["in no batch job", "set SAFE_GPU_NB_GPUS=N"]),
        (SLURM, ["slurm:77", "not known (SLURM_GPUS_ON_NODE is not set)", "set SAFE_GPU_NB_GPUS=N"]),
        ({**SLURM, "SLURM_GPUS_ON_NODE": "0"}, ["slurm:77 asked for no GPU", "set SAFE_GPU_NB_GPUS=N"]),
        (
            {**SLURM, "SLURM_GPUS_ON_NODE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            ["slurm:77 asked for 2 GPUs", "4 processes"],
        ),
        ({"SGE_TASK_ID": "undefined", "JOB_ID": "4"}, ["sge:4", "not known", "set SAFE_GPU_NB_GPUS=N"]),
        ({"SGE_TASK_ID": "undefined"}, ["of unknown number", "set SAFE_GPU_NB_GPUS=N"]),
        ({**FLUX, "FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "1"}, ["flux:fABC", "set SAFE_GPU_NB_GPUS=N"]),
    ):
        with pytest.raises(UnsatisfiableRequestError) as caught:
            number_for_job(environ, ask=False)
        for name in names:
            assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_hard_request() -> None:
    for requests, found in (
        (hard(request("gpu", 2)), ResourceRequest(2, "slot")),
        (hard(request("ngpus", 2, consumable=2), request("h_rt", 100, valtype=3)), ResourceRequest(2, "job")),
        (hard(request("gpus", 1, consumable=3, valtype=10)), ResourceRequest(1, "host")),
        (hard(GPU_TYPE, request("gpu", 2)) + soft(flag("has_gpu")), ResourceRequest(2, "slot")),
        (hard(request("gpu", 0)) + listed("JB_hard_queue_list", queue("gpu.q")), ResourceRequest(0, "slot")),
        (hard(request("h_vmem", 4, valtype=4)) + listed("JB_hard_queue_list", queue("all.q")), None),
        (hard(flag("gpu", "FALSE")), None),
        ("", None),
        (sets(hard_set(0, request("gpu", 2))), ResourceRequest(2, "slot")),
        (sets(hard_set(1, request("gpu", 2))), ResourceRequest(2, "job")),
        (sets(hard_set(1, request("gpu", 2)), hard_set(2, request("gpu", 1))), ResourceRequest(1, "slave slot")),
        (sets(hard_set(2, request("gpu", 1, consumable=3))), ResourceRequest(1, "slave host")),
    ):
        assert hard_request(qstat_xml(requests, environment="a & b <\x01"), ("gpu", "gpus", "ngpus")) == found


@pytest.mark.parametrize(
    ("requests", "word"),
    [
        (hard(flag("gpu")), "-l gpu=TRUE"),
        (hard(request("gpu_ram", 20)), "-l gpu_ram=20"),
        (soft(request("gpus", 7)), "-l gpus=7"),
        (listed("JB_hard_queue_list", queue("gpu.q")), "-q gpu.q"),
        (listed("JB_hard_queue_list", queue("all.q"), queue("GPU@node1")), "-q GPU@node1"),
        ("<JB_pe>gpu</JB_pe>", "-pe gpu"),
        (sets(hard_set(2, GPU_TYPE)), "-l gpu_type=a100"),
        (sets("0" + listed("JRS_soft_resource_list", request("gpu", 1))), "-l gpu=1"),
    ],
)
def test_gpus_without_a_number(fake_qstat: Qstat, requests: str, word: str) -> None:
    """They are not known to be none: the claim is refused, and says what the number is missing in."""
    with on_command_line(), pytest.raises(UnsatisfiableRequestError) as caught:
        number_for_job(fake_qstat(qstat_xml(requests)))
    assert caught.value.value == "job"
    for part in (word, "not known", "set SAFE_GPU_NB_GPUS=N", "-n N", "SAFE_GPU_SGE_RESOURCE=NAME"):
        assert part in str(caught.value)


def test_hard_request_in_a_broken_list() -> None:
    with pytest.raises(QstatError, match="cannot be read"):
        hard_request("<JB_hard_resource_list><CE_name>gpu</JB_hard_resource_list>", ("gpu",))


def test_request_on_this_host() -> None:
    for request_, granted, number in (
        (ResourceRequest(2, "slot"), Slots(1, True), 2),
        (ResourceRequest(0.5, "slot"), Slots(4, True), 2),
        (ResourceRequest(2, "job"), Slots(4, True), 2),
        (ResourceRequest(2, "job"), Slots(4, False), 0),
        (ResourceRequest(1, "slave slot"), Slots(3, False), 3),
        (ResourceRequest(1, "slave slot"), Slots(3, True), None),
        (ResourceRequest(1, "slave host"), Slots(3, False), 1),
    ):
        assert here(request_, granted) == number


def called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=name))


@pytest.mark.parametrize(
    ("name", "hostname", "hosts", "lines"),
    [
        ("n1", "", "n1 n2", [0]),
        ("n1.site.org", "", "n2 n1", [1]),
        ("N1.Site.org", "", "n2.site.org n1.SITE.ORG", [1]),
        ("n1", "", "n1.a.org n1.b.org", []),
        ("n1", "n1.b.org", "n1.a.org n1.b.org", [1]),
        ("node7", "", "gpu-ib7", [0]),
        ("node7", "", "gpu-ib7 gpu-ib8", []),
        ("node7", "gpu-ib8", "gpu-ib7 gpu-ib8", [1]),
        ("n2", "n1", "", []),
    ],
)
def test_which_host_of_a_list_is_this_one(name: str, hostname: str, hosts: str, lines: Any, monkeypatch: Any) -> None:
    called(monkeypatch, name)
    assert lines_of_this_host(hosts.split(), {"HOSTNAME": hostname}) == lines


TWO_HOSTS = "n1 2 all.q@n1 UNDEFINED\nn2 3 all.q@n2 UNDEFINED\n"


@pytest.mark.parametrize(
    ("name", "environ", "files", "found"),
    [
        ("n1", {}, {}, Slots(1, True)),
        ("n1", {"NSLOTS": "4", "NHOSTS": "2"}, {}, Slots(None, False)),
        ("n1", {"NSLOTS": "5", "NHOSTS": "2"}, {"7.1/pe_hostfile": TWO_HOSTS}, Slots(2, True)),
        ("n2", {"NSLOTS": "5", "NHOSTS": "2"}, {"7.1/pe_hostfile": TWO_HOSTS}, Slots(3, False)),
        ("m1", {"NSLOTS": "2", "NHOSTS": "1"}, {"7.1/pe_hostfile": TWO_HOSTS[:25]}, Slots(2, True)),
        # The execution daemon knows the number whatever the host is called. The script runs in the job's own directory.
        ("m1", {"NHOSTS": "2"}, {"7.1/pe_hostfile": TWO_HOSTS, "7.1/config": "host_slots=2\n"}, Slots(2, True)),
        # Tasks of qrsh -inherit: on the script's host, elsewhere, elsewhere with -V.
        ("n1", {"NSLOTS": "5", "NHOSTS": "2"}, {"7.1/pe_hostfile": TWO_HOSTS, "7.1/1.n1/config": ""}, Slots(2, True)),
        ("n2", {"NSLOTS": "3", "NHOSTS": "1"}, {"7.1/1.n2/config": "pe_slots=3\nhost_slots=3\n"}, Slots(3, False)),
        ("n2", {"NSLOTS": "3", "NHOSTS": "1", "PE_HOSTFILE": "/nonexistent"}, {"7.1/2.n2/config": ""}, Slots(3, False)),
        ("m2", {"NHOSTS": "1"}, {"V": TWO_HOSTS, "7.1/2.n2/config": "host_slots=3\n"}, Slots(3, False)),
    ],
)
def test_slots_of_a_job_on_this_host(
    name: str,
    environ: dict[str, str],
    files: dict[str, str],
    found: Slots,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Son of Grid Engine 8.1.9 lays out its spool directory and sets its variables."""
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        if path.endswith("pe_hostfile") or path == "V":
            environ = {"PE_HOSTFILE": str(tmp_path / path), **environ}
        environ = {**environ, "SGE_JOB_SPOOL_DIR": str((tmp_path / path).parent)}
    called(monkeypatch, name)
    assert slots(environ) == found


@pytest.mark.parametrize("consumable", [1, 2])
def test_a_host_that_its_job_knows_by_no_name(
    fake_qstat: Qstat, consumable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known whether the request is for this host: not none, and the message names both."""
    (tmp_path / "hosts").write_text(TWO_HOSTS)
    called(monkeypatch, "node7")
    environ = fake_qstat(qstat_xml(hard(request("gpu", 1, consumable))))
    with pytest.raises(UnsatisfiableRequestError, match=r"on this host, node7, .* names n1, n2\)") as caught:
        number_for_job({**environ, "PE_HOSTFILE": str(tmp_path / "hosts"), "NHOSTS": "2"})
    assert caught.value.value == "job"


@pytest.fixture
def fake_qstat(tmp_path: Path) -> Qstat:
    """A qstat that answers what it is told to, and the environment of a job that finds it."""

    def make(answer: str = "", *, status: int = 0, error: str = "") -> dict[str, str]:
        (tmp_path / "answer").write_text(answer)
        program = tmp_path / "qstat"
        program.write_text(
            f"#!{sys.executable}\nimport sys\n"
            f"assert sys.argv[1:] == ['-j', '1234', '-xml'], sys.argv\n"
            f"sys.stderr.write({error!r})\nsys.stdout.write(open({str(tmp_path / 'answer')!r}).read())\n"
            f"sys.exit({status})\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return {"SGE_TASK_ID": "undefined", "JOB_ID": "1234", "NSLOTS": "1", "NHOSTS": "1", "PATH": str(tmp_path)}

    return make


def test_slots_ranks_and_a_resource_of_another_name(fake_qstat: Qstat) -> None:
    environ = {**fake_qstat(qstat_xml(hard(request("accel", 1)))), "NSLOTS": "4"}
    assert declared_gpus(environ) == 0
    environ["SAFE_GPU_SGE_RESOURCE"] = "accel"
    assert (declared_gpus(environ), declared_gpus(environ, ask=False)) == (4, None)
    assert number_for_job({**environ, "SAFE_GPU_NB_GPUS": "1"}) == 1
    off_its_path = {**environ, "SGE_BINARY_PATH": environ["PATH"], "PATH": "/nowhere"}
    assert number_for_job(off_its_path) == 4
    assert number_for_job({**environ, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            {"status": 1, "error": 'denied: host "n1" is neither submit nor admin host\n'},
            "neither submit nor admin host",
        ),
        ({"answer": REFUSAL}, 'job 1234: denied: host "n1" is neither submit nor admin host)'),
        ({"answer": "<?xml version='1.0'?>\n<unknown_jobs >\n<ST_name>1234</ST_name></unknown_jobs>"}, "no such job"),
        ({"answer": qstat_xml("", job="12345")}, "job 1234"),
        ({"answer": qstat_xml("")}, "asked for no GPU on this host"),
        ({"answer": qstat_xml(sets(hard_set(2, request("gpu", 1))))}, "how many of its tasks"),
    ],
)
def test_qstat_that_does_not_tell(fake_qstat: Qstat, answer: dict[str, object], says: str) -> None:
    environ = fake_qstat(**answer)
    with pytest.raises(UnsatisfiableRequestError, match="set SAFE_GPU_NB_GPUS=N") as caught:
        number_for_job(environ)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    known = 0 if "no GPU" in says else None
    assert declared_gpus(environ) == known
    assert caught.value.value == ("job" if known is None else 0)


def test_no_qstat(tmp_path: Path) -> None:
    environ = {"SGE_TASK_ID": "undefined", "JOB_ID": "1234", "PATH": str(tmp_path)}
    with pytest.raises(UnsatisfiableRequestError, match=r"qstat is not on PATH here.*set SAFE_GPU_NB_GPUS=N"):
        number_for_job(environ)
    assert declared_gpus(environ) is None


# The GPUs of one rank


def env(variables: str) -> dict[str, str]:
    return dict(variable.split("=", 1) for variable in variables.split())


def srun(tasks: int, gpus: int, visible: str) -> dict[str, str]:
    """A task of a step with so many tasks and GPUs on this node, as in Slurm 22.05."""
    ids = ",".join(map(str, range(tasks)))
    text = f"SLURM_GTIDS={ids} SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE={tasks} SLURM_TASKS_PER_NODE={tasks}"
    return SLURM | env(f"{text} SLURM_GPUS_ON_NODE={gpus} CUDA_VISIBLE_DEVICES={visible}")


def batch(gpus: int, visible: str) -> dict[str, str]:
    return SLURM | env(f"SLURM_GTIDS=0 SLURM_TASKS_PER_NODE=4 SLURM_GPUS_ON_NODE={gpus} CUDA_VISIBLE_DEVICES={visible}")


def ompi(ranks: int) -> dict[str, str]:
    return env(f"OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE={ranks}")


def torchrun(ranks: int) -> dict[str, str]:
    return env(f"LOCAL_RANK=0 LOCAL_WORLD_SIZE={ranks}")


def jsrun(ranks: int, visible: str) -> dict[str, str]:
    return env(
        f"LSB_JOBID=9 JSM_NAMESPACE_LOCAL_RANK=0 JSM_NAMESPACE_LOCAL_SIZE={ranks} CUDA_VISIBLE_DEVICES={visible}"
    )


PBS, LSF, TORQUE = env("PBS_JOBID=1.h"), env("LSB_JOBID=1"), env("PBS_JOBID=1.h PBS_GPUFILE=4")
ONE, TWO, FOUR = (env(f"CUDA_VISIBLE_DEVICES={gpus}") for gpus in ("2", "2,3", "0,1,2,3"))


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        pytest.param(srun(2, 4, "2,3"), 2, id="srun --gpus-per-task=2"),
        pytest.param(srun(2, 4, "1"), 1, id="srun --gpu-bind=single:1, more GPUs than tasks"),
        pytest.param(srun(2, 4, "0,1,2,3"), 2, id="srun, one list for all"),
        pytest.param(srun(4, 2, "1"), "asked for 2 GPUs on this host, for 4 processes", id="srun --gpu-bind=single:2"),
        pytest.param(srun(2, 4, "2,3") | torchrun(2), 1, id="torchrun in each task of srun"),
        pytest.param(srun(2, 4, "2,3") | ompi(2), 1, id="mpirun in each task of srun"),
        pytest.param(batch(4, "0,1,2,3") | ompi(4), 1, id="mpirun in a batch script"),
        pytest.param(batch(4, "2,3") | torchrun(2), 1, id="torchrun on two of four"),
        pytest.param(batch(4, "2,3") | ompi(2) | {"SAFE_GPU_SCOPE": "x"}, 1, id="mpirun in a claim of two of four"),
        pytest.param(jsrun(6, "1"), 1, id="jsrun -g 1"),
        pytest.param(jsrun(3, "2,3") | torchrun(2), 1, id="torchrun in each task of jsrun"),
        pytest.param(jsrun(6, ""), "asked for no GPU", id="jsrun -g 0"),
        pytest.param(TORQUE | FOUR | ompi(4), 1, id="torque, the job's list"),
        pytest.param(TORQUE | ompi(2), 2, id="torque, no list"),
        pytest.param(TORQUE | TWO | torchrun(2), 1, id="torque, torchrun on two"),
        pytest.param(PBS | {"PBS_NGPUS": "4"} | ONE | ompi(4), 1, id="pbs with a number, a list of one for each"),
        pytest.param(PBS | {"PBS_NGPUS": "2"} | TWO | ompi(4), "2 GPUs on this host, for 4", id="pbs, MPS ranks"),
        pytest.param(PBS | TWO | ompi(4), "2 GPUs visible to each of 4 processes", id="pbs, MPS ranks or not"),
        pytest.param(LSF | ONE | ompi(4), "1 GPU visible to each of 4 processes", id="lsf, its own list or the job's"),
        pytest.param(PBS | FOUR | env("HOROVOD_LOCAL_RANK=0 HOROVOD_LOCAL_SIZE=2"), 2, id="pbs, horovod shares"),
    ],
)
def test_the_number_of_a_rank(environ: dict[str, str], number: int | str, tmp_path: Path) -> None:
    if "PBS_GPUFILE" in environ:
        gpus = [f"{host}-gpu{gpu}\n" for host in ("a-b", os.uname().nodename) for gpu in range(4)]
        (tmp_path / "gpus").write_text("".join(gpus))
        environ = {**environ, "PBS_GPUFILE": str(tmp_path / "gpus")}
    if isinstance(number, int):
        assert number_for_job(environ) == number
        return
    with pytest.raises(UnsatisfiableRequestError, match=number):
        number_for_job(environ)


# When the job ends, where its variables do not tell


def fake_squeue(tmp_path: Path, answer: str, code: int = 0) -> dict[str, str]:
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\necho \"$*\" >> {tmp_path}/asked\necho '{answer}'\nexit {code}\n")
    program.chmod(0o755)
    return {"SLURM_JOB_ID": "77", "PATH": f"{tmp_path}:{os.defpath}"}


def test_the_end_of_a_slurm_job(tmp_path: Path) -> None:
    environ = fake_squeue(tmp_path, "2026-11-22T23:40:00")
    job = current(environ)
    ends = int(time.mktime((2026, 11, 22, 23, 40, 0, 0, 0, -1)))
    assert with_end(environ, job, ask=True).ends == ends
    assert (tmp_path / "asked").read_text() == "-h -j 77 -o %e\n"
    assert with_end(environ, job, ask=False) == job
    told = job._replace(ends=5)
    assert with_end(environ, told, ask=True) == told
    assert (tmp_path / "asked").read_text().count("\n") == 1


@pytest.mark.parametrize(("answer", "code"), [("N/A", 0), ("2026-11-22T23:40:00", 1)])
def test_a_slurm_that_does_not_tell(tmp_path: Path, answer: str, code: int) -> None:
    environ = fake_squeue(tmp_path, answer, code)
    assert with_end(environ, current(environ), ask=True).ends is None


def test_the_limit_of_a_job_of_grid_engine(fake_qstat: Qstat) -> None:
    environ = fake_qstat(qstat_xml(hard(request("h_rt", 7200, valtype=3), request("gpu", 2))))
    job = current(environ)
    assert with_end(environ, job, ask=True).walltime is None  # qstat is not asked for that alone
    assert ask_qstat(environ, "1234") == 2
    assert with_end(environ, job, ask=True).walltime == 7200


def test_array_tasks_of_one_gpu_ask_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"}
    for name, value in (fake_squeue(tmp_path, "N/A") | array).items():
        monkeypatch.setenv(name, value)
    read_options(1)
    assert not (tmp_path / "asked").exists()
    read_options(2)
    assert (tmp_path / "asked").exists()
