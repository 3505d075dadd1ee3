"""The command ``safe-gpu demo``: a race of processes for GPUs, and a referee that checks it for collisions."""

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from .claim.functions import claim_gpus, release_gpus
from .drivers import opened_driver
from .errors import NoDriverError, NotEnoughGpusError
from .gpus.devices import Gpu
from .gpus.vendors import VENDORS
from .status.gather import gather
from .wording.text import gpu_ranges, paint, plural, wrapped

_HOST = "dgx-a100"  # that is simulated if SAFE_GPU_DRIVER names none
_START_UP = 0.05  # seconds
_PATIENCE = 60.0  # a faulty GPU can block a process that uses it
_ENOUGH = 3.0  # seconds after which no further round begins
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_QUIET = logging.Logger("safe_gpu.demo", logging.CRITICAL)


@dataclass
class Outcome:
    """What one racer reports; ``began`` is in seconds of the monotonic clock."""

    gpus: Sequence[Gpu] = ()
    error: str = ""
    began: float = 0.0
    pid: int = 0


Work = Callable[[int], Outcome]


def _at_once(ask: int) -> Outcome:
    return Outcome(claim_gpus(ask, logger=_QUIET, timeout=0.0, affinity=None).gpus)


def _poll_and_pick(ask: int) -> Outcome:
    """Do what programs do without safe_gpu: poll the driver, pick a free GPU, start up, use it."""
    with opened_driver() as driver:
        free = [gpu for gpu in driver.snapshot().gpus if not (gpu.processes or gpu.unusable or gpu.lost)][:ask]
        time.sleep(_START_UP)
        for gpu in free:
            driver.occupy(gpu.uuid)  # type: ignore[attr-defined]
    return Outcome(free)


def _racer(parent: int, work: Work, ask: int, line: Any, start: int, gun: int) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return
    os.close(gun)
    try:
        os.read(start, 1)
        told = work(ask)
    except NotEnoughGpusError:
        told = Outcome()
    except Exception as err:
        told = Outcome(error=f"{type(err).__name__}: {err}")
    told.began, told.pid = time.monotonic(), os.getpid()
    line.send(told)
    line.recv()  # hold the GPUs until all have reported
    release_gpus()


def _race(asks: Sequence[int], work: Work) -> list[Outcome]:
    """Run a racer for each of these numbers of GPUs, all started by one signal."""
    start, gun = os.pipe()
    context = multiprocessing.get_context("fork")
    with ExitStack() as ending, os.fdopen(start, "rb"), os.fdopen(gun, "wb", buffering=0) as shot:
        racers = []
        for ask in asks:
            line, far = context.Pipe()
            process = context.Process(target=_racer, args=(os.getpid(), work, ask, far, start, gun), daemon=True)
            process.start()
            far.close()
            for end in (line.close, process.join, process.kill):
                ending.callback(end)
            racers.append((process, line))
        shot.close()
        told = [_hear(line) for _, line in racers]
        for one, (process, line) in zip(told, racers, strict=True):
            with suppress(OSError):
                line.send("let go")
            process.join(_PATIENCE)
            if process.exitcode != 0 and not one.error:
                one.error = "it could not release its GPUs"
    return told


def _hear(line: Any) -> Outcome:
    until = time.monotonic() + _PATIENCE
    try:
        while not line.poll(0.05):
            if signal.sigpending() & {*_SIGNALS}:
                raise KeyboardInterrupt
            if time.monotonic() > until:
                return Outcome(error=f"it said nothing within {_PATIENCE:.0f} s")
        told: Outcome = line.recv()
        return told
    except (EOFError, OSError):
        return Outcome(error="it exited without a report")


def _collisions(heat: Sequence[Outcome]) -> list[str]:
    first: dict[str, Outcome] = {}
    found = []
    for one in sorted(heat, key=lambda one: one.began):
        for gpu in one.gpus:
            rival = first.setdefault(gpu.uuid, one)
            if rival is not one:
                found.append(f"Collision: process {one.pid} got GPU {gpu.label}, which process {rival.pid} had.")
    return found


@contextmanager
def _simulated(name: str) -> Iterator[None]:
    """Set up a simulated host in a temporary directory, for this process and its children; claim once, so that racers
    need not import modules."""
    kept = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="safe-gpu-demo-") as directory:
        try:
            for variable in kept:
                if variable.startswith(("SAFE_GPU_", *(name for one in VENDORS.values() for name in one.prefixes))):
                    del os.environ[variable]
            os.environ.update(SAFE_GPU_DIR=directory, SAFE_GPU_DRIVER=f"simulated:{name}")
            os.environ.update(SAFE_GPU_LEGACY_LOCK="never", SAFE_GPU_TEST_SIMULATED="1")
            claim_gpus(logger=_QUIET, timeout=0.0, affinity=None)
            release_gpus()
            yield
        finally:
            os.environ.clear()
            os.environ.update(kept)


def _free_gpus() -> list[Gpu]:
    """Return the free GPUs of this host that claims do not share; none without a driver."""
    try:
        gpus = gather().gpus
        return [one.gpu for one in gpus if one.state == "free" and one.gpu.vendor == gpus[0].gpu.vendor]
    except NoDriverError:
        if os.environ.get("SAFE_GPU_DRIVER") not in (None, "", "auto"):
            raise
        return []


def run(processes: int | None = None, rounds: int = 5, stream: TextIO | None = None, *, color: bool = False) -> int:
    """Race without safe_gpu on a simulated host, then with it, on real GPUs that are free or on a simulated host.

    Returns:
        0; 1 if two processes had the same GPU, or a claim failed for another reason than too few free GPUs.
    """
    say = partial(_say, stream or sys.stdout)
    kind, _, name = os.environ.get("SAFE_GPU_DRIVER", "").partition(":")
    hosts = [name, _HOST] if kind == "simulated" else [_HOST]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # here and in children, until all is cleaned up
    with ExitStack() as stack:
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        free = [] if kind == "simulated" else _free_gpus()
        simulated = not free
        if simulated and kind != "simulated":
            say("No GPU is free on this host; `safe-gpu status` and `safe-gpu doctor` say why.", "")
        while not free:
            stack.enter_context(_simulated(name := hosts.pop(0)))
            free = _free_gpus()
        where = f"A race on a simulated host, {name}" if simulated else "A race for the free GPUs of this host"
        models = Counter(gpu.name or "unknown GPU" for gpu in free)
        say(f"{where}: {', '.join(f'{number} x {model}' for model, number in models.items())}.")
        say("No real GPU is touched." if simulated else "Each is held for a moment, and no process waits.", "")
        pair = 1 if os.environ.get("CUDA_VISIBLE_DEVICES") or len(free) < 2 or free[0].is_mig_instance else 2
        asks = [pair if n % 4 == 3 else 1 for n in range(processes or max(4, min(32, 2 * len(free))))]

        say(paint(f"Without safe_gpu, {len(asks)} processes poll the driver and pick free GPUs:", "bold", color))
        with ExitStack() as other:
            if not simulated:
                other.enter_context(_simulated(_HOST))
            without = _race(asks, _poll_and_pick)
        say(*_users(without, color), "")

        say(paint(f"With safe_gpu, {len(asks)} processes claim GPUs at the same moment:", "bold", color))
        began, heats = time.monotonic(), [_race(asks, _at_once)]
        while len(heats) < rounds and time.monotonic() - began < _ENOUGH:
            heats.append(_race(asks, _at_once))
        first = [one for one in heats[0] if one.gpus]
        say(*_users(first, color), f"  {len(first)} of {len(asks)} got GPUs, the others were refused.", "")
    told = [one for heat in heats for one in heat]
    errors = [text for heat in heats for text in _collisions(heat)]
    number, taken = len(errors), sum(len(one.gpus) for one in told)
    errors += dict.fromkeys(f"Failure: {one.error}" for one in told if one.error)
    say(*errors)
    verdict = f"Verdict: {plural(number, 'collision')} in {plural(sum(bool(one.gpus) for one in told), 'claim')} of "
    verdict += f"{plural(taken)}; without safe_gpu, {len(_collisions(without))} on "
    say(paint(verdict + f"{plural(sum(len(one.gpus) for one in without))}.", "red" if errors else "green", color))
    return int(bool(errors))


def _users(heat: Sequence[Outcome], color: bool) -> list[str]:
    """Return how many processes had each GPU, in one line for each number."""
    users = Counter(gpu.label for one in heat for gpu in one.gpus)
    lines = []
    for number in sorted({*users.values()}, reverse=True):
        labels = sorted((one for one in users if users[one] == number), key=lambda one: [*map(int, one.split(":"))])
        text = "1 process" + " each" * (len(labels) > 1) if number == 1 else f"{number} processes at once"
        lines.append(f"  GPU {gpu_ranges(labels)}: {paint(text, 'red' if number > 1 else 'green', color)}")
    return lines


def _say(stream: TextIO, *lines: str) -> None:
    """Print lines of at most 80 columns, and leave nothing in the buffer that forked racers would inherit."""
    for line in lines:
        indent = "  " if line.startswith("  ") else ""
        parts = wrapped(line, 80, indent, "  ") if len(line) > 80 and "\x1b" not in line else [line]
        stream.write("".join(f"{one}\n" for one in parts))
    stream.flush()
