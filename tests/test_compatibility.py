"""Code that was written for the older package runs unchanged."""

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import safe_gpu as package
from safe_gpu import safe_gpu
from safe_gpu.claim import owner


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


def test_the_ready_made_placeholders_take_a_device_number() -> None:
    for placeholder in (safe_gpu.pytorch_placeholder, safe_gpu.tensorflow_placeholder):
        assert list(inspect.signature(placeholder).parameters) == ["device_no"]


def test_an_own_placeholder_is_called_with_the_device_number_and_kept() -> None:
    made = []

    def occupy(device_no: int) -> object:
        made.append((device_no, visible()))
        return f"pointer {device_no}"

    safe_gpu.claim_gpus(2, placeholder_fn=occupy)
    assert made == [(0, "0,1"), (1, "0,1")]
    assert safe_gpu.gpu_owner.placeholders == ["pointer 0", "pointer 1"]
    safe_gpu.release_gpus()  # it has no release(): nothing to call


def test_the_owner_can_be_constructed_and_released_explicitly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = safe_gpu.GPUOwner(nb_gpus=2, logger=logging, debug_sleep=0.0)
    assert own.devices_taken == [0, 1]
    assert {record.name for record in caplog.records} == {"root"}, "the logging module is a logger, too"
    assert safe_gpu.gpu_owner is None
    own.release_gpus()
    assert safe_gpu.GPUOwner(2).devices_taken == [0, 1], "they were given back"


def test_all_names_are_there_by_any_way_of_importing() -> None:
    names = (
        "LOCK_FILENAME, NvidiasmiError, get_free_gpus, PytorchPlaceholder, TensorflowPlaceholder, PyCudaPlaceholder, "
        "GPUOwner, claim_gpus, release_gpus, gpu_owner, pytorch_placeholder, tensorflow_placeholder"
    )
    exec(f"from safe_gpu.safe_gpu import {names}; import safe_gpu.safe_gpu as s; s.claim_gpus", {})
    assert importlib.import_module("safe_gpu.safe_gpu") is safe_gpu
