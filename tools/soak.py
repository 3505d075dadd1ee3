#!/usr/bin/env python3
"""A soak test: processes that claim GPUs of a simulated host in every way, and end in every way, for minutes or hours.

    tools/soak.py --minutes 10 --processes 32

A referee outside the claim code counts violations: GPUs booked twice, GPUs that nobody can claim at a quiet point,
waits past their deadline, waiters served out of turn or later than they were told because others were let through,
users over their limit or held up by it wrongly, shares beside a whole claim or together larger than the memory,
undocumented exceptions. The exit status is 1 if there was any. One
line of figures is printed each minute; for each violation, the last events on that GPU. --islands, --users, --policy,
--cleaner and --order fair need root.
"""

import argparse
import ctypes
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common import parser_with_seed
from soak_host import ISLANDS, Ground, Life, Policy, draw, live, replace_file
from support.broken import BROKEN
from support.stage import import_everything, place_for_all

from safe_gpu.cli.commands import main as safe_gpu_main
from safe_gpu.drivers.simulated import PRESETS, find_preset
from safe_gpu.host import procfs

USERS = (12001, 12002, 12003)
GRACE = 15.0  # how far past its deadline a claim may return on a busy machine with a driver that stalls, seconds
QUIET_EVERY = 20.0  # seconds
PATIENCE = 30.0  # how long all may take to end before a quiet point, seconds
_SET_CHILD_SUBREAPER = 36  # prctl(2): processes whose parents have ended become children of this one
_LATE = 0.3  # how much later than it was told a waiter may start on a busy machine, seconds


class Soak:
    """The controller: starts processes, hurts them, and reads what they tell."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rng = random.Random(options.seed)
        above = place_for_all("soak")
        self.ground = Ground(f"{above}/ground", options.preset)
        self.gpus = self.ground.gpus
        self.options = options
        self.shared = tuple(self.gpus[:3]) if options.shares else ()
        self.islands = ISLANDS if options.islands else ISLANDS[:1]
        self.users = USERS if options.users else ()
        limited = options.users or options.policy or options.order == "fair"
        self.policy = Policy(self.ground.root, options.order) if limited else None
        self.broken: str = options.broken
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.violations: list[dict[str, Any]] = []
        self.longest_wait = 0.0
        self._number = 0
        self._children: set[int] = set()
        self._players: dict[int, int] = {}  # pid on the host -> number
        self._hurt: set[int] = set()  # numbers of those that were stopped
        self._resume: list[tuple[float, int]] = []
        self.story: deque[dict[str, Any]] = deque(maxlen=4000)
        if options.islands:
            Path(self.ground.root, "islands").touch()
            # Processes in PID namespaces see the host's /proc there.
            if os.system(f"mount --bind /proc '{self.ground.root}/proc'"):
                sys.exit("soak.py: --islands needs root, and mount(8)")
            self.ground = Ground(self.ground.root)
        self.ground.enter()
        import_everything()  # so that forked processes import nothing
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._events = open(self.ground.referee.log, encoding="utf-8")  # noqa: SIM115
        self._partial = ""

    # ---- Time passes ----

    def run(self, seconds: float) -> None:
        """Let processes live for this time, with a quiet point every 20 s and at the end."""
        self._be_quiet()
        started = time.monotonic()
        end, minute, quiet = started + seconds, started + 60.0, started + QUIET_EVERY / 3
        while time.monotonic() < end and not self.is_caught:
            self._step()
            if time.monotonic() >= quiet:
                self._be_quiet()
                quiet = time.monotonic() + QUIET_EVERY
            if time.monotonic() >= minute:
                self.report(time.monotonic() - started)
                minute += 60.0
        if not self.is_caught:
            self._be_quiet()
        self._end_all()

    @property
    def is_caught(self) -> bool:
        """Whether the claim code was broken on purpose and that was found."""
        return bool(self.broken) and bool(self.violations)

    def _step(self) -> None:
        while len(self._children) < self.options.processes:
            self.start(draw(self.rng, self.islands, self.users, self.shared))
        self._reap()
        self._listen()
        now = time.monotonic()
        for when, pid in list(self._resume):
            if now >= when:
                _signal(pid, signal.SIGCONT)
                self._resume.remove((when, pid))
        if self._players and self.rng.random() < 0.05:
            self._harm(self.rng.choice(list(self._players)))
        if self.rng.random() < 0.01:
            self._change_weather()
        if self.options.cleaner and self.rng.random() < 0.2:
            self._clean()
        time.sleep(0.005)

    def start(self, life: Life) -> int:
        self._number += 1
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            live(self.ground, self._number, life, self.broken)
        self._children.add(child)
        self.counts["processes"] += 1
        return self._number

    def _harm(self, pid: int) -> None:
        """Kill, interrupt or stop a process, whatever it is doing."""
        what = self.rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP))
        if _signal(pid, what):
            self.counts[what.name] += 1
            self._hurt.add(self._players[pid])
            if what == signal.SIGSTOP:
                self._resume.append((time.monotonic() + self.rng.uniform(0.05, 1.5), pid))

    def _change_weather(self) -> None:
        # Who asks for all of the shared GPUs is refused for ever while one of them is lost, and rightly.
        some = self.rng.sample([gpu for gpu in self.gpus if gpu not in self.shared], 2)
        skies = ({"lag": 0.05}, {"stall": 0.1}, {"stall": 2.0}, {"hides": some}, {"lost": some}, {"fails": True})
        self._set_weather(**self.rng.choice((*[{}] * 4, *skies)))

    def _set_weather(self, **sky: Any) -> None:
        replace_file(f"{self.ground.root}/weather", json.dumps(sky))

    def _clean(self) -> None:
        """What a cleaner of /tmp does: remove a file, a directory, everything; or move it away."""
        self.counts["cleaned"] += 1
        state = self.ground.state
        what = self.rng.random()
        with suppress(OSError, IndexError):
            if what < 0.05:
                os.rename(state, f"{self.ground.root}/moved-{self.counts['cleaned']}")
            elif what < 0.15:
                shutil.rmtree(state, ignore_errors=True)
            else:
                files = [os.path.join(place, name) for place, _, names in os.walk(state) for name in names]
                os.unlink(self.rng.choice(files))

    # ---- What the processes tell ----

    def _listen(self) -> None:
        self._partial += self._events.read()
        lines = self._partial.split("\n")
        self._partial = lines.pop()
        for line in lines:
            event = json.loads(line)
            self.story.append(event)
            self.counts[event["event"]] += 1
            if event["event"] == "begins":
                self._players[event["pid"]] = event["number"]
            elif event["event"] == "refused":
                self.errors[event["error"]] += 1
                if event["error"] in ("StateDirError", "LockTimeout") and not self.options.cleaner:
                    self.violation(event | {"what": "an error without a cause"})
            elif event["event"] == "waited":
                self.longest_wait = max(self.longest_wait, event["seconds"])
                if event["seconds"] > event["timeout"] + GRACE and event["number"] not in self._hurt:
                    self.violation(event | {"what": "a wait past its deadline"})
            elif event["event"] == "violation":
                self.violation(event)

    def violation(self, event: dict[str, Any]) -> None:
        """Print it with what went before."""
        self.violations.append(event)
        print(f"VIOLATION: {event.pop('what')}: {event}")
        gpu, number = event.get("uuid", "-"), event.get("number")
        for past in [past for past in self.story if gpu in past.get("uuids", ()) or past.get("number") == number][-12:]:
            print(f"    {past}")

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while child := os.waitpid(-1, os.WNOHANG)[0]:
                self._children.discard(child)
        for pid in [pid for pid in self._players if not self.ground.referee.start_time(pid)]:
            del self._players[pid]

    # ---- Quiet points ----

    def _be_quiet(self) -> None:
        """Let all end, and see what must be true then."""
        if self.story:
            self._set_weather()
            deadline = time.monotonic() + PATIENCE
            while (self._children or self._players) and time.monotonic() < deadline:
                for _, pid in self._resume:
                    _signal(pid, signal.SIGCONT)
                self._resume.clear()
                self._reap()
                self._listen()
                time.sleep(0.01)
            self._end_all()
        self.counts["quiet points"] += 1
        cleaner = Path(self.ground.root, "cleaner")  # the referee counts what users hold only while none is at work
        cleaner.unlink(missing_ok=True)
        if self.policy:
            self.policy.set({})
        scenes: list[Callable[[], None]] = [partial(self.claim_all, island) for island in self.islands]
        scenes += [self.take_turns, self.stay_behind, self.keep_promises]
        if self.shared:
            scenes.insert(0, self.share_out)
        if self.policy:
            scenes.append(partial(self.keep_limits, self.policy))
        for scene in scenes:
            if not self.is_caught:
                scene()
        if self.options.cleaner:
            cleaner.touch()
        self._end_all()
        if self.policy:
            self.counts["policies"] += 1
            self.policy.change(self.rng, self.users or (os.getuid(),))

    def told(self, number: int, *events: str) -> set[str]:
        """Wait until a process tells one of these events or has been silent for long; all that it told."""
        events = events or ("holds", "refused", "violation")
        deadline = time.monotonic() + PATIENCE
        while True:
            self._listen()
            told = {event["event"] for event in self.story if event.get("number") == number}
            if told & set(events) or time.monotonic() > deadline:
                return told
            self._reap()
            time.sleep(0.002)

    def expect_served(self, number: int, what: str, **facts: Any) -> None:
        """It is this violation if a process gets no GPUs."""
        if "holds" not in self.told(number):
            self.violation({"what": what, "number": number, **facts})

    def kill(self, number: int) -> None:
        """Kill a process that has told that it begins."""
        for pid, known in self._players.items():
            if known == number:
                _signal(pid, signal.SIGKILL)

    def _end_all(self) -> None:
        """Kill all, with what outlives its parent by design: a forked child, or a claim inside a claim."""
        with suppress(ChildProcessError):
            while True:
                for pid in procfs.descendants(os.getpid()):
                    _signal(pid, signal.SIGKILL)
                os.waitpid(-1, 0)
        self._children.clear()
        self._players.clear()
        self._listen()

    def report(self, seconds: float) -> None:
        """One line of figures."""
        words = ("processes", "holds", "refused", "SIGKILL", "SIGSTOP", "policies", "cleaned", "quiet points")
        figures = ", ".join(f"{self.counts[word]} {word}" for word in words if self.counts[word])
        errors = ", ".join(f"{count} {name}" for name, count in self.errors.most_common(4))
        print(
            f"{seconds / 60:5.1f} min: {figures}; {errors}; longest wait {self.longest_wait:.1f} s; "
            f"{len(self.violations)} violations",
            flush=True,
        )

    def close(self) -> None:
        """Remove the stage."""
        self._events.close()
        if self.ground.islands:
            os.system(f"umount -l '{self.ground.root}/proc'")
        shutil.rmtree(os.path.dirname(self.ground.root), ignore_errors=True)

    # ---- What must be true at a quiet point ----

    def claim_all(self, island: str) -> None:
        number = self.start(Life(len(self.gpus), hold=0.0, island=island))
        self.expect_served(number, "GPUs that nobody can claim at a quiet point", island=island)

    def take_turns(self) -> None:
        """Waiters for the whole host, who come one after the other behind a holder, are served in order."""
        fair = self.options.order == "fair"
        uids: list[int | None] = [self.rng.choice(USERS) if fair else None for _ in range(6)]
        self.told(holder := self.start(Life(len(self.gpus), hold=PATIENCE, uid=uids[0])))
        ends = ("linger", "release", "release", "exit", "release")
        lives = (Life(len(self.gpus), end=end, uid=uid) for end, uid in zip(ends, uids[1:], strict=True))
        came = [self._queue_up(life) for life in lives]
        self.kill(holder)
        served = self._served(came)
        expected = [came[place] for place in by_turns(uids, len(self.gpus))] if fair else came
        if served != expected:
            self.violation({"what": "waiters out of turn", "came": came, "served": served, "expected": expected})

    def stay_behind(self) -> None:
        """A small claim that says nothing does not pass one who waits for all GPUs, though half of them are free."""
        self.told(holder := self.start(Life(len(self.gpus) // 2, hold=PATIENCE)))
        large = self._queue_up(Life(len(self.gpus)))
        self.told(small := self.start(Life(1, timeout=0.0)))
        self.kill(holder)
        if self._served([large, small])[:1] == [small]:
            self.violation({"what": "a waiter was passed", "number": small, "waiter": large})

    def share_out(self) -> None:
        """Shares that fit are served beside each other. What does not fit is tried, and the referee sees it served."""
        gpu = self.rng.choice(self.shared)

        def attempt(share: str | None, island: str = "home", hold: float = 0.01, timeout: float = 0.0) -> int:
            number = self.start(Life(1, timeout=timeout, hold=hold, share=share, only=(gpu,), island=island))
            self.told(number)
            return number

        for sizes in (("50%", "50%"), (None,), ("100%",)):
            holders = [attempt(share, hold=PATIENCE, timeout=2.0) for share in sizes]
            for number in holders:
                self.expect_served(number, "refused while there was room", uuid=gpu, sizes=sizes)
            for island in self.islands:
                attempt(None, island)
                attempt("1GiB", island)
            for number in holders:
                self.kill(number)

    # ---- Promises ----

    def keep_promises(self) -> None:
        """Holders keep their word, and small claims come: nobody starts later than it was told because of them."""
        rng = self.rng
        words: dict[int, float] = {}
        free = rng.choice((1, 2, 3))
        part = rng.randint(1, len(self.gpus) - free - 1)
        for size in (part, len(self.gpus) - free - part):
            word = rng.choice((1.5, 2.0, 2.5, 3.0))
            number = self.start(Life(size, hold=word - rng.choice((0.2, 0.7)), hold_for=word))
            words[number] = word
            self.expect_served(number, "refused while enough GPUs were free")
        waiters = []
        large = rng.choice((len(self.gpus), rng.randint(free + 1, len(self.gpus))))
        for size in (large, rng.randint(1, len(self.gpus))):
            number = self._queue_up(Life(size, hold=0.1, hold_for=1.0))
            words[number] = 1.0
            waiters.append(Waiter(number, self._expected_start(number)))
        for word in rng.sample((1.0, 1.0, 2.0, 4.0, 4.0, math.inf), 4):
            life = Life(rng.randint(1, free), timeout=rng.choice((0.0, 0.0, 1.0)))
            if word < math.inf:
                life = life._replace(hold=0.9 * word, hold_for=word)
            words[self.start(life)] = word
            time.sleep(rng.choice((0.0, 0.1, 0.3)))
        for number in words:
            if "holds" in self.told(number):
                self.told(number, "released")
        for broken in broken_promises(waiters, words, self.story):
            self.violation(broken)

    def _expected_start(self, number: int) -> float:
        """When a waiter can expect to start, as ``status`` shows it, ``time.monotonic()``; inf if it shows none."""
        self.told(number, "begins")
        text = io.StringIO()
        with open(os.devnull, "w") as null, redirect_stdout(text), redirect_stderr(null):
            safe_gpu_main(["status", "--json"])
        now = time.monotonic() - time.time()
        for waiter in json.loads(text.getvalue())["queue"]:
            if self._players.get(waiter["pid"]) == number and waiter["expected_start"] is not None:
                return float(waiter["expected_start"] + now)
        return math.inf

    # ---- Limits ----

    def keep_limits(self, policy: Policy) -> None:
        """A user may hold as many GPUs as the policy says, whatever others hold, and holds nobody up."""
        user, other = self.rng.sample(USERS[:2], 2)
        most = self.rng.choice((2, 3))
        policy.set({user: most})
        holders: list[int] = []
        for size, uid in ((2, other), (most - 1, user), (1, user)):
            holders.append(self.start(Life(size, uid=uid, timeout=0.0, hold=8.0)))
            self.expect_served(holders[-1], "refused within the limit", most=most)
        over = self.start(Life(1, uid=user, timeout=0.0))
        self.told(over)  # the markers tell if it is over the limit
        waiter = self._queue_up(Life(1, uid=user, timeout=60.0))
        passer = self.start(Life(1, uid=other, timeout=0.0))
        held = "holds" in self.told(passer)
        if not held and not any("released" in self.told(number, "holds") for number in holders):
            self.violation({"what": "held up by a waiter at its limit", "number": passer, "waiter": waiter})
        for number in holders:
            self.kill(number)
        self.expect_served(waiter, "not served below the limit", most=most)

    def _queue_up(self, life: Life) -> int:
        """Start a process and wait until it has a ticket, or needs none; its number."""
        known = self._tickets()
        number = self.start(life)
        while self._tickets() <= known and not {"holds", "refused"} & self.told(number, "begins"):
            time.sleep(0.001)
        return number

    def _served(self, numbers: list[int]) -> list[int]:
        """Those of these processes that got GPUs, in the order in which they did."""
        for number in numbers:
            self.told(number)
        return [event["number"] for event in self.story if event["event"] == "holds" and event["number"] in numbers]

    def _tickets(self) -> int:
        """The highest number of a ticket."""
        with suppress(OSError):
            names = os.listdir(f"{self.ground.state}/queue")
            return max((int(name.partition(".")[0]) for name in names if name[0] != "."), default=-1)
        return -1


def by_turns(uids: Sequence[object], size: int) -> list[int]:
    """Return in which order waiters for the whole host are served, by their users; the first of these holds it."""
    turns: list[float] = []
    for uid in uids[1:]:
        own = [turn + size for turn, other in zip(turns, uids[1:], strict=False) if other == uid]
        turns.append(max([min(turns, default=0.0) + 0.5 + size * (uid == uids[0]), *own]))
    return sorted(range(len(turns)), key=turns.__getitem__)


class Waiter(NamedTuple):
    """A waiter and the start that it was told to expect, ``time.monotonic()``; ``math.inf`` if it was told none."""

    number: int
    expected: float


def broken_promises(
    waiters: list[Waiter], words: Mapping[int, float], story: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Waiters that started later than they were told because others who came after them were let through.

    To blame is a claim that got GPUs before the waiter although its word reaches past the expected start. All is
    counted from the moment that it began, so that it is not blamed for what a busy machine does. What holders and
    waiters ahead were late is added to the expected start.

    Args:
        waiters: in the order in which they came.
        words: number of a process -> for how long it said that it would hold its GPUs, seconds; in the order in which
            they came.
    """
    at: dict[int, dict[str, float]] = {number: {} for number in words}
    for event in story:
        at.get(event.get("number", -1), {}).setdefault(event["event"], event["at"])
    slack = max(
        _lateness(at[one], at[one].get("begins", -math.inf) + words[one]) for one in words if one < waiters[0].number
    )
    found = []
    before = -math.inf
    for waiter in waiters:
        start, latest = at[waiter.number].get("holds", math.inf), waiter.expected + slack
        if waiter.expected < before:
            break  # it was to pass the one before it, which it cannot if that one starts early
        passers = [
            f"{one}, who said {words[one]} s"
            for one in words
            if one > waiter.number
            and at[one].get("holds", math.inf) < start
            and at[one]["begins"] + words[one] > latest
        ]
        if passers and start > latest + _LATE:
            late = round(start - waiter.expected, 3)
            what = "an expected start passed because others were let through"
            found.append({"what": what, "number": waiter.number, "late": late, "let through": passers})
        before = waiter.expected
        slack = max(
            slack, start - waiter.expected, _lateness(at[waiter.number], waiter.expected + words[waiter.number])
        )
    return found


def _lateness(events: Mapping[str, float], end: float) -> float:
    """How much later than that a process let go, seconds."""
    return max(0.0, events.get("released", math.inf) - end)


def _signal(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def main() -> int:
    parser = parser_with_seed(__doc__, BROKEN)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--processes", type=int, default=24, help="how many live at a time")
    parser.add_argument("--shares", action="store_true", help="most claims are on three GPUs, and share them")
    needing_root = {
        "islands": "some in another state directory, a private one, a PID namespace",
        "users": "as three users",
        "policy": "with limits that change; part of --users",
        "cleaner": "the state directory is cleaned and moved",
    }
    for name, text in needing_root.items():
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--order", choices=("fifo", "fair"), default="fifo", help="in which users are served")
    whole = {name: [gpu for gpu in find_preset(name).of(None).gpus if not gpu.unusable] for name in PRESETS}
    large = [name for name, gpus in whole.items() if len(gpus) >= 8]
    name_of = partial(re.sub, "^simulated:", "")
    parser.add_argument("--preset", type=name_of, choices=large, default="dgx-a100", help="the simulated host")
    args = parser.parse_args()
    if os.geteuid() and (args.order == "fair" or any(getattr(args, name) for name in needing_root)):
        parser.error(f"--{', --'.join(needing_root)} and --order fair need root")
    print(f"seed {args.seed}", flush=True)
    soak = Soak(args)
    started = time.monotonic()
    try:
        soak.run(args.minutes * 60)
    finally:
        soak.report(time.monotonic() - started)
        soak.close()
    return 1 if soak.violations else 0


if __name__ == "__main__":
    sys.exit(main())
