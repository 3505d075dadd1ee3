"""Hosts with AMD and Intel GPUs: saved sysfs trees, for ``SAFE_GPU_FSROOT``, and a fake HIP over one; a fake CUDA."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.gpus import PACKAGE_ROOT, run_python

from safe_gpu.runtimes.hip import HIP

GIB = 1 << 30


def _write(place: Path, values: Mapping[str, object]) -> Path:
    """Have these files in a directory."""
    place.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (place / name).write_text(f"{value}\n")
    return place


def _environment(root: Path, libraries: Path, driver: str) -> dict[str, str]:
    """os.environ with the GPUs of a tree in place of any others."""
    here = {"LD_LIBRARY_PATH": str(libraries), "SAFE_GPU_FSROOT": str(root), "SAFE_GPU_DRIVER": driver}
    return {**os.environ, **here, "PYTHONPATH": str(PACKAGE_ROOT)}


class KfdHost:
    """One with AMD GPUs, which are added in the kernel's order, after two nodes of CPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kfd = root / "sys/class/kfd/kfd"
        self.pci = root / "sys/bus/pci/devices"
        self._next = 0
        (self.kfd / "proc").mkdir(parents=True)
        for _ in range(2):
            self.node(gpu_id=0, cpu_cores_count=64, simd_count=0)

    def node(self, *, gpu_id: int | str, **properties: Any) -> Path:
        """A node of the topology with these properties."""
        lines = "\n".join(f"{name} {value}" for name, value in properties.items())
        path = self.kfd / "topology/nodes" / str(self._next)
        self._next += 1
        return _write(path, {"gpu_id": gpu_id, "properties": lines})

    def gpu(
        self,
        bus: int,
        gpu_id: int,
        unique_id: int,
        *,
        memory: int = 64 * GIB,
        used: int = 10 << 20,
        numa_node: int = 0,
        partition: int = 0,
        **properties: Any,
    ) -> Path:
        """A GPU, or one of several partitions: those share a bus number and its directory."""
        cpus = f"{numa_node * 64}-{numa_node * 64 + 63}"
        files = {"vendor": "0x1002", "class": "0x038000", "numa_node": numa_node, "local_cpulist": cpus}
        memories = {"mem_info_vram_total": memory, "mem_info_vram_used": used, "gpu_busy_percent": 0}
        _write(self.pci / f"0000:{bus:02x}:00.0", {**files, **memories})
        given = {
            "cpu_cores_count": 0, "simd_count": 440, "mem_banks_count": 1, "gfx_target_version": 90010,
            "vendor_id": 0x1002, "device_id": 0x740C, "location_id": bus << 8 | partition << 28, "domain": 0,
            "drm_render_minor": 128 + self._next, "hive_id": 0, "unique_id": unique_id, **properties,
        }  # fmt: skip
        return self.node(gpu_id=gpu_id, **given)

    def bank(self, node: Path, size: int) -> None:
        """The memory bank of a node."""
        _write(node / "mem_banks/0", {"properties": f"heap_type 1\nsize_in_bytes {size}\nflags 0"})

    def process(self, pid: int, *, queues: tuple[int, ...] = (), context: int | None = None, **vram: int) -> Path:
        """A process that has opened /dev/kfd: bytes by ``vram_<gpu_id>``, 0 on all GPUs that are not named."""
        place = self.kfd / "proc" / str(pid)
        place = place if context is None else place / f"context_{context}"
        (place / "queues").mkdir(parents=True, exist_ok=True)
        for node in (self.kfd / "topology/nodes").iterdir():
            name = f"vram_{(node / 'gpu_id').read_text().strip()}"
            if name != "vram_0":
                _write(place, {name: vram.get(name, 0)})
        for number, gpu_id in enumerate(queues):
            _write(place / "queues" / str(number), {"gpuid": gpu_id})
        return place


class HipHost(KfdHost):
    """Equal AMD GPUs behind a fake libamdhip64, whose allocations show in the tree.

    Names of claimed GPUs are one for the whole machine, so the UUIDs are this test's own.
    """

    def __init__(self, root: Path, library: Path, count: int = 8) -> None:
        super().__init__(root)
        self.library = library
        self.uuids: list[str] = []
        _write(root / "dev", {"kfd": ""})
        own = int.from_bytes(os.urandom(6), "big") << 16
        for number in range(count):
            self.gpu(0xC1 + number, 100 + number, own + number + 1)
            self.uuids.append(f"GPU-{own + number + 1:016x}")
        self.describe()

    def describe(self, order: list[int] | None = None) -> None:
        """What HIP sees, in an order that need not be the kernel's."""
        lines = (f"{100 + n} {self.uuids[n]} 0000:{0xC1 + n:02x}:00.0" for n in order or range(len(self.uuids)))
        _write(self.root, {"hip_gpus": "\n".join(lines)})

    def end(self, pid: int) -> None:
        """What the kernel does after the end of a process that used HIP."""
        shutil.rmtree(self.kfd / "proc" / str(pid), ignore_errors=True)

    def fail(self, name: str, code: int) -> None:
        """Let this function of HIP answer this code."""
        _write(self.root, {"hip_error": f"{name} {code}"})

    @property
    def env(self) -> dict[str, str]:
        return _environment(self.root, self.library.parent, "kfd")

    def python(self, code: str, *arguments: str, **environment: str) -> str:
        """What a program prints on this host."""
        return run_python("-c", code, *arguments, env={**self.env, **environment})

    def users(self) -> dict[str, int]:
        """UUID -> bytes that processes hold there, for the GPUs on which there are any."""
        found = {}
        for number, uuid in enumerate(self.uuids):
            files = self.kfd.glob(f"proc/*/vram_{100 + number}")
            if used := sum(int(file.read_text()) for file in files):
                found[uuid] = used
        return found


def without_hip(directory: Path) -> Path:
    """A directory for LD_LIBRARY_PATH with which no HIP can be loaded, on a machine that has it too."""
    for file in HIP.names:
        if os.path.isabs(file) and os.path.exists(file):
            pytest.skip(f"this machine has {file}")
    return _write(directory / "no-hip", {os.path.basename(file): "not a library" for file in HIP.names})


class IntelHost:
    """One with Intel GPUs, which are added in any order, and the open files of processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._minor = 0
        for path in ("proc", "dev/dri", "sys/class/drm", "sys/bus/pci/drivers/xe", "sys/bus/pci/drivers/i915"):
            (root / path).mkdir(parents=True)

    def gpu(self, bus_id: str, device: int = 0x0BD5, *, driver: str = "xe", tiles: int = 1, memory: int = 0) -> Path:
        """A GPU with a render node; its memory, which is divided among the tiles, is told where it is not 0."""
        path = self.root / "sys/bus/pci/devices" / bus_id
        drm = path / f"drm/card{self._minor}"
        _write(path, {"vendor": "0x8086", "class": "0x038000", "numa_node": 1, "device": f"0x{device:04x}"})
        (path / "driver").symlink_to(self.root / "sys/bus/pci/drivers" / driver)
        _write(drm, {"lmem_total_bytes": memory} if driver == "i915" and memory else {})
        for tile in range(tiles):
            if driver == "xe":
                _write(path / f"tile{tile}", {"physical_vram_size_bytes": memory // tiles} if memory else {})
            else:
                (drm / f"gt/gt{tile}").mkdir(parents=True)
        node = f"renderD{128 + self._minor}"
        _write(self.root / "dev/dri", {node: ""})
        (self.root / "sys/class/drm" / node).mkdir()
        (self.root / "sys/class/drm" / node / "device").symlink_to(path)
        self._minor += 1
        return path

    def client(
        self, pid: int, bus_id: str, *lines: str, number: int = 5, identity: int = 1, driver: str = "xe"
    ) -> None:
        """A file of a process that is a client of DRM on this GPU, with these further lines."""
        place = self.root / "proc" / str(pid)
        told = (f"drm-driver:\t{driver}", f"drm-client-id:\t{identity}", f"drm-pdev:\t{bus_id}", *lines)
        _write(place / "fdinfo", {str(number): "\n".join(("pos:\t0", "flags:\t0100002", *told))})
        (place / "fd").mkdir(exist_ok=True)
        (place / "fd" / str(number)).symlink_to("/dev/dri/renderD128")

    def private(self, pid: int) -> None:
        """A process whose open files cannot be read, as those of another user."""
        _write(self.root / "proc" / str(pid), {"fd": ""})

    @property
    def env(self) -> dict[str, str]:
        return _environment(self.root, self.root, "intel")


# A host of fake GPUs behind a fake libcuda

A, B, C = (f"GPU-00000000-0000-0000-0000-0000000000{end}" for end in ("a0", "b1", "b2"))
M0, M1 = (f"MIG-11111111-0000-0000-0000-00000000000{end}" for end in "01")

# A slow card first by bus id and two fast ones, one of them in exclusive process mode: the two orders differ.
MIXED = f"""\
uuid={A} name=NVIDIA_T4 bus=00000000:03:00.0 mem=16000000000 speed=1
uuid={B} name=NVIDIA_A100 bus=00000000:07:00.0 mem=80000000000 speed=9
uuid={C} name=NVIDIA_A100 bus=00000000:08:00.0 mem=80000000000 speed=9 mode=3
"""
SLICED = f"uuid={A} name=NVIDIA_H100 bus=00000000:03:00.0 mem=80000000000 mig=1 instances={M0},{M1}\n"

MAP = "import ctypes; lib = ctypes.CDLL('libcuda.so.1')"
INITIALIZE = f"{MAP}; assert lib.cuInit(0) == 0"


def run(code: str, environment: dict[str, str]) -> Any:
    """What `code` leaves in `result`, run in a new process; an exception of ours arrives as [class, message]."""
    script = """
import json, os, sys
from safe_gpu.runtimes.cuda import CUDA
from safe_gpu.runtimes.hip import HIP
from safe_gpu.runtimes.calls import CudaCallError
from safe_gpu.errors import SafeGpuError
result = None
try:
    exec(sys.argv[1])
except SafeGpuError as err:
    result = [type(err).__name__, str(err)]
print(json.dumps(result), flush=True)
"""
    output = run_python("-S", "-c", script, code, env={**environment, "PYTHONPATH": str(PACKAGE_ROOT)})
    return json.loads(output.splitlines()[-1])


class Host:
    """A host with fake GPUs, and Python processes on it."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.directory = directory
        self.library = library
        self.describe(MIXED)

    def describe(self, gpus: str) -> None:
        (self.directory / "gpus").write_text(gpus)

    def set_options(self, *lines: str) -> None:
        (self.directory / "options").write_text("".join(f"{line}\n" for line in lines))

    def environment(self, **variables: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
        place = {"LD_LIBRARY_PATH": str(self.library.parent), "FAKE_GPU_DIR": str(self.directory)}
        return {**kept, **place, **variables}

    def run(self, code: str, **variables: str) -> Any:
        """As the function, where libcuda is the fake one."""
        return run(code, self.environment(**variables))

    def holders(self) -> list[str]:
        """The processes that stand on a GPU, as UUID/PID."""
        files = self.directory.glob("procs/*/[0-9]*")
        return sorted(f"{file.parent.name}/{file.name}" for file in files if file.is_file())

    def calls(self) -> list[str]:
        """Every driver function called, with log=1."""
        log = self.directory / "cuda_calls"
        return [line.split()[1] for line in log.read_text().splitlines()] if log.exists() else []


def in_child(code: str) -> str:
    """Code that has in `result` what this expression is in a forked child."""
    return f"""
out, into = os.pipe()
if os.fork() == 0:
    try:
        answer = {code}
    except SafeGpuError as err:
        answer = [type(err).__name__, str(err)]
    os.write(into, json.dumps(answer).encode())
    os._exit(0)
os.close(into)
os.wait()
result = json.loads(os.read(out, 65536))
"""


def broken_library(directory: Path) -> Path:
    """A directory whose libcuda.so.1 cannot be loaded, on a machine with a driver too."""
    (directory / "libcuda.so.1").write_text("not a library")
    return directory
