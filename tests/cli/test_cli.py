"""The command line: what it understands, how it refuses, and which exit code says what."""

import os
import re
import subprocess
from pathlib import Path

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
    ("line", "nb_gpus", "command"),
    [
        ("run true", 1, "true"),
        ("run -- true", 1, "true"),
        ("run --nb-gpus=2 -- true", 2, "true"),
        ("run --gpus=2 -t 5 -q -- true", 2, "true"),
        ("run -n 2 python x.py --epochs 3", 2, "python x.py --epochs 3"),
        ("run -- python x.py -n 3 --version", 1, "python x.py -n 3 --version"),
        ("run python x.py --version --help", 1, "python x.py --version --help"),
        ("run -n 2 -- sh -- a -- b", 2, "sh -- a -- b"),
        ("run -n 2 sh -c -- a", 2, "sh -c -- a"),
        ("run -- -odd-name", 1, "-odd-name"),
        ("run -- --", 1, "--"),
        ("run -n 2 --timeout 5 run -- x", 2, "run -- x"),
    ],
)
def test_where_options_end_and_the_command_begins(line: str, nb_gpus: object, command: str) -> None:
    options = parsed(*line.split())
    assert options.nb_gpus == nb_gpus
    assert options.command == command.split()


@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("1.5", 1.5), ("1h30m", 5400.0), ("inf", None)])
@pytest.mark.parametrize("verb", ["run", "wait"])
def test_the_timeout_as_an_option_and_by_the_environment(
    verb: str, text: str, seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = ["--", "true"] if verb == "run" else []
    for option in ("--timeout", "-t"):
        assert claim_arguments(parsed(verb, option, text, *tail))["timeout"] == seconds
    assert claim_arguments(parsed(verb, *tail))["timeout"] is None
    monkeypatch.setenv("SAFE_GPU_TIMEOUT", text)
    assert claim_arguments(parsed(verb, *tail))["timeout"] == seconds
    assert claim_arguments(parsed(verb, "--timeout", "3", *tail))["timeout"] == 3.0


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
    *[(f"affinity --{end}-cores {value}", value) for end in ("min", "max") for value in ("0", "-2", "x", "1.5")],
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
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("safe-gpu")
    assert value in err
    assert "Traceback" not in err


# Exit codes


@pytest.mark.parametrize("line", ["wait", "status", "run -- /bin/true"])
def test_no_driver(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    assert main(line.split()) == 69
    assert capsys.readouterr().err.startswith("safe-gpu: ")


def test_an_unusable_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "no" / "parent"):
        monkeypatch.setenv("SAFE_GPU_DIR", str(path))
        assert main(["wait"]) == 73
        assert str(path.parent if path.name == "parent" else path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(LockTimeout("held"), 75), (GPUAffinityError("too few cores"), 78), (KeyboardInterrupt(), 130)]
)
def test_what_a_claim_may_raise(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def claim(self: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(owner.GPUOwner, "__init__", claim)
    assert main(["run", "--", "true"]) == code
    assert capsys.readouterr().err == (f"safe-gpu: {error}\n" if str(error) else "")


# Help and version


@pytest.mark.parametrize("verb", ["", *COMMANDS])
def test_help_fits_a_terminal_explains_every_option_and_has_examples(
    verb: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main([*verb.split(), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.count("COMMAND") == (not verb)
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith("usage: safe-gpu")
    for option, below in re.findall(r"^(  -.*)\n(.*)$", out, re.MULTILINE):
        assert re.search(r"\S  +\S", option) or below.startswith(" " * 20), option
    if verb in ("", "run", "bind", "status", "wait", "affinity", "completion"):
        assert re.search(r"^examples?:\n  \S", out, re.MULTILINE)
    if not verb:
        assert all(re.search(rf"^ +{name} ", out, re.MULTILINE) for name in COMMANDS)
    assert main(["help", *verb.split()]) == 0
    assert capsys.readouterr().out == out


def test_the_version(ask) -> None:
    assert ask("-V").stdout == ask("--version").stdout == f"safe-gpu {__version__}\n"


# Where the output goes


@pytest.mark.parametrize("line", ["status", "--help", "affinity"])
def test_output_that_nobody_reads(command, line: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = command.run(*line.split(), stdout=writer)
    os.close(writer)
    assert done.returncode in ((0, 141) if line.startswith("--") else (141,))  # argparse may not notice
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("line", ["status", "affinity", "--version", "history --json", "wait"])
def test_output_that_finds_no_room(command, line: str, unbuffered: str) -> None:
    with open("/dev/full", "w") as full:
        done = command.run(*line.split(), stdout=full, env={"PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 74
    assert done.stderr == "safe-gpu: standard output (/dev/full) cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("status > out", "standard output ({here}/out)"),
        ("status --watch --json > out", "standard output ({here}/out)"),
        ("status --prometheus --output out", "{here}/out"),
        ("status --html --output out", "{here}/out"),
    ],
)
def test_a_file_that_becomes_too_large_is_named(command, ground, line: str, what: str, tmp_path) -> None:
    shell = ["bash", "-c", f"ulimit -f 0; exec {command.path} {line}"]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == f"safe-gpu: {what.format(here=tmp_path)} cannot be written: File too large\n"
    assert done.returncode == 74
    assert os.listdir(tmp_path) == (["out"] if ">" in line else [])


def test_an_output_that_is_not_open_for_writing_is_named(command) -> None:
    with open("/dev/null") as closed:
        done = command.run("status", stdout=closed)
    text = "safe-gpu: standard output (/dev/null) cannot be written: Bad file descriptor\n"
    assert (done.returncode, done.stderr) == (74, text)
