"""Claims GPUs on all hosts or on none, without deadlock.

Every cluster claim orders its hosts in the same way. It *waits* for a host only while all hosts that it holds come
before that host. A deadlock is a cycle of claims, each waiting for a host that the next one holds. At least one claim
in a cycle would have to wait for a host that comes before one that it holds. No claim does that, so there is no
deadlock, whatever the number of claims and hosts.

Waiting for one host after the other would add up the times of all hosts. So hosts are first *tried*, all at the same
time and without waiting. If all succeed, which is the common case, the claim takes as long as its slowest host.
Otherwise the claim gives back all hosts after the first one that is busy, waits for the busy host (in that host's
queue, first come, first served), and tries the rest again. A try never waits, so the argument above still holds. Each
wait adds a host that stays held, so there are at most as many waits as hosts.

A claim that may not wait (``timeout=0``) cannot try again after a conflict: two claims of the same hosts could each get
one host, and both would fail. It therefore tries the first host alone, and the other hosts, all at once, after it has
the first. Of two such claims with the same first host, one continues and the other fails without holding any host.
This takes the time of two hosts instead of one, whatever the number of hosts.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from ..errors import ClaimTimeout, NotEnoughGpusError, SafeGpuError
from .connection import Holder

# Seconds for a release or a ping, which normally take milliseconds.
ANSWER_LIMIT = 30.0

_ErrorT = TypeVar("_ErrorT", bound=SafeGpuError)


class HostClaim(NamedTuple):
    """The claim on one host: the holder of its first node claims for all of them. An engine may run several nodes on
    one host, and two claims there could deadlock.

    Attributes:
        members: the holders of its nodes.
        rank: the sort key of this host: different for different hosts, the same for every claim.
        nb_gpus: how many GPUs are wanted there.
    """

    members: Sequence[Holder]
    rank: tuple[str, ...]
    nb_gpus: int

    @property
    def holder(self) -> Holder:
        """The one that claims."""
        return self.members[0]

    def begin(self, timeout: float | None) -> None:
        """Start claiming; ``timeout`` in seconds: 0 does not wait, None waits without limit."""
        self.holder.call("claim", self.nb_gpus, timeout)

    def outcome(self) -> Any:
        """Wait for the end of ``begin`` and return what the host granted.

        Raises:
            NotEnoughGpusError: the host is busy, and nothing is held there.
            SafeGpuError: any other error, and nothing is held there.
        """
        try:
            result = self.holder.answer(None)
            if isinstance(result, SafeGpuError):
                raise result
            return result
        except SafeGpuError as err:
            raise on_host(self.holder.host, err) from None


def on_host(host: str, error: _ErrorT) -> _ErrorT:
    """Return the same error, with the host in its message and in a new attribute ``host``."""
    if not getattr(error, "host", None):
        error.host = host  # type: ignore[attr-defined]
        error.message = f"{host}: {error.message}"
    return error


def claim_on_all(
    claimers: Sequence[HostClaim],
    timeout: float | None,
    *,
    on_wait: Callable[[str, NotEnoughGpusError], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Any]:
    """Claim on every host, or on none.

    Args:
        claimers: one per host, in any order.
        timeout: one deadline for all of them, in seconds; 0 does not wait, None waits without limit.
        on_wait: called with the host and its refusal, each time before the claim waits for a host.
        clock: a monotonic clock in seconds.

    Returns:
        What each host granted, in the order of ``claimers``.

    Raises:
        SafeGpuError: the error of a host, see :func:`on_host`. All claimers have been abandoned then.
    """
    order = sorted(range(len(claimers)), key=lambda number: claimers[number].rank)
    deadline = None if timeout is None else clock() + timeout
    grants: list[Any] = []  # of the first hosts in the order, which stay held
    try:
        while len(grants) < len(order):
            ahead = [claimers[number] for number in order[len(grants) :]]
            granted, refusal = _try(ahead[:1] if timeout == 0 and not grants else ahead)
            grants += granted
            if refusal is None:
                continue
            if timeout == 0:
                raise refusal
            busy = ahead[len(granted)]
            left = None if deadline is None else deadline - clock()
            if timeout is not None and left is not None and left <= 0:
                late = ClaimTimeout(
                    refusal.message, nb_gpus=refusal.nb_gpus, verdicts=refusal.verdicts, timeout=timeout
                )
                late.__dict__["host"] = busy.holder.host  # the message names it already
                raise late
            if on_wait is not None:
                on_wait(busy.holder.host, refusal)
            busy.begin(left)
            try:
                grants.append(busy.outcome())
            except ClaimTimeout as err:
                if timeout is not None:
                    err.timeout = timeout  # the host was given only the remaining time
                raise
    except BaseException:
        for claimer in claimers:
            claimer.holder.end()
        raise
    by_number = dict(zip(order, grants, strict=True))
    return [by_number[number] for number in range(len(claimers))]


def _try(ahead: Sequence[HostClaim]) -> tuple[list[Any], NotEnoughGpusError | None]:
    """Try hosts at the same time and keep those before the first busy one: their grants, and its refusal or None."""
    for claimer in ahead:
        claimer.begin(0)
    grants: list[Any] = []
    refusal: NotEnoughGpusError | None = None
    error: SafeGpuError | None = None
    behind: list[Holder] = []
    for claimer in ahead:
        try:
            grant = claimer.outcome()
        except NotEnoughGpusError as err:
            refusal = refusal or err
        except SafeGpuError as err:
            error = error or err
        else:
            if refusal is None:
                grants.append(grant)
            else:
                behind.append(claimer.holder)
    if error is not None:  # waiting for the busy hosts cannot help
        raise error
    for holder in behind:
        holder.call("release")
    for holder in behind:
        holder.answer(ANSWER_LIMIT)
    return grants, refusal
