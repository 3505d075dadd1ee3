"""The driver's side of a claim across hosts: chooses nodes and claims GPUs through their holders, for every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..errors import HolderLostError, SafeGpuError, UnsatisfiableRequestError, package_logger
from .cluster import ClusterClaim, ClusterGpu, claim_on_all
from .holder import HostReport

# Seconds for a holder to start. It imports Python modules first, perhaps from a slow network file system.
_START_LIMIT = 120.0
# Seconds for a release or a ping, which normally take milliseconds.
_ANSWER_LIMIT = 30.0


class RemoteHolder(Protocol):
    """A :class:`~safe_gpu.engines.holder.HolderProcess` on a node. Each ``call`` must be followed by its ``answer``."""

    @property
    def host(self) -> str:
        """The engine's name of the host."""

    @property
    def node_id(self) -> str:
        """The engine's id of the node."""

    def call(self, method: str, *arguments: Any) -> None:
        """Start a method of the holder."""

    def answer(self, limit: float | None) -> Any:
        """Return the result of the method.

        Raises:
            HolderLostError: the holder has exited, or did not answer within ``limit`` seconds.
        """

    def end(self) -> None:
        """End the holder in any state, which releases what it holds. Safe to call twice."""


def holder_exited(host: str, said: str = "") -> HolderLostError:
    """Return the error of a claim whose GPUs on a host nobody holds any more; ``said`` is the engine's word, in
    brackets."""
    return HolderLostError(
        f"{host}: the process that held the GPUs there has exited, and others may have taken them: claim again{said}",
        host=host,
    )


def holder_is_mute(host: str, limit: float) -> HolderLostError:
    """Return the error of a holder that did not answer within this number of seconds."""
    return HolderLostError(
        f"{host}: the holder does not answer within {limit:g} s; is the node overloaded or cut off?", host=host
    )


_HolderT = TypeVar("_HolderT", bound=RemoteHolder)


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
        chosen = nodes_named(named, {node: facts.names for node, facts in alive.items()})
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


def nodes_named(names: Sequence[str], nodes: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the node ids for names given by a user.

    Args:
        names: for each node its id or one of its names.
        nodes: all nodes, id -> names.

    Raises:
        UnsatisfiableRequestError: a name fits no node or several, or a node is named twice.
    """
    by_name: dict[str, list[str]] = {}
    for node, others in nodes.items():
        for name in {node, *others}:
            by_name.setdefault(name, []).append(node)
    chosen: dict[str, None] = {}
    known = ", ".join(sorted(others[0] for others in nodes.values())) or "none"
    for name in names:
        fitting = by_name.get(name, [])
        if len(fitting) != 1:
            what = "no live node" if not fitting else f"{len(fitting)} nodes, name one by its id"
            raise UnsatisfiableRequestError(f"{name!r} is {what}; live nodes: {known}", value=name)
        if fitting[0] in chosen:
            raise UnsatisfiableRequestError(
                f"{name!r} is named twice in nodes: each node can be claimed once", value=name
            )
        chosen[fitting[0]] = None
    return list(chosen)


def claim_through(
    holders: Sequence[_HolderT],
    nodes: int,
    gpus_per_node: int,
    timeout: float | None,
    logger: Any = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> dict[ClusterGpu, _HolderT]:
    """Claim on ``nodes`` of the nodes that have a holder; nodes with enough free GPUs are preferred.

    Returns:
        The GPUs with their holders, node by node in the order of ``holders``. The other holders have been ended.

    Raises:
        SafeGpuError: see :func:`~safe_gpu.engines.cluster.claim_on_all`. All holders have been ended then.
    """
    keep: set[_HolderT] = set()
    try:
        reports, lost = _ask(holders, _START_LIMIT, "report", gpus_per_node if len(holders) > nodes else 0)
        if lost is not None and len(reports) < nodes:  # a holder that did not start is left out if enough others did
            raise lost
        chosen = _best(reports, nodes, gpus_per_node)
        claimers = _one_per_host(chosen, gpus_per_node)
        if logger is None:
            logger = package_logger()

        on_wait = partial(logger.info, "Waiting for GPUs on %s: %s")
        held: dict[ClusterGpu, _HolderT] = {}
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
    holders: Collection[_HolderT], limit: float, method: str, *arguments: Any
) -> tuple[dict[_HolderT, Any], HolderLostError | None]:
    """Return the answers of holders that are asked at the same time, and the error of the first one that is lost."""
    answers: dict[_HolderT, Any] = {}
    lost: HolderLostError | None = None
    for holder in holders:
        holder.call(method, *arguments)
    for holder in holders:
        try:
            answers[holder] = holder.answer(limit)
        except HolderLostError as err:
            lost = lost or err
    return answers, lost


def _best(reports: Mapping[_HolderT, HostReport], nodes: int, gpus_per_node: int) -> dict[_HolderT, HostReport]:
    """Return the best nodes: first those with enough free GPUs, by fewest free GPUs, which keeps room for large
    requests; then the others, by most free GPUs."""

    def key(holder: _HolderT) -> tuple[int, int]:
        free = reports[holder].free
        return (0, free) if free >= gpus_per_node else (1, -free)

    best = sorted(reports, key=key)[:nodes]
    return {holder: report for holder, report in reports.items() if holder in best}


def _one_per_host(chosen: Mapping[_HolderT, HostReport], gpus_per_node: int) -> list[_Claimer[_HolderT]]:
    """Return one claimer for each host. An engine may run several nodes on one host; two claims there could
    deadlock."""
    groups: dict[tuple[str, ...], list[_HolderT]] = {}
    for holder, report in chosen.items():
        groups.setdefault(report.rank, []).append(holder)
    return [_Claimer(members, rank, gpus_per_node * len(members)) for rank, members in groups.items()]


class _Claimer(Generic[_HolderT]):
    """A :class:`~safe_gpu.engines.cluster.HostClaimer`: the holder of a host's first node claims for all of them."""

    def __init__(self, members: list[_HolderT], rank: tuple[str, ...], nb_gpus: int) -> None:
        self.members = members
        self.holder = members[0]
        self.host = members[0].host
        self.rank = rank
        self._nb_gpus = nb_gpus

    def begin(self, timeout: float | None) -> None:
        self.holder.call("claim", self._nb_gpus, timeout)

    def outcome(self) -> tuple[ClusterGpu, ...]:
        result = self.holder.answer(None)
        if isinstance(result, SafeGpuError):
            raise result
        assert isinstance(result, tuple)
        return result

    def give_back(self) -> None:
        self.holder.call("release")

    def given_back(self) -> None:
        self.holder.answer(_ANSWER_LIMIT)

    def abandon(self) -> None:
        self.holder.end()


class HeldClaim(ClusterClaim, Generic[_HolderT]):
    """A claim whose GPUs are held by holders on nodes."""

    def __init__(self, held: Mapping[ClusterGpu, _HolderT]) -> None:
        super().__init__(tuple(held))
        self._holders = dict(held)
        self._calls = Lock()

    def _check(self, gpus: Sequence[ClusterGpu]) -> None:
        with self._calls:
            _, lost = _ask(dict.fromkeys(self._holders[gpu] for gpu in gpus), _ANSWER_LIMIT, "ping")
        if lost is not None:
            raise lost

    def _release(self) -> None:
        holders = dict.fromkeys(self._holders.values())
        with self._calls:
            try:
                _ask(holders, _ANSWER_LIMIT, "release")  # a lost holder's locks were released when it exited
            finally:
                for holder in holders:
                    holder.end()
