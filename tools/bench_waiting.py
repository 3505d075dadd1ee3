#!/usr/bin/env python3
"""Measures waiting: the time to hand a GPU to the next waiter, and the cost of five hundred waiters.

    python3 tools/bench_waiting.py [handover] [waiters] [backfill] [memory] [--processes N] [--waiters N]
        [--seconds S] [--check]

handover  64 processes for 8 GPUs: from the release of a GPU to the next claim of it
waiters   500 processes wait for GPUs that do not become free: the time until all wait, and their processor time
backfill  the same with an idle GPU: all say for how long they hold it, too long to pass the first, who wants all GPUs
memory    the memory of a waiting process, minus that of a bare interpreter

Run it on an idle machine: the figures depend on the kernel's scheduler as much as on safe_gpu.
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
WORK = 0.05  # how long each claim is held, seconds


class Polled:
    """The usual solution by hand: a lock file for each GPU, all tried every 50 ms."""

    def __init__(self, directory: str) -> None:
        self._paths = [f"{directory}/{number}.lock" for number in range(GPUS)]

    def claim(self) -> str:
        while True:
            for path in self._paths:
                self._file = open(path, "w")  # noqa: SIM115 - open as long as the claim is held
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return path
                except BlockingIOError:
                    self._file.close()
            time.sleep(0.05)

    def release(self) -> None:
        self._file.close()


def gaps(claim: Callable[[], str], release: Callable[[], None], processes: int) -> list[float]:
    """Milliseconds from the start of each release until the next claim of the same GPU returns, sorted."""

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
            return safe_gpu.claim_gpus(timeout=600, affinity=None, hold_for=60).gpus[0].uuid

        warm_up()
        own = gaps(claim, safe_gpu.release_gpus, options.processes)
        polled = Polled(directory)
        other = gaps(polled.claim, polled.release, options.processes)
    name = f"hand-over, {options.processes} for {GPUS}"
    rival = "a lock file per GPU, tried every 50 ms"
    return [
        Row(f"{name}: median", median(own), median(other), rival, budget=20.0),
        Row(f"{name}: worst", own[-1], other[-1], rival, budget=100.0),
    ]


@contextmanager
def all_held(number: int = GPUS) -> Iterator[None]:
    """Have another process hold GPUs. This process cannot, because its children would not wait for it."""
    import safe_gpu

    def hold(line: Any) -> None:
        safe_gpu.claim_gpus(number, affinity=None, hold_for=3600)
        line.send("holds")
        line.recv()

    holder = Worker(hold)
    holder.line.recv()
    try:
        yield
    finally:
        holder.kill()


def warm_up() -> None:
    """Import all modules in this process before it forks, also those for waiting behind others."""
    import safe_gpu
    from safe_gpu.coordination.files import state_dir_path

    with all_held():
        ahead = Worker(lambda line: safe_gpu.claim_gpus(timeout=60, affinity=None))
        while not waiting(Path(state_dir_path(), "queue")):
            time.sleep(0.001)
        try:
            safe_gpu.claim_gpus(timeout=0.05, affinity=None)
        except safe_gpu.ClaimTimeout:
            pass
    os.waitpid(ahead.pid, 0)
    ahead.line.close()
    safe_gpu.claim_gpus(affinity=None)
    safe_gpu.release_gpus()


def processor_time(pids: list[int]) -> float:
    """Processor time of all threads of these processes, seconds."""
    total = 0
    for pid in pids:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                total += int(file.read().split()[0])
    return total / 1e9


def settled_processor_time(pids: list[int]) -> float:
    """:func:`processor_time` after the processes have finished their start-up."""
    before = processor_time(pids)
    while True:
        time.sleep(1.0)
        now = processor_time(pids)
        if now - before < 0.1:
            return now
        before = now


def waiting(queue: Path) -> int:
    """How many tickets there are."""
    return sum(name.endswith(".ticket") for name in os.listdir(queue)) if queue.is_dir() else 0


def cost_of(wait: Callable[[Any], None], number: int, queue: Path, seconds: float) -> tuple[float, float]:
    """The time until all these waiters wait, in seconds, and the share of a core that they take together then."""
    there = waiting(queue)
    workers, fired = start_all(wait, number)
    try:
        while waiting(queue) < there + number:
            time.sleep(0.01)
        arrival = time.monotonic() - fired
        pids = [worker.pid for worker in workers]
        before, began = settled_processor_time(pids), time.monotonic()
        time.sleep(seconds)
        return arrival, (processor_time(pids) - before) / (time.monotonic() - began)
    finally:
        for worker in workers:
            worker.kill()


def bench_backfill(options: argparse.Namespace) -> list[Row]:
    import safe_gpu

    number = options.waiters
    with simulated_host() as directory:
        warm_up()
        queue = Path(directory, "state", "queue")

        def first(line: Any) -> None:
            safe_gpu.claim_gpus(GPUS, timeout=3600, affinity=None, hold_for=60)

        def wait(line: Any) -> None:
            safe_gpu.claim_gpus(timeout=3600, affinity=None, hold_for=7200)

        with all_held(GPUS - 1):
            head = Worker(first)
            try:
                while not waiting(queue):
                    time.sleep(0.01)
                _, share = cost_of(wait, number, queue, options.seconds)
            finally:
                head.kill()
    return [
        Row(f"{number} waiters, an idle GPU, share of a core", share * 100, None, unit="%", budget=2.0),
    ]


def bench_waiters(options: argparse.Namespace) -> list[Row]:
    import safe_gpu

    number = options.waiters
    with simulated_host() as directory:
        warm_up()
        queue = Path(directory, "state", "queue")

        def wait(line: Any) -> None:
            safe_gpu.claim_gpus(timeout=3600, affinity=None, hold_for=600)

        def wait_once(line: Any) -> None:
            try:
                safe_gpu.claim_gpus(timeout=1, affinity=None)
            except safe_gpu.NotEnoughGpusError:
                pass

        with all_held():
            for worker in start_all(wait_once, number)[
                0
            ]:  # warm-up: a virtual machine allocates memory slowly the first time
                os.waitpid(worker.pid, 0)
                worker.line.close()
            arrival, share = cost_of(wait, number, queue, options.seconds)
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
            other = (processor_time(pids) - before) / (time.monotonic() - began)
        finally:
            for worker in workers:
                worker.kill()
    return [
        Row(f"{number} waiters arrive at once", arrival, None, unit="s", budget=3.0),
        Row(f"{number} waiters, share of a core", share * 100, other * 100, "tried every 50 ms", "%", budget=2.0),
    ]


WAIT = "import safe_gpu; safe_gpu.claim_gpus(timeout=None, affinity=None)"
GIVE_UP = "import safe_gpu; safe_gpu.claim_gpus(timeout=0.1, affinity=None)"
BARE = "import time; print(flush=True); time.sleep(3600)"


def memory_of(pid: int, key: str) -> float:
    """MiB, from the line ``key`` of /proc/PID/smaps_rollup."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        sizes = {line.split()[0]: int(line.split()[1]) for line in file if line.endswith("kB\n")}
    return sizes[key] / 1024


def bench_memory(options: argparse.Namespace) -> list[Row]:
    with simulated_host() as directory:
        warm_up()
        queue = Path(directory, "state", "queue")
        with all_held():
            # A first process compiles all modules, so that the measured processes do not.
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


PARTS = {"handover": bench_handover, "waiters": bench_waiters, "backfill": bench_backfill, "memory": bench_memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--processes", type=int, default=64, metavar="N", help="for handover (default: %(default)s)")
    parser.add_argument("--waiters", type=int, default=500, metavar="N", help="for waiters (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="how long waiters are measured (default: %(default)s)"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is missed")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose among {', '.join(PARTS)}")
    rows = [row for part in options.parts or PARTS for row in PARTS[part](options)]
    return 1 if not print_table(rows) and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
