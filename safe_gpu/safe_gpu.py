"""The module path of the older package: ``from safe_gpu import safe_gpu`` keeps working, with the names it had."""

from __future__ import annotations

from typing import Any

from . import owner
from .coordination.legacy import LOCK_FILE as LOCK_FILENAME
from .errors import NvidiasmiError
from .inquiry import get_free_gpus
from .owner import GPUOwner, claim_gpus, release_gpus
from .placeholders import (
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
