"""Real schedulers, and a working directory for their jobs: a safe_gpu that an ordinary user can run, and a log.

The jobs run on simulated GPUs; everything else about them is real.
"""

import functools
import itertools
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import pynvml
import pytest
from support.real import REQUIRED, unavailable

import safe_gpu

TOOLS = Path(__file__).parents[2] / "tools"
JOB = Path(__file__).parent / "job.py"
USER = "gpujobs"


def become_user() -> list[str]:
    """What to put before a command so that an ordinary user runs it."""
    return ["setpriv", "--reuid", USER, "--regid", USER, "--init-groups"] if os.geteuid() == 0 else []


class WorkDir:
    """A directory where an ordinary user's jobs find what they need and leave what they saw.

    It lies outside /tmp, which a scheduler may make private to each job. Each host (or Slurm node: they share a
    machine) has a state directory of its own.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._numbers = itertools.count(1)
        self.fresh()

    def fresh(self) -> None:
        """Forget all that happened: a new log, new state directories, and NVIDIA GPUs."""
        self.preset = "dgx-a100"
        self.referee = self._open_directory(f"referee-{next(self._numbers)}")
        self.state = self._open_directory(f"{self.referee.name}/state")

    def _open_directory(self, name: str) -> Path:
        path = self.path / name
        path.mkdir(mode=0o1777)
        path.chmod(0o1777)
        return path

    @functools.cached_property
    def python(self) -> str:
        """An interpreter that the jobs' user may run: this one, unless it lies in someone's home directory."""
        check = ["-c", "import sys; sys.exit(sys.version_info < (3, 10))"]
        for python in (sys.executable, "/usr/bin/python3"):
            # setpriv itself still opens what root may; what env starts, the user must be able to.
            command = [*become_user(), "env", python, *check]
            if subprocess.run(command, capture_output=True, cwd="/", timeout=60).returncode == 0:
                break
        else:
            unavailable("no Python >= 3.10 that an ordinary user may run: try one outside root's home directory")
        return python

    def script(self, *lines: str) -> str:
        """The path of a new job script with these lines; ``$CLAIM`` in them is job.py, ``$SAFE_GPU`` the command."""
        path = self.path / f"script-{next(self._numbers)}.sh"
        head = f"""#!/bin/bash
export PYTHONPATH={self.path}/lib PYTHONDONTWRITEBYTECODE=1 REFEREE={self.referee}
export SAFE_GPU_DRIVER=simulated:{self.preset} SAFE_GPU_DIR={self.state}/"${{SLURMD_NODENAME:-$(hostname)}}"
CLAIM="{self.python} {self.path}/job.py" SAFE_GPU="{self.python} -m safe_gpu"
"""
        path.write_text("\n".join([head, *lines, ""]))
        path.chmod(0o755)
        return str(path)

    def records(self, event: str) -> list[dict[str, Any]]:
        """What jobs have written so far, in order."""
        path = self.referee / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record for record in map(json.loads, lines) if record["event"] == event]

    def entries(self, host: str) -> dict[str, dict[str, Any]]:
        """Entries of claims on a host by the UUIDs of their GPUs, those of killed claims too."""
        found = [json.loads(path.read_text()) for path in (self.state / host / "claims").glob("[0-9]*")]
        return {uuid: entry for entry in found for uuid in entry["gpus"]}

    def waiting(self, host: str) -> int:
        """Tickets in the queue of a host."""
        return len(list((self.state / host / "queue").glob("[0-9]*")))

    def go(self) -> None:
        """Let the jobs end that hold their GPUs until told."""
        (self.referee / "go").touch()

    def verdict(self, *, killed: Sequence[int] = ()) -> list[dict[str, Any]]:
        """All claims, after two independent checks that no GPU was ever held twice: locks and times.

        ``killed`` are pids that were not allowed to end in order.
        """
        assert self.records("collision") == []
        claims = self.records("claim")
        ends = {(record["pid"], gpu): record["time"] for record in self.records("end") for gpu in record["gpus"]}
        taken: dict[str, list[tuple[float, float]]] = {}
        for claim in claims:
            for gpu in claim["gpus"]:
                end = ends.get((claim["pid"], gpu))
                if end is None:
                    assert claim["pid"] in killed, f"{claim} never ended"
                    end = claim["time"]
                taken.setdefault(f"{claim['host']}/{gpu}", []).append((claim["time"], end))
        for gpu, intervals in taken.items():
            intervals.sort()
            for (_, end), (start, _) in itertools.pairwise(intervals):
                assert end <= start, f"GPU {gpu} was held twice at a time: {intervals}"
        return claims


@pytest.fixture(scope="session")
def _shared_workdir() -> Iterator[WorkDir]:
    path = Path(tempfile.mkdtemp(prefix="safe-gpu-jobs-", dir="/var/tmp"))
    path.chmod(0o1777)
    lib = path / "lib"
    lib.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(safe_gpu.__file__).parent, lib / "safe_gpu", ignore=ignore)
    shutil.copy(pynvml.__file__, lib)
    shutil.copytree(Path(filelock.__file__).parent, lib / "filelock", ignore=ignore)
    shutil.copy(JOB, path)
    subprocess.run(["chmod", "-R", "a+rX", str(path)], check=True)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(lib)], check=False)
    yield WorkDir(path)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def workdir(_shared_workdir: WorkDir) -> Iterator[WorkDir]:
    """The working directory, as new. What the jobs said is shown where a test fails."""
    _shared_workdir.fresh()
    yield _shared_workdir
    for path in sorted(_shared_workdir.referee.iterdir()):
        if path.is_file() and path.stat().st_size:
            print(f"---- {path.name}\n{path.read_text(errors='replace')}")


# What a job says: when it began, and when others expect its claim to end.
END = """export PROGRAM="$SAFE_GPU"; date +%s
$SAFE_GPU run -n job -- python3 -c '
import json, os, subprocess
status = json.loads(subprocess.check_output([*os.environ["PROGRAM"].split(), "status", "--json"]))
print(next(gpu["claim"]["until"] for gpu in status["gpus"] if gpu["claim"]))'"""


def check_end(system: Any, most: float, *options: str) -> None:
    """A claim of a job with these options ends with the job, after so many seconds at most."""
    job = system.submit(*options, system.workdir.script(END))
    system.finish(job)
    began, *_, until = system.output(job).split()
    assert 0 < float(until) - float(began) <= most


class Cluster:
    """A scheduler that tools/ brought up, and how to run things beside it."""

    def __init__(self, script: str, **settings: str) -> None:
        scratch = tempfile.mkdtemp(prefix="safe-gpu-cluster-", dir="/var/tmp")
        os.chmod(scratch, 0o755)
        self.scratch = Path(scratch)
        self._tool = str(TOOLS / script)
        name = "SGE_SCRATCH" if script.startswith("sge") else "SLURM_SCRATCH"
        self._env = {"PATH": os.environ["PATH"], name: scratch, "JOB_USER": USER, **settings}

    def tool(self, *words: str, check: bool = True, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
        """Run the tool; with ``check``, the test fails with its output where it fails."""
        done = subprocess.run(
            [self._tool, *words], env=self._env, cwd="/", capture_output=True, text=True, timeout=timeout
        )
        if check and done.returncode != 0:
            pytest.fail(f"{' '.join(words)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done

    def run(self, *words: str, check: bool = True, timeout: float = 90.0) -> str:
        """Run a command as the ordinary user on the submit host, and return what it says."""
        return self.tool("run", *words, check=check, timeout=timeout).stdout

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a command as the ordinary user on the submit host."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([self._tool, "run", *words], env=self._env, cwd="/", text=True, **streams)

    def close(self) -> None:
        """End it and all its jobs."""
        self.tool("down", check=False)
        shutil.rmtree(self.scratch, ignore_errors=True)


real = pytest.mark.skipif(
    not REQUIRED, reason="needs SAFE_GPU_REQUIRE_REAL=1, as root: then tools/*_up.sh install and start schedulers here"
)


@contextmanager
def bring_up(script: str, **settings: str) -> Iterator[Cluster]:
    """``bring_up("sge_up.sh", HOSTS="2")``: a running cluster, or a skip with the reason."""
    if os.geteuid() != 0:
        unavailable(f"needs root, to bring up a scheduler by tools/{script}")
    cluster = Cluster(script, **settings)
    done = cluster.tool("up", check=False, timeout=300)
    if done.returncode != 0:
        cluster.close()
        unavailable(f"tools/{script} up failed: {done.stdout}{done.stderr}")
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def mpirun() -> list[str]:
    """Open MPI's mpirun, more ranks than cores allowed, and a user for its ranks; skips where there is none."""
    if shutil.which("mpirun") is None:
        unavailable("needs Open MPI: apt-get install openmpi-bin")
    said = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60).stdout
    if "Open MPI" not in said:
        unavailable(f"needs Open MPI, and this mpirun is another: {said.splitlines()[:1]}")
    if os.geteuid() == 0:
        try:
            pwd.getpwnam(USER)
        except KeyError:
            subprocess.run(["useradd", "-m", "-s", "/bin/bash", USER], check=True)
    return ["mpirun", "--oversubscribe", "--bind-to", "none"]


@pytest.fixture
def run_as_user(workdir: WorkDir) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_as_user(*command)`` runs a command as an ordinary user, to its end."""
    environ = {"PATH": os.environ["PATH"], "HOME": "/", "TMPDIR": str(workdir.referee)}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 100}
    return lambda *command: subprocess.run([*become_user(), "env", *command], cwd=workdir.path, env=environ, **options)
