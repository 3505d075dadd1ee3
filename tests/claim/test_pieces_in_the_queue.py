"""Who waits for a GPU and who waits for pieces of it stand in one queue."""

from collections.abc import Callable
from typing import Any

import pytest
from support import api
from support.claims import Host, try_claim

CARD, ONE, TWO, THREE = range(4)  # the card and its virtual functions, by index


@pytest.fixture
def divided(host_of: Callable[[str], Host]) -> Host:
    """A host whose first card has three virtual functions."""
    host = host_of("max1550")
    host.divide(host.idle.gpus[0].uuid, "functions 3")
    return host


@pytest.fixture
def holding(divided: Host, forked: Callable[..., Any]) -> Callable[..., Any]:
    """``holding(ONE, "1h")``: a process that has claimed this device and said for how long, until it is told."""
    code = """
import safe_gpu
owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0, only=%r, hold_for=%r)
say("holds")
listen()
owner.release_gpus()
say("released")
"""
    return lambda index, hold_for=None: forked(code % (str(index), hold_for), "holds")


@pytest.fixture
def waiting(divided: Host, forked: Callable[..., Any], eventually: Callable[..., None]) -> Callable[..., Any]:
    """``waiting(CARD)``: a process that waits for this device and says that it has it."""
    code = """
import safe_gpu
owner = safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=60, only=%r)
say("holds", owner.gpus[0].index)
listen()
"""

    def start(index: int) -> Any:
        before = len(api.waiting_tickets())
        one = forked(code % str(index))
        eventually(lambda: len(api.waiting_tickets()) > before)
        return one

    return start


def gets(index: int, hold_for: str | None = None) -> bool:
    return try_claim(1, only=str(index), hold_for=hold_for) == (index,)


def test_who_waits_for_a_gpu_is_not_starved_by_those_who_come_for_its_pieces(holding: Any, waiting: Any) -> None:
    holder = holding(ONE)
    waiter = waiting(CARD)
    assert not any(gets(index) for index in (CARD, ONE, TWO, THREE))
    assert gets(4), "another card"
    holder.tell()
    assert waiter.hear() == "holds 0"


def test_who_waits_for_a_piece_is_not_passed_by_those_who_come_for_the_gpu(holding: Any, waiting: Any) -> None:
    holder = holding(ONE)
    waiter = waiting(ONE)
    assert [gets(index) for index in (CARD, ONE, TWO)] == [False, False, True]
    holder.tell()
    assert waiter.hear() == "holds 1"


def test_they_are_served_in_their_order(holding: Any, waiting: Any) -> None:
    holder = holding(CARD)
    waiters = [waiting(index) for index in (ONE, CARD, TWO)]
    holder.tell()
    assert waiters[0].hear() == "holds 1"
    waiters[0].kill()
    assert waiters[1].hear() == "holds 0"
    waiters[1].kill()
    assert waiters[2].hear() == "holds 2"


def test_a_piece_is_lent_until_the_last_claim_ends_that_the_gpu_waits_for(holding: Any, waiting: Any) -> None:
    holding(ONE, "10m")
    holding(TWO, "2h")
    waiting(CARD)
    assert gets(THREE, "1h")
    assert not gets(THREE, "3h")
    assert not gets(THREE)


def test_a_ticket_that_finds_its_gpu_divided_is_made_again_at_its_place(
    divided: Host, holding: Any, forked: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    """The new one says of which GPU the devices are pieces."""
    card = divided.idle.gpus[0].uuid
    divided.divide(card, "whole")
    holder = holding(CARD)
    others = ",".join(gpu.uuid for gpu in divided.idle.gpus[1:])
    options = f"1, safe_gpu.NoPlaceholder(), affinity=None, timeout=60, exclude={others!r}"
    forked(f"import safe_gpu\nsafe_gpu.GPUOwner({options})")
    eventually(lambda: len(api.waiting_tickets()) == 1)
    (first,) = api.waiting_tickets()
    assert (set(first.gpus), first.pieces) == ({card}, {})
    divided.divide(card, "functions 2")
    functions = tuple(gpu.uuid for gpu in divided.snapshot().gpus if gpu.is_piece)
    eventually(lambda: [one.pieces for one in api.waiting_tickets()] == [{card: functions}])
    (again,) = api.waiting_tickets()
    assert (set(again.gpus), again.number) == ({card, *functions}, first.number)
    holder.kill()
