"""The driver's side of a claim across hosts: chooses nodes, and claims on all of them or on none, without deadlock.

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

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from ..errors import (
    ClaimTimeout,
    HolderLostError,
    NotEnoughGpusError,
    SafeGpuError,
    UnsatisfiableRequestError,
    package_logger,
)
from .connection import Holder
from .holder import ClusterGpu, HostReport

# Seconds for a release or a ping, which normally take milliseconds.
ANSWER_LIMIT = 30.0

# Seconds for a holder to start. It imports Python modules first, perhaps from a slow network file system.
_START_LIMIT = 120.0


class NodeFacts(NamedTuple):
    """A live node of an engine: its names, the host name first, and whether the engine sees GPUs there."""

    names: tuple[str, ...]
    has_gpus: bool


def choose_nodes(nodes: int | Sequence[Any], alive: Mapping[str, NodeFacts], engine: str) -> tuple[list[str], int]:
    """Return the ids of the candidate nodes, and the number of nodes that the claim needs.

    Args:
        nodes: the number of nodes, or a list of node ids or names.
        alive: all live nodes by id, in the engine's order.
        engine: for messages, "the Ray cluster".

    Returns:
        For a list, its nodes in that order. For a number, all nodes with GPUs, or all nodes if those are too few.

    Raises:
        UnsatisfiableRequestError: there are too few nodes, or a name fits no node, several, or one already named.
    """
    if not nodes or isinstance(nodes, bool) or (isinstance(nodes, int) and nodes < 1):
        raise UnsatisfiableRequestError(f"nodes={nodes!r} names no node: ask for 1 node or more", value=nodes)
    if not isinstance(nodes, int):
        named = [nodes] if isinstance(nodes, str) else [str(node) for node in nodes]
        chosen = [_node_named(name, alive) for name in named]
        if len(set(chosen)) < len(chosen):
            problem = f"a node is named twice in nodes={named}: each node can be claimed once"
            raise UnsatisfiableRequestError(problem, value=nodes)
        return chosen, len(chosen)
    if nodes > len(alive):
        names = ", ".join(facts.names[0] for facts in alive.values())
        problem = f"{nodes} nodes asked for, and {engine} has {len(alive)}: {names}"
        raise UnsatisfiableRequestError(problem, value=nodes)
    with_gpus = [node for node, facts in alive.items() if facts.has_gpus]
    return (with_gpus if len(with_gpus) >= nodes else list(alive)), nodes


def _node_named(name: str, alive: Mapping[str, NodeFacts]) -> str:
    """Return the id of the node that has this id or name."""
    fitting = [node for node, facts in alive.items() if name == node or name in facts.names]
    if len(fitting) == 1:
        return fitting[0]
    what = "no live node" if not fitting else f"{len(fitting)} nodes, name one by its id"
    known = ", ".join(sorted(facts.names[0] for facts in alive.values())) or "none"
    raise UnsatisfiableRequestError(f"{name!r} is {what}; live nodes: {known}", value=name)


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
    deadline = math.inf if timeout is None else clock() + timeout
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
            left = deadline - clock()
            if timeout is not None and left <= 0:
                late = ClaimTimeout(
                    refusal.message, nb_gpus=refusal.nb_gpus, verdicts=refusal.verdicts, timeout=timeout
                )
                late.__dict__["host"] = busy.holder.host  # the message names it already
                raise late
            if on_wait is not None:
                on_wait(busy.holder.host, refusal)
            busy.begin(None if timeout is None else left)
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
    return [grants[order.index(number)] for number in range(len(claimers))]


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
    _, lost = _ask(behind, ANSWER_LIMIT, "release")
    if lost is not None:
        raise lost
    return grants, refusal


def claim_through(
    holders: Sequence[Holder],
    nodes: int,
    gpus_per_node: int,
    timeout: float | None,
    logger: Any = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[ClusterGpu, Any]:
    """Claim on ``nodes`` of the nodes that have a holder; nodes with enough free GPUs are preferred.

    Returns:
        The GPUs with their holders, node by node in the order of ``holders``. The other holders have been ended.

    Raises:
        SafeGpuError: see :func:`claim_on_all`. All holders have been ended then.
    """
    keep: set[Holder] = set()
    try:
        reports, lost = _ask(holders, _START_LIMIT, "report", gpus_per_node if len(holders) > nodes else 0)
        if lost is not None and len(reports) < nodes:  # a holder that did not start is left out if enough others did
            raise lost
        claimers = _best(reports, nodes, gpus_per_node)
        on_wait = partial((logger or package_logger()).info, "Waiting for GPUs on %s: %s")
        held: dict[ClusterGpu, Any] = {}
        for claimer, grant in zip(claimers, claim_on_all(claimers, timeout, on_wait=on_wait, clock=clock), strict=True):
            for nth, gpu in enumerate(grant):
                member = claimer.members[nth // gpus_per_node]
                held[replace(gpu, host=member.host, node_id=member.node_id)] = claimer.holder
        order = {holder.node_id: number for number, holder in enumerate(holders)}
        held = dict(sorted(held.items(), key=lambda item: order[item[0].node_id]))
        keep = set(held.values())
        return held
    finally:
        for holder in holders:
            if holder not in keep:
                holder.end()


def _ask(
    holders: Collection[Holder], limit: float, method: str, *arguments: Any
) -> tuple[dict[Holder, Any], HolderLostError | None]:
    """Return the answers of holders that are asked at the same time, and the error of the first one that is lost."""
    answers: dict[Holder, Any] = {}
    lost: HolderLostError | None = None
    for holder in holders:
        holder.call(method, *arguments)
    for holder in holders:
        try:
            answers[holder] = holder.answer(limit)
        except HolderLostError as err:
            lost = lost or err
    return answers, lost


def _best(reports: Mapping[Holder, HostReport], nodes: int, gpus_per_node: int) -> list[HostClaim]:
    """Return the claims on the best nodes: first those with enough free GPUs, by fewest free GPUs, which keeps room for
    large requests; then the others, by most free GPUs."""

    def key(holder: Holder) -> tuple[int, int]:
        free = reports[holder].free
        return (0, free) if free >= gpus_per_node else (1, -free)

    best = sorted(reports, key=key)[:nodes]
    hosts: dict[tuple[str, ...], list[Holder]] = {}
    for holder, report in reports.items():
        if holder in best:
            hosts.setdefault(report.rank, []).append(holder)
    return [HostClaim(members, rank, gpus_per_node * len(members)) for rank, members in hosts.items()]


class ClusterClaim:
    """GPUs on one host or several, held from the claim to :meth:`release`, the end of ``with``, or exit.

    Deleting the last reference to the object does not release the GPUs.

    Attributes:
        gpus: the held GPUs, host by host in the order of ``nodes``, by index within each host.
    """

    def __init__(self, held: Mapping[ClusterGpu, Holder], memory: str | None = None) -> None:
        self._memory = memory  # the policy of the workers
        self.gpus = tuple(held)
        self._holders = dict(held)
        self._calls = Lock()
        _live.add(self)

    def __enter__(self) -> "ClusterClaim":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "" if self in _live else " released"
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
        self._check(self.gpus)

    def release(self) -> None:
        """Release all GPUs; safe to call twice."""
        if self not in _live:
            return
        _live.discard(self)
        holders = dict.fromkeys(self._holders.values())
        with self._calls:
            try:
                _ask(holders, ANSWER_LIMIT, "release")  # a lost holder's locks were released when it exited
            finally:
                for holder in holders:
                    holder.end()

    def checked(self, gpu: ClusterGpu) -> ClusterGpu:
        """Return the GPU itself, if it belongs to this claim and is still held."""
        if gpu not in self.gpus:
            raise UnsatisfiableRequestError(f"{gpu!r} is not a GPU of {self!r}: pass one of claim.gpus", value=gpu)
        self._check((gpu,))
        return gpu

    def _check_unreleased(self) -> None:
        if self not in _live:
            raise UnsatisfiableRequestError(f"{self!r} holds nothing any more: claim again")

    def _check(self, gpus: Sequence[ClusterGpu]) -> None:
        self._check_unreleased()
        with self._calls:
            _, lost = _ask(dict.fromkeys(self._holders[gpu] for gpu in gpus), ANSWER_LIMIT, "ping")
        if lost is not None:
            raise lost


# References to all claims that are held: a connection to which there is no reference left is closed, and that must not
# end a claim.
_live: set[ClusterClaim] = set()
