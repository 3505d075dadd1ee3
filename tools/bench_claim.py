#!/usr/bin/env python3
"""What a claim costs, against a named rival in the same run.

    python3 tools/bench_claim.py [import] [claim] [crowd] [slow] [run] [--repeat N] [--older DIR] [--check]

import  `import safe_gpu` over a bare interpreter
claim   an uncontended claim and its release, warm, over a simulated driver
crowd   eight processes at once, one GPU each, until the last one has it
slow    the same where a context takes two seconds
run     `safe-gpu run -- true` over a bare interpreter that becomes `true`

Figures of one process are the best of many, those of crowds are medians. Run it at a quiet moment all the same.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from bench_support import Row, environment, milliseconds, print_table, run_time, simulated_host, start_all

CROWD = 8


def best(times: list[float]) -> float:
    """The tenth part's limit: what it takes where nobody disturbs, and not just once."""
    return sorted(times)[len(times) // 10]


def bench_import(repeat: int, older: str | None) -> list[Row]:
    bare, ours = run_time(
        [sys.executable, "-c", "pass"], [sys.executable, "-c", "import safe_gpu"], repeat=max(5, repeat)
    )
    return [Row("import safe_gpu", ours, bare, "a bare interpreter", budget=25.0, what="over")]


class Bare:
    """What a careful person writes: one lock file, held from the look at the GPUs until the context is there."""

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
    """The simulated driver, with the time that its calls and its placeholder take counted apart."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> Untimed:
        from safe_gpu.drivers.simulated import SimulatedContext, SimulatedDriver, SimulatedPlaceholder

        self._kept: list[tuple[type, str, Any]] = []
        for owner, name in (
            (SimulatedDriver, "__init__"),
            (SimulatedDriver, "snapshot"),
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

        contestants: list[Callable[[], None]] = [lambda: claim(None), lambda: claim("node"), rival]
        times: list[list[float]] = [[], [], []]
        alone: list[list[float]] = [[], []]
        for number in range(20 * repeat + 3):
            for contestant, found in zip(contestants, times, strict=True):
                found.append(milliseconds(contestant))
            for affinity, without in zip((None, "node"), alone, strict=True):
                with Untimed() as untimed:
                    whole = milliseconds(lambda affinity=affinity: claim(affinity))
                without.append(whole - untimed.seconds * 1e3)
            if number == 2:  # the first ones import and create files
                for found in (*times, *alone):
                    found.clear()
        plain, bound, theirs = map(best, times)
        plain_alone, bound_alone = map(best, alone)
    rows = [
        Row("claim and release, all of it", plain, theirs, "flock held over poll and context"),
        Row("the same without driver and placeholder", plain_alone, None, budget=3.0),
        Row("affinity='node' on top of that", bound_alone - plain_alone, None, budget=2.0),
        Row("with affinity='node', all of it", bound, theirs, "flock held over poll and context"),
    ]
    if older:
        rows.append(Row("claim and release, all of it", plain, time_of_older(older, repeat), "safe-gpu 2.0.0"))
    return rows


# The older package with an nvidia-smi that answers at once, and a lock file elsewhere than everybody's.
OLDER = """
import sys, time
directory, repeat = sys.argv[1], int(sys.argv[2])
from safe_gpu import safe_gpu
assert not hasattr(safe_gpu, "NoPlaceholder") and "3." not in getattr(safe_gpu, "__version__", "")
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


def time_of_older(older: str, repeat: int) -> float:
    with simulated_host() as directory:
        os.mkdir(f"{directory}/bin")
        with open(f"{directory}/bin/nvidia-smi", "w") as file:
            file.write(NVIDIA_SMI)
        os.chmod(f"{directory}/bin/nvidia-smi", 0o755)
        done = subprocess.run(
            [sys.executable, "-c", OLDER, directory, str(max(5, repeat))],
            env={**environment(), "PYTHONPATH": older, "PATH": f"{directory}/bin:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
    return float(done.stdout)


def at_once(claim: Callable[[], None], release: Callable[[], None]) -> float:
    """Milliseconds until the last of eight processes has its GPU; they hold until all have."""

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

        claim()  # whatever is imported, is imported before the fork
        safe_gpu.release_gpus()
        ours, theirs = [], []
        for _ in range(repeat):
            ours.append(at_once(claim, safe_gpu.release_gpus))
            theirs.append(at_once(bare.claim, bare.release))
    return median(ours), median(theirs)


def bench_crowd(repeat: int, older: str | None) -> list[Row]:
    ours, theirs = crowd(max(3, repeat), 0.0)
    return [Row("8 processes at once", ours, theirs, "flock held over poll and context")]


def bench_slow(repeat: int, older: str | None) -> list[Row]:
    ours, theirs = crowd(1, 2.0)
    return [Row("8 at once, contexts of 2 s", ours, theirs, "flock held over poll and context")]


# What the console script does.
RUN = "import sys; from safe_gpu.cli import main; sys.argv = ['safe-gpu', 'run', '--', 'true']; sys.exit(main())"


def bench_run(repeat: int, older: str | None) -> list[Row]:
    become = "import os; os.execvp('true', ['true'])"
    with simulated_host():
        ours = [sys.executable, "-c", RUN]
        bare, whole = run_time([sys.executable, "-c", become], ours, repeat=max(5, repeat))
    return [Row("safe-gpu run -- true", whole, bare, "a bare interpreter that becomes true", budget=50.0, what="over")]


PARTS = {
    "import": bench_import,
    "claim": bench_claim,
    "crowd": bench_crowd,
    "slow": bench_slow,
    "run": bench_run,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="how often (default: %(default)s)")
    parser.add_argument("--older", metavar="DIR", help="where safe-gpu 2.0.0 is (pip install --target=DIR)")
    parser.add_argument("--check", action="store_true", help="exit 1 where a budget is missed")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}: choose among {', '.join(PARTS)}")
    rows = [row for part in options.parts or PARTS for row in PARTS[part](options.repeat, options.older)]
    return 1 if not print_table(rows) and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
