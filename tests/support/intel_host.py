"""Saved sysfs trees of hosts with Intel GPUs, with the open files of processes."""

import os
from pathlib import Path

from support.gpus import PACKAGE_ROOT

GIB = 1 << 30


class IntelHost:
    """A tree for ``SAFE_GPU_FSROOT``: GPUs are added in any order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._minor = 0
        for path in ("proc", "dev/dri", "sys/class/drm", "sys/bus/pci/drivers/xe", "sys/bus/pci/drivers/i915"):
            (root / path).mkdir(parents=True)

    def gpu(self, bus_id: str, device: int = 0x0BD5, *, driver: str = "xe", tiles: int = 1, memory: int = 0) -> Path:
        """A GPU with a render node; its memory, which is divided among the tiles, is told where it is not 0."""
        path = self.root / "sys/bus/pci/devices" / bus_id
        drm = path / f"drm/card{self._minor}"
        drm.mkdir(parents=True)
        (path / "driver").symlink_to(self.root / "sys/bus/pci/drivers" / driver)
        files = {"vendor": "0x8086", "class": "0x038000", "numa_node": "1", "device": f"0x{device:04x}"}
        for tile in range(tiles):
            place = path / f"tile{tile}" if driver == "xe" else drm / f"gt/gt{tile}"
            place.mkdir(parents=True)
            if driver == "xe" and memory:
                (place / "physical_vram_size_bytes").write_text(f"{memory // tiles}\n")
        if driver == "i915" and memory:
            (drm / "lmem_total_bytes").write_text(f"{memory}\n")
        for name, value in files.items():
            (path / name).write_text(f"{value}\n")
        node = f"renderD{128 + self._minor}"
        (self.root / "dev/dri" / node).touch()
        (self.root / "sys/class/drm" / node).mkdir()
        (self.root / "sys/class/drm" / node / "device").symlink_to(path)
        self._minor += 1
        return path

    def client(
        self, pid: int, bus_id: str, *lines: str, number: int = 5, identity: int = 1, driver: str = "xe"
    ) -> None:
        """A file of a process that is a client of DRM on this GPU, with these further lines."""
        place = self.root / "proc" / str(pid)
        for name in ("fd", "fdinfo"):
            (place / name).mkdir(parents=True, exist_ok=True)
        (place / "fd" / str(number)).symlink_to("/dev/dri/renderD128")
        text = [f"drm-driver:\t{driver}", f"drm-client-id:\t{identity}", f"drm-pdev:\t{bus_id}", *lines]
        (place / "fdinfo" / str(number)).write_text("pos:\t0\nflags:\t0100002\n" + "\n".join(text) + "\n")

    def private(self, pid: int) -> None:
        """A process whose open files cannot be read, as those of another user."""
        (self.root / "proc" / str(pid)).mkdir()
        (self.root / "proc" / str(pid) / "fd").touch()

    @property
    def env(self) -> dict[str, str]:
        """os.environ with these GPUs in place of any others."""
        here = {"LD_LIBRARY_PATH": str(self.root), "SAFE_GPU_FSROOT": str(self.root), "SAFE_GPU_DRIVER": "intel"}
        return {**os.environ, **here, "PYTHONPATH": str(PACKAGE_ROOT)}
