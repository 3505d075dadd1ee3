"""``safe-gpu run --host``: one host claims, its command ends with ours, and nothing is left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes import free_port
from support.terminals import Terminal

from safe_gpu.cli.run_on_hosts import Session
from safe_gpu.host.procfs import descendants

from .conftest import program

LAPTOP = {"SAFE_GPU_DRIVER": "simulated:laptop"}  # one GPU


@pytest.fixture
def free(hosts: Any, command: Any) -> Callable[[str], int]:
    """How many GPUs of a host are free, by its own status."""

    def count(name: str, **env: str) -> int:
        gpus = json.loads(command.run("status", "--json", env={**hosts.environment(name), **env}).stdout)["gpus"]
        return sum(gpu["state"] in ("free", "display") for gpu in gpus)

    return count


@pytest.fixture
def started(hosts: Any, command: Any) -> Callable[..., Any]:
    """A script that runs on the first of these hosts by ``run --host``, and has said "up"."""

    def start(script: str, *names: str) -> Any:
        for name in names or ("gpu1",):
            hosts.up(name)
        process = command.start("run", "--host", ",".join(names) or "gpu1", "--", "sh", "-c", script)
        assert process.stdout.readline() == "up\n"
        return process

    return start


def test_the_one_with_the_most_free_gpus_in_this_directory(
    hosts: Any, command: Any, free: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.up("gpu1", env=LAPTOP)
    hosts.up("gpu2")
    odd = tmp_path / "it's a !\n\\place"
    odd.mkdir()
    monkeypatch.setenv("PWD", "/elsewhere")
    script = 'printf "%s|" "$PWD" "$1" "$CUDA_VISIBLE_DEVICES" "$SAFE_GPU_SESSION$(cat)" "$SAFE_GPU_DIR"'
    script += "; echo bad >&2; exit 7"
    words = ("run", "--host", "gpu1,gpu2", "--", "sh", "-c", script, "sh", "a  'b'\n!")
    done = command.run(*words, cwd=odd, stdin=subprocess.DEVNULL)
    printed = f"{odd}|a  'b'\n!|0||{hosts.state_dir('gpu2')}|"
    assert (done.returncode, done.stdout, done.stderr) == (7, printed, "bad\n")
    assert (free("gpu1", **LAPTOP), free("gpu2")) == (1, 8)


@pytest.mark.parametrize("code", [0, 75, 255])
def test_the_commands_own_exit_code_tries_no_other_host(hosts: Any, command: Any, tmp_path: Path, code: int) -> None:
    hosts.up("gpu1")
    hosts.up("gpu2")
    done = command.run("run", "--host", "gpu1,gpu2", "--", "sh", "-c", f"echo once >> {tmp_path}/log; exit {code}")
    assert (done.returncode, done.stderr) == (code, "")
    assert (tmp_path / "log").read_text() == "once\n"


def test_nobody_has_enough(hosts: Any, remote: Any, command: Any, user: str) -> None:
    hosts.up("gpu1", env=LAPTOP, as_well="gpu1-ib")
    hosts.up("gpu2")
    hosts.known("gpu3", free_port())
    remote("gpu2").hold(7)
    waiter = remote("gpu2").start("run", "-n", 4, "--", "true")
    assert "waiting" in waiter.stderr.readline()
    done = command.run("run", "--host", "gpu1,gpu1-ib,gpu2,gpu3", "-n", 2, "--", "true")
    assert (done.returncode, done.stdout) == (75, "")
    first, gpu1, gpu2, ib, gpu3 = done.stderr.splitlines()
    assert first == "safe-gpu: no host gives the GPUs now, and run --host does not wait:"
    assert gpu1.startswith("  gpu1: ")
    assert ib == "  gpu1-ib: the same host as gpu1"
    assert gpu2 == f"  gpu2: 1 of 8 GPUs free, 1 waiting: {user}"
    assert gpu3.endswith("Connection refused")
    assert command.run("run", "--host", "gpu3", "--", "true").returncode == 68
    assert command.run("run", "--host", "gpu2", "-n", 9, "--", "true").returncode == 78


def test_a_directory_that_is_not_there_is_no_claim(hosts: Any, command: Any, tmp_path: Path) -> None:
    hosts.up("gpu1")
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.rmdir('{gone}'); os.environ['PWD'] = '/'; from safe_gpu.cli import run_on_hosts as run"
    code += f"; os.getcwd = lambda: '{gone}'; from safe_gpu.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "run", "--host", "gpu1", "--", "touch", str(tmp_path / "ran")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 126
    assert f"gpu1: there is no directory {gone}" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert not hosts.state_dir("gpu1").exists()


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_signals_reach_the_command_there(started: Any, free: Any, name: str) -> None:
    process = started(f"trap 'echo got it; exit 3' {name}; echo up; while :; do sleep 0.1; done")
    process.send_signal(signal.Signals[f"SIG{name}"])
    assert process.communicate(timeout=60)[0] == "got it\n"
    assert (process.returncode, free("gpu1")) == (3, 8)


def test_a_signal_that_ends_the_command_ends_ours(started: Any, free: Any) -> None:
    process = started("echo up; exec sleep 600")
    process.send_signal(signal.SIGINT)
    assert (process.wait(60), free("gpu1")) == (130, 8)


@pytest.mark.parametrize("victim", ["server", "client"])
def test_nothing_is_left_where_the_connection_breaks(
    hosts: Any, started: Any, free: Any, tmp_path: Path, victim: str
) -> None:
    """Not even what has left its session and ignores all but SIGKILL, and no other host is tried."""
    leave = f"trap '' TERM HUP INT; (setsid sleep 600 &); echo once >> {tmp_path}/log"
    process = started(f"{leave}; echo up; while :; do sleep 1; done", "gpu1", "gpu2")
    assert free("gpu1") == 7
    for pid in hosts.connections() if victim == "server" else descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert err.endswith("safe-gpu: the connection to gpu1 broke, and the command was ended there\n")
    assert (process.returncode, free("gpu1"), hosts.processes()) == (76, 8, [])
    assert (tmp_path / "log").read_text() == "once\n"


@pytest.mark.parametrize("victim", ["server", "client"])
def test_no_other_host_is_tried_where_the_connection_breaks_before_the_claim(
    hosts: Any, command: Any, tmp_path: Path, victim: str
) -> None:
    """It may have claimed when that happened."""
    slow, real, up = tmp_path / "slow" / "safe-gpu", hosts.directory / "remote" / "safe-gpu", tmp_path / "up"
    os.mkfifo(up)
    program(slow, f'case "$*" in *--supervised*) echo > {up}; exec sleep 600;; esac\nexec {real} "$@"')
    hosts.up("gpu1", env={"PATH": f"{slow.parent}:/usr/bin:/bin"})
    hosts.up("gpu2", env=LAPTOP)
    started = command.start("run", "--host", "gpu1,gpu2", "--", "touch", tmp_path / "ran")
    assert up.read_text() == "\n"
    for pid in hosts.connections() if victim == "server" else descendants(started.pid):
        os.kill(pid, signal.SIGKILL)
    assert (started.wait(60), (tmp_path / "ran").exists(), hosts.processes()) == (76, False, [])


def test_nothing_is_left_where_we_are_killed(hosts: Any, started: Any, free: Any, eventually: Any) -> None:
    started("echo up; exec sleep 600").kill()
    eventually(lambda: free("gpu1") == 8)
    eventually(lambda: hosts.processes() == [])


def test_what_the_command_leaves_behind_keeps_the_gpu(hosts: Any, command: Any, free: Any, eventually: Any) -> None:
    """As without --host: whoever has its descriptors may use the GPU."""
    hosts.up("gpu1")
    done = command.run("run", "--host", "gpu1", "--", "sh", "-c", "sleep 600 & echo $!")
    assert done.returncode == 0
    assert free("gpu1") == 7
    os.kill(int(done.stdout), signal.SIGKILL)
    eventually(lambda: free("gpu1") == 8)


def test_a_reader_that_leaves_ends_the_command(hosts: Any, started: Any, free: Any) -> None:
    process = started("yes up")
    process.stdout.close()
    assert (process.wait(60), free("gpu1"), hosts.processes()) == (141, 8, [])


def on_terminal(terminal: Terminal, script: str) -> subprocess.Popen[bytes]:
    """Run a script on gpu1 from this terminal, which is the controlling one."""
    code = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    code += "from safe_gpu.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "run", "--host", "gpu1", "--", "sh", "-c", script]
    return subprocess.Popen(words, stdin=terminal.slave, stdout=terminal.slave, stderr=terminal.slave)


def test_on_a_terminal(hosts: Any, command: Any, free: Any, terminal: Terminal) -> None:
    hosts.up("gpu1")
    script = "trap 'echo got it; exit 5' INT; tty; stty size; echo up; while :; do sleep 0.1; done"
    with on_terminal(terminal, script) as started:
        terminal.read_until("up\r\n")
        os.write(terminal.master, b"\x03")
        terminal.read_until("got it\r\n")
        assert started.wait(60) == 5
    assert "/dev/pts/" in terminal.raw
    assert "24 80" in terminal.raw
    assert "safe-gpu: on gpu1" in terminal.raw
    assert "safe-gpu: got GPU 0" in terminal.raw
    assert "\x1e" not in terminal.raw
    assert free("gpu1") == 8


def test_sigterm_on_a_terminal(hosts: Any, free: Any, terminal: Terminal) -> None:
    hosts.up("gpu1")
    with on_terminal(terminal, "trap '' HUP; echo up; while :; do sleep 0.1; done") as started:
        terminal.read_until("up\r\n")
        started.terminate()
        assert started.wait(60) == 143
    assert free("gpu1") == 8


def test_a_race_of_two_users_for_the_last_gpu(users: list[str], hosts: Any, remote: Any, eventually: Any) -> None:
    hosts.up("gpu1")
    remote("gpu1").hold(7)
    in_home = os.path.realpath(sys.executable).startswith(("/root/", "/home/"))  # where other users cannot look
    python = "/usr/bin/python3" if in_home else sys.executable
    safe_gpu = hosts.directory / "remote" / "safe-gpu"
    program(safe_gpu, f'exec {python} -m safe_gpu "$@"')
    words = [safe_gpu, "run", "--host", "gpu1", "--", "sh", "-c", "id -un; exec sleep 600"]
    env = {**os.environ, **hosts.environment("gpu1"), "PATH": os.environ["PATH"], "HOME": "/", "PWD": "/"}
    racers = []
    for user in users * 2:
        hosts.give_key(user)
        as_user: Any = {"user": user, "group": user, "extra_groups": (), "cwd": "/", "env": env}
        racers.append((user, subprocess.Popen(words, stdout=subprocess.PIPE, **as_user)))
    eventually(lambda: sum(one.poll() is not None for _, one in racers) == 3)
    for user, one in racers:
        with one:
            if one.poll() is None:
                assert one.stdout.readline() == f"{user}\n".encode()
                one.terminate()
    assert sorted(one.returncode for _, one in racers) == [75, 75, 75, 143]


def test_a_version_that_tells_nothing_of_a_claim_makes_none(hosts: Any, command: Any, tmp_path: Path) -> None:
    file, new = tmp_path / "older" / "safe-gpu", hosts.directory / "remote" / "safe-gpu"
    program(file, f'case "$*" in *--supervised*) echo unknown >&2; exit 2;; esac\nexec {new} "$@"')
    hosts.up("gpu1", env={"PATH": f"{file.parent}:/usr/bin:/bin"})
    hosts.up("gpu2", env=LAPTOP)
    done = command.run("run", "--host", "gpu1,gpu2", "--", "sh", "-c", 'echo "$SAFE_GPU_DIR"')
    assert (done.returncode, done.stdout) == (0, f"{hosts.state_dir('gpu2')}\n")


@pytest.mark.parametrize("words", ["--timeout 5 -- true", "-n job -- true"])
def test_what_does_not_go_with_hosts(ask: Any, words: str) -> None:
    assert ask("run", "--host", "gpu1", *words.split()).returncode == 2


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_words_are_found_however_they_are_cut(size: int, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    session = Session("gpu1", False, "0123")
    text = b"Hi\n*safe-gpu-012 is none\n*safe-gpu-0123 \r\na*bs*safe-gpu-0123 255\n"
    text = text.replace(b"*", b"\x1e")
    for at in range(0, len(text), size):
        session._show(text[at : at + size])
    assert capsysbinary.readouterr() == (b"a\x1ebs", b"Hi\n\x1esafe-gpu-012 is none\n")
    assert session.ended == 255
