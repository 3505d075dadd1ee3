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
from typing import Any, TextIO

from .claim.functions import claim_gpus, release_gpus
from .drivers import opened_driver
from .errors import NoDriverError, NotEnoughGpusError
from .gpus.devices import Gpu
from .gpus.vendors import VENDORS
from .status.facts import GpuStatus
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
        free = [gpu for gpu in driver.snapshot().gpus if not (gpu.processes or gpu.unusable or gpu.lost)]
        picked = free[:ask]
        time.sleep(_START_UP)
        for gpu in picked:
            driver.occupy(gpu.uuid)  # type: ignore[attr-defined]
    return Outcome(picked)


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
    told.began = time.monotonic()
    told.pid = os.getpid()
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
            ending.callback(line.close)
            ending.callback(process.join)
            ending.callback(process.kill)  # first: the last one added is called first
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
    prefixes = ["SAFE_GPU_"]
    for vendor in VENDORS.values():
        prefixes += vendor.prefixes
    with tempfile.TemporaryDirectory(prefix="safe-gpu-demo-") as directory:
        try:
            for variable in kept:
                if variable.startswith(tuple(prefixes)):
                    del os.environ[variable]
            os.environ.update(SAFE_GPU_DIR=directory, SAFE_GPU_DRIVER=f"simulated:{name}")
            os.environ.update(SAFE_GPU_LEGACY_LOCK="never", SAFE_GPU_TEST_SIMULATED="1")
            claim_gpus(logger=_QUIET, timeout=0.0, affinity=None)
            release_gpus()
            yield
        finally:
            os.environ.clear()
            os.environ.update(kept)


def _gpus_of_host() -> Sequence[GpuStatus]:
    """Return the GPUs of this host; none without a driver."""
    try:
        return gather().gpus
    except NoDriverError:
        if os.environ.get("SAFE_GPU_DRIVER") not in (None, "", "auto"):
            raise
        return ()


def _free(gpus: Sequence[GpuStatus]) -> list[Gpu]:
    """Return those that are free, of one vendor, and that claims do not share."""
    return [one.gpu for one in gpus if one.state == "free" and one.gpu.vendor == gpus[0].gpu.vendor]


def run(processes: int | None = None, rounds: int = 5, stream: TextIO | None = None, *, color: bool = False) -> int:
    """Race without safe_gpu on a simulated host, then with it, on real GPUs that are free or on a simulated host.

    Returns:
        0; 1 if two processes had the same GPU, or a claim failed for another reason than too few free GPUs.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # here and in children, until all is cleaned up
    with ExitStack() as stack:
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        demo = _Demo(stream or sys.stdout, color=color)
        demo.find_gpus(stack)
        asks = demo.numbers_asked_for(processes)
        without = demo.race_without_safe_gpu(asks)
        heats = demo.race_with_safe_gpu(asks, rounds)
    return demo.verdict(without, heats)


class _Demo:
    """One run of the demo, and what it prints.

    Attributes:
        free: the GPUs to race for.
        is_simulated: whether these are of a simulated host.
    """

    def __init__(self, stream: TextIO, *, color: bool) -> None:
        self._stream = stream
        self._color = color
        self.free: list[Gpu] = []
        self.is_simulated = False

    def find_gpus(self, stack: ExitStack) -> None:
        """Find GPUs that are free, else set up a simulated host until the stack ends."""
        kind, _, name = os.environ.get("SAFE_GPU_DRIVER", "").partition(":")
        hosts = [_HOST]
        if kind == "simulated":
            hosts.insert(0, name)
        else:
            gpus = _gpus_of_host()
            self.free = _free(gpus)
            if not gpus:
                self._say("There is no GPU on this host; `safe-gpu doctor` says why.", "")
            elif not self.free:
                self._say("No GPU is free on this host; `safe-gpu status` and `safe-gpu doctor` say why.", "")
        self.is_simulated = not self.free
        where = "A race for the free GPUs of this host"
        promise = "Each is held for a moment, and no process waits."
        for host in hosts:
            if not self.free:
                stack.enter_context(_simulated(host))
                self.free = _free(_gpus_of_host())
                where = f"A race on a simulated host, {host}"
                promise = "No real GPU is touched."
        models = Counter(gpu.name or "unknown GPU" for gpu in self.free)
        self._say(f"{where}: {', '.join(f'{number} x {model}' for model, number in models.items())}.", promise, "")

    def numbers_asked_for(self, processes: int | None) -> list[int]:
        """Return how many GPUs each process asks for: most for one, every fourth for two where that is possible."""
        if processes is None:
            processes = max(4, min(32, 2 * len(self.free)))
        asks = [1] * processes
        is_limited = bool(os.environ.get("CUDA_VISIBLE_DEVICES"))
        if len(self.free) >= 2 and not is_limited and not self.free[0].is_mig_instance:
            asks[3::4] = [2] * len(asks[3::4])
        return asks

    def race_without_safe_gpu(self, asks: Sequence[int]) -> list[Outcome]:
        """Let processes pick GPUs of a simulated host as programs do without safe_gpu."""
        self._title(f"Without safe_gpu, {len(asks)} processes poll the driver and pick free GPUs:")
        with ExitStack() as other:
            if not self.is_simulated:
                other.enter_context(_simulated(_HOST))
            heat = _race(asks, _poll_and_pick)
        self._say_users(heat)
        self._say("")
        return heat

    def race_with_safe_gpu(self, asks: Sequence[int], rounds: int) -> list[list[Outcome]]:
        """Let processes claim GPUs, for several rounds as long as these are quick."""
        self._title(f"With safe_gpu, {len(asks)} processes claim GPUs at the same moment:")
        began = time.monotonic()
        heats = [_race(asks, _at_once)]
        while len(heats) < rounds and time.monotonic() - began < _ENOUGH:
            heats.append(_race(asks, _at_once))
        served = [outcome for outcome in heats[0] if outcome.gpus]
        self._say_users(served)
        self._say(f"  {len(served)} of {len(asks)} got GPUs, the others were refused.", "")
        return heats

    def verdict(self, without: Sequence[Outcome], heats: Sequence[Sequence[Outcome]]) -> int:
        """Print what the referee found, and return the exit status."""
        outcomes = [outcome for heat in heats for outcome in heat]
        collisions = [text for heat in heats for text in _collisions(heat)]
        failures = [f"Failure: {outcome.error}" for outcome in outcomes if outcome.error]
        errors = [*collisions, *dict.fromkeys(failures)]
        self._say(*errors)
        claims = [outcome for outcome in outcomes if outcome.gpus]
        number_of_claims = plural(len(claims), "claim")
        found = f"no GPU was given out twice ({number_of_claims})"
        if collisions:
            found = f"{plural(len(collisions), 'collision')} in {number_of_claims}"
        text = f"Verdict: {found}. Without safe_gpu: {plural(len(_collisions(without)), 'collision')} in "
        text += f"{plural(_number_of_gpus(without), 'pick')}."
        if errors:
            self._say(paint(text, "red", self._color))
            return 1
        self._say(paint(text, "green", self._color))
        return 0

    def _title(self, text: str) -> None:
        self._say(paint(text, "bold", self._color))

    def _say_users(self, heat: Sequence[Outcome]) -> None:
        """Print how many processes had each GPU, in one line for each number."""
        users = Counter(gpu.label for outcome in heat for gpu in outcome.gpus)
        for number in sorted(set(users.values()), reverse=True):
            labels = sorted((label for label in users if users[label] == number), key=_label_as_numbers)
            text = "1 process"
            color = "green"
            if number > 1:
                text = f"{number} processes at once"
                color = "red"
            elif len(labels) > 1:
                text = "1 process each"
            self._say(f"  GPU {gpu_ranges(labels)}: {paint(text, color, self._color)}")

    def _say(self, *lines: str) -> None:
        """Print lines of at most 80 columns, and leave nothing in the buffer that forked racers would inherit."""
        for line in lines:
            parts = [line]
            if len(line) > 80 and "\x1b" not in line:
                indent = "  " if line.startswith("  ") else ""
                parts = wrapped(line, 80, indent, "  ")
            for part in parts:
                self._stream.write(f"{part}\n")
        self._stream.flush()


def _number_of_gpus(heat: Sequence[Outcome]) -> int:
    return sum(len(outcome.gpus) for outcome in heat)


def _label_as_numbers(label: str) -> list[int]:
    """Return ``3:1`` as 3 and 1, which sort as numbers do."""
    return [int(part) for part in label.split(":")]
