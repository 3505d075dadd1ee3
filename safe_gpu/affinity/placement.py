"""Compares the NUMA nodes on which processes run with the nodes of their GPUs.

A line is one mapping: address, policy, then facts such as ``N0=pages N1=pages kernelpagesize_kB=4`` (numa(7)). A
mapping without a policy of its own shows that of the process's main thread.

The data come from ``/proc``: the CPU on which a thread ran last, the CPUs and memory nodes that it may use, and the
nodes of its pages. The memory policy of the calling thread comes from get_mempolicy(2).
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from .. import drivers
from ..drivers.base import Driver
from ..errors import GPUAffinityError, SafeGpuError
from ..gpus.devices import Gpu, HostSnapshot
from ..host.foreign_files import printable, read_start
from ..host.procfs import command_of, descendants, lines_of, parent_of
from ..runtimes.visible_devices import visible_variables
from ..topology.cpulist import format_cpulist, parse_cpulist
from ..topology.host import GpuLocality, HostTopology, read_topology
from ..wording.text import plural
from .memory_policy import get_policy
from .planner import as_count, union
from .resolve_gpus import BOUND, Names, named, remembered, visible


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
        lines = [
            f"process {self.pid} ({self.command})",
            f"  GPU node: {format_cpulist(self.gpu_nodes) or 'unknown'} ({self._gpus_text()})",
            f"  CPU node: {_or_unknown(self.threads[0].node)} ({self._threads_text()})",
            *self._allowed_lines(),
            f"  memory nodes allowed (cpuset): {format_cpulist(self.threads[0].mems_allowed) or 'unknown'}",
            f"  memory policy: {self._policy_text()}",
        ]
        if self.memory is not None:
            parts = [f"node {node} {size / 2**20:,.0f} MiB" for node, size in self.memory.items()]
            lines.append(f"  memory pages: {', '.join(parts) or 'none yet'}")
        if self.matches is not None:
            lines.append(f"  GPU and CPU NUMA nodes {_match_text(self.matches)}")
        if self.memory_matches is not None:
            lines.append(f"  GPU node and memory policy {_match_text(self.memory_matches)}")
        return "\n".join(lines)

    def _gpus_text(self) -> str:
        if not self.gpus:
            return "no GPU is known for it"
        return f"GPU {', '.join(str(index) for index in self.gpus)} by {self.gpu_source}"

    def _threads_text(self) -> str:
        nodes = Counter(thread.node for thread in self.threads).most_common()
        counts = ", ".join(f"{plural(count, 'thread')} on node {_or_unknown(node)}" for node, count in nodes)
        return f"CPU {self.threads[0].cpu}; {counts}"

    def _allowed_lines(self) -> list[str]:
        lines = []
        for allowed, count in Counter(thread.cpus_allowed for thread in self.threads).most_common():
            line = f"  CPUs allowed: {format_cpulist(allowed)}"
            if count < len(self.threads):
                line += f" ({count} of {len(self.threads)} threads)"
            lines.append(line)
        return lines

    def _policy_text(self) -> str:
        policy = self.policy or "unknown"
        if len(self.policy_nodes) == 1:
            return f"{policy} on node {format_cpulist(self.policy_nodes)}"
        if self.policy_nodes:
            return f"{policy} on nodes {format_cpulist(self.policy_nodes)}"
        if policy == "default":
            return "default (the node of the CPU that first writes to a page)"
        return policy


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
        return "\n".join([*(str(process) for process in self.processes), *self.notes])

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON values: CPU and node sets as kernel lists ("0-3,8"), the keys of ``memory`` as
        strings."""
        rows = []
        for process in self.processes:
            rows.append({**asdict(process), "matches": process.matches, "memory_matches": process.memory_matches})
        report = {"matches": self.matches, "processes": rows, "notes": self.notes}
        plain: dict[str, Any] = json.loads(json.dumps(report, default=format_cpulist))
        return plain


def _all_known(matches: Iterable[bool | None]) -> bool | None:
    known = [match for match in matches if match is not None]
    if not known:
        return None
    return all(known)


def _or_unknown(node: int | None) -> str:
    if node is None:
        return "unknown"
    return str(node)


def _match_text(matches: bool) -> str:
    if matches:
        return "match"
    return "do NOT match"


# "bind:0-1", "prefer:0", "prefer (many):0", "bind=static:0", "default"
_POLICY = re.compile(rb"[0-9a-f]+ (weighted interleave|prefer \(many\)|[a-z]+)(?:=[a-z|]+)?(?::([0-9,-]+))?(?: |$)")

_NAMES = {b"prefer": "preferred", b"prefer (many)": "preferred"}


def parse_numa_maps(lines: Iterable[bytes]) -> dict[str, Any]:
    """Return what all mappings together show: ``memory``, ``policy`` (that of most) and ``policy_nodes`` of
    :class:`ProcessPlacement`. Empty if there are none, which means that the file may not be read."""
    total: Counter[int] = Counter()
    policies: Counter[tuple[bytes, bytes]] = Counter()
    for line in lines:
        policy = _POLICY.match(line)
        if policy:
            policies[policy[1], policy[2] or b""] += 1
        page_size = 4  # KiB
        told_size = re.search(rb" kernelpagesize_kB=([0-9]{1,18})\b", line)
        if told_size:
            page_size = int(told_size[1])
        for node, pages in re.findall(rb" N([0-9]{1,9})=([0-9]{1,18})\b", line):
            total[int(node)] += int(pages) * page_size * 1024
    if not policies:
        return {}
    [((name, nodes), _)] = policies.most_common(1)
    return {
        "memory": dict(sorted(total.items())),
        "policy": _NAMES.get(name) or name.decode(),
        "policy_nodes": parse_cpulist(nodes.decode()) or frozenset(),
    }


def placement(
    pid: int | None = None, *, driver: Driver | None = None, gpus: Names | None = None, ordinal: int | None = None
) -> PlacementReport:
    """Return where a process, its threads and its descendants run.

    Args:
        pid: None is this process.
        driver: the source of the process lists of the GPUs; None opens the one that ``SAFE_GPU_DRIVER`` names, if
            possible.
        gpus: indices of the process's GPUs as nvidia-smi shows them, or UUIDs. None takes, of each process, the first
            that is known: the driver's process lists, the GPUs next to which it was bound by number (SAFE_GPU_BOUND),
            CUDA_VISIBLE_DEVICES, and for a descendant the GPUs of its parent.
        ordinal: CUDA's number of the process's GPU in that process, instead of ``gpus``.

    Raises:
        GPUAffinityError: there is no such process or GPU, or it may not be read.

    A variable that another process has set since it started cannot be seen: give ``gpus`` for one that bound itself.
    """
    root = os.getpid()
    if pid is not None:
        root = as_count("pid", pid, 1)
    notes: list[str] = []
    snapshot = None
    try:
        driver = driver or drivers.open_driver()
        snapshot = driver.snapshot()
    except SafeGpuError as err:
        driver = None
        notes.append(f"the GPUs in use are not known: {err}")
    topology = read_topology(None, driver)
    reader = _Reader(topology, snapshot)
    if gpus is not None or ordinal is not None:
        reader.known[root] = (_given(gpus, ordinal, root, topology, snapshot), "given")
    processes = []
    for number in (root, *sorted(descendants(root))):
        process = reader.process(number)
        if process is not None:
            processes.append(process)
    if not processes or processes[0].pid != root:
        raise GPUAffinityError(f"there is no process {root} that can be read from here")
    return PlacementReport(tuple(processes), tuple(notes))


def _given(
    gpus: Names | None, ordinal: int | None, pid: int, topology: HostTopology, snapshot: HostSnapshot | None
) -> tuple[int, ...]:
    if snapshot is None:  # the kernel's list of GPUs has no UUIDs
        if ordinal is not None:
            raise GPUAffinityError(f"without a GPU driver it is not known which GPU CUDA's number {ordinal} is")
        names: Iterable[int | str] = ()
        if isinstance(gpus, (int, str)):
            names = [gpus]
        elif gpus is not None:
            names = gpus
        return tuple(_gpu_by_number(name, topology).index for name in names)
    chosen = named(gpus, ordinal, snapshot, _variables(pid) or {})
    return tuple(dict.fromkeys(topology.gpu(gpu.index).index for gpu in chosen.gpus))


def _gpu_by_number(name: int | str, topology: HostTopology) -> GpuLocality:
    if not str(name).isdecimal():
        return topology.gpu(-1)  # raises the error of a GPU that is not there
    return topology.gpu(int(name))


class _Reader:
    """Reads processes one by one, parents before children, and keeps the GPUs of each."""

    def __init__(self, topology: HostTopology, snapshot: HostSnapshot | None) -> None:
        self.topology = topology
        self.snapshot = snapshot
        self.places = {gpu.index: gpu for gpu in topology.gpus}
        self.node_of_cpu = {cpu: node for node, cpus in topology.nodes.items() for cpu in cpus}
        self.known: dict[int, tuple[tuple[int, ...], str]] = {}
        self._set = cache(lambda text: parse_cpulist(text) or frozenset[int]())  # most threads have the same ones

    def process(self, pid: int) -> ProcessPlacement | None:
        """Return one process; None if it has ended."""
        parent = parent_of(pid)
        if parent is None:
            return None
        if pid not in self.known:
            self.known[pid] = self._gpus_of(pid, parent)
        gpus, source = self.known[pid]
        places = [self.places[index] for index in gpus if index in self.places]
        near = union(self.topology.node_set(place) for place in places)
        threads = self._threads(pid, near)
        if not threads:
            return None
        nodes = {self.topology.node_of(place) for place in places}
        facts = parse_numa_maps(lines_of(f"/proc/{pid}/numa_maps"))
        if pid == os.getpid():
            own = get_policy()  # that of the calling thread
            if own is not None:
                facts["policy"] = own.name
                facts["policy_nodes"] = own.nodes
        return ProcessPlacement(
            pid,
            parent,
            command_of(pid, longest=60) or "?",
            threads,
            gpus=gpus,
            gpu_nodes=frozenset(node for node in nodes if node is not None),
            gpu_source=source,
            **facts,
        )

    def _threads(self, pid: int, near: frozenset[int]) -> tuple[ThreadPlacement, ...]:
        """Return the threads of a process, the main one first; none of one that has ended."""
        try:
            tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
        except OSError:
            return ()
        threads = [self._thread(f"/proc/{pid}/task/{tid}", tid, near) for tid in tids]
        return tuple(thread for thread in threads if thread is not None)

    def _thread(self, path: str, tid: int, near: frozenset[int]) -> ThreadPlacement | None:
        fields = _text(f"{path}/stat").rpartition(")")[2].split()
        status = dict(line.split(":\t", 1) for line in _text(f"{path}/status").split("\n") if ":\t" in line)
        if len(fields) <= 36 or not fields[36].isdecimal() or "Cpus_allowed_list" not in status:
            return None
        if fields[0] in "ZX":
            return None
        cpu = int(fields[36])
        allowed = self._set(status["Cpus_allowed_list"])
        matches = None
        if near:
            # /proc shows the last CPU of a sleeping thread, which may be from before the binding.
            matches = cpu in near or allowed <= near
        return ThreadPlacement(
            tid=tid,
            name=printable(status.get("Name", "")),
            cpu=cpu,
            node=self.node_of_cpu.get(cpu),
            cpus_allowed=allowed,
            mems_allowed=self._set(status.get("Mems_allowed_list", "")),
            matches=matches,
        )

    def _gpus_of(self, pid: int, parent: int) -> tuple[tuple[int, ...], str]:
        """Return the indices of the GPUs of a process, and how they are known."""
        if self.snapshot is None:
            return (), ""
        on = {gpu.index for gpu in self.snapshot.gpus for process in gpu.processes or () if process.pid == pid}
        if on:
            return tuple(sorted(on)), "driver"
        inherited: tuple[tuple[int, ...], str] = ((), "")
        if parent in self.known and self.known[parent][0]:
            inherited = self.known[parent][0], "parent"
        variables = _variables(pid)
        # /proc shows the environment at exec. A forked child therefore shows its parent's environment from before the
        # claim; the parent's GPUs are more recent.
        forked = pid != os.getpid() and (variables is None or variables == _variables(parent, at_exec=True))
        if parent in self.known and forked:
            return inherited
        environ = variables or {}
        bound = remembered(self.snapshot, environ)
        if bound is not None:
            return _indices(bound.gpus), BOUND
        for name in visible_variables(self.snapshot):
            if name in environ:
                return self._visible_gpus(environ, name)
        return inherited

    def _visible_gpus(self, environ: Mapping[str, str], name: str) -> tuple[tuple[int, ...], str]:
        assert self.snapshot is not None
        try:
            return _indices(visible(self.snapshot, environ).gpus), name
        except GPUAffinityError:
            return (), ""


def _indices(gpus: Iterable[Gpu]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(gpu.index for gpu in gpus))


def _text(path: str) -> str:
    return (read_start(path) or b"").decode("utf-8", "replace")


def _variables(pid: int, *, at_exec: bool = False) -> Mapping[str, str] | None:
    """Return a process's environment: as it is now for this process, else as it was at the start, its first 64 KiB.

    None if it may not be read.
    """
    if pid == os.getpid() and not at_exec:
        return os.environ
    text = read_start(f"/proc/{pid}/environ")
    if text is None:
        return None
    return dict(os.fsdecode(entry).split("=", 1) for entry in text.split(b"\0") if b"=" in entry)
