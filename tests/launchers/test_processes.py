"""One GPU per process: multiprocessing in each of its ways, and ranks as launchers' environments describe them."""

from __future__ import annotations

import sys
from typing import Any

import pytest


@pytest.mark.parametrize(("method", "failing"), [("fork", 1), ("spawn", -1), ("forkserver", -1)])
def test_multiprocessing(ranks: Any, method: str, failing: int) -> None:
    """One of those that are forked fails once it has its GPU, which leaves nothing behind either."""
    ranks.finish(ranks.start(sys.executable, ranks.program, ranks.directory, 4, method, failing))
    assert [fact["gpus"] for fact in ranks.facts()] == [[0], [1], [2], [3]]
    assert [fact["visible"] for fact in ranks.facts()] == ["0", "1", "2", "3"]


def test_the_environment_of_a_launcher(ranks: Any) -> None:
    """It is there before the first line of the script runs, so a claim can be that line."""
    rank, size = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    started = [
        ranks.start(sys.executable, ranks.program, ranks.directory, 2, **{rank: str(number), size: "2"})
        for number in range(2)
    ]
    ranks.finish(*started)
    assert [fact["gpus"] for fact in ranks.facts()] == [[0], [1]]
    assert {fact["local_rank"] for fact in ranks.facts()} == {0, 1}
    assert {fact["local_size"] for fact in ranks.facts()} == {2}
