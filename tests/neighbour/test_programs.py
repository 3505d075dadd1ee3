"""Root with a user's environment runs no program that the user chose, and is told what to do instead."""

import ast
import os
import re
import selectors
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.cli import hosts
from safe_gpu.errors import PolicyError
from safe_gpu.host import programs
from safe_gpu.settings.config import host_values
from safe_gpu.settings.variables import known_hosts

NEIGHBOUR = 4711

pytestmark = pytest.mark.skipif(not programs.is_root(), reason="needs root, to be the victim")

CODE = """
import os
from safe_gpu import SafeGpuError, wrap_command
from safe_gpu.cli.hosts import ask, ssh_to
from safe_gpu.drivers import open_driver
from safe_gpu.schedulers.gpu_count import number_for_job
try:
    print({})
except (SafeGpuError, OSError) as err:
    print(err)
"""
STATUS = CODE.format("open_driver().snapshot()")
NUMBER = CODE.format("number_for_job(os.environ)")
WRAP = CODE.format("wrap_command(['train'], gpu=0, mode=None, memory='preferred', check=True)")
JOB = {"SGE_TASK_ID": "undefined", "JOB_ID": "1234", "SGE_ROOT": "", "SGE_ARCH": "", "SGE_BINARY_PATH": ""}


def write(program: Path, script: str) -> None:
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("name", "code", "variable", "environment"),
    [
        ("nvidia-smi", STATUS, "PATH", {"SAFE_GPU_DRIVER": "nvidia-smi"}),
        ("qstat", NUMBER, "PATH", JOB),
        ("qstat", NUMBER, "SGE_BINARY_PATH", JOB),
        ("bin/qstat", NUMBER, "SGE_ROOT", JOB),
        ("numactl", WRAP, "PATH", {}),
        ("true", WRAP, "PATH", {}),
        ("timeout", CODE.format("ask(['/bin/true']).err"), "PATH", {}),
        ("ssh", CODE.format("ask(ssh_to('gpu1', 'true')).err"), "PATH", {}),
    ],
)
def test_root_runs_no_program_of_a_neighbour(
    open_tmp: Path, state_dir: Path, child: Any, name: str, code: str, variable: str, environment: dict[str, str]
) -> None:
    place, mark = open_tmp / "his", open_tmp / "mark"
    program = place / name
    write(program, f": > {mark}")
    os.chown(place, NEIGHBOUR, NEIGHBOUR)
    write(open_tmp / "roots" / "numactl" if name == "true" else open_tmp / "roots" / "other", 'shift; exec "$@"')
    environment = {"SAFE_GPU_DRIVER": "simulated:dgx-a100", **environment, "PATH": str(open_tmp / "roots")}
    environment[variable] = f"{place}:{environment['PATH']}" if variable == "PATH" else str(place)
    said = child(code, env=environment).finish()
    assert not mark.exists()
    assert (
        f"{program} is not run as root, because other users can change {place}: put a {program.name} that only root "
        "can change on PATH"
    ) in said


@pytest.mark.parametrize(
    ("how", "part"),
    [
        ("chown 4711 bin", "bin"),
        ("chown 4711 bin/nvidia-smi", "bin/nvidia-smi"),
        ("chmod 757 bin", "bin"),
        ("chgrp 4711 bin; chmod 775 bin", "bin"),
        ("chmod 775 bin", "bin"),  # root's group
        ("setfacl -m u:4711:rwx bin", "bin"),
        ("mv bin roots; ln -s roots bin; chown -h 4711 bin", "bin"),  # his link, to a place of root's until root looks
        ("mv bin roots; ln -s roots his; chown -h 4711 his; ln -s his bin", "his"),
    ],
)
def test_a_place_that_others_can_change(open_tmp: Path, how: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_tmp / "bin"
    write(place / "nvidia-smi", "")
    write(open_tmp / "sure" / "nvidia-smi", "")
    environment = {"PATH": str(place)}
    assert programs.find_program("nvidia-smi", environment) == str(place / "nvidia-smi")
    if subprocess.run(how, shell=True, cwd=open_tmp).returncode:
        assert "setfacl" in how
        pytest.skip("needs setfacl, of the package acl, and a file system with ACLs")
    assert programs.others_can_change(str(place / "nvidia-smi")) == str(open_tmp / part)
    with pytest.raises(PermissionError, match=f"can change {'it' if '/' in part else open_tmp / part}: "):
        programs.find_program("nvidia-smi", environment)
    sure = str(open_tmp / "sure")
    assert programs.find_program("nvidia-smi", {"PATH": f"{place}:{sure}"}) == f"{sure}/nvidia-smi"
    assert programs.find_program("nvidia-smi", environment, sure) == f"{sure}/nvidia-smi"
    assert programs.find_program("nvidia-smi", {"PATH": "/nowhere"}) is None
    monkeypatch.setattr(programs, "is_root", lambda: False)
    assert programs.find_program("nvidia-smi", environment) == str(place / "nvidia-smi")


@pytest.mark.parametrize(("mode", "sure"), [(0o755, True), (0o777, False), (0o1777, True), (0o1775, True)])
def test_a_sticky_directory_keeps_what_is_roots(open_tmp: Path, mode: int, sure: bool) -> None:
    (open_tmp / "x").mkdir()
    (open_tmp / "x").chmod(mode)
    (open_tmp / "link").symlink_to(open_tmp / "x")
    for name in ("x", "link", "x/../link"):
        assert programs.others_can_change(str(open_tmp / name)) == (None if sure else str(open_tmp / "x"))
        within = None if mode == 0o755 else str(open_tmp / "x")
        assert programs.others_can_change(str(open_tmp / name), within=True) == within, "others may make files there"


@pytest.mark.parametrize(
    "path", ["bin", "", ".", "/proc/self/root/bin", "{tmp}/later", "{tmp}/later/../x", "{tmp}/loop"]
)
def test_paths_that_may_become_others(open_tmp: Path, path: str) -> None:
    """By another current directory, in another mount namespace, or since anybody can make what is not there yet."""
    (open_tmp / "loop").symlink_to("loop")
    assert programs.others_can_change(path.format(tmp=open_tmp)) is not None
    assert programs.others_can_change("/usr/no such directory/bin") is None


def test_what_a_program_gets_of_the_environment(open_tmp: Path) -> None:
    """A program of root's loads libraries, and a script runs other programs, by variables."""
    his = open_tmp / "his"
    his.mkdir()
    (open_tmp / "roots").mkdir()
    os.chown(his, NEIGHBOUR, NEIGHBOUR)
    environment = {
        "PATH": f"{his}:/usr/bin:.:{open_tmp}:/bin",
        "LD_LIBRARY_PATH": f"$ORIGIN/{his}:/usr/lib;{his}::{open_tmp}",
        "LD_AUDIT": f"{his}/audit.so",
        "BASH_ENV": f"{his}/bash",
        "PYTHONPATH": str(his),
        "GLIBC_TUNABLES": "glibc.malloc.check=3",
        "CUDA_INJECTION64_PATH": f"{his}/injected.so",
        "SLURM_CONF_SERVER": "his.example.org",
        "LC_CTYPE": f"../../..{his}",
    }
    kept = {"JOB_ID": "4711", "SGE_CELL": "default", "SGE_QMASTER_PORT": "6444", "LC_ALL": "C"}
    kept |= {"HOME": "/root", "SGE_ROOT": "/opt/no such", "SLURM_CONF": "/etc/slurm.conf", "TZ": "Europe/Prague"}
    his_paths = {"HOME": str(his), "SGE_ROOT": str(his), "SLURM_CONF": f"{his}/conf", "TZ": f"../../..{his}/zone"}
    sure = {f"{name}={value}" for name, value in kept.items()}
    for asked, got in (
        ({**environment, **kept}, {"PATH=/usr/bin:/bin", "LD_LIBRARY_PATH=/usr/lib", *sure}),
        ({"LD_LIBRARY_PATH": str(his), "PATH": str(his), **his_paths}, set()),
        ({"HOME": ".", "SGE_ROOT": "sge", "TZ": f":{his}/zone"}, set()),
        ({"SGE_CELL": "..", "SGE_ROOT": f"{open_tmp}/roots", "SLURM_CONF": f"{open_tmp}/roots"}, {"SGE_CELL=.."}),
    ):
        code, text, _ = programs.output_of(["/usr/bin/env"], env=asked, timeout=60, most=1 << 16)
        assert (code, set(text.splitlines())) == (0, got)


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("exec yes", 255, "it prints without end"),
        ("yes | tr y '\\000'", 255, "it prints without end"),
        ("sleep 600 & exec sleep 600", 124, "did not answer within 0.5 s"),
        ("sleep 600 >/dev/null & echo {}; exit 3", 3, "ends with exit code 3"),
        ("cat >&2; exit 4", 4, "ends with exit code 4"),
    ],
)
def test_an_answer_of_another_host_is_bounded(
    open_tmp: Path, script: str, code: int, told: str, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    """Of bytes and of time, whatever runs there; what is left behind is not waited for, and nothing can be asked."""
    write(open_tmp / "ssh", f"echo $$ > {open_tmp}/pid; {script}")
    monkeypatch.setattr(hosts, "SECONDS", 0.5 if code == 124 else 60.0)
    said = hosts.ask([str(open_tmp / "ssh")])
    assert (said.code, told in hosts.read_answer(said).error) == (code, True)
    assert len(said.out) + len(said.err) < 1 << 10
    group = int((open_tmp / "pid").read_text())

    def has_ended() -> bool:
        with suppress(ProcessLookupError):
            os.killpg(group, 0)
            return False
        return True

    eventually(has_ended)


SECRET = "hunter2"


@pytest.mark.parametrize("text", [SECRET, f"[host]\n{SECRET} = 1", f"[host]\nhosts = -{SECRET}"])
@pytest.mark.parametrize("mode", [0o600, 0o644])
@pytest.mark.parametrize("how", ["link", "link above", "hard link"])
def test_root_shows_no_line_of_a_file_that_a_neighbour_chose(
    open_tmp: Path, how: str, mode: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sudo may keep HOME."""
    secret, file = open_tmp / "roots" / "config.ini", open_tmp / "his" / ".config" / "safe-gpu" / "config.ini"
    secret.parent.mkdir(mode=0o700)
    secret.write_text(text)
    secret.chmod(mode)
    if how == "link above":
        file.parents[1].mkdir(parents=True)
        file.parent.symlink_to(secret.parent)
    else:
        file.parent.mkdir(parents=True)
        {"link": os.symlink, "hard link": os.link}[how](secret, file)
    for path in file.parents[:3]:
        os.chown(path, NEIGHBOUR, NEIGHBOUR, follow_symlinks=False)
    with pytest.raises(PolicyError) as refused:
        known_hosts({"HOME": str(open_tmp / "his"), "SAFE_GPU_DRIVER": "simulated:laptop"})
    assert SECRET not in f"{refused.value} {refused.value.__cause__}"
    assert str(file) in str(refused.value)


def test_nor_of_one_that_a_variable_names(open_tmp: Path) -> None:
    secret = open_tmp / "shadow"
    secret.write_text(SECRET)
    for mode in (0o640, 0o644):
        secret.chmod(mode)
        with pytest.raises(PolicyError) as refused:
            host_values(str(secret))
        assert (SECRET in str(refused.value)) == (mode == 0o644)


def starts(source: str) -> set[str]:
    """What a module starts programs by."""
    names = {*"subprocess Popen system popen posix_spawn posix_spawnp execvp execvpe execlp pty".split()}
    kinds = (ast.Import, ast.ImportFrom, ast.Attribute, ast.Name)
    found = " ".join(ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return names & {*re.findall(r"\w+", found)}


def test_one_runner_starts_all_programs() -> None:
    """But for the commands of users, and ssh with the terminal of one."""
    root = Path(safe_gpu.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if starts(path.read_text())}
    assert found == {"host/programs.py", "cli/hosts.py"}
    assert starts("import subprocess as s") == starts("from subprocess import run") == {"subprocess"}
    assert starts("os.system('x')") == {"system"}


def test_what_a_program_prints_at_its_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may print and end between a look at its output and one at itself."""
    select, calls, go = selectors.DefaultSelector.select, [], tmp_path / "go"

    def late(selector: selectors.DefaultSelector, timeout: float | None = None) -> Any:
        calls.append(timeout)
        if len(calls) > 1:
            return select(selector, timeout)
        go.touch()
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", late)
    waits = f"until [ -e {go} ]; do sleep 0.01; done; echo answer"
    assert programs.output_of(["/bin/sh", "-c", waits], env={}, timeout=60, most=99)[:2] == (0, "answer\n")
