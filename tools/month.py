"""A group's month on one host, live: 200 jobs of five users on a simulated host, and what the history says of them.

    sudo python tools/month.py                             # 30 days at 1/1000 of time: 43 minutes
    sudo python tools/month.py --speed 30000               # 86 seconds
    sudo python tools/month.py --days 4 --jobs 30 --speed 10000    # 35 seconds

The group has limits, turns, shares of GPUs, a drain, a reservation and two jobs that are killed, and `safe-gpu status`
runs every minute. Each job tells when it had which GPUs, and that is printed beside what the history says. Exit
code 1: a job is missing or has other GPUs there, a GPU was held twice, one was taken that was closed, or the least or
the most of the history is more than 1 % off the GPU-hours of a user, but for jobs that ended while nobody looked.
Faster than 1/1000 of time, when jobs are hardly longer than their starts, these need only lie between the two, or
within 20 %.

Each user has a load, which the driver tells as utilisation while a job works; two users' jobs work in a part of their
time only. For a thirtieth of the time, a day of a month, nobody looks. Exit code 1, too: USED of the history is more
than two points off, IDLE is on average off by more than a look for each claim and GPU, or time without looks is not
told as that. Only claims that were looked at all the time are compared, and USED of whole GPUs only.
"""

import argparse
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import common  # noqa: F401 - says where the package and the support of its tests are
from support.actor import Actor
from support.stage import import_everything, replace_file, temporary_host

import safe_gpu
from safe_gpu.cli import main as command
from safe_gpu.coordination import looks
from safe_gpu.coordination.history import HistoryDir
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.status.gather import status_of
from safe_gpu.status.history import PastClaim, claims_between, hours_held
from safe_gpu.status.table import table
from safe_gpu.wording.text import Column

DAY = 86400.0
HOST = "dgx-a100"
USERS = range(3001, 3006)
GUEST = USERS[-1]  # for whom GPUs are reserved
KILLED = (60, 121)
SHARE, MEMORY = 20, 80  # GiB
LOAD = 0.62  # of the eight GPUs
LOOKS = 60.0  # seconds of life between two looks at the host, as by root's cron
UNSEEN = (0.7, 0.7 + 1 / 30)  # the part of the time in which nobody looks: a day of a month
MEMORY_IN_USE = 10 << 30  # bytes, of a job on each GPU
POINTS = 2.0  # percent that USED may be off
EXACT = 1000.0  # times faster: what a process takes to start and end is less than 1 % of a job
POLICY = f"[host]\norder = fair\n[default]\nmax_gpus = 6\n[user {USERS[0]}]\nmax_gpus = 4\n"


class Load(NamedTuple):
    """How a user's jobs use GPUs.

    Attributes:
        mean: utilisation while a job works, from 0 to 1; it goes up and down by half of that.
        works: the part of a job in which it works, from its start.
        period: seconds in which the utilisation goes up and down.
    """

    mean: float
    works: float
    period: float

    def now(self, seconds: float) -> float:
        """The utilisation so long after a job has begun, from 0 to 1."""
        return self.mean * (1 + 0.5 * math.sin(2 * math.pi * seconds / self.period))

    def until(self, seconds: float) -> float:
        """The integral of the utilisation until then, in seconds."""
        wave = self.period / (4 * math.pi) * (1 - math.cos(2 * math.pi * seconds / self.period))
        return self.mean * (seconds + wave)


def loads(look: float) -> dict[int, Load]:
    """The load of each user, whose utilisation changes slowly.

    Args:
        look: seconds between two looks.
    """
    kinds = ((0.6, 1.0), (0.5, 1.0), (0.35, 1.0), (0.5, 0.6), (0.3, 0.5))
    return {user: Load(mean, works, 200 * look) for user, (mean, works) in zip(USERS, kinds, strict=True)}


# Each context is a locked file; it has its name when it is locked.
SCRIPT = """
exec >{number}; date +%s.%N; echo $CUDA_VISIBLE_DEVICES; set -- {uuids}; fd=4
for gpu in $(echo $CUDA_VISIBLE_DEVICES | tr , ' '); do
  eval "uuid=\\${{$((gpu + 1))}}"; fd=$((fd + 1))
  eval "exec $fd>{tree}/.$$.$fd"; flock $fd
  mv {tree}/.$$.$fd {tree}/$uuid.$$-{memory}-compute-$fd
done
date +%s.%N; sleep {works}; exec 5>&- 6>&- 7>&- 8>&-; date +%s.%N; sleep {rests}; date +%s.%N
"""


class Told(NamedTuple):
    """What a job has told so far: when it got its GPUs, and which; when it worked and ceased to; and when it ended.

    None has not been told.
    """

    begin: float | None = None
    gpus: tuple[str, ...] = ()
    works: float | None = None
    rests: float | None = None
    end: float | None = None

    @classmethod
    def read(cls, number: int) -> "Told":
        """What the job with this number has told."""
        path = Path(str(number))
        words = []
        if path.exists():
            words = path.read_text().split()
        told = cls()
        if len(words) >= 2:
            told = told._replace(begin=float(words[0]), gpus=tuple(words[1].split(",")))
        if len(words) >= 3:
            told = told._replace(works=float(words[2]))
        if len(words) >= 4:
            told = told._replace(rests=float(words[3]))
        if len(words) >= 5:
            told = told._replace(end=float(words[4]))
        return told


class Job(NamedTuple):
    """What a user starts: when and for how long, in seconds, on how many GPUs, or on a share of one."""

    number: int
    user: int
    start: float
    length: float
    gpus: int
    part: float
    load: Load

    @property
    def by_run(self) -> bool:
        """Whether it is a command, and no Python program."""
        return self.number % 2 == 0

    @property
    def share(self) -> str | None:
        """Of the GPU, as an option of the claim; None: all."""
        if self.part == 1:
            return None
        return f"{SHARE}GiB"

    @property
    def hold_for(self) -> float:
        """For how long it says that it will hold them, seconds."""
        return max(1.0, self.length)

    @property
    def works(self) -> float:
        """For how long it works, seconds."""
        return self.length * self.load.works

    def work(self, line: Connection) -> None:
        """Claim, tell when and what, and hold it."""
        log = os.open(f"log.{self.number}", os.O_CREAT | os.O_WRONLY, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if self.by_run:
            self._be_command()
        else:
            self._be_program()

    def _be_command(self) -> None:
        """Run a script of the shell by ``safe-gpu run``."""
        script = SCRIPT.format(
            number=self.number,
            uuids=" ".join(gpu.uuid for gpu in SimulatedDriver(HOST).idle.gpus),
            tree=os.path.join(os.environ["SAFE_GPU_SIMULATED_DIR"], HOST),
            memory=MEMORY_IN_USE,
            works=self.works,
            rests=self.length - self.works,
        )
        options = ["-n", str(self.gpus), "--for", f"{self.hold_for}s"]
        if self.share is not None:
            options += ["--share", self.share]
        sys.exit(command(["run", *options, "--", "sh", "-c", script]))

    def _be_program(self) -> None:
        """Claim in Python."""
        driver = SimulatedDriver(HOST)
        owner = safe_gpu.claim_gpus(
            self.gpus, safe_gpu.NoPlaceholder(), timeout=None, hold_for=self.hold_for, share=self.share
        )
        with open(str(self.number), "w") as told:
            print(time.time(), os.environ["CUDA_VISIBLE_DEVICES"], file=told, flush=True)
            contexts = [driver.occupy(gpu.uuid, memory=MEMORY_IN_USE) for gpu in owner.gpus]
            print(time.time(), file=told, flush=True)
            time.sleep(self.works)
            for context in contexts:
                context.close()
            print(time.time(), file=told, flush=True)
            time.sleep(self.length - self.works)
            print(time.time(), file=told)
        owner.release_gpus()


def jobs_of(number: int, rng: random.Random, month: float, load_of: dict[int, Load]) -> list[Job]:
    """The jobs of a month that takes so many seconds, in the order of their starts.

    Args:
        load_of: user -> load.
    """
    parts = []
    for _ in range(number):
        is_share = rng.random() < 0.15
        parts.append(SHARE / MEMORY if is_share else 1.0)
    gpus = []
    for part in parts:
        gpus.append(rng.choice((1, 1, 1, 2, 2, 4)) if part == 1 else 1)
    weights = [rng.lognormvariate(0, 0.7) for _ in parts]
    unit = LOAD * 8 * month / sum(math.prod(factors) for factors in zip(parts, gpus, weights, strict=True))
    starts = sorted(rng.uniform(0, 0.95 * month) for _ in parts)
    jobs = []
    for n in range(number):
        user = rng.choice(USERS)
        jobs.append(Job(n, user, starts[n], round(unit * weights[n], 3), gpus[n], parts[n], load_of[user]))
    return jobs


class Month:
    """The jobs of a host, and what happened.

    Attributes:
        looks: seconds between two looks.
        killed: job -> when.
        closed: GPU -> from when until when only the guest may take it.
        looked: when each look took place.
        cost: seconds of processor time that the looks took.
    """

    def __init__(self, number: int, seed: int, speed: float, days: float) -> None:
        self.seconds = days * DAY / speed
        self.looks = max(LOOKS / speed, 0.05)
        self.speed = speed
        self.jobs = jobs_of(number, random.Random(seed), self.seconds, loads(self.looks))
        self.looked: list[float] = []
        self.cost = 0.0
        self.driver = SimulatedDriver(HOST)
        self.pids: dict[int, int] = {}
        self.killed: dict[int, float] = {}
        self.closed: dict[str, tuple[float, float]] = {}
        self.began = time.time()

    def live(self) -> None:
        """Let the month pass."""
        coming = list(self.jobs)
        plan: list[tuple[float, Callable[[], None]]] = [(0.3, self.drain), (0.4, self.resume), (0.5, self.reserve)]
        running: dict[int, Actor] = {}
        next_look = 0.0
        while coming or running:
            passed = time.time() - self.began
            if coming and coming[0].start <= passed:
                job = coming.pop(0)
                running[job.number] = Actor(job.work, uid=job.user)
                self.pids[job.number] = running[job.number].pid
            if passed >= next_look and not self.is_unseen(time.time()):
                next_look = passed + self.looks
                self.look()
            if plan and plan[0][0] * self.seconds <= passed:
                _, do = plan.pop(0)
                do()
            self.kill_some(running)
            running = {number: one for number, one in running.items() if os.waitpid(one.pid, os.WNOHANG) == (0, 0)}
            time.sleep(0.002)

    def kill_some(self, running: dict[int, Actor]) -> None:
        """Kill those of the running jobs that are to be killed, in the middle."""
        for number in KILLED:
            if number not in running:
                continue
            told = Told.read(number)
            if told.begin is None or told.end is not None:
                continue
            if time.time() > told.begin + self.jobs[number].length / 2:
                self.killed[number] = time.time()
                os.kill(running[number].pid, signal.SIGKILL)

    def is_unseen(self, moment: float) -> bool:
        """Whether nobody looks then."""
        return UNSEEN[0] <= (moment - self.began) / self.seconds < UNSEEN[1]

    def look(self) -> None:
        """Look at the host, as `safe-gpu status` does, with the utilisation of the jobs that work there."""
        began = time.process_time()
        now = time.time()
        snapshot = self.driver.snapshot()
        job_of = {self.pids[job.number]: job for job in self.jobs if job.number in self.pids}
        gpus = []
        for gpu in snapshot.gpus:
            load = 0.0
            for process in gpu.processes or ():
                if process.pid in job_of:
                    load += load_of_job(job_of[process.pid], now)
            gpus.append(gpu._replace(utilization=min(100, round(100 * load))))
        status_of(snapshot.updated(gpus))
        self.cost += time.process_time() - began
        self.looked.append(now)

    def drain(self) -> None:
        """Close two GPUs at once."""
        command(["drain", "6,7", "--reason", "a fan is broken"])
        self.closed.update(dict.fromkeys("67", (time.time(), math.inf)))

    def resume(self) -> None:
        """Open them again."""
        self.closed.update(dict.fromkeys("67", (self.closed["6"][0], time.time())))
        command(["resume", "6,7"])

    def reserve(self) -> None:
        """Reserve two GPUs for the guest, from soon on."""
        tenth = max(2, round(self.seconds / 10))
        begin = time.time() + tenth
        command(["drain", "0,1", "--from", f"+{tenth}s", "--until", f"+{tenth}s", "--for-user", str(GUEST)])
        self.closed.update(dict.fromkeys("01", (begin + 1, begin + tenth - 1)))  # it is kept in whole seconds


def load_of_job(job: Job, now: float) -> float:
    """The utilisation by a job that works, from 0 to 1."""
    told = Told.read(job.number)
    if told.works is None:
        return job.load.mean  # it is about to tell
    return job.load.now(now - told.works)


@dataclass
class Hours:
    """What the jobs of a user had, in GPU-hours of the month, and what the history tells of it."""

    jobs: int = 0
    happened: float = 0.0
    least: float = 0.0
    most: float = 0.0


class Judge:
    """Compares what jobs tell with what the history says.

    Attributes:
        wrong: what differs.
    """

    def __init__(self, month: Month) -> None:
        self.wrong: list[str] = []
        self._month = month
        self._now = time.time()
        self._claims = claims_between(month.began - 1, self._now)[0]
        self._held: list[tuple[str, float, float, Job]] = []  # of whole GPUs
        self._hours = {user: Hours() for user in USERS}

    def claim_of(self, job: Job) -> PastClaim | None:
        """The claim of a job in the history; None if there is none."""
        start = self._month.began + job.start
        for claim in self._claims:
            # Before and after the job, other processes may have had its pid.
            if claim.pid == self._month.pids[job.number] and claim.since >= start:
                return claim
        return None

    def judge_hours(self) -> None:
        """Print the GPU-hours of each user, as the jobs tell them and as the history does, and judge them."""
        for job in self._month.jobs:
            self._judge_job(job)
        for (gpu, _, end, one), (same, begin, _, other) in pairwise(sorted(self._held)):
            if gpu == same and begin < end:
                self.wrong.append(f"GPU {gpu} was held by {one} and by {other}")
        self._print_hours()
        for user, hours in self._hours.items():
            if self._month.speed <= EXACT:
                factor = 1.01
                is_right = hours.most / factor <= hours.happened <= hours.least * factor
            else:
                factor = 1.2
                is_right = hours.least / factor <= hours.happened <= hours.most * factor
            if not is_right:
                self.wrong.append(f"the history of {user} is off by more than {factor - 1:.0%}")

    def _judge_job(self, job: Job) -> None:
        """Judge whether the history knows a job, whether it had what nobody else had, and add its hours."""
        month = self._month
        told = Told.read(job.number)
        claim = self.claim_of(job)
        was_killed = job.number in month.killed
        # One that is killed may just have ended.
        end = told.end
        if end is None:
            end = month.killed.get(job.number)
        if claim is None or told.begin is None or end is None:
            log = Path(f"log.{job.number}").read_text()
            self.wrong.append(f"{job} is lost: it told {told}, the history {claim}; {log}")
            return
        was_released = not job.by_run and not was_killed
        is_same = sorted(claim.labels) == sorted(told.gpus) and claim.uid == job.user
        if not is_same or (was_released and not claim.knows_its_end):
            self.wrong.append(f"{job} had {told.gpus}, and the history says {claim}")
        self._judge_closed(job, told.begin, told.gpus)
        if job.part == 1:
            self._held += [(gpu, told.begin, end, job) for gpu in told.gpus]
        # The look that finds it gone may be late.
        if not was_released and (month.is_unseen(end) or month.is_unseen(end - 10 * month.looks)):
            return  # nobody has seen how long it lived
        least, most = hours_held(claim, 0.0, self._now)
        to_hours = job.gpus * month.speed / 3600
        hours = self._hours[job.user]
        hours.jobs += 1
        hours.happened += (end - told.begin) * job.part * to_hours
        hours.least += least * to_hours
        hours.most += most * to_hours

    def _judge_closed(self, job: Job, begin: float, gpus: Sequence[str]) -> None:
        """Judge whether a job took GPUs that were closed."""
        for gpu in gpus:
            since, until = self._month.closed.get(gpu, (0.0, 0.0))
            if since < begin < until and (gpu in "67" or job.user != GUEST):
                self.wrong.append(f"{job} took GPU {gpu}, which was closed")

    def _print_hours(self) -> None:
        """Print the table of hours."""
        found = self._hours.values()
        columns = [
            Column("USER", [str(user) for user in self._hours]),
            Column("JOBS", [f"{hours.jobs}" for hours in found], right=True),
            Column("GPU-HOURS", [f"{hours.happened:,.1f}" for hours in found], right=True),
            Column("AT LEAST", [f"{hours.least:,.1f}" for hours in found], right=True),
            Column("AT MOST", [f"{hours.most:,.1f}" for hours in found], right=True),
        ]
        print(*table(columns, 80), sep="\n")

    def judge_use(self) -> None:
        """Print how much each user used, as the jobs tell it and as the history does, and judge it."""
        look = self._longest_look()
        uses = {user: UseOfUser() for user in USERS}
        for job in self._month.jobs:
            told = Told.read(job.number)
            claim = self.claim_of(job)
            if claim is not None and job.number not in self._month.killed and told.end is not None:
                self._add_use(uses[job.user], job, told, claim, look)
        self._print_uses(uses, look)
        for user, use in uses.items():
            self.wrong += use.wrong(user, look)

    def _longest_look(self) -> float:
        """The longest time between two looks, but for the day without any; seconds."""
        gaps = [later - earlier for earlier, later in pairwise(self._month.looked)]
        return max(gap for gap in gaps if gap < 10 * looks.MINUTE)

    def _add_use(self, use: "UseOfUser", job: Job, told: Told, claim: PastClaim, look: float) -> None:
        """Add what a job did that has told everything, and what the history tells of it."""
        month = self._month
        unseen_from, unseen_until = [month.began + part * month.seconds for part in UNSEEN]
        use.claims += job.gpus
        was_unseen = max(0.0, min(told.end, unseen_until) - max(told.begin, unseen_from))
        use.unseen += job.gpus * job.part * was_unseen
        seen = claim.use(0.0, self._now)
        missed = job.gpus * hours_held(claim, 0.0, self._now)[1] - seen.looked
        use.missed += missed
        if missed > 2 * look * job.gpus * job.part:
            return  # what part of the load was seen is not known
        use.missed_of_these += missed / job.part
        use.looked_idle += seen.idle / job.part
        use.idle += job.gpus * (told.works - told.begin + told.end - told.rests)
        if job.part == 1:  # of a share that of the GPU is told
            use.told += seen.told
            use.used += seen.used
            use.happened += job.gpus * job.load.until(told.rests - told.works)
            use.held += job.gpus * (told.end - told.begin)

    def _print_uses(self, uses: "dict[int, UseOfUser]", look: float) -> None:
        """Print how the GPUs were used, as it was and as it is told, and what looks cost."""
        hour = 3600 / self._month.speed
        cells = {
            "USED (%)": [f"{100 * use.happened / max(use.held, 1e-9):.1f}" for use in uses.values()],
            "TOLD": [f"{100 * use.used / max(use.told, 1e-9):.1f}" for use in uses.values()],
            "IDLE HOURS": [f"{use.idle / hour:,.1f}" for use in uses.values()],
            "TOLD ": [f"{use.looked_idle / hour:,.1f}" for use in uses.values()],
            "UNSEEN HOURS": [f"{use.unseen / hour:,.1f}" for use in uses.values()],
            "NOT LOOKED AT": [f"{use.missed / hour:,.1f}" for use in uses.values()],
        }
        columns = [Column("USER", [str(user) for user in uses])]
        columns += [Column(title, column, right=True) for title, column in cells.items()]
        print(*table(columns, 100), sep="\n")
        told = []
        for path in Path("state/history").glob("*.jsonl"):
            told += [line for line in path.read_bytes().splitlines(True) if b'"looks"' in line]
        number = len(self._month.looked)
        kib = sum(len(line) for line in told) / 1024
        print(
            f"{number} looks, {1000 * self._month.cost / number:.1f} ms of processor time each, at most "
            f"{look / hour * 60:.1f} minutes apart; {len(told)} lines of them, {kib:.0f} KiB"
        )


class UseOfUser:
    """What a user's jobs did, and what the history tells of it, in GPU-seconds.

    Attributes:
        claims: GPUs of claims.
        held, happened: of whole GPUs, which were looked at all the time: held, and each second times the utilisation.
        told, used: the same as the history tells it.
        idle, looked_idle: without work, as it was and as the history tells it, of the same claims and of shares.
        unseen: when nobody looked.
        missed: not looked at, as the history tells it; ``missed_of_these``: of the claims that are compared.
    """

    def __init__(self) -> None:
        self.claims = 0
        self.held = self.happened = self.told = self.used = 0.0
        self.idle = self.looked_idle = self.unseen = self.missed = self.missed_of_these = 0.0

    def wrong(self, user: int, look: float) -> list[str]:
        """What is wrong; looks are so many seconds apart at most."""
        wrong = []
        # A load that nobody has looked at may have been any.
        points = POINTS / 100 + self.missed_of_these / max(self.held, 1e-9)
        if self.held and abs(self.happened / self.held - self.used / self.told) > points:
            wrong.append(f"USED of {user} is off by more than {POINTS:g} points")
        if abs(self.idle - self.looked_idle) > self.claims * look:
            wrong.append(f"IDLE of {user} is off by more than a look for each claim and GPU")
        if self.missed < self.unseen - self.claims * look:
            wrong.append(f"of {user}, {self.unseen} s were not looked at, and the history says {self.missed}")
        return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--speed", type=float, default=1000.0, help="how many times faster than life (default 1000)")
    parser.add_argument("--days", type=float, default=30.0, help="how long a month is (default 30)")
    parser.add_argument("--seed", type=int, default=1, help="of what is random (default 1)")
    options = parser.parse_args()
    if os.geteuid():
        parser.error("only root can start jobs of five users: use sudo")
    import_everything()
    with temporary_host("month", HOST) as host:
        os.chdir(host.path)
        replace_file(host.policy, POLICY)
        host.enter()
        HistoryDir(make=True).close()
        host.make_files_of_driver()
        month = Month(options.jobs, options.seed, options.speed, options.days)
        looks.MINUTE = month.looks
        month.live()
        judge = Judge(month)
        judge.judge_hours()
        judge.judge_use()
        os.chdir("/")
    print(*judge.wrong, sep="\n")
    return 1 if judge.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
