#!/usr/bin/env python3
"""Measures the time of a claim, compared with a named rival in the same run.

    python3 tools/bench_claim.py [import] [claim] [calls] [crowd] [slow] [run] [--repeat N] [--older DIR] [--check]

import  `import safe_gpu` over a bare interpreter
claim   an uncontended claim and its release, warm, over a simulated driver
calls   the calls of NVML in a claim of one GPU of eight, counted with a fake NVML (needs a C compiler)
crowd   eight processes at once, one GPU each, until the last process has its GPU
slow    the same where a context takes two seconds
run     `safe-gpu run -- true` over an interpreter that imports filelock, pynvml and argparse and becomes `true`

Figures of one process are the fastest of many runs, figures of crowds are medians. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench_support import (
    Row,
    environment,
    fake_nvml_host,
    milliseconds,
    print_table,
    run_time,
    simulated_host,
    start_all,
)

CROWD = 8


def best(times: list[float]) -> float:
    """The 10th percentile: the time without disturbance, but not a single lucky run."""
    return sorted(times)[len(times) // 10]


def bench_import(repeat: int, older: str | None) -> list[Row]:
    bare, own = run_time(
        [sys.executable, "-c", "pass"], [sys.executable, "-c", "import safe_gpu"], repeat=max(5, repeat)
    )
    return [Row("import safe_gpu", own, bare, "a bare interpreter", budget=25.0, what="over")]


class Bare:
    """The usual solution by hand: one lock file, held from the poll of the GPUs until the context exists."""

    def __init__(self, directory: str, delay: float = 0.0) -> None:
        from safe_gpu.drivers.simulated import SimulatedDriver

        self._driver = SimulatedDriver("dgx-a100")
        self._path = f"{directory}/bare.lock"
        self._delay = delay
        self._context: Any = None

    def claim(self) -> None:
        with open(self._path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            free = next(gpu for gpu in self._driver.snapshot().gpus if not gpu.processes)
            os.environ["CUDA_VISIBLE_DEVICES"] = str(free.index)
            time.sleep(self._delay)
            self._context = self._driver.occupy(free.uuid)

    def release(self) -> None:
        self._context.close()
        del os.environ["CUDA_VISIBLE_DEVICES"]


class Untimed:
    """Sums up the time that is spent in the simulated driver and its placeholder, to be subtracted."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> Untimed:
        from safe_gpu.drivers.simulated import SimulatedContext, SimulatedDriver, SimulatedPlaceholder

        self._kept: list[tuple[type, str, Any]] = []
        for owner, name in (
            (SimulatedDriver, "__init__"),
            (SimulatedDriver, "snapshot"),
            (SimulatedDriver, "usage"),
            (SimulatedPlaceholder, "__call__"),
            (SimulatedContext, "close"),
        ):
            self._kept.append((owner, name, getattr(owner, name)))
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *exc: object) -> None:
        for owner, name, function in self._kept:
            setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def bench_claim(repeat: int, older: str | None) -> list[Row]:
    import safe_gpu

    def claim(affinity: str | None) -> None:
        safe_gpu.claim_gpus(timeout=0, affinity=affinity)
        safe_gpu.release_gpus()

    with simulated_host() as directory:
        bare = Bare(directory)

        def rival() -> None:
            bare.claim()
            bare.release()

        measured: list[Callable[[], None]] = [lambda: claim(None), lambda: claim("node"), rival]
        times: list[list[float]] = [[], [], []]
        alone: list[list[float]] = [[], []]
        for number in range(20 * repeat + 3):
            for work, found in zip(measured, times, strict=True):
                found.append(milliseconds(work))
            for affinity, without in zip((None, "node"), alone, strict=True):
                with Untimed() as untimed:
                    whole = milliseconds(lambda affinity=affinity: claim(affinity))
                without.append(whole - untimed.seconds * 1e3)
            if number == 2:  # the first runs import modules and create files
                for found in (*times, *alone):
                    found.clear()
        plain, bound, other = map(best, times)
        plain_alone, bound_alone = map(best, alone)
    rows = [
        Row("claim and release, all of it", plain, other, "flock held over poll and context", budget=4.5, what="ratio"),
        Row("the same without driver and placeholder", plain_alone, None, budget=3.0),
        Row("affinity='node' on top of that", bound_alone - plain_alone, None, budget=2.0),
        Row("with affinity='node', all of it", bound, other, "flock held over poll and context"),
    ]
    if older:
        rows.append(Row("claim and release, all of it", plain, time_of_older(older, repeat), "safe-gpu 2.0.0"))
    return rows


# Claims twice. Prints the time and the number of NVML calls at the start of each claim, when its leases are held, and
# at its end.
TWICE = """
import json, logging, os, time
import safe_gpu
from safe_gpu.claim import view as host_view, owner
owner._STALE = host_view._RECENT = 1e9  # on a busy machine a poll may be old by the time it is used, and is taken again
log = os.environ["FAKE_GPU_DIR"] + "/calls"
marks = []
def mark():
    marks.append((time.perf_counter(), len(open(log).read().split()) if os.path.exists(log) else 0))
class Leased(logging.Handler):
    def emit(self, record):
        if record.getMessage() == "lock released":
            mark()
logger = logging.getLogger("safe_gpu")
logger.setLevel(logging.INFO)
logger.addHandler(Leased())
for _ in range(2):
    mark()
    safe_gpu.claim_gpus(timeout=0)
    mark()
    safe_gpu.release_gpus()
print(json.dumps(marks))
"""


def bench_calls(repeat: int, older: str | None) -> list[Row]:
    with fake_nvml_host() as host:
        if host is None:
            print("driver calls: they are counted with a fake NVML, which needs a C compiler and tests/fakes")
            return []
        done = subprocess.run([sys.executable, "-c", TWICE], env=host, stdout=subprocess.PIPE, check=True, text=True)
    marks = json.loads(done.stdout)
    rows = []
    for name, most, (began, leased, held) in (
        ("first claim, fake NVML", 100, marks[:3]),
        ("claim again, fake NVML", 62, marks[3:]),
    ):
        for part, start, limit in ((name, began, most), ("  once the leases are held", leased, 20)):
            took = (held[0] - start[0]) * 1e3
            rows.append(Row(part, took, None, calls=held[1] - start[1], most_calls=limit))
    return rows


# The older package with an nvidia-smi that answers at once, and a private lock file.
OLDER = """
import os, sys, time
directory, repeat = sys.argv[1], int(sys.argv[2])
from safe_gpu import safe_gpu
assert safe_gpu.__file__.startswith(os.environ["PYTHONPATH"])
safe_gpu.LOCK_FILENAME = directory + "/older/lock"
class Nothing:
    def __call__(self, device_no): return device_no
    def release(self, placeholder): pass
times = []
for _ in range(repeat):
    began = time.perf_counter()
    safe_gpu.claim_gpus(1, Nothing())
    safe_gpu.release_gpus()
    times.append(time.perf_counter() - began)
print(sorted(times)[len(times) // 2] * 1e3)
"""
NVIDIA_SMI = """#!/bin/sh
case "$*" in
*--query-gpu*) for i in 0 1 2 3 4 5 6 7; do echo "$i, 00000000:0$i:00.0"; done ;;
*-q*) case "$*" in *compute*) ;; *) echo "Attached GPUs : 8"; echo "Display Mode : Disabled" ;; esac ;;
esac
"""


def make_nvidia_smi(directory: str) -> None:
    """An nvidia-smi in the folder ``bin`` of this directory, with eight free GPUs."""
    os.mkdir(f"{directory}/bin")
    with open(f"{directory}/bin/nvidia-smi", "w") as file:
        file.write(NVIDIA_SMI)
    os.chmod(f"{directory}/bin/nvidia-smi", 0o755)


def time_of_older(older: str, repeat: int) -> float:
    older = os.path.abspath(older)  # it runs in another directory
    with simulated_host() as directory:
        make_nvidia_smi(directory)
        done = subprocess.run(
            [sys.executable, "-c", OLDER, directory, str(max(5, repeat))],
            env={**environment(), "PYTHONPATH": older, "PATH": f"{directory}/bin:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            cwd=directory,
        )
    return float(done.stdout)


def at_once(claim: Callable[[], None], release: Callable[[], None]) -> float:
    """Milliseconds until the last of eight processes has its GPU; they hold their GPUs until all have one."""

    def race(line: Any) -> None:
        claim()
        line.send(time.monotonic())
        line.recv()
        release()

    workers, fired = start_all(race, CROWD)
    last = max(worker.line.recv() for worker in workers)
    for worker in workers:
        worker.line.send("let go")
        os.waitpid(worker.pid, 0)
        worker.line.close()
    return (last - fired) * 1e3


def crowd(repeat: int, delay: float) -> tuple[float, float]:
    import safe_gpu
    from safe_gpu.drivers.simulated import SimulatedPlaceholder

    with simulated_host() as directory:
        bare = Bare(directory, delay)

        def claim() -> None:
            safe_gpu.claim_gpus(1, SimulatedPlaceholder(delay=delay), timeout=600, affinity=None)

        claim()  # so that all modules are imported before the fork
        safe_gpu.release_gpus()
        own, other = [], []
        for _ in range(repeat):
            own.append(at_once(claim, safe_gpu.release_gpus))
            other.append(at_once(bare.claim, bare.release))
    return median(own), median(other)


def bench_crowd(repeat: int, older: str | None) -> list[Row]:
    own, other = crowd(max(3, repeat), 0.0)
    return [Row("8 processes at once", own, other, "flock held over poll and context", budget=4.5, what="ratio")]


def bench_slow(repeat: int, older: str | None) -> list[Row]:
    own, other = crowd(1, 2.0)
    return [Row("8 at once, contexts of 2 s", own, other, "flock held over poll and context")]


# The same as the console script.
RUN = "import sys; from safe_gpu.cli import main; sys.argv = ['safe-gpu', 'run', '--', 'true']; sys.exit(main())"


def bench_run(repeat: int, older: str | None) -> list[Row]:
    become = "import filelock, pynvml, argparse, os; os.execvp('true', ['true'])"
    with simulated_host():
        own = [sys.executable, "-c", RUN]
        bare, whole = run_time([sys.executable, "-c", become], own, repeat=max(5, repeat))
    rival = "an interpreter that imports filelock, pynvml and argparse, and becomes true"
    return [Row("safe-gpu run -- true", whole, bare, rival, budget=15.0, what="over")]


PARTS = {
    "import": bench_import,
    "claim": bench_claim,
    "calls": bench_calls,
    "crowd": bench_crowd,
    "slow": bench_slow,
    "run": bench_run,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument(
        "--repeat", type=int, default=20, metavar="N", help="number of repetitions (default: %(default)s)"
    )
    parser.add_argument("--older", metavar="DIR", help="directory of safe-gpu 2.0.0 (pip install --target=DIR)")
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is missed")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose among {', '.join(PARTS)}")
    rows = [row for part in options.parts or PARTS for row in PARTS[part](options.repeat, options.older)]
    return 1 if not print_table(rows) and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
