"""A drop-in replacement for ``set_affinity`` of NVIDIA gpu_affinity, and its enumerations with the same members."""

import logging
import os
from enum import Enum

from .. import drivers
from ..errors import GPUAffinityError, SafeGpuError, package_logger
from ..topology.host import read_topology
from .binding import bind_process, original_mask
from .planner import AffinityOptions, as_count, plan
from .resolve_gpus import by_ordinal, remember, visible


class _Text(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class Mode(_Text):
    """The modes of gpu_affinity, with what they give two GPUs on a node of eight cores, 0 to 7.

    ===================  =======  =======  ==========================================================
    mode                 GPU 0    GPU 1
    ===================  =======  =======  ==========================================================
    all                  0-7      0-7      every core of the node or socket; its GPUs share them
    single               0        0        the first core; its GPUs share it
    single_unique        0        1        one core that no other GPU gets
    unique_interleaved   0,2,4,6  1,3,5,7  an equal share of the cores, dealt one by one
    unique_contiguous    0-3      4-7      an equal share of the cores, in one piece
    ===================  =======  =======  ==========================================================

    NVIDIA recommends unique_contiguous for training on DGX servers: there one job has all GPUs, and its ranks divide
    the cores. It is the default of set_affinity. A claim does not know who has the other GPUs, and a core set aside for
    a GPU that nobody uses would idle. So its default is the mode node, whose CPUs are those of all.
    """

    ALL = "all"
    SINGLE = "single"
    SINGLE_UNIQUE = "single_unique"
    UNIQUE_INTERLEAVED = "unique_interleaved"
    UNIQUE_CONTIGUOUS = "unique_contiguous"


class Scope(_Text):
    """Which CPUs count as near a GPU: those of its NUMA node, or those of its processor socket."""

    NODE = "node"
    SOCKET = "socket"


class Multithreading(_Text):
    """All hardware threads of a physical core, or only the lowest allowed one."""

    ALL_LOGICAL = "all_logical"
    SINGLE_LOGICAL = "single_logical"


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
            :class:`~safe_gpu.affinity.planner.AffinityOptions`; ``mode`` takes the other modes of this package too.

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
    gpu_id = as_count("gpu_id", gpu_id, 0)
    nproc_per_node = as_count("nproc_per_node", nproc_per_node, 1)
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
        problem = f"nproc_per_node={nproc_per_node} processes need as many GPUs, and {len(shown)} are visible"
        listed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if listed:
            problem += f" with CUDA_VISIBLE_DEVICES={listed}"
        raise GPUAffinityError(problem)
    taking_part = [gpu.index for gpu in shown[:nproc_per_node]]
    shares = plan(read_topology(driver=driver), **vars(options), allowed=original_mask(), gpus=taking_part)
    chosen = by_ordinal(gpu_id, snapshot, os.environ)
    report = bind_process(shares[gpu_id])
    remember(chosen.gpus)
    notes = (*chosen.notes, *report.notes)
    level = logging.INFO
    if notes:
        level = logging.WARNING
    package_logger().log(level, "%s", report._replace(target=chosen.title, notes=notes))
    return set(report.cpus)
