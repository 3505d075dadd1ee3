"""What needs no Dragon: which nodes it is asked for, the check in a worker, cores for workers that share a GPU."""

import ctypes
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from safe_gpu import GPUAffinityError, UnsatisfiableRequestError, WrongDeviceError
from safe_gpu.claim.worker import check_expected_gpu
from safe_gpu.engines import dragon as dragon_module
from safe_gpu.engines.dragon import DragonClaim, WorkerCheck, _split, claim
from safe_gpu.engines.holder import ClaimArguments, ClusterGpu, HolderProcess
from safe_gpu.errors import HolderLostError


@pytest.fixture
def holder() -> Iterator[HolderProcess]:
    """A holder in this very process, which sees eight simulated GPUs."""
    holder = HolderProcess(ClaimArguments(), "a test")
    yield holder
    holder.release()


@pytest.fixture
def gpus(holder: HolderProcess) -> tuple[ClusterGpu, ...]:
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
    check = pickle.loads(pickle.dumps(WorkerCheck(gpus)))
    with worker(CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="", SAFE_GPU_SCOPE=""):
        assert check.at("hosta") == gpus[1]
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert os.environ["SAFE_GPU_SCOPE"] == gpus[1].environment["SAFE_GPU_SCOPE"]


@pytest.mark.parametrize(
    ("visible", "host", "held"),
    [
        (None, "hosta", "GPU 0 or 1"),
        ("", "hosta", "GPU 0 or 1"),
        ("7", "hosta", "GPU 0 or 1"),
        ("0,1", "hosta", "GPU 0 or 1"),
        ("0", "hostb", "nothing"),
    ],
)
def test_a_worker_with_another_gpu_or_several(gpus: Any, visible: str | None, host: str, held: str) -> None:
    told = f"on {host}, and the claim holds {held} there"
    with worker(CUDA_VISIBLE_DEVICES=visible), pytest.raises(WrongDeviceError, match=told):
        WorkerCheck(gpus).at(host)


def test_a_worker_on_other_cpus(gpus: Any) -> None:
    elsewhere = tuple(replace(gpu, cpus=frozenset({max(os.sched_getaffinity(0)) + 1})) for gpu in gpus)
    with worker(CUDA_VISIBLE_DEVICES="0"), pytest.raises(GPUAffinityError, match="instead of"):
        WorkerCheck(elsewhere).at("hosta")


def test_a_worker_after_the_claim(holder: HolderProcess, gpus: Any) -> None:
    holder.release()
    told = "hosta: GPU 0 is no longer held"
    with worker(CUDA_VISIBLE_DEVICES="0"), pytest.raises(HolderLostError, match=told):
        WorkerCheck(gpus).at("hosta")
    holder.claim(2, 0)  # the same GPUs, but another claim
    with worker(CUDA_VISIBLE_DEVICES="0"), pytest.raises(HolderLostError, match=told):
        WorkerCheck(gpus).at("hosta")


class Idle:
    """A holder's side of the driver that has nothing to say."""

    def __init__(self, numbers: Sequence[int] = range(8), variable: str = "CUDA_VISIBLE_DEVICES") -> None:
        self.node = SimpleNamespace(gpus=numbers, gpu_env_str=variable)

    def nothing(self, *arguments: Any) -> None:
        pass

    call = answer = end = nothing


def policy(host: str, *numbers: int) -> Any:
    return SimpleNamespace(host_name=host, gpu_affinity=list(numbers))


def test_the_environment_of_a_template_is_that_of_the_gpu_of_its_policy(gpus: Any) -> None:
    idle: Any = Idle()
    with DragonClaim({replace(gpu, inherited_position=gpu.index): idle for gpu in gpus}) as claimed:
        for gpu in gpus:
            env = claimed.template_env(policy("hosta", gpu.index))
            assert env == {**gpu.environment, "SAFE_GPU_EXPECT": gpu.uuid}
            assert env["CUDA_VISIBLE_DEVICES"] == str(gpu.index)
            with worker(**env):
                check_expected_gpu()  # what ``run`` and ``bind`` do in the worker
        for wrong in (policy("hosta"), policy("hosta", 7), policy("hosta", 0, 1), policy("hostb", 0)):
            with pytest.raises(UnsatisfiableRequestError, match="policies"):
                claimed.template_env(wrong)
    with pytest.raises(UnsatisfiableRequestError, match="claim again"):
        claimed.template_env(policy("hosta", 0))


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch) -> Iterator[DragonClaim]:
    """GPU 2 and 3 of hosta, AMD ones, where Dragon was started with ROCR_VISIBLE_DEVICES=1,2,3."""
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:mi250x")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "1,2,3")
    holder = HolderProcess(ClaimArguments(selection={"only": [2, 3]}), "a test")
    granted: Any = holder.claim(2, 0)
    idle: Any = Idle([1, 2, 3], "ROCR_VISIBLE_DEVICES")  # Dragon 0.14 numbers them as ROCR does
    with worker(), DragonClaim({replace(gpu, host="hosta", node_id="1"): idle for gpu in granted}) as claim:
        yield claim
    holder.release()


def test_amd_gpus_where_dragon_counts_those_of_nvidia(amd: DragonClaim) -> None:
    """Its numbers are others' there, even if the holder has inherited a ROCR_VISIBLE_DEVICES."""
    assert amd.find_gpus() == [("hosta", 2), ("hosta", 3)]
    idle: Any = Idle()
    with pytest.raises(UnsatisfiableRequestError, match="Dragon places there by CUDA_VISIBLE_DEVICES"):
        DragonClaim(dict.fromkeys(amd.gpus, idle))


@pytest.mark.parametrize("left_over", [{}, {"HIP_VISIBLE_DEVICES": "2,3"}, {"CUDA_VISIBLE_DEVICES": "3"}])
def test_a_worker_on_an_amd_gpu(amd: DragonClaim, left_over: dict[str, str]) -> None:
    """Dragon sets ROCR_VISIBLE_DEVICES; HIP would count the others, where there are any, within that."""
    check = pickle.loads(pickle.dumps(amd.check_worker))
    gpu = amd.gpus[1]
    env = amd.template_env(policy("hosta", 3))
    assert env == {**gpu.environment, "SAFE_GPU_EXPECT": gpu.uuid}
    for given in ({"ROCR_VISIBLE_DEVICES": "3"}, {"ROCR_VISIBLE_DEVICES": gpu.uuid}):  # Dragon's policy comes last
        with worker(**left_over, **given), pytest.MonkeyPatch.context() as checked:
            assert check.at("hosta") == gpu
            checked.setenv("SAFE_GPU_EXPECT", gpu.uuid)
            check_expected_gpu()
        with worker(**{**left_over, **env, **given}):
            check_expected_gpu()


@pytest.mark.parametrize("visible", [None, "0", "2,3"])
def test_a_worker_on_another_amd_gpu(amd: DragonClaim, visible: str | None) -> None:
    told = r"this worker got ROCR_VISIBLE_DEVICES=.* holds GPU 2 or 3 there"
    with worker(CUDA_VISIBLE_DEVICES="3", ROCR_VISIBLE_DEVICES=visible), pytest.raises(WrongDeviceError, match=told):
        amd.check_worker.at("hosta")


def test_workers_divide_the_cores_of_their_gpu() -> None:
    cores = tuple((core, core + 8) for core in range(4))
    assert _split(cores, 3) == [(0, 1, 8, 9), (2, 10), (3, 11)]
    assert _split(cores, 9) == list(cores), "more workers than cores go round"
    assert _split((), 3) == [()], "no preference"


def test_outside_of_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAGON_MY_PUID", raising=False)
    with pytest.raises(UnsatisfiableRequestError, match="start this program with `dragon"):
        claim()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nodes on which holders were to be started, in a runtime of nodea, without GPUs, and nodeb."""
    found: list[str] = []

    def start(node: Any, wishes: ClaimArguments, door: object) -> None:
        found.append(node.hostname)
        raise HolderLostError("none starts here")

    nodes = {
        1: SimpleNamespace(h_uid=1, hostname="nodea", gpus=[]),
        2: SimpleNamespace(h_uid=2, hostname="nodeb", gpus=[0, 1]),
    }
    machine: Any = types.ModuleType("dragon.native.machine")
    machine.Node, machine.System = nodes.get, lambda: SimpleNamespace(nodes=[1, 2])
    for name in ("dragon", "dragon.native"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "dragon.native.machine", machine)
    monkeypatch.setenv("DRAGON_MY_PUID", "1")
    monkeypatch.setattr(dragon_module, "_DragonHolder", start)
    return found


def test_nodes_where_dragon_sees_gpus_are_asked_and_others_refused(asked: list[str]) -> None:
    for nodes in (1, "nodeb", ["2"], [2]):
        with pytest.raises(HolderLostError, match="none starts here"):
            claim(nodes, 1, timeout=0)  # type: ignore[arg-type]
    assert asked == ["nodeb"] * 4
    for nodes in (2, "nodea"):
        with pytest.raises(UnsatisfiableRequestError, match="Dragon sees no GPU on nodea"):
            claim(nodes, 1, timeout=0)
    assert asked == ["nodeb"] * 4


def test_the_stand_in_for_cudart_has_all_that_dragon_looks_up(build_library: Callable[..., Path]) -> None:
    """As of Dragon 0.15.0: where one is missing, it sees no GPU."""
    library = ctypes.CDLL(str(build_library("cudart.c", "libcudart.so")))
    names = """
        Malloc Free Memcpy Memset SetDeviceFlags SetDevice GetDevice DeviceSynchronize IpcGetMemHandle IpcOpenMemHandle
        IpcCloseMemHandle GetErrorString GetDeviceCount HostRegister HostUnregister GetDeviceProperties
    """
    assert [name for name in names.split() if not hasattr(library, f"cuda{name}")] == []
