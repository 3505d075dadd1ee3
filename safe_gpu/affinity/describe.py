"""A plan as people and programs read it: a table with one line for each GPU, and a JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .cpulist import format_cpulist
from .options import AffinityOptions
from .policies import is_remote
from .topology import HostTopology

__all__ = ["affinity_json", "affinity_table"]

_HEADER = ("GPU", "BUS", "NODE", "CPUS", "CORES", "MEMORY", "SOURCE")


def affinity_json(topology: HostTopology, options: AffinityOptions, shares: Sequence[frozenset[int]]) -> dict[str, Any]:
    """``{"mode", "gpus": [{"index", "uuid", "numa_node", "cpus"}]}``; ``shares`` are in the host's GPU order."""
    return {
        "mode": options.mode,
        "gpus": [
            {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "numa_node": topology.node_of(gpu),
                "cpus": format_cpulist(share),
            }
            for gpu, share in zip(topology.gpus, shares, strict=True)
        ],
    }


def affinity_table(topology: HostTopology, options: AffinityOptions, shares: Sequence[frozenset[int]]) -> str:
    """The plan as a table: GPU, bus, node, CPUs as ranges, physical cores, memory node, source of the fact."""
    rows = [_HEADER]
    notes = []
    for gpu, share in zip(topology.gpus, shares, strict=True):
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
            notes.append(f"GPU {gpu.index}: its CPUs are on another node, its own may not be used")
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"mode {options.mode}", *lines, *notes])
