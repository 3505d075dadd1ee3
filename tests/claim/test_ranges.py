"""Claims of a range of GPUs: at least so many, and more if these can be had at once."""

from typing import Any

import pytest
from support.claims import claim, try_claim

from safe_gpu import UnsatisfiableRequestError
from safe_gpu.coordination.queue import waiting_tickets


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param((2, 4), (4, 5, 6, 7), id="as many as it may have"),
        pytest.param((2, 6), (4, 5, 6, 7), id="as many as are free"),
        pytest.param((4, 5), (4, 5, 6, 7), id="no more than it needs"),
        pytest.param((5, 6), None, id="fewer than it needs"),
    ],
)
def test_a_range_takes_what_is_free_at_once(ground: Any, wanted: Any, expected: Any) -> None:
    ground.hold(0, 1, 2, 3)
    assert try_claim(wanted) == expected


def test_a_range_passes_nobody(ground: Any, line: Any) -> None:
    ground.hold(0)
    line(8)
    assert try_claim((2, 4)) is None


def test_a_range_takes_only_gpus_that_it_may_pass_with(ground: Any, line: Any) -> None:
    line(3, range(3))
    assert try_claim((2, 8)) == (3, 4, 5, 6, 7)


def test_the_ticket_of_a_range_has_its_least_number(ground: Any, child: Any, eventually: Any) -> None:
    ground.hold(*range(7))
    child("import safe_gpu\nsafe_gpu.claim_gpus((2, 4), safe_gpu.NoPlaceholder(), timeout=60)")
    eventually(lambda: [one.nb_gpus for one in waiting_tickets()] == [2])


def test_a_range_on_the_command_line(ground: Any, command: Any) -> None:
    ground.hold(0, 1, 2, 3, 4)
    ran = command.run("run", "-q", "-n", "2-4", "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert (ran.returncode, ran.stdout) == (0, "5,6,7\n")
    assert "a range such as 2-4" in command.run("run", "-n", "4-2", "--", "true").stderr


@pytest.mark.parametrize("wanted", [(0, 2), (4, 2), (2, 2), (1, 2, 3), ("a", "b"), (2.5, 3)])
def test_a_range_that_makes_no_sense_is_refused(wanted: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="nb_gpus"):
        claim(wanted)


def test_a_range_needs_its_least_number_on_this_host(ground: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="this host has only 8 NVIDIA GPUs"):
        claim((9, 12))
    assert len(try_claim((8, 12)) or ()) == 8
