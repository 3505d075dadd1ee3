"""A referee for races: sees from outside who uses which GPU, and knows nothing of leases, locks and queues.

Two detectors that share nothing. :class:`Markers`: whoever has a GPU makes a file that only one can make. And
:class:`Watch`: a process of its own keeps asking the driver who is on which GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import procfs
from .devices import ProcessKind

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from .devices import HostSnapshot
    from .drivers.base import Driver

__all__ = ["Markers", "Sighting", "Watch"]


class Markers:
    """Files in one directory, a GPU each, that say who has it; made with O_EXCL, so that nobody has to be trusted."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def enter(self, uuid: str) -> int | None:
        """Say that this process has the GPU; the pid of the one who has it already, or None where nobody has.

        A collision leaves the other one's marker; 0 stands for one that left between the two looks.
        """
        try:
            fd = os.open(self._path(uuid), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return self._holder(uuid)
        with os.fdopen(fd, "wb", buffering=0) as file:
            os.fchmod(fd, 0o644)  # whatever the umask: others are to read it
            file.write(b"%d" % os.getpid())
        return None

    def leave(self, uuid: str) -> None:
        """Take one's own marker away, before the GPU is given back; in a collision there is none to take."""
        if self._holder(uuid) == os.getpid():
            os.unlink(self._path(uuid))

    def _holder(self, uuid: str) -> int:
        try:
            with open(self._path(uuid), "rb") as file:
                return int(file.read() or 0)
        except FileNotFoundError:
            return 0

    def _path(self, uuid: str) -> str:
        return os.path.join(self._directory, uuid.replace("/", "_"))


@dataclass(frozen=True)
class Sighting:
    """Processes that the driver showed on one GPU at the same time; only ``newcomers`` were not there at the start."""

    uuid: str
    newcomers: frozenset[int]
    residents: frozenset[int]

    def concerns(self, pids: frozenset[int]) -> bool:
        """Whether one of these is among the newcomers, or may be: a container shows pids that resolve nowhere."""
        return any(pid in pids or not procfs.exists(pid) for pid in self.newcomers)


class Watch:
    """A process that asks the driver again and again who is on which GPU, from construction until :meth:`stop`.

    Args:
        open_driver: called in that process.
        pause: seconds between two looks.
    """

    def __init__(self, open_driver: Callable[[], Driver], pause: float) -> None:
        import multiprocessing

        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(theirs, open_driver, pause), daemon=True)
        self._process.start()
        theirs.close()
        self._ours.recv()  # it has taken its first look

    def stop(self) -> tuple[int, list[Sighting]]:
        """How often it looked, and every set of more than one process that it saw on a GPU with a newcomer.

        Raises:
            EOFError: it died, for the driver failed.
        """
        self._ours.send("stop")
        looks, sightings = self._ours.recv()
        self._process.join()
        return looks, sightings


def _watch(report: Connection[object, object], open_driver: Callable[[], Driver], pause: float) -> None:
    driver = open_driver()
    residents = _users(driver.snapshot())
    report.send("ready")
    seen: set[Sighting] = set()
    looks = 0
    stopped = False
    while not stopped:
        stopped = report.poll(pause)  # one more look is taken then: whoever is there now has been seen
        looks += 1
        for uuid, pids in _users(driver.snapshot()).items():
            newcomers = pids - residents[uuid] if uuid in residents else pids
            if newcomers and len(pids) > 1:
                seen.add(Sighting(uuid, newcomers, pids - newcomers))
    report.recv()
    report.send((looks, sorted(seen, key=lambda sighting: sighting.uuid)))
    driver.close()


def _users(snapshot: HostSnapshot) -> dict[str, frozenset[int]]:
    return {
        gpu.uuid: frozenset(process.pid for process in gpu.processes or () if process.kind != ProcessKind.GRAPHICS)
        for gpu in snapshot.gpus
    }
