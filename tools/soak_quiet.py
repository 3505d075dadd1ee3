"""What must be true at a quiet point of a soak test, when nobody is hurt and the driver behaves."""

from __future__ import annotations

import io
import json
import math
import os
import random
import time
from collections.abc import Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from soak_lives import Life

from safe_gpu.cli.commands import main as safe_gpu_main

if TYPE_CHECKING:
    from soak import Soak
    from soak_limits import Policy

__all__ = ["Waiter", "broken_promises", "quiet_point"]

_FAIR = (12001, 12002)  # users of the check of limits
_LATE = 0.3  # how much later than it was told a waiter may start on a busy machine, seconds


def quiet_point(soak: Soak, rng: random.Random, islands: Iterable[str], policy: Policy | None) -> None:
    """Claim all GPUs on every island, see that waiters are served in turn and by their dates, and that limits hold."""
    if policy:
        policy.set({})
    quiet = _Quiet(soak, rng)
    scenes = [partial(quiet.claim_all, island) for island in islands]
    scenes += [partial(scene) for scene in (quiet.take_turns, quiet.stay_behind, quiet.keep_promises)]
    if policy:
        scenes.append(partial(quiet.keep_limits, policy))
    for scene in scenes:
        if not soak.is_caught:
            scene()
    if policy:
        policy.set({})


def _calm(nb_gpus: int, *, timeout: float = 10.0, hold: float = 0.01, end: str = "release") -> Life:
    """A plain claim at a quiet point."""
    return Life("claim", nb_gpus, False, timeout, hold, None, end, "home", None, 0)


class _Quiet:
    def __init__(self, soak: Soak, rng: random.Random) -> None:
        self._soak = soak
        self._rng = rng
        self._all = len(soak.gpus)

    def claim_all(self, island: str) -> None:
        number = self._soak.start(_calm(self._all, hold=0.0)._replace(island=island))
        if "holds" not in self._told(number):
            self._soak.violation(
                {"what": "GPUs that nobody can claim at a quiet point", "number": number, "island": island}
            )

    def take_turns(self) -> None:
        """Waiters for the whole host, who come one after the other behind a holder, are served in that order."""
        holder = self._soak.start(_calm(self._all, hold=0.5))
        self._told(holder)
        ends = ("linger", "release", "release", "exit", "release")
        waiters = [self._queue_up(_calm(self._all, end=end)) for end in ends]
        served = self._served(waiters)
        if served != waiters:
            self._soak.violation({"what": "waiters out of turn", "came": waiters, "served": served})

    def stay_behind(self) -> None:
        """A small claim that says nothing does not pass one who waits for all GPUs, though half of them are free."""
        holder = self._soak.start(_calm(self._all // 2, hold=1.5))
        self._told(holder)
        large = self._queue_up(_calm(self._all))
        small = self._soak.start(_calm(1, timeout=0.0))
        if self._served([large, small])[:1] == [small]:
            self._soak.violation({"what": "a waiter was passed", "number": small, "waiter": large})

    # ---- Promises ----

    def keep_promises(self) -> None:
        """Holders keep their word, and small claims come: nobody starts later than it was told because of them."""
        rng = self._rng
        words: dict[int, float] = {}
        free = rng.choice((1, 2, 3))
        part = rng.randint(1, self._all - free - 1)
        for size in (part, self._all - free - part):
            word = rng.choice((1.5, 2.0, 2.5, 3.0))
            number = self._say(words, size, word, hold=word - rng.choice((0.2, 0.7)))
            if "holds" not in self._told(number):
                self._soak.violation({"what": "refused while enough GPUs were free", "number": number})
        waiters = []
        for size in (rng.choice((self._all, rng.randint(free + 1, self._all))), rng.randint(1, self._all)):
            number = self._say(words, size, 1.0, hold=0.1, queue_up=True)
            waiters.append(Waiter(number, self._expected_start(number)))
        for word in rng.sample((1.0, 1.0, 2.0, 4.0, 4.0, math.inf), 4):
            hold = 0.01 if word == math.inf else 0.9 * word
            self._say(words, rng.randint(1, free), word, hold=hold, timeout=rng.choice((0.0, 0.0, 1.0)))
            time.sleep(rng.choice((0.0, 0.1, 0.3)))
        for number in words:
            if "holds" in self._told(number):
                self._told(number, "released")
        for broken in broken_promises(waiters, words, self._soak.story):
            self._soak.violation(broken)

    def _say(
        self,
        words: dict[int, float],
        size: int,
        word: float,
        *,
        hold: float,
        timeout: float = 10.0,
        queue_up: bool = False,
    ) -> int:
        """Start a process that says for how long it will hold its GPUs; its number. The word is noted."""
        life = _calm(size, timeout=timeout, hold=hold)._replace(hold_for=None if word == math.inf else word)
        number = self._queue_up(life) if queue_up else self._soak.start(life)
        words[number] = word
        return number

    def _expected_start(self, number: int) -> float:
        """When a waiter can expect to start, as ``status`` shows it, ``time.monotonic()``; inf if it shows none."""
        self._told(number, "begins")
        text = io.StringIO()
        with open(os.devnull, "w") as null, redirect_stdout(text), redirect_stderr(null):
            safe_gpu_main(["status", "--json"])
        now = time.monotonic() - time.time()
        for waiter in json.loads(text.getvalue())["queue"]:
            if self._soak.number_of(waiter["pid"]) == number and waiter["expected_start"] is not None:
                return float(waiter["expected_start"] + now)
        return math.inf

    # ---- Limits ----

    def keep_limits(self, policy: Policy) -> None:
        """A user may hold as many GPUs as the policy says, whatever others hold, and holds nobody up.

        A PID namespace hides who holds a lock, so some look from there.
        """
        user, other = self._rng.sample(_FAIR, 2)
        most = self._rng.choice((2, 3))
        policy.set({user: most})
        holders: list[int] = []
        for size, uid in ((2, other), (most - 1, user), (1, user)):
            holders.append(self._soak.start(self._of(uid, size, timeout=0.0, hold=8.0)))
            if "holds" not in self._told(holders[-1]):
                self._soak.violation({"what": "refused within the limit", "number": holders[-1], "most": most})
        over = self._soak.start(self._of(user, 1, timeout=0.0))
        self._told(over)  # the markers tell if it is over the limit
        waiter = self._queue_up(self._of(user, 1, timeout=60.0))
        passer = self._soak.start(self._of(other, 1, timeout=0.0))
        held = "holds" in self._told(passer)
        if not held and not any("released" in self._told(number, "holds") for number in holders):
            self._soak.violation({"what": "held up by a waiter at its limit", "number": passer, "waiter": waiter})
        for number in holders:
            self._soak.kill(number)
        if "holds" not in self._told(waiter):
            self._soak.violation({"what": "not served below the limit", "number": waiter, "most": most})

    def _of(self, uid: int, nb_gpus: int, *, timeout: float, hold: float = 0.01) -> Life:
        """A claim of a user, on some island with the state directory of all."""
        islands = [one for one in self._soak.islands if one in ("home", "pid namespace")]
        return _calm(nb_gpus, timeout=timeout, hold=hold)._replace(uid=uid, island=self._rng.choice(islands))

    # ---- What processes tell ----

    def _told(self, number: int, *events: str) -> set[str]:
        return self._soak.told(number, *(events or ("holds", "refused", "violation")))

    def _queue_up(self, life: Life) -> int:
        """Start a process and wait until it has a ticket, or needs none; its number."""
        known = self._tickets()
        number = self._soak.start(life)
        while self._tickets() <= known and not {"holds", "refused"} & self._soak.told(number, "begins"):
            time.sleep(0.001)
        return number

    def _served(self, numbers: list[int]) -> list[int]:
        """Those of these processes that got GPUs, in the order in which they did."""
        for number in numbers:
            self._told(number)
        return [
            event["number"] for event in self._soak.story if event["event"] == "holds" and event["number"] in numbers
        ]

    def _tickets(self) -> int:
        """The highest number of a ticket."""
        with suppress(OSError):
            return max(
                (int(name[:-7]) for name in os.listdir(f"{self._soak.stage.state}/queue") if name.endswith(".ticket")),
                default=-1,
            )
        return -1


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
