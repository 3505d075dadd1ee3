#!/usr/bin/env python3
"""Replays jobs on one host in simulated time: how long they wait with a queue, with --for, and without either.

    python tools/replay.py                         a generated workload
    python tools/replay.py --large 10 --load 0.5   another one
    python tools/replay.py jobs.csv --gpus 8       your own

The CSV has a header. Columns: arrival (seconds), size (GPUs), duration (seconds); optional: hold_for (what the job says
with --for, in seconds; empty: nothing) and gpus (the GPUs that it may use, such as 0-3;6; empty: all). Without hold_for
the answers are generated: as many jobs as the line of the table says name one to three times their duration, but a
fifth of them too little.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from safe_gpu.cpulist import parse_cpulist
from safe_gpu.selection.backfill import BackfillRequest, free_at, open_gpus

LOOKERS = 32
"""Only this many waiters look for a chance to pass others; the rest follow when they get there."""


class Job(NamedTuple):
    """``arrival`` and ``duration`` in seconds."""

    arrival: float
    want: BackfillRequest
    duration: float

    @property
    def large(self) -> bool:
        """Whether it wants at least half of its GPUs, and more than one."""
        return self.want.nb > 1 and 2 * self.want.nb >= len(self.want.gpus)


class Hold(NamedTuple):
    """A GPU's job: from when, and until when by its own word."""

    since: float
    until: float | None


class Outcome(NamedTuple):
    """``waits``: (job, seconds). ``idle``: the share of GPU time that passed unused while a job waited."""

    waits: list[tuple[Job, float]]
    idle: float


Policy = Callable[["Host", BackfillRequest, Sequence[Job]], frozenset[str]]
"""The GPUs that a request may take, given those who wait ahead of it; too few: it waits."""


class Host:
    """GPUs in simulated time."""

    def __init__(self, gpus: Iterable[str]) -> None:
        self.free = set(gpus)
        self.held: dict[str, Hold] = {}
        self.now = 0.0

    def dates(self) -> dict[str, float]:
        """When each GPU is expected to be free."""
        leased = {gpu: free_at(self.now, since=one.since, until=one.until) for gpu, one in self.held.items()}
        return leased | dict.fromkeys(self.free, self.now)


def polling(host: Host, want: BackfillRequest, _ahead: Sequence[Job]) -> frozenset[str]:
    """No queue: the first who looks while there are enough."""
    return want.gpus & host.free


def strict(host: Host, want: BackfillRequest, ahead: Sequence[Job]) -> frozenset[str]:
    """First come, first served: nobody passes anybody who wants one of the same GPUs."""
    if any(not other.want.gpus.isdisjoint(want.gpus) for other in ahead):
        return frozenset()
    return want.gpus & host.free


def ours(host: Host, want: BackfillRequest, ahead: Sequence[Job]) -> frozenset[str]:
    """The rule of this package."""
    if len(want.gpus & host.free) < want.nb:
        return frozenset()
    return open_gpus(want, (other.want for other in ahead), host.free, host.dates(), host.now)


def replay(jobs: Sequence[Job], gpus: Sequence[str], policy: Policy, chance: random.Random) -> Outcome:
    """Let all these jobs come, wait, run and end."""
    host, coming, queue = Host(gpus), sorted(jobs, key=lambda job: job.arrival)[::-1], list[Job]()
    ending: list[tuple[float, int, frozenset[str]]] = []
    waits: list[tuple[Job, float]] = []
    idle = 0.0
    while coming or ending:
        times = [coming[-1].arrival] if coming else []
        now = min([*times, ending[0][0]] if ending else times)
        idle += (now - host.now) * len(host.free) * bool(queue)
        host.now = now
        while ending and ending[0][0] <= now:
            for gpu in heapq.heappop(ending)[2]:
                del host.held[gpu]
                host.free.add(gpu)
        while coming and coming[-1].arrival <= now:
            queue.append(coming.pop())
        while (found := _next_start(host, queue, policy, chance)) is not None:
            place, open_to = found
            job = queue.pop(place)
            taken = frozenset(sorted(open_to)[: job.want.nb])
            host.free -= taken
            until = None if job.want.hold_for == math.inf else now + job.want.hold_for
            host.held.update(dict.fromkeys(taken, Hold(now, until)))
            heapq.heappush(ending, (now + job.duration, len(waits), taken))
            waits.append((job, now - job.arrival))
    return Outcome(waits, idle / (len(gpus) * max(host.now, 1e-9)))


def _next_start(
    host: Host, queue: Sequence[Job], policy: Policy, chance: random.Random
) -> tuple[int, frozenset[str]] | None:
    """The first waiter that may start now, by its place, with the GPUs that are open to it."""
    if not host.free:
        return None
    places = list(range(len(queue)))
    if policy is polling:
        chance.shuffle(places)
    else:
        del places[LOOKERS:]
    for place in places:
        open_to = policy(host, queue[place].want, queue[:place])
        if len(open_to) >= queue[place].want.nb:
            return place, open_to
    return None


# Workloads


def generated(
    number: int, gpus: Sequence[str], large: float, load: float, chance: random.Random, picky: float = 0.0
) -> list[Job]:
    """Jobs that arrive at random, half of them shorter than an hour, some of them a day long.

    Args:
        large: the share of jobs that want half of the GPUs or all of them; the others want one.
        load: the share of all GPU time that the jobs need.
        picky: the share of jobs that want no other GPUs than those of one half of the host.
    """
    wide = (max(1, len(gpus) // 2), len(gpus))
    sizes = [chance.choice(wide) if chance.random() < large else 1 for _ in range(number)]
    durations = [chance.lognormvariate(math.log(3600), 1.0) for _ in range(number)]
    work = sum(size * duration for size, duration in zip(sizes, durations, strict=True))
    gap = work / number / (load * len(gpus))
    arrival, jobs = 0.0, []
    for size, duration in zip(sizes, durations, strict=True):
        arrival += chance.expovariate(1 / gap)
        among = gpus
        if picky and size <= len(gpus) // 2 and chance.random() < picky:
            among = chance.choice((gpus[: len(gpus) // 2], gpus[len(gpus) // 2 :]))
        jobs.append(Job(arrival, BackfillRequest(size, frozenset(among)), duration))
    return jobs


def read(path: Path, gpus: Sequence[str]) -> tuple[list[Job], bool]:
    """The jobs of a CSV, and whether it says what they said with --for."""
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    jobs = []
    for row in rows:
        among = frozenset(gpus)
        if listed := (row.get("gpus") or "").strip():
            numbers = parse_cpulist(listed.replace(";", ",")) or ()
            among = frozenset(gpu for number, gpu in enumerate(gpus) if number in numbers)
        said = float(row.get("hold_for") or math.inf)
        want = BackfillRequest(int(row["size"]), among, max(1.0, said))
        if not 0 < want.nb <= len(among):
            raise SystemExit(f"{path}: a job wants {want.nb} of {len(among)} GPUs and could never start")
        jobs.append(Job(float(row["arrival"]), want, max(0.0, float(row["duration"]))))
    return jobs, bool(rows) and "hold_for" in rows[0]


def saying(jobs: Sequence[Job], share: float, chance: random.Random, overrun: float = 0.2) -> list[Job]:
    """The same jobs, of which a share names one to three times its duration; a fifth of those names too little."""
    told = []
    for job in jobs:
        says = math.inf
        if chance.random() < share:
            factor = chance.uniform(0.3, 1.0) if chance.random() < overrun else chance.uniform(1.0, 3.0)
            says = max(1.0, job.duration * factor)
        told.append(job._replace(want=job.want._replace(hold_for=says)))
    return told


# The table


def line(title: str, outcome: Outcome) -> str:
    """One row: mean, 95 % and longest wait of the small and of the large jobs, in hours, and what stood idle."""
    cells = []
    for large in (False, True):
        waits = sorted(wait / 3600 for job, wait in outcome.waits if job.large is large)
        cells += [fmean(waits), waits[int(0.95 * len(waits))], waits[-1]] if waits else [math.nan] * 3
    return f"{title:34}" + "".join(f"{cell:8.1f}" for cell in cells) + f"{100 * outcome.idle:9.0f} %"


def table(jobs: Sequence[Job], gpus: Sequence[str], *, told: bool, seed: int) -> Iterable[str]:
    """The rows, each as soon as it is known."""
    yield f"{'waits in hours':34}{'small':>8}{'95 %':>8}{'longest':>8}{'large':>8}{'95 %':>8}{'longest':>8}{'idle':>11}"
    plain = saying(jobs, 0.0, random.Random(seed))
    rows: list[tuple[str, Policy, Sequence[Job]]] = [
        ("no queue, everybody polls", polling, plain),
        ("strict order", strict, plain),
        ("safe_gpu, nobody says --for", ours, plain),
    ]
    if told:
        rows.append(("safe_gpu, --for as in the file", ours, jobs))
    for word, share in () if told else (("half say", 0.5), ("all say", 1.0)):
        rows.append((f"safe_gpu, {word} --for", ours, saying(jobs, share, random.Random(seed))))
    for title, policy, said in rows:
        yield line(title, replay(said, gpus, policy, random.Random(seed)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Replay jobs through the queue in simulated time.")
    parser.add_argument("csv", nargs="?", type=Path, help="arrival, size, duration; optional hold_for and gpus")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the host (default 8)")
    parser.add_argument("--jobs", type=int, default=2000, help="generated jobs (default 2000)")
    parser.add_argument(
        "--large", type=float, nargs="+", default=[6, 20], help="per cent of them that are large (default 6, then 20)"
    )
    parser.add_argument("--picky", type=float, default=0, help="per cent that want one half of the host (default 0)")
    parser.add_argument("--load", type=float, default=0.65, help="share of the GPU time that they need (default 0.65)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    gpus = [f"GPU-{number:03d}" for number in range(options.gpus)]
    for number, large in enumerate(options.large[:1] if options.csv else options.large):
        if options.csv:
            jobs, told = read(options.csv, gpus)
            title = f"{len(jobs)} jobs from {options.csv}, {options.gpus} GPUs"
        else:
            chance, told = random.Random(options.seed), False
            jobs = generated(options.jobs, gpus, large / 100, options.load, chance, options.picky / 100)
            title = f"{len(jobs)} jobs, {large:g} % of them large; {options.gpus} GPUs, load {options.load:g}"
        print("\n" * bool(number) + f"{title}\n")
        for row in table(jobs, gpus, told=told, seed=options.seed):
            print(row, flush=True)


if __name__ == "__main__":
    main()
