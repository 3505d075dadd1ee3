"""The module of the older package, with its names: ``from safe_gpu import safe_gpu`` keeps working."""

from typing import Any

from .claim import functions as owner
from .claim.functions import claim_gpus, get_free_gpus, release_gpus
from .claim.owner import GPUOwner
from .coordination.older_package import LOCK_FILE as LOCK_FILENAME
from .errors import NvidiasmiError
from .runtimes.placeholders import (
    PyCudaPlaceholder,
    PytorchPlaceholder,
    TensorflowPlaceholder,
    pytorch_placeholder,
    tensorflow_placeholder,
)

__all__ = [
    "LOCK_FILENAME",
    "GPUOwner",
    "NvidiasmiError",
    "PyCudaPlaceholder",
    "PytorchPlaceholder",
    "TensorflowPlaceholder",
    "claim_gpus",
    "get_free_gpus",
    "gpu_owner",  # noqa: F822 - see __getattr__
    "pytorch_placeholder",
    "release_gpus",
    "tensorflow_placeholder",
]


def __getattr__(name: str) -> Any:
    if name == "gpu_owner":  # changes with every claim
        return owner.gpu_owner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
