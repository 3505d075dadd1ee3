#!/usr/bin/env python3
"""Measures how claims across hosts grow with the number of hosts, on a simulated network with the engine's own code.

    python3 tools/bench_cluster_scale.py [--hosts N ...] [--rivals N] [--rounds N] [--seed S] [--quick]
    python3 tools/bench_cluster_scale.py --storm N [--seed S]

For each number of hosts: one claim of all hosts alone, and rival claims of all hosts at once, half of which name the
hosts from the opposite end. Seconds are simulated: a message takes 1 ms in the median (log-normal), 1 % of the hosts
are 20 times slower, a host takes 3 ms for a claim, and the claiming process 20 us for each message.

    slowest    what the slowest host alone takes for its report and its claim
    all        until all hosts are held, alone; medians of the rounds
    rivals     from the start of the rivals to the first and to the last that holds all hosts; each holds them for 50 ms
    messages   of a claim for each host, in both directions
    CPU        real processor time of a claim for each host, of coordination and simulation together

With --storm N: N times two to six rivals for any of 64 hosts, from both ends, with any number of GPUs and any timeout,
while hosts are lost. A deadlock, or a claim that holds some of its hosts only, ends either run with an error.
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import mean, median
from typing import NamedTuple

from cluster_sim import Claim, Network, SimulatedHost, World, make_hosts, run_claim, storm
from text_plot import plot

HOLD = 0.05


class Figures(NamedTuple):
    """Seconds, but for the messages."""

    slowest: float
    alone: float
    first: float
    last: float
    messages: float
    messages_of_rivals: float
    processor: float


def race(number: int, rivals: int, seed: int) -> tuple[list[Claim], list[float]]:
    """Claims of all hosts at once; their results, and when each had its hosts, in order."""
    world = World(Network(), seed)
    hosts = make_hosts(world, number)
    claims: list[Claim] = []
    ends: list[float] = []

    def one(wanted: list[SimulatedHost], began: float) -> None:
        claim = run_claim(world, wanted, 8, None, HOLD)
        if claim.error is not None:
            raise claim.error
        claims.append(claim)
        ends.append(began + claim.seconds)

    for rival in range(rivals):
        began = world.random.uniform(0, 0.005) if rivals > 1 else 0.0
        wanted = hosts if rival % 2 == 0 else hosts[::-1]
        world.start(lambda wanted=wanted, began=began: one(wanted, began), at=began)
    world.run()
    assert all(not host.held for host in hosts), "held after all claims were released"
    return claims, sorted(ends)


def figures(number: int, rivals: int, rounds: int, seed: int) -> Figures:
    alone, spent, raced, first, last = [], [], [], [], []
    for turn in range(rounds):
        began = time.process_time()
        ((claim,), _) = race(number, 1, seed + turn)
        spent.append(time.process_time() - began)
        alone.append(claim)
        if rivals > 1:
            claims, ends = race(number, rivals, seed + turn)
            raced += claims
            first.append(ends[0])
            last.append(ends[-1])
    return Figures(
        median(claim.slowest for claim in alone),
        median(claim.seconds for claim in alone),
        median(first or [0.0]),
        median(last or [0.0]),
        mean(claim.messages for claim in alone),
        mean(claim.messages for claim in raced or alone),
        min(spent) / number,
    )


def run_storm(rounds: int, seed: int) -> int:
    claims = []
    for turn in range(rounds):
        try:
            claims += storm(64, seed + turn)
        except BaseException:
            print(f"the seed of this round: {seed + turn}", file=sys.stderr)
            raise
    failed = sum(claim.error is not None for claim in claims)
    print(f"{rounds} rounds, {len(claims)} claims: {len(claims) - failed} held all their hosts, {failed} held none")
    print("no deadlock, nothing left held")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", metavar="N", help="numbers of hosts (1, 4, ... 4096)")
    parser.add_argument("--rivals", type=int, default=4, metavar="N", help="claims at once (default: %(default)s)")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each number of hosts (3)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the latencies (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="up to 64 hosts, one round")
    parser.add_argument("--storm", type=int, metavar="N", help="N seeded rounds of rivals instead of figures")
    options = parser.parse_args()
    if options.storm:
        return run_storm(options.storm, options.seed)
    numbers = options.hosts or ([1, 8, 64] if options.quick else [4**power for power in range(7)])
    rounds = options.rounds or (1 if options.quick else 3)
    print(f"seed {options.seed}, {rounds} rounds, {options.rivals} rivals; simulated ms, but for CPU\n")
    print(
        f"{'hosts':>6} {'slowest':>9} {'all':>9} {'ratio':>6} {'messages':>9} {'first rival':>12} {'last':>9}", end=""
    )
    print(f" {'messages':>9} {'CPU us/host':>12}")
    table: dict[int, Figures] = {}
    for number in numbers:
        table[number] = now = figures(number, options.rivals, rounds, options.seed)
        print(
            f"{number:6} {now.slowest * 1e3:9.1f} {now.alone * 1e3:9.1f} {now.alone / now.slowest:6.2f} "
            f"{now.messages:9.1f} {now.first * 1e3:12.1f} {now.last * 1e3:9.1f} {now.messages_of_rivals:9.1f} "
            f"{now.processor * 1e6:12.0f}",
            flush=True,
        )
    print()
    series = {
        "the slowest host": [(number, now.slowest * 1e3) for number, now in table.items()],
        "all hosts": [(number, now.alone * 1e3) for number, now in table.items()],
        "the last rival": [(number, now.last * 1e3) for number, now in table.items()],
    }
    print(plot(series, across="hosts", up="ms"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
