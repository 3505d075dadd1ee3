"""The limits of the policy file: how many GPUs the users of this host may hold, and hold, and for how long.

Limits are resolved while no lock is held, because a directory service may have to be asked for groups. Who holds what
is asked of the kernel just before host.lock is taken. The module is loaded only if there is a policy file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from ..coordination.files.state_dir import StateDir, opened
from ..coordination.holders.by_kernel import LeaseOwners, is_held_by, lease_owners
from ..coordination.leases.file_names import lease_name, slot_name
from ..coordination.leases.lease import is_empty
from ..coordination.leases.record import read_record
from ..coordination.leases.slots import recorded_slots
from ..coordination.socket_names import slot_of
from ..errors import PolicyError, UnsatisfiableRequestError, package_logger
from ..gpus.devices import MOST_SHARERS, HostSnapshot
from ..host.procfs import TOO_LONG, printable_lines
from ..selection.request import Selection
from ..selection.sharing import LEAST_SHARE, ROUNDING, part_of
from ..settings import policy
from ..settings import variables as settings
from ..wording.text import format_age

if TYPE_CHECKING:
    from ..coordination.queue.ticket import Ticket, TicketRequest
    from ..settings.policy import Limits, Policy
    from ..wording.argument_style import ArgumentStyle


def check_policy_limits(
    nb_gpus: float, seconds: float | None, limits: Limits, spelling: type[ArgumentStyle], *, said: bool
) -> None:
    """Refuse a claim that is not made inside another one and that the policy never allows.

    Args:
        seconds: for how long it says that it will hold its GPUs.
        said: whether the caller said so, and not a variable.

    Raises:
        UnsatisfiableRequestError: more GPUs, or a longer time, than the policy allows.
    """
    check_count(nb_gpus, limits)
    if limits.max_hold is not None and seconds is not None and seconds > limits.max_hold:
        name = spelling.option("hold_for") if said else "SAFE_GPU_FOR"
        raise UnsatisfiableRequestError(
            f"{name} says {format_age(seconds)}, and {limits.path} allows you {format_age(limits.max_hold)} "
            f"({limits.sections['max_hold']}): say less, or ask the administrator",
            value=seconds,
        )


def check_count(nb_gpus: float, limits: Limits) -> None:
    """Refuse more GPUs than the user may hold at once.

    Raises:
        UnsatisfiableRequestError: says how many are allowed, and by which section of the file.
    """
    most = limits.max_gpus
    if most is not None and nb_gpus > most:
        number, way_out = (f"{most} at once", "ask for fewer, or ") if most else ("none", "")
        raise UnsatisfiableRequestError(
            f"{nb_gpus:.2g} {'GPU' if nb_gpus == 1 else 'GPUs'} asked for, and {limits.path} allows you {number} on "
            f"this host ({limits.sections['max_gpus']}): {way_out}ask the administrator",
            value=nb_gpus,
        )


def hold_within(seconds: float | None, limits: Limits, *, said: bool) -> float | None:
    """Return for how long a claim will probably hold its GPUs, by its own word and by the policy; None is unknown.

    Args:
        seconds: by its own word, or by that of the batch job.
        said: whether the claim said it. If not, and nothing is known, the default of the policy applies.
    """
    if seconds is None and not said:
        seconds = limits.default_hold
    if limits.max_hold is None:
        return seconds
    return limits.max_hold if seconds is None else min(seconds, limits.max_hold)


class LimitReached(NamedTuple):
    """A limit of a user that stands in the way: ``held`` of ``most`` GPUs, by the leases with these names.

    ``known`` is False if the kernel's tables were too long to tell what is held.
    """

    held: float
    most: int
    leases: frozenset[str] = frozenset()
    known: bool = True

    def __str__(self) -> str:
        """Return ``you hold 4 of your 4 GPUs``."""
        gpus = f"{self.most} {'GPU' if self.most == 1 else 'GPUs'}"
        if not self.known:
            return f"how many of your {gpus} you hold is not known: {TOO_LONG}"
        return f"you hold {round(self.held, 2):g} of your {gpus}"


class Quota:
    """The limits that one claim has to consider.

    Attributes:
        limits: those of this user.
        unresolved: whether a look has met a waiter whose limit was not known. :meth:`prepare` finds it out.
    """

    def __init__(self, rules: Policy, limits: Limits) -> None:
        self.limits = limits
        self.unresolved = False
        self._rules = rules
        self._most: dict[int, int | None] = {os.geteuid(): limits.max_gpus}
        self._changed = _time_of(rules.path)

    def prepare(self) -> None:
        """Resolve the limits of the users who wait. Call it while host.lock is not held, before each look.

        A file that was changed is read again. While it has a mistake, the limits stay as they were.
        """
        self.unresolved = False
        changed = _time_of(self._rules.path)
        if changed != self._changed:
            self._changed = changed
            with suppress(PolicyError):
                self._rules = policy.read(self._rules.path)[0] or self._rules
                self.limits = policy.limits_of_this_user(self._rules)
                self._most = {os.geteuid(): self.limits.max_gpus}
        if not self._rules.limits_gpus:
            return
        owners: set[int] = set()
        with suppress(FileNotFoundError), opened("queue", make=False) as queue:
            if not queue.is_empty():
                from ..coordination.queue.listing import ticket_owners

                owners = ticket_owners(queue)
        for uid in owners.difference(self._most):
            self._most[uid] = policy.limits_of_user(self._rules, uid).max_gpus

    @property
    def by_turns(self) -> bool:
        """Whether users who wait are served by turns."""
        return self._rules.by_turns

    def owners(self, leases: StateDir, snapshot: HostSnapshot, *, others: bool, joins: bool = False) -> LeaseOwners:
        """Return whose leases are now, as far as a look needs it. Host.lock must not be held.

        Args:
            others: whether other users wait, whose limits matter too.
            joins: whether it may join the queue, where its turn depends on what its user holds.
        """
        needs_own = self.limits.max_gpus is not None or (joins and self.by_turns)
        if not needs_own and not (others and self._rules.limits_gpus):
            return LeaseOwners()
        return lease_owners(leases, [gpu.uuid for gpu in snapshot.gpus], snapshot.name_prefix)

    def holdings(
        self, leases: StateDir, snapshot: HostSnapshot, owners: LeaseOwners, *, tried: Collection[str] = ()
    ) -> LeasesByUser:
        """Return who holds what during one look.

        Args:
            owners: as of :meth:`owners`.
            tried: the names of the leases that this process takes during the look, as it takes them.
        """
        return LeasesByUser(self, leases, snapshot, owners, tried)

    def most_of(self, uid: int) -> int | None:
        """Return how many GPUs a user may hold at once; None is no limit, or not known yet."""
        if uid not in self._most:
            self.unresolved = self.unresolved or self._rules.limits_gpus
            return None
        return self._most[uid]


def _time_of(path: str) -> int:
    """Return when a file was changed; 0 if it is not there."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


class LeasesByUser:
    """Who holds which leases, by what the kernel told just before host.lock was taken.

    A claim of this user may have come since then. It has another record than the lease had, and counts if the process
    that this names is of this user and has locked the lease.
    """

    def __init__(
        self, quota: Quota, leases: StateDir, snapshot: HostSnapshot, owners: LeaseOwners, tried: Collection[str]
    ) -> None:
        self._quota = quota
        self._leases = leases
        self._snapshot = snapshot
        self._owners = owners
        self._tried = tried
        self._parts: dict[str, float] = {}  # of a GPU, by the name of the lease
        self._users = dict(owners.users)

    def own_limit(self, request: Selection) -> LimitReached | None:
        """Return the limit of the user of this claim, if it does not allow that many GPUs more."""
        return self._limit_of(os.geteuid(), request)

    def own_held(self) -> float:
        """Return how many GPUs the user of this claim holds."""
        return sum(self._parts[name] for name in self._held_by(os.geteuid()))

    def size(self, request: TicketRequest) -> float:
        """Return how many GPUs a ticket asks for."""
        if not request.conditions:
            return request.nb_gpus
        selection, _ = Selection.from_ticket(request.nb_gpus, request.conditions)
        return selection.amount(self._snapshot.gpus)

    def _limit_of(self, uid: int, request: Selection) -> LimitReached | None:
        most = self._quota.most_of(uid)
        if most is None:
            return None
        if not self._owners.known:
            return LimitReached(most, most, known=False)
        names = self._held_by(uid)
        held = sum(self._parts[name] for name in names)
        exceeds = held + request.amount(self._snapshot.gpus) > most + ROUNDING
        return LimitReached(held, most, names) if exceeds else None

    def is_at_limit(self, ticket: Ticket) -> bool:
        """Return whether that waiter, of another user, cannot take its GPUs before leases of its user end. It may be
        passed.

        Waiters of this user keep their order, and those inside a claim have no limit.
        """
        if ticket.request is None or ticket.uid == os.geteuid() or ticket.request.inside:
            return False
        request, _ = Selection.from_ticket(ticket.request.nb_gpus, ticket.request.conditions)
        limit = self._limit_of(ticket.uid, request)
        return limit is not None and limit.known

    def _held_by(self, uid: int) -> frozenset[str]:
        if not self._parts:
            self._count()
        counted = self._parts.keys() - self._tried
        return frozenset(name for name, user in self._users.items() if user == uid and name in counted)

    def _count(self) -> None:
        self._parts = parts_by_lease(self._leases, self._snapshot, self._owners)
        there = self._leases.few_names()
        for gpu in self._snapshot.gpus:
            for name in (lease_name(gpu.uuid), *(slot_name(gpu.uuid, slot) for slot in range(MOST_SHARERS))):
                record = None if is_empty(self._leases, name, there) else read_record(self._leases, name)
                known = self._owners.records.get(name)
                if record is not None and record != known and is_held_by(self._leases, name, record, os.geteuid()):
                    self._users[name], self._parts[name] = os.geteuid(), part_of(gpu, record.share)


def parts_by_lease(leases: StateDir, snapshot: HostSnapshot, owners: LeaseOwners) -> dict[str, float]:
    """Return name of a lease -> how much of a GPU who holds it has: of a share its part, or that of the smallest if
    names do not confirm what the record says."""
    found, directory = {}, os.fstat(leases.fd)
    for gpu in snapshot.gpus:
        found[lease_name(gpu.uuid)] = 1.0
        for slot, record in recorded_slots(leases, gpu.uuid).items():
            name = slot_of(gpu.uuid, slot, snapshot.name_prefix)
            certain = owners.names.confirms(name, record, directory)
            found[slot_name(gpu.uuid, slot)] = part_of(gpu, record.share if certain else LEAST_SHARE)
    return found


def quota_of(path: str, warn: object) -> Quota | None:
    """Return what the policy file demands of this claim; None if it is ignored, with a warning.

    Args:
        warn: called with a format and arguments, as ``logging.Logger.warning``.

    Raises:
        PolicyError: the file cannot be read, or a line of it is wrong.
    """
    rules, doubt = policy.read(path)
    if doubt:
        warn("%s", printable_lines(doubt))  # type: ignore[operator]
    return None if rules is None else Quota(rules, policy.limits_of_this_user(rules))


def remaining_quota(snapshot: HostSnapshot, nb_gpus: int) -> float:
    """Return how many GPUs more the policy of this host lets this user hold; ``math.inf`` if nothing limits that.

    Args:
        nb_gpus: how many would be claimed at once.

    Raises:
        UnsatisfiableRequestError: the policy never allows that many.
        PolicyError: the policy file cannot be used. StateDirError: the leases cannot be read.
    """
    path = settings.existing_policy(os.environ)
    if path is None:
        return math.inf
    quota = quota_of(path, package_logger().warning)
    if quota is None or quota.limits.max_gpus is None:
        return math.inf
    check_count(nb_gpus, quota.limits)
    with opened("leases") as leases:
        holdings = quota.holdings(leases, snapshot, quota.owners(leases, snapshot, others=False))
        limit = holdings.own_limit(Selection(quota.limits.max_gpus + 1))
    assert limit is not None  # one GPU more than the limit is never allowed
    return limit.most - limit.held
