"""What every driver promises, asked of each with the same words."""

import html
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from support.forks import in_child

from safe_gpu.drivers import open_driver
from safe_gpu.drivers.base import Driver
from safe_gpu.gpus.devices import Gpu, ProcessKind, are_mixed, bus_order

HIDDEN = 4_000_000  # above every pid that Linux gives
MEMORY = 512 << 20


class Bench(NamedTuple):
    """A driver over some host, and the means to put processes on its GPUs."""

    driver: Any
    occupy: Callable[..., Any]  # (uuid, pid): a process with this pid is on the device until .close() of the result


def over_fake_gpus(fake_gpus: Any, mig: bool, name: str) -> Bench:
    if name == "nvml":
        fake_gpus.use_nvml_here()
    if mig:
        fake_gpus.write({"mig": 0}, {"mig": 1, "instances": "MIG-0a,MIG-0b"}, {"mig": 0})
    else:
        fake_gpus.write(*({"bus": f"00000000:{bus}:00.0"} for bus in ("0A", "C1", "09")))

    def occupy(uuid: str, pid: int) -> Any:
        return SimpleNamespace(close=fake_gpus.process(uuid, pid, MEMORY, static=pid == HIDDEN).unlink)

    return Bench(open_driver(name), occupy)


@pytest.fixture(params=["nvml", "nvidia-smi", "simulated"])
def open_bench(request: pytest.FixtureRequest) -> Iterator[Callable[[bool], Bench]]:
    opened: list[Driver] = []

    def make(mig: bool) -> Bench:
        if request.param == "simulated":
            driver: Any = open_driver(f"simulated:{'mig-h100' if mig else 'workstation-mixed'}")
            bench = Bench(driver, lambda uuid, pid: driver.occupy(uuid, memory=MEMORY, pid=pid))
        else:
            if request.param == "nvidia-smi":
                request.getfixturevalue("fake_nvidia_smi")
            bench = over_fake_gpus(request.getfixturevalue("fake_gpus"), mig, request.param)
        opened.append(bench.driver)
        return bench

    yield make
    for driver in opened:
        driver.close()


@pytest.fixture
def bench(open_bench: Callable[[bool], Bench]) -> Bench:
    return open_bench(False)


@pytest.fixture
def mig_bench(open_bench: Callable[[bool], Bench]) -> Bench:
    return open_bench(True)


of_drivers_with_mig = pytest.mark.parametrize("open_bench", ["nvml", "simulated"], indirect=True)


def test_it_says_who_it_is(bench: Bench) -> None:
    snapshot = bench.driver.snapshot()
    assert snapshot.driver == bench.driver.name
    assert snapshot.driver_version
    runtime = bench.driver.runtime
    assert runtime.asks_library == (not bench.driver.name.startswith("simulated:"))
    assert (bench.driver.host_topology() is None) == runtime.asks_library
    placeholder = runtime.default_placeholder()
    assert callable(placeholder)
    assert callable(placeholder.release)


def test_an_idle_host(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = bench.driver.snapshot()
    assert len(snapshot.physical) == len(snapshot.gpus) == len({gpu.uuid for gpu in snapshot.gpus}) == 3
    keys = [bus_order(gpu.pci_bus_id) for gpu in snapshot.gpus]
    assert None not in keys
    assert keys == sorted(keys)  # type: ignore[type-var]
    for index, gpu in enumerate(snapshot.gpus):
        assert (gpu.index, gpu.pci_bus_id, len(gpu.pci_bus_id)) == (index, gpu.pci_bus_id.lower(), 12)
        assert gpu.uuid.startswith("GPU-")
        assert gpu.name
        assert (gpu.unusable, gpu.lost, gpu.mig_enabled, gpu.is_mig_instance) == (None, False, False, False)
        assert (gpu.processes, gpu.process_error, gpu.processes_supported) == ((), "", True)
        assert gpu.memory_total is not None
        assert gpu.memory_used is not None
        assert gpu.memory_total > 1 << 30, "bytes"
        assert gpu.memory_free == gpu.memory_total - gpu.memory_used
        for scope in ("node", "socket"):
            cpus = bench.driver.cpu_affinity(gpu.uuid, scope)
            assert cpus is None or (isinstance(cpus, frozenset) and cpus)
    assert bench.driver.cpu_affinity("GPU-stranger", "node") is None
    assert bench.driver.snapshot() == snapshot, "nothing changes by itself"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bench.driver.snapshot() == snapshot, "visibility is of no concern"


NO_NAMES = (
    *("[Unknown Error]", "Unknown Error", "ERR!", "[N/A]", "N/A", "[GPU is lost]", "GPU is lost", "None", "Unknown"),
    *("[Insufficient Permissions]", "Not Supported", "GPU requires reset", "<error>", "Failed to get name"),
    "GPU access blocked by the operating system",
)


@pytest.mark.parametrize("pid", [os.getpid(), HIDDEN], ids=["own", "hidden"])
def test_a_process_shows_on_its_gpu_and_goes(bench: Bench, pid: int) -> None:
    """A poll and the narrow question see the same, whatever the record said before."""
    before = bench.driver.snapshot()
    gpus = before.gpus
    assert bench.driver.usage(gpus) == gpus
    context = bench.occupy(gpus[1].uuid, pid)
    during = bench.driver.snapshot().gpus
    assert during[1].processes is not None
    assert [(process.pid, process.kind, process.memory_used) for process in during[1].processes] == [
        (pid, ProcessKind.COMPUTE, MEMORY)
    ]
    assert during[1].memory_used == (gpus[1].memory_used or 0) + MEMORY
    assert during[::2] == gpus[::2]
    assert bench.driver.usage(gpus[1:2]) == during[1:2]
    assert bench.driver.usage((gpus[2], gpus[1])) == (gpus[2], during[1]), "in the order of the question"
    context.close()
    assert bench.driver.usage(during[1:2]) == gpus[1:2]
    assert bench.driver.usage(()) == ()
    assert bench.driver.snapshot() == before


def test_a_device_that_is_not_there(bench: Bench) -> None:
    here = bench.driver.snapshot().gpus[0]
    stranger = Gpu(0, "GPU-stranger", "Ghost", here.pci_bus_id)
    gone, same = bench.driver.usage((stranger, here))
    assert (gone.index, gone.uuid, gone.name, gone.lost, gone.processes) == (0, "GPU-stranger", "Ghost", True, None)
    assert gone.unusable
    assert gone.process_error
    assert same == here
    assert bench.driver.snapshot().gpus[0] == here


def test_more_is_told_of_the_same_poll(bench: Bench) -> None:
    snapshot = bench.driver.snapshot()
    uuids = [gpu.uuid for gpu in snapshot.gpus]
    for fuller in (bench.driver.linked(snapshot), bench.driver.detailed(snapshot)):
        assert [gpu.uuid for gpu in fuller.gpus] == uuids
        assert [gpu.processes for gpu in fuller.gpus] == [gpu.processes for gpu in snapshot.gpus]
        assert (fuller.driver, fuller.driver_version) == (snapshot.driver, snapshot.driver_version)
    for gpu in bench.driver.linked(snapshot).gpus:
        assert gpu.uuid not in gpu.nvlink_peers
        assert gpu.nvlink_peers <= set(uuids)


def test_a_forked_child_may_ask(bench: Bench) -> None:
    before = bench.driver.snapshot()
    assert in_child(lambda: bench.driver.usage(before.gpus[:1]) == before.gpus[:1])
    assert in_child(lambda: bench.driver.snapshot() == before)
    assert bench.driver.usage(before.gpus[1:]) == before.gpus[1:]
    assert bench.driver.snapshot() == before


@of_drivers_with_mig
def test_mig_instances_are_the_devices(mig_bench: Bench) -> None:
    snapshot = mig_bench.driver.snapshot()
    assert snapshot.needs_uuids
    parents = {gpu.uuid: gpu for gpu in snapshot.gpus if gpu.mig_enabled}
    assert {gpu.unusable for gpu in parents.values()} == {"MIG mode is on: claim one of its instances"}
    instances = [gpu for gpu in snapshot.gpus if gpu.is_mig_instance]
    assert instances
    for gpu in instances:
        parent = parents[gpu.mig_parent or ""]
        assert gpu.uuid.startswith("MIG-")
        assert (gpu.index, gpu.pci_bus_id, gpu.unusable) == (parent.index, parent.pci_bus_id, None)
        assert gpu.mig_instance is not None
        behind = snapshot.gpus[snapshot.gpus.index(parent) + 1 :][: len(instances)]
        assert gpu in behind, "instances follow their GPU"


@pytest.mark.parametrize("said", NO_NAMES)
@pytest.mark.parametrize("name", ["nvml", "nvidia-smi"])
def test_an_error_in_place_of_a_product_name_is_no_model(request: Any, fake_gpus: Any, name: str, said: str) -> None:
    if name == "nvidia-smi":
        request.getfixturevalue("fake_nvidia_smi")
    for models, seen in ([said], [""]), (["NVIDIA H200", said], ["NVIDIA H200"] * 2):  # what was told before stays
        driver = over_fake_gpus(fake_gpus, False, name).driver
        for model, expected in zip(models, seen, strict=True):
            told = html.escape(model) if name == "nvidia-smi" else model
            fake_gpus.write({"name": "NVIDIA H200"}, {"name": told})
            gpus = driver.snapshot().gpus
            assert gpus[1].name == expected
            assert not are_mixed(gpus)
        driver.close()
