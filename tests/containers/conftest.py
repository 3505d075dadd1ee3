"""Real containers of podman, made from this machine's own root directory: nothing is pulled."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import PACKAGE_ROOT
from support.real import unavailable

PODMAN = ("podman", "--cgroup-manager=cgroupfs", "--runtime=runc")
LIMITS = ("--ulimit=nofile=1024:1024", "--ulimit=nproc=1024:1024")


@functools.cache
def trouble() -> str:
    """Why podman cannot start a container here; "" if it can."""
    if os.geteuid() != 0:
        return "needs root, for podman with --rootfs"
    missing = [name for name in ("podman", "runc") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    words = [*PODMAN, "run", "--rm", "--network=none", *LIMITS, "--rootfs", "/:O", "true"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return "podman does not start a container here within 60 s"
    return "" if done.returncode == 0 else f"podman cannot start a container here: {done.stderr.strip()[-300:]}"


class Podman:
    """Starts containers that do not outlive the test. In them are this machine's files, safe_gpu and its Python."""

    def __init__(self, shared: Path) -> None:
        self.shared = shared
        self._numbers = itertools.count(1)
        self._started: list[subprocess.Popen[str]] = []
        self._names: list[str] = []

    def words(
        self, *command: str, network: str = "none", mount: bool = True, options: tuple[str, ...] = ()
    ) -> list[str]:
        """The command line that runs a command in a new container, which is the latest from now on.

        Args:
            mount: whether the container has the directory with the state directory; the simulated host it has always.
        """
        name = f"safe-gpu-test-{os.getpid()}-{next(self._numbers)}"
        self._names.append(name)
        simulated = os.environ["SAFE_GPU_SIMULATED_DIR"]
        volumes = {str(PACKAGE_ROOT): "ro", sys.prefix: "ro", sys.base_prefix: "ro", simulated: "rw"}
        volumes.pop("/usr", None)
        if mount:
            volumes[str(self.shared)] = "rw"
        environment = {
            "PYTHONPATH": str(PACKAGE_ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SAFE_GPU_TEST_SIMULATED": "1",
            "SAFE_GPU_DRIVER": "simulated:dgx-a100",
            "SAFE_GPU_SIMULATED_DIR": simulated,
            "SAFE_GPU_DIR": os.environ["SAFE_GPU_DIR"] if mount else "/srv/safe-gpu-state",
        }
        return [
            *(*PODMAN, "run", "--rm", "--name", name, f"--network={network}", *LIMITS),
            *(f"--volume={path}:{path}:{mode}" for path, mode in volumes.items()),
            *(f"--env={key}={value}" for key, value in environment.items()),
            *(*options, "--rootfs", "/:O", *command),
        ]

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Run a command in a container, with its output captured."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._started.append(subprocess.Popen(self.words(*command, **options), text=True, **streams))
        return self._started[-1]

    def safe_gpu(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run ``safe-gpu`` in a container, to its end."""
        process = self.start(sys.executable, "-m", "safe_gpu", *arguments, **options)
        out, err = process.communicate(timeout=100)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def claim(self, nb_gpus: int, **options: Any) -> str:
        """Claim GPUs in a container that keeps them until it ends; returns CUDA_VISIBLE_DEVICES."""
        hold = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exec sleep 600")
        arguments = ("run", "-n", str(nb_gpus), "--timeout", "0", "--", *hold)
        process = self.start(sys.executable, "-m", "safe_gpu", *arguments, **options)
        line = process.stdout.readline() if process.stdout else ""
        assert line, process.communicate()[1]
        return line.strip()

    def kill(self) -> None:
        """End the latest container by SIGKILL."""
        subprocess.run([*PODMAN, "kill", "--signal=KILL", self._names[-1]], check=True, capture_output=True, timeout=60)

    def end(self) -> None:
        for name in self._names:
            subprocess.run([*PODMAN, "rm", "-f", "-i", "-t", "0", name], capture_output=True, timeout=60)
        for process in self._started:
            process.communicate(timeout=60)


@pytest.fixture
def podman(state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Podman]:
    """Containers that share, or do not share, the state directory of this test; see :class:`Podman`."""
    why_not = trouble()
    if why_not:
        unavailable(why_not)
    (tmp_path / "host").mkdir()
    monkeypatch.setenv("SAFE_GPU_SIMULATED_DIR", str(tmp_path / "host"))
    podman = Podman(state_dir.parent)
    yield podman
    podman.end()
