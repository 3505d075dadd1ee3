"""Claims GPUs on shared hosts without collisions.

Needs no daemon and no root rights. In a program::

    import safe_gpu
    safe_gpu.claim_gpus(2)      # before anything initialises CUDA

Every name is loaded on first use, so that importing the package is fast.
"""

from __future__ import annotations

import sys

if sys.implementation.name != "cpython":  # PyPy has no os.O_PATH, for example
    refusal = f"safe_gpu needs CPython, and this is {sys.implementation.name}: start it with CPython's python3"
    started_as_module = sys.argv[0] == "-m" and "safe_gpu" in sys.orig_argv
    if started_as_module or sys.argv[0].endswith("safe-gpu"):  # the command, which ends without a traceback
        print(f"safe-gpu: {refusal}", file=sys.stderr)
        sys.exit(70)
    raise ImportError(refusal)

TYPE_CHECKING = False  # importing typing would take longer than this whole module
if TYPE_CHECKING:
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

# Name -> the module from which it is loaded on first use.
_HOME_OF = {
    "BindingReport": "affinity.binding",
    "split_share": "affinity.binding",
    "Mode": "affinity.gpu_affinity",
    "Multithreading": "affinity.gpu_affinity",
    "Scope": "affinity.gpu_affinity",
    "set_affinity": "affinity.gpu_affinity",
    "wrap_command": "affinity.numactl",
    "AffinityOptions": "affinity.planner",
    "PlacementReport": "affinity.placement",
    "placement": "affinity.placement",
    "bind": "claim.worker",
    "Gpu": "gpus.devices",
    "GpuProcess": "gpus.devices",
    "GpuVerdict": "gpus.devices",
    "AlreadyClaimedError": "errors",
    "ClaimTimeout": "errors",
    "CudaInitializedError": "errors",
    "GPUAffinityError": "errors",
    "GpuContendedError": "errors",
    "LockTimeout": "errors",
    "NoDriverError": "errors",
    "NotEnoughGpusError": "errors",
    "NvidiasmiError": "errors",
    "PlaceholderError": "errors",
    "PolicyError": "errors",
    "SafeGpuError": "errors",
    "StateDirError": "errors",
    "UnsatisfiableRequestError": "errors",
    "WrongDeviceError": "errors",
    "claim_gpus": "claim.functions",
    "ensure_gpus": "claim.functions",
    "get_free_gpus": "claim.functions",
    "gpu_owner": "claim.functions",
    "release_gpus": "claim.functions",
    "GPUOwner": "claim.owner",
    "CudaPlaceholder": "runtimes.cuda",
    "CupyPlaceholder": "runtimes.placeholders",
    "JaxPlaceholder": "runtimes.placeholders",
    "NoPlaceholder": "runtimes.placeholders",
    "PyCudaPlaceholder": "runtimes.placeholders",
    "PytorchPlaceholder": "runtimes.placeholders",
    "TensorflowPlaceholder": "runtimes.placeholders",
    "pytorch_placeholder": "runtimes.placeholders",
    "tensorflow_placeholder": "runtimes.placeholders",
}

if not TYPE_CHECKING:  # checkers take what is imported above, and a name that is not there is an error
    __all__ = ["__version__"]
    __all__.extend(_HOME_OF)

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            text = f"module {__name__!r} has no attribute {name!r}"
            instead = _instead_of(name)
            if instead:
                raise AttributeError(f"{text}: {instead}")
            raise AttributeError(text, name=name, obj=sys.modules[__name__])  # Python adds a name that is spelt alike
        from importlib import import_module

        module = import_module(f".{_HOME_OF[name]}", __name__)
        value = getattr(module, name)
        if name != "gpu_owner":  # its value changes with every claim, so it must not be cached
            globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME_OF})


# Not asked of the command line: ``from safe_gpu import errors`` looks for such a name too, and would load all of it.
_COMMANDS = frozenset("affinity completion demo doctor drain history policy resume run setup status wait".split())


def _instead_of(name: str) -> str:
    """Return what to write instead of a name that there is not; "" if nobody knows."""
    longer = [known for known in _HOME_OF if known.startswith(f"{name}_")]
    if longer:
        return f"write {' or '.join(longer)}"
    if name == "free_gpus":
        return "write get_free_gpus to see which are free, or release_gpus to give those of this process back"
    meant = _meant_function(name)
    if meant:
        return f"write {meant}"
    if name in _COMMANDS:
        return f"safe-gpu {name} is a command of the shell"
    return ""


def _meant_function(name: str) -> str:
    """Return the function that does what a verb such as ``acquire`` or ``unlock_gpus`` says; "" if none does."""
    from .wording.elsewhere import CLAIM, GIVE_BACK

    verb = name.removesuffix("s").removesuffix("_gpu")
    if verb in CLAIM:
        return "claim_gpus"
    if verb in GIVE_BACK:
        return "release_gpus"
    return ""
