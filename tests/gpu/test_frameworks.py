"""Every placeholder on a real GPU, as far as its framework is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from safe_gpu.runtimes.cuda import same_device

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PLACEHOLDERS = {
    "CudaPlaceholder": "",
    "PytorchPlaceholder": "torch",
    "TensorflowPlaceholder": "tensorflow",
    "PyCudaPlaceholder": "pycuda",
    "CupyPlaceholder": "cupy",
    "JaxPlaceholder": "jax",
}

CODE = """
try:
    owner = claim(uuid, safe_gpu.{placeholder}())
except safe_gpu.PlaceholderError as err:
    say("failed", str(err).splitlines()[0])
    sys.exit()
say("holds", opened()[0])
listen()
safe_gpu.release_gpus()
say("released")
listen()
"""


@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_a_placeholder_holds_the_gpu_and_lets_it_go(gpu: Any, claimer: Any, placeholder: str) -> None:
    module = PLACEHOLDERS[placeholder]
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    process = claimer(CODE.format(placeholder=placeholder))
    word, _, rest = process.hear().partition(" ")
    if word == "failed" and "for CPUs only" in rest:
        pytest.skip(f"{module} is built for CPUs: {rest}")
    assert word == "holds", rest
    assert same_device(rest, gpu.uuid)
    process.tell()
    assert process.hear() == "released"
    process.kill()
    assert claimer("say(claim(uuid).gpus[0].uuid)").hear() == gpu.uuid


def test_no_placeholder_leaves_cuda_alone(gpu: Any, claimer: Any) -> None:
    claimer("claim(uuid, safe_gpu.NoPlaceholder()); say(cuda.visible_if_initialized())", says="None")
