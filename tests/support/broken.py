"""Builds that are broken on purpose: each must be caught by the race, the soak, the explorer or the crash points."""

import argparse
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from safe_gpu.claim import attempt, closed, others, queue_place, search
from safe_gpu.claim import checks as opened
from safe_gpu.claim import claim as claims
from safe_gpu.claim.limits import ClaimsByUser
from safe_gpu.claim.polls import Polls
from safe_gpu.coordination import directory, doors, entry
from safe_gpu.coordination.doors import Doors
from safe_gpu.coordination.entries import Entries
from safe_gpu.coordination.holders import Claims
from safe_gpu.coordination.listing import DEAD
from safe_gpu.coordination.queue import Waiter
from safe_gpu.coordination.silicon import Silicon
from safe_gpu.host import locks
from safe_gpu.host.signals import DeferredSignals
from safe_gpu.selection import backfill, sharing, verdicts

_make_entry, _is_taken = claims.Claim.make_entry, attempt.Attempt._is_taken
_lock = entry.lock
_held_by, _open_gpus = ClaimsByUser.held_by, backfill.open_gpus
_room, _promised_room = sharing.room, sharing.promised_room
_take_share, _take_part_of_pieces, _meets = Doors.take_share, Doors.take_part_of_pieces, Silicon.meets
_to_be_locked: list[int] = []


def _give_back_doors_first(self: claims.Claim, *arguments: Any, **options: Any) -> None:
    self.doors.release()
    _make_entry(self, *arguments, **options)


def _see_lower_alone(self: attempt.Attempt, gpu: Any) -> bool:
    assert self._claim is not None
    assert self._claim.entry is not None
    number = int(self._claim.entry.name.partition(".")[0])
    lower = Claims(one for one in self._view.others.claims.living if one.number <= number)
    self._view.others = replace(self._view.others, claims=lower)
    return _is_taken(self, gpu)


def _remove_numbers(self: Entries) -> list[Any]:
    numbers = {file.name.partition(".")[0] for file in self._listing.files() if file.state == DEAD}
    for name in os.listdir(self.directory.fd):
        if name.partition(".")[0] in numbers:
            with suppress(OSError):
                os.unlink(name, dir_fd=self.directory.fd)
    return []


def _rename_and_lock(source: str, target: str, **at: int) -> None:
    os.rename(source, target, **at)
    _lock(_to_be_locked.pop())


class _Os:
    """os of a module, with some functions of its own."""

    def __init__(self, **own: Callable[..., Any]) -> None:
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _lock_and_drop_in_child(fd: int) -> None:
    _lock(fd)

    def drop() -> None:
        with suppress(OSError):
            entry.unlock(fd)

    os.register_at_fork(after_in_child=drop)


def _share_without_door(self: Doors, uuid: str, parts_here: Any) -> bool:
    return self._take_part(uuid, doors.SHARE_PARTS, parts_here)


def _ask_first_alone(self: Doors, uuid: str, token: str) -> bool:
    return all(doors._are_held(self._names_of_token(uuid, token)[:1]))


def _take_no_part(self: Doors, gpu: str, mode: str = "") -> bool:
    return not self.is_held_against_pieces(gpu, mode)


def _ask_before_the_part(self: Doors, gpu: str, mode: str = "") -> bool:
    if gpu in self.parts:
        return True
    return not self.is_held_against_pieces(gpu, mode) and self._take_part(gpu, doors.PIECE_PARTS)


def _is_whole_held(self: Doors, gpu: str, mode: str = "") -> bool:
    return any(doors._are_held([self._name(gpu)]))


def _share_without_asking_for_pieces(self: Doors, uuid: str, parts_here: Any) -> bool:
    pieces, doors.PIECE_PARTS = doors.PIECE_PARTS, range(0)
    try:
        return _take_share(self, uuid, parts_here)
    finally:
        doors.PIECE_PARTS = pieces


def _take_part_in_any_mode(self: Doors, gpu: str, mode: str = "") -> bool:
    return _take_part_of_pieces(self, gpu)


def _meets_in_any_mode(self: Silicon, other: Silicon) -> bool:
    modes = self._modes, other._modes
    self._modes, other._modes = ({gpu: {""} for gpu in one} for one in modes)
    try:
        return _meets(self, other)
    finally:
        self._modes, other._modes = modes


def _refuse(*about: object) -> None:
    raise PermissionError(1, "no doors in this build")


def _without_dates(want: backfill.BackfillRequest, *rest: Any) -> frozenset[str]:
    return _open_gpus(want if want.hold_for == math.inf else want._replace(hold_for=0.0), *rest)


def _counts_all(self: ClaimsByUser, uid: int) -> dict[str, float]:
    return {
        name: held for one in {one.uid for one in self._claims.living} for name, held in _held_by(self, one).items()
    }


class _Empty(set[Any]):
    """A set that stays empty."""

    def add(self, one: Any) -> None:
        pass


def _make_unfinished(name: str, path: str, parent: int | None) -> None:
    os.mkdir(name, 0o700, dir_fd=parent)
    os.chmod(name, 0o1777, dir_fd=parent)


def _release_first(self: search._Search, claim: claims.Claim) -> None:
    claim.release()
    self._come_back()


def _release_doors_first(self: claims.Claim) -> None:
    self.release_older()
    self.doors.release()
    if self.entry is not None:
        self.entry.release()
        self.entry = None


_NO_DOORS: list[tuple[Any, str, Any]] = [(Doors, "_take", _refuse), (Doors, "are_taken", _refuse)]

BROKEN: dict[str, list[tuple[Any, str, Any]]] = {
    # Entries and doors
    "no second listing": [(attempt.Attempt, "_may_stay", lambda self, claim, gpus: True)],
    "lower stays": [(attempt.Attempt, "_is_taken", _see_lower_alone)],
    "names come again": [(entry, "os", _Os(urandom=bytes))],
    "unlink by number": [(Entries, "remove_dead", _remove_numbers)],
    "not locked": [(entry, "lock", lambda fd: None)],
    "locked after its name": [(entry, "lock", _to_be_locked.append), (entry, "os", _Os(rename=_rename_and_lock))],
    "flock": [(locks, "ofd_locks", lambda: False)],  # which a neighbour can take too
    "children unlock": [(entry, "lock", _lock_and_drop_in_child)],
    "children keep all": [(locks, "_closed_in_children", _Empty())],
    "no doors": _NO_DOORS,
    "no doors nor locks": [*_NO_DOORS, (entry, "lock", lambda fd: None)],
    "door too early": [(claims.Claim, "make_entry", _give_back_doors_first)],
    "parts not asked": [(Doors, "_parts_elsewhere", lambda self, uuid, parts_here: set())],
    "share without the door": [(Doors, "take_share", _share_without_door)],
    "doors first": [(claims.Claim, "_release_now", _release_doors_first)],
    "parts known once": [(attempt.Attempt, "_has_lost_a_sharer", lambda *about: False)],
    "no door of the token": [(Doors, "is_inside", lambda self, uuid, token: True)],
    "one door of the token": [(Doors, "is_inside", _ask_first_alone)],
    # GPUs and their pieces
    "no part of the GPU": [(Doors, "take_part_of_pieces", _take_no_part)],
    "piece asks first": [(Doors, "take_part_of_pieces", _ask_before_the_part)],
    "parts of one kind": [(doors, "PIECE_PARTS", doors.SHARE_PARTS), (Doors, "is_held_against_pieces", _is_whole_held)],
    "share asks no pieces": [(Doors, "take_share", _share_without_asking_for_pieces)],
    "no modes": [(Doors, "take_part_of_pieces", _take_part_in_any_mode), (Silicon, "meets", _meets_in_any_mode)],
    "names alone": [(Silicon, "meets", lambda self, other: not self._names.isdisjoint(other._names))],
    "closed read once": [(closed.ClosedGpus, "read", lambda *about: None)],
    "directories unfinished": [(directory, "make_directory", _make_unfinished)],
    # An exception comes between open(2) and the line that stores the descriptor.
    "signals": [(DeferredSignals, "defer", lambda self: None)],
    # The driver is not asked again.
    "one poll": [
        (Polls, "poll_again", lambda self, gpus: None),
        (opened, "_refuse_other_processes", lambda *about: True),
    ],
    # The queue
    "no queue": [(Waiter, "ahead", lambda self: iter(()))],
    "ticket stays": [(Waiter, "leave", lambda self: None)],
    "comes back last": [(Waiter, "stands_aside", property(lambda self: False))],
    "comes back late": [(search._Search, "_give_back", _release_first)],
    "backfill": [(queue_place, "open_gpus", lambda request, ahead, free, *about: frozenset(free))],
    "promise": [(queue_place, "open_gpus", _without_dates)],  # who says for how long may pass all
    "old poll": [(Polls, "waited_since", property(lambda self: False, lambda self, value: None))],
    "turns": [(queue_place, "turn_of_newcomer", lambda *about, **more: 0.5)],
    # Limits and shares
    "limit": [(ClaimsByUser, "limit_of", lambda *about: None)],
    "limit of others": [(ClaimsByUser, "held_by", _counts_all)],
    "limit of waiters": [(ClaimsByUser, "is_at_limit", lambda *about: False)],
    "room": [
        (others, "promised_room", lambda *about: _promised_room(*about) + (8 << 30)),
        (verdicts, "room", lambda *about, **more: _room(*about, **more) + (8 << 30)),
        (attempt, "share_capacity", lambda gpu: 1 << 60),
    ],
}
"""Name -> what is put in whose place, in one process."""


def break_build(name: str) -> None:
    """Break what this process does from now on; "" breaks nothing."""
    for owner, attribute, other in BROKEN[name] if name else ():
        setattr(owner, attribute, other)


def add_break_option(parser: argparse.ArgumentParser) -> None:
    """Add --break to the parser of what must then find the build broken, as ``broken``."""
    parser.add_argument(
        "--break", dest="broken", choices=("", *BROKEN), default="", help="break the claim code: must end with 1"
    )
