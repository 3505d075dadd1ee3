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

import logging
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
from typing import Any, NamedTuple

from common import parser_with_seed
from interleave_host import Host, Move, Ran, Run, Schedule, VoidError, end_with_parent
from interleave_racer import DEATHS, ENDLESS, GO, HELD, INTERRUPT
from interleave_scenes import SCENES, Scene
from support.broken import BROKEN
from support.stage import simulate

from safe_gpu.claim import search

_ENOUGH = 3  # faults of one scene
_REPORT_INTERVAL = 60.0  # seconds
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
        """Return what is the same if all that comes is."""
        return hash((self.state, str(self.schedule[-1:]), self.preemptions, self.struck))


def children(scene: Scene, node: Node, made: list[Ran], most: int) -> Iterator[Node]:
    """Yield the schedules that go on otherwise than a run did, after what it was asked for. Each comes of one run."""
    done: Schedule = ()
    for number, ran in enumerate(made):
        name, free = ran.move.task, number >= len(node.schedule)
        if free:
            here = node._replace(schedule=done, state=ran.states[0])
            yield from _strikes(scene, here, ran.alive, 0)
            for other, preempts in ran.before.items():
                if other != name and node.preemptions + preempts <= most:
                    yield _next(here, Move(other), preempts)
        if ran.move.steps == ENDLESS and number >= len(node.schedule) - 1:
            for steps, last in enumerate(ran.steps[:-1], 1):
                there = (*done, ran.move._replace(steps=steps))
                here = node._replace(schedule=there, state=ran.states[steps])
                if steps <= ran.living and not _LOOKS.match(last):  # to be killed before a look is the same
                    yield from _strikes(scene, here, ran.alive & {name}, 0)
                if node.preemptions < most:
                    yield from _strikes(scene, here, ran.alive - {name}, 1)
                    yield from (_next(here, Move(other), 1) for other, since in ran.others.items() if since <= steps)
        done = (*done, ran.move)


def _next(node: Node, move: Move, cost: int) -> Node:
    return node._replace(schedule=(*node.schedule, move), preemptions=node.preemptions + cost)


def _strikes(scene: Scene, node: Node, whom: Iterable[str], cost: int) -> Iterator[Node]:
    """Yield the schedules in which one of these is killed or interrupted now."""
    for name in () if node.struck else sorted(whom):
        for kind in (scene.deaths if name in scene.kill else "") + (INTERRUPT if name in scene.interrupt else ""):
            yield _next(node, Move(name, kind=kind), cost)._replace(struck=True)


class _EnoughError(Exception):
    """The search is over."""


class Search:
    """Tries the schedules of one scene.

    Args:
        args: of the command line.
        seconds: only so long, drawn at random.

    Attributes:
        schedules: how many were tried.
        faults: schedules, and what is wrong.
    """

    def __init__(self, scene: str, args: Any, seconds: float) -> None:
        self._name = scene
        self._most, self._sample, self._seconds, self._broken = args.preemptions, args.sample, seconds, args.broken
        begin = parse(args.begin)
        self._root = Node(begin, struck=any(move.kind != GO for move in begin))
        self._chance = random.Random(args.seed)
        self._tried: dict[Schedule, list[Node]] = {}
        self._marks: set[int] = set()
        self.schedules = self._alike = self._void = 0
        self.faults: list[tuple[str, list[str]]] = []

    def run(self) -> None:
        """Try them, and print what came of it."""
        signal.signal(signal.SIGTERM, lambda *about: sys.exit(1))  # and not before the host is cleared away
        self._began = time.monotonic()
        self._due = self._began + _REPORT_INTERVAL
        with closing(Host(SCENES[self._name], self._broken)) as self._host, suppress(_EnoughError):
            if self._sample is None and self._seconds == math.inf:
                self._try_all()
            else:
                first, misses = list(self._try(self._root)), 0
                while misses < _MOST_MISSES:
                    misses = 0 if self._draw(first) else misses + 1
        took = time.monotonic() - self._began
        text = f"{self._name:28} {self.schedules:6} schedules, {self._alike:6} like others, {self._void:4} void, "
        text += f"{took:5.0f} s, {took * 1000 / self.schedules:4.0f} ms each, {len(self.faults)} faults"
        for schedule, faults in self.faults:
            again = f"tools/interleave.py --scene {self._name} --replay '{schedule}'"
            text += f"\nFAULT: {'; '.join(faults)}\n    {again}"
        print(text, flush=True)

    def _try(self, node: Node) -> Iterator[Node]:
        try:
            run = Run(self._host, node.schedule)
        except VoidError:
            self._void += 1
            return iter(())
        self.schedules += 1
        if run.faults:
            self.faults.append((" ".join(map(str, node.schedule)), run.faults))
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _REPORT_INTERVAL
            print(f"{self._name}: {self.schedules} schedules", file=sys.stderr, flush=True)
        late = now - self._began > self._seconds
        if len(self.faults) == _ENOUGH or self.schedules == self._sample or late:
            raise _EnoughError
        for number, ran in enumerate(run.made[len(node.schedule) :], len(node.schedule)):
            done = tuple(one.move for one in run.made[: number + 1])
            self._marks.add(node._replace(schedule=done, state=ran.states[0]).mark)
        return children(SCENES[self._name], node, run.made, self._most)

    def _try_all(self) -> None:
        """Try all schedules, but of those that come to the same state and go on alike only one."""
        stack = [self._root]
        while stack:
            for node in self._try(stack.pop()):
                if node.mark in self._marks:
                    self._alike += 1
                else:
                    self._marks.add(node.mark)
                    stack.append(node)

    def _draw(self, below: list[Node]) -> bool:
        """Go from schedule to schedule by chance, to one that has all that it may. Returns whether any was new."""
        new, depth = False, 0
        while below:
            node = self._chance.choice(below)
            if node.schedule not in self._tried:
                found = list(self._try(node))
                self._tried[node.schedule] = [] if depth else found  # of all it would be too much
                below, new = found, True
            else:
                below = self._tried[node.schedule]
            depth += 1
        return new


def parse(text: str) -> Schedule:
    """Return the schedule that was printed so."""
    moves = []
    for word in text.split():
        found = re.fullmatch(rf"([A-F]|[a-f]+)([{''.join(map(re.escape, (*DEATHS, INTERRUPT)))}]?)(\d*)", word)
        if found is None:
            raise SystemExit(f"{word!r} is no move: A, A17, A!, A!2, A~ are some")
        moves.append(Move(found[1], int(found[3] or ENDLESS), found[2] or GO))
    return tuple(moves)


def replay(scene: str, broken: str, schedule: Schedule) -> int:
    """Make one schedule, and print each step of it."""
    try:
        with closing(Host(SCENES[scene], broken)) as host:
            run = Run(host, schedule)
    except VoidError as err:
        print(f"there is no such schedule: {err}", file=sys.stderr)
        return 2
    number = 0
    for ran in run.made:
        print(f"-- {ran.move}")
        for one in ran.log:
            number += isinstance(one, str)
            told = one if isinstance(one, str) else " ".join(map(str, one)).upper()
            print(f"{number:5} {'  ' * (ord(ran.move.task[0].upper()) - ord('A'))}{ran.move.task} {told}")
    for fault in run.faults:
        print(f"FAULT: {fault}")
    return 1 if run.faults else 0


def main() -> int:
    parser = parser_with_seed(__doc__, BROKEN)
    parser.add_argument("--scene", action="append", metavar="NAME", help="only this one, or those that begin so")
    parser.add_argument("--preemptions", type=int, default=1, metavar="K", help="at most so many (default 1)")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many of each scene, drawn at random")
    parser.add_argument("--minutes", type=float, default=math.inf, help="as many as can be drawn in this time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="scenes at once")
    parser.add_argument("--begin", default="", metavar="SCHEDULE", help="only schedules that begin so")
    parser.add_argument("--replay", metavar="SCHEDULE", help="make this one, of one scene, and print its steps")
    parser.add_argument("--checkout", metavar="DIR", help="of the package that the processes import; default: this")
    args = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a schedule
        there = {"SAFE_GPU_CHECKOUT": args.checkout} if args.checkout else {}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0", **there})
    logging.getLogger("safe_gpu").addHandler(logging.NullHandler())
    simulate("gpus-1", "/nonexistent")
    os.sched_yield = lambda: None
    search.import_all()  # once, for all that are forked
    search.import_all = lambda: None  # type: ignore[assignment]
    asked = tuple(args.scene or [""])
    names = [name for name in SCENES if name in asked or name.startswith(tuple({*asked} - SCENES.keys()))]
    names = [name for name in names if not (SCENES[name].users and os.geteuid())]
    if args.replay is not None:
        return replay(args.scene[0], args.broken, parse(args.replay))
    seconds = args.minutes * 60 * args.jobs / len(names)
    # multiprocessing.Pool may deadlock in terminate(), with which it ends (CPython issue 73945).
    with ProcessPoolExecutor(args.jobs, get_context("fork"), end_with_parent, (signal.SIGTERM,)) as pool:
        found = [*pool.map(partial(_search, args, seconds), names)]
    print(f"{sum(tried for tried, _ in found)} schedules, {sum(faults for _, faults in found)} with faults")
    return int(any(faults for _, faults in found))


def _search(args: Any, seconds: float, scene: str) -> tuple[int, int]:
    """Search a scene. Returns how many schedules were tried, and how many had faults."""
    search = Search(scene, args, seconds)
    search.run()
    return search.schedules, len(search.faults)


if __name__ == "__main__":
    sys.exit(main())
