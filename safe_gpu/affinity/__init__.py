"""CPU and memory binding next to GPUs: read a host's topology, plan CPU shares, bind, and report where processes run.

Nothing here claims a GPU or initialises CUDA. Names are imported on first use, because a claim needs only a few of
them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..topology.topology import GpuLocality, HostTopology, read_topology
    from .binding import BindingReport, PartReport, bind_process, original_mask, undo
    from .cpu_shares import (
        ClaimShares,
        bind_claim,
        bind_near,
        claim_shares,
        memory_nodes,
        nodes_of_cpus,
        split_share,
        undo_binding,
    )
    from .gpu_affinity import set_affinity
    from .numactl import wrap_command
    from .observed.placement_report import PlacementReport
    from .observed.placements import placement
    from .options import AffinityOptions, parse_options
    from .planning.enumerations import Mode, Multithreading, Scope
    from .planning.plan_text import affinity_json, affinity_table
    from .planning.planner import plan
    from .resolve_gpus import visible_indices

__all__ = [
    "AffinityOptions", "BindingReport", "ClaimShares", "GpuLocality", "HostTopology", "Mode", "Multithreading",
    "PartReport", "PlacementReport", "Scope", "affinity_json", "affinity_table", "bind_claim", "bind_near",
    "bind_process", "claim_shares", "memory_nodes", "nodes_of_cpus", "original_mask", "parse_options", "placement",
    "plan", "read_topology", "set_affinity", "split_share", "undo", "undo_binding", "visible_indices", "wrap_command",
]  # fmt: skip

# The module of each public name, as a relative module name without its first dot.
_HOMES = {
    "binding": "BindingReport PartReport bind_process original_mask undo",
    "planning.enumerations": "Mode Multithreading Scope",
    "planning.planner": "plan",
    "planning.plan_text": "affinity_json affinity_table",
    "gpu_affinity": "set_affinity",
    "numactl": "wrap_command",
    "resolve_gpus": "visible_indices",
    "options": "AffinityOptions parse_options",
    "observed.placement_report": "PlacementReport",
    "observed.placements": "placement",
    "cpu_shares": ("ClaimShares bind_claim bind_near claim_shares memory_nodes nodes_of_cpus split_share undo_binding"),
    ".topology.topology": "GpuLocality HostTopology read_topology",
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
