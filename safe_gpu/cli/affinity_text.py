"""What ``safe-gpu affinity`` prints: the CPUs of each GPU, or where a process runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..drivers import opened_driver
from ..errors import GPUAffinityError

if TYPE_CHECKING:
    from ..affinity.resolve_gpus import Names
    from ..drivers.base import Driver


def affinity_text(
    *,
    mode: str,
    scope: str,
    multithreading: str,
    balanced: bool,
    min_physical_cores: int,
    max_physical_cores: int | None,
    allowed: str | None,
    gpus: Names | None,
    ordinal: int | None,
    as_json: bool,
) -> str:
    """The CPUs of each GPU of the host, or of some, and the host's NUMA nodes, as tables or as JSON.

    ``allowed`` is a CPU list; None is this process's mask, or every CPU of a simulated host. Shares are divided among
    all GPUs of the host, whichever are shown.
    """
    from ..affinity import AffinityOptions, affinity_json, affinity_table, plan, read_topology
    from ..affinity.cpu_shares import node_memory
    from ..affinity.options import doubt_about
    from ..affinity.planner import node_table
    from ..cpulist import parse_cpulist

    options = AffinityOptions(mode, scope, multithreading, balanced, min_physical_cores, max_physical_cores)
    with opened_driver() as driver:
        topology = read_topology(None, driver)
        usable = _usable(driver) if allowed is None else parse_cpulist(allowed)
        memory = node_memory(topology.nodes, driver)
        shown = _shown(gpus, ordinal, driver)
    if allowed is not None and not usable:
        raise GPUAffinityError(f"--allowed={allowed} names no CPU: write a list such as 0-15,128-143")
    shares = plan(topology, **options._asdict(), allowed=usable)
    if as_json:
        return _json(affinity_json(topology, options, shares, memory, shown))
    doubt = doubt_about(options)
    gpu_table = affinity_table(topology, options, shares, shown) + (f"\n{doubt}" if doubt else "")
    return f"{gpu_table}\n\n{node_table(topology, memory)}"


def _shown(gpus: Names | None, ordinal: int | None, driver: Driver) -> list[int] | None:
    """The indices of the GPUs to show; None for all."""
    from ..affinity.resolve_gpus import by_name, by_ordinal

    if ordinal is not None:
        return [gpu.index for gpu in by_ordinal(ordinal, driver.snapshot(), os.environ).gpus]
    return None if gpus is None else [gpu.index for gpu in by_name(gpus, driver.snapshot()).gpus]


def _usable(driver: Driver) -> frozenset[int] | None:
    """This process's mask, where the topology is this host's."""
    from ..affinity.binding import original_mask
    from ..settings import fsroot_or_default

    foreign = fsroot_or_default(None) != "/" or driver.host_topology() is not None
    return None if foreign else original_mask()


def placement_text(pid: int, *, gpus: Names | None, ordinal: int | None, as_json: bool) -> str:
    """Where a process, its threads and its children really run."""
    from ..affinity.placements import placement

    report = placement(pid, gpus=gpus, ordinal=ordinal)
    if not as_json:
        return str(report)
    return _json(report.as_dict())


def _json(value: dict[str, Any]) -> str:
    import json

    return json.dumps(value, indent=2, default=sorted)
