"""A claim without work: ``status`` marks it, and ``history --idle`` lists it."""

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

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
