"""A racer: a real process of the package that stands still before each system call by which claims see each other.

It runs the package as it is. Replaced are the functions of Python that make those system calls, and the clock: each
counts as a step, and when the steps that the controller has granted are used up, the process waits for more. A step is
made by one process at a time, so the order of all steps is the schedule. A lock that is waited for, a sleep and a wait
for a thread are told to the controller; time is a number that it moves on when nobody else can go on.
"""

from __future__ import annotations

import _socket
import _thread
import builtins
import fcntl
import gc
import marshal
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
from typing import Any

from safe_gpu.drivers import simulated

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
_SLOT = re.compile(rb"\.share\.([0-9]+)")
_PERSONAL = re.compile(  # what another process would write, or the same at another time
    rb'"(pid|start|since|until|queued|ended)": ?[0-9.]+|"(claim)": ?\[[0-9]+, ?[0-9.]+'
)
_TABLES = "/proc/net/unix", "/proc/locks"
_OFD = {36: "ask", 37: "try", 38: "wait for"}  # F_OFD_GETLK, F_OFD_SETLK, F_OFD_SETLKW
_KINDS = {0: "shared", 1: "exclusive"}  # F_RDLCK, F_WRLCK


def names_of_tasks(racer: str) -> list[str]:
    """Return the names of the threads that a racer may have, the main one first."""
    return [racer, *(racer.lower() * number for number in (1, 2, 3))]


class Task:
    """One thread of a racer, as the controller knows it.

    Args:
        pipe: both ends of what its grants come by.
    """

    def __init__(self, name: str, pipe: tuple[int, int]) -> None:
        self.name = name
        self.racer = name[0].upper()
        self.pipe = pipe
        self.steps = 0  # that are granted

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
        slots: how many shares of a GPU there can be.
    """

    def __init__(self, tasks: list[Task], line: _socket.socket, clock: Any, base: str, slots: int) -> None:
        self.slots = slots
        self.name = tasks[0].name
        self.tasks = tasks
        self.line = line
        self.clock = clock
        self.base = base
        self.running = tasks[0]
        self.idle = tasks[:0:-1]
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
        if self.quiet or (what.startswith("pread") and self.log and self.log[-1] == what):  # it is read again
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
        spared = {fd for task in self.tasks for fd in task.pipe} | {self.line.fileno()}
        for name in sorted(map(int, os.listdir("/proc/self/fd"))):
            with suppress(OSError):
                if name not in spared and fcntl.fcntl(name, fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                    os.close(name)

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
        log, self.log = self.log, []
        self.line.send(marshal.dumps((self.running.name, state, deadline, on, log)))

    def _listen(self, task: Task) -> None:
        sign, steps = _GRANT.unpack(os.read(task.pipe[0], _GRANT.size))
        self.running, task.steps, kind = task, steps, sign.decode()
        if kind in DEATHS:
            self.die(kind)
        elif kind == INTERRUPT:
            os.kill(os.getpid(), signal.SIGINT)

    def label(self, file: int | str) -> str:
        """Return what a descriptor or a path is, as others know it."""
        path = file if isinstance(file, str) else os.readlink(f"/proc/self/fd/{file}").removesuffix(" (deleted)")
        return path[len(self.base) + 1 :] if path.startswith(self.base) else path

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
        label = "context" if self.quiet else self.label(fd)
        if operation & fcntl.LOCK_UN:
            self.step(f"unlock {label}")
            _flock(fd, operation)
            self.held.pop(fd, None)
            return
        kind = _KINDS[bool(operation & fcntl.LOCK_EX)]
        if operation & fcntl.LOCK_NB:
            self.step(f"try {kind} {label}")
            self.look(_flock, fd, operation)
        else:
            self.step(f"wait for {kind} {label}")
            self.wait(lambda: _succeeds(_flock, fd, operation | fcntl.LOCK_NB), label)
        self.held[fd] = label

    def fcntl(self, fd: int, command: int, argument: Any = 0) -> Any:
        if command in _OFD:
            label, kind = self.label(fd), struct.unpack_from("h", argument)[0]
            if kind not in _KINDS:
                self.step(f"unlock {label}")
                self.held.pop(fd, None)
                return _fcntl(fd, command, argument)
            self.step(f"{_OFD[command]} {_KINDS[kind]} {label}")
            if command == 38:
                self.wait(lambda: _succeeds(_fcntl, fd, 37, argument), label)
            result = self.look(_fcntl, fd, 37 if command == 38 else command, argument)
            self.held[fd] = label
            return result
        result = _fcntl(fd, command, argument)
        if command in (fcntl.F_DUPFD, fcntl.F_DUPFD_CLOEXEC) and fd in self.held:
            self.held[result] = self.held[fd]
        return result

    def lockf(self, fd: int, operation: int, *where: int) -> None:
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
        if fd in self.held:
            self.step(f"close {self.held[fd]}")
            del self.held[fd]
        _close(fd)

    def named(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return a function whose first argument is a path, or a descriptor, as a step."""

        def stepping(where: Any, *arguments: Any, **options: Any) -> Any:
            if not self.quiet:
                path = arguments[0] if what in ("link", "rename") else where
                place = options.get("dst_dir_fd") or options.get("dir_fd")
                self.step(f"{what} {f'{self.label(place)}/{path}' if place else self.label(path)}")
            result = call(where, *arguments, **options)
            if what in ("pwrite", "ftruncate") and not self.quiet:
                line, _, left = _pread(where, 1 << 16, 0).partition(b"\n")
                self.say(CONTENT, self.label(where), hash((_PERSONAL.sub(b"", line), bool(left))))
            return result

        return stepping

    def whole(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return a function of the simulated driver, as one step, whatever it does within."""

        def stepping(*arguments: Any, **options: Any) -> Any:
            self.step(what)
            before, self.quiet = self.quiet, True
            try:
                return call(*arguments, **options)
            finally:
                self.quiet = before

        return stepping


_pread = os.pread
_flock, _fcntl, _lockf, _close, _open = fcntl.flock, fcntl.fcntl, fcntl.lockf, os.close, builtins.open


def _succeeds(call: Callable[..., Any], *arguments: Any) -> bool:
    try:
        call(*arguments)
    except BlockingIOError:
        return False
    return True


def _replace(racer: Racer) -> None:
    """Put the stand-ins into the modules of this process."""
    fcntl.flock, fcntl.fcntl, fcntl.lockf, os.close = racer.flock, racer.fcntl, racer.lockf, racer.close
    for name in ("link", "unlink", "rename", "mkdir", "rmdir", "pread", "pwrite", "ftruncate"):
        setattr(os, name, racer.named(getattr(os, name), name))
    driver, context = simulated.SimulatedDriver, simulated.SimulatedContext
    for owner, name, what in (
        (driver, "snapshot", "poll all"),
        (driver, "usage", "poll some"),
        (driver, "occupy", "start context"),
        (context, "close", "end context"),
    ):
        setattr(owner, name, racer.whole(getattr(owner, name), what))

    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        if path in _TABLES:
            racer.step(f"read {path}")
        return _open(path, *arguments, **options)

    builtins.open = opened  # type: ignore[assignment]
    _socket.socket = _socket_of(racer)  # type: ignore[misc]
    sys.modules["threading"] = _threading_of(racer)
    began = time.time(), time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    time.time = lambda: began[0] + racer.clock[0]
    time.time_ns = lambda: int(time.time() * 1e9)
    time.monotonic = lambda: began[1] + racer.clock[0]
    time.monotonic_ns = lambda: int(time.monotonic() * 1e9)
    time.clock_gettime = lambda number: began[2] + racer.clock[0]
    time.sleep = racer.sleep
    os.urandom = lambda size: racer.name.encode() * size
    os.sched_yield = lambda: None
    os.sched_getaffinity = lambda pid: set(range(os.cpu_count() or 1))  # else claims look for what is near
    random.Random = lambda seed=0: _Random(seed)  # type: ignore[misc, assignment]


_Random = random.Random


def _socket_of(racer: Racer) -> type[_socket.socket]:
    class Socket(_socket.socket):
        def bind(self, address: Any) -> None:
            racer.step(f"bind {(label := _name(address))}")
            racer.look(super().bind, address)
            racer.held[self.fileno()] = label

        def connect_ex(self, address: Any) -> int:
            if (slot := _SLOT.search(address)) is None or int(slot[1]) < racer.slots:  # nobody here has the others
                racer.step(f"connect {_name(address)}")
            return super().connect_ex(address)

        def send(self, *data: Any) -> int:  # over netlink, which nothing else uses
            racer.step(f"read {_TABLES[0]}")
            return super().send(*data)

        def close(self) -> None:
            if label := racer.held.get(self.fileno()):
                racer.step(f"close {label}")
                del racer.held[self.fileno()]
            super().close()

    return Socket


def _name(address: bytes) -> str:
    return "name " + address.rpartition(b"/")[2].rstrip(b".").decode()


def _threading_of(racer: Racer) -> types.ModuleType:
    """Return a module threading whose locks and threads the controller knows."""

    class Lock:
        def __init__(self) -> None:
            self._taken = False

        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            deadline = racer.clock[0] + (timeout if timeout >= 0 else math.inf) if blocking else -math.inf
            taken = racer.wait(lambda: not self._taken, racer.name, deadline)
            self._taken = self._taken or taken
            return taken

        def release(self) -> None:
            self._taken = False
            racer.say(FREES)

        def locked(self) -> bool:
            return self._taken

    class Event:
        def __init__(self) -> None:
            self._set = False

        def set(self) -> None:
            self._set = True
            racer.say(FREES)

        def is_set(self) -> bool:
            return self._set

        def wait(self, timeout: float | None = None) -> bool:
            return racer.wait(self.is_set, racer.name, racer.clock[0] + (math.inf if timeout is None else timeout))

    class Thread:
        def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), **about: Any) -> None:
            self._run = lambda: target(*args)

        def start(self) -> None:
            racer.spawn(self._run)

    module = types.ModuleType("threading")
    module.__dict__.update({**vars(threading), "Lock": Lock, "Event": Event, "Thread": Thread})
    return module
