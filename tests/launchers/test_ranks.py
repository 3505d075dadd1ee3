"""One GPU per process: multiprocessing in each of its ways, launchers, torchrun and PyTorch's DataLoader.

PyTorch for CPUs is enough: the GPUs are simulated.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gpus import PACKAGE_ROOT
from support.processes import free_port
from support.real import REQUIRED

LOADER = Path(__file__).parent / "loader.py"
PROGRAM = Path(__file__).parent / "rank.py"


class Ranks:
    """Ranks of one run: they live in one state directory and leave their facts in another."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, *command: object) -> None:
        """Run a command with safe_gpu on its path, which must end well."""
        done = subprocess.run(
            [sys.executable, *map(str, command)],
            env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout

    def facts(self) -> list[dict[str, Any]]:
        """What each rank held while all held theirs, by GPU."""
        facts = [json.loads(path.read_text()) for path in self.directory.glob("*.json")]
        return sorted(facts, key=lambda fact: fact["gpus"])


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


@pytest.mark.parametrize(("method", "failing"), [("fork", 1), ("spawn", -1), ("forkserver", -1)])
def test_multiprocessing(ranks: Any, method: str, failing: int) -> None:
    """One of those that are forked fails once it has its GPU, which leaves nothing behind either."""
    ranks.run(PROGRAM, ranks.directory, 4, method, failing)
    assert [fact["gpus"] for fact in ranks.facts()] == [[0], [1], [2], [3]]
    assert [fact["visible"] for fact in ranks.facts()] == ["0", "1", "2", "3"]


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None and not REQUIRED, reason="needs PyTorch")


@needs_torch
@pytest.mark.timeout(180)
def test_torchrun(ranks: Any) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 4]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    ranks.run(*torchrun, *rendezvous, PROGRAM, ranks.directory, 4)
    assert [fact["gpus"] for fact in ranks.facts()] == [[0], [1], [2], [3]]
    assert {fact["local_rank"] for fact in ranks.facts()} == {0, 1, 2, 3}
    assert {fact["local_size"] for fact in ranks.facts()} == {4}


@needs_torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_hold_nothing(ranks: Any, method: str) -> None:
    claim_all = [sys.executable, "-m", "safe_gpu", "run", "-n", "8", "--timeout", "0", "--", "true"]
    ranks.run(LOADER, method, *claim_all)
