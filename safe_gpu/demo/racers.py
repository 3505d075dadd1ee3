"""The racers: processes that start claiming at one signal."""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import errors
from ..claim.functions import claim_gpus, release_gpus
from ..drivers import opened_driver
from ..selection.possible import check_possible
from ..selection.request import Selection
from .race_host import QUIET, RaceHost

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ..gpus.devices import Gpu

_FEWEST, _MOST = 4, 32


def plan_race(host: RaceHost, racers: int | None = None) -> tuple[int, ...]:
    """Return how many GPUs each racer claims on this host; empty if none can be claimed now, or claims share the only
    one.

    Args:
        racers: their number; default: twice as many as free GPUs, 4 to 32.
    """
    free = sum(verdict.free for verdict in host.verdicts)
    if not free or host.snapshot.shared_display:
        return ()
    number = racers or max(_FEWEST, min(_MOST, 2 * free))
    try:
        check_possible(host.snapshot, Selection(2), host.visible_limit)
    except errors.UnsatisfiableRequestError:  # on a host with one GPU, and for MIG instances
        return (1,) * number
    return tuple(2 if i % 4 == 3 else 1 for i in range(number))


TURN = 0.05
"""How long GPUs are used when racers wait for turns, seconds."""

# Time between a program's poll of the GPUs and its use of one, seconds. Importing PyTorch takes far longer.
_START_UP = 0.05

# How long a race may take, seconds: a faulty GPU can block a process that uses it.
_PATIENCE = 60.0

# How long a racer waits for its turn, seconds.
_TURN_PATIENCE = 30.0

# How soon a signal is noticed, seconds.
_NOTICE = 0.05

# Signals that end the demo, which then ends its children.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_at_the_end() -> Iterator[None]:
    """Block signals that end this process, here and in its children, until all is cleaned up.

    :func:`race` looks for them. So no process and no directory is left behind.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Outcome:
    """The report of one racer.

    Attributes:
        pid: the racer.
        nb_gpus: how many GPUs it claims.
        gpus: those that it got; empty if it got none.
        refused: the message of the refusal, if too few GPUs were free.
        trouble: the error of a GPU or of its driver.
        failed: any other error.
        began: when the claim succeeded or was refused, in seconds after the start signal; None: not measured.
        ended: when it was about to release its GPUs; infinite if all others had reported by then.
    """

    pid: int
    nb_gpus: int
    gpus: tuple[Gpu, ...] = ()
    refused: str = ""
    trouble: str = ""
    failed: str = ""
    began: float | None = None
    ended: float = math.inf

    def got(self, gpus: Sequence[Gpu]) -> None:
        """Record the GPUs and the time."""
        self.began, self.gpus = time.monotonic(), tuple(gpus)


Work = Callable[[Outcome, Any, "Connection[Any, Any]"], None]
"""What a racer does after the start signal. An exception that it raises becomes its outcome."""


def claim_at_once(outcome: Outcome, driver: object, line: Connection[Any, Any]) -> None:
    """Claim without waiting, and hold the GPUs until all racers have reported."""
    outcome.got(claim_gpus(outcome.nb_gpus, logger=QUIET, timeout=0.0, affinity=None).gpus)
    line.send(outcome)
    line.recv()
    release_gpus()


def claim_in_turn(outcome: Outcome, driver: object, line: Connection[Any, Any]) -> None:
    """Wait for a turn, use the GPUs for a moment and release them."""
    outcome.got(claim_gpus(outcome.nb_gpus, logger=QUIET, timeout=_TURN_PATIENCE, affinity=None).gpus)
    time.sleep(TURN)
    outcome.ended = time.monotonic()
    release_gpus()
    line.send(outcome)


def poll_and_pick(outcome: Outcome, driver: Any, line: Connection[Any, Any]) -> None:
    """Do what programs do without safe_gpu, on a simulated host: poll the driver, pick a free GPU, start up, use it."""
    seen = driver.snapshot().gpus
    free = [gpu for gpu in seen if not (gpu.processes or gpu.unusable or gpu.lost)][: outcome.nb_gpus]
    time.sleep(_START_UP)
    with ExitStack() as contexts:
        for gpu in free:
            contexts.enter_context(driver.occupy(gpu.uuid))
        outcome.got(free)
        line.send(outcome)
        line.recv()


def race(asks: Sequence[int], work: Work) -> list[Outcome]:
    """Run a racer for each of ``asks``, all started by one signal.

    Returns:
        The outcomes in the order of ``asks``, with times relative to the start signal.
    """
    hear, fire = os.pipe()
    racers: list[_Racer] = []
    with ExitStack() as ending, os.fdopen(hear), os.fdopen(fire, "wb", buffering=0) as gun:
        for ask in asks:
            racers.append(_Racer(work, ask, hear, fire))
            ending.callback(racers[-1].kill)
        until = time.monotonic() + _PATIENCE
        outcomes = [racer.hear(until) for racer in racers]
        fired = time.monotonic()
        gun.close()
        for i, racer in enumerate(racers):
            if not outcomes[i].failed and not outcomes[i].trouble:
                outcomes[i] = racer.hear(fired + _PATIENCE)
        until = time.monotonic() + _PATIENCE
        for outcome, racer in zip(outcomes, racers, strict=True):
            code = racer.finish(until)
            if code != 0 and not outcome.failed:
                outcome.failed = "it did not exit" if code is None else "it could not release its GPUs"
    for outcome in outcomes:
        outcome.began = None if outcome.began is None else outcome.began - fired
        outcome.ended -= fired
    return outcomes


class _Racer:
    """A forked process that claims; a signal that ends the demo interrupts the wait for it."""

    def __init__(self, work: Work, ask: int, hear: int, fire: int) -> None:
        self._ask = ask
        context = multiprocessing.get_context("fork")
        self._line, far_end = context.Pipe()
        arguments = (os.getpid(), far_end, work, ask, hear, fire)
        self._process = context.Process(target=_racer_main, args=arguments, daemon=True)
        self._process.start()
        far_end.close()

    def hear(self, until: float) -> Outcome:
        """Return its next message: that it is ready, or its outcome."""
        failed = f"it neither got a GPU nor was refused within {_PATIENCE:.0f} s"
        try:
            if self._waits(self._line.poll, until):
                outcome: Outcome = self._line.recv()
                return outcome
        except (EOFError, OSError):
            failed = "it exited without a report"
        return Outcome(self._process.pid or 0, self._ask, failed=failed)

    def finish(self, until: float) -> int | None:
        """Let it release its GPUs and exit; its exit code, None if it does not exit."""
        with suppress(OSError):  # it has exited
            self._line.send("let go")
        self._waits(self._has_exited, until)
        return self._process.exitcode

    def _has_exited(self, seconds: float) -> bool:
        self._process.join(seconds)
        return self._process.exitcode is not None

    @staticmethod
    def _waits(ready: Callable[[float], bool], until: float) -> bool:
        while not ready(_NOTICE):
            if signal.sigpending() & set(_SIGNALS):
                raise KeyboardInterrupt
            if time.monotonic() > until:
                return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._line.close()


def _racer_main(parent: int, line: Connection[Any, Any], work: Work, ask: int, hear: int, fire: int) -> None:
    """Run a racer. All modules were imported before the fork."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        return  # the parent exited before prctl
    os.close(fire)
    outcome = Outcome(os.getpid(), ask)
    try:
        with opened_driver() as driver:
            driver.snapshot()  # opens the session and reads the static facts before the start
            line.send(outcome)
            os.read(hear, 1)  # the start signal: returns when the last writer closes the pipe
            work(outcome, driver, line)
        return
    except errors.NotEnoughGpusError as err:
        outcome.began = time.monotonic()
        outcome.refused = str(err)
    except (errors.NoDriverError, errors.PlaceholderError, errors.UnsatisfiableRequestError) as err:
        outcome.trouble = str(err)  # the plan has only claims that were possible
    except errors.SafeGpuError as err:
        outcome.failed = str(err)
    except Exception as err:  # reported as an outcome, so that the verdict counts it
        outcome.failed = f"{type(err).__name__}: {err}"
    if outcome.gpus:
        os._exit(1)  # it got its GPUs and failed to release them
    line.send(outcome)
