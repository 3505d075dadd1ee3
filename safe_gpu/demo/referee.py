"""What a race stands on: its host, child processes that end with their parent, and a referee outside.

It has two independent detectors. :class:`Markers`: each process that has a GPU creates a link that can exist only once.
:class:`Watch`: a separate process polls the driver for the processes on each GPU.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import procfs
from ..claim.free import current_verdicts
from ..claim.owner import claim_gpus, release_gpus
from ..devices import GpuRequest, GpuVerdict, HostSnapshot, ProcessKind
from ..drivers import opened_driver
from ..errors import NoDriverError, SafeGpuError, StateDirError, UnsatisfiableRequestError
from ..runtimes.visible_devices import VisibleLimit
from ..runtimes.visible_limit import visible_limit_of
from ..selection.verdicts import computes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from types import FrameType

    from ..devices import GpuProcess, HostSnapshot
    from ..drivers.base import Driver


# Child processes that end with their parent, and temporary directories that are always removed.


# Signals that end the parent, which then ends its children. They are blocked while a child is started.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Delay before an interrupt is repeated, if an exception would have been lost, seconds.
_AGAIN = 0.01
_PR_SET_PDEATHSIG = 1  # prctl(2)


@contextmanager
def cleaned_up() -> Iterator[None]:
    """Inside this context Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt once; later signals are ignored.

    This works only in the main thread, and only for signals at their default. After the context SIGTERM and SIGHUP
    kill the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    wanted = (*_SIGNALS, signal.SIGALRM)
    before = {number: handler for number in wanted if (handler := signal.getsignal(number)) in defaults}
    caught: list[int] = []

    def unwind(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            caught.append(number)
        if _in_destructor(frame):
            if signal.SIGALRM in before:  # else only a further signal can interrupt
                signal.setitimer(signal.ITIMER_REAL, _AGAIN)
            return
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, unwind)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if caught and caught[0] != signal.SIGINT:
            os.kill(os.getpid(), caught[0])


def _in_destructor(frame: FrameType | None) -> bool:
    """Whether the frame is inside a ``__del__``. Python prints exceptions raised there and continues."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextmanager
def children_end() -> Iterator[None]:
    """Kill and join at the end all children that were started inside, even if an interrupt came during a start."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        started = set(multiprocessing.active_children()) - before
        for process in started:
            process.kill()
        for process in started:
            process.join()


@contextmanager
def scratch_directory(prefix: str, parent: str | None = None) -> Iterator[str]:
    """A directory for this user only, with a random name; it is removed at the end with its content.

    ``tempfile.TemporaryDirectory`` does not remove its directory if an interrupt comes while it is created or removed.
    Here a second attempt follows, and :func:`cleaned_up` allows only one interrupt.
    """
    path = os.path.join(parent or tempfile.gettempdir(), prefix + os.urandom(8).hex())
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        try:
            shutil.rmtree(path)
        finally:
            shutil.rmtree(path, ignore_errors=True)


class Child:
    """A forked process that runs ``work(line, *arguments)``.

    It ignores SIGINT, which a terminal sends to both processes: the parent handles it and ends the child.

    Attributes:
        line: the parent's end of a pipe to the child; EOFError there means that the child has exited.
        pid: its process id.
    """

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.line, far_end = context.Pipe()
        self._process = context.Process(target=_child_main, args=(os.getpid(), work, far_end, *arguments), daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        far_end.close()
        self.pid = self._process.pid or 0

    def finish(self, seconds: float) -> int | None:
        """Wait at most ``seconds`` for its exit; returns its exit code, or None if it still runs."""
        self._process.join(seconds)
        return self._process.exitcode

    def kill(self) -> None:
        """Kill it; safe to call twice, and after its exit."""
        self._process.kill()
        self._process.join()
        self.line.close()


def _child_main(parent: int, work: Callable[..., None], line: Connection[Any, Any], *arguments: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent exited before prctl
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with suppress(EOFError, BrokenPipeError):  # the parent has closed the pipe
        work(line, *arguments)


# The hosts of races: the GPUs that can be claimed on this host, and private simulated hosts.


DEFAULT_HOST = "dgx-a100"
"""The simulated host if SAFE_GPU_DRIVER names none."""

QUIET = logging.getLogger("safe_gpu.demo")
"""The logger of all claims, without output: the demo prints its own report."""

QUIET.propagate = False
QUIET.addHandler(logging.NullHandler())

_KIND = "simulated"


class RaceHost(NamedTuple):
    """A host before a race: one poll, the verdicts for a claim of this process, and the fence of CUDA_VISIBLE_DEVICES.

    ``obstacle`` is another reason why no claim is possible, "" if there is none.
    """

    snapshot: HostSnapshot
    verdicts: tuple[GpuVerdict, ...] = ()
    fence: VisibleLimit | None = None
    obstacle: str = ""


def wanted_host() -> str | None:
    """The simulated host that SAFE_GPU_DRIVER names; None if it names a driver of real GPUs or is not set."""
    kind, _, name = os.environ.get("SAFE_GPU_DRIVER", "").partition(":")
    return name if kind == _KIND else None


def look() -> RaceHost:
    """The host of the driver that SAFE_GPU_DRIVER names; without a driver it has no GPUs.

    Raises:
        NoDriverError: the driver that SAFE_GPU_DRIVER names does not work.
        LockTimeout, StateDirError: as for a claim.
    """
    try:
        with opened_driver() as driver:
            snapshot = driver.snapshot()
            if not snapshot.gpus:
                return RaceHost(snapshot)
            try:
                fence = visible_limit_of(snapshot, 1, driver.runtime)
            except UnsatisfiableRequestError as err:
                return RaceHost(snapshot, obstacle=str(err))
    except NoDriverError:
        if os.environ.get("SAFE_GPU_DRIVER") not in (None, "", "auto"):
            raise
        return RaceHost(HostSnapshot(()))
    return RaceHost(snapshot, current_verdicts(snapshot, GpuRequest(), fence), fence)


@contextmanager
def simulated_host(name: str) -> Iterator[None]:
    """An unused simulated host in a temporary directory, for this process and its children.

    One claim is made there and released, so that racers need not import modules.

    Raises:
        UnsatisfiableRequestError: there is no such host.
        StateDirError: locks work in no directory for temporary files.
    """
    kept = dict(os.environ)
    try:
        with _directory(name):
            yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def _directory(name: str) -> Iterator[None]:
    """Use a directory for temporary files, or one in /dev/shm if locks do not work there (a network file system)."""
    with scratch_directory("safe-gpu-demo-") as directory:
        try:
            _enter(name, directory)
        except StateDirError:
            if not os.path.isdir("/dev/shm"):
                raise
        else:
            yield
            return
    with scratch_directory("safe-gpu-demo-", "/dev/shm") as directory:
        _enter(name, directory)
        yield


def _enter(name: str, directory: str) -> None:
    for variable in list(os.environ):
        if variable.startswith(("SAFE_GPU_", "CUDA_", "ROCR_", "HIP_")):
            del os.environ[variable]
    os.environ.update(
        SAFE_GPU_DIR=directory,
        SAFE_GPU_DRIVER=f"{_KIND}:{name}",
        SAFE_GPU_LEGACY_LOCK="never",
        SAFE_GPU_TEST_SIMULATED="1",
    )
    claim_gpus(logger=QUIET, timeout=0.0, affinity=None)
    release_gpus()


# A referee for races: observes from outside which process uses which GPU, without leases, locks and queues.


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
