"""GPUs of AMD and Intel, read from saved sysfs trees, with their processes."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.processes import ALL_ARE_SEEN
from support.vendor_hosts import GIB, IntelHost, KfdHost

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


def gpus() -> tuple[api.Gpu, ...]:
    return api.KfdDriver().snapshot().gpus


def free() -> list[int]:
    snapshot = api.KfdDriver().snapshot()
    return [verdict.gpu.index for verdict in api.judge(snapshot, api.Selection()) if verdict.free]


def test_gpus_stand_in_the_order_of_rocr(three: KfdHost) -> None:
    snapshot = api.open_driver("kfd").snapshot()
    assert (snapshot.driver, snapshot.driver_version) == ("kfd", f"Linux {os.uname().release}")
    assert [(gpu.index, gpu.uuid, gpu.pci_bus_id, gpu.numa_node) for gpu in snapshot.gpus] == [
        (0, "GPU-2c5f51a30d4f9e01", "0000:c3:00.0", 0),
        (1, "GPU-91b2000000000002", "0000:23:00.0", 1),
        (2, "GPU-0000000000ab0003", "0000:63:00.0", 0),
    ]
    first = snapshot.gpus[0]
    assert (first.memory_total, first.memory_used, first.memory_free) == (64 * GIB, 10 << 20, 64 * GIB - (10 << 20))
    assert (first.processes, first.unusable, first.display_active) == ((), None, False)
    assert free() == [0, 1, 2]
    # The module may tell its version and a board its name.
    (three.root / "sys/module/amdgpu").mkdir(parents=True)
    (three.root / "sys/module/amdgpu/version").write_text("6.10.5\n")
    (three.pci / "0000:c3:00.0/product_name").write_text("AMD INSTINCT MI210 PCIe\n")
    three.gpu(0xE3, 44, 4, device_id=0x1234, gfx_target_version=90402)
    snapshot = api.KfdDriver().snapshot()
    assert snapshot.driver_version == "6.10.5"
    names = ["AMD INSTINCT MI210 PCIe", "AMD Instinct MI210", "AMD Instinct MI210", "AMD GPU gfx942"]
    assert [gpu.name for gpu in snapshot.gpus] == names


def test_the_memory_of_a_process_that_starts_meanwhile_is_not_that_of_nobody(three: KfdHost, monkeypatch: Any) -> None:
    names = api.Files.names

    def and_then_it_starts(files: api.Files, path: str) -> list[str]:
        answered = names(files, path)
        if path.endswith("kfd/proc"):
            (three.pci / "0000:23:00.0/mem_info_vram_used").write_text(f"{1 << 30}\n")
            three.process(HIDDEN, vram_22=1 << 30)
        return answered

    monkeypatch.setattr(api.Files, "names", and_then_it_starts)
    assert [gpu.unexplained_memory for gpu in gpus()] == [10 << 20] * 3


def test_queues_and_further_contexts_count(three: KfdHost) -> None:
    three.process(os.getpid())  # it has only enumerated them
    assert free() == [0, 1, 2]
    three.process(HIDDEN, vram_11=1 << 20)
    three.process(HIDDEN, context=0, vram_11=2 << 20, vram_22=4 << 20)
    three.process(HIDDEN, context=1, queues=(33,))
    used = (3 << 20, 4 << 20, 0)
    expected = [api.GpuProcess(HIDDEN, memory_used=memory, ended=ALL_ARE_SEEN) for memory in used]
    assert [gpu.processes for gpu in gpus()] == [(process,) for process in expected]
    assert free() == []


def test_a_number_of_another_namespace_is_known_by_the_device(three: KfdHost, child: Any) -> None:
    (three.root / "dev").mkdir()
    (three.root / "dev/kfd").touch()
    three.process(child("listen()").pid, vram_11=1 << 20)  # it has no /dev/kfd open
    assert [process.elsewhere for process in gpus()[0].processes or ()] == [True]
    assert free() == [1, 2]


def test_a_process_list_that_cannot_be_read(three: KfdHost) -> None:
    """A process that ends meanwhile is none; a kernel without a list tells nothing."""
    memory = three.process(HIDDEN) / "vram_22"
    for content in ("", "x", "-1", "1 2", "9" * 30):
        memory.write_text(content)
        assert gpus()[1].processes is None
        assert str(HIDDEN) in gpus()[1].process_error
        assert free() == [0, 2]
    memory.unlink()
    assert free() == [0, 1, 2]
    shutil.rmtree(three.kfd / "proc")
    assert all(gpu.processes is None and "kfd/proc" in gpu.process_error for gpu in gpus())
    assert free() == []


@pytest.mark.parametrize("in_function", [False, True])
def test_partitions_share_a_bus_id(host: KfdHost, in_function: bool) -> None:
    """MI300X in CPX mode; the first such kernels wrote the partition in place of the function."""
    for number in range(8):
        place = {"location_id": 0x05 << 8 | number} if in_function else {}
        node = host.gpu(0x05, 100 + number, 0xA0 + number, used=300 << 20, partition=number, **place)
        host.bank(node, 24 * GIB)
    found = gpus()
    assert [(gpu.index, gpu.uuid) for gpu in found] == [(number, f"GPU-00000000000000a{number}") for number in range(8)]
    assert {(gpu.pci_bus_id, gpu.memory_total, gpu.mode) for gpu in found} == {("0000:05:00.0", 24 * GIB, "8")}
    host.process(HIDDEN, vram_103=2 * GIB)
    used = host.pci / "0000:05:00.0/mem_info_vram_used"
    used.write_text(f"{2 * GIB + (300 << 20)}\n")
    assert free() == [0, 1, 2, 4, 5, 6, 7]
    assert [gpu.memory_used for gpu in gpus()][2:4] == [300 << 20, 2 * GIB + (300 << 20)]
    used.write_text(f"{5 * GIB}\n")
    assert free() == [], "memory of nobody may be on any of them"


def test_partitions_with_one_unique_id(host: KfdHost) -> None:
    """Or with none; and two nodes with one place."""
    for number, unique_id in enumerate((0, 0xABC)):
        for partition in range(2):
            host.gpu(0x05 + number, 100 + partition, unique_id, partition=partition)
    for gpu_id in (1, 2):
        host.gpu(0x03, gpu_id, 0)
    uuids = [gpu.uuid for gpu in gpus()]
    assert uuids[:4] == [f"AMD-0000:0{bus}:00.0-{partition}" for bus in (5, 6) for partition in (0, 1)]
    assert len(set(uuids)) == 6
    assert free() == [0, 1, 2, 3]


def test_a_node_that_a_cgroup_hides_is_not_counted(three: KfdHost, monkeypatch: pytest.MonkeyPatch) -> None:
    read = api.Files.read

    def refused(self: api.Files, path: str) -> str:
        if path.endswith(("nodes/2/gpu_id", "nodes/2/properties")):
            raise PermissionError(1, "Operation not permitted", path)
        return read(self, path)

    monkeypatch.setattr(api.Files, "read", refused)
    assert [(gpu.index, gpu.pci_bus_id) for gpu in gpus()] == [(0, "0000:23:00.0"), (1, "0000:63:00.0")]


def test_what_is_asked_for_later(three: KfdHost) -> None:
    """The display, links by xGMI, which connects a hive, and what people look at."""
    second = three.pci / "0000:23:00.0"
    (second / "gpu_busy_percent").write_text("87\n")
    (three.pci / "0000:63:00.0/gpu_busy_percent").write_text("65535\n")
    connector = second / "drm/card1/card1-HDMI-A-1"
    connector.mkdir(parents=True)
    (connector / "enabled").write_text("enabled\n")
    driver = api.KfdDriver()
    gpus = driver.detailed(driver.linked(driver.snapshot())).gpus
    assert [gpu.display_active for gpu in gpus] == [False, True, False]
    assert [gpu.nvlink_peers for gpu in gpus] == [{gpus[1].uuid}, {gpus[0].uuid}, frozenset()]
    assert [gpu.utilization for gpu in gpus] == [0, 87, None]


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    for name, words in (("kfd", "amdgpu"), ("intel", "the Intel GPU driver is not loaded")):
        with pytest.raises(api.NoDriverError, match=words):
            api.open_driver(name)


@pytest.mark.parametrize("name", ["gpu_id", "properties"])
def test_a_malformed_node_keeps_its_number_and_cannot_be_claimed(three: KfdHost, name: str) -> None:
    too_large = f"simd_count 440\nlocation_id {1 << 32}\n"
    for content in ("", "\0\0", "simd_count", "simd_count -1\nlocation_id x\n", too_large, "é\ud800", "4" * 100):
        (three.kfd / "topology/nodes/3" / name).write_bytes(content.encode("utf-8", "surrogatepass"))
        found = gpus()
        assert [gpu.index for gpu in found] == [0, 1, 2]
        assert "incompletely" in (found[1].unusable or "")
        assert free() == [0, 2]


# Intel

ONE, TWO = "0000:18:00.0", "0000:42:00.0"


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IntelHost:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    return IntelHost(tmp_path)


def test_cards_are_listed_in_bus_order(cards: IntelHost) -> None:
    cards.gpu("0000:42:00.0", 0x56A0, driver="i915", memory=16 * GIB)
    cards.gpu("0000:00:02.0", 0x46A6, driver="i915")  # integrated
    cards.gpu("0000:18:00.0", 0x0BD5, tiles=2, memory=128 * GIB)
    cards.gpu("0000:99:00.0", 0x1234, driver="i915", tiles=2)
    cards.gpu("0000:50:00.0", driver="vfio-pci")
    cards.gpu("0000:51:00.0")
    (cards.root / "dev/dri/renderD133").unlink()  # as in a container that was not given it
    snapshot = api.open_driver("intel").snapshot()
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.tiles, gpu.memory_total) for gpu in snapshot.gpus] == [
        (1, "INTEL-0000:18:00.0", "Intel Data Center GPU Max 1550", 2, 128 * GIB),
        (2, "INTEL-0000:42:00.0", "Intel Arc A770", 1, 16 * GIB),
        (3, "INTEL-0000:99:00.0", "Intel GPU 1234", 2, None),
    ]
    assert {(gpu.vendor, gpu.numa_node, gpu.processes, gpu.processes_private) for gpu in snapshot.gpus} == {
        ("intel", 1, (), False)
    }


def test_a_simulated_card_reports_no_more_than_a_real_one(cards: IntelHost) -> None:
    cards.gpu("0000:03:00.0", memory=16 * GIB)
    driver = api.IntelDriver()
    (real,) = driver.detailed(driver.snapshot()).gpus
    simulated, *_ = api.find_preset("arc-a770").gpus
    unknown = {field for field in api.Gpu._fields if getattr(real, field) is None}
    assert {"utilization", "temperature"} <= unknown
    assert [field for field in unknown if getattr(simulated, field) is not None] == []


def test_who_is_on_a_card(cards: IntelHost) -> None:
    cards.gpu(ONE, memory=GIB)
    cards.gpu(TWO, memory=GIB)
    cards.client(11, ONE, "drm-resident-vram0:\t64 MiB", "drm-total-vram0:\t1 GiB", "drm-resident-system:\t9 GiB")
    cards.client(11, ONE, "drm-resident-vram0:\t64 MiB", number=6)  # the same client again
    cards.client(11, ONE, "drm-resident-vram0:\t1 KiB", number=7, identity=2)
    cards.client(12, ONE, "drm-resident-vram0:\t0", "drm-resident-system:\t1 MiB")
    cards.client(13, "0000:03:00.0", "drm-resident-vram0:\t1 MiB", driver="amdgpu")
    one, two = api.open_driver("intel").snapshot().gpus
    assert [(process.pid, process.memory_used) for process in one.processes or ()] == [(11, (64 << 20) + 1024)]
    assert (one.memory_used, one.memory_free) == ((64 << 20) + 1024, GIB - (64 << 20) - 1024)
    assert (two.processes, two.memory_used) == ((), 0)
    cards.client(4_000_014, TWO, driver="i915")  # a kernel that does not tell memory
    two = api.open_driver("intel").usage([two])[0]
    assert [(process.pid, process.memory_used) for process in two.processes or ()] == [(4_000_014, None)]
    assert two.memory_used is None


def test_processes_of_other_users_are_not_known(cards: IntelHost, monkeypatch: Any, capsys: Any) -> None:
    for bus_id in (ONE, TWO):
        cards.gpu(bus_id, memory=GIB)
    cards.private(1)
    cards.client(11, ONE, "drm-resident-vram0:\t1 MiB")
    monkeypatch.setenv("SAFE_GPU_DRIVER", "intel")
    snapshot = api.open_driver("intel").snapshot()
    assert {(gpu.processes_private, gpu.process_error) for gpu in snapshot.gpus} == {(True, api.PRIVATE)}
    assert [gpu.memory_used for gpu in snapshot.gpus] == [None, None]
    assert [verdict.state for verdict in api.judge(snapshot, api.Selection())] == ["busy", "free"]
    api.main(["doctor"])
    assert "processes of other users on Intel" in " ".join(capsys.readouterr().out.split())


def test_a_client_of_drm() -> None:
    place = "drm-pdev: 0000:03:00.0\n"
    for text, client in (
        (f"drm-driver: xe\n{place}drm-client-id: 7\ndrm-total-vram0: 4096", ("0000:03:00.0", "7", 4096)),
        (f"drm-driver: i915\n{place}drm-resident-local0: 2 KiB\n", ("0000:03:00.0", "", 2048)),
        ("drm-driver: xe\ndrm-pdev: ../../etc\n", None),
    ):
        assert api.parse_client(text) == client


def test_the_driver_of_a_host_without_other_gpus(cards: IntelHost, monkeypatch: pytest.MonkeyPatch) -> None:
    cards.gpu(ONE)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cards.root))
    monkeypatch.setenv("PATH", str(cards.root))
    monkeypatch.setattr("safe_gpu.drivers.nvml_calls.why_missing", lambda: "it is not installed")
    monkeypatch.setenv("SAFE_GPU_DRIVER", "auto")
    assert api.open_driver().name == api.open_driver(vendor="intel").name == "intel"
    assert [driver.name for driver in api.open_drivers()[0]] == ["intel"]
