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
from ..host.locks import Held
from .directory import state_dir_path
from .entry import Entry, is_plain, living_entries, make_entry, remove_entry, sleep_until_dead
from .host_lock import Host
from .silicon import Silicon, keys_of, silicon_of
from .turns import by_turn, turn_of

_MOST_OF_ONE_USER = 1000  # tickets that count, but of root

_NO_CONDITIONS = ("waited", "hold_for", "turn")
_MOST_CONDITIONS = 16


class TicketRequest(NamedTuple):
    """What a waiter wants, as far as others must know it.

    Attributes:
        gpus: UUIDs of the GPUs that could ever do.
        conditions: names and JSON values of what else it asks of them.
        hold_for: for how many seconds it will probably hold them; None is unknown.
        inside: hash of the token of the claim around it; "" of one inside none.
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
        said = [(name, value) for name, value in sorted(ticket.more.items()) if name not in _NO_CONDITIONS]
        plain = [one for one in said[:_MOST_CONDITIONS] if is_plain(one[1])]
        return cls(
            ticket.nb_gpus,
            frozenset(ticket.gpus),
            tuple(one for one in plain if one[1] is not None),
            float(hold_for) if isinstance(hold_for, (int, float)) and 1 <= hold_for < math.inf else None,
            ticket.inside,
            ticket.version == 1 and plain == said,
            ticket.pieces,
            ticket.modes,
        )

    def for_gpus(self, gpus: Iterable[Gpu]) -> TicketRequest:
        """Return the same for those of these devices that could ever do."""
        could_do = list(gpus)
        return self._replace(gpus=frozenset(gpu.uuid for gpu in could_do), **keys_of(could_do))

    def said(self) -> dict[str, Any]:
        """Return the same as keys of a ticket."""
        said = {"nb_gpus": self.nb_gpus, "gpus": sorted(self.gpus), "hold_for": self.hold_for, "inside": self.inside}
        if self.pieces:
            said["pieces"] = {gpu: sorted(names) for gpu, names in self.pieces.items()}
            said["modes"] = dict(self.modes)
        said.update(self.conditions)
        return said

    @property
    def silicon(self) -> Silicon:
        """What it could get."""
        return Silicon.said(self.gpus, self.pieces, self.modes)

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
        one = (ticket.uid, ticket.file) if ticket.uid >= 0 else ticket.name
        if one not in found:
            made[ticket.uid] += 1
            if ticket.uid == 0 or made[ticket.uid] <= _MOST_OF_ONE_USER:
                found[one] = ticket
    return [*found.values()]


def waiting_tickets(path: str | None = None, ignored: list[str] | None = None) -> list[Entry]:
    """Return everyone who waits in a state directory, in the order of the queue; the rest as of
    :func:`~safe_gpu.coordination.entry.living_entries`."""
    living = living_entries(path or state_dir_path(), "queue", ignored)
    return [ticket for _, ticket in by_turn(tickets_that_count([one for one in living if one.nb_gpus]))]


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
        self._name = ""
        self._number = 0
        self._turn = 0.0
        self._stands_aside = False
        self._before: set[str] = set()  # the names that stood ahead when it stood aside
        self._held: Held | None = None
        self._kept: Held | None = None

    @property
    def queued(self) -> bool:
        """Whether it holds a ticket that others can see."""
        return self._held is not None and self._joined is self._host.queue

    @property
    def has_place(self) -> bool:
        """Whether it has a number in the queue: that of its ticket, or of the one that it gave back for a claim."""
        return (self._held is not None or self._stands_aside) and self._joined is self._host.queue

    @property
    def kept_turn(self) -> float:
        """The turn of the place that it has kept; without one, infinity."""
        return self._turn if self.has_place and not self.queued else math.inf

    @property
    def next_number(self) -> int:
        """The number of the ticket that it takes next, by the latest listing.

        Of one that comes back, it is not above that of any newcomer meanwhile, since numbers that are gone come again;
        and above those that were ahead. By turns it is its own, which the turn's bound depends on.
        """
        queue = self._host.queue
        if not self._comes_back or not queue.would_count(self._number):
            return queue.next_number
        if self.by_turns:
            return self._number
        last = max((number for number, name in queue.listed() if name in self._before), default=0)
        return min(self._number, last + 1)

    @property
    def _comes_back(self) -> bool:
        return self._stands_aside and self.has_place

    def was_removed(self) -> bool:
        """Return whether somebody has removed its ticket, or the numbers before its own, by the latest listing: then
        who comes now would stand ahead of it."""
        queue = self._host.queue
        return self.queued and (self._number >= queue.next_number or not queue.lists(self._name))

    def join(
        self, said: Mapping[str, Any], newcomer: Callable[[list[tuple[float, Entry]]], float] | None = None
    ) -> bool:
        """Take a ticket: behind everyone who is there, or with a turn, or after :meth:`stand_aside` at the old place.
        host.lock is held.

        Args:
            said: of this process, see :class:`~safe_gpu.coordination.entry.Entry`.
            newcomer: returns the turn, from the tickets of others in the order of turns.

        Returns:
            Whether it stands ahead of somebody now. Without a ticket, all were ahead.

        Raises:
            StateDirError: no room, or the queue is closed to us.
        """
        again, number = self._comes_back, self.next_number
        self.leave()
        self._stands_aside = again  # until it has a ticket
        self._joined = queue = self._host.queue
        others = self._in_order() if newcomer is not None else []
        turn = None if newcomer is None else newcomer(others)
        if self.since is None or not again:
            self.since = time.time()
        content = {**said, **self.request.said(), "since": round(self.since, 3)}
        if turn is not None:
            content["turn"] = turn
        assert self._host.directory is not None
        self._kept = self._host.directory.keep_from_cleaners(by_children=False)
        self._name, self._held = make_entry(queue.directory, number, content, by_children=False)
        self._number, self._stands_aside = number, False
        self._turn = turn or 0.0
        return turn is not None and bool(others) and turn < others[-1][0]

    def ahead(self) -> Iterator[Entry]:
        """Yield the living tickets ahead that compete, the nearest first, each asked again; without a ticket of its
        own, all are ahead."""
        return self._competing(map(self._host.queue.ask, reversed(self._names_ahead())))

    def everybody_ahead(self) -> Iterator[Entry]:
        """Yield the same in the order of the queue."""
        return self._competing(map(self._host.queue.ask, self._names_ahead()))

    def competing(self) -> list[Entry]:
        """Return the tickets ahead that compete, in the order of the queue; one that died a moment ago may count."""
        self._host.queue.refresh()
        return [*self._competing(map(self._host.queue.known, self._names_ahead()))]

    def _competing(self, tickets: Iterable[Entry | None]) -> Iterator[Entry]:
        wanted = self.request.silicon
        for one in tickets:
            if one is None or not one.nb_gpus or one.inside != self.request.inside:
                continue
            if wanted.meets(silicon_of(one)):
                yield one

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
        """Give the ticket back, since a claim was made, and remember its place: the claim may fail yet."""
        queued, listed = self.queued, self._host.queue.listed()
        self._before = {name for number, name in listed if number < self._number}
        self.leave()
        self._stands_aside = queued

    def leave(self) -> None:
        """Give the ticket back; safe to call twice, and without one."""
        self._stands_aside = False
        held, self._held = self._held, None
        if held is not None:
            remove_entry(self._joined.directory, self._name, held)
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.release()

    def _names_ahead(self) -> list[str]:
        own = (self._turn, self._number) if self.has_place else (math.inf, math.inf)
        if self.by_turns:
            ahead = [ticket for turn, ticket in self._in_order() if (turn, ticket.number) < own]
            # One without a turn stands behind all lower numbers, and so behind this one too.
            return [one.name for one in ahead if one.number <= own[1] or turn_of(one) is not None]
        listed = self._host.queue.listed()
        if len(listed) > _MOST_OF_ONE_USER:
            listed = [(one.number, one.name) for one in self._counting()]
        return [name for number, name in listed if number < own[1]]

    def _in_order(self) -> list[tuple[float, Entry]]:
        return by_turn(self._counting())

    def _counting(self) -> list[Entry]:
        known = filter(None, (self._host.queue.known(name) for _, name in self._host.queue.listed()))
        others = [one for one in known if one.nb_gpus and one.name != self._name]
        return [one for one in tickets_that_count(others) if one.inside == self.request.inside]
