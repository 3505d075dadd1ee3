"""Bounded reading of ``/sys`` and ``/proc``, of this host or of a saved tree.

The root may be a saved tree (such as those of hwloc's tests), so any file may be missing, padded with NUL bytes or
malformed. A malformed file counts as missing. Nothing here raises because of the content of a tree, but where a
docstring says so.
"""

import os
import re
from contextlib import suppress

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
        given = os.environ.get("SAFE_GPU_FSROOT") or "/" if root is None else root
        try:
            self.root = os.path.normpath(os.fsdecode(given)) if given else "/"
        except TypeError as err:
            raise GPUAffinityError(f"fsroot must be a directory, not {given!r}") from err

    def read(self, path: str) -> str:
        """Return the text of a file without NULs and outer blanks.

        Raises:
            OSError: it cannot be read.
        """
        data = read_bytes(f"{self.root}/{path}", _READ_LIMIT)
        return data.replace(b"\0", b"").decode("utf-8", "replace").strip()

    def text(self, path: str) -> str | None:
        """Return the same; None if it is empty or cannot be read."""
        with suppress(OSError, ValueError):
            return self.read(path) or None
        return None

    def number(self, path: str, *, signed: bool = False) -> int | None:
        """Return the decimal number in a file, of at most 20 digits; None if there is none."""
        text = self.text(path)
        pattern = "-?[0-9]{1,20}" if signed else "[0-9]{1,20}"
        return int(text) if text is not None and re.fullmatch(pattern, text) else None

    def properties(self, path: str) -> dict[str, int]:
        """Return name -> number of a file of such lines; other lines are left out.

        Raises:
            OSError: it cannot be read.
        """
        return {name: int(value) for name, value in re.findall(r"(?m)^(\w{1,64}) ([0-9]{1,20})$", self.read(path))}

    def names(self, path: str) -> list[str]:
        """Return the entries of a directory, sorted."""
        with suppress(OSError, ValueError):
            return sorted(os.listdir(f"{self.root}/{path}"))
        return []

    def numbered(self, path: str, prefix: str = "") -> list[int]:
        """Return the numbers N of the entries ``prefixN`` of a directory, in order."""
        digits = (name[len(prefix) :] for name in self.names(path) if name.startswith(prefix))
        numbers = {int(text) for text in digits if text.isascii() and text.isdigit() and len(text) < 7}
        return sorted(number for number in numbers if number < LIMIT)

    def exists(self, path: str) -> bool:
        """Return whether there is such a file."""
        return os.path.exists(f"{self.root}/{path}")

    def cpus(self, path: str, mask: str = "") -> tuple[frozenset[int], str]:
        """Return the CPUs in the list ``path``, or else in the bit mask ``mask``, and the name of the file.

        The set is empty, and the name "", if neither has any.
        """
        for name, parse in ((path, parse_cpulist), (mask, parse_cpumask)):
            if name and (found := parse(self.text(name))):
                return found, name.rpartition("/")[2]
        return frozenset(), ""

    def pci_node(self, bus_id: str) -> int | None:
        """Return the NUMA node of a PCI device, negative if the firmware does not say; None without the file."""
        return self.number(f"{PCI}/{bus_id}/numa_node", signed=True) if bus_order(bus_id) else None

    def nvidia_gpus(self) -> dict[str, str]:
        """Return bus id -> UUID of NVIDIA's GPUs in bus order, "" for one that the kernel driver does not list.

        They are the display devices of vendor 0x10de, and those that the kernel driver lists.

        If the NVIDIA driver is loaded, a card that is bound to another driver (passed through to a virtual machine) is
        left out.
        """
        listed = {name: self._uuid(name) for name in self.names(_NVIDIA) if bus_order(name)}
        there = {name: "" for name in self.names(PCI) if bus_order(name) and self._is_gpu(name, loaded=bool(listed))}
        return dict(sorted((there | listed).items(), key=lambda one: bus_order(one[0]) or ()))

    def _is_gpu(self, bus_id: str, *, loaded: bool) -> bool:
        path = f"{PCI}/{bus_id}"
        vendor, kind = ((self.text(f"{path}/{name}") or "").lower() for name in ("vendor", "class"))
        if vendor != "0x10de" or not kind.startswith("0x03"):
            return False
        with suppress(OSError):
            return not loaded or os.path.basename(os.readlink(f"{self.root}/{path}/driver")) == "nvidia"
        return True

    def _uuid(self, bus_id: str) -> str:
        match = re.search(r"GPU UUID:\s*(GPU-[0-9A-Za-z-]{1,90})", self.text(f"{_NVIDIA}/{bus_id}/information") or "")
        return match[1] if match else ""
