"""Several hosts of one machine, with simulated GPUs, for real engines to run across.

The programs that run on them are in ``programs/``; they check things themselves and fail loudly. Engines may live in
other environments than pytest does: SAFE_GPU_RAY_PYTHON and SAFE_GPU_DRAGON_PYTHON name their interpreters.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import api
from support.real import unavailable, wait_for

import safe_gpu

PROGRAMS = Path(__file__).parent / "programs"
TOOLS = Path(__file__).parents[2] / "tools"
PACKAGE_ROOT = Path(safe_gpu.__file__).parents[1]


def python_with(module: str) -> str:
    """An interpreter that has an engine; skips where there is none."""
    python = os.environ.get(f"SAFE_GPU_{module.upper()}_PYTHON", sys.executable)
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    if subprocess.run([python, "-c", code], cwd="/", timeout=60).returncode:
        unavailable(f"needs {module}: {python} -m pip install '.[{module}]'")
    return python


class Hosts:
    """Hosts that are up, each with its own name, network, boot id and state directory, and all with ``/tmp``."""

    def __init__(self, count: int, preset: str) -> None:
        # Short, since Ray puts sockets below it and their paths may have 107 characters.
        self.scratch = Path(tempfile.mkdtemp(prefix="sg-", dir="/tmp"))
        self.names = ("hosta", "hostb")[:count]
        self.marks = self.scratch / "marks"
        self.marks.mkdir()
        (self.scratch / "home").mkdir()
        self.env = {
            "HOME": str(self.scratch / "home"),
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONPATH": str(PACKAGE_ROOT),
            "HOSTS_SCRATCH": str(self.scratch),
            "SAFE_GPU_DIR": str(self.scratch / "state"),
            "SAFE_GPU_DRIVER": f"simulated:{preset}",
            "TEST_MARKS": str(self.marks),
        }
        self.up()

    def _tool(self, *words: str) -> None:
        command = [str(TOOLS / "hosts.sh"), *words]
        done = subprocess.run(command, env=self.env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())

    def up(self) -> None:
        self._tool("up", str(len(self.names)))

    def down(self) -> None:
        """End everything on the hosts, and the hosts."""
        self._tool("down")

    def start(self, host: str, *command: str, **env: str) -> subprocess.Popen[str]:
        """Start a command on a host, its output into a file; see :meth:`run`."""
        output = tempfile.NamedTemporaryFile(dir=self.scratch, prefix="out-", delete=False)  # noqa: SIM115
        process = subprocess.Popen(
            [str(TOOLS / "hosts.sh"), "run", host, *command],
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=self.scratch,
            text=True,
        )
        process.output = Path(output.name)  # type: ignore[attr-defined]
        return process

    def finish(self, process: subprocess.Popen[str], timeout: float) -> str:
        """Output of a started command, which must end well and in time."""
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            raise AssertionError(f"not done in {timeout:g} s:\n{self.output(process)}") from None
        assert process.returncode == 0, f"exit code {process.returncode}:\n{self.output(process)}"
        return self.output(process)

    @staticmethod
    def output(process: subprocess.Popen[str]) -> str:
        return process.output.read_text(errors="replace")  # type: ignore[attr-defined, no-any-return]

    def run(self, host: str, *command: str, timeout: float = 90.0, **env: str) -> str:
        """Run a command on a host. Output goes to a file: what a killed runtime leaves behind would hold a pipe."""
        return self.finish(self.start(host, *command, **env), timeout)

    def claimed(self) -> set[str]:
        """host:UUID of every GPU that a living claim has."""
        claims = {host: api.living_entries(f"{self.scratch}/{host}.state", "claims") for host in self.names}
        return {f"{host}:{uuid}" for host, living in claims.items() for one in living for uuid in one.gpus}

    def see_the_driver_end(self, process: subprocess.Popen[str]) -> None:
        """A program that runs ``scenarios.driver`` ends, and so do its claims of 16 GPUs."""
        wait_for(lambda: (self.marks / "driver").exists() or process.poll() is not None, "claim")
        assert process.poll() is None, self.output(process)
        assert len(self.claimed()) == 16
        (self.marks / "end-driver").touch()
        wait_for(lambda: not self.claimed(), "end of the claims of a driver that is gone")

    @contextmanager
    def neighbours(self, python: str, **env: str) -> Iterator[None]:
        """Other users on each host, who take one and two GPUs over and over, and get them."""
        stop = self.marks / "stop"
        program = (python, str(PROGRAMS / "scenarios.py"), "neighbour", str(stop))
        others = [self.start(host, *program, count, **env) for host in self.names for count in "12"]
        try:
            yield
        finally:
            stop.touch()
        for other in others:
            assert "round 3" in self.finish(other, 30)

    def remove(self) -> None:
        self.down()
        shutil.rmtree(self.scratch, ignore_errors=True)


@pytest.fixture(scope="module")
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """``make_hosts(2)`` brings up hosts with 8 simulated GPUs each."""
    lacking = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if os.geteuid() or lacking:
        unavailable(f"needs {' and '.join(lacking) if lacking else 'root'}")
    made: list[Hosts] = []

    def make(count: int, preset: str = "dgx-h100") -> Hosts:
        try:
            made.append(Hosts(count, preset))
        except RuntimeError as err:
            unavailable(f"this machine cannot make hosts of itself: {err}")
        return made[-1]

    yield make
    for hosts in made:
        hosts.remove()
