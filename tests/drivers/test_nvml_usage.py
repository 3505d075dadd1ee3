"""The narrow question to NVML, and what may have happened since the poll whose GPUs it asks about."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from safe_gpu.devices import Gpu, GpuRequest, HostSnapshot, ProcessKind
from safe_gpu.drivers import nvml
from safe_gpu.drivers.nvml_session import Session
from safe_gpu.errors import NoDriverError
from safe_gpu.selection.verdicts import NOT_YET, SHOWN, judge, presence

INVALID_ARGUMENT, TIMEOUT, GPU_IS_LOST, RESET_REQUIRED, UNINITIALIZED, UNKNOWN = 2, 10, 15, 16, 1, 999

HIDDEN = 4_000_000  # above every pid that Linux gives


@pytest.fixture
def host(fake_gpus: Any) -> Any:
    fake_gpus.here()
    return fake_gpus


@pytest.fixture
def driver(host: Any) -> Iterator[nvml.NvmlDriver]:
    opened = nvml.NvmlDriver()
    yield opened
    opened.close()


def state(gpu: Gpu) -> tuple[str, str]:
    """What a claim would say of it."""
    (verdict,) = judge(HostSnapshot((gpu, Gpu(1, "GPU-other")), ""), GpuRequest(), leased={})[:1]
    return verdict.state, verdict.reason


def test_it_asks_about_these_gpus_only(host: Any, driver: nvml.NvmlDriver) -> None:
    gpus = driver.snapshot().gpus
    host.options(log=1)
    driver.usage(gpus[2:4])
    calls = host.calls()
    assert len(calls) == 2 * 4
    assert calls.count("nvmlDeviceGetUUID") == 2


@pytest.mark.parametrize(("question", "shown"), [("memory", SHOWN), ("processes", NOT_YET)])
def test_the_memory_of_a_process_that_starts_meanwhile_is_not_that_of_nobody(
    question: str, shown: str, host: Any, driver: nvml.NvmlDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = driver.snapshot().gpus[:1]
    answer = getattr(Session, question)

    def and_then_it_starts(*args: Any) -> Any:
        answered = answer(*args)
        host.process(host.uuids[0], HIDDEN, 1 << 30, static=True)
        return answered

    monkeypatch.setattr(Session, question, and_then_it_starts)
    assert presence(before, driver.usage((before,))[0], {HIDDEN}) == shown
    assert presence(before, driver.usage((before,))[0], {HIDDEN}) == SHOWN


def test_every_kind_of_process_that_computes(host: Any, driver: nvml.NvmlDriver) -> None:
    gpus = driver.snapshot().gpus
    host.process(host.uuids[0], HIDDEN, 1 << 30, static=True)
    host.process(host.uuids[0], HIDDEN + 1, 1 << 30, static=True, kind="mps")
    host.process(host.uuids[0], HIDDEN + 2, 1 << 20, static=True, kind="graphics")
    (gpu,) = driver.usage(gpus[:1])
    assert {(process.pid, process.kind) for process in gpu.processes or ()} == {
        (HIDDEN, ProcessKind.COMPUTE),
        (HIDDEN + 1, ProcessKind.MPS),
    }
    assert gpu.memory_used == (2 << 30) + (1 << 20)
    assert state(gpu)[0] == "busy"


def test_what_draws_explains_memory(host: Any, driver: nvml.NvmlDriver) -> None:
    gpus = driver.snapshot().gpus
    host.process(host.uuids[0], HIDDEN, 4 << 30, static=True, kind="graphics")
    for gpu, *_ in (driver.usage(gpus[:1]), driver.snapshot().gpus):
        assert [process.kind for process in gpu.processes or ()] == [ProcessKind.GRAPHICS]
        assert state(gpu) == ("free", "")
    host.change(0, used=4 << 30)
    for gpu, *_ in (driver.usage(gpus[:1]), driver.snapshot().gpus):
        assert "4 GiB of memory in use by no process" in state(gpu)[1]
    host.change(0, used=0, graphics_error=TIMEOUT)
    for gpu, *_ in (driver.usage(gpus[:1]), driver.snapshot().gpus):
        assert gpu.processes is None, "it cannot be told"
        assert state(gpu)[0] == "busy"


@pytest.mark.parametrize("field", ["compute_error", "mps_error"])
def test_a_list_that_fails_this_time(host: Any, driver: nvml.NvmlDriver, field: str) -> None:
    gpus = driver.snapshot().gpus
    host.change(0, **{field: TIMEOUT})
    first, second = driver.usage(gpus[:2])
    assert (first.processes, first.processes_supported, first.unusable) == (None, True, None)
    assert "timed out" in first.process_error
    assert state(first)[0] == "busy"
    assert second == gpus[1]
    host.change(0, **{field: 0})
    assert driver.usage((first,)) == gpus[:1], "and what was said of it before is forgotten"


@pytest.mark.parametrize(
    "values",
    [
        {"lost": 1},
        {"lost": 2},
        *({f"{field}_error": GPU_IS_LOST} for field in ("uuid", "memory", "mig", "compute", "mps")),
        {"memory_error": RESET_REQUIRED},
        {"uuid_error": INVALID_ARGUMENT},
        {"uuid_error": UNKNOWN},
    ],
)
@pytest.mark.parametrize("restart", [False, True])
def test_a_gpu_that_is_lost(host: Any, driver: nvml.NvmlDriver, values: dict[str, int], restart: bool) -> None:
    host.set(8, mig=0)
    gpus = driver.snapshot().gpus
    host.change(3, **values)
    if restart:
        driver.close()
    lost, other = driver.usage((gpus[3], gpus[4]))
    assert (lost.index, lost.uuid, lost.name, lost.pci_bus_id) == (
        3,
        *(vars(gpus[3])[k] for k in ("uuid", "name", "pci_bus_id")),
    )
    assert (lost.lost, lost.processes) == (True, None)
    assert state(lost)[0] == "unusable"
    assert other == gpus[4]
    host.set(8, mig=0)
    assert driver.usage((lost,)) == gpus[3:4], "it is back"
    assert driver.snapshot().gpus == gpus


def test_another_gpu_in_its_place(host: Any, driver: nvml.NvmlDriver) -> None:
    gpus = driver.snapshot().gpus
    host.change(0, uuid="GPU-new")
    gone, other = driver.usage(gpus[:2])
    assert (gone.uuid, gone.lost, other) == (gpus[0].uuid, True, gpus[1])
    assert "no longer shows it" in state(gone)[1]
    assert [gpu.uuid for gpu in driver.snapshot().gpus] == ["GPU-new", *host.uuids[1:]]


@pytest.mark.parametrize("restart", [False, True])
def test_gpus_whose_numbers_have_changed(host: Any, driver: nvml.NvmlDriver, restart: bool) -> None:
    gpus = driver.snapshot().gpus
    host.process(host.uuids[5], HIDDEN, static=True)
    host.write(*host.gpus[::-1])
    if restart:
        driver.close()
    assert driver.usage(gpus[:2]) == gpus[:2]
    assert [process.pid for process in driver.usage(gpus[5:6])[0].processes or ()] == [HIDDEN]
    assert [gpu.uuid for gpu in driver.snapshot().gpus] == [gpu.uuid for gpu in gpus]


def test_a_gpu_in_place_of_another_after_a_restart(host: Any, driver: nvml.NvmlDriver) -> None:
    """As many as before, and all of the earlier ones but the last have moved on by one number."""
    gpus = driver.snapshot().gpus
    host.write({"uuid": "GPU-new", "bus": "00000000:01:00.0"}, *host.gpus[:-1])
    driver.close()
    assert [gpu.uuid for gpu in driver.snapshot().gpus] == ["GPU-new", *(gpu.uuid for gpu in gpus[:-1])]
    assert [gpu.lost for gpu in driver.usage((gpus[0], gpus[-1]))] == [False, True]


def test_mig_turned_on(host: Any, driver: nvml.NvmlDriver) -> None:
    host.set(2, mig=0)
    gpus = driver.snapshot().gpus
    host.change(0, mig=1, instances="MIG-a")
    changed, same = driver.usage(gpus)
    assert changed.mig_enabled
    assert state(changed) == ("unusable", "MIG mode is on: claim one of its instances")
    assert same == gpus[1]
    host.change(0, mig=0)
    assert driver.usage((changed,)) == gpus[:1]


def test_mig_turned_off_or_cut_anew(host: Any, driver: nvml.NvmlDriver) -> None:
    host.write({"mig": 1, "instances": "MIG-a,MIG-b"}, {"mig": 0})
    parent, first, second, other = gpus = driver.snapshot().gpus
    assert driver.usage(gpus) == gpus
    host.process("MIG-b", HIDDEN, static=True)
    busy = driver.usage((first, second))
    assert [[process.pid for process in gpu.processes or ()] for gpu in busy] == [[], [HIDDEN]]
    host.change(0, instances="MIG-b,MIG-c")
    assert [(gpu.uuid, gpu.label, gpu.lost) for gpu in driver.usage((first, second))] == [
        ("MIG-a", "0:0", True),
        ("MIG-b", "0:1", True),  # it has another number now: the next poll shows it
    ]
    host.change(0, mig=0, instances="")
    assert [gpu.lost for gpu in driver.usage((parent, first, other))] == [False, True, False]


def test_an_nvml_that_another_has_ended(host: Any, driver: nvml.NvmlDriver) -> None:
    import pynvml

    gpus = driver.snapshot().gpus
    host.process(host.uuids[0], HIDDEN, static=True)
    pynvml.nvmlShutdown()
    assert [len(gpu.processes or ()) for gpu in driver.usage(gpus[:2])] == [1, 0]


def test_a_driver_that_goes_and_comes_back(host: Any, driver: nvml.NvmlDriver) -> None:
    gpus = driver.snapshot().gpus
    host.options(session_error=UNINITIALIZED)
    for question in (
        lambda: driver.usage(gpus),
        lambda: driver.linked(HostSnapshot(gpus)),
        lambda: driver.detailed(HostSnapshot(gpus)),
    ):
        with pytest.raises(NoDriverError):
            question()
    host.options()
    assert driver.usage(gpus) == gpus


def test_a_forked_child_asks_in_a_session_of_its_own(host: Any, driver: nvml.NvmlDriver) -> None:
    gpus = driver.snapshot().gpus
    host.options(log=1)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if driver.usage(gpus) == gpus else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert "nvmlInitWithFlags" in host.calls()
    assert driver.usage(gpus) == gpus
    assert "nvmlInitWithFlags" not in host.calls()


def test_details_of_a_gpu_that_is_lost_meanwhile(host: Any, driver: nvml.NvmlDriver) -> None:
    snapshot = driver.snapshot()
    host.change(0, lost=1)
    host.change(1, util=37)
    first, second, *_ = driver.detailed(snapshot).gpus
    assert (first.uuid, first.lost) == (host.uuids[0], True)
    assert second.utilization == 37
