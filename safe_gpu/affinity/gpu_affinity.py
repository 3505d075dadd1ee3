"""A drop-in replacement for ``set_affinity`` of NVIDIA gpu_affinity."""

import logging
import os

from .. import drivers
from ..errors import GPUAffinityError, SafeGpuError, package_logger
from ..topology.host import read_topology
from .binding import bind_process, original_mask
from .options import AffinityOptions, as_count, doubt_about
from .planning.enumerations import Mode, Multithreading, Scope
from .planning.planner import plan
from .resolve_gpus import by_ordinal, remember, visible


def set_affinity(
    gpu_id: int,
    nproc_per_node: int,
    *,
    mode: str | Mode = Mode.UNIQUE_CONTIGUOUS,
    scope: str | Scope = Scope.NODE,
    multithreading: str | Multithreading = Multithreading.ALL_LOGICAL,
    balanced: bool = True,
    min_physical_cores: int = 1,
    max_physical_cores: int | None = None,
) -> set[int]:
    """Bind this process to its GPU's share of the cores, which ``nproc_per_node`` processes of this host divide.

    Args:
        gpu_id: 0 to ``nproc_per_node`` - 1, a position in CUDA_VISIBLE_DEVICES (indices or UUIDs), as in CUDA.
        nproc_per_node: the number of processes that take part, with one GPU each. Both may be integers of numpy.
        mode, scope, multithreading, balanced, min_physical_cores, max_physical_cores: see
            :class:`~safe_gpu.affinity.options.AffinityOptions`; ``mode`` takes the other modes of this package too.

    Returns:
        The logical CPUs on which the process may run now. All its threads are moved. A second call starts from the
        mask before the first call. An INFO line has the GPU and the mask.

    Two shares differ from gpu_affinity's on purpose:

    * Scope SOCKET, unique modes: each core of a GPU's node brings some of the socket's other cores along. Where they
      do not divide evenly (a ragged mask, or GPUs on some nodes only), gpu_affinity drops all beyond the common number.
      Here no core is lost. ``balanced`` then trims all shares to the smallest, and gpu_affinity does not: with 5 or 6
      ranks on a DGX A100, GPU 4 gets 16 cores here, as every GPU does, and 32 there.
    * Mode ALL with scope SOCKET: the cores of the GPU's own node come first, then those of the other GPUs' nodes, then
      the rest. gpu_affinity does not put the own node first, which matters with ``max_physical_cores``.

    Raises:
        GPUAffinityError: there is no such GPU, too few cores or no driver, or the kernel refuses.
    """
    gpu_id, nproc_per_node = as_count("gpu_id", gpu_id, 0), as_count("nproc_per_node", nproc_per_node, 1)
    if gpu_id >= nproc_per_node:
        raise GPUAffinityError(f"gpu_id={gpu_id} should be smaller than nproc_per_node={nproc_per_node}")
    options = AffinityOptions(mode, scope, multithreading, balanced, min_physical_cores, max_physical_cores)

    try:
        driver = drivers.open_driver()
        snapshot = driver.snapshot()
        shown = visible(snapshot, os.environ).gpus
    except GPUAffinityError:
        raise
    except SafeGpuError as err:
        raise GPUAffinityError(f"the place of GPU {gpu_id} is not known: {err}") from err
    if nproc_per_node > len(shown):
        raise GPUAffinityError(
            f"nproc_per_node={nproc_per_node} processes need as many GPUs, and {len(shown)} are visible"
            + (f" with CUDA_VISIBLE_DEVICES={listed}" if (listed := os.environ.get("CUDA_VISIBLE_DEVICES")) else "")
        )
    taking_part = [gpu.index for gpu in shown[:nproc_per_node]]
    shares = plan(read_topology(driver=driver), **options._asdict(), allowed=original_mask(), gpus=taking_part)
    chosen = by_ordinal(gpu_id, snapshot, os.environ)
    report = bind_process(shares[gpu_id], notes=filter(None, [*chosen.notes, doubt_about(options)]))
    remember(chosen.gpus)
    log = package_logger()
    log.log(logging.WARNING if report.notes else logging.INFO, "%s", report._replace(target=chosen.title))
    return set(report.cpus)
