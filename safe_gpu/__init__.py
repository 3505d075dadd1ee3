"""Claim GPUs safely on hosts that many share: no daemon, no root, no collisions.

    import safe_gpu
    safe_gpu.claim_gpus(2)      # before anything touches CUDA

Every name here is loaded when it is first used; importing the package costs next to nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing costs more than all of this module
if TYPE_CHECKING:
    from typing import Any

    from .affinity import (
        AffinityOptions,
        BindingReport,
        Mode,
        Multithreading,
        PlacementReport,
        Scope,
        placement,
        set_affinity,
        split_share,
        wrap_command,
    )
    from .devices import Gpu, GpuProcess, GpuVerdict
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
        SafeGpuError,
        StateDirError,
        UnsatisfiableRequestError,
        WrongDeviceError,
    )
    from .inquiry import get_free_gpus
    from .locality import bind
    from .owner import GPUOwner, claim_gpus, release_gpus
    from .placeholders import (
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

# Where each name lives.
_HOMES = {
    "affinity": (
        "AffinityOptions BindingReport Mode Multithreading PlacementReport Scope placement set_affinity "
        "split_share wrap_command"
    ),
    "locality": "bind",
    "devices": "Gpu GpuProcess GpuVerdict",
    "errors": (
        "AlreadyClaimedError ClaimTimeout CudaInitializedError GPUAffinityError GpuContendedError "
        "LockTimeout NoDriverError NotEnoughGpusError NvidiasmiError PlaceholderError SafeGpuError "
        "StateDirError UnsatisfiableRequestError WrongDeviceError"
    ),
    "inquiry": "get_free_gpus",
    "owner": "GPUOwner claim_gpus gpu_owner release_gpus",
    "placeholders": (
        "CudaPlaceholder CupyPlaceholder JaxPlaceholder NoPlaceholder PyCudaPlaceholder "
        "PytorchPlaceholder TensorflowPlaceholder pytorch_placeholder tensorflow_placeholder"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{home}", __name__), name)
    if name != "gpu_owner":  # the one name whose value changes
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
