"""The queue: who stands before whom, how the dead fall out, and how a sleeper wakes."""

import json
import math
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.entries import remove_entry

ANY = frozenset({"GPU-0", "GPU-1"})
OTHER = 4711


class Waiting:
    """One who waits, with directories of its own, as each process has."""

    def __init__(self, request: api.TicketRequest, *, by_turns: bool = False) -> None:
        self.host = api.Host()
        self.host.prepare()
        self.waiter = api.Waiter(self.host, request, by_turns=by_turns)

    def join(self, turn: float | None = None) -> bool:
        with api.DeferredSignals() as signals, self.host.locked(time.monotonic() + 30, signals):
            self.host.queue.refresh()
            newcomer = None if turn is None else lambda others: turn
            return self.waiter.join(api.facts_of_this_process(None), newcomer)

    def ahead(self) -> list[int]:
        """Numbers of those ahead who compete, the nearest first."""
        self.host.queue.refresh()
        return [ticket.number for ticket in self.waiter.ahead()]

    def end(self) -> None:
        self.waiter.leave()
        self.host.close()


Join = Callable[..., Waiting]


@pytest.fixture
def join(state_dir: Path) -> Iterator[Join]:
    """Waiters of this process; each has a ticket, with a turn or without, unless told otherwise."""
    with ExitStack() as joined:

        def make(gpus: Any = ANY, *, inside="", ticket=True, by_turns=False, turn: float | None = None) -> Waiting:
            one = Waiting(api.TicketRequest(1, gpus, inside=inside), by_turns=by_turns)
            joined.callback(one.end)
            if ticket:
                one.join(turn)
            return one

        yield make


def numbers(state_dir: Path) -> list[int]:
    return sorted(int(name.partition(".")[0]) for name in os.listdir(state_dir / "queue"))


# Tickets


def test_tickets_are_numbered_in_order_say_who_waits_and_go_when_it_leaves(state_dir: Path, join: Join) -> None:
    before = os.listdir("/proc/self/fd")
    mine = [join(), join()]
    assert numbers(state_dir) == [1, 2]
    (path,) = (state_dir / "queue").glob("2.*")
    said = json.loads(path.read_text())
    assert (said["pid"], said["pidns"]) == (os.getpid(), os.stat("/proc/self/ns/pid").st_ino)
    assert {"nb_gpus": 1, "gpus": ["GPU-0", "GPU-1"], "hold_for": None, "inside": ""}.items() <= said.items()
    assert path.stat().st_mode & 0o777 == 0o644
    for one in mine:
        assert one.waiter.queued
        one.end()
        one.end()
        assert not one.waiter.queued
    assert numbers(state_dir) == []
    assert os.listdir("/proc/self/fd") == before


def request_of(**said: Any) -> api.TicketRequest:
    data = json.dumps({"v": 1, "nb_gpus": 1, "gpus": [], **said}).encode()
    return api.TicketRequest.of(api.Entry.read("1.00000000000000aa", 0, (0, 0), data))


def test_a_request_is_what_its_ticket_says() -> None:
    said = api.TicketRequest(2, ANY, (("min_memory", 5), ("near", "numa")), 60.0, "abc")
    assert request_of(pid=1, **said.as_facts()) == said
    assert request_of(hold_for=math.nan).hold_for is None
    partitions = [api.Gpu(one, f"AMD-5-{one}", place="AMD-5", partition=True, mode="CPX") for one in (0, 1)]
    pieces = said.for_gpus([*partitions, api.Gpu(2, "GPU-x", place="AMD-6"), api.Gpu(3, "GPU-0")])
    assert request_of(**pieces.as_facts()) == pieces
    assert pieces.pieces == {"AMD-5": ("AMD-5-0", "AMD-5-1"), "AMD-6": ()}
    assert pieces.modes == {"AMD-5": "CPX"}
    assert pieces.for_gpus([api.Gpu(3, "GPU-0")]) == said._replace(gpus=frozenset({"GPU-0"}))


def test_who_waits_for_no_piece_says_nothing_of_pieces() -> None:
    """Older clients take what they do not know for a condition."""
    assert not {"pieces", "modes"} & api.TicketRequest(1, ANY).as_facts().keys()


@pytest.mark.parametrize(
    "more",
    [{"v": 2}, {"near": "x" * 65}, {f"c{number}": 1 for number in range(20)}],
    ids=["a later version", "a long text", "many"],
)
def test_what_is_not_understood_makes_a_ticket_unknown(more: dict[str, Any]) -> None:
    """So it is waited for and never passed."""
    assert not request_of(**more).known


# Order


@pytest.mark.parametrize(
    ("ahead", "mine", "waits"),
    [
        ((ANY, ""), (ANY, ""), True),
        ((frozenset({"GPU-0"}), ""), (frozenset({"GPU-1"}), ""), False),  # only=, model=: another part of the host
        ((ANY, ""), (ANY, "a"), False),  # inside a claim
        ((ANY, "a"), (ANY, "a"), True),
    ],
)
@pytest.mark.parametrize("ticket", [True, False])
@pytest.mark.parametrize("by_turns", [True, False])
def test_only_competitors_stand_in_the_way(join: Join, ahead, mine, waits: bool, ticket: bool, by_turns: bool) -> None:
    join(ahead[0], inside=ahead[1])
    one = join(mine[0], inside=mine[1], ticket=ticket, by_turns=by_turns, turn=5.0 if by_turns and ticket else None)
    assert one.ahead() == ([1] if waits else [])
    assert one.waiter.position() == 1 + waits


def test_the_nearest_competitor_comes_first_and_nobody_behind(join: Join) -> None:
    first, _other, second = join(), join(frozenset({"GPU-9"})), join()
    third, _last = join(), join()
    assert third.ahead() == [3, 1]
    assert [one.number for one in third.waiter.everybody_ahead()] == [1, 3]
    assert (second.ahead(), first.ahead()) == ([1], [])
    assert [one.waiter.position() for one in (first, second, third)] == [1, 2, 3]
    assert [third.waiter.among_first(number) for number in (3, 4)] == [False, True]
    assert join(ticket=False).ahead() == [5, 4, 3, 1]


def test_by_turns_a_lower_turn_is_ahead_of_a_lower_number(join: Join) -> None:
    assert join(by_turns=True, turn=7.0).ahead() == []
    late = join(by_turns=True, turn=9.0)
    early = join(by_turns=True, turn=2.0)
    assert early.ahead() == []
    assert late.ahead() == [1, 3]
    assert join(by_turns=True, ticket=False).ahead() == [2, 1, 3]
    assert [ticket.number for ticket in api.waiting_tickets()] == [3, 1, 2]
    assert (early.waiter.position(), late.waiter.position()) == (1, 3)


def test_by_turns_one_without_a_turn_that_came_later_is_behind(join: Join) -> None:
    """Though its turn, the highest of the tickets before it, is that of this waiter. Else both would wait."""
    assert [join(by_turns=True, turn=5.0).ahead(), join().ahead()] == [[], [1]]


def test_who_joins_by_turns_learns_whether_it_passed_somebody(join: Join) -> None:
    join(by_turns=True, turn=7.0)
    one, other, simple = join(by_turns=True, ticket=False), join(by_turns=True, ticket=False), join(ticket=False)
    assert [one.join(2.0), other.join(9.0), simple.join()] == [True, False, False]


@pytest.mark.parametrize("turn", [None, 2.0])
def test_who_stands_aside_for_a_claim_that_fails_comes_back_to_its_place(state_dir: Path, join: Join, turn) -> None:
    by_turns = turn is not None
    first, second = join(by_turns=by_turns, turn=turn), join(by_turns=by_turns, turn=turn and turn + 1)
    since = first.waiter.since
    first.waiter.stand_aside()
    assert not first.waiter.queued
    assert numbers(state_dir) == [2]
    assert (first.ahead(), second.ahead()) == ([], []), "those behind go on, and its own place counts for it"
    first.join(turn)
    assert numbers(state_dir) == [1, 2]
    assert first.waiter.since == since
    assert (first.ahead(), second.ahead()) == ([], [1])
    first.waiter.leave()
    first.join(turn and turn + 5)
    assert numbers(state_dir) == [2, 3], "who has left is a newcomer"


@pytest.mark.parametrize(("newcomer", "turn"), [(9.0, 5.0), (1.0, 1.0)])
def test_by_turns_who_comes_back_has_its_old_turn_or_that_of_a_newcomer(state_dir, join, newcomer, turn) -> None:
    """When all the others have left, turns begin anew: its old one would be behind all who come."""
    mine = join(by_turns=True, turn=5.0)
    mine.waiter.stand_aside()
    mine.join(newcomer)
    (path,) = (state_dir / "queue").glob("1.*")
    assert json.loads(path.read_text())["turn"] == turn


def test_several_who_come_back_stand_as_before(state_dir: Path, join: Join) -> None:
    first, second, third = join(), join(), join()
    for one in (first, second, third):
        one.waiter.stand_aside()
    for one in (second, third, first):
        one.join()
    assert numbers(state_dir) == [1, 2, 3]
    assert [one.ahead() for one in (first, second, third)] == [[], [1], [2, 1]]


def test_who_comes_back_is_not_behind_newcomers_with_numbers_that_were_gone(state_dir: Path, join: Join) -> None:
    first, mine, last = join(), join(), join()
    mine.waiter.stand_aside()
    for one in (first, last):
        one.end()
    newcomer = join()
    assert numbers(state_dir) == [1]
    mine.join()
    assert numbers(state_dir) == [1, 1]
    assert (mine.ahead(), newcomer.ahead()) == ([], [])
    newcomer.end()
    mine.host.queue.refresh()
    assert not mine.waiter.was_removed()


def test_who_comes_back_is_still_behind_those_who_were_ahead(state_dir: Path, join: Join) -> None:
    """Whatever number somebody takes who says that he joined later."""
    first, second, mine = join(), join(), join()
    mine.waiter.stand_aside()
    facts = {**api.facts_of_this_process(None), **mine.waiter.request.as_facts(), "since": time.time() + 1000}
    _, held = api.make_entry(mine.host.queue.directory, 1, facts, by_children=False)
    mine.join()
    assert numbers(state_dir) == [1, 1, 2, 3]
    assert (first.ahead(), sorted(second.ahead()), sorted(mine.ahead())) == ([], [1, 1], [1, 1, 2])
    held.release()


@pytest.mark.parametrize("turn", [None, 5.0])
def test_who_comes_back_with_a_number_that_no_longer_counts_is_a_newcomer(state_dir: Path, join: Join, turn) -> None:
    """It stood behind somebody with a high number, who has left."""
    high = join(ticket=False)
    facts = {**api.facts_of_this_process(None), **high.waiter.request.as_facts()}
    name, held = api.make_entry(high.host.queue.directory, 10**7, facts, by_children=False)
    mine = join(by_turns=turn is not None, turn=turn)
    assert numbers(state_dir) == [10**7, 10**7 + 1]
    remove_entry(high.host.queue.directory, name, held)
    mine.waiter.stand_aside()
    mine.join(turn)
    assert numbers(state_dir) == [1]


def test_no_room_for_the_ticket_costs_who_comes_back_no_place(state_dir: Path, join: Join, monkeypatch) -> None:
    mine, other = join(), join()
    mine.waiter.stand_aside()
    with monkeypatch.context() as full:
        full.setattr(
            "safe_gpu.coordination.own_entry.make_entry", Mock(side_effect=api.StateDirError("full", path="/"))
        )
        with pytest.raises(api.StateDirError, match="full"):
            mine.join()
    mine.join()
    assert (mine.ahead(), other.ahead()) == ([], [1])


def test_who_came_between_the_listing_and_the_lock_stands_ahead(state_dir: Path, join: Join) -> None:
    first, mine = join(), join(ticket=False)
    mine.host.queue.refresh()
    second = join()
    first.waiter.leave()
    mine.join()
    assert numbers(state_dir) == [2, 3]
    assert mine.ahead() == [2]
    second.waiter.leave()
    assert mine.ahead() == []


# Removed and replaced


def test_a_ticket_that_was_removed_is_noticed_and_made_anew(state_dir: Path, join: Join) -> None:
    mine = join()
    mine.host.prepare()
    mine.host.queue.refresh()
    assert not mine.waiter.was_removed()
    for path in (state_dir / "queue").iterdir():
        path.unlink()
    mine.host.prepare()
    mine.host.queue.refresh()
    assert mine.waiter.was_removed()
    mine.join()
    assert len(numbers(state_dir)) == 1
    assert not api.Waiter.was_removed(join(ticket=False).waiter)


# Who counts


def ticket(number: int, uid: int = OTHER, **said: Any) -> api.Entry:
    data = json.dumps({"v": 1, "nb_gpus": 1, "gpus": ["GPU-0"], **said}).encode()
    return api.Entry.read(f"{number}.{number:016x}", uid, (1, number), data)


def test_of_one_user_a_thousand_tickets_count() -> None:
    crowd = [ticket(number) for number in range(1, 1051)]
    found = api.tickets_that_count([*crowd, ticket(1051, 4712), ticket(1052)])
    assert [one.number for one in found] == [*range(1, 1001), 1051]
    assert len(api.tickets_that_count([one._replace(uid=0) for one in crowd])) == 1050


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to play another user")
def test_beyond_the_caps_a_ticket_is_not_ahead_until_it_counts(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.queue, "MOST_OF_ONE_USER", 3)
    queue = join(ticket=False).host.queue.directory
    said = [{"nb_gpus": 0, "gpus": {"GPU-0": None}}, *[{"nb_gpus": 1, "gpus": sorted(ANY)}] * 5]  # the first is a claim
    claimed, *made = (api.make_entry(queue, number, what, by_children=False)[1] for number, what in enumerate(said, 1))
    for held in (claimed, *made):
        os.fchown(held.fd, OTHER, OTHER)
    mine = join()
    assert mine.ahead() == [4, 3, 2]
    assert mine.waiter.position() == 4
    made[0].release()
    assert [mine.ahead(), mine.ahead()][1] == [5, 4, 3]
    assert len(api.waiting_tickets()) == 4
    for held in (claimed, *made):
        held.release()


def test_a_stopped_waiter_is_known_in_its_own_pid_namespace_only(child: Any, eventually: Any) -> None:
    one, own = child("say('here'); listen()", says="here"), os.stat("/proc/self/ns/pid").st_ino
    waiters = [ticket(1, pid=one.pid, pidns=namespace) for namespace in (own, 0, own + 1)]
    assert not any(map(api.is_stopped, waiters))
    os.kill(one.pid, signal.SIGSTOP)
    eventually(lambda: api.is_stopped(waiters[0]))
    assert list(map(api.is_stopped, waiters)) == [True, True, False]
    os.kill(one.pid, signal.SIGCONT)


# Those who die, and those who sleep


WAIT = """
import os, time
from safe_gpu.coordination.host_lock import Host
from safe_gpu.coordination.queue import TicketRequest, Waiter
from safe_gpu.host.signals import DeferredSignals
host = Host()
host.prepare()
waiter = Waiter(host, TicketRequest(1, frozenset({"GPU-0"})), by_turns=False)
with DeferredSignals() as signals, host.locked(None, signals):
    host.queue.refresh()
    waiter.join({"pid": os.getpid()})
say("queued")
"""


def test_the_dead_fall_out_though_a_forked_child_lives_on(state_dir: Path, join: Join, forked: Any) -> None:
    dead = forked(WAIT + "import signal\nos.fork() or (say(os.getpid()), signal.pause())\nlisten()", says="queued")
    survivor = int(dead.hear())
    mine = join()
    assert mine.ahead() == [1]
    dead.kill()
    assert mine.ahead() == []
    os.kill(survivor, signal.SIGKILL)
    assert mine.waiter.position() == 1
    assert [one.number for one in mine.host.queue.remove_dead()] == [1]
    assert numbers(state_dir) == [2]


def test_a_sleeper_wakes_when_the_one_before_it_leaves_or_dies(state_dir: Path, child: Any) -> None:
    sleeper = """
def look():
    host.queue.refresh()
    return next(waiter.ahead(), None)
while (ahead := look()) is not None:
    say("sleeping")
    assert waiter.sleep_behind(ahead, 600)
say("head")
listen()
waiter.leave()
say("left")
"""
    first, second, third = (child(WAIT + sleeper, says="queued") for _ in range(3))
    assert [first.hear(), second.hear(), third.hear()] == ["head", "sleeping", "sleeping"]
    first.tell()
    assert [first.hear(), second.hear()] == ["left", "head"]
    second.kill()
    assert third.hear() == "head"


def test_a_sleep_ends_at_its_deadline_and_is_taken_up_again(join: Join, eventually: Any) -> None:
    first = join()
    before = threading.active_count()
    for one in (join(ticket=False), join(ticket=False)):
        one.host.queue.refresh()
        ahead = next(one.waiter.ahead())
        assert one.waiter.sleep_behind(ahead, 0.001) is False
        assert one.waiter.sleep_behind(ahead, 0.001) is False
    assert threading.active_count() == before + 1  # one thread for one ticket, whoever looks at it and how often
    first.waiter.leave()
    eventually(lambda: threading.active_count() == before)


class Interrupt(BaseException):
    pass


def test_the_exception_of_a_handler_comes_out_of_a_sleep_as_it_is(join: Join, eventually: Any) -> None:
    """And later ones too. Most happens when a sleep ends: there a wait for a thread may make another exception of it,
    and what lets handlers run may be left half way, both once in some hundreds of tries."""
    first, mine, threads = join(), join(ticket=False), threading.active_count()
    mine.host.queue.refresh()
    ahead = next(mine.waiter.ahead())

    def sleep() -> float:
        began = time.perf_counter()
        mine.waiter.sleep_behind(ahead, 0.0005)
        return time.perf_counter() - began

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    takes, chance = statistics.median(sleep() for _ in range(50)), random.Random(1)

    def be_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, takes * chance.uniform(0.8, 1.1))
        sleep()
        eventually(lambda: False)  # it comes a little later

    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(2000):
            with pytest.raises(Interrupt):
                be_interrupted()
    finally:
        signal.signal(signal.SIGALRM, former)
    first.end()
    eventually(lambda: threading.active_count() == threads)


def test_without_a_thread_to_sleep_in_it_looks_now_and_then(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    first, mine = join(), join()
    mine.host.queue.refresh()
    ahead = next(mine.waiter.ahead())

    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    assert mine.waiter.sleep_behind(ahead, 0.001) is False
    first.waiter.leave()
    assert mine.waiter.sleep_behind(ahead, 60) is True
