"""Saved sysfs trees of hosts with AMD GPUs: what the kernel shows of them, written below a directory."""

from pathlib import Path
from typing import Any

GIB = 1 << 30


class KfdHost:
    """A tree for ``SAFE_GPU_FSROOT``. GPUs are added in the kernel's order, after two nodes of CPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kfd = root / "sys/class/kfd/kfd"
        self.pci = root / "sys/bus/pci/devices"
        self._next = 0
        (self.kfd / "proc").mkdir(parents=True)
        for cores in (64, 64):
            self.node(gpu_id=0, cpu_cores_count=cores, simd_count=0)

    def node(self, *, gpu_id: int | str, **properties: Any) -> Path:
        """A node of the topology with these properties."""
        path = self.kfd / "topology/nodes" / str(self._next)
        self._next += 1
        path.mkdir(parents=True)
        (path / "gpu_id").write_text(f"{gpu_id}\n")
        (path / "properties").write_text("".join(f"{name} {value}\n" for name, value in properties.items()))
        return path

    def gpu(
        self,
        bus: int,
        gpu_id: int,
        unique_id: int,
        *,
        memory: int = 64 * GIB,
        used: int = 10 << 20,
        numa_node: int = 0,
        device_id: int = 0x740C,
        partition: int = 0,
        **properties: Any,
    ) -> Path:
        """A GPU, or one of several partitions: those share a bus number and its directory."""
        device = self.pci / f"0000:{bus:02x}:00.0"
        device.mkdir(parents=True, exist_ok=True)
        cpus = f"{numa_node * 64}-{numa_node * 64 + 63}"
        files = {"vendor": "0x1002", "class": "0x038000", "numa_node": numa_node, "local_cpulist": cpus}
        memories = {"mem_info_vram_total": memory, "mem_info_vram_used": used, "gpu_busy_percent": 0}
        for name, value in {**files, **memories}.items():
            (device / name).write_text(f"{value}\n")
        given = {
            "cpu_cores_count": 0, "simd_count": 440, "mem_banks_count": 1, "gfx_target_version": 90010,
            "vendor_id": 0x1002, "device_id": device_id, "location_id": bus << 8 | partition << 28, "domain": 0,
            "drm_render_minor": 128 + self._next, "hive_id": 0, "unique_id": unique_id, **properties,
        }  # fmt: skip
        return self.node(gpu_id=gpu_id, **given)

    def bank(self, node: Path, size: int) -> None:
        """The memory bank of a node."""
        (node / "mem_banks/0").mkdir(parents=True)
        (node / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {size}\nflags 0\n")

    def process(self, pid: int, *, queues: tuple[int, ...] = (), context: int | None = None, **vram: int) -> Path:
        """A process that has opened /dev/kfd: bytes by ``vram_<gpu_id>``, 0 on all GPUs that are not named."""
        place = self.kfd / "proc" / str(pid)
        place = place if context is None else place / f"context_{context}"
        (place / "queues").mkdir(parents=True, exist_ok=True)
        for node in (self.kfd / "topology/nodes").iterdir():
            gpu_id = (node / "gpu_id").read_text().strip()
            if gpu_id != "0":
                (place / f"vram_{gpu_id}").write_text(f"{vram.get(f'vram_{gpu_id}', 0)}\n")
        for number, gpu_id_of_queue in enumerate(queues):
            queue = place / "queues" / str(number)
            queue.mkdir()
            (queue / "gpuid").write_text(f"{gpu_id_of_queue}\n")
        return place
