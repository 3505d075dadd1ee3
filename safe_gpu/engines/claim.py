"""The program's side of a claim across hosts: chooses nodes, and claims on all of them or on none, without deadlock.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
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
from .connection import RemoteHolder
from .holder import ClusterGpu, HostReport

# Seconds for a release or a ping, which normally take milliseconds.
ANSWER_LIMIT = 30.0

# Seconds for a holder to start. It imports Python modules first, perhaps from a slow network file system.
_START_LIMIT = 120.0


class NodeFacts(NamedTuple):
    """A live node of an engine: its names, the host name first, and whether the engine sees GPUs there."""

    names: tuple[str, ...]
    has_gpus: bool


class CandidateNodes(NamedTuple):
    """The ids of the nodes that may take part, and the number of nodes that the claim needs."""

    ids: list[str]
    needed: int


def choose_nodes(nodes: int | Sequence[Any], alive: Mapping[str, NodeFacts], engine: str) -> CandidateNodes:
    """Return the nodes that may take part: for a list, its nodes in that order; for a number, all nodes with GPUs, or
    all nodes if those are too few.

    Args:
        nodes: the number of nodes, or a list of node ids or names.
        alive: all live nodes by id, in the engine's order.
        engine: for messages, "the Ray cluster".

    Raises:
        UnsatisfiableRequestError: there are too few nodes, or a name fits no node, several, or one already named.
    """
    if not nodes or isinstance(nodes, bool) or (isinstance(nodes, int) and nodes < 1):
        raise UnsatisfiableRequestError(f"nodes={nodes!r} names no node: ask for 1 node or more", value=nodes)
    if not isinstance(nodes, int):
        return _named_nodes(nodes, alive)
    if nodes > len(alive):
        names = ", ".join(facts.names[0] for facts in alive.values())
        problem = f"{nodes} nodes asked for, and {engine} has {len(alive)}: {names}"
        raise UnsatisfiableRequestError(problem, value=nodes)
    with_gpus = [node for node, facts in alive.items() if facts.has_gpus]
    if len(with_gpus) >= nodes:
        return CandidateNodes(with_gpus, nodes)
    return CandidateNodes(list(alive), nodes)


def _named_nodes(nodes: Sequence[Any], alive: Mapping[str, NodeFacts]) -> CandidateNodes:
    if isinstance(nodes, str):
        names = [nodes]
    else:
        names = [str(node) for node in nodes]
    ids = [_id_of_node(name, alive) for name in names]
    if len(set(ids)) < len(ids):
        problem = f"a node is named twice in nodes={names}: each node can be claimed once"
        raise UnsatisfiableRequestError(problem, value=nodes)
    return CandidateNodes(ids, len(ids))


def _id_of_node(name: str, alive: Mapping[str, NodeFacts]) -> str:
    """Return the id of the node that has this id or name."""
    fitting = [node for node, facts in alive.items() if name == node or name in facts.names]
    if len(fitting) == 1:
        return fitting[0]
    problem = "no live node"
    if fitting:
        problem = f"{len(fitting)} nodes, name one by its id"
    known = ", ".join(sorted(facts.names[0] for facts in alive.values())) or "none"
    raise UnsatisfiableRequestError(f"{name!r} is {problem}; live nodes: {known}", value=name)


_ErrorT = TypeVar("_ErrorT", bound=SafeGpuError)


class HostClaim(NamedTuple):
    """The claim on one host: the holder of its first node claims for all of them. An engine may run several nodes on
    one host, and two claims there could deadlock.

    Attributes:
        members: the holders of its nodes.
        rank: the sort key of this host: different for different hosts, the same for every claim.
        nb_gpus: how many GPUs are wanted there.
    """

    members: Sequence[RemoteHolder]
    rank: tuple[str, ...]
    nb_gpus: int

    @property
    def holder(self) -> RemoteHolder:
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


class _Deadline:
    """The one deadline of a claim on all hosts.

    Attributes:
        timeout: the seconds from now until the deadline; None is without limit.
    """

    def __init__(self, timeout: float | None, clock: Callable[[], float]) -> None:
        self.timeout = timeout
        self._clock = clock
        self._start = clock()

    def left(self) -> float | None:
        """Return the seconds that are left, None without limit."""
        if self.timeout is None:
            return None
        return self._start + self.timeout - self._clock()


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
    in_order = sorted(claimers, key=lambda claimer: claimer.rank)
    deadline = _Deadline(timeout, clock)
    grants: list[Any] = []  # of the first hosts in the order, which stay held
    try:
        while len(grants) < len(in_order):
            ahead = in_order[len(grants) :]
            if timeout == 0 and not grants:
                ahead = ahead[:1]  # it cannot try again after a conflict, see above
            tried = _try(ahead)
            grants += tried.grants
            if tried.refusal is not None:
                busy = in_order[len(grants)]
                grants.append(_wait_for(busy, tried.refusal, deadline, on_wait))
    except BaseException:
        for claimer in claimers:
            claimer.holder.end()
        raise
    grant_of = {claimer.rank: grant for claimer, grant in zip(in_order, grants, strict=True)}
    return [grant_of[claimer.rank] for claimer in claimers]


class _Tried(NamedTuple):
    """What hosts say that were tried at the same time.

    Attributes:
        grants: of the hosts before the first busy one; they are held.
        refusal: of the first busy host; None if all granted.
    """

    grants: list[Any]
    refusal: NotEnoughGpusError | None


def _try(ahead: Sequence[HostClaim]) -> _Tried:
    """Try hosts at the same time, and keep those before the first busy one."""
    for claimer in ahead:
        claimer.begin(0)
    grants: list[Any] = []
    refusal: NotEnoughGpusError | None = None
    error: SafeGpuError | None = None
    behind: list[RemoteHolder] = []  # hosts that granted, but come after the first busy one
    for claimer in ahead:
        try:
            grant = claimer.outcome()
        except NotEnoughGpusError as err:
            if refusal is None:
                refusal = err
        except SafeGpuError as err:
            if error is None:
                error = err
        else:
            if refusal is None:
                grants.append(grant)
            else:
                behind.append(claimer.holder)
    if error is not None:  # waiting for the busy hosts cannot help
        raise error
    released = _ask(behind, ANSWER_LIMIT, "release")
    if released.lost is not None:
        raise released.lost
    return _Tried(grants, refusal)


def _wait_for(
    busy: HostClaim,
    refusal: NotEnoughGpusError,
    deadline: _Deadline,
    on_wait: Callable[[str, NotEnoughGpusError], None] | None,
) -> Any:
    """Wait until a busy host grants its GPUs, and return them.

    Raises:
        NotEnoughGpusError: the refusal, if the claim does not wait; ClaimTimeout after the deadline.
        SafeGpuError: any other error of the host.
    """
    if deadline.timeout == 0:
        raise refusal
    left = deadline.left()
    if deadline.timeout is not None and left is not None and left <= 0:
        late = ClaimTimeout(
            refusal.message, nb_gpus=refusal.nb_gpus, verdicts=refusal.verdicts, timeout=deadline.timeout
        )
        late.host = busy.holder.host  # type: ignore[attr-defined]  # the message names it already
        raise late
    if on_wait is not None:
        on_wait(busy.holder.host, refusal)
    busy.begin(left)
    try:
        return busy.outcome()
    except ClaimTimeout as err:
        if deadline.timeout is not None:
            err.timeout = deadline.timeout  # the host was given only the remaining time
        raise


def claim_through(
    holders: Sequence[RemoteHolder],
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

    def tell(host: str, refusal: NotEnoughGpusError) -> None:
        log = logger or package_logger()
        log.info("Waiting for GPUs on %s: %s", host, refusal)

    kept: set[RemoteHolder] = set()
    try:
        reports = _reports(holders, nodes, gpus_per_node)
        claimers = _best(reports, nodes, gpus_per_node)
        grants = claim_on_all(claimers, timeout, on_wait=tell, clock=clock)
        held: dict[ClusterGpu, RemoteHolder] = {}
        for claimer, grant in zip(claimers, grants, strict=True):
            for nth, gpu in enumerate(grant):
                member = claimer.members[nth // gpus_per_node]
                held[replace(gpu, host=member.host, node_id=member.node_id)] = claimer.holder
        place_of = {holder.node_id: place for place, holder in enumerate(holders)}
        gpus = sorted(held, key=lambda gpu: place_of[gpu.node_id])
        kept.update(held.values())
        return {gpu: held[gpu] for gpu in gpus}
    finally:
        for holder in holders:
            if holder not in kept:
                holder.end()


def _reports(holders: Sequence[RemoteHolder], nodes: int, gpus_per_node: int) -> dict[RemoteHolder, HostReport]:
    """Return the reports of the holders that started.

    Raises:
        HolderLostError: fewer than ``nodes`` started.
    """
    count_for = 0
    if len(holders) > nodes:  # there is a choice, for which free GPUs are counted
        count_for = gpus_per_node
    reports = _ask(holders, _START_LIMIT, "report", count_for)
    if reports.lost is not None and len(reports.by_holder) < nodes:
        raise reports.lost
    return reports.by_holder


class _Answers(NamedTuple):
    """The answers of holders, and the error of the first one that is lost."""

    by_holder: dict[RemoteHolder, Any]
    lost: HolderLostError | None


def _ask(holders: Collection[RemoteHolder], limit: float, method: str, *arguments: Any) -> _Answers:
    """Ask holders at the same time; each may take ``limit`` seconds to answer."""
    by_holder: dict[RemoteHolder, Any] = {}
    lost: HolderLostError | None = None
    for holder in holders:
        holder.call(method, *arguments)
    for holder in holders:
        try:
            by_holder[holder] = holder.answer(limit)
        except HolderLostError as err:
            if lost is None:
                lost = err
    return _Answers(by_holder, lost)


def _best(reports: Mapping[RemoteHolder, HostReport], nodes: int, gpus_per_node: int) -> list[HostClaim]:
    """Return the claims on the best nodes: first those with enough free GPUs, by fewest free GPUs, which keeps room for
    large requests; then the others, by most free GPUs."""
    enough = [holder for holder in reports if reports[holder].free >= gpus_per_node]
    too_few = [holder for holder in reports if reports[holder].free < gpus_per_node]
    enough.sort(key=lambda holder: reports[holder].free)
    too_few.sort(key=lambda holder: reports[holder].free, reverse=True)
    best = [*enough, *too_few][:nodes]
    members_of_host: dict[tuple[str, ...], list[RemoteHolder]] = {}
    for holder, report in reports.items():
        if holder in best:
            members_of_host.setdefault(report.rank, []).append(holder)
    return [HostClaim(members, rank, gpus_per_node * len(members)) for rank, members in members_of_host.items()]


class ClusterClaim:
    """GPUs on one host or several, held from the claim to :meth:`release`, the end of ``with``, or exit.

    Deleting the last reference to the object does not release the GPUs.

    Attributes:
        gpus: the held GPUs, host by host in the order of ``nodes``, by index within each host.
    """

    def __init__(self, held: Mapping[ClusterGpu, RemoteHolder], memory: str | None = None) -> None:
        self._memory = memory  # the policy of the workers
        self.gpus: tuple[ClusterGpu, ...] = tuple(held)
        self._holders = dict(held)
        self._calls = Lock()
        _live.add(self)

    def __enter__(self) -> "ClusterClaim":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def __repr__(self) -> str:
        name = type(self).__name__
        if self not in _live:
            name += " released"
        gpus = ", ".join(f"{gpu.host}:{gpu.index}" for gpu in self.gpus)
        return f"<{name} {gpus}>"

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
        holders = dict.fromkeys(self._holders[gpu] for gpu in gpus)  # each once, in order
        with self._calls:
            pinged = _ask(holders, ANSWER_LIMIT, "ping")
        if pinged.lost is not None:
            raise pinged.lost


# References to all claims that are held: a connection to which there is no reference left is closed, and that must not
# end a claim.
_live: set[ClusterClaim] = set()
