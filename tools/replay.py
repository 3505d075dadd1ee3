#!/usr/bin/env python3
"""Replays jobs on one host in simulated time: how long they wait with a queue, with --for, and without either.

    python tools/replay.py                         a generated workload
    python tools/replay.py --large 10 --load 0.5   another one
    python tools/replay.py --sharing 70 --load 1   whole GPUs only, and shared by most jobs
    python tools/replay.py --group                 a month of a group, by the order in which users are served
    python tools/replay.py jobs.csv --gpus 8       your own

The CSV has a header. Columns: arrival (seconds), size (GPUs), duration (seconds); optional: hold_for (what the job says
with --for, in seconds; empty: nothing) and gpus (the GPUs that it may use, such as 0-3;6; empty: all). Without hold_for
the answers are generated: as many jobs as the line of the table says name one to three times their duration, but a
fifth of them too little.
"""

import argparse
import csv
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from safe_gpu.coordination.queue.ticket import Ticket, TicketRequest
from safe_gpu.coordination.queue.turns import by_turn, turn_of_newcomer
from safe_gpu.selection.backfill import BackfillRequest, When, free_at, open_gpus
from safe_gpu.topology.cpulist import parse_cpulist

LOOKERS = 32
"""Only this many waiters look for a chance to pass others; the rest follow when they get there."""


class Job(NamedTuple):
    """``arrival`` and ``duration`` in seconds; ``shares``: whether it wants a part of a GPU, where some do; ``user``
    and ``kind``: whose job of what kind, where users are told apart."""

    arrival: float
    want: BackfillRequest
    duration: float
    shares: bool | None = None
    user: int = 0
    kind: str = ""

    @property
    def large(self) -> bool:
        """Whether it wants at least half of its GPUs, and more than one; where some share GPUs, whether it does not."""
        if self.shares is not None:
            return not self.shares
        return self.want.nb > 1 and 2 * self.want.nb >= len(self.want.gpus)


MEMORY = 80.0
"""GiB of each GPU."""


@dataclass(eq=False)
class Run:
    """A job on its GPUs: from when, until when by its own word, and until when. ``slow``: how many times as long as
    alone what is left of it takes."""

    job: Job
    gpus: frozenset[str]
    since: float
    until: float | None
    ends: float
    slow: float = 1.0


class Outcome(NamedTuple):
    """``waits``: (job, seconds). ``idle``: the share of GPU time that passed unused while a job waited."""

    waits: list[tuple[Job, float]]
    idle: float


Policy = Callable[["Host", BackfillRequest, Sequence[Job]], frozenset[str]]
"""The GPUs that a request may take, given those who wait ahead of it; too few: it waits."""


class Host:
    """GPUs in simulated time."""

    def __init__(self, gpus: Iterable[str]) -> None:
        self.held: dict[str, list[Run]] = {gpu: [] for gpu in gpus}
        self.now = 0.0

    def room(self, gpu: str) -> float:
        """GiB that nobody has; less than 0 where somebody has the whole GPU."""
        return MEMORY - sum(one.job.want.share for one in self.held[gpu])

    def free(self, want: BackfillRequest) -> frozenset[str]:
        """The GPUs that a request could have if nobody were ahead of it."""
        return frozenset(gpu for gpu in want.gpus if self.room(gpu) >= min(want.share, MEMORY))

    def dates(self) -> dict[str, When]:
        """When each GPU, or each part of it, is expected to be free."""
        found: dict[str, When] = {}
        for gpu, runs in self.held.items():
            parts = [(free_at(self.now, since=one.since, until=one.until), one.job.want.share) for one in runs]
            room = self.room(gpu)
            found[gpu] = self.now if not parts else parts[0][0] if room < 0 else (*parts, (self.now, room))
        return found

    def holdings(self) -> Mapping[int, int]:
        """How many GPUs each user holds."""
        found: Counter[int] = Counter()
        for run in {run for runs in self.held.values() for run in runs}:
            found[run.job.user] += run.job.want.nb
        return found

    def change(self, run: Run, *, ends: bool, slowdown: float) -> None:
        """Let a job begin or end. Each neighbour slows a job by ``slowdown``."""
        for gpu in run.gpus:
            self.held[gpu].remove(run) if ends else self.held[gpu].append(run)
        for one in {one for gpu in run.gpus for one in self.held[gpu]} if slowdown else ():
            slow = 1 + slowdown * max(len(self.held[gpu]) - 1 for gpu in one.gpus)
            one.ends = self.now + (one.ends - self.now) * slow / one.slow
            one.slow = slow


def polling(host: Host, want: BackfillRequest, _ahead: Sequence[Job]) -> frozenset[str]:
    """No queue: the first who looks while there are enough."""
    return host.free(want)


def strict(host: Host, want: BackfillRequest, ahead: Sequence[Job]) -> frozenset[str]:
    """First come, first served: nobody passes anybody who wants one of the same GPUs."""
    if any(not other.want.gpus.isdisjoint(want.gpus) for other in ahead):
        return frozenset()
    return host.free(want)


def ours(host: Host, want: BackfillRequest, ahead: Sequence[Job]) -> frozenset[str]:
    """The rule of this package."""
    free = host.free(want)
    if len(free) < want.nb:
        return frozenset()
    return open_gpus(want, (other.want for other in ahead), free, host.dates(), host.now)


class Queue:
    """Who waits, in order.

    Args:
        fair: users are served by turns; else who came first is served first.
        most: GPUs that a user may hold at once, if its job does not want more; None is no limit.
    """

    def __init__(self, *, fair: bool = False, most: int | None = None) -> None:
        self.jobs: list[Job] = []
        self._fair = fair
        self._most = most
        self._tickets: dict[Job, Ticket] = {}
        self._numbers = count(1)

    def join(self, job: Job, held: Mapping[int, int]) -> None:
        """Let a job join, whose user holds that many GPUs."""
        request, seq = TicketRequest(job.want.nb, job.want.gpus), next(self._numbers)
        turn = None
        if self._fair:
            order = by_turn(self._tickets.values())
            turn = turn_of_newcomer(
                request, order, seq, uid=job.user, held=held.get(job.user, 0), size=lambda one: one.nb_gpus
            )
        self._tickets[job] = Ticket(seq, seq, 0, "", 0.0, request, uid=job.user, turn=turn)
        jobs = {ticket.seq: job for job, ticket in self._tickets.items()}
        self.jobs = [jobs[ticket.seq] for _, ticket in by_turn(self._tickets.values())]

    def leave(self, job: Job) -> None:
        """Let a job leave, as it starts."""
        self.jobs.remove(job)
        del self._tickets[job]

    def present(self, held: Mapping[int, int]) -> list[Job]:
        """Those whose users are not at their limit."""
        most = self._most
        return [
            job for job in self.jobs if most is None or held.get(job.user, 0) + job.want.nb <= max(most, job.want.nb)
        ]


def replay(
    jobs: Sequence[Job],
    gpus: Sequence[str],
    policy: Policy,
    chance: random.Random,
    slowdown: float = 0.0,
    queue: Queue | None = None,
) -> Outcome:
    """Let all these jobs come, wait, run and end. Each neighbour on a GPU slows a job by ``slowdown``."""
    host, coming, queue = Host(gpus), sorted(jobs, key=lambda job: job.arrival)[::-1], queue or Queue()
    running: list[Run] = []
    waits: list[tuple[Job, float]] = []
    idle = 0.0
    while coming or running:
        now = min([*(run.ends for run in running), *(job.arrival for job in coming[-1:])])
        idle += (now - host.now) * sum(not runs for runs in host.held.values()) * bool(queue.jobs)
        host.now = now
        for run in [run for run in running if run.ends <= now]:
            running.remove(run)
            host.change(run, ends=True, slowdown=slowdown)
        while coming and coming[-1].arrival <= now:
            queue.join(coming.pop(), host.holdings())
        while (found := _next_start(host, queue.present(host.holdings()), policy, chance)) is not None:
            job, open_to = found
            queue.leave(job)
            taken = sorted(open_to, key=lambda gpu: (host.room(gpu), gpu))[: job.want.nb]
            until = None if job.want.hold_for == math.inf else now + job.want.hold_for
            running.append(Run(job, frozenset(taken), now, until, now + job.duration))
            host.change(running[-1], ends=False, slowdown=slowdown)
            waits.append((job, now - job.arrival))
    return Outcome(waits, idle / (len(gpus) * max(host.now, 1e-9)))


def _next_start(
    host: Host, queue: Sequence[Job], policy: Policy, chance: random.Random
) -> tuple[Job, frozenset[str]] | None:
    """The first waiter that may start now, with the GPUs that are open to it."""
    if not any(host.room(gpu) > 0 for gpu in host.held):
        return None
    places = list(range(len(queue)))
    if policy is polling:
        chance.shuffle(places)
    else:
        del places[LOOKERS:]
    for place in places:
        open_to = policy(host, queue[place].want, queue[:place])
        if len(open_to) >= queue[place].want.nb:
            return queue[place], open_to
    return None


# Workloads


def generated(
    number: int,
    gpus: Sequence[str],
    large: float,
    load: float,
    chance: random.Random,
    picky: float = 0.0,
    sharing: float = 0.0,
) -> list[Job]:
    """Jobs that arrive at random, half of them shorter than an hour, some of them a day long.

    Args:
        large: the share of jobs that want half of the GPUs or all of them; the others want one.
        load: the share of all GPU time that the jobs need.
        picky: the share of jobs that want no other GPUs than those of one half of the host.
        sharing: the share of jobs that want 10 to 20 GiB of one GPU; the load counts whole GPUs for these too.
    """
    wide = (max(1, len(gpus) // 2), len(gpus))
    sizes = [chance.choice(wide) if chance.random() < large else 1 for _ in range(number)]
    shares = [0.0] * number
    if sharing:
        shares = [chance.uniform(10, 20) * (chance.random() < sharing) for _ in range(number)]
        sizes = [1 if share else size for share, size in zip(shares, sizes, strict=True)]
    durations = [chance.lognormvariate(math.log(3600), 1.0) for _ in range(number)]
    work = sum(size * duration for size, duration in zip(sizes, durations, strict=True))
    gap = work / number / (load * len(gpus))
    arrival, jobs = 0.0, []
    for size, duration, share in zip(sizes, durations, shares, strict=True):
        arrival += chance.expovariate(1 / gap)
        among = gpus
        if picky and size <= len(gpus) // 2 and chance.random() < picky:
            among = chance.choice((gpus[: len(gpus) // 2], gpus[len(gpus) // 2 :]))
        want = BackfillRequest(size, frozenset(among), share=share or math.inf)
        jobs.append(Job(arrival, want, duration, bool(share) if sharing else None))
    return jobs


DAY = 86400.0
GROUP = {"interactive": 240, "small": 300, "8 GPUs": 30, "sweep": 16 * 64}
"""What a group does in 30 days: kind of job -> how many."""


def of_a_group(gpus: Sequence[str], chance: random.Random) -> list[Job]:
    """A month of ten users: sweeps of 64 jobs at once, jobs of eight GPUs, small jobs, and interactive work by day."""
    jobs = []

    def add(kind: str, arrival: float, user: int, hours: float, number: int = 1) -> None:
        duration = chance.lognormvariate(math.log(3600 * hours) - 0.125, 0.5)
        jobs.append(Job(arrival, BackfillRequest(number, frozenset(gpus)), duration, user=user, kind=kind))

    for _ in range(GROUP["interactive"]):
        add("interactive", (chance.randrange(30) + chance.uniform(9, 18) / 24) * DAY, chance.randrange(4), 1)
    for _ in range(GROUP["small"]):
        add("small", chance.uniform(0, 30) * DAY, 4 + chance.randrange(4), 2)
    for _ in range(GROUP["8 GPUs"]):
        add("8 GPUs", chance.uniform(0, 30) * DAY, 8, 5, len(gpus))
    for _ in range(GROUP["sweep"] // 64):
        arrival = chance.uniform(0, 29) * DAY
        for _ in range(64):
            add("sweep", arrival, 9, 1.5)
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


def table_of_shares(jobs: Sequence[Job], gpus: Sequence[str], *, seed: int) -> Iterable[str]:
    """What sharing changes; small jobs are those that share GPUs, large ones the others."""
    yield f"{'waits in hours':34}" + "".join(f"{title:>8}{'95 %':>8}{'longest':>8}" for title in ("sharing", "whole"))
    for word, says in (("all say --for", 1.0), ("nobody says", 0.0)):
        shared = saying(jobs, says, random.Random(seed))
        whole = [job._replace(want=job.want._replace(share=math.inf)) for job in shared]
        rows = [("whole GPUs only", whole, 0.0), ("shared", shared, 0.0), ("30 % slower each", shared, 0.3)]
        for title, some, slowdown in rows:
            yield line(f"{word}: {title}", replay(some, gpus, ours, random.Random(seed), slowdown))[:82]


def table_of_orders(jobs: Sequence[Job], gpus: Sequence[str], *, seed: int) -> Iterable[str]:
    """Mean, 95 % and longest wait of each kind of job, in hours, by the order in which users are served."""
    yield f"{'mean / 95 % / longest wait, hours':34}" + "".join(f"{kind:>20}" for kind in GROUP) + f"{'idle':>8}"
    for title, queue in (
        ("first come, first served", Queue()),
        ("the same with max_gpus = 4", Queue(most=4)),
        ("order = fair", Queue(fair=True)),
    ):
        outcome, cells = replay(jobs, gpus, ours, random.Random(seed), queue=queue), ""
        for kind in GROUP:
            waits = sorted(wait / 3600 for job, wait in outcome.waits if job.kind == kind)
            cells += f"{fmean(waits):8.1f} /{waits[int(0.95 * len(waits))]:4.1f} /{waits[-1]:4.1f}"
        yield f"{title:34}{cells}{100 * outcome.idle:6.0f} %"


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
    parser.add_argument("--sharing", type=float, default=0, help="per cent that share an 80 GiB GPU (default 0)")
    parser.add_argument("--load", type=float, default=0.65, help="share of the GPU time that they need (default 0.65)")
    parser.add_argument("--group", action="store_true", help="a month of a group, by the order of its users")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    gpus = [f"GPU-{number:03d}" for number in range(options.gpus)]
    if options.group:
        jobs = of_a_group(gpus, random.Random(options.seed))
        print(f"{len(jobs)} jobs of ten users in 30 days, {options.gpus} GPUs\n")
        for row in table_of_orders(jobs, gpus, seed=options.seed):
            print(row, flush=True)
        return
    for number, large in enumerate(options.large[:1] if options.csv else options.large):
        if options.csv:
            jobs, told = read(options.csv, gpus)
            title = f"{len(jobs)} jobs from {options.csv}, {options.gpus} GPUs"
        else:
            chance, told = random.Random(options.seed), False
            jobs = generated(
                options.jobs, gpus, large / 100, options.load, chance, options.picky / 100, options.sharing / 100
            )
            title = f"{len(jobs)} jobs, {large:g} % of them large; {options.gpus} GPUs, load {options.load:g}"
        print("\n" * bool(number) + f"{title}\n")
        rows = table_of_shares(jobs, gpus, seed=options.seed) if options.sharing else None
        for row in rows or table(jobs, gpus, told=told, seed=options.seed):
            print(row, flush=True)


if __name__ == "__main__":
    main()
