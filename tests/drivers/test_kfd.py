"""AMD GPUs read from saved sysfs trees."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.vendor_hosts import GIB, KfdHost

from safe_gpu.drivers import open_driver
from safe_gpu.drivers.kfd import KfdDriver
from safe_gpu.errors import NoDriverError
from safe_gpu.gpus.devices import Gpu, GpuProcess
from safe_gpu.selection.request import Selection
from safe_gpu.selection.verdicts import judge
from safe_gpu.topology.files import Files

HIDDEN = 4_000_000  # above every pid that Linux gives
MI210, SECOND, THIRD = 0x2C5F_51A3_0D4F_9E01, 0x91B2_0000_0000_0002, 0x0000_0000_00AB_0003


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KfdHost:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    return KfdHost(tmp_path)


@pytest.fixture
def three(host: KfdHost) -> KfdHost:
    """Three MI210, whose order is not that of the bus ids."""
    host.gpu(0xC3, 11, MI210, device_id=0x740F, hive_id=5)
    host.gpu(0x23, 22, SECOND, device_id=0x740F, numa_node=1, hive_id=5)
    host.gpu(0x63, 33, THIRD, device_id=0x740F)
    return host


def gpus() -> tuple[Gpu, ...]:
    return KfdDriver().snapshot().gpus


def free() -> list[int]:
    snapshot = KfdDriver().snapshot()
    return [verdict.gpu.index for verdict in judge(snapshot, Selection(), claimed={}) if verdict.free]


def test_gpus_stand_in_the_order_of_rocr(three: KfdHost) -> None:
    snapshot = open_driver("kfd").snapshot()
    assert snapshot.driver == "kfd"
    assert snapshot.driver_version == f"Linux {os.uname().release}"
    assert [(gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.numa_node) for gpu in snapshot.gpus] == [
        (0, "GPU-2c5f51a30d4f9e01", "0000:c3:00.0", 0),
        (1, "GPU-91b2000000000002", "0000:23:00.0", 1),
        (2, "GPU-0000000000ab0003", "0000:63:00.0", 0),
    ]
    first = snapshot.gpus[0]
    assert first.name == "AMD Instinct MI210"
    assert (first.memory_total, first.memory_used, first.memory_free) == (64 * GIB, 10 << 20, 64 * GIB - (10 << 20))
    assert (first.processes, first.unusable, first.display_active) == ((), None, False)
    assert free() == [0, 1, 2]


def test_the_module_tells_its_version_and_the_board_its_name(three: KfdHost) -> None:
    (three.root / "sys/module/amdgpu").mkdir(parents=True)
    (three.root / "sys/module/amdgpu/version").write_text("6.10.5\n")
    (three.pci / "0000:c3:00.0/product_name").write_text("AMD INSTINCT MI210 PCIe\n")
    (three.pci / "0000:23:00.0/product_name").write_text("\n")
    assert KfdDriver().snapshot().driver_version == "6.10.5"
    three.gpu(0xE3, 44, 4, device_id=0x1234, gfx_target_version=90402)
    names = [gpu.name for gpu in gpus()]
    assert names == ["AMD INSTINCT MI210 PCIe", "AMD Instinct MI210", "AMD Instinct MI210", "AMD GPU gfx942"]


def test_the_memory_of_a_process_that_starts_meanwhile_is_not_that_of_nobody(three: KfdHost, monkeypatch: Any) -> None:
    names = Files.names

    def and_then_it_starts(files: Files, path: str) -> list[str]:
        answered = names(files, path)
        if path.endswith("kfd/proc"):
            (three.pci / "0000:23:00.0/mem_info_vram_used").write_text(f"{1 << 30}\n")
            three.process(HIDDEN, vram_22=1 << 30)
        return answered

    monkeypatch.setattr(Files, "names", and_then_it_starts)
    assert [gpu.unexplained_memory for gpu in gpus()] == [10 << 20] * 3


def test_queues_and_further_contexts_count(three: KfdHost) -> None:
    three.process(os.getpid())  # it has only enumerated them
    assert free() == [0, 1, 2]
    three.process(HIDDEN, vram_11=1 << 20)
    three.process(HIDDEN, context=0, vram_11=2 << 20, vram_22=4 << 20)
    three.process(HIDDEN, context=1, queues=(33,))
    assert [gpu.processes for gpu in gpus()] == [
        (GpuProcess(HIDDEN, memory_used=3 << 20),),
        (GpuProcess(HIDDEN, memory_used=4 << 20),),
        (GpuProcess(HIDDEN, memory_used=0),),
    ]
    assert free() == []


def test_a_number_of_another_namespace_is_known_by_the_device(three: KfdHost) -> None:
    (three.root / "dev").mkdir()
    (three.root / "dev/kfd").touch()
    with subprocess.Popen(["sleep", "60"]) as other:  # has no /dev/kfd open
        three.process(other.pid, vram_11=1 << 20)
        (process,) = gpus()[0].processes or ()
        assert process.elsewhere
        assert free() == [1, 2]
        other.kill()


@pytest.mark.parametrize("content", ["", "x", "-1", "1 2", "9" * 30])
def test_a_process_list_that_cannot_be_read(three: KfdHost, content: str) -> None:
    (three.process(HIDDEN) / "vram_22").write_text(content)
    assert gpus()[1].processes is None
    assert str(HIDDEN) in gpus()[1].process_error
    assert free() == [0, 2]


def test_a_process_that_ends_meanwhile(three: KfdHost) -> None:
    (three.process(HIDDEN) / "vram_22").unlink()
    assert free() == [0, 1, 2]


def test_a_kernel_without_a_process_list(three: KfdHost) -> None:
    shutil.rmtree(three.kfd / "proc")
    assert all(gpu.processes is None and "kfd/proc" in gpu.process_error for gpu in gpus())
    assert free() == []


@pytest.mark.parametrize("in_function", [False, True])
def test_partitions_share_a_bus_id(host: KfdHost, in_function: bool) -> None:
    """MI300X in CPX mode; the first such kernels wrote the partition in place of the function."""
    for partition in range(8):
        place = {"location_id": 0x05 << 8 | partition} if in_function else {}
        node = host.gpu(0x05, 100 + partition, 0xA0 + partition, memory=192 * GIB, used=300 << 20, device_id=0x74A1,
                        partition=partition, **place)  # fmt: skip
        host.bank(node, 24 * GIB)
    found = gpus()
    assert [gpu.uuid for gpu in found] == [f"GPU-00000000000000a{partition}" for partition in range(8)]
    assert {gpu.pci_bus_id for gpu in found} == {"0000:05:00.0"}
    assert {gpu.memory_total for gpu in found} == {24 * GIB}
    assert [gpu.index for gpu in found] == list(range(8))
    host.process(HIDDEN, vram_103=2 * GIB)
    (host.pci / "0000:05:00.0/mem_info_vram_used").write_text(f"{2 * GIB + (300 << 20)}\n")
    assert free() == [0, 1, 2, 4, 5, 6, 7]
    assert [gpu.memory_used for gpu in gpus()][2:4] == [300 << 20, 2 * GIB + (300 << 20)]
    (host.pci / "0000:05:00.0/mem_info_vram_used").write_text(f"{5 * GIB}\n")
    assert free() == [], "memory of nobody may be on any of them"


@pytest.mark.parametrize("unique_id", [0, 0xABC])
def test_partitions_with_one_unique_id(host: KfdHost, unique_id: int) -> None:
    for partition in range(2):
        host.gpu(0x05, 100 + partition, unique_id, partition=partition)
    host.gpu(0x06, 8, MI210)
    assert [gpu.uuid for gpu in gpus()] == ["AMD-0000:05:00.0-0", "AMD-0000:05:00.0-1", "GPU-2c5f51a30d4f9e01"]


def test_a_node_that_a_cgroup_hides_is_not_counted(three: KfdHost, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Files.read

    def refused(self: Files, path: str) -> str:
        if path.endswith(("nodes/2/gpu_id", "nodes/2/properties")):
            raise PermissionError(1, "Operation not permitted", path)
        return read(self, path)

    monkeypatch.setattr(Files, "read", refused)
    assert [(gpu.index, gpu.pci_bus_id) for gpu in gpus()] == [(0, "0000:23:00.0"), (1, "0000:63:00.0")]


def test_what_is_asked_for_later(three: KfdHost) -> None:
    """The display, links by xGMI, which connects a hive, and what people look at."""
    second = three.pci / "0000:23:00.0"
    (second / "gpu_busy_percent").write_text("87\n")
    (three.pci / "0000:63:00.0/gpu_busy_percent").write_text("65535\n")
    connector = second / "drm/card1/card1-HDMI-A-1"
    connector.mkdir(parents=True)
    (connector / "enabled").write_text("enabled\n")
    driver = KfdDriver()
    gpus = driver.detailed(driver.linked(driver.snapshot())).gpus
    assert [gpu.display_active for gpu in gpus] == [False, True, False]
    assert [gpu.nvlink_peers for gpu in gpus] == [{gpus[1].uuid}, {gpus[0].uuid}, frozenset()]
    assert [gpu.utilization for gpu in gpus] == [0, 87, None]


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    with pytest.raises(NoDriverError, match="amdgpu"):
        open_driver("kfd")


@pytest.mark.parametrize("name", ["gpu_id", "properties"])
@pytest.mark.parametrize("content", ["", "\0\0", "simd_count", "simd_count -1\nlocation_id x\n", "é\ud800", "4" * 100])
def test_a_malformed_node_keeps_its_number_and_cannot_be_claimed(three: KfdHost, name: str, content: str) -> None:
    file = three.kfd / "topology/nodes/3" / name
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    found = gpus()
    assert [gpu.index for gpu in found] == [0, 1, 2]
    assert "incompletely" in (found[1].unusable or "")
    assert free() == [0, 2]


@pytest.mark.parametrize("value", [1 << 32, 1 << 63, 10**19])
@pytest.mark.parametrize("name", ["location_id", "domain"])
def test_a_place_out_of_range(host: KfdHost, name: str, value: int) -> None:
    host.gpu(0x03, 1, MI210, **{name: value})
    assert [gpu.unusable is None for gpu in gpus()] == [False]


def test_two_nodes_with_one_place(host: KfdHost) -> None:
    for gpu_id in (1, 2):
        host.gpu(0x03, gpu_id, 0)
    assert len({gpu.uuid for gpu in gpus()}) == 2
    assert free() == []
