#!/usr/bin/env python3
"""One table: what safe_gpu costs beside the older package, a bare flock and a bare interpreter, and its budgets.

    python3 tools/bench_all.py [--older DIR] [--repeat N] [--quick] [--check]

It runs the parts of bench_claim.py and bench_waiting.py. The older package, safe-gpu 2.0.0, is in DIR, or else pip
installs it for this run; without it its column is empty. It cannot wait for GPUs. Run it on an idle machine: it takes
minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import bench_claim
import bench_waiting
from bench_support import Row, environment, run_time, simulated_host

# Processes that claim at once with the older package, and the milliseconds until the last has its GPU.
OLDER_CROWD = """
import os, sys, time
directory, delay, processes = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
from safe_gpu import safe_gpu
assert safe_gpu.__file__.startswith(os.environ["PYTHONPATH"])
safe_gpu.LOCK_FILENAME = directory + "/older/lock"
class Context:
    def __call__(self, device_no): time.sleep(delay)
    def release(self, placeholder): pass
gun, trigger = os.pipe()
done, said = os.pipe()
for _ in range(processes):
    if os.fork() == 0:
        os.close(trigger)
        os.read(gun, 1)
        safe_gpu.claim_gpus(1, Context())
        os.write(said, b"%020.6f" % time.monotonic())
        os._exit(0)
fired = time.monotonic()
os.close(trigger)
print((max(float(os.read(done, 20)) for _ in range(processes)) - fired) * 1e3)
"""


@contextmanager
def older_package(given: str | None) -> Iterator[str | None]:
    """A directory with the older package, or None if it cannot be had."""
    if given:
        yield os.path.abspath(given)
        return
    with tempfile.TemporaryDirectory(prefix="safe-gpu-older-") as target:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        command = [*pip, "--retries=1", "--timeout=10", f"--target={target}", "safe-gpu==2.0.0"]
        try:
            found = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=100).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            found = False
        yield target if found else None


def older_crowd(older: str, delay: float, repeat: int) -> float:
    times = []
    with simulated_host() as directory:
        bench_claim.make_nvidia_smi(directory)
        env = {**environment(), "PYTHONPATH": older, "PATH": f"{directory}/bin:{os.environ['PATH']}"}
        for _ in range(repeat):
            command = [sys.executable, "-c", OLDER_CROWD, directory, str(delay), str(bench_claim.CROWD)]
            times.append(
                float(
                    subprocess.run(
                        command, env=env, stdout=subprocess.PIPE, check=True, text=True, cwd=directory
                    ).stdout
                )
            )
    return median(times)


def figures_of_older(older: str, repeat: int, quick: bool) -> dict[str, float]:
    """Name of a row -> milliseconds of the older package."""
    env = {**environment(), "PYTHONPATH": older}
    code = "import sys; sys.path.remove(''); from safe_gpu import safe_gpu"  # not what lies in the working directory
    (loaded,) = run_time([sys.executable, "-c", code], repeat=max(3, repeat // 2), env=env)
    found = {
        "import safe_gpu": loaded,
        "claim and release, all of it": bench_claim.time_of_older(older, repeat),
        "8 processes at once": older_crowd(older, 0.0, max(1, repeat // 4)),
    }
    return found if quick else {**found, "8 at once, contexts of 2 s": older_crowd(older, 2.0, 1)}


def print_all(rows: list[Row], older: dict[str, float]) -> bool:
    """Print the table; returns whether every budget is met."""
    width = max(len(row.name) for row in rows) + 5
    print(f"{'':{width}} {'safe_gpu':>9} {'2.0.0':>9} {'flock':>9} {'python':>9}  budget")
    for row in rows:
        by_hand = row.rival if row.rival_name.startswith(("flock", "a lock file", "tried")) else None
        python = row.rival if "interpreter" in row.rival_name else None
        cells = " ".join(
            f"{'-' if value is None else f'{value:.2f}':>9}" for value in (older.get(row.name), by_hand, python)
        )
        print(f"{f'{row.name} ({row.unit})':{width}} {row.own:9.2f} {cells}  {budget_of(row)}".rstrip())
    print(
        "\n2.0.0: the older package. flock: by hand, one lock held over poll and context; for waiters, a lock file for"
    )
    print("each GPU that is tried every 50 ms. python: an interpreter, with imports where the budget is over that.")
    return all(row.met for row in rows)


def budget_of(row: Row) -> str:
    verdict = "met" if row.met else "MISSED"
    if row.most_calls is not None:
        return f"{row.calls} NVML calls of at most {row.most_calls}: {verdict}"
    if row.budget is None:
        return ""
    if row.what == "ratio":
        return f"{row.figure:.2f} of at most {row.budget:g} times flock: {verdict}"
    if row.what == "over":
        return f"{row.figure:+.2f} of at most {row.budget:+g} {row.unit} over python: {verdict}"
    return f"at most {row.budget:g} {row.unit}: {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--older", metavar="DIR", help="directory of safe-gpu 2.0.0 (pip install --target=DIR)")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="repetitions (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="few repetitions, few waiters, no contexts of 2 s")
    parser.add_argument("--check", action="store_true", help="exit 1 if a budget is missed")
    options = parser.parse_args()
    if options.quick:
        options.repeat = 1
    waiting = argparse.Namespace(processes=64, waiters=500, seconds=20.0)
    if options.quick:
        waiting = argparse.Namespace(processes=10, waiters=3, seconds=0.1)
    rows: list[Row] = []
    for part, bench in bench_claim.PARTS.items():
        if not (options.quick and part == "slow"):
            rows += bench(options.repeat, None)
    for part in ("handover", "waiters"):
        rows += bench_waiting.PARTS[part](waiting)
    with older_package(options.older) as older:
        found = {} if older is None else figures_of_older(older, options.repeat, options.quick)
    return 1 if not print_all(rows, found) and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
