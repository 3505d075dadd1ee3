"""``safe-gpu history``: its forms, its times, and what it shows of real claims."""

from __future__ import annotations

import argparse
import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.cli.status import moment

NOW = time.mktime((2026, 11, 21, 12, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW),
        ("today", (2026, 11, 21, 0, 0)),
        ("yesterday", (2026, 11, 20, 0, 0)),
        ("2026-11-01", (2026, 11, 1, 0, 0)),
        ("2026-11-01 13:45", (2026, 11, 1, 13, 45)),
        ("2026-11-01T13:45", (2026, 11, 1, 13, 45)),
        ("7d", NOW - 7 * 86400),
        ("99999999d", 0.0),
    ],
)
def test_times(text: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert moment(text) == (time.mktime((*expected, 0, 0, 0, -1)) if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("text", ["soon", "7", "", "2026-13-01", "inf", "-5h", "2026-11-01 25:00"])
def test_what_is_no_time_is_told_what_is(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="write 2026-11-01"):
        moment(text)


@pytest.fixture
def used(state_dir: Path, driver_libraries: object) -> None:
    """A host where this process has claimed two GPUs and one."""
    for number in (2, 1):
        safe_gpu.GPUOwner(number, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).release_gpus()


def test_claims_the_latest_first(used: None, ask: Any) -> None:
    done = ask("history")
    title, first, second = done.stdout.splitlines()
    assert title.split() == ["USER", "GPU", "FROM", "TO", "GPU-HOURS", "COMMAND"]
    assert [first.split()[1], second.split()[1]] == ["0", "0,1"]
    assert done.stderr == ""


def test_json_and_csv_tell_the_same(used: None, ask: Any) -> None:
    document = json.loads(ask("history", "--json").stdout)
    assert document["schema"] == 1
    one, two = document["claims"]
    assert one["labels"] == ["0"]
    assert one["running"] is False
    assert two["since"] <= two["seen"] == two["ended"] <= one["since"]
    rows = list(csv.DictReader(io.StringIO(ask("history", "--csv").stdout)))
    assert [row["labels"] for row in rows] == ["0", "0 1"]
    assert rows[0].keys() == one.keys()
    assert rows[0]["ended"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one["ended"]))


@pytest.mark.parametrize(("by", "keys"), [("user", 1), ("gpu", 2), ("job", 1), ("day", 1)])
def test_gpu_hours(used: None, ask: Any, by: str, keys: int) -> None:
    document = json.loads(ask("history", "--by", by, "--json", "--since", "1h").stdout)
    assert document["by"] == by
    assert len({row[by] for row in document["use"]}) == keys
    rows = list(csv.DictReader(io.StringIO(ask("history", "--by", by, "--csv").stdout)))
    assert [row[by] for row in rows] == [row[by] for row in document["use"]]
    table = ask("history", "--by", by).stdout.splitlines()
    assert table[0].split() == [by.upper(), "CLAIMS", "GPU-HOURS"]
    assert len(table) == 1 + keys + (keys > 1)


def test_others_and_other_times_are_left_out(used: None, ask: Any) -> None:
    assert ask("history", "--user", "nobody-of-here").stdout == "no claims in this time\n"
    assert ask("history", "--until", "1h").stdout == "no claims in this time\n"
    assert json.loads(ask("history", "--until", "1h", "--json").stdout)["claims"] == []


def test_claims_whose_gpus_show_no_work(used: None, ask: Any) -> None:
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0):
        ask("status")  # the first look, from which on the GPU is known to be idle
        (claim,) = json.loads(ask("history", "--idle", "--json").stdout)["claims"]
    assert claim["running"]
    assert json.loads(ask("history", "--idle", "--json").stdout)["claims"] == []


def test_a_host_without_a_history(state_dir: Path, ask: Any) -> None:
    done = ask("history")
    assert (done.returncode, done.stdout, done.stderr) == (0, "no claims in this time\n", "")
    assert not state_dir.exists()


def test_gpu_hours_survive_a_clock_that_jumped(command, ground, ask) -> None:
    """A claim from before the jump seems to hold its GPU since a year ago; its process has not run that long."""
    started = command.start("run", "--", "sh", "-c", "echo up; exec sleep 600")
    assert started.stdout.readline() == "up\n"
    lease = ground.directory / "leases" / f"{ground.uuids[0]}.lock"
    record = json.loads(lease.read_text())
    lease.write_text(json.dumps({**record, "since": record["since"] - 365 * 86400}))
    (use,) = json.loads(ask("history", "--by", "gpu", "--since", "400d", "--json").stdout)["use"]
    assert use["gpu_hours_most"] < 1
