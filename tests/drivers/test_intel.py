"""Intel GPUs by saved sysfs trees, and their processes by fdinfo."""

from pathlib import Path
from typing import Any

import pytest
from support.vendor_hosts import GIB, IntelHost

from safe_gpu.cli.commands import main
from safe_gpu.drivers import open_driver, open_drivers
from safe_gpu.drivers.intel import PRIVATE, parse_client
from safe_gpu.errors import NoDriverError
from safe_gpu.gpus.devices import vendor_of
from safe_gpu.selection.request import Selection
from safe_gpu.selection.verdicts import judge

ONE, TWO = "0000:18:00.0", "0000:42:00.0"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IntelHost:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    return IntelHost(tmp_path)


def test_cards_are_listed_in_bus_order(host: IntelHost) -> None:
    host.gpu("0000:42:00.0", 0x56A0, driver="i915", memory=16 * GIB)
    host.gpu("0000:00:02.0", 0x46A6, driver="i915")  # integrated
    host.gpu("0000:18:00.0", 0x0BD5, tiles=2, memory=128 * GIB)
    host.gpu("0000:99:00.0", 0x1234, driver="i915", tiles=2)
    host.gpu("0000:50:00.0", driver="vfio-pci")
    host.gpu("0000:51:00.0")
    (host.root / "dev/dri/renderD133").unlink()  # as in a container that was not given it
    snapshot = open_driver("intel").snapshot()
    assert [(gpu.index, gpu.uuid, gpu.name, gpu.tiles, gpu.memory_total) for gpu in snapshot.gpus] == [
        (1, "INTEL-0000:18:00.0", "Intel Data Center GPU Max 1550", 2, 128 * GIB),
        (2, "INTEL-0000:42:00.0", "Intel Arc A770", 1, 16 * GIB),
        (3, "INTEL-0000:99:00.0", "Intel GPU 1234", 2, None),
    ]
    assert {(gpu.vendor, gpu.numa_node, gpu.processes, gpu.processes_private) for gpu in snapshot.gpus} == {
        ("intel", 1, (), False)
    }
    assert [vendor_of(gpu.uuid) for gpu in snapshot.gpus] == ["intel"] * 3


def test_who_is_on_a_card(host: IntelHost) -> None:
    host.gpu(ONE, memory=GIB)
    host.gpu(TWO, memory=GIB)
    host.client(11, ONE, "drm-resident-vram0:\t64 MiB", "drm-total-vram0:\t1 GiB", "drm-resident-system:\t9 GiB")
    host.client(11, ONE, "drm-resident-vram0:\t64 MiB", number=6)  # the same client again
    host.client(11, ONE, "drm-resident-vram0:\t1 KiB", number=7, identity=2)
    host.client(12, ONE, "drm-resident-vram0:\t0", "drm-resident-system:\t1 MiB")
    host.client(13, "0000:03:00.0", "drm-resident-vram0:\t1 MiB", driver="amdgpu")
    one, two = open_driver("intel").snapshot().gpus
    assert [(process.pid, process.memory_used) for process in one.processes or ()] == [(11, (64 << 20) + 1024)]
    assert (one.memory_used, one.memory_free) == ((64 << 20) + 1024, GIB - (64 << 20) - 1024)
    assert (two.processes, two.memory_used) == ((), 0)
    host.client(4_000_014, TWO, driver="i915")  # a kernel that does not tell memory
    two = open_driver("intel").usage([two])[0]
    assert [(process.pid, process.memory_used) for process in two.processes or ()] == [(4_000_014, None)]
    assert two.memory_used is None


def test_processes_of_other_users_are_not_known(host: IntelHost, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    host.gpu(ONE, memory=GIB)
    host.gpu(TWO, memory=GIB)
    host.private(1)
    monkeypatch.setenv("SAFE_GPU_DRIVER", "intel")
    host.client(11, ONE, "drm-resident-vram0:\t1 MiB")
    snapshot = open_driver("intel").snapshot()
    assert {(gpu.processes_private, gpu.process_error, gpu.memory_used) for gpu in snapshot.gpus} == {
        (True, PRIVATE, None)
    }
    verdicts = judge(snapshot, Selection(), claimed={})
    assert [verdict.state for verdict in verdicts] == ["busy", "free"]
    main(["doctor"])
    assert "processes of other users on Intel" in " ".join(capsys.readouterr().out.split())


def test_a_client_of_drm() -> None:
    for text, client in (
        (
            "drm-driver: xe\ndrm-pdev: 0000:03:00.0\ndrm-client-id: 7\ndrm-total-vram0: 4096",
            ("0000:03:00.0", "7", 4096),
        ),
        ("drm-driver: i915\ndrm-pdev: 0000:03:00.0\ndrm-resident-local0: 2 KiB\n", ("0000:03:00.0", "", 2048)),
        ("drm-driver: xe\ndrm-pdev: ../../etc\n", None),
        ("drm-driver: amdgpu\ndrm-pdev: 0000:03:00.0\n", None),
    ):
        assert parse_client(text) == client


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_FSROOT", str(tmp_path))
    with pytest.raises(NoDriverError, match="the Intel GPU driver is not loaded"):
        open_driver("intel")


def test_the_driver_of_a_host_without_other_gpus(host: IntelHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.gpu(ONE)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(host.root))
    monkeypatch.setenv("PATH", str(host.root))
    monkeypatch.setattr("safe_gpu.drivers.nvml.why_missing", lambda: "it is not installed")
    monkeypatch.setenv("SAFE_GPU_DRIVER", "auto")
    assert open_driver().name == open_driver(vendor="intel").name == "intel"
    assert [driver.name for driver in open_drivers()[0]] == ["intel"]
