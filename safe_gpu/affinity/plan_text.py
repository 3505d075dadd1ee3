"""Renders an affinity plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..topology.cpulist import format_cpulist
from ..topology.host import GpuLocality, HostTopology
from ..wording.text import format_bytes
from .planner import AffinityOptions, is_remote

Shares = Mapping[GpuLocality, frozenset[int]]
"""The CPUs of each GPU that is shown."""


def affinity_json(topology: HostTopology, options: AffinityOptions, shares: Shares) -> dict[str, Any]:
    """Return the plan and the host's NUMA nodes.

    ``{"mode", "gpus": [{"index", "uuid", "numa_node", "cpus"}],
    "nodes": [{"node", "cpus", "memory_total", "memory_free", "distances"}]}``; memory is in bytes or null, and
    ``distances`` maps a node (as text) to the kernel's relative distance.
    """
    gpus = []
    for gpu, share in shares.items():
        gpus.append(
            {"index": gpu.index, "uuid": gpu.uuid, "numa_node": topology.node_of(gpu), "cpus": format_cpulist(share)}
        )
    nodes = []
    for node, cpus in sorted(topology.nodes.items()):
        total, free = topology.memory.get(node, (None, None))
        nodes.append(
            {
                "node": node,
                "cpus": format_cpulist(cpus),
                "memory_total": total,
                "memory_free": free,
                "distances": {str(to): distance for to, distance in topology.distances.get(node, {}).items()},
            }
        )
    return {"mode": options.mode, "gpus": gpus, "nodes": nodes}


def affinity_table(
    topology: HostTopology, options: AffinityOptions, shares: Shares, *, closed: frozenset[int] = frozenset()
) -> str:
    """Return the plan as a table: GPU, bus, node, CPUs as ranges, physical cores, memory node, source of the GPU's
    place. ``closed`` are CPUs of the host that may not be used here, which is told."""
    rows = [("GPU", "BUS", "NODE", "CPUS", "CORES", "MEMORY", "SOURCE")]
    notes = []
    if topology.isolated:
        notes.append(f"isolated CPUs are left out: {format_cpulist(topology.isolated)}")
    if closed:
        notes.append(f"CPUs that may not be used here are left out: {format_cpulist(closed)}")
    for gpu, share in shares.items():
        node = "?"
        memory = "-"
        number = topology.node_of(gpu)
        if number is not None:
            node = str(number)
            memory = format_cpulist(topology.nearest_memory(number))
        cores = [core for core in topology.cores if core & share]
        rows.append(
            (
                str(gpu.index),
                gpu.pci_bus_id or "-",
                node,
                format_cpulist(share),
                str(len(cores)),
                memory,
                gpu.source or "unknown",
            )
        )
        if is_remote(topology, gpu, share):
            notes.append(f"GPU {gpu.index}: its CPUs are on another node, because those of its own may not be used")
    return "\n".join([f"mode {options.mode}", *_aligned(rows), *notes])


def node_table(topology: HostTopology) -> str:
    """Return the NUMA nodes as a table: CPUs, size of the memory, what of it is free, and the distance to each node.

    Distances are the kernel's, relative to 10 for the node itself.
    """
    rows = [("NODE", "CPUS", "SIZE", "FREE", "DISTANCES")]
    for node, cpus in sorted(topology.nodes.items()):
        size = "-"
        free = "-"
        if node in topology.memory:
            size, free = (format_bytes(value) for value in topology.memory[node])
        distances = "-"
        row = topology.distances.get(node, {})
        if row:
            distances = " ".join(str(row.get(to, "-")) for to in sorted(topology.nodes))
        rows.append((str(node), format_cpulist(cpus) or "-", size, free, distances))
    return "\n".join(_aligned(rows))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(text) for text in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
