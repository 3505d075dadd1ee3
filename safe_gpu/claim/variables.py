"""The environment variables that a claim sets."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ..selection.sharing import MIB, share_fraction

if TYPE_CHECKING:
    from ..gpus.devices import Gpu


class ClaimVariables:
    """Variables of this process that a claim has set."""

    def __init__(self) -> None:
        self._set: dict[str, tuple[str, str | None]] = {}  # name -> value, and value before

    def set(self, variables: Mapping[str, str]) -> None:
        """Set these variables."""
        for name, value in variables.items():
            self._set[name] = value, os.environ.get(name)
            os.environ[name] = value

    def restore(self) -> None:
        """Make them what they were; a value that the program has set since stays."""
        for name, (value, before) in self._set.items():
            if os.environ.get(name) == value:
                if before is None:
                    del os.environ[name]
                else:
                    os.environ[name] = before
        self._set = {}


def share_variables(share: int, gpus: Collection[Gpu], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep a program within its share of each GPU, in bytes."""
    fraction = f"{share_fraction(share, gpus):.6g}"
    found = {"GPU_MEMORY_LIMIT": str(share), "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    if "XLA_CLIENT_MEM_FRACTION" not in environ:  # JAX refuses both together
        found["XLA_PYTHON_CLIENT_MEM_FRACTION"] = fraction
    if environ.get("SAFE_GPU_SHARE_TORCH") == "1":  # PyTorch before 2.10 refuses the option
        found["PYTORCH_CUDA_ALLOC_CONF"] = f"per_process_memory_fraction:{fraction}"
    pipe = environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    if os.path.exists(os.path.join(pipe, "control")) and all(gpu.named_by_uuid for gpu in gpus):
        found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = ",".join(f"{gpu.uuid}={share // MIB}M" for gpu in gpus)
    found = {name: value for name, value in found.items() if name not in environ}
    return {"SAFE_GPU_SHARE": str(share), "SAFE_GPU_SHARE_FRACTION": fraction, **found}
