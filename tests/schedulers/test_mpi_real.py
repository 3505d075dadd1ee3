"""mpirun for real, without a batch scheduler: each rank claims a GPU of its own."""

import shlex
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(120)]


# Ends the others' hold once all four have claimed.
GO_AFTER_4 = [
    'until [ "$(grep -c \'"claim"\' $REFEREE/log)" = 4 ] || ! kill -0 $pid 2>/dev/null; do sleep .05; done',
    "touch $REFEREE/go",
]


def test_each_rank_gets_its_own_gpu_and_none_waits_for_another_ones_context(
    mpirun: list[str], room: Any, run_as_user: Callable[..., Any]
) -> None:
    """A placeholder of any rank is ready only when those of all ranks are being made: started one by one, they hang."""
    claim = ("$CLAIM claim 1 --placeholders-meet 4 --hold go & pid=$!", *GO_AFTER_4, "wait $pid")
    done = run_as_user(*mpirun, "-np", "4", room.script(*claim))
    assert done.returncode == 0, done.stdout + done.stderr
    claims = room.verdict()
    assert sorted(gpu for claim in claims for gpu in claim["gpus"]) == ["0", "1", "2", "3"]
    assert {claim["about"]["OMPI_COMM_WORLD_LOCAL_RANK"] for claim in claims} == set("0123")


def test_ranks_claim_from_the_claim_around_them(mpirun: list[str], room: Any, run_as_user: Callable[..., Any]) -> None:
    """`safe-gpu run -n 4 -- mpirun -np 4 ...`: one GPU of the four for each rank, however many others are free."""
    rank = room.script("$CLAIM claim 1 --hold go & pid=$!", *GO_AFTER_4, "wait $pid")
    script = room.script(f"$SAFE_GPU run -n 4 --only 2-5 -- {shlex.join([*mpirun, '-np', '4', rank])}")
    done = run_as_user(script)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(gpu for claim in room.verdict() for gpu in claim["gpus"]) == ["2", "3", "4", "5"]


def test_a_rank_that_fails_frees_what_all_of_them_held(mpirun: list[str], room: Any, run_as_user: Any) -> None:
    """mpirun ends the others; at once all eight GPUs are to be had again."""
    script = room.script(
        'if [ "$OMPI_COMM_WORLD_RANK" = 2 ]; then',
        """  until [ "$(grep -c '"claim"' $REFEREE/log)" = 3 ]; do sleep .05; done""",
        "  exec $CLAIM claim 1 --fail",
        "fi",
        "exec $CLAIM claim 1 --hold go",
    )
    done = run_as_user(*mpirun, "-np", "4", script)
    assert done.returncode != 0
    assert len(room.records("claim")) == 3
    assert len(room.records("failing")) == 1
    killed = [claim["pid"] for claim in room.records("claim")]
    room.go()
    after = run_as_user(room.script("$CLAIM claim 8 --timeout 10"))
    assert after.returncode == 0, after.stdout + after.stderr
    assert [len(claim["gpus"]) for claim in room.verdict(killed=killed)] == [1, 1, 1, 8]
