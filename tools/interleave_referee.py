"""The referee of the explorer: who may have which GPU, by what racers did and said and by nothing else."""

import re
from typing import Any

from interleave_scenes import CAPACITY, GIB, Device, Scene
from support.referee import Part, booked_twice

_TICKET = re.compile(r"(rename|unlink) \d+/queue/(\d+)\.")
_CLAIM = re.compile(r"rename \d+/claims/")
_CLAIM_GONE = re.compile(r"unlink \d+/claims/")


class Referee:
    """Hears what racers say, in the order in which they say it, and knows nothing of entries.

    Attributes:
        violations: what must not be.
    """

    def __init__(self, scene: Scene) -> None:
        self.violations: list[str] = []
        self._scene = scene
        self._has: dict[str, tuple[list[Device], int | None]] = {}
        self._served = 0
        self._drained: dict[int, set[str]] = {}  # GPU -> the racers that had begun before
        self._empty: set[int] = set()  # GPUs that were found so after they were drained
        self._began: set[str] = set()
        self._turns: dict[str, float] = {}
        self._tickets: dict[str, tuple[float, int]] = {}  # turn and number, of who waits or has made an entry
        self._waiting: set[str] = set()
        self._waited: dict[str, tuple[str, ...]] = {}  # who waited when a racer made its entry: others join later
        self._stranger_since_wait: set[str] = set()  # racers that may have seen one
        self._strangers: set[str] = set()
        self._leaving: set[str] = set()  # who gives back, and has not done so
        self._disturbed = False  # whether somebody died or was refused, so that fewer may be served

    def step(self, who: str, what: str) -> None:
        """Hear of a step of a racer."""
        self._began.add(who)
        if _CLAIM.match(what):
            self._waited[who] = tuple(sorted(self._waiting))
        if _CLAIM_GONE.match(what) and self._lost_its_place(who):
            self.violations.append(f"{who} gives its claim back, and has not made its ticket again")
        found = _TICKET.match(what)
        if found is None:
            return
        number = int(found[2])
        if found[1] == "rename":
            self._joins(who, number)
        elif self._tickets.get(who, (0.0, 0))[1] == number:
            self._waiting.discard(who)

    def _joins(self, who: str, number: int) -> None:
        """Hear that a racer has a ticket: its first one since it began to wait, or at the place that it had."""
        place = self._turns.get(who, 0.0), number
        if self._scene.in_turn and place > self._tickets.get(who, place):
            self.violations.append(f"{who} comes back with ticket {number}, and had ticket {self._tickets[who][1]}")
        self._tickets[who] = place
        self._waiting.add(who)

    def _lost_its_place(self, who: str) -> bool:
        """Whether a racer waits, and others cannot see that. One that is interrupted gives up."""
        gives_up = who in self._has or who in self._leaving or self._disturbed or who in self._scene.interrupt
        return self._scene.in_turn and who in self._tickets and who not in self._waiting and not gives_up

    def stands(self, who: str) -> None:
        """Hear that a racer waits. What it saw before does not count any more."""
        if not self._strangers:
            self._stranger_since_wait.discard(who)

    def hear(self, who: str, what: str, *about: Any) -> None:
        """Hear what a racer says."""
        if what == "has":
            self._take(who, *about)
        elif what == "gives back":
            self._give_back(who)
        elif what == "has given back":
            self._leaving.discard(who)
        elif what == "dies":
            self._give_back(who)
            self._disturbed = True
            self._leave_queue(who)
        elif what == "refused":
            self._refuse(who, about[0])
        elif what == "turn":
            self._turns[who] = about[0]
        elif what == "fails":
            self.violations.append(f"{who} fails: {about[0]}")
        elif what == "comes":
            self._strangers.add(who)
            self._stranger_since_wait = set(self._scene.plans)
        elif what == "goes":
            self._strangers.discard(who)
        elif what == "drains":
            for gpu in about[0]:
                self._drained[gpu] = set(self._began)
        elif what == "empty":
            self._empty.add(*about)
        elif what == "undrains":
            self._drained.clear()
            self._empty.clear()

    def _give_back(self, who: str) -> None:
        """Hear that a racer begins to give back what it has."""
        self._has.pop(who, None)
        self._leaving.add(who)

    def _refuse(self, who: str, error: str) -> None:
        """Hear that a racer gets nothing, by an exception of this name."""
        if self._leaving:  # what is half given back is taken
            self._disturbed = True
        if error == "KeyboardInterrupt":
            self._disturbed = True
        if error == "GpuContendedError" and who in self._stranger_since_wait:  # who meets a stranger gives all back
            self._disturbed = True
        self._leave_queue(who)

    def _leave_queue(self, who: str) -> None:
        """Nobody has to wait behind it any more."""
        self._waiting.discard(who)
        self._tickets.pop(who, None)

    def _take(self, who: str, devices: list[Device], share: int | None) -> None:
        """Hear that a racer has got these, and judge it."""
        gpus = [device.card for device in devices]
        self._served += 1
        self._judge_turn(who, gpus)
        self._leave_queue(who)
        self._has[who] = devices, share
        self._judge_limit(who, gpus)
        for gpu in gpus:
            if gpu in self._drained and who not in self._drained[gpu]:
                self.violations.append(f"{who} gets GPU {gpu}, which was drained before it began")
            if gpu in self._empty:
                self.violations.append(f"{who} gets GPU {gpu}, which was drained and held by nobody")
            self._judge_card(gpu)

    def _judge_turn(self, who: str, gpus: list[int]) -> None:
        """Judge whether others were there before, who waited already when this one made its entry."""
        mine = self._tickets.get(who)
        if not self._scene.in_turn or mine is None or who in self._stranger_since_wait:
            return
        for other in self._waiting.intersection(self._waited.get(who, ())) - {who}:
            if self._tickets[other] < mine:
                self.violations.append(
                    f"{who} has GPU {gpus} before {other}, whose ticket is {self._tickets[other][1]}"
                )

    def _judge_limit(self, who: str, gpus: list[int]) -> None:
        """Judge whether the user of this one has more than it may."""
        if not self._scene.limit:
            return
        user = self._scene.user(who)
        held = sum(len(devices) for one, (devices, _) in self._has.items() if self._scene.user(one) == user)
        if held > self._scene.limit:
            self.violations.append(f"{who} has GPU {gpus} beyond the limit of its user")

    def _judge_card(self, card: int) -> None:
        """Judge who has some of a card now."""
        holders = [one for one, (devices, _) in self._has.items() if card in [device.card for device in devices]]
        parts: list[Part] = []
        told: list[str] = []
        for one in holders:
            devices, share = self._has[one]
            for device in devices:
                if device.card == card:
                    is_inside = self._scene.plans[one].inside in holders
                    parts.append(Part(share, is_inside, device.piece, device.mode))
                    told.append(f"{one} has {_amount(device, share)} of it")
        what = booked_twice(parts, CAPACITY)
        if what:
            self.violations.append(f"GPU {card} is booked twice ({what}): {', '.join(told)}")

    def state(self) -> str:
        """What matters to its judgement of what is to come."""
        known = []
        for name, value in vars(self).items():
            if isinstance(value, set):
                value = sorted(value)
            if name not in ("violations", "_scene"):
                known.append((name, value))
        return repr(known)

    def end(self) -> None:
        """Judge what all got."""
        if not self._disturbed and self._served < self._scene.served:
            self.violations.append(f"{self._served} claims got GPUs, and {self._scene.served} could have")


def _amount(device: Device, share: int | None) -> str:
    """What a racer has of a card, for people."""
    what = f"{device.piece} {device.mode}".rstrip() or "all"
    if share:
        return f"{share / GIB:.0f} GiB of {what}"
    return what
