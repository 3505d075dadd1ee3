"""The queue: first come, first served, or by turns, without a daemon.

A ticket is an entry that says what its process wants. A waiter sleeps on the nearest ticket ahead that competes.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..gpus.devices import Gpu
from ..host import procfs
from .directory import state_dir_path
from .entries import living_entries
from .entry import Entry, is_plain, sleep_until_dead
from .host_lock import Host
from .own_entry import OwnEntry
from .silicon import Silicon, keys_of, silicon_of
from .turns import by_turn, turn_of

MOST_OF_ONE_USER = 1000
"""Tickets of one user that count. All of root count."""

_NO_CONDITIONS = ("waited", "hold_for", "turn")
_MOST_CONDITIONS = 16


class TicketRequest(NamedTuple):
    """What a waiter wants, as far as others must know it.

    Attributes:
        gpus: UUIDs of the GPUs that could ever do.
        conditions: names and JSON values of what else it asks of them.
        hold_for: for how many seconds it will probably hold them; None is unknown.
        inside: hash of the token of the claim that encloses it; "" of one inside none.
        known: whether this version knows all that the ticket says. Nobody passes one that says more.
        pieces, modes: of which GPUs those of ``gpus`` are pieces, as in the entry of a claim.
    """

    nb_gpus: int
    gpus: frozenset[str]
    conditions: tuple[tuple[str, Any], ...] = ()
    hold_for: float | None = None
    inside: str = ""
    known: bool = True
    pieces: Mapping[str, Sequence[str]] = MappingProxyType({})
    modes: Mapping[str, str] = MappingProxyType({})

    @classmethod
    def of(cls, ticket: Entry) -> TicketRequest:
        """Return what a ticket says."""
        hold_for = ticket.more.get("hold_for")
        if isinstance(hold_for, (int, float)) and 1 <= hold_for < math.inf:
            hold_for = float(hold_for)
        else:
            hold_for = None
        listed = [(name, value) for name, value in sorted(ticket.more.items()) if name not in _NO_CONDITIONS]
        plain = [(name, value) for name, value in listed[:_MOST_CONDITIONS] if is_plain(value)]
        return cls(
            nb_gpus=ticket.nb_gpus,
            gpus=frozenset(ticket.gpus),
            conditions=tuple((name, value) for name, value in plain if value is not None),
            hold_for=hold_for,
            inside=ticket.inside,
            known=ticket.version == 1 and plain == listed,
            pieces=ticket.pieces,
            modes=ticket.modes,
        )

    def for_gpus(self, gpus: Iterable[Gpu]) -> TicketRequest:
        """Return the same for those of these devices that could ever do."""
        could_do = list(gpus)
        return self._replace(gpus=frozenset(gpu.uuid for gpu in could_do), **keys_of(could_do))

    def as_facts(self) -> dict[str, Any]:
        """Return the same as keys of a ticket."""
        facts: dict[str, Any] = {
            "nb_gpus": self.nb_gpus,
            "gpus": sorted(self.gpus),
            "hold_for": self.hold_for,
            "inside": self.inside,
        }
        if self.pieces:
            facts["pieces"] = {gpu: sorted(names) for gpu, names in self.pieces.items()}
            facts["modes"] = dict(self.modes)
        facts.update(self.conditions)
        return facts

    @property
    def silicon(self) -> Silicon:
        """What it could get."""
        return Silicon.of_keys(self.gpus, self.pieces, self.modes)

    def competes_with(self, ticket: Entry) -> bool:
        """Return whether both could end up wanting the same GPU, or one all of a GPU and the other a piece of it."""
        return self.inside == ticket.inside and self.silicon.meets(silicon_of(ticket))


def is_stopped(ticket: Entry, known: dict[int | bytes, bool] | None = None) -> bool:
    """Return whether a waiter is stopped or frozen (Ctrl-Z, a suspended job). In another PID namespace nobody knows.

    Args:
        known: as for :func:`~safe_gpu.host.procfs.is_stopped`, for a look at many tickets.
    """
    if not ticket.pid or ticket.pidns not in (0, procfs.pid_namespace()):
        return False
    return procfs.is_stopped(ticket.pid, known)


def tickets_that_count(tickets: list[Entry]) -> list[Entry]:
    """Return the living tickets, given by number, without those of a user who makes too many, and each file once."""
    made: Counter[int] = Counter()
    found: dict[object, Entry] = {}
    for ticket in tickets:
        what_tells_it: object = (ticket.uid, ticket.file)
        if ticket.uid < 0:  # files of several users
            what_tells_it = ticket.name
        if what_tells_it in found:
            continue
        made[ticket.uid] += 1
        if ticket.uid == 0 or made[ticket.uid] <= MOST_OF_ONE_USER:
            found[what_tells_it] = ticket
    return list(found.values())


def waiting_tickets(path: str | None = None, ignored: list[str] | None = None) -> list[Entry]:
    """Return everyone who waits in a state directory, in the order of the queue; the rest as of
    :func:`~safe_gpu.coordination.entries.living_entries`."""
    living = living_entries(path or state_dir_path(), "queue", ignored)
    return [ticket for _, ticket in by_turn(tickets_that_count([one for one in living if one.nb_gpus]))]


class _Place(NamedTuple):
    """Where a ticket stands, or stood."""

    turn: float
    number: int


_BEHIND_ALL = _Place(math.inf, 10**18)  # above all numbers that names can have


class _Ticket(OwnEntry):
    """A ticket of this process.

    Attributes:
        place: where it stands.
    """

    def __init__(self, host: Host, place: _Place, content: Mapping[str, Any]) -> None:
        super().__init__(host, host.queue, place.number, content, by_children=False)
        self.place = place


class Waiter:
    """A process that looks at the queue, from its first look on. It holds a ticket only after :meth:`join`.

    Args:
        request: what it wants.
        by_turns: whether users are served by turns. While it waits that stays: a ticket whose turn and whose own order
            differ could wait for one that waits for it.

    Attributes:
        since: when it joined, Unix seconds; None before.
    """

    def __init__(self, host: Host, request: TicketRequest, *, by_turns: bool) -> None:
        self.request = request
        self.by_turns = by_turns
        self.since: float | None = None
        self._host = host
        self._joined = host.queue  # where its ticket is; the host opens another one when a cleaner has removed that
        self._ticket: _Ticket | None = None
        self._kept_place: _Place | None = None  # of the ticket that it gave back for a claim

    @property
    def queued(self) -> bool:
        """Whether it holds a ticket that others can see."""
        return self._ticket is not None and self._joined is self._host.queue

    @property
    def stands_aside(self) -> bool:
        """Whether it has given its ticket back for a claim, and its place is kept."""
        return self._kept_place is not None and self._joined is self._host.queue

    @property
    def next_number(self) -> int:
        """The number of the ticket that it takes next, by the latest listing: a new one, or that of its kept place.

        Numbers that are gone are used again, so those who joined later may have lower ones than that place. It is not
        put behind them, nor before those who joined earlier. By turns it has its own number, which bounds its turn.
        """
        queue = self._host.queue
        place = self._kept_place
        if place is None or not self.stands_aside or not queue.would_count(place.number):
            return queue.next_number
        if self.by_turns:
            return place.number
        lowest = place.number
        above_earlier = 0
        for ticket in self._counting():
            if ticket.number >= place.number:
                continue
            if self._joined_before(ticket):
                lowest = min(lowest, ticket.number)
            else:
                above_earlier = max(above_earlier, ticket.number + 1)
        return max(lowest, above_earlier)

    def was_removed(self) -> bool:
        """Return whether somebody has removed its ticket, or the numbers before its own, by the latest listing: then
        newcomers would stand ahead of it."""
        queue = self._host.queue
        ticket = self._ticket
        if ticket is None or not self.queued:
            return False
        return ticket.number >= queue.next_number or not queue.lists(ticket.name)

    def join(
        self, facts: Mapping[str, Any], newcomer: Callable[[list[tuple[float, Entry]]], float] | None = None
    ) -> bool:
        """Take a ticket: behind everyone who is there, or with a turn, or after :meth:`stand_aside` at the old place.
        host.lock is held.

        Args:
            facts: of this process, see :class:`~safe_gpu.coordination.entry.Entry`.
            newcomer: returns the turn of a newcomer with :attr:`next_number`, from the tickets of others in the order
                of turns. At the old place it is not above the old turn: those who came later may have low ones.

        Returns:
            Whether it stands ahead of somebody now. Without a ticket, all were ahead.

        Raises:
            StateDirError: no room, or the queue is closed to us. A place that was kept is kept.
        """
        number = self.next_number
        kept_place = None
        if self.stands_aside:
            kept_place = self._kept_place
        self._give_back()
        self._joined = self._host.queue
        if kept_place is None:
            self.since = round(time.time(), 6)
        content = {**facts, **self.request.as_facts(), "since": self.since}
        if newcomer is None:
            self._ticket = _Ticket(self._host, _Place(0.0, number), content)
            self._kept_place = None
            return False
        others = self._in_order()
        turn = newcomer(others)
        if kept_place is not None:
            turn = min(turn, kept_place.turn)
        self._ticket = _Ticket(self._host, _Place(turn, number), {**content, "turn": turn})
        self._kept_place = None
        return bool(others) and turn < others[-1][0]

    def ahead(self) -> Iterator[Entry]:
        """Yield the living tickets ahead that compete, the nearest first, the lock of each checked again; without a
        ticket of its own, all are ahead."""
        names = reversed(self._names_ahead())
        return self._competing(self._host.queue.recheck(name) for name in names)

    def everybody_ahead(self) -> Iterator[Entry]:
        """Yield the same in the order of the queue."""
        names = self._names_ahead()
        return self._competing(self._host.queue.recheck(name) for name in names)

    def competing(self) -> list[Entry]:
        """Return the tickets ahead that compete, in the order of the queue; one that died a moment ago may count."""
        self._host.queue.refresh()
        names = self._names_ahead()
        return list(self._competing(self._host.queue.known(name) for name in names))

    def _competing(self, tickets: Iterable[Entry | None]) -> Iterator[Entry]:
        wanted = self.request.silicon
        for ticket in tickets:
            if ticket is None or ticket.nb_gpus == 0 or ticket.inside != self.request.inside:
                continue
            if wanted.meets(silicon_of(ticket)):
                yield ticket

    def position(self) -> int:
        """Return 1 for the head of those who compete with it, counting itself."""
        return 1 + len(self.competing())

    def among_first(self, number: int) -> bool:
        """Return whether it is certainly one of the first ``number`` in the queue. Cheaper than :meth:`position`."""
        return len(self._names_ahead()) < number

    def sleep_behind(self, ticket: Entry, seconds: float) -> bool:
        """Sleep until that ticket is given back (True), or until the time has passed."""
        until = time.monotonic() + seconds
        sleep_until_dead(self._host.queue.directory, ticket.name, seconds)
        return time.monotonic() < until

    def stand_aside(self) -> None:
        """Give the ticket back, since a claim was made, and keep its place: the claim may fail yet."""
        ticket = self._ticket
        if ticket is None or not self.queued:
            return
        self._kept_place = ticket.place
        self._give_back()

    def leave(self) -> None:
        """Give the ticket back and the place up; safe to call twice, and without one."""
        self._kept_place = None
        self._give_back()

    def _give_back(self) -> None:
        ticket = self._ticket
        self._ticket = None
        if ticket is not None:
            ticket.release()

    def _place(self) -> _Place:
        """Return where it stands in the queue; without a ticket and a place that was kept, behind all."""
        if self._joined is self._host.queue:
            if self._ticket is not None:
                return self._ticket.place
            if self._kept_place is not None:
                return self._kept_place
        return _BEHIND_ALL

    def _names_ahead(self) -> list[str]:
        place = self._place()
        if self.by_turns:
            names = []
            for its_turn, ticket in self._in_order():
                # One without a turn stands behind all lower numbers, and so behind this one too.
                is_before = ticket.number <= place.number or turn_of(ticket) is not None
                if (its_turn, ticket.number) < place and is_before:
                    names.append(ticket.name)
            return names
        listed = self._host.queue.listed()
        if len(listed) > MOST_OF_ONE_USER:
            listed = [(ticket.number, ticket.name) for ticket in self._counting()]
        return [name for number, name in listed if number < place.number]

    def _joined_before(self, ticket: Entry) -> bool:
        """Return whether this waiter joined before another one, as their tickets say."""
        return self.since is not None and ticket.since is not None and self.since < ticket.since

    def _in_order(self) -> list[tuple[float, Entry]]:
        return by_turn(self._counting())

    def _counting(self) -> list[Entry]:
        known = [self._host.queue.known(name) for _, name in self._host.queue.listed()]
        own = ""
        if self._ticket is not None:
            own = self._ticket.name
        others = [one for one in known if one is not None and one.nb_gpus and one.name != own]
        return [one for one in tickets_that_count(others) if one.inside == self.request.inside]
