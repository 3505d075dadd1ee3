#!/usr/bin/env python3
"""How long commands hold host.lock on a simulated host, while another user has many locks, doors or names.

    tools/host_lock_holds.py --locks 10000 --doors 60000 --names 60000
    tools/host_lock_holds.py --names 60000 -- safe-gpu wait --timeout 1s

It tries host.lock itself, some 10,000 times a second, and where the lock is held it waits for it. So a hold is told
from the last try that found it free until it is free again: never too short, and some tenth of a millisecond too long.
On a busy machine holds take longer, since holders lose the CPU; --realtime prevents that.
"""

import argparse
import fcntl
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from common import ROOT, simulate
from support.actor import become

NOBODY = 65534
GPUS = 8  # of the simulated host
PERIOD = 0.00005  # seconds
SAFE_GPU = (sys.executable, "-m", "safe_gpu")
_SCOPE = ("SAFE_GPU_SCOPE=0123456789abcdef", "SAFE_GPU_DRIVER=simulated:two-vendors")  # where it is looked for
CLAIM = (*SAFE_GPU, "run", "--quiet", "--timeout", "0", "--", "true")


class Holds(NamedTuple):
    """What was seen during one command: times in seconds. ``longest`` is 0 and ``before`` None if no hold was."""

    longest: float
    before: float | None
    code: int


def measure(command: Sequence[str], path: str, *, patience: float, realtime: bool) -> Holds:
    """Run a command and sample the lock at ``path`` until it ends, or is killed after ``patience`` seconds."""
    longest, before = 0.0, None
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    start = os.sched_get_priority_min(os.SCHED_FIFO)

    def hurry() -> None:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(start))

    began = free = time.monotonic()
    process = subprocess.Popen(
        command, preexec_fn=hurry if realtime else None, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    watchdog = threading.Timer(patience, process.kill)
    watchdog.start()
    try:
        while process.poll() is None:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                before = time.monotonic() - began if before is None else before
                fcntl.flock(fd, fcntl.LOCK_SH)
                longest = max(longest, time.monotonic() - free)
            free = time.monotonic()  # nobody holds it before the next line
            fcntl.flock(fd, fcntl.LOCK_UN)
            time.sleep(PERIOD)
        return Holds(longest, before, process.returncode)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        os.close(fd)


def hold_locks(numbers: Iterable[int], place: str) -> list[int]:
    """Lock files of one's own."""
    fds = [os.open(os.path.join(place, str(one)), os.O_RDWR | os.O_CREAT, 0o600) for one in numbers]
    for fd in fds:
        fcntl.flock(fd, fcntl.LOCK_EX)
    return fds


def hold_doors(numbers: Iterable[int], place: str) -> list[socket.socket]:
    """Bind abstract names."""
    found = []
    for one in numbers:
        found.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        found[-1].bind(f"\0safe-gpu/1/{place}/{one}".ljust(60, "."))
    return found


def make_names(numbers: Iterable[int], place: str) -> None:
    """Make dead entries of claims, which say nothing."""
    for one in numbers:
        with open(os.path.join(_claims(), f"{one + 1}.{one:016x}"), "w") as file:
            file.write("{}")


def _claims() -> str:
    return os.path.join(os.environ["SAFE_GPU_DIR"], "claims")


LOADS: Mapping[str, Callable[[Iterable[int], str], object]] = {
    "locks": hold_locks,
    "doors": hold_doors,
    "names": make_names,
}


@contextmanager
def neighbour(load: str, number: int) -> Iterator[None]:
    """Processes of another user (as root; else of this one) that have made such a load, until the end of the block.

    They are as few as the limit of descriptors allows.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = hard - 100
    place = tempfile.mkdtemp(prefix="neighbour-")
    if os.geteuid() == 0:
        os.chown(place, NOBODY, NOBODY)
    kept, until = os.pipe()
    pids = []
    try:
        for first in range(0, number, most):
            ready, told = os.pipe()
            pids.append(os.fork())
            if not pids[-1]:
                try:
                    os.close(until)
                    if os.geteuid() == 0:
                        become(NOBODY)
                    made = LOADS[load](range(first, min(number, first + most)), place)
                    os.write(told, b"x")
                    os.read(kept, 1)  # to the end of the block, also if the tool is killed
                    del made
                finally:
                    os._exit(0)
            os.close(told)
            if not os.read(ready, 1):
                raise SystemExit(f"the load of {number} {load} cannot be made here")
            os.close(ready)
        yield
    finally:
        for fd in (kept, until):
            os.close(fd)
        for pid in pids:
            os.waitpid(pid, 0)
        shutil.rmtree(place)
        for name in os.listdir(_claims()) if load == "names" else ():
            os.unlink(os.path.join(_claims(), name))


@contextmanager
def all_claimed() -> Iterator[None]:
    """Every GPU is claimed by another process."""
    command = [*SAFE_GPU, "run", "-n", str(GPUS), "--timeout", "0", "--", "sh", "-c", "echo up; read x"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            if holder.stdout.readline() != b"up\n":
                raise SystemExit("the GPUs cannot be claimed")
            yield
        finally:
            holder.kill()


def rows(loads: Iterable[tuple[str, int]], command: Sequence[str], runs: int, **how: float) -> Iterator[str]:
    """Measure each command beside each load."""
    lock = os.path.join(os.environ["SAFE_GPU_DIR"], "host.lock")

    def row(what: str, load: str, number: int, words: Sequence[str]) -> str:
        found = [measure(words, lock, **how) for _ in range(runs)]  # type: ignore[arg-type]
        holds = sorted(one.longest for one in found)
        before = min((one.before for one in found if one.before is not None), default=None)
        times = [holds[0], holds[len(holds) // 2], holds[-1], before]
        cells = "".join(f"{'-' if one is None else format(one * 1000, '.1f'):>9}" for one in times)
        codes = ",".join(sorted({str(one.code) for one in found}))
        return f"{what:<18}{f'{number} {load}' if number else '-':<14}{cells}  {codes}"

    yield f"{'longest hold, ms':<18}{'beside':<14}{'least':>9}{'median':>9}{'most':>9}{'before':>9}  exit"
    for load, number in loads:
        with neighbour(load, number):
            if command:
                yield row(os.path.basename(command[0]), load, number, command)
                continue
            with all_claimed():
                yield row("refused claim", load, number, CLAIM)
            yield row("claim", load, number, CLAIM)
            yield row("claim in a scope", load, number, ("env", *_SCOPE, *CLAIM))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for load in LOADS:
        parser.add_argument(f"--{load}", type=int, default=0, metavar="N", help="one more row of each command beside N")
    parser.add_argument("--runs", type=int, default=5, help="of each command (default: 5)")
    parser.add_argument("--patience", type=float, default=60.0, metavar="S", help="seconds after which one is killed")
    parser.add_argument("--realtime", action="store_true", help="commands lose the CPU to nobody (needs root)")
    parser.add_argument("command", nargs="*", help="measure this instead; SAFE_GPU_DIR is set for it")
    options = parser.parse_args(arguments)
    if options.realtime:
        # Before the commands, which are of the lowest of these priorities.
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(2))
    place = tempfile.mkdtemp(prefix="host-lock-")
    os.chmod(place, 0o755)
    policy = os.environ.get("SAFE_GPU_POLICY")
    simulate("dgx-a100", f"{place}/state", PYTHONPATH=str(ROOT), **{"SAFE_GPU_POLICY": policy} if policy else {})
    try:
        subprocess.run(CLAIM, check=True)  # makes the state directory
        loads = [("", 0), *((load, number) for load in LOADS if (number := getattr(options, load)))]
        for line in rows(loads, options.command, options.runs, patience=options.patience, realtime=options.realtime):
            print(line, flush=True)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
