"""A ticket: a locked file, and what stands in it of the waiter that holds it."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ...host import decoding, procfs

TICKET_MODE = 0o644
"""Nobody but its waiter writes a ticket. flock(2) asks for no permission to write."""

TICKET_SUFFIX = ".ticket"

# What no request exceeds. A ticket that does is unreadable.
_MOST_GPUS = 4096

_MOST_MEMORY = 1 << 60

_MOST_CONDITIONS = 16

LATEST_TURN = 2.0**53
"""Above it whole numbers have gaps as floats."""

_LONGEST_STEM = 100  # UUID.inner

_LONGEST_NAME = 64

_LONGEST_JOB = 100


def ticket_name(seq: int) -> str:
    """Return the file of a number.

    >>> ticket_name(7)
    '7.ticket'
    """
    return f"{seq}{TICKET_SUFFIX}"


class TicketRequest(NamedTuple):
    """What a waiter wants, as far as others must know it.

    ``gpus`` are the lease names' stems that it could use (UUIDs, or ``UUID.inner`` inside a scope); ``conditions`` are
    the names and JSON values of what else it asks of them; ``hold_for`` is for how many seconds it will probably hold
    them, None where it did not say; ``job`` is the batch job, for people.
    """

    nb_gpus: int
    gpus: frozenset[str]
    conditions: tuple[tuple[str, Any], ...] = ()
    hold_for: float | None = None
    job: str | None = None

    @property
    def inside(self) -> bool:
        """Whether it is of a claim inside another one, which no limit concerns."""
        return any(stem.endswith(".inner") for stem in self.gpus)

    def competes_with(self, other: TicketRequest) -> bool:
        """Return whether both could end up wanting the same GPU."""
        return not self.gpus.isdisjoint(other.gpus)


class Ticket(NamedTuple):
    """A place in the queue as others see it.

    ``since`` in Unix seconds; ``request`` None: unreadable; ``pidns``: the inode of the PID namespace in which ``pid``
    is a number, None where it is not known; ``uid``: the owner of the file, whatever stands in it, -1 if not known;
    ``turn``: see :mod:`safe_gpu.coordination.queue.turns`, None of a client without turns.
    """

    seq: int
    inode: int
    pid: int
    user: str
    since: float
    request: TicketRequest | None
    pidns: int | None = None
    uid: int = -1
    turn: float | None = None

    def competes_with(self, request: TicketRequest) -> bool:
        """Return whether it wants any of the same GPUs; a ticket that cannot be read is taken to."""
        return self.request is None or self.request.competes_with(request)

    def is_same(self, other: Ticket) -> bool:
        """Return whether both are one waiter's. Numbers and inodes are used again within seconds, these are not."""
        return (self.since, self.pid, self.pidns) == (other.since, other.pid, other.pidns)

    def is_stopped(self, known: dict[int | bytes, bool] | None = None) -> bool:
        """Return whether its waiter is stopped or frozen (Ctrl-Z, a suspended job). In another PID namespace nobody
        knows.

        Args:
            known: as for :func:`~safe_gpu.host.procfs.is_stopped`, for a look at many tickets.
        """
        if not self.pid or self.pidns not in (None, procfs.pid_namespace()):
            return False
        return procfs.is_stopped(self.pid, known)


def encode_ticket(pid: int, request: TicketRequest, turn: float | None = None) -> bytes:
    import json

    asked = {"nb_gpus": request.nb_gpus, "gpus": sorted(request.gpus), "min_memory": None, **dict(request.conditions)}
    user = procfs.well_formed(procfs.user_name(os.geteuid()))
    fields: dict[str, Any] = {"pid": pid, "pidns": procfs.pid_namespace(), "user": user, "request": asked}
    fields["hold_for"], fields["job"] = request.hold_for, request.job
    if turn is not None:
        fields["turn"] = turn
    return json.dumps({**fields, "since": round(time.time(), 6)}).encode() + b"\n"


_SHORT = 4096

_decoded: dict[tuple[int, int], tuple[bytes, Ticket]] = {}
"""Number and inode -> content and what it says, of short tickets: waiters look at the same ones again and again."""


def decode_file(seq: int, fd: int) -> Ticket:
    status = os.fstat(fd)
    inode, data = status.st_ino, os.pread(fd, decoding.LONGEST_FILE, 0)
    kept = _decoded.get((seq, inode))
    if kept is not None and kept[0] == data:
        return kept[1]
    ticket = _decode(seq, inode, data)._replace(uid=status.st_uid)
    if len(data) <= _SHORT:
        if len(_decoded) >= _SHORT:
            _decoded.clear()
        _decoded[seq, inode] = data, ticket
    return ticket


def _decode(seq: int, inode: int, data: bytes) -> Ticket:
    import json

    try:
        raw: dict[str, Any] = json.loads(data.decode("utf-8", "replace"))
        asked = raw["request"]
        pidns = raw.get("pidns")
        request = TicketRequest(
            decoding.as_int(asked["nb_gpus"], 1, _MOST_GPUS),
            frozenset(str(stem)[:_LONGEST_STEM] for stem in asked["gpus"]),
            tuple(_conditions(asked)),
            decoding.as_seconds(raw.get("hold_for"), 1),
            None if raw.get("job") is None else decoding.as_text(raw["job"], _LONGEST_JOB),
        )
        pid = int(raw["pid"])
        return Ticket(
            seq,
            inode,
            pid if 0 < pid < 1 << 31 else 0,
            decoding.as_text(raw["user"], _LONGEST_NAME),
            decoding.as_time(raw["since"]),
            request,
            None if pidns is None else decoding.as_int(pidns, 0, 1 << 63),
            turn=None if raw.get("turn") is None else decoding.as_number(raw["turn"], 0, LATEST_TURN),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Ticket(seq, inode, 0, "unknown", 0.0, None)


def _conditions(request: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what a request has besides its number and its GPUs. A value that is no plain one makes sense to nobody."""
    for name in sorted(request.keys() - {"nb_gpus", "gpus"})[:_MOST_CONDITIONS]:
        value = request[name]
        if name == "min_memory" and value is not None:
            value = decoding.as_int(value, 0, _MOST_MEMORY)
        if value is not None:
            plain = isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= _LONGEST_NAME)
            yield decoding.as_text(name, _LONGEST_NAME), value if plain else ""


def is_ticket(status: os.stat_result) -> bool:
    """Return whether a file of the queue is a ticket, by its mode. host.lock and leases have another one: links to
    these would be live tickets for as long as a claim lives, or always, since who looks at a ticket holds
    host.lock."""
    return status.st_mode == stat.S_IFREG | TICKET_MODE
