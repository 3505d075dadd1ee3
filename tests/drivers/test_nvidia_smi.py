"""The nvidia-smi driver against a program that answers as the real one does on good and bad days."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from safe_gpu.drivers.nvidia.nvidia_smi import NvidiaSmiDriver
from safe_gpu.errors import NoDriverError, UnsatisfiableRequestError
from safe_gpu.gpus.devices import ComputeMode, HostSnapshot, ProcessKind
from safe_gpu.runtimes.visible_devices import parse_cuda
from safe_gpu.selection.possible import check_possible
from safe_gpu.selection.request import parse_request

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
    host.write(
        {"bus": "00000000:C1:00.0", "util": 12, "temp": 66, "mode": 3, "display": 1},
        {"bus": "00000000:0A:00.0", "mode": 2},
    )
    host.process(host.uuids[0], os.getpid(), 3 << 20)
    host.process(host.uuids[0], HIDDEN, None, static=True)
    host.process(host.uuids[0], HIDDEN + 1, 1 << 20, static=True, kind="graphics")
    host.process(host.uuids[0], HIDDEN + 2, 1 << 20, static=True, kind="mps")
    snapshot = driver.snapshot()
    first, second = snapshot.gpus
    assert (snapshot.driver, snapshot.driver_version) == ("nvidia-smi", "550.54.15")
    assert (first.index, first.uuid, first.pci_bus_id) == (0, host.uuids[1], "0000:0a:00.0")
    assert (first.compute_mode, second.compute_mode) == (ComputeMode.PROHIBITED, ComputeMode.EXCLUSIVE_PROCESS)
    assert (second.utilization, second.temperature, second.display_active) == (12, 66, True)
    assert (second.memory_total, second.memory_used) == (80 << 30, 5 << 20)
    own, *others = sorted(second.processes or (), key=lambda process: process.pid)
    assert (own.pid, own.memory_used, bool(own.name)) == (os.getpid(), 3 << 20, True)
    assert [(process.pid, process.kind, process.memory_used) for process in others] == [
        (HIDDEN, ProcessKind.COMPUTE, None),
        (HIDDEN + 1, ProcessKind.GRAPHICS, 1 << 20),
        (HIDDEN + 2, ProcessKind.MPS, 1 << 20),
    ]
    assert second.draws
    assert not first.draws
    assert driver.usage(snapshot.gpus) == snapshot.gpus
    assert driver.detailed(snapshot) == driver.linked(snapshot) == snapshot


@pytest.mark.parametrize(
    "value", ["[N/A]", "[Not Supported]", "Unknown Error", "N/A", "ERR!", "Insufficient Permissions"]
)
def test_values_that_are_none(host: Any, driver: NvidiaSmiDriver, value: str) -> None:
    fields = ("total", "used", "free", "gpu_util", "compute_mode", "display_active")
    host.quirks(**dict.fromkeys((*fields, "current_mig", "driver_version"), value))
    snapshot = driver.snapshot()
    gpu = snapshot.gpus[0]
    assert (gpu.memory_total, gpu.memory_used, gpu.memory_free, gpu.utilization) == (None, None, None, None)
    assert (gpu.compute_mode, gpu.display_active, gpu.mig_enabled) == (ComputeMode.DEFAULT, False, False)
    assert (gpu.uuid, gpu.processes, gpu.unusable, gpu.lost) == (host.uuids[0], (), None, False)
    assert snapshot.driver_version == ""


def test_extra_lines_and_elements_that_close_in_the_wrong_order(host: Any, driver: NvidiaSmiDriver) -> None:
    host.process(host.uuids[1], HIDDEN, 5 << 20, static=True)
    host.quirks(
        before="WARNING: infoROM is corrupted at gpu 0000:0F:00.0\\nHinweis: Grafikkarte, Speicher, und so weiter",
        after="\\nWARNING: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve",
        broken=1,
    )
    gpus = driver.snapshot().gpus
    assert [gpu.uuid for gpu in gpus] == host.uuids
    assert gpus[0].processes == ()
    assert [(process.pid, process.memory_used) for process in gpus[1].processes or ()] == [(HIDDEN, 5 << 20)]


def test_odd_names(host: Any, driver: NvidiaSmiDriver) -> None:
    host.process(host.uuids[0], HIDDEN, static=True)
    name = "python </processes> a&lt;b --gpus 0, 1, 2 </gpu>"
    host.quirks(process_name=name, product_name="Graphics Device, 8 GB")
    gpus = driver.snapshot().gpus
    assert [gpu.uuid for gpu in gpus] == host.uuids
    assert gpus[0].name == "Graphics Device, 8 GB"
    assert [process.name for process in gpus[0].processes or ()] == [name.replace("&lt;", "<")]
    assert gpus[1].processes == ()


@pytest.mark.parametrize("lacking", ["current_mig", "current_mig,display_active,driver_version", "compute_mode,free"])
def test_old_versions_lack_elements(host: Any, driver: NvidiaSmiDriver, lacking: str) -> None:
    host.process(host.uuids[1], HIDDEN, static=True)
    host.quirks(version_lacks=f"{lacking},type,gpu_instance_id,compute_instance_id")
    gpus = driver.snapshot().gpus
    assert [gpu.uuid for gpu in gpus] == host.uuids
    assert gpus[0].memory_total == 80 << 30
    assert gpus[0].processes == ()
    assert [(process.pid, process.kind) for process in gpus[1].processes or ()] == [(HIDDEN, ProcessKind.COMPUTE)]


def runs(host: Any) -> list[str]:
    """The arguments of each run since the last time this was asked."""
    path = host.directory / "runs"
    lines: list[str] = path.read_text().splitlines()
    path.unlink()
    return lines


def test_one_run_answers_a_poll(host: Any, driver: NvidiaSmiDriver) -> None:
    gpus = driver.snapshot().gpus
    assert runs(host) == ["-q -x"]
    driver.usage(gpus)
    driver.usage(gpus[1:])
    assert runs(host) == [f"-q -x -i {host.uuids[0]},{host.uuids[1]}", f"-q -x -i {host.uuids[1]}"]


def test_where_not_all_answer_by_id_the_host_is_asked(host: Any, driver: NvidiaSmiDriver) -> None:
    gpus = driver.snapshot().gpus
    host.quirks(one_id=1)
    assert driver.usage(gpus[::-1]) == gpus[::-1]
    host.change(0, lost=1)
    lost, other = driver.usage(gpus)
    assert (lost.uuid, lost.lost, other) == (gpus[0].uuid, True, gpus[1])
    assert "GPU is lost" in lost.process_error


@pytest.mark.parametrize(
    ("says", "shown"),
    [
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "couldn't communicate"),
        ("Failed to initialize NVML: Driver/library version mismatch\\nNVML library version: 550.54", "mismatch"),
        ("something else altogether", "something else altogether"),
        ("", "exit status 9"),
    ],
)
def test_a_driver_that_does_not_work(host: Any, driver: NvidiaSmiDriver, says: str, shown: str) -> None:
    gpus = driver.snapshot().gpus
    host.quirks(fail=1, says=says, status=9)
    for question in (driver.snapshot, lambda: driver.usage(gpus)):
        with pytest.raises(NoDriverError, match=shown) as caught:
            question()
        assert caught.value.driver == "nvidia-smi"


def test_no_gpu_in_spite_of_a_driver(host: Any, driver: NvidiaSmiDriver) -> None:
    host.set(0)
    assert driver.snapshot().gpus == ()


def test_a_lost_gpu_keeps_its_place_and_identity(host: Any, driver: NvidiaSmiDriver) -> None:
    before = driver.snapshot().gpus
    host.change(0, lost=1)
    lost, other = driver.snapshot().gpus
    known = [(gpu.index, gpu.uuid, gpu.name, gpu.pci_bus_id) for gpu in (before[0], lost)]
    assert known[0] == known[1]
    assert (lost.lost, lost.processes, "GPU is lost" in (lost.unusable or "")) == (True, None, True)
    assert other == before[1]
    assert NvidiaSmiDriver().snapshot().gpus[0].lost, "also when it was never seen alive"


@pytest.mark.parametrize("text", ["[GPU is lost]", "[GPU requires reset]"])
def test_values_that_say_lost(host: Any, driver: NvidiaSmiDriver, text: str) -> None:
    host.quirks(used=text)
    assert [gpu.lost for gpu in driver.snapshot().gpus] == [True, True]
    host.quirks(uuid=text)
    assert [gpu.uuid for gpu in driver.snapshot().gpus] == host.uuids, "remembered"


@pytest.mark.parametrize(
    ("quirks", "said", "supported"),
    [
        ({"processes": "N/A"}, "N/A", False),
        ({"processes": "Unknown Error"}, "Unknown Error", True),
        ({"version_lacks": "processes"}, "does not list", True),
        ({"pid": "[Not Supported]"}, "[Not Supported]", False),
        ({"pid": "[N/A]"}, "[N/A]", False),
        ({"pid": "[Unknown Error]"}, "[Unknown Error]", True),
        ({"pid": "ERR!"}, "ERR!", True),
    ],
)
def test_no_process_list(
    host: Any, driver: NvidiaSmiDriver, quirks: dict[str, str], said: str, supported: bool
) -> None:
    host.process(host.uuids[1], HIDDEN, static=True)
    host.quirks(**quirks)
    gpus = driver.snapshot().gpus
    for gpu in (gpus[1], *driver.usage(gpus[1:])):
        assert (gpu.processes, gpu.processes_supported) == (None, supported)
        assert said in gpu.process_error
    assert gpus[0].processes == (() if "pid" in quirks else None)


def hung_process_is_gone(host: Any) -> bool:
    return not os.path.exists(f"/proc/{(host.directory / 'hung').read_text()}")


def test_a_hung_query(host: Any) -> None:
    host.quirks(hang=1)
    with pytest.raises(NoDriverError, match="did not answer within 4 s"):
        NvidiaSmiDriver(timeout=4.0).snapshot()
    assert hung_process_is_gone(host)


def test_an_interrupted_query_leaves_no_process(host: Any) -> None:
    def interrupt(_number: int, _frame: object) -> None:
        if (host.directory / "hung").exists():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    host.quirks(hang=1)
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


def test_mig_needs_nvml(host: Any, driver: NvidiaSmiDriver) -> None:
    host.write({"mig": 1, "instances": "MIG-a,MIG-b", "imem": 20 << 30}, {"mig": 0})
    host.process("MIG-b", HIDDEN, 5 << 20, static=True)
    parent, other = snapshot = driver.snapshot().gpus
    assert (parent.mig_enabled, parent.memory_total, parent.memory_used) == (True, 80 << 30, 5 << 20)
    assert other.unusable is None
    assert driver.usage(snapshot) == snapshot
    host_now = HostSnapshot(snapshot)
    for request, limit in (({"nb_gpus": 2}, None), ({"only": "MIG-a"}, None), ({"nb_gpus": 1}, "MIG-a")):
        with pytest.raises(UnsatisfiableRequestError, match=r"GPU 0: .* NVML only: pip install nvidia-ml"):
            check_possible(host_now, parse_request(**request), parse_cuda(limit, host_now))
