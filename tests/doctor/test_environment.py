"""``doctor`` on its own process: packages, variables, limits."""

import os
import subprocess
from pathlib import Path

import pytest
from support.findings import environment, says

VARIABLES, VISIBLE = "SAFE_GPU variables", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("check", "variables", "status", "words"),
    [
        (VARIABLES, {}, "passed", "none"),
        (VARIABLES, {"SAFE_GPU_TIMEOUT": "15m", "SAFE_GPU_NB_GPUS": "2", "SAFE_GPU_FENCE": "ignore"}, "passed", "15m"),
        (VARIABLES, {"safe_gpu_dirr": "/x"}, "warning", "safe_gpu_dirr"),
        (VARIABLES, {"SAFE_GPU_TIMEOUT": "soon"}, "failed", "soon"),
        (VARIABLES, {"SAFE_GPU_UNEXPLAINED_MEMORY": "much"}, "failed", "much"),
        (VARIABLES, {"SAFE_GPU_NB_GPUS": "-1"}, "failed", "'-1'"),
        (VARIABLES, {"SAFE_GPU_FENCE": "yes"}, "failed", "ignore"),
        (VISIBLE, {}, "passed", "not set"),
        (VISIBLE, {VISIBLE: "0,1,2,3,4,5,6,7"}, "passed", "all GPUs"),
        (VISIBLE, {VISIBLE: "0"}, "warning", "limits claims to 1 of 8"),
        (VISIBLE, {VISIBLE: "0", "SAFE_GPU_FENCE": "ignore"}, "passed", "is ignored"),
        (VISIBLE, {VISIBLE: "0", "SLURM_JOB_ID": "7"}, "passed", "as the job's share"),
        (VISIBLE, {VISIBLE: ""}, "failed", "CUDA shows no GPU"),
        (VISIBLE, {VISIBLE: "1,1"}, "failed", "CUDA reads '1,1' as no GPU"),
        (VISIBLE, {VISIBLE: "1,99,2"}, "warning", "CUDA reads '1,99,2' as GPU 1"),
        (VISIBLE, {VISIBLE: "0 1"}, "warning", "CUDA reads '0 1' as GPU 0"),
        (VISIBLE, {VISIBLE: "cuda:0"}, "failed", "CUDA reads 'cuda:0' as no GPU"),
        (VISIBLE, {VISIBLE: "0,1,"}, "warning", "limits claims to 2 of 8"),
        ("batch job", {}, "passed", "not in a batch job"),
        ("batch job", {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "passed", "rank 1 of 4"),
        ("batch job", {"JOB_ID": "12", "SGE_TASK_ID": "3", "SGE_ROOT": "/x"}, "passed", "sge:12.3"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}, "passed", "2 GPUs asked for"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "3"}, "passed", ""),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, "warning", "0,1"),
    ],
)
def test_variables(check: str, variables: dict[str, str], status: str, words: str) -> None:
    says(check, status, words, environment(**variables))


def test_a_state_directory_that_is_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DIR", "state")
    says("state directory", "failed", "relative")


@pytest.mark.parametrize(("value", "status"), [("10000", "failed"), ("1,99", "warning")])
def test_the_list_of_a_scheduler_is_not_ignored(value: str, status: str) -> None:
    says(VISIBLE, status, fix="ask the scheduler", host=environment(**{VISIBLE: value, "SLURM_JOB_ID": "7"}))


def test_numbers_that_mean_other_gpus_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:workstation-mixed")
    says(VISIBLE, "warning", "ambiguous", environment(CUDA_VISIBLE_DEVICES="1"), "PCI_BUS_ID")


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")


@as_root
@pytest.mark.parametrize(
    ("prepare", "status", "words", "fix"),
    [
        ("printf '[default]\nmax_gpus = 4\n[user anna]\nmax_gpus = 1' > $P", "passed", "2 sections", ""),
        ("printf '[default]\nmax_gpus = many' > $P", "failed", ":2: max_gpus = many is not a number", "message says"),
        ("echo '[default]' > $P; chmod 666 $P", "warning", "mode 0666): it is ignored", "as root"),
        ("echo '[default]' > $P; chown 54321 $P", "warning", "not to root", "as root"),
        ("ln -s /etc/passwd $P", "warning", "is a link", "as root"),
        ("true", "warning", "does not exist", "unset SAFE_GPU_POLICY"),
    ],
)
def test_a_policy(tmp_path: Path, prepare: str, status: str, words: str, fix: str) -> None:
    path = str(tmp_path / "policy.ini")
    subprocess.run(f"umask 022; {prepare}", shell=True, check=True, env={**os.environ, "P": path}, timeout=60)
    says("policy file", status, words, environment(SAFE_GPU_POLICY=path), fix)


def test_a_host_without_a_policy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("safe_gpu.settings.variables.HOST_FILES", (str(tmp_path / "config.ini"),))
    says("policy file", "skipped", host=environment())
