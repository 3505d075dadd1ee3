"""CPU and memory binding next to GPUs: read a host's topology, plan CPU shares, bind, and report where processes run.

Nothing here claims a GPU or initialises CUDA. Names are imported on first use, because a claim needs only a few of
them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..topology.host import GpuLocality, HostTopology, read_topology
    from .binding import BindingReport, PartReport, bind_process, undo
    from .cpu_shares import ClaimShares, claim_shares, split_share
    from .gpu_affinity import set_affinity
    from .numactl import wrap_command
    from .observed.placement_report import PlacementReport
    from .observed.placements import placement
    from .options import AffinityOptions, parse_options
    from .planning.enumerations import Mode, Multithreading, Scope
    from .planning.plan_text import affinity_json, affinity_table
    from .planning.planner import plan

__all__ = [
    "AffinityOptions", "BindingReport", "ClaimShares", "GpuLocality", "HostTopology", "Mode", "Multithreading",
    "PartReport", "PlacementReport", "Scope", "affinity_json", "affinity_table", "bind_process", "claim_shares",
    "parse_options", "placement", "plan", "read_topology", "set_affinity", "split_share", "undo", "wrap_command",
]  # fmt: skip

# The module of each public name, as a relative module name without its first dot.
_HOMES = {
    "binding": "BindingReport PartReport bind_process undo",
    "planning.enumerations": "Mode Multithreading Scope",
    "planning.planner": "plan",
    "planning.plan_text": "affinity_json affinity_table",
    "gpu_affinity": "set_affinity",
    "numactl": "wrap_command",
    "options": "AffinityOptions parse_options",
    "observed.placement_report": "PlacementReport",
    "observed.placements": "placement",
    "cpu_shares": "ClaimShares claim_shares split_share",
    ".topology.host": "GpuLocality HostTopology read_topology",
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
