"""What claims write into the history, whatever way they end."""

import fcntl
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

import safe_gpu
from safe_gpu.claim import claim as claim_module
from safe_gpu.coordination import history
from safe_gpu.status.history import PastClaim, claims_between


def past() -> list[PastClaim]:
    claims, warnings = claims_between(0, time.time() + 1)
    assert warnings == []
    return claims


def lines(state_dir: Path) -> list[dict[str, Any]]:
    text = "".join(file.read_text() for file in sorted((state_dir / history.NAME).glob("*.jsonl")))
    return [json.loads(line) for line in text.splitlines()]


def test_a_claim_is_told_by_its_entry_and_written_when_it_is_released(state_dir: Path, ground: Any) -> None:
    with claim(2, hold_for=60):
        (running,) = past()
        assert lines(state_dir) == []
        assert (running.running, running.labels) == (True, ("0", "1"))
    first, end = lines(state_dir)
    assert (first["uid"], first["gpus"], first["labels"]) == (os.geteuid(), ground.uuids[:2], ["0", "1"])
    assert first["until"] == pytest.approx(first["claim"][1] + 60, abs=0.01)
    assert first["waited"] >= 0
    assert end == {"v": 1, "claim": first["claim"], "ended": end["ended"]}
    (known,) = past()
    assert (known.running, known.seen, known.ended) == (False, end["ended"], end["ended"])


def test_a_claim_that_was_killed_ended_between_last_seen_and_found_dead(
    state_dir: Path, command: Any, eventually: Any
) -> None:
    """And the history has names only, though entries may have the whole command by their user's wish."""
    words = ("run", "-n", 2, "--", "sh", "-c", "echo up; read x", "hunter2")
    started = command.start(*words, stdin=subprocess.PIPE, env={"SAFE_GPU_RECORD_COMMAND": "full"})
    assert started.stdout.readline() == "up\n"
    assert any("hunter2" in file.read_text() for file in (state_dir / "claims").iterdir())
    before = time.time()
    assert command.run("status").returncode == 0
    (alive,) = past()
    assert alive.running
    started.send_signal(signal.SIGKILL)
    started.wait(60)
    killed = time.time()
    assert [one.ended is not None for one in past()] == [True]  # by its entry
    with claim(2):
        (dead, mine) = past()
        assert len(os.listdir(state_dir / "claims")) == 1
    assert (dead.command, dead.gpus, dead.running) == ("sh", mine.gpus, False)
    assert before - 1 < dead.seen < killed + 1 < (dead.ended or 0.0) + 2
    assert [one["claim"][0] for one in lines(state_dir) if "ended" in one] == [started.pid, os.getpid()]
    assert "hunter2" not in json.dumps(lines(state_dir))


def test_a_claim_that_is_refused_tells_of_the_dead_that_it_has_removed(state_dir: Path, command: Any) -> None:
    words = ("run", "--", "sh", "-c", "echo up; read x")
    killed, other = (command.start(*words, stdin=subprocess.PIPE) for _ in range(2))
    for one in (killed, other):
        assert one.stdout.readline() == "up\n"
    killed.kill()
    killed.wait(60)
    with pytest.raises(safe_gpu.NotEnoughGpusError):
        claim(8)
    assert len(os.listdir(state_dir / "claims")) == 1
    assert [one["claim"][0] for one in lines(state_dir) if "ended" in one] == [killed.pid]


def test_nothing_of_it_is_done_under_host_lock(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    def spy(lines: Any, *more: Any) -> bool:
        with open(state_dir / "host.lock", "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, if anybody holds it
        written.append(lines)
        return True

    monkeypatch.setattr(claim_module, "append", spy)
    with claim():
        pass
    assert len(written) == 1


def test_a_history_that_cannot_be_written_costs_its_lines_and_no_claim(state_dir: Path) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    (state_dir / history.NAME).touch()
    with claim() as owner:
        assert owner.devices_taken == [0]
    (state_dir / history.NAME).unlink()
    assert past() == []
    with claim():
        pass
    assert len(past()) == 1


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_jumps_does_not_change_how_long_a_claim_lasted(state_dir, monkeypatch, jump: float) -> None:
    clock, began = time.time, time.monotonic()
    with claim():
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
    lasted = time.monotonic() - began
    end = lines(state_dir)[-1]
    assert 0 <= end["ended"] - end["claim"][1] <= lasted + 1e-3
