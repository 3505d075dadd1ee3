"""A racer: a real process of the package that stands still before each system call by which claims see each other.

It runs the package as it is. Replaced are the functions of Python that make those system calls, and the clock: each
counts as a step, and when the steps that the controller has granted are used up, the process waits for more. A step is
made by one process at a time, so the order of all steps is the schedule. A lock that is waited for, a sleep and a wait
for a thread are told to the controller; time is a number that it moves on when nobody else can go on.
"""

from __future__ import annotations

import _socket
import _thread
import fcntl
import gc
import math
import os
import random
import re
import select
import signal
import struct
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from safe_gpu.claim import closed
from safe_gpu.coordination import directory, doors
from safe_gpu.drivers import simulated
from safe_gpu.host import locks

GO, INTERRUPT = ".", "~"
DEATHS: dict[str, Callable[[tuple[int, str]], Any]] = {
    "!": lambda one: -one[0],
    "^": lambda one: one[0],
    "%": lambda one: (not one[1].startswith("name "), -one[0]),
    "&": lambda one: (one[1].startswith("name "), -one[0]),
}
"""In which order the descriptors of a dead process are closed. Linux begins with the highest."""

ENDLESS = 1 << 30
FREES, GETS, CONTENT = "frees", "gets", "content"  # what is said for the controller alone
HELD = ": another has it"
_GRANT = struct.Struct("=cq")
_TICK = 1e-5  # what a step takes, seconds
_PERSONAL = re.compile(rb'"(pid|start|since|until|queued|waited)": ?[0-9.]+')  # of another time, it would be other
_ASK, _TRY, _WAIT = 36, 37, 38  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
_OFD = {_ASK: "ask", _TRY: "try", _WAIT: "wait for"}
_BEGAN = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)  # for all racers
_LISTED = "/claims", "/queue"
_PARTS = 3  # that a GPU has for shares, and for pieces: more is asked for in vain
_KINDS = {0: "shared", 1: "exclusive"}  # F_RDLCK, F_WRLCK


def names_of_tasks(racer: str) -> list[str]:
    """The names of the threads that a racer may have, the main one first."""
    return [racer, *(racer.lower() * number for number in (1, 2, 3))]


class Task:
    """One thread of a racer, as the controller knows it.

    Args:
        pipe: both ends of what its grants come by.

    Attributes:
        state: "new" (its racer has not begun), "none" (there is no such thread), or what its process said last.
        deadline: until when it waits at most.
        on: what it waits for.
        seen: how often that had been let go of when it looked last.
    """

    def __init__(self, name: str, pipe: tuple[int, int]) -> None:
        self.name = name
        self.racer = name[0].upper()
        self.pipe = pipe
        self.steps = 0  # that are granted, in its own process
        self.begin()

    def begin(self) -> None:
        """In the controller: be as before the first step."""
        self.state = "none"
        if self.name == self.racer:
            self.state = "new"
        self.deadline = math.inf
        self.on = ""
        self.seen = 0

    def grant(self, kind: str, steps: int) -> None:
        """In the controller: let it go on."""
        os.write(self.pipe[1], _GRANT.pack(kind.encode(), steps))

    def forget(self) -> None:
        """In the controller: what was granted to one that is gone is for nobody."""
        while select.select([self.pipe[0]], [], [], 0)[0]:
            os.read(self.pipe[0], _GRANT.size)

    def close(self) -> None:
        """In the controller: it will not be used any more."""
        for end in self.pipe:
            os.close(end)


class Racer:
    """This process, once :meth:`live` is called in a forked child of the controller.

    Args:
        tasks: its threads, those too that do not exist yet.
        line: where it says how far it came.
        clock: shared by all: seconds.
        base: the directory of the host; paths are told relative to it.
        scene: which says whether host.lock is one (``host_lock``), whether nobody else sees its doors (``apart``), and
            whether somebody closes GPUs, so that it matters when that is read (``closes``).
    """

    def __init__(self, tasks: list[Task], line: Connection, clock: Any, base: str, scene: Any) -> None:
        self.scene = scene
        self.made = 0  # random numbers
        self.name = tasks[0].name
        self.tasks = tasks
        self.line = line
        self.clock = clock
        self.base = base
        self.running = tasks[0]
        self.idle = tasks[:0:-1]  # all but the first, which is running: the next one comes last
        self.log: list[Any] = []
        self.held: dict[int, str] = {}  # descriptor -> what others see by it
        self.quiet = False

    def live(self, act: Callable[[Racer], None], become: Callable[[Racer], None]) -> None:
        """Become somebody, and do the same in each schedule, until killed."""
        gc.disable()
        _replace(self)
        become(self)
        while True:
            self._listen(self.tasks[0])
            self.made = 0
            try:
                act(self)
            except BaseException as err:
                self.say("fails", repr(err))
            if self.held:
                self.say("fails", f"it keeps {', '.join(self.held.values())}")
            self._report("over")

    def say(self, what: str, *about: Any) -> None:
        """Tell the referee of something that is no step."""
        self.log.append((what, *about))

    def step(self, what: str) -> None:
        """Stand here, if no more steps are granted; then make one."""
        if self.quiet:
            return
        task = self.running  # another thread may be granted steps as soon as this one has reported
        if not task.steps:
            self._report("at")
            self._listen(task)
        task.steps -= 1
        self.clock[0] += _TICK
        self.log.append(what)

    def wait(self, ready: Callable[[], bool], on: str, deadline: float = math.inf) -> bool:
        """Return True when it is ready, False at the deadline. It is not ready before ``on`` is let go of."""
        task = self.running
        while not ready():
            if self.clock[0] >= deadline:
                return False
            self._report("waits", deadline, on)
            self._listen(task)
        if on:
            self.say(GETS, on)
        return True

    def sleep(self, seconds: float) -> None:
        """Stand in for time.sleep."""
        until = self.clock[0] + seconds
        self.wait(lambda: bool(self.clock[0] >= until), "", until)

    def exec(self) -> None:
        """Do what execve(2) does to descriptors and threads. The program is still this one."""
        spared = {self.line.fileno()}
        for task in self.tasks:
            spared.update(task.pipe)
        for fd in sorted(int(name) for name in os.listdir("/proc/self/fd")):
            with suppress(OSError):
                if fd not in spared and fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.close(fd)

    def die(self, kind: str = "!") -> None:
        """Let go of everything one by one, as the kernel does for a process that exits, and be gone."""
        left = sorted(self.held.items(), key=DEATHS[kind])
        self.say("dies", [label for _, label in left])
        for fd, label in left:
            self.step(f"dying closes {label}")
            _close(fd)
        self._report("gone")
        os.kill(os.getpid(), signal.SIGKILL)

    def spawn(self, run: Callable[[], None]) -> None:
        """Start a thread, which waits for its first grant."""
        if not self.idle:
            raise RuntimeError("can't start new thread")
        task = self.idle.pop()

        def begin() -> None:
            self._listen(task)
            run()
            self.idle.append(task)
            self._report("over")

        self.say("thread", task.name)
        _thread.start_new_thread(begin, ())

    def _report(self, state: str, deadline: float = math.inf, on: str = "") -> None:
        """Tell the controller where this process stands, and what it did and said since."""
        log = self.log
        self.log = []  # before another thread may be granted steps
        self.line.send((state, deadline, on, log))

    def _listen(self, task: Task) -> None:
        """Wait until the controller grants steps to a thread, or strikes this process."""
        sign, task.steps = _GRANT.unpack(os.read(task.pipe[0], _GRANT.size))
        self.running = task
        kind = sign.decode()
        if kind in DEATHS:
            self.die(kind)
        elif kind == INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)

    def label(self, file: int | str) -> str:
        """What a descriptor or a path is, as others know it."""
        if isinstance(file, str):
            path = file
        else:
            path = os.readlink(f"/proc/self/fd/{file}").removesuffix(" (deleted)")
        return path.removeprefix(f"{self.base}/")

    @property
    def suffix(self) -> bytes:
        """What keeps doors apart, as a network namespace does."""
        if self.scene.apart:
            return self.name.encode()
        return b""

    def door(self, address: bytes) -> str:
        """What a door is, as others know it."""
        uuid = address.rpartition(b"/")[2].rstrip(b".")
        return f"name {(uuid + self.suffix).decode()}"

    def look(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call what may find that another has it. Then nothing has changed, and the log says so."""
        try:
            return call(*arguments)
        except OSError:
            if not self.quiet:
                self.log[-1] += HELD
            raise

    # Stand-ins of functions that make system calls

    def flock(self, fd: int, operation: int) -> None:
        """Stand in for flock(2) of host.lock, and of files that matter to nobody else, which is no step."""
        label = self.label(fd)
        if self.quiet or "/" not in label:  # of the driver, or that of a directory, for cleaners
            _flock(fd, operation)
        elif not self.scene.host_lock and label.endswith("/host.lock"):
            return
        elif operation & fcntl.LOCK_UN:
            self.step(f"unlock {label}")
            _flock(fd, operation)
            self.held.pop(fd, None)
        else:
            self.step(f"try exclusive {label}")
            self.look(_flock, fd, operation)
            self.held[fd] = label

    def fcntl(self, fd: int, command: int, argument: Any = 0) -> Any:
        """Stand in for fcntl(2): its locks are steps, and a copy of a descriptor holds what that does."""
        if command in _OFD:
            return self.lock(fd, command, argument)
        result = _fcntl(fd, command, argument)
        if command in (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC) and fd in self.held:
            self.held[result] = self.held[fd]
        return result

    def lock(self, fd: int, command: int, argument: bytes) -> Any:
        """Stand in for fcntl(2) with locks of open file descriptions. One of a file without a name is no step."""
        label = self.label(fd)
        kind = struct.unpack_from("h", argument)[0]
        if kind not in _KINDS:
            if fd in self.held:
                self.step(f"unlock {self.held[fd]}")  # the label by which others know it
                del self.held[fd]
            return _fcntl(fd, command, argument)
        if not _is_unnamed(label):
            self.step(f"{_OFD[command]} {_KINDS[kind]} {label}")
        if command == _ASK:
            answer = _fcntl(fd, command, argument)
            if struct.unpack_from("h", answer)[0] == fcntl.F_WRLCK and not self.quiet:
                self.log[-1] += HELD
            return answer
        if command == _WAIT:
            self.wait(lambda: _succeeds(_fcntl, fd, _TRY, argument), label)
        result = self.look(_fcntl, fd, _TRY, argument)
        self.held[fd] = label
        return result

    def lockf(self, fd: int, operation: int, *where: int) -> None:
        """Stand in for lockf(3), by which the older package waits for its lock."""
        label = self.label(fd)
        if operation & fcntl.LOCK_UN:
            self.step(f"unlock {label}")
            self.held.pop(fd, None)
        else:
            self.step(f"wait for exclusive {label}")
            self.wait(lambda: _succeeds(_lockf, fd, operation | fcntl.LOCK_NB, *where), label)
            self.held[fd] = label
        _lockf(fd, operation, *where)

    def close(self, fd: int) -> None:
        """Stand in for close(2)."""
        self.forget(fd)
        _close(fd)

    def forget(self, fd: int) -> None:
        """A descriptor is closed: a step, if it was the last one of what others see by it."""
        label = self.held.get(fd)
        if label is not None and list(self.held.values()).count(label) == 1:
            self.step(f"close {label}")
        self.held.pop(fd, None)

    def rename(self, source: str, target: str, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        """Stand in for rename(2). Of a file that others have not seen it is a step, and that may be locked."""
        if dst_dir_fd is None or not self.label(dst_dir_fd).endswith(_LISTED):
            _rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            return
        place = self.label(dst_dir_fd)
        old, new = f"{place}/{source}", f"{place}/{target}"
        self.step(f"rename {new}")
        _rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        for fd, label in self.held.items():
            if label == old:
                self.held[fd] = new
        fd = os.open(target, os.O_RDONLY, dir_fd=dst_dir_fd)
        self.say(CONTENT, new, hash(_PERSONAL.sub(b"", os.pread(fd, 1 << 16, 0))))
        _close(fd)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Stand in for unlink(2)."""
        if dir_fd is None:
            label = self.label(path)
        else:
            label = f"{self.label(dir_fd)}/{path}"
        if not _is_unnamed(label):
            self.step(f"unlink {label}")
        _unlink(path, dir_fd=dir_fd)

    def random(self, size: int) -> bytes:
        """Stand in for os.urandom: never the same in one schedule, and the same in each."""
        self.made += 1
        return f"{self.name}{self.made:{size - 1}}".encode()[:size]

    def whole(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        """A function of the simulated driver, as one step, whatever it does within."""

        def stepping(*arguments: Any, **options: Any) -> Any:
            self.step(what)
            before = self.quiet
            self.quiet = True
            try:
                return call(*arguments, **options)
            finally:
                self.quiet = before

        return stepping


# What is replaced
_flock = fcntl.flock
_fcntl = fcntl.fcntl
_lockf = fcntl.lockf
_close = os.close
_unlink = os.unlink
_rename = os.rename
_names = directory.SharedDirectory.names
_Random = random.Random


def _is_unnamed(label: str) -> bool:
    """Whether a file has no name yet by which others know it."""
    return label.rpartition("/")[2].startswith(".")


def _succeeds(call: Callable[..., Any], *arguments: Any) -> bool:
    """Whether a call finds that nobody else has it."""
    with suppress(BlockingIOError):
        call(*arguments)
        return True
    return False


def _replace(racer: Racer) -> None:
    """Put the stand-ins into the modules of this process."""
    _replace_system_calls(racer)
    _replace_driver(racer)
    _replace_locks_and_threads(racer)
    _replace_clock(racer)
    os.sched_yield = lambda: None
    os.sched_getaffinity = lambda pid: set(range(os.cpu_count() or 1))  # else claims look for what is near
    random.Random = lambda: _Random(racer.name)  # type: ignore[misc, assignment]


def _replace_driver(racer: Racer) -> None:
    """Make each call of the simulated driver a step, and each look for closed GPUs where somebody closes some."""
    driver = simulated.SimulatedDriver
    driver.snapshot = racer.whole(driver.snapshot, "poll all")
    driver.usage = racer.whole(driver.usage, "poll some")
    driver.occupy = racer.whole(driver.occupy, "start context")
    context = simulated.SimulatedContext
    context.close = racer.whole(context.close, "end context")
    if racer.scene.closes:
        closed.has_closed_file = racer.whole(closed.has_closed_file, "read closed")


def _replace_system_calls(racer: Racer) -> None:
    """Make steps of the system calls for files, locks and random numbers."""
    fcntl.flock = racer.flock
    fcntl.fcntl = racer.fcntl
    fcntl.lockf = racer.lockf
    os.close = racer.close
    os.rename = racer.rename
    os.unlink = racer.unlink
    os.urandom = racer.random

    def names(self: Any, most: int | None = None, **options: int) -> set[str]:
        label = racer.label(self.fd)
        if label.endswith(_LISTED):
            racer.step(f"list {label}")
        return _names(self, most, **options)

    directory.SharedDirectory.names = names  # type: ignore[method-assign]


def _replace_locks_and_threads(racer: Racer) -> None:
    """Make steps of what is done to doors, and tell the controller of threads and of the locks between them."""
    doors.SHARE_PARTS = doors.SHARE_PARTS[:_PARTS]
    doors.PIECE_PARTS = doors.PIECE_PARTS[:_PARTS]
    doors.socket = _socket_of(racer)  # type: ignore[misc]
    sys.modules["threading"] = _threading_of(racer)
    locks.allocate_lock = _lock_of(racer)  # type: ignore[assignment]


def _replace_clock(racer: Racer) -> None:
    """Let time be the number that the controller moves on."""
    time.time = lambda: _BEGAN[0] + racer.clock[0]
    time.time_ns = lambda: int(time.time() * 1e9)
    time.monotonic = lambda: _BEGAN[1] + racer.clock[0]
    time.monotonic_ns = lambda: int(time.monotonic() * 1e9)
    time.clock_gettime = lambda number: _BEGAN[2] + racer.clock[0]
    time.sleep = racer.sleep


def _socket_of(racer: Racer) -> type[_socket.socket]:
    """The sockets of doors of this racer."""

    class Socket(_socket.socket):
        def bind(self, address: Any) -> None:
            label = racer.door(address)
            racer.step(f"bind {label}")
            racer.look(super().bind, address + racer.suffix)
            racer.held[self.fileno()] = label

        def connect_ex(self, address: Any) -> int:
            racer.step(f"connect {racer.door(address)}")
            return super().connect_ex(address + racer.suffix)

        def close(self) -> None:
            racer.forget(self.fileno())
            super().close()

    return Socket


def _lock_of(racer: Racer) -> type:
    """A lock between the threads of this racer that the controller knows."""

    class Lock:
        def __init__(self) -> None:
            self._is_free = True

        def acquire(self, timeout: float = math.inf) -> bool:
            until = racer.clock[0] + timeout
            if not self._is_free and not racer.wait(lambda: self._is_free, racer.name, until):
                return False
            self._is_free = False
            return True

        def release(self) -> None:
            self._is_free = True
            racer.say(FREES)

    return Lock


def _event_of(racer: Racer) -> type:
    """An event between the threads of this racer that the controller knows."""

    class Event:
        def __init__(self) -> None:
            self._set = False

        def set(self) -> None:
            self._set = True
            racer.say(FREES)

        def is_set(self) -> bool:
            return self._set

        def wait(self, timeout: float | None = None) -> bool:
            deadline = math.inf
            if timeout is not None:
                deadline = racer.clock[0] + timeout
            return racer.wait(self.is_set, racer.name, deadline)

    return Event


def _threading_of(racer: Racer) -> types.ModuleType:
    """A module threading whose locks and threads the controller knows."""
    event = _event_of(racer)

    class Thread:
        def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **about: Any) -> None:
            self._run = lambda: target(*args)
            self._done = event()

        def start(self) -> None:
            def run() -> None:
                self._run()
                self._done.set()

            racer.spawn(run)

        def join(self, timeout: float | None = None) -> None:
            self._done.wait(timeout)

        def is_alive(self) -> bool:
            return not self._done.is_set()

    module = types.ModuleType("threading")
    module.__dict__.update({**vars(threading), "Event": event, "Thread": Thread})
    return module
