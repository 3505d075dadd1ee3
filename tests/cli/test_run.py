"""``safe-gpu run`` and ``wait``: real processes that wait, become their command, hold GPUs and let go of them."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.real import long
from support.terminals import Terminal

USER = api.procfs.user_name(os.geteuid())

ENDS = {"TERM": -signal.SIGTERM, "HUP": -signal.SIGHUP, "INT": 130}
"""How a waiter's exit shows to its parent, by signal."""


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


# Becoming the command


def test_the_command_has_our_pid_and_sees_its_gpus(command, dgx) -> None:
    started = command.start("run", "-n", 2, "--", "sh", "-c", 'echo $$; env; cat "$SAFE_GPU_DIR"/claims/*')
    out, _ = started.communicate(timeout=60)
    lines = out.splitlines()
    assert int(lines[0]) == started.pid
    assert {"CUDA_VISIBLE_DEVICES=0,1", "CUDA_DEVICE_ORDER=PCI_BUS_ID"} <= {*lines}
    entry = json.loads(lines[-1])
    assert (entry["pid"], entry["command"], [*entry["gpus"]]) == (started.pid, "sh", dgx.uuids[:2])


def ignored_signals(text: str) -> set[int]:
    mask = int(re.search(r"SigIgn:\s*([0-9a-f]+)", text)[1], 16)
    return {number for number in range(1, 65) if mask & 1 << (number - 1)}


def test_signals_that_were_ignored_stay_ignored_and_no_others(command) -> None:
    """Those that nohup ignores, and a script for its background jobs; not those that Python ignores itself."""
    text = f"trap '' HUP INT; exec {command.path} run -- grep SigIgn /proc/self/status"
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, timeout=60)
    ignored = ignored_signals(done.stdout)
    assert {signal.SIGHUP, signal.SIGINT} <= ignored
    assert not ignored & {signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTERM}


def test_a_refused_command_leaves_signals_as_they_were() -> None:
    """SIGPIPE at its default would end the process when it says why, and nobody reads it."""
    with pytest.raises(api.CommandError):
        api.become("/etc/passwd", ["command"])
    assert signal.getsignal(signal.SIGPIPE) == signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN


# The claim goes with the last who inherited it


def test_a_child_in_the_background_that_inherited_it_keeps_it(command, dgx, eventually) -> None:
    done = command.run("run", "--", "sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!")
    child = int(done.stdout)
    try:
        assert dgx.claimed() == [0]
    finally:
        os.kill(child, signal.SIGKILL)
    eventually(lambda: dgx.claimed() == [])


# Descriptors


LIST = "ls -l /proc/$$/fd; :"


def descriptors(text: str) -> dict[int, str]:
    return {int(found[1]): found[2] for found in re.finditer(r" (\d+) -> (.*)", text)}


def numbers_of_entries(found: dict[int, str]) -> set[int]:
    return {number for number, target in found.items() if "/claims/" in target}


def test_entry_and_doors_lie_out_of_the_way_and_nothing_else_is_handed_on(command, dgx) -> None:
    found = descriptors(command.run("run", "-n", 2, "--", "bash", "-c", LIST).stdout)
    entries = numbers_of_entries(found)
    kept = {number for number, target in found.items() if target == str(dgx.state_dir)}
    assert (len(entries), len(kept), min(entries | kept) >= 500) == (1, 1, True)
    doors = {number for number, target in found.items() if target.startswith("socket:") and number >= 500}
    assert len(doors) == 8  # of each GPU, of a part of it, and two for claims inside this one
    assert set(found) - entries - kept - doors <= {0, 1, 2, 255}  # the last is bash's own


@pytest.mark.parametrize("limit", [16, 256, 505])
def test_a_low_limit_of_descriptors(command, dgx, limit: int) -> None:
    text = f"ulimit -n {limit}; exec {command.path} run -n 8 -- bash -c '{LIST}; exec 3>/dev/null 4>&1 5<&0'"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (entry,) = numbers_of_entries(descriptors(done.stdout))
    assert entry >= min(500, limit // 2 - 8)


@pytest.mark.parametrize("closed", ["<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_stay_closed(command, tmp_path: Path, closed: str) -> None:
    """No entry takes their number."""
    script(tmp_path / "list", f"#!/bin/bash\n({LIST}) > {tmp_path}/out 2>/dev/null\n")
    done = subprocess.run(["bash", "-c", f"{command.path} run -- {tmp_path}/list {closed}"], timeout=60)
    assert done.returncode == 0
    found = descriptors((tmp_path / "out").read_text())
    assert numbers_of_entries(found) == {500}


# Finding the command


def test_a_script_without_an_interpreter_line_runs_in_a_shell(command, tmp_path: Path) -> None:
    path = script(tmp_path / "tool", "echo $1-$2 $0\n")
    assert command.run("run", "--", path, "a", "b c").stdout == f"a-b c {path}\n"


@pytest.mark.parametrize(
    ("verb", "name", "code", "why"),
    [
        ("run", "orphan", 126, "its interpreter (after #!, or the dynamic loader) does not exist"),
        ("bind", "no-such-command", 127, "command not found"),
        ("bind", "foreign", 126, "Exec format error"),
    ],
)
def test_a_command_that_cannot_be_run(command, dgx, tmp_path: Path, verb: str, name: str, code: int, why: str) -> None:
    """Without its interpreter, not there, or for another machine."""
    script(tmp_path / "orphan", "#!/no/such/interpreter\n")
    script(tmp_path / "foreign", "\x7fNOT\0\0\0\1" * 64)
    done = command.run(verb, "--", f"./{name}", cwd=tmp_path)
    assert done.returncode == code
    *notes, line = done.stderr.splitlines()
    assert line.startswith(f"safe-gpu: ./{name}")
    assert line.endswith(why)
    assert not notes or verb == "bind"
    assert dgx.claimed() == []


def test_the_command_is_looked_for_before_its_claim_joins_the_queue(command, dgx) -> None:
    dgx.hold(*range(8))
    dgx.state_dir.joinpath("queue").rmdir()
    assert command.run("run", "--timeout", "inf", "--", "no-such-command").returncode == 127
    assert not dgx.state_dir.joinpath("queue").exists()


@pytest.mark.parametrize(
    ("path", "name", "found"),
    [
        ("closed:{here}/bin:/usr/bin:/bin", "tool", "{here}/bin/tool"),  # what cannot be executed is passed over
        ("closed:/usr/bin:/bin", "tool", 126),
        ("/usr/bin:/bin", "tool", 127),
        ("/usr/bin:/bin:bin", "tool", "bin/tool"),  # relative places count from here
        (":/usr/bin:/bin", "here", "./here"),  # an empty one is here
    ],
)
def test_places_where_a_command_is_looked_for(
    tmp_path: Path, monkeypatch: Any, path: str, name: str, found: Any
) -> None:
    for place, mode in (("bin/tool", 0o755), ("closed/tool", 0o644), ("here", 0o755)):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        script(tmp_path / place, "#!/bin/sh\n", mode)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path.format(here=tmp_path))
    if isinstance(found, str):
        assert api.find_command([name]) == found.format(here=tmp_path)
        return
    with pytest.raises(api.CommandError) as caught:
        api.find_command([name])
    assert caught.value.code == found


# While it waits


def waiting(command, dgx, *arguments: object, verb: str = "run"):
    """A process that has said that it waits, and its first line on stderr."""
    started = command.start(verb, *arguments, *(("--", "true") if verb == "run" else ()))
    return started, started.stderr.readline()


def test_a_waiter_says_once_for_whom_it_waits(command, dgx, eventually) -> None:
    holder = command.start("run", "-n", 8, "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "up\n"
    first, line = waiting(command, dgx, "-n", 2)
    user = re.escape(USER)
    held = rf"GPU 0-7: {user} \(pid {holder.pid}\) for \d+ s\n"
    assert re.fullmatch(rf"safe-gpu: waiting 0:\d\d for 2 GPUs \(0 free\); {held}", line)
    second, line = waiting(command, dgx, "--for", "1h")
    ahead = rf"{user} \(pid {first.pid}, wants 2 GPUs, queued for \d+ s\)"
    assert re.fullmatch(
        rf"safe-gpu: waiting 0:\d\d for 1 GPU \(0 free\), #2 in the queue; behind {ahead}; {held}", line
    )
    holder.communicate("\n", timeout=60)
    for one, gpus in ((first, r"GPU \d+,\d+ \(2 x "), (second, r"GPU \d+ \(")):
        out, err = one.communicate(timeout=60)
        assert (out, one.returncode) == ("", 0)
        assert re.fullmatch(rf"safe-gpu: got {gpus}NVIDIA A100-SXM4-80GB, simulated\) after \d+ s\n", err)
    eventually(lambda: dgx.tickets() == [])


@pytest.mark.parametrize(
    ("verb", "name"), [("run", "TERM"), ("run", "INT"), pytest.param("run", "HUP", marks=long), ("wait", "TERM")]
)
def test_a_waiter_that_is_told_to_end_leaves_nothing(command, dgx, verb: str, name: str) -> None:
    dgx.hold(*range(8))
    started, _ = waiting(command, dgx, verb=verb)
    behind, _ = waiting(command, dgx, "--only", "0", "--for", "1h", verb=verb)
    assert len(dgx.tickets()) == 2
    for one in (started, behind):  # the head polls, the one behind sleeps
        one.send_signal(getattr(signal, f"SIG{name}"))
        out, err = one.communicate(timeout=60)
        assert out == ""
        told = err.splitlines()  # that the one behind has come to be the head
        assert all(line.startswith("safe-gpu: waiting ") for line in told)
        assert one.returncode == ENDS[name]
    assert dgx.tickets() == []


@pytest.mark.parametrize(
    ("line", "heard", "said"), [("run -- echo x", False, "x\n"), ("wait", False, "0\n"), ("run -q -- true", True, "")]
)
def test_a_waiter_that_is_not_heard_or_says_nothing(command, dgx, line: str, heard: bool, said: str) -> None:
    """The place in the queue is worth more than the news."""
    dgx.hold(*range(8))
    reader, writer = os.pipe()
    os.close(reader)
    started = command.start(*line.split(), stderr=subprocess.PIPE if heard else writer)
    os.close(writer)
    while not dgx.tickets():
        assert started.poll() is None
    dgx.let_go()
    assert (*started.communicate(timeout=60), started.returncode) == (said, "" if heard else None, 0)


# wait


def test_wait_stands_in_the_queue_like_everybody(command, dgx) -> None:
    dgx.hold(*range(1, 8))
    first = command.start("run", "-n", 8, "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE)
    first.stderr.readline()
    second, line = waiting(command, dgx, verb="wait")
    assert f"for 1 GPU (1 free, kept for the claim ahead), #2 in the queue; behind {USER} (pid {first.pid}, " in line
    dgx.let_go()
    assert first.stdout.readline() == "up\n"
    assert second.poll() is None
    first.communicate("\n", timeout=60)
    assert second.wait(60) == 0


# In the company of other programs


def test_a_job_of_no_gpu_starts_its_command_and_says_so(command) -> None:
    said = "safe-gpu: the command starts without a GPU: job slurm:7 asked for no GPU on this host: ask"
    for quiet, told in ((), said), (("-q",), ""):
        line = ("run", *quiet, "-n", "job", "--", "printenv", "CUDA_VISIBLE_DEVICES")
        done = command.run(*line, env={"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "0"})
        assert (done.returncode, done.stdout, done.stderr.startswith(told)) == (0, "\n", True)
        assert not quiet or not done.stderr


# What it says of the claim


def test_on_a_terminal_it_says_so_at_once(command, terminal: Terminal) -> None:
    for quiet in ((), ("-q",)):
        assert command.run("run", "-n", 2, *quiet, "--", "true", stderr=terminal.slave).returncode == 0
    terminal.read_to_the_end()
    assert terminal.raw == "safe-gpu: got GPU 0,1 (2 x NVIDIA A100-SXM4-80GB, simulated)\r\n"


# Where the host is to blame


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")
@pytest.mark.parametrize(
    ("said", "config", "code"), [((), "", 73), ((), "100", 100), (("--refused-exit", 99), "100", 99)]
)
def test_what_a_scheduler_is_told_of_a_broken_host(
    command,
    run_here,
    tmp_path: Path,
    rules,
    monkeypatch: pytest.MonkeyPatch,
    said: tuple[object, ...],
    config: str,
    code: int,
) -> None:
    if config:
        rules(f"[host]\nrefused_exit = {config}\n")
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    assert run_here("run", *said, "--", "true").returncode == code
    monkeypatch.setenv("SAFE_GPU_DIR", str(tmp_path / "state"))
    assert run_here("run", "-n", 99, *said, "--", "true").returncode == 78  # the request is to blame
    assert command.run("run", *said, "--", "sh", "-c", "exit 70").returncode == 70  # the command's own


# That meets nobody: which modules it loads

# Rooms that only a claim needs that waits, fails, or runs on the GPUs of a real vendor.
OTHER_ROOMS = {"status", "engines", "doctor", "demo"}
OTHERS = {"claim.limits", "claim.worker", "claim.report", "drivers.nvml", "runtimes.cuda", "cli.status"}
HEAVY = set("logging subprocess ctypes socket hashlib shutil tempfile difflib pynvml".split())

RUN = """
import filelock, json, os
loaded = set(sys.modules)
lock, locked = filelock.lock_descriptor, []
def spied(fd, **options):
    locked.append(fd)
    return lock(fd, **options)
filelock.lock_descriptor = spied
def become(*arguments):
    own = [name.removeprefix("safe_gpu.") for name in sys.modules if name.split(".")[0] == "safe_gpu"]
    say(json.dumps([own, sorted(set(sys.modules) - loaded), locked]))
    os._exit(0)
os.execv = become
from safe_gpu.cli import main
main(["run", "--", "true"])
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < (os.cpu_count() or 1), reason="needs all CPUs of the host")
def test_an_undisturbed_run(dgx: Any, child: Any, command: Any) -> None:
    command.run("run", "--", "true")  # the state directory is there by now
    own, others, locked = json.loads(child(RUN).hear())
    assert OTHER_ROOMS.isdisjoint(name.partition(".")[0] for name in own)
    assert OTHERS.isdisjoint(own)
    assert HEAVY.isdisjoint(others)
    assert locked


def test_partitions_of_amd_gpus(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi300x-cpx")
    shell = "echo $ROCR_VISIBLE_DEVICES; safe-gpu status --free"
    claimed, *free = command.run("run", "--only", "2,3", "-n", 2, "--", "sh", "-c", shell).stdout.split()
    uuids = [gpu.uuid for gpu in api.find_preset("mi300x-cpx").gpus]
    assert claimed.split(",") == uuids[2:4]
    assert free == [str(index) for index in range(len(uuids)) if index not in (2, 3)]
