#!/usr/bin/env python3
"""Kills or interrupts a process before and after each system call of a claim, and checks what is left.

    tools/crash_points.py                       every point, in an hour; each minute it says how many
    tools/crash_points.py --sample 100          some of them, by a seed that is printed

An interrupt is a Python exception from a signal handler. After each crash no GPU is booked twice, none is lost, the
next claimers in the queue are served, another user among them (as root), and nothing is left in the state directory.
After an exception its caller gets it as it was, and the process can claim again and has no more descriptors than
before. The exit status is 1 if that was not so at some point, 77 where processes cannot be traced.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from crash_trace import Stop, Traced, begin, end, refusal
from stress import EachMinute, keep_quiet, parser_with_seed, violation_text
from support.actor import Actor, Failure, Work
from support.broken import break_build
from support.guard import ProcessState, process_state
from support.stage import Stage, import_everything, let_go, replace_file

import safe_gpu
from safe_gpu.claim.owner import current_owner
from safe_gpu.cli.commands import main as safe_gpu_main
from safe_gpu.coordination import older_package as legacy
from safe_gpu.host import procfs

HOW = ("kill", "exception")
_SOON = 60.0  # timeout of claims that are to be served at once, seconds: longer than any patience
_LONGEST = 40  # one point, seconds


# What processes are doing when they are made to crash, and the host on which they do it

GPUS = 8
_SLEEPS = ("clock_nanosleep", "nanosleep", "pselect6", "select")


class Scene:
    """A claim of two GPUs with contexts, that allows claims inside it. The other scenes are variations of it.

    Attributes:
        helpers: processes that hold or wait meanwhile, in the order in which they are to be served and to let go.
        child: a forked child of the victim, which outlives it, or 0.
    """

    first_use = False
    becomes_command = False
    needs_stops = False  # after the crash too
    ends_claim = False
    inside = 0  # GPUs of the claim inside which it is
    shared = False  # with the helper, which has half of each GPU

    def __init__(self) -> None:
        self.helpers: list[Actor] = []
        self.child = 0
        self.sleeps = 0

    def arrange(self, stage: Stage) -> None:
        """Before the victim starts, in the controller."""

    def hold(self, stage: Stage, work: Work, *, other: bool = True) -> str:
        """Have another process claim first; its token."""
        self.helpers = [stage.start("the holder", work, other=other)]
        return str(self.helpers[0].expect("holds")[2])

    def prepare(self, line: Connection) -> None:
        """Before the operation, in the victim; not traced."""

    def operate(self) -> None:
        """The operation, in the victim."""
        safe_gpu.claim_gpus(2, timeout=0, affinity=None, delegate=True)

    def at(self, stop: Stop) -> None:
        """While the victim stands at this stop, in the controller."""

    def close(self) -> None:
        """At the end, in the controller."""


class First(Scene):
    """The first claim ever on a host: it makes the state directory."""

    first_use = True

    def prepare(self, line: Connection) -> None:
        procfs.file_system_at.cache_clear()


class Wait(Scene):
    """A wait as the head of the queue, until the holder lets go: ticket, sleep, turn."""

    needs_stops = True

    def arrange(self, stage: Stage) -> None:
        self.hold(stage, stage.claims(GPUS))

    def operate(self) -> None:
        safe_gpu.claim_gpus(2, timeout=30, affinity=None, hold_for=60)

    def at(self, stop: Stop) -> None:
        if stop.thread == 0 and stop.before and stop.call in _SLEEPS and self.helpers:
            self.sleeps += 1
            if self.sleeps == 2:
                let_go(self.helpers.pop())


class Turns(Wait):
    """Such a wait on a host with limits, where users who wait are served by turns."""

    def arrange(self, stage: Stage) -> None:
        self.host = stage.host
        replace_file(self.host.policy, f"[host]\norder = fair\n[default]\nmax_gpus = {GPUS}\n")
        self.host.enter()
        super().arrange(stage)

    def close(self) -> None:
        os.unlink(self.host.policy)
        self.host.enter()


class Queue(Wait):
    """A wait behind another waiter, which dies: ticket, sleep in a thread, head of the queue, turn."""

    def arrange(self, stage: Stage) -> None:
        super().arrange(stage)
        self.helpers.append(stage.start("the waiter ahead", stage.claims(GPUS, 30.0), other=True))
        stage.until_queued(self.helpers[1])

    def at(self, stop: Stop) -> None:
        if len(self.helpers) == 2 and stop.thread and stop.before and stop.call == "fcntl":
            self.helpers.pop().end()
        elif len(self.helpers) == 1:
            super().at(stop)


class Refused(Scene):
    """A claim that gets nothing: all GPUs are held, and it does not wait."""

    def arrange(self, stage: Stage) -> None:
        self.hold(stage, stage.claims(GPUS - 1))

    def operate(self) -> None:
        with suppress(safe_gpu.NotEnoughGpusError):
            super().operate()


class Release(Scene):
    """The release of two GPUs."""

    ends_claim = True

    def prepare(self, line: Connection) -> None:
        super().operate()

    def operate(self) -> None:
        safe_gpu.release_gpus()


class Share(Scene):
    """A claim of a share of two GPUs, beside a claim that shares all."""

    shared = True

    def arrange(self, stage: Stage) -> None:
        self.hold(stage, stage.claims(GPUS, share="50%"))

    def operate(self) -> None:
        safe_gpu.claim_gpus(2, timeout=0, affinity=None, share="50%", only=(0, 1))


class ReleaseShare(Release, Share):
    """The release of such a share."""


class ReleaseForked(Release):
    """The release of two GPUs while a forked child lives, which has a copy of the entry."""

    def prepare(self, line: Connection) -> None:
        super().prepare(line)
        theirs, ours = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            line.close()
            os.close(theirs)
            os.close(ours)
            time.sleep(120)
            os._exit(0)
        os.close(ours)
        os.read(theirs, 1)  # its end: the child has closed what no child keeps
        os.close(theirs)


class Nested(Scene):
    """A claim inside a claim."""

    inside = 4

    def arrange(self, stage: Stage) -> None:
        self.token = self.hold(stage, stage.claims(self.inside, delegate=True), other=False)

    def prepare(self, line: Connection) -> None:
        os.environ["SAFE_GPU_SCOPE"] = self.token

    def operate(self) -> None:
        safe_gpu.claim_gpus(2, timeout=0, affinity=None)


class Run(Scene):
    """``safe-gpu run``, until it has become the command."""

    becomes_command = True
    needs_stops = True

    def arrange(self, stage: Stage) -> None:
        self.theirs, self.ours = os.pipe()

    def prepare(self, line: Connection) -> None:
        os.dup2(self.theirs, 0)
        os.close(self.ours)

    def operate(self) -> None:
        code = safe_gpu_main(["run", "-q", "-n", "2", "-t", "0", "--affinity", "none", "--", "/bin/cat"])
        raise AssertionError(f"safe-gpu run returned {code}")

    def close(self) -> None:
        os.close(self.theirs)
        os.close(self.ours)


class Older(Scene):
    """A claim on a host with the lock of the older package."""

    def arrange(self, stage: Stage) -> None:
        self.path = os.path.join(stage.host.path, "older")
        if not os.path.isdir(self.path):
            stage.host.make_place("older")

    def prepare(self, line: Connection) -> None:
        legacy.LOCK_FILE = os.path.join(self.path, "lock")
        os.environ["SAFE_GPU_LEGACY_LOCK"] = "always"


SCENES: dict[str, type[Scene]] = {
    "claim": Scene,
    "first": First,
    "older": Older,
    "refused": Refused,
    "wait": Wait,
    "turns": Turns,
    "queue": Queue,
    "release": Release,
    "release-forked": ReleaseForked,
    "share": Share,
    "release-share": ReleaseShare,
    "nested": Nested,
    "run": Run,
}


# The crash, and what is left


class Point(NamedTuple):
    """Where a process crashes, and how; ``number`` counts the calls of this thread from 1, and 0 is nowhere."""

    operation: str
    how: str
    number: int
    before: bool
    thread: int = 0

    def is_at(self, stop: Stop) -> bool:
        """Whether a process that stands at this stop is there."""
        return (self.thread, self.number, self.before) == (stop.thread, stop.number, stop.before)

    @property
    def when(self) -> str:
        """Before the call, or after it."""
        return "before" if self.before else "after"

    def command(self) -> str:
        """What reproduces it."""
        text = f"tools/crash_points.py --operation {self.operation} --how {self.how}"
        text += f" --at {self.number} --when {self.when}"
        if self.thread:
            text += f" --thread {self.thread}"
        return text


class Interrupt(BaseException):
    """What the signal handler of the victim raises. An Exception inside a placeholder would be the placeholder's."""


def crash(stage: Stage, point: Point, broken: str) -> Outcome:
    """Let a process crash at this point, and see what is left.

    Args:
        broken: what the victim is, a build of ``support.broken``.
    """
    scene = SCENES[point.operation]()
    if scene.first_use:
        stage.renew(first_use=True)
    outcome = Outcome(stage, scene, point)

    def give_up(number: int, frame: Any) -> None:
        raise Failure(f"nothing goes on for {_LONGEST} s")

    try:
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(_LONGEST)
        outcome.crash(broken)
        outcome.look_after()
    except Failure as err:
        outcome.violations.append(str(err))
    finally:
        signal.alarm(0)
        outcome.close()
    if outcome.violations or scene.first_use:
        stage.renew(first_use=False)  # the next one begins with a clean host
    return outcome


class Outcome:
    """What comes of one crash.

    Attributes:
        call: the system call at which it came, "" if the operation was over before.
        held: what the process held there.
        end: what became of it.
        violations: what is not as it should be.
        calls: the stops that were passed.
    """

    def __init__(self, stage: Stage, scene: Scene, point: Point) -> None:
        self.stage = stage
        self.scene = scene
        self.point = point
        self.call = self.held = self.end = ""
        self.violations: list[str] = []
        self.calls: list[Stop] = []
        self._actors: list[Actor] = []
        self._traced: Traced | None = None
        self._alive = True

    def crash(self, broken: str) -> None:
        """Let the victim come to the point, and crash there."""
        self.scene.arrange(self.stage)
        self._actors += self.scene.helpers
        self._victim = self._start("the victim", Victim(self.stage, self.scene, broken).live)
        self.scene.child = self._victim.expect("ready")[1]
        self._traced = Traced(self._victim.pid)
        for stop in self._traced.stops():
            self.calls.append(stop)
            if self.scene.becomes_command and stop.call == "execve" and not stop.before and not self._is_victim():
                self.end = "became the command"
            if not self.point.is_at(stop):
                self.scene.at(stop)
            elif self._strike(self._traced, stop):
                break
            if self.end:
                break
        if self._traced.status is None and self.end:
            self._end_command(self._traced)
        status = self._traced.status
        if status is not None:
            self._alive = False
            self._victim.status = status
            if os.WIFSIGNALED(status):
                self.end = "ended by the signal"
            else:
                self.end = f"exit {os.WEXITSTATUS(status)}"

    def _strike(self, traced: Traced, stop: Stop) -> bool:
        """Kill or interrupt the victim, which stands at this stop. Returns whether its next stops do not matter."""
        self.call = stop.call
        self.held = _held(self._victim.pid)
        if self.point.how == "kill":
            traced.kill()
            return True
        if self.scene.needs_stops:
            traced.send(signal.SIGUSR1)
            return False
        traced.leave(signal.SIGUSR1)
        return True

    def _end_command(self, traced: Traced) -> None:
        """End the command that the victim has become. If it was interrupted before, that came to nothing."""
        if self.call == "execve":  # it meets the signal as the command
            traced.join()
            return
        traced.kill()
        if self.call:
            self.violations.append("the exception was swallowed")

    def _is_victim(self) -> bool:
        """Whether execve(2) failed, and it is still the program that it was."""
        return os.readlink(f"/proc/{self._victim.pid}/exe") == os.readlink("/proc/self/exe")

    # What is left

    def look_after(self) -> None:
        """The process, if it lives, has everything as before; the next ones are served, and nothing lies about."""
        if self._alive:
            self._examine()
        elif self.scene.child:
            self._end_child()
        if self.scene.inside:
            self._claim_inside()
        if self.scene.shared:
            self._claim_beside()
        first = self._next_claimer()
        self._claim_again(first)
        if self._alive:
            more = self._more_descriptors()
            if more:
                self.violations.append(f"descriptors are left: {more}")
        self.violations += self.stage.referee.violations()
        self._add_flaws()

    def _end_child(self) -> None:
        """End the forked child, which has outlived the victim."""
        os.kill(self.scene.child, signal.SIGKILL)
        while not procfs.has_ended(self.scene.child):
            time.sleep(0.0002)
        self.scene.child = 0

    def _claim_beside(self) -> None:
        """Beside the helper that shares all GPUs there is room for another one."""
        sharer = self._start("the next sharer", self.stage.claims(GPUS, share="50%"), other=True)
        self._expect_all(sharer)
        let_go(sharer)

    def _next_claimer(self) -> Actor:
        """Somebody who gets all GPUs as soon as the helpers have had theirs and let go."""
        timeout = 0.0
        if self.scene.helpers:
            timeout = _SOON
        first = self._start("the next claimer", self.stage.claims(GPUS, timeout), other=True)
        if self.scene.helpers:
            self.stage.until_queued(first)
            holder, *waiters = self.scene.helpers
            let_go(holder)
            for waiter in waiters:
                waiter.expect("holds")
                let_go(waiter)
        self._expect_all(first)
        return first

    def _claim_again(self, first: Actor) -> None:
        """The victim, if it lives, or else another one, waits behind one that holds all GPUs, and is served."""
        if self._alive:
            second = self._victim
            second.tell("claim")
        else:
            second = self._start("one more claimer", self.stage.claims(GPUS, _SOON))
        self.stage.until_queued(second)
        if second.line.poll(0):
            raise Failure(
                f"a GPU is booked twice: {second.name} says {second.line.recv()} while the next claimer holds all"
            )
        let_go(first)
        self._expect_all(second)
        let_go(second)

    def _add_flaws(self) -> None:
        """Nothing is left in the files."""
        flaws = self.stage.flaws()
        if self.scene.first_use and flaws and "/." in flaws[0].replace("left: ", "/"):
            del flaws[0]  # the directory that was not named yet when its maker died
        self.violations += flaws

    def _examine(self) -> None:
        """What the victim says of itself."""
        _, said, ignored, changed, uuids = self._victim.expect("over")
        self.end = said
        if ignored:
            self.violations.append(f"the exception was swallowed: {ignored}")
        if changed:
            self.violations.append(f"changed: {changed}")
        if said not in ("done", "raised"):
            self.violations.append(f"the exception became another: {said}")
        if said == "raised" and uuids:
            self.violations.append(f"GPUs are held after the exception: {uuids}")
        if said == "done" and self.call and not ignored:
            self.violations.append("the exception was swallowed")

    def _claim_inside(self) -> None:
        """The outer claim holds its GPUs, and gives them to those inside it."""
        rival = self.stage.claims(GPUS - self.scene.inside + 1)
        refused = self._start("a rival of the outer claim", rival, other=True)
        refused.expect("refused")
        os.environ["SAFE_GPU_SCOPE"] = self.scene.token  # type: ignore[attr-defined]
        try:
            inner = self._start("the next claim inside", self.stage.claims(self.scene.inside, inside=True))
        finally:
            del os.environ["SAFE_GPU_SCOPE"]
        inner.expect("holds")
        let_go(inner)

    def _more_descriptors(self) -> dict[str, str]:
        """Those that it did not have before; a thread that sleeps for one that has just died may be closing its own."""
        for _ in range(400):
            self._victim.tell("descriptors")
            more: dict[str, str] = self._victim.hear()
            if not more:
                break
            time.sleep(0.005)
        return more

    def _expect_all(self, actor: Actor) -> None:
        """It has claimed all GPUs, or does so next."""
        _, uuids, _ = actor.expect("holds")
        if len(set(uuids)) != GPUS:
            raise Failure(f"{actor.name} got {uuids}")

    def _start(self, name: str, work: Work, *, other: bool = False) -> Actor:
        """Start a process that does not outlive this crash."""
        self._actors.append(self.stage.start(name, work, other=other))
        return self._actors[-1]

    def close(self) -> None:
        """Let nobody live on."""
        if self._traced is not None and self._victim.status is None:
            self._traced.kill()
            self._victim.status = self._traced.status
        for actor in {*self._actors, *self.scene.helpers}:
            actor.end()
        if self.scene.child:
            with suppress(ProcessLookupError):
                os.kill(self.scene.child, signal.SIGKILL)
        self.scene.close()


_KINDS = {"host.lock": "host.lock", "/claims/": "claim", "/queue/": "ticket"}
"""A part of the path of a file -> what has it that locks it, in the order in which this is told."""


def _held(pid: int) -> str:
    """What a process that stands holds, by the kernel's word: its descriptors whose fdinfo shows a lock."""
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{name}")
            if "lock:" in Path(f"/proc/{pid}/fdinfo/{name}").read_text():
                found.update(kind for part, kind in _KINDS.items() if part in path)
    return " + ".join(kind for kind in _KINDS.values() if kind in found) or "nothing"


class Victim:
    """What the process does that crashes.

    Args:
        broken: a build of ``support.broken``, which it is.
    """

    def __init__(self, stage: Stage, scene: Scene, broken: str) -> None:
        self._stage = stage
        self._scene = scene
        self._broken = broken
        self._raised: list[int] = []  # the exceptions of the signal handler, by their ids
        self._ignored: list[str] = []  # those that Python could raise nowhere

    def live(self, line: Connection) -> None:
        """Do the operation, say what came of it and what is otherwise than before, and then what it is told to."""
        sys.unraisablehook = lambda one: self._ignored.append(f"{one.exc_value!r} in {one.object!r}")
        signal.signal(signal.SIGUSR1, self._interrupt)
        break_build(self._broken)
        before = process_state()
        self._scene.prepare(line)
        if not self._scene.ends_claim:
            before = process_state()
        line.send(("ready", self._scene.child))
        begin()
        said = "done"
        try:
            self._scene.operate()
        except Interrupt as err:
            said = repr(err)
            if id(err) in self._raised:
                said = "raised"
        except BaseException as err:
            said = f"{err!r} after {err.__context__!r}"
        end()
        uuids = []
        owner = current_owner()
        if owner is not None:
            uuids = [gpu.uuid for gpu in owner.gpus]
            owner.release_gpus()
        changed: dict[str, Any] = {}
        if said == "raised":
            changed = process_state().changes(before)
        for name in ("descriptors", "threads"):  # some end a moment later
            changed.pop(name, None)
        line.send(("over", said, self._ignored, changed, uuids))
        self._obey(line, before)

    def _interrupt(self, number: int, frame: Any) -> None:
        """The signal handler."""
        err = Interrupt()
        self._raised.append(id(err))
        raise err

    def _obey(self, line: Connection, before: ProcessState) -> None:
        """Claim when told to, or say which descriptors are there that were not before."""
        while True:
            if line.recv() == "claim":
                self._stage.claims(GPUS, _SOON)(line)
            else:
                now = process_state().descriptors
                line.send({number: path for number, path in now.items() if before.descriptors.get(number) != path})


_Row = tuple[str, str, str, bool, str]
"""Operation, how, system call, whether after it, what became of the process."""

_VIOLATION = "VIOLATION"
_SKIPPED = 77
_PATIENCE, _SHORT_PATIENCE = 15.0, 2.0  # how long anything may take before it counts as hung, seconds


def points_of(stage: Stage, operation: str, args: argparse.Namespace) -> list[Point]:
    """The points of an operation that were asked for, by one run without a crash.

    Raises:
        Failure: that run does not end well.
    """
    whole = crash(stage, Point(operation, "kill", 0, True), args.broken)
    if whole.violations and not args.broken:
        raise Failure(f"{operation} without any crash: {'; '.join(whole.violations)}")
    stops = [stop for stop in whole.calls if not args.call or stop.call in args.call]
    if args.at:
        stops = [stop for stop in stops if (stop.number, stop.thread) == (args.at, args.thread)]
    if args.when:
        stops = [stop for stop in stops if stop.before == (args.when == "before")]
    points = []
    for how in HOW:
        if args.how in (None, how):
            points += [Point(operation, how, stop.number, stop.before, stop.thread) for stop in stops]
    return points


def table(rows: Mapping[_Row, int]) -> str:
    """System calls of each operation, before and after, with what the process held there and what became of it."""
    text = []
    for operation, how in dict.fromkeys(row[:2] for row in rows):
        found = {row[2:]: count for row, count in rows.items() if row[:2] == (operation, how)}
        bad = sum(count for (*_, end), count in found.items() if end == _VIOLATION)
        text.append(f"\n{operation}, {how}: {sum(found.values())} points, {bad} violations")
        for (call, after, what), count in sorted(found.items()):
            text.append(f"  {call:16} {'after' if after else 'before':6} {count:5}  {what}")
    return "\n".join(text)


def _end_of(outcome: Outcome) -> str:
    """What the table says of an outcome."""
    if outcome.violations:
        return _VIOLATION
    if not outcome.call:
        return "over before"
    if outcome.point.how == "kill" or outcome.end == "ended by the signal":
        return f"held {outcome.held}"
    return f"{outcome.end}, held {outcome.held}"


def _crash_all(stage: Stage, args: argparse.Namespace) -> int:
    """Crash at the points that were asked for, and print what came of it; the exit status."""
    began = time.monotonic()
    points = [point for name in args.operation or SCENES for point in points_of(stage, name, args)]
    if args.sample is not None and args.sample < len(points):
        print(f"{args.sample} of {len(points)} points, seed {args.seed}", flush=True)
        points = random.Random(args.seed).sample(points, args.sample)
    rows: Counter[_Row] = Counter()
    bad = 0
    minutes = EachMinute()
    with suppress(KeyboardInterrupt):  # with a table of those that were visited
        for point in points:
            if minutes.has_passed():
                print(f"{rows.total()} of {len(points)} points", file=sys.stderr, flush=True)
            outcome = crash(stage, point, args.broken)
            end = _end_of(outcome)  # alone: thousands of outcomes make every fork slow
            rows[point.operation, point.how, outcome.call or "(over before)", not point.before, end] += 1
            for violation in outcome.violations:
                what = f"{outcome.call} held {outcome.held}: {violation}"
                print(violation_text(what, point.command()), flush=True)
            if outcome.violations:
                bad += 1
                if args.broken:
                    break
    print(table(rows))
    print(f"\n{rows.total()} points, {bad} with violations, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def main() -> int:
    parser = parser_with_seed(__doc__)
    parser.add_argument("--operation", choices=SCENES, action="append", help="only this one; may be repeated")
    parser.add_argument("--how", choices=HOW, help="only this way to crash")
    parser.add_argument("--sample", type=int, metavar="N", help="only N points")
    parser.add_argument("--call", action="append", metavar="NAME", help="only this system call; may be repeated")
    parser.add_argument("--at", type=int, metavar="CALL", help="only this call, counted from 1; with one operation")
    parser.add_argument("--when", choices=("before", "after"), help="only before, or only after")
    parser.add_argument("--thread", type=int, default=0, help="of --at: 0 is the main thread")
    args = parser.parse_args()
    reason = refusal()
    if reason:
        print(f"skipped: {reason}")
        return _SKIPPED
    keep_quiet()
    import_everything()
    gc.freeze()  # forked processes share what is there
    patience = _SHORT_PATIENCE if args.broken else _PATIENCE
    with closing(Stage(patience=patience)) as stage:
        return _crash_all(stage, args)


if __name__ == "__main__":
    sys.exit(main())
