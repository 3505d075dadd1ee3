"""Checks of the limits of this process, and of its CPU mask."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import GPUAffinityError
from .check import CheckedHost, Finding, labels, passed, skipped, warning, with_snapshot

if TYPE_CHECKING:
    from ..gpus.devices import HostSnapshot


def address_space(host: CheckedHost) -> Finding:
    """Check that the address space is not limited. Batch systems set that limit for memory, and CUDA may fail under
    it."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return passed("not limited")
    return warning(
        f"limited to {limit / (1 << 30):.1f} GiB: CUDA reserves more address space than the memory of the host and its "
        "GPUs together, and may fail with an out-of-memory error",
        "limit memory in another way than h_vmem or ulimit -v (such as m_mem_free, cgroups), or ulimit -v unlimited",
    )


@with_snapshot
def cpu_mask(host: CheckedHost, snapshot: HostSnapshot) -> Finding:
    """Check that this process may use the CPUs next to the GPUs."""
    if host.simulated:
        return skipped("the CPUs next to simulated GPUs are simulated too")
    from ..topology.host import read_topology

    try:
        topology = read_topology(driver=host.driver)
    except GPUAffinityError as err:
        return warning(str(err), "claim with affinity=None (--affinity none)")
    mask = frozenset(os.sched_getaffinity(0))
    by_uuid = {gpu.uuid: gpu for gpu in snapshot.physical}
    remote, narrowed = [], []
    for place in topology.gpus:
        gpu = by_uuid.get(place.uuid)
        if gpu is None or not place.source:
            continue  # it is not known which CPUs are next to it
        near = topology.unisolated(topology.node_set(place))
        if not near & mask:
            remote.append(gpu)
        elif near - mask:
            narrowed.append(gpu)
    fix = "ask the batch system for cores next to the GPUs, or lift the binding (taskset -pc, mpirun --bind-to none)"
    if remote:
        return warning(f"{labels(remote)}: this process may use no CPU next to it, but {len(mask)} elsewhere", fix)
    if narrowed:
        return warning(
            f"{labels(narrowed)}: this process may use only some of the CPUs next to it, {len(mask)} in all", fix
        )
    return passed(f"all CPUs next to the GPUs may be used, {len(mask)} in all")


_OPENMP = {"OMP_PROC_BIND": ("", "false"), "GOMP_CPU_AFFINITY": ("",), "KMP_AFFINITY": ("", "disabled", "none")}


def openmp(host: CheckedHost) -> Finding:
    """Check that no variable of OpenMP moves threads away from the CPUs to which a claim binds them."""
    for name, harmless in _OPENMP.items():
        value = host.environ.get(name)
        if value is not None and value.lower() not in harmless:
            return warning(
                f"{name}={value}: OpenMP binds threads itself when it is loaded, which undoes the binding of the claim",
                f"unset {name}, or claim with affinity=None (--affinity none)",
            )
    return passed("no variable makes OpenMP bind threads")
