"""The CPUs of a process that claimed GPUs: plan over the whole host, intersect with its mask, bind.

All cores of the host but the isolated ones are divided among all its GPUs first. Only then is the share intersected
with the mask of the process. In this way two independent jobs get disjoint cores, whatever their masks are.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

from ..drivers import opened_driver
from ..drivers.base import Driver
from ..errors import GPUAffinityError
from ..gpus.devices import Gpu
from ..topology.cpulist import format_cpulist
from ..topology.host import HostTopology, read_topology
from .binding import BindingReport, bind_process, enter, leave, original_mask
from .options import AffinityOptions, as_count
from .planner import deal, divide, is_remote


class Near(NamedTuple):
    """What is next to some GPUs of a host.

    Attributes:
        topology: the host.
        cpus: those to bind to: the union of the shares; None if no threads are to be bound.
        shares: GPU index to its CPUs; a GPU without a CPU in the mask has all of ``cpus``.
        notes: sentences on what is not as asked, such as remote shares and a mask that is used as the share.
        remote: whether the mask has no CPU next to some GPU.
        nodes: the nodes for a memory policy; empty without one.
    """

    topology: HostTopology
    cpus: frozenset[int] | None = None
    shares: Mapping[int, frozenset[int]] = {}
    notes: tuple[str, ...] = ()
    remote: bool = False
    nodes: frozenset[int] = frozenset()


def claim_shares(topology: HostTopology, options: AffinityOptions, gpus: Iterable[int], mask: Iterable[int]) -> Near:
    """Return the CPUs of a claim of ``gpus`` (indices) by a process that may use the CPUs in ``mask``.

    The result is a subset of the mask and never empty: if the mask has none of a GPU's share, the CPUs of the GPU's
    node count, and without those the whole mask. Isolated CPUs are left out, unless the mask has no others.

    Raises:
        GPUAffinityError: the mode cannot divide this host (fewer cores than GPUs), a GPU is unknown, or the mask is
            empty.
    """
    usable = topology.unisolated(frozenset(mask))
    if not usable:
        raise GPUAffinityError("the mask of allowed CPUs is empty")
    chosen = {gpu.index: gpu for gpu in map(topology.gpu, gpus)}
    # In mode node a share does not depend on the other GPUs.
    taking_part = chosen.values() if options.mode == "node" else topology.gpus
    places = sorted(taking_part, key=lambda gpu: gpu.index)
    near = {gpu.index: topology.node_set(gpu) for gpu in places if gpu.is_known}
    # Isolated CPUs are dealt if the mask has no others, and to GPUs that have no others: the cut takes those away.
    dealt = usable.union(*(cpus for cpus in near.values() if cpus <= topology.isolated))
    allowed = topology.cpus - (topology.isolated - dealt) or topology.cpus
    planned = zip(places, deal(topology, places, allowed, options), strict=True)
    shares = {gpu.index: share for gpu, share in planned if gpu.index in chosen}
    lost = [index for index, share in shares.items() if share.isdisjoint(usable)]
    theirs = format_cpulist(frozenset[int]().union(*map(shares.__getitem__, lost)))
    notes = [f"this process may use none of the CPUs {theirs} of {_titled(lost)}"] if lost else []
    cut = {index: share & usable or near.get(index, share) & usable for index, share in shares.items()}
    cpus = frozenset[int]().union(*cut.values()) or usable
    found = {index: share or cpus for index, share in cut.items()}
    remote: dict[tuple[frozenset[int], str], list[int]] = {}
    for index, share in found.items():
        if is_remote(topology, chosen[index], share):
            node = topology.node_of(chosen[index])
            own = f"CPUs {format_cpulist(near[index])}" if node is None else f"NUMA node {node}"
            remote.setdefault((share, own), []).append(index)
    for (share, own), indices in remote.items():
        notes.append(f"CPUs {format_cpulist(share)} are remote to {_titled(indices)} (on {own})")
    return Near(topology, cpus, found, tuple(notes), bool(remote))


def _titled(indices: Sequence[int]) -> str:
    return f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def memory_nodes(topology: HostTopology, gpus: Iterable[int]) -> frozenset[int]:
    """Return the NUMA nodes of some GPUs, for a memory policy; a GPU whose node is unknown adds none."""
    return frozenset(node for index in gpus if (node := topology.node_of(topology.gpu(index))) is not None)


def with_memory(topology: HostTopology, nodes: Iterable[int]) -> tuple[frozenset[int], list[str]]:
    """Return the nodes for a memory policy on some nodes, and a sentence for each that has no memory: the nearest nodes
    that have some replace it."""
    nearest = {node: topology.nearest_memory(node) for node in sorted(nodes)}
    others = ((node, format_cpulist(found)) for node, found in nearest.items() if found != {node})
    notes = [f"NUMA node {node} has no memory, so that of node {other} is used" for node, other in others]
    return frozenset[int]().union(*nearest.values()), notes


def near(
    gpus: Sequence[Gpu], driver: Driver, options: AffinityOptions | None, memory: str | None, mask: Iterable[int]
) -> Near:
    """Return the CPUs and memory next to some GPUs, of a process that may use the CPUs in ``mask``.

    Args:
        gpus: devices of the driver's snapshot; a MIG instance is where its parent GPU is.
        options: how CPUs are chosen; None chooses none.
        memory: None, "preferred" or "bind".

    Raises:
        GPUAffinityError: the CPUs cannot be planned.
    """
    divided = options is not None and options.mode != "node"  # among all GPUs of the host
    topology = read_topology(None, driver, None if divided else gpus)
    indices = list(dict.fromkeys(gpu.index for gpu in gpus))
    nodes, notes = with_memory(topology, memory_nodes(topology, indices) if memory is not None else ())
    found = Near(topology)
    if options is not None:
        found = claim_shares(topology, options, indices, mask)
    return found._replace(notes=(*found.notes, *notes), nodes=nodes)


def bind_near(
    gpus: Sequence[Gpu], driver: Driver, *, options: AffinityOptions | None, memory: str | None = None
) -> BindingReport:
    """Bind this process next to some GPUs, starting from the mask before any earlier binding; arguments as of
    :func:`near`.

    Raises:
        GPUAffinityError: the CPUs cannot be planned or bound.
    """
    if not gpus:
        raise GPUAffinityError("there is no GPU to bind next to: claim one, or name some")
    there = near(gpus, driver, options, memory, original_mask())
    report = bind_process(there.cpus, there.nodes, memory, lacks=there.notes)
    # The CPUs and nodes of a made-up host are not those of this machine.
    return report._replace(as_asked=True) if driver.is_simulated else report._replace(remote=there.remote)


def bind_node(node: int, *, cpus: bool = True, memory: str | None = None) -> BindingReport:
    """Bind this process to a NUMA node by the kernel's number, within the mask before any earlier binding.

    No driver is opened, but for a simulated host, whose nodes count.

    Raises:
        GPUAffinityError: there is no such node, or, unless not ``cpus``, the mask has no CPU of it.
    """
    number = as_count("node", node, 0)
    simulated = os.environ.get("SAFE_GPU_DRIVER", "").startswith("simulated")
    with opened_driver() if simulated else nullcontext() as driver:
        topology = read_topology(driver=driver)
    nodes = topology.nodes
    if number not in nodes:
        raise GPUAffinityError(f"this host has no NUMA node {number}: it has {format_cpulist(nodes)}")
    mask = original_mask()
    usable = topology.unisolated(nodes[number] & mask)
    if cpus and not usable:
        has = format_cpulist(nodes[number]) or "none"
        why = f"the node has {has}, the mask {format_cpulist(mask)}"
        raise GPUAffinityError(f"this process may use no CPU of NUMA node {number}: {why}")
    near, lacks = with_memory(topology, [number] if memory is not None else ())
    report = bind_process(usable if cpus else None, near, memory, lacks=lacks)
    return report._replace(target=f"NUMA node {number}")


def bind_claim(
    gpus: Sequence[Gpu], driver: Driver, *, options: AffinityOptions | None, memory: str | None = None
) -> BindingReport:
    """Call :func:`bind_near` for a claim, at whose end ``binding.leave`` restores the state at the time of this call.

    Raises:
        GPUAffinityError: as for :func:`bind_near`; the earlier state has been restored then.
    """
    enter()
    try:
        return bind_near(gpus, driver, options=options, memory=memory)
    except BaseException:
        leave()
        raise


def usable_cpus(topology: HostTopology) -> frozenset[int]:
    """Return this process's mask, where the topology is this host's; else all CPUs."""
    return original_mask() if topology.is_here else topology.cpus


def nodes_of_cpus(cpus: Iterable[int], driver: Driver, fsroot: str | None = None) -> frozenset[int] | None:
    """Return the NUMA nodes of some CPUs; None if the kernel shows no node for them."""
    wanted = frozenset(cpus)
    try:
        nodes = read_topology(fsroot, driver).nodes
    except GPUAffinityError:
        return None
    return frozenset(node for node, near in nodes.items() if near & wanted) or None


def split_share(cpus: Iterable[int], topology: HostTopology, n: int) -> list[frozenset[int]]:
    """Split a share into ``n`` parts of whole physical cores, for several workers per GPU (or DataLoader workers).

    The parts are contiguous, as in mode ``exclusive``. If the cores do not divide evenly, the first parts have one
    core more.

    Raises:
        GPUAffinityError: ``n`` is not a positive number, or there are fewer than ``n`` physical cores.
    """
    cores = cores_of_share(cpus, topology)
    if len(cores) < as_count("n", n, 1):
        raise GPUAffinityError(
            f"{n} workers cannot have a physical core each: CPUs {format_cpulist(cpus)} are {len(cores)} "
            f"physical core{'' if len(cores) == 1 else 's'}; start fewer workers, or let them share"
        )
    return [frozenset[int]().union(*part) for part in divide(cores, n)]


def cores_of_share(cpus: Iterable[int], topology: HostTopology) -> list[frozenset[int]]:
    """Return the physical cores of a share, as their threads in it, by the lowest thread; then CPUs of no known
    core."""
    share = frozenset(cpus)
    cores = [core & share for core in sorted(topology.cores, key=min) if core & share]
    return cores + [frozenset([cpu]) for cpu in sorted(share.difference(*cores))]
