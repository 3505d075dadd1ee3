"""A claim without work: ``status`` marks it, ``history --idle`` lists it, and who waits on a terminal is told of it."""

import io
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.terminals import Terminal

from safe_gpu.claim.report import WaitStatus
from safe_gpu.cli.wait_line import WaitLine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")

HOUR = 3600.0


@pytest.fixture
def claim(state_dir: Path, command: Any, ask: Any) -> Any:
    """A claim of all GPUs, whose first look without work has been noted."""
    started = command.start("run", "-n", 8, "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE)
    assert started.stdout.readline() == "up\n"
    assert ask("status").returncode == 0
    return started


@pytest.fixture
def idle(claim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """That claim two hours later, by the clock of this process."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 2 * HOUR)


def test_from_the_limit_on_it_is_marked_and_listed(idle: None, ask: Any, rules: Any) -> None:
    for policy, marked, found in (
        (None, False, 1),
        ("idle_report_after = 1h", True, 1),
        ("idle_report_after = 3h", False, 0),
        ("idle_report_after = unlimited", False, 0),
        ("max_gpus = 8", False, 1),
    ):
        if policy is not None:
            rules(f"[user root]\n{policy}\n")
        assert ("\nGPU 0-7: no work for 2 h\n" in ask("status").stdout) is marked, policy
        assert len(json.loads(ask("history", "--idle", "--json").stdout)["claims"]) == found, policy
    assert all(one["idle_for"] > 2 * HOUR for one in json.loads(ask("status", "--json").stdout)["gpus"])


def test_a_waiter_on_a_terminal_is_told_whom_to_ask(
    claim: Any, command: Any, ask: Any, rules: Any, terminal: Terminal, eventually: Any
) -> None:
    rules("[user root]\nidle_report_after = 1s")
    eventually(lambda: "no work for" in ask("status").stdout)
    started = command.start("wait", stderr=terminal.slave)
    terminal.read_until(f" s: it is yours (pid {claim.pid})\r\n")
    claim.communicate("\n", timeout=60)
    assert started.wait(60) == 0


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_on_a_terminal_and_from_the_limit_on_and_once(
    idle: None, rules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim is held all the while, and the line is written before ``show`` returns."""
    monkeypatch.setenv("TERM", "xterm")
    for stream, policy, told in (
        (Tty, None, False),
        (Tty, "idle_report_after = 1h", True),
        (Tty, "idle_report_after = 3h", False),
        (Tty, "max_gpus = 99", False),
        (io.StringIO, "idle_report_after = 1h", False),
    ):
        if policy is not None:
            rules(f"[user root]\n{policy}\n")
        written = stream()
        with WaitLine(written) as line:
            line.show(WaitStatus(1, 0, 1))
            line.show(WaitStatus(1, 0, 1))
        assert "for 1 GPU" in written.getvalue()
        assert written.getvalue().count("no work on GPU 0-7 for 2 h") == told, policy
