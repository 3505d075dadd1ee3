"""The limits of the policy file at a claim: those of this user, and of users who wait ahead.

Limits are resolved while no lock is held, because a directory service may have to be asked for groups. Who holds what
is read under host.lock. The module is loaded only if there is a policy file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from .. import policy
from ..coordination.files import StateDir, state_dir_path
from ..coordination.holders import lease_owners
from ..coordination.leases import lease_name, recorded_slots, slot_name
from ..errors import PolicyError, UnsatisfiableRequestError
from ..procfs import printable_lines
from ..selection.request import Selection
from ..selection.sharing import ROUNDING, amount, part_of
from ..text import format_age

if TYPE_CHECKING:
    from ..argument_style import ArgumentStyle
    from ..coordination.leases import Lease
    from ..coordination.queue import Ticket
    from ..devices import Gpu
    from ..policy import Limits, Policy
    from .times import HoldTime


class LimitReached(NamedTuple):
    """A limit of a user that stands in the way: ``held`` of ``most`` GPUs, by the leases with these names."""

    held: float
    most: int
    leases: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Return ``you hold 4 of your 4 GPUs``."""
        return f"you hold {round(self.held, 2):g} of your {self.most} {'GPU' if self.most == 1 else 'GPUs'}"


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
        with suppress(FileNotFoundError), StateDir(state_dir_path(), make=False) as root:
            with StateDir("queue", root, make=False) as queue:
                if queue.is_empty():
                    return
                from ..coordination.queue import ticket_owners

                owners = ticket_owners(queue)
            for uid in owners.difference(self._most):
                self._most[uid] = policy.limits_of_user(self._rules, uid).max_gpus

    def holdings(self, leases: StateDir, gpus: Iterable[Gpu], tried: Mapping[str, Lease]) -> LeasesByUser:
        """Return who holds what during one look.

        Args:
            gpus: of this host.
            tried: the leases that this process takes during the look.
        """
        return LeasesByUser(self, leases, gpus, tried)

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
    """Who holds which leases, read from the kernel at the first question."""

    def __init__(self, quota: Quota, leases: StateDir, gpus: Iterable[Gpu], tried: Mapping[str, Lease]) -> None:
        self._quota = quota
        self._leases = leases
        self._gpus = tuple(gpus)
        self._tried = tried
        self._owners: Mapping[str, int] | None = None
        self._parts: dict[str, float] = {}  # of a GPU, by the name of the lease

    def own_spent(self, request: Selection) -> LimitReached | None:
        """Return the limit of the user of this claim, if it does not allow that many GPUs more."""
        return self._spent(os.geteuid(), request)

    def _spent(self, uid: int, request: Selection) -> LimitReached | None:
        most = self._quota.most_of(uid)
        if most is None:
            return None
        names = self._held_by(uid)
        held = sum(self._parts[name] for name in names)
        wanted = amount(request.nb_gpus, request.share, self._gpus)
        return LimitReached(held, most, names) if held + wanted > most + ROUNDING else None

    def is_at_limit(self, ticket: Ticket) -> bool:
        """Return whether that waiter, of another user, cannot take its GPUs before leases of its user end. It may be
        passed.

        Waiters of this user keep their order, and those inside a claim have no limit.
        """
        if ticket.demand is None or ticket.uid == os.geteuid():
            return False
        if any(stem.endswith(".inner") for stem in ticket.demand.gpus):
            return False
        request, _ = Selection.from_ticket(ticket.demand.nb_gpus, ticket.demand.conditions)
        return self._spent(ticket.uid, request) is not None

    def _held_by(self, uid: int) -> frozenset[str]:
        if self._owners is None:
            tried = {lease.name for lease in self._tried.values()}
            self._parts = parts_by_lease(self._leases, self._gpus)
            self._owners = lease_owners(self._leases, set(self._parts) - tried)
        return frozenset(name for name, owner in self._owners.items() if owner == uid)


def parts_by_lease(leases: StateDir, gpus: Iterable[Gpu]) -> dict[str, float]:
    """Return name of a lease -> how much of a GPU who holds it has: of a share its part."""
    found = {}
    for gpu in gpus:
        found[lease_name(gpu.uuid)] = 1.0
        for slot, record in recorded_slots(leases, gpu.uuid).items():
            found[slot_name(gpu.uuid, slot)] = part_of(gpu, record.share)
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


def check_policy_limits(nb_gpus: float, hold: HoldTime, limits: Limits, spelling: type[ArgumentStyle]) -> None:
    """Refuse a claim that is not made inside another one and that the policy never allows.

    Raises:
        UnsatisfiableRequestError: more GPUs, or a longer time, than the policy allows.
    """
    check_count(nb_gpus, limits)
    if limits.max_hold is not None and hold.seconds is not None and hold.seconds > limits.max_hold:
        name = spelling.option("hold_for") if hold.said else "SAFE_GPU_FOR"
        raise UnsatisfiableRequestError(
            f"{name} says {format_age(hold.seconds)}, and {limits.path} allows you {format_age(limits.max_hold)} "
            f"({limits.sections['max_hold']}): say less, or ask the administrator",
            value=hold.seconds,
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
