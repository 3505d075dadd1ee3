"""Waiters on a host of fake NVIDIA GPUs whose driver takes its time: for bench.py.

The driver is the fake NVML of the tests. Processes of this package, or of another checkout of it, claim there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

FAKES = Path(__file__).resolve().parents[1] / "tests/fakes"
_LIBRARIES = {"nvml.c": "libnvidia-ml.so.1", "cuda.c": "libcuda.so.1"}

# So long nothing happens before GPUs are freed, in seconds: the polls of those who wait are old by then.
_QUIET = 7.0

# Claims GPUs, says when it had them, and gives them back when it is told to.
_HOLD = """
import sys, time, safe_gpu
owner = safe_gpu.claim_gpus(int(sys.argv[1]), timeout=0, affinity=None)
print(time.monotonic(), flush=True)
sys.stdin.readline()
owner.release_gpus()
print(time.monotonic(), flush=True)
sys.stdin.readline()
"""

# Starts many who wait for one GPU each; each says when it had it.
_WAIT = """
import os, pynvml, signal, sys, time, safe_gpu
safe_gpu.claim_gpus, safe_gpu.get_free_gpus()
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        safe_gpu.claim_gpus(1, timeout=None, affinity=None)
        os.write(1, f"{time.monotonic()}\\n".encode())
        signal.pause()
sys.stdin.readline()
os.killpg(0, signal.SIGKILL)
"""


class SlowHost:
    """A host of fake GPUs in a directory of its own.

    Args:
        directory: is empty, and exists until the last process has ended.
        gpus: how many.
    """

    def __init__(self, directory: Path, gpus: int = 8) -> None:
        self.directory = directory
        # Doors are named by the UUIDs, and belong to all that runs on this machine.
        self.uuids = [f"GPU-{number:08x}-{os.urandom(2).hex()}-4000-8000-{number:012x}" for number in range(gpus)]
        self._compile()
        (directory / "procs").mkdir()
        self.show({})
        self.slow_down(0)

    @property
    def state_dir(self) -> Path:
        """Where those who claim here have their entries."""
        return self.directory / "state"

    def _compile(self) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc") or "cc"
        for source, library in _LIBRARIES.items():
            options = ["-shared", "-fPIC", "-O1", "-pthread", f"-Wl,-soname,{library}"]
            subprocess.run([compiler, *options, "-o", self.directory / library, FAKES / source], check=True)

    def environment(self, checkout: Path) -> dict[str, str]:
        """Return the variables of a process that has these GPUs, and the package of that checkout."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SAFE_GPU_", "CUDA_"))}
        return {
            **kept,
            "PYTHONPATH": str(checkout),
            "LD_LIBRARY_PATH": str(self.directory),
            "FAKE_GPU_DIR": str(self.directory),
            "SAFE_GPU_DRIVER": "nvml",
            "SAFE_GPU_DIR": str(self.state_dir),
            "SAFE_GPU_LEGACY_LOCK": "never",
        }

    def show(self, facts: dict[int, str]) -> None:
        """Let the driver show these facts of GPUs too, as ``tests/fakes/nvml.c`` describes them."""
        lines = []
        for number, uuid in enumerate(self.uuids):
            bus = f"{number // 16:08X}:{7 + 8 * (number % 16):02X}:00.0"
            lines.append(f"uuid={uuid} mem={80 << 30} bus={bus} {facts.get(number, '')}\n")
        self._replace("gpus", "".join(lines))

    def slow_down(self, milliseconds: int, *, log: bool = False) -> None:
        """Let each call of the driver take so long; ``log``: note the calls."""
        self._replace("options", f"call_ms={milliseconds}\nlog={log:d}\n")

    def calls(self) -> int:
        """Return how many calls of the driver were noted."""
        path = self.directory / "calls"
        return len(path.read_text().split()) if path.exists() else 0

    def occupy(self, number: int, pid: int, *, visible: bool = True) -> Path:
        """Have the driver list this process on a GPU; it is seen there until it ends, or until the file is removed.

        Args:
            visible: False is a pid that means nothing here, as one of the host in a container.
        """
        path = self.directory / "procs" / self.uuids[number] / (str(pid) if visible else f"{pid}.static")
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(1 << 30))
        return path

    def tickets(self) -> int:
        """Return how many stand in the queue."""
        return len(list(self.state_dir.glob("queue/[0-9]*")))

    def _replace(self, name: str, text: str) -> None:
        new = self.directory / f".{name}"
        new.write_text(text)
        new.rename(self.directory / name)


@contextmanager
def slow_host(gpus: int = 8) -> Iterator[SlowHost]:
    """A host of fake GPUs in a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="safe-gpu-bench-") as directory:
        yield SlowHost(Path(directory), gpus)


class Program:
    """A Python program on such a host, which is killed with its children at the end."""

    def __init__(self, host: SlowHost, checkout: Path, code: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=host.directory,  # where no package is
            env=host.environment(checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def hear(self) -> float:
        """Return the time that it says next, as of ``time.monotonic()``."""
        return float(_end(self._process.stdout).readline())

    def tell(self) -> None:
        """Let it go on."""
        _end(self._process.stdin).write("\n")
        _end(self._process.stdin).flush()

    def kill(self) -> None:
        """SIGKILL to all that it has started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.returncode is None:
            self.kill()
        with self._process:
            pass


def _end(pipe: IO[Any] | None) -> IO[Any]:
    assert pipe is not None
    return pipe


def freed_together(checkout: Path, waiters: int, call_ms: int, *, by_release: bool = False) -> tuple[float, float]:
    """Free all GPUs of a host at once, for which others wait. Returns the seconds until the first and the last are in
    other hands.

    Args:
        waiters: for one GPU each, at least as many as there are GPUs.
        call_ms: what each call of the driver takes, in milliseconds.
        by_release: the holder gives the GPUs back and lives on. Else it ends.
    """
    with slow_host() as host, Program(host, checkout, _HOLD, len(host.uuids)) as holder:
        holder.hear()
        with Program(host, checkout, _WAIT, waiters) as crowd:
            while host.tickets() < waiters:
                time.sleep(0.05)
            host.slow_down(call_ms)
            time.sleep(_QUIET)
            began = time.monotonic()
            if by_release:
                holder.tell()
                began = holder.hear()
            else:
                holder.kill()
            times = sorted(crowd.hear() - began for _ in host.uuids)
    return times[0], times[-1]


if __name__ == "__main__":
    for ms in map(int, sys.argv[3].split(",")):
        for release in (False, True):
            for checkout in sys.argv[1].split(","):
                first, last = freed_together(Path(checkout), int(sys.argv[2]), ms, by_release=release)
                how = "release" if release else "exit"
                figures = f"{first:.3f} {last:.3f} {last / first:.2f}"
                print(f"{ms} ms, {how}, {checkout}: {figures}", flush=True)
