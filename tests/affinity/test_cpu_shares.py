"""A claim's CPUs: divided over the whole host, cut to the mask, bound for real."""

import os
from dataclasses import replace
from typing import Any

import pytest
from affinity.conftest import MASK, InChild, MakeHost, cpus, needs_two_cpus
from hypothesis import given, settings
from hypothesis import strategies as st

from safe_gpu.affinity import binding
from safe_gpu.affinity.binding import bind_process, leave
from safe_gpu.affinity.cpu_shares import (
    bind_claim,
    bind_near,
    claim_shares,
    memory_nodes,
    nodes_of_cpus,
    split_share,
    with_memory,
)
from safe_gpu.affinity.options import MODES, AffinityOptions
from safe_gpu.affinity.planner import plan
from safe_gpu.errors import GPUAffinityError
from safe_gpu.gpus.devices import Gpu, HostSnapshot
from safe_gpu.topology.host import GpuLocality, HostTopology, SysfsHost, read_topology

TWO_ON_ONE = {"cores_per_node": 8, "nodes": 1, "gpu_nodes": [0, 0]}
ONE_EACH = {"cores_per_node": 4, "nodes": 2, "gpu_nodes": [0, 1]}
THREE = {"cores_per_node": 4, "nodes": 2, "gpu_nodes": [0, 0, 1]}


def test_shares_are_of_the_host_and_cut_to_the_mask(host: MakeHost) -> None:
    """GPU 0 has cores 0-3 of 8 and GPU 1 cores 4-7, whoever asks, although each mask alone would divide otherwise.

    The cut may leave nothing, for a GPU or for all of them.
    """
    none = "this process may use none of the CPUs 0-3 of GPU"
    for shape, mode, gpus, mask, expected, notes in (
        (TWO_ON_ONE, "exclusive", [0], "2-5", {0: "2-3"}, ()),
        (TWO_ON_ONE, "exclusive", [1], "0-7", {1: "4-7"}, ()),
        (THREE, "exclusive", [2, 0], "0-7", {2: "4-7", 0: "0-1"}, ()),
        (ONE_EACH, "node", [0], "5-6", {0: "5-6"}, (f"{none} 0", "CPUs 5-6 are remote to GPU 0 (on NUMA node 0)")),
        (
            *(THREE, "node", [0, 1, 2], "5", {0: "5", 1: "5", 2: "5"}),
            (f"{none}s 0, 1", "CPUs 5 are remote to GPUs 0, 1 (on NUMA node 0)"),
        ),
    ):
        found = claim_shares(host(**shape, smt=1), AffinityOptions(mode=mode), gpus, cpus(mask))
        assert found.shares == {index: cpus(share) for index, share in expected.items()}
        assert found.cpus == frozenset().union(*found.shares.values())
        assert found.notes == notes


def test_isolated_cpus_are_left_out_before_cores_are_divided(host: MakeHost) -> None:
    for shape, isolated, mode, gpu, mask, share, remote in (
        (TWO_ON_ONE, "4-7", "exclusive", 1, "0-3", "2-3", False),
        (TWO_ON_ONE, "0-1", "unique_interleaved", 1, "0-7", "3,5,7", False),
        # A part of which the mask has nothing: the other CPUs of the node come before the whole mask.
        (TWO_ON_ONE, "", "exclusive", 1, "0-3", "0-3", False),
        (ONE_EACH, "", "exclusive", 0, "4-5", "4-5", True),
        # The whole node of a GPU is isolated, which does not keep claims of the other GPU from their part.
        (ONE_EACH, "4-7", "exclusive", 0, "0-3", "0-3", False),
        (ONE_EACH, "4-7", "exclusive", 1, "0-7", "0-3", True),
        # Whose mask has isolated CPUs only was put there on purpose.
        (ONE_EACH, "4-7", "node", 1, "4-6", "4-6", False),
        (TWO_ON_ONE, "0-7", "exclusive", 1, "0-7", "4-7", False),
    ):
        topology = replace(host(**shape, smt=1), isolated=cpus(isolated))
        found = claim_shares(topology, AffinityOptions(mode=mode), [gpu], cpus(mask))
        assert (found.shares, found.remote) == ({gpu: cpus(share)}, remote)


def test_cpus_of_another_node_are_remote(host: MakeHost) -> None:
    topology = host(cores_per_node=2, nodes=2, smt=1, gpu_nodes=[2], distances=True)
    far = {0: {0: 10, 1: 20, 2: 80}, 1: {0: 20, 1: 10, 2: 40}, 2: {0: 80, 1: 40, 2: 10}}
    topology = replace(topology, nodes={**topology.nodes, 2: frozenset()}, distances=far)
    found = claim_shares(topology, AffinityOptions(), [0], range(4))
    assert found.cpus == cpus("2-3") == plan(topology, mode="socket")[0]
    assert "remote to GPU 0 (on NUMA node 2)" in found.notes[0]


def test_what_cannot_be_divided_or_does_not_exist(host: MakeHost) -> None:
    topology = host(cores_per_node=1, nodes=1, gpu_nodes=[0, 0])
    for options, gpus, mask in [("exclusive", [0], {0}), ("node", [5], {0}), ("node", [0], ())]:
        with pytest.raises(GPUAffinityError):
            claim_shares(topology, AffinityOptions(mode=options), gpus, mask)


@settings(max_examples=60)
@given(st.data())
def test_never_wider_than_the_mask_and_never_in_anothers_way(data: st.DataObject) -> None:
    cores, gpus = data.draw(st.integers(4, 24)), data.draw(st.integers(2, 4))
    topology = HostTopology(
        cpus=frozenset(range(2 * cores)),
        cores=[frozenset([core, core + cores]) for core in range(cores)],
        nodes={0: frozenset(range(2 * cores))},
        gpus=[GpuLocality(index, "", 0) for index in range(gpus)],
    )
    options = AffinityOptions(mode=data.draw(st.sampled_from(MODES)))
    whole = [frozenset(range(2 * cores))] + [
        data.draw(st.frozensets(st.integers(0, 2 * cores - 1), min_size=1)) for _ in range(2)
    ]
    first, second = (claim_shares(topology, options, [index], whole[index + 1]) for index in (0, 1))
    for found, mask in ((first, whole[1]), (second, whole[2])):
        assert found.cpus
        assert found.cpus <= mask
    if options.mode in ("exclusive", "single_unique", "unique_contiguous", "unique_interleaved") and not (
        first.notes or second.notes
    ):
        assert not first.cpus & second.cpus


# Binding

GPUS = [Gpu(number, f"GPU-{number}", pci_bus_id=f"0000:0{number + 1}:00.0") for number in range(3)]


@pytest.fixture
def small_host(saved_tree: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A saved host whose first CPUs are those that this process really has: one on each of two nodes."""
    first, second = MASK[:2]
    saved_tree.cpus([(first,), (second,), (5000,)])
    saved_tree.nodes({0: [first], 1: [second], 2: [5000]}, distance=lambda a, b: 10 if a == b else 20)
    for number in range(3):
        saved_tree.gpu(f"0000:0{number + 1}:00.0", node=number)
    monkeypatch.setenv("SAFE_GPU_FSROOT", os.fspath(saved_tree))
    return saved_tree


@needs_two_cpus
@pytest.mark.parametrize("mode", ["node", "exclusive"])
def test_a_claim_is_bound_and_given_back(small_host: Any, fake_driver: Any, in_child: InChild, mode: str) -> None:
    driver = fake_driver(GPUS)

    def child() -> tuple[Any, ...]:
        bind_process({MASK[0]})  # which is there again after the claim
        seen = []
        for chosen in ([GPUS[0]], [GPUS[1]], GPUS[:2], [GPUS[2]]):
            report = bind_claim(chosen, driver, options=AffinityOptions(mode=mode))
            assert report.remote == bool(report.notes) != report.as_asked
            seen.append((os.sched_getaffinity(0), report.notes))
            leave()
        return (*seen, os.sched_getaffinity(0))

    one, two, both, remote, after = in_child(child)
    assert one == ({MASK[0]}, ())
    assert two == ({MASK[1]}, ())
    assert both == (set(MASK[:2]), ())
    assert remote[0] == set(MASK)
    assert remote[1][0] == "this process may use none of the CPUs 5000 of GPU 2"
    assert after == {MASK[0]}


@needs_two_cpus
def test_the_default_reads_no_whole_host(small_host: Any, fake_driver: Any, in_child: Any, monkeypatch: Any) -> None:
    """Neither the cores, sockets and caches of each CPU, nor the places of other GPUs."""

    class Silent(fake_driver):
        def snapshot(self) -> HostSnapshot:
            raise AssertionError("the driver was polled")

    for fact in ("cores", "packages", "llc"):
        monkeypatch.setattr(SysfsHost, fact, property(lambda host: pytest.fail("the whole host was read")))
    assert in_child(lambda: bind_near(GPUS[1:2], Silent(GPUS), options=AffinityOptions()).cpus) == {MASK[1]}


@needs_two_cpus
def test_a_claim_that_cannot_be_bound_remembers_nothing(small_host: Any, fake_driver: Any) -> None:
    with pytest.raises(GPUAffinityError):
        bind_claim([], fake_driver([]), options=AffinityOptions())
    assert not binding._stack


def test_nodes_of_cpus(saved_tree: Any, fake_driver: Any, host: MakeHost) -> None:
    assert nodes_of_cpus([3], fake_driver([]), saved_tree) is None
    saved_tree.cpus([(0,), (1,), (2,), (3,)])
    saved_tree.nodes({0: [0, 1], 8: [2, 3]})
    assert nodes_of_cpus([3], fake_driver([]), saved_tree) == {8}
    assert nodes_of_cpus([99], fake_driver([]), saved_tree) is None
    driver = fake_driver([])
    driver.own = host(cores_per_node=2, nodes=2, smt=1)
    assert nodes_of_cpus([1, 2], driver, "/") == {0, 1}


@pytest.mark.parametrize(
    ("has", "sizes", "distances", "nodes"),
    [
        ("0-3", [1, 1, 1, 1], "16 10 16 16", {1}),
        ("0,2-3", [1, 0, 1, 1], "16 10 16 32", {0, 2}),
        ("0,2-3", [1, 0, 1, 1], "", {0, 2, 3}),
        ("", [1, 0, 1, 1], "32 10 16 16", {2, 3}),  # before Linux 2.6.24
        ("\0", [0, 0, 0, 0], "16 10 28 12", {1}),  # they cannot all be without memory
    ],
)
def test_the_nearest_memory_of_a_node(saved_tree: Any, has: str, sizes: list[int], distances: str, nodes: Any) -> None:
    saved_tree.cpus([(0,), (1,), (2,), (3,)])
    saved_tree.nodes({number: [number] for number in range(4)})
    saved_tree.gpu("0000:01:00.0", node=1)
    base = "sys/devices/system/node"
    saved_tree.write(f"{base}/node1/distance", distances)
    saved_tree.write(f"{base}/has_memory", has)
    for node, size in enumerate(sizes):
        saved_tree.write(f"{base}/node{node}/meminfo", f"Node {node} MemTotal:   {size * 4096} kB")
    topology = read_topology(saved_tree)
    found, lacks = with_memory(topology, memory_nodes(topology, [0]))
    assert found == nodes
    assert [line.partition(",")[0] for line in lacks] == ["NUMA node 1 has no memory"] * (found != {1})


# Workers


@settings(max_examples=60)
@given(st.integers(1, 32), st.sampled_from([1, 2, 4]), st.data())
def test_parts_are_whole_cores_and_make_up_the_share(cores: int, smt: int, data: st.DataObject) -> None:
    topology = HostTopology(
        cpus=frozenset(range(cores * smt)),
        cores=[frozenset(range(core * smt, core * smt + smt)) for core in range(cores)],
    )
    share = data.draw(st.frozensets(st.integers(0, cores * smt - 1), min_size=1))
    most = sum(not core.isdisjoint(share) for core in topology.cores)
    parts = split_share(share, topology, data.draw(st.integers(1, most)))
    assert frozenset().union(*parts) == share
    assert sum(map(len, parts)) == len(share)
    for core in topology.cores:
        assert sum(not core.isdisjoint(part) for part in parts) <= 1
