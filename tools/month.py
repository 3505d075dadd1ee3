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
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import common  # noqa: F401 - says where the package and the support of its tests are
from support.actor import Actor, Connection
from support.stage import import_everything, simulate

import safe_gpu
from safe_gpu.cli import main as command
from safe_gpu.coordination import looks
from safe_gpu.coordination.history import HistoryDir
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.status.gather import status_of
from safe_gpu.status.history import claims_between, hours_held
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
    """What a job tells: when it got its GPUs, and which; when it began to work and ceased to; and when it ended."""

    begin: float
    gpus: list[str]
    works: float = 0.0
    rests: float = 0.0
    end: float = 0.0


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

    def work(self, line: Connection) -> None:
        """Claim, tell when and what, and hold it."""
        log = os.open(f"log.{self.number}", os.O_CREAT | os.O_WRONLY, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        share = None if self.part == 1 else f"{SHARE}GiB"
        works = self.length * self.load.works
        driver = SimulatedDriver(HOST)
        if self.by_run:
            script = SCRIPT.format(
                number=self.number,
                uuids=" ".join(gpu.uuid for gpu in driver.idle.gpus),
                tree=f"state/simulated/{HOST}",
                memory=MEMORY_IN_USE,
                works=works,
                rests=self.length - works,
            )
            options = [
                "-n",
                str(self.gpus),
                "--for",
                f"{max(1.0, self.length)}s",
                *(["--share", share] if share else ()),
            ]
            sys.exit(command(["run", *options, "--", "sh", "-c", script]))
        owner = safe_gpu.claim_gpus(
            self.gpus, safe_gpu.NoPlaceholder(), timeout=None, hold_for=max(1.0, self.length), share=share
        )
        with open(str(self.number), "w") as told:
            print(time.time(), os.environ["CUDA_VISIBLE_DEVICES"], file=told, flush=True)
            contexts = [driver.occupy(gpu.uuid, memory=MEMORY_IN_USE) for gpu in owner.gpus]
            print(time.time(), file=told, flush=True)
            time.sleep(works)
            for context in contexts:
                context.close()
            print(time.time(), file=told, flush=True)
            time.sleep(self.length - works)
            print(time.time(), file=told)
        owner.release_gpus()


def jobs_of(number: int, rng: random.Random, month: float, load_of: dict[int, Load]) -> list[Job]:
    """Return the jobs of a month that takes so many seconds, in the order of their starts.

    Args:
        load_of: user -> load.
    """
    parts = [SHARE / MEMORY if rng.random() < 0.15 else 1.0 for _ in range(number)]
    gpus = [rng.choice((1, 1, 1, 2, 2, 4)) if part == 1 else 1 for part in parts]
    weights = [rng.lognormvariate(0, 0.7) for _ in parts]
    unit = LOAD * 8 * month / sum(map(math.prod, zip(parts, gpus, weights, strict=True)))
    starts = sorted(rng.uniform(0, 0.95 * month) for _ in parts)
    jobs = []
    for n in range(number):
        user = rng.choice(USERS)
        jobs.append(Job(n, user, starts[n], round(unit * weights[n], 3), gpus[n], parts[n], load_of[user]))
    return jobs


class Month:
    """The jobs of a host, and what happened.

    Attributes:
        killed: job -> when.
        closed: GPU -> from when until when only the guest may take it.
        looked: when each look took place.
        cost: seconds of processor time that the looks took.
    """

    def __init__(self, number: int, seed: int, speed: float, days: float) -> None:
        self.seconds, self.looks = days * DAY / speed, max(LOOKS / speed, 0.05)
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
        plan = [(0.3, self.drain), (0.4, self.resume), (0.5, self.reserve)]
        running: dict[int, Actor] = {}
        looked = 0.0
        while coming or running:
            passed = time.time() - self.began
            if coming and coming[0].start <= passed:
                job = coming.pop(0)
                running[job.number] = Actor(job.work, uid=job.user)
                self.pids[job.number] = running[job.number].pid
            if passed >= looked and not self.is_unseen(time.time()):
                looked = passed + self.looks
                self.look()
            if plan and plan[0][0] * self.seconds <= passed:
                plan.pop(0)[1]()
            for number in KILLED:
                told = self.told(number)
                if (
                    number in running
                    and 2 <= len(told) < 5
                    and time.time() > float(told[0]) + self.jobs[number].length / 2
                ):
                    self.killed[number] = time.time()
                    os.kill(running[number].pid, signal.SIGKILL)
            running = {number: one for number, one in running.items() if os.waitpid(one.pid, os.WNOHANG) == (0, 0)}
            time.sleep(0.002)

    def is_unseen(self, moment: float) -> bool:
        """Return whether nobody looks then."""
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
                    load += self.load_of(job_of[process.pid], now)
            gpus.append(gpu._replace(utilization=min(100, round(100 * load))))
        status_of(snapshot.updated(gpus))
        self.cost += time.process_time() - began
        self.looked.append(now)

    def load_of(self, job: Job, now: float) -> float:
        """Return the utilisation by a job that works, from 0 to 1."""
        told = self.told(job.number)
        if len(told) < 3:
            return job.load.mean  # it is about to tell
        return job.load.now(now - float(told[2]))

    def told(self, number: int) -> list[str]:
        """Return what a job has told so far, the fields of `Told`."""
        path = Path(str(number))
        return path.read_text().split() if path.exists() else []

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

    def judge(self, speed: float) -> list[str]:
        """Print the GPU-hours of each user, as the jobs tell them and as the history does; return what is wrong."""
        now = time.time()
        claims = claims_between(self.began - 1, now)[0]
        wrong, held = [], []
        sums = {user: [0.0] * 4 for user in USERS}
        for job in self.jobs:
            told, pid, start = self.told(job.number), self.pids[job.number], self.began + job.start
            # Before and after the job, other processes may have had its pid.
            claim = next((one for one in claims if one.pid == pid and one.since >= start), None)
            if claim is None or len(told) < (2 if job.number in self.killed else 5):
                log = Path(f"log.{job.number}").read_text()
                wrong.append(f"{job} is lost: it told {told}, the history {claim}; {log}")
                continue
            # One that is killed may just have ended.
            end = float(told[4]) if len(told) > 4 else self.killed[job.number]
            begin, gpus = float(told[0]), told[1].split(",")
            released = not job.by_run and job.number not in self.killed
            is_same = (sorted(claim.labels), claim.uid) == (sorted(gpus), job.user)
            if not is_same or (released and not claim.knows_its_end):
                wrong.append(f"{job} had {gpus}, and the history says {claim}")
            for gpu in gpus:
                since, until = self.closed.get(gpu, (0.0, 0.0))
                if since < begin < until and (gpu in "67" or job.user != GUEST):
                    wrong.append(f"{job} took GPU {gpu}, which was closed")
            held += [(gpu, begin, end, job) for gpu in gpus if job.part == 1]
            # The look that finds it gone may be late.
            if not released and (self.is_unseen(end) or self.is_unseen(end - 10 * self.looks)):
                continue  # nobody has seen how long it lived
            seconds = [(end - begin) * job.part, *hours_held(claim, 0.0, now)]
            more = [1.0, *(job.gpus * one * speed / 3600 for one in seconds)]
            sums[job.user] = [one + other for one, other in zip(sums[job.user], more, strict=True)]
        for (gpu, _, end, one), (same, begin, _, other) in pairwise(sorted(held)):
            if gpu == same and begin < end:
                wrong.append(f"GPU {gpu} was held by {one} and by {other}")
        columns = [Column("USER", [str(user) for user in sums])]
        for place, title in enumerate(("JOBS", "GPU-HOURS", "AT LEAST", "AT MOST")):
            cells = [f"{one[place]:,.{min(place, 1)}f}" for one in sums.values()]
            columns.append(Column(title, cells, right=True))
        print(*table(columns, 80), sep="\n")
        for user, (_, happened, least, most) in sums.items():
            exact = speed <= EXACT
            low, high, factor = (most, least, 1.01) if exact else (least, most, 1.2)
            if not low / factor <= happened <= high * factor:
                wrong.append(f"the history of {user} is off by more than {factor - 1:.0%}")
        return wrong

    def judge_use(self) -> list[str]:
        """Print how much each user used, as the jobs tell it and as the history does; return what is wrong."""
        now = time.time()
        claims = claims_between(self.began - 1, now)[0]
        uses = {user: UseOfUser() for user in USERS}
        look = max(later - earlier for earlier, later in pairwise(self.looked) if later - earlier < 10 * looks.MINUTE)
        unseen = [self.began + part * self.seconds for part in UNSEEN]
        for job in self.jobs:
            told, start = self.told(job.number), self.began + job.start
            claim = next((one for one in claims if one.pid == self.pids[job.number] and one.since >= start), None)
            if claim is None or job.number in self.killed or len(told) < 5:
                continue
            begin, works, rests, end = [float(told[place]) for place in (0, 2, 3, 4)]
            use = uses[job.user]
            use.claims += job.gpus
            was_unseen = max(0.0, min(end, unseen[1]) - max(begin, unseen[0]))
            use.unseen += job.gpus * job.part * was_unseen
            seen = claim.use(0.0, now)
            missed = job.gpus * hours_held(claim, 0.0, now)[1] - seen.looked
            use.missed += missed
            if missed > 2 * look * job.gpus * job.part:
                continue  # what part of the load was seen is not known
            use.missed_of_these += missed / job.part
            use.looked_idle += seen.idle / job.part
            use.idle += job.gpus * (works - begin + end - rests)
            if job.part == 1:  # of a share that of the GPU is told
                use.told += seen.told
                use.used += seen.used
                use.happened += job.gpus * job.load.until(rests - works)
                use.held += job.gpus * (end - begin)
        self.print_uses(uses, look)
        return [wrong for user, use in uses.items() for wrong in use.wrong(user, look)]

    def print_uses(self, uses: "dict[int, UseOfUser]", look: float) -> None:
        """Print how the GPUs were used, as it was and as it is told, and what looks cost."""
        hour = 3600 / self.speed
        cells = {
            "USED (%)": [f"{100 * use.happened / max(use.held, 1e-9):.1f}" for use in uses.values()],
            "TOLD": [f"{100 * use.used / max(use.told, 1e-9):.1f}" for use in uses.values()],
            "IDLE HOURS": [f"{use.idle / hour:,.1f}" for use in uses.values()],
            "TOLD ": [f"{use.looked_idle / hour:,.1f}" for use in uses.values()],
            "UNSEEN HOURS": [f"{use.unseen / hour:,.1f}" for use in uses.values()],
            "NOT LOOKED AT": [f"{use.missed / hour:,.1f}" for use in uses.values()],
        }
        users = Column("USER", [str(user) for user in uses])
        print(*table([users, *(Column(title, column, right=True) for title, column in cells.items())], 100), sep="\n")
        lines = [line for path in Path("state/history").glob("*.jsonl") for line in path.read_bytes().splitlines(True)]
        told = [line for line in lines if b'"looks"' in line]
        print(
            f"{len(self.looked)} looks, {1000 * self.cost / len(self.looked):.1f} ms of processor time each, at most "
            f"{look / hour * 60:.1f} minutes apart; {len(told)} lines of them, {sum(map(len, told)) / 1024:.0f} KiB"
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
        """Return what is wrong; looks are so many seconds apart at most."""
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
    with tempfile.TemporaryDirectory(prefix="safe-gpu-month-") as path:
        os.chmod(path, 0o1777)
        os.chdir(path)
        Path("policy.ini").write_text(POLICY)
        simulate(HOST, f"{path}/state", SAFE_GPU_POLICY=f"{path}/policy.ini")
        HistoryDir(make=True).close()
        SimulatedDriver(HOST).occupy(SimulatedDriver(HOST).idle.gpus[0].uuid).close()  # makes its directory
        month = Month(options.jobs, options.seed, options.speed, options.days)
        looks.MINUTE = month.looks
        month.live()
        wrong = month.judge(options.speed) + month.judge_use()
        os.chdir("/")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
