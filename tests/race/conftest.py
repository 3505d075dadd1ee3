"""Processes that race for simulated GPUs, and what they tell whoever runs the race."""

import ctypes
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from support.actor import Actor
from support.hip_host import HipHost
from support.stage import UNITS, Referee

import safe_gpu
from safe_gpu.claim import arguments
from safe_gpu.coordination import host_lock
from safe_gpu.drivers.kfd import KfdDriver
from safe_gpu.drivers.simulated import SimulatedDriver
from safe_gpu.runtimes.hip import HIP

QUIET = logging.getLogger("safe_gpu.test_race")
QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())
PRESET = "dgx-a100"


def kill_me_at(step: int) -> None:
    """Die by SIGKILL at this call of a function that enters the kernel, counted from 1 and from now on."""
    left = step

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal left
        if event == "c_call" and function.__module__ in ("posix", "fcntl"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)


class Track:
    """A simulated host, the referee, and the racers on it.

    Attributes:
        claims_once: a racer can choose its GPUs once only, since its runtime is initialised from then on.
    """

    claims_once = False

    def __init__(self, directory: Path, preset: str = PRESET) -> None:
        self.preset = preset
        self.racers: list[Actor] = []
        self.random = random.Random(20)
        self.use(directory)

    def use(self, directory: Path) -> None:
        """Race in this directory from now on; there is no state directory in it yet."""
        directory.mkdir(exist_ok=True)
        directory.chmod(0o1777)
        self.state_dir = directory / "state"
        self.driver: Any = self.open_driver()
        (directory / "referee").mkdir()
        (directory / "referee").chmod(0o777)
        self.referee = Referee(directory / "referee", UNITS)

    def open_driver(self) -> Any:
        """The host's driver."""
        return SimulatedDriver(self.preset, str(self.state_dir))

    def opened(self, claim: Any) -> list[str]:
        """Names of the GPUs that a claim has opened, in its order."""
        return [gpu.uuid for gpu in claim.gpus]

    def work_on(self, claim: Any) -> list[Callable[[], None]]:
        """Compute on the claimed GPUs, as the driver shows it; returns what ends that."""
        return [self.driver.occupy(gpu.uuid).close for gpu in claim.gpus]

    def doubled(self) -> list[str]:
        """The GPUs on which the driver shows several processes at this moment."""
        found = {gpu.uuid: {process.pid for process in gpu.processes or ()} for gpu in self.driver.snapshot().gpus}
        return [uuid for uuid, pids in found.items() if len(pids) > 1]

    def start(self, work: Callable[[Any], None], **options: Any) -> Actor:
        """Fork a process that does this work."""
        self.racers.append(Actor(work, **options))
        return self.racers[-1]

    def bury(self, racer: Actor) -> None:
        """Do what the kernel does after the end of a process."""

    def claim_and_hold(
        self, line: Any, nb_gpus: int = 1, *, timeout: float | None = 0.0, placeholder: Any = None, die_at: int = 0
    ) -> None:
        """What a racer does: claim, hold until told to let go. It says ``refused`` or ``holds``, and ``done``.

        Told to ``work`` before, it computes on its GPUs and says ``works``.
        """
        if die_at:
            kill_me_at(die_at)
        try:
            claim = safe_gpu.claim_gpus(nb_gpus, placeholder, QUIET, timeout=timeout, affinity=None)
        except safe_gpu.NotEnoughGpusError as err:
            sys.setprofile(None)
            line.send(("refused", err))
            return
        sys.setprofile(None)
        uuids = self.opened(claim)
        locks = {uuid: self.referee.begin(uuid, None) for uuid in uuids}
        rivals = [uuid for uuid in uuids if not locks[uuid]]
        counts = [self.referee.count(uuid) for uuid in uuids]
        line.send(("holds", uuids, rivals))
        ends: list[Callable[[], None]] = []
        if line.recv() == "work":
            ends = self.work_on(claim)
            line.send(("works",))
            line.recv()
        for uuid, count in zip(uuids, counts, strict=True):
            self.referee.count(uuid, count + 1)
            self.referee.end(locks[uuid])
        for end in ends:
            end()
        safe_gpu.release_gpus()
        line.send(("done",))

    def next_word(self, racers: Sequence[Actor]) -> tuple[Actor, tuple[Any, ...]]:
        """The first of these to say something, and what."""
        (line, *_) = wait([racer.line for racer in racers])
        racer = next(racer for racer in racers if racer.line is line)
        return racer, racer.hear()

    def counted(self) -> int:
        """How many claims of a GPU have ended, by its counter: those that overlap lose some."""
        return sum(int(path.read_text()) for path in self.referee.directory.glob("*.count"))

    def claim_all(self) -> None:
        """All GPUs can be had at once, by this process."""
        every = len(self.driver.snapshot().gpus)
        with safe_gpu.GPUOwner(every, safe_gpu.NoPlaceholder(), QUIET, timeout=0, affinity=None) as claim:
            assert claim.devices_taken == list(range(every))

    def files(self) -> list[str]:
        """Everything in the state directory but what belongs there when nobody does anything, and what has no name yet:
        it is removed when it is a minute old."""
        self.driver.snapshot()  # removes what dead processes had on the simulated GPUs
        found = [path for path in self.state_dir.rglob("*") if not path.is_dir() and not path.name.startswith(".")]
        return sorted(
            {str(path.relative_to(self.state_dir)) for path in found if path.parent.name != "history"} - {"host.lock"}
        )

    def close(self) -> None:
        """End all racers."""
        for racer in self.racers:
            racer.end()
        self.racers.clear()


class HipTrack(Track):
    """A host of eight fake AMD GPUs: HIP chooses by the variables, once in a process, and the kernel shows its use."""

    claims_once = True

    def __init__(self, directory: Path, host: HipHost) -> None:
        self.host = host
        super().__init__(directory)

    def open_driver(self) -> KfdDriver:
        return KfdDriver()

    def start(self, work: Callable[[Any], None], **options: Any) -> Actor:
        def with_hip(line: Any) -> None:
            ctypes.CDLL(str(self.host.library))  # not in this process, whose other tests are to do without
            work(line)

        return super().start(with_hip, **options)

    def opened(self, claim: Any) -> list[str]:
        """What HIP says, in words of its own."""
        shown = HIP.load().all_shown()
        assert len(shown) == len(claim.gpus)
        for one, gpu in zip(shown, claim.gpus, strict=True):
            assert HIP.is_same(one, gpu), f"{one} was opened for {gpu}"
        return [one.replace("/", "_") for one in shown]

    def work_on(self, claim: Any) -> list[Callable[[], None]]:
        return [HIP.hold(number).release for number in range(len(claim.gpus))]

    def bury(self, racer: Actor) -> None:
        self.host.end(racer.pid)


@pytest.fixture
def track(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Track]:
    """A fresh track, in a directory that other users can enter. Its parameter is a preset, or "hip"."""
    kind = getattr(request, "param", PRESET)
    with tempfile.TemporaryDirectory(prefix="safe-gpu-race-") as path:
        os.chmod(path, 0o1777)
        monkeypatch.setenv("SAFE_GPU_DIR", f"{path}/state")
        for module in (arguments, host_lock):  # a crowd on a busy machine may need longer for host.lock
            monkeypatch.setattr(module, "MINIMUM_PATIENCE", 300.0)
        if kind == "hip":
            library = request.getfixturevalue("build_library")("hip.c", "libamdhip64.so")
            monkeypatch.setenv("SAFE_GPU_DRIVER", "kfd")
            monkeypatch.setenv("SAFE_GPU_FSROOT", f"{path}/host")
            os.mkdir(f"{path}/host")
            track: Track = HipTrack(Path(path), HipHost(Path(path) / "host", library))
        else:
            monkeypatch.setenv("SAFE_GPU_DRIVER", f"simulated:{kind}")
            track = Track(Path(path), kind)
        _warm_up(track)
        yield track
        track.close()


def _warm_up(track: Track) -> None:
    """Import everything before the first fork: racers are to start at once, whoever's they are."""
    with tempfile.TemporaryDirectory() as path:
        kept = os.environ["SAFE_GPU_DIR"]
        os.environ["SAFE_GPU_DIR"] = path
        try:
            # HIP is left alone: it would be initialised in all racers, which are forked from here.
            every = len(track.driver.snapshot().gpus)
            placeholder = safe_gpu.NoPlaceholder() if track.claims_once else None
            with safe_gpu.GPUOwner(every, placeholder, QUIET, timeout=0, affinity=None):
                racer = track.start(lambda line: track.claim_and_hold(line))
                assert racer.hear()[0] == "refused"
                racer.join()
        finally:
            os.environ["SAFE_GPU_DIR"] = kept
    for name in ("threading", "pwd", "json", "signal"):
        __import__(name)
    str(safe_gpu.NotEnoughGpusError("warm"))
