"""Who may go first and what a claim does next, as tables; and real processes that wait, are stopped or interrupted."""

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import api
from support.claims import Host, claim, try_claim
from support.real import long

from safe_gpu import ClaimTimeout, NoPlaceholder, NotEnoughGpusError, UnsatisfiableRequestError, claim_gpus

USER = api.procfs.user_name(os.geteuid())

ALL = tuple(range(8))


HOUR = 3600.0


def case(nb_gpus: int, gets: tuple[int, ...] | None, **scene: Any) -> dict[str, Any]:
    """A claim that does not wait, and the GPUs that it gets (None: it is refused), in a scene of that test.

    Of the free ones it takes those on a node where others are busy; GPUs 0 and 1 share a node, and so on.
    """
    return {"nb_gpus": nb_gpus, "gets": gets, **scene}


def short(gets: tuple[int, ...] | None, **scene: Any) -> dict[str, Any]:
    """A claim for ten minutes beside one of eight GPUs that has to wait for an hour."""
    return case(1, gets, **{"hold_for": 600, "ahead": [(8, ALL)], "due": dict.fromkeys(ALL[1:], HOUR), **scene})


QUEUES = {
    "behind a large request that waits for a lease": case(1, None, ahead=[(8, ALL)], claimed=(3,)),
    "behind a large request that a stranger blocks": case(1, (6,), ahead=[(8, ALL)], strangers=(7,)),
    "overlapping parts of the host": case(1, (2,), ahead=[(2, (0, 1))], claimed=(0,), only=(1, 2)),
    "any GPU, behind one who wants a certain one": case(1, (1,), ahead=[(1, (0,))], claimed=(0,)),
    "a certain GPU, behind one who wants any": case(1, None, ahead=[(1, ALL)], claimed=(0,), only=(7,)),
    "the free ones are too few anyhow": case(3, None, ahead=[(8, ALL)], strangers=(7,), claimed=(0, 1, 2, 3, 4)),
    "it ends in time": short((0,)),
    "it ends too late": short(None, hold_for=2 * HOUR),
    "it does not say": short(None, hold_for=None),
    "the large one's date is not known": short(None, due=dict.fromkeys(ALL[1:7], HOUR), claimed=(7,)),
    "a holder is overdue": short(None, due=dict.fromkeys(ALL[1:], -5.0)),
    "past two who cannot start either": short((0,), ahead=[(8, ALL), (1, (0,))]),
    "a stranger's GPU has no date": short(
        (0,), hold_for=60, ahead=[(2, (0, 1, 2)), (1, (1,))], strangers=(1,), due=dict.fromkeys(ALL[2:], HOUR)
    ),
}


@pytest.mark.parametrize("case", QUEUES.values(), ids=QUEUES)
def test_who_may_go_first(case: dict[str, Any], dgx, join_queue, stranger_pid: int) -> None:
    scene = {"ahead": [], "claimed": (), "due": {}, "strangers": (), "only": (), "hold_for": None, **case}
    dgx.hold(*scene["claimed"])  # nobody knows for how long
    now = time.time()
    for index, seconds in scene["due"].items():
        dgx.hold(index, until=now + seconds)
    dgx.occupy(*scene["strangers"], pid=stranger_pid)
    for nb_gpus, gpus, *hold_for in scene["ahead"]:
        join_queue(nb_gpus, gpus, hold_for=next(iter(hold_for), None))
    assert try_claim(scene["nb_gpus"], only=scene["only"], hold_for=scene["hold_for"]) == scene["gets"]
    assert len(dgx.tickets()) == len(scene["ahead"])
    assert dgx.claimed() == sorted({*scene["claimed"], *scene["due"]})


def test_a_holder_that_let_go_is_a_stranger_unless_it_is_dying(dgx, join_queue, zombie: int, stranger_pid: int) -> None:
    """The GPU of one that dies is free in a moment, that of one who computes on it is not."""
    (dying,) = dgx.occupy(7, pid=zombie)
    join_queue(8)
    assert try_claim(1) is None
    dying.close()
    dgx.occupy(7, pid=stranger_pid)
    assert try_claim(1) == (6,)


def test_a_stopped_waiter_keeps_its_ticket_and_is_passed(command, dgx, stop, eventually) -> None:
    dgx.hold(0)
    large = command.start("run", "-n", 8, "--", "echo", "large")
    assert "for 8 GPUs (7 free)" in large.stderr.readline()
    assert try_claim(1) is None
    stop(large.pid)
    assert try_claim(1) == (1,)
    with pytest.raises(NotEnoughGpusError, match=rf"\(past {USER}, pid {large.pid}, stopped, wants 8 GPUs, queued"):
        claim_gpus(1, NoPlaceholder(), only=0, timeout=0)
    os.kill(large.pid, signal.SIGCONT)
    eventually(lambda: not api.procfs.is_stopped(large.pid))
    assert try_claim(1) is None
    dgx.let_go()
    assert large.communicate(timeout=60)[0] == "large\n"


# Real waiters


WAIT = """
import logging, sys
from safe_gpu import NoPlaceholder, claim_gpus
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
owner = claim_gpus(only=0, affinity=None, timeout=None, placeholder_fn=NoPlaceholder())
say("has", *owner.devices_taken)
listen()
owner.release_gpus()
"""
SHOW = 'cat "$SAFE_GPU_DIR"/claims/* | grep "\\"pid\\": $$,"'


def hear(one, start: str) -> str:
    while not (line := one.hear()).startswith(start):
        pass
    return line


def test_a_claimer_that_gives_back_after_the_second_poll_keeps_its_place(dgx, child, eventually) -> None:
    dgx.hold(0)
    first = child(WAIT)
    assert hear(first, "waiting").startswith("waiting for 1 GPU (0 of 1 free); GPU 0: ")
    second = child(WAIT)
    assert f"behind {USER} (pid {first.process.pid}, wants 1 GPU" in hear(second, "waiting")
    (context,) = dgx.occupy(0)
    dgx.let_go()
    hear(first, "GPU 0 was taken meanwhile")
    eventually(lambda: dgx.claimed() == [])
    tickets = dgx.tickets()  # it has made its own again before it gave the GPU back
    assert [name.partition(".")[0] for name in tickets] == ["1", "2"]
    context.close()
    assert hear(first, "has") == "has 0"
    assert dgx.tickets() == tickets[1:]
    first.tell()
    assert hear(second, "has") == "has 0"


class OnceItWaits:
    """A logger that does something when a claim says that it waits, before it sleeps."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do: list[Callable[[], None]] = [do]

    def info(self, message: str, *arguments: object, **_: object) -> None:
        if (message % arguments).startswith("waiting for ") and self._do:
            self._do.pop()()

    warning = info


def test_a_stranger_who_has_left_blocks_nobody(command, dgx, rarely_polled, stranger_pid) -> None:
    """Whoever would pass because of him polls again before it takes anything."""
    dgx.hold(*range(7))
    (context,) = dgx.occupy(7, pid=stranger_pid)
    large = command.start("run", "-n", 8, "--", "true")
    assert "for 8 GPUs (0 free); GPU " in large.stderr.readline()

    def leave() -> None:
        context.close()
        dgx.let_go(0)

    with pytest.raises(ClaimTimeout, match="wants 8 GPUs"):
        claim(only=0, timeout=1.0, logger=OnceItWaits(leave))
    dgx.let_go()
    assert large.wait(60) == 0


def test_a_timeout_is_one_deadline_wherever_one_stands(dgx, join_queue) -> None:
    join_queue(8)
    dgx.hold(0)
    for only in ((), (1,)):
        with pytest.raises(ClaimTimeout, match=rf"behind \S+ \(pid {os.getpid()}, wants 8 GPUs"):
            claim_gpus(1, NoPlaceholder(), only=only, timeout=0.05)
    assert len(dgx.tickets()) == 1


# Interruptions


INTERRUPT = """
import inspect, linecache, os, signal, sys
import safe_gpu
from safe_gpu import NoPlaceholder, claim_gpus
from safe_gpu.claim import owner as owners
from safe_gpu.host import locks
from safe_gpu.coordination.holders import living_claims
from safe_gpu.coordination.queue import waiting_tickets

package = os.path.dirname(safe_gpu.__file__)
rooms = tuple(os.path.join(package, room) for room in ("claim", "coordination"))

def own(entries):
    return [one.name for one in entries if one.pid == os.getpid()]

been = set()

def interrupted(nb_gpus, timeout):
    "Have the signal come before the first line of a claim where it has not come yet; where that was."
    where = ""
    def local(frame, event, argument):
        nonlocal where
        line = frame.f_code, frame.f_lineno, bool(locks._closed_in_children)
        if event == "line" and line not in been:
            been.add(line)
            # On its way out a `with` is a line again, but there the interpreter handles no signal; and one that comes
            # between a refusal and its cleaning up is a second misfortune.
            statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split(None, 1)[0]
            if statement not in ("with", "except", "self._undo()"):
                sys.settrace(None)
                where = f"{os.path.relpath(frame.f_code.co_filename, package)}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGINT)
        return local
    def trace(frame, event, argument):
        if frame.f_code.co_name == "_undo":  # on the way out it is too late to come for the first time
            sys.settrace(None)
            return None
        function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # no body of a class, or of a module that is imported
        return local if function and frame.f_code.co_filename.startswith(rooms) else None
    sys.settrace(trace)
    try:
        owner = claim_gpus(nb_gpus, NoPlaceholder(), affinity=None, timeout=timeout, vendor="nvidia")
        sys.settrace(None)
        owner.release_gpus()
    except KeyboardInterrupt:
        safe_gpu.release_gpus()
    except safe_gpu.NotEnoughGpusError:
        pass
    finally:
        sys.settrace(None)
    return where

def state():
    return {
        "owner": owners.current_owner(), "environment": dict(os.environ),
        "claims": own(living_claims()), "tickets": own(waiting_tickets()),
        "files": len(os.listdir("/proc/self/fd")), "held": set(locks._closed_in_children),
    }

before, number = state(), 0
while where := interrupted(*REQUEST):
    after = state()
    if after != before:
        say(f"interrupted before {where}, it left", after)
    number += 1
say("interrupted before", number, "lines")
"""


GRANTED, REFUSED, IN_THE_QUEUE = (2, 0), (7, 0), (7, 0.02)


@long
@pytest.mark.parametrize("wanted", [GRANTED, REFUSED, IN_THE_QUEUE])
def test_wherever_an_interrupt_comes_nothing_is_left_behind(wanted, dgx, child, rules, monkeypatch) -> None:
    """A notebook lives on after Ctrl-C, and what it kept would be gone for everybody until it ends."""
    dgx.hold(0, 1)
    if os.geteuid() == 0:  # whose file a policy must be
        rules("[host]\norder = fair\n[default]\nmax_gpus = 8")
    monkeypatch.setenv("SAFE_GPU_SCOPE", "of a claim that has ended")
    *left, done = child(f"REQUEST = {wanted}\n{INTERRUPT}").finish().splitlines()
    assert left == []
    assert int(done.split()[2]) > 40


# Ranges: at least so many, and more if these can be had at once


def test_a_range_takes_what_is_free_and_passes_nobody(dgx: Any, join_queue: Any) -> None:
    dgx.hold(0, 1, 2, 3)
    assert try_claim((2, 4)) == try_claim((2, 6)) == try_claim((4, 5)) == (4, 5, 6, 7)
    assert try_claim((5, 6)) is None
    join_queue(3, (0, 1, 4))
    assert try_claim((2, 8)) == (5, 6, 7)
    join_queue(8)
    assert try_claim((2, 4)) is None
    for nonsense in ((0, 2), (4, 2), (2, 2), (1, 2, 3), ("a", "b"), (2.5, 3)):
        with pytest.raises(UnsatisfiableRequestError, match="nb_gpus"):
            claim(nonsense)


# Waiters with conditions: nobody waits for a GPU that the one ahead cannot use, nor takes one past him that he can


@pytest.fixture
def linked(host_of: Any) -> Host:
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


def test_one_that_cannot_use_the_free_gpu_is_passed(linked, dgx, join_queue) -> None:
    linked.stranger(0, kind="graphics", memory=1 << 30)
    join_queue(1, (0,), min_memory=79 << 30)
    join_queue(1, (0,), max_utilization=10)
    assert try_claim(1, only=0) == (0,)
    join_queue(1, (0,), min_memory=7 << 30)
    assert try_claim(1, only=0) is None


@pytest.mark.parametrize(
    ("strangers", "near", "gets"),
    [((), "numa", None), ((1, 2), "numa", (0,)), ((1,), "nvlink", (0,)), ((2, 3), "numa", None)],
)
def test_a_set_that_no_release_can_complete_is_passed(strangers, near: str, gets, linked, dgx, join_queue) -> None:
    """GPUs 0 and 1 share a node, and so do 2 and 3; the waiter wants two of the four."""
    dgx.hold(*range(4, 8))
    for number in strangers:
        linked.stranger(number)
    join_queue(2, range(4), near=near)
    assert try_claim(1, only=0) == gets


@pytest.mark.parametrize(
    ("there", "condition"),
    [("free", {"colour": "red"}), ("held", {"near": ["a", "b"]}), ("stranger", {"max_utilization": "x" * 100})],
)
def test_an_unknown_condition_is_waited_for(there: str, condition, linked, dgx, join_queue, monkeypatch) -> None:
    """Whether the waiter can use GPU 5 is not known, nor when it will have it. A stopped one is passed."""
    dgx.hold(*range(6, 8), *([4] if there == "held" else []), until=time.time() + 1000)
    if there == "stranger":
        linked.stranger(4)
    join_queue(2, (4, 5), hold_for=60, **condition)
    join_queue(8, hold_for=60)
    assert try_claim(1, only=5, hold_for=1) is None
    assert try_claim(1, only="3,5", hold_for=1) == (3,)
    monkeypatch.setattr("safe_gpu.claim.queue_place.is_stopped", lambda ticket, known: ticket.number == 1)
    assert try_claim(1, only=5, hold_for=1) == (5,)


def test_a_gpu_that_was_lost_when_a_waiter_came(linked, dgx) -> None:
    """It stands in the waiter's ticket, so nobody takes it past the waiter when it is back."""
    linked.edits[linked.uuids[5]] = {"lost": True}
    dgx.hold(3)
    wanted = set()
    linked.on_poll = lambda number: wanted.update(*(ticket.gpus for ticket in api.waiting_tickets()))
    assert try_claim(1, only="3,5", timeout=0.05) is None
    assert wanted == {linked.uuids[3], linked.uuids[5]}


# What a claim does next, and what holds for every state


NOW = 1000.0
A, AB, ABC = frozenset("A"), frozenset("AB"), frozenset("ABC")


def waiting(**values: object) -> api.WaitState:
    return api.WaitState(NOW + 60)._replace(**values)  # type: ignore[arg-type]


OVER = api.WaitState(NOW)
LATE = api.WaitState(NOW, tried_last=True)
ASKED = waiting(polled_for=AB)
LIMIT = api.LimitReached(1, 1)
AHEAD = api.Entry.read("1.00000000000000aa", 0, (1, 1), b'{"v": 1, "nb_gpus": 1, "gpus": ["GPU-1"]}')

# What a look saw, how far the wait has come, when the driver may be asked -> the step, to when, what changes.
CASES = {
    "seen by another one": (api.Seen(api.WITHDRAWN), waiting(), 0, api.AGAIN, NOW + 0.25, {"withdrew": NOW}),
    "that for a second": (api.Seen(api.WITHDRAWN), LATE._replace(withdrew=NOW - 1), 0, api.REFUSE, None, {}),
    "held elsewhere": (api.Seen(elsewhere=A), LATE, 0, api.WATCH, NOW + 0.005, {"elsewhere": A}),
    "held elsewhere after all": (api.Seen(elsewhere=A), LATE._replace(elsewhere=AB), 0, api.REFUSE, None, {}),
    "outdated late": (api.Seen(api.OUTDATED), LATE, NOW + 9, api.POLL, None, {}),
    "one last try, behind": (api.Seen(ahead=AHEAD), OVER, NOW + 9, api.POLL, None, {"tried_last": True}),
    "it failed behind others": (api.Seen(ahead=AHEAD), LATE, 0, api.REFUSE, None, {}),
    "somebody ahead": (api.Seen(ahead=AHEAD), waiting(), 0, api.SLEEP, NOW + 30, {}),
    "at the user's limit": (api.Seen(limit=LIMIT), waiting(), 0, api.WATCH, NOW + 1, {}),
    "that and behind": (api.Seen(ahead=AHEAD, limit=LIMIT), waiting(), 0, api.SLEEP, NOW + 30, {}),
    "others are free": (api.Seen(free=ABC), ASKED, NOW + 9, api.POLL, None, {"polled_for": ABC}),
    "the driver may be asked": (api.Seen(free=AB), ASKED, NOW, api.POLL, None, {"polled_for": AB}),
    "the driver was just asked": (api.Seen(free=AB), ASKED, NOW + 0.1, api.WATCH, NOW + 0.1, {}),
    "too few free": (api.Seen(free=A), waiting(), NOW + 9, api.WATCH, NOW + 1, {}),
    "too few, to the deadline": (api.Seen(), waiting(deadline=NOW + 0.5), NOW + 9, api.WATCH, NOW + 0.5, {}),
    "one may have come back": (api.Seen(free=A), ASKED, NOW, api.POLL, None, {"polled_for": A}),
}


@pytest.mark.parametrize(("seen", "state", "next_poll", "step", "until", "then"), CASES.values(), ids=CASES.keys())
def test_the_next_step(seen, state, next_poll, step, until, then) -> None:
    suffices = len(seen.free) >= 2
    found = api.decide(seen, state, suffices=suffices, now=NOW, next_poll=next_poll, next_attempt=NOW + 30, pause=0.25)
    assert (found.step, found.state) == (step, state._replace(**then))  # type: ignore[arg-type]
    assert until is None or found.until == until


gpus = st.frozensets(st.sampled_from("ABCD"))
looks = st.sampled_from([api.Seen(ahead=AHEAD), api.Seen(api.WITHDRAWN)]) | st.builds(
    api.Seen, free=gpus, elsewhere=gpus
)
moments = st.floats(NOW - 100, NOW + 100) | st.just(math.inf)
patiences = st.builds(api.WaitState, moments, st.booleans(), st.none() | gpus, gpus)


@given(looks, patiences, st.integers(1, 4))
def test_every_state_makes_progress(seen: api.Seen, state: api.WaitState, needed: int) -> None:
    """With the world standing still, time passes or the same look leads to another step; a late claim ends."""
    now, polls, next_poll = NOW, 0, NOW
    suffices = len(seen.free) >= needed
    for _ in range(8):
        times = {"now": now, "next_poll": next_poll, "next_attempt": now + 60, "pause": 0.001}
        step, state, until = api.decide(seen, state, suffices=suffices, **times)
        if step == api.REFUSE:
            return
        if step == api.POLL:
            polls += 1
            assert polls <= 2
            next_poll = now + 0.1
        else:
            assert until > now
            now, polls = until, 0
    assert now > NOW
