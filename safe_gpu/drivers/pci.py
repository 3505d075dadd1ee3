"""PCI bus ids: their order, which is nvidia-smi's order of GPUs, and the NUMA node that sysfs gives them."""

from __future__ import annotations

import os

__all__ = ["bus_order", "numa_node"]


def bus_order(bus_id: str) -> tuple[int, ...] | None:
    """Sort key of a bus id: domain, bus, device and function as numbers; None where it is none.

    >>> bus_order("0000:0f:00.0") < bus_order("0000:c1:00.0") < bus_order("10000:01:00.0")
    True
    """
    try:
        domain, bus, rest = bus_id.split(":")
        device, _, function = rest.partition(".")
        return int(domain, 16), int(bus, 16), int(device, 16), int(function or "0", 16)
    except ValueError:
        return None


def numa_node(bus_id: str) -> int | None:
    """The NUMA node of a PCI device by sysfs, read under ``SAFE_GPU_FSROOT``; None is unknown (sysfs says -1).

    This is where the card is plugged in. The driver's own notion of a GPU's NUMA node (``nvmlDeviceGetNumaNodeId``) is
    the node that the GPU's *memory* forms on coherent platforms, which is no place for CPUs.
    """
    root = os.environ.get("SAFE_GPU_FSROOT") or "/"
    try:
        with open(os.path.join(root, "sys/bus/pci/devices", bus_id, "numa_node"), "rb") as file:
            node = int(file.read().strip(b"\0 \n"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
