"""One GPU per process: multiprocessing in each of its ways, and ranks as launchers' environments describe them."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(ranks: Any, method: str) -> None:
    ranks.finish(ranks.start(sys.executable, ranks.program, ranks.directory, 4, method))
    assert [fact["gpus"] for fact in ranks.facts()] == [[0], [1], [2], [3]]
    assert [fact["visible"] for fact in ranks.facts()] == ["0", "1", "2", "3"]


def test_a_process_that_fails_leaves_nothing_behind(ranks: Any) -> None:
    ranks.finish(ranks.start(sys.executable, ranks.program, ranks.directory, 3, "fork", 1))
    assert len(ranks.facts()) == 3


LAUNCHERS = {
    "horovod": ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    "open mpi": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "hydra": ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_environments_of_launchers(ranks: Any, launcher: str) -> None:
    """The environment that each sets is there before the first line of the script runs, so a claim can be that line."""
    rank, size = LAUNCHERS[launcher]
    started = [
        ranks.start(sys.executable, ranks.program, ranks.directory, 2, **{rank: str(number), size: "2"})
        for number in range(2)
    ]
    ranks.finish(*started)
    assert [fact["gpus"] for fact in ranks.facts()] == [[0], [1]]
    assert {fact["local_rank"] for fact in ranks.facts()} == {0, 1}
    assert {fact["local_size"] for fact in ranks.facts()} == {2}
