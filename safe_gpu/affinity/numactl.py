"""A command made to run next to a GPU by numactl, for launchers that start other programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import GPUAffinityError, SafeGpuError
from .binding import original_mask
from .cpulist import format_cpulist
from .options import AffinityOptions, check_memory_mode, parse_options
from .policies import plan
from .shares import memory_nodes
from .topology import HostTopology

if TYPE_CHECKING:
    from ..drivers.base import Driver

__all__ = ["numactl_options", "wrap_command"]


def wrap_command(
    command: Sequence[str],
    *,
    gpu: int,
    mode: str | AffinityOptions,
    memory: str | None = None,
    driver: Driver | None = None,
) -> list[str]:
    """``command`` with ``numactl --physcpubind=...`` before it, bound as rank on ``gpu`` among all GPUs of the host.

    numactl need not be installed here, only where the command runs.

    Args:
        command: the arguments, the program first.
        gpu: index as nvidia-smi shows it.
        mode: as for :func:`~safe_gpu.affinity.policies.plan`, over the CPUs that this process may use.
        memory: None, "preferred" (``--preferred``) or "bind" (``--membind``): the GPU's NUMA node.
        driver: None opens the one that ``SAFE_GPU_DRIVER`` names.

    Raises:
        GPUAffinityError: there is no such GPU, no share for it, or no driver to say.
    """
    if isinstance(command, (str, bytes)) or not command or not all(isinstance(word, str) for word in command):
        raise GPUAffinityError(f"a command is a list of strings, the program first, not {command!r}")
    options = parse_options(mode, memory)
    if options is None:
        raise GPUAffinityError("wrap_command needs a mode: node, socket, exclusive, core-complex, ...")
    if driver is None:
        from ..drivers import open_driver

        try:
            driver = open_driver()
        except SafeGpuError as err:
            raise GPUAffinityError(f"where GPU {gpu!r} is cannot be told: {err}") from err
    topology = HostTopology.from_host(driver=driver)
    place = topology.gpu(gpu)
    everyone = [other.index for other in topology.gpus]
    shares = plan(
        topology,
        mode=options.mode,
        scope=options.scope,
        multithreading=options.multithreading,
        balanced=options.balanced,
        min_physical_cores=options.min_physical_cores,
        max_physical_cores=options.max_physical_cores,
        allowed=original_mask(),
        gpus=everyone,
    )
    nodes = memory_nodes(topology, [place.index]) if memory is not None else frozenset[int]()
    return ["numactl", *numactl_options(shares[everyone.index(place.index)], nodes, memory), *command]


def numactl_options(cpus: frozenset[int], nodes: frozenset[int] = frozenset(), memory: str | None = None) -> list[str]:
    """The options of numactl(8) for a share and a memory policy.

    Raises:
        GPUAffinityError: a memory policy without a node.
    """
    options = [f"--physcpubind={format_cpulist(cpus)}"]
    if check_memory_mode(memory) is None:
        return options
    if not nodes:
        raise GPUAffinityError(f"memory={memory!r} needs to know the GPU's NUMA node, and it is not known")
    if memory == "bind":
        return [*options, f"--membind={format_cpulist(nodes)}"]
    many = "-many" if len(nodes) > 1 else ""
    return [*options, f"--preferred{many}={format_cpulist(nodes)}"]
