"""Claims of a range of GPUs: at least so many, and more if these can be had at once."""

from typing import Any

import pytest
from support.claims import claim, try_claim

from safe_gpu import UnsatisfiableRequestError


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


@pytest.mark.parametrize("wanted", [(0, 2), (4, 2), (2, 2), (1, 2, 3), ("a", "b"), (2.5, 3)])
def test_a_range_that_makes_no_sense_is_refused(wanted: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="nb_gpus"):
        claim(wanted)
