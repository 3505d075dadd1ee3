"""Bind this process to the CPUs and memory nodes next to its GPUs, report the result, and undo it.

All cores of the host but the isolated ones are divided among all its GPUs first. Only then is the share of a claim
intersected with the mask of the process. In this way two independent jobs get disjoint cores, whatever their masks are.

sched_setaffinity(2) acts on one thread, so every thread is moved and its mask is read back.

set_mempolicy(2) acts on the calling thread only; threads and processes that it starts later inherit the policy.
Containers often refuse the call (seccomp, EPERM). Kernels without NUMA do not have it (ENOSYS).

The earlier masks and policy are kept per process: a second binding starts from the mask before the first binding, not
from the narrower mask that the first one set.
"""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..drivers import opened_driver
from ..drivers.base import Driver
from ..errors import GPUAffinityError
from ..gpus.devices import Gpu
from ..host.procfs import process_global
from ..topology.cpulist import format_cpulist
from ..topology.host import GpuLocality, HostTopology, read_topology
from ..wording.text import plural
from .memory_policy import MemoryPolicy, get_policy, policy_for, set_policy
from .planner import AffinityOptions, as_count, check_memory_mode, deal, divide, is_remote, union

_MOST_TRIES = 3  # to move one thread


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
        if self.as_asked:
            logger.info("%s", self)
        else:
            logger.warning("%s", self)

    @property
    def ok(self) -> bool:
        """Whether nothing was refused."""
        return not (self.threads.refused or self.memory.refused)

    def __str__(self) -> str:
        parts = []
        if self.threads.done:
            parts.append(f"bound {plural(self.threads.moved, 'thread')} to CPUs {format_cpulist(self.threads.done)}")
        if self.memory.done:
            verb = "preferred on"
            if self.memory_mode == "bind":
                verb = "bound to"
            parts.append(f"memory {verb} {_noun('node', self.memory.done)} {format_cpulist(self.memory.done)}")
        parts += [f"refused: {reason}" for reason in (*self.threads.refused, *self.memory.refused)]
        if not parts:
            parts.append("nothing bound")
        text = "; ".join([*parts, *self.notes])
        if self.target:
            text = f"next to {self.target}: {text}"
        return text


class _SavedState:
    """The masks of all threads at one moment, and the masks and policies that this module has set since then.

    Attributes:
        caller: the mask of the thread that saved this state.
        threads: thread -> its mask.
        memory: the memory policy before the first that was set since.
        masks, policies: those that were set since.
    """

    def __init__(self, caller: frozenset[int], threads: dict[int, frozenset[int]]) -> None:
        self.caller = caller
        self.threads = threads
        self.memory = MemoryPolicy()
        self.masks: set[frozenset[int]] = set()
        self.policies: list[MemoryPolicy] = []


_stack: list[_SavedState] = process_global("bindings", [])
"""The saved states, the oldest first. A forked child inherits the list, and it stays valid there: the child's threads
have other numbers, but the masks that this module set are recognised by value, and the mask before them is the same."""


def original_mask() -> frozenset[int]:
    """Return the CPUs that this process could use before its first binding. Every new binding starts from this mask."""
    if _stack:
        return _stack[0].caller
    return present_mask()


def present_mask() -> frozenset[int]:
    """Return the CPUs that the calling thread may use now.

    Raises:
        GPUAffinityError: a sandbox refuses to tell.
    """
    try:
        return frozenset(os.sched_getaffinity(0))
    except OSError as err:
        what = f"the CPUs that this process may use are not known ({err.strerror})"
        raise GPUAffinityError(f"{what}: allow sched_getaffinity(2) in the sandbox") from err


def known_mask() -> frozenset[int]:
    """Return the same; no CPU where a sandbox refuses to tell."""
    try:
        return present_mask()
    except GPUAffinityError:
        return frozenset()


def save_state() -> None:
    """Save the masks of all threads as they are now; :func:`restore_state` restores them.

    Raises:
        GPUAffinityError: the threads or their masks are not known.
    """
    caller = present_mask()
    threads: dict[int, frozenset[int]] = {}
    for tid in _tids():
        mask = _mask_of(tid)
        if mask is not None:
            threads[tid] = mask
    _stack.append(_SavedState(caller, threads))


def restore_state() -> None:
    """Restore the state that was saved last, and forget it: every thread's mask and the caller's memory policy. Does
    nothing if none is saved."""
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
    notes = list(lacks)
    is_first_binding = not _stack
    if is_first_binding:
        save_state()  # to the end of the process, for original_mask
    threads = PartReport()
    if cpus is not None:
        wanted = frozenset(cpus)
        try:
            threads = _move_threads(wanted)
        except GPUAffinityError:
            if is_first_binding:
                restore_state()
            raise
        if threads.done < wanted:
            notes.append(f"the kernel cut {format_cpulist(wanted)} to this process's cpuset")
    memory = PartReport()
    if mode is not None:
        memory = _set_memory(mode, nodes)
        notes += _notes_on_memory(memory)
    nothing_lacks = not threads.refused and not lacks
    return BindingReport(
        cpus=known_mask(),
        threads=threads,
        memory=memory,
        memory_mode=mode,
        notes=tuple(notes),
        as_asked=nothing_lacks and threads.done == threads.asked and memory.done == memory.asked,
    )


def _notes_on_memory(memory: PartReport) -> list[str]:
    """Return what the user should know of a memory policy that was set."""
    if not memory.done:
        return []
    notes = []
    if memory.done != memory.asked:
        notes.append(f"the kernel cut nodes {format_cpulist(memory.asked)} to {format_cpulist(memory.done)}")
    others = len(_tids()) - 1
    if others:
        notes.append(f"memory policy of {plural(others, 'older thread')} unchanged")
    return notes


def _tids() -> list[int]:
    """Return the numbers of the threads of this process.

    Raises:
        GPUAffinityError: there is no /proc, as in some sandboxes.
    """
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError as err:
        raise GPUAffinityError(f"the threads of this process are not known: mount /proc ({err})") from err


def _move_threads(wanted: frozenset[int]) -> PartReport:
    # The calling thread goes first: threads that it starts from now on inherit the mask. If it cannot be moved, no
    # other thread is moved.
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, OverflowError, ValueError) as err:
        problem = f"this process cannot be bound to CPUs {format_cpulist(wanted)}: {err}"
        raise GPUAffinityError(f"{problem}; it may use {format_cpulist(present_mask())}") from err
    done = present_mask()
    for saved in _stack:
        saved.masks.add(done)
    tries: Counter[int] = Counter()
    trouble: dict[int, str] = {}
    # A thread that was not moved yet may start another one. A thread that is just being created has the old mask and
    # is not listed yet. So two rounds in a row must find every thread with the new mask, unless this one is alone.
    quiet_rounds = 0
    while quiet_rounds < 2:
        tids = _tids()
        if len(tids) == 1:
            break
        behind = [tid for tid in tids if tries[tid] < _MOST_TRIES and _mask_of(tid) not in (None, done)]
        if behind:
            quiet_rounds = 0
        else:
            quiet_rounds += 1
        for tid in behind:
            tries[tid] += 1
            for saved in _stack:  # setdefault: the thread may have been created after that state was saved
                saved.threads.setdefault(tid, saved.caller)
            try:
                os.sched_setaffinity(tid, wanted)
            except OSError as err:
                trouble[tid] = f": {err.strerror}"
    refused = []
    for tid, number in tries.items():
        mask = _mask_of(tid)
        if number == _MOST_TRIES and mask is not None and mask != done:
            refused.append(f"thread {tid} stays on CPUs {format_cpulist(mask)}{trouble.get(tid, '')}")
    return PartReport(wanted, done, tuple(refused), len(tids) - len(refused))


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
    for saved in _stack:
        if not saved.policies:
            saved.memory = earlier
        saved.policies.append(policy)
    return PartReport(nodes, policy.nodes, moved=1)


def _restore(saved: _SavedState) -> None:
    """Restore masks and memory policy.

    A thread that existed then gets its own mask back. A newer thread gets the caller's mask, if its present mask is one
    that this module set.
    """
    if saved.masks:
        _restore_masks(saved)
    if saved.policies and get_policy() in saved.policies:
        with suppress(OSError):  # the kernel or a container's filter refuses; the policy stays
            set_policy(saved.memory)


def _restore_masks(saved: _SavedState) -> None:
    seen: set[int] = set()
    while True:
        try:
            new = [tid for tid in _tids() if tid not in seen]  # a thread may start another one meanwhile
        except GPUAffinityError:
            return  # /proc has gone since: at the end of a claim that is no reason to fail
        if not new:
            return
        seen.update(new)
        for tid in new:
            earlier = saved.threads.get(tid)
            if earlier is None and _mask_of(tid) in saved.masks:
                earlier = saved.caller
            if earlier is not None:
                with suppress(OSError):  # it has ended, or its earlier CPUs are no longer in this process's cpuset
                    os.sched_setaffinity(tid, earlier)


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
    chosen = {index: topology.gpu(index) for index in gpus}
    shares = _shares_of_host(topology, options, chosen, usable)
    notes = []
    lost = [index for index, share in shares.items() if share.isdisjoint(usable)]
    if lost:
        theirs = format_cpulist(union(shares[index] for index in lost))
        notes.append(f"this process may use none of the CPUs {theirs} of {_titled_gpus(lost)}")
    within_mask = {}
    for index, share in shares.items():
        within_mask[index] = share & usable
        if not within_mask[index] and chosen[index].is_known:
            within_mask[index] = topology.node_set(chosen[index]) & usable
    cpus = union(within_mask.values()) or usable
    found = {index: share or cpus for index, share in within_mask.items()}
    notes_on_remote = _notes_on_remote(topology, chosen, found)
    return Near(topology, cpus, found, (*notes, *notes_on_remote), remote=len(notes_on_remote) > 0)


def _shares_of_host(
    topology: HostTopology, options: AffinityOptions, chosen: Mapping[int, GpuLocality], usable: frozenset[int]
) -> dict[int, frozenset[int]]:
    """Return the shares of the chosen GPUs when the CPUs of the host are divided among all its GPUs, whatever the mask
    of this process is: then two jobs get disjoint shares. Of isolated CPUs only those in ``usable`` are dealt."""
    taking_part = list(topology.gpus)
    if options.mode == "node":  # a share does not depend on the other GPUs
        taking_part = list(chosen.values())
    taking_part.sort(key=lambda gpu: gpu.index)
    dealt = usable
    for gpu in taking_part:
        # A GPU that has none but isolated CPUs gets them here, or there would be no plan; the mask takes them away.
        if gpu.is_known and topology.node_set(gpu) <= topology.isolated:
            dealt |= topology.node_set(gpu)
    allowed = topology.cpus - (topology.isolated - dealt) or topology.cpus
    shares = deal(topology, taking_part, allowed, options)
    return {gpu.index: share for gpu, share in zip(taking_part, shares, strict=True) if gpu.index in chosen}


def _notes_on_remote(
    topology: HostTopology, gpus: Mapping[int, GpuLocality], shares: Mapping[int, frozenset[int]]
) -> list[str]:
    """Return a sentence for each share that is not near its GPUs."""
    remote: dict[tuple[frozenset[int], str], list[int]] = {}
    for index, share in shares.items():
        gpu = gpus[index]
        if is_remote(topology, gpu, share):
            node = topology.node_of(gpu)
            place = f"NUMA node {node}"
            if node is None:
                place = f"CPUs {format_cpulist(topology.node_set(gpu))}"
            remote.setdefault((share, place), []).append(index)
    return [
        f"CPUs {format_cpulist(share)} are remote to {_titled_gpus(indices)} (on {place})"
        for (share, place), indices in remote.items()
    ]


def _titled_gpus(indices: Sequence[int]) -> str:
    return f"{_noun('GPU', indices)} {', '.join(str(index) for index in indices)}"


def _noun(name: str, things: Collection[object]) -> str:
    """Return the name of one thing, or of several."""
    if len(things) == 1:
        return name
    return f"{name}s"


def memory_nodes(topology: HostTopology, gpus: Iterable[int]) -> frozenset[int]:
    """Return the NUMA nodes of some GPUs, for a memory policy; a GPU whose node is unknown adds none."""
    nodes = {topology.node_of(topology.gpu(index)) for index in gpus}
    return frozenset(node for node in nodes if node is not None)


def with_memory(topology: HostTopology, nodes: Iterable[int]) -> tuple[frozenset[int], list[str]]:
    """Return the nodes for a memory policy on some nodes, and a sentence for each that has no memory: the nearest nodes
    that have some replace it."""
    found: set[int] = set()
    notes = []
    for node in sorted(nodes):
        nearest = topology.nearest_memory(node)
        found |= nearest
        if nearest != {node}:
            notes.append(f"NUMA node {node} has no memory, so that of node {format_cpulist(nearest)} is used")
    return frozenset(found), notes


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
    shown: Sequence[Gpu] | None = gpus
    if options is not None and options.mode != "node":
        shown = None  # the CPUs are divided among all GPUs of the host
    topology = read_topology(None, driver, shown)
    indices = list(dict.fromkeys(gpu.index for gpu in gpus))
    found = Near(topology)
    if options is not None:
        found = claim_shares(topology, options, indices, mask)
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
    if driver.is_simulated:  # the CPUs and nodes of a made-up host are not those of this machine
        return report._replace(as_asked=True)
    return report._replace(remote=there.remote)


def bind_node(node: int, *, cpus: bool = True, memory: str | None = None) -> BindingReport:
    """Bind this process to a NUMA node by the kernel's number, within the mask before any earlier binding.

    No driver is opened, but for a simulated host, whose nodes count.

    Raises:
        GPUAffinityError: there is no such node, or, unless not ``cpus``, the mask has no CPU of it.
    """
    number = as_count("node", node, 0)
    topology = _topology_without_driver()
    nodes = topology.nodes
    if number not in nodes:
        raise GPUAffinityError(f"this host has no NUMA node {number}: it has {format_cpulist(nodes)}")
    wanted = None
    if cpus:
        mask = original_mask()
        wanted = topology.unisolated(nodes[number] & mask)
        if not wanted:
            has = format_cpulist(nodes[number]) or "none"
            why = f"the node has {has}, the mask {format_cpulist(mask)}"
            raise GPUAffinityError(f"this process may use no CPU of NUMA node {number}: {why}")
    memory_on: frozenset[int] = frozenset()
    lacks: list[str] = []
    if memory is not None:
        memory_on, lacks = with_memory(topology, [number])
    report = bind_process(wanted, memory_on, memory, lacks=lacks)
    return report._replace(target=f"NUMA node {number}")


def _topology_without_driver() -> HostTopology:
    """Return the topology of this machine, or of the simulated host, whose driver alone knows it."""
    if not os.environ.get("SAFE_GPU_DRIVER", "").startswith("simulated"):
        return read_topology()
    with opened_driver() as driver:
        return read_topology(driver=driver)


def bind_claim(
    gpus: Sequence[Gpu], driver: Driver, *, options: AffinityOptions | None, memory: str | None = None
) -> BindingReport:
    """Call :func:`bind_near` for a claim, at whose end :func:`restore_state` restores the state at the time of this
    call.

    Raises:
        GPUAffinityError: as for :func:`bind_near`; the earlier state has been restored then.
    """
    save_state()
    try:
        return bind_near(gpus, driver, options=options, memory=memory)
    except BaseException:
        restore_state()
        raise


def usable_cpus(topology: HostTopology) -> frozenset[int]:
    """Return this process's mask, where the topology is this host's; else all CPUs."""
    if topology.is_here:
        return original_mask()
    return topology.cpus


def nodes_of_cpus(cpus: Iterable[int], driver: Driver, fsroot: str | None = None) -> frozenset[int] | None:
    """Return the NUMA nodes of some CPUs; None if the kernel shows no node for them."""
    wanted = frozenset(cpus)
    try:
        nodes = read_topology(fsroot, driver).nodes
    except GPUAffinityError:
        return None
    return frozenset(node for node, cpus_of_node in nodes.items() if cpus_of_node & wanted) or None


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
            f"{n} workers cannot have a physical core each: CPUs {format_cpulist(cpus)} are "
            f"{plural(len(cores), 'physical core')}; start fewer workers, or let them share"
        )
    return [union(part) for part in divide(cores, n)]


def cores_of_share(cpus: Iterable[int], topology: HostTopology) -> list[frozenset[int]]:
    """Return the physical cores of a share, as their threads in it, by the lowest thread; then CPUs of no known
    core."""
    share = frozenset(cpus)
    cores = [core & share for core in sorted(topology.cores, key=min) if core & share]
    without_core = share.difference(*cores)
    return cores + [frozenset([cpu]) for cpu in sorted(without_core)]
