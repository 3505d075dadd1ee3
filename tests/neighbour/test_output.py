"""What a neighbour writes comes out as plain text of bounded length, wherever it is shown."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination.leases import fault_name, lease_name

TRICK = "\x1b[2J\x1b]0;owned\x07\u202e\u2066evil\r\nGPU 0 is free\x9b31m\x00\u0085\u2028."
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
    text = TRICK.replace("\x00", "")
    names = [lease_name(uuid) for uuid in ground.uuids]
    holder = child(
        "import fcntl, os, subprocess\n"
        f"os.chdir({str(state_dir / 'leases')!r})\n"
        f"kept = [open(name, 'r+') for name in {names[:2]!r}]\n"
        "for file in kept: fcntl.flock(file, fcntl.LOCK_EX); os.set_inheritable(file.fileno(), True)\n"
        f"os.execlp('sh', {text!r}, '-c', 'echo held; read x', {text!r}, {text * 200!r})\n"
    )
    assert holder.hear() == "held"
    record = {"pid": holder.pid, "uid": 0, "user": TRICK, "host": TRICK, "job": TRICK, "command": TRICK, "since": 1}
    (state_dir / "leases" / names[0]).write_text(json.dumps(record))
    (state_dir / "leases" / names[1]).write_text(json.dumps({**record, "pid": os.getpid()}))  # forged
    note = {"when": time.time(), "error": TRICK}
    (state_dir / "leases" / fault_name(ground.uuids[2])).write_text(json.dumps(note))
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
            for line in text.split("\n"):
                assert line.isprintable(), f"{arguments}: {line!r}"
                assert not line.startswith("GPU 0 is free")
            assert len(text) < 30_000
            if "--json" in arguments:
                assert_plain(json.loads(done.stdout))


def test_a_refusal_that_names_the_holders(command: Any, tricks: int) -> None:
    done = command.run("run", "-n", 8, "--timeout", 0.2, "--", "true")
    assert done.returncode == LATE, "nobody is refused for the parent that the second record names"
    assert str(tricks) in done.stderr
    assert all(line.isprintable() for line in done.stderr.split("\n")), repr(done.stderr)


def assert_plain(value: Any) -> None:
    if isinstance(value, str):
        assert value.isprintable(), repr(value)
    elif isinstance(value, dict):
        for one in value.values():
            assert_plain(one)
    elif isinstance(value, list):
        for one in value:
            assert_plain(one)
