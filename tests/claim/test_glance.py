"""The glance of a claim that has just joined the queue: it says "wait" only where a look under host.lock would."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import safe_gpu
from safe_gpu.claim.glance import certain_to_wait
from safe_gpu.claim.host_view import HostView
from safe_gpu.claim.line import Line
from safe_gpu.claim.look import Look
from safe_gpu.claim.news import News
from safe_gpu.claim.terms import read_terms
from safe_gpu.coordination.host_lock import HostLock
from safe_gpu.coordination.leases import LeaseRecord, lease_name
from safe_gpu.coordination.queue import Waiter
from safe_gpu.coordination.tickets import Demand, Ticket

MINUTE, HOUR = 60.0, 3600.0


class Scene:
    """Waiters and holders of a host with eight GPUs, all in this process."""

    def __init__(self, host: Any, leases: Any) -> None:
        self.host = host
        self.leases = leases
        self._end = ExitStack()

    def wait(self, nb_gpus: int, *numbers: int, hold_for: float | None = None, min_memory: int | None = None) -> None:
        """Another waiter, for GPUs with these numbers, or for any."""
        uuids = self.host.uuids
        gpus = frozenset(uuids[number] for number in numbers or range(len(uuids)))
        self._join(Waiter(Demand(nb_gpus, gpus, min_memory, hold_for)))

    def hold(self, *numbers: int, until: float | None = None) -> None:
        """A claim of these GPUs."""
        for uuid in (self.host.uuids[number] for number in numbers):
            self.leases.hold(uuid)
            record = LeaseRecord.of_this_process(None, None).claiming((uuid,), "")
            path = Path(os.environ["SAFE_GPU_DIR"], "leases", lease_name(uuid))
            path.write_bytes(record._replace(until=until).encode())

    def stranger(self, number: int) -> None:
        self._end.enter_context(self.host.stranger(number))

    def come(self, nb_gpus: int = 1, hold_for: float | None = None, only: tuple[int, ...] = ()) -> tuple[bool, Look]:
        """Whether the glance of one more waiter says that it has to wait, and what it finds when it looks."""
        terms = read_terms(nb_gpus, timeout=0, hold_for=hold_for, affinity=None, only=only)
        view = HostView.of(self.host, self.host.snapshot(), terms.request)
        line = Line(view, terms.hold)
        self._join(line.stand())
        ahead = certain_to_wait(view, line)
        look = Look()
        look.take(view, line, None, terms, may_wait=False)
        look.close()
        if ahead is None:
            return False, look
        ahead.close()
        assert look.ahead is not None
        assert look.ahead.ticket.seq == ahead.ticket.seq
        return True, look

    def _join(self, waiter: Waiter) -> None:
        with HostLock(None) as locked:
            waiter.join(locked)
        self._end.callback(waiter.leave)

    def close(self) -> None:
        self._end.close()
        self.leases.free()
        for path in Path(os.environ["SAFE_GPU_DIR"], "leases").glob("*.lock"):
            path.write_bytes(b"")  # as a release leaves it


@pytest.fixture
def scene(host: Any, leases: Any) -> Any:
    found = Scene(host, leases)
    yield found
    found.close()


def all_held(scene: Scene) -> None:
    scene.hold(*range(8))
    scene.wait(1)


def none_held_and_nothing_said(scene: Scene) -> None:
    scene.wait(1)


def the_first_is_about_to_take_one(scene: Scene) -> None:
    scene.wait(1, hold_for=MINUTE)
    scene.wait(8, hold_for=MINUTE)


def unreadable(scene: Scene) -> None:
    scene.hold(*range(8))
    scene.wait(1)
    Path(os.environ["SAFE_GPU_DIR"], "queue", "1.ticket").write_bytes(b"?")


def nobody(scene: Scene) -> None:
    scene.hold(*range(8))


def others_want_other_gpus(scene: Scene) -> None:
    scene.wait(1, 4, 5)
    scene.hold(*range(8))


def one_wants_another_gpu_of_ours(scene: Scene) -> None:
    scene.wait(1, 0)


def a_large_one_waits_for_long(scene: Scene) -> None:
    scene.hold(0, until=time.time() + HOUR)
    scene.wait(8, hold_for=MINUTE)


def a_large_one_waits_before_a_small_one(scene: Scene) -> None:
    scene.hold(0, until=time.time() + HOUR)
    scene.wait(8, hold_for=MINUTE)
    scene.wait(1, hold_for=MINUTE)


def a_stranger_keeps_the_one_ahead_waiting(scene: Scene) -> None:
    scene.stranger(0)
    scene.wait(8)


def one_wants_memory(scene: Scene) -> None:
    scene.wait(1, min_memory=1 << 40)


@pytest.mark.parametrize(
    ("arrange", "hold_for"),
    [
        (all_held, None),
        (all_held, MINUTE),
        (none_held_and_nothing_said, None),
        (none_held_and_nothing_said, MINUTE),
        (the_first_is_about_to_take_one, MINUTE),
    ],
)
def test_a_glance_is_enough(scene: Scene, arrange: Callable[[Scene], None], hold_for: float | None) -> None:
    arrange(scene)
    waits, look = scene.come(1, hold_for)
    assert waits
    assert look.seen.behind


@pytest.mark.parametrize(
    ("arrange", "hold_for", "only"),
    [
        (nobody, None, ()),
        (unreadable, None, ()),
        (others_want_other_gpus, None, (0, 1)),
        (one_wants_another_gpu_of_ours, None, ()),
        (a_large_one_waits_for_long, MINUTE, ()),
        (a_large_one_waits_before_a_small_one, MINUTE, ()),
        (a_stranger_keeps_the_one_ahead_waiting, None, ()),
        (one_wants_memory, None, ()),
    ],
)
def test_a_glance_does_not_tell(
    scene: Scene, arrange: Callable[[Scene], None], hold_for: float | None, only: tuple[int, ...]
) -> None:
    arrange(scene)
    assert not scene.come(1, hold_for, only)[0]


def test_a_stopped_waiter_is_for_a_look(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    all_held(scene)
    monkeypatch.setattr(Ticket, "is_stopped", lambda ticket, frozen=None: True)
    assert not scene.come()[0]


numbers = st.integers(0, 7)
terms_of_waiters = st.tuples(st.integers(1, 8), st.sets(numbers, max_size=8), st.sampled_from([None, MINUTE, HOUR]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    waiters=st.lists(terms_of_waiters, max_size=3),
    held=st.dictionaries(numbers, st.sampled_from([None, MINUTE / 2, HOUR]), max_size=8),
    strangers=st.sets(numbers, max_size=2),
    mine=st.tuples(st.integers(1, 3), st.sets(numbers, max_size=8), st.sampled_from([None, 10.0, MINUTE, HOUR])),
)
def test_a_look_finds_the_same(host: Any, leases: Any, waiters: Any, held: Any, strangers: set[int], mine: Any) -> None:
    scene = Scene(host, leases)
    try:
        for nb_gpus, gpus, hold_for in waiters:
            scene.wait(min(nb_gpus, len(gpus) or 8), *gpus, hold_for=hold_for)
        for number, seconds in held.items():
            scene.hold(number, until=None if seconds is None else time.time() + seconds)
        for number in strangers - held.keys():
            scene.stranger(number)
        nb_gpus, only, hold_for = mine
        waits, look = scene.come(min(nb_gpus, len(only) or 8), hold_for, tuple(only))
        assert look.seen.behind or not waits
    finally:
        scene.close()


def test_a_newcomer_who_has_to_wait_takes_host_lock_once(
    host: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It joins under it, and asks for no lease."""
    from safe_gpu.claim import look

    all_held(scene)
    taken: list[bool] = []
    tried: list[str] = []

    class Noted(HostLock):
        def __init__(self, deadline: Any, path: Any = None, *, urgent: bool = False) -> None:
            super().__init__(deadline, path, urgent=urgent)
            taken.append(urgent)

    def try_lease(host: Any, name: str, *, shared: bool = False) -> None:
        tried.append(name)

    class Slept(Exception):
        pass

    def tell(self: News, look: Any) -> None:
        raise Slept

    monkeypatch.setattr(look, "HostLock", Noted)
    monkeypatch.setattr(look, "try_lease", try_lease)
    monkeypatch.setattr(News, "tell", tell)
    with pytest.raises(Slept):
        safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=60)
    assert (taken, tried) == ([False], [])
