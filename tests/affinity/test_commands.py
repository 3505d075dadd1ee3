"""What the older worlds call: gpu_affinity's set_affinity, numactl before a command; and the table of a plan."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import safe_gpu.drivers
from safe_gpu.affinity.describe import affinity_json, affinity_table
from safe_gpu.affinity.gpu_affinity import set_affinity, visible_indices
from safe_gpu.affinity.modes import Mode, Multithreading, Scope
from safe_gpu.affinity.numactl import numactl_options, wrap_command
from safe_gpu.affinity.options import MODES, MULTITHREADING, SCOPES, AffinityOptions
from safe_gpu.affinity.policies import plan
from safe_gpu.affinity.topology import HostTopology
from safe_gpu.devices import Gpu, HostSnapshot
from safe_gpu.errors import GPUAffinityError, NoDriverError

InChild = Callable[[Callable[[], Any]], Any]

MASK = sorted(os.sched_getaffinity(0))
needs_two_cpus = pytest.mark.skipif(len(MASK) < 2, reason="this process may use one CPU only")
needs_numactl = pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed")


@pytest.fixture
def four_gpus(saved_tree: Any, fake_driver: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two nodes of one real CPU each, GPUs 0 and 2 on the first, 1 and 3 on the second."""
    first, second = (MASK * 2)[:2]
    saved_tree.cpus([(first,), (second,)])
    saved_tree.nodes({0: [first], 1: [second]})
    gpus = []
    for number in range(4):
        bus_id = f"0000:0{number + 1}:00.0"
        saved_tree.gpu(bus_id, node=number % 2)
        gpus.append(Gpu(number, f"GPU-{number}{number}ab", pci_bus_id=bus_id))
    driver = fake_driver(gpus)
    monkeypatch.setenv("SAFE_GPU_FSROOT", os.fspath(saved_tree))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(safe_gpu.drivers, "open_driver", lambda name=None: driver)
    return driver


# set_affinity


@needs_two_cpus
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1]),
        ("0,1", [0, 1]),
        ("1,0", [1, 0]),
        ("3,2", [1, 0]),
        ("GPU-33,GPU-0", [1, 0]),
    ],
)
def test_ranks_follow_the_order_of_visible_gpus(
    four_gpus: Any, in_child: InChild, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[int]
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    def child() -> list[set[int]]:
        # The second call starts from the mask before the first, or it would find no core.
        return [found for rank in (0, 1) if (found := set_affinity(rank, 2)) == os.sched_getaffinity(0)]

    assert in_child(child) == [{MASK[at]} for at in expected]


def test_enumerations_and_texts_are_the_same() -> None:
    assert {mode.value for mode in Mode} < set(MODES)
    assert tuple(scope.value for scope in Scope) == SCOPES
    assert tuple(threads.value for threads in Multithreading) == MULTITHREADING


@needs_two_cpus
def test_all_options_are_passed_on(four_gpus: Any, in_child: InChild) -> None:
    def child() -> set[int]:
        return set_affinity(
            0,
            2,
            mode=Mode.ALL,
            scope=Scope.SOCKET,
            multithreading=Multithreading.SINGLE_LOGICAL,
            balanced=False,
            min_physical_cores=2,
            max_physical_cores=2,
        )

    assert in_child(child) == set(MASK[:2])


@pytest.mark.parametrize(
    ("arguments", "options", "names"),
    [
        ((2, 2), {}, "gpu_id=2 .* nproc_per_node=2"),
        ((-1, 2), {}, "gpu_id .* -1"),
        ((True, 2), {}, "True"),
        (("0", 2), {}, "'0'"),
        ((0, 0), {}, "nproc_per_node .* 0"),
        ((0, 5), {}, "nproc_per_node=5 .* 4 are visible"),
        ((0, 4), {}, "1 physical core near 2 GPUs"),
        ((0, 2), {"mode": "best"}, "'best'"),
        ((0, 2), {"min_physical_cores": 4, "max_physical_cores": 3}, "3.*4"),
        ((0, 2), {"mode": "all", "min_physical_cores": 7}, "at least 7"),
    ],
)
def test_errors_have_the_numbers_in_them(four_gpus: Any, arguments: Any, options: Any, names: str) -> None:
    with pytest.raises(GPUAffinityError, match=names):
        set_affinity(*arguments, **options)
    assert sorted(os.sched_getaffinity(0)) == MASK


@pytest.mark.parametrize(("visible", "names"), [("9", "shows no GPU"), ("0,0", "shows no GPU"), ("0", "1 are visible")])
def test_too_few_visible_gpus(four_gpus: Any, monkeypatch: pytest.MonkeyPatch, visible: str, names: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(GPUAffinityError, match=f"CUDA_VISIBLE_DEVICES={visible}|{names}"):
        set_affinity(0, 2)


def test_no_driver_is_an_affinity_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str | None = None) -> Any:
        raise NoDriverError("there is no NVIDIA driver here")

    monkeypatch.setattr(safe_gpu.drivers, "open_driver", none)
    with pytest.raises(GPUAffinityError, match="no NVIDIA driver"):
        set_affinity(0, 1)
    with pytest.raises(GPUAffinityError, match="no NVIDIA driver"):
        wrap_command(["true"], gpu=0, mode="node")


def test_a_mig_instance_counts_as_its_gpu() -> None:
    snapshot = HostSnapshot((Gpu(0, "GPU-a", mig_enabled=True), Gpu(0, "MIG-1", mig_parent="GPU-a"), Gpu(1, "GPU-b")))
    assert visible_indices(snapshot, "MIG-1") == [0]
    assert visible_indices(snapshot, None) == [0, 1]


# numactl


def test_options_of_numactl() -> None:
    share = frozenset([0, 1, 2, 8])
    assert numactl_options(share) == ["--physcpubind=0-2,8"]
    assert numactl_options(share, frozenset([3]), "bind") == ["--physcpubind=0-2,8", "--membind=3"]
    assert numactl_options(share, frozenset([3]), "preferred") == ["--physcpubind=0-2,8", "--preferred=3"]
    assert numactl_options(share, frozenset([2, 3]), "preferred")[1] == "--preferred-many=2-3"
    with pytest.raises(GPUAffinityError, match="NUMA node"):
        numactl_options(share, frozenset(), "bind")


@needs_two_cpus
@pytest.mark.parametrize(("gpu", "at"), [(0, 0), (1, 1), (3, 1)])
def test_the_wrapped_command(four_gpus: Any, gpu: int, at: int) -> None:
    command = ["python", "-c", "print('a b')"]
    assert wrap_command(command, gpu=gpu, mode="node") == ["numactl", f"--physcpubind={MASK[at]}", *command]
    assert wrap_command(tuple(command), gpu=gpu, mode="node", memory="bind")[2] == f"--membind={at}"


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (["true"], {"gpu": 4, "mode": "node"}),
        (["true"], {"gpu": -1, "mode": "node"}),
        (["true"], {"gpu": "0", "mode": "node"}),
        (["true"], {"gpu": 0, "mode": "none"}),
        (["true"], {"gpu": 0, "mode": None}),
        (["true"], {"gpu": 0, "mode": "exclusive"}),  # one core for two GPUs
        (["true"], {"gpu": 0, "mode": "node", "memory": "here"}),
        ([], {"gpu": 0, "mode": "node"}),
        ("true", {"gpu": 0, "mode": "node"}),
        ([1], {"gpu": 0, "mode": "node"}),
    ],
)
def test_commands_that_cannot_be_wrapped(four_gpus: Any, command: Any, options: Any) -> None:
    with pytest.raises(GPUAffinityError):
        wrap_command(command, **options)


@needs_numactl
@needs_two_cpus
@pytest.mark.parametrize("memory", [None, "bind", "preferred"])
def test_numactl_runs_it(four_gpus: Any, memory: str | None) -> None:
    code = "import os, json; print(json.dumps([sorted(os.sched_getaffinity(0)), open('/proc/self/numa_maps').read()]))"
    wrapped = wrap_command([sys.executable, "-c", code], gpu=0, mode="node", memory=memory)
    done = subprocess.run(wrapped, capture_output=True, text=True, timeout=60)
    if done.returncode and memory:
        pytest.skip(f"memory policies cannot be used here: {done.stderr.strip()}")
    cpus, maps = json.loads(done.stdout)
    assert cpus == [MASK[0]]
    assert {None: " default ", "bind": " bind:0 ", "preferred": " prefer:0 "}[memory] in maps or (
        memory == "preferred" and " prefer (many):0 " in maps
    )


# The table


def test_a_plan_as_table_and_json(host: Callable[..., HostTopology]) -> None:
    topology = host(cores_per_node=2, nodes=2, gpu_nodes=[0, 1, None])
    shares = plan(topology, mode="node")
    options = AffinityOptions(mode="node")
    document = affinity_json(topology, options, shares)
    assert json.loads(json.dumps(document)) == {
        "mode": "node",
        "gpus": [
            {"index": 0, "uuid": "GPU-0", "numa_node": 0, "cpus": "0-1,4-5"},
            {"index": 1, "uuid": "GPU-1", "numa_node": 1, "cpus": "2-3,6-7"},
            {"index": 2, "uuid": "GPU-2", "numa_node": None, "cpus": "0-7"},
        ],
    }
    table = affinity_table(topology, options, shares).splitlines()
    assert table[1].split() == ["GPU", "BUS", "NODE", "CPUS", "CORES", "MEMORY", "SOURCE"]
    assert table[2].split() == ["0", "-", "0", "0-1,4-5", "2", "0", "unknown"]
    assert len({line.index(text) for line, text in zip(table[2:], ["0-1,4-5", "2-3,6-7", "0-7"], strict=True)}) == 1


def test_the_table_says_what_is_remote(host: Callable[..., HostTopology]) -> None:
    topology = host(cores_per_node=2, nodes=2, smt=1, gpu_nodes=[0], distances=True)
    shares = plan(topology, mode="node", allowed=[2, 3])
    assert "GPU 0: its CPUs are on another node" in affinity_table(topology, AffinityOptions(), shares)
