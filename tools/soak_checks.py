"""What must be true at a quiet point of a soak, when nobody else lives: who is served, in which order, and when."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from soak_host import Life, Policy

from safe_gpu.cli.commands import main as safe_gpu_main

if TYPE_CHECKING:
    from soak import Soak

USERS = (12001, 12002, 12003)
PATIENCE = 30.0  # how long all may take to end before a quiet point, seconds
_LATE = 0.3  # how much later than it was told a waiter may start on a busy machine, seconds


class Checks:
    """The checks at the quiet points of a soak.

    Args:
        fair: whether users are served by turns.
    """

    def __init__(self, soak: Soak, *, fair: bool) -> None:
        self._soak = soak
        self._rng = soak.rng
        self._nb_gpus = len(soak.host.gpus)
        self._fair = fair

    # ---- All GPUs can be claimed ----

    def claim_all(self, island: str) -> None:
        """Somebody on this island can claim all GPUs."""
        number = self._soak.start(Life(self._nb_gpus, hold=0.0, island=island))
        self._expect_served(number, "GPUs that nobody can claim at a quiet point", island=island)

    def share_out(self, gpus: Sequence[str]) -> None:
        """Shares that fit are served beside each other. What does not fit is tried, and the referee sees it served.

        Args:
            gpus: of which one is shared.
        """
        gpu = self._rng.choice(gpus)
        for sizes in (("50%", "50%"), (None,), ("100%",)):
            holders = [self._try_share(gpu, share, hold=PATIENCE, timeout=2.0) for share in sizes]
            for number in holders:
                self._expect_served(number, "refused while there was room", uuid=gpu, sizes=sizes)
            for island in self._soak.islands:
                self._try_share(gpu, None, island=island)
                self._try_share(gpu, "1GiB", island=island)
            for number in holders:
                self._soak.kill(number)

    def _try_share(self, gpu: str, share: str | None, **more: Any) -> int:
        """Let a process claim this much of a GPU, at once if nothing else is said, until it is told; its number."""
        life = Life(1, timeout=0.0, share=share, only=(gpu,))._replace(**more)
        number = self._soak.start(life)
        self._soak.told(number)
        return number

    # ---- The queue ----

    def take_turns(self) -> None:
        """Waiters for the whole host, who come one after the other behind a holder, are served in order."""
        uids: list[int | None] = [None] * 6
        if self._fair:
            uids = [self._rng.choice(USERS) for _ in range(6)]
        holder = self._soak.start(Life(self._nb_gpus, hold=PATIENCE, uid=uids[0]))
        self._soak.told(holder)
        came = []
        for end, uid in zip(("linger", "release", "release", "exit", "release"), uids[1:], strict=True):
            came.append(self._queue_up(Life(self._nb_gpus, end=end, uid=uid)))
        self._soak.kill(holder)
        served = self._served(came)
        expected = came
        if self._fair:
            expected = [came[place] for place in by_turns(uids, self._nb_gpus)]
        if served != expected:
            self._soak.violation({"what": "waiters out of turn", "came": came, "served": served, "expected": expected})

    def stay_behind(self) -> None:
        """A small claim that says nothing does not pass one who waits for all GPUs, though half of them are free."""
        holder = self._soak.start(Life(self._nb_gpus // 2, hold=PATIENCE))
        self._soak.told(holder)
        large = self._queue_up(Life(self._nb_gpus))
        small = self._soak.start(Life(1, timeout=0.0))
        self._soak.told(small)
        self._soak.kill(holder)
        if self._served([large, small])[:1] == [small]:
            self._soak.violation({"what": "a waiter was passed", "number": small, "waiter": large})

    # ---- Promises ----

    def keep_promises(self) -> None:
        """Holders keep their word, and small claims come: nobody starts later than it was told because of them."""
        free = self._rng.choice((1, 2, 3))
        words = self._hold_all_but(free)
        waiters = []
        large = self._rng.choice((self._nb_gpus, self._rng.randint(free + 1, self._nb_gpus)))
        for size in (large, self._rng.randint(1, self._nb_gpus)):
            number = self._queue_up(Life(size, hold=0.1, hold_for=1.0))
            words[number] = 1.0
            waiters.append(Waiter(number, self._expected_start(number)))
        words.update(self._send_small_ones(free))
        for number in words:
            if "holds" in self._soak.told(number):
                self._soak.told(number, "released")
        for broken in broken_promises(waiters, words, self._soak.story):
            self._soak.violation(broken)

    def _hold_all_but(self, free: int) -> dict[int, float]:
        """Let two processes hold all but so many GPUs, and release them a little earlier than they say.

        Returns: number -> how long it has said to hold them, seconds.
        """
        words: dict[int, float] = {}
        part = self._rng.randint(1, self._nb_gpus - free - 1)
        for size in (part, self._nb_gpus - free - part):
            word = self._rng.choice((1.5, 2.0, 2.5, 3.0))
            number = self._soak.start(Life(size, hold=word - self._rng.choice((0.2, 0.7)), hold_for=word))
            words[number] = word
            self._expect_served(number, "refused while enough GPUs were free")
        return words

    def _send_small_ones(self, free: int) -> dict[int, float]:
        """Start claims that fit into so many GPUs, of whom all but some say for how long; as _hold_all_but."""
        words: dict[int, float] = {}
        for word in self._rng.sample((1.0, 1.0, 2.0, 4.0, 4.0, math.inf), 4):
            life = Life(self._rng.randint(1, free), timeout=self._rng.choice((0.0, 0.0, 1.0)))
            if word < math.inf:
                life = life._replace(hold=0.9 * word, hold_for=word)
            words[self._soak.start(life)] = word
            time.sleep(self._rng.choice((0.0, 0.1, 0.3)))
        return words

    def _expected_start(self, number: int) -> float:
        """When a waiter can expect to start, as ``status`` shows it, ``time.monotonic()``; inf if it shows none."""
        self._soak.told(number, "begins")
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
        """A user may hold as many GPUs as the policy says, whatever others hold, and holds nobody up."""
        user, other = self._rng.sample(USERS[:2], 2)
        most = self._rng.choice((2, 3))
        policy.set({user: most})
        holders: list[int] = []
        for size, uid in ((2, other), (most - 1, user), (1, user)):
            holders.append(self._soak.start(Life(size, uid=uid, timeout=0.0, hold=8.0)))
            self._expect_served(holders[-1], "refused within the limit", most=most)
        over = self._soak.start(Life(1, uid=user, timeout=0.0))
        self._soak.told(over)  # the markers tell if it is over the limit
        waiter = self._queue_up(Life(1, uid=user, timeout=60.0))
        passer = self._soak.start(Life(1, uid=other, timeout=0.0))
        is_served = "holds" in self._soak.told(passer)
        if not is_served and not any("released" in self._soak.told(number, "holds") for number in holders):
            self._soak.violation({"what": "held up by a waiter at its limit", "number": passer, "waiter": waiter})
        for number in holders:
            self._soak.kill(number)
        self._expect_served(waiter, "not served below the limit", most=most)

    # ---- What all of them do ----

    def _expect_served(self, number: int, what: str, **facts: Any) -> None:
        """It is this violation if a process gets no GPUs."""
        if "holds" not in self._soak.told(number):
            self._soak.violation({"what": what, "number": number, **facts})

    def _queue_up(self, life: Life) -> int:
        """Start a process and wait until it has a ticket, or needs none; its number."""
        known = self._last_ticket()
        number = self._soak.start(life)
        while self._last_ticket() <= known and not {"holds", "refused"} & self._soak.told(number, "begins"):
            time.sleep(0.001)
        return number

    def _served(self, numbers: list[int]) -> list[int]:
        """Those of these processes that got GPUs, in the order in which they did."""
        for number in numbers:
            self._soak.told(number)
        holds = [event["number"] for event in self._soak.story if event["event"] == "holds"]
        return [number for number in holds if number in numbers]

    def _last_ticket(self) -> int:
        """The highest number of a ticket; -1 if there is none."""
        numbers = [-1]
        with suppress(OSError):
            for name in os.listdir(f"{self._soak.host.state}/queue"):
                if not name.startswith("."):
                    numbers.append(int(name.partition(".")[0]))
        return max(numbers)


def by_turns(uids: Sequence[object], size: int) -> list[int]:
    """In which order waiters for the whole host are served, by their users; the first of these holds it.

    Args:
        size: of the host, in GPUs.
    """
    holder, *waiting = uids
    turns: list[float] = []
    for uid in waiting:
        # Behind the first in the queue, and behind all that this user has and waits for.
        turn = min(turns, default=0.0) + 0.5
        if uid == holder:
            turn += size
        own = [turn_of + size for turn_of, other in zip(turns, waiting, strict=False) if other == uid]
        turns.append(max([turn, *own]))
    return sorted(range(len(turns)), key=turns.__getitem__)


class Waiter(NamedTuple):
    """A waiter and the start that it was told to expect, ``time.monotonic()``; ``math.inf`` if it was told none."""

    number: int
    expected: float


Moments = dict[int, dict[str, float]]
"""Number of a process -> event -> when that was first told, ``time.monotonic()``."""


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
    at: Moments = {number: {} for number in words}
    for event in story:
        number = event.get("number", -1)
        if number in at:
            at[number].setdefault(event["event"], event["at"])
    slack = 0.0
    for number, word in words.items():
        if number < waiters[0].number:
            slack = max(slack, _lateness(at[number], at[number].get("begins", -math.inf) + word))
    found = []
    before = -math.inf
    for waiter in waiters:
        if waiter.expected < before:
            break  # it was to pass the one before it, which it cannot if that one starts early
        start = at[waiter.number].get("holds", math.inf)
        latest = waiter.expected + slack
        passers = _let_through(waiter, start, latest, words, at)
        if passers and start > latest + _LATE:
            late = round(start - waiter.expected, 3)
            what = "an expected start passed because others were let through"
            found.append({"what": what, "number": waiter.number, "late": late, "let through": passers})
        before = waiter.expected
        held_for = _lateness(at[waiter.number], waiter.expected + words[waiter.number])
        slack = max(slack, start - waiter.expected, held_for)
    return found


def _let_through(waiter: Waiter, start: float, latest: float, words: Mapping[int, float], at: Moments) -> list[str]:
    """Who came after a waiter, had GPUs before it, and whose word reaches past the latest start that it was told."""
    found = []
    for number, word in words.items():
        if number <= waiter.number or at[number].get("holds", math.inf) >= start:
            continue
        if at[number]["begins"] + word > latest:
            found.append(f"{number}, who said {word} s")
    return found


def _lateness(events: Mapping[str, float], end: float) -> float:
    """How much later than that a process let go, seconds."""
    return max(0.0, events.get("released", math.inf) - end)
