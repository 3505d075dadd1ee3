"""A host of fake AMD GPUs: a saved sysfs tree, and a fake libamdhip64 whose allocations show there."""

import os
import shutil
from pathlib import Path

import pytest
from support.gpus import PACKAGE_ROOT, run_python
from support.kfd_host import KfdHost

from safe_gpu.runtimes.hip import HIP


class HipHost(KfdHost):
    """A number of equal GPUs. Names of claimed GPUs are one for the whole machine, so the UUIDs are this test's own."""

    def __init__(self, root: Path, library: Path, count: int = 8) -> None:
        super().__init__(root)
        self.library = library
        self.uuids: list[str] = []
        (root / "dev").mkdir()
        (root / "dev/kfd").touch()
        own = int.from_bytes(os.urandom(6), "big") << 16
        for number in range(count):
            self.gpu(0xC1 + number, 100 + number, own + number + 1)
            self.uuids.append(f"GPU-{own + number + 1:016x}")
        self.describe()

    def describe(self, order: list[int] | None = None) -> None:
        """What HIP sees, in an order that need not be the kernel's."""
        lines = (f"{100 + n} {self.uuids[n]} 0000:{0xC1 + n:02x}:00.0" for n in order or range(len(self.uuids)))
        (self.root / "hip_gpus").write_text("".join(f"{line}\n" for line in lines))

    def end(self, pid: int) -> None:
        """What the kernel does after the end of a process that used HIP."""
        shutil.rmtree(self.kfd / "proc" / str(pid), ignore_errors=True)

    def fail(self, name: str, code: int) -> None:
        """Let this function of HIP answer this code."""
        (self.root / "hip_error").write_text(f"{name} {code}\n")

    @property
    def env(self) -> dict[str, str]:
        """os.environ with these GPUs in place of any others."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library.parent),
            "SAFE_GPU_FSROOT": str(self.root),
            "SAFE_GPU_DRIVER": "kfd",
            "PYTHONPATH": str(PACKAGE_ROOT),
        }

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
    found = directory / "no-hip"
    found.mkdir()
    for file in HIP.names:
        if os.path.isabs(file) and os.path.exists(file):
            pytest.skip(f"this machine has {file}")
        (found / os.path.basename(file)).write_text("not a library")
    return found
