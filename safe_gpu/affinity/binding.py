"""Bind this process to the CPUs and memory nodes next to its GPUs, report the result, and undo it.

All cores of the host but the isolated ones are divided among all its GPUs first. Only then is the share of a claim
intersected with the mask of the process. In this way two independent jobs get disjoint cores, whatever their masks are.

set_mempolicy(2) acts on the calling thread only; threads and processes that it starts later inherit the policy.
Containers often refuse the call (seccomp, EPERM). Kernels without NUMA do not have it (ENOSYS).

``sched_setaffinity`` acts on one thread, so every thread is moved and its mask is read back. A memory policy can only
be set for the calling thread. The earlier masks and policy are kept per process: a second binding starts from the mask
before the first binding, not from the narrower mask that the first one set.
"""

import os
from _thread import get_native_id
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from ..drivers import opened_driver
from ..drivers.base import Driver
from ..errors import GPUAffinityError
from ..gpus.devices import Gpu
from ..host.procfs import lasting
from ..topology.cpulist import format_cpulist
from ..topology.host import HostTopology, read_topology
from ..wording.text import plural
from .memory_policy import MemoryPolicy, get_policy, policy_for, set_policy
from .planner import AffinityOptions, as_count, check_memory_mode, deal, divide, is_remote


class PartReport(NamedTuple):
    """One part of a binding: CPU numbers for the threads, node numbers for the memory.

    Attributes:
        asked: the CPUs or nodes that were requested.
        done: the CPUs or nodes in effect now; empty if the kernel refused.
        refused: one sentence for each refusal, with the kernel's reason.
        moved: the number of threads that were moved; for a memory policy 1 (the calling thread) once it is set.
    """

    asked: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    refused: tuple[str, ...] = ()
    moved: int = 0


class BindingReport(NamedTuple):
    """The result of a binding: what was requested, what is in effect, what was refused. ``str()`` is one log line.

    Attributes:
        cpus: the mask of the calling thread now.
        threads: the CPU part; empty if only memory was bound.
        memory: the memory part; empty if no memory policy was requested.
        memory_mode: "preferred", "bind" or None.
        notes: remarks for the user, such as remote CPUs, a mask used as the share, or a policy on one thread only.
        target: the GPUs or the NUMA node that the caller meant, and how they were found; "" for a claim, which has
            logged its GPUs.
        remote: whether the CPUs are not those next to some GPU, because the mask has none of these.
        as_asked: whether the CPUs and the memory in effect are those that were asked for. Always True for GPUs of a
            simulated host.
    """

    cpus: frozenset[int]
    threads: PartReport = PartReport()
    memory: PartReport = PartReport()
    memory_mode: str | None = None
    notes: tuple[str, ...] = ()
    target: str = ""
    remote: bool = False
    as_asked: bool = True

    def log(self, logger: Any) -> None:
        """Log this report: a warning if the binding is not as asked."""
        (logger.info if self.as_asked else logger.warning)("%s", self)

    @property
    def ok(self) -> bool:
        """Whether nothing was refused."""
        return not (self.threads.refused or self.memory.refused)

    def __str__(self) -> str:
        parts = []
        if self.threads.done:
            parts.append(f"bound {plural(self.threads.moved, 'thread')} to CPUs {format_cpulist(self.threads.done)}")
        if self.memory.done:
            nodes = "node" if len(self.memory.done) == 1 else "nodes"
            verb = "bound to" if self.memory_mode == "bind" else "preferred on"
            parts.append(f"memory {verb} {nodes} {format_cpulist(self.memory.done)}")
        parts += [f"refused: {reason}" for reason in (*self.threads.refused, *self.memory.refused)]
        text = "; ".join([*(parts or ["nothing bound"]), *self.notes])
        return f"next to {self.target}: {text}" if self.target else text


class _Before:
    """The masks of all threads at one moment, and the masks and policies that this module has set since then."""

    def __init__(self, caller: frozenset[int], threads: dict[int, frozenset[int]]) -> None:
        self.caller = caller
        self.threads = threads
        self.memory = MemoryPolicy()
        self.masks: set[frozenset[int]] = set()
        self.policies: list[MemoryPolicy] = []


_stack: list[_Before] = lasting("bindings", [])
"""The saved states, the oldest first. A forked child inherits the list, and it stays valid there: the child's threads
have other numbers, but the masks that this module set are recognised by value, and the mask before them is the same."""


def original_mask() -> frozenset[int]:
    """Return the CPUs that this process could use before its first binding. Every new binding starts from this mask."""
    return _stack[0].caller if _stack else frozenset(os.sched_getaffinity(0))


def enter() -> None:
    """Save the masks of all threads as they are now; :func:`leave` restores them."""
    threads = {tid: mask for tid in _tids() if (mask := _mask_of(tid)) is not None}
    _stack.append(_Before(frozenset(os.sched_getaffinity(0)), threads))


def leave() -> None:
    """Restore the latest saved state: every thread's mask and the caller's memory policy. Safe to call twice."""
    if _stack:
        _restore(_stack.pop())


def bind_process(
    cpus: Iterable[int] | None, memory_nodes: Iterable[int] = (), mode: str | None = None, *, lacks: Sequence[str] = ()
) -> BindingReport:
    """Move all threads of this process to ``cpus`` and set the calling thread's memory policy.

    Args:
        cpus: logical CPUs; None leaves the threads where they are.
        memory_nodes: NUMA nodes for the memory.
        mode: of the memory: None, "preferred" (falls back to other nodes) or "bind" (does not fall back: the kernel may
            kill the process when the nodes are full).
        lacks: why these CPUs and nodes are not those that the user asked for; added to the notes of the report.

    Returns:
        The report. It lists refused memory policies and threads that could not be moved; these do not raise.

    Raises:
        GPUAffinityError: the calling thread cannot be moved (nothing has changed then), or the memory mode is unknown
            or has no node.
    """
    check_memory_mode(mode)
    nodes = frozenset(memory_nodes)
    if mode is not None and not nodes:
        raise GPUAffinityError(f"memory={mode!r} needs to know the NUMA node, and it is not known for these GPUs")
    wanted = None if cpus is None else frozenset(cpus)
    threads, memory = PartReport(), PartReport()
    said = [*lacks]
    first = not _stack
    if first:
        enter()
    if wanted is not None:
        try:
            threads = _move_threads(wanted)
        except GPUAffinityError:
            if first:
                leave()
            raise
        if threads.done < wanted:
            said.append(f"the kernel cut {format_cpulist(wanted)} to this process's cpuset")
    if mode is not None:
        memory = _set_memory(mode, nodes)
        others = len(_tids()) - 1
        if memory.done and memory.done != nodes:
            said.append(f"the kernel cut nodes {format_cpulist(nodes)} to {format_cpulist(memory.done)}")
        if memory.done and others:
            said.append(f"memory policy of {others} older thread{'' if others == 1 else 's'} unchanged")
    done = not (threads.refused or lacks) and (threads.done, memory.done) == (threads.asked, memory.asked)
    return BindingReport(frozenset(os.sched_getaffinity(0)), threads, memory, mode, tuple(said), as_asked=done)


def _tids() -> list[int]:
    if os.stat("/proc/self/task").st_nlink == 3:  # one thread, this one: to list it takes longer
        return [get_native_id()]
    return [int(name) for name in os.listdir("/proc/self/task")]


def _move_threads(wanted: frozenset[int]) -> PartReport:
    # The calling thread goes first: threads that it starts from now on inherit the mask. If it cannot be moved, no
    # other thread is moved.
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, OverflowError, ValueError) as err:
        problem = f"this process cannot be bound to CPUs {format_cpulist(wanted)}: {err}"
        raise GPUAffinityError(f"{problem}; it may use {format_cpulist(os.sched_getaffinity(0))}") from err
    done = frozenset(os.sched_getaffinity(0))
    for before in _stack:
        before.masks.add(done)
    tries: Counter[int] = Counter()
    trouble: dict[int, str] = {}
    # A thread that was not moved yet may start another one. A thread that is just being created has the old mask and
    # is not listed yet. So two rounds in a row must find every thread with the new mask, unless this one is alone.
    quiet = 0
    while quiet < 2:
        tids = _tids()
        if len(tids) == 1:
            break
        behind = [tid for tid in tids if tries[tid] < 3 and _mask_of(tid) not in (None, done)]
        quiet = 0 if behind else quiet + 1
        for tid in behind:
            tries[tid] += 1
            for before in _stack:  # setdefault: the thread may have been created after that state was saved
                before.threads.setdefault(tid, before.caller)
            try:
                os.sched_setaffinity(tid, wanted)
            except OSError as err:
                trouble[tid] = f": {err.strerror}"
    stay = {tid: mask for tid in tries if tries[tid] == 3 and (mask := _mask_of(tid)) not in (None, done)}
    refused = [f"thread {tid} stays on CPUs {format_cpulist(stay[tid] or ())}{trouble.get(tid, '')}" for tid in stay]
    return PartReport(wanted, done, tuple(refused), len(tids) - len(stay))


def _mask_of(tid: int) -> frozenset[int] | None:
    """Return a thread's mask; None for one that has ended."""
    try:
        return frozenset(os.sched_getaffinity(tid))
    except ProcessLookupError:
        return None


def _set_memory(mode: str, nodes: frozenset[int]) -> PartReport:
    policy = policy_for(mode, nodes)
    earlier = get_policy() or MemoryPolicy()
    try:
        policy = set_policy(policy)
    except OSError as err:
        return PartReport(nodes, refused=(f"memory policy {policy}: {err.strerror}",))
    policy = get_policy() or policy
    for before in _stack:
        if not before.policies:
            before.memory = earlier
        before.policies.append(policy)
    return PartReport(nodes, policy.nodes, moved=1)


def _restore(before: _Before) -> None:
    """Restore masks and memory policy.

    A thread that existed then gets its own mask back. A newer thread gets the caller's mask, if its present mask is one
    that this module set.
    """
    seen: set[int] = set()
    while before.masks and (new := [tid for tid in _tids() if tid not in seen]):
        seen.update(new)
        for tid in new:
            earlier = before.threads.get(tid)
            if earlier is None and _mask_of(tid) in before.masks:
                earlier = before.caller
            if earlier is not None:
                with suppress(OSError):  # it has ended, or its earlier CPUs are no longer in this process's cpuset
                    os.sched_setaffinity(tid, earlier)
    if before.policies and get_policy() in before.policies:
        with suppress(OSError):  # the kernel or a container's filter refuses; the policy stays
            set_policy(before.memory)


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
    notes = []
    if lost:
        theirs = format_cpulist(frozenset[int]().union(*map(shares.__getitem__, lost)))
        notes.append(f"this process may use none of the CPUs {theirs} of {_titled(lost)}")
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
    found = Near(topology) if options is None else claim_shares(topology, options, indices, mask)
    if memory is not None:
        nodes, notes = with_memory(topology, memory_nodes(topology, indices))
        found = found._replace(notes=(*found.notes, *notes), nodes=nodes)
    return found


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
    with suppress(GPUAffinityError):
        return frozenset(node for node, near in read_topology(fsroot, driver).nodes.items() if near & wanted) or None
    return None


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
