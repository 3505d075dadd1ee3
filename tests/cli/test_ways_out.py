"""Ways out of errors, followed word by word: what the message says is done, and then it works."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import api

import safe_gpu

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose the directories above are to be")


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def typed(command: Any, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of shell, in which ``safe-gpu`` is this one."""
    path = f"{command.path.parent}:{os.environ['PATH']}"
    environ = {**os.environ, **variables, "PATH": path}
    return subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, timeout=60)


def test_an_environment_of_conda(command: Any) -> None:
    """A function of the shell that the user types in, which that of a script does not have."""
    functions = "conda() { export CONDA_DEFAULT_ENV=$2; }; "
    done = typed(command, f"{functions}safe-gpu run -q -- conda activate train")
    assert done.returncode == 127
    way_out = re.search(r"call it before, (.*) && safe-gpu run -- \.\.\.", done.stderr)
    assert way_out is not None, done.stderr
    done = typed(command, f"{functions}{way_out[1]} && safe-gpu run -q -- printenv CONDA_DEFAULT_ENV")
    assert (done.stdout, done.stderr) == ("train\n", "")


def test_what_is_part_of_the_shell(command: Any, tmp_path: Path) -> None:
    done = typed(command, f"safe-gpu run -q -- cd {tmp_path}")
    way_out = re.search(r"write (.*) &&", done.stderr)
    assert way_out is not None, done.stderr
    assert typed(command, f"{way_out[1]} && pwd'").stdout == f"{tmp_path}\n"


@pytest.mark.parametrize("value", ["", "99"])
def test_a_variable_that_hides_all_gpus(command: Any, value: str) -> None:
    done = typed(command, "safe-gpu run -- true", CUDA_VISIBLE_DEVICES=value)
    assert (done.returncode, done.stderr.endswith(": unset CUDA_VISIBLE_DEVICES\n")) == (78, True)
    assert typed(command, "unset CUDA_VISIBLE_DEVICES; safe-gpu run -q -- true").returncode == 0


def test_a_variable_that_hides_all_gpus_inside_a_claim(command: Any) -> None:
    inside = "safe-gpu run -q -- bash -c '{}safe-gpu run -q -- true'"
    done = typed(command, inside.format("export CUDA_VISIBLE_DEVICES=; "))
    assert (done.returncode, done.stderr.endswith(": unset CUDA_VISIBLE_DEVICES\n")) == (78, True)
    assert typed(command, inside.format("unset CUDA_VISIBLE_DEVICES; ")).returncode == 0


def test_no_way_leads_out_of_the_enclosing_claim(command: Any) -> None:
    """SAFE_GPU_FENCE=ignore gives no GPU of others to a claim inside a claim, so nothing advises it there."""
    with safe_gpu.GPUOwner(2, safe_gpu.NoPlaceholder(), delegate=True):
        inside = command.start("run", "-q", "-n", 2, "--", "sh", "-c", "echo ready; exec sleep 60")
        assert inside.stdout.readline() == "ready\n"
        told = command.run("run", "--timeout", 0, "--", "true").stderr
        assert "outside the claim of process" in told
        assert "SAFE_GPU_FENCE" not in told
        ignored = command.run("run", "--timeout", 0, "--", "true", env={"SAFE_GPU_FENCE": "ignore"})
        assert ignored.returncode == 75, "and it would not help"
        inside.kill()


@needs_root
def test_a_file_of_the_history_that_lost_its_mode(command: Any, dgx: Any) -> None:
    """Copied, or restored from a backup. It is not to be removed."""
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder()).release_gpus()
    (path,) = Path(dgx.state_dir, "history").glob("*.jsonl")
    path.chmod(0o644)
    done = command.run("history")
    way_out = f"ask its owner {api.procfs.user_name(os.geteuid())} to give it mode 0666 again (chmod 666), or root"
    assert way_out in done.stderr
    path.chmod(0o666)
    done = command.run("history")
    assert (done.stdout.count("\n"), done.stderr) == (2, "")
    os.link(path, path.with_name("another"))  # it may be a name of any file then
    path.chmod(0o644)
    assert "chmod" not in command.run("history").stderr


def test_a_client_of_containers_behind_sudo(command: Any, tmp_path: Path, dgx: Any) -> None:
    """The way out goes by sudo too: without it the user may not start containers."""
    program(tmp_path / "sudo", 'test "$1" = -n && shift && SUDO=yes exec "$@"')
    program(tmp_path / "docker", 'test "$SUDO" = yes && shift 4 && exec "$@"')  # run -v A:B IMAGE ...
    path = f"PATH={tmp_path}:$PATH; "
    done = typed(command, f"{path}safe-gpu run -q -- sudo -n docker run -d IMAGE ./train")
    way_out = re.search("mounted: (sudo -n docker run .*) CMD", done.stderr)
    assert way_out is not None, done.stderr
    line = way_out[1].replace(" ... ", " ").replace("run -q -d", "run -q")
    done = typed(command, f"{path}{line} printenv CUDA_VISIBLE_DEVICES")
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert shlex.split(line)[:5] == ["sudo", "-n", "docker", "run", "-v"]


def test_a_file_of_settings_that_others_may_write(command: Any, tmp_path: Path) -> None:
    """Where ``--all-hosts`` finds the hosts."""
    path = tmp_path / ".config/safe-gpu/config.ini"
    path.parent.mkdir(parents=True)
    path.write_text("[host]\nhosts = localhost\n")
    path.chmod(0o666)
    line = "safe-gpu status --all-hosts --json"
    done = typed(command, line, HOME=str(tmp_path), SAFE_GPU_HOSTS="")
    way_out = re.search(r": (chmod 644 \S+)$", done.stderr.strip())
    assert way_out is not None, done
    typed(command, way_out[1])
    program(tmp_path / "ssh", "exit 255")
    done = typed(command, f"PATH={tmp_path}:$PATH; {line}", HOME=str(tmp_path), SAFE_GPU_HOSTS="")
    assert "chmod" not in done.stderr
    assert "localhost" in done.stdout + done.stderr
