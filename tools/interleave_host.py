"""The host on which racers run, and one run of them: who goes on, for how long, and what they say."""

import ctypes
import marshal
import math
import mmap
import os
import select
import shutil
import signal
import socket
import tempfile
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple

from interleave_racer import DEATHS, ENDLESS, FREES, GO, Racer, Task, names_of_tasks
from interleave_scenes import Referee, Scene, everything, furnish, renew
from interleave_states import World
from support.broken import break_build

_SET_PDEATHSIG = 1  # prctl(2)
_MOST_STEPS = 20_000
_PATIENCE = 100.0  # in which a racer makes its steps, seconds


class Move(NamedTuple):
    """A part of a schedule: a thread goes on or is struck, and makes so many steps; ENDLESS: until it waits or ends."""

    task: str
    steps: int = ENDLESS
    kind: str = GO

    def __str__(self) -> str:
        return f"{self.task}{self.kind.strip(GO)}{'' if self.steps == ENDLESS else self.steps}"


Schedule = tuple[Move, ...]


class Ran(NamedTuple):
    """A move as it was made.

    Attributes:
        log: the steps, which are text, and what was said between them.
        before: who could have been chosen -> whether that would have been a preemption.
        others: who could have gone on in its course -> after which step at the earliest.
        alive: the racers that could have been struck.
        states: of all, before it and after each step.
    """

    move: Move
    log: list[Any]
    before: dict[str, bool]
    others: dict[str, int]
    alive: set[str]
    states: list[int]

    @property
    def steps(self) -> list[str]:
        """Return the steps alone."""
        return [one for one in self.log if isinstance(one, str)]

    @property
    def living(self) -> int:
        """Return how many steps were made in life."""
        death = next((number for number, one in enumerate(self.log) if one[0] == "dies"), len(self.log))
        return sum(isinstance(one, str) for one in self.log[:death])


class Actor:
    """A thread of a racer, as it stands.

    Attributes:
        state: "new" (its racer has not begun), "none" (there is no such thread), or what its process said last.
        deadline: until when it waits at most.
        on: what it waits for.
        seen: how often that had been let go of when it looked last.
    """

    def __init__(self, task: Task, state: str) -> None:
        self.task = task
        self.state = state
        self.deadline = math.inf
        self.on = ""
        self.seen = 0


class VoidError(Exception):
    """A schedule that cannot be: who is to go on must wait."""


class FaultError(Exception):
    """What ends a schedule early."""


class Host:
    """A simulated host and its racers, who live from schedule to schedule unless they are struck."""

    def __init__(self, scene: Scene, broken: str = "") -> None:
        self.scene = scene
        self._broken = broken
        self.base = tempfile.mkdtemp(prefix="safe-gpu-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.chmod(self.base, 0o755)
        self._line, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.clock = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self._tasks = {name: [Task(one, os.pipe()) for one in names_of_tasks(name)] for name in scene.plans}
        self._pids: dict[str, int] = {}
        self._worn: set[str] = set()  # racers that cannot take part in another schedule
        furnish(scene, self.base)

    def begin(self) -> list[Actor]:
        """Let all be as before the first schedule."""
        renew(self.scene, self.base)
        self.clock[0] = 0.0
        for name in self.scene.plans:
            if name in self._worn:
                self._end(name)
            if name not in self._pids:
                self._start(name)
        found = ((task, "new" if task is tasks[0] else "none") for tasks in self._tasks.values() for task in tasks)
        return [Actor(task, state) for task, state in found]

    def _start(self, name: str) -> None:
        for task in self._tasks[name]:
            task.forget()
        pid = self._pids[name] = os.fork()
        if pid == 0:
            try:
                end_with_parent(signal.SIGKILL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self.scene.enter(name, self.base)
                racer = Racer(self._tasks[name], self._theirs, self.clock, self.base, **self.scene.about)

                def become(racer: Racer) -> None:
                    self.scene.become(racer)
                    break_build(self._broken)

                racer.live(self.scene.plans[name].act, become)
            finally:
                os._exit(1)

    def _end(self, name: str) -> None:
        self._worn.discard(name)
        if name in self._pids:
            pid = self._pids.pop(name)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def wear(self, name: str) -> None:
        """Let another process take the part of this racer in the next schedule."""
        self._worn.add(name)

    def hear(self) -> tuple[str, str, float, str, list[Any]]:
        """Return what a racer says of itself.

        Raises:
            FaultError: it says nothing.
        """
        if not select.select([self._line], [], [], _PATIENCE)[0]:
            raise FaultError(f"a racer makes no step for {_PATIENCE:.0f} s")
        return marshal.loads(self._line.recv(1 << 20))  # type: ignore[no-any-return]

    def bury(self, name: str) -> None:
        """Wait until a racer that has closed everything is gone."""
        os.waitpid(self._pids.pop(name), 0)
        self._worn.discard(name)

    def check(self) -> list[str]:
        """Return what is wrong when all are over."""
        for name in self._worn & self._pids.keys():
            self._end(name)
        return everything(self.scene, self.base)

    def restart(self) -> None:
        """End all racers, wherever they stand."""
        for name in list(self._pids):
            self._end(name)
        while select.select([self._line], [], [], 0)[0]:
            self._line.recv(1 << 20)

    def close(self) -> None:
        self.restart()
        for task in (one for tasks in self._tasks.values() for one in tasks):
            task.close()
        shutil.rmtree(self.base, ignore_errors=True)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the one that started it is gone."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, number, 0, 0, 0)


class Run:
    """One schedule: what was asked for, and then whoever can go on.

    Attributes:
        made: the moves.
        faults: what must not be.

    Raises:
        VoidError: there is no such schedule.
    """

    def __init__(self, host: Host, schedule: Schedule) -> None:
        self.made: list[Ran] = []
        self._host = host
        self._referee = Referee(host.scene)
        self.faults = self._referee.faults
        self._actors = {actor.task.name: actor for actor in host.begin()}
        self._steps = 0
        self._freed: Counter[str] = Counter()
        self._dying: set[str] = set()
        self._world = World()
        self._over: set[str] = set()  # racers for which nobody waits any more that is to begin after them
        try:
            for move in schedule:
                if not self._make(move):
                    raise VoidError(f"{move} has to wait")
            while (name := self._next()) is not None:
                self._make(Move(name))
            self._referee.end()
            self.faults += host.check()
        except FaultError as err:
            self.faults.append(str(err))
        except VoidError:
            host.restart()
            raise
        if self.faults:
            host.restart()

    def _can(self, actor: Actor) -> bool:
        if actor.state == "new":
            return self._host.scene.plans[actor.task.name].after in ("", *self._over)
        if actor.state == "waits":
            return actor.deadline <= self._host.clock[0] or actor.seen != self._freed[actor.on]
        return actor.state == "at"

    def _next(self) -> str | None:
        """Return who goes on if nothing else was asked for; time passes if nobody can.

        Raises:
            FaultError: nobody ever can.
        """
        actors = self._actors.values()
        last = self.made[-1].move.task if self.made else ""
        for actor in sorted(actors, key=lambda one: one.task.name != last):
            if self._can(actor):
                return actor.task.name
        waiting = [actor for actor in actors if actor.state == "waits"]
        until = min((actor.deadline for actor in waiting), default=math.inf)
        if until < math.inf:
            self._host.clock[0] = max(self._host.clock[0], until)
            return self._next()
        for actor in waiting:  # a thread may be left behind
            if actor.task.name == actor.task.racer:
                raise FaultError(f"{actor.task.name} will wait for {actor.on} for ever")
            self._host.wear(actor.task.racer)
        return None

    def _choices(self) -> dict[str, bool]:
        """Return who may go on now -> whether others would have to stand still for longer than a moment."""
        found = {name: False for name, actor in self._actors.items() if self._can(actor)}
        able = bool(found)
        for name, actor in self._actors.items():
            if actor.state == "waits" and actor.deadline < math.inf:
                found.setdefault(name, able)
        return found

    def _make(self, move: Move) -> bool:
        """Let one go on. Returns whether it could."""
        host, actor, before = self._host, self._actors[move.task], self._choices()
        alive = {name for name in host.scene.plans if self._actors[name].state in ("at", "waits")} - self._dying
        if move.task not in (before if move.kind == GO else alive):
            return False
        if move.kind != GO:
            host.wear(move.task)
        elif not self._can(actor):
            host.clock[0] = max(host.clock[0], actor.deadline)
        waited = actor.deadline if actor.state == "waits" else None
        actor.task.grant(move.kind, move.steps)
        _, actor.state, actor.deadline, actor.on, log = host.hear()
        states = [self._state(move.task)]
        ready = self._read(actor.task, log, states)
        actor.seen = self._freed[actor.on]
        if actor.state == "gone":
            host.bury(actor.task.racer)
            actor.state = "over"
        if move.kind in DEATHS:
            for other in self._actors.values():
                if other.task.racer == move.task and other is not actor:
                    other.state = "over"
        if actor.state == "over" and move.task in host.scene.plans:
            self._let_begin(move.task, 0, ready)
        elif actor.state == "waits":
            self._referee.stands(actor.task.racer)
            if not log and actor.deadline == waited and move.kind == GO:
                return False
        others = {**dict.fromkeys(before, 0), **{one: ready.get(one, 0) for one in self._choices()}}
        others.pop(move.task, None)
        self.made.append(ran := Ran(move, log, before, others, alive, states))
        made = len(ran.steps)
        self._steps += made
        if move.steps not in (made, ENDLESS):
            raise VoidError(f"{move} makes {made} steps")
        if self._steps > _MOST_STEPS:
            raise FaultError(f"{_MOST_STEPS} steps, and no end")
        return True

    def _state(self, running: str) -> int:
        waiting = [one for one in self._actors.values() if one.state == "waits" and one.task.name != running]
        found = tuple((one.task.name, one.on, self._can(one)) for one in sorted(waiting, key=lambda one: one.deadline))
        return self._world.state(running, found, self._referee.state())

    def _read(self, task: Task, log: list[Any], states: list[int]) -> dict[str, int]:
        """Tell the referee what a racer did and said. Returns who can go on by that -> after which step."""
        ready: dict[str, int] = {}
        racer, made = task.racer, 0
        for one in log:
            if isinstance(one, str):
                made += 1
                self._world.step(task.name, racer, one)
                states.append(self._state(task.name))
                self._referee.step(racer, one)
                call, _, thing = one.removeprefix("dying ").partition(" ")
                if call in ("unlock", "close", "closes"):
                    self._let_go(thing, made, ready)
                continue
            self._referee.hear(racer, *one)
            self._world.hear(task.name, racer, one[0], one[1:])
            if one[0] == "thread":
                self._actors[one[1]].state = "at"
                self._host.wear(racer)
                ready[one[1]] = made
            elif one[0] == FREES:
                self._let_go(racer, made, ready)
            elif one[0] in ("has", "dies"):
                self._let_begin(racer, made, ready)
                if one[0] == "dies":
                    self._dying.add(racer)
        return ready

    def _let_go(self, what: str, made: int, ready: dict[str, int]) -> None:
        self._freed[what] += 1
        ready.update((name, made) for name, one in self._actors.items() if one.state == "waits" and one.on == what)

    def _let_begin(self, racer: str, made: int, ready: dict[str, int]) -> None:
        if racer not in self._over:
            self._over.add(racer)
            ready.update((name, made) for name, plan in self._host.scene.plans.items() if plan.after == racer)
