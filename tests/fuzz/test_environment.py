"""Variables of this package, of schedulers, launchers and vendors, with any bytes in them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import hostile
from support.gpus import PACKAGE_ROOT
from support.hostile import LINES, TRICK, assert_shown_safely, bounded, broken_text, examples, refusing, with_examples

import safe_gpu
from safe_gpu.errors import UnsatisfiableRequestError
from safe_gpu.schedulers import gpu_count as qstat
from safe_gpu.schedulers.job import current
from safe_gpu.settings.variables import VARIABLES

PATHS = ("SAFE_GPU_DIR", "SAFE_GPU_SIMULATED_DIR", "SAFE_GPU_POLICY")
SCREEN = {"COLUMNS", "TERM", "NO_COLOR", "TZ", "HOSTNAME"}


def named_in(*rooms: str) -> set[str]:
    """The names of variables, and of a few other things, that these rooms have in quotes."""
    texts = (path.read_text() for room in rooms for path in Path(safe_gpu.__file__).parent.joinpath(room).rglob("*.py"))
    return {name for text in texts for name in re.findall(r'"(_?[A-Z][A-Z]+_?[A-Za-z_]+)"', text)}


JOBS = sorted({*named_in("schedulers", "affinity"), "SGE_HGR_gpu", "NHOSTS", "NSLOTS"})
NAMES = sorted({*JOBS, *VARIABLES, *named_in("runtimes"), *SCREEN}.difference({*PATHS, "PATH"}))

# What an environment can hold: no NUL, and bytes that are not UTF-8 as lone surrogates of their own.
VALUES = st.one_of(
    LINES.map(lambda text: text.replace("\0", "").encode("utf-8", "replace").decode()),
    st.sampled_from(
        ["\udcff\udc80", "0,1", "0", "-1", "1.5", "1e308", "9" * 400, "inf", "2(x3),1", "1(x999999999)",
         "4711[5].server",
         "4711.server", "ƒ3ETxsR9H",
         "[", "undefined", "GPU-", "MIG-GPU-/1/0", "0,0", "9" * 5000 + ",1", ",", "2-12:00:00",
         "1d" * 99,
         "20GiB", "1e9999GiB", "auto", "node", "simulated:", "simulated:laptop", "/dev/null",
         "/nonexistent/active_jobs/x.1"]
    ),
)  # fmt: skip
ENVIRONMENTS = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5)
DIGITS = "9" * 5000
ENDS = (0, 69, 70, 73, 75, 78)


def assert_logged_safely(caplog: pytest.LogCaptureFixture) -> None:
    """Whether a terminal can show what was logged since the last call; Python shows warnings on stderr."""
    for message in caplog.messages:
        assert_shown_safely(message, own=True)
    caplog.clear()


@with_examples(
    *({"PBS_JOBID": number} for number in (DIGITS, f"4711[{DIGITS}]")),
    {"SGE_JOB_SPOOL_DIR": f"/x/active_jobs/{DIGITS}.1", "NSLOTS": DIGITS},
    {"SLURM_JOB_ID": "1", "SLURM_GPUS_ON_NODE": "9" * 18, "SLURM_STEP_GPUS": TRICK},
    {"SLURM_JOB_ID": "1", "SLURM_NODEID": "9" * 18, "SLURM_STEP_TASKS_PER_NODE": "1(x1)," * 20_000},
    {"LSB_JOBID": "1", "CUDA_VISIBLE_DEVICES": "," * 100_000},
    {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "1", "FLUX_JOB_NNODES": "1", "CUDA_VISIBLE_DEVICES": "," * 100_000},
    *({"_CONDOR_JOB_AD": path, "_CONDOR_AssignedGPUs": "," * 100_000} for path in ("/dev/zero", "/proc/self/environ")),
    {"SAFE_GPU_NB_GPUS": TRICK},
)
@examples(50)
@given(st.dictionaries(st.sampled_from(JOBS), VALUES, max_size=6))
def test_jobs_and_ranks(environ: dict[str, str]) -> None:
    with bounded():
        job = current(environ)
        hostile.assert_plain([job.job_label or ""])
        assert len(job.job_label or "") <= 100
        assert qstat.declared_gpus(environ, ask=False) is None or environ
        with refusing() as refused:
            assert 0 < qstat.number_for_job(environ, ask=False) < 10**18
    assert refused.error is None or isinstance(refused.error, UnsatisfiableRequestError)
    assert len(str(refused.error or "")) < 25_000


@pytest.mark.parametrize("visible", ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "SAFE_GPU_TIMEOUT"])
def test_a_claim_in_such_an_environment(visible: str, monkeypatch: Any, ground: Any, run: Any, caplog: Any) -> None:
    """It ends well or with an error of ours, and leaves no lease, whatever the variables say."""

    @with_examples(
        *(({}, value) for value in (DIGITS, "1e308")),
        *((environ, "0") for environ in (
            {"SAFE_GPU_FOR": "1e308"}, {"SAFE_GPU_UNEXPLAINED_MEMORY": DIGITS},
            {"SAFE_GPU_UNEXPLAINED_MEMORY": "1e9999GiB"}, {"SAFE_GPU_SCOPE": TRICK}, {"SAFE_GPU_SCOPE": "\udcff"},
            {"SAFE_GPU_FSROOT": f"/{TRICK}"}, {"SAFE_GPU_FSROOT": "\udcff"}, {"COLUMNS": "9" * 9}, {"COLUMNS": "1"},
            {"SAFE_GPU_BOUND": TRICK, "SAFE_GPU_EXPECT": "\udcff", "SAFE_GPU_RAY_WORKER": "x"},
            {"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": "9" * 18}, {"PBS_JOBID": "1", "PBS_WALLTIME": "9" * 18},
            {"SGE_JOB_SPOOL_DIR": f"/x/active_jobs/{DIGITS}.1"}, {"SAFE_GPU_DRIVER": f"simulated:{TRICK}"},
        )),
    )  # fmt: skip
    @examples(8)
    @given(ENVIRONMENTS, VALUES)
    def attack(environ: dict[str, str], value: str) -> None:
        with monkeypatch.context() as patched:
            for name, text in {**environ, visible: value}.items():
                if name != "SAFE_GPU_DRIVER" or text.startswith("simulated:"):
                    patched.setenv(name, text)
            set_before = dict(os.environ)
            with bounded(), refusing():
                safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
            assert_logged_safely(caplog)
            assert {name: os.environ.get(name) for name in set_before} == set_before
            for command in ("status", "status --json", "policy", "wait --timeout 0"):
                run(command, *ENDS, own=True)
        assert ground.claimed() == []

    attack()


ELSEWHERE = (
    "", "relative", "./state", "~", "\udcff", TRICK, "/dev/null", "/dev/null/state", "/dev/full", "/proc/self",
    "/proc/self/fd/0", "/sys/kernel", "/" + "x" * 300, "/dev/null/" + "y/" * 30_000,
)  # fmt: skip


@pytest.mark.parametrize("variable", PATHS)
def test_paths_that_name_anything(
    variable: str, open_tmp: Path, monkeypatch: pytest.MonkeyPatch, ground: Any, run: Any, caplog: Any
) -> None:
    """What lies there is not harmed, nothing is left outside, and a claim ends well or with an error of ours."""
    base = open_tmp / "base"
    base.mkdir()
    (empty := open_tmp / "empty").mkdir()
    (base / "file").write_text("kept")
    (base / "link").symlink_to(base / "file")
    (base / "loop").symlink_to(base / "loop")
    os.mkfifo(base / "pipe")
    monkeypatch.chdir(empty)
    below = VALUES.map(lambda text: f"{base}/{text.replace('..', '__')}")
    there = st.sampled_from([f"{base}{end}" for end in ("", "/file", "/link", "/loop", "/pipe", "/file/x", "//./x/..")])

    @with_examples(*(f"{base}/{name}" for name in ("x/" * 2000, "x" * 70_000, TRICK)))
    @examples(10)
    @given(there | below | st.sampled_from(ELSEWHERE))
    def attack(path: str) -> None:
        with monkeypatch.context() as patched:
            patched.setenv(variable, path)
            with bounded(), refusing():
                safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
            assert_logged_safely(caplog)
            for command in ("status", "status --json", "policy", "history", "doctor"):
                # Doctor shows a path with each of its findings.
                run(command, 1, *ENDS, own=True, plain=False, most=200_000)
        assert (base / "file").read_text() == "kept"
        assert os.listdir(empty) == []

    attack()
    assert ground.claimed() == []


COMMANDS = """
import sys
from safe_gpu.cli import main
for command in ("status", "status --json", "doctor", "policy", "history", "affinity"):
    assert main(command.split()) in (0, 1, 70, 73, 78), command
main(["run", "--", "true"])
"""


@pytest.mark.parametrize("codec", ["utf-8", "ascii", "latin-1"])
def test_bytes_that_are_no_text_in_a_terminal_of_any_codec(codec: str, tmp_path: Path) -> None:
    state = os.fsencode(tmp_path) + b"/caf\xe9\xff\x1b[2J\xe2\x80\xae"
    os.mkdir(state)
    environ = {
        b"SAFE_GPU_DIR": state,
        b"SAFE_GPU_SCOPE": b"\xff\x1b[2J",
        b"PBS_JOBID": b"1.\xff",
        b"SAFE_GPU_\xff": b"\xff",
    }
    python = {b"PYTHONPATH": os.fsencode(PACKAGE_ROOT), b"PYTHONIOENCODING": codec.encode()}
    command = [sys.executable, "-c", COMMANDS]
    done = subprocess.run(command, env={**os.environb, **environ, **python}, capture_output=True, timeout=100)
    out, err = done.stdout.decode(codec), done.stderr.decode(codec)
    assert "Traceback" not in err, err
    assert done.returncode in (0, 1, 70, 73, 78), err
    assert_shown_safely(out)
    assert_shown_safely(err)


# Grid Engine's files and its qstat

HOSTFILE = "gpu1.site.org 4 all.q@gpu1 <NULL>\ngpu2 2 all.q@gpu2 UNDEFINED\n"
ANSWER = Path(__file__).with_name("qstat.xml").read_text()
XML = (
    "<JB_hard_resource_list>", "</JB_hard_resource_list>", "<element>", "<!DOCTYPE x>", "&lol;", "<unknown_jobs>",
    "<AN_text>",
)  # fmt: skip


@with_examples(
    *((answer, HOSTFILE, "") for answer in (
        ANSWER, ANSWER.replace("2.000000", "nan"), ANSWER.replace("2.000000", "1e999"),
        ANSWER.replace("<qstat_l_requests>", "<x>" * 50_000), "<JB_hard_resource_list>" * 100_000,
    )),
    *((ANSWER, f"{os.uname().nodename} {number} q\n", "") for number in (DIGITS, "9" * 400, "\u0663")),
    (ANSWER, "", f"host_slots={DIGITS}"),
)  # fmt: skip
@examples(25)
@given(broken_text(ANSWER, XML), broken_text(HOSTFILE), broken_text("host_slots=4\n"))
def test_what_grid_engine_says(tmp_path_factory: Any, answer: str, hostfile: str, config: str) -> None:
    spool = tmp_path_factory.mktemp("spool")
    for name, text in (("hosts", hostfile), ("config", config)):
        (spool / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    answer = answer.encode("utf-8", "replace").decode()
    environ = {"PE_HOSTFILE": str(spool / "hosts"), "SGE_JOB_SPOOL_DIR": str(spool)}
    with bounded():
        slots = qstat.slots(environ)
        try:
            request = qstat.hard_request(answer, ["gpu"])
        except qstat.QstatError as err:
            assert_shown_safely(str(err), 1000)
            return
        number = None if request is None else qstat.here(request, slots)
    assert number is None or 0 <= number < 10**18


@pytest.mark.parametrize(
    "script",
    ["exec cat /dev/zero", "(sleep 600) &", "printf '\\033[2J\\n' >&2; exit 1", "echo '<AN_text>&#27;[2J</AN_text>'"],
)  # fmt: skip
def test_a_qstat_that_prints_without_end_or_hangs(script: str, tmp_path: Path) -> None:
    program = tmp_path / "qstat"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_ID": "4711", "SGE_TASK_ID": "undefined"}
    with bounded(20.0, 128), pytest.raises(qstat.QstatError) as caught:
        qstat.ask_qstat(environ, "4711", patience=1.0)
    assert_shown_safely(str(caught.value), 1000)
