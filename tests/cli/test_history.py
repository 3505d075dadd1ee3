"""``safe-gpu history``: its forms, its times, and what it shows of real claims."""

import csv
import io
import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.settings.durations import parse_moment

NOW = time.mktime((2026, 11, 21, 12, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("today", (2026, 11, 21, 0, 0)),
        ("yesterday", (2026, 11, 20, 0, 0)),
        ("2026-11-01", (2026, 11, 1, 0, 0)),
        ("2026-11-01 13:45", (2026, 11, 1, 13, 45)),
        ("12:30", NOW),
        ("12:31", (2026, 11, 20, 12, 31)),
        ("sat 9:00", (2026, 11, 21, 9, 0)),
        ("Saturday  13:00", (2026, 11, 14, 13, 0)),
        ("+2h", NOW + 7200),
        ("7d", NOW - 7 * 86400),
        ("99999999d", 0.0),
    ],
)
def test_times(text: str, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: NOW)
    assert parse_moment(text) == (time.mktime((*expected, 0, 0, 0, -1)) if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12:30", (2026, 11, 22, 12, 30)),
        ("12:31", (2026, 11, 21, 12, 31)),
        ("Sat 12:30", (2026, 11, 28, 12, 30)),
        ("Sat 12:31", (2026, 11, 21, 12, 31)),
        ("Tue 9:00", (2026, 12, 1, 9, 0)),
        ("+90m", NOW + 5400),
    ],
)
def test_the_next_such_time(text: str, expected: Any) -> None:
    after = time.mktime((*expected, 0, 0, 0, -1)) if isinstance(expected, tuple) else expected
    base = NOW if text != "Tue 9:00" else time.mktime((2026, 11, 24, 9, 0, 0, 0, 0, -1))
    assert parse_moment(text, base) == after


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "UTC"])
def test_a_time_of_day_is_one_where_the_clocks_change(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        base = time.mktime((2026, 10, 24, 18, 0, 0, 0, 0, -1))
        for days, text in enumerate(("17:00", "Mon 17:00"), 1):
            found = time.localtime(parse_moment(text, base))
            assert (found.tm_mday, found.tm_hour, found.tm_min) == (24 + days, 17, 0)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text", ["soon", "24:00", "9:60", "Foo 9:00", "+", "+2", "7", "", "2026-13-01", "inf", "-5h", "2026-11-01 25:00"]
)
def test_what_is_no_time_is_told_what_is(text: str) -> None:
    with pytest.raises(ValueError, match="write 2026-11-01"):
        parse_moment(text)


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


def test_a_report_of_a_wait(command: Any, ask: Any, ground: Any, eventually: Any) -> None:
    with safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), affinity=None, timeout=0):
        began = time.monotonic()
        waiter = command.start("run", "-q", "-n", 2, "--", "true")
        eventually(lambda: bool(ground.tickets()))
        seen = time.monotonic()
        eventually(lambda: time.monotonic() > seen)
        least = time.monotonic() - seen
    assert waiter.wait(60) == 0
    most = time.monotonic() - began
    last, first = json.loads(ask("history", "--json").stdout)["claims"]
    assert first["waited"] >= 0
    assert least < last["waited"] < most
    user, week, host = json.loads(ask("history", "--report", "month", "--json").stdout)["report"]
    assert [one["claims"] for one in (user, week, host)] == [2, 2, 2]
    assert (user["waits"], user["wait_95"]) == (2, last["waited"])
    assert user["free_gpu_hours"] is None
    assert week["free_gpu_hours"] == host["free_gpu_hours"] >= 0
    rows = list(csv.DictReader(io.StringIO(ask("history", "--report", "month", "--csv").stdout)))
    assert rows[0].keys() == user.keys()
    for name in ("by", "key", "claims", "waits", "wait_mean", "wait_95"):  # the hours grow while somebody looks
        assert [row[name] for row in rows] == [str(one[name]) for one in (user, week, host)]
    titles = [line.split()[0] for line in ask("history", "--report", "month").stdout.splitlines() if line[:1].isupper()]
    assert titles == ["USER", "WEEK", "HOST"]


def test_a_picture_needs_matplotlib(used: None, ask: Any, command: Any, tmp_path: Path, monkeypatch: Any) -> None:
    words = ("history", "--report", "month", "--plot", tmp_path / "month.svg")
    if find_spec("matplotlib") is not None:
        done = command.run(*words)
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "month.svg").read_text().startswith("<?xml")
        (tmp_path / "month.svg").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = ask(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--plot needs matplotlib, which is not installed: pip install matplotlib" in done.stderr
    assert list(tmp_path.iterdir()) == []


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
