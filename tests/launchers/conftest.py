"""Start ranks, and read what they held at the same time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.gpus import PACKAGE_ROOT

PROGRAM = Path(__file__).parent / "rank.py"


class Ranks:
    """Ranks of one run: they live in one state directory and leave their facts in another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.program = str(PROGRAM)

    def start(self, *command: object, **environment: str) -> subprocess.Popen[str]:
        """Start a command with safe_gpu on its path."""
        return subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def finish(self, *processes: subprocess.Popen[str]) -> str:
        """Wait for all; their output. Fails with it where one failed."""
        outputs = [process.communicate(timeout=100)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
        return "\n".join(outputs)

    def facts(self) -> list[dict[str, Any]]:
        """What each rank held while all held theirs, by GPU."""
        facts = [json.loads(path.read_text()) for path in self.directory.glob("*.json")]
        return sorted(facts, key=lambda fact: fact["gpus"])


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)
