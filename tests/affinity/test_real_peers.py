"""numactl and PyTorch as they are installed; SAFE_GPU_REQUIRE_REAL makes their absence a failure."""

import importlib.util
import json
import shutil
import subprocess
import sys
from typing import Any

import pytest
from affinity.conftest import MASK, needs_two_cpus
from support.real import REQUIRED

import safe_gpu
from safe_gpu.affinity.numactl import wrap_command
from safe_gpu.affinity.options import MODES, AffinityOptions, parse_options
from safe_gpu.errors import GPUAffinityError

needs_numactl = pytest.mark.skipif(shutil.which("numactl") is None and not REQUIRED, reason="needs numactl")


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


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None and not REQUIRED, reason="needs PyTorch")


@needs_torch
@needs_two_cpus
def test_torchs_own_options(four_gpus: Any, in_child: Any) -> None:
    """What torch plans with them is recorded in peers.json.gz."""
    from torch.numa.binding import AffinityMode, NumaOptions

    assert {mode.value for mode in AffinityMode} < set(MODES)
    for mode in AffinityMode:
        assert parse_options(NumaOptions(affinity_mode=mode)) == AffinityOptions(mode.value)
    divided = AffinityMode.EXCLUSIVE  # one core for two GPUs
    with pytest.raises(GPUAffinityError, match="physical core"):
        wrap_command(["true"], gpu=1, mode=NumaOptions(affinity_mode=divided))
    falls_back = NumaOptions(affinity_mode=divided, should_fall_back_if_binding_fails=True)
    assert wrap_command(["true"], gpu=1, mode=falls_back) == ["true"]
    assert not in_child(lambda: safe_gpu.bind(1, mode=falls_back)).ok
