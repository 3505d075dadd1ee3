"""What safe_gpu takes for granted of AMD GPUs, on an idle host that has some: a few KiB are allocated on one of them.

``pytest -rA`` shows what is printed, which answers questions on which nothing depends yet.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from support import api

pytestmark = [pytest.mark.gpu("amd"), pytest.mark.timeout(300)]

on_fakes_too = "SAFE_GPU_FSROOT" in os.environ
differs_on_fakes = pytest.mark.xfail(on_fakes_too, reason="the fake library does otherwise", strict=True)

HOLDS = """
from safe_gpu.runtimes.hip import HIP
memory = HIP.hold(0)
say("holds")
listen()
memory.release()
"""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> api.KfdDriver:
    for name in [name for name in os.environ if name.endswith("_VISIBLE_DEVICES")]:
        monkeypatch.delenv(name)
    return api.KfdDriver()


@pytest.fixture
def holder(driver: api.KfdDriver, child: Callable[..., Any]) -> Any:
    """A process that holds memory on the first GPU that can be used."""
    gpu = next(gpu for gpu in driver.snapshot().gpus if not gpu.unusable)
    process = child(HOLDS, "holds", env=api.render_visible([gpu], visible_as="uuid", snapshot=api.HostSnapshot((gpu,))))
    process.gpu = gpu.index
    return process


def used(driver: api.KfdDriver, pid: int) -> list[int]:
    """Indices of the GPUs on which the kernel shows a process."""
    return [gpu.index for gpu in driver.snapshot().gpus if pid in {one.pid for one in gpu.processes or ()}]


def test_an_idle_gpu_shows_less_than_a_gibibyte_in_use(driver: api.KfdDriver) -> None:
    for gpu, device in zip(driver.snapshot().gpus, api.kfd_topology.devices(api.Files()) or (), strict=True):
        print(gpu, device)
        assert not gpu.processes
        assert gpu.memory_used is not None
        assert gpu.memory_used < 1 << 30


def test_hip_numbers_and_names_the_gpus_as_the_kernel_does(driver: api.KfdDriver) -> None:
    snapshot, plain = driver.snapshot(), dict(os.environ)
    seen = api.HIP.visible_in_child(plain)
    assert [api.HIP.is_same(*pair) for pair in zip(seen, snapshot.gpus, strict=True)] == [True] * len(seen)
    for gpu in snapshot.gpus:
        for environ in ({}, {"RAY_RAYLET_PID": "1"}):  # under Ray HIP's own numbers count
            chosen = api.HIP.visible_in_child(
                {**plain, **api.render_visible([gpu], visible_as="index", snapshot=snapshot, environ=environ)}
            )
            assert [api.HIP.is_same(one, gpu) for one in chosen] == [True]


def test_hip_tells_uuids_as_text_and_what_is_integrated_graphics(driver: api.KfdDriver, child: Any) -> None:
    code = """
import ctypes
from safe_gpu.runtimes.hip import HIP
for number in range(HIP.load().count()):
    raw, integrated = (ctypes.c_char * 16)(), ctypes.c_int()
    HIP.load().call("hipDeviceGetUuid", raw, ctypes.c_int(number))
    HIP.load().call("hipDeviceGetAttribute", ctypes.byref(integrated), ctypes.c_int(16), ctypes.c_int(number))
    say(raw.raw.decode(), integrated.value)
"""
    told = [line.split() for line in child(code).finish().splitlines()]
    gpus = driver.snapshot().gpus
    assert {gpu.uuid.removeprefix("GPU-") for gpu in gpus if "GPU-" in gpu.uuid} <= {uuid for uuid, _ in told}
    integrated = [number == "1" for _, number in told]
    assert integrated == [bool(gpu.unusable) for gpu in gpus] or all(integrated)


def test_hip_opens_its_device_with_the_first_call_and_is_on_no_gpu_then(driver: api.KfdDriver, child: Any) -> None:
    code = """
from safe_gpu.runtimes.hip import HIP
HIP.load()
say(HIP.has_opened())
HIP.load().initialize()
say(HIP.has_opened())
listen()
"""
    process = child(code, "False")
    assert process.hear() == "True"
    assert used(driver, process.pid) == []


@differs_on_fakes
def test_a_child_that_is_forked_later_cannot_use_hip(driver: api.KfdDriver, child: Any) -> None:
    code = """
import os, signal
from safe_gpu.runtimes.hip import HIP
HIP.load().initialize()
if os.fork() == 0:
    signal.alarm(20)
    HIP.initialized_in = None  # safe_gpu itself would refuse
    try:
        HIP.hold(0)
        os._exit(0)
    except BaseException:
        os._exit(1)
say(os.wait()[1])
"""
    assert child(code).hear() != "0"


def test_memory_shows_on_its_gpu_alone_until_the_process_ends(
    driver: api.KfdDriver, holder: Any, eventually: Any
) -> None:
    eventually(lambda: used(driver, holder.pid) == [holder.gpu])
    holder.tell()
    holder.finish()
    eventually(lambda: not used(driver, holder.pid))


@differs_on_fakes
def test_a_killed_process_is_gone(driver: api.KfdDriver, holder: Any) -> None:
    assert used(driver, holder.pid) == [holder.gpu]
    holder.kill()
    patience = time.monotonic() + 2
    while used(driver, holder.pid):
        assert time.monotonic() < patience
