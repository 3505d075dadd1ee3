"""Renders an affinity plan: a table with one line for each GPU, one for each NUMA node, and a JSON document."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..cpulist import format_cpulist
from ..topology import GpuLocality, HostTopology
from .options import AffinityOptions
from .policies import is_remote

_HEADER = ("GPU", "BUS", "NODE", "CPUS", "CORES", "MEMORY", "SOURCE")


def affinity_json(
    topology: HostTopology,
    options: AffinityOptions,
    shares: Sequence[frozenset[int]],
    memory: Mapping[int, tuple[int, int]] | None = None,
    shown: Collection[int] | None = None,
) -> dict[str, Any]:
    """The plan and the host's NUMA nodes.

    ``{"mode", "gpus": [{"index", "uuid", "numa_node", "cpus"}],
    "nodes": [{"node", "cpus", "memory_total", "memory_free", "distances"}]}``; memory is in bytes or null, and
    ``distances`` maps a node (as text) to the kernel's relative distance.

    Args:
        shares: one for each GPU, in the host's GPU order.
        memory: node -> bytes, all and free.
        shown: indices of the GPUs to show; None for all.
    """
    known = memory or {}
    return {
        "mode": options.mode,
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "numa_node": topology.node_of(gpu),
                "cpus": format_cpulist(share),
            }
            for gpu, share in _rows(topology, shares, shown)
        ],
        "nodes": [
            {
                "node": node,
                "cpus": format_cpulist(cpus),
                "memory_total": known[node][0] if node in known else None,
                "memory_free": known[node][1] if node in known else None,
                "distances": {str(to): far for to, far in topology.distances.get(node, {}).items()},
            }
            for node, cpus in sorted(topology.nodes.items())
        ],
    }


def affinity_table(
    topology: HostTopology,
    options: AffinityOptions,
    shares: Sequence[frozenset[int]],
    shown: Collection[int] | None = None,
) -> str:
    """The plan as a table: GPU, bus, node, CPUs as ranges, physical cores, memory node, source of the GPU's place."""
    rows = [_HEADER]
    notes = []
    for gpu, share in _rows(topology, shares, shown):
        node = topology.node_of(gpu)
        cores = sum(not core.isdisjoint(share) for core in topology.cores)
        rows.append(
            (
                str(gpu.index),
                gpu.pci_bus_id or "-",
                "?" if node is None else str(node),
                format_cpulist(share),
                str(cores),
                "-" if node is None else str(node),
                gpu.source or "unknown",
            )
        )
        if is_remote(topology, gpu, share):
            notes.append(f"GPU {gpu.index}: its CPUs are on another node, because those of its own may not be used")
    return "\n".join([f"mode {options.mode}", *_aligned(rows), *notes])


def node_table(topology: HostTopology, memory: Mapping[int, tuple[int, int]]) -> str:
    """The NUMA nodes as a table: CPUs, size of the memory, what of it is free, and the distance to each node.

    Distances are the kernel's, relative to 10 for the node itself.
    """
    from ..text import format_bytes

    rows = [("NODE", "CPUS", "SIZE", "FREE", "DISTANCES")]
    for node, cpus in sorted(topology.nodes.items()):
        sizes = [format_bytes(value) for value in memory[node]] if node in memory else ["-", "-"]
        row = topology.distances.get(node, {})
        distances = " ".join(str(row.get(to, "-")) for to in sorted(topology.nodes)) if row else "-"
        rows.append((str(node), format_cpulist(cpus) or "-", sizes[0], sizes[1], distances))
    return "\n".join(_aligned(rows))


def _rows(
    topology: HostTopology, shares: Sequence[frozenset[int]], shown: Collection[int] | None
) -> Iterable[tuple[GpuLocality, frozenset[int]]]:
    for gpu, share in zip(topology.gpus, shares, strict=True):
        if shown is None or gpu.index in shown:
            yield gpu, share


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
