"""Small hosts in simulated time on which requests queue by a backfill rule, with a referee that computes its own dates.

Time goes in whole units. In each unit holds end, requests come and leave, and all waiters look, in any order. The
referee knows holds and promises, and nothing of the rule.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from safe_gpu.selection.backfill import BackfillRequest, When

CAPACITY = 8.0
"""Of each GPU, for those that share it."""


class BrokenPromise(AssertionError):
    """What the rule promises did not hold in a world."""


@dataclass
class Job:
    """A request: it holds for ``lasts``, whatever it said, and leaves the queue after ``patience`` without GPUs."""

    name: int
    arrives: float
    want: BackfillRequest
    lasts: float
    patience: float = math.inf
    started: float | None = None


@dataclass
class Hold:
    """The job of a claimed GPU, or of a share of it. ``said`` is when it is to end by its own word."""

    job: Job
    since: float
    said: float
    ends: float


@dataclass
class World:
    """A host with these GPUs. ``honest``: no hold lasts longer than said, so that dates may not move."""

    rule: Any
    gpus: tuple[str, ...]
    chance: random.Random
    honest: bool = False
    now: float = 0.0
    held: dict[str, list[Hold]] = field(default_factory=dict)
    queue: list[Job] = field(default_factory=list)
    promised: dict[int, float] = field(default_factory=dict)  # of the waiters with no competitor ahead
    due: dict[int, float] = field(default_factory=dict)  # when such a waiter is served at the latest
    passes: int = 0

    def run(self, jobs: Iterable[Job], until: float = 300) -> None:
        """Let these jobs come and go."""
        coming = sorted(jobs, key=lambda job: job.arrives)
        while self.now < until and (coming or self.queue or self.held):
            left = {gpu: [hold for hold in holds if hold.ends > self.now] for gpu, holds in self.held.items()}
            self.held = {gpu: holds for gpu, holds in left.items() if holds}
            self.queue = [job for job in self.queue if job.arrives + job.patience > self.now]
            while coming and coming[0].arrives <= self.now:
                self.queue.append(coming.pop(0))
            self._note_promises()
            for job in self.chance.sample(self.queue, len(self.queue)):
                self.look(job)
            self._note_promises()
            for job in self.queue:
                if self.due.get(job.name, math.inf) < self.now:
                    raise BrokenPromise(f"{job} was due and could be served at {self.due[job.name]}, now {self.now}")
            self.now += 1

    def look(self, job: Job) -> None:
        """One look of a waiter, which starts if the rule lets it."""
        ahead = self.queue[: self.queue.index(job)]
        free = frozenset(gpu for gpu in self.gpus if _room(self.held.get(gpu, [])) >= min(job.want.share, CAPACITY))
        want, *others = (self.rule.BackfillRequest(*one.want) for one in (job, *ahead))
        opened = self.rule.open_gpus(want, others, free, self._free_at(), self.now)
        if not self._competitors(job) and opened != job.want.gpus & free:
            raise BrokenPromise(f"nobody competes ahead of {job}, and it is hindered")
        if len(opened) >= job.want.nb:
            self.take(job, self.chance.sample(sorted(opened), job.want.nb))

    def take(self, job: Job, gpus: Iterable[str]) -> None:
        """Give the job these GPUs, and check whom that harms."""
        for gpu in gpus:
            assert _room(self.held.get(gpu, [])) >= min(job.want.share, CAPACITY)
            for other in self._competitors(job):
                if gpu in other.want.gpus:
                    self._check_pass(job, other)
        for gpu in gpus:
            hold = Hold(job, self.now, self.now + job.want.hold_for, self.now + job.lasts)
            self.held.setdefault(gpu, []).append(hold)
        job.started = self.now
        self.queue.remove(job)

    def _check_pass(self, job: Job, other: Job) -> None:
        self.passes += 1
        if job.want.hold_for == math.inf:
            raise BrokenPromise(f"{job} did not say how long, and takes a GPU that {other} wants")
        promise = self.promised.get(other.name)
        if promise is not None and not self.now + job.want.hold_for <= promise < math.inf:
            raise BrokenPromise(f"{job} takes a GPU past {other}, which was promised {promise}, at {self.now}")

    def _competitors(self, job: Job) -> list[Job]:
        """Those ahead that want any of the same GPUs."""
        ahead = self.queue[: self.queue.index(job)]
        return [one for one in ahead if one.want.gpus & job.want.gpus]

    def _free_at(self) -> dict[str, When]:
        found: dict[str, When] = dict.fromkeys(self.gpus, self.now)
        for gpu, holds in self.held.items():
            ends = []
            for hold in holds:
                until = None if hold.said == math.inf else hold.said
                ends.append(self.rule.free_at(self.now, since=hold.since, until=until))
            parts = [(end, hold.job.want.share) for end, hold in zip(ends, holds, strict=True)]
            found[gpu] = ends[0] if _room(holds) == -math.inf else (*parts, (self.now, _room(holds)))
        return found

    def _said(self, gpu: str, share: float) -> float:
        """When there is that much room on a GPU, by what its holders said."""
        holds = self.held.get(gpu, [])
        moments = {self.now, *(max(self.now, hold.said) for hold in holds)}
        return min(at for at in moments if _room([one for one in holds if one.said > at]) >= min(share, CAPACITY))

    def _note_promises(self) -> None:
        """Give those that nobody is ahead of a date, by what the holders said, and hold the rule to the earliest."""
        for job in self.queue:
            if self._competitors(job):
                continue
            said = [self._said(gpu, job.want.share) for gpu in job.want.gpus]
            date = next((when for when in sorted(said) if sum(one <= when for one in said) >= job.want.nb), math.inf)
            earlier = self.promised.get(job.name, math.inf)
            if self.honest and date > max(earlier, self.now):
                raise BrokenPromise(f"the date of {job} moves from {earlier} to {date}")
            self.promised[job.name] = min(earlier, date)
            if self.promised[job.name] <= self.now and job.name not in self.due:
                # From its date on nobody takes its GPUs, so it is served when those who hold them then have ended.
                ends = [hold.ends for gpu in job.want.gpus for hold in self.held.get(gpu, [])]
                self.due[job.name] = max([self.now, *ends])


def _room(holds: Iterable[Hold]) -> float:
    return CAPACITY - sum(hold.job.want.share for hold in holds)


def random_jobs(
    chance: random.Random,
    gpus: tuple[str, ...],
    *,
    honest: bool = False,
    mute: bool = False,
    shares: Sequence[float] = (math.inf,),
) -> list[Job]:
    """Jobs with overlapping sets of GPUs. ``mute``: nobody says for how long. ``shares``: how much each may want."""
    jobs = []
    for name in range(40):
        among = frozenset(chance.sample(gpus, chance.randint(1, len(gpus))))
        lasts = chance.choice((1, 2, 3, 5, 8, 20))
        if mute or (not honest and chance.random() < 0.2):
            says = math.inf
        elif honest:
            says = lasts + chance.choice((0, 0, 1, 10))
        else:
            says = max(1, round(lasts * chance.choice((0.2, 0.8, 1, 1, 3))))
        arrives = chance.randint(0, 60)
        share = shares[0] if len(shares) == 1 else chance.choice(shares)
        want = BackfillRequest(chance.randint(1, len(among)), among, says, share=share)
        jobs.append(Job(name, arrives, want, lasts, patience=chance.choice((math.inf, math.inf, 10))))
    return jobs
