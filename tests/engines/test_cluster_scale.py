"""Claims across many hosts in simulated time: rivals from opposite ends, and growth."""

import random
from typing import Any

import pytest

from . import cluster_sim as sim

ROUNDS = 20


def test_rivals_never_deadlock_and_get_all_or_nothing() -> None:
    seed = random.randrange(10**6)
    print(f"seeds from {seed}")
    claims = [claim for turn in range(ROUNDS) for claim in sim.storm(64, seed + turn)]
    assert len(claims) >= 2 * ROUNDS
    assert any(claim.error is None for claim in claims)
    assert any(claim.error is not None for claim in claims)


def test_a_cycle_of_waiting_claims_is_found() -> None:
    world = sim.World(sim.Network(stragglers=0), 1)
    first, second = sim.make_hosts(world, 2)

    def one_after_the_other(one: Any, other: Any) -> None:
        for host in (one, other):
            holder = sim.SimulatedHolder(host)
            holder.call("claim", 8, None)
            holder.answer(None)
            world.sleep(1)

    world.start(lambda: one_after_the_other(first, second))
    world.start(lambda: one_after_the_other(second, first))
    with pytest.raises(sim.Deadlock, match="2 of 2"):
        world.run()


@pytest.mark.parametrize("number", [1, 8, 64])
def test_a_claim_takes_as_long_as_its_slowest_host(number: int) -> None:
    found = []
    world = sim.World(sim.Network(), 5)
    hosts = sim.make_hosts(world, number)
    world.start(lambda: found.append(sim.run_claim(world, hosts, 8, 10.0, 0.0)))
    world.run()
    (claim,) = found
    assert claim.error is None
    assert claim.messages == 4  # a report and a claim, and their answers
    sending = 4 * number * world.network.per_message
    assert claim.slowest < claim.seconds <= 2 * claim.slowest + sending


@pytest.mark.parametrize("timeout", [0, None])
def test_four_rivals_for_64_hosts_from_opposite_ends(timeout: float | None) -> None:
    world = sim.World(sim.Network(), 7)
    hosts = sim.make_hosts(world, 64)
    claims: list[Any] = []
    for wanted in (hosts, hosts[::-1], hosts, hosts[::-1]):
        world.start(lambda wanted=wanted: claims.append(sim.run_claim(world, wanted, 8, timeout, 0.05)))
    world.run()
    assert sum(claim.error is None for claim in claims) == (1 if timeout == 0 else 4)
    assert max(claim.messages for claim in claims) < 16  # a handful of rounds, whatever the number of hosts
