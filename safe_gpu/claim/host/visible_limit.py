"""The GPUs to which a variable like CUDA_VISIBLE_DEVICES limits a claim."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...errors import CudaInitializedError, NoDriverError, UnsatisfiableRequestError
from ...gpus.visible import VisibleLimit
from ...runtimes import placeholders
from ...runtimes.visible_devices import read_visible_once, visible_variables
from ...schedulers.job import in_batch_job
from ...settings import variables as settings

if TYPE_CHECKING:
    from ...gpus.devices import HostSnapshot
    from ...runtimes.library import Runtime

# Pid of the process in which a claim's placeholder initialised CUDA, and the name of that placeholder. CUDA stays
# initialised when the placeholder is released.
_initializer: tuple[int, str] | None = None


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
    if limit is not None and in_batch_job():
        limit = limit._replace(lift="")
    if limit is not None and limit.ambiguous:
        limit = limit._replace(uuids=_resolved(snapshot, limit, runtime), ambiguous=False, doubt="")
    return limit


def prepare_only(placeholder: Any, runtime: Runtime) -> None:
    """Call the placeholder's ``prepare()``, and check that it does no more than that.

    Raises:
        CudaInitializedError: it initialised the library.
        PlaceholderError: as for :func:`~safe_gpu.runtimes.placeholders.prepare`.
    """
    uninitialized = runtime.visible_if_initialized() is None
    placeholders.prepare(placeholder)
    if uninitialized and runtime.visible_if_initialized() is not None:
        raise CudaInitializedError(
            "the placeholder's prepare() initialised CUDA, which fixed the GPUs that this process sees: prepare() "
            "may only import; initialise CUDA when the placeholder is called"
        )


def remember_initializer(visible_limit: VisibleLimit | None, placeholder: Any, runtime: Runtime) -> None:
    """After a placeholder is allocated: store whether it has initialised CUDA, for the error of a later claim.

    ``visible_limit`` is that of the claim; ``visible_limit.frozen`` means that CUDA was initialised before.
    """
    global _initializer
    if not (visible_limit is not None and visible_limit.frozen) and runtime.shown_at(0) is not None:
        _initializer = os.getpid(), placeholders.name_of(placeholder)


def _frozen(snapshot: HostSnapshot, nb_gpus: int, visible: tuple[str, ...], runtime: Runtime) -> VisibleLimit:
    """Return the limit of a process in which CUDA is initialised. It can claim exactly the GPUs that CUDA sees, no
    others."""
    found = _claimable(snapshot, visible, runtime)
    if found is None or len(found) != nb_gpus:
        library = runtime.title
        cannot = f"sees {len(visible)} GPU(s), so a claim of {nb_gpus} cannot change which ones it uses"
        problem = (
            f"{library} is already initialised in this process and {cannot}: call claim_gpus() before "
            f"torch.cuda.is_available(), device_count() and anything else that initialises {library}"
        )
        if _initializer is not None and _initializer[0] == os.getpid():
            problem = (
                f"{library} was initialised in this process by the placeholder of an earlier claim "
                f"({_initializer[1]}), and it stays so after release_gpus(): it {cannot}: make one claim of "
                f"{max(nb_gpus, len(visible))}, or make the earlier claim with placeholder_fn=NoPlaceholder() and use "
                "no GPU before this one"
            )
        raise CudaInitializedError(f"{problem}, or start a new process", visible=visible)
    name = visible_variables(snapshot)[0]
    return VisibleLimit(os.environ.get(name, ""), found, frozen=True, name=name, library=runtime.title, lift="")


def _resolved(snapshot: HostSnapshot, visible_limit: VisibleLimit, runtime: Runtime) -> tuple[str, ...]:
    """Return the devices that an ambiguous variable selects, as CUDA shows them in a child process."""
    problem = ""
    if runtime.asks_library:
        try:
            found = _claimable(snapshot, runtime.visible_in_child(), runtime)
            if found is not None:
                return found
            problem = f"; {runtime.title} itself shows GPUs that the driver does not"
        except NoDriverError as err:
            problem = f"; {runtime.title} itself could not be asked: {err}"
    raise UnsatisfiableRequestError(
        f"{visible_limit.name}={visible_limit.value} is ambiguous: {visible_limit.doubt}{problem}; set "
        f"{visible_limit.clear_by}{visible_limit.lift and f', or set {visible_limit.lift}'}",
        value=visible_limit.value,
    )


def _claimable(snapshot: HostSnapshot, visible: Iterable[str], runtime: Runtime) -> tuple[str, ...] | None:
    """CUDA's UUIDs as the driver writes them, in CUDA's order; None if the driver does not list one of them."""
    found = []
    for shown in visible:
        gpu = next((gpu for gpu in reversed(snapshot.gpus) if runtime.is_same(shown, gpu)), None)
        if gpu is None:
            return None
        found.append(gpu.uuid)
    return tuple(found)
