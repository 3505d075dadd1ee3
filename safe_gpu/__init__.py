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

    from .affinity.binding import BindingReport as BindingReport, split_share as split_share
    from .affinity.gpu_affinity import (
        Mode as Mode,
        Multithreading as Multithreading,
        Scope as Scope,
        set_affinity as set_affinity,
    )
    from .affinity.numactl import wrap_command as wrap_command
    from .affinity.planner import AffinityOptions as AffinityOptions
    from .affinity.placement import PlacementReport as PlacementReport, placement as placement
    from .claim.functions import (
        claim_gpus as claim_gpus,
        ensure_gpus as ensure_gpus,
        get_free_gpus as get_free_gpus,
        release_gpus as release_gpus,
    )
    from .claim.owner import GPUOwner as GPUOwner
    from .claim.worker import bind as bind
    from .errors import (
        AlreadyClaimedError as AlreadyClaimedError,
        ClaimTimeout as ClaimTimeout,
        CudaInitializedError as CudaInitializedError,
        GPUAffinityError as GPUAffinityError,
        GpuContendedError as GpuContendedError,
        LockTimeout as LockTimeout,
        NoDriverError as NoDriverError,
        NotEnoughGpusError as NotEnoughGpusError,
        NvidiasmiError as NvidiasmiError,
        PlaceholderError as PlaceholderError,
        PolicyError as PolicyError,
        SafeGpuError as SafeGpuError,
        StateDirError as StateDirError,
        UnsatisfiableRequestError as UnsatisfiableRequestError,
        WrongDeviceError as WrongDeviceError,
    )
    from .gpus.devices import Gpu as Gpu, GpuProcess as GpuProcess, GpuVerdict as GpuVerdict
    from .runtimes.cuda import CudaPlaceholder as CudaPlaceholder
    from .runtimes.placeholders import (
        CupyPlaceholder as CupyPlaceholder,
        JaxPlaceholder as JaxPlaceholder,
        NoPlaceholder as NoPlaceholder,
        PyCudaPlaceholder as PyCudaPlaceholder,
        PytorchPlaceholder as PytorchPlaceholder,
        TensorflowPlaceholder as TensorflowPlaceholder,
        pytorch_placeholder as pytorch_placeholder,
        tensorflow_placeholder as tensorflow_placeholder,
    )

    gpu_owner: GPUOwner | None
    """The owner that :func:`claim_gpus` made, until its release."""

__version__ = "3.0.0"

# Module -> names that are loaded from it.
_HOMES = {
    "affinity.binding": ("BindingReport split_share"),
    "affinity.gpu_affinity": ("Mode Multithreading Scope set_affinity"),
    "affinity.numactl": ("wrap_command"),
    "affinity.planner": ("AffinityOptions"),
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
    "runtimes.cuda": ("CudaPlaceholder"),
    "runtimes.placeholders": (
        "CupyPlaceholder JaxPlaceholder NoPlaceholder PyCudaPlaceholder "
        "PytorchPlaceholder TensorflowPlaceholder pytorch_placeholder tensorflow_placeholder"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

if not TYPE_CHECKING:  # checkers take what is imported under its own name
    __all__ = ["__version__"]
    __all__.extend(_HOME_OF)


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
    return sorted({*globals(), *_HOME_OF})
