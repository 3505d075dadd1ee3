"""Questions about the host that claim nothing: which GPUs are free, and when so many will be."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .acquisition import Acquisition
from .claims import describe_process, survey
from .coordination.host_lock import MINIMUM_PATIENCE, HostLock
from .devices import Gpu, GpuRequest
from .drivers import opened_driver
from .durations import DefaultTimeout
from .preconditions import boundaries, checked
from .selection import judge
from .verification import own_pids

if TYPE_CHECKING:
    from .report import WaitNews

__all__ = ["get_free_gpus", "wait_for_gpus"]


def wait_for_gpus(
    nb_gpus: int | str = 1,
    *,
    timeout: float | str | DefaultTimeout | None = None,
    min_memory: int | str | None = None,
    model: str | None = None,
    exclude: str | int | Iterable[str | int] = (),
    only: str | int | Iterable[str | int] = (),
    on_wait: Callable[[WaitNews], None] | None = None,
) -> tuple[Gpu, ...]:
    """Wait in the queue until a claim with these arguments would succeed, and claim nothing; same errors.

    Returns:
        The GPUs that the claim would have got; by now somebody else may have them.
    """
    import logging

    logger = logging.getLogger("safe_gpu")
    request, wait, _ = checked(nb_gpus, timeout, None, None, min_memory, model, exclude, only, "index", logger)
    with opened_driver() as driver:
        snapshot = driver.snapshot()
        _, fence = boundaries(driver, snapshot, request)
        acquisition = Acquisition(
            driver,
            snapshot,
            request,
            fence=fence,
            timeout=wait,
            scope=os.environ.get("SAFE_GPU_SCOPE"),
            own=own_pids(snapshot),
            logger=logger,
            on_wait=on_wait,
        )
        return acquisition.wait()


def get_free_gpus() -> list[str]:
    """Indices of the GPUs that nobody holds or uses, in numeric order; volatile.

    Speaks of the host: neither CUDA_VISIBLE_DEVICES nor what this process claimed matters. A MIG instance is ``"3:1"``.
    """
    with opened_driver() as driver:
        snapshot = driver.snapshot()
    with HostLock(time.monotonic() + MINIMUM_PATIENCE) as host:
        leased = survey(host, snapshot.gpus)
    verdicts = judge(snapshot, GpuRequest(), leased=leased, describe=describe_process)
    return [verdict.gpu.label for verdict in verdicts if verdict.free]
