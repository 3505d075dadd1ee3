"""The expected starts of the queue, by a table."""

import itertools
import json
from typing import Any

import pytest

from safe_gpu.coordination.closed import find_admitted
from safe_gpu.coordination.entry import Entry
from safe_gpu.gpus.devices import Gpu, Holder
from safe_gpu.gpus.windows import Window
from safe_gpu.settings.config import Limits
from safe_gpu.status.facts import GpuStatus
from safe_gpu.status.starts import at_limits, expected_starts

NOW = 1000.0


TOKEN = "0123456789abcdef"  # of the claims inside which others claim

numbers = itertools.count(1)


def gpu(index: int, state: str = "claimed", until: float | None = None) -> GpuStatus:
    claim = Holder(1, since=1.0, until=until) if state == "claimed" else None
    return GpuStatus(Gpu(index, f"GPU-{index}"), state, claim=claim)


def ticket(nb_gpus: int, hold_for: float | None = None, inside: str = "", **more: Any) -> Entry:
    number = next(numbers)
    said = {"v": 1, "nb_gpus": nb_gpus, "gpus": ["GPU-0", "GPU-1"], "hold_for": hold_for, "inside": inside, **more}
    return Entry.read(f"{number}.{'0' * 16}", 0, (1, number), json.dumps(said).encode())


UNKNOWN = ticket(1, wish="of a later version")
LEASED = [gpu(0, until=1100.0), gpu(1, until=1300.0)]


@pytest.mark.parametrize(
    ("tickets", "gpus", "expected"),
    [
        pytest.param([ticket(2)], LEASED, [1300.0], id="the later of two"),
        pytest.param([ticket(2, 60), ticket(1)], LEASED, [1300.0, 1360.0], id="one after the other"),
        pytest.param([ticket(2), ticket(1)], LEASED, [1300.0, None], id="behind one that did not say"),
        pytest.param([ticket(2), ticket(1, 60)], LEASED, [1300.0, 1100.0], id="passes"),
        pytest.param([ticket(2)], [gpu(0, until=1100.0), gpu(1)], [None], id="a holder did not say"),
        pytest.param([ticket(1)], [gpu(0, until=900.0), gpu(1)], [NOW], id="overdue"),
        pytest.param([ticket(2)], [gpu(0, "free"), gpu(1, until=1100.0)], [1100.0], id="one is free"),
        pytest.param([ticket(2), ticket(1)], [gpu(0, "busy"), gpu(1, until=1100.0)], [None, 1100.0], id="a stranger"),
        pytest.param([UNKNOWN, ticket(1)], LEASED, [None, None], id="one that nobody understands"),
        pytest.param([ticket(2, inside=TOKEN), ticket(2)], LEASED, [None, 1300.0], id="inside a claim"),
        pytest.param([], LEASED, [], id="nobody waits"),
    ],
)
def test_when_waiters_can_expect_to_start(tickets: Any, gpus: Any, expected: Any) -> None:
    assert [start for start, _ in expected_starts(tickets, gpus, NOW)] == expected


@pytest.mark.parametrize(
    ("ticket", "gpus", "expected"),
    [
        pytest.param(ticket(1, 60), [gpu(0, "free"), gpu(1, "free")], NOW, id="ends in time"),
        pytest.param(ticket(1, 200), [gpu(0, "free"), gpu(1)], 2000.0, id="after the window"),
        pytest.param(ticket(1), [gpu(0, "free"), gpu(1)], 2000.0, id="did not say"),
        pytest.param(ticket(1, 200), [gpu(0, "free"), gpu(1, until=1300.0)], 1300.0, id="another is free before"),
    ],
)
def test_a_window_puts_a_start_off(ticket: Any, gpus: Any, expected: float) -> None:
    windows = [Window(1100.0, 2000.0, ("GPU-0",), "user:4711", "", "root")]
    anna, ben = ticket._replace(uid=4711), ticket._replace(uid=4712)
    find_admitted(windows, [4711, 4712])
    assert [start for start, _ in expected_starts([ben], gpus, NOW, windows=windows)] == [expected]
    assert expected_starts([anna], gpus, NOW, windows=windows) == expected_starts([anna], gpus, NOW)


def test_before_when_a_waiter_probably_does_not_start() -> None:
    assert expected_starts([ticket(2), ticket(1)], LEASED, NOW) == [(1300.0, 1300.0), (None, 1300.0)]


@pytest.mark.parametrize(
    ("most", "share", "expected"),
    [
        (2, None, (2.0, 2, 1100.0)),  # until one of the two ends
        (1, None, (2.0, 1, 1300.0)),
        (2, 1 << 30, None),  # two halves
        (1, 1 << 30, (1.0, 1, 1300.0)),
    ],
)
def test_who_is_at_a_limit_and_until_when(most: int, share: int | None, expected: Any) -> None:
    gpus = [
        GpuStatus(
            Gpu(index, f"GPU-{index}", memory_total=3 << 30),
            "claimed",
            claim=Holder(1, since=1.0, until=until, uid=4711, share=share),
        )
        for index, until in enumerate((1100.0, 1300.0))
    ]
    asked = ticket(1)._replace(uid=4711)
    found = at_limits([asked, ticket(1)], gpus, {4711: Limits(max_gpus=most)}, NOW)
    assert found == ({} if expected is None else {asked.name: expected})
