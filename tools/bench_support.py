"""Helpers of the benchmarks: a private simulated host, forked processes with one start signal, and a table."""

from __future__ import annotations

import atexit
import gc
import math
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

__all__ = [
    "Row",
    "Worker",
    "environment",
    "fake_nvml_host",
    "milliseconds",
    "print_table",
    "run_time",
    "simulated_host",
    "start_all",
]


@dataclass
class Row:
    """One line of the table: safe_gpu (``own``) and a rival, measured in turns in the same run.

    ``what`` selects the figure for the ``budget``: "over" (``own`` minus ``rival``), "ratio" or "own". ``calls`` is
    the number of driver calls, and ``most_calls`` its limit.
    """

    name: str
    own: float
    rival: float | None
    rival_name: str = ""
    unit: str = "ms"
    budget: float | None = None
    what: str = "own"
    calls: int | None = None
    most_calls: int | None = None

    @property
    def figure(self) -> float:
        if self.what == "ratio":
            return self.own / (self.rival or math.inf)
        return self.own - (self.rival or 0.0) if self.what == "over" else self.own

    @property
    def met(self) -> bool:
        in_time = self.budget is None or self.figure <= self.budget
        return in_time and (self.calls is None or self.most_calls is None or self.calls <= self.most_calls)


def print_table(rows: Sequence[Row]) -> bool:
    """Print the table; returns whether every budget is met."""
    print(f"{'':42} {'safe_gpu':>10} {'rival':>10} {'ratio':>7} {'driver calls':>13}  budget")
    for row in rows:
        rival = f"{row.rival:10.2f}" if row.rival is not None else f"{'-':>10}"
        ratio = f"{row.own / row.rival:6.2f}x" if row.rival else f"{'-':>7}"
        budget = ""
        if row.budget is not None:
            sign = "+" if row.what == "over" else ""
            verdict = "met" if row.met else "MISSED"
            unit = "times that" if row.what == "ratio" else row.unit
            budget = f"{sign}{row.figure:.2f} of at most {sign}{row.budget:g} {unit}: {verdict}"
        elif row.most_calls is not None:
            budget = f"at most {row.most_calls} calls: {'met' if row.met else 'MISSED'}"
        name = f"{row.name} ({row.unit})"
        calls = "-" if row.calls is None else str(row.calls)
        print(f"{name:42} {row.own:10.2f} {rival} {ratio} {calls:>13}  {budget}")
        if row.rival_name:
            print(f"{'':42} rival: {row.rival_name}")
    return all(row.met for row in rows)


def milliseconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def run_time(*commands: Sequence[str], repeat: int, env: dict[str, str] | None = None) -> list[float]:
    """Shortest wall time of each command in ms. The commands run in turns, so that load affects all of them."""
    times: list[list[float]] = [[] for _ in commands]

    def run(command: Sequence[str]) -> None:
        subprocess.run(command, check=True, env=env or environment(), stdout=subprocess.DEVNULL)

    for command in commands:
        run(command)
    for _ in range(repeat):
        for command, found in zip(commands, times, strict=True):
            found.append(milliseconds(lambda command=command: run(command)))
    return [min(found) for found in times]


@cache
def _bytecode() -> str:
    """A directory for compiled modules, so that each is compiled only once, whatever the environment says."""
    directory = tempfile.mkdtemp(prefix="safe-gpu-bench-pyc-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def environment(**values: str) -> dict[str, str]:
    """os.environ with this package first in PYTHONPATH."""
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
            SAFE_GPU_DIR=f"{directory}/state",
            SAFE_GPU_DRIVER=f"simulated:{preset}",
            SAFE_GPU_LEGACY_LOCK="never",
            SAFE_GPU_TEST_SIMULATED="1",
        )
        yield directory


@contextmanager
def fake_nvml_host(count: int = 8) -> Iterator[dict[str, str] | None]:
    """The environment for processes that use fake NVML and CUDA libraries with ``count`` GPUs.

    Each call of NVML is logged to ``$FAKE_GPU_DIR/calls``. None without a C compiler or without tests/fakes.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    fakes = ROOT / "tests/fakes"
    if compiler is None or not fakes.is_dir():
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="safe-gpu-bench-") as directory:
        for source, library in (("nvml.c", "libnvidia-ml.so.1"), ("cuda.c", "libcuda.so.1")):
            command = [compiler, "-shared", "-fPIC", "-O1", "-pthread", f"-Wl,-soname,{library}"]
            subprocess.run([*command, "-o", f"{directory}/{library}", str(fakes / source)], check=True)
        Path(directory, "procs").mkdir()
        Path(directory, "options").write_text("log=1\n")
        Path(directory, "gpus").write_text(
            "".join(
                f"uuid=GPU-{n:08x}-aaaa-bbbb-cccc-{n:012x} bus=00000000:{7 + 8 * n:02X}:00.0\n" for n in range(count)
            )
        )
        kept = {name: text for name, text in environment().items() if not name.startswith(("SAFE_GPU_", "CUDA_"))}
        yield {
            **kept,
            "LD_LIBRARY_PATH": directory,
            "FAKE_GPU_DIR": directory,
            "SAFE_GPU_DIR": f"{directory}/state",
            "SAFE_GPU_DRIVER": "nvml",
            "SAFE_GPU_LEGACY_LOCK": "never",
        }


class Worker:
    """A forked process that runs ``work(line)`` and then exits; :meth:`kill` ends it earlier."""

    def __init__(self, work: Callable[[Connection[Any, Any]], None]) -> None:
        self.line, far_end = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                work(far_end)
                status = 0
            except EOFError:
                pass
            finally:
                os._exit(status)
        far_end.close()

    def kill(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        self.line.close()


def start_all(work: Callable[[Connection[Any, Any]], None], number: int) -> tuple[list[Worker], float]:
    """Fork ``number`` processes and start them with one signal; returns them and the time of the signal."""
    gun, trigger = os.pipe()

    def wait_for_gun(line: Connection[Any, Any]) -> None:
        os.close(trigger)
        os.read(gun, 1)
        work(line)

    gc.collect()
    gc.freeze()  # or the garbage collector of each child would copy memory pages
    workers = [Worker(wait_for_gun) for _ in range(number)]
    os.close(gun)
    fired = time.monotonic()
    os.close(trigger)
    return workers, fired
