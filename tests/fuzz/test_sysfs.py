"""Trees of sysfs and /proc below SAFE_GPU_FSROOT, with anything in their files: what is malformed counts as missing."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import hostile
from support.hostile import TRICK, assert_plain, bounded, broken_text, examples, refusing, with_examples
from support.vendor_hosts import KfdHost

from safe_gpu.affinity import planner as policies
from safe_gpu.affinity.placement import parse_numa_maps
from safe_gpu.drivers.base import memory_is_node, numa_node
from safe_gpu.drivers.kfd import KfdDriver
from safe_gpu.errors import GPUAffinityError, NoDriverError
from safe_gpu.gpus.devices import bus_order
from safe_gpu.topology.files import Files
from safe_gpu.topology.host import read_topology
from safe_gpu.topology.kfd_topology import devices

Tree = dict[str, str]
DIGITS = "9" * 5000
CPU, NODE, PCI = "sys/devices/system/cpu", "sys/devices/system/node", "sys/bus/pci/devices"

CPUS: Tree = {
    f"{CPU}/online": "0-3",
    f"{NODE}/online": "0-1",
    **{f"{CPU}/cpu{n}/topology/core_cpus_list": f"{n & ~1}-{n | 1}" for n in range(4)},
    **{f"{CPU}/cpu{n}/topology/physical_package_id": str(n // 2) for n in range(4)},
    **{f"{CPU}/cpu{n}/cache/index0/level": "3" for n in range(4)},
    **{f"{CPU}/cpu{n}/cache/index0/shared_cpu_list": f"{n & ~1}-{n | 1}" for n in range(4)},
    **{f"{NODE}/node{n}/cpulist": f"{2 * n}-{2 * n + 1}" for n in range(2)},
    **{f"{NODE}/node{n}/distance": "10 20" if n == 0 else "20 10" for n in range(2)},
    f"{PCI}/0000:07:00.0/vendor": "0x10de",
    f"{PCI}/0000:07:00.0/class": "0x030200",
    f"{PCI}/0000:07:00.0/numa_node": "0",
    f"{PCI}/0000:07:00.0/local_cpulist": "0-1",
    "proc/driver/nvidia/gpus/0000:07:00.0/information": "GPU UUID: \t GPU-00000000-0000-0000-0000-000000000000",
}


def kfd_tree(root: Path) -> Tree:
    """Two GPUs, one in two partitions, and a process with memory and a queue, as files."""
    host = KfdHost(root)
    host.gpu(0x07, 4001, 0x1111)
    host.bank(host.gpu(0x0B, 4002, 0x2222), 64 << 30)
    host.gpu(0x0B, 4003, 0x2222, partition=1)
    host.process(1, queues=(4001,), vram_4001=1 << 30)
    return {str(file.relative_to(root)): file.read_text() for file in root.rglob("*") if file.is_file()}


@st.composite
def broken_tree(draw: Any, tree: Tree) -> Tree:
    """The tree with some files changed or gone; "" with a name that ends in "/" makes a directory in its place."""
    tree = dict(tree)
    for name in draw(st.lists(st.sampled_from(sorted(tree)), max_size=6)):
        change = draw(st.sampled_from(["value", "value", "value", "drop", "directory", "all"]))
        text = tree.pop(name, None)
        if text is None:
            continue
        if change in ("value", "all"):
            broken = draw(broken_text(text, most=2))
            same = [name] if change == "value" else [one for one in tree if one.endswith(name[-9:])]
            tree.update(dict.fromkeys([name, *same], broken))
        elif change == "directory":
            tree[f"{name}/"] = ""
    return tree


def plant(root: Path, tree: Mapping[str, str]) -> None:
    shutil.rmtree(root, ignore_errors=True)
    for name, text in tree.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            path.write_bytes(text.encode("utf-8", "surrogatepass"))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path / "root"))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "kfd")
    return tmp_path / "root"


def changed(tree: Tree, **values: str) -> Tree:
    """The tree with these values in every file whose name ends like this."""
    return {name: next((text for end, text in values.items() if name.endswith(end)), old) for name, old in tree.items()}


def test_a_tree_of_amd_gpus(root: Path, tmp_path: Path) -> None:
    tree = kfd_tree(tmp_path / "valid")

    @with_examples(
        *(changed(tree, **{name: value}) for name, value in (
            ("gpu_id", DIGITS), ("gpu_id", "-1"), ("vram_4001", TRICK * 999), ("vram_4001", "-1"),
            ("properties", f"simd_count {DIGITS}\nlocation_id {'9' * 20}\n"),
            ("properties", "simd_count 4\nlocation_id 1792\n"),
            ("properties", ("simd_count 4\n" + "x" * 64 + " 1\n") * 3000),
        )),
        changed(tree, vram_4001="9" * 20, mem_info_vram_used="9" * 20),
        *({**tree, name: value} for name, value in (
            ("sys/module/amdgpu/version", TRICK * 999), (f"{PCI}/0000:07:00.0/product_name", TRICK),
            (f"{PCI}/0000:07:00.0/product_name", "x" * 70_000),
            (f"sys/class/kfd/kfd/proc/{'9' * 10}/vram_4001", "1"), ("sys/class/kfd/kfd/proc/\x1b[2J/vram_4001", "1"),
        )),
        tree,
        {},
    )  # fmt: skip
    @examples(12)
    @given(broken_tree(tree))
    def attack(files: Tree) -> None:
        plant(root, files)
        with bounded(), refusing() as refused:
            for device in devices(Files(str(root))) or ():
                assert device.uuid.startswith(("GPU-", "AMD-"))
                assert device.broken or (device.bus_id and device.gpu_id)
            driver = KfdDriver()
            snapshot = driver.detailed(driver.linked(driver.snapshot()))
            driver.usage(snapshot.gpus)
            hostile.assert_gpus_shown_safely(snapshot)
            assert all(len(gpu.name) < 100 for gpu in snapshot.gpus)
        assert refused.error is None or isinstance(refused.error, NoDriverError)

    attack()


def test_a_tree_of_cpus(root: Path) -> None:
    @with_examples(
        *((files, "node") for files in (
            CPUS, {}, {**CPUS, f"{NODE}/node{'9' * 40}/cpulist": "0"},
            {**CPUS, f"{CPU}/cpu{'9' * 40}/topology/core_id": "0"},
            *(changed(CPUS, cpulist=text) for text in (
                "0-4294967295", ",".join(map(str, range(70_000))), "0-65535," * 20_000, DIGITS,
            )),
        )),
        *((changed(CPUS, distance=text), "socket") for text in ("10 " * 100_000, DIGITS)),
        (changed(CPUS, physical_package_id=DIGITS), "socket"),
        (changed(CPUS, level=DIGITS), "core-complex"),
        (changed(CPUS, numa_node="-1", local_cpulist=TRICK), "exclusive"),
        (changed(CPUS, information="GPU UUID: GPU-" + "a" * 100_000), "exclusive"),
    )  # fmt: skip
    @examples(12)
    @given(broken_tree(CPUS), st.sampled_from(["node", "socket", "exclusive", "core-complex", "unique_interleaved"]))
    def attack(files: Tree, mode: str) -> None:
        plant(root, files)
        with bounded(), refusing() as refused:
            host = read_topology(root)
            for gpu in host.gpus:
                assert_plain([gpu.uuid, gpu.pci_bus_id])
                assert len(gpu.uuid) < 200
            shares = policies.plan(host, mode=mode)
            assert all(share <= host.cpus for share in shares)
        assert refused.error is None or isinstance(refused.error, GPUAffinityError)

    attack()


MAPS = "7f1200000000 default file=/usr/lib/x mapped=4 N0=4 kernelpagesize_kB=4\n7f1300000000 bind:0-1 anon=9 N1=9\n"


@with_examples(
    MAPS,
    f"7f12 default N{DIGITS}={DIGITS}",
    f"7f12 bind:{DIGITS} N0=1",
    f"7f12 default N0=1 kernelpagesize_kB={DIGITS}",
)
@examples(30)
@given(broken_text(MAPS))
def test_the_maps_of_a_process(text: str) -> None:
    with bounded():
        maps = parse_numa_maps(text.encode("utf-8", "replace").splitlines(keepends=True))
    if maps:
        assert_plain([maps["policy"]])
        assert len(maps["memory"]) <= text.count("=")


@with_examples("../../../../../etc/passwd", "0000:07:00.0\x00", "\ud800:0:0", "0" * 100_000 + ":0:0", " 1_0:+7:0.0")
@examples(30)
@given(st.text(max_size=30) | broken_text("0000:07:00.0"))
def test_the_address_of_a_device(bus_id: str) -> None:
    with bounded():
        place = bus_order(bus_id)
        numa_node(bus_id)
        memory_is_node(bus_id)
    assert place is None or len(place) == 4


def test_no_fifo_in_a_tree_blocks(root: Path, tmp_path: Path) -> None:
    """A saved tree may be anybody's."""
    plant(root, {**CPUS, **kfd_tree(tmp_path / "valid")})
    for name in [file for file in root.rglob("*") if file.is_file()]:
        name.unlink()
        os.mkfifo(name)
    with bounded(), refusing():
        read_topology(root)
    with bounded(), refusing():
        KfdDriver().snapshot()
