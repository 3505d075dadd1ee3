"""What the benchmarks share: a simulated host of their own, forked processes with one starting gun, and a table."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package beside these scripts, installed or not

__all__ = ["Row", "Worker", "environment", "milliseconds", "print_table", "run_time", "simulated_host", "start_all"]


@dataclass
class Row:
    """One line of the table: ours against a rival, measured in turns in the same run.

    ``what`` says which figure is held against the ``budget``: "over" (ours minus the rival's), "ours", or "" for none.
    """

    name: str
    ours: float
    rival: float | None
    rival_name: str = ""
    unit: str = "ms"
    budget: float | None = None
    what: str = "ours"

    @property
    def figure(self) -> float:
        return self.ours - (self.rival or 0.0) if self.what == "over" else self.ours

    @property
    def met(self) -> bool:
        return self.budget is None or self.figure <= self.budget


def print_table(rows: Sequence[Row]) -> bool:
    """Print it; whether every budget is met."""
    print(f"{'':42} {'ours':>10} {'rival':>10} {'ratio':>7}  budget")
    for row in rows:
        rival = f"{row.rival:10.2f}" if row.rival is not None else f"{'-':>10}"
        ratio = f"{row.ours / row.rival:6.2f}x" if row.rival else f"{'-':>7}"
        budget = ""
        if row.budget is not None:
            sign = "+" if row.what == "over" else ""
            verdict = "met" if row.met else "MISSED"
            budget = f"{sign}{row.figure:.2f} of at most {sign}{row.budget:g} {row.unit}: {verdict}"
        name = f"{row.name} ({row.unit})"
        print(f"{name:42} {row.ours:10.2f} {rival} {ratio}  {budget}")
        if row.rival_name:
            print(f"{'':42} rival: {row.rival_name}")
    return all(row.met for row in rows)


def milliseconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def run_time(*commands: Sequence[str], repeat: int) -> list[float]:
    """Shortest wall time of each command in ms, run in turns, so that a busy moment hits all alike."""
    times: list[list[float]] = [[] for _ in commands]
    for command in commands:
        subprocess.run(command, check=True, env=environment())
    for _ in range(repeat):
        for command, found in zip(commands, times, strict=True):
            found.append(milliseconds(lambda command=command: subprocess.run(command, check=True, env=environment())))
    return [min(found) for found in times]


@cache
def _bytecode() -> str:
    """A place for compiled modules, so that each is compiled once whatever the environment says."""
    directory = tempfile.mkdtemp(prefix="safe-gpu-bench-pyc-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def environment(**values: str) -> dict[str, str]:
    """os.environ with this package first on the path."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": _bytecode(), **values}


@contextmanager
def simulated_host(preset: str = "dgx-a100") -> Iterator[str]:
    """A simulated host in a fresh state directory, for this process and its children; yields the directory."""
    with tempfile.TemporaryDirectory(prefix="safe-gpu-bench-") as directory:
        for name in list(os.environ):
            if name.startswith(("SAFE_GPU_", "CUDA_")):
                del os.environ[name]
        os.environ.update(
            SAFE_GPU_DIR=f"{directory}/state", SAFE_GPU_DRIVER=f"simulated:{preset}", SAFE_GPU_LEGACY_LOCK="never"
        )
        yield directory


class Worker:
    """A forked process that runs ``work(line)`` and dies with it, or with :meth:`kill`."""

    def __init__(self, work: Callable[[Connection[Any, Any]], None]) -> None:
        self.line, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                work(theirs)
                status = 0
            except EOFError:
                pass
            finally:
                os._exit(status)
        theirs.close()

    def kill(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        self.line.close()


def start_all(work: Callable[[Connection[Any, Any]], None], number: int) -> tuple[list[Worker], float]:
    """So many processes, all of them forked and then started from one gun, and the moment of the shot."""
    gun, trigger = os.pipe()

    def wait_for_gun(line: Connection[Any, Any]) -> None:
        os.close(trigger)
        os.read(gun, 1)
        work(line)

    gc.collect()
    gc.freeze()  # or every child copies what the collector touches
    workers = [Worker(wait_for_gun) for _ in range(number)]
    os.close(gun)
    fired = time.monotonic()
    os.close(trigger)
    return workers, fired
