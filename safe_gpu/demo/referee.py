"""A referee for races: observes from outside which process uses which GPU, without leases, locks and queues.

It has two independent detectors. :class:`Markers`: each process that has a GPU creates a link that can exist only once.
:class:`Watch`: a separate process polls the driver for the processes on each GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from .. import procfs
from ..devices import ProcessKind
from ..errors import SafeGpuError
from ..selection.verdicts import computes
from .children import Child

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from ..devices import GpuProcess, HostSnapshot
    from ..drivers.base import Driver


class Markers:
    """Symbolic links in one directory, one for each GPU, that name the process that has it. symlink(2) is exclusive.

    A marker counts only while the process that created it lives. The kernel releases the lease of a process that dies,
    but not its marker, so the next owner removes that. Links are used because a link is created together with its text;
    a new file would be empty for a moment.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def enter(self, uuid: str) -> int | None:
        """Mark the GPU as held by this process; returns the pid of a process that holds it already, or None.

        In a collision the other process's marker stays. The result is 0 if that marker was removed in the meantime.
        """
        path, pid = self._path(uuid), os.getpid()
        while True:
            try:
                os.symlink(f"{pid} {procfs.start_time(pid)}", path)
                return None
            except FileExistsError:
                pass
            there = _text(path)
            if _lives(there):
                return _pid(there)
            aside = f"{path}.{pid}"
            try:
                os.rename(path, aside)
            except FileNotFoundError:
                continue
            moved = _text(aside)
            os.unlink(aside)
            if moved != there:
                return _pid(moved)  # another process replaced the stale marker first, and holds the GPU

    def leave(self, uuid: str) -> None:
        """Remove this process's marker, before the GPU is released. After a collision it has none."""
        if _pid(_text(self._path(uuid))) == os.getpid():
            os.unlink(self._path(uuid))

    def _path(self, uuid: str) -> str:
        return os.path.join(self._directory, uuid.replace("/", "_"))


def _text(path: str) -> str:
    """The text of a marker, "PID START"; empty if there is none."""
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def _pid(text: str) -> int:
    return int(text.split()[0]) if text else 0


def _lives(text: str) -> bool:
    """Whether the process named in a marker may still have its GPU; True for an empty text, a marker just removed."""
    if not text:
        return True
    pid, start = int(text.split()[0]), text.split()[1]
    now = procfs.start_time(pid)  # None if other users' processes are hidden
    return not procfs.is_exiting(pid) and (now is None or str(now) == start)


@dataclass(frozen=True)
class Sighting:
    """Processes that the driver showed on one GPU at the same time; ``residents`` were there when the watch began."""

    uuid: str
    newcomers: frozenset[int]
    residents: frozenset[int]

    def concerns(self, pids: frozenset[int]) -> bool:
        """Whether one of ``pids`` is or may be among the newcomers: in a container some pids do not resolve."""
        return any(pid in pids or not procfs.exists(pid) for pid in self.newcomers)


class Watched(NamedTuple):
    """What a watch saw.

    Attributes:
        looks: the number of polls.
        sightings: every set of several processes on one GPU that has a newcomer.
        shown: (UUID, pid) of every newcomer.
        trouble: why the watch stopped early; "" if it did not.
    """

    looks: int = 0
    sightings: tuple[Sighting, ...] = ()
    shown: frozenset[tuple[str, int]] = frozenset()
    trouble: str = ""


class Watch:
    """A process that polls the driver for the processes on each GPU, from construction until :meth:`stop`.

    Args:
        open_driver: called in that process.
        pause: seconds between two polls.
    """

    def __init__(self, open_driver: Callable[[], Driver], pause: float) -> None:
        self._child = Child(_watch, open_driver, pause)
        try:
            self._child.line.recv()  # it has polled once
        except EOFError:
            pass
        except BaseException:
            self._child.kill()
            raise

    def stop(self) -> Watched:
        """Poll once more, end the process, and return what it saw."""
        try:
            self._child.line.send("stop")
            watched = self._child.line.recv()
            assert isinstance(watched, Watched)
            return watched
        except (EOFError, OSError):
            return Watched(trouble="the process that polled the driver has died")
        finally:
            self._child.kill()


_Users = dict[str, "dict[int, GpuProcess]"]
"""UUID -> pid -> process, without processes of kind graphics."""


def _watch(report: Connection[object, object], open_driver: Callable[[], Driver], pause: float) -> None:
    residents: _Users | None = None
    seen: set[Sighting] = set()
    shown: set[tuple[str, int]] = set()
    looks = 0
    stopped = False
    trouble = ""
    try:
        driver = open_driver()
        residents = _users(driver.snapshot())
        report.send("ready")
        while not stopped:
            stopped = report.poll(pause)  # after "stop" one more poll follows, which sees all present processes
            looks += 1
            for uuid, users in _users(driver.snapshot()).items():
                newcomers = users.keys() - residents.get(uuid, {}).keys()
                shown.update((uuid, pid) for pid in newcomers)
                if newcomers and len(users) > 1:
                    computing = {pid for pid, process in users.items() if computes(process, procfs.describe_process)}
                    if computing & newcomers and len(computing) > 1:
                        seen.add(Sighting(uuid, frozenset(computing & newcomers), frozenset(computing - newcomers)))
        driver.close()
    except SafeGpuError as err:
        trouble = str(err)
    if residents is None:
        report.send("ready")
    if not stopped:
        report.recv()
    report.send(Watched(looks, tuple(sorted(seen, key=lambda one: one.uuid)), frozenset(shown), trouble))


def _users(snapshot: HostSnapshot) -> _Users:
    """The processes on each GPU. A GPU in MIG mode is left out: it lists the processes of all its instances."""
    return {
        gpu.uuid: {process.pid: process for process in gpu.processes or () if process.kind != ProcessKind.GRAPHICS}
        for gpu in snapshot.gpus
        if not gpu.mig_enabled
    }
