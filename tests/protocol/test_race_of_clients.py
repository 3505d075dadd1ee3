"""Both clients claim the same GPUs at once, and some are killed: no GPU is ever held twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

AT_ONCE = 10
CONTENDED = 75  # EX_TEMPFAIL


def race(scene: Any, claims: int, flags: Sequence[str] = ()) -> None:
    """Let that many claims of both clients run, ten at once; kill every fifth of them, chosen at random.

    Args:
        flags: with which the C client is broken. The Python one may see it on its GPUs, and refuse.
    """
    live: list[Any] = []

    def wait_for_room(room: int) -> None:
        nonlocal live
        while len(live) > room:
            scene.until(lambda: any(party.process.poll() is not None for party in live))
            for party in [party for party in live if party.process.poll() is not None]:
                code, _, err = party.finish()
                assert code == 0 or (flags and code == CONTENDED), f"{party} ended with {code}: {err}"
                live.remove(party)

    for number in range(claims):
        wait_for_room(AT_ONCE - 1)
        kind = "python" if number % 4 == 0 else "c"
        size, seconds = scene.random.choice((1, 2, 3, 5)), scene.random.choice((0.0, 0.005, 0.02))
        live.append(scene.start(kind, size, seconds=seconds, flags=flags if kind == "c" else ()))
        if number % 5 == 4:
            live.pop(scene.random.randrange(len(live))).end()
    wait_for_room(0)


@pytest.mark.timeout(600)
def test_no_gpu_is_held_twice(scene: Any) -> None:
    claims = 900 if scene.required else 50
    race(scene, claims)
    assert scene.said("rival") == []
    assert len(scene.served()) >= claims * 4 // 5
    scene.all_can_be_claimed()
    assert scene.tickets() == []


def test_both_detectors_see_a_client_that_takes_no_leases(scene: Any) -> None:
    for _ in range(20):
        race(scene, 12, ["-DNO_LEASE"])
        if scene.rivals("marker") and scene.rivals("list"):
            break
    assert scene.rivals("marker") > 0
    assert scene.rivals("list") > 0
