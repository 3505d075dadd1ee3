"""What must be right before a claim touches anything: its arguments, CUDA's state, the GPUs it may choose from."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from . import cuda
from .coordination.legacy import legacy_mode
from .devices import GpuRequest, HostSnapshot
from .durations import DefaultTimeout, parse_timeout
from .errors import CudaInitializedError, NoDriverError, PlaceholderError, UnsatisfiableRequestError
from .request import parse_request
from .visibility import Fence, parse, render

if TYPE_CHECKING:
    from .affinity import AffinityOptions
    from .drivers.base import Driver

__all__ = [
    "boundaries",
    "check_placeholder",
    "checked",
    "checked_pause",
    "job_label",
    "warn_of_more_than_declared",
]


def checked(
    nb_gpus: int | str,
    timeout: float | str | DefaultTimeout | None,
    affinity: str | AffinityOptions | None,
    memory: str | None,
    min_memory: int | str | None,
    model: str | None,
    exclude: str | int | Iterable[str | int],
    only: str | int | Iterable[str | int],
    visible_as: str,
    logger: Any,
) -> tuple[GpuRequest, float | None, AffinityOptions | None]:
    """Every argument as what it means; nothing is touched before all of them are right."""
    from .schedulers import in_batch_job

    if not callable(getattr(logger, "info", None)):
        raise UnsatisfiableRequestError(
            f"logger={logger!r} is no logger: pass a logging.Logger, or leave it out", value=logger
        )
    count = nb_gpus
    if nb_gpus == "job":
        from .schedulers import number_for_job

        count = number_for_job(os.environ)
    request = parse_request(count, min_memory=min_memory, model=model, only=only, exclude=exclude)
    wait = parse_timeout(timeout, os.environ, in_batch_job=in_batch_job(os.environ))
    render((), visible_as=visible_as, snapshot=HostSnapshot(()))
    legacy_mode()
    options = None
    if affinity is not None or memory is not None:
        from .affinity.options import parse_options

        options = parse_options(affinity, memory)
    return request, wait, options


def warn_of_more_than_declared(nb_gpus: int, logger: Any) -> None:
    """Say so when a batch job takes more GPUs than it asked its scheduler for; the others on the host pay for that."""
    from .schedulers import in_batch_job

    if not in_batch_job(os.environ):
        return
    from .schedulers import declared_gpus

    # A claim of one is not worth a question to the scheduler: thousands of array tasks would ask.
    declared = declared_gpus(os.environ, ask=nb_gpus > 1, patience=2.0)
    if declared is not None and nb_gpus > declared:
        logger.warning(
            "This claim takes %d GPUs, but the job asked its scheduler for %d: declare what you take", nb_gpus, declared
        )


def checked_pause(debug_sleep: object) -> float:
    """Seconds to sleep; an argument that ``time.sleep`` would refuse is refused before anything is touched."""
    try:
        seconds = float(debug_sleep)  # type: ignore[arg-type]
        if 0 <= seconds < math.inf and not isinstance(debug_sleep, (str, bytes, bytearray)):
            return seconds
    except (TypeError, ValueError, OverflowError):
        pass
    raise UnsatisfiableRequestError(
        f"debug_sleep={debug_sleep!r} is no number of seconds: pass 0 or a positive number", value=debug_sleep
    )


def check_placeholder(placeholder_fn: object) -> None:
    """Refuse what could not hold a GPU, before anything is touched."""
    if placeholder_fn is not None and not callable(placeholder_fn):
        raise PlaceholderError(
            f"placeholder_fn={placeholder_fn!r} cannot be called: pass a function of the CUDA ordinal that returns "
            "what holds that GPU, such as PytorchPlaceholder(), or leave it out"
        )


def boundaries(
    driver: Driver, snapshot: HostSnapshot, request: GpuRequest
) -> tuple[tuple[str, ...] | None, Fence | None]:
    """UUIDs that CUDA is frozen to (None while it sleeps), and what CUDA_VISIBLE_DEVICES leaves to choose from."""
    if not snapshot.gpus:
        raise NoDriverError(
            f"the driver ({driver.name}) works, but there is no GPU here: pass one into the container (docker --gpus), "
            "or try SAFE_GPU_DRIVER=simulated:dgx-a100",
            driver=driver.name,
        )
    visible = cuda.visible_if_awake() if driver.uses_cuda else None
    if visible is not None:
        return _frozen(snapshot, request, visible)
    if os.environ.get("SAFE_GPU_FENCE") == "ignore":
        return None, None
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    fence = parse(value, snapshot, device_order=os.environ.get("CUDA_DEVICE_ORDER"))
    if fence is not None and fence.ambiguous:
        fence = Fence(fence.value, _resolved(driver, snapshot, fence), uses_indices=fence.uses_indices)
    return None, fence


def _frozen(snapshot: HostSnapshot, request: GpuRequest, visible: tuple[str, ...]) -> tuple[tuple[str, ...], Fence]:
    """CUDA is awake: a claim of exactly what it sees changes nothing and is fine, any other comes too late."""
    found = _claimable(snapshot, visible)
    if found is None or len(found) != request.nb_gpus:
        raise CudaInitializedError(
            f"CUDA is awake in this process already and sees {len(visible)} GPU(s), so a claim of {request.nb_gpus} "
            "cannot change which ones it uses: call claim_gpus() before torch.cuda.is_available(), device_count() and "
            "anything else that touches CUDA, or start a new process",
            visible=visible,
        )
    return found, Fence(os.environ.get("CUDA_VISIBLE_DEVICES", ""), found, frozen=True)


def _resolved(driver: Driver, snapshot: HostSnapshot, fence: Fence) -> tuple[str, ...]:
    trouble = ""
    if driver.uses_cuda:
        try:
            found = _claimable(snapshot, cuda.visible_in_child())
            if found is not None:
                return found
            trouble = "; CUDA itself shows GPUs that the driver does not"
        except NoDriverError as err:
            trouble = f"; CUDA itself could not be asked: {err}"
    raise UnsatisfiableRequestError(
        f"CUDA_VISIBLE_DEVICES={fence.value} is ambiguous: {fence.doubt}{trouble}; set CUDA_DEVICE_ORDER=PCI_BUS_ID "
        "with numbers as nvidia-smi shows them, or name UUIDs, or set SAFE_GPU_FENCE=ignore",
        value=fence.value,
    )


def _claimable(snapshot: HostSnapshot, visible: Iterable[str]) -> tuple[str, ...] | None:
    """CUDA's UUIDs as the driver writes them, in CUDA's order; None where one is not among the driver's."""
    found = []
    for uuid in visible:
        gpu = next((gpu for gpu in reversed(snapshot.gpus) if cuda.same_device(uuid, gpu.uuid)), None)
        if gpu is None:
            return None
        found.append(gpu.uuid)
    return tuple(found)


def job_label() -> str | None:
    """The batch job that this process belongs to, as lease records name it; None outside."""
    from .schedulers import current

    return current(os.environ).job_label
