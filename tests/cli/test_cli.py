"""The command line: what it understands, how it refuses, which exit code says what, and how it writes."""

import fcntl
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from safe_gpu import GPUAffinityError, LockTimeout, __version__
from safe_gpu.claim import owner
from safe_gpu.cli import commands as cli
from safe_gpu.cli.arguments import claim_arguments
from safe_gpu.cli.commands import COMMANDS, main


def parsed(*line: str) -> object:
    return cli.parse(list(line))


# What it understands


@pytest.mark.parametrize(
    ("options", "nb_gpus", "command"),
    [
        ("--gpus=2 -t 5 -q --", 2, "true"),
        ("-n 2", 2, "python x.py --epochs 3"),
        ("--", 1, "python x.py -n 3 --version"),
        ("-n 2 --", 2, "sh -- a -- b"),
        ("--", 1, "-odd-name"),
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
        return claim_arguments(parsed(*line.format(option).split()))["timeout"]

    assert [timeout(option) for option in (f"--timeout {text}", f"-t {text}", "")] == [seconds, seconds, None]
    monkeypatch.setenv("SAFE_GPU_TIMEOUT", text)
    assert [timeout(option) for option in ("", "--timeout 3")] == [seconds, 3.0]


@pytest.mark.parametrize("verb", ["run", "bind"])
def test_either_name_of_affinity_means_the_same(verb: str, ask) -> None:
    for name in ("--affinity", "--mode"):
        assert parsed(verb, name, "unique_contiguous", "--", "true").affinity == "unique_contiguous"
    shown = ask("help", verb).stdout
    assert ("--affinity M" in shown, "--mode M" in shown) == (True, False)


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
    ("run --affinity sideways -- true", "sideways"),
    ("run --time 5 -- true", "--time"),  # no abbreviations: a later option would change what they mean
    ("bind --mode sideways -- true", "sideways"),
    ("wait surplus", "surplus"),
    ("run --refused-exit 256 -- true", "256"),
    ("affinity --mode sideways", "sideways"),
    *[(f"affinity --{end}-cores {value}", value) for end in ("min", "max") for value in ("0", "1.5")],
    *[(f"affinity --allowed {value}", value) for value in ("x", "5-2", ",", "-1", "0-99999999999")],
    *[(f"affinity --of {value}", value) for value in ("x", "0", "-1", "999999999")],
    ("--no-such-option", "--no-such-option"),
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
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err[:8]) == ("", 1, "safe-gpu")
    assert value in err


# Exit codes


@pytest.mark.parametrize("line", ["wait", "status", "run -- /bin/true"])
def test_no_driver(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    done = ask(*line.split())
    assert (done.returncode, done.stderr[:10]) == (69, "safe-gpu: ")


def test_an_unusable_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "no" / "parent"):
        monkeypatch.setenv("SAFE_GPU_DIR", str(path))
        assert main(["wait"]) == 73
        assert str(path.parent if path.name == "parent" else path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(LockTimeout("held"), 75), (GPUAffinityError("too few cores"), 78), (KeyboardInterrupt(), 130)]
)
def test_what_a_claim_may_raise(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, ask) -> None:
    monkeypatch.setattr(owner.GPUOwner, "__init__", Mock(side_effect=error))
    done = ask("run", "--", "true")
    assert (done.returncode, done.stderr) == (code, f"safe-gpu: {error}\n" if str(error) else "")


# Help and version


@pytest.mark.parametrize("verb", ["", *COMMANDS])
def test_help_fits_a_terminal_explains_every_option_and_has_examples(verb: str, ask, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    done = ask(*verb.split(), "--help")
    assert (done.returncode, done.stderr, done.stdout.count("COMMAND")) == (0, "", not verb)
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert done.stdout.startswith("usage: safe-gpu")
    for option, below in re.findall(r"^(  -.*)\n(.*)$", done.stdout, re.MULTILINE):
        assert re.search(r"\S  +\S", option) or below.startswith(" " * 20), option
    if verb in ("", "run", "bind", "status", "wait", "affinity", "completion"):
        assert re.search(r"^examples?:\n  \S", done.stdout, re.MULTILINE)
    if not verb:
        assert all(re.search(rf"^ +{name} ", done.stdout, re.MULTILINE) for name in COMMANDS)
    assert ask("help", *verb.split()).stdout == done.stdout


def test_the_version(ask) -> None:
    assert ask("-V").stdout == ask("--version").stdout == f"safe-gpu {__version__}\n"


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
    "--help; run --help; status; status --json; status --prometheus; history; history --json; history --csv; doctor; "
    "affinity; affinity --of 1; policy; completion bash; demo; wait; run -- /nowhere; run --tiemout 3; "
    "drain 1 --dry-run; setup --dry-run; nonsense"
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


@pytest.mark.parametrize(("words", "unbuffered"), [(words, "1" * (n % 2)) for n, words in enumerate(PRINTING)])
def test_a_line_is_one_write(words: str, unbuffered: str, command: Any, ground: Any, packets: Any) -> None:
    ground.hold(0, 1, until=time.time() + 60)
    writing, read = packets
    streams = {"stdout": writing, "stderr": writing, "env": {"PYTHONUNBUFFERED": unbuffered}}
    command.start(*words.split(), **streams).wait(60)
    assert_whole(read())


def test_every_command_is_among_them() -> None:
    assert {line.split()[0] for line in PRINTING} >= COMMANDS.keys() - {"bind", "resume"}


def test_the_lines_of_waiters_too(command: Any, ground: Any, packets: Any, eventually: Callable[..., None]) -> None:
    ground.hold(*range(8))
    writing, read = packets
    streams = {"stdout": writing, "stderr": writing, "env": {"PYTHONUNBUFFERED": "1"}}
    waiting = [command.start("run", "--", "true", **streams) for _ in range(3)]
    eventually(lambda: len(ground.tickets()) == 3)
    ground.let_go()
    for one in waiting:
        assert one.wait(60) == 0
    assert_whole(read())
