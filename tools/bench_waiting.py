#!/usr/bin/env python3
"""What waiting costs: how fast a GPU passes from hand to hand, and what five hundred waiters take.

    python3 tools/bench_waiting.py [handover] [waiters] [memory] [--processes N] [--waiters N] [--seconds S] [--check]

handover  64 processes for 8 GPUs: from one claim's release to the next one's start on that GPU
waiters   500 processes wait for GPUs that do not come free: arrival of all at once, and the processor time they take
memory    what a waiting process takes over a bare interpreter

Run it at a quiet moment: it times the scheduler of the kernel as much as anything else.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench_support import Row, Worker, environment, print_table, simulated_host, start_all

GPUS = 8
WORK = 0.05  # how long each claim is used, seconds


class Polled:
    """What people write: a lock file for each GPU, and a look at all of them every 50 ms."""

    def __init__(self, directory: str) -> None:
        self._paths = [f"{directory}/{number}.lock" for number in range(GPUS)]

    def claim(self) -> str:
        while True:
            for path in self._paths:
                self._file = open(path, "w")  # noqa: SIM115 - held for as long as the claim
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return path
                except BlockingIOError:
                    self._file.close()
            time.sleep(0.05)

    def release(self) -> None:
        self._file.close()


def gaps(claim: Callable[[], str], release: Callable[[], None], processes: int) -> list[float]:
    """Milliseconds from each release (its beginning) to the next claim of the same GPU (its return), sorted."""

    def use(line: Any) -> None:
        gpu = claim()
        began = time.monotonic()
        time.sleep(WORK)
        ended = time.monotonic()
        release()
        line.send((gpu, began, ended))

    workers, _ = start_all(use, processes)
    uses = sorted((worker.line.recv() for worker in workers), key=lambda use: use[1])
    for worker in workers:
        os.waitpid(worker.pid, 0)
        worker.line.close()
    last: dict[str, float] = {}
    found = []
    for gpu, began, ended in uses:
        if gpu in last:
            found.append((began - last[gpu]) * 1e3)
        last[gpu] = ended
    return sorted(found)


def bench_handover(options: argparse.Namespace) -> list[Row]:
    import safe_gpu

    with simulated_host() as directory:

        def claim() -> str:
            return safe_gpu.claim_gpus(timeout=600, affinity=None).gpus[0].uuid

        warm_up()
        ours = gaps(claim, safe_gpu.release_gpus, options.processes)
        polled = Polled(directory)
        theirs = gaps(polled.claim, polled.release, options.processes)
    name = f"hand-over, {options.processes} for {GPUS}"
    rival = "a lock file per GPU, tried every 50 ms"
    return [
        Row(f"{name}: median", median(ours), median(theirs), rival, budget=20.0),
        Row(f"{name}: worst", ours[-1], theirs[-1], rival, budget=100.0),
    ]


@contextmanager
def all_held() -> Iterator[None]:
    """A process holds every GPU; not this one, whose children would not wait for their parent."""
    import safe_gpu

    def hold(line: Any) -> None:
        safe_gpu.claim_gpus(GPUS, affinity=None)
        line.send("holds")
        line.recv()

    holder = Worker(hold)
    holder.line.recv()
    try:
        yield
    finally:
        holder.kill()


def warm_up() -> None:
    """Have everything imported in this process before it forks, the parts for waiting too."""
    import safe_gpu

    with all_held():
        try:
            safe_gpu.claim_gpus(timeout=0.05, affinity=None)
        except safe_gpu.ClaimTimeout:
            pass
    safe_gpu.claim_gpus(affinity=None)
    safe_gpu.release_gpus()


def processor_time(pids: list[int]) -> float:
    """Seconds that all threads of these processes have run."""
    total = 0
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                total += int(file.read().split()[0])
    return total / 1e9


def settled_processor_time(pids: list[int]) -> float:
    """The same, once the processes have stopped getting ready."""
    before = processor_time(pids)
    while True:
        time.sleep(1.0)
        now = processor_time(pids)
        if now - before < 0.1:
            return now
        before = now


def bench_waiters(options: argparse.Namespace) -> list[Row]:
    import safe_gpu

    number = options.waiters
    with simulated_host() as directory:
        warm_up()
        queue = Path(directory, "state", "queue")

        def wait(line: Any) -> None:
            safe_gpu.claim_gpus(timeout=3600, affinity=None)

        def wait_once(line: Any) -> None:
            try:
                safe_gpu.claim_gpus(timeout=1, affinity=None)
            except safe_gpu.NotEnoughGpusError:
                pass

        with all_held():
            for worker in start_all(wait_once, number)[0]:  # a virtual machine gives a first crowd its memory slowly
                os.waitpid(worker.pid, 0)
                worker.line.close()
            workers, fired = start_all(wait, number)
            try:
                while sum(name.endswith(".ticket") for name in os.listdir(queue)) < number:
                    time.sleep(0.01)
                arrival = time.monotonic() - fired
                pids = [worker.pid for worker in workers]
                before, began = settled_processor_time(pids), time.monotonic()
                time.sleep(options.seconds)
                share = (processor_time(pids) - before) / (time.monotonic() - began)
            finally:
                for worker in workers:
                    worker.kill()
        polled = Polled(directory)

        def poll(line: Any) -> None:
            polled.claim()

        held = [Polled(directory) for _ in range(GPUS)]
        for one in held:
            one.claim()
        workers, _ = start_all(poll, number)
        try:
            time.sleep(2.0)
            pids = [worker.pid for worker in workers]
            before, began = processor_time(pids), time.monotonic()
            time.sleep(min(5.0, options.seconds))
            theirs = (processor_time(pids) - before) / (time.monotonic() - began)
        finally:
            for worker in workers:
                worker.kill()
    return [
        Row(f"{number} waiters arrive at once", arrival, None, unit="s", budget=3.0),
        Row(f"{number} waiters, share of a core", share * 100, theirs * 100, "tried every 50 ms", "%", budget=2.0),
    ]


WAIT = "import safe_gpu; safe_gpu.claim_gpus(timeout=None, affinity=None)"
GIVE_UP = "import safe_gpu; safe_gpu.claim_gpus(timeout=0.1, affinity=None)"
BARE = "import time; print(flush=True); time.sleep(3600)"


def memory_of(pid: int, key: str) -> float:
    """MiB, by one line of /proc/PID/smaps_rollup."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        sizes = {line.split()[0]: int(line.split()[1]) for line in file if line.endswith("kB\n")}
    return sizes[key] / 1024


def bench_memory(options: argparse.Namespace) -> list[Row]:
    with simulated_host() as directory:
        warm_up()
        queue = Path(directory, "state", "queue")
        with all_held():
            # One that gives up first, so that none of those measured has compiled what it imports.
            subprocess.run([sys.executable, "-c", GIVE_UP], env=environment(), stderr=subprocess.DEVNULL)
            waiters = [subprocess.Popen([sys.executable, "-c", WAIT], env=environment()) for _ in range(5)]
            bare = [
                subprocess.Popen([sys.executable, "-c", BARE], env=environment(), stdout=subprocess.PIPE)
                for _ in range(5)
            ]
            try:
                for one in bare:
                    assert one.stdout is not None
                    one.stdout.readline()
                while len(list(queue.glob("[0-9]*.ticket"))) < len(waiters):
                    time.sleep(0.01)
                settled_processor_time([waiter.pid for waiter in waiters])
                rows = [
                    Row(
                        f"memory of a waiter, {name}",
                        median(memory_of(one.pid, key) for one in waiters),
                        median(memory_of(one.pid, key) for one in bare),
                        "a bare interpreter that sleeps",
                        "MiB",
                        budget=15.0,
                        what="over",
                    )
                    for name, key in (("resident", "Rss:"), ("its share", "Pss:"))
                ]
            finally:
                for one in (*waiters, *bare):
                    one.kill()
                    one.wait()
    return rows


PARTS = {"handover": bench_handover, "waiters": bench_waiters, "memory": bench_memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--processes", type=int, default=64, metavar="N", help="for handover (default: %(default)s)")
    parser.add_argument("--waiters", type=int, default=500, metavar="N", help="for waiters (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="how long waiters are watched (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 where a budget is missed")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose among {', '.join(PARTS)}")
    rows = [row for part in options.parts or PARTS for row in PARTS[part](options)]
    return 1 if not print_table(rows) and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
