"""PCI bus ids: their order, which is nvidia-smi's order of GPUs, and their NUMA nodes."""

from ..host.foreign_files import read_start
from .kernel import under_root

# A domain has at most 8 digits. int() also reads signs, blanks, "_" and digits of other scripts.
_LONGEST = len("00000000:00:00.0")

_CHARACTERS = frozenset("0123456789abcdefABCDEF:.")


def bus_order(bus_id: str) -> tuple[int, ...] | None:
    """Return the sort key of a bus id: domain, bus, device and function as numbers; None where it is none.

    >>> bus_order("0000:0f:00.0") < bus_order("0000:c1:00.0") < bus_order("10000:01:00.0")
    True
    """
    if len(bus_id) > _LONGEST or not _CHARACTERS.issuperset(bus_id):
        return None
    try:
        domain, bus, rest = bus_id.split(":")
        device, _, function = rest.partition(".")
        return int(domain, 16), int(bus, 16), int(device, 16), int(function or "0", 16)
    except ValueError:
        return None


def numa_node(bus_id: str) -> int | None:
    """Return the NUMA node of a PCI device by sysfs, read under ``SAFE_GPU_FSROOT``; None is unknown (sysfs says -1).

    This is where the card is plugged in. The driver's own notion of a GPU's NUMA node (``nvmlDeviceGetNumaNodeId``) is
    the node that the GPU's *memory* forms on coherent platforms, which is no place for CPUs.
    """
    if bus_order(bus_id) is None:
        return None
    text = read_start(under_root(f"sys/bus/pci/devices/{bus_id}/numa_node"), 64) or b""
    node = text.strip(b"\0 \n")
    return int(node) if node.isdigit() else None
