"""What ``placement`` returns."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...topology.cpulist import format_cpulist
from ...wording.text import plural


@dataclass(frozen=True)
class ThreadPlacement:
    """One thread: where it ran last, and where it may run.

    Attributes:
        tid: its number.
        name: its name.
        cpu: the CPU on which it ran last.
        node: the NUMA node of that CPU; None if unknown.
        cpus_allowed: CPUs that it may use.
        mems_allowed: memory nodes of its cpuset. A memory policy does not change them; see ``ProcessPlacement.policy``.
        matches: whether it ran last on a node of its GPUs, or may run only there; None without a known GPU.
    """

    tid: int
    name: str
    cpu: int
    node: int | None
    cpus_allowed: frozenset[int]
    mems_allowed: frozenset[int]
    matches: bool | None = None


@dataclass(frozen=True)
class ProcessPlacement:
    """One process.

    Attributes:
        pid: its pid.
        parent: the pid of its parent.
        command: its command line.
        threads: its threads, the main one first.
        memory: bytes of its pages by NUMA node; None if the kernel does not allow reading it.
        policy: its memory policy: "default" (a page comes from the node of the CPU that first writes to it),
            "preferred", "bind", ... For this process it is the calling thread's; for another one it is the main
            thread's, as its mappings show it. "" is unknown.
        policy_nodes: the nodes of that policy.
        gpus: indices of its GPUs.
        gpu_nodes: the NUMA nodes of these GPUs.
        gpu_source: the source of ``gpus``: "driver", "SAFE_GPU_BOUND" (it was bound next to them),
            "CUDA_VISIBLE_DEVICES", "parent", "given", or "".
    """

    pid: int
    parent: int
    command: str
    threads: tuple[ThreadPlacement, ...]
    memory: Mapping[int, int] | None = None
    policy: str = ""
    policy_nodes: frozenset[int] = frozenset()
    gpus: tuple[int, ...] = ()
    gpu_nodes: frozenset[int] = frozenset()
    gpu_source: str = ""

    @property
    def matches(self) -> bool | None:
        """Whether all its threads match; None without a GPU whose node is known."""
        return _all_known(thread.matches for thread in self.threads)

    @property
    def memory_matches(self) -> bool | None:
        """Whether its memory policy keeps to the nodes of its GPUs; None without such a policy or a known GPU."""
        if not self.policy_nodes or not self.gpu_nodes:
            return None
        return self.policy_nodes <= self.gpu_nodes

    def __str__(self) -> str:
        main = self.threads[0]
        nodes = Counter(thread.node for thread in self.threads)
        on = ", ".join(f"{plural(count, 'thread')} on node {_or_unknown(node)}" for node, count in nodes.most_common())
        gpus = f"GPU {', '.join(map(str, self.gpus))} by {self.gpu_source}" if self.gpus else "no GPU is known for it"
        lines = [
            f"process {self.pid} ({self.command})",
            f"  GPU node: {format_cpulist(self.gpu_nodes) or 'unknown'} ({gpus})",
            f"  CPU node: {_or_unknown(main.node)} (CPU {main.cpu}; {on})",
        ]
        for allowed, count in Counter(thread.cpus_allowed for thread in self.threads).most_common():
            of = "" if count == len(self.threads) else f" ({count} of {len(self.threads)} threads)"
            lines.append(f"  CPUs allowed: {format_cpulist(allowed)}{of}")
        lines.append(f"  memory nodes allowed (cpuset): {format_cpulist(main.mems_allowed) or 'unknown'}")
        policy = self.policy or "unknown"
        if self.policy_nodes:
            policy += f" on node{'' if len(self.policy_nodes) == 1 else 's'} {format_cpulist(self.policy_nodes)}"
        elif policy == "default":
            policy += " (the node of the CPU that first writes to a page)"
        lines.append(f"  memory policy: {policy}")
        if self.memory is not None:
            parts = [f"node {node} {size / 2**20:,.0f} MiB" for node, size in self.memory.items()]
            lines.append(f"  memory pages: {', '.join(parts) or 'none yet'}")
        for what, match in (
            ("GPU and CPU NUMA nodes", self.matches),
            ("GPU node and memory policy", self.memory_matches),
        ):
            if match is not None:
                lines.append(f"  {what} {'match' if match else 'do NOT match'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PlacementReport:
    """A process and its descendants. ``str()`` is a text for people, :meth:`as_dict` is for JSON.

    Attributes:
        processes: the requested process first, then its descendants by pid.
        notes: which facts are unknown, and why.
    """

    processes: tuple[ProcessPlacement, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def matches(self) -> bool | None:
        """Whether every process matches; None if no GPU's node is known."""
        return _all_known(process.matches for process in self.processes)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.processes), *self.notes])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: CPU and node sets as kernel lists ("0-3,8"), the keys of ``memory`` as
        strings."""

        def plain(value: Any) -> Any:
            if isinstance(value, frozenset):
                return format_cpulist(value)
            if isinstance(value, dict):
                return {str(key): plain(item) for key, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

        processes = [
            plain({**asdict(process), "matches": process.matches, "memory_matches": process.memory_matches})
            for process in self.processes
        ]
        return {"matches": self.matches, "processes": processes, "notes": list(self.notes)}


def _all_known(matches: Iterable[bool | None]) -> bool | None:
    known = [match for match in matches if match is not None]
    return all(known) if known else None


def _or_unknown(node: int | None) -> str:
    return "unknown" if node is None else str(node)
