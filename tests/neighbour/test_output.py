"""What a neighbour writes comes out as plain text of bounded length, and stands in no advice, which root may follow."""

import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostile import TRICK, assert_plain, assert_shown_safely

from safe_gpu.coordination.directory import PARTS, Directory
from safe_gpu.coordination.faults import write_fault
from safe_gpu.doctor import CheckedHost, run_checks
from safe_gpu.doctor.state import directory
from safe_gpu.gpus.devices import GpuFault
from safe_gpu.host import procfs
from safe_gpu.status.facts import HostStatus, WaiterStatus
from safe_gpu.status.metrics import render_metrics

LATE, NEIGHBOUR = 75, 4711
WORD = TRICK.replace("/", "")

COMMANDS: list[tuple[object, ...]] = [
    ("status",),
    ("status", "--json"),
    ("history",),
    ("doctor",),
    ("run", "-n", 8, "--timeout", 0.2, "--", "true"),
    ("wait", "-n", 8, "--timeout", 0.2),
]


@pytest.fixture
def tricks(state_dir: Path, ground: Any, child: Callable[..., Any], entry_of: Any) -> int:
    """Tricks in the arguments of a holder, in entries and their names, in a ticket and in a note; its pid."""
    run = f"os.execlp('sh', {TRICK!r}, '-c', 'echo held; read x', {TRICK!r}, {TRICK * 200!r})"
    holder = child(f"import os\n{run}")
    assert holder.hear() == "held"
    texts = {"user": TRICK, "host": TRICK, "job": TRICK, "command": TRICK * 200, TRICK: TRICK}
    here = {"start": procfs.start_time(holder.pid), "pidns": procfs.pid_namespace(), "since": time.time() - 9}
    ground.hold(0, pid=holder.pid, **texts)
    entry_of(NEIGHBOUR, {"gpus": {ground.uuids[1]: None}, "pid": holder.pid, **here, **texts})
    entry_of(NEIGHBOUR, {"gpus": {ground.uuids[2]: 5, TRICK: None}, "parts": {TRICK: 0}, "pid": 1, "pidns": 7, **texts})
    entry_of(NEIGHBOUR, {"gpus": ground.uuids, "nb_gpus": 1, "near": TRICK, TRICK: TRICK, **texts}, part="queue")
    entry_of(NEIGHBOUR, {"gpus": {ground.uuids[3]: TRICK}, **texts})
    dead = {"gpus": {ground.uuids[4]: None}, "pid": 1, "v": 1, "since": time.time() - 9, **texts}
    (state_dir / "claims" / f"9.{'9' * 16}").write_text(json.dumps(dead))
    for part in ("claims", "queue"):
        (state_dir / part / WORD).write_text(TRICK)
    write_fault(str(state_dir), ground.uuids[5], GpuFault(time.time(), "makes the directory"))
    note = {"when": time.time(), "error": TRICK}
    (state_dir / "faults" / f"{ground.uuids[5]}.{os.geteuid()}").write_text(json.dumps(note))
    return int(holder.pid)


def test_tricks_of_text(state_dir: Path, ground: Any, command: Any, tricks: int) -> None:
    for arguments in COMMANDS:
        done = command.run(*arguments)
        text = done.stdout + done.stderr
        assert "evil" in text or arguments[0] != "status"
        assert_shown_safely(text)
        if arguments[0] == "run":
            assert (done.returncode, str(tricks) in done.stderr) == (LATE, True), "a refusal names the holders"
        if "--json" in arguments:
            assert_plain(json.loads(done.stdout))


def test_metrics_of_a_thousand_users_who_wait() -> None:
    """A neighbour with a range of user ids (subuid(5)) can wait as each of them."""
    users = ["ada"] * 5 + ["other"] * 3 + [f"u{number}" for number in range(1000)]
    queue = tuple(WaiterStatus(place, 1, user, 1, 1.0) for place, user in enumerate(users, 1))
    text = render_metrics(HostStatus("h", "nvml", "", "/s", 2.0, (), queue))
    samples = [line.rpartition(" ") for line in text.splitlines() if line.startswith("safe_gpu_waiting{")]
    numbers = {labels: float(value) for labels, _, value in samples}
    assert (len(samples), sum(numbers.values())) == (100, len(users))
    assert numbers['safe_gpu_waiting{user="ada"}'] == 5
    assert numbers['safe_gpu_waiting{user="other"}'] == len(users) - 5 - 98


# What doctor advises is pasted by root: no name that a neighbour chose stands in it, and none that it can replace


@pytest.fixture
def used(state_dir: Path) -> Path:
    for part in PARTS:
        Directory(str(state_dir), part).close()
    return state_dir


@pytest.mark.parametrize("name", ["a\n; touch pwned\n", "\x1b[2J$(touch pwned)", "-rf "])
def test_names_of_others_stand_in_no_advice(used: Path, name: str) -> None:
    for part in PARTS:
        (used / part / name).symlink_to("/etc/passwd")
    for check in run_checks():
        assert "touch" not in check.fix + check.detail
        assert "-rf " not in check.fix


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_the_path_of_the_state_directory_is_quoted(open_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_tmp / "a b; touch pwned"
    Directory(str(path), "claims").close()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    monkeypatch.setenv("SAFE_GPU_DIR", str(path))
    command = directory(CheckedHost()).fix.partition(": ")[2]
    assert shlex.split(command) == ["safe-gpu", "setup", "--state-dir", str(path)]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("mode", [0o700, 0o1777])
@pytest.mark.parametrize("broken", ["host.lock", *PARTS, "."])
def test_root_is_not_told_to_change_what_others_can_replace(used: Path, broken: str, mode: int) -> None:
    """The owner puts a symbolic link in its place before the advice is followed."""
    path = used / broken
    path.touch()
    os.chown(path, NEIGHBOUR, NEIGHBOUR)
    path.chmod(mode)
    words = directory(CheckedHost()).fix.split()
    assert not {"chmod", "chown", "mv", "rm"} & {*words}
