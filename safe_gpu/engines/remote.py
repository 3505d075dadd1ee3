"""The driver's side of a claim across hosts, the same for every engine: from holders on nodes to GPUs that are held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar

from ..errors import HolderLostError, NotEnoughGpusError, SafeGpuError, UnsatisfiableRequestError
from .cluster import ClusterClaim, ClusterGpu, claim_on_all
from .holder import HostReport

__all__ = ["HeldClaim", "RemoteHolder", "claim_through", "nodes_named"]

# A cold node imports Python first, from a network file system perhaps; one that needs longer will not do it.
_START_LIMIT = 120.0
# To give back and to answer takes milliseconds.
_ANSWER_LIMIT = 30.0


class RemoteHolder(Protocol):
    """A :class:`~safe_gpu.engines.holder.Holder` on some node. One call at a time, each followed by its answer."""

    @property
    def host(self) -> str:
        """The host's name, as the engine knows it."""

    @property
    def node_id(self) -> str:
        """The engine's own id of the node."""

    def call(self, method: str, *arguments: Any) -> None:
        """Start a method of the holder."""

    def answer(self, limit: float | None) -> Any:
        """What the method returned.

        Raises:
            HolderLostError: the holder is gone, or did not answer within ``limit`` seconds.
        """

    def end(self) -> None:
        """End the holder, whatever it is doing, and with it what it holds. Safe to call twice."""


_HolderT = TypeVar("_HolderT", bound=RemoteHolder)


def nodes_named(names: Sequence[str], nodes: Mapping[str, Sequence[str]]) -> list[str]:
    """Node ids for what a user called nodes.

    Args:
        names: each the id, or one of the other names, of one node.
        nodes: all nodes, id -> other names.

    Raises:
        UnsatisfiableRequestError: a name fits no node or several, or a node is named twice.
    """
    chosen: list[str] = []
    known = ", ".join(sorted(others[0] for others in nodes.values())) or "none"
    for name in names:
        fitting = [node for node, others in nodes.items() if name == node or name in others]
        if len(fitting) != 1:
            what = "no live node" if not fitting else f"{len(fitting)} nodes, name one by its id"
            raise UnsatisfiableRequestError(f"{name!r} is {what}; live nodes: {known}", value=name)
        if fitting[0] in chosen:
            raise UnsatisfiableRequestError(
                f"{name!r} is named twice in nodes: each node can be claimed once", value=name
            )
        chosen += fitting
    return chosen


def claim_through(
    holders: Sequence[_HolderT], nodes: int, gpus_per_node: int, timeout: float | None, logger: Any = None
) -> dict[ClusterGpu, _HolderT]:
    """Claim on ``nodes`` of the nodes that have a holder; where there is a choice, those with enough free GPUs first.

    Returns:
        The GPUs, node by node in the order of ``holders``, each with the holder that holds it.

    Raises:
        SafeGpuError: see :func:`~safe_gpu.engines.cluster.claim_on_all`. Holders that hold nothing have been ended.
    """
    keep: list[_HolderT] = []
    try:
        chosen = _best(_reports(holders, nodes, gpus_per_node), nodes, gpus_per_node)
        claimers = _one_per_host(chosen, gpus_per_node)
        if logger is None:
            import logging

            logger = logging.getLogger("safe_gpu")

        def on_wait(host: str, refusal: NotEnoughGpusError) -> None:
            logger.info("Waiting for GPUs on %s: %s", host, refusal)

        held: dict[ClusterGpu, _HolderT] = {}
        for claimer, grant in zip(claimers, claim_on_all(claimers, timeout, on_wait=on_wait), strict=True):
            for nth, gpu in enumerate(grant):
                member = claimer.members[nth // gpus_per_node]
                held[replace(gpu, host=member.host, node_id=member.node_id)] = claimer.holder
        order = [holder.node_id for holder in holders]
        held = dict(sorted(held.items(), key=lambda item: order.index(item[0].node_id)))
        keep = list(held.values())
        return held
    finally:
        for holder in holders:
            if holder not in keep:
                holder.end()


def _reports(holders: Sequence[_HolderT], nodes: int, gpus_per_node: int) -> dict[_HolderT, HostReport]:
    """What holders find, those that could not start left out where others do."""
    count_for = gpus_per_node if len(holders) > nodes else 0
    reports: dict[_HolderT, HostReport] = {}
    lost: HolderLostError | None = None
    for holder in holders:
        holder.call("report", count_for)
    for holder in holders:
        try:
            reports[holder] = holder.answer(_START_LIMIT)
        except HolderLostError as err:
            lost = err
    if len(reports) < nodes:
        assert lost is not None
        raise lost
    return reports


def _best(reports: Mapping[_HolderT, HostReport], nodes: int, gpus_per_node: int) -> dict[_HolderT, HostReport]:
    """Nodes that can deliver now, the fullest first so that large requests still find room; then the emptiest."""

    def key(holder: _HolderT) -> tuple[int, int]:
        free = reports[holder].free
        return (0, free) if free >= gpus_per_node else (1, -free)

    best = reports if len(reports) <= nodes else sorted(reports, key=key)[:nodes]
    return {holder: report for holder, report in reports.items() if holder in best}


def _one_per_host(chosen: Mapping[_HolderT, HostReport], gpus_per_node: int) -> list[_Claimer[_HolderT]]:
    """Nodes that are one host (an engine may run several there) make one claim, or two could wait for each other."""
    groups: dict[tuple[str, ...], list[_HolderT]] = {}
    for holder, report in chosen.items():
        groups.setdefault(report.rank, []).append(holder)
    return [_Claimer(members, rank, gpus_per_node * len(members)) for rank, members in groups.items()]


class _Claimer(Generic[_HolderT]):
    """A :class:`~safe_gpu.engines.cluster.HostClaimer`: the first of the nodes that are this host claims for all."""

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
    """A claim that holders hold."""

    def __init__(self, held: Mapping[ClusterGpu, _HolderT]) -> None:
        super().__init__(tuple(held))
        self._holders = dict(held)
        self._talking = Lock()

    def _check(self, gpus: Sequence[ClusterGpu]) -> None:
        holders = list(dict.fromkeys(self._holders[gpu] for gpu in gpus))
        with self._talking:
            for holder in holders:
                holder.call("ping")
            lost: HolderLostError | None = None
            for holder in holders:
                try:
                    holder.answer(_ANSWER_LIMIT)
                except HolderLostError as err:
                    lost = lost or err
        if lost is not None:
            raise lost

    def _release(self) -> None:
        holders = list(dict.fromkeys(self._holders.values()))
        with self._talking:
            for holder in holders:
                holder.call("release")
            for holder in holders:
                try:
                    holder.answer(_ANSWER_LIMIT)
                except HolderLostError:
                    pass  # what it held went with it
                finally:
                    holder.end()
