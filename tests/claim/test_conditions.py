"""Waiters with conditions: nobody waits for a GPU that the one ahead cannot use, nor takes one past him that he can."""

import time
from typing import Any

import pytest
from support.claims import try_claim
from support.watched_host import Host

import safe_gpu
from safe_gpu.claim import queue_place
from safe_gpu.claim.arguments import read_options
from safe_gpu.claim.queue_place import QueuePlace
from safe_gpu.claim.view import HostView
from safe_gpu.coordination.host_lock import Host as SharedHost
from safe_gpu.selection.request import parse_request


@pytest.fixture
def host(host_of: Any) -> Host:
    """GPU 0 computes for nobody, or draws; GPU 1 has links with GPU 0 alone."""
    host: Host = host_of("dgx-a100")
    host.edits = {
        uuid: {
            "utilization": 50 if number == 0 else 0,
            "nvlink_peers": frozenset(host.uuids[1 - number : 2 - number] if number < 2 else ()),
        }
        for number, uuid in enumerate(host.uuids)
    }
    return host


@pytest.mark.parametrize(
    ("ahead", "gets"),
    [
        ({"max_utilization": 10}, 0),
        ({"max_utilization": 50}, None),
        ({"min_memory": 79 << 30}, 0),
        ({"min_memory": 7 << 30}, None),
        ({"max_utilization": 10, "min_memory": 1}, 0),
    ],
)
def test_one_that_cannot_use_the_free_gpu_is_passed(
    ahead: dict[str, Any], gets: int | None, host, ground, line
) -> None:
    host.stranger(0, kind="graphics", memory=1 << 30)
    line(1, (0,), **ahead)
    line(1, (0,), max_utilization=0)
    assert try_claim(1, only=0) == (None if gets is None else (gets,))


@pytest.mark.parametrize(
    ("strangers", "near", "gets"),
    [((), "numa", None), ((1,), "numa", (0,)), ((2,), "nvlink", None), ((1,), "nvlink", (0,)), ((2, 3), "numa", None)],
)
def test_a_set_that_no_release_can_complete_is_passed(
    strangers: tuple[int, ...], near: str, gets: tuple[int, ...] | None, host, ground, line
) -> None:
    """GPUs 0 and 1 share a node, and so do 2 and 3; the waiter wants two of the four."""
    ground.hold(*range(4, 8))
    for number in strangers if near == "nvlink" else (*strangers, *((2,) if 1 in strangers else ())):
        host.stranger(number)
    line(2, range(4), near=near)
    assert try_claim(1, only=0) == gets


def test_by_dates_a_set_waits_for_the_earliest_of_its_groups(host, ground, line) -> None:
    ground.hold(1, until=time.time() + 1000)
    ground.hold(3, until=time.time() + 5000)
    line(2, range(4), near="numa", hold_for=60)
    assert try_claim(1, only=2, hold_for=2000) is None
    assert try_claim(1, only=2, hold_for=900) == (2,)


@pytest.mark.parametrize("condition", [{"colour": "red"}, {"near": ["a", "b"]}, {"max_utilization": "x" * 100}])
@pytest.mark.parametrize("there", ["free", "held", "stranger"])
def test_a_condition_that_is_not_known_is_waited_for(condition: dict[str, Any], there: str, host, ground, line) -> None:
    """Whether the waiter can use GPU 5 is not known, nor when it will have it; it competes for no other."""
    ground.hold(*range(6, 8), *([4] if there == "held" else []), until=time.time() + 1000)
    if there == "stranger":
        host.stranger(4)
    line(2, (4, 5), hold_for=60, **condition)
    assert try_claim(1, only=5, hold_for=1) is None
    assert try_claim(1, only="3,5", hold_for=1) == (3,)


def test_a_stopped_waiter_with_such_a_condition_is_passed(host, ground, line, monkeypatch) -> None:
    ground.hold(0, until=time.time() + 1000)
    line(1, (4, 5), colour="red")
    line(8, hold_for=60)
    assert try_claim(1, only=5, hold_for=1) is None
    monkeypatch.setattr(queue_place, "is_stopped", lambda ticket, known: ticket.number == 1)
    assert try_claim(1, only=5, hold_for=1) == (5,)


def test_a_gpu_that_was_lost_when_a_waiter_came(host) -> None:
    """It stands in the waiter's ticket, so nobody takes it past the waiter when it is back."""
    host.edits[host.uuids[5]] = {"lost": True}
    view = HostView(host, host.snapshot(), parse_request(1, only="3,5"))
    with SharedHost() as shared:
        shared.look()
        waiter = QueuePlace(shared, view, read_options()).ensure_waiter()
        assert waiter.request.gpus == {host.uuids[3], host.uuids[5]}


@pytest.mark.parametrize(
    ("asked", "busy", "gets"),
    [
        ({"model": "A10"}, (), (5,)),
        ({"model": "A10"}, (5,), None),
        ({"model": "A10", "exclude": 5}, (), "impossible"),
        ({"prefer": "A10"}, (), (5,)),
        ({"prefer": "A10,H100"}, (5,), (4,)),
        ({"model": "A10", "share": "50%"}, (), (5,)),
    ],
)
def test_an_a10_is_no_a100(asked: dict[str, Any], busy: tuple[int, ...], gets: Any, host) -> None:
    """Whether it is free or not. GPU 4 is the best of the others, since it shares a node with one that is busy."""
    host.edits = {host.uuids[5]: {"name": "NVIDIA A10"}}
    for number in busy:
        host.stranger(number)
    if gets == "impossible":
        with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="A100-SXM4-80GB does not match model='A10'"):
            try_claim(1, **asked)
    else:
        assert try_claim(1, **asked) == gets
