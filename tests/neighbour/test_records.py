"""What records tell the neighbours of a claim, while it lives and after it."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.coordination.leases.record import LeaseRecord
from safe_gpu.host import procfs
from safe_gpu.status.gather import gather

USER = 4711
SECRET = "hunter2"


def records(state_dir: Path) -> str:
    return "".join(file.read_text() for file in sorted((state_dir / "leases").glob("*.lock")))


def ends_only(state_dir: Path) -> bool:
    """Whether no lease file says more than when its last claim ended."""
    lines = [json.loads(line) for line in records(state_dir).splitlines()]
    return bool(lines) and all(line.keys() == {"v", "claim", "ended"} for line in lines)


def test_arguments_stand_in_no_record(state_dir: Path, command: Any) -> None:
    line = ("run", "-n", 2, "--", "sh", "-c", "echo up; read x", "sh", "--password", SECRET)
    started = command.start(*line, stdin=subprocess.PIPE)
    assert started.stdout.readline() == "up\n"
    assert '"command": "sh"' in records(state_dir)
    assert SECRET not in records(state_dir)
    claim = gather().gpus[0].claim
    assert claim is not None
    assert claim.command == "sh", "nor are they shown"
    started.communicate("\n", timeout=60)


@pytest.mark.parametrize("look", ["status", "claim"])
def test_a_record_ends_with_its_claim_however_that_ends(state_dir: Path, command: Any, look: str, monkeypatch) -> None:
    monkeypatch.setenv("SAFE_GPU_RECORD_COMMAND", "full")
    started = command.start("run", "-n", 8, "--", "sh", "-c", "echo up; read x", SECRET, stdin=subprocess.PIPE)
    assert started.stdout.readline() == "up\n"
    started.send_signal(signal.SIGKILL)
    started.wait(60)
    assert SECRET in records(state_dir)
    if look == "status":
        gather()
    else:
        safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    assert ends_only(state_dir)


def test_a_neighbour_who_finds_it_dead_empties_it(state_dir: Path, as_user: Any, ground: Any) -> None:
    def hold(say: Callable[[str], None], listen: Callable[[], str]) -> None:
        safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
        os.kill(os.getpid(), signal.SIGKILL)

    holder = as_user(hold, uid=USER)
    assert holder.hear() == ""
    assert holder.end()
    assert json.loads((state_dir / "leases" / lease_name(ground.uuids[0])).read_text())["uid"] == USER
    assert as_user(lambda say, listen: say(str(safe_gpu.get_free_gpus())), uid=USER + 1).hear()
    assert ends_only(state_dir)


def test_the_record_of_a_process_that_is_only_exiting_stays(state_dir: Path, ground: Any, monkeypatch) -> None:
    """Its memory is still on the GPU, and who waits for that GPU has to know that it will go."""
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    record = LeaseRecord.of_this_process(None, None).claiming((ground.uuids[0],), "")
    path = state_dir / "leases" / lease_name(ground.uuids[0])
    path.write_bytes(record.encode())
    gather()
    assert path.read_bytes() == record.encode()
    monkeypatch.setattr(procfs, "has_ended", lambda pid: True)
    gather()
    assert ends_only(state_dir)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 60_000, "x" * 100_000, '{"pid": 0}'])
def test_nonsense_in_a_free_lease_is_removed(state_dir: Path, ground: Any, content: str) -> None:
    safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()
    path = state_dir / "leases" / lease_name(ground.uuids[0])
    path.write_text(content)
    gather()
    assert path.read_bytes() == b""
