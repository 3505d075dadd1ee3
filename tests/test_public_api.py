"""What the package offers, what importing it costs, and that code for the older package runs unchanged."""

import importlib
import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import safe_gpu as old
from safe_gpu.claim import owner

ROOT = Path(safe_gpu.__file__).parents[1]
CONTRACT = """
claim_gpus ensure_gpus release_gpus gpu_owner GPUOwner get_free_gpus
PytorchPlaceholder TensorflowPlaceholder PyCudaPlaceholder CupyPlaceholder JaxPlaceholder CudaPlaceholder NoPlaceholder
pytorch_placeholder tensorflow_placeholder
set_affinity Mode Scope Multithreading GPUAffinityError bind placement wrap_command AffinityOptions
SafeGpuError NoDriverError NvidiasmiError NotEnoughGpusError ClaimTimeout GpuContendedError UnsatisfiableRequestError
AlreadyClaimedError LockTimeout StateDirError CudaInitializedError PlaceholderError WrongDeviceError
""".split()


HEAVY = "torch tensorflow numpy pynvml ctypes subprocess logging asyncio"


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import safe_gpu", HEAVY),
        ("from safe_gpu import SafeGpuError, NotEnoughGpusError, gpu_owner, claim_gpus, CudaPlaceholder", HEAVY),
        ("from safe_gpu import safe_gpu; safe_gpu.claim_gpus", HEAVY),
        ("import safe_gpu.cli", "pynvml logging subprocess json ctypes torch dataclasses threading difflib shutil"),
        (
            "import safe_gpu; safe_gpu.claim_gpus(1, timeout=0); safe_gpu.release_gpus()",
            "torch pynvml numpy subprocess",
        ),
    ],
)
def test_what_is_loaded(code: str, heavy: str) -> None:
    command = [sys.executable, "-S", "-c", f"{code}; import sys; print(*sys.modules)"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    loaded = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert not [name for name in loaded if name in heavy.split()]
    assert code != "import safe_gpu" or not [name for name in loaded if name.startswith("safe_gpu.")]


@pytest.mark.parametrize("name", sorted({*safe_gpu.__all__, *CONTRACT}))
def test_every_name_is_there(name: str) -> None:
    assert name in safe_gpu.__all__
    assert name in dir(safe_gpu)
    value = getattr(safe_gpu, name)
    if callable(value) and name not in ("pytorch_placeholder", "tensorflow_placeholder"):
        assert inspect.getdoc(value), f"{name} is not explained"


def test_no_name_is_there_twice_and_unknown_ones_are_not() -> None:
    assert len(safe_gpu.__all__) == len(set(safe_gpu.__all__))
    with pytest.raises(AttributeError, match="claim_gpu'") as caught:
        safe_gpu.claim_gpu  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("claim_gpu", safe_gpu), "Python may suggest another one"


def test_the_star_import_brings_them_all() -> None:
    namespace: dict[str, object] = {}
    exec("from safe_gpu import *", namespace)
    assert set(safe_gpu.__all__) <= set(namespace)


def test_the_arguments_of_a_claim() -> None:
    expected = {
        "nb_gpus": 1,
        "placeholder_fn": None,
        "logger": None,
        "debug_sleep": 0.0,
        "timeout": inspect.signature(safe_gpu.claim_gpus).parameters["timeout"].default,
        "affinity": "node",
        "memory": None,
        "min_memory": None,
        "model": None,
        "max_utilization": None,
        "near": None,
        "prefer": None,
        "share": None,
        "exclude": (),
        "only": (),
        "visible_as": "index",
        "delegate": False,
        "hold_for": inspect.signature(safe_gpu.claim_gpus).parameters["hold_for"].default,
        "vendor": None,
    }
    for callable_ in (safe_gpu.claim_gpus, safe_gpu.ensure_gpus, safe_gpu.GPUOwner):
        parameters = inspect.signature(callable_).parameters
        public = {name: p.default for name, p in parameters.items() if not name.startswith("_")}
        assert public == expected
        positional = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == ["nb_gpus", "placeholder_fn", "logger", "debug_sleep"]
    for function in (safe_gpu.claim_gpus, safe_gpu.ensure_gpus):
        assert inspect.signature(function).return_annotation == "GPUOwner"


def test_elsewhere_than_on_linux_the_import_works_and_a_claim_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(safe_gpu.UnsatisfiableRequestError, match="Linux only, and this is darwin"):
        safe_gpu.claim_gpus(1)


def test_the_version_is_the_distributions_and_it_is_typed() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert f'version = "{safe_gpu.__version__}"' in text
    assert (Path(safe_gpu.__file__).parent / "py.typed").exists()


# The older package's module


def test_both_modules_speak_of_the_same_things() -> None:
    older = importlib.import_module("safe_gpu.safe_gpu")
    for name in older.__all__:
        if name in safe_gpu.__all__:
            assert getattr(older, name) is getattr(safe_gpu, name)


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """An owner that a test dropped goes with it."""
    yield
    if owner.current_owner() is not None:
        owner.current_owner().release_gpus()


def visible() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_claiming_one_gpu() -> None:
    assert old.gpu_owner is None
    old.claim_gpus()
    assert old.gpu_owner.devices_taken == [0]
    assert type(old.gpu_owner.devices_taken[0]) is int
    assert visible() == "0"
    assert len(old.gpu_owner.placeholders) == 1
    assert isinstance(old.gpu_owner, old.GPUOwner)
    assert safe_gpu.gpu_owner is old.gpu_owner


def test_all_four_arguments_by_position(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("mine")
    caplog.set_level(logging.INFO, "mine")
    devices = []
    old.claim_gpus(2, devices.append, logger, 0.0)
    assert devices == [0, 1]
    assert {record.name for record in caplog.records} == {"mine"}


def test_the_default_of_the_older_package_can_be_passed_where_torch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        @staticmethod
        def zeros(shape: Any, device: str) -> str:
            return device

    monkeypatch.setitem(sys.modules, "torch", Torch)
    old.claim_gpus(2, placeholder_fn=old.PytorchPlaceholder(logger=logging))
    assert old.gpu_owner.placeholders == ["cuda:0", "cuda:1"]


def test_an_own_placeholder_is_called_with_the_device_number_and_kept() -> None:
    made = []

    def occupy(device_no: int) -> object:
        made.append((device_no, visible()))
        return f"pointer {device_no}"

    old.claim_gpus(2, placeholder_fn=occupy)
    assert made == [(0, "0,1"), (1, "0,1")]
    assert old.gpu_owner.placeholders == ["pointer 0", "pointer 1"]
    old.release_gpus()  # it has no release(): nothing to call


def test_the_owner_can_be_constructed_and_released_explicitly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    own = old.GPUOwner(nb_gpus=2, logger=logging, debug_sleep=0.0)
    assert own.devices_taken == [0, 1]
    assert {record.name for record in caplog.records} == {"root"}, "the logging module is a logger, too"
    assert old.gpu_owner is None
    own.release_gpus()
    assert old.GPUOwner(2).devices_taken == [0, 1], "they were given back"


def test_all_names_are_there_by_any_way_of_importing() -> None:
    names = (
        "LOCK_FILENAME, NvidiasmiError, get_free_gpus, PytorchPlaceholder, TensorflowPlaceholder, PyCudaPlaceholder, "
        "GPUOwner, claim_gpus, release_gpus, gpu_owner, pytorch_placeholder, tensorflow_placeholder"
    )
    exec(f"from safe_gpu.safe_gpu import {names}; import safe_gpu.safe_gpu as s; s.claim_gpus", {})
    assert importlib.import_module("safe_gpu.safe_gpu") is old
