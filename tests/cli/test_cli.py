"""The command line: what it understands, how it refuses and writes, and what the commands that look show of claims."""

import csv
import fcntl
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.claims import claim
from support.real import long

from safe_gpu import GPUAffinityError, LockTimeout, __version__


def parsed(*line: str) -> object:
    return api.commands.parse(list(line))


# What it understands


@pytest.mark.parametrize(
    ("options", "nb_gpus", "command"),
    [
        ("-n 2", 2, "python x.py --epochs 3"),
        ("--", 1, "python x.py -n 3 --version"),
        ("-n 2 --", 2, "sh -- a -- b"),
        ("--", 1, "--"),
        ("-n 2 --timeout 5", 2, "run -- x"),
    ],
)
def test_where_options_end_and_the_command_begins(options: str, nb_gpus: int, command: str) -> None:
    found = parsed("run", *options.split(), *command.split())
    assert (found.nb_gpus, found.command) == (nb_gpus, command.split())


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("1h30m", 5400.0), ("inf", None)])
@pytest.mark.parametrize("line", ["run {} -- true", "wait {}"])
def test_the_timeout_as_an_option_and_by_the_environment(line: str, text: str, seconds: Any, monkeypatch: Any) -> None:
    def timeout(option: str) -> object:
        return api.claim_arguments(parsed(*line.format(option).split()))["timeout"]

    assert [timeout(option) for option in (f"--timeout {text}", f"-t {text}", "")] == [seconds, seconds, None]
    monkeypatch.setenv("SAFE_GPU_TIMEOUT", text)
    assert [timeout(option) for option in ("", "--timeout 3")] == [seconds, 3.0]


# How it refuses

NO_COUNT = ("0", "-1", "x", "1.5", "1_0", "٣", "9" * 30)
NO_DURATION = ("x", "-5", "-5s", "5w", "1h30", "1:30", "nan", "-inf", "1e999")
NO_SIZE = ("x", "-1", "20XB", "GiB", "1e9", "20")
NO_GPUS = ("", "x", "0,,1", "3-1", "-1", "1.5")

BAD = [
    *[(f"{verb} -n {value} -- true", value) for verb in ("run", "wait") for value in NO_COUNT],
    *[(f"run --timeout {value} -- true", value) for value in NO_DURATION],
    *[(f"run --min-memory {value} -- true", value) for value in NO_SIZE],
    *[(f"run --{option}={value} -- true", value) for option in ("only", "exclude") for value in NO_GPUS],
    ("run --time 5 -- true", "--time"),  # no abbreviations: a later option would change what they mean
    ("bind --mode sideways -- true", "sideways"),
    ("run --refused-exit 256 -- true", "256"),
    *[(f"affinity --{end}-cores {value}", value) for end in ("min", "max") for value in ("0", "1.5")],
    *[(f"affinity --allowed {value}", value) for value in ("x", "5-2", ",", "-1", "0-99999999999")],
    *[(f"affinity --of {value}", value) for value in ("x", "0", "-1", "999999999")],
    *[(f"status --watch --interval={value}", "--interval") for value in ("0", "0.01", "-1", "inf", "soon", "")],
    # What does not go together
    *[(f"status --free {other}", "--free") for other in ("--json", "--mine", "--prometheus")],
    *[(f"status --prometheus {other}", other.split()[0]) for other in ("--user anna", "--watch")],
    *[(f"status --html {other}", other.split()[0]) for other in ("--json", "--user anna", "--watch")],
    *[(f"status {option}", option.split()[0]) for option in ("--output file", "--interval 5m")],
    ("status --mine --user anna", "--user"),
    *[(f"history {line}", line.split()[0]) for line in ("--json --csv", "--by moon", "--since 1h --until 2h")],
    *[(f"history --report month {line}", line.split()[0]) for line in ("--by user", "--user anna", "--idle")],
    *[(f"history {line}", "--plot") for line in ("--plot a.svg", "--report month --plot a.pdf")],
]  # fmt: skip


@pytest.mark.parametrize(("line", "value"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_a_usage_error_of_one_line(line: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert api.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:8]) == ("", 1, "safe-gpu")
    assert value in err


# Exit codes


@pytest.mark.parametrize("line", ["wait", "status", "run -- /bin/true"])
def test_no_driver(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    done = run_here(*line.split())
    assert (done.returncode, done.stderr[:10]) == (69, "safe-gpu: ")


def test_an_unusable_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "no" / "parent"):
        monkeypatch.setenv("SAFE_GPU_DIR", str(path))
        assert api.main(["wait"]) == 73
        assert str(path.parent if path.name == "parent" else path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(LockTimeout("held"), 75), (GPUAffinityError("too few cores"), 78), (KeyboardInterrupt(), 130)]
)
def test_what_a_claim_may_raise(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, run_here) -> None:
    monkeypatch.setattr(api.owner.GPUOwner, "__init__", Mock(side_effect=error))
    done = run_here("run", "--", "true")
    assert (done.returncode, done.stderr) == (code, f"safe-gpu: {error}\n" if str(error) else "")


# Help and version


@pytest.mark.parametrize("verb", ["", *api.COMMANDS])
def test_help_fits_a_terminal_and_explains_every_option(verb: str, run_here, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    done = run_here(*verb.split(), "--help")
    assert (done.returncode, done.stderr, done.stdout.count("COMMAND")) == (0, "", not verb)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.startswith("usage: safe-gpu")
    for option, below in re.findall(r"^(  -.*)\n(.*)$", done.stdout, re.MULTILINE):
        assert re.search(r"\S  +\S", option) or below.startswith(" " * 20), option
    if not verb:
        assert all(re.search(rf"^ +{name} ", done.stdout, re.MULTILINE) for name in api.COMMANDS)
    assert run_here("help", *verb.split()).stdout == done.stdout


def test_the_version(run_here) -> None:
    assert run_here("-V").stdout == run_here("--version").stdout == f"safe-gpu {__version__}\n"


# Where the output goes


@pytest.mark.parametrize("line", ["status", "--help", "affinity"])
def test_output_that_nobody_reads(command, line: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command.run(*line.split(), stdout=writer)
    os.close(writer)
    assert done.returncode in ((0, 141) if line == "--help" else (141,))  # argparse may not notice
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("line", "place", "mode", "why"),
    [
        *((line, "full", "w", "No space left on device") for line in ("status", "--version", "history --json", "wait")),
        ("status", "null", "r", "Bad file descriptor"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written(command, line: str, place: str, mode: str, why: str, unbuffered: str) -> None:
    with open(f"/dev/{place}", mode) as file:
        done = command.run(*line.split(), stdout=file, env={"PYTHONUNBUFFERED": unbuffered})
    text = f"safe-gpu: standard output (/dev/{place}) cannot be written: {why}\n"
    assert (done.returncode, done.stderr) == (74, text)


@pytest.mark.parametrize(
    ("line", "what"), [("status --watch --json > out", "standard output ({})"), ("status --html --output out", "{}")]
)
def test_a_file_that_becomes_too_large_is_named(command, line: str, what: str, tmp_path: Path) -> None:
    shell = ["bash", "-c", f"ulimit -f 0; exec {command.path} {line}"]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    text = f"safe-gpu: {what.format(tmp_path / 'out')} cannot be written: File too large\n"
    assert (done.returncode, done.stderr) == (74, text)
    assert os.listdir(tmp_path) == (["out"] if ">" in line else [])


# Each line, or text of several lines, is one write(2), so that the lines of jobs that share an output stay whole

PAGE = 4096  # what a pipe in packet mode keeps together of one write

PRINTING = (
    "--help; status; status --json; status --prometheus; history; history --csv; doctor; affinity; policy; "
    "completion bash; wait; run -- /nowhere; run --tiemout 3; drain 1 --dry-run; setup --dry-run; nonsense"
).split("; ")


@pytest.fixture
def packets() -> Any:
    """The writing end of a pipe, and what returns the writes of those who have it, once all have closed it."""
    reading, writing = os.pipe2(os.O_DIRECT)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 256 * PAGE)  # a page for each write

    def read() -> list[bytes]:
        os.close(writing)
        found = []
        while data := os.read(reading, 1 << 16):
            found.append(data)
        os.close(reading)
        return found

    return writing, read


def assert_whole(packets: list[bytes]) -> None:
    assert packets
    assert [one for one in packets if not one.endswith(b"\n") and len(one) < PAGE] == []


@pytest.mark.parametrize(
    ("words", "unbuffered"),
    [*((words, "1" * (n % 2)) for n, words in enumerate(PRINTING)), pytest.param("demo", "", marks=long)],
)
def test_a_line_is_one_write(words: str, unbuffered: str, command: Any, dgx: Any, packets: Any) -> None:
    dgx.hold(0, 1, until=time.time() + 60)
    writing, read = packets
    streams = {"stdout": writing, "stderr": writing, "env": {"PYTHONUNBUFFERED": unbuffered}}
    command.start(*words.split(), **streams).wait(60)
    assert_whole(read())


def test_every_command_has_a_line_of_these() -> None:
    assert {line.split()[0] for line in PRINTING} >= api.COMMANDS.keys() - {"bind", "demo", "resume"}


def test_each_line_of_a_waiter_is_one_write(
    command: Any, dgx: Any, packets: Any, eventually: Callable[..., None]
) -> None:
    dgx.hold(*range(8))
    writing, read = packets
    streams = {"stdout": writing, "stderr": writing, "env": {"PYTHONUNBUFFERED": "1"}}
    waiting = [command.start("run", "--", "true", **streams) for _ in range(3)]
    eventually(lambda: len(dgx.tickets()) == 3)
    dgx.let_go()
    for one in waiting:
        assert one.wait(60) == 0
    assert_whole(read())


# What the commands that look show of real claims: history, its forms and times, and parts of status

NOW = time.mktime((2026, 11, 21, 12, 30, 0, 0, 0, -1))


def moments(*texts: str, after: float | None = None) -> list[str]:
    return [time.strftime("%m-%d %H:%M", time.localtime(api.parse_moment(text, after))) for text in texts]


def test_times_that_were_and_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Saturday at 12:30. Now is not next."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    days = ("yesterday", "2026-11-01", "2026-11-01 13:45", "sat 9:00", "Saturday  13:00", "7d")
    assert moments(*days) == ["11-20 00:00", "11-01 00:00", "11-01 13:45", "11-21 09:00", "11-14 13:00", "11-14 12:30"]
    assert moments("today", "tomorrow") == ["11-21 00:00", "11-22 00:00"]
    assert moments("yesterday 18:00", "today 9:00", "Tomorrow  09:30") == ["11-20 18:00", "11-21 09:00", "11-22 09:30"]
    assert moments("12:30", "12:31", "+2h") == ["11-21 12:30", "11-20 12:31", "11-21 14:30"]
    assert api.parse_moment("99999999d") == 0.0
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
def test_a_text_that_is_no_time_is_answered_with_one_that_is(text: str) -> None:
    with pytest.raises(ValueError, match="write 2026-11-01"):
        api.parse_moment(text)


@pytest.fixture
def used(state_dir: Path, driver_libraries: object) -> None:
    """A host where this process has claimed two GPUs and one."""
    for number in (2, 1):
        claim(number).release_gpus()


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_claims_the_latest_first_in_each_form(used: None, run_here: Any) -> None:
    title, first, second = run_here("history").stdout.splitlines()
    assert title.split() == ["USER", "GPU", "FROM", "TO", "GPU-HOURS", "COMMAND"]
    assert [first.split()[1], second.split()[1]] == ["0", "0,1"]
    document = json.loads(run_here("history", "--json").stdout)
    one, two = document["claims"]
    assert (document["schema"], one["labels"], one["running"]) == (1, ["0"], False)
    assert two["since"] <= two["seen"] == two["ended"] <= one["since"]
    last, before = rows(run_here("history", "--csv").stdout)
    assert (last["labels"], before["labels"], last.keys()) == ("0", "0 1", one.keys())
    assert last["ended"] == time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(one["ended"]))


@pytest.mark.parametrize(("by", "keys"), [("user", 1), ("gpu", 2)])
def test_gpu_hours(used: None, run_here: Any, by: str, keys: int) -> None:
    document = json.loads(run_here("history", "--by", by, "--json", "--since", "1h").stdout)
    assert document["by"] == by
    assert len({row[by] for row in document["use"]}) == keys
    assert [row[by] for row in rows(run_here("history", "--by", by, "--csv").stdout)] == [
        row[by] for row in document["use"]
    ]


def test_a_report_of_a_wait(
    command: Any, run_here: Any, dgx: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claim(8):
        began = time.monotonic()
        waiter = command.start("run", "-q", "-n", 2, "--", "true")
        eventually(lambda: bool(dgx.tickets()))
        seen = time.monotonic()
        eventually(lambda: time.monotonic() > seen)
        least = time.monotonic() - seen
    assert waiter.wait(60) == 0
    most = time.monotonic() - began
    last, _ = json.loads(run_here("history", "--json").stdout)["claims"]
    assert least < last["waited"] < most
    user, week, host = json.loads(run_here("history", "--report", "month", "--json").stdout)["report"]
    assert [one["claims"] for one in (user, week, host)] == [2, 2, 2]
    assert (user["waits"], user["wait_95"], user["free_gpu_hours"]) == (2, last["waited"], None)
    assert week["free_gpu_hours"] == host["free_gpu_hours"] >= 0
    printed = run_here("history", "--report", "month").stdout
    assert re.findall("^[A-Z]{4,} ", printed, re.MULTILINE) == ["USER ", "WEEK ", "HOST "]
    today = time.strftime("%Y-%m-%d")
    assert re.match(f"GPUs of {os.uname().nodename}, [0-9-]+ to {today}\n\nUSER ", printed)
    assert printed.endswith("\n\n95 of 100 claims waited no longer than 95% WAIT.\n")
    monkeypatch.setenv("COLUMNS", "50")
    assert "95" not in run_here("history", "--report", "month").stdout, "what is left out is not explained"


def test_a_report_begins_with_a_day_and_is_of_two_years_at_most(used: None, run_here: Any) -> None:
    document = json.loads(run_here("history", "--report", "week", "--json").stdout)
    assert time.strftime("%H:%M:%S", time.localtime(document["since"])) == "00:00:00"
    assert 7 * 86400 <= document["until"] - document["since"] < 9 * 86400
    document = json.loads(run_here("history", "--report", "week", "--since", "2001-01-01", "--json").stdout)
    assert document["until"] - document["since"] == pytest.approx(731 * 86400)


def test_a_picture_needs_matplotlib(used: None, run_here: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run_here("history", "--report", "month", "--plot", tmp_path / "month.svg")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--plot needs matplotlib, which is not installed: pip install matplotlib" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_others_and_other_times_are_left_out(used: None, run_here: Any) -> None:
    assert run_here("history", "--user", "nobody-of-here").stdout == "no claims in this time\n"
    assert json.loads(run_here("history", "--until", "1h", "--json").stdout)["claims"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")
def test_a_claim_without_work_is_marked_and_listed_from_the_limit_on(
    run_here: Any, rules: Any, monkeypatch: Any
) -> None:
    def listed() -> int:
        return len(json.loads(run_here("history", "--idle", "--json").stdout)["claims"])

    now = time.time
    with claim(8):
        assert run_here("status").returncode == 0  # the first look, from which on the GPUs are known to be idle
        assert listed() == 1
        monkeypatch.setattr(time, "time", lambda: now() + 7200)
        for policy, marked, found in (
            ("max_gpus = 8", False, 1),
            ("idle_report_after = 1h", True, 1),
            ("idle_report_after = unlimited", False, 0),
        ):
            rules(f"[user root]\n{policy}\n")
            assert ("\nGPU 0-7: no work for 2 h\n" in run_here("status").stdout, listed()) == (marked, found), policy
        assert all(one["idle_for"] > 7200 for one in json.loads(run_here("status", "--json").stdout)["gpus"])
    assert listed() == 0


# status --free, --mine and --user


def test_nothing_is_free_where_the_claims_are_not_known(state_dir: Path, run_here: Any) -> None:
    state_dir.mkdir()
    (state_dir / "claims").touch()
    done = run_here("status", "--free")
    assert (done.returncode, done.stdout, "warning" in done.stderr) == (73, "", True)


def test_gpus_that_are_free_and_those_of_one_user(run_here: Any, dgx: Any) -> None:
    dgx.hold(5, uid=4711)
    with claim(2):
        done = run_here("status", "--free")
        assert (done.returncode, done.stdout, done.stderr) == (0, "2\n3\n4\n6\n7\n", "")
        for words in (["--mine"], ["--user", api.procfs.user_name(os.geteuid())]):
            assert [one["index"] for one in json.loads(run_here("status", "--json", *words).stdout)["gpus"]] == [0, 1]
            title, *lines = run_here("status", *words).stdout.splitlines()
            assert ": 5 of 8 GPUs free" in title
            assert not any(line.split()[:1] == ["2"] for line in lines)
        assert json.loads(run_here("status", "--json", "--user", "nobody").stdout)["gpus"] == []
        assert "no GPU is held or used by this user" in run_here("status", "--user", "nobody").stdout
