"""All or nothing across hosts, without deadlock: what the engines share, driven by whatever can claim on one host.

Every cluster claim orders its hosts in the same way, and *waits* for a host only while it holds nothing but hosts that
come before it. A ring of claims, each waiting for a host that the next one holds, would need one that waits for a host
before one that it holds; there is none, so there is no deadlock, whatever the number of claims and hosts.

Waiting host by host would make a claim as slow as all its hosts together. So hosts are first *tried*, all at the same
time and without waiting. Where all deliver, which is the common case, the claim has cost as much as its slowest host.
Else everything behind the first host that did not deliver is given back, that one host is waited for (in its own queue,
first come, first served, holding only hosts before it), and the rest is tried again. A try never waits, so it adds
nothing to the argument above, and each wait adds a host that stays held: there are at most as many waits as hosts.

A claim that may not wait (``timeout=0``) has no second chance after a try that met another claim's try: two claims of
the same hosts, each with one of them in its hands, would both fail. It tries the first host alone and the others, all
at once, when it has that one: of two claims that start at the same host one goes on, and the other stops without having
touched the rest. That costs the time of two hosts instead of one, however many there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ..errors import ClaimTimeout, NotEnoughGpusError, SafeGpuError, UnsatisfiableRequestError

__all__ = ["ClusterClaim", "ClusterGpu", "HostClaimer", "claim_on_all", "on_host"]

_GrantT = TypeVar("_GrantT")
_GrantT_co = TypeVar("_GrantT_co", covariant=True)
_ErrorT = TypeVar("_ErrorT", bound=SafeGpuError)


class HostClaimer(Protocol[_GrantT_co]):
    """The claim on one host. Its calls only start things, so that many hosts work side by side."""

    @property
    def host(self) -> str:
        """What errors call it."""

    @property
    def rank(self) -> tuple[str, ...]:
        """Its place in the order of all hosts: different for different hosts, the same for every claim."""

    def begin(self, timeout: float | None) -> None:
        """Start claiming: seconds to wait for GPUs, 0 does not wait, None waits for ever."""

    def outcome(self) -> _GrantT_co:
        """What ``begin`` led to, as soon as that is known.

        Raises:
            NotEnoughGpusError: busy, and nothing is held there.
            SafeGpuError: anything else, and nothing is held there.
        """

    def give_back(self) -> None:
        """Start giving back what ``outcome`` granted."""

    def given_back(self) -> None:
        """Wait for what ``give_back`` started."""

    def abandon(self) -> None:
        """Let go in whatever state it is, also between ``begin`` and ``outcome``; nothing is called afterwards."""


def on_host(host: str, error: _ErrorT) -> _ErrorT:
    """The same error; its message and a new attribute ``host`` say where it happened."""
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
        timeout: one deadline for all of them, in seconds; 0 does not wait, None waits for ever.
        on_wait: called with the host and what it said, each time a host has to be waited for.
        clock: seconds, never running backwards.

    Returns:
        What each host granted, in the order of ``claimers``.

    Raises:
        SafeGpuError: from a host that did not deliver, see :func:`on_host`. All claimers have been abandoned then.
    """
    ordered = sorted(claimers, key=lambda claimer: claimer.rank)
    try:
        grants = _Attempt(ordered, timeout, on_wait, clock).run()
    except BaseException:
        for claimer in claimers:
            claimer.abandon()
        raise
    return [grants[ordered.index(claimer)] for claimer in claimers]


class _Attempt(Generic[_GrantT]):
    def __init__(
        self,
        claimers: Sequence[HostClaimer[_GrantT]],
        timeout: float | None,
        on_wait: Callable[[str, NotEnoughGpusError], None] | None,
        clock: Callable[[], float],
    ) -> None:
        self._claimers = claimers
        self._timeout = timeout
        self._on_wait = on_wait
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._grants: list[_GrantT] = []  # of the first hosts, which stay held from here

    def run(self) -> list[_GrantT]:
        while len(self._grants) < len(self._claimers):
            ahead = self._claimers[len(self._grants) :]
            if self._timeout == 0 and not self._grants:
                ahead = ahead[:1]
            refusal = self._try(ahead)
            if refusal is not None:
                self._wait_for(self._claimers[len(self._grants)], refusal)
        return self._grants

    def _try(self, ahead: Sequence[HostClaimer[_GrantT]]) -> NotEnoughGpusError | None:
        """Try hosts side by side and keep those before the first that is busy; what that one said, or None."""
        for claimer in ahead:
            claimer.begin(0)
        refusal: NotEnoughGpusError | None = None
        hopeless: SafeGpuError | None = None
        behind: list[HostClaimer[_GrantT]] = []
        for claimer in ahead:
            try:
                grant = claimer.outcome()
            except NotEnoughGpusError as err:
                refusal = refusal or on_host(claimer.host, err)
            except SafeGpuError as err:
                hopeless = hopeless or on_host(claimer.host, err)
            else:
                if refusal is None:
                    self._grants.append(grant)
                else:
                    behind.append(claimer)
        if hopeless is not None:  # whatever the busy ones give later
            raise hopeless
        for claimer in behind:
            claimer.give_back()
        for claimer in behind:
            claimer.given_back()
        return refusal

    def _wait_for(self, claimer: HostClaimer[_GrantT], refusal: NotEnoughGpusError) -> None:
        if self._timeout == 0:
            raise refusal
        left = None if self._deadline is None else self._deadline - self._clock()
        if left is not None and left <= 0:
            raise on_host(claimer.host, _timed_out(refusal, self._timeout))
        if self._on_wait is not None:
            self._on_wait(claimer.host, refusal)
        claimer.begin(left)
        try:
            self._grants.append(claimer.outcome())
        except SafeGpuError as err:
            if isinstance(err, ClaimTimeout) and self._timeout is not None:
                err.timeout = self._timeout  # the host only saw what was left of it
            raise on_host(claimer.host, err) from None


def _timed_out(refusal: NotEnoughGpusError, timeout: float | None) -> ClaimTimeout:
    error = ClaimTimeout(refusal.message, nb_gpus=refusal.nb_gpus, verdicts=refusal.verdicts, timeout=timeout or 0.0)
    error.__dict__["host"] = refusal.__dict__.get("host")
    return error


@dataclass(frozen=True)
class ClusterGpu:
    """One GPU of a cluster claim.

    Attributes:
        host: the host's name, as the engine knows it.
        node_id: the engine's own id of the node.
        index, uuid: as nvidia-smi shows them there.
        cpus: the CPUs next to it that its workers shall use; empty: no preference.
        cores: the same, as the hardware threads of each physical core.
        numa_node: the NUMA node whose memory is next to it; None is unknown.
        environment: the variables that show exactly this GPU to CUDA, and let its workers claim it.
        inherited_position: its place in the CUDA_VISIBLE_DEVICES that the holder was started with; None without one.
    """

    host: str
    node_id: str
    index: int
    uuid: str
    cpus: frozenset[int] = frozenset()
    cores: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    numa_node: int | None = field(default=None, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    inherited_position: int | None = field(default=None, repr=False)


class ClusterClaim:
    """GPUs on one host or several, held from the claim to :meth:`release`, the end of ``with``, or exit.

    Dropping the object lets go of nothing.

    Attributes:
        gpus: what is held, host by host in the order of ``nodes``, by index within each.
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
        """The hosts' names, in the order of ``gpus``, each once."""
        return tuple(dict.fromkeys(gpu.host for gpu in self.gpus))

    def check(self) -> None:
        """Make sure that every GPU is still held.

        Raises:
            HolderLostError: the process that holds a host's GPUs is gone, and with it the claim there.
            UnsatisfiableRequestError: the claim was released.
        """
        self._check_unreleased()
        self._check(self.gpus)

    def release(self) -> None:
        """Give all GPUs back; safe to call twice."""
        if not self._released:
            self._released = True
            _live.discard(self)
            self._release()

    def _known(self, gpu: ClusterGpu) -> ClusterGpu:
        """That GPU of ours; whoever passes another one has mixed up two claims."""
        if gpu not in self.gpus:
            raise UnsatisfiableRequestError(f"{gpu!r} is no GPU of {self!r}: pass one of claim.gpus", value=gpu)
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


# Engines end what nobody refers to any more (Ray an actor, Dragon a queue), and a claim is not to end that way.
_live: set[ClusterClaim] = set()
