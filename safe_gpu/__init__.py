"""Claims GPUs on shared hosts without collisions.

Needs no daemon and no root rights. In a program::

    import safe_gpu
    safe_gpu.claim_gpus(2)      # before anything initialises CUDA

Every name is loaded on first use, so that importing the package is fast.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would take longer than this whole module
if TYPE_CHECKING:
    from typing import Any

    from .affinity.binding import BindingReport
    from .affinity.cpu_shares import split_share
    from .affinity.gpu_affinity import Mode, Multithreading, Scope, set_affinity
    from .affinity.numactl import wrap_command
    from .affinity.options import AffinityOptions
    from .affinity.placement import PlacementReport, placement
    from .claim.functions import claim_gpus, ensure_gpus, get_free_gpus, release_gpus
    from .claim.owner import GPUOwner
    from .claim.worker import bind
    from .errors import (
        AlreadyClaimedError,
        ClaimTimeout,
        CudaInitializedError,
        GPUAffinityError,
        GpuContendedError,
        LockTimeout,
        NoDriverError,
        NotEnoughGpusError,
        NvidiasmiError,
        PlaceholderError,
        PolicyError,
        SafeGpuError,
        StateDirError,
        UnsatisfiableRequestError,
        WrongDeviceError,
    )
    from .gpus.devices import Gpu, GpuProcess, GpuVerdict
    from .runtimes.placeholders import (
        CudaPlaceholder,
        CupyPlaceholder,
        JaxPlaceholder,
        NoPlaceholder,
        PyCudaPlaceholder,
        PytorchPlaceholder,
        TensorflowPlaceholder,
        pytorch_placeholder,
        tensorflow_placeholder,
    )

    gpu_owner: GPUOwner | None
    """The owner that :func:`claim_gpus` made, until its release."""

__version__ = "3.0.0"

__all__ = [
    "AffinityOptions",
    "AlreadyClaimedError",
    "BindingReport",
    "ClaimTimeout",
    "CudaInitializedError",
    "CudaPlaceholder",
    "CupyPlaceholder",
    "GPUAffinityError",
    "GPUOwner",
    "Gpu",
    "GpuContendedError",
    "GpuProcess",
    "GpuVerdict",
    "JaxPlaceholder",
    "LockTimeout",
    "Mode",
    "Multithreading",
    "NoDriverError",
    "NoPlaceholder",
    "NotEnoughGpusError",
    "NvidiasmiError",
    "PlaceholderError",
    "PlacementReport",
    "PolicyError",
    "PyCudaPlaceholder",
    "PytorchPlaceholder",
    "SafeGpuError",
    "Scope",
    "StateDirError",
    "TensorflowPlaceholder",
    "UnsatisfiableRequestError",
    "WrongDeviceError",
    "__version__",
    "bind",
    "claim_gpus",
    "ensure_gpus",
    "get_free_gpus",
    "gpu_owner",
    "placement",
    "pytorch_placeholder",
    "release_gpus",
    "set_affinity",
    "split_share",
    "tensorflow_placeholder",
    "wrap_command",
]

# Module -> names that are loaded from it.
_HOMES = {
    "affinity.binding": ("BindingReport"),
    "affinity.cpu_shares": ("split_share"),
    "affinity.gpu_affinity": ("Mode Multithreading Scope set_affinity"),
    "affinity.numactl": ("wrap_command"),
    "affinity.options": ("AffinityOptions"),
    "affinity.placement": ("PlacementReport placement"),
    "claim.worker": ("bind"),
    "gpus.devices": ("Gpu GpuProcess GpuVerdict"),
    "errors": (
        "AlreadyClaimedError ClaimTimeout CudaInitializedError GPUAffinityError GpuContendedError "
        "LockTimeout NoDriverError NotEnoughGpusError NvidiasmiError PlaceholderError PolicyError "
        "SafeGpuError StateDirError UnsatisfiableRequestError WrongDeviceError"
    ),
    "claim.functions": ("claim_gpus ensure_gpus get_free_gpus gpu_owner release_gpus"),
    "claim.owner": ("GPUOwner"),
    "runtimes.placeholders": (
        "CudaPlaceholder CupyPlaceholder JaxPlaceholder NoPlaceholder PyCudaPlaceholder "
        "PytorchPlaceholder TensorflowPlaceholder pytorch_placeholder tensorflow_placeholder"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        # From name and obj Python makes its suggestion: "Did you mean: 'claim_gpus'?"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    from importlib import import_module

    value = getattr(import_module(f".{home}", __name__), name)
    if name != "gpu_owner":  # its value changes with every claim, so it must not be cached
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
