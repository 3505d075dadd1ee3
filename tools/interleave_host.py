"""The host on which racers run, and one run of them: who goes on, for how long, and what they say.

When two schedules have come to the same state, they go on alike from there. The state of a racer is what it has done
and has seen until now. What it sees besides the locks and names that it tries is the content of files, as others have
left them, and what the driver says, which is what all hold. What a dead one has done does not count, but what is left
of it. Times are left out, but for whose is next.
"""

import ctypes
import math
import mmap
import os
import shutil
import signal
from collections import Counter
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from interleave_racer import CONTENT, DEATHS, ENDLESS, FREES, GETS, GO, HELD, Racer, Task, names_of_tasks
from interleave_scenes import Referee, Scene, everything, furnish, renew
from support.actor import GONE, Actor, Failure
from support.broken import break_build
from support.stage import place_for_all

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


class VoidError(Exception):
    """A schedule that cannot be: who is to go on must wait."""


class Host:
    """A simulated host and its racers, who live from schedule to schedule unless they are struck.

    Attributes:
        worn: racers that cannot take part in another schedule: another process takes their part.
    """

    def __init__(self, scene: Scene, broken: str = "") -> None:
        self.scene = scene
        self._broken = broken
        self.base = place_for_all("explorer", in_memory=True)
        self.clock = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self._tasks = {name: [Task(one, os.pipe()) for one in names_of_tasks(name)] for name in scene.plans}
        self._racers: dict[str, Actor] = {}
        self.worn: set[str] = set()
        furnish(scene, self.base)

    def begin(self) -> list[Task]:
        """Let all be as before the first schedule."""
        renew(self.scene, self.base)
        self.clock[0] = 0.0
        for name in self.scene.plans:
            if name in self.worn:
                self._end(name)
            if name not in self._racers:
                self._start(name)
        found = [task for tasks in self._tasks.values() for task in tasks]
        for task in found:
            task.begin()
        return found

    def _start(self, name: str) -> None:
        for task in self._tasks[name]:
            task.forget()

        def become(racer: Racer) -> None:
            self.scene.become(racer)
            break_build(self._broken)

        def live(line: Connection) -> None:
            end_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.scene.visit(self.base, self.scene.plans[name].at)
            Racer(self._tasks[name], line, self.clock, self.base, self.scene).live(self.scene.plans[name].act, become)

        self._racers[name] = Actor(live, name=name, patience=_PATIENCE)

    def _end(self, name: str) -> None:
        self.worn.discard(name)
        if name in self._racers:
            self._racers.pop(name).end()

    def hear(self, name: str) -> tuple[str, float, str, list[Any]]:
        """Return what a racer says of itself.

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
        """Return what is wrong when all are over."""
        for name in self.worn & self._racers.keys():
            self._end(name)
        return everything(self.scene, self.base)

    def restart(self) -> None:
        """End all racers, wherever they stand."""
        for name in list(self._racers):
            self._end(name)

    def close(self) -> None:
        self.restart()
        for task in (one for tasks in self._tasks.values() for one in tasks):
            task.close()
        shutil.rmtree(self.base, ignore_errors=True)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when the one that started it is gone."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, number, 0, 0, 0)


class World:
    """All processes and files, as far as they matter to what comes next."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}  # thread -> what it has done and seen
        self._held: set[tuple[str, str]] = set()
        self._files: dict[str, int] = {}
        self._left: dict[str, list[str]] = {}  # of the dead: what is still to be closed

    def step(self, task: str, racer: str, what: str) -> None:
        """A thread makes a step."""
        call, _, thing = what.removesuffix(HELD).partition(" ")
        free = not what.endswith(HELD)
        if call == "dying":
            self._left[racer].pop(0)
            call, thing = "close", thing.removeprefix("closes ")
        seen: Any = frozenset(self._files.items())
        if call == "connect":
            seen = any(name == thing for name, _ in self._held)
        elif call == "poll":
            seen = seen, frozenset(one for one in self._held if one[0] == "context")
        elif thing.endswith("host.lock") and not free:
            seen = 0
        self._seen[task] = hash((self._seen.get(task), what, seen))
        if call in ("unlock", "close", "end"):
            self._held.discard((thing, racer))
        elif call in ("bind", "start") and free:
            self._held.add((thing, racer))
        elif call == "try" and free:
            self._held.add((thing.partition(" ")[2], racer))
        elif call in ("rename", "write"):
            self._files[thing] = 0
        elif call == "unlink":
            self._files.pop(thing, None)

    def hear(self, task: str, racer: str, what: str, about: Collection[Any]) -> None:
        """A thread says something."""
        if what == CONTENT:
            self._files.update([about])  # type: ignore[list-item]
        elif what == GETS:
            self._held.add((*about, racer))  # type: ignore[arg-type]
        elif what == "dies":
            (self._left[racer],) = about
            self._seen = {name: seen for name, seen in self._seen.items() if name[0].upper() != racer}
        else:
            self._seen[task] = hash((self._seen.get(task), what, repr(about)))
            if what == "has":
                self._files[f"scope-{racer}"] = 0

    def state(self, *more: Any) -> int:
        """Return what tells this state from others, with what else matters."""
        living = {name: seen for name, seen in self._seen.items() if name[0].upper() not in self._left}
        left = tuple(sorted((name, tuple(labels)) for name, labels in self._left.items()))
        return hash((frozenset(living.items()), frozenset(self._files.items()), left, more))


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
        self._tasks = {task.name: task for task in host.begin()}
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
        except Failure as err:
            self.faults.append(str(err))
        except VoidError:
            host.restart()
            raise
        if self.faults:
            host.restart()

    def _can(self, task: Task) -> bool:
        if task.state == "new":
            return self._host.scene.plans[task.name].after in ("", *self._over)
        if task.state == "waits":
            return task.deadline <= self._host.clock[0] or task.seen != self._freed[task.on]
        return task.state == "at"

    def _next(self) -> str | None:
        """Return who goes on if nothing else was asked for; time passes if nobody can.

        Raises:
            Failure: nobody ever can.
        """
        tasks = self._tasks.values()
        last = self.made[-1].move.task if self.made else ""
        for task in sorted(tasks, key=lambda one: one.name != last):
            if self._can(task):
                return task.name
        waiting = [task for task in tasks if task.state == "waits"]
        until = min((task.deadline for task in waiting), default=math.inf)
        if until < math.inf:
            self._host.clock[0] = max(self._host.clock[0], until)
            return self._next()
        for task in waiting:  # a thread may be left behind
            if task.name == task.racer:
                raise Failure(f"{task.name} will wait for {task.on} for ever")
            self._host.worn.add(task.racer)
        return None

    def _choices(self) -> dict[str, bool]:
        """Return who may go on now -> whether others would have to stand still for longer than a moment."""
        found = {name: False for name, task in self._tasks.items() if self._can(task)}
        able = bool(found)
        for name, task in self._tasks.items():
            if task.state == "waits" and task.deadline < math.inf:
                found.setdefault(name, able)
        return found

    def _make(self, move: Move) -> bool:
        """Let one go on. Returns whether it could."""
        host, task, before = self._host, self._tasks[move.task], self._choices()
        alive = {name for name in host.scene.plans if self._tasks[name].state in ("at", "waits")} - self._dying
        if move.task not in (before if move.kind == GO else alive):
            return False
        if move.kind != GO:
            host.worn.add(move.task)
        elif not self._can(task):
            host.clock[0] = max(host.clock[0], task.deadline)
        waited = task.deadline if task.state == "waits" else None
        task.grant(move.kind, move.steps)
        task.state, task.deadline, task.on, log = host.hear(task.racer)
        states = [self._state(move.task)]
        ready = self._read(task, log, states)
        task.seen = self._freed[task.on]
        if task.state == "gone":
            host.bury(task.racer)
            task.state = "over"
        if move.kind in DEATHS:
            for other in self._tasks.values():
                if other.racer == move.task and other is not task:
                    other.state = "over"
        if task.state == "over" and move.task in host.scene.plans:
            self._let_begin(move.task, 0, ready)
        elif task.state == "waits":
            self._referee.stands(task.racer)
            if not log and task.deadline == waited and move.kind == GO:
                return False
        others = {**dict.fromkeys(before, 0), **{one: ready.get(one, 0) for one in self._choices()}}
        others.pop(move.task, None)
        self.made.append(ran := Ran(move, log, before, others, alive, states))
        made = len(ran.steps)
        self._steps += made
        if move.steps not in (made, ENDLESS):
            raise VoidError(f"{move} makes {made} steps")
        if self._steps > _MOST_STEPS:
            raise Failure(f"{_MOST_STEPS} steps, and no end")
        return True

    def _state(self, running: str) -> int:
        waiting = [one for one in self._tasks.values() if one.state == "waits" and one.name != running]
        found = tuple((one.name, one.on, self._can(one)) for one in sorted(waiting, key=lambda one: one.deadline))
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
                self._tasks[one[1]].state = "at"
                self._host.worn.add(racer)
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
        ready.update((name, made) for name, one in self._tasks.items() if one.state == "waits" and one.on == what)

    def _let_begin(self, racer: str, made: int, ready: dict[str, int]) -> None:
        if racer not in self._over:
            self._over.add(racer)
            ready.update((name, made) for name, plan in self._host.scene.plans.items() if plan.after == racer)
