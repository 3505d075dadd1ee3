"""Bind this process to CPUs and memory nodes, report the result, and undo it.

set_mempolicy(2) acts on the calling thread only; threads and processes that it starts later inherit the policy.
Containers often refuse the call (seccomp, EPERM). Kernels without NUMA do not have it (ENOSYS).

``sched_setaffinity`` acts on one thread, so every thread is moved and its mask is read back. A memory policy can only
be set for the calling thread. The earlier masks and policy are kept per process: a second binding starts from the mask
before the first binding, not from the narrower mask that the first one set.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import GPUAffinityError
from ..host.procfs import lasting
from ..topology.cpulist import format_cpulist
from ..wording.text import plural
from .memory_policy import MemoryPolicy, get_policy, policy_for, set_policy
from .options import check_memory_mode


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
    # is not listed yet. So two rounds in a row must find every thread with the new mask.
    quiet = 0
    while quiet < 2:
        tids = _tids()
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
