"""What a claim does next, as a table, and what holds for every state."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safe_gpu.claim.attempt import AttemptResult
from safe_gpu.claim.quota import LimitReached
from safe_gpu.claim.search import POLL, REFUSE, SLEEP, TAKE, WATCH, WaitState, decide

NOW = 1000.0
A, AB, ABC = frozenset("A"), frozenset("AB"), frozenset("ABC")


def waiting(**values: object) -> WaitState:
    return WaitState(NOW + 60)._replace(**values)  # type: ignore[arg-type]


OVER = WaitState(NOW)
LATE = WaitState(NOW, tried_last=True)


@pytest.mark.parametrize(
    ("seen", "patience", "next_poll", "step", "until", "then"),
    [
        # What a look saw, how far the wait has come, when the driver may be asked -> the step, to when, what changes.
        pytest.param(AttemptResult(enough=True, unleased=AB), waiting(), 0, TAKE, None, {}, id="enough"),
        pytest.param(AttemptResult(enough=True, unleased=AB), OVER, 0, TAKE, None, {}, id="enough at the last moment"),
        pytest.param(AttemptResult(outdated=True, unleased=AB), waiting(), NOW + 9, POLL, None, {}, id="outdated"),
        pytest.param(
            AttemptResult(outdated=True, unleased=AB),
            LATE,
            NOW + 9,
            POLL,
            None,
            {},
            id="outdated late",
        ),
        pytest.param(AttemptResult(unleased=A), OVER, NOW + 9, POLL, None, {"tried_last": True}, id="one last try"),
        pytest.param(
            AttemptResult(behind=True), OVER, NOW + 9, POLL, None, {"tried_last": True}, id="one last try, behind"
        ),
        pytest.param(AttemptResult(unleased=A), LATE, 0, REFUSE, None, {}, id="the last try failed"),
        pytest.param(AttemptResult(behind=True), LATE, 0, REFUSE, None, {}, id="it failed behind others"),
        pytest.param(AttemptResult(behind=True), waiting(), 0, SLEEP, NOW + 30, {}, id="somebody ahead"),
        pytest.param(
            AttemptResult(behind=True),
            waiting(deadline=NOW + 5),
            0,
            SLEEP,
            NOW + 5,
            {},
            id="somebody ahead, to the deadline",
        ),
        pytest.param(
            AttemptResult(spent=LimitReached(1, 1)), waiting(), 0, WATCH, NOW + 1, {}, id="at the user's limit"
        ),
        pytest.param(
            AttemptResult(behind=True, spent=LimitReached(1, 1)),
            waiting(),
            0,
            SLEEP,
            NOW + 30,
            {},
            id="that and behind",
        ),
        pytest.param(AttemptResult(spent=LimitReached(1, 1)), LATE, 0, REFUSE, None, {}, id="at the limit to the end"),
        pytest.param(
            AttemptResult(unleased=AB), waiting(), NOW + 9, POLL, None, {"polled_for": AB}, id="unleased and in use"
        ),
        pytest.param(
            AttemptResult(unleased=ABC),
            waiting(polled_for=AB),
            NOW + 9,
            POLL,
            None,
            {"polled_for": ABC},
            id="others unleased",
        ),
        pytest.param(
            AttemptResult(unleased=AB),
            waiting(polled_for=AB),
            NOW,
            POLL,
            None,
            {"polled_for": AB},
            id="the driver may be asked",
        ),
        pytest.param(
            AttemptResult(unleased=AB),
            waiting(polled_for=AB),
            NOW + 0.1,
            WATCH,
            NOW + 0.1,
            {},
            id="the driver was just asked",
        ),
        pytest.param(AttemptResult(unleased=A), waiting(), 0, WATCH, NOW + 1, {}, id="too few unleased"),
        pytest.param(
            AttemptResult(), waiting(deadline=NOW + 0.5), 0, WATCH, NOW + 0.5, {}, id="too few, to the deadline"
        ),
        pytest.param(AttemptResult(), waiting(deadline=math.inf), 0, WATCH, NOW + 1, {}, id="for ever"),
    ],
)
def test_the_next_step(
    seen: AttemptResult, patience: WaitState, next_poll: float, step: str, until: float | None, then: dict[str, object]
) -> None:
    found = decide(seen, patience, needed=2, now=NOW, next_poll=next_poll, next_look=NOW + 30)
    assert found.step == step
    assert found.patience == patience._replace(**then)  # type: ignore[arg-type]
    if until is not None:
        assert found.until == until


def gpus() -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from("ABCD"))


def looks() -> st.SearchStrategy[AttemptResult]:
    return st.one_of(
        st.just(AttemptResult(behind=True)),
        gpus().map(lambda unleased: AttemptResult(unleased=unleased)),
        gpus().map(lambda unleased: AttemptResult(enough=True, unleased=unleased)),
        gpus().map(lambda unleased: AttemptResult(outdated=True, unleased=unleased)),
    )


moments = st.floats(NOW - 100, NOW + 100) | st.just(math.inf)
patiences = st.builds(WaitState, moments, st.booleans(), st.none() | gpus())


@given(looks(), patiences, st.integers(1, 4), moments, moments)
def test_what_holds_for_every_state(
    seen: AttemptResult, patience: WaitState, needed: int, next_poll: float, next_look: float
) -> None:
    step, after, until = decide(seen, patience, needed=needed, now=NOW, next_poll=next_poll, next_look=next_look)
    assert (step == TAKE) == seen.enough
    if step in (SLEEP, WATCH):
        assert patience.deadline > NOW
        assert until <= patience.deadline
        assert (step == SLEEP) == seen.behind
    if step == REFUSE:
        assert patience.tried_last
        assert patience.deadline <= NOW
    if seen.outdated:
        assert step == POLL
    assert after.deadline == patience.deadline


@given(looks().filter(lambda seen: not seen.enough and not seen.outdated), patiences, st.integers(1, 4))
def test_every_state_makes_progress(seen: AttemptResult, patience: WaitState, needed: int) -> None:
    """With the world standing still, time passes or the same look leads to another step; a late claim ends."""
    now, polls = NOW, 0
    next_poll = NOW
    for _ in range(8):
        step, patience, until = decide(seen, patience, needed=needed, now=now, next_poll=next_poll, next_look=now + 60)
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
