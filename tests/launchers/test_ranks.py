"""One GPU per process: multiprocessing in each of its ways, launchers, torchrun and PyTorch's DataLoader.

PyTorch for CPUs is enough: the GPUs are simulated.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gpus import PACKAGE_ROOT, run_python
from support.processes import free_port
from support.real import REQUIRED, long

LOADER = Path(__file__).parent / "loader.py"
PROGRAM = Path(__file__).parent / "rank.py"


def run(*command: object) -> None:
    """Run a program with safe_gpu on its path, which must end well."""
    run_python(*map(str, command), env={**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}, timeout=100)


def facts(directory: Path) -> list[dict[str, Any]]:
    """What each rank held while all held theirs, by GPU."""
    found = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    return sorted(found, key=lambda fact: fact["gpus"])


@pytest.mark.parametrize(
    ("method", "failing"), [("fork", 1), pytest.param("spawn", -1, marks=long), ("forkserver", -1)]
)
def test_multiprocessing(tmp_path: Path, method: str, failing: int) -> None:
    """One of those that are forked fails once it has its GPU, which leaves nothing behind either."""
    run(PROGRAM, tmp_path, 4, method, failing)
    assert [fact["gpus"] for fact in facts(tmp_path)] == [[0], [1], [2], [3]]
    assert [fact["visible"] for fact in facts(tmp_path)] == ["0", "1", "2", "3"]


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None and not REQUIRED, reason="needs PyTorch")


@needs_torch
@pytest.mark.timeout(180)
def test_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 4]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    run(*torchrun, *rendezvous, PROGRAM, tmp_path, 4)
    assert [fact["gpus"] for fact in facts(tmp_path)] == [[0], [1], [2], [3]]
    assert {fact["local_rank"] for fact in facts(tmp_path)} == {0, 1, 2, 3}
    assert {fact["local_size"] for fact in facts(tmp_path)} == {4}


@needs_torch
@pytest.mark.timeout(180)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_hold_nothing(method: str) -> None:
    claim_all = [sys.executable, "-m", "safe_gpu", "run", "-n", "8", "--timeout", "0", "--", "true"]
    run(LOADER, method, *claim_all)
