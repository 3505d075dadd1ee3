"""What commands print on a real terminal of 80 and 120 columns, with and without colour."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from support.terminals import Terminal

from safe_gpu.cli.commands import COMMANDS

COLORED = {"TERM": "xterm", "NO_COLOR": ""}
PLAIN = [{"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb", "NO_COLOR": ""}]
Shown = Callable[..., str]


@pytest.fixture(params=[80, 120])
def columns(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def shown(command: Any, columns: int, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """What a command writes to a terminal; without colours its lines must fit."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*words: str, **variables: str) -> str:
        terminal = Terminal(columns, rows=200)
        started = command.start(*words, stdout=terminal.slave, env=variables)
        terminal.read_to_the_end()
        terminal.close()
        assert started.wait(60) == 0, started.stderr.read()
        assert terminal.widest <= columns
        return terminal.raw.replace("\r\n", "\n")

    return run


def test_doctor(shown: Shown) -> None:
    wrong = {"OMP_PROC_BIND": "close"}
    text = shown("doctor", **COLORED, **wrong)
    assert re.search(r"^\x1b\[33mwarning\x1b\[0m  OpenMP variables: OMP_PROC_BIND=close", text, re.MULTILINE)
    assert "\x1b[1mfix:\x1b[0m unset OMP_PROC_BIND" in text
    assert re.fullmatch(r"\d+ passed, \d+ skipped, .* \(-v lists all\)", text.splitlines()[-1])
    for variables in PLAIN:
        assert "\x1b" not in shown("doctor", **variables, **wrong)


def test_demo(shown: Shown) -> None:
    text = shown("demo", **COLORED)
    assert "\x1b[1mWithout safe_gpu, 16 processes" in text
    assert re.search(r"\x1b\[31m\d+ processes at once\x1b\[0m", text)  # all of them, unless the host is busy
    assert "\x1b[32m1 process each\x1b[0m" in text
    assert re.search(r"^\x1b\[32mVerdict: 0 collisions", text, re.MULTILINE)
    assert len(text.splitlines()) <= 25
    assert "\x1b" not in shown("demo", **PLAIN[0])


@pytest.mark.parametrize("line", ["", *COMMANDS])
def test_help(line: str, columns: int, monkeypatch: pytest.MonkeyPatch, ask: Any) -> None:
    """Of 80 columns at most, on a wider terminal too."""
    monkeypatch.setenv("COLUMNS", str(columns))
    text = ask("help", *line.split()).stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "positional" not in text or line in ("drain", "resume", "completion")
    assert text.count("COMMAND") == (not line)


def test_examples_are_aligned(ask: Any) -> None:
    lines = ask("help").stdout.partition("examples:\n")[2].partition("\n\n")[0].splitlines()
    assert len({re.search(r"\s{3,}\S", line).end() for line in lines}) == 1  # type: ignore[union-attr]


def test_the_options_of_run_are_in_groups(ask: Any) -> None:
    text = ask("help", "run").stdout
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles[:4] == ["which GPUs", "how long", "CPUs, memory and environment", "on which host"]
    assert titles[4:] == ["output and exit code", "examples"]
    groups = dict(zip(titles, re.split(r"^\S.*:$", text, flags=re.MULTILINE)[1:], strict=True))
    for title, options in {
        "which GPUs": "-n --only --exclude --model --min-memory --max-utilization --near --share --prefer --vendor",
        "how long": "-t --for",
        "CPUs, memory and environment": "--affinity --memory --visible-as",
        "on which host": "--host",
        "output and exit code": "-q --refused-exit -h",
    }.items():
        assert re.findall(r"^  (-[-a-z]+)", groups[title], re.MULTILINE) == options.split()
