"""``set_affinity`` as NVIDIA gpu_affinity has it, for programs that call it today."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import GPUAffinityError, SafeGpuError
from .binding import bind_process, original_mask
from .modes import Mode, Multithreading, Scope
from .policies import plan
from .topology import HostTopology

if TYPE_CHECKING:
    from ..devices import HostSnapshot

__all__ = ["set_affinity", "visible_indices"]


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
    """Bind this process for one GPU per process, dividing cores among ``nproc_per_node`` of them on this host.

    Args:
        gpu_id: 0 to ``nproc_per_node`` - 1, counted after CUDA_VISIBLE_DEVICES (indices or UUIDs), as CUDA does.
        nproc_per_node: processes, and so GPUs, that take part.
        mode, scope, multithreading, balanced, min_physical_cores, max_physical_cores: see
            :class:`~safe_gpu.affinity.options.AffinityOptions`; the other modes of this package are welcome too.

    Returns:
        The logical CPUs on which the process may run now. All its threads are moved. A second call starts from the
        mask before the first.

    Raises:
        GPUAffinityError: no such GPU, too few cores, no driver, or the kernel refuses.
    """
    for name, value, least in (("gpu_id", gpu_id, 0), ("nproc_per_node", nproc_per_node, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise GPUAffinityError(f"{name} must be a whole number from {least} on, not {value!r}")
    if gpu_id >= nproc_per_node:
        raise GPUAffinityError(f"gpu_id={gpu_id} should be smaller than nproc_per_node={nproc_per_node}")
    from ..drivers import open_driver

    try:
        driver = open_driver()
        visible = visible_indices(driver.snapshot(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    except GPUAffinityError:
        raise
    except SafeGpuError as err:
        raise GPUAffinityError(f"where GPU {gpu_id} is cannot be told: {err}") from err
    if nproc_per_node > len(visible):
        raise GPUAffinityError(
            f"nproc_per_node={nproc_per_node} processes need as many GPUs, and {len(visible)} are visible"
            + (f" with CUDA_VISIBLE_DEVICES={shown}" if (shown := os.environ.get("CUDA_VISIBLE_DEVICES")) else "")
        )
    shares = plan(
        HostTopology.from_host(driver=driver),
        mode=mode,
        scope=scope,
        multithreading=multithreading,
        balanced=balanced,
        min_physical_cores=min_physical_cores,
        max_physical_cores=max_physical_cores,
        allowed=original_mask(),
        gpus=visible[:nproc_per_node],
    )
    return set(bind_process(shares[gpu_id]).cpus)


def visible_indices(snapshot: HostSnapshot, visible_devices: str | None) -> list[int]:
    """Indices of the GPUs that CUDA_VISIBLE_DEVICES shows, in its order; a MIG instance counts as its GPU.

    Raises:
        GPUAffinityError: it shows none.
    """
    from ..visibility import parse

    # gpu_affinity takes numbers as nvidia-smi's, whatever CUDA_DEVICE_ORDER says, and so do we.
    fence = parse(visible_devices, snapshot, device_order="PCI_BUS_ID")
    if fence is None:
        return [gpu.index for gpu in snapshot.physical]
    found = [gpu.index for uuid in fence.uuids if (gpu := snapshot.by_uuid(uuid)) is not None]
    if not found:
        raise GPUAffinityError(
            f"CUDA_VISIBLE_DEVICES={visible_devices} shows no GPU of this host, which has {len(snapshot.physical)}"
        )
    return found
