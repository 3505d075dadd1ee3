"""Saved sysfs trees in, topology out: each test is one thing that real machines do."""

import os
import random
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from affinity.conftest import MASK, FakeDriver, SavedTree, cpus, needs_two_cpus
from hypothesis import given
from hypothesis import strategies as st
from support import api
from support.vendor_hosts import KfdHost

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
needs_sysfs = pytest.mark.skipif(not os.path.isdir("/sys/devices/system/cpu"), reason="/sys is not mounted")
CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def groups(cores: Any) -> list[list[int]]:
    return [sorted(core) for core in cores]


# CPUs 0-3 with siblings 8-11, 4-7 with siblings 12-15.
FIRST, SECOND = cpus("0-3,8-11"), cpus("4-7,12-15")


def two_sockets(tree: Any, **options: Any) -> None:
    """Two packages of one node each."""
    packages = [FIRST, SECOND]
    tree.cpus([(cpu, cpu + 8) for cpu in range(8)], packages=packages, caches=packages, **options)
    tree.nodes(dict(enumerate(packages)), distance=lambda a, b: 10 if a == b else 21, masks=options.get("masks", False))


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(("old_names", "padded"), [(False, False), (True, True)])
def test_lists_masks_old_names_and_padding(saved_tree: Any, masks: bool, old_names: bool, padded: bool) -> None:
    two_sockets(saved_tree, masks=masks, old_names=old_names)
    if padded:
        for file in saved_tree.root.rglob("*"):
            if file.is_file():
                file.write_bytes(file.read_bytes() + b"\0" * 37)
    host = api.read_topology(saved_tree)
    assert host.cpus == frozenset(range(16))
    assert groups(host.cores) == [[cpu, cpu + 8] for cpu in range(8)]
    assert host.nodes == host.packages == {0: FIRST, 1: SECOND}
    assert set(host.llc) == {FIRST, SECOND}
    assert host.distances == {0: {0: 10, 1: 21}, 1: {0: 21, 1: 10}}


def test_offline_cpus_that_lists_still_name(saved_tree: Any) -> None:
    """The kernel drops offline CPUs from siblings, but saved trees and node lists name them."""
    saved_tree.cpus([(0, 4), (1, 5), (2, 6), (3, 7)], offline=[5, 3, 7], caches=[range(8)])
    saved_tree.nodes({0: range(8)})
    saved_tree.gpu("0000:01:00.0", cpus=range(8))
    host = api.read_topology(saved_tree)
    assert host.cpus == {0, 1, 2, 4, 6}
    assert groups(host.cores) == [[0, 4], [1], [2, 6]]
    assert host.nodes == {0: host.cpus}
    assert groups(host.llc) == [[0, 1, 2, 4, 6]]
    assert host.gpus[0].node_cpus == host.cpus


@needs_two_cpus
@needs_root
def test_a_list_of_online_cpus_that_is_not_the_kernels(tmp_path: Path) -> None:
    """lxcfs shows a container of CPUs 24-31 the list 0-7."""
    if len(MASK) < len(api.read_topology().cpus) or len(MASK) < 2:
        pytest.skip("some CPUs are closed to the tests")
    (tmp_path / "online").write_text("0\n")
    mount = f"mount --bind {tmp_path}/online /sys/devices/system/cpu/online"
    ask = "from safe_gpu.topology.host import read_topology; print(sorted(read_topology().cpus))"
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", ask]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode and "mount" in done.stderr:
        pytest.skip(f"cannot mount here: {done.stderr}")
    assert (done.stdout.strip(), done.stderr) == (str(MASK), "")


def test_nodes_sparse_absent_and_without_cpus(saved_tree: Any) -> None:
    """Node 252 has memory only, node 3 is possible but not there, node 7 has a directory but is offline.

    With numa=fake every CPU is in every node, and belongs to the first. CPU 4 has no topology.
    """
    saved_tree.cpus([(0,), (1,), (2,), (3,)])
    saved_tree.nodes({0: [0, 1], 8: [1, 2, 3], 252: []}, distance=lambda a, b: 10 if a == b else 40)
    saved_tree.write(f"{CPU}/online", "0-2,4")
    saved_tree.write(f"{NODE}/possible", "0-255")
    saved_tree.write(f"{NODE}/node7/cpulist", "")
    saved_tree.write(f"{NODE}/node8/distance", "21")  # it does not fit
    (Path(saved_tree) / CPU / "cpu4").mkdir()
    host = api.read_topology(saved_tree)
    assert (host.cpus, host.nodes) == ({0, 1, 2}, {0: {0, 1}, 8: {2}, 252: set()})
    assert (host.distances[252], 8 in host.distances) == ({0: 40, 8: 40, 252: 10}, False)


def test_packages_and_caches(saved_tree: Any) -> None:
    """Ids of packages are the kernel's. Without them packages are numbered, without packages the host is one."""
    cores = [(0,), (1,), (2,), (3,)]
    saved_tree.cpus(cores, packages=[(0, 1), (2, 3)], package_ids=[36, 3002])
    assert api.read_topology(saved_tree).packages == {36: {0, 1}, 3002: {2, 3}}
    saved_tree.nodes({0: [0], 1: [1, 2, 3]})
    assert groups(api.read_topology(saved_tree).llc) == [[0], [1], [2, 3]]  # no cache is package and node
    saved_tree.cpus(cores, packages=[(0, 2), (1, 3)], package_ids=[-1, -1])
    assert api.read_topology(saved_tree).packages == {0: {0, 2}, 1: {1, 3}}
    for file in saved_tree.root.glob(f"{CPU}/cpu*/topology/p*"):
        file.unlink()
    shutil.rmtree(saved_tree.root / NODE)
    host = api.read_topology(saved_tree)
    assert (host.packages, host.nodes, host.distances) == ({0: set(range(4))}, {0: set(range(4))}, {})
    saved_tree.cpus(cores, caches=[(0, 1, 2, 3)])
    for cpu in range(4):  # an instruction cache is never the last level
        for name, text in (("level", "4"), ("type", "Instruction"), ("shared_cpu_list", str(cpu))):
            saved_tree.write(f"{CPU}/cpu{cpu}/cache/index9/{name}", text)
    assert groups(api.read_topology(saved_tree).llc) == [[0, 1, 2, 3]]


def test_malformed_is_missing(saved_tree: Any) -> None:
    two_sockets(saved_tree)
    saved_tree.write(f"{CPU}/online", "0-4294967295")
    saved_tree.write(f"{CPU}/cpu0/topology/core_cpus_list", "0-")
    saved_tree.write(f"{CPU}/cpu0/topology/thread_siblings_list", "0,8")
    saved_tree.write(f"{CPU}/cpu1/topology/core_cpus_list", "5")
    saved_tree.write(f"{CPU}/cpu1/topology/core_cpus", "00000202")
    saved_tree.write(f"{CPU}/cpu0/cache/index3/level", "three")
    saved_tree.write(f"{NODE}/online", "nothing")
    host = api.read_topology(saved_tree)
    assert host.cpus == frozenset(range(16))
    assert groups(host.cores) == [[cpu, cpu + 8] for cpu in range(8)]
    assert list(host.nodes) == [0, 1]


def test_no_host_there() -> None:
    for root in ("/nowhere", "/dev/null"):
        with pytest.raises(api.GPUAffinityError, match="no online"):
            api.read_topology(root)


# GPUs without a driver


def test_gpus_in_bus_order(saved_tree: Any) -> None:
    two_sockets(saved_tree)
    for bus_id, node in [("10000:01:00.0", 1), ("0000:c1:00.0", 1), ("0000:0f:00.0", 0), ("0000:0f:01.0", 0)]:
        saved_tree.gpu(bus_id, node=node)
    saved_tree.gpu("0000:02:00.0", node=0, **{"class": "0x068000"})  # NVSwitch
    saved_tree.gpu("0000:03:00.0", node=0, vendor="0x1002")
    saved_tree.gpu("0000:04:00.0", node=0, **{"class": "0x040300"})  # the card's audio function
    host = api.read_topology(saved_tree)
    assert [gpu.index for gpu in host.gpus] == [0, 1, 2, 3]
    places = [(gpu.pci_bus_id, gpu.numa_node) for gpu in host.gpus]
    assert places == [("0000:0f:00.0", 0), ("0000:0f:01.0", 0), ("0000:c1:00.0", 1), ("10000:01:00.0", 1)]
    assert host.gpus[3].node_cpus == host.nodes[1]
    assert host.gpus[3].socket_cpus == host.packages[1]
    assert {gpu.source for gpu in host.gpus} == {"numa_node"}


def test_gpus_that_only_the_kernel_driver_names(saved_tree: Any) -> None:
    """A card that was passed on to a virtual machine is no GPU."""
    two_sockets(saved_tree)
    saved_tree.write("sys/bus/pci/devices/0035:03:00.0/numa_node", "1")
    saved_tree.write("proc/driver/nvidia/gpus/0035:03:00.0/information", "Model: V100\nGPU UUID: \t GPU-abc-1\n")
    for bus_id, driver in (("0004:04:00.0", "nvidia"), ("0001:01:00.0", "vfio-pci")):
        saved_tree.gpu(bus_id, node=0)
        (saved_tree.root / f"sys/bus/pci/devices/{bus_id}/driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
    saved_tree.write("proc/driver/nvidia/gpus/0004:04:00.0/information", "")
    saved_tree.gpu("0036:05:00.0", node=0)  # of no driver
    gpu0, gpu1, gpu2 = api.read_topology(saved_tree).gpus
    assert gpu2.pci_bus_id == "0036:05:00.0"
    assert (gpu0.pci_bus_id, gpu0.uuid) == ("0004:04:00.0", "")
    assert (gpu1.pci_bus_id, gpu1.uuid, gpu1.numa_node) == ("0035:03:00.0", "GPU-abc-1", 1)


def test_where_a_gpu_stands(saved_tree: Any) -> None:
    two_sockets(saved_tree)
    cases: list[tuple[dict[str, str], Any]] = [
        ({"numa_node": "1", "local_cpulist": "0-3"}, (1, SECOND, "numa_node")),
        ({"numa_node": "-1", "local_cpulist": "4-7,12-15"}, (1, SECOND, "local_cpulist")),
        ({"numa_node": "-1", "local_cpus": "0000f0f0"}, (1, SECOND, "local_cpus")),
        ({"local_cpulist": "0-15"}, (None, set(range(16)), "local_cpulist")),
        ({"numa_node": "-1"}, (None, set(), "")),
    ]
    for number, (files, _) in enumerate(cases):
        saved_tree.gpu(f"0000:0{number}:00.0", **files)
    for (files, expected), gpu in zip(cases, api.read_topology(saved_tree).gpus, strict=True):
        assert (gpu.numa_node, gpu.node_cpus, gpu.source) == expected, files


def test_a_single_node_and_one_of_memory_only(saved_tree: Any) -> None:
    """Firmware of hosts with a single node may tell none."""
    saved_tree.cpus([(0,), (1,)])
    for nodes, node, expected in (({0: [0, 1]}, -1, (0, {0, 1}, "only node")), ({4: []}, 4, (4, set(), "numa_node"))):
        saved_tree.nodes({0: [0, 1], **nodes})
        saved_tree.gpu("0000:01:00.0", node=node)
        (gpu,) = api.read_topology(saved_tree).gpus
        assert (gpu.numa_node, gpu.node_cpus, gpu.source) == expected


# GPUs of a driver


@needs_sysfs
def test_the_cpuset_that_nvml_cut_its_answer_to_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in different cpusets must divide the same cores, or their exclusive shares would overlap."""
    host = api.read_topology("/")
    mine = min(os.sched_getaffinity(0))
    masks = {0: {mine}}  # by process: 0 is this one
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: masks[pid])
    driver = FakeDriver([api.Gpu(0, "GPU-a")], {("GPU-a", "node"): frozenset([mine])})
    (gpu,) = api.read_topology("/", driver).gpus
    assert gpu.node_cpus == next(cpus for cpus in host.nodes.values() if mine in cpus)


def test_some_gpus_are_located_without_a_poll(saved_tree: Any) -> None:
    """The driver's word comes before that of PCI."""
    two_sockets(saved_tree)
    saved_tree.gpu("0000:02:00.0", node=1)
    saved_tree.gpu("0000:03:00.0", node=-1, cpus=[0, 1])
    driver = FakeDriver(affinity={("GPU-told", "node"): SECOND})
    driver.error = api.NoDriverError("the driver was unloaded")
    for gpu, expected in [
        (api.Gpu(0, "GPU-told", pci_bus_id="0000:03:00.0", numa_node=0), (1, SECOND, "nvml")),
        (api.Gpu(0, "MIG-x", mig_parent="GPU-told"), (1, SECOND, "nvml")),
        (api.Gpu(0, "GPU-x", pci_bus_id="0000:02:00.0"), (1, SECOND, "numa_node")),
        (api.Gpu(0, "GPU-x", pci_bus_id="0000:77:00.0", numa_node=0), (0, FIRST, "numa_node")),
        (api.Gpu(0, "GPU-x", pci_bus_id="0000:03:00.0"), (0, {0, 1}, "local_cpulist")),
        (api.Gpu(0, "GPU-x", pci_bus_id="0000:77:00.0"), (None, set(), "")),
    ]:
        (place,) = api.read_topology(saved_tree, driver, [gpu, gpu]).gpus
        assert (place.numa_node, place.node_cpus, place.source) == expected, gpu
    with pytest.raises(api.GPUAffinityError, match="the driver was unloaded"):
        _ = api.read_topology(saved_tree, driver).gpus


# AMD GPUs: an MI250X and an MI300X host in CPX mode, as the kernel shows them


def save(tree: SavedTree, host: api.Preset) -> None:
    there = host.topology
    tree.cpus(there.cores, packages=list(there.packages.values()), caches=there.llc)
    tree.nodes(there.nodes, distance=lambda a, b: there.distances[a][b])
    kfd, partitions = KfdHost(tree.root), Counter[str]()
    for number, gpu in enumerate(host.gpus):
        bus, unique_id = int(gpu.pci_bus_id[5:7], 16), int(gpu.uuid.removeprefix("GPU-"), 16)
        kfd.gpu(bus, 100 + number, unique_id, partition=partitions[gpu.pci_bus_id], numa_node=gpu.numa_node or 0)
        partitions[gpu.pci_bus_id] += 1


def told(gpus: Iterable[api.Gpu]) -> list[tuple[object, ...]]:
    """What only some drivers report, which a condition or a column may need."""
    return [(gpu.utilization, gpu.temperature, gpu.fan, gpu.power, gpu.power_limit) for gpu in gpus]


@pytest.mark.parametrize("name", ["mi250x", "mi300x-cpx"])
def test_an_amd_host_is_read_as_it_is(saved_tree: SavedTree, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By the driver, and without one."""

    def located(topology: api.HostTopology) -> list[api.GpuLocality]:
        return [replace(gpu, source="") for gpu in topology.gpus]

    save(saved_tree, api.find_preset(name))
    monkeypatch.setenv("SAFE_GPU_FSROOT", os.fspath(saved_tree))
    there, found = api.find_preset(name).topology, api.read_topology(driver=api.KfdDriver())
    assert located(found) == located(api.read_topology(saved_tree)) == located(there)
    for part in ("cpus", "nodes", "packages", "distances"):
        assert getattr(found, part) == getattr(there, part), part
    assert (set(found.cores), set(found.llc)) == (set(there.cores), set(there.llc))
    # Partitions of one GPU have one bus id, so that nothing but the index tells them apart.
    one, two = (api.claim_shares(found, api.AffinityOptions("exclusive"), gpus, found.cpus) for gpus in ([0, 1], [2]))
    assert not one.cpus & two.cpus
    assert len(one.shares) == 2
    assert one.shares[0] | one.shares[1] == one.cpus
    assert api.memory_nodes(found, [0, 1]) == {found.gpus[0].numa_node}
    # Ordinals are those of HIP.
    snapshot = api.KfdDriver().snapshot()
    assert told(api.KfdDriver().detailed(snapshot).gpus) == told(api.find_preset(name).gpus)
    for cut, index in ({}, 0), ({"ROCR_VISIBLE_DEVICES": "5,3", "HIP_VISIBLE_DEVICES": "1"}, 3):
        meant = api.by_ordinal(0, snapshot, cut)
        assert [gpu.index for gpu in meant.gpus] == [index]
        assert all(words in meant.title for words in ("HIP ordinal 0", *map("=".join, cut.items())))
        assert len(api.visible(snapshot, cut).gpus) == (1 if cut else len(snapshot.gpus))
        with pytest.raises(api.GPUAffinityError, match="HIP shows no GPU 64"):
            api.by_ordinal(64, snapshot, cut)


# hwloc as the referee


def hwloc(root: str) -> dict[str, set[frozenset[int]]]:
    text = subprocess.run(
        ["lstopo-no-graphics", "--of", "xml", "--no-io", "-"],
        env=os.environ
        | {"HWLOC_FSROOT": root, "HWLOC_COMPONENTS": "linux,stop", "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    found: dict[str, set[frozenset[int]]] = {kind: set() for kind in ("PU", "Core", "Package", "NUMANode", "L3Cache")}
    for item in ElementTree.fromstring(text).iter("object"):
        groups = item.get("cpuset", "0x0").replace("0x", "").split(",")
        cpus = api.parse_cpumask(",".join(group or "0" for group in groups))  # a group of zeros is left blank
        if cpus and item.get("type") in found:
            found[item.get("type", "")].add(cpus)
    return found


needs_hwloc = pytest.mark.skipif(shutil.which("lstopo-no-graphics") is None, reason="needs hwloc (lstopo-no-graphics)")


@needs_hwloc
@pytest.mark.parametrize("seed", range(6))
def test_hwloc_sees_the_same_host(saved_tree: Any, seed: int) -> None:
    chance = random.Random(seed)
    smt, packages = chance.choice([(1, 4), (2, 1), (2, 4), (4, 2), (8, 1)])
    nodes_each, cores_each = chance.choice([1, 2]), chance.choice([2, 3])
    count = packages * nodes_each * cores_each
    if chance.random() < 0.5:
        cores = [[core + thread * count for thread in range(smt)] for core in range(count)]
    else:
        cores = [list(range(core * smt, (core + 1) * smt)) for core in range(count)]

    def groups_of(size: int) -> list[list[int]]:
        return [[cpu for core in cores[first : first + size] for cpu in core] for first in range(0, count, size)]

    sockets, caches = groups_of(nodes_each * cores_each), groups_of(cores_each)
    nodes = dict(zip(sorted(chance.sample(range(64), len(caches))), caches, strict=True))
    offline = chance.sample(range(1, count * smt), chance.choice([0, 1, 2]))
    old_names = chance.random() < 0.5
    saved_tree.cpus(cores, packages=sockets, caches=caches, offline=offline, old_names=old_names, as_the_kernel=True)
    saved_tree.nodes({node: set(cpus) - set(offline) for node, cpus in nodes.items()}, masks=True)
    ours, theirs = api.read_topology(saved_tree), hwloc(os.fspath(saved_tree))
    assert theirs == {
        "PU": {frozenset([cpu]) for cpu in ours.cpus},
        "Core": set(ours.cores),
        "Package": set(ours.packages.values()),
        "NUMANode": {cpus for cpus in ours.nodes.values() if cpus},
        "L3Cache": set(ours.llc),
    }


# Lists of CPUs, and topologies without a host

LISTS = {
    "0": {0}, "0-3": {0, 1, 2, 3}, "0-1,8,10-11\n": {0, 1, 8, 10, 11}, "0-1\n\0\0\0": {0, 1}, " 2 , 4 ": {2, 4},
    "": set(), "\n": set(),
}  # fmt: skip
MASKS = {
    "f": {0, 1, 2, 3}, "00000000,00000001": {0}, "1,00000000": {32}, "00000001,00000000,00000002\0\0": {1, 64},
    "0": set(), "ff00000000000000": set(range(56, 64)),
}  # fmt: skip
NO_LISTS = (
    "x", "3-1", "0-", "-1", "0--3", "0-4294967295", str(api.LIMIT), "9" * 5000, "0-3:2", "٣", "(null)", "1 2", None,
)  # fmt: skip
NO_MASKS = ("g", "0x1", "1,,1", "000000000,1", "-1", "f" * 70_000, "1," * 3000 + "1", None)


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (api.parse_cpulist, {**LISTS, **dict.fromkeys(NO_LISTS)}),
        (api.parse_cpumask, {**MASKS, **dict.fromkeys(NO_MASKS)}),
    ],
)
def test_lists_and_masks_and_what_is_none(parse: Any, texts: dict[str | None, set[int] | None]) -> None:
    assert {text: parse(text) for text in texts} == texts


@given(st.frozensets(st.integers(0, 2000)))
def test_written_and_read_back(numbers: frozenset[int]) -> None:
    assert api.parse_cpulist(api.format_cpulist(numbers)) == numbers


def test_from_host_reads_as_affinity_does(tmp_path: Path) -> None:
    """The name that users have: one CPU, one node, and the driver's own host where it brings one."""
    (tmp_path / "sys/devices/system/cpu/cpu3/topology").mkdir(parents=True)
    host = api.HostTopology.from_host(fsroot=tmp_path, driver=None)
    assert host == api.read_topology(tmp_path)
    assert host.cpus == {3}
