"""A terminal to look at, and commands in this process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator

import pytest
from support.terminals import Terminal

from safe_gpu.cli.commands import main

Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """What a command that becomes no other prints, without a new interpreter for it."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        code = main(list(map(str, words)))
        return subprocess.CompletedProcess(words, code, *capsys.readouterr())

    return run


@pytest.fixture
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Of 80 columns, or as many as the parameter says."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal = Terminal(getattr(request, "param", 80))
    yield terminal
    terminal.close()
