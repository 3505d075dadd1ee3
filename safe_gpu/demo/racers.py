"""The racers: who asks for what, and the processes that claim."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..claim.owner import claim_gpus, release_gpus
from ..claim.view import HostView
from ..devices import GpuRequest
from ..drivers import open_driver, opened_driver
from ..errors import NoDriverError, NotEnoughGpusError, PlaceholderError, SafeGpuError, UnsatisfiableRequestError
from ..selection.choice import check_possible
from .referee import QUIET, Child, Markers, Watch, Watched, children_end, scratch_directory

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ..devices import Gpu, GpuVerdict, HostSnapshot
    from ..drivers.base import Driver
    from ..runtimes.visible_devices import VisibleLimit


# Chooses the claims of a race for a host. Pure: a function of a snapshot and verdicts.


_FEWEST, _MOST = 4, 32
# Free memory that the contexts of all racers need on a GPU that they share with a desktop, bytes.
_ROOM_TO_SHARE = 1 << 30


class RacerRequest(NamedTuple):
    """The claim of one racer; ``min_memory`` in bytes, as in ``claim_gpus``."""

    nb_gpus: int = 1
    min_memory: int | None = None


class Plan(NamedTuple):
    """A race, with one entry for each racer.

    ``shared`` means that the claims do not exclude each other, because the GPU drives the display.
    """

    asks: tuple[RacerRequest, ...]
    shared: bool = False


def plan_race(
    snapshot: HostSnapshot, verdicts: Sequence[GpuVerdict], fence: VisibleLimit | None = None, racers: int | None = None
) -> Plan | None:
    """The race for this host, or None if no GPU can be claimed now.

    Args:
        snapshot: one poll of the driver.
        verdicts: of every device, for a claim of one GPU by this process.
        fence: the GPUs that CUDA_VISIBLE_DEVICES allows; None: all.
        racers: the number of racers; default: twice as many as free GPUs, 4 to 32. On a shared GPU it is 2 or 3.
    """
    free = [verdict.gpu for verdict in verdicts if verdict.free]
    if not free:
        return None
    if snapshot.shared_display:
        return _shared(snapshot)
    pairs = _possible(snapshot, 2, fence)
    number = racers or max(_FEWEST, min(_MOST, 2 * len(free)))
    return Plan(tuple(RacerRequest(2 if pairs and i % 4 == 3 else 1) for i in range(number)))


def _shared(snapshot: HostSnapshot) -> Plan | None:
    """Two racers that share the GPU, and one that asks for all its memory and is refused, as the desktop uses some."""
    gpu = snapshot.physical[0]
    if gpu.memory_free is not None and gpu.memory_free < _ROOM_TO_SHARE:
        return None
    asks = [RacerRequest(), RacerRequest()]
    if gpu.memory_total is not None and gpu.memory_free is not None and gpu.memory_free < gpu.memory_total:
        asks.append(RacerRequest(min_memory=gpu.memory_total))
    return Plan(tuple(asks), shared=True)


def _possible(snapshot: HostSnapshot, nb_gpus: int, fence: VisibleLimit | None) -> bool:
    """Whether one claim can ever get this number of GPUs: False on a host with one GPU, and for MIG instances."""
    try:
        check_possible(snapshot, GpuRequest(nb_gpus), fence)
    except UnsatisfiableRequestError:
        return False
    return True


# The racers: processes that start claiming at one signal, and report what they got and when.


TURN = 0.05
"""How long GPUs are used when racers wait for turns, seconds."""

# Time between a program's poll of the GPUs and its use of one, seconds. Importing PyTorch takes far longer.
_START_UP = 0.05
# How long a race may take, seconds: a faulty GPU can block a process that uses it.
_PATIENCE = 60.0
# How long a racer waits for its turn, seconds.
_TURN_PATIENCE = 30.0


@dataclass
class Outcome:
    """The report of one racer.

    Attributes:
        pid: the racer.
        known_as: other pids of the racer in the driver's lists: in a container these have the host's numbers.
        ask: its claim.
        labels, uuids: the GPUs that it got, by label and by UUID; empty if it got none.
        rivals: for each of these GPUs, the pid in a marker that existed already; -1: there was none.
        refused: the message of the refusal, if too few GPUs were free.
        trouble: the error of a GPU or of its driver.
        failed: any other error.
        began, ended: when the claim succeeded or was refused, and when it was released, in seconds after the start
            signal; None: not measured.
    """

    pid: int
    ask: RacerRequest
    known_as: frozenset[int] = frozenset()
    labels: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    rivals: tuple[int, ...] = ()
    refused: str = ""
    trouble: str = ""
    failed: str = ""
    began: float | None = None
    ended: float | None = None


@dataclass
class RaceResult:
    """The outcomes of one race, and what the watch saw."""

    outcomes: list[Outcome] = field(default_factory=list)
    watched: Watched = field(default_factory=Watched)

    @property
    def winners(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.uuids]

    @property
    def refused(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.refused]


class RacerState:
    """The state of a racer: its outcome so far, the referee's markers, and the connection to the parent process."""

    def __init__(self, outcome: Outcome, markers: Markers, line: Connection[Any, Any]) -> None:
        self.outcome = outcome
        self._markers = markers
        self._line = line

    def got(self, gpus: Sequence[Gpu]) -> None:
        """Record the time, and mark the GPUs as held by this racer."""
        self.outcome.began = time.monotonic()
        self.outcome.uuids = tuple(gpu.uuid for gpu in gpus)
        self.outcome.labels = tuple(gpu.label for gpu in gpus)
        found = [self._markers.enter(uuid) for uuid in self.outcome.uuids]
        self.outcome.rivals = tuple(-1 if rival is None else rival for rival in found)

    def wait_for_the_others(self) -> None:
        """Report, and keep the GPUs until all other racers have reported."""
        self.report()
        self._line.recv()

    def leave(self) -> None:
        """Remove the markers. To be called just before the GPUs are released."""
        for uuid in self.outcome.uuids:
            self._markers.leave(uuid)
        self.outcome.ended = time.monotonic()

    def report(self) -> None:
        self._line.send(self.outcome)


Work = Callable[[RacerState, "Driver"], None]
"""What a racer does after the start signal. An exception that it raises becomes its outcome."""


def claim_at_once(lane: RacerState, driver: Driver) -> None:
    """Claim without waiting, and hold the GPUs until all racers have reported."""
    ask = lane.outcome.ask
    owner = claim_gpus(ask.nb_gpus, logger=QUIET, timeout=0.0, affinity=None, min_memory=ask.min_memory)
    lane.got(owner.gpus)
    if driver.runtime.real:
        with suppress(SafeGpuError):
            view = HostView.of(driver, driver.snapshot(), GpuRequest(len(owner.gpus)))
            lane.outcome.known_as = frozenset(view.own)
    lane.wait_for_the_others()
    lane.leave()
    release_gpus()


def claim_in_turn(lane: RacerState, driver: Driver) -> None:
    """Wait for a turn, use the GPUs for a moment and release them."""
    ask = lane.outcome.ask
    owner = claim_gpus(ask.nb_gpus, logger=QUIET, timeout=_TURN_PATIENCE, affinity=None)
    lane.got(owner.gpus)
    time.sleep(TURN)
    lane.leave()
    release_gpus()
    lane.report()


def poll_and_pick(lane: RacerState, driver: Driver) -> None:
    """What programs do without safe_gpu, on a simulated host: poll the driver, pick a free GPU, start up, use it."""
    from ..drivers.simulated import SimulatedDriver

    assert isinstance(driver, SimulatedDriver)
    seen = driver.snapshot().gpus
    free = [gpu for gpu in seen if not (gpu.processes or gpu.unusable or gpu.lost)][: lane.outcome.ask.nb_gpus]
    time.sleep(_START_UP)
    with ExitStack() as contexts:
        for gpu in free:
            contexts.enter_context(driver.occupy(gpu.uuid))
        lane.got(free)
        lane.wait_for_the_others()
        lane.leave()


def race(asks: Sequence[RacerRequest], work: Work, pause: float) -> RaceResult:
    """Run a racer for each of ``asks``, all started by one signal, while the referee watches the driver.

    Args:
        asks: the claim of each racer.
        work: what all racers do after the start signal.
        pause: seconds between two polls of the watch.

    Returns:
        The outcomes in the order of ``asks``, with times relative to the start signal.
    """
    with scratch_directory("safe-gpu-referee-") as directory, ExitStack() as ending, children_end():
        markers = Markers(directory)
        watch = Watch(open_driver, pause)
        hear, fire = os.pipe()
        ending.callback(os.close, hear)
        gun = ending.enter_context(os.fdopen(fire, "wb", buffering=0))
        racers = [Child(_racer_main, work, ask, markers, hear, fire) for ask in asks]
        for racer in racers:
            ending.callback(racer.line.close)
        ready = time.monotonic() + _PATIENCE
        outcomes = [_next_message(racer, ask, ready) for racer, ask in zip(racers, asks, strict=True)]
        fired = time.monotonic()
        gun.close()
        done = fired + _PATIENCE
        for i, racer in enumerate(racers):
            if not outcomes[i].failed and not outcomes[i].trouble:
                outcomes[i] = _next_message(racer, asks[i], done)
        watched = watch.stop()
        for outcome, code in zip(outcomes, _finish_all(racers), strict=True):
            if code != 0 and not outcome.failed:
                outcome.failed = "it did not exit" if code is None else "it could not release its GPUs"
    for outcome in outcomes:
        outcome.began = None if outcome.began is None else outcome.began - fired
        outcome.ended = None if outcome.ended is None else outcome.ended - fired
    return RaceResult(outcomes, watched)


def _next_message(racer: Child, ask: RacerRequest, deadline: float) -> Outcome:
    """The next message of a racer: that it is ready, or its outcome."""
    try:
        if racer.line.poll(max(0.0, deadline - time.monotonic())):
            outcome = racer.line.recv()
            assert isinstance(outcome, Outcome)
            return outcome
        return Outcome(racer.pid, ask, failed=f"it neither got a GPU nor was refused within {_PATIENCE:.0f} s")
    except (EOFError, OSError):
        return Outcome(racer.pid, ask, failed="it exited without a report")


def _finish_all(racers: Sequence[Child]) -> list[int | None]:
    """Let all racers release their GPUs and exit; returns their exit codes, None for one that does not exit."""
    until = time.monotonic() + _PATIENCE
    for racer in racers:
        with suppress(OSError):  # it has exited
            racer.line.send("let go")
    return [racer.finish(max(0.0, until - time.monotonic())) for racer in racers]


def _racer_main(
    line: Connection[Any, Any], work: Work, ask: RacerRequest, markers: Markers, hear: int, gun: int
) -> None:
    """The main function of a racer. All modules were imported before the fork."""
    os.close(gun)
    outcome = Outcome(os.getpid(), ask)
    lane = RacerState(outcome, markers, line)
    try:
        with opened_driver() as driver:
            driver.snapshot()  # opens the session and reads the static facts before the start
            lane.report()
            os.read(hear, 1)  # the start signal: returns when the last writer closes the pipe
            work(lane, driver)
        return
    except (EOFError, BrokenPipeError):
        raise
    except NotEnoughGpusError as err:
        outcome.began = time.monotonic()
        outcome.refused = str(err)
    except (NoDriverError, PlaceholderError, UnsatisfiableRequestError) as err:
        outcome.trouble = str(err)  # the plan has only claims that were possible
    except SafeGpuError as err:
        outcome.failed = str(err)
    except Exception as err:  # reported as an outcome, so that the verdict counts it
        outcome.failed = f"{type(err).__name__}: {err}"
    if outcome.uuids:
        os._exit(1)  # it got its GPUs and failed to release them
    lane.report()
