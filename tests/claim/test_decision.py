"""What a claim does next, as a table, and what holds for every state."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.claim.limits import LimitReached
from safe_gpu.claim.search.decision import POLL, REFUSE, SLEEP, TAKE, WATCH, WaitState, decide
from safe_gpu.claim.search.decision import AttemptResult as Seen

NOW = 1000.0
A, AB, ABC = frozenset("A"), frozenset("AB"), frozenset("ABC")


def waiting(**values: object) -> WaitState:
    return WaitState(NOW + 60)._replace(**values)  # type: ignore[arg-type]


OVER = WaitState(NOW)
LATE = WaitState(NOW, tried_last=True)
SOON = waiting(deadline=NOW + 5)
ASKED = waiting(polled_for=AB)
LIMIT = LimitReached(1, 1)

# What an attempt saw, how far the wait has come, when the driver may be asked -> the step, to when, what changes.
CASES = {
    "enough": (Seen(enough=True, unleased=AB), waiting(), 0, TAKE, None, {}),
    "enough at the last moment": (Seen(enough=True, unleased=AB), OVER, 0, TAKE, None, {}),
    "outdated": (Seen(outdated=True, unleased=AB), waiting(), NOW + 9, POLL, None, {}),
    "outdated late": (Seen(outdated=True, unleased=AB), LATE, NOW + 9, POLL, None, {}),
    "one last try": (Seen(unleased=A), OVER, NOW + 9, POLL, None, {"tried_last": True}),
    "one last try, behind": (Seen(behind=True), OVER, NOW + 9, POLL, None, {"tried_last": True}),
    "the last try failed": (Seen(unleased=A), LATE, 0, REFUSE, None, {}),
    "it failed behind others": (Seen(behind=True), LATE, 0, REFUSE, None, {}),
    "somebody ahead": (Seen(behind=True), waiting(), 0, SLEEP, NOW + 30, {}),
    "somebody ahead, to the deadline": (Seen(behind=True), SOON, 0, SLEEP, NOW + 5, {}),
    "at the user's limit": (Seen(limit=LIMIT), waiting(), 0, WATCH, NOW + 1, {}),
    "that and behind": (Seen(behind=True, limit=LIMIT), waiting(), 0, SLEEP, NOW + 30, {}),
    "at the limit to the end": (Seen(limit=LIMIT), LATE, 0, REFUSE, None, {}),
    "unleased and in use": (Seen(unleased=AB), waiting(), NOW + 9, POLL, None, {"polled_for": AB}),
    "others unleased": (Seen(unleased=ABC), ASKED, NOW + 9, POLL, None, {"polled_for": ABC}),
    "the driver may be asked": (Seen(unleased=AB), ASKED, NOW, POLL, None, {"polled_for": AB}),
    "the driver was just asked": (Seen(unleased=AB), ASKED, NOW + 0.1, WATCH, NOW + 0.1, {}),
    "too few unleased": (Seen(unleased=A), waiting(), 0, WATCH, NOW + 1, {}),
    "too few, to the deadline": (Seen(), waiting(deadline=NOW + 0.5), 0, WATCH, NOW + 0.5, {}),
    "for ever": (Seen(), waiting(deadline=math.inf), 0, WATCH, NOW + 1, {}),
}


@pytest.mark.parametrize(("result", "state", "next_poll", "step", "until", "then"), CASES.values(), ids=CASES.keys())
def test_the_next_step(
    result: Seen, state: WaitState, next_poll: float, step: str, until: float | None, then: dict[str, object]
) -> None:
    found = decide(result, state, suffices=len(result.unleased) >= 2, now=NOW, next_poll=next_poll, next_look=NOW + 30)
    assert (found.step, found.state) == (step, state._replace(**then))  # type: ignore[arg-type]
    assert until is None or found.until == until


def gpus() -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from("ABCD"))


def looks() -> st.SearchStrategy[Seen]:
    return st.one_of(
        st.just(Seen(behind=True)),
        gpus().map(lambda unleased: Seen(unleased=unleased)),
        gpus().map(lambda unleased: Seen(enough=True, unleased=unleased)),
        gpus().map(lambda unleased: Seen(outdated=True, unleased=unleased)),
    )


moments = st.floats(NOW - 100, NOW + 100) | st.just(math.inf)
patiences = st.builds(WaitState, moments, st.booleans(), st.none() | gpus())


@given(looks().filter(lambda result: not result.enough and not result.outdated), patiences, st.integers(1, 4))
def test_every_state_makes_progress(result: Seen, state: WaitState, needed: int) -> None:
    """With the world standing still, time passes or the same look leads to another step; a late claim ends."""
    now, polls = NOW, 0
    next_poll = NOW
    for _ in range(8):
        step, state, until = decide(
            result, state, suffices=len(result.unleased) >= needed, now=now, next_poll=next_poll, next_look=now + 60
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
