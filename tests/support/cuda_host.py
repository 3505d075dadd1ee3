"""A host of fake GPUs behind a fake libcuda, and Python processes on it that use CUDA."""

import json
import os
from pathlib import Path
from typing import Any

from support.gpus import PACKAGE_ROOT, run_python

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
from safe_gpu.runtimes.library import CudaCallError
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


IN_CHILD = """
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


def in_child(code: str) -> str:
    return IN_CHILD.replace("{code}", code)


def broken_library(directory: Path) -> Path:
    """A directory whose libcuda.so.1 cannot be loaded, on a machine with a driver too."""
    (directory / "libcuda.so.1").write_text("not a library")
    return directory
