"""A race for GPUs that anyone can watch, on real GPUs where there are some, else on a simulated host."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from .devices import HostSnapshot
from .drivers import open_driver
from .errors import NoDriverError, NotEnoughGpusError, SafeGpuError
from .inquiry import get_free_gpus
from .owner import claim_gpus, release_gpus
from .referee import Markers, Sighting, Watch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from .drivers.simulated import SimulatedDriver

__all__ = ["run"]

_SIMULATED = "simulated:dgx-a100"

# No round begins later than this after the first one, seconds: contexts on real GPUs take their time.
_ENOUGH = 4.0
# What a program does between its look at the GPUs and its use of one, seconds; importing PyTorch takes far longer.
_START_UP = 0.05
# How long a racer may take for anything, seconds: a GPU in trouble can hang whoever touches it.
_PATIENCE = 60.0
# How long each GPU is used where everybody waits for a turn, seconds.
_TURN = 0.05


@dataclass
class _Outcome:
    """What one racer reports; times are of the monotonic clock, which all processes share."""

    pid: int
    asked: int
    labels: tuple[str, ...] = ()
    uuids: tuple[str, ...] = ()
    rivals: tuple[int, ...] = ()
    refused: str = ""
    failed: str = ""
    began: float = 0.0
    ended: float = 0.0


@dataclass
class _Race:
    """One race or several, and what the referee saw in them."""

    outcomes: list[_Outcome] = field(default_factory=list)
    looks: int = 0
    sightings: list[Sighting] = field(default_factory=list)

    def add(self, other: _Race) -> None:
        self.outcomes += other.outcomes
        self.looks += other.looks
        self.sightings += other.sightings

    @property
    def winners(self) -> list[_Outcome]:
        return [outcome for outcome in self.outcomes if outcome.uuids]

    @property
    def refused(self) -> list[_Outcome]:
        return [outcome for outcome in self.outcomes if outcome.refused]

    @property
    def failed(self) -> list[_Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]

    @property
    def taken(self) -> int:
        """How many times a GPU was taken."""
        return sum(len(outcome.uuids) for outcome in self.outcomes)

    @property
    def clashes(self) -> list[tuple[int, int, str]]:
        """(pid, pid of the one who was there before, UUID), from the markers."""
        return [
            (outcome.pid, rival, uuid)
            for outcome in self.outcomes
            for uuid, rival in zip(outcome.uuids, outcome.rivals, strict=True)
            if rival >= 0
        ]

    @property
    def collisions(self) -> int:
        """How many times a GPU was taken that another process had, by whichever detector saw more of it."""
        pids = frozenset(outcome.pid for outcome in self.outcomes)
        together: dict[str, set[int]] = {}
        for sighting in self.sightings:
            if sighting.concerns(pids):
                together.setdefault(sighting.uuid, set()).update(sighting.newcomers | sighting.residents)
        return max(len(self.clashes), sum(len(users) - 1 for users in together.values()))


def run(processes: int | None = None, rounds: int = 5, stream: TextIO | None = None) -> int:
    """Race, watch and tell: who got which GPU and when, who was refused and why, how many collided.

    On real GPUs only free ones are claimed, nobody waits, and each is held for a moment. On a simulated host, in a
    temporary state directory, the racers also take turns; and there, for contrast, the race is run without safe_gpu.

    Args:
        processes: how many claim at the same moment; default: twice as many as there are free GPUs, 4 to 32.
        rounds: how often; fewer where GPUs are slow to start.
        stream: where the story goes; default: standard output.

    Returns:
        0; 1 where two processes had the same GPU, or a claim failed otherwise than by too few free GPUs.
    """
    out = sys.stdout if stream is None else stream
    real = _real_host(out)
    total = _Race()
    if real is not None:
        total.add(_rush(out, processes or max(4, min(32, 2 * len(get_free_gpus()))), rounds, pause=0.02))
    with _simulated_host(_driver_name()) as driver:
        if real is None:
            number = processes or max(4, min(32, 2 * len(driver.idle.gpus)))
            total.add(_rush(out, number, rounds, pause=0.001))
            total.add(_turns(out, number))
        contrast = _without(out, driver, processes or max(4, 2 * len(driver.idle.gpus)), simulated=real is not None)
    return _verdict(out, total, contrast)


def _driver_name() -> str:
    asked = os.environ.get("SAFE_GPU_DRIVER", "")
    return asked if asked.startswith("simulated:") else _SIMULATED


def _real_host(out: TextIO) -> HostSnapshot | None:
    """The host's GPUs where a race on them is possible; tells what there is."""
    if not os.environ.get("SAFE_GPU_DRIVER", "").startswith("simulated:"):
        try:
            driver = open_driver()
            snapshot = driver.snapshot()
            driver.close()
        except NoDriverError:
            if os.environ.get("SAFE_GPU_DRIVER", "auto") != "auto":
                raise
            snapshot = HostSnapshot(())
            _say(out, "There is no NVIDIA GPU here (`safe-gpu doctor` says why), so let us simulate some.", "")
        free = get_free_gpus() if snapshot.gpus else []
        if free and not snapshot.shared_display:
            _say(
                out,
                f"A race for the GPUs of this host: {len(snapshot.physical)}, of which {len(free)} free just now "
                f"({', '.join(free)}).",
                "Only free ones are claimed, each is held for a moment, and nobody waits for one.",
            )
            return snapshot
        if snapshot.gpus:
            reason = "it drives the display and is shared" if snapshot.shared_display else "none of them is free"
            _say(out, f"This host has {len(snapshot.physical)} GPU(s), but {reason}.", "")
    from .drivers.simulated import SimulatedDriver

    host = SimulatedDriver(_driver_name().partition(":")[2]).idle
    _say(
        out,
        f"A race on a simulated host, {host.driver.partition(':')[2]}: {len(host.physical)} x {host.gpus[0].name}.",
        "Processes, locks and signals are real; only the GPUs are not. No real GPU is touched.",
    )
    return None


# ----------------------------------------------------------------------------------------------------------------------
# The races


def _rush(out: TextIO, processes: int, rounds: int, pause: float) -> _Race:
    """Everybody claims at the same moment and nobody waits, several times."""
    race = _Race()
    began = time.monotonic()
    for number in range(1, rounds + 1):
        racers = [partial(_claim, 2 if i % 4 == 3 else 1, 0.0, None) for i in range(processes)]
        heat = _start(racers, open_driver, pause)
        if number == 1:
            _say(out, "", f"1. {processes} processes claim GPUs at the same moment, and none waits:", "")
            _tell(out, heat)
        race.add(heat)
        if time.monotonic() - began > _ENOUGH:
            break
    if number > 1:
        more = _Race(race.outcomes[processes:])
        rounds_more = "round" if number == 2 else "rounds"
        _say(out, f"   {number - 1} more {rounds_more}: {len(more.winners)} claims, {len(more.refused)} refusals.")
    return race


def _turns(out: TextIO, processes: int) -> _Race:
    """Everybody claims at the same moment, waits for a turn and passes the GPUs on."""
    racers = [partial(_claim, 2 if i % 4 == 3 else 1, 30.0, _TURN) for i in range(processes)]
    race = _start(racers, open_driver, 0.001)
    last: dict[str, float] = {}
    gaps = []
    for outcome in sorted(race.winners, key=lambda outcome: outcome.began):
        gaps += [outcome.began - last[uuid] for uuid in outcome.uuids[:1] if uuid in last]
        last.update(dict.fromkeys(outcome.uuids, outcome.ended))
    _say(
        out, "", f"2. The same {processes}, each waiting for its turn and using its GPUs for {_TURN * 1e3:.0f} ms:", ""
    )
    _say(out, f"   {len(race.winners)} of {processes} served.")
    if gaps:
        gaps.sort()
        _say(
            out,
            f"   From one's release to the next one's claim of that GPU: median {gaps[len(gaps) // 2] * 1e3:.0f} ms, "
            f"worst {gaps[-1] * 1e3:.0f} ms.",
        )
    return race


def _without(out: TextIO, driver: SimulatedDriver, processes: int, *, simulated: bool) -> _Race:
    """The same race by those who poll the driver, pick a free GPU and start up."""
    where = ", on a simulated host" if simulated else ""
    _say(out, "", f"For contrast, {processes} processes without safe_gpu{where}: look, pick a free GPU, start up:", "")
    race = _start(
        [partial(_poll_and_pick, 2 if i % 4 == 3 else 1, driver) for i in range(processes)], lambda: driver, 0.001
    )
    users: dict[str, int] = {}
    for outcome in race.winners:
        for label in outcome.labels:
            users[label] = users.get(label, 0) + 1
    for label, number in sorted(users.items()):
        _say(out, f"   GPU {label}: {number} process{'es at once' if number > 1 else ''}")
    return race


def _verdict(out: TextIO, race: _Race, contrast: _Race) -> int:
    """The last word; returns the exit status."""
    _say(out, "")
    pids = frozenset(outcome.pid for outcome in race.outcomes)
    for pid, rival, uuid in race.clashes:
        _say(out, f"Collision: process {pid} got {uuid}, which process {rival or 'unknown'} had.")
    for sighting in race.sightings:
        if sighting.concerns(pids):
            together = ", ".join(map(str, sorted(sighting.newcomers | sighting.residents)))
            _say(out, f"Collision: the driver showed processes {together} on {sighting.uuid} together.")
    for outcome in race.failed:
        _say(out, f"Failure: process {outcome.pid}: {outcome.failed}")
    _say(
        out,
        f"Verdict: {len(race.winners)} claims of {race.taken} GPUs, {len(race.refused)} refusals, "
        f"{race.collisions} collisions.",
        "         The referee takes no one's word: each winner makes a file that only one can make,",
        f"         and a process of its own asked the driver {race.looks} times who is on which GPU.",
        f"         Without safe_gpu, {contrast.collisions} of the {contrast.taken} GPUs taken were somebody "
        "else's already.",
    )
    return 1 if race.collisions or race.failed else 0


def _tell(out: TextIO, race: _Race) -> None:
    for outcome in sorted(race.outcomes, key=lambda outcome: outcome.began):
        what = f"got GPU {','.join(outcome.labels)}" if outcome.uuids else "was refused"
        asked = f"{outcome.asked} GPU{'s' if outcome.asked > 1 else ''}"
        _say(out, f"   {outcome.began * 1e3:6.1f} ms  process {outcome.pid:<7d} asked for {asked:6s} {what}")
    if race.refused:
        told = race.refused[-1]
        _say(out, "", f"   What process {told.pid} was told:", "")
        _say(out, *(f"      {line}" for line in told.refused.splitlines()))
        _say(out, "")


def _say(out: TextIO, *lines: str) -> None:
    for line in lines:
        print(line, file=out)
    out.flush()


# ----------------------------------------------------------------------------------------------------------------------
# The racers


class _Lane:
    """What a racer has: the starting gun, the referee's markers, and a line to whoever runs the race."""

    def __init__(self, gun: int, markers: Markers, line: Connection[Any, Any]) -> None:
        self.gun = gun
        self.markers = markers
        self.line = line

    def hold(self, outcome: _Outcome, turn: float | None) -> None:
        """Have the GPUs: until all others have tried too, or for so many seconds."""
        found = [self.markers.enter(uuid) for uuid in outcome.uuids]
        outcome.rivals = tuple(-1 if rival is None else rival for rival in found)
        if turn is None:
            self.line.send(outcome)
            self.line.recv()
        else:
            time.sleep(turn)
        for uuid in outcome.uuids:
            self.markers.leave(uuid)
        outcome.ended = time.monotonic()
        if turn is not None:
            self.line.send(outcome)


_Racer = Callable[["_Lane", "_Outcome"], None]


def _claim(asked: int, timeout: float, turn: float | None, lane: _Lane, outcome: _Outcome) -> None:
    outcome.asked = asked
    try:
        owner = claim_gpus(asked, timeout=timeout, affinity=None)
    except NotEnoughGpusError as err:
        outcome.began = time.monotonic()
        outcome.refused = str(err)
        lane.line.send(outcome)
        return
    outcome.began = time.monotonic()
    outcome.uuids = tuple(gpu.uuid for gpu in owner.gpus)
    outcome.labels = tuple(gpu.label for gpu in owner.gpus)
    lane.hold(outcome, turn)
    release_gpus()


def _poll_and_pick(asked: int, driver: SimulatedDriver, lane: _Lane, outcome: _Outcome) -> None:
    outcome.asked = asked
    free = [gpu for gpu in driver.snapshot().gpus if not gpu.processes and not gpu.unusable][:asked]
    time.sleep(_START_UP)
    contexts = [driver.occupy(gpu.uuid) for gpu in free]
    outcome.began = time.monotonic()
    outcome.uuids = tuple(gpu.uuid for gpu in free)
    outcome.labels = tuple(gpu.label for gpu in free)
    lane.hold(outcome, None)
    for context in contexts:
        context.close()


def _start(racers: Sequence[_Racer], watched: Callable[[], Any], pause: float) -> _Race:
    """Run them all from one gun, under the referee's eyes; their times count from the gun."""
    import multiprocessing

    context = multiprocessing.get_context("fork")
    lines = []
    runners = []
    with tempfile.TemporaryDirectory(prefix="safe-gpu-referee-") as directory:
        watch = Watch(watched, pause)
        hear, gun = os.pipe()
        for racer in racers:
            ours, theirs = context.Pipe()
            lane = _Lane(hear, Markers(directory), theirs)
            runner = context.Process(target=_run_racer, args=(racer, lane, gun), daemon=True)
            runner.start()
            theirs.close()
            lines.append(ours)
            runners.append(runner)
        fired = time.monotonic()
        os.close(gun)
        os.close(hear)
        outcomes = [_heard(line, runner.pid or 0) for line, runner in zip(lines, runners, strict=True)]
        looks, sightings = watch.stop()
        for line in lines:
            with suppress(OSError):
                line.send("let go")  # whoever still holds a GPU
        for runner in runners:
            runner.join(_PATIENCE)
            runner.kill()
            runner.join()
    for outcome in outcomes:
        outcome.began -= fired
        outcome.ended -= fired
    return _Race(outcomes, looks, sightings)


def _heard(line: Connection[Any, Any], pid: int) -> _Outcome:
    try:
        if line.poll(_PATIENCE):
            outcome = line.recv()
            assert isinstance(outcome, _Outcome)
            return outcome
        return _Outcome(pid, 0, failed=f"it neither got a GPU nor gave up in {_PATIENCE:.0f} s")
    except EOFError:
        return _Outcome(pid, 0, failed="it ended without a word")


def _run_racer(racer: _Racer, lane: _Lane, gun: int) -> None:
    os.close(gun)
    outcome = _Outcome(os.getpid(), 0)
    os.read(lane.gun, 1)  # ends when the last writer closes
    try:
        racer(lane, outcome)
    except EOFError:
        pass  # whoever ran the race is gone
    except SafeGpuError as err:
        outcome.failed = str(err)
        lane.line.send(outcome)


@contextmanager
def _simulated_host(name: str) -> Iterator[SimulatedDriver]:
    """A simulated host of its own, for this process and its children, with nobody on it."""
    from .drivers.simulated import SimulatedDriver

    kept = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="safe-gpu-demo-") as directory:
        for variable in kept:
            if variable.startswith(("SAFE_GPU_", "CUDA_")):
                del os.environ[variable]
        os.environ.update(SAFE_GPU_DIR=directory, SAFE_GPU_DRIVER=name, SAFE_GPU_LEGACY_LOCK="never")
        try:
            claim_gpus()  # so that no racer begins with an import
            release_gpus()
            yield SimulatedDriver(name.partition(":")[2])
        finally:
            os.environ.clear()
            os.environ.update(kept)
