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
from support.forks import in_fork

from safe_gpu.claim import history_entry as note
from safe_gpu.coordination import history
from safe_gpu.coordination.leases.claim_end import ClaimEnd
from safe_gpu.coordination.leases.file_names import lease_name
from safe_gpu.status.history import PastClaim, claims_between


def past() -> list[PastClaim]:
    claims, warnings = claims_between(0, time.time() + 1)
    assert warnings == []
    return claims


def lines(state_dir: Path) -> list[dict[str, Any]]:
    text = "".join(file.read_text() for file in sorted((state_dir / history.NAME).iterdir()))
    return [json.loads(line) for line in text.splitlines()]


def test_a_claim_is_written_when_it_begins_and_its_end_by_the_next(state_dir: Path, ground: Any) -> None:
    with claim(2, hold_for=60):
        (first,) = lines(state_dir)
        assert (first["uid"], first["gpus"], first["labels"]) == (os.geteuid(), ground.uuids[:2], ["0", "1"])
        assert first["until"] == pytest.approx(first["claim"][1] + 60, abs=0.01)
        assert past()[0].running
    assert lines(state_dir) == [first]
    (known,) = past()
    assert not known.running
    assert known.seen == known.ended  # released: known exactly
    with claim():
        end, second = lines(state_dir)[1:]
        assert end["claim"] == first["claim"]
        assert end["ended"] == pytest.approx(known.ended, abs=5)  # the two leases ended one after the other
        assert second["gpus"] == ground.uuids[:1]
    assert [one.ended is not None for one in past()] == [True, True]


def test_a_claim_that_was_killed_ended_between_last_seen_and_found_free(
    state_dir: Path, command: Any, eventually: Any
) -> None:
    started = command.start("run", "-n", 2, "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE)
    assert started.stdout.readline() == "up\n"
    eventually(lambda: past()[0].running)  # /proc/locks may miss one while others lock and unlock files
    (alive,) = past()
    started.send_signal(signal.SIGKILL)
    started.wait(60)
    before = time.time()
    with claim(2):
        (dead, mine) = past()
    assert (dead.command, dead.gpus, dead.running) == ("sh", mine.gpus, False)
    assert alive.seen - 0.1 <= dead.seen < before <= (dead.ended or 0.0) <= mine.since + 60
    assert dead.seen > dead.since  # the look saw it alive


def test_a_claim_that_was_killed_before_it_wrote_its_line_has_one(state_dir: Path, child: Any) -> None:
    code = """
import os, safe_gpu
from safe_gpu.claim import history_entry as note
note.append = lambda lines, now: os.kill(os.getpid(), 9)
safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
"""
    killed = child(code)
    killed.process.wait(60)
    assert not (state_dir / history.NAME).exists()
    with claim():
        first, _ = past()
    assert first.pid == killed.pid
    assert first.ended


def test_a_waiter_that_was_killed_leaves_no_line(state_dir: Path, command: Any, ground: Any) -> None:
    ground.hold(*range(8))
    waiter = command.start("run", "--", "true")
    assert "waiting" in waiter.stderr.readline()
    waiter.kill()
    waiter.wait(60)
    ground.let_go()
    with claim():
        assert [one.pid for one in past()] == [os.getpid()]


def test_a_month_ends_while_claims_go_on(state_dir: Path, ground: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    december = 1_796_083_200.0  # its first second, in UTC
    clock = [december - 10]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock[0])
    owner = claim()
    clock[0] = december + 5
    owner.release_gpus()
    with claim():
        pass
    files = sorted(file.name for file in (state_dir / history.NAME).iterdir())
    assert files == ["2026-11.jsonl", "2026-12.jsonl"]
    (first, _), warnings = claims_between(december, december + 60)
    assert (first.since, first.ended, warnings) == (december - 10, december + 5, [])


def test_nothing_of_it_is_done_under_host_lock(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []

    def spy(lines: Any, now: float) -> bool:
        with open(state_dir / "host.lock", "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, if anybody holds it
        locked.append(False)
        return True

    monkeypatch.setattr(note, "append", spy)
    with claim():
        pass
    assert locked == [False]


def test_a_history_that_cannot_be_written_costs_its_line_and_no_claim(state_dir: Path, ground: Any) -> None:
    with claim():
        pass
    file = state_dir / "leases" / lease_name(ground.uuids[0])
    left = file.read_bytes()
    written = (state_dir / history.NAME).rename(state_dir / "kept")
    (state_dir / history.NAME).touch()
    with claim() as owner:
        assert owner.devices_taken == [0]
    assert file.read_bytes() == left  # the end of the claim that the history knows
    (state_dir / history.NAME).unlink()
    written.rename(state_dir / history.NAME)
    with claim():
        pass
    assert len(past()) == 2


def test_a_claim_inside_another_has_no_line(state_dir: Path) -> None:
    with claim(2, delegate=True):
        in_fork(lambda: claim(1).release_gpus())
    assert [len(one.gpus) for one in past()] == [2]
    for file in (state_dir / "leases").glob("*.inner.lock"):
        assert file.read_bytes() == b""


def test_a_shared_display_has_no_lines(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:laptop")
    with claim():
        pass
    assert not (state_dir / history.NAME).exists()


def test_the_history_has_names_only(state_dir: Path, command: Any) -> None:
    """Records may have the whole command by their user's wish, and are gone soon; the history stays."""
    environment = {"SAFE_GPU_RECORD_COMMAND": "full"}
    done = command.run("run", "-q", "--", "sh", "-c", "true", "hunter2", env=environment)
    assert done.returncode == 0
    assert any("hunter2" in file.read_text() for file in (state_dir / "leases").iterdir())
    with claim():
        text = json.dumps(lines(state_dir))
    assert "hunter2" not in text
    assert '"command": "sh"' in text


def test_releases_write_when_even_if_the_clock_went_back(state_dir: Path, ground: Any, monkeypatch: Any) -> None:
    owner = claim()
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    owner.release_gpus()
    ending = ClaimEnd.decode((state_dir / "leases" / lease_name(ground.uuids[0])).read_bytes())
    assert ending is not None
    assert ending.since <= ending.ended < ending.since + 300
