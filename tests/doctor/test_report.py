"""``doctor`` as a whole, which changes nothing and says first what is wrong; packages, variables and limits; and hosts
of other vendors."""

import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.findings import environment, says
from support.vendor_hosts import KfdHost

import safe_gpu
from safe_gpu import doctor
from safe_gpu.cli.commands import main
from safe_gpu.doctor import Check, CheckedHost
from safe_gpu.wording.text import display_width


def check_document(document: dict[str, Any]) -> None:
    assert list(document) == ["host", "checks"]
    assert document["host"] == socket.gethostname()
    for one in document["checks"]:
        assert list(one) == ["name", "status", "detail", "fix"]
        assert all(isinstance(text, str) for text in one.values())
        assert "" not in (one["name"], one["detail"])
        assert one["status"] in ("passed", "warning", "failed", "skipped")


def test_a_host_without_faults_passes_and_stays_as_it_was(state_dir: Path) -> None:
    checks = doctor.run_checks()
    assert [one.name for one in checks] == list(doctor.CHECKS)
    # A container may well be the place where the tests run.
    certain = [one for one in checks if one.name not in ("visible processes", "Python packages")]
    assert [one for one in certain if one.status in ("failed", "warning")] == []
    assert (doctor.exit_code(certain), state_dir.exists()) == (0, False)
    check_document(json.loads(json.dumps(doctor.to_dict(checks))))


def test_a_check_that_breaks_is_failed_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(host: CheckedHost) -> Check:
        raise ZeroDivisionError("a strange host")

    monkeypatch.setattr(doctor, "CHECKS", {"first": broken, "batch job": doctor.CHECKS["batch job"]})
    first, second = doctor.run_checks()
    assert (first.status, second.status) == ("failed", "passed")
    assert "ZeroDivisionError: a strange host" in first.detail
    assert (doctor.exit_code([first, second]), doctor.exit_code([second])) == (1, 0)


FOUND = [
    Check("passed", "not running", name="process lists"),
    Check("skipped", "there is none", name="policy file"),
    Check("warning", "host.lock was held by others for 3.0 s", "look for a process " + "x" * 130, "file locks"),
    Check("failed", "it does not answer " * 9, "restart the driver", "GPU driver"),
    Check("warning", "belongs to no living claim", "unset it", "batch job"),
]


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("color", [False, True])
def test_the_report_says_first_what_is_wrong(width: int, color: bool) -> None:
    text = doctor.render_checks(FOUND, color=color, width=width)
    assert ("\x1b[31mfailed\x1b[0m" in text, "\x1b[33mwarning\x1b[0m" in text) == (color, color)
    lines = re.sub(r"\x1b\[[0-9]+m", "", text).splitlines()
    assert [line.split(": ")[0] for line in lines if line[:1].strip()] == [
        "failed   GPU driver", "warning  file locks", "warning  batch job", lines[-1],
    ]  # fmt: skip
    assert sum(line.startswith(" " * 9 + "fix: ") for line in lines) == 3
    assert lines[-1] == "1 passed, 1 skipped, 1 failed, 2 warnings (-v lists all)"
    (long,) = [line for line in lines if display_width(line) > width and line != lines[-1]]
    assert long.strip() == "x" * 130, "what is to be copied is whole"


def test_the_report_of_all_checks() -> None:
    lines = doctor.render_checks(FOUND, color=False, width=80, verbose=True).splitlines()
    assert lines[-4:-2] == ["passed   process lists: not running", "skipped  policy file: there is none"]
    assert lines[-1] == "1 passed, 1 skipped, 1 failed, 2 warnings"
    assert doctor.render_checks(FOUND[:1], color=False, width=80) == "1 passed (-v lists all)"


def test_from_the_command_line(state_dir: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    main(["doctor"])
    assert "GPU driver" not in capsys.readouterr().out
    main(["doctor", "-v"])
    assert "passed   GPU driver: simulated:dgx-a100 " in capsys.readouterr().out
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    monkeypatch.setenv("PATH", str(state_dir))
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("failed   GPU driver: ")
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    check_document(document)
    statuses = {one["name"]: one["status"] for one in document["checks"]}
    assert (statuses["GPU driver"], statuses["access to GPUs"]) == ("failed", "skipped")


# Its own process: packages, variables, limits


VARIABLES, VISIBLE = "SAFE_GPU variables", "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("check", "variables", "status", "words"),
    [
        (VARIABLES, {}, "passed", "none"),
        (VARIABLES, {"SAFE_GPU_TIMEOUT": "15m", "SAFE_GPU_NB_GPUS": "2", "SAFE_GPU_FENCE": "ignore"}, "passed", "15m"),
        (VARIABLES, {"safe_gpu_dirr": "/x"}, "warning", "safe_gpu_dirr"),
        (VARIABLES, {"SAFE_GPU_TIMEOUT": "soon"}, "failed", "soon"),
        (VARIABLES, {"SAFE_GPU_UNEXPLAINED_MEMORY": "much"}, "failed", "much"),
        (VARIABLES, {"SAFE_GPU_FENCE": "yes"}, "failed", "ignore"),
        (VISIBLE, {}, "passed", "not set"),
        (VISIBLE, {VISIBLE: "0,1,2,3,4,5,6,7"}, "passed", "all GPUs"),
        (VISIBLE, {VISIBLE: "0"}, "warning", "limits claims to 1 of 8"),
        (VISIBLE, {VISIBLE: "0", "SAFE_GPU_FENCE": "ignore"}, "passed", "is ignored"),
        (VISIBLE, {VISIBLE: "0", "SLURM_JOB_ID": "7"}, "passed", "as the job's share"),
        (VISIBLE, {VISIBLE: ""}, "failed", "CUDA shows no GPU"),
        (VISIBLE, {VISIBLE: "1,1"}, "failed", "CUDA reads '1,1' as no GPU"),
        (VISIBLE, {VISIBLE: "1,99,2"}, "warning", "CUDA reads '1,99,2' as GPU 1"),
        (VISIBLE, {VISIBLE: "0,1,"}, "warning", "limits claims to 2 of 8"),
        ("batch job", {}, "passed", "not in a batch job"),
        ("batch job", {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "passed", "rank 1 of 4"),
        ("batch job", {"JOB_ID": "12", "SGE_TASK_ID": "3", "SGE_ROOT": "/x"}, "passed", "sge:12.3"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}, "passed", "2 GPUs asked for"),
        ("batch job", {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "0,1"}, "warning", "0,1"),
    ],
)
def test_variables(check: str, variables: dict[str, str], status: str, words: str) -> None:
    says(check, status, words, environment(**variables))


def test_the_list_of_a_scheduler_is_not_ignored() -> None:
    for value, status in (("10000", "failed"), ("1,99", "warning")):
        says(VISIBLE, status, fix="ask the scheduler", host=environment(**{VISIBLE: value, "SLURM_JOB_ID": "7"}))


def test_numbers_that_mean_other_gpus_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:workstation-mixed")
    says(VISIBLE, "warning", "ambiguous", environment(CUDA_VISIBLE_DEVICES="1"), "PCI_BUS_ID")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")
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


# Hosts with AMD GPUs, and with GPUs of both vendors


def found() -> dict[str, Check]:
    """Name of a check -> its finding."""
    return {one.name: one for one in doctor.run_checks()}


def test_rows_on_a_simulated_amd_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi300x-cpx")
    checks = found()
    assert not checks.keys() & {"CUDA", "CUDA_VISIBLE_DEVICES"}
    assert checks["ROCR_VISIBLE_DEVICES"].status == "passed"
    assert not re.search("nvidia-smi|Xid|NVML|CUDA can", str(checks))
    assert checks["HIP"].detail == "safe_gpu does not ask HIP about these GPUs"


def test_a_tree_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    KfdHost(tmp_path)
    monkeypatch.setenv("SAFE_GPU_DRIVER", "kfd")
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    says("GPU driver", "failed", fix="--device /dev/kfd")


def test_the_other_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:two-vendors")
    with safe_gpu.GPUOwner(1, vendor="amd", timeout=0, affinity=None, delegate=True):
        assert "HIP" in found(), "a claim inside a claim of AMD GPUs gets those"
    assert "CUDA" in found()
