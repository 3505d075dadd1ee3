"""numactl and PyTorch as they are installed; SAFE_GPU_REQUIRE_REAL makes their absence a failure."""

import importlib.util
import json
import shutil
import subprocess
import sys
from itertools import islice
from typing import Any

import pytest
from affinity.conftest import MASK, needs_two_cpus
from affinity.peers import torch_cases
from support.real import REQUIRED

from safe_gpu.affinity.numactl import wrap_command
from safe_gpu.affinity.planner import plan
from safe_gpu.errors import GPUAffinityError

needs_numactl = pytest.mark.skipif(shutil.which("numactl") is None and not REQUIRED, reason="needs numactl")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None and not REQUIRED, reason="needs PyTorch")


@needs_numactl
@needs_two_cpus
@pytest.mark.parametrize("memory", [None, "bind", "preferred"])
def test_numactl_runs_it(four_gpus: Any, four_gpus_env: dict[str, str], memory: str | None) -> None:
    code = """if True:
    import json, os
    import safe_gpu
    found = safe_gpu.placement(gpus=[0]).processes[0]
    print(json.dumps([sorted(os.sched_getaffinity(0)), found.policy, sorted(found.policy_nodes), found.memory_matches]))
    """
    try:
        wrapped = wrap_command([sys.executable, "-c", code], gpu=0, mode="node", memory=memory, check=True)
    except GPUAffinityError as err:
        if memory is None or REQUIRED:
            raise
        pytest.skip(f"memory policies cannot be used here: {err}")
    done = subprocess.run(wrapped, env=four_gpus_env, capture_output=True, text=True, timeout=60)
    policy = {None: ["default", [], None], "bind": ["bind", [0], True], "preferred": ["preferred", [0], True]}[memory]
    assert json.loads(done.stdout) == [[MASK[0]], *policy], done.stderr


@needs_torch
def test_torchs_own_plans(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed torch gives the same sets of CPUs, for every hundredth case of the recorded ones."""
    from torch.numa import binding

    def told(name: str, answer: Any) -> None:
        assert hasattr(binding, name), f"torch.numa.binding has no {name} any more"
        monkeypatch.setattr(binding, name, answer)

    for topology, mask, gpus, mode in islice(torch_cases(host), 0, None, 101):
        near = [topology.gpus[index].numa_node for index in gpus]
        told("_get_gpu_count", lambda near=near: len(near))
        told("_get_numa_node_index_for_gpu_index", lambda *, gpu_index, near=near: near[gpu_index])
        told("_get_systemwide_numa_node_indices", lambda host=topology: set(host.nodes))
        told(
            "_get_cpu_indices_for_numa_node_MAYBE_NOT_ALLOWED",
            lambda *, numa_node_index, host=topology: set(host.nodes[numa_node_index]),
        )
        told("_get_allowed_cpu_indices_for_current_thread", lambda mask=mask: set(mask))
        told("_get_socket_index_for_cpu", lambda *, cpu_index, host=topology: group_of(cpu_index, host.packages))
        for name, groups in (
            ("_get_logical_cpu_indices_sharing_same_physical_core_as", topology.cores),
            ("_get_logical_cpus_sharing_same_max_level_cache_as", topology.llc),
        ):
            told(name, lambda *, logical_cpu_index, groups=groups: next(g for g in groups if logical_cpu_index in g))
        plans = getattr(binding, f"_{mode.replace('-', '_')}_get_logical_cpus_to_bind_to")
        try:
            theirs = [set(plans(gpu_index=number)) for number in range(len(gpus))]
        except RuntimeError:
            theirs = None
        try:
            own = [set(share) for share in plan(topology, mode=mode, allowed=mask, gpus=gpus)]
        except GPUAffinityError:
            own = None
        assert own == theirs, (gpus, mode)


def group_of(cpu: int, groups: Any) -> int:
    return next(number for number, cpus in groups.items() if cpu in cpus)
