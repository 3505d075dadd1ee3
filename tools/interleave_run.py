"""One run of racers: who goes on, for how long, and what they say.

When two schedules have come to the same state, they go on alike from there. The state of a racer is what it has done
and has seen until now. What it sees besides the locks and names that it tries is the content of files, as others have
left them, and what the driver says, which is what all hold. What a dead one has done does not count, but what is left
of it. Times are left out, but for whose is next.
"""

import math
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

from interleave_host import Host
from interleave_racer import CONTENT, DEATHS, ENDLESS, FREES, GETS, GO, HELD, Task
from interleave_referee import Referee
from support.actor import Failure

_MOST_STEPS = 20_000


class Move(NamedTuple):
    """A part of a schedule: a thread goes on or is struck, and makes so many steps; ENDLESS: until it waits or ends."""

    task: str
    steps: int = ENDLESS
    kind: str = GO

    def __str__(self) -> str:
        text = self.task
        if self.kind != GO:
            text += self.kind
        if self.steps != ENDLESS:
            text += str(self.steps)
        return text


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
        """The steps alone."""
        return [one for one in self.log if isinstance(one, str)]

    @property
    def living(self) -> int:
        """How many steps were made in life."""
        made = 0
        for one in self.log:
            if isinstance(one, str):
                made += 1
            elif one[0] == "dies":
                break
        return made


class VoidError(Exception):
    """A schedule that cannot be: who is to go on must wait."""


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
        is_free = not what.endswith(HELD)
        if call == "dying":
            self._left[racer].pop(0)
            call = "close"
            thing = thing.removeprefix("closes ")
        self._seen[task] = hash((self._seen.get(task), what, self._sees(call, thing, is_free=is_free)))
        if call in ("unlock", "close", "end"):
            self._held.discard((thing, racer))
        elif call in ("bind", "start") and is_free:
            self._held.add((thing, racer))
        elif call == "try" and is_free:
            _, _, path = thing.partition(" ")
            self._held.add((path, racer))
        elif call in ("rename", "write"):
            self._files[thing] = 0
        elif call == "unlink":
            self._files.pop(thing, None)

    def _sees(self, call: str, thing: str, *, is_free: bool) -> Any:
        """What a thread may find by a step: by all but these, in files."""
        if call == "connect":
            return any(name == thing for name, _ in self._held)
        if call == "poll":
            contexts = frozenset(one for one in self._held if one[0] == "context")
            return frozenset(self._files.items()), contexts
        if thing.endswith("host.lock") and not is_free:
            return 0
        return frozenset(self._files.items())

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
        """What tells this state from others, with what else matters."""
        living = {name: seen for name, seen in self._seen.items() if name[0].upper() not in self._left}
        left = tuple(sorted((name, tuple(labels)) for name, labels in self._left.items()))
        return hash((frozenset(living.items()), frozenset(self._files.items()), left, more))


class Run:
    """One schedule: what was asked for, and then whoever can go on.

    Attributes:
        made: the moves.
        violations: what must not be.

    Raises:
        VoidError: there is no such schedule.
    """

    def __init__(self, host: Host, schedule: Schedule) -> None:
        self.made: list[Ran] = []
        self._host = host
        self._referee = Referee(host.scene)
        self.violations = self._referee.violations
        self._tasks = {task.name: task for task in host.begin()}
        self._steps = 0
        self._freed: Counter[str] = Counter()
        self._dying: set[str] = set()
        self._world = World()
        self._over: set[str] = set()  # racers for which nobody waits any more that is to begin after them
        try:
            self._make_all(schedule)
            self._referee.end()
            self.violations += host.check()
        except Failure as err:
            self.violations.append(str(err))
        except VoidError:
            host.restart()
            raise
        if self.violations:
            host.restart()

    def _make_all(self, schedule: Schedule) -> None:
        """Make the moves that were asked for, and then go on until all are over."""
        for move in schedule:
            if not self._make(move):
                raise VoidError(f"{move} has to wait")
        while True:
            name = self._next()
            if name is None:
                return
            self._make(Move(name))

    def _can(self, task: Task) -> bool:
        """Whether a thread can go on."""
        if task.state == "new":
            return self._host.scene.plans[task.name].after in ("", *self._over)
        if task.state == "waits":
            return task.deadline <= self._host.clock[0] or task.seen != self._freed[task.on]
        return task.state == "at"

    def _next(self) -> str | None:
        """Who goes on if nothing else was asked for, at best the last one; None when all are over.

        Time passes if nobody can.

        Raises:
            Failure: nobody ever can.
        """
        able = [task.name for task in self._tasks.values() if self._can(task)]
        if able:
            if self.made and self.made[-1].move.task in able:
                return self.made[-1].move.task
            return able[0]
        waiting = [task for task in self._tasks.values() if task.state == "waits"]
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
        """Who may go on now -> whether others would have to stand still for longer than a moment."""
        found = {name: False for name, task in self._tasks.items() if self._can(task)}
        is_preemption = bool(found)
        for name, task in self._tasks.items():
            if task.state == "waits" and task.deadline < math.inf:
                found.setdefault(name, is_preemption)
        return found

    def _make(self, move: Move) -> bool:
        """Let one go on, or strike it. Returns whether it could."""
        task = self._tasks[move.task]
        before = self._choices()
        alive = self._alive()
        is_struck = move.kind != GO
        if is_struck and move.task not in alive:
            return False
        if not is_struck and move.task not in before:
            return False
        waited = None
        if task.state == "waits":
            waited = task.deadline
        self._let_go_on(task, move)
        task.state, task.deadline, task.on, log = self._host.hear(task.racer)
        states = [self._state(move.task)]
        ready = self._read(task, log, states)
        task.seen = self._freed[task.on]
        self._note_end(task, move, ready)
        if task.state == "waits":
            self._referee.stands(task.racer)
            if not log and task.deadline == waited and not is_struck:
                return False
        others = dict.fromkeys(before, 0)
        for name in self._choices():
            others[name] = ready.get(name, 0)
        others.pop(move.task, None)
        ran = Ran(move, log, before, others, alive, states)
        self.made.append(ran)
        self._count(ran)
        return True

    def _alive(self) -> set[str]:
        """The racers that could be struck."""
        return {name for name in self._host.scene.plans if self._tasks[name].state in ("at", "waits")} - self._dying

    def _let_go_on(self, task: Task, move: Move) -> None:
        """Grant a thread the steps of a move; time passes if it has to wait."""
        clock = self._host.clock
        if move.kind != GO:
            self._host.worn.add(move.task)
        elif not self._can(task):
            clock[0] = max(clock[0], task.deadline)
        task.grant(move.kind, move.steps)

    def _note_end(self, task: Task, move: Move, ready: dict[str, int]) -> None:
        """See whether a racer is over or dead after a move."""
        if task.state == "gone":
            self._host.bury(task.racer)
            task.state = "over"
        if move.kind in DEATHS:
            for other in self._tasks.values():
                if other.racer == move.task and other is not task:
                    other.state = "over"
        if task.state == "over" and move.task in self._host.scene.plans:
            self._let_begin(move.task, 0, ready)

    def _count(self, ran: Ran) -> None:
        """Count the steps of a move.

        Raises:
            VoidError: it has not as many as were asked for.
            Failure: there are too many in all.
        """
        made = len(ran.steps)
        self._steps += made
        if ran.move.steps not in (made, ENDLESS):
            raise VoidError(f"{ran.move} makes {made} steps")
        if self._steps > _MOST_STEPS:
            raise Failure(f"{_MOST_STEPS} steps, and no end")

    def _state(self, running: str) -> int:
        """What tells the state of all from others."""
        waiting = [one for one in self._tasks.values() if one.state == "waits" and one.name != running]
        waiting.sort(key=lambda one: one.deadline)
        found = tuple((one.name, one.on, self._can(one)) for one in waiting)
        return self._world.state(running, found, self._referee.state())

    def _read(self, task: Task, log: list[Any], states: list[int]) -> dict[str, int]:
        """Tell the referee what a racer did and said. Returns who can go on by that -> after which step.

        Args:
            states: those after each step are added.
        """
        ready: dict[str, int] = {}
        made = 0
        for one in log:
            if isinstance(one, str):
                made += 1
                self._world.step(task.name, task.racer, one)
                states.append(self._state(task.name))
                self._referee.step(task.racer, one)
                call, _, thing = one.removeprefix("dying ").partition(" ")
                if call in ("unlock", "close", "closes"):
                    self._let_go(thing, made, ready)
            else:
                self._referee.hear(task.racer, *one)
                self._world.hear(task.name, task.racer, one[0], one[1:])
                self._heed(task.racer, one, made, ready)
        return ready

    def _heed(self, racer: str, said: tuple[Any, ...], made: int, ready: dict[str, int]) -> None:
        """See who can go on by what a racer has said, after so many steps."""
        what = said[0]
        if what == "thread":
            self._tasks[said[1]].state = "at"
            self._host.worn.add(racer)
            ready[said[1]] = made
        elif what == FREES:
            self._let_go(racer, made, ready)
        elif what == "has":
            self._let_begin(racer, made, ready)
        elif what == "dies":
            self._let_begin(racer, made, ready)
            self._dying.add(racer)

    def _let_go(self, what: str, made: int, ready: dict[str, int]) -> None:
        """Something is let go of: those who wait for it can go on."""
        self._freed[what] += 1
        for name, one in self._tasks.items():
            if one.state == "waits" and one.on == what:
                ready[name] = made

    def _let_begin(self, racer: str, made: int, ready: dict[str, int]) -> None:
        """A racer has its GPUs, or is over: those who begin after it can."""
        if racer not in self._over:
            self._over.add(racer)
            for name, plan in self._host.scene.plans.items():
                if plan.after == racer:
                    ready[name] = made
