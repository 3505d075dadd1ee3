"""The table of waiters, which the terminal and the page show. Pure."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from ..wording.text import Column, gpu_ranges, short_age
from .facts import HostStatus, WaiterStatus
from .rows import job_cell, user_cell
from .table import MOST_OF_JOB

# Waiters that are shown. Any user can make thousands.
_MOST_WAITERS = 100

# Successive waiters of one user that want the same are one line from this number on.
_LEAST_ALIKE = 4


class ShownQueue(NamedTuple):
    """The queue as people see it.

    Attributes:
        order: in which its waiters are served, in words.
        groups: the waiters, those that are alike together.
        columns: each has a cell for each group.
    """

    order: str
    groups: list[list[WaiterStatus]]
    columns: list[Column]


class _WaiterCells(NamedTuple):
    """One line of the queue."""

    positions: str
    user: str
    job: str
    wants: str
    waited: str
    planned: str
    starts: str


def queue_of(status: HostStatus, *, verbose: bool, most_of_user: int, whole_names: bool) -> ShownQueue:
    """Return the waiters that are shown.

    Args:
        verbose: whether each has a line of its own.
        most_of_user: columns of the name of a user.
        whole_names: whether longer ones are not cut.
    """
    groups = _alike(status.queue, verbose)[:_MOST_WAITERS]
    is_foreseen = any(_says_when(group[0]) for group in groups)
    of_two_vendors = any(one.prefix for one in status.gpus)
    now = status.taken_at
    lines = [_cells(group, now, is_foreseen=is_foreseen, of_two_vendors=of_two_vendors) for group in groups]
    columns = [
        Column("#", [line.positions for line in lines], right=True),
        Column("USER", [line.user for line in lines], most=most_of_user, whole=whole_names),
        Column("JOB/PID", [line.job for line in lines], most=MOST_OF_JOB),
        Column("WANTS", [line.wants for line in lines]),
        Column("WAITED", [line.waited for line in lines], right=True),
        Column("PLANNED", [line.planned for line in lines], right=True),
        Column("STARTS", [line.starts for line in lines]),
    ]
    return ShownQueue(_order(status.queue, is_foreseen), groups, columns)


def notes_on_waiter(one: WaiterStatus) -> list[str]:
    """Return the remarks on a waiter."""
    notes = []
    if one.stopped:
        notes.append(f"process {one.pid} is stopped (a suspended job?) and keeps its place")
    if one.note:
        notes.append(one.note)
    return notes


def _says_when(one: WaiterStatus) -> bool:
    """Return whether anything is known of when it starts."""
    return one.expected_start is not None or one.earliest_start is not None or bool(one.limit)


def _order(queue: Iterable[WaiterStatus], is_foreseen: bool) -> str:
    if all(one.turn is None for one in queue):
        return "first come first served"
    if is_foreseen:
        return "by turns; all but the first may start later than shown"
    return "by turns"


def _cells(group: Sequence[WaiterStatus], now: float, *, is_foreseen: bool, of_two_vendors: bool) -> _WaiterCells:
    """Return the line of waiters that are alike; all but their number and their places are those of the first."""
    first = group[0]
    job = ""
    wants = first.wants(of_two_vendors)
    if len(group) == 1:
        job = job_cell(first.job, first.pid)
    else:
        wants = f"{len(group)} x {wants}"
    waited = "?"
    if first.since:
        waited = short_age(now - first.since)
    planned = ""
    if first.hold_for is not None:
        planned = short_age(first.hold_for)
    starts = ""
    if is_foreseen:
        starts = first.starts(now)
    positions = gpu_ranges(str(one.position) for one in group)
    return _WaiterCells(positions, user_cell(first.user), job, wants, waited, planned, starts)


_what_it_wants = attrgetter("user", "nb_gpus", "share", "vendor", "limit", "stopped", "note")


def _alike(queue: Sequence[WaiterStatus], verbose: bool) -> list[list[WaiterStatus]]:
    """Group successive waiters of one user that want the same, unless they are few."""
    groups: list[list[WaiterStatus]] = []
    for _, successive in groupby(queue, _what_it_wants):
        group = list(successive)
        first = group[0]
        if verbose or len(group) < _LEAST_ALIKE or first.stopped or first.note:
            groups += [[waiter] for waiter in group]
        else:
            groups.append(group)
    return groups
