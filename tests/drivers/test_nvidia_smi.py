"""The nvidia-smi driver against a program that answers as the real one does on good and bad days."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from safe_gpu.devices import ComputeMode
from safe_gpu.drivers.nvidia_smi import NvidiaSmiDriver
from safe_gpu.errors import NoDriverError

HIDDEN = 4_000_000


@pytest.fixture
def host(fake_gpus: Any, fake_nvidia_smi: Any) -> Any:
    fake_gpus.set(2)
    fake_gpus.quirks = lambda **values: fake_nvidia_smi(values)
    return fake_gpus


@pytest.fixture
def driver(host: Any) -> Iterator[NvidiaSmiDriver]:
    return NvidiaSmiDriver()


def test_all_fields(host: Any, driver: NvidiaSmiDriver) -> None:
    host.write({"bus": "00000000:C1:00.0", "util": 12, "mode": 3, "display": 1}, {"bus": "00000000:0A:00.0", "mode": 2})
    host.process(host.uuids[0], os.getpid(), 3 << 20)
    host.process(host.uuids[0], HIDDEN, None, static=True)
    snapshot = driver.snapshot()
    first, second = snapshot.gpus
    assert [gpu.uuid for gpu in snapshot.gpus] == host.uuids[::-1]
    assert (snapshot.driver, snapshot.driver_version) == ("nvidia-smi", "550.54.15")
    assert (first.index, first.compute_mode, first.pci_bus_id) == (0, ComputeMode.PROHIBITED, "0000:0a:00.0")
    assert (second.utilization, second.display_active) == (12, True)
    assert second.compute_mode == ComputeMode.EXCLUSIVE_PROCESS
    assert (second.memory_total, second.memory_used) == (80 << 30, 3 << 20)
    assert second.processes is not None
    listed = {process.pid: (process.memory_used, process.name) for process in second.processes}
    assert set(listed) == {os.getpid(), HIDDEN}
    assert listed[os.getpid()][0] == 3 << 20
    assert listed[os.getpid()][1]
    assert listed[HIDDEN] == (None, None)


@pytest.mark.parametrize(
    "value", ["[N/A]", "[Not Supported]", "[Unknown Error]", "N/A", "ERR!", "[Insufficient Permissions]"]
)
def test_values_that_are_none(host: Any, driver: NvidiaSmiDriver, value: str) -> None:
    fields = ("memory.total", "memory.used", "memory.free", "utilization.gpu", "compute_mode", "display_active")
    host.quirks(**dict.fromkeys((*fields, "mig.mode.current", "driver_version"), value))
    snapshot = driver.snapshot()
    gpu = snapshot.gpus[0]
    assert (gpu.memory_total, gpu.memory_used, gpu.memory_free, gpu.utilization) == (None, None, None, None)
    assert (gpu.compute_mode, gpu.display_active, gpu.mig_enabled) == (ComputeMode.DEFAULT, False, False)
    assert (gpu.uuid, gpu.processes, gpu.unusable, gpu.lost) == (host.uuids[0], (), None, False)
    assert snapshot.driver_version == ""


def test_extra_lines_and_units(host: Any, driver: NvidiaSmiDriver) -> None:
    host.process(host.uuids[1], HIDDEN, 5 << 20, static=True)
    host.quirks(
        before="WARNING: infoROM is corrupted at gpu 0000:0F:00.0\\nHinweis: Grafikkarte, Speicher, und so weiter",
        after="\\nWARNING: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve",
        units=1,
    )
    gpus = driver.snapshot().gpus
    assert [gpu.uuid for gpu in gpus] == host.uuids
    assert gpus[0].processes == ()
    assert [(process.pid, process.memory_used) for process in gpus[1].processes or ()] == [(HIDDEN, 5 << 20)]


def test_commas_in_names(host: Any, driver: NvidiaSmiDriver) -> None:
    host.process(host.uuids[0], HIDDEN, static=True)
    host.quirks(process_name="python train.py --gpus 0, 1, 2", name="Graphics Device, 8 GB")
    gpu = driver.snapshot().gpus[0]
    assert gpu.name == "Graphics Device, 8 GB"
    assert [process.name for process in gpu.processes or ()] == ["python train.py --gpus 0, 1, 2"]


@pytest.mark.parametrize(
    "lacking", ["mig.mode.current", "mig.mode.current,display_active,driver_version", "compute_mode,memory.free,name"]
)
def test_old_versions_lack_fields(host: Any, driver: NvidiaSmiDriver, lacking: str) -> None:
    host.quirks(version_lacks=lacking)
    for _ in range(2):
        gpus = driver.snapshot().gpus
        assert [gpu.uuid for gpu in gpus] == host.uuids
        assert gpus[0].memory_total == 80 << 30
        assert gpus[0].processes == ()


@pytest.mark.parametrize(
    "says",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        "Failed to initialize NVML: Driver/library version mismatch\\nNVML library version: 550.54",
        "something else altogether",
    ],
)
def test_a_driver_that_does_not_work(host: Any, driver: NvidiaSmiDriver, says: str) -> None:
    host.quirks(fail="gpu", says=says, status=9)
    with pytest.raises(NoDriverError) as caught:
        driver.snapshot()
    assert says.split("\\n")[0] in str(caught.value)
    assert caught.value.driver == "nvidia-smi"


def test_silence_is_no_answer(host: Any, driver: NvidiaSmiDriver) -> None:
    host.quirks(fail="gpu", says="", status=9)
    with pytest.raises(NoDriverError, match="exit status 9"):
        driver.snapshot()


def test_no_gpu_in_spite_of_a_driver(host: Any, driver: NvidiaSmiDriver) -> None:
    host.set(0)
    assert driver.snapshot().gpus == ()


def test_a_lost_gpu_keeps_its_place_and_identity(host: Any, driver: NvidiaSmiDriver) -> None:
    before = driver.snapshot().gpus
    host.change(0, lost=1)
    lost, other = driver.snapshot().gpus
    assert (lost.index, lost.uuid, lost.name, lost.pci_bus_id, lost.lost) == (
        0,
        before[0].uuid,
        before[0].name,
        before[0].pci_bus_id,
        True,
    )
    assert lost.unusable
    assert "GPU is lost" in lost.unusable
    assert lost.processes is None
    assert other == before[1]
    assert NvidiaSmiDriver().snapshot().gpus[0].lost, "also when it was never seen alive"


@pytest.mark.parametrize("text", ["[GPU is lost]", "[GPU requires reset]"])
def test_values_that_say_lost(host: Any, driver: NvidiaSmiDriver, text: str) -> None:
    host.quirks(**{"memory.used": text})
    assert [gpu.lost for gpu in driver.snapshot().gpus] == [True, True]
    host.quirks(uuid=text)
    assert [gpu.uuid for gpu in driver.snapshot().gpus] == host.uuids, "remembered"


@pytest.mark.parametrize("quirks", [{"fail": "compute-apps", "says": "boom"}, {"gpu_uuid": "[Unknown Error]"}])
def test_a_process_list_that_fails_fails_for_all(host: Any, driver: NvidiaSmiDriver, quirks: dict[str, str]) -> None:
    host.process(host.uuids[1], HIDDEN, static=True)
    host.quirks(**quirks)
    for gpu in driver.snapshot().gpus:
        assert gpu.processes is None
        assert gpu.processes_supported
        assert (quirks.get("says") or "[Unknown Error]") in gpu.process_error


@pytest.mark.parametrize(
    ("pid", "supported"), [("[Not Supported]", False), ("[N/A]", False), ("[Unknown Error]", True), ("ERR!", True)]
)
def test_pids_that_are_none(host: Any, driver: NvidiaSmiDriver, pid: str, supported: bool) -> None:
    host.process(host.uuids[0], HIDDEN, static=True)
    host.quirks(pid=pid)
    first, second = driver.snapshot().gpus
    assert (first.processes, first.processes_supported) == (None, supported)
    assert pid in first.process_error
    assert second.processes == ()


def hung_process_is_gone(host: Any) -> bool:
    return not os.path.exists(f"/proc/{(host.directory / 'hung').read_text()}")


def test_a_hung_query_of_gpus(host: Any) -> None:
    host.quirks(hang="gpu")
    with pytest.raises(NoDriverError, match="did not answer within 2 s"):
        NvidiaSmiDriver(timeout=2.0).snapshot()
    assert hung_process_is_gone(host)


def test_a_hung_query_of_processes(host: Any) -> None:
    host.quirks(hang="compute-apps")
    gpus = NvidiaSmiDriver(timeout=2.0).snapshot().gpus
    assert all(gpu.processes is None and "did not answer" in gpu.process_error for gpu in gpus)


def test_an_interrupted_query_leaves_no_process(host: Any) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        if (host.directory / "hung").exists():
            raise KeyboardInterrupt

    host.quirks(hang="gpu")
    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            NvidiaSmiDriver().snapshot()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert hung_process_is_gone(host)


def test_it_needs_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoDriverError, match="PATH"):
        NvidiaSmiDriver()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/nonexistent/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(NoDriverError, match="cannot be started"):
        NvidiaSmiDriver().snapshot()


def test_mig_instances_that_it_cannot_tell_about(host: Any, driver: NvidiaSmiDriver) -> None:
    host.write({"mig": 1, "instances": "MIG-a,MIG-b"}, {"mig": 0})
    parent, first, second, other = driver.snapshot().gpus
    assert parent.unusable
    assert [gpu.label for gpu in (first, second)] == ["0:0", "0:1"]
    for gpu in (first, second):
        assert (gpu.processes, gpu.processes_supported) == (None, False)
        assert "nvidia-ml-py" in gpu.process_error
    assert other.processes == ()
    host.quirks(fail="compute-apps", says="boom")
    assert [(gpu.processes, gpu.processes_supported) for gpu in driver.snapshot().gpus] == [(None, True)] * 4


def test_mig_instances_that_it_names(host: Any, driver: NvidiaSmiDriver) -> None:
    host.write({"mig": 1, "instances": "MIG-a,MIG-b"})
    host.process("MIG-b", HIDDEN, 5 << 20, static=True)
    parent, first, second = driver.snapshot().gpus
    assert [process.pid for process in parent.processes or ()] == [HIDDEN]
    assert first.processes is None
    assert second.processes is None
    host.quirks(mig_rows="instance")
    parent, first, second = driver.snapshot().gpus
    assert first.processes is None
    assert [(process.pid, process.memory_used) for process in second.processes or ()] == [(HIDDEN, 5 << 20)]
