"""Whose a process number is, and whose memory is in use, by real threads and processes and by files of /dev."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.drivers.base import is_wsl, own_namespace_pids
from safe_gpu.drivers.nvidia_smi import NvidiaSmiDriver
from safe_gpu.drivers.nvml import NvmlDriver
from safe_gpu.gpus.devices import GpuProcess, HostSnapshot, ProcessKind
from safe_gpu.host import procfs
from safe_gpu.selection.request import Selection
from safe_gpu.selection.verdicts import judge

HIDDEN = 4_000_000  # above every pid that Linux gives
MIB = 1 << 20
NOT_SUPPORTED = 3


@pytest.fixture
def thread() -> Iterator[int]:
    """The id of a thread of this process that is not its main thread."""
    done, ready = threading.Event(), threading.Event()
    ids: list[int] = []

    def wait() -> None:
        ids.append(threading.get_native_id())
        ready.set()
        done.wait(120)

    worker = threading.Thread(target=wait)
    worker.start()
    assert ready.wait(60)
    yield ids[0]
    done.set()
    worker.join()


@pytest.fixture
def opening(child: Any) -> Callable[..., int]:
    """``opening(path)``: the pid of a process that has this file open, or ``(path, "mapped")`` mapped and not open."""

    def start(*arguments: Any) -> int:
        how = f"""
path, *mapped = {[*map(str, arguments), ""]!r}
if path:
    file = open(path, "r+b")
if "mapped" in mapped:
    import mmap
    memory = mmap.mmap(file.fileno(), 4096)
    file.close()
say()
listen()
"""
        process = child(how)
        process.hear()
        return process.pid

    return start


# Threads


def test_a_thread_stands_for_its_process(thread: int) -> None:
    listed = (GpuProcess(thread, memory_used=5), GpuProcess(os.getpid(), memory_used=7), GpuProcess(HIDDEN))
    assert own_namespace_pids(listed) == (GpuProcess(os.getpid(), memory_used=7), GpuProcess(HIDDEN))
    assert own_namespace_pids(reversed(listed))[1] == GpuProcess(os.getpid(), memory_used=7)
    kinds = (GpuProcess(thread), GpuProcess(thread, ProcessKind.GRAPHICS))
    assert [process.kind for process in own_namespace_pids(kinds)] == [ProcessKind.COMPUTE, ProcessKind.GRAPHICS]


# Numbers of another PID namespace


@pytest.fixture
def devices(fake_gpus: Any) -> Path:
    """A /dev with the files of an NVIDIA driver."""
    return fake_gpus.devices("nvidiactl", "nvidia0", "nvidia-uvm")


def test_who_has_a_device_open(devices: Path, opening: Any) -> None:
    (devices / "nvidia0").write_bytes(bytes(4096))
    user, mapper = opening(devices / "nvidia0"), opening(devices / "nvidia0", "mapped")
    bystander = opening()
    listed = tuple(GpuProcess(pid, name="x") for pid in (user, mapper, bystander, os.getpid(), HIDDEN))
    found = {process.pid: process.elsewhere for process in own_namespace_pids(listed)}
    assert found == {user: False, mapper: False, bystander: True, os.getpid(): False, HIDDEN: False}
    assert [process.name for process in own_namespace_pids(listed)] == ["x", "x", None, "x", "x"]
    assert own_namespace_pids((GpuProcess(bystander, ProcessKind.GRAPHICS),))[0].elsewhere
    (devices / "nvidiactl").unlink()
    assert not any(process.elsewhere for process in own_namespace_pids(listed)), "not NVIDIA's driver for Linux"


def test_a_process_that_may_not_be_read_or_has_too_much_open(devices: Path, opening: Any, monkeypatch: Any) -> None:
    listed = (GpuProcess(opening()),)
    assert own_namespace_pids(listed)[0].elsewhere
    monkeypatch.setattr(procfs, "open_files", lambda pid: None)
    assert not own_namespace_pids(listed)[0].elsewhere


def test_a_zombie_is_not_judged_by_its_devices(devices: Path, zombie: int) -> None:
    """Its descriptors and mappings are gone, which says nothing; so are those of a main thread that has ended."""
    assert not own_namespace_pids((GpuProcess(zombie),))[0].elsewhere


# Memory


def judged(driver: Any, number: int = 0) -> tuple[str, str]:
    verdict = judge(driver.snapshot(), Selection(), claimed={})[number]
    return verdict.state, verdict.reason


def test_memory_that_the_driver_reserves(fake_gpus: Any) -> None:
    """Version 2 of the memory call leaves it out, so that a stranger of another container with 600 MiB is noticed."""
    fake_gpus.use_nvml_here()
    driver = NvmlDriver()
    fake_gpus.change(0, reserved=700 * MIB)
    assert judged(driver) == ("free", "")
    assert not driver.snapshot().gpus[0].counts_reserved
    fake_gpus.change(0, used=600 * MIB)
    assert "600 MiB of memory in use by no process" in judged(driver)[1]
    (gpu,) = driver.usage(driver.snapshot().gpus[:1])
    assert not judge(HostSnapshot((gpu, *driver.snapshot().gpus[1:])), Selection(), claimed={})[0].free
    fake_gpus.change(0, used=0, memory_v2_error=NOT_SUPPORTED)
    assert driver.snapshot().gpus[0].counts_reserved
    assert judged(driver) == ("free", "")
    fake_gpus.change(0, used=400 * MIB)
    assert judged(driver)[0] == "busy"


def test_page_cache_on_a_gpu_whose_memory_is_a_numa_node(fake_gpus: Any) -> None:
    fake_gpus.use_nvml_here()
    driver = NvmlDriver()
    fake_gpus.change(0, used=60 << 30, memory_node=1)
    fake_gpus.change(1, used=17 * MIB)
    fake_gpus.change(2, used=16 * MIB)
    fake_gpus.options(log=1)
    assert judged(driver)[0] == "free"
    assert fake_gpus.calls().count("nvmlDeviceGetNumaNodeId") == 2, "only where memory is unexplained"
    fake_gpus.change(1, used=60 << 30)
    assert judged(driver, 1)[0] == "busy"
    fake_gpus.process(fake_gpus.uuids[0], HIDDEN, 1 << 30, static=True)
    assert judged(driver)[0] == "busy"


def test_the_desktop_of_windows(fake_gpus: Any, fake_nvidia_smi: Any) -> None:
    fake_gpus.use_nvml_here()
    fake_gpus.change(0, used=2 << 30)
    devices = fake_gpus.devices("dxg")
    assert is_wsl()
    assert judged(NvmlDriver()) == judged(NvidiaSmiDriver()) == ("free", "")
    (devices / "nvidiactl").touch()
    assert not is_wsl()
    assert judged(NvmlDriver())[0] == judged(NvidiaSmiDriver())[0] == "busy"
