"""The driver's side of a claim across hosts: chooses nodes and claims GPUs through their holders, for every engine."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

from ..errors import HolderLostError, UnsatisfiableRequestError, package_logger
from .connection import Holder
from .holder import ClusterGpu, HostReport
from .order import ANSWER_LIMIT, HostClaim, claim_on_all

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
    if not isinstance(nodes, int):
        named = [nodes] if isinstance(nodes, str) else [str(node) for node in nodes]
        if not named:
            raise UnsatisfiableRequestError("nodes=[] names no node", value=nodes)
        chosen = [_node_named(name, alive) for name in named]
        if len(set(chosen)) < len(chosen):
            problem = f"a node is named twice in nodes={named}: each node can be claimed once"
            raise UnsatisfiableRequestError(problem, value=nodes)
        return chosen, len(chosen)
    if isinstance(nodes, bool) or nodes < 1:
        raise UnsatisfiableRequestError(f"nodes={nodes!r}: ask for 1 node or more, or name them", value=nodes)
    if nodes > len(alive):
        raise UnsatisfiableRequestError(
            f"{nodes} nodes asked for, and {engine} has {len(alive)}: "
            f"{', '.join(facts.names[0] for facts in alive.values())}",
            value=nodes,
        )
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
        SafeGpuError: see :func:`~safe_gpu.engines.order.claim_on_all`. All holders have been ended then.
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
        self._released = False
        _live.add(self)

    def __enter__(self) -> "ClusterClaim":
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
        self._check(self.gpus)

    def release(self) -> None:
        """Release all GPUs; safe to call twice."""
        if self._released:
            return
        self._released = True
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
        if self._released:
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
