"""The host of a scene, and the racers on it, who live from schedule to schedule."""

import mmap
import os
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from interleave_racer import Racer, Task, names_of_tasks
from interleave_scenes import Scene
from support.actor import GONE, Actor, Failure
from support.broken import break_build
from support.kernel import end_with_parent
from support.stage import HostDirectory, left_behind, place_for_all, replace_file

import safe_gpu
from safe_gpu.coordination import older_package as legacy
from safe_gpu.coordination.directory import PARTS
from safe_gpu.drivers.simulated import SimulatedDriver

_PATIENCE = 100.0  # in which a racer makes its steps, seconds


class SceneHost(HostDirectory):
    """The files of a scene: those that the first claims on a host would make, so that all schedules find the same.

    Its state directories are named by their numbers.
    """

    def __init__(self, scene: Scene, path: str) -> None:
        super().__init__(path, scene.host)
        self._scene = scene
        for number in scene.directories:
            for part in ("", *PARTS):
                self.make_place(f"{number}/{part}")
        legacy.LOCK_FILE = os.path.join(self.make_place("older"), "lock")
        Path(legacy.LOCK_FILE).touch()
        os.chmod(legacy.LOCK_FILE, 0o666)
        if scene.users:
            text = "[host]\norder = fair\n"
            if scene.limit:
                text += f"[default]\nmax_gpus = {scene.limit}\n"
            replace_file(self.policy, text)
        self.claim_everything()
        self.make_files_of_driver()

    def visit(self, number: int) -> None:
        """Let this process use the state directory of that number."""
        self.enter(f"{self.path}/{number}")

    def renew(self) -> None:
        """Let the files be as before the first schedule."""
        for number in self._scene.directories:
            for part in PARTS:
                _empty(Path(self.path, str(number), part))
            self._reopen(number)
        _empty(Path(self.tree, self.preset))
        for path in Path(self.path).glob("scope-*"):
            path.unlink()
        if self._scene.mode:
            self.visit(self._scene.directories[0])
            driver = SimulatedDriver(self.preset)
            driver.divide(driver.idle.gpus[0].whole, self._scene.mode)

    def claim_everything(self) -> list[str]:
        """Claim all GPUs, whole, in each state directory, one after the other. Returns what is wrong."""
        found = []
        for path in Path(self.tree).glob("*/*.mode"):
            path.unlink()
        for number in self._scene.directories:
            self._reopen(number)
            self.visit(number)
            try:
                owner = safe_gpu.GPUOwner(self._scene.gpus, safe_gpu.NoPlaceholder(), timeout=0, affinity=None)
                owner.release_gpus()
            except safe_gpu.SafeGpuError as err:
                found.append(f"afterwards not all can be claimed in directory {number}: {err}")
            found += [f"left: {path}" for path in left_behind(f"{self.path}/{number}")]
        return found

    def _reopen(self, number: int) -> None:
        """Let no GPU be closed in that state directory."""
        Path(self.path, str(number), "closed").unlink(missing_ok=True)


def _empty(directory: Path) -> None:
    """Remove the files of a directory."""
    for path in directory.iterdir():
        if not path.is_dir():
            path.unlink()


class Host:
    """A simulated host and its racers, who live from schedule to schedule unless they are struck.

    Attributes:
        worn: racers that cannot take part in another schedule: another process takes their part.
    """

    def __init__(self, scene: Scene, broken: str = "") -> None:
        self.scene = scene
        self.clock = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self.worn: set[str] = set()
        self._broken = broken
        self._place = place_for_all("explorer", in_memory=True)
        self._files = SceneHost(scene, f"{self._place}/host")
        self._tasks: dict[str, list[Task]] = {}
        for name in scene.plans:
            self._tasks[name] = [Task(one, os.pipe()) for one in names_of_tasks(name)]
        self._racers: dict[str, Actor] = {}

    @property
    def tasks(self) -> list[Task]:
        """The threads of all racers."""
        return [task for tasks in self._tasks.values() for task in tasks]

    def begin(self) -> list[Task]:
        """Let all be as before the first schedule; their threads."""
        self._files.renew()
        self.clock[0] = 0.0
        for name in self.scene.plans:
            if name in self.worn:
                self._end(name)
            if name not in self._racers:
                self._start(name)
        for task in self.tasks:
            task.begin()
        return self.tasks

    def _start(self, name: str) -> None:
        """Start the process of a racer, which waits for its first grant."""
        plan = self.scene.plans[name]
        for task in self._tasks[name]:
            task.forget()

        def become(racer: Racer) -> None:
            self.scene.become(racer)
            break_build(self._broken)

        def live(line: Connection) -> None:
            end_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._files.visit(plan.at)
            Racer(self._tasks[name], line, self.clock, self._files.path, self.scene).live(plan.act, become)

        self._racers[name] = Actor(live, name=name, patience=_PATIENCE)

    def _end(self, name: str) -> None:
        """Kill a racer."""
        self.worn.discard(name)
        if name in self._racers:
            self._racers.pop(name).end()

    def hear(self, name: str) -> tuple[str, float, str, list[Any]]:
        """What a racer says of itself: its state, until when it waits and on what, and what it did and said.

        Raises:
            Failure: it says nothing.
        """
        said = self._racers[name].hear()
        if said == GONE:
            raise Failure(f"{name} has gone")
        return said

    def bury(self, name: str) -> None:
        """Wait until a racer that has closed everything is gone."""
        self._racers[name].join()
        self._end(name)

    def check(self) -> list[str]:
        """What is wrong when all are over."""
        for name in self.worn & self._racers.keys():
            self._end(name)
        return self._files.claim_everything()

    def restart(self) -> None:
        """End all racers, wherever they stand."""
        for name in list(self._racers):
            self._end(name)

    def close(self) -> None:
        """End all, and remove the files."""
        self.restart()
        for task in self.tasks:
            task.close()
        shutil.rmtree(self._place, ignore_errors=True)
