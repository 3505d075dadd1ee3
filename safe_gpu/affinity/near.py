"""The short way to the CPUs of one GPU's node, which is all that most claims need to know of a host."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..devices import normalize_bus_id
from ..errors import GPUAffinityError, SafeGpuError

if TYPE_CHECKING:
    from ..devices import Gpu
    from ..drivers.base import Driver

__all__ = ["asked", "fsroot_or_default", "node_cpus_of"]

_T = TypeVar("_T")


def fsroot_or_default(fsroot: str | os.PathLike[str] | None) -> str:
    """The root to read under: as given, else ``SAFE_GPU_FSROOT``, else ``/``.

    Raises:
        GPUAffinityError: what was given is no path.
    """
    given = os.environ.get("SAFE_GPU_FSROOT") or "/" if fsroot is None else fsroot
    try:
        return os.path.normpath(os.fsdecode(given)) if given else "/"
    except TypeError as err:
        raise GPUAffinityError(f"fsroot must be a directory, not {given!r}") from err


def asked(driver: Driver, question: Callable[[], _T]) -> _T:
    """The driver's answer; its trouble as an affinity error."""
    try:
        return question()
    except GPUAffinityError:
        raise
    except SafeGpuError as err:
        raise GPUAffinityError(f"the GPU driver ({driver.name}) cannot say where its GPUs are: {err}") from err


def node_cpus_of(
    gpu: Gpu, driver: Driver, fsroot: str | os.PathLike[str] | None = None
) -> tuple[frozenset[int], str] | None:
    """The CPUs of one GPU's node and the source of the fact, reading no more than its node's list: under 0.2 ms.

    The set may hold CPUs that are offline, or lack CPUs that NVML hides from this process: cut it to the process's
    mask. None where the place is not told this cheaply (no CPUs on the node, a host that the driver brings, unknown):
    ask ``HostTopology.from_host``.

    Raises:
        GPUAffinityError: the driver does not answer.
    """
    near = asked(driver, lambda: driver.cpu_affinity(gpu.mig_parent or gpu.uuid, "node"))
    if near:
        return near, driver.name.partition(":")[0] or "driver"
    root = fsroot_or_default(fsroot)
    if root == "/" and asked(driver, lambda: driver.host_topology()) is not None:
        return None
    from .sysfs import Tree

    tree = Tree(root)
    bus_id = normalize_bus_id(gpu.pci_bus_id)
    node = tree.pci_node(bus_id)
    if node is None:
        node = gpu.numa_node
    if node is not None and node >= 0 and node in tree.node_ids():
        near = tree.node_cpus(node)
        return (near, "numa_node") if near else None
    return tree.pci_cpus(bus_id)
