"""Fixes of ``doctor``, followed word by word: then the check passes."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.findings import UUIDS, environment, finding

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")

SCOPE = "0123456789abcdef"


def followed(fix: str, variables: dict[str, str]) -> dict[str, str]:
    """The variables when the user has done what a fix says of them first."""
    kept = dict(variables)
    unset = re.match(r"unset (\w+)", fix)
    if unset is not None:
        del kept[unset[1]]
    kept.update(re.findall(r"\bset (\w+)=(\S+?)(?:[,;]? |$)", fix))
    assert kept != variables, f"nothing to do: {fix}"
    return kept


@pytest.mark.parametrize(
    ("check", "variables"),
    [
        ("SAFE_GPU variables", {"safe_gpu_dirr": "/x"}),
        ("SAFE_GPU variables", {"SAFE_GPU_DIRR": "/x"}),
        ("policy file", {"SAFE_GPU_POLICY": "/nowhere/config.ini"}),
        ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": ""}),
        ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "", "SAFE_GPU_SCOPE": SCOPE}),
        ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "99"}),
        ("CUDA_VISIBLE_DEVICES", {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ],
)
def test_variables(check: str, variables: dict[str, str]) -> None:
    found = finding(check, environment(**variables))
    assert found.status in ("warning", "failed")
    status = finding(check, environment(**followed(found.fix, variables))).status
    assert status in ("passed", "skipped"), found.fix


def test_numbers_that_mean_other_gpus_to_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:workstation-mixed")
    variables = {"CUDA_VISIBLE_DEVICES": "1"}
    fix = finding("CUDA_VISIBLE_DEVICES", environment(**variables)).fix
    found = finding("CUDA_VISIBLE_DEVICES", environment(**followed(fix, variables)))
    assert "limits claims to 1 of " in found.detail


@pytest.mark.parametrize(
    ("host", "check"), [({"compute_error": 3}, "process lists"), ({"used": 600 << 20}, "process lists")]
)
def test_gpus_that_cannot_be_watched(fake_gpus: Any, host: dict[str, int], check: str, monkeypatch: Any) -> None:
    """The fix names a variable."""
    fake_gpus.change(2, **host)
    fake_gpus.use_nvml_here()
    fix = finding(check).fix
    variables = {"SAFE_GPU_UNEXPLAINED_MEMORY": "1GiB"}
    if "SAFE_GPU_PROCESS_LIST=optional" in fix:
        variables = {"SAFE_GPU_PROCESS_LIST": "optional"}
    assert all(name in fix for name in variables)
    assert finding(check, environment(**variables)).status != "failed"


@pytest.mark.parametrize("remover", ["", "claims"])
@as_root
def test_setup_takes_a_directory_back(open_tmp: Path, remover: str, run_here: Any, monkeypatch: Any) -> None:
    path = open_tmp / "state"
    monkeypatch.setattr(api.cli_setup, "RULE", str(open_tmp / "rule.conf"))
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    api.setup.make(str(path))
    os.chown(path / remover, 54321, 54321)
    words = shlex.split(finding("state directory").fix.removeprefix("as root: "))
    assert words[:2] == ["safe-gpu", "setup"]
    done = run_here(*words[1:])
    move = re.search(r"move this one away \((.*)\) and run (.*) again", done.stderr)
    assert move is not None, done.stderr
    subprocess.run(move[1], shell=True, check=True, timeout=60)
    assert shlex.split(move[2]) == words
    assert run_here(*words[1:]).returncode in (0, 1)  # 1: the line for root's file is left to do
    assert finding("state directory").status == "passed"


def resumed(command: Any, fix: str) -> None:
    """Run the commands of a fix."""
    for line in re.findall("safe-gpu resume[^,;]*", fix):
        done = command.run(*shlex.split(line)[1:])
        assert done.returncode == 0, done.stderr


@as_root
def test_drained_gpus_are_resumed(state_dir: Path, run_here: Any, command: Any) -> None:
    assert run_here("drain", "3", "--reason", "a fan").returncode == 0
    user = api.procfs.user_name(os.geteuid())
    fix = finding("GPUs in service").fix
    assert fix == f"as {user}: safe-gpu resume 3, when they may be claimed again"
    resumed(command, fix)
    assert finding("GPUs in service").status == "passed"


@as_root
def test_reserved_gpus_are_given_free(state_dir: Path, run_here: Any, command: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(api.closed.programs, "is_root", lambda: False)  # whom no reservation binds
    assert run_here("drain", "3", "--until", "23:59", "--for-user", "nobody", "--reason", "course").returncode == 0
    found = finding("GPUs in service")
    assert found.fix == "safe-gpu resume 3 says how the reservation is cancelled"
    way_out = re.search("to cancel that: safe-gpu (.*)\\)", run_here("resume", "3").stderr)
    assert way_out is not None
    assert command.run(*shlex.split(way_out[1])).returncode == 0
    assert finding("GPUs in service").status == "passed"


@as_root
def test_who_drained_is_who_resumes(open_tmp: Path, as_user: Any, monkeypatch: Any) -> None:
    """The owner of the state directory. What root resumes is what root has drained."""
    monkeypatch.setenv("SAFE_GPU_DIR", str(open_tmp / "state"))
    api.setup.make(str(open_tmp / "state"))
    os.chown(open_tmp / "state", 4711, 4711)

    def work(say: Any, listen: Any) -> None:
        say(api.main(["drain", "3"]))
        listen()
        say(api.main(["resume", "3"]))

    owner = as_user(work, uid=4711)
    assert owner.hear() == "0"
    fix = finding("GPUs in service").fix
    assert fix == "as 4711: safe-gpu resume 3, when they may be claimed again"
    owner.tell("follow it")
    assert owner.hear() == "0"
    assert finding("GPUs in service").status == "passed"


@as_root
def test_lines_that_no_command_takes_out(state_dir: Path) -> None:
    api.setup.make(str(state_dir))
    (state_dir / "closed").write_text(f"{UUIDS[3]} - - - a fan\nGPU-gone;x - - - \n")
    fix = finding("GPUs in service").fix
    assert fix == f"as root: take 2 lines of GPUs that resume does not know out of {state_dir}/closed"
    (state_dir / "closed").unlink()
    assert finding("GPUs in service").status == "passed"


def test_entries_that_are_ignored_are_removed(state_dir: Path) -> None:
    api.setup.make(str(state_dir))
    (state_dir / "queue" / f"7.{'a' * 16}").symlink_to("/etc/passwd")
    detail = finding("entries").detail
    os.unlink(detail.partition(" of ")[0])
    assert finding("entries").status == "passed"


@as_root
def test_a_policy_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "policy.ini"
    path.write_text("[default]\nmax_gpus = 2\n")
    path.chmod(0o666)
    host = environment(SAFE_GPU_POLICY=str(path))
    fix = finding("policy file", host).fix
    assert fix == f"as root: replace {path} by a file of root's with mode 644"
    subprocess.run(["install", "-m", "644", "/dev/stdin", path], input=b"[default]\nmax_gpus = 2\n", check=True)
    assert finding("policy file", host).status == "passed"


@pytest.mark.parametrize("fault", ["mkdir leases", "chmod 600 host.lock", "rm -r history && ln -s /tmp history"])
def test_what_stands_in_the_way_is_removed(state_dir: Path, fault: str) -> None:
    api.setup.make(str(state_dir))
    subprocess.run(fault, shell=True, check=True, cwd=state_dir, timeout=60)
    found = finding("state directory")
    assert "remove" in found.detail + found.fix or "set SAFE_GPU_DIR, for all users, to" in found.fix
    subprocess.run("rm -rf leases host.lock history", shell=True, check=True, cwd=state_dir, timeout=60)
    assert finding("state directory").status == "passed"


def test_a_driver_that_is_loaded_is_not_to_be_installed(
    fake_gpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container that lost its devices NVML fails so, and the way out is in the message."""
    fake_gpus.options(init_error=999)
    fake_gpus.use_nvml_here()
    assert finding("GPU driver").fix.startswith("install the NVIDIA driver")
    (tmp_path / "root/proc/driver/nvidia/version").mkdir(parents=True)
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path / "root"))
    found = finding("GPU driver")
    assert "in a container that lost its access to /dev/nvidia0 restart it" in found.detail
    assert found.fix == "do what the message says, and check again"
