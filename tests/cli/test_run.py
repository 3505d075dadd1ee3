"""``safe-gpu run``: real processes that wait, become their command, hold GPUs and let go of them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.terminals import Terminal

from safe_gpu.cli.job import become, find_command
from safe_gpu.cli.output import CommandError
from safe_gpu.host import procfs

USER = procfs.user_name(os.geteuid())

ENDS = {"TERM": -signal.SIGTERM, "HUP": -signal.SIGHUP, "INT": 130}
"""How a waiter's exit shows to its parent, by signal."""


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


# Becoming the command


def test_the_command_has_our_pid_and_sees_its_gpus(command, ground) -> None:
    started = command.start("run", "-n", 2, "--", "sh", "-c", 'echo $$; env; cat "$SAFE_GPU_DIR"/claims/*')
    out, _ = started.communicate(timeout=60)
    lines = out.splitlines()
    assert int(lines[0]) == started.pid
    assert "CUDA_VISIBLE_DEVICES=0,1" in lines
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in lines
    assert [line for line in lines if line.startswith("SAFE_GPU_SCOPE=")]
    entry = json.loads(lines[-1])
    assert (entry["pid"], entry["command"], [*entry["gpus"]]) == (started.pid, "sh", ground.uuids[:2])


@pytest.mark.parametrize("code", [0, 255])
def test_the_exit_code_is_the_command_s(command, code: int) -> None:
    done = command.run("run", "--", "sh", "-c", f"exit {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_command(command, number: signal.Signals) -> None:
    text = f"trap 'echo caught; exit 7' {number.name[3:]}; echo up; while sleep 0.01; do :; done"
    started = command.start("run", "--", "sh", "-c", text)
    assert started.stdout.readline() == "up\n"
    started.send_signal(number)
    assert started.communicate(timeout=60)[0] == "caught\n"
    assert started.returncode == 7


def ignored_signals(text: str) -> set[int]:
    mask = int(re.search(r"SigIgn:\s*([0-9a-f]+)", text)[1], 16)
    return {number for number in range(1, 65) if mask & 1 << (number - 1)}


def test_python_s_own_signal_handling_is_not_handed_on(command) -> None:
    done = command.run("run", "--", "grep", "SigIgn", "/proc/self/status")
    assert not ignored_signals(done.stdout) & {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM}


def test_signals_that_were_ignored_stay_ignored(command) -> None:
    """nohup, and background jobs of a script."""
    text = f"trap '' HUP INT; exec {command.path} run -- grep SigIgn /proc/self/status"
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60)
    assert {signal.SIGHUP, signal.SIGINT} <= ignored_signals(done.stdout)


def test_a_refused_command_leaves_signals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGPIPE at its default would end the process when it says why, and nobody reads it."""

    def interrupted(path: str, arguments: list[str]) -> None:
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL
        raise KeyboardInterrupt

    with pytest.raises(CommandError):
        become("/etc/passwd", ["command"])
    assert signal.getsignal(signal.SIGPIPE) == signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    monkeypatch.setattr(os, "execv", interrupted)
    with pytest.raises(KeyboardInterrupt):
        become("/bin/true", ["true"])
    assert signal.getsignal(signal.SIGPIPE) == signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN


# The claim goes with the last who inherited it


def test_a_child_in_the_background_that_inherited_it_keeps_it(command, ground, eventually) -> None:
    done = command.run("run", "--", "sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!")
    child = int(done.stdout)
    try:
        assert ground.claimed() == [0]
    finally:
        os.kill(child, signal.SIGKILL)
    eventually(lambda: ground.claimed() == [])


# Descriptors


LIST = "ls -l /proc/$$/fd; :"


def descriptors(text: str) -> dict[int, str]:
    return {int(found[1]): found[2] for found in re.finditer(r" (\d+) -> (.*)", text)}


def numbers_of_entries(found: dict[int, str]) -> set[int]:
    return {number for number, target in found.items() if "/claims/" in target}


def test_entry_and_doors_lie_out_of_the_way_and_nothing_else_is_handed_on(command, ground) -> None:
    found = descriptors(command.run("run", "-n", 2, "--", "bash", "-c", LIST).stdout)
    entries = numbers_of_entries(found)
    kept = {number for number, target in found.items() if target == str(ground.directory)}
    assert len(entries) == 1
    assert len(kept) == 1
    assert min(entries | kept) >= 500
    doors = {number for number, target in found.items() if target.startswith("socket:") and number >= 500}
    assert len(doors) == 8  # of each GPU, of a part of it, and two for claims inside this one
    assert set(found) - entries - kept - doors <= {0, 1, 2, 255}  # the last is bash's own


@pytest.mark.parametrize("limit", [16, 256, 505])
def test_a_low_limit_of_descriptors(command, ground, limit: int) -> None:
    text = f"ulimit -n {limit}; exec {command.path} run -n 8 -- bash -c '{LIST}; exec 3>/dev/null 4>&1 5<&0'"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (entry,) = numbers_of_entries(descriptors(done.stdout))
    assert entry >= min(500, limit // 2 - 8)


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_stay_closed_and_no_entry_takes_their_number(
    command, ground, tmp_path: Path, closed: str
) -> None:
    script(tmp_path / "list", f"#!/bin/bash\n({LIST}) > {tmp_path}/out 2>/dev/null\n")
    done = subprocess.run(["bash", "-c", f"{command.path} run -- {tmp_path}/list {closed}"], timeout=60)
    assert done.returncode == 0
    found = descriptors((tmp_path / "out").read_text())
    assert numbers_of_entries(found) == {500}
    (entry,) = (ground.directory / "claims").iterdir()
    assert json.loads(entry.read_text())["v"] == 1


# Finding the command


def test_a_script_without_an_interpreter_line_runs_in_a_shell(command, tmp_path: Path) -> None:
    path = script(tmp_path / "tool", "echo $1-$2 $0\n")
    assert command.run("run", "--", path, "a", "b c").stdout == f"a-b c {path}\n"


@pytest.mark.parametrize(
    ("verb", "name", "code"),
    [
        ("run", "./no-such-file", 127),
        ("run", "./orphan", 126),
        ("run", "./foreign", 126),
        ("bind", "no-such-command", 127),
        ("bind", "./foreign", 126),
    ],
)
def test_a_command_that_cannot_be_run(command, ground, tmp_path: Path, verb: str, name: str, code: int) -> None:
    """Not there, without its interpreter, or for another machine."""
    script(tmp_path / "orphan", "#!/no/such/interpreter\n")
    (tmp_path / "foreign").write_bytes(b"\x7fNOT\0\0\0\1" * 64)
    (tmp_path / "foreign").chmod(0o755)
    done = command.run(verb, "--", name, cwd=tmp_path)
    assert done.returncode == code
    *notes, line = done.stderr.splitlines()
    assert line.startswith(f"safe-gpu: {name}")
    assert not notes or verb == "bind"
    assert ground.claimed() == []


def test_it_is_looked_for_before_anybody_queues(command, ground) -> None:
    ground.hold(*range(8))
    ground.directory.joinpath("queue").rmdir()
    assert command.run("run", "--timeout", "inf", "--", "no-such-command").returncode == 127
    assert not ground.directory.joinpath("queue").exists()


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("{bin}:/usr/bin:/bin", "tool", "{bin}/tool"),
        ("{closed}:{bin}:/usr/bin:/bin", "tool", "{bin}/tool"),  # what cannot be executed is passed over
        ("{closed}:/usr/bin:/bin", "tool", 126),
        ("/usr/bin:/bin", "./bin/tool", "./bin/tool"),
        ("/usr/bin:/bin", "tool", 127),
        ("/usr/bin:/bin:bin", "tool", "bin/tool"),  # relative places count from here
        (":/usr/bin:/bin", "here", "./here"),  # an empty one is here
    ],
)
def test_places_where_a_command_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, name: str, found: str | int
) -> None:
    for place, mode in (("bin", 0o755), ("closed", 0o644)):
        (tmp_path / place).mkdir()
        script(tmp_path / place / "tool", "#!/bin/sh\n", mode)
    script(tmp_path / "here", "#!/bin/sh\n")
    places = {"bin": tmp_path / "bin", "closed": tmp_path / "closed"}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path.format(**places))
    if isinstance(found, str):
        assert find_command([name]) == found.format(**places)
    else:
        with pytest.raises(CommandError) as caught:
            find_command([name])
        assert caught.value.code == found


# While it waits


def waiting(command, ground, *arguments: object, verb: str = "run"):
    """A process that has said that it waits, and its first line on stderr."""
    started = command.start(verb, *arguments, *(("--", "true") if verb == "run" else ()))
    return started, started.stderr.readline()


def test_it_says_once_for_whom_it_waits(command, ground, eventually) -> None:
    holder = command.start("run", "-n", 8, "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "up\n"
    started, line = waiting(command, ground, "-n", 2)
    user = re.escape(USER)
    assert re.fullmatch(
        rf"safe-gpu: waiting 0:\d\d for 2 GPUs \(0 free\); GPU 0-7: {user} \(pid {holder.pid}\) for \d+ s\n", line
    )
    assert len(ground.tickets()) == 1
    behind, line = waiting(command, ground, "--for", "1h")
    assert re.fullmatch(
        rf"safe-gpu: waiting 0:\d\d for 1 GPU \(0 free\), #2 in the queue; behind {user} \(pid {started.pid}, wants "
        rf"2 GPUs, queued for \d+ s\); GPU 0-7: {user} \(pid {holder.pid}\) for \d+ s\n",
        line,
    )
    holder.communicate("\n", timeout=60)
    for one, gpus in (
        (started, r"GPU \d+,\d+ \(2 x NVIDIA A100-SXM4-80GB, simulated\)"),
        (behind, r"GPU \d+ \(NVIDIA A100-SXM4-80GB, simulated\)"),
    ):
        out, err = one.communicate(timeout=60)
        assert out == ""
        assert re.fullmatch(rf"safe-gpu: got {gpus} after \d+ s\n", err)
        assert one.returncode == 0
    eventually(lambda: ground.tickets() == [])


@pytest.mark.parametrize(("verb", "name"), [*(("run", name) for name in ENDS), ("wait", "TERM")])
def test_a_waiter_that_is_told_to_end_leaves_nothing(command, ground, verb: str, name: str) -> None:
    ground.hold(*range(8))
    started, line = waiting(command, ground, verb=verb)
    assert "for 1 GPU" in line
    behind, _ = waiting(command, ground, "--only", "0", "--for", "1h", verb=verb)
    assert len(ground.tickets()) == 2
    for one in (started, behind):  # the head polls, the one behind sleeps
        one.send_signal(getattr(signal, f"SIG{name}"))
        assert one.communicate(timeout=60) == ("", "")
        assert one.returncode == ENDS[name]
    assert ground.tickets() == []
    ground.let_go()
    assert ground.claimed() == []


@pytest.mark.parametrize(
    ("line", "heard", "said"),
    [("run -- echo x", False, "x\n"), ("wait", False, "0\n"), ("run -q -- true", True, ""), ("wait -q", True, "0\n")],
)
def test_a_waiter_that_is_not_heard_or_says_nothing(command, ground, line: str, heard: bool, said: str) -> None:
    """The place in the queue is worth more than the news."""
    ground.hold(*range(8))
    reader, writer = os.pipe()
    os.close(reader)
    started = command.start(*line.split(), stderr=subprocess.PIPE if heard else writer)
    os.close(writer)
    while not ground.tickets():
        assert started.poll() is None
    ground.let_go()
    assert started.communicate(timeout=60) == (said, "" if heard else None)
    assert started.returncode == 0


# wait


def test_wait_claims_nothing(command, ground) -> None:
    done = command.run("wait", "-n", 8)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [str(index) for index in range(8)], "")
    assert ground.claimed() == []
    assert [*(ground.directory / "claims").iterdir()] == []


def test_wait_stands_in_the_queue_like_everybody(command, ground) -> None:
    ground.hold(*range(1, 8))
    first = command.start("run", "-n", 8, "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE)
    first.stderr.readline()
    second, line = waiting(command, ground, verb="wait")
    assert (
        f"for 1 GPU (1 is free for 1 claim ahead), #2 in the queue; behind {USER} (pid {first.pid}, wants 8 GPUs, "
        in line
    )
    ground.let_go()
    assert first.stdout.readline() == "up\n"
    assert second.poll() is None
    first.communicate("\n", timeout=60)
    assert second.wait(60) == 0


# In the company of other programs


def test_the_number_that_a_job_asked_for(command, ground) -> None:
    line = ("run", "-n", "job", "--visible-as", "uuid", "--", "printenv", "CUDA_VISIBLE_DEVICES")
    assert command.run(*line, env={"SAFE_GPU_NB_GPUS": "3"}).stdout.strip().split(",") == ground.uuids[:3]


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"SAFE_GPU_NB_GPUS": "0"}, "SAFE_GPU_NB_GPUS=0"),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "0"}, "job slurm:7 asked for no GPU on this host: ask"),
        *(
            ({"_CONDOR_JOB_AD": "/dev/null", "CUDA_VISIBLE_DEVICES": none}, "job (of unknown number) asked for no GPU")
            for none in ("10000", "none")
        ),
    ],
)
def test_a_job_of_no_gpu_starts_its_command_and_says_so(command, job: dict[str, str], why: str) -> None:
    line = ("-n", "job", "--", "printenv", "CUDA_VISIBLE_DEVICES")
    done = command.run("run", *line, env=job)
    assert (done.returncode, done.stdout) == (0, "\n")
    assert done.stderr.startswith(f"safe-gpu: the command starts without a GPU: {why}")
    quiet = command.run("run", "-q", *line, env=job)
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "\n", "")


def test_a_command_line_of_any_length_leaves_a_readable_entry(command, ground) -> None:
    text = f"{'true; ' * 20000} cat; : \x1b[31m"
    line = ("run", "--", "sh", "-c", f"echo up; {text}")
    started = command.start(*line, stdin=subprocess.PIPE, env={"SAFE_GPU_RECORD_COMMAND": "full"})
    assert started.stdout.readline() == "up\n"
    (entry,) = (ground.directory / "claims").iterdir()
    assert len(json.loads(entry.read_text())["command"]) == 200
    started.communicate("", timeout=60)


def test_affinity_of_the_command(command) -> None:
    """The simulated host has other CPUs than this one; asked for or not, the command runs."""
    before = sorted(os.sched_getaffinity(0))
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    done = command.run("run", "--affinity", "none", "--", sys.executable, "-c", code)
    assert done.stdout.strip() == str(before)
    done = command.run("run", "--", sys.executable, "-c", code)
    assert done.returncode == 0
    assert done.stderr == ""


# What it says of the claim


@pytest.mark.parametrize(
    ("quiet", "said"), [((), "safe-gpu: got GPU 0,1 (2 x NVIDIA A100-SXM4-80GB, simulated)\r\n"), (("-q",), "")]
)
def test_on_a_terminal_it_says_so_at_once(command, terminal: Terminal, quiet: tuple[str, ...], said: str) -> None:
    assert command.run("run", "-n", 2, *quiet, "--", "true", stderr=terminal.slave).returncode == 0
    terminal.read_to_the_end()
    assert terminal.raw == said


# Where the host is to blame


@pytest.mark.parametrize(
    ("said", "config", "code"), [(None, "", 73), (99, "", 99), (None, "100", 100), (99, "100", 99)]
)
def test_what_a_scheduler_is_told_of_a_broken_host(
    command, tmp_path: Path, rules, monkeypatch: pytest.MonkeyPatch, said: int | None, config: str, code: int
) -> None:
    if config:
        if os.geteuid() != 0:
            pytest.skip("needs root, whose file it must be")
        rules(f"[host]\nrefused_exit = {config}\n")
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    option = [] if said is None else ["--refused-exit", said]
    assert command.run("run", *option, "--", "true").returncode == code
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "state"))
    assert command.run("run", "-n", 99, *option, "--", "true").returncode == 78  # the request is to blame
    assert command.run("run", *option, "--", "sh", "-c", "exit 70").returncode == 70  # the command's own
