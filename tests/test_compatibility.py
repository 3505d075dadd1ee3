"""Code that was written for the older package runs unchanged."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu as package
from safe_gpu import safe_gpu
from safe_gpu.claim import owner
from safe_gpu.drivers.simulated import SimulatedDriver


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """An owner that a test dropped goes with it."""
    yield
    if owner.current_owner() is not None:
        owner.current_owner().release_gpus()


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_claiming_one_gpu() -> None:
    assert safe_gpu.gpu_owner is None
    safe_gpu.claim_gpus()
    assert safe_gpu.gpu_owner.devices_taken == [0]
    assert type(safe_gpu.gpu_owner.devices_taken[0]) is int
    assert visible() == "0"
    assert len(safe_gpu.gpu_owner.placeholders) == 1
    assert isinstance(safe_gpu.gpu_owner, safe_gpu.GPUOwner)
    assert package.gpu_owner is safe_gpu.gpu_owner


def test_all_four_arguments_by_position(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("mine")
    caplog.set_level(logging.INFO, "mine")
    devices = []
    safe_gpu.claim_gpus(2, devices.append, logger, 0.0)
    assert devices == [0, 1]
    assert {record.name for record in caplog.records} == {"mine"}


def test_the_default_of_the_older_package_can_be_passed_where_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        @staticmethod
        def zeros(shape: Any, device: str) -> str:
            return device

    monkeypatch.setitem(sys.modules, "torch", Torch)
    safe_gpu.claim_gpus(2, placeholder_fn=safe_gpu.PytorchPlaceholder(logger=logging))
    assert safe_gpu.gpu_owner.placeholders == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("name", ["pytorch_placeholder", "tensorflow_placeholder"])
def test_the_ready_made_placeholders_take_a_device_number(name: str) -> None:
    placeholder = getattr(safe_gpu, name)
    assert callable(placeholder)
    assert list(inspect.signature(placeholder).parameters) == ["device_no"]


@pytest.mark.parametrize("name", ["PytorchPlaceholder", "TensorflowPlaceholder", "PyCudaPlaceholder"])
def test_placeholder_classes_take_a_logger(name: str) -> None:
    assert getattr(safe_gpu, name)(logger=logging).logger is logging
    assert getattr(safe_gpu, name)(logging).logger is logging
    getattr(safe_gpu, name)()


def test_an_own_placeholder_is_called_with_the_device_number_and_kept() -> None:
    made = []

    def occupy(device_no: int) -> object:
        made.append((device_no, visible()))
        return f"pointer {device_no}"

    safe_gpu.claim_gpus(2, placeholder_fn=occupy)
    assert made == [(0, "0,1"), (1, "0,1")]
    assert safe_gpu.gpu_owner.placeholders == ["pointer 0", "pointer 1"]
    safe_gpu.release_gpus()  # it has no release(): nothing to call


def test_an_own_placeholder_class_is_released(caplog: pytest.LogCaptureFixture) -> None:
    released = []

    class Placeholder:
        def __call__(self, device_no: int) -> str:
            return f"thing {device_no}"

        def release(self, placeholder: str) -> None:
            released.append(placeholder)

    caplog.set_level(logging.INFO)
    safe_gpu.claim_gpus(2, Placeholder())
    taken = safe_gpu.gpu_owner.devices_taken
    safe_gpu.release_gpus()
    assert released == ["thing 0", "thing 1"]
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if line.startswith("Releasing")] == [
        f"Releasing placeholder on CUDA device: {device}" for device in taken
    ]


def test_the_owner_can_be_constructed_and_released_explicitly() -> None:
    own = safe_gpu.GPUOwner(nb_gpus=2, logger=logging, debug_sleep=0.0)
    assert own.devices_taken == [0, 1]
    assert safe_gpu.gpu_owner is None
    own.release_gpus()
    assert safe_gpu.GPUOwner(2).devices_taken == [0, 1], "they were given back"


def test_the_logging_module_itself_is_a_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    safe_gpu.claim_gpus(1, logger=logging)
    assert {record.name for record in caplog.records} == {"root"}


def test_the_log_tells_the_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "safe_gpu")
    safe_gpu.claim_gpus(2)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    steps = ["acquiring lock", "lock acquired", "lock released", "Set CUDA_VISIBLE_DEVICES=0,1"]
    assert [line for line in lines if line in steps] == steps
    assert {record.name for record in caplog.records} == {"safe_gpu"}


def test_debug_sleep_falls_between_the_choice_and_the_placeholder(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr("time.sleep", lambda seconds: steps.append((seconds, visible())))
    safe_gpu.claim_gpus(1, lambda device_no: steps.append("placeholder"), None, 12.5)
    assert steps[:2] == [(12.5, "0"), "placeholder"]


def test_too_few_free_gpus_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch, stranger_pid: int) -> None:
    monkeypatch.setenv("SAFE_GPU_TIMEOUT", "0")
    driver = SimulatedDriver("dgx-a100")
    contexts = [driver.occupy(gpu.uuid, pid=stranger_pid) for gpu in driver.idle.gpus[:7]]
    with pytest.raises(RuntimeError, match="2 GPUs asked for, 1 free"):
        safe_gpu.claim_gpus(2)
    with pytest.raises(RuntimeError):
        safe_gpu.claim_gpus(9)
    for context in contexts:
        context.close()


def test_a_failing_placeholder_is_a_runtime_error() -> None:
    def fails(device_no: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        safe_gpu.claim_gpus(placeholder_fn=fails)
    assert visible() is None


def test_no_driver_is_an_nvidiasmi_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(safe_gpu.NvidiasmiError):
        safe_gpu.claim_gpus(2)


def test_free_gpus_are_strings_in_numeric_order() -> None:
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(8)]
    safe_gpu.claim_gpus(2)
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(2, 8)]


def test_releasing_twice_or_nothing_is_fine() -> None:
    safe_gpu.release_gpus()
    safe_gpu.claim_gpus()
    safe_gpu.release_gpus()
    safe_gpu.release_gpus()


def test_all_names_are_there_by_any_way_of_importing() -> None:
    names = (
        "LOCK_FILENAME NvidiasmiError get_free_gpus PytorchPlaceholder TensorflowPlaceholder PyCudaPlaceholder "
        "GPUOwner claim_gpus release_gpus gpu_owner pytorch_placeholder tensorflow_placeholder"
    ).split()
    module = importlib.import_module("safe_gpu.safe_gpu")
    assert module is safe_gpu
    exec(f"from safe_gpu.safe_gpu import {', '.join(names)}; import safe_gpu.safe_gpu as s; s.claim_gpus", {})
