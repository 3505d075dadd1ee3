"""What a neighbour writes comes out as plain text of bounded length, wherever it is shown."""

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hostile import TRICK, assert_plain, assert_shown_safely

import safe_gpu
from safe_gpu.coordination.faults import write_fault
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.gpus.devices import GpuFault

LATE = 75

COMMANDS: list[tuple[object, ...]] = [
    ("status",),
    ("status", "--json"),
    ("doctor",),
    ("run", "-n", 8, "--timeout", 0.2, "--", "true"),
    ("wait", "-n", 8, "--timeout", 0.2),
]


@pytest.fixture
def tricks(state_dir: Path, ground: Any, child: Callable[..., Any]) -> int:
    """Tricks in the arguments of a holder, in its record, in a note and in a ticket; the pid of the holder."""
    safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    names = [lease_name(uuid) for uuid in ground.uuids]
    holder = child(
        "import fcntl, os, subprocess\n"
        f"os.chdir({str(state_dir / 'leases')!r})\n"
        f"kept = [open(name, 'r+') for name in {names[:2]!r}]\n"
        "for file in kept: fcntl.flock(file, fcntl.LOCK_EX); os.set_inheritable(file.fileno(), True)\n"
        f"os.execlp('sh', {TRICK!r}, '-c', 'echo held; read x', {TRICK!r}, {TRICK * 200!r})\n"
    )
    assert holder.hear() == "held"
    trick = f"{TRICK}\x00"  # no argument can have that
    record = {"pid": holder.pid, "uid": 0, "user": trick, "host": trick, "job": trick, "command": trick, "since": 1}
    (state_dir / "leases" / names[0]).write_text(json.dumps(record))
    (state_dir / "leases" / names[1]).write_text(json.dumps({**record, "pid": os.getpid()}))  # forged
    note = {"when": time.time(), "error": TRICK}
    write_fault(str(state_dir), ground.uuids[2], GpuFault(time.time(), "makes the directory"))
    (state_dir / "faults" / f"{ground.uuids[2]}.{os.geteuid()}").write_text(json.dumps(note))
    return int(holder.pid)


def test_tricks_of_text(state_dir: Path, ground: Any, command: Any, tricks: int) -> None:
    request = {"nb_gpus": 1, "gpus": ground.uuids}
    with open(state_dir / "queue" / "1.ticket", "w") as file:
        json.dump({"pid": os.getpid(), "user": TRICK, "since": 1, "request": request}, file)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        for arguments in COMMANDS:
            done = command.run(*arguments)
            text = done.stdout + done.stderr
            assert "evil" in text or arguments[0] in ("run", "wait", "doctor")
            assert_shown_safely(text)
            if "--json" in arguments:
                assert_plain(json.loads(done.stdout))


def test_a_refusal_that_names_the_holders(command: Any, tricks: int) -> None:
    done = command.run("run", "-n", 8, "--timeout", 0.2, "--", "true")
    assert done.returncode == LATE, "nobody is refused for the parent that the second record names"
    assert str(tricks) in done.stderr
    assert_shown_safely(done.stderr)
