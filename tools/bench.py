#!/usr/bin/env python3
"""Measures what safe_gpu costs, beside something simpler in the same run, and compares it with budgets.

    python3 tools/bench.py [PART ...] [--repeat N] [--processes N] [--waiters N] [--seconds S] [--quick] [--check]
                           [--against CHECKOUT] [--jobs N] [--job-seconds S]

import    `import safe_gpu` over a bare interpreter
claim     an uncontended claim and its release, warm, over a simulated driver
calls     what a claim of one GPU of eight calls, of NVML and of Python and C, with a fake NVML (needs a C compiler)
crowd     eight processes at once, one GPU each, until the last process has its GPU
run       `safe-gpu run -- true` and `status` over a Python that imports filelock, pynvml and argparse, and is `true`
handover  64 processes for 8 GPUs: from the release of a GPU to the next claim of it
together  eight GPUs are freed at once, for which 8 and 64 processes wait: until the first and the last are in other
          hands, with calls of NVML that take 0, 1, 5 and 20 ms, when their holder ends and when it releases them
head      how often who waits asks NVML, and how soon it sees what comes back; takes six minutes
waiters   500 processes wait for GPUs that do not become free: the time until all wait, their processor time,
          and what `safe-gpu status` takes beside them
memory    the memory of a process that waits with a fake NVML, minus that of a bare interpreter
herd      200 jobs start at once on eight GPUs and hold one for a second each: what a job computes before it has its
          GPU, and how much of the time the GPUs are used; takes two minutes

Figures of one process are the fastest of many runs, figures of crowds are medians. Run it on an idle machine: it
depends on the kernel's scheduler as much as on safe_gpu, and takes minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import math
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench_waits import (
    FAKES,
    HOLD,
    Program,
    SlowHost,
    calls_in_minutes,
    find_compiler,
    freed_together,
    seconds_until_seen,
    slow_host,
    wait_for_tickets,
)
from common import ROOT
from support.actor import Actor
from support.kernel import end_with_parent
from support.stage import HostDirectory, temporary_host

import safe_gpu
from safe_gpu.drivers.simulated import SimulatedDriver

GPUS = 8
WORK = 0.05  # how long each claim of the hand-over is held, seconds
FEW = ("PATH", "HOME", "LANG", "LD_LIBRARY_PATH")  # variables
FLOCK = "flock over poll and context"
Claim = Callable[[], AbstractContextManager[object]]


class Row(NamedTuple):
    """One line of the table: safe_gpu (``own``) and a rival, measured in turns in the same run.

    ``what`` selects the figure for the ``budget``: "over" (``own`` minus ``rival``), "ratio" or "own".
    """

    name: str
    own: float
    rival: float | None = None
    rival_name: str = ""
    unit: str = "ms"
    budget: float = math.inf
    what: str = "own"

    @property
    def figure(self) -> float:
        """What has a budget."""
        rival = self.rival or 0.0
        if self.what == "over":
            return self.own - rival
        if self.what == "ratio":
            return self.own / (rival or math.inf)
        return self.own

    @property
    def met(self) -> bool:
        """Whether it is within the budget."""
        return self.figure <= self.budget

    def __str__(self) -> str:
        rival = "-"
        if self.rival is not None:
            rival = f"{self.rival:.2f}"
        title = f"{self.name} ({self.unit})"
        line = f"{title:44} {self.own:9.2f} {rival:>9}"
        if self.budget < math.inf:
            line += f"  {self._told_of_budget()}"
        if self.rival_name:
            line += f"  ({self.rival_name})"
        return line

    def _told_of_budget(self) -> str:
        """How the figure compares with the budget."""
        verdict = "met" if self.met else "MISSED"
        if self.what == "over":
            return f"{self.figure:+.2f} of at most {self.budget:+g} {self.unit}: {verdict}"
        unit = "times" if self.what == "ratio" else self.unit
        return f"{self.figure:.2f} of at most {self.budget:g} {unit}: {verdict}"


# Hosts, processes and clocks


def environment(**more: str) -> dict[str, str]:
    """os.environ with this package first in PYTHONPATH, and more."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@contextmanager
def simulated_host() -> Iterator[HostDirectory]:
    """A simulated host in a fresh directory, for this process and its children."""
    with temporary_host("bench", "dgx-a100") as host:
        host.enter(SAFE_GPU_TEST_SIMULATED="1")
        yield host


@contextmanager
def crowd(work: Callable[[Connection[Any, Any]], object], number: int) -> Iterator[tuple[list[Actor], float]]:
    """Fork ``number`` processes and start them with one signal; yields them and the time of the signal.

    They are killed at the end.
    """
    gun, trigger = os.pipe()

    def wait_for_gun(line: Connection[Any, Any]) -> None:
        end_with_parent(signal.SIGKILL)  # one that waits for a GPU does not see that nobody listens any more
        os.close(trigger)
        os.read(gun, 1)
        work(line)

    gc.collect()
    gc.freeze()  # or the garbage collector of each child would copy memory pages
    workers = [Actor(wait_for_gun) for _ in range(number)]
    os.close(gun)
    fired = time.monotonic()
    os.close(trigger)
    try:
        yield workers, fired
    finally:
        for worker in workers:
            worker.end()


def milliseconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def in_turns(repeat: int, *works: Callable[[], Any]) -> list[list[float]]:
    """Sorted milliseconds of each, which run in turns, so that load affects all of them; the first ones warm up."""
    times: list[list[float]] = [[] for _ in works]
    for number in range(repeat + 3):
        for place, work in enumerate(works):
            took = milliseconds(work)
            if number >= 3:
                times[place].append(took)
    return [sorted(found) for found in times]


def run_times(repeat: int, *commands: Sequence[str]) -> list[float]:
    """Shortest wall time of each command in ms."""
    run = partial(subprocess.run, check=True, env=environment(), stdout=subprocess.DEVNULL)
    works = [partial(run, command) for command in commands]
    return [found[0] for found in in_turns(max(5, repeat), *works)]


# One claim


def bench_import(options: argparse.Namespace) -> list[Row]:
    bare, own = run_times(options.repeat, [sys.executable, "-c", "pass"], [sys.executable, "-c", "import safe_gpu"])
    return [Row("import safe_gpu", own, bare, "a bare interpreter", budget=25.0, what="over")]


@contextmanager
def by_hand(driver: SimulatedDriver, host: HostDirectory) -> Iterator[None]:
    """The usual solution: one lock file, held from the poll of the GPUs until the context exists."""
    with open(f"{host.path}/lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        free = next(gpu for gpu in driver.snapshot().gpus if not gpu.processes)
        os.environ["CUDA_VISIBLE_DEVICES"] = str(free.index)
        time.sleep(0)  # where a framework would start; costs 0.08 ms, and the budgets were set with it
        context = driver.occupy(free.uuid)
    yield
    context.close()
    del os.environ["CUDA_VISIBLE_DEVICES"]


def bench_claim(options: argparse.Namespace) -> list[Row]:
    def once(claim: Claim) -> None:
        with claim():
            pass

    with simulated_host() as host:
        plainly = partial(safe_gpu.claim_gpus, timeout=0, affinity=None)
        near = partial(safe_gpu.claim_gpus, timeout=0, affinity="node")
        rival = partial(by_hand, SimulatedDriver(host.preset), host)
        times = in_turns(20 * options.repeat, partial(once, plainly), partial(once, near), partial(once, rival))
    # The 10th percentile: the time without disturbance, but not a single lucky run.
    plain, bound, other = (found[len(found) // 10] for found in times)
    return [
        Row("claim and release", plain, other, FLOCK, budget=4.5, what="ratio"),
        Row("claim and release, by itself", plain, budget=3.0),
        Row("affinity='node' on top of that", bound - plain, budget=2.0),
    ]


# Claims twice; prints how many calls of NVML there were when each claim had its GPUs, and at its end.
TWICE = """
import os, types, safe_gpu
from safe_gpu.claim import polls
polls.RECENT = 1e9  # on a busy machine a poll may be old by the time it is used, and is taken again
def mark(said="lock released", *more, **options):
    if said == "lock released":
        print(len(open(os.environ["FAKE_GPU_DIR"] + "/calls").read().split()))
for _ in range(2):
    safe_gpu.claim_gpus(timeout=0, logger=types.SimpleNamespace(info=mark, warning=lambda *said: None))
    mark()
    safe_gpu.release_gpus()
"""

# Claims a GPU once it has looked at the GPUs; prints how many functions of Python and C the claim calls, without
# imports of other packages. The next run is to find nobody dead.
FIRST = """
import ctypes, filelock, logging, os, sys, safe_gpu
safe_gpu.claim_gpus, safe_gpu.get_free_gpus()
calls = []
sys.setprofile(lambda frame, event, argument: calls.append(event))
safe_gpu.claim_gpus(timeout=0)
sys.setprofile(None)
safe_gpu.release_gpus()
print(calls.count("call") + calls.count("c_call"), flush=True)
os._exit(0)
"""


def bench_calls(options: argparse.Namespace) -> list[Row]:
    if not has_fake_libraries():
        return []
    with slow_host() as host:
        env = host.environment(ROOT, host.another_driver("noted"))
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        told = subprocess.check_output([sys.executable, "-c", TWICE], env=env).split()
        taken, held, taken_again, held_again = [int(number) for number in told]
        # However busy the machine is; a claim looks at each variable.
        few = {name: value for name, value in env.items() if name in FEW or "PYTHON" in name or "GPU" in name}
        first = host.directory / "first.py"
        first.write_text(FIRST)
        for _ in range(2):  # the first time the package is compiled, and the state directory made
            calls = int(subprocess.check_output([sys.executable, first], env=few))
    return [
        Row("a first claim, of Python and C", calls, unit="calls"),
        Row("NVML in a first claim", held, unit="calls"),
        Row("NVML in a claim again", held_again - held, unit="calls"),
        Row("NVML once the GPUs are held", max(held - taken, held_again - taken_again), unit="calls"),
    ]


STATUS = "import sys; from safe_gpu.cli import main; sys.exit(main(['status', '--json']))"


def bench_run(options: argparse.Namespace) -> list[Row]:
    # The same as the console script.
    run = "import sys; from safe_gpu.cli import main; sys.argv = ['safe-gpu', 'run', '--', 'true']; sys.exit(main())"
    become = "import filelock, pynvml, argparse, os; os.execvp('true', ['true'])"
    commands = [[sys.executable, "-c", code] for code in (become, run, STATUS)]
    with simulated_host():
        bare, own, status = run_times(options.repeat, *commands)
    rival = "an interpreter that imports filelock, pynvml and argparse, and becomes true"
    return [
        Row("safe-gpu run -- true", own, bare, rival, budget=30.0, what="over"),
        Row("safe-gpu status", status, bare, rival, budget=50.0, what="over"),
    ]


# Crowds


def at_once(claim: Claim) -> float:
    """Milliseconds until the last of eight processes has its GPU; they hold their GPUs until all have one."""

    def race(line: Any) -> None:
        with claim():
            line.send(time.monotonic())
            line.recv()

    with crowd(race, GPUS) as (workers, fired):
        last = max(worker.hear() for worker in workers)
        for worker in workers:
            worker.tell()
            worker.join()
    return (last - fired) * 1e3


def bench_crowd(options: argparse.Namespace) -> list[Row]:
    own = []
    other = []
    with simulated_host() as host:
        claim = partial(safe_gpu.claim_gpus, timeout=600, affinity=None)
        rival = partial(by_hand, SimulatedDriver(host.preset), host)
        with claim():  # so that all modules are imported before the fork
            pass
        for _ in range(max(3, options.repeat)):
            own.append(at_once(claim))
            other.append(at_once(rival))
    return [Row("8 processes at once", median(own), median(other), FLOCK, budget=4.5, what="ratio")]


def bench_handover(options: argparse.Namespace) -> list[Row]:
    def use(line: Any) -> None:
        with safe_gpu.claim_gpus(timeout=600, affinity=None, hold_for=60) as owner:
            began = time.monotonic()
            time.sleep(WORK)
            said = owner.devices_taken, began, time.monotonic()
        line.send(said)

    with simulated_host() as host:
        warm_up(host)
        with crowd(use, options.processes) as (workers, _):
            uses = sorted(worker.hear() for worker in workers)
    # From the start of each release until the next claim of the same GPU returns.
    gaps = [(began - end) * 1e3 for (gpu, _, end), (same, began, _) in pairwise(uses) if gpu == same]
    name = f"hand-over, {options.processes} for {GPUS}"
    return [Row(f"{name}: median", median(gaps), budget=20.0), Row(f"{name}: worst", max(gaps), budget=300.0)]


def bench_together(options: argparse.Namespace) -> Iterator[Row]:
    crowds: tuple[int, ...] = (8, 64)
    delays: tuple[int, ...] = (0, 1, 5, 20)
    if options.quick:
        crowds = (8,)
        delays = (5,)
    for call_ms in delays:
        for waiters in crowds:
            for by_release in (False, True):
                yield from together(options, waiters, call_ms, by_release=by_release)


def together(options: argparse.Namespace, waiters: int, call_ms: int, *, by_release: bool) -> list[Row]:
    """Rows of one case, in turns with the other checkout."""
    firsts: list[list[float]] = [[] for _ in options.checkouts]
    lasts: list[list[float]] = [[] for _ in options.checkouts]
    for _ in range(min(options.repeat, 3)):
        for number, checkout in enumerate(options.checkouts):
            first, last = freed_together(checkout, waiters, call_ms, by_release=by_release)
            firsts[number].append(first)
            lasts[number].append(last)
    first_of_each = [median(found) for found in firsts]  # this one, and the rival if there is one
    last_of_each = [median(found) for found in lasts]
    ratio = last_of_each[0] / first_of_each[0]
    name = f"{waiters} wait, {call_ms} ms, {'release' if by_release else 'end'}"
    last_budget = 0.3 if call_ms == 5 else math.inf
    ratio_budget = 1.5 if call_ms >= 5 else math.inf
    return [
        Row(f"{name}: first", *first_of_each, unit="s"),
        Row(f"{name}: last", *last_of_each, unit="s", budget=last_budget),
        Row(f"{name}: last / first", ratio, unit="times", budget=ratio_budget),
    ]


BEHIND = ("claims", "strangers", "a ticket")
SEEN = ("lost GPU", "MIG instance", "end of a stranger", "end of a hidden stranger")


def bench_head(options: argparse.Namespace) -> list[Row]:
    rows = []
    minutes = []
    seconds = []
    with ThreadPoolExecutor(len(BEHIND)) as pool:  # they sleep nearly all the time
        for checkout in options.checkouts:
            minutes.append(list(pool.map(partial(calls_in_minutes, checkout), BEHIND)))
        for checkout in options.checkouts:
            seconds.append(list(pool.map(partial(seconds_until_seen, checkout), SEEN)))
    for number, behind in enumerate(BEHIND):
        for minute, name in enumerate(("first minute", "next minute")):
            counts = [float(found[number][minute]) for found in minutes]
            rows.append(Row(f"behind {behind}, {name}", *counts, unit="calls", budget=600.0))
    for number, what in enumerate(SEEN):
        budget = 2.0 if what == "end of a stranger" else 10.0
        rows.append(Row(f"{what} is seen after", *(found[number] for found in seconds), unit="s", budget=budget))
    return rows


@contextmanager
def held(number: int = GPUS) -> Iterator[None]:
    """Have another process hold GPUs. This process cannot, because its children would not wait for it."""

    def hold(line: Any) -> None:
        safe_gpu.claim_gpus(number, affinity=None, hold_for=3600)
        line.send("holds")
        line.recv()

    with crowd(hold, 1) as ([holder], _):
        holder.hear()
        yield


def warm_up(host: HostDirectory) -> None:
    """Import all modules in this process before it forks, also those for waiting behind others."""
    with held():
        ahead = Actor(lambda line: safe_gpu.claim_gpus(timeout=60, affinity=None))
        wait_for_tickets(Path(host.state), 1)
        with suppress(safe_gpu.ClaimTimeout):
            safe_gpu.claim_gpus(timeout=0.05, affinity=None)
    ahead.end()
    safe_gpu.claim_gpus(affinity=None).release_gpus()


def processor_time(pids: list[int]) -> float:
    """Processor time of all threads of these processes, seconds."""
    nanoseconds = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def settle(pids: list[int]) -> None:
    """Return when the processes have finished their start-up; those that never rest are given half a minute."""
    before = -math.inf
    now = processor_time(pids)
    for _ in range(30):
        if now - before <= 0.1:
            return
        time.sleep(1.0)
        before = now
        now = processor_time(pids)


def bench_waiters(options: argparse.Namespace) -> list[Row]:
    number = options.waiters or 500

    def wait(line: Any) -> None:
        safe_gpu.claim_gpus(timeout=3600, affinity=None, hold_for=600)

    def wait_once(line: Any) -> None:
        with suppress(safe_gpu.NotEnoughGpusError):
            safe_gpu.claim_gpus(timeout=1, affinity=None)

    with simulated_host() as host:
        warm_up(host)
        with held():
            with crowd(wait_once, number) as (workers, _):  # a virtual machine allocates memory slowly the first time
                for worker in workers:
                    worker.join()
            with crowd(wait, number) as (workers, fired):
                wait_for_tickets(Path(host.state), number)
                arrival = time.monotonic() - fired
                pids = [worker.pid for worker in workers]
                settle(pids)
                before = processor_time(pids)
                began = time.monotonic()
                time.sleep(options.seconds)
                share = 100 * (processor_time(pids) - before) / (time.monotonic() - began)
                (status,) = run_times(5, [sys.executable, "-c", STATUS])
    return [
        Row(f"{number} waiters arrive at once", arrival, unit="s", budget=3.0),
        Row(f"{number} waiters, share of a core", share, unit="%", budget=2.0),
        Row(f"safe-gpu status beside {number} waiters", status, budget=300.0),
    ]


def memory_of(pid: int) -> float:
    """MiB of memory that the process has in use, shared pages by their share."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kib = re.findall(r"^Pss: +(\d+) kB$", text, re.MULTILINE)
    return int(kib[0]) / 1024


WAIT = "import safe_gpu; safe_gpu.claim_gpus(timeout=None, affinity=None)"
SLEEP = "import time; time.sleep(3600)"


def bench_memory(options: argparse.Namespace) -> list[Row]:
    if not has_fake_libraries():
        return []
    number = options.waiters or 5
    with slow_host() as host, Program(host, ROOT, HOLD, GPUS) as holder:
        holder.hear()
        with ExitStack() as ending:
            waiters = [ending.enter_context(Program(host, ROOT, WAIT)) for _ in range(number)]
            host.wait_for_tickets(number)
            own = memory_of_each(waiters)
        with ExitStack() as ending:
            sleepers = [ending.enter_context(Program(host, ROOT, SLEEP)) for _ in range(number)]
            bare = memory_of_each(sleepers)
    return [Row("memory of a waiter", own, bare, "a bare interpreter that sleeps", "MiB", budget=20.0, what="over")]


def memory_of_each(programs: Sequence[Program]) -> float:
    """Median of MiB that these have in use, once they have finished their start-up."""
    pids = [program.pid for program in programs]
    settle(pids)
    return median(memory_of(pid) for pid in pids)


def has_fake_libraries() -> bool:
    """Whether the fake NVML can be compiled; if not, it says so."""
    if find_compiler() is not None and FAKES.is_dir():
        return True
    print("left out: the fake NVML needs a C compiler and tests/fakes")
    return False


# The same as the console script.
RUN = "import sys; from safe_gpu.cli import main; sys.exit(main(['run', '--', *sys.argv[1:]]))"

# What a job does before it has a GPU, each with all that stands before it.
STEPS = {
    "a job: the interpreter": "import os; os.execvp('true', ['true'])",
    "a job: filelock": "import filelock, os; os.execvp('true', ['true'])",
    "a job: pynvml": "import filelock, pynvml, os; os.execvp('true', ['true'])",
    "a job: safe_gpu": "import sys; from safe_gpu.cli import main; sys.exit(main(['run', '--', 'true']))",
}


def processor_milliseconds(command: Sequence[str], host: SlowHost) -> float:
    """Processor time that a process takes until its end."""
    before = seconds_of_children()
    env = host.environment(ROOT, host.directory)
    subprocess.run(command, env=env, cwd=host.directory, stderr=subprocess.DEVNULL, check=True)
    return (seconds_of_children() - before) * 1e3


def seconds_of_children() -> float:
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def seconds_of_herd(host: SlowHost, commands: Sequence[Sequence[str]]) -> float:
    """Seconds until the last of these processes has ended, which start at once."""
    env = host.environment(ROOT, host.directory)
    with ExitStack() as ending:
        began = time.monotonic()
        jobs = []
        for command in commands:
            job = subprocess.Popen(command, env=env, cwd=host.directory, stderr=subprocess.DEVNULL)
            ending.enter_context(job)
            ending.callback(job.kill)
            jobs.append(job)
        for job in jobs:
            if job.wait() != 0:
                raise subprocess.CalledProcessError(job.returncode, job.args)
        return time.monotonic() - began


def bench_herd(options: argparse.Namespace) -> Iterator[Row]:
    if not has_fake_libraries():
        return
    with slow_host() as host:
        yield from steps_of_a_job(host, options.repeat)
        hold = ["sleep", str(options.job_seconds)]
        claims = [[sys.executable, "-c", RUN, *hold] for _ in range(options.jobs)]
        own = seconds_of_herd(host, claims)
        locks = [["flock", f"{host.directory}/lock-{number % GPUS}", *hold] for number in range(options.jobs)]
        other = seconds_of_herd(host, locks)
    used = 100 * options.jobs * options.job_seconds / GPUS
    rival = "flock(1) of a GPU that each job is given beforehand"
    yield Row(f"{options.jobs} jobs at once: GPUs are used", used / own, used / other, rival, unit="%")


def steps_of_a_job(host: SlowHost, repeat: int) -> list[Row]:
    """What each step of a job computes beyond the one before."""
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for _ in range(repeat + 1):  # the first time the package is compiled, and the state directory made
        for name, code in STEPS.items():
            times[name].append(processor_milliseconds([sys.executable, "-c", code], host))
    rows = []
    before = 0.0
    for name, found in times.items():
        fastest = min(found)
        rows.append(Row(name, fastest - before, unit="ms of CPU"))
        before = fastest
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], Iterable[Row]]] = {
    "import": bench_import,
    "claim": bench_claim,
    "calls": bench_calls,
    "run": bench_run,
    "crowd": bench_crowd,
    "handover": bench_handover,
    "together": bench_together,
    "head": bench_head,
    "waiters": bench_waiters,
    "memory": bench_memory,
    "herd": bench_herd,
}

TAKE_MINUTES = ("together", "head", "herd")  # left out by --quick


def main() -> int:
    options = options_of_bench()
    print(f"{'':44} {'safe_gpu':>9} {'rival':>9}  budget", flush=True)
    all_met = True
    for part in options.parts:
        for row in PARTS[part](options):
            print(row, flush=True)
            all_met = all_met and row.met
    return 1 if options.check and not all_met else 0


def options_of_bench() -> argparse.Namespace:
    """The options of the command line, with the ``checkouts`` that are compared, and all ``parts`` if none is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="(default: all)")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="repetitions (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=64, metavar="N", help="for handover (default: %(default)s)")
    parser.add_argument("--waiters", type=int, metavar="N", help="how many (default: 500, and 5 for memory)")
    parser.add_argument("--jobs", type=int, default=200, metavar="N", help="of the herd (default: %(default)s)")
    parser.add_argument("--job-seconds", type=float, default=1.0, metavar="S", help="of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="of each measurement of waiters")
    parser.add_argument(
        "--quick", action="store_true", help="few repetitions, few processes; without what takes minutes"
    )
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="of together and head: the rival")
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is missed")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose among {', '.join(PARTS)}")
    if not options.parts:
        options.parts = [part for part in PARTS if not (options.quick and part in TAKE_MINUTES)]
    if options.quick:
        options.repeat = 1
        options.processes = 10
        options.waiters = 3
        options.seconds = 0.1
    options.checkouts = [ROOT]
    if options.against is not None:
        options.checkouts.append(options.against.resolve())
    return options


if __name__ == "__main__":
    sys.exit(main())
