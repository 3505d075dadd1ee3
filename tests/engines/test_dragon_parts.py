"""What needs no Dragon: the check in a worker, and cores for workers that share a GPU."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest

from safe_gpu import GPUAffinityError, UnsatisfiableRequestError, WrongDeviceError
from safe_gpu.engines.cluster import ClusterGpu
from safe_gpu.engines.dragon import WorkerCheck, _split, claim
from safe_gpu.engines.holder import Holder, Wishes
from safe_gpu.errors import HolderLostError


@pytest.fixture
def holder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    """A holder in this very process, which sees eight simulated GPUs."""
    holder = Holder(Wishes(), "a test")
    yield holder
    holder.release()


@pytest.fixture
def gpus(holder: Holder) -> tuple[ClusterGpu, ...]:
    granted = holder.claim(2, 0)
    assert isinstance(granted, tuple), granted
    return tuple(replace(gpu, host="hosta", node_id="1") for gpu in granted)


def test_a_worker_that_got_what_was_promised(gpus: tuple[ClusterGpu, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    check = pickle.loads(pickle.dumps(WorkerCheck(gpus)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(gpus[1].index))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    monkeypatch.setenv("SAFE_GPU_SCOPE", "")
    assert check.at("hosta") == gpus[1]
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert os.environ["SAFE_GPU_SCOPE"] == gpus[1].environment["SAFE_GPU_SCOPE"]


@pytest.mark.parametrize("visible", [None, "", "0,1,2,3,4,5,6,7", "7", "0,1"])
def test_a_worker_with_another_gpu_or_all(
    gpus: tuple[ClusterGpu, ...], visible: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(WrongDeviceError, match="holds GPU 0 or 1 there"):
        WorkerCheck(gpus).at("hosta")


def test_a_worker_on_another_host(gpus: tuple[ClusterGpu, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(WrongDeviceError, match="on hostb, and the claim holds nothing there"):
        WorkerCheck(gpus).at("hostb")


def test_a_worker_on_other_cpus(gpus: tuple[ClusterGpu, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    elsewhere = tuple(replace(gpu, cpus=frozenset({max(os.sched_getaffinity(0)) + 1})) for gpu in gpus)
    with pytest.raises(GPUAffinityError, match="instead of"):
        WorkerCheck(elsewhere).at("hosta")


def test_a_worker_after_the_claim(
    holder: Holder, gpus: tuple[ClusterGpu, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder.release()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(HolderLostError, match="hosta: GPU 0 is no longer held"):
        WorkerCheck(gpus).at("hosta")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    again = holder.claim(2, 0)  # the same GPUs, but another claim
    assert isinstance(again, tuple)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(HolderLostError):
        WorkerCheck(gpus).at("hosta")


CORES = tuple((core, core + 8) for core in range(4))


@pytest.mark.parametrize(
    ("cores", "workers", "parts"),
    [
        (CORES, 1, [(0, 1, 2, 3, 8, 9, 10, 11)]),
        (CORES, 2, [(0, 1, 8, 9), (2, 3, 10, 11)]),
        (CORES, 3, [(0, 1, 8, 9), (2, 10), (3, 11)]),
        (CORES, 4, [(0, 8), (1, 9), (2, 10), (3, 11)]),
        (CORES, 9, [(0, 8), (1, 9), (2, 10), (3, 11)]),  # more workers than cores: they go round
        ((), 3, [()]),  # no preference
    ],
)
def test_workers_divide_the_cores_of_their_gpu(
    cores: tuple[tuple[int, ...], ...], workers: int, parts: list[tuple[int, ...]]
) -> None:
    assert _split(cores, workers) == parts


def test_outside_of_a_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DRAGON_MY_PUID", raising=False)
    with pytest.raises(UnsatisfiableRequestError, match="start this program with `dragon"):
        claim()
