"""What the older worlds call: gpu_affinity's set_affinity, numactl before a command, torch's options; and the table.

numactl and PyTorch are the installed ones in the last tests; SAFE_GPU_REQUIRE_REAL makes their absence a failure.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from affinity.conftest import MASK, make_host, needs_two_cpus, no_driver
from support import api
from support.forks import in_child
from support.real import REQUIRED

import safe_gpu


@needs_two_cpus
def test_errors_have_the_numbers_in_them(four_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, visible, names in (
        ((2, 2), "0,1,2,3", "gpu_id=2 .* nproc_per_node=2"),
        ((0, 2.0), "0,1,2,3", "nproc_per_node must be a whole number, not 2.0"),
        ((0, 4), "0,1,2,3", "1 physical core near 2 GPUs"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(api.GPUAffinityError, match=names):
            api.set_affinity(*arguments)  # type: ignore[arg-type]
    assert sorted(os.sched_getaffinity(0)) == MASK


def test_options_of_numactl() -> None:
    share = frozenset([0, 1, 2, 8])
    assert api.numactl_options(share, frozenset([3]), "preferred") == ["--physcpubind=0-2,8", "--preferred=3"]
    assert api.numactl_options(share, frozenset([2, 3]), "preferred")[1] == "--preferred-many=2-3"
    with pytest.raises(api.GPUAffinityError, match="NUMA node"):
        api.numactl_options(share, frozenset(), "bind")


@needs_two_cpus
def test_the_wrapped_command(four_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["python", "-c", "print('a b')"]
    for gpu, at in ((0, 0), (3, 1)):
        assert api.wrap_command(command, gpu=gpu, mode="node") == ["numactl", f"--physcpubind={MASK[at]}", *command]
        assert api.wrap_command(tuple(command), gpu=gpu, mode="node", memory="bind")[2] == f"--membind={at}"
    assert api.wrap_command(["./train"], gpu=0, mode=None, check=True) == ["./train"]
    wrong: list[tuple[Any, dict[str, Any]]] = [(["true"], {"gpu": -1}), ([], {}), ("true", {}), ([1], {})]
    # These do not fall back either.
    more = ({"mode": "somewhere"}, {"gpu": None}, {"ordinal": 0}, {"memory": "here"})
    for words, options in [*wrong, *((["true"], {**one, "strict": False}) for one in more)]:
        with pytest.raises(api.GPUAffinityError):
            api.wrap_command(words, **{"gpu": 0, "mode": "node", **options})
    monkeypatch.setattr(api.drivers, "open_driver", no_driver)
    assert api.wrap_command(("./train", "x y"), mode=None) == ["./train", "x y"]


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
    four_gpus.gpus.append(api.Gpu(4, "GPU-4"))
    cpus = f"{MASK[0]}-{MASK[-1]}" if "gpu" in arguments else str(MASK[0])
    numactl = tmp_path / "numactl"
    refusing = f"*{refused.format(cpus)}*) echo no policy >&2; exit 1"
    numactl.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncase "$*" in {refusing};; esac\n')
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = {"gpu": 0, "mode": "node", **arguments}
    expected = [*(["numactl"] if kept else []), *(option.format(cpus) for option in kept), "./train"]
    for _ in range(2):
        assert api.wrap_command(["./train"], **asked, strict=False) == expected
        if said:
            assert caplog.records[0].levelname == "WARNING"
            assert said.format(cpus) in caplog.text
            with pytest.raises(api.GPUAffinityError):
                api.wrap_command(["./train"], **asked, check=True)
    lines = (tmp_path / "asked").read_text().splitlines()
    assert len(lines) == len(set(lines))


def torch_options(mode: str, falls_back: bool = False) -> Any:
    """The attributes of torch.numa.binding.NumaOptions."""
    return SimpleNamespace(affinity_mode=mode, should_fall_back_if_binding_fails=falls_back)


@needs_two_cpus
def test_options_of_torch_are_taken_as_they_are(four_gpus: Any) -> None:
    options = torch_options("node")
    assert api.parse_options(options) == api.AffinityOptions("node")
    assert api.wrap_command(["true"], gpu=1, mode=options)[1] == f"--physcpubind={MASK[1]}"
    assert in_child(lambda: sorted(safe_gpu.bind(1, mode=options).cpus)) == [MASK[1]]
    with pytest.raises(api.GPUAffinityError, match="elsewhere"):
        api.parse_options(torch_options("elsewhere"))


def test_falling_back_to_the_command(four_gpus: Any, monkeypatch: Any, caplog: Any, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["./train", "--all"]
    for arguments, why in (
        ({"gpu": 9}, "no GPU 9"),
        ({"gpu": 0, "mode": "exclusive"}, "physical core"),  # one for two GPUs
        ({"gpu": 0}, "numactl is not installed here"),
        ({"gpu": 0}, "no NVIDIA driver"),
    ):
        if why == "no NVIDIA driver":
            monkeypatch.setattr(api.drivers, "open_driver", no_driver)
        asked = {"mode": "node", **arguments}
        caplog.clear()
        for falls_back in ({"strict": False}, {"mode": torch_options(asked["mode"], True)}):
            assert api.wrap_command(command, **{**asked, **falls_back}) == command
            assert caplog.records[-1].levelname == "WARNING"
        assert caplog.text.count("the command runs unbound: ") == caplog.text.count(why) == 2
        with pytest.raises(api.GPUAffinityError, match=why):
            api.wrap_command(command, **asked, check=True)


def test_a_node_without_memory_is_not_given_to_numactl(four_gpus: Any, saved_tree: Any, caplog: Any) -> None:
    saved_tree.write("sys/devices/system/node/has_memory", "0")
    assert api.wrap_command(["true"], gpu=1, mode=None, memory="bind") == ["numactl", "--membind=0", "true"]
    assert "NUMA node 1 has no memory, so that of node 0 is used" in caplog.text
    topology = api.read_topology(driver=four_gpus)
    shares = dict(zip(topology.gpus, api.plan(topology, mode="node"), strict=True))
    rows = api.affinity_table(topology, api.AffinityOptions(), shares).splitlines()
    assert rows[3].split()[-2] == "0"


def test_a_plan_as_table_and_json() -> None:
    topology = make_host(cores_per_node=2, nodes=2, gpu_nodes=[0, 1, None], distances=True)
    topology = replace(topology, memory={0: (32 << 30, 5 << 30)})
    shares = dict(zip(topology.gpus, api.plan(topology, mode="node"), strict=True))
    options = api.AffinityOptions(mode="node")
    document = json.loads(json.dumps(api.affinity_json(topology, options, shares)))
    gpu, node = document["gpus"][2], document["nodes"][0]
    assert (document["mode"], gpu) == ("node", {"index": 2, "uuid": "GPU-2", "numa_node": None, "cpus": "0-7"})
    assert (node["node"], node["cpus"], node["distances"]) == (0, "0-1,4-5", {"0": 10, "1": 32})
    assert [node["memory_total"] for node in document["nodes"]] == [32 << 30, None]
    assert [node["memory_free"] for node in document["nodes"]] == [5 << 30, None]
    table = api.affinity_table(topology, options, shares).splitlines()
    assert table[1].split() == ["GPU", "BUS", "NODE", "CPUS", "CORES", "MEMORY", "SOURCE"]
    assert table[2].split() == ["0", "-", "0", "0-1,4-5", "2", "0", "unknown"]
    assert len({line.index(text) for line, text in zip(table[2:], ["0-1,4-5", "2-3,6-7", "0-7"], strict=True)}) == 1


@needs_two_cpus
def test_closed_cpus_are_told(four_gpus: Any, saved_tree: Any, capsys: Any) -> None:
    """Those that the mask lacks, or --allowed."""
    closed = "CPUs that may not be used here are left out: "
    assert api.main(["affinity"]) == 0
    assert closed not in capsys.readouterr().out
    assert api.main(["affinity", "--allowed", str(MASK[0])]) == 0
    assert f"{closed}{MASK[1]}\n" in capsys.readouterr().out


def test_the_table_of_nodes(saved_tree: Any) -> None:
    """Sizes as numactl --hardware shows them, from the kernel's files."""
    saved_tree.cpus([(0,), (1,)])
    saved_tree.nodes({0: [0], 1: [1]}, distance=lambda a, b: 10 if a == b else 32)
    saved_tree.write("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal: 2097152 kB\nNode 1 MemFree:  524288 kB")
    saved_tree.write("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal: many kB")
    topology = api.read_topology(saved_tree)
    assert topology.memory == {1: (2 << 30, 512 << 20)}
    assert [line.split() for line in api.node_table(topology).splitlines()] == [
        ["NODE", "CPUS", "SIZE", "FREE", "DISTANCES"],
        ["0", "0", "-", "-", "10", "32"],
        ["1", "1", "2", "GiB", "512", "MiB", "32", "10"],
    ]


@pytest.mark.skipif(shutil.which("numactl") is None and not REQUIRED, reason="needs numactl")
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
        wrapped = api.wrap_command([sys.executable, "-c", code], gpu=0, mode="node", memory=memory, check=True)
    except api.GPUAffinityError as err:
        if memory is None or REQUIRED:
            raise
        pytest.skip(f"memory policies cannot be used here: {err}")
    done = subprocess.run(wrapped, env=four_gpus_env, capture_output=True, text=True, timeout=60)
    policy = {None: ["default", [], None], "bind": ["bind", [0], True], "preferred": ["preferred", [0], True]}[memory]
    assert json.loads(done.stdout) == [[MASK[0]], *policy], done.stderr


@pytest.mark.skipif(importlib.util.find_spec("torch") is None and not REQUIRED, reason="needs PyTorch")
@needs_two_cpus
def test_torchs_own_options(four_gpus: Any) -> None:
    """What torch plans with them is recorded in peers.json.gz."""
    from torch.numa.binding import AffinityMode, NumaOptions

    assert {mode.value for mode in AffinityMode} < set(api.MODES)
    for mode in AffinityMode:
        assert api.parse_options(NumaOptions(affinity_mode=mode)) == api.AffinityOptions(mode.value)
    # One core for two GPUs cannot be divided.
    falls_back = NumaOptions(affinity_mode=AffinityMode.EXCLUSIVE, should_fall_back_if_binding_fails=True)
    assert api.wrap_command(["true"], gpu=1, mode=falls_back) == ["true"]
    assert not in_child(lambda: safe_gpu.bind(1, mode=falls_back)).ok
