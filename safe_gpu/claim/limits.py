"""The limits of the policy file: how many GPUs the users of this host may hold, and hold, and for how long.

Limits are resolved while no lock is held, because a directory service may have to be asked for groups. Whose a claim is
says the owner of its entry. The module is loaded only if there is a policy file.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from ..coordination.entry import Entry
from ..coordination.holders import Claims, living_claims
from ..coordination.host_lock import Host
from ..coordination.queue import TicketRequest
from ..errors import PolicyError, UnsatisfiableRequestError, package_logger
from ..gpus.devices import HostSnapshot, vendor_of
from ..host.foreign_files import printable_lines
from ..selection.request import Selection
from ..selection.sharing import ROUNDING, part_of
from ..settings import config as policy
from ..settings import variables as settings
from ..settings.config import Limits, Policy
from ..wording import style
from ..wording.text import format_age, plural

# GPUs of a user that the driver does not show and whose vendor is looked for. Who names more is beyond every limit.
_MOST_UNKNOWN = 256


def check_policy_limits(nb_gpus: float, limits: Limits, seconds: float | None = None, *, stated: bool = False) -> None:
    """Refuse a claim that is not made inside another one and that the policy never allows.

    Args:
        seconds: for how long it says that it will hold its GPUs.
        stated: whether the caller stated it, and not a variable.

    Raises:
        UnsatisfiableRequestError: more GPUs, or a longer time, than the policy allows, and by which section of the
            file.
    """
    most = limits.max_gpus
    if most is not None and nb_gpus > most:
        thing = "GPUs"
        if nb_gpus == 1:
            thing = "GPU"
        number = "none"
        way_out = "ask the administrator"
        if most:
            number = f"{most} at once"
            way_out = "ask for fewer, or ask the administrator"
        raise UnsatisfiableRequestError(
            f"{nb_gpus:.2g} {thing} asked for, and {limits.path} allows you {number} on this host "
            f"({limits.sections['max_gpus']}): {way_out}",
            value=nb_gpus,
        )
    if limits.max_hold is not None and seconds is not None and seconds > limits.max_hold:
        name = "SAFE_GPU_FOR"
        if stated:
            name = style.option("hold_for")
        raise UnsatisfiableRequestError(
            f"{name} says {format_age(seconds)}, and {limits.path} allows you {format_age(limits.max_hold)} "
            f"({limits.sections['max_hold']}): state less, or ask the administrator",
            value=seconds,
        )


class LimitReached(NamedTuple):
    """A limit of a user that stands in the way: ``held`` of ``most`` GPUs, by the claims with these names."""

    held: float
    most: int
    claims: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Return ``you hold 4 of your 4 GPUs``."""
        return f"you hold {round(self.held, 2):g} of your {plural(self.most)}"


class Quota:
    """The limits that one claim has to consider.

    Attributes:
        limits: those of this user.
        rules: those of all users.
        unresolved: whether an attempt has met a waiter whose limit was not known. :meth:`prepare` finds it out.
    """

    def __init__(self, rules: Policy, limits: Limits) -> None:
        self.limits = limits
        self.rules = rules
        self.unresolved = False
        self._most: dict[int, int | None] = {os.geteuid(): limits.max_gpus}
        self._changed = _time_of(rules.path)

    def prepare(self, host: Host) -> None:
        """Resolve the limits of the users who wait. Call it while host.lock is not held, before each attempt.

        A file that was changed is read again. While it has a mistake, the limits stay as they were.
        """
        self.unresolved = False
        changed = _time_of(self.rules.path)
        if changed != self._changed:
            self._changed = changed
            with suppress(PolicyError):
                rules, _doubt = policy.read(self.rules.path)
                self.rules = rules or self.rules
                self.limits = policy.limits_of_user(self.rules, os.geteuid())
                self._most = {os.geteuid(): self.limits.max_gpus}
        if not self.rules.by_turns and not self.rules.limits_gpus:
            return
        waiting = {ticket.uid for ticket in host.queue.look(())}
        if self.rules.limits_gpus:
            for uid in waiting.difference(self._most):
                self._most[uid] = policy.limits_of_user(self.rules, uid).max_gpus

    def hold_within(self, seconds: float | None, *, stated: bool) -> float | None:
        """Return for how long a claim will probably hold its GPUs, by its own word and by the policy; None is unknown.

        Args:
            seconds: by its own word, or by that of the batch job.
            stated: whether the claim stated it. If not, and nothing is known, the default of the policy applies.
        """
        if seconds is None and not stated:
            seconds = self.limits.default_hold
        if self.limits.max_hold is None:
            return seconds
        if seconds is None:
            return self.limits.max_hold
        return min(seconds, self.limits.max_hold)

    def held(self, snapshot: HostSnapshot, claims: Claims) -> ClaimsByUser:
        """Return who holds what of these claims."""
        return ClaimsByUser(self, snapshot, claims)

    def most_of(self, uid: int) -> int | None:
        """Return how many GPUs a user may hold at once; None is no limit, or not known yet."""
        if uid not in self._most:
            self.unresolved = self.unresolved or self.rules.limits_gpus
            return None
        return self._most[uid]


def _time_of(path: str) -> int:
    """Return when a file was changed; 0 if it is not there."""
    with suppress(OSError):
        return os.stat(path).st_mtime_ns
    return 0


class ClaimsByUser:
    """Which users hold what, by the living claims of one listing. Claims inside claims and on a shared display do not
    count."""

    def __init__(self, quota: Quota, snapshot: HostSnapshot, claims: Claims) -> None:
        self._quota = quota
        self._snapshot = snapshot
        self._claims = claims
        self._held: dict[int, dict[str, float]] | None = None

    def size(self, ticket: Entry) -> float:
        """Return how many GPUs a ticket asks for."""
        return self._asked(ticket).amount(self._snapshot.gpus)

    def is_at_limit(self, ticket: Entry) -> bool:
        """Return whether that waiter, of another user, cannot take its GPUs before claims of its user end. It may be
        passed.

        Waiters of this user keep their order, and those inside a claim have no limit.
        """
        if ticket.uid == os.geteuid() or ticket.inside:
            return False
        return self.limit_of(ticket.uid, self._asked(ticket)) is not None

    def _asked(self, ticket: Entry) -> Selection:
        request = TicketRequest.of(ticket)
        selection, _is_known = Selection.from_ticket(request.nb_gpus, request.conditions)
        return selection

    def limit_of(self, uid: int, request: Selection) -> LimitReached | None:
        """Return the limit of a user, if it does not allow that many GPUs more."""
        most = self._quota.most_of(uid)
        if most is None:
            return None
        claims = self.held_by(uid)
        held = sum(claims.values())
        amount = request.amount(self._snapshot.gpus)
        if amount > 0:
            amount = max(amount, 2 * ROUNDING)  # who is at the limit gets no share, however small
        if held + amount <= most + ROUNDING:
            return None
        return LimitReached(held, most, frozenset(claims))

    def held_by(self, uid: int) -> dict[str, float]:
        """Return name of a claim -> how many GPUs it holds."""
        if self._held is None:
            self._held = {}
            for one, held in held_of(self._snapshot, self._claims):
                if held:
                    self._held.setdefault(one.uid, {})[one.name] = held
        return self._held.get(uid, {})


def held_of(snapshot: HostSnapshot, claims: Claims) -> Iterator[tuple[Entry, float]]:
    """Yield the claims that count for limits, each with how many GPUs of the vendor of one poll it holds, and shares as
    parts. Of a GPU that the driver does not show it holds all."""
    shown = {gpu.uuid: gpu for gpu in snapshot.gpus}
    unknown: Counter[int] = Counter()  # names of each user
    for claim in claims.living:
        if not _counts(claim, snapshot, claims):
            continue
        held = 0.0
        for uuid, share in claim.gpus.items():
            if uuid in shown:
                held += part_of(shown[uuid], share)
                continue
            unknown[claim.uid] += 1
            if unknown[claim.uid] > _MOST_UNKNOWN or vendor_of(uuid) == snapshot.vendor:
                held += 1
        yield claim, held


def _counts(claim: Entry, snapshot: HostSnapshot, claims: Claims) -> bool:
    """Return whether a claim counts for the limits of its user. One inside another does not, nor one of nobody, nor one
    on a shared display: on a host without such a display nobody lets others in beside a claim that says so."""
    if claim.uid < 0 or claims.is_inside(claim):
        return False
    return not (claim.display and snapshot.shared_display)


def quota_of(path: str, warn: Callable[[str, str], object]) -> Quota | None:
    """Return what the policy file demands of this claim; None if it is ignored, with a warning.

    Args:
        warn: called with a format and arguments, as ``logging.Logger.warning``.

    Raises:
        PolicyError: the file cannot be read, or a line of it is wrong.
    """
    rules, doubt = policy.read(path)
    if doubt:
        warn("%s", printable_lines(doubt))
    if rules is None:
        return None
    return Quota(rules, policy.limits_of_user(rules, os.geteuid()))


def remaining_quota(snapshot: HostSnapshot, nb_gpus: int) -> float:
    """Return how many GPUs more the policy of this host lets this user hold; ``math.inf`` if nothing limits that.

    Args:
        nb_gpus: how many would be claimed at once.

    Raises:
        UnsatisfiableRequestError: the policy never allows that many.
        PolicyError: the policy file cannot be used. StateDirError: the claims cannot be read.
    """
    path = settings.existing_policy(os.environ)
    if path is None:
        return math.inf
    quota = quota_of(path, package_logger().warning)
    if quota is None or quota.limits.max_gpus is None:
        return math.inf
    check_policy_limits(nb_gpus, quota.limits)
    held = quota.held(snapshot, Claims(living_claims())).held_by(os.geteuid())
    return quota.limits.max_gpus - sum(held.values())
