"""Both clients claim the same GPUs at once, and some are killed: no GPU is ever held twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from safe_gpu.coordination import socket_names as names

AT_ONCE = 10
CONTENDED = 75  # EX_TEMPFAIL


def race(scene: Any, claims: int, flags: Sequence[str] = (), directories: Sequence[str] = ()) -> None:
    """Let that many claims of both clients run, ten at once; kill every fifth of them, chosen at random.

    Args:
        flags: with which the C client is broken. The Python one may see it on its GPUs, and refuse.
        directories: state directories; where there are some, every second claim is for a share.
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
        options, env = (), {}
        if directories:
            env["SAFE_GPU_DIR"] = str(scene.directory / scene.random.choice(directories))
        if directories and number % 2:
            kind, options, seconds = "python", ("--share", scene.random.choice(("10%", "25%", "60%"))), 2 * seconds
        live.append(scene.start(kind, size, *options, seconds=seconds, flags=flags if kind == "c" else (), env=env))
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("directories", [("state",), ("state", "other")], ids=["one directory", "two directories"])
def test_no_gpu_is_held_whole_beside_a_share(scene: Any, directories: Sequence[str]) -> None:
    claims = 300 if scene.required else 30
    race(scene, claims, directories=directories)
    assert scene.said("rival") == []
    assert len(scene.served()) >= claims * 4 // 5
    scene.all_can_be_claimed()


def test_a_client_that_does_not_ask_for_shares_is_seen(scene: Any) -> None:
    last = names.slot_of(max(scene.uuids), 0, names.simulated_prefix(str(scene.tree.parent)))
    sharer = scene.start("python", 8, "--share", "10%", command=["sleep", "60"])
    scene.until(lambda: last in names.in_use(), sharer)
    other = {"SAFE_GPU_DIR": str(scene.directory / "other")}
    for flags, code in (((), CONTENDED), (("-DNO_SLOTS",), 0)):
        assert scene.start("c", 1, "-t", "0", command=["true"], flags=flags, env=other).finish()[0] == code
