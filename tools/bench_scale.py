#!/usr/bin/env python3
"""Measures how waiting, contention and status grow on one host, with plots in characters.

    python3 tools/bench_scale.py [waiters] [contention] [status] [--most N] [--seconds S] [--quick]

waiters     8, 16, ... 1,000 waiters, as memory allows: until all wait, the processor time that they take then, and the
            time from the release of a GPU to the next claim of it while all of them claim, hold for 50 ms and release
contention  claims and releases a second by 1, 2, ... 64 processes in a loop, beside a bare flock over poll and context
status      the state of a host with 16 GPUs and 0 to 1,000 waiters: in this process, and as `safe-gpu status --json`

Run it on an idle machine. GPUs are simulated, processes and locks are real.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench_claim import Bare
from bench_support import Worker, environment, milliseconds, run_time, simulated_host, start_all
from bench_waiting import all_held, cost_of, gaps, warm_up
from text_plot import plot

PER_WAITER = 15 << 20
"""Bytes that a waiter may need."""


def doubled(most: int, first: int = 1) -> list[int]:
    """``first``, twice that and so on, and ``most`` at the end."""
    found = []
    while first < most:
        found.append(first)
        first *= 2
    return [*found, most]


def room() -> int:
    """How many waiters three quarters of the free memory have room for."""
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:"))
    return int(free * 0.75) // PER_WAITER


def print_rows(heads: Sequence[str], rows: Sequence[Sequence[float]]) -> None:
    """A table of whole numbers and of numbers with some digits."""
    widths = [max(len(head), 8) for head in heads]
    print("  ".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True)))
    for row in rows:
        print("  ".join(f"{_text(value):>{width}}" for value, width in zip(row, widths, strict=True)))
    print()


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def bench_waiters(options: argparse.Namespace) -> None:
    import safe_gpu

    most = min(options.most, room())
    if most < options.most:
        print(f"{most} waiters are as many as the memory of this host has room for")
    rows: list[tuple[float, ...]] = []
    for number in doubled(most, first=min(8, most)):
        with simulated_host() as directory:
            warm_up()

            def wait(line: Any) -> None:
                safe_gpu.claim_gpus(timeout=3600, affinity=None)

            def claim() -> str:
                return safe_gpu.claim_gpus(timeout=3600, affinity=None).gpus[0].uuid

            with all_held():
                arrival, share = cost_of(wait, number, Path(directory, "state", "queue"), options.seconds)
            found = gaps(claim, safe_gpu.release_gpus, number + 8)
        rows.append((number, arrival * 1e3, share * 100, share * 1e6 / number, median(found), found[-1]))
    heads = ("waiters", "all wait (ms)", "CPU (% of a core)", "us/s each", "hand-over (ms)", "worst (ms)")
    print_rows(heads, rows)
    series = {
        "all wait": [(row[0], row[1]) for row in rows],
        "hand-over": [(row[0], row[4]) for row in rows],
        "its worst": [(row[0], row[5]) for row in rows],
    }
    print(plot(series, across="waiters", up="ms"), end="\n\n")
    print(plot({"all waiters": [(row[0], row[2]) for row in rows]}, across="waiters", up="% of a core"), end="\n\n")


def rate(once: Callable[[], None], processes: int, seconds: float) -> float:
    """How often a second these processes together do it."""

    def loop(line: Any) -> None:
        done, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            once()
            done += 1
        line.send(done)

    workers, fired = start_all(loop, processes)
    total = sum(worker.line.recv() for worker in workers)
    spent = time.monotonic() - fired
    for worker in workers:
        os.waitpid(worker.pid, 0)
        worker.line.close()
    return total / spent


def bench_contention(options: argparse.Namespace) -> None:
    import safe_gpu

    rows: list[tuple[float, ...]] = []
    with simulated_host() as directory:
        bare = Bare(directory)

        def own() -> None:
            safe_gpu.claim_gpus(timeout=600, affinity=None)
            safe_gpu.release_gpus()

        def other() -> None:
            while True:
                try:
                    bare.claim()
                    break
                except StopIteration:
                    pass  # no GPU is free: by hand there is no queue, so it tries again
            bare.release()

        warm_up()
        other()
        for number in doubled(min(64, options.most)):
            ours, theirs = rate(own, number, options.seconds), rate(other, number, options.seconds)
            rows.append((number, ours, theirs, theirs / ours))
    print_rows(("processes", "claims/s", "bare flock/s", "ratio"), rows)
    series = {"safe_gpu": [(row[0], row[1]) for row in rows], "bare flock": [(row[0], row[2]) for row in rows]}
    print(plot(series, across="processes for 8 GPUs", up="claims a second"), end="\n\n")


@contextmanager
def tickets(number: int) -> Iterator[None]:
    """So many processes with a ticket each, which sleep otherwise: as small as a waiter can be."""
    from safe_gpu.coordination.locks import HostLock
    from safe_gpu.coordination.queue import TicketRequest, Waiter
    from safe_gpu.drivers import opened_driver

    with opened_driver() as driver:
        uuids = frozenset(gpu.uuid for gpu in driver.snapshot().gpus)

    def stand(line: Any) -> None:
        waiter = Waiter(TicketRequest(1, uuids))
        with HostLock(None) as host:
            waiter.join(host)
        line.send("stands")
        line.recv()

    workers: list[Worker] = []
    try:
        for _ in range(number):
            workers.append(Worker(stand))
            workers[-1].line.recv()
        yield
    finally:
        for worker in workers:
            worker.kill()


def bench_status(options: argparse.Namespace) -> None:
    rows: list[tuple[float, ...]] = []
    with simulated_host("big-16"):
        from safe_gpu.status.gather import gather

        command = [sys.executable, "-m", "safe_gpu", "status", "--json"]
        for number in [0, *doubled(options.most, first=min(8, options.most))]:
            with all_held(16), tickets(number):
                assert len(gather().queue) == number
                inside = min(milliseconds(gather) for _ in range(options.repeat))
                (outside,) = run_time(command, repeat=max(2, options.repeat // 2))
            rows.append((number, inside, outside))
    print_rows(("waiters", "gather (ms)", "the command (ms)"), rows)
    series = {
        "gather": [(max(1, row[0]), row[1]) for row in rows],
        "the command": [(max(1, row[0]), row[2]) for row in rows],
    }
    print(plot(series, across="waiters (0 as 1) for 16 GPUs", up="ms"), end="\n\n")


PARTS = {"waiters": bench_waiters, "contention": bench_contention, "status": bench_status}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--most", type=int, default=1000, metavar="N", help="waiters at most (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each measurement (%(default)s)")
    parser.add_argument("--repeat", type=int, default=10, metavar="N", help="looks at the status (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="at most 4 processes, a tenth of a second each")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose among {', '.join(PARTS)}")
    if options.quick:
        options.most, options.seconds, options.repeat = 4, 0.1, 2
    os.environ.update(environment())
    for part in options.parts or PARTS:
        PARTS[part](options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
