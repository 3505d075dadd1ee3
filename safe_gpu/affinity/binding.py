"""Move this process onto CPUs and memory nodes, say what came of it, and put it back.

``sched_setaffinity`` acts on one thread, so every thread is moved and asked afterwards. A memory policy can only be
set for the calling thread. What was before is remembered for the process, which is where affinity lives: a second
binding starts from the mask before the first, not from what the first left of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from operator import index
from typing import NamedTuple

from ..errors import GPUAffinityError
from .cpulist import LIMIT, format_cpulist
from .options import check_memory_mode

__all__ = ["BindingReport", "PartReport", "bind_process", "enter", "leave", "original_mask", "undo"]


class PartReport(NamedTuple):
    """One part of a binding, in CPU numbers for the threads and node numbers for the memory.

    Attributes:
        asked: what was to be set.
        done: what is in effect now; empty when it was refused.
        refused: one sentence for each refusal, with the kernel's reason.
        moved: how many threads were; for the memory policy 1 (the calling thread) once set.
    """

    asked: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    refused: tuple[str, ...] = ()
    moved: int = 0


class BindingReport(NamedTuple):
    """What a binding asked for, did and was refused. ``str()`` is one line for a log.

    Attributes:
        cpus: the mask of the calling thread now.
        threads: the CPU part; nothing asked where only memory was bound.
        memory: the memory part; nothing asked where none was wanted.
        memory_mode: "preferred", "bind" or None.
        notes: what a person should know: remote CPUs, a mask taken as the share, a policy that reaches one thread.
    """

    cpus: frozenset[int]
    threads: PartReport = PartReport()
    memory: PartReport = PartReport()
    memory_mode: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was refused."""
        return not (self.threads.refused or self.memory.refused)

    def __str__(self) -> str:
        parts = []
        if self.threads.done:
            threads = "1 thread" if self.threads.moved == 1 else f"{self.threads.moved} threads"
            parts.append(f"bound {threads} to CPUs {format_cpulist(self.threads.done)}")
        if self.memory.done:
            nodes = "node" if len(self.memory.done) == 1 else "nodes"
            verb = "bound to" if self.memory_mode == "bind" else "preferred on"
            parts.append(f"memory {verb} {nodes} {format_cpulist(self.memory.done)}")
        parts += [f"refused: {reason}" for reason in (*self.threads.refused, *self.memory.refused)]
        return "; ".join([*(parts or ["nothing bound"]), *self.notes])


class _Before:
    """What every thread had at one moment, and the masks and policies that we set since."""

    def __init__(self, caller: frozenset[int], threads: dict[int, frozenset[int]]) -> None:
        self.caller = caller
        self.threads = threads
        self.memory: object = None
        self.masks: set[frozenset[int]] = set()
        self.policies: list[object] = []


_stack: list[_Before] = []
"""The moments that can be gone back to, the first one at the bottom. A forked child inherits it, which is right: its
threads have other numbers, but masks that we set are told by being ours, and the mask before them is the same."""


def original_mask() -> frozenset[int]:
    """The CPUs this process could use before we bound it: the mask that every new binding starts from."""
    return _stack[0].caller if _stack else frozenset(os.sched_getaffinity(0))


def enter() -> None:
    """Remember this moment, whatever was bound before; :func:`leave` comes back to it."""
    _stack.append(_now())


def leave() -> None:
    """Back to the latest moment remembered: every thread's own mask, the caller's memory policy. Safe to call twice."""
    if _stack:
        _restore(_stack.pop())


def undo() -> None:
    """Back to before the first binding of all. Safe to call twice."""
    if _stack:
        before = _stack[0]
        _stack.clear()
        _restore(before)


def bind_process(
    cpus: Iterable[int] | None,
    memory_nodes: Iterable[int] = (),
    memory_mode: str | None = None,
    *,
    notes: Iterable[str] = (),
) -> BindingReport:
    """Move all threads of this process to ``cpus`` and set the calling thread's memory policy.

    Args:
        cpus: logical CPUs; None leaves the threads where they are.
        memory_nodes: NUMA nodes for ``memory_mode``.
        memory_mode: None, "preferred" (falls back to other nodes) or "bind" (never does: may get the process killed).
        notes: go into the report.

    Returns:
        The report. Refused memory policies, and threads that would not be moved, stand in it and do not raise.

    Raises:
        GPUAffinityError: the calling thread cannot be moved (everything is as before then), or an argument is wrong.
    """
    mode = check_memory_mode(memory_mode)
    wanted = None if cpus is None else _checked(cpus)
    nodes = frozenset(memory_nodes)
    if mode is not None and not nodes:
        raise GPUAffinityError(f"memory={mode!r} needs to know the NUMA node, and it is not known for these GPUs")
    first = not _stack
    if first:
        enter()
    threads, memory = PartReport(), PartReport()
    said = list(notes)
    try:
        if wanted is not None:
            threads = _move_threads(wanted)
            if threads.done < wanted:
                said.append(f"the kernel cut {format_cpulist(wanted)} to this process's cpuset")
    except GPUAffinityError:
        if first:
            leave()
        raise
    if mode is not None:
        memory = _set_memory(mode, nodes)
        others = len(_tids()) - 1
        if memory.done and others:
            said.append(f"memory policy of {others} older thread{'' if others == 1 else 's'} unchanged")
    return BindingReport(frozenset(os.sched_getaffinity(0)), threads, memory, mode, tuple(said))


def _checked(cpus: Iterable[int]) -> frozenset[int]:
    try:
        wanted = frozenset(index(cpu) for cpu in cpus)
    except TypeError as err:
        raise GPUAffinityError(f"CPUs to bind to must be a set of numbers, not {cpus!r}") from err
    if not wanted or not all(0 <= cpu < LIMIT for cpu in wanted):
        raise GPUAffinityError(f"CPUs to bind to must be numbers, at least one and all below {LIMIT}, not {cpus!r}")
    return wanted


def _tids() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _now() -> _Before:
    masks = {tid: _mask_of(tid) for tid in _tids()}
    return _Before(frozenset(os.sched_getaffinity(0)), {tid: mask for tid, mask in masks.items() if mask is not None})


def _move_threads(wanted: frozenset[int]) -> PartReport:
    # The caller first: what it starts from here on inherits the mask, and if it cannot be moved nothing else is.
    try:
        os.sched_setaffinity(0, wanted)
    except (OSError, OverflowError, ValueError) as err:
        raise GPUAffinityError(
            f"this process cannot be bound to CPUs {format_cpulist(wanted)}: {err}; "
            f"it may use {format_cpulist(os.sched_getaffinity(0))}"
        ) from err
    done = frozenset(os.sched_getaffinity(0))
    for before in _stack:
        before.masks.add(done)
    refused: dict[int, str] = {}
    tries: dict[int, int] = {}
    # A thread that was not moved yet may have started another, and one in the midst of being started has the old mask
    # and is not listed yet: two rounds in a row must find everyone in place.
    quiet = 0
    while quiet < 2:
        behind = [tid for tid in _tids() if tid not in refused and _mask_of(tid) not in (None, done)]
        quiet = 0 if behind else quiet + 1
        for tid in behind:
            for before in _stack:  # born after that moment
                before.threads.setdefault(tid, before.caller)
            tries[tid] = tries.get(tid, 0) + 1
            if tries[tid] > 3:
                refused[tid] = f"thread {tid} stays on CPUs {format_cpulist(_mask_of(tid) or ())}"
                continue
            try:
                os.sched_setaffinity(tid, wanted)
            except ProcessLookupError:
                continue  # it ended
            except OSError as err:
                refused[tid] = f"thread {tid} could not be moved: {err.strerror}"
    return PartReport(wanted, done, tuple(refused.values()), len(_tids()) - len(refused))


def _mask_of(tid: int) -> frozenset[int] | None:
    """A thread's mask; None for one that has ended."""
    try:
        return frozenset(os.sched_getaffinity(tid))
    except ProcessLookupError:
        return None


def _set_memory(mode: str, nodes: frozenset[int]) -> PartReport:
    from .mempolicy import get_policy, policy_for, set_policy

    policy = policy_for(mode, nodes)
    try:
        earlier = get_policy()
    except OSError:
        earlier = None
    try:
        policy = set_policy(policy)
    except OSError as err:
        return PartReport(nodes, refused=(f"memory policy {policy}: {err.strerror}",))
    try:
        policy = get_policy()
    except OSError:
        pass  # set, and not to be read: what was set counts
    for before in _stack:
        if not before.policies:
            before.memory = earlier
        before.policies.append(policy)
    return PartReport(nodes, policy.nodes, moved=1)


def _restore(before: _Before) -> None:
    """Every thread that was there gets its own mask back; one born since, if it has a mask of ours, the caller's."""
    seen: set[int] = set()
    while new := [tid for tid in _tids() if tid not in seen]:
        seen.update(new)
        for tid in new:
            try:
                earlier = before.threads.get(tid)
                if earlier is None and _mask_of(tid) in before.masks:
                    earlier = before.caller
                if earlier is not None and before.masks:
                    os.sched_setaffinity(tid, earlier)
            except OSError:
                continue  # it ended, or its CPUs were taken from us meanwhile: there is nothing to go back to
    if before.policies:
        from .mempolicy import MemoryPolicy, get_policy, set_policy

        earlier_policy = before.memory if isinstance(before.memory, MemoryPolicy) else MemoryPolicy()
        try:
            if get_policy() in before.policies:
                set_policy(earlier_policy)
        except OSError:
            pass  # refused now as it would have been then
