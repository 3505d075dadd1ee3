"""The questions to which ``peers.json.gz`` has the answers of gpu_affinity and of torch.numa, in a fixed order."""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

from affinity.conftest import MakeHost

from safe_gpu.topology.host import HostTopology

HOSTS: dict[str, dict[str, Any]] = {
    "dgx1": {"cores_per_node": 20, "nodes": 2, "gpu_nodes": [0] * 4 + [1] * 4},
    "dgx-a100": {
        "cores_per_node": 16,
        "nodes": 8,
        "nodes_per_package": 4,
        "gpu_nodes": [3, 3, 1, 1, 7, 7, 5, 5],
        "caches_per_node": 4,
    },
    "dgx-h100": {"cores_per_node": 56, "nodes": 2, "gpu_nodes": [0] * 4 + [1] * 4},
    "uneven": {"cores_per_node": 6, "nodes": 2, "gpu_nodes": [0, 0, 0, 1]},
    "scattered": {"cores_per_node": 10, "nodes": 2, "gpu_nodes": [0, 1, 1, 0, 0, 1, 0, 0], "caches_per_node": 3},
    "one thread": {"cores_per_node": 8, "nodes": 2, "smt": 1, "gpu_nodes": [0, 1, 1, 0]},
    "four threads": {"cores_per_node": 4, "nodes": 2, "smt": 4, "gpu_nodes": [0, 0, 1, 1]},
    "two of four nodes": {"cores_per_node": 4, "nodes": 4, "nodes_per_package": 2, "gpu_nodes": [0, 2]},
    "both on one node": {"cores_per_node": 3, "nodes": 2, "gpu_nodes": [1, 1], "caches_per_node": 2},
    "small": {"cores_per_node": 2, "nodes": 1, "smt": 1, "gpu_nodes": [0, 0]},
    "tiny": {"cores_per_node": 1, "nodes": 2, "gpu_nodes": [0, 0]},
}

MASKS: dict[str, Callable[[HostTopology], frozenset[int]]] = {
    "all": lambda host: host.cpus,
    "first threads": lambda host: frozenset(min(core) for core in host.cores),
    "ragged": lambda host: frozenset(cpu for cpu in host.cpus if cpu % 7 not in (1, 4)),
    "gaps": lambda host: frozenset(cpu for core in host.cores if min(core) % 5 != 3 for cpu in core),
    "first cores": lambda host: frozenset(cpu for core in host.cores if min(core) % 6 < 2 for cpu in core),
}

# Host, mask, processes.
SETTINGS = [
    *(("dgx1", "all", 8), ("dgx1", "all", 5), ("dgx1", "first threads", 8), ("dgx1", "ragged", 8)),
    *(("dgx-a100", "all", 8), ("dgx-a100", "all", 3), ("dgx-a100", "ragged", 8), ("dgx-a100", "first threads", 8)),
    *(("dgx-h100", "all", 8), ("dgx-h100", "ragged", 7)),
    *(("uneven", "all", 4), ("uneven", "ragged", 4), ("uneven", "first cores", 4)),
    *(("one thread", "all", 4), ("one thread", "ragged", 4)),
    *(("four threads", "all", 4), ("four threads", "ragged", 4)),
    *(("two of four nodes", "all", 2), ("two of four nodes", "gaps", 2)),
]
# Minimum and maximum of physical cores.
BOUNDS = [(1, None), (1, 3), (4, 2)]
OPTIONS = ("mode", "scope", "multithreading", "balanced", "min_physical_cores", "max_physical_cores")
MODES = ("all", "single", "single_unique", "unique_interleaved", "unique_contiguous")

TORCH_HOSTS = [
    *(("dgx1", "all"), ("dgx-a100", "all"), ("dgx-h100", "ragged"), ("scattered", "ragged")),
    *(("two of four nodes", "all"), ("both on one node", "ragged"), ("small", "all"), ("tiny", "all")),
]
TORCH_MODES = ("node", "socket", "exclusive", "core-complex")


def planner_cases(make_host: MakeHost) -> Iterator[tuple[HostTopology, frozenset[int], int, dict[str, Any]]]:
    """2,280 cases for gpu_affinity: host, mask, number of processes, options."""
    for (name, mask, nproc), bounds in product(SETTINGS, BOUNDS):
        host = make_host(**HOSTS[name])
        for options in product(MODES, ("node", "socket"), ("all_logical", "single_logical"), (True, False)):
            yield host, MASKS[mask](host), nproc, dict(zip(OPTIONS, (*options, *bounds), strict=True))


def torch_cases(make_host: MakeHost) -> Iterator[tuple[HostTopology, frozenset[int], tuple[int, ...], str]]:
    """1,032 sets of visible GPUs in each of torch's modes: host, mask, GPUs, mode."""
    for name, mask in TORCH_HOSTS:
        host = make_host(**HOSTS[name])
        indices = [gpu.index for gpu in host.gpus]
        for size in range(1, len(indices) + 1):
            for gpus in combinations(indices, size):
                for mode in TORCH_MODES:
                    yield host, MASKS[mask](host), gpus, mode
