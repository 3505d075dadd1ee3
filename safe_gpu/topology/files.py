"""Bounded reading of ``/sys`` and ``/proc``, of this host or of a saved tree.

The root may be a saved tree (such as those of hwloc's tests), so any file may be missing, padded with NUL bytes or
malformed. A malformed file counts as missing. Nothing here raises because of the content of a tree, but where a
docstring says so.
"""

import os
import re

from ..errors import GPUAffinityError
from ..gpus.devices import bus_order
from ..host.foreign_files import read_bytes
from .cpulist import LIMIT, parse_cpulist, parse_cpumask

PCI = "sys/bus/pci/devices"

_NVIDIA = "proc/driver/nvidia/gpus"

_READ_LIMIT = 1 << 20


class Files:
    """Reads files under one root directory, with bounds. What is missing or malformed is None, or an empty list.

    Args:
        root: None takes ``SAFE_GPU_FSROOT``, else ``/``.

    Raises:
        GPUAffinityError: ``root`` is not a path.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None) -> None:
        if root is None:
            root = os.environ.get("SAFE_GPU_FSROOT")
        try:
            self.root = os.path.normpath(os.fsdecode(root or "/"))
        except TypeError as err:
            raise GPUAffinityError(f"fsroot must be a directory, not {root!r}") from err

    def read(self, path: str) -> str:
        """Return the text of a file without NULs and outer blanks.

        Raises:
            OSError: it cannot be read.
        """
        data = read_bytes(f"{self.root}/{path}", _READ_LIMIT)
        return data.replace(b"\0", b"").decode("utf-8", "replace").strip()

    def text(self, path: str) -> str | None:
        """Return the same; None if it is empty or cannot be read."""
        try:
            return self.read(path) or None
        except (OSError, ValueError):
            return None

    def number(self, path: str, *, signed: bool = False) -> int | None:
        """Return the decimal number in a file, of at most 20 digits; None if there is none."""
        text = self.text(path) or ""
        sign = "-?" if signed else ""
        if not re.fullmatch(f"{sign}[0-9]{{1,20}}", text):
            return None
        return int(text)

    def properties(self, path: str) -> dict[str, int]:
        """Return name -> number of a file of such lines; other lines are left out.

        Raises:
            OSError: it cannot be read.
        """
        return {name: int(value) for name, value in re.findall(r"(?m)^(\w{1,64}) ([0-9]{1,20})$", self.read(path))}

    def names(self, path: str) -> list[str]:
        """Return the entries of a directory, sorted."""
        try:
            return sorted(os.listdir(f"{self.root}/{path}"))
        except (OSError, ValueError):
            return []

    def numbered(self, path: str, prefix: str = "") -> list[int]:
        """Return the numbers N of the entries ``prefixN`` of a directory, in order."""
        numbers = set()
        for name in self.names(path):
            digits = name.removeprefix(prefix)
            if name.startswith(prefix) and re.fullmatch("[0-9]{1,6}", digits) and int(digits) < LIMIT:
                numbers.add(int(digits))
        return sorted(numbers)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        return os.path.exists(f"{self.root}/{path}")

    def cpulist(self, path: str) -> frozenset[int]:
        """Return the numbers in a kernel list."""
        return parse_cpulist(self.text(path)) or frozenset()

    def cpumask(self, path: str) -> frozenset[int]:
        """Return the numbers in a kernel bit mask, which old kernels have instead."""
        return parse_cpumask(self.text(path)) or frozenset()

    def pci_node(self, bus_id: str) -> int | None:
        """Return the NUMA node of a PCI device, negative if the firmware does not say; None without the file."""
        if bus_order(bus_id) is None:
            return None
        return self.number(f"{PCI}/{bus_id}/numa_node", signed=True)

    def nvidia_gpus(self) -> dict[str, str]:
        """Return bus id -> UUID of NVIDIA's GPUs in bus order, "" for one that the kernel driver does not list.

        They are the display devices of vendor 0x10de, and those that the kernel driver lists.

        If the NVIDIA driver is loaded, a card that is bound to another driver (passed through to a virtual machine) is
        left out.
        """
        listed = {bus_id: self._uuid(bus_id) for bus_id in self._bus_ids(_NVIDIA)}
        found = {bus_id: "" for bus_id in self._bus_ids(PCI) if self._is_gpu(bus_id, loaded=bool(listed))}
        found |= listed
        return {bus_id: found[bus_id] for bus_id in sorted(found, key=lambda bus_id: bus_order(bus_id) or ())}

    def _bus_ids(self, path: str) -> list[str]:
        return [name for name in self.names(path) if bus_order(name) is not None]

    def _is_gpu(self, bus_id: str, *, loaded: bool) -> bool:
        path = f"{PCI}/{bus_id}"
        vendor = (self.text(f"{path}/vendor") or "").lower()
        kind = (self.text(f"{path}/class") or "").lower()
        if vendor != "0x10de" or not kind.startswith("0x03"):
            return False
        if not loaded:
            return True
        try:
            driver = os.readlink(f"{self.root}/{path}/driver")
        except OSError:
            return True
        return os.path.basename(driver) == "nvidia"

    def _uuid(self, bus_id: str) -> str:
        information = self.text(f"{_NVIDIA}/{bus_id}/information") or ""
        match = re.search(r"GPU UUID:\s*(GPU-[0-9A-Za-z-]{1,90})", information)
        if match is None:
            return ""
        return match[1]
