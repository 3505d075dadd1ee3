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

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..errors import ClaimTimeout, NotEnoughGpusError, SafeGpuError, UnsatisfiableRequestError
from ..gpus.vendors import FIRST

_GrantT = TypeVar("_GrantT")
_GrantT_co = TypeVar("_GrantT_co", covariant=True)
_ErrorT = TypeVar("_ErrorT", bound=SafeGpuError)


class HostClaimer(Protocol[_GrantT_co]):
    """The claim on one host. ``begin`` and ``give_back`` return at once, so that many hosts work at the same time."""

    @property
    def host(self) -> str:
        """The name of the host in errors."""

    @property
    def rank(self) -> tuple[str, ...]:
        """The sort key of this host: different for different hosts, the same for every claim."""

    def begin(self, timeout: float | None) -> None:
        """Start claiming; ``timeout`` in seconds: 0 does not wait, None waits without limit."""

    def outcome(self) -> _GrantT_co:
        """Wait for the result of ``begin`` and return what the host granted.

        Raises:
            NotEnoughGpusError: the host is busy, and nothing is held there.
            SafeGpuError: any other error, and nothing is held there.
        """

    def give_back(self) -> None:
        """Start to give back what ``outcome`` granted."""

    def given_back(self) -> None:
        """Wait for the end of ``give_back``."""

    def abandon(self) -> None:
        """End the claim in any state, also between ``begin`` and ``outcome``. No call follows."""


def on_host(host: str, error: _ErrorT) -> _ErrorT:
    """Return the same error, with the host in its message and in a new attribute ``host``."""
    if not getattr(error, "host", None):
        error.host = host  # type: ignore[attr-defined]
        error.message = f"{host}: {error.message}"
    return error


def claim_on_all(
    claimers: Sequence[HostClaimer[_GrantT]],
    timeout: float | None,
    *,
    on_wait: Callable[[str, NotEnoughGpusError], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[_GrantT]:
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
    grants: list[_GrantT] = []  # of the first hosts in the order, which stay held
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
                error = ClaimTimeout(
                    refusal.message, nb_gpus=refusal.nb_gpus, verdicts=refusal.verdicts, timeout=timeout
                )
                error.__dict__["host"] = busy.host  # the message names it already
                raise error
            if on_wait is not None:
                on_wait(busy.host, refusal)
            busy.begin(left)
            try:
                grants.append(busy.outcome())
            except SafeGpuError as err:
                if isinstance(err, ClaimTimeout) and timeout is not None:
                    err.timeout = timeout  # the host was given only the remaining time
                raise on_host(busy.host, err) from None
    except BaseException:
        for claimer in claimers:
            claimer.abandon()
        raise
    by_number = dict(zip(order, grants, strict=True))
    return [by_number[number] for number in range(len(claimers))]


def _try(ahead: Sequence[HostClaimer[_GrantT]]) -> tuple[list[_GrantT], NotEnoughGpusError | None]:
    """Try hosts at the same time and keep those before the first busy one: their grants, and its refusal or None."""
    for claimer in ahead:
        claimer.begin(0)
    grants: list[_GrantT] = []
    refusal: NotEnoughGpusError | None = None
    error: SafeGpuError | None = None
    behind: list[HostClaimer[_GrantT]] = []
    for claimer in ahead:
        try:
            grant = claimer.outcome()
        except NotEnoughGpusError as err:
            refusal = refusal or on_host(claimer.host, err)
        except SafeGpuError as err:
            error = error or on_host(claimer.host, err)
        else:
            if refusal is None:
                grants.append(grant)
            else:
                behind.append(claimer)
    if error is not None:  # waiting for the busy hosts cannot help
        raise error
    for claimer in behind:
        claimer.give_back()
    for claimer in behind:
        claimer.given_back()
    return grants, refusal


@dataclass(frozen=True)
class ClusterGpu:
    """One GPU of a cluster claim.

    Attributes:
        host: the engine's name of the host.
        node_id: the engine's id of the node.
        index: as nvidia-smi shows it on that host; ROCR's number of an AMD GPU.
        uuid: as nvidia-smi or ROCR shows it.
        cpus: the CPUs next to it, for its workers; empty: no preference.
        cores: the same CPUs, as the hardware threads of each physical core.
        numa_node: the NUMA node next to it; None is unknown.
        vendor: a key of :data:`~safe_gpu.gpus.vendors.VENDORS`.
        environment: the variables that make only this GPU visible to CUDA or HIP, and allow its workers to claim it.
        inherited_position: its position in the CUDA_VISIBLE_DEVICES, or ROCR_VISIBLE_DEVICES for an AMD GPU, that the
            holder inherited; None without one.
    """

    host: str
    node_id: str
    index: int
    uuid: str
    cpus: frozenset[int] = frozenset()
    cores: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    numa_node: int | None = field(default=None, repr=False)
    vendor: str = field(default=FIRST, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    inherited_position: int | None = field(default=None, repr=False)


class ClusterClaim:
    """GPUs on one host or several, held from the claim to :meth:`release`, the end of ``with``, or exit.

    Deleting the last reference to the object does not release the GPUs.

    Attributes:
        gpus: the held GPUs, host by host in the order of ``nodes``, by index within each host.
    """

    def __init__(self, gpus: Sequence[ClusterGpu]) -> None:
        self.gpus = tuple(gpus)
        self._released = False
        _live.add(self)

    def __enter__(self) -> ClusterClaim:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = " released" if self._released else ""
        return f"<{type(self).__name__}{state} {', '.join(f'{gpu.host}:{gpu.index}' for gpu in self.gpus)}>"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts, in the order of ``gpus``, without repeats."""
        return tuple(dict.fromkeys(gpu.host for gpu in self.gpus))

    def check(self) -> None:
        """Check that every GPU is still held.

        Raises:
            HolderLostError: the process that held a host's GPUs has exited, so the claim on that host is lost.
            UnsatisfiableRequestError: the claim was released.
        """
        self._check_unreleased()
        self._check(self.gpus)

    def release(self) -> None:
        """Release all GPUs; safe to call twice."""
        if not self._released:
            self._released = True
            _live.discard(self)
            self._release()

    def _known(self, gpu: ClusterGpu) -> ClusterGpu:
        """Return the GPU itself, if it belongs to this claim and is still held."""
        if gpu not in self.gpus:
            raise UnsatisfiableRequestError(f"{gpu!r} is not a GPU of {self!r}: pass one of claim.gpus", value=gpu)
        self._check_unreleased()
        self._check((gpu,))
        return gpu

    def _check_unreleased(self) -> None:
        if self._released:
            raise UnsatisfiableRequestError(f"{self!r} holds nothing any more: claim again")

    def _check(self, gpus: Sequence[ClusterGpu]) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


# References to all claims that are held. Engines end objects that have no references left (Ray an actor, Dragon a
# queue), and that must not end a claim.
_live: set[ClusterClaim] = set()
