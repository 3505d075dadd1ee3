"""Users who wait are served by turns, where root's file says so, with real users and tickets."""

import os
import select
from typing import Any

import pytest
from support.claims import claim

from safe_gpu import ClaimTimeout
from safe_gpu.claim import report, search
from safe_gpu.coordination import queue
from safe_gpu.coordination.entry import make_entry
from safe_gpu.coordination.queue import waiting_tickets
from safe_gpu.coordination.turns import turn_of

ANNA, BEN, CARLA = 4711, 4712, 4713

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose file a policy must be")


def served(holder: Any, crowd: list[Any]) -> Any:
    """Let a holder go, and return who of a crowd gets its GPUs."""
    holder.tell()
    assert holder.hear() == "released"
    ready = select.select([one.line for one in crowd], [], [], 60)[0]
    assert len(ready) == 1, "nobody, or more than one, was served"
    one = next(one for one in crowd if one.line in ready)
    one.hear()
    crowd.remove(one)
    return one


@pytest.mark.parametrize("order", ["fifo", "fair"])
def test_one_request_does_not_wait_for_a_sweep(
    rules: Any, user: Any, waiting: Any, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_EARLY_INTERVAL", 1e6)  # each is woken by whom it waits for, or never
    rules(f"[host]\norder = {order}")
    holders = [user(ANNA, 1) for _ in range(8)]
    assert [one.hear() for one in holders] == ["1"] * 8
    sweep = [waiting(ANNA) for _ in range(4)]
    ben = waiting(BEN)
    crowd = [*sweep, ben]
    # Anna holds eight, so her first ticket has the turn 8.5; Ben comes after that one and before her next.
    expected = [sweep[0], ben, *sweep[1:]] if order == "fair" else [*sweep, ben]
    assert [one.pid for one in waiting_tickets()] == [one.pid for one in expected]
    assert [served(holder, crowd) for holder in holders[:5]] == expected


@pytest.mark.parametrize(("before", "after", "turns"), [("fifo", "fair", [None]), ("fair", "fifo", [1.0])])
def test_a_claim_keeps_the_order_in_which_it_began(
    rules: Any, line: Any, stranger: Any, monkeypatch: pytest.MonkeyPatch, before: str, after: str, turns: list[Any]
) -> None:
    """Else it could wait for one who waits for it. Root changes the order between two looks."""
    rules(f"[host]\norder = {before}")
    line(1, (0,))
    written, confirm = list[Any](), search.confirm

    def changing(*arguments: Any) -> bool:
        rules(f"[host]\norder = {after}")
        stranger(*range(8))
        return confirm(*arguments)

    def writing(directory: Any, number: int, said: Any, **more: Any) -> Any:
        written.append(said.get("turn"))
        return make_entry(directory, number, said, **more)

    monkeypatch.setattr(search, "confirm", changing)
    monkeypatch.setattr(queue, "make_entry", writing)
    with pytest.raises(ClaimTimeout):
        claim(1, only=range(1, 8), timeout=2)
    assert written == turns


def test_tickets_have_turns_only_where_the_order_is_fair(rules: Any, user: Any, waiting: Any) -> None:
    """Who changes the order while some wait changes nobody's place."""
    rules("[host]\norder = fifo")
    holder = user(ANNA, 8)
    assert holder.hear() == "8"
    first = waiting(ANNA, 8)
    rules("[host]\norder = fair\n[user 4712]\nweight = 2")
    second = waiting(BEN, 8)
    third = waiting(BEN, 8)
    fourth = waiting(CARLA, 8)
    turns = {one.pid: turn_of(one) for one in waiting_tickets()}
    assert [turns[one.pid] for one in (first, second, third, fourth)] == [None, 0.5, 4.5, 0.5]
    crowd = [first, second, third, fourth]
    for one in (first, second, fourth, third):
        assert served(holder, crowd) is one
        holder = one


def test_a_shares_turn_is_its_part_of_a_gpu(rules: Any, user: Any, waiting: Any) -> None:
    rules("[host]\norder = fair")
    assert user(BEN, 1, share="25%").hear() == "1"
    assert user(BEN, 7).hear() == "7"
    waiting(BEN, 1, share="80%")
    waiting(BEN, 1, share="50%")
    turns = [turn_of(one) for one in sorted(waiting_tickets(), key=lambda one: one.number)]
    assert turns == pytest.approx([7.75, 7.75 + 7.75], abs=0.001)
