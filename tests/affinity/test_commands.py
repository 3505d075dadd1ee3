"""What the older worlds call: gpu_affinity's set_affinity, numactl before a command; and the table of a plan."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import pytest
from affinity.conftest import MASK, InChild, needs_two_cpus, no_driver

import safe_gpu
import safe_gpu.drivers
from safe_gpu.affinity.gpu_affinity import set_affinity
from safe_gpu.affinity.numactl import numactl_options, wrap_command
from safe_gpu.affinity.options import AffinityOptions, parse_options
from safe_gpu.affinity.plan_text import affinity_json, affinity_table, node_table
from safe_gpu.affinity.planner import plan
from safe_gpu.errors import GPUAffinityError
from safe_gpu.gpus.devices import Gpu
from safe_gpu.topology.host import HostTopology, read_topology

# set_affinity


@needs_two_cpus
def test_errors_have_the_numbers_in_them(four_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[Any, dict[str, Any], str, str]] = [
        ((2, 2), {}, "0,1,2,3", "gpu_id=2 .* nproc_per_node=2"),
        ((-1, 2), {}, "0,1,2,3", "gpu_id=-1"),
        ((0, 2.0), {}, "0,1,2,3", "nproc_per_node must be a whole number, not 2.0"),
        ((0, 2), {}, "0,0", "CUDA_VISIBLE_DEVICES=0,0 shows no GPU"),
        ((0, 2), {}, "0", "nproc_per_node=2 .*1 are visible with CUDA_VISIBLE_DEVICES=0"),
        ((0, 4), {}, "0,1,2,3", "1 physical core near 2 GPUs"),
        ((0, 2), {"mode": "all", "min_physical_cores": 7, "max_physical_cores": 3}, "0,1,2,3", "at least 7"),
    ]
    for arguments, options, visible, names in wrong:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(GPUAffinityError, match=names):
            set_affinity(*arguments, **options)
    monkeypatch.setattr(safe_gpu.drivers, "open_driver", no_driver)
    with pytest.raises(GPUAffinityError, match="no NVIDIA driver"):
        set_affinity(0, 1)
    assert sorted(os.sched_getaffinity(0)) == MASK


# numactl


def test_options_of_numactl() -> None:
    share = frozenset([0, 1, 2, 8])
    assert numactl_options(share, frozenset(), None) == ["--physcpubind=0-2,8"]
    assert numactl_options(share, frozenset([3]), "bind") == ["--physcpubind=0-2,8", "--membind=3"]
    assert numactl_options(share, frozenset([3]), "preferred") == ["--physcpubind=0-2,8", "--preferred=3"]
    assert numactl_options(share, frozenset([2, 3]), "preferred")[1] == "--preferred-many=2-3"
    with pytest.raises(GPUAffinityError, match="NUMA node"):
        numactl_options(share, frozenset(), "bind")


@needs_two_cpus
def test_the_wrapped_command(four_gpus: Any) -> None:
    command = ["python", "-c", "print('a b')"]
    for gpu, at in ((0, 0), (3, 1)):
        assert wrap_command(command, gpu=gpu, mode="node") == ["numactl", f"--physcpubind={MASK[at]}", *command]
        assert wrap_command(tuple(command), gpu=gpu, mode="node", memory="bind")[2] == f"--membind={at}"
    wrong: list[tuple[Any, dict[str, Any]]] = [(["true"], {"gpu": -1}), ([], {}), ("true", {}), ([1], {})]
    # These do not fall back either.
    more = ({"mode": "somewhere"}, {"gpu": None}, {"ordinal": 0}, {"memory": "here"})
    for words, options in [*wrong, *((["true"], {**one, "strict": False}) for one in more)]:
        with pytest.raises(GPUAffinityError):
            wrap_command(words, **{"gpu": 0, "mode": "node", **options})


@pytest.mark.parametrize(
    ("refused", "arguments", "kept", "said"),
    [
        ("--membind=0", {"memory": "bind"}, ["--physcpubind={}"], "bound without a memory policy: numactl --phys"),
        ("--physcpubind={}", {"memory": "bind"}, [], "the command runs unbound: numactl --physcpubind={} fails"),
        ("--membind=0", {"memory": "bind", "mode": None}, [], "the command runs unbound: numactl --membind=0 fails"),
        ("--membind=0", {"memory": None}, ["--physcpubind={}"], ""),
        ("--membind=0", {"memory": "bind", "gpu": 4}, ["--physcpubind={}"], "policy: memory='bind' needs to know"),
    ],
)
def test_numactl_loses_only_what_is_refused(
    four_gpus: Any, monkeypatch: Any, tmp_path: Any, caplog: Any, refused: str, arguments: Any, kept: Any, said: str
) -> None:
    """It refuses one option, as in a container; each set of options is tried once. GPU 4 is next to no known node."""
    four_gpus.gpus.append(Gpu(4, "GPU-4"))
    cpus = f"{MASK[0]}-{MASK[-1]}" if "gpu" in arguments else str(MASK[0])
    numactl = tmp_path / "numactl"
    refusing = f"*{refused.format(cpus)}*) echo no policy >&2; exit 1"
    numactl.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase "$*" in {refusing};; esac\n')
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = {"gpu": 0, "mode": "node", **arguments}
    expected = [*(["numactl"] if kept else []), *(option.format(cpus) for option in kept), "./train"]
    for _ in range(2):
        assert wrap_command(["./train"], **asked, strict=False) == expected
        if said:
            assert caplog.records[0].levelname == "WARNING"
            assert said.format(cpus) in caplog.text
            with pytest.raises(GPUAffinityError):
                wrap_command(["./train"], **asked, check=True)
    lines = (tmp_path / "asked").read_text().splitlines()
    assert len(lines) == len(set(lines))


# Fallback, and options as torch writes them


class Theirs(str, Enum):
    NODE = "node"
    CORE_COMPLEX = "core-complex"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class NumaOptions:
    """The attributes of torch.numa.binding.NumaOptions."""

    affinity_mode: Any
    should_fall_back_if_binding_fails: bool = False


@needs_two_cpus
def test_options_of_torch_are_taken_as_they_are(four_gpus: Any, in_child: InChild) -> None:
    options = NumaOptions(Theirs.NODE)
    assert parse_options(options) == AffinityOptions("node")
    assert parse_options(NumaOptions(Theirs.CORE_COMPLEX)) == AffinityOptions("core-complex")
    assert wrap_command(["true"], gpu=1, mode=options)[1] == f"--physcpubind={MASK[1]}"
    assert in_child(lambda: sorted(safe_gpu.bind(1, mode=options).cpus)) == [MASK[1]]
    with pytest.raises(GPUAffinityError, match="elsewhere"):
        parse_options(NumaOptions(Theirs.ELSEWHERE))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"gpu": 0}, "no NVIDIA driver"),
        ({"gpu": 9}, "no GPU 9"),
        ({"ordinal": 9}, "CUDA shows no GPU 9"),
        ({"gpu": 0, "mode": "exclusive"}, "physical core"),  # one for two GPUs
        pytest.param({"gpu": 0}, "numactl is not installed here", marks=needs_two_cpus),
    ],
)
def test_falling_back_to_the_command(
    four_gpus: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, tmp_path: Any, arguments: Any, why: str
) -> None:
    if why == "no NVIDIA driver":
        monkeypatch.setattr(safe_gpu.drivers, "open_driver", no_driver)
    monkeypatch.setenv("PATH", str(tmp_path))
    mode, command = arguments.get("mode", "node"), ["./train", "--all"]
    falls_back = {"mode": NumaOptions(mode, True)} if why == "no GPU 9" else {"mode": mode, "strict": False}
    assert wrap_command(command, **{**arguments, **falls_back}) == command
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the command runs unbound: " in caplog.text
    assert why in caplog.text
    with pytest.raises(GPUAffinityError, match=why):
        wrap_command(command, **{**arguments, "mode": mode, "check": True})


def test_a_node_without_memory_is_not_given_to_numactl(four_gpus: Any, saved_tree: Any, caplog: Any) -> None:
    saved_tree.write("sys/devices/system/node/has_memory", "0")
    assert wrap_command(["true"], gpu=1, mode=None, memory="bind") == ["numactl", "--membind=0", "true"]
    assert "NUMA node 1 has no memory, so that of node 0 is used" in caplog.text
    topology = read_topology(driver=four_gpus)
    shares = dict(zip(topology.gpus, plan(topology, mode="node"), strict=True))
    rows = affinity_table(topology, AffinityOptions(), shares).splitlines()
    assert rows[3].split()[-2] == "0"


def test_no_mode_no_change(four_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrap_command(("true",), gpu=0, mode=None, memory="bind") == ["numactl", "--membind=0", "true"]
    monkeypatch.setattr(safe_gpu.drivers, "open_driver", no_driver)
    assert wrap_command(("./train", "x y"), mode=None) == ["./train", "x y"]
    assert wrap_command(["./train"], gpu=0, mode=None, check=True) == ["./train"]


def test_a_claim_falls_back_with_torchs_options(four_gpus: Any) -> None:
    """One core for two GPUs cannot be divided."""
    with pytest.raises(GPUAffinityError, match="physical core"):
        safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=NumaOptions("exclusive"))
    with safe_gpu.GPUOwner(1, safe_gpu.NoPlaceholder(), affinity=NumaOptions("exclusive", True)) as owner:
        assert (owner.devices_taken, sorted(owner.cpus)) == ([0], [])


# The table


def test_a_plan_as_table_and_json(host: Callable[..., HostTopology]) -> None:
    topology = host(cores_per_node=2, nodes=2, gpu_nodes=[0, 1, None], distances=True)
    shares = dict(zip(topology.gpus, plan(topology, mode="node"), strict=True))
    options = AffinityOptions(mode="node")
    document = affinity_json(replace(topology, memory={0: (32 << 30, 5 << 30)}), options, shares)
    columns = ("index", "uuid", "numa_node", "cpus"), ("node", "cpus", "memory_total", "memory_free", "distances")
    gpus = [(0, "GPU-0", 0, "0-1,4-5"), (1, "GPU-1", 1, "2-3,6-7"), (2, "GPU-2", None, "0-7")]
    nodes = [(0, "0-1,4-5", 32 << 30, 5 << 30, {"0": 10, "1": 32}), (1, "2-3,6-7", None, None, {"0": 32, "1": 10})]
    assert json.loads(json.dumps(document)) == {
        "mode": "node",
        "gpus": [dict(zip(columns[0], gpu, strict=True)) for gpu in gpus],
        "nodes": [dict(zip(columns[1], node, strict=True)) for node in nodes],
    }
    table = affinity_table(topology, options, shares).splitlines()
    assert table[1].split() == ["GPU", "BUS", "NODE", "CPUS", "CORES", "MEMORY", "SOURCE"]
    assert table[2].split() == ["0", "-", "0", "0-1,4-5", "2", "0", "unknown"]
    assert len({line.index(text) for line, text in zip(table[2:], ["0-1,4-5", "2-3,6-7", "0-7"], strict=True)}) == 1


def test_the_table_of_nodes(host: Callable[..., HostTopology], saved_tree: Any) -> None:
    """Sizes as numactl --hardware shows them, from the kernel's files."""
    saved_tree.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 2097152 kB\nNode 1 MemFree:  524288 kB")
    saved_tree.write("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: many kB")
    topology = host(cores_per_node=2, nodes=2, smt=1, distances=True)
    saved_tree.cpus([(0,), (1,)])
    saved_tree.nodes({0: [0], 1: [1]})
    memory = read_topology(saved_tree).memory
    assert memory == {1: (2 << 30, 512 << 20)}
    assert [line.split() for line in node_table(replace(topology, memory=memory)).splitlines()] == [
        ["NODE", "CPUS", "SIZE", "FREE", "DISTANCES"],
        ["0", "0-1", "-", "-", "10", "32"],
        ["1", "2-3", "2", "GiB", "512", "MiB", "32", "10"],
    ]
    bare = host(cores_per_node=2, nodes=1, smt=1)
    assert node_table(bare).splitlines()[1].split() == ["0", "0-1", "-", "-", "-"]
    assert topology.memory == {}  # a made-up host has no memory of its own
