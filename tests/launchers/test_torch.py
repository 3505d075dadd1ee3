"""torchrun and PyTorch's DataLoader (PyTorch for CPUs is enough: the GPUs are simulated)."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from support.real import REQUIRED

LOADER = Path(__file__).parent / "loader.py"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch") is None and not REQUIRED, reason="PyTorch is not installed"),
    pytest.mark.timeout(180),
]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def test_torchrun(ranks: Any) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 4]
    rendezvous = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    ranks.finish(ranks.start(*torchrun, *rendezvous, ranks.program, ranks.directory, 4))
    assert [fact["gpus"] for fact in ranks.facts()] == [[0], [1], [2], [3]]
    assert {fact["local_rank"] for fact in ranks.facts()} == {0, 1, 2, 3}
    assert {fact["local_size"] for fact in ranks.facts()} == {4}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_hold_nothing(ranks: Any, method: str) -> None:
    claim_all = [sys.executable, "-m", "safe_gpu", "run", "-n", "8", "--timeout", "0", "--", "true"]
    ranks.finish(ranks.start(sys.executable, LOADER, method, *claim_all))
