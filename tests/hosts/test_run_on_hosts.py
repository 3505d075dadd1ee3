"""``safe-gpu run --host``: one host claims, whatever becomes of the connections.

Some tests have real sshds; others an ssh that runs its script here, as the host that it is to reach.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import free_port, program
from support.terminals import Terminal

from safe_gpu.host.procfs import user_name

USER = user_name(os.geteuid())
LAPTOP = {"SAFE_GPU_DRIVER": "simulated:laptop"}  # one GPU


@pytest.fixture
def free(hosts: Any, command: Any) -> Callable[[str], int]:
    """How many GPUs of a host are free, by its own status."""

    def count(name: str, **env: str) -> int:
        gpus = json.loads(command.run("status", "--json", env={**hosts.environment(name), **env}).stdout)["gpus"]
        return sum(gpu["state"] in ("free", "display") for gpu in gpus)

    return count


def test_the_one_with_the_most_free_gpus_in_this_directory(
    hosts: Any, command: Any, free: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.up("gpu1", env=LAPTOP)
    hosts.up("gpu2")
    odd = tmp_path / "it's a !\n\\place"
    odd.mkdir()
    monkeypatch.setenv("PWD", "/elsewhere")
    script = 'printf "%s|" "$PWD" "$1" "$CUDA_VISIBLE_DEVICES" "$(cat)" "$SAFE_GPU_DIR"'
    script += "; echo bad >&2; exit 7"
    words = ("run", "--host", "gpu1,gpu2", "--", "sh", "-c", script, "sh", "a  'b'\n!")
    given = tmp_path / "stdin"
    given.write_text("stdin")
    with given.open() as stdin:
        done = command.run(*words, cwd=odd, stdin=stdin)
    printed = f"{odd}|a  'b'\n!|0|stdin|{hosts.directory}/gpu2|"
    assert (done.returncode, done.stdout, done.stderr) == (7, printed, "bad\n")
    assert (free("gpu1", **LAPTOP), free("gpu2")) == (1, 8)


def test_nobody_has_enough(hosts: Any, remote: Any, hold: Any, command: Any) -> None:
    hosts.up("gpu1", env=LAPTOP, as_well="gpu1-ib")
    hosts.up("gpu2")
    hosts.known("gpu3", free_port())
    hold("gpu2", 7)
    waiter = remote("gpu2", "run", "-n", 4, "--", "true")
    assert "waiting" in waiter.stderr.readline()
    done = command.run("run", "--host", "gpu1,gpu1-ib,gpu2,gpu3", "-n", 2, "--", "true")
    assert (done.returncode, done.stdout) == (75, "")
    *refusals, first, gpu1, gpu2, ib, gpu3 = done.stderr.splitlines()
    assert any("2 GPUs" in line for line in refusals)
    assert "run --host does not wait" in first
    assert gpu1.startswith("  gpu1: ")
    assert ib == "  gpu1-ib: the same host as gpu1"
    assert gpu2 == f"  gpu2: 1 of 8 GPUs free, 1 waiting: {USER}"
    assert gpu3.endswith("Connection refused")
    assert command.run("run", "--host", "gpu3", "--", "true").returncode == 68
    assert command.run("run", "--host", "gpu2", "-n", 9, "--", "true").returncode == 78


def test_a_directory_that_is_not_there_is_no_claim(hosts: Any, command: Any, tmp_path: Path) -> None:
    hosts.up("gpu1")
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.rmdir('{gone}'); os.environ['PWD'] = '/'; from safe_gpu.cli import hosts as run"
    code += f"; os.getcwd = lambda: '{gone}'; from safe_gpu.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "run", "--host", "gpu1", "--", "touch", str(tmp_path / "ran")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 126
    assert f"there is no directory {gone}\n" in done.stderr
    assert "  gpu1: exit code 126" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert not (hosts.directory / "gpu1").exists()


def test_a_signal_before_the_claim_makes_none(hosts: Any, command: Any, free: Any, tmp_path: Path) -> None:
    """The safe-gpu of that host says when it is to claim, waits then, and tells what the real one says at its end."""
    up, go, end = (tmp_path / name for name in ("up", "go", "end"))
    for path in (up, go, end):
        os.mkfifo(path)
    real = f'{hosts.directory}/remote/safe-gpu "$@"'
    wait = f"echo > {up}; read x < {go}; exec {real} > {end} 2>&1"
    program(tmp_path / "slow" / "safe-gpu", f'case "$*" in *--pending*) {wait};; esac\nexec {real}')
    hosts.up("gpu1", env={"PATH": f"{tmp_path}/slow:/usr/bin:/bin"})
    started = command.start("run", "--host", "gpu1", "--", "touch", tmp_path / "ran")
    assert up.read_text() == "\n"
    started.terminate()
    assert started.wait(60) == 143
    go.write_text("\n")
    assert "has ended its ssh" in end.read_text()
    assert (free("gpu1"), (tmp_path / "ran").exists()) == (8, False)


def test_no_other_host_is_tried_where_the_connection_breaks_after_the_claim(
    hosts: Any, command: Any, free: Any, tmp_path: Path, eventually: Any
) -> None:
    """The command runs on there and keeps its GPU."""
    hosts.up("gpu1")
    hosts.up("gpu2", env=LAPTOP)
    script = f"echo once >> {tmp_path}/log; echo up; exec sleep 600"
    started = command.start("run", "--host", "gpu1,gpu2", "--", "sh", "-c", script)
    assert started.stdout.readline() == "up\n"
    for pid in hosts.connections():
        os.kill(pid, signal.SIGKILL)
    assert (started.wait(60), free("gpu1")) == (255, 7)
    assert (tmp_path / "log").read_text() == "once\n"


def test_on_a_terminal(hosts: Any, free: Any, terminal: Terminal) -> None:
    hosts.up("gpu1")
    code = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    code += "from safe_gpu.cli import main; sys.exit(main(sys.argv[1:]))"
    script = "trap 'echo got it; exit 5' INT; tty; stty size; echo up; while :; do sleep 0.1; done"
    words = [sys.executable, "-c", code, "run", "--host", "gpu1", "--", "sh", "-c", script]
    with subprocess.Popen(words, stdin=terminal.slave, stdout=terminal.slave, stderr=terminal.slave) as started:
        terminal.read_until("up\r\n")
        os.write(terminal.master, b"\x03")
        terminal.read_until("got it\r\n")
        assert started.wait(60) == 5
    assert "/dev/pts/" in terminal.raw
    assert "24 80" in terminal.raw
    assert "safe-gpu: on gpu1" in terminal.raw
    assert "safe-gpu: got GPU 0" in terminal.raw
    assert free("gpu1") == 8


def test_what_does_not_go_with_hosts(ask: Any) -> None:
    for words in (("--timeout", 5), ("-n", "job")):
        assert ask("run", "--host", "gpu1", *words, "--", "true").returncode == 2


# Where "breaks-HOST" is there, the connection breaks before the claim; "late" tells what waits there then.
SSH = """
while [ "$1" != -- ]; do shift; done
export SAFE_GPU_DIR={0}/state-$2 SAFE_GPU_DRIVER=simulated:$(cat {0}/driver-$2) PATH={1}:/usr/bin:/bin
pending=$(echo "$3" | grep -o '/tmp/safe-gpu-run-[0-9a-f]*' | head -1)
[ -z "$pending" ] || echo $pending >> {0}/made
case "$3" in *--pending*) if [ -e {0}/breaks-$2 ]; then mkdir $pending; echo $pending > {0}/late; exit 255; fi;; esac
eval "$3"
"""


@pytest.fixture
def there(tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of two hosts, "a" with eight GPUs and "b" with one."""
    program(tmp_path / "bin" / "ssh", SSH.format(tmp_path, command.path.parent))
    (tmp_path / "driver-a").write_text("dgx-a100")
    (tmp_path / "driver-b").write_text("laptop")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code", "tried"),
    [
        ((), 0, "a\n"),
        (("--model", "4070"), 0, "b\n"),  # 78 on the other one
        (("-n", 2, "--model", "4070"), 78, ""),
        (("-n", 9), 78, ""),
    ],
)
def test_the_first_that_claims(command: Any, there: Path, words: tuple[object, ...], code: int, tried: str) -> None:
    script = f'echo "${{SAFE_GPU_DIR##*-}}" >> {there}/ran; exit $0'
    for own in (0, 75, 255) if code == 0 else (0,):
        (there / "ran").write_text("")
        done = command.run("run", "--host", "b,a", *words, "--", "sh", "-c", script, own)
        assert (done.returncode, (there / "ran").read_text()) == (code or own, tried), done.stderr
    assert not any(map(os.path.exists, (there / "made").read_text().split())), "a directory was left behind"


def test_what_comes_late_on_a_broken_connection_runs_nothing(command: Any, there: Path, ground: Any) -> None:
    """The first host is asked to give up, and only then the next one is tried."""
    (there / "breaks-a").touch()
    done = command.run("run", "--host", "a,b", "--", "sh", "-c", 'echo "${SAFE_GPU_DIR##*-}"')
    assert (done.returncode, done.stdout) == (0, "b\n"), done.stderr
    pending = (there / "late").read_text().strip()
    late = command.run("run", "--pending", pending, "--", "echo", "ran")
    assert (late.returncode, late.stdout) == (2, "")
    assert "run --host has ended its ssh" in late.stderr
    assert ground.claimed() == []
    os.mkdir(pending)
    assert command.run("run", "--pending", pending, "--", "echo", "ran").stdout == "ran\n"
    assert not os.path.exists(pending)
