"""From claimed GPUs to this process's CPUs: plan over the whole host, cut to the mask, bind.

Cores are divided among all GPUs of the host and over all its CPUs, and only then cut to the mask of the process. Two
jobs that never heard of each other get disjoint cores that way, whatever their masks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..errors import GPUAffinityError
from .binding import BindingReport, PartReport, bind_process, enter, leave, original_mask
from .cpulist import format_cpulist
from .near import fsroot_or_default, node_cpus_of
from .options import AffinityOptions

if TYPE_CHECKING:
    from ..devices import Gpu
    from ..drivers.base import Driver
    from .topology import HostTopology

__all__ = [
    "ClaimShares",
    "bind_claim",
    "bind_near",
    "claim_shares",
    "memory_nodes",
    "nodes_of_cpus",
    "split_share",
    "undo_binding",
]


class ClaimShares(NamedTuple):
    """The CPUs of a claim.

    Attributes:
        cpus: what the process is bound to: the union of the shares.
        shares: GPU index to its CPUs; a GPU without a CPU in the mask has all of ``cpus``.
        notes: sentences for the report: shares that are remote, a mask that had to serve as the share.
    """

    cpus: frozenset[int]
    shares: dict[int, frozenset[int]]
    notes: tuple[str, ...] = ()


def claim_shares(
    topology: HostTopology, options: AffinityOptions, gpus: Iterable[int], mask: Iterable[int]
) -> ClaimShares:
    """The CPUs of a claim of ``gpus`` (indices) by a process that may use the CPUs in ``mask``.

    Never wider than the mask, never empty: where the mask has none of the shares' CPUs, it is the share itself.

    Raises:
        GPUAffinityError: this host cannot be divided so (fewer cores than GPUs), an unknown GPU, or an empty mask.
    """
    from .policies import is_remote, plan

    everyone = sorted(topology.gpus, key=lambda gpu: gpu.index)
    places = {gpu.index: gpu for gpu in everyone}
    chosen = [topology.gpu(index) for index in gpus]
    planned = plan(
        topology,
        mode=options.mode,
        scope=options.scope,
        multithreading=options.multithreading,
        balanced=options.balanced,
        min_physical_cores=options.min_physical_cores,
        max_physical_cores=options.max_physical_cores,
    )
    found = _cut({gpu.index: share for gpu, share in zip(everyone, planned, strict=True) if gpu in chosen}, mask)
    remote = (
        (index, f"CPUs {format_cpulist(share)} are remote to {{}} (on {_node_name(topology, index)})")
        for index, share in found.shares.items()
        if is_remote(topology, places[index], share)
    )
    return ClaimShares(found.cpus, found.shares, (*found.notes, *_notes(remote)))


def _notes(said: Iterable[tuple[int, str]]) -> list[str]:
    """One sentence for all GPUs of which the same is to be said, in the place of its braces."""
    gpus: dict[str, list[int]] = {}
    for index, sentence in said:
        gpus.setdefault(sentence, []).append(index)
    return [
        sentence.format(f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}")
        for sentence, indices in gpus.items()
    ]


def _node_name(topology: HostTopology, index: int) -> str:
    gpu = topology.gpu(index)
    node = topology.node_of(gpu)
    return f"CPUs {format_cpulist(topology.node_set(gpu))}" if node is None else f"NUMA node {node}"


def _cut(planned: dict[int, frozenset[int]], mask: Iterable[int]) -> ClaimShares:
    whole = frozenset(mask)
    if not whole:
        raise GPUAffinityError("the mask of allowed CPUs is empty")
    cut = {index: share & whole for index, share in planned.items()}
    cpus = frozenset[int]().union(*cut.values())
    rest = f"claim's other CPUs {format_cpulist(cpus)}" if cpus else f"whole mask {format_cpulist(whole)}"
    notes = _notes(
        (index, f"this process may use none of the CPUs {format_cpulist(share)} of {{}}, so the {rest} must do")
        for index, share in planned.items()
        if not cut[index]
    )
    cpus = cpus or whole
    return ClaimShares(cpus, {index: share or cpus for index, share in cut.items()}, tuple(notes))


def memory_nodes(topology: HostTopology, gpus: Iterable[int]) -> frozenset[int]:
    """The NUMA nodes of some GPUs, for a memory policy; a GPU whose place is unknown adds none."""
    nodes = (topology.node_of(topology.gpu(index)) for index in gpus)
    return frozenset(node for node in nodes if node is not None)


def bind_near(
    gpus: Sequence[Gpu],
    driver: Driver,
    *,
    options: AffinityOptions | None,
    memory: str | None = None,
    strict: bool = True,
    fsroot: str | None = None,
) -> BindingReport:
    """Bind this process next to some GPUs, starting from the mask before any earlier binding.

    Args:
        gpus: devices as the driver's snapshot has them; a MIG instance stands where its parent does.
        options: which CPUs; None leaves the threads alone.
        memory: None, "preferred" or "bind".
        strict: False puts into the report what would raise.

    Raises:
        GPUAffinityError: the CPUs cannot be planned or bound (unless not ``strict``).
    """
    try:
        return _bind_near(gpus, driver, options, memory, fsroot)
    except GPUAffinityError as err:
        if strict:
            raise
        return BindingReport(frozenset(os.sched_getaffinity(0)), PartReport(refused=(str(err),)), memory_mode=memory)


def _bind_near(
    gpus: Sequence[Gpu], driver: Driver, options: AffinityOptions | None, memory: str | None, fsroot: str | None
) -> BindingReport:
    if not gpus:
        raise GPUAffinityError("there is no GPU to bind next to: claim one, or name some")
    mask = original_mask()
    indices = list(dict.fromkeys(gpu.index for gpu in gpus))
    if options is not None and options.mode == "node" and memory is None:
        near = {gpu.index: node_cpus_of(gpu, driver, fsroot) for gpu in gpus}
        told = {index: found[0] for index, found in near.items() if found is not None}
        if len(told) == len(indices):  # the whole host need not be read
            shares = _cut(told, mask)
            remote = (
                (index, f"CPUs {format_cpulist(share)} are remote to {{}}")
                for index, share in shares.shares.items()
                if not share & told[index]
            )
            return bind_process(shares.cpus, notes=(*shares.notes, *_notes(remote)))
    from .topology import HostTopology

    topology = HostTopology.from_host(fsroot, driver)
    nodes = memory_nodes(topology, indices) if memory is not None else frozenset[int]()
    if options is None:
        return bind_process(None, nodes, memory)
    shares = claim_shares(topology, options, indices, mask)
    return bind_process(shares.cpus, nodes, memory, notes=shares.notes)


def bind_claim(
    gpus: Sequence[Gpu], driver: Driver, *, options: AffinityOptions | None, memory: str | None = None
) -> BindingReport:
    """:func:`bind_near` for a claim: :func:`undo_binding` comes back to the moment of this call.

    Raises:
        GPUAffinityError: as there; everything is as before then.
    """
    enter()
    try:
        return bind_near(gpus, driver, options=options, memory=memory)
    except BaseException:
        leave()
        raise


undo_binding = leave
"""Every thread and the memory policy as they were before the latest :func:`bind_claim`."""


def nodes_of_cpus(cpus: Iterable[int], driver: Driver, fsroot: str | None = None) -> frozenset[int] | None:
    """The NUMA nodes that some CPUs are on, reading node lists only; None where the kernel tells of none."""
    from .sysfs import Tree

    wanted = frozenset(cpus)
    root = fsroot_or_default(fsroot)
    own = driver.host_topology() if root == "/" else None
    if own is not None:
        by_node = dict(own.nodes)
    else:
        tree = Tree(root)
        by_node = {node: tree.node_cpus(node) for node in tree.node_ids()}
    return frozenset(node for node, near in by_node.items() if near & wanted) or None


def split_share(cpus: Iterable[int], topology: HostTopology, n: int) -> list[frozenset[int]]:
    """A share in ``n`` parts of whole physical cores, for more workers than GPUs (or DataLoader workers).

    Contiguous like ``exclusive``: the first parts have one core more where it does not divide.

    Raises:
        GPUAffinityError: ``n`` is no positive number, or there are fewer physical cores than that.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise GPUAffinityError(f"a share can be split among 1 worker or more, not {n!r}")
    left = set(cpus)
    cores = []
    for core in sorted(topology.cores, key=min):
        if mine := core & left:
            cores.append(mine)
            left -= mine
    cores += [frozenset([cpu]) for cpu in sorted(left)]
    if len(cores) < n:
        raise GPUAffinityError(
            f"{n} workers cannot have a physical core each: CPUs {format_cpulist(cpus)} are {len(cores)}; "
            "start fewer workers, or let them share"
        )
    each, more = divmod(len(cores), n)
    parts = []
    start = 0
    for nth in range(n):
        end = start + each + (nth < more)
        parts.append(frozenset[int]().union(*cores[start:end]))
        start = end
    return parts
