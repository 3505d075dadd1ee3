"""A claim without work: ``status`` marks it, ``history --idle`` lists it, and who waits on a terminal is told of it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.terminals import Terminal

from safe_gpu.claim.messages import WaitStatus
from safe_gpu.cli.run import WaitLine

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")

HOUR = 3600.0


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the policy of this host, one for root."""

    def write(line: str) -> None:
        path = tmp_path / "policy.ini"
        path.write_text(f"[user root]\n{line}\n")
        path.chmod(0o644)
        monkeypatch.setenv("SAFE_GPU_POLICY", str(path))

    return write


@pytest.fixture
def idle(state_dir: Path, command: Any, ask: Any) -> Any:
    """A claim of all GPUs, made two hours ago and without work since, as far as the files of the host tell."""
    started = command.start("run", "-n", 8, "--", "sh", "-c", "echo up; read x", stdin=subprocess.PIPE)
    assert started.stdout.readline() == "up\n"
    assert ask("status").returncode == 0
    leases = [path for path in (state_dir / "leases").glob("*.lock") if not path.name.endswith(".inner.lock")]
    notes = list((state_dir / "history").glob("*.idle"))
    assert len(leases) == len(notes) == 8
    now = json.loads(notes[0].read_text())["claim"]
    then = float(int(now - 2 * HOUR))  # whole seconds, so that its text is not longer than that of now
    for path in leases:
        earlier(path, now, then)
    for path in notes:
        path.write_text(json.dumps({"v": 1, "claim": then, "idle": then}))
    return started


def earlier(lease: Path, now: float, then: float) -> None:
    """Change the time in the record of a lease in place, as its file stays locked."""
    with lease.open("r+b") as file:
        record = file.read()
        found = re.search(rb'"since": [0-9.]+', record)
        assert found is not None
        assert float(found[0].split()[1]) == now
        file.seek(found.start())
        file.write(f'"since": {then}'.encode().ljust(len(found[0])))


def test_from_the_limit_on_it_is_marked_and_listed(idle: Any, ask: Any, rules: Any) -> None:
    for policy, marked, found in (
        (None, 0, 1),
        ("idle_report_after = 1h", 8, 1),
        ("idle_report_after = 3h", 0, 0),
        ("idle_report_after = unlimited", 0, 0),
        ("max_gpus = 8", 0, 1),
    ):
        if policy is not None:
            rules(policy)
        assert len(re.findall("^ +no work for 2 h$", ask("status").stdout, re.MULTILINE)) == marked, policy
        assert len(json.loads(ask("history", "--idle", "--json").stdout)["claims"]) == found, policy
    assert all(one["idle_for"] > 2 * HOUR for one in json.loads(ask("status", "--json").stdout)["gpus"])


@pytest.mark.parametrize("words", [("run", "--", "true"), ("wait",)], ids=["run", "wait"])
def test_a_waiter_on_a_terminal_is_told_whom_to_ask(
    idle: Any, command: Any, rules: Any, words: tuple[str, ...], terminal: Terminal
) -> None:
    rules("idle_report_after = 1h")
    started = command.start(*words, stderr=terminal.slave)
    terminal.read_until(f"safe-gpu: no work on GPU 0-7 for 2 h: it is yours (pid {idle.pid})\r\n")
    idle.communicate("\n", timeout=60)
    assert started.wait(60) == 0


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_on_a_terminal_and_from_the_limit_on_and_once(
    idle: Any, rules: Any, monkeypatch: pytest.MonkeyPatch
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
            rules(policy)
        written = stream()
        with WaitLine(written) as line:
            line.show(WaitStatus(1, 0, 1))
            line.show(WaitStatus(1, 0, 1))
        assert "waiting for 1 GPU" in written.getvalue()
        assert written.getvalue().count("no work on GPU 0-7 for 2 h") == told, policy
