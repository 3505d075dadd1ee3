"""Reads a host's topology: CPUs from sysfs, the place of a GPU from the driver (NVML's affinity), else from sysfs.

It does not initialise CUDA.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from ..devices import HostSnapshot, normalize_bus_id
from ..errors import GPUAffinityError, as_affinity_error
from ..settings import fsroot_or_default
from ..topology import GpuLocality, HostTopology, socket_around
from .sysfs import PciGpu, Tree


class GpuLocator(Protocol):
    """What is asked of a driver here; every :class:`~safe_gpu.drivers.base.Driver` is one."""

    @property
    def name(self) -> str: ...
    def snapshot(self) -> HostSnapshot: ...
    def cpu_affinity(self, uuid: str, scope: str) -> frozenset[int] | None: ...
    def host_topology(self) -> HostTopology | None: ...


def read_topology(fsroot: str | os.PathLike[str] | None = None, driver: GpuLocator | None = None) -> HostTopology:
    """Read a whole host. Takes tens of milliseconds for 256 CPUs.

    Args:
        fsroot: the directory that has ``sys`` and ``proc``, ``/`` for this host; None takes ``SAFE_GPU_FSROOT``,
            else ``/``. It may be a saved sysfs tree.
        driver: the driver whose GPUs are located, in its order. None finds NVIDIA GPUs in sysfs by PCI bus order, or,
            where there are none, AMD GPUs in the kernel's order. A driver with its own host topology (a simulated one)
            returns that, unless another root is given.

    Raises:
        GPUAffinityError: there is no online CPU under the root, or the driver does not answer.
    """
    root = fsroot_or_default(fsroot)
    if driver is not None and root == "/":
        own = as_affinity_error(driver, lambda: driver.host_topology())
        if own is not None:
            return own
    tree = Tree(root)
    online = tree.online_cpus()
    if not online:
        raise GPUAffinityError(
            f"there is no online CPU with a topology under {root.rstrip('/')}/sys/devices/system/cpu: "
            "give the root of a host's /sys (SAFE_GPU_FSROOT), or claim with affinity=None"
        )
    cores = tree.cores(online)
    nodes = tree.nodes(online)
    packages = tree.packages(online, cores)
    host = HostTopology(
        cpus=online,
        cores=cores,
        nodes=nodes,
        packages=packages,
        llc=tree.last_level_caches(online, nodes, packages),
        distances=tree.distances(nodes),
    )
    return replace(host, gpus=tuple(_located_gpus(tree, host, driver)))


def _located_gpus(tree: Tree, host: HostTopology, driver: GpuLocator | None) -> Iterable[GpuLocality]:
    if driver is None:
        for index, found in enumerate(tree.pci_gpus() or _amd_gpus(tree.root)):
            yield _by_pci(tree, host, index, found.uuid, found.bus_id, None)
        return
    for gpu in as_affinity_error(driver, lambda: driver.snapshot()).physical:
        bus_id = normalize_bus_id(gpu.pci_bus_id)
        by_pci = _by_pci(tree, host, gpu.index, gpu.uuid, bus_id, gpu.numa_node)
        yield _by_driver(tree, host, driver, by_pci)


def _amd_gpus(root: str) -> list[PciGpu]:
    from ..drivers import kfd_nodes

    return [PciGpu(device.bus_id, device.uuid) for device in kfd_nodes.devices(kfd_nodes.Tree(root)) or ()]


def _by_driver(tree: Tree, host: HostTopology, driver: GpuLocator, by_pci: GpuLocality) -> GpuLocality:
    """The place of a GPU according to the driver; ``by_pci`` if the driver does not know it."""

    def told(scope: str) -> frozenset[int]:
        return (as_affinity_error(driver, lambda: driver.cpu_affinity(by_pci.uuid, scope)) or frozenset()) & host.cpus

    near = told("node")
    if not near:
        return by_pci
    socket = told("socket")
    if tree.root == "/":
        near, socket = _unfiltered(near, host.nodes), _unfiltered(socket, host.packages)
    node = next((node for node, cpus in host.nodes.items() if near <= cpus), None)
    if node is None and near & host.nodes.get(-1 if by_pci.numa_node is None else by_pci.numa_node, frozenset()):
        node = by_pci.numa_node
    socket = socket | near if socket else socket_around(near, host.nodes, host.packages)
    return GpuLocality(
        by_pci.index, by_pci.uuid, node, near, socket, by_pci.pci_bus_id, driver.name.partition(":")[0] or "driver"
    )


def _unfiltered(told: frozenset[int], groups: Mapping[int, frozenset[int]]) -> frozenset[int]:
    """NVML's answer before NVML intersected it with this process's cpuset.

    Cores are divided over the whole host, so that jobs in different cpusets compute the same shares. A group counts as
    whole if every CPU of it that is missing in the answer is one that this process may not use.
    """
    usable = os.sched_getaffinity(0)
    whole = set(told)
    for cpus in groups.values():
        if told & cpus and not (cpus - told) & usable:
            whole |= cpus
    return frozenset(whole)


def _by_pci(tree: Tree, host: HostTopology, index: int, uuid: str, bus_id: str, told_node: int | None) -> GpuLocality:
    """The place of a GPU from its PCI device; ``told_node`` is the driver's node, for a device that sysfs lacks."""
    node = tree.pci_node(bus_id)
    if node is None:
        node = told_node
    local = tree.pci_cpus(bus_id)
    near = local[0] & host.cpus if local else frozenset()
    source = local[1] if local and near else ""
    if node is not None and node in host.nodes:
        near, source = host.nodes[node] or near, "numa_node"
    elif near:
        node = next((node for node, cpus in host.nodes.items() if near <= cpus), None)
    elif len(host.nodes) == 1:
        (node, near), source = next(iter(host.nodes.items())), "only node"
    else:
        node = None
    return GpuLocality(index, uuid, node, near, socket_around(near, host.nodes, host.packages), bus_id, source)
