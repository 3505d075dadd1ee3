"""One free GPU of this machine, and processes that claim it."""

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from support import api

PRELUDE = """
import os, sys, threading
import safe_gpu
from safe_gpu.runtimes.cuda import CUDA
def claim(uuid, placeholder=None, timeout=60, **options):
    return safe_gpu.claim_gpus(1, placeholder, only=uuid, timeout=timeout, **options)
def opened():
    return CUDA.shown_at(0), CUDA.shown_at(1)
"""


class RealGpu:
    """A GPU of this machine that was free before the test."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid

    def now(self) -> api.Gpu:
        """What the driver says of it."""
        with api.opened_driver() as driver:
            gpu = driver.snapshot().by_uuid(self.uuid)
        assert gpu is not None
        return gpu

    def shows(self, pid: int) -> bool:
        """Whether the driver lists this process on it; some drivers list the number of a thread in its place."""
        processes = self.now().processes
        assert processes is not None
        return pid in {api.procfs.thread_group(process.pid) or process.pid for process in processes}

    def expect(self, pid: int) -> None:
        """Wait until the driver lists this process; skip where it lists none of this PID namespace."""
        deadline = time.monotonic() + 10
        while not self.shows(pid):
            if time.monotonic() > deadline:
                numbers = [process.pid for process in self.now().processes or ()]
                if any(os.path.exists(f"/proc/{number}") for number in numbers):
                    pytest.fail(f"the driver lists {numbers}, and not {pid}")
                pytest.skip(f"this driver does not list processes of this PID namespace (it lists {numbers})")
            time.sleep(0.01)


def free_gpus() -> list[api.Gpu]:
    """The free GPUs and MIG instances of this machine; skip where there is none."""
    with api.opened_driver() as driver:
        snapshot = driver.snapshot()
    free = [verdict.gpu for verdict in api.judge(snapshot, api.Selection()) if verdict.free]
    if not free:
        pytest.skip("no GPU of this machine is free")
    return free


@pytest.fixture
def gpu() -> RealGpu:
    """A free GPU, or MIG instance, of this machine."""
    return RealGpu(free_gpus()[0].uuid)


@pytest.fixture
def gpu_for_one_process() -> RealGpu:
    """A free GPU in compute mode EXCLUSIVE_PROCESS; skip where there is none, since no test changes a mode."""
    for one in free_gpus():
        if one.compute_mode == api.ComputeMode.EXCLUSIVE_PROCESS:
            return RealGpu(one.uuid)
    pytest.skip("needs a free GPU in compute mode EXCLUSIVE_PROCESS")


@pytest.fixture
def exclusive(gpu: RealGpu) -> None:
    """Skip where claims share the GPU, because it is the only one and drives the display."""
    with api.opened_driver() as driver:
        if driver.snapshot().shared_display:
            pytest.skip("claims share the only GPU of this machine, since a display is active on it")


@pytest.fixture
def claimer(child: Callable[..., Any], gpu: RealGpu) -> Callable[..., Any]:
    """Start a process that runs some code with ``uuid`` as the free GPU's, and ``claim`` and ``opened`` defined."""
    return lambda code, says="": child(f"{PRELUDE}\nuuid = {gpu.uuid!r}\n{code}", says)
