"""PCI bus ids: their order, which is nvidia-smi's order of GPUs, and their NUMA nodes."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..gpus.devices import Gpu
from ..gpus.devices import bus_order as bus_order
from ..host.foreign_files import read_start
from .kernel import under_root

_Thing = TypeVar("_Thing")


def in_bus_order(found: Iterable[tuple[str, int, _Thing]]) -> list[_Thing]:
    """Return GPUs by PCI bus id, as nvidia-smi numbers them. Those without one are put at the places that their numbers
    give, in the given order.

    Args:
        found: bus id, number and GPU.
    """
    keyed = [(bus_order(bus_id), number, gpu) for bus_id, number, gpu in found]
    ordered = [gpu for _, gpu in sorted(((key, gpu) for key, _, gpu in keyed if key), key=lambda pair: pair[0])]
    for key, number, gpu in keyed:
        if key is None:
            ordered.insert(number, gpu)
    return ordered


def numa_node(bus_id: str, near: Callable[[], frozenset[int] | None] = lambda: None) -> int | None:
    """Return the NUMA node of a PCI device, read under ``SAFE_GPU_FSROOT``; None is unknown.

    It is sysfs's. Where sysfs does not tell (-1), it is the only node that has CPUs, else the one that has all CPUs
    near the device.

    This is where the card is plugged in. The driver's own notion of a GPU's NUMA node (``nvmlDeviceGetNumaNodeId``) is
    the node that the GPU's *memory* forms on coherent platforms, which is no place for CPUs.

    Args:
        near: returns the driver's word for the CPUs near it, and is asked where sysfs does not tell.
    """
    if bus_order(bus_id) is not None:
        text = read_start(under_root(f"sys/bus/pci/devices/{bus_id}/numa_node"), 64) or b""
        node = text.strip(b"\0 \n")
        if node.isdigit():
            return int(node)
    from ..topology.files import Files  # most hosts need none of it
    from ..topology.host import SysfsHost, node_of_cpus

    host = SysfsHost(Files())
    node_by_sysfs, _, _ = host.place(Gpu(0, "", pci_bus_id=bus_id))
    return node_of_cpus(near() or frozenset(), host.nodes) if node_by_sysfs is None else node_by_sysfs
