"""What the commands that look show of real claims: ``history``, its forms and times, and parts of ``status``."""

import csv
import io
import json
import os
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.claims import claim

from safe_gpu.host import procfs
from safe_gpu.settings.durations import parse_moment

NOW = time.mktime((2026, 11, 21, 12, 30, 0, 0, 0, -1))


def moments(*texts: str, after: float | None = None) -> list[str]:
    return [time.strftime("%m-%d %H:%M", time.localtime(parse_moment(text, after))) for text in texts]


def test_times_that_were_and_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Saturday at 12:30. Now is not next."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    days = ("yesterday", "2026-11-01", "2026-11-01 13:45", "sat 9:00", "Saturday  13:00", "7d")
    assert moments(*days) == ["11-20 00:00", "11-01 00:00", "11-01 13:45", "11-21 09:00", "11-14 13:00", "11-14 12:30"]
    assert moments("12:30", "12:31", "+2h") == ["11-21 12:30", "11-20 12:31", "11-21 14:30"]
    assert parse_moment("99999999d") == 0.0
    assert moments("12:30", "12:31", "+90m", after=NOW) == ["11-22 12:30", "11-21 12:31", "11-21 14:00"]
    assert moments("Sat 12:30", "Sat 12:31", after=NOW) == ["11-28 12:30", "11-21 12:31"]


def test_a_time_of_day_is_one_where_the_clocks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        before = time.mktime((2026, 10, 24, 18, 0, 0, 0, 0, -1))
        assert moments("17:00", "Mon 17:00", after=before) == ["10-25 17:00", "10-26 17:00"]
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
        claim(number).release_gpus()


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_claims_the_latest_first_in_each_form(used: None, ask: Any) -> None:
    title, first, second = ask("history").stdout.splitlines()
    assert title.split() == ["USER", "GPU", "FROM", "TO", "GPU-HOURS", "COMMAND"]
    assert [first.split()[1], second.split()[1]] == ["0", "0,1"]
    document = json.loads(ask("history", "--json").stdout)
    one, two = document["claims"]
    assert (document["schema"], one["labels"], one["running"]) == (1, ["0"], False)
    assert two["since"] <= two["seen"] == two["ended"] <= one["since"]
    last, before = rows(ask("history", "--csv").stdout)
    assert (last["labels"], before["labels"], last.keys()) == ("0", "0 1", one.keys())
    assert last["ended"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one["ended"]))


@pytest.mark.parametrize(("by", "keys"), [("user", 1), ("gpu", 2), ("job", 1), ("day", 1)])
def test_gpu_hours(used: None, ask: Any, by: str, keys: int) -> None:
    document = json.loads(ask("history", "--by", by, "--json", "--since", "1h").stdout)
    assert document["by"] == by
    assert len({row[by] for row in document["use"]}) == keys
    assert [row[by] for row in rows(ask("history", "--by", by, "--csv").stdout)] == [row[by] for row in document["use"]]
    table = ask("history", "--by", by).stdout.splitlines()
    assert table[0].split() == [by.upper(), "CLAIMS", "GPU-HOURS"]
    assert len(table) == 1 + keys + (keys > 1)


def test_a_report_of_a_wait(command: Any, ask: Any, ground: Any, eventually: Any) -> None:
    with claim(8):
        began = time.monotonic()
        waiter = command.start("run", "-q", "-n", 2, "--", "true")
        eventually(lambda: bool(ground.tickets()))
        seen = time.monotonic()
        eventually(lambda: time.monotonic() > seen)
        least = time.monotonic() - seen
    assert waiter.wait(60) == 0
    most = time.monotonic() - began
    last, _ = json.loads(ask("history", "--json").stdout)["claims"]
    assert least < last["waited"] < most
    user, week, host = json.loads(ask("history", "--report", "month", "--json").stdout)["report"]
    assert [one["claims"] for one in (user, week, host)] == [2, 2, 2]
    assert (user["waits"], user["wait_95"], user["free_gpu_hours"]) == (2, last["waited"], None)
    assert week["free_gpu_hours"] == host["free_gpu_hours"] >= 0
    table = rows(ask("history", "--report", "month", "--csv").stdout)
    assert table[0].keys() == user.keys()
    for name in ("by", "key", "claims", "waits", "wait_mean", "wait_95"):  # the hours grow while somebody looks
        assert [row[name] for row in table] == [str(one[name]) for one in (user, week, host)]
    assert re.findall("^[A-Z]+", ask("history", "--report", "month").stdout, re.MULTILINE) == ["USER", "WEEK", "HOST"]


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


def test_a_host_without_a_history(state_dir: Path, ask: Any) -> None:
    done = ask("history")
    assert (done.returncode, done.stdout, done.stderr) == (0, "no claims in this time\n", "")
    assert not state_dir.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")
def test_a_claim_without_work_is_marked_and_listed_from_the_limit_on(ask: Any, rules: Any, monkeypatch: Any) -> None:
    def listed() -> int:
        return len(json.loads(ask("history", "--idle", "--json").stdout)["claims"])

    now = time.time
    with claim(8):
        assert ask("status").returncode == 0  # the first look, from which on the GPUs are known to be idle
        assert listed() == 1
        monkeypatch.setattr(time, "time", lambda: now() + 7200)
        for policy, marked, found in (
            ("max_gpus = 8", False, 1),
            ("idle_report_after = 1h", True, 1),
            ("idle_report_after = 3h", False, 0),
            ("idle_report_after = unlimited", False, 0),
        ):
            rules(f"[user root]\n{policy}\n")
            assert ("\nGPU 0-7: no work for 2 h\n" in ask("status").stdout, listed()) == (marked, found), policy
        assert all(one["idle_for"] > 7200 for one in json.loads(ask("status", "--json").stdout)["gpus"])
    assert listed() == 0


# status --free, --mine and --user


def test_nothing_is_free_where_the_claims_are_not_known(state_dir: Path, ask: Any) -> None:
    state_dir.mkdir()
    (state_dir / "claims").touch()
    done = ask("status", "--free")
    assert (done.returncode, done.stdout, "warning" in done.stderr) == (73, "", True)


def test_gpus_that_are_free_and_those_of_one_user(ask: Any, ground: Any) -> None:
    ground.hold(5, uid=4711)
    with claim(2):
        done = ask("status", "--free")
        assert (done.returncode, done.stdout, done.stderr) == (0, "2\n3\n4\n6\n7\n", "")
        for words in (["--mine"], ["--user", procfs.user_name(os.geteuid())]):
            assert [one["index"] for one in json.loads(ask("status", "--json", *words).stdout)["gpus"]] == [0, 1]
            title, *lines = ask("status", *words).stdout.splitlines()
            assert ": 5 of 8 GPUs free" in title
            assert not any(line.split()[:1] == ["2"] for line in lines)
        assert json.loads(ask("status", "--json", "--user", "nobody").stdout)["gpus"] == []
        assert "none of these GPUs" in ask("status", "--user", "nobody").stdout
