"""CPUs next to AMD GPUs: saved trees of an MI250X and an MI300X host in CPX mode, read as the kernel shows them."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from affinity.conftest import SavedTree
from support.vendor_hosts import KfdHost

from safe_gpu.affinity.cpu_shares import claim_shares, memory_nodes
from safe_gpu.affinity.options import MODES, AffinityOptions
from safe_gpu.affinity.planner import plan
from safe_gpu.affinity.resolve_gpus import by_ordinal, visible
from safe_gpu.drivers.kfd import KfdDriver
from safe_gpu.drivers.presets import Preset, preset
from safe_gpu.errors import GPUAffinityError
from safe_gpu.topology.cpulist import format_cpulist
from safe_gpu.topology.host import HostTopology, read_topology

HOSTS = ("mi250x", "mi300x-cpx")


def save(tree: SavedTree, host: Preset, numa_node: Callable[[int], int] = lambda node: node) -> KfdHost:
    """The tree of a host, with ``numa_node`` as the firmware tells it."""
    cpus = host.cpus
    nodes = host.topology.nodes
    same, socket, remote = cpus.distances
    tree.cpus(
        [cpus.threads(core, 1) for core in range(cpus.total)],
        packages=list(host.topology.packages.values()),
        caches=[cpus.threads(first, cpus.llc) for first in range(0, cpus.total, cpus.llc)],
    )
    tree.nodes(
        nodes, distance=lambda a, b: same if a == b else socket if a // cpus.nodes == b // cpus.nodes else remote
    )
    kfd = KfdHost(tree.root)
    partitions: dict[str, int] = {}
    for number, gpu in enumerate(host.gpus):
        partition = partitions[gpu.pci_bus_id] = partitions.get(gpu.pci_bus_id, -1) + 1
        unique_id, node = int(gpu.uuid.removeprefix("GPU-"), 16), gpu.numa_node or 0
        kfd.gpu(int(gpu.pci_bus_id[5:7], 16), 100 + number, unique_id, partition=partition, numa_node=numa_node(node))
        near = range(2 * cpus.total) if numa_node(node) < 0 else nodes[node]
        tree.write(f"sys/bus/pci/devices/{gpu.pci_bus_id}/local_cpulist", ",".join(map(str, sorted(near))))
    return kfd


@pytest.fixture(scope="module", params=HOSTS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Preset, str]:
    """A host, and the root of its tree."""
    tree = SavedTree(tmp_path_factory.mktemp("tree"))
    host = preset(request.param)
    save(tree, host)
    return host, os.fspath(tree)


@pytest.fixture
def read(saved: tuple[Preset, str], monkeypatch: pytest.MonkeyPatch) -> tuple[HostTopology, HostTopology]:
    """The host as it is, and as it is read."""
    host, root = saved
    monkeypatch.setenv("SAFE_GPU_FSROOT", root)
    return host.topology, read_topology(driver=KfdDriver())


def located(topology: HostTopology) -> list[tuple[Any, ...]]:
    return [
        (gpu.index, gpu.uuid, gpu.numa_node, gpu.node_cpus, gpu.socket_cpus, gpu.pci_bus_id) for gpu in topology.gpus
    ]


def test_the_tree_is_read_as_the_host_is(read: tuple[HostTopology, HostTopology], saved: tuple[Preset, str]) -> None:
    """By the driver, and without one."""
    there, found = read
    assert located(found) == located(read_topology(saved[1])) == located(there)
    for part in ("cpus", "nodes", "packages", "distances"):
        assert getattr(found, part) == getattr(there, part), part
    assert (set(found.cores), set(found.llc)) == (set(there.cores), set(there.llc))


EXPECTED = {
    ("mi250x", "exclusive"): ["48-55,112-119", "56-63,120-127", "16-23,80-87", "24-31,88-95"],
    ("mi300x-cpx", "exclusive"): ["0-2,192-194", "3-5,195-197", "6-8,198-200", "9-11,201-203"],
    ("mi300x-cpx", "core-complex"): ["0-7,192-199", "8-15,200-207", "16-23,208-215", "24-31,216-223"],
}


def test_shares_in_full(read: tuple[HostTopology, HostTopology], saved: tuple[Preset, str]) -> None:
    for mode in MODES:
        shares = plan(read[1], mode=mode)
        assert shares == plan(read[0], mode=mode)
        assert text(shares)[:4] == EXPECTED.get((saved[0].name, mode), text(shares)[:4])


def test_two_claims_of_partitions_of_one_gpu_share_no_core(read: tuple[HostTopology, HostTopology]) -> None:
    """Partitions have one bus id, so that nothing but the index tells them apart."""
    _, found = read
    exclusive, everything = AffinityOptions("exclusive"), found.cpus
    one, two = claim_shares(found, exclusive, [0, 1], everything), claim_shares(found, exclusive, [2], everything)
    assert not one.cpus & two.cpus
    assert len(one.shares) == 2
    assert one.shares[0] | one.shares[1] == one.cpus
    assert memory_nodes(found, [0, 1]) == {found.gpus[0].numa_node}


@pytest.mark.parametrize("cut", [{}, {"ROCR_VISIBLE_DEVICES": "5,3", "HIP_VISIBLE_DEVICES": "1"}])
def test_ordinals_are_those_of_hip(read: tuple[HostTopology, HostTopology], cut: dict[str, str]) -> None:
    snapshot = KfdDriver().snapshot()
    meant = by_ordinal(0, snapshot, cut)
    assert [gpu.index for gpu in meant.gpus] == [3 if cut else 0]
    assert "HIP ordinal 0" in meant.title
    assert all(f"{name}={value}" in meant.title for name, value in cut.items())
    assert len(visible(snapshot, cut).gpus) == (1 if cut else len(snapshot.gpus))
    with pytest.raises(GPUAffinityError, match="HIP shows no GPU 64"):
        by_ordinal(64, snapshot, cut)


def test_firmware_that_tells_no_node(saved_tree: SavedTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """``numa_node`` is -1 and the CPUs of the PCI device are all: every GPU is near everything, and divides it."""
    save(saved_tree, preset("mi250x"), lambda node: -1)
    monkeypatch.setenv("SAFE_GPU_FSROOT", os.fspath(saved_tree))
    driver = KfdDriver()
    found = read_topology(driver=driver)
    assert {(gpu.numa_node, gpu.node_cpus, gpu.source) for gpu in found.gpus} == {(None, found.cpus, "local_cpulist")}
    assert text(plan(found, mode="exclusive")) == [f"{8 * n}-{8 * n + 7},{64 + 8 * n}-{71 + 8 * n}" for n in range(8)]
    assert memory_nodes(found, range(8)) == frozenset()


def text(shares: list[frozenset[int]]) -> list[str]:
    return [format_cpulist(share) for share in shares]
