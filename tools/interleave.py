#!/usr/bin/env python3
"""Tries all orders in which processes can make the system calls by which claims see each other.

    tools/interleave.py                              every scene, with at most one preemption
    tools/interleave.py --scene nested --preemptions 2 --sample 20000
    tools/interleave.py --scene nested-directories --replay 'A A!2 C B'

The processes are real, and so are their locks and names; each stands before every step until it is let go on. A
schedule says who goes on, and for how many steps: 'A41 B C' lets A make 41, then B and C as many as they can. 'A!2'
kills A and closes two of its descriptors, from the highest down ('A^2' up, 'A%2' names first, 'A&2' files first), and
'A~' interrupts it; 'a' is a thread of A. The exit status is 1 if a schedule ended with a GPU given twice or lost, a
waiter that was passed, or a process that never ends.
"""

import argparse
import math
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import common  # noqa: F401 - says where the package and the support of its tests are
from interleave_host import Host
from interleave_racer import DEATHS, ENDLESS, GO, HELD, INTERRUPT
from interleave_run import Move, Ran, Run, Schedule, VoidError
from interleave_scenes import SCENES, Scene
from stress import EachMinute, keep_quiet, parser_with_seed, violation_text
from support.kernel import end_with_parent
from support.stage import simulate

from safe_gpu.claim import search

_ENOUGH = 3  # violations in one scene
_MOST_MISSES = 300  # draws one after the other, all of what was tried
_LOOKS = re.compile(f"(ask|list|read|poll|connect) |.*{HELD}$")  # steps that change nothing


class Node(NamedTuple):
    """A schedule to try.

    Attributes:
        preemptions: that it has.
        struck: whether somebody is killed or interrupted in it.
        state: in which its last move is made.
    """

    schedule: Schedule = ()
    preemptions: int = 0
    struck: bool = False
    state: int = 0

    @property
    def mark(self) -> int:
        """What is the same if all that comes is."""
        return hash((self.state, str(self.schedule[-1:]), self.preemptions, self.struck))

    def then(self, move: Move, preemptions: int) -> "Node":
        """The schedule that goes on with this move, which is so many preemptions."""
        return self._replace(schedule=(*self.schedule, move), preemptions=self.preemptions + preemptions)


def children(scene: Scene, node: Node, made: list[Ran], most: int) -> Iterator[Node]:
    """Yield the schedules that go on otherwise than a run did, after what it was asked for. Each comes of one run."""
    asked = len(node.schedule)
    done: Schedule = ()
    for number, ran in enumerate(made):
        if number >= asked:
            here = node._replace(schedule=done, state=ran.states[0])
            yield from _instead(scene, here, ran, most)
        if number >= asked - 1 and ran.move.steps == ENDLESS:
            for steps in range(1, len(ran.steps)):
                there = (*done, ran.move._replace(steps=steps))
                here = node._replace(schedule=there, state=ran.states[steps])
                yield from _after(scene, here, ran, steps, most)
        done = (*done, ran.move)


def _instead(scene: Scene, here: Node, ran: Ran, most: int) -> Iterator[Node]:
    """Yield the schedules in which another move is made than this one was."""
    yield from _strikes(scene, here, ran.alive, 0)
    for other, preempts in ran.before.items():
        if other != ran.move.task and here.preemptions + preempts <= most:
            yield here.then(Move(other), int(preempts))


def _after(scene: Scene, here: Node, ran: Ran, steps: int, most: int) -> Iterator[Node]:
    """Yield the schedules in which a move ends after so many steps."""
    own = {ran.move.task}
    is_look = _LOOKS.match(ran.steps[steps - 1])
    if steps <= ran.living and not is_look:  # to be killed before a look is the same
        yield from _strikes(scene, here, ran.alive & own, 0)
    if here.preemptions < most:
        yield from _strikes(scene, here, ran.alive - own, 1)
        for other, since in ran.others.items():
            if since <= steps:
                yield here.then(Move(other), 1)


def _strikes(scene: Scene, node: Node, whom: Iterable[str], cost: int) -> Iterator[Node]:
    """Yield the schedules in which one of these is killed or interrupted now, which costs so many preemptions."""
    if node.struck:
        return
    for name in sorted(whom):
        kinds = ""
        if name in scene.kill:
            kinds += scene.deaths
        if name in scene.interrupt:
            kinds += INTERRUPT
        for kind in kinds:
            yield node.then(Move(name, kind=kind), cost)._replace(struck=True)


class _EnoughError(Exception):
    """The search is over."""


class Search:
    """Tries the schedules of one scene.

    Args:
        args: of the command line.
        seconds: only so long, drawn at random.

    Attributes:
        schedules: how many were tried.
        found: schedules with violations, and these.
    """

    def __init__(self, scene: str, args: argparse.Namespace, seconds: float) -> None:
        self.schedules = 0
        self.found: list[tuple[str, list[str]]] = []
        self._name = scene
        self._scene = SCENES[scene]
        self._args = args
        self._seconds = seconds
        begin = parse(args.begin)
        self._root = Node(begin, struck=any(move.kind != GO for move in begin))
        self._chance = random.Random(args.seed)
        self._tried: dict[Schedule, list[Node]] = {}
        self._marks: set[int] = set()
        self._alike = 0
        self._void = 0
        self._began = time.monotonic()
        self._minutes = EachMinute()

    def run(self) -> None:
        """Try them, and print what came of it."""
        signal.signal(signal.SIGTERM, lambda *about: sys.exit(1))  # and not before the host is cleared away
        with closing(Host(self._scene, self._args.broken)) as host, suppress(_EnoughError):
            if self._args.sample is None and self._seconds == math.inf:
                self._try_all(host)
            else:
                self._draw_all(host)
        print(self._report(), flush=True)

    def _report(self) -> str:
        """How many were tried, and what was wrong in which."""
        took = time.monotonic() - self._began
        text = f"{self._name:28} {self.schedules:6} schedules, {self._alike:6} like others, {self._void:4} void, "
        text += f"{took:5.0f} s, {took * 1000 / self.schedules:4.0f} ms each, {len(self.found)} with violations"
        for schedule, violations in self.found:
            again = f"tools/interleave.py --scene {self._name} --replay '{schedule}'"
            text += "\n" + violation_text("; ".join(violations), again)
        return text

    def _try(self, host: Host, node: Node) -> list[Node]:
        """Make a schedule. Returns those that go on otherwise.

        Raises:
            _EnoughError: the search is over.
        """
        try:
            run = Run(host, node.schedule)
        except VoidError:
            self._void += 1
            return []
        self.schedules += 1
        if run.violations:
            self.found.append((" ".join(str(move) for move in node.schedule), run.violations))
        if self._minutes.has_passed():
            print(f"{self._name}: {self.schedules} schedules", file=sys.stderr, flush=True)
        is_late = time.monotonic() - self._began > self._seconds
        if len(self.found) == _ENOUGH or self.schedules == self._args.sample or is_late:
            raise _EnoughError
        asked = len(node.schedule)
        for number, ran in enumerate(run.made[asked:], asked):
            done = tuple(one.move for one in run.made[: number + 1])
            self._marks.add(node._replace(schedule=done, state=ran.states[0]).mark)
        return list(children(self._scene, node, run.made, self._args.preemptions))

    def _try_all(self, host: Host) -> None:
        """Try all schedules, but of those that come to the same state and go on alike only one."""
        stack = [self._root]
        while stack:
            for node in self._try(host, stack.pop()):
                if node.mark in self._marks:
                    self._alike += 1
                else:
                    self._marks.add(node.mark)
                    stack.append(node)

    def _draw_all(self, host: Host) -> None:
        """Try schedules that are drawn at random, until hardly any is new."""
        first = self._try(host, self._root)
        misses = 0
        while misses < _MOST_MISSES:
            if self._draw(host, first):
                misses = 0
            else:
                misses += 1

    def _draw(self, host: Host, below: list[Node]) -> bool:
        """Go from schedule to schedule by chance, to one that has all that it may. Returns whether any was new."""
        is_new = False
        depth = 0
        while below:
            node = self._chance.choice(below)
            if node.schedule in self._tried:
                below = self._tried[node.schedule]
            else:
                is_new = True
                below = self._try(host, node)
                self._tried[node.schedule] = []  # those below it are not kept: of all it would be too much
                if depth == 0:
                    self._tried[node.schedule] = below
            depth += 1
        return is_new


_KINDS = "".join(re.escape(kind) for kind in (*DEATHS, INTERRUPT))
_MOVE = re.compile(rf"([A-F]|[a-f]+)([{_KINDS}]?)(\d*)")


def parse(text: str) -> Schedule:
    """The schedule that was printed so."""
    moves = []
    for word in text.split():
        found = _MOVE.fullmatch(word)
        if found is None:
            raise SystemExit(f"{word!r} is no move: A, A17, A!, A!2, A~ are some")
        task, kind, steps = found.groups()
        moves.append(Move(task, int(steps or ENDLESS), kind or GO))
    return tuple(moves)


def replay(scene: str, broken: str, schedule: Schedule) -> int:
    """Make one schedule, and print each step of it; the exit status."""
    try:
        with closing(Host(SCENES[scene], broken)) as host:
            run = Run(host, schedule)
    except VoidError as err:
        print(f"there is no such schedule: {err}", file=sys.stderr)
        return 2
    number = 0
    for ran in run.made:
        print(f"-- {ran.move}")
        indent = "  " * (ord(ran.move.task[0].upper()) - ord("A"))
        for one in ran.log:
            if isinstance(one, str):
                number += 1
                told = one
            else:
                told = " ".join(str(word) for word in one).upper()
            print(f"{number:5} {indent}{ran.move.task} {told}")
    for violation in run.violations:
        print(violation_text(violation))
    return 1 if run.violations else 0


def scenes_of(asked: list[str] | None) -> list[str]:
    """The names of the scenes that were asked for, by name or by the beginnings of their names; None: all."""
    if asked is None:
        names = list(SCENES)
    else:
        beginnings = tuple(word for word in asked if word not in SCENES)
        names = [name for name in SCENES if name in asked or name.startswith(beginnings)]
    if os.geteuid() != 0:
        names = [name for name in names if not SCENES[name].users]
    return names


def _become_reproducible(checkout: str | None) -> None:
    """Start anew where the order of sets is not always the same, since that is part of a schedule.

    Args:
        checkout: of the package that is imported then; None: the one of this tool.
    """
    if os.environ.get("PYTHONHASHSEED") == "0":
        return
    os.environ["PYTHONHASHSEED"] = "0"
    if checkout:
        os.environ["SAFE_GPU_CHECKOUT"] = checkout
    os.execv(sys.executable, [sys.executable, *sys.argv])


def _import_once() -> None:
    """Import in this process all that is forked."""
    simulate("gpus-1", "/nonexistent")
    os.sched_yield = lambda: None
    search.import_all()
    search.import_all = lambda: None  # type: ignore[assignment]


def _search(args: argparse.Namespace, seconds: float, scene: str) -> tuple[int, int]:
    """Search a scene. Returns how many schedules were tried, and how many had violations."""
    search = Search(scene, args, seconds)
    search.run()
    return search.schedules, len(search.found)


def main() -> int:
    parser = parser_with_seed(__doc__)
    parser.add_argument("--scene", action="append", metavar="NAME", help="only this one, or those that begin so")
    parser.add_argument("--preemptions", type=int, default=1, metavar="K", help="at most so many (default 1)")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many of each scene, drawn at random")
    parser.add_argument("--minutes", type=float, default=math.inf, help="as many as can be drawn in this time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="scenes at once")
    parser.add_argument("--begin", default="", metavar="SCHEDULE", help="only schedules that begin so")
    parser.add_argument("--replay", metavar="SCHEDULE", help="make this one, of one scene, and print its steps")
    parser.add_argument("--checkout", metavar="DIR", help="of the package that the processes import; default: this")
    args = parser.parse_args()
    _become_reproducible(args.checkout)
    keep_quiet()
    _import_once()
    names = scenes_of(args.scene)
    if args.replay is not None:
        return replay(args.scene[0], args.broken, parse(args.replay))
    seconds = args.minutes * 60 * args.jobs / len(names)
    # multiprocessing.Pool may deadlock in terminate(), with which it ends (CPython issue 73945).
    with ProcessPoolExecutor(args.jobs, get_context("fork"), end_with_parent, (signal.SIGTERM,)) as pool:
        found = list(pool.map(partial(_search, args, seconds), names))
    bad = sum(violations for _, violations in found)
    print(f"{sum(tried for tried, _ in found)} schedules, {bad} with violations")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
