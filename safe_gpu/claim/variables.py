"""The environment variables of a claim: which GPUs they leave it, and those that it sets."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from ..errors import CudaInitializedError, UnsatisfiableRequestError
from ..gpus.devices import Gpu, HostSnapshot, VisibleLimit
from ..runtimes.library import Runtime
from ..runtimes.visible_devices import read_visible_once, visible_variables
from ..schedulers.job import current
from ..selection.sharing import MIB, share_fraction
from ..settings import variables as settings

initializers: dict[int, str] = {}
"""Pid of a process in which a claim's placeholder initialised CUDA -> the name of that placeholder. CUDA stays
initialised when the placeholder is released."""


def visible_limit_of(snapshot: HostSnapshot, nb_gpus: int, runtime: Runtime) -> VisibleLimit | None:
    """Return the GPUs that the variables of their vendor allow; None if these do not limit the choice.

    If the runtime is initialised in this process, the limit is the GPUs that it sees (``frozen``), in its order.

    Args:
        snapshot: the host's devices.
        nb_gpus: how many are asked for.
        runtime: of these devices.

    Raises:
        CudaInitializedError: CUDA is initialised and sees another number of GPUs than asked for.
        UnsatisfiableRequestError: the variable is ambiguous on this host.
    """
    visible = runtime.visible_if_initialized()
    if visible is not None:
        return _frozen(snapshot, nb_gpus, visible, runtime)
    if settings.ignores_fence(os.environ):
        return None
    limit = read_visible_once(os.environ, snapshot)
    if limit is not None and current().scheduler is not None:
        limit = limit._replace(lift="")
    if limit is not None and limit.ambiguous:
        raise UnsatisfiableRequestError(
            f"{limit.name}={limit.value} is ambiguous: {limit.doubt}; set {limit.clear_by}"
            f"{limit.lift and f', or set {limit.lift}'}",
            value=limit.value,
        )
    return limit


def _frozen(snapshot: HostSnapshot, nb_gpus: int, visible: tuple[str, ...], runtime: Runtime) -> VisibleLimit:
    """Return the limit of a process in which CUDA is initialised. It can claim exactly the GPUs that CUDA sees, no
    others."""
    # As the driver writes them; None is one that it does not list.
    found = [next((gpu.uuid for gpu in reversed(snapshot.gpus) if runtime.is_same(one, gpu)), None) for one in visible]
    if None in found or len(found) != nb_gpus:
        library = runtime.title
        cannot = f"sees {len(visible)} GPU(s), so a claim of {nb_gpus} cannot change which ones it uses"
        problem = (
            f"{library} is already initialised in this process and {cannot}: call claim_gpus() before "
            f"torch.cuda.is_available(), device_count() and anything else that initialises {library}"
        )
        if placeholder := initializers.get(os.getpid()):
            problem = (
                f"{library} was initialised in this process by the placeholder of an earlier claim "
                f"({placeholder}), and it stays so after release_gpus(): it {cannot}: make one claim of "
                f"{max(nb_gpus, len(visible))}, or make the earlier claim with placeholder_fn=NoPlaceholder() and use "
                "no GPU before this one"
            )
        raise CudaInitializedError(f"{problem}, or start a new process", visible=visible)
    name = visible_variables(snapshot)[0]
    uuids = tuple(filter(None, found))
    return VisibleLimit(os.environ.get(name, ""), uuids, frozen=True, name=name, library=runtime.title, lift="")


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
