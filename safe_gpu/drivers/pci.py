"""PCI bus ids: their order, which is nvidia-smi's order of GPUs, and the NUMA node that sysfs gives them."""

from __future__ import annotations

import os

# A domain has at most 8 digits. int() also reads signs, blanks, "_" and digits of other scripts.
_LONGEST = len("00000000:00:00.0")
_CHARACTERS = frozenset("0123456789abcdefABCDEF:.")


def bus_order(bus_id: str) -> tuple[int, ...] | None:
    """Sort key of a bus id: domain, bus, device and function as numbers; None where it is none.

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
    """The NUMA node of a PCI device by sysfs, read under ``SAFE_GPU_FSROOT``; None is unknown (sysfs says -1).

    This is where the card is plugged in. The driver's own notion of a GPU's NUMA node (``nvmlDeviceGetNumaNodeId``) is
    the node that the GPU's *memory* forms on coherent platforms, which is no place for CPUs.
    """
    if bus_order(bus_id) is None:
        return None
    root = os.environ.get("SAFE_GPU_FSROOT") or "/"
    try:
        node = int(_beginning(os.path.join(root, "sys/bus/pci/devices", bus_id, "numa_node")).strip(b"\0 \n"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def has_nvidia_gpu() -> bool:
    """Whether the kernel lists a display device of NVIDIA, with a driver or without, read under ``SAFE_GPU_FSROOT``."""
    devices = os.path.join(os.environ.get("SAFE_GPU_FSROOT") or "/", "sys/bus/pci/devices")
    try:
        found = os.listdir(devices)
    except OSError:
        return False
    paths = [os.path.join(devices, one) for one in found]
    return any(_starts(f"{path}/vendor", b"0x10de") and _starts(f"{path}/class", b"0x03") for path in paths)


def _starts(path: str, value: bytes) -> bool:
    try:
        return _beginning(path).lower().startswith(value)
    except OSError:
        return False


def _beginning(path: str) -> bytes:
    """The first bytes of a file. A FIFO in a saved tree does not block it."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(fd, 64)
    finally:
        os.close(fd)
