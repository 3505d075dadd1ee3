"""The CPUs of one GPU's NUMA node, without reading the whole host."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import as_affinity_error
from ..gpus.devices import Gpu, normalize_bus_id
from ..topology.fsroot import fsroot_or_default

if TYPE_CHECKING:
    from ..drivers.base import Driver
    from ..topology.sysfs import SysfsTree


def node_cpus_of(
    gpu: Gpu, driver: Driver, fsroot: str | os.PathLike[str] | None = None
) -> tuple[frozenset[int], str] | None:
    """Return the CPUs of one GPU's node and the source of that fact. Reads only the lists of nodes.

    The set may have CPUs that are offline, and may lack CPUs that NVML hides from this process: intersect it with the
    process's mask. The result is None if the node has no CPUs, if the driver brings its own host topology, or if the
    node is unknown; :func:`~safe_gpu.topology.topology.read_topology` reads the whole host then.

    Raises:
        GPUAffinityError: the driver does not answer.
    """
    near = as_affinity_error(driver, lambda: driver.cpu_affinity(gpu.mig_parent or gpu.uuid, "node"))
    if near:
        return near, driver.name.partition(":")[0] or "driver"
    if (tree := _tree(driver, fsroot)) is None:
        return None
    _, cpus, source = tree.pci_place(normalize_bus_id(gpu.pci_bus_id), gpu.numa_node)
    return (cpus, source) if cpus else None


def node_memory(
    nodes: Iterable[int], driver: Driver, fsroot: str | os.PathLike[str] | None = None
) -> dict[int, tuple[int, int]]:
    """Return, for each NUMA node, its memory in bytes: all of it, and what is free.

    Nodes of which the kernel tells nothing are left out, as are all nodes of a host that the driver makes up.

    Raises:
        GPUAffinityError: the driver does not answer.
    """
    tree = _tree(driver, fsroot)
    return {node: memory for node in nodes if tree and (memory := tree.node_memory(node)) is not None}


def isolated_cpus(driver: Driver, fsroot: str | os.PathLike[str] | None = None) -> frozenset[int]:
    """Return the isolated CPUs of this host; none for a host that the driver makes up."""
    tree = _tree(driver, fsroot)
    return tree.isolated_cpus() if tree else frozenset()


def _tree(driver: Driver, fsroot: str | os.PathLike[str] | None) -> SysfsTree | None:
    root = fsroot_or_default(fsroot)
    if root == "/" and driver.is_simulated:
        return None
    from ..topology.sysfs import SysfsTree

    return SysfsTree(root)
