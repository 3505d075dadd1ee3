"""A group's month on one host, live: 200 jobs of five users on a simulated host, and what the history says of them.

    sudo python tools/month.py                   # 30 days at 1/1000 of time: 43 minutes
    sudo python tools/month.py --speed 30000     # 86 seconds

The group has limits, turns, shares of GPUs, a drain, a reservation and two jobs that are killed, and `safe-gpu status`
runs every minute. Each job tells when it had which GPUs, and that is printed beside what the history says. Exit
code 1: a job is missing or has other GPUs there, a GPU was held twice, one was taken that was closed, or the least or
the most of the history is more than 1 % off the GPU-hours of a user. Faster than 1/1000 of time, when jobs are hardly
longer than their starts, these need only lie between the two, or within 20 %.
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
from safe_gpu.status.gather import gather
from safe_gpu.status.history import claims_between, hours_held
from safe_gpu.status.table import table
from safe_gpu.wording.text import Column

MONTH = 30 * 86400.0
USERS = range(3001, 3006)
GUEST = USERS[-1]  # for whom GPUs are reserved
KILLED = (60, 121)
SHARE, MEMORY = 20, 80  # GiB
LOAD = 0.62  # of the eight GPUs
LOOKS = 60.0  # seconds of life between two looks at the host, as by root's cron
EXACT = 1000.0  # times faster: what a process takes to start and end is less than 1 % of a job
POLICY = f"[host]\norder = fair\n[default]\nmax_gpus = 6\n[user {USERS[0]}]\nmax_gpus = 4\n"


class Job(NamedTuple):
    """What a user starts: when and for how long, in seconds, on how many GPUs, or on a share of one."""

    number: int
    user: int
    start: float
    length: float
    gpus: int
    part: float

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
        if self.by_run:
            script = f"exec >{self.number}; date +%s.%N; echo $CUDA_VISIBLE_DEVICES; sleep {self.length}; date +%s.%N"
            options = [
                "-n",
                str(self.gpus),
                "--for",
                f"{max(1.0, self.length)}s",
                *(["--share", share] if share else ()),
            ]
            sys.exit(command(["run", *options, "--", "sh", "-c", script]))
        owner = safe_gpu.claim_gpus(self.gpus, timeout=None, hold_for=max(1.0, self.length), share=share)
        with open(str(self.number), "w") as told:
            print(time.time(), os.environ["CUDA_VISIBLE_DEVICES"], file=told, flush=True)
            time.sleep(self.length)
            print(time.time(), file=told)
        owner.release_gpus()


def jobs_of(number: int, rng: random.Random, month: float) -> list[Job]:
    """Return the jobs of a month that takes so many seconds, in the order of their starts."""
    parts = [SHARE / MEMORY if rng.random() < 0.15 else 1.0 for _ in range(number)]
    gpus = [rng.choice((1, 1, 1, 2, 2, 4)) if part == 1 else 1 for part in parts]
    weights = [rng.lognormvariate(0, 0.7) for _ in parts]
    unit = LOAD * 8 * month / sum(map(math.prod, zip(parts, gpus, weights, strict=True)))
    starts = sorted(rng.uniform(0, 0.95 * month) for _ in parts)
    return [Job(n, rng.choice(USERS), starts[n], round(unit * weights[n], 3), gpus[n], parts[n]) for n in range(number)]


class Month:
    """The jobs of a host, and what happened.

    Attributes:
        killed: job -> when.
        closed: GPU -> from when until when only the guest may take it.
    """

    def __init__(self, number: int, seed: int, speed: float) -> None:
        self.seconds, self.looks = MONTH / speed, max(LOOKS / speed, 0.05)
        self.jobs = jobs_of(number, random.Random(seed), self.seconds)
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
            if passed >= looked:
                looked = passed + self.looks
                gather()
            if plan and plan[0][0] * self.seconds <= passed:
                plan.pop(0)[1]()
            for number in KILLED:
                told = self.told(number)
                if number in running and len(told) == 2 and time.time() > float(told[0]) + self.jobs[number].length / 2:
                    self.killed[number] = time.time()
                    os.kill(running[number].pid, signal.SIGKILL)
            running = {number: one for number, one in running.items() if os.waitpid(one.pid, os.WNOHANG) == (0, 0)}
            time.sleep(0.002)

    def told(self, number: int) -> list[str]:
        """Return what a job has told: when it got its GPUs, which, and when it ended."""
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
            if claim is None or len(told) < (2 if job.number in self.killed else 3):
                log = Path(f"log.{job.number}").read_text()
                wrong.append(f"{job} is lost: it told {told}, the history {claim}; {log}")
                continue
            # One that is killed may just have ended.
            end = float(told[2]) if len(told) > 2 else self.killed[job.number]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--speed", type=float, default=1000.0, help="how many times faster than life (default 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of what is random (default 1)")
    options = parser.parse_args()
    if os.geteuid():
        parser.error("only root can start jobs of five users: use sudo")
    import_everything()
    with tempfile.TemporaryDirectory(prefix="safe-gpu-month-") as path:
        os.chmod(path, 0o1777)
        os.chdir(path)
        Path("policy.ini").write_text(POLICY)
        simulate("dgx-a100", f"{path}/state", SAFE_GPU_POLICY=f"{path}/policy.ini")
        month = Month(options.jobs, options.seed, options.speed)
        month.live()
        wrong = month.judge(options.speed)
        os.chdir("/")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
