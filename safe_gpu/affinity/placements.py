"""Where a process, its threads and its children really run, beside where their GPU is.

All of it is read from ``/proc``: the CPU a thread ran on last, the CPUs and memory nodes it may use, and on which nodes
its pages lie.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import GPUAffinityError, SafeGpuError
from ..procfs import command_of, descendants
from .cpulist import format_cpulist, parse_cpulist
from .topology import GpuLocality, HostTopology

if TYPE_CHECKING:
    from ..devices import HostSnapshot
    from ..drivers.base import Driver

__all__ = ["PlacementReport", "ProcessPlacement", "ThreadPlacement", "placement"]


@dataclass(frozen=True)
class ThreadPlacement:
    """One thread: where it ran last, and where it may run.

    Attributes:
        tid, name: its number and the name the program gave it.
        cpu, node: the CPU it ran on last and that CPU's NUMA node (None where the kernel tells none).
        cpus_allowed, mems_allowed: CPUs and memory nodes it may use.
        matches: whether it runs on a node of its GPUs, or can run nowhere else; None without a known GPU.
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
        pid, parent, command: who it is.
        threads: its threads, the main one first.
        memory: bytes of its memory by NUMA node; None where the kernel does not let us read it.
        gpus: indices of its GPUs; gpu_nodes: the NUMA nodes they are on.
        gpu_source: how its GPUs are known: "driver", "CUDA_VISIBLE_DEVICES", "parent", "given", or "".
    """

    pid: int
    parent: int
    command: str
    threads: tuple[ThreadPlacement, ...]
    memory: Mapping[int, int] | None = None
    gpus: tuple[int, ...] = ()
    gpu_nodes: frozenset[int] = frozenset()
    gpu_source: str = ""

    @property
    def matches(self) -> bool | None:
        """Whether all its threads are where its GPUs are; None without a GPU whose node is known."""
        known = [thread.matches for thread in self.threads if thread.matches is not None]
        return all(known) if known else None

    def __str__(self) -> str:
        main = self.threads[0]
        nodes = Counter(thread.node for thread in self.threads)
        on = ", ".join(
            f"{count} thread{'' if count == 1 else 's'} on node {_or_unknown(node)}"
            for node, count in nodes.most_common()
        )
        gpus = f"GPU {', '.join(map(str, self.gpus))} by {self.gpu_source}" if self.gpus else "no GPU is known for it"
        lines = [
            f"process {self.pid} ({self.command})",
            f"  GPU node: {format_cpulist(self.gpu_nodes) or 'unknown'} ({gpus})",
            f"  CPU node: {_or_unknown(main.node)} (CPU {main.cpu}; {on})",
        ]
        for allowed, count in Counter(thread.cpus_allowed for thread in self.threads).most_common():
            of = "" if count == len(self.threads) else f" ({count} of {len(self.threads)} threads)"
            lines.append(f"  CPUs allowed: {format_cpulist(allowed)}{of}")
        lines.append(f"  mem binding: {sorted(main.mems_allowed)}")
        if self.memory is not None:
            parts = [f"node {node} {size / 2**20:,.0f} MiB" for node, size in self.memory.items()]
            lines.append(f"  memory: {', '.join(parts) or 'none yet'}")
        if self.matches is not None:
            lines.append(f"  GPU and CPU NUMA nodes {'match' if self.matches else 'do NOT match'}")
        return "\n".join(lines)


@dataclass(frozen=True)
class PlacementReport:
    """A process and all below it. ``str()`` is for people, :meth:`as_dict` for JSON.

    Attributes:
        processes: the one asked for first, its descendants by pid.
        notes: what could not be found out and why.
    """

    processes: tuple[ProcessPlacement, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def matches(self) -> bool | None:
        """Whether every process runs where its GPUs are; None where no GPU's node is known."""
        known = [process.matches for process in self.processes if process.matches is not None]
        return all(known) if known else None

    def __str__(self) -> str:
        return "\n".join([*map(str, self.processes), *self.notes])

    def as_dict(self) -> dict[str, Any]:
        """Everything as JSON has it: sets as kernel lists ("0-3,8"), memory nodes as text."""

        def plain(value: Any) -> Any:
            if isinstance(value, (set, frozenset)):
                return format_cpulist(value)
            if isinstance(value, dict):
                return {str(key): plain(item) for key, item in value.items()}
            return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

        processes = [{**plain(asdict(process)), "matches": process.matches} for process in self.processes]
        return {"matches": self.matches, "processes": processes, "notes": list(self.notes)}


def placement(
    pid: int | None = None,
    *,
    driver: Driver | None = None,
    gpus: Iterable[int] | None = None,
    fsroot: str | os.PathLike[str] | None = None,
) -> PlacementReport:
    """Look at a process, its threads and its descendants.

    Args:
        pid: None is this process.
        driver: tells which process is on which GPU; None opens the one that ``SAFE_GPU_DRIVER`` names, if it opens.
        gpus: indices of the process's GPUs, where the caller knows them; else the driver's process list, else
            CUDA_VISIBLE_DEVICES, else (for descendants) the parent's.
        fsroot: root for the topology files; processes are always those of this host.

    Raises:
        GPUAffinityError: there is no such process, or it may not be read.
    """
    root = os.getpid() if pid is None else pid
    if isinstance(root, bool) or not isinstance(root, int) or root < 1:
        raise GPUAffinityError(f"a pid is a positive number, not {pid!r}")
    notes: list[str] = []
    driver, snapshot = _opened(driver, notes)
    topology = HostTopology.from_host(fsroot, driver)
    looker = _Looker(topology, snapshot)
    if gpus is not None:
        looker.known[root] = (tuple(topology.gpu(index).index for index in gpus), "given")
    found = [process for number in (root, *sorted(descendants(root))) if (process := looker.process(number))]
    if not found or found[0].pid != root:
        raise GPUAffinityError(f"there is no process {root} that can be looked at from here")
    return PlacementReport(tuple(found), tuple(notes))


def _opened(driver: Driver | None, notes: list[str]) -> tuple[Driver | None, HostSnapshot | None]:
    from ..drivers import open_driver

    try:
        driver = driver or open_driver()
        return driver, driver.snapshot()
    except SafeGpuError as err:
        notes.append(f"which GPUs are used is not known: {err}")
        return None, None


class _Looker:
    """Reads processes one by one, parents before children, and remembers which GPUs each has."""

    def __init__(self, topology: HostTopology, snapshot: HostSnapshot | None) -> None:
        self.topology = topology
        self.snapshot = snapshot
        self.places = {gpu.index: gpu for gpu in topology.gpus}
        self.node_of_cpu = {cpu: node for node, cpus in topology.nodes.items() for cpu in cpus}
        self.known: dict[int, tuple[tuple[int, ...], str]] = {}

    def process(self, pid: int) -> ProcessPlacement | None:
        """None for one that has ended."""
        parent = _parent(pid)
        if parent is None:
            return None
        gpus, source = self.known.setdefault(pid, self._gpus_of(pid, parent))
        places = [self.places[index] for index in gpus if index in self.places]
        threads = tuple(thread for tid in _tids(pid) if (thread := self._thread(pid, tid, places)))
        if not threads:
            return None
        nodes = (self.topology.node_of(place) for place in places)
        return ProcessPlacement(
            pid=pid,
            parent=parent,
            command=command_of(pid, limit=60) or "?",
            threads=threads,
            memory=_memory(pid),
            gpus=gpus,
            gpu_nodes=frozenset(node for node in nodes if node is not None),
            gpu_source=source,
        )

    def _thread(self, pid: int, tid: int, places: list[GpuLocality]) -> ThreadPlacement | None:
        path = f"/proc/{pid}/task/{tid}"
        fields = _text(f"{path}/stat").rpartition(")")[2].split()
        status = dict(line.split(":\t", 1) for line in _text(f"{path}/status").splitlines() if ":\t" in line)
        if len(fields) < 37 or fields[0] in "ZX" or "Cpus_allowed_list" not in status:
            return None
        cpu = int(fields[36])
        allowed = parse_cpulist(status["Cpus_allowed_list"]) or frozenset()
        near = frozenset[int]().union(*(self.topology.node_set(place) for place in places))
        return ThreadPlacement(
            tid=tid,
            name=status.get("Name", ""),
            cpu=cpu,
            node=self.node_of_cpu.get(cpu),
            cpus_allowed=allowed,
            mems_allowed=parse_cpulist(status.get("Mems_allowed_list")) or frozenset(),
            # A sleeping thread still shows the CPU from before it was bound.
            matches=(cpu in near or allowed <= near) if near else None,
        )

    def _gpus_of(self, pid: int, parent: int) -> tuple[tuple[int, ...], str]:
        if self.snapshot is None:
            return (), ""
        on = {gpu.index for gpu in self.snapshot.gpus for process in gpu.processes or () if process.pid == pid}
        if on:
            return tuple(sorted(on)), "driver"
        environment = _environment(pid)
        # A forked child shows its parent's environment from before the claim: what the parent has is more recent.
        if parent in self.known and (environment is None or environment == _environment(parent)):
            return self.known[parent][0], "parent" if self.known[parent][0] else ""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") if pid == os.getpid() else _visible(environment)
        if visible is not None:
            from .gpu_affinity import visible_indices

            try:
                return tuple(visible_indices(self.snapshot, visible)), "CUDA_VISIBLE_DEVICES"
            except GPUAffinityError:
                return (), ""
        if parent in self.known:
            return self.known[parent][0], "parent" if self.known[parent][0] else ""
        return (), ""


def _or_unknown(node: int | None) -> str:
    return "unknown" if node is None else str(node)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _parent(pid: int) -> int | None:
    fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else None


def _tids(pid: int) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return []


def _environment(pid: int) -> bytes | None:
    """The environment it was started with; None where it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return None


def _visible(environment: bytes | None) -> str | None:
    for entry in (environment or b"").split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == b"CUDA_VISIBLE_DEVICES":
            return os.fsdecode(value)
    return None


def _memory(pid: int) -> dict[int, int] | None:
    """Bytes by node from numa_maps, whose lines end in ``N0=pages N1=pages kernelpagesize_kB=4``."""
    text = _text(f"/proc/{pid}/numa_maps")
    if not text:
        return None
    total: Counter[int] = Counter()
    for line in text.splitlines():
        size = re.search(r" kernelpagesize_kB=([0-9]+)", line)
        for node, pages in re.findall(r" N([0-9]+)=([0-9]+)", line):
            total[int(node)] += int(pages) * (int(size[1]) if size else 4) * 1024
    return dict(sorted(total.items()))
