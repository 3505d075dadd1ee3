"""Processes that race for simulated GPUs, and what they tell whoever runs the race."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import acquisition
from safe_gpu.coordination import waiting
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.referee import Markers

QUIET = logging.getLogger("safe_gpu.test_race")
QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())
PRESET = "dgx-a100"


class Racer:
    """A forked process that does one thing and talks to this one over ``line``; it dies with the test at the latest.

    ``uid`` and ``umask`` make it another user's: the pytest of root is readable to it because everything that it needs
    was imported before.
    """

    def __init__(self, work: Callable[[Any], None], *, uid: int | None = None, umask: int | None = None) -> None:
        self.line, theirs = Pipe()
        self.pid = os.fork()
        self.status: int | None = None
        if self.pid == 0:
            try:
                if umask is not None:
                    os.umask(umask)
                if uid is not None:
                    os.setgroups([])
                    os.setresgid(uid, uid, uid)
                    os.setresuid(uid, uid, uid)
                work(theirs)
            except EOFError:
                pass  # the test is over
            except BaseException:
                theirs.send(("error", traceback.format_exc()))
            finally:
                os._exit(0)
        theirs.close()

    def hear(self) -> tuple[Any, ...]:
        """What it says next; ``("gone",)`` where it died."""
        try:
            said = self.line.recv()
        except (EOFError, ConnectionResetError):
            self.join()
            return ("gone",)
        assert said[0] != "error", said[1]
        return said

    def tell(self, word: str) -> None:
        self.line.send(word)

    def kill(self) -> None:
        """Kill it and wait until nothing of it is left."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.join()

    def join(self) -> int:
        """Its wait status."""
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status


def kill_me_at(step: int) -> None:
    """Die by SIGKILL at the so-manieth call of a function that enters the kernel, counted from now."""
    left = step

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal left
        if event == "c_call" and function.__module__ in ("posix", "fcntl"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)


def steps_of(work: Callable[[], None]) -> int:
    """How many calls of functions that enter the kernel it makes."""
    number = 0

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal number
        number += event == "c_call" and function.__module__ in ("posix", "fcntl")

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return number


class Counters:
    """A number for each GPU, read when a claim begins and written one higher when it ends: overlap loses updates."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, uuid: str) -> int:
        path = self._directory / uuid
        return int(path.read_text()) if path.exists() else 0

    def write(self, uuid: str, number: int) -> None:
        path = self._directory / uuid
        path.unlink(missing_ok=True)  # it may be another user's
        path.write_text(str(number))
        path.chmod(0o644)

    def total(self) -> int:
        return sum(self.read(path.name) for path in self._directory.iterdir())


class Track:
    """A simulated host with eight GPUs, the referee's markers and counters, and the racers on it."""

    def __init__(self, directory: Path) -> None:
        self.racers: list[Racer] = []
        self.random = random.Random(20)
        self.use(directory)

    def use(self, directory: Path) -> None:
        """Race in this directory from now on; there is no state directory in it yet."""
        directory.mkdir(exist_ok=True)
        directory.chmod(0o1777)
        self.state_dir = directory / "state"
        self.driver = SimulatedDriver(PRESET, str(self.state_dir))
        self.markers_dir = directory / "markers"
        for path in (self.markers_dir, directory / "counters"):
            path.mkdir()
            path.chmod(0o777)
        self.markers = Markers(str(self.markers_dir))
        self.counters = Counters(directory / "counters")

    def start(self, work: Callable[[Any], None], **options: Any) -> Racer:
        """Fork a process that does this work."""
        self.racers.append(Racer(work, **options))
        return self.racers[-1]

    def claim_and_hold(
        self,
        line: Any,
        nb_gpus: int = 1,
        *,
        timeout: float | None = 0.0,
        placeholder: Any = None,
        die_at: int = 0,
    ) -> None:
        """What a racer does: claim, hold until told to let go. It says ``refused`` or ``holds``, and ``done``."""
        if die_at:
            kill_me_at(die_at)
        try:
            claim = safe_gpu.claim_gpus(nb_gpus, placeholder, QUIET, timeout=timeout, affinity=None)
        except safe_gpu.NotEnoughGpusError as err:
            sys.setprofile(None)
            line.send(("refused", err))
            return
        sys.setprofile(None)
        uuids = [gpu.uuid for gpu in claim.gpus]
        rivals = [rival for uuid in uuids if (rival := self.markers.enter(uuid)) is not None]
        counts = [self.counters.read(uuid) for uuid in uuids]
        line.send(("holds", uuids, rivals))
        line.recv()
        for uuid, count in zip(uuids, counts, strict=True):
            self.counters.write(uuid, count + 1)
            self.markers.leave(uuid)
        safe_gpu.release_gpus()
        line.send(("done",))

    def kill(self, racer: Racer) -> None:
        """Kill a racer, and take down the markers of what it held."""
        racer.kill()
        for marker in self.markers_dir.iterdir():
            if marker.read_text() == str(racer.pid):
                marker.unlink()

    def next_word(self, racers: Sequence[Racer]) -> tuple[Racer, tuple[Any, ...]]:
        """The first of these to say something, and what."""
        (line, *_) = wait([racer.line for racer in racers])
        racer = next(racer for racer in racers if racer.line is line)
        return racer, racer.hear()

    def claim_all(self) -> None:
        """All eight GPUs can be had at once, by this process."""
        with safe_gpu.GPUOwner(8, safe_gpu.NoPlaceholder(), QUIET, timeout=0, affinity=None) as claim:
            assert claim.devices_taken == list(range(8))

    def files(self) -> list[str]:
        """Everything in the state directory but what belongs there when nobody does anything."""
        self.driver.snapshot()  # removes what dead processes had on the GPUs
        usual = {"host.lock", *(f"leases/{gpu.uuid}.lock" for gpu in self.driver.idle.gpus)}
        found = {str(path.relative_to(self.state_dir)) for path in self.state_dir.rglob("*") if not path.is_dir()}
        return sorted(found - usual)

    def close(self) -> None:
        """End all racers."""
        for racer in self.racers:
            racer.kill()
            racer.line.close()
        self.racers.clear()


@pytest.fixture
def track(monkeypatch: pytest.MonkeyPatch) -> Iterator[Track]:
    """A fresh track, in a directory that other users can enter."""
    with tempfile.TemporaryDirectory(prefix="safe-gpu-race-") as path:
        os.chmod(path, 0o1777)
        monkeypatch.setenv("SAFE_GPU_DIR", f"{path}/state")
        monkeypatch.setenv("SAFE_GPU_DRIVER", f"simulated:{PRESET}")
        for module in (acquisition, waiting):  # a crowd on a busy machine may need longer for host.lock
            monkeypatch.setattr(module, "MINIMUM_PATIENCE", 300.0)
        track = Track(Path(path))
        _warm_up(track)
        yield track
        track.close()


def _warm_up(track: Track) -> None:
    """Import everything before the first fork: racers are to start at once, whoever's they are."""
    with tempfile.TemporaryDirectory() as path:
        kept = os.environ["SAFE_GPU_DIR"]
        os.environ["SAFE_GPU_DIR"] = path
        try:
            with safe_gpu.GPUOwner(8, None, QUIET, timeout=0, affinity=None):
                racer = Racer(lambda line: track.claim_and_hold(line))
                assert racer.hear()[0] == "refused"
                racer.join()
        finally:
            os.environ["SAFE_GPU_DIR"] = kept
    for name in ("threading", "pwd", "json", "signal"):
        __import__(name)
    str(safe_gpu.NotEnoughGpusError("warm"))


@pytest.fixture
def steps() -> Callable[[Callable[[], None]], int]:
    """Counts the calls that enter the kernel."""
    return steps_of


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition, with a deadline that only a hang reaches."""

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.002)

    return until
