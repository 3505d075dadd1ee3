"""What a claim does next, as a table, and what holds for every state."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.claim.limits import LimitReached
from safe_gpu.claim.look import Seen
from safe_gpu.claim.search import AGAIN, POLL, REFUSE, SLEEP, TAKE, WATCH, WaitState, decide

NOW = 1000.0
A, AB, ABC = frozenset("A"), frozenset("AB"), frozenset("ABC")


def waiting(**values: object) -> WaitState:
    return WaitState(NOW + 60)._replace(**values)  # type: ignore[arg-type]


def late_since(withdrew: float) -> WaitState:
    return LATE._replace(withdrew=withdrew)


OVER = WaitState(NOW)
LATE = WaitState(NOW, tried_last=True)
SOON = waiting(deadline=NOW + 5)
ASKED = waiting(polled_for=AB)
LIMIT = LimitReached(1, 1)

# What a look saw, how far the wait has come, when the driver may be asked -> the step, to when, what changes.
CASES = {
    "enough": (Seen(enough=True, free=AB), waiting(), 0, TAKE, None, {}),
    "seen by another one": (Seen(withdrawn=True), waiting(), 0, AGAIN, NOW + 0.25, {"withdrew": NOW}),
    "that without a wait": (Seen(withdrawn=True), LATE, 0, AGAIN, NOW + 0.25, {"withdrew": NOW}),
    "that for a second": (Seen(withdrawn=True), late_since(NOW - 1), 0, REFUSE, None, {}),
    "held elsewhere": (Seen(elsewhere=A), LATE, 0, WATCH, NOW + 0.005, {"elsewhere": A}),
    "held elsewhere after all": (Seen(elsewhere=A), LATE._replace(elsewhere=AB), 0, REFUSE, None, {}),
    "enough at the last moment": (Seen(enough=True, free=AB), OVER, 0, TAKE, None, {}),
    "outdated": (Seen(outdated=True, free=AB), waiting(), NOW + 9, POLL, None, {}),
    "outdated late": (Seen(outdated=True, free=AB), LATE, NOW + 9, POLL, None, {}),
    "one last try": (Seen(free=A), OVER, NOW + 9, POLL, None, {"tried_last": True}),
    "one last try, behind": (Seen(behind=True), OVER, NOW + 9, POLL, None, {"tried_last": True}),
    "the last try failed": (Seen(free=A), LATE, 0, REFUSE, None, {}),
    "it failed behind others": (Seen(behind=True), LATE, 0, REFUSE, None, {}),
    "somebody ahead": (Seen(behind=True), waiting(), 0, SLEEP, NOW + 30, {}),
    "somebody ahead, to the deadline": (Seen(behind=True), SOON, 0, SLEEP, NOW + 5, {}),
    "at the user's limit": (Seen(limit=LIMIT), waiting(), 0, WATCH, NOW + 1, {}),
    "that and behind": (Seen(behind=True, limit=LIMIT), waiting(), 0, SLEEP, NOW + 30, {}),
    "at the limit to the end": (Seen(limit=LIMIT), LATE, 0, REFUSE, None, {}),
    "free and in use": (Seen(free=AB), waiting(), NOW + 9, POLL, None, {"polled_for": AB}),
    "others are free": (Seen(free=ABC), ASKED, NOW + 9, POLL, None, {"polled_for": ABC}),
    "the driver may be asked": (Seen(free=AB), ASKED, NOW, POLL, None, {"polled_for": AB}),
    "the driver was just asked": (Seen(free=AB), ASKED, NOW + 0.1, WATCH, NOW + 0.1, {}),
    "too few free": (Seen(free=A), waiting(), 0, WATCH, NOW + 1, {}),
    "too few, to the deadline": (Seen(), waiting(deadline=NOW + 0.5), 0, WATCH, NOW + 0.5, {}),
    "for ever": (Seen(), waiting(deadline=math.inf), 0, WATCH, NOW + 1, {}),
}


@pytest.mark.parametrize(("seen", "state", "next_poll", "step", "until", "then"), CASES.values(), ids=CASES.keys())
def test_the_next_step(
    seen: Seen, state: WaitState, next_poll: float, step: str, until: float | None, then: dict[str, object]
) -> None:
    suffices = len(seen.free) >= 2
    found = decide(seen, state, suffices=suffices, now=NOW, next_poll=next_poll, next_look=NOW + 30, pause=0.25)
    assert (found.step, found.state) == (step, state._replace(**then))  # type: ignore[arg-type]
    assert until is None or found.until == until


def gpus() -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from("ABCD"))


def looks() -> st.SearchStrategy[Seen]:
    return st.one_of(
        st.just(Seen(behind=True)), st.builds(Seen, free=gpus(), elsewhere=gpus()), st.just(Seen(withdrawn=True))
    )


moments = st.floats(NOW - 100, NOW + 100) | st.just(math.inf)
patiences = st.builds(WaitState, moments, st.booleans(), st.none() | gpus(), gpus())


@given(looks(), patiences, st.integers(1, 4))
def test_every_state_makes_progress(seen: Seen, state: WaitState, needed: int) -> None:
    """With the world standing still, time passes or the same look leads to another step; a late claim ends."""
    now, polls = NOW, 0
    next_poll = NOW
    for _ in range(8):
        step, state, until = decide(
            seen,
            state,
            suffices=len(seen.free) >= needed,
            now=now,
            next_poll=next_poll,
            next_look=now + 60,
            pause=0.001,
        )
        if step == REFUSE:
            return
        if step == POLL:
            polls += 1
            assert polls <= 2
            next_poll = now + 0.1
        else:
            assert until > now
            now, polls = until, 0
    assert now > NOW
