"""CPUs and memory next to the GPUs. Names are loaded when they are first used: a claim needs only a few of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .binding import BindingReport, PartReport, bind_process, original_mask, undo
    from .describe import affinity_json, affinity_table
    from .gpu_affinity import set_affinity, visible_indices
    from .modes import Mode, Multithreading, Scope
    from .numactl import wrap_command
    from .options import AffinityOptions, parse_options
    from .placements import PlacementReport, placement
    from .policies import plan
    from .shares import (
        ClaimShares,
        bind_claim,
        bind_near,
        claim_shares,
        memory_nodes,
        nodes_of_cpus,
        split_share,
        undo_binding,
    )
    from .topology import GpuLocality, HostTopology

__all__ = [
    "AffinityOptions",
    "BindingReport",
    "ClaimShares",
    "GpuLocality",
    "HostTopology",
    "Mode",
    "Multithreading",
    "PartReport",
    "PlacementReport",
    "Scope",
    "affinity_json",
    "affinity_table",
    "bind_claim",
    "bind_near",
    "bind_process",
    "claim_shares",
    "memory_nodes",
    "nodes_of_cpus",
    "original_mask",
    "parse_options",
    "placement",
    "plan",
    "set_affinity",
    "split_share",
    "undo",
    "undo_binding",
    "visible_indices",
    "wrap_command",
]

# Where each name lives.
_HOMES = {
    "binding": ("BindingReport", "PartReport", "bind_process", "original_mask", "undo"),
    "describe": ("affinity_json", "affinity_table"),
    "gpu_affinity": ("set_affinity", "visible_indices"),
    "modes": ("Mode", "Multithreading", "Scope"),
    "numactl": ("wrap_command",),
    "options": ("AffinityOptions", "parse_options"),
    "placements": ("PlacementReport", "placement"),
    "policies": ("plan",),
    "shares": (
        "ClaimShares",
        "bind_claim",
        "bind_near",
        "claim_shares",
        "memory_nodes",
        "nodes_of_cpus",
        "split_share",
        "undo_binding",
    ),
    "topology": ("GpuLocality", "HostTopology"),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
