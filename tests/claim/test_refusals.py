"""Who is refused, when, and in which words; deadlines that are passed down."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

import safe_gpu
from safe_gpu.claim import checks as confirmation
from safe_gpu.coordination.host_lock import Host
from safe_gpu.errors import ClaimTimeout, LockTimeout, NotEnoughGpusError, SafeGpuError, UnsatisfiableRequestError

SHORT = 0.05


# Too few are free


def test_too_few_free_now(host: Any, cleanup: ExitStack, untouched: Callable[[], Any]) -> None:
    for number in range(3):
        cleanup.enter_context(host.stranger(number))
    with untouched(), pytest.raises(NotEnoughGpusError) as caught:
        safe_gpu.claim_gpus(6, timeout=0)
    assert type(caught.value) is NotEnoughGpusError
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.nb_gpus == 6
    lines = str(caught.value).splitlines()
    longer = 'timeout="1h", or timeout=None to wait without limit'
    assert lines[0] == f"6 GPUs asked for, 5 free: wait for them ({longer}), or ask for fewer."
    assert lines[1].startswith(f"  GPU 0-2 (NVIDIA A100-SXM4-80GB): process {host.stranger_pid} ")
    assert lines[2:] == ["  GPU 3-7 (NVIDIA A100-SXM4-80GB): free"]


def test_too_few_until_the_deadline(host: Any, ground: Any, untouched: Callable[[], Any]) -> None:
    ground.hold(*range(3))
    with untouched(), pytest.raises(ClaimTimeout) as caught:
        safe_gpu.claim_gpus(6, timeout=SHORT)
    assert isinstance(caught.value, NotEnoughGpusError)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.timeout == SHORT
    assert caught.value.verdicts[0].state == "claimed"
    assert "wait longer" in str(caught.value)


# Choosing


def test_only_exclude_model_and_memory_choose(host_of: Any, cleanup: ExitStack) -> None:
    host = host_of("workstation-mixed")

    def taken(number: int = 1, **arguments: Any) -> list[int]:
        with safe_gpu.GPUOwner(number, timeout=0, **arguments) as claimed:
            return claimed.devices_taken

    assert taken() == [1]  # the display is on 0
    assert taken(3) == [0, 1, 2]
    assert taken(exclude=1) == [2]
    assert taken(only=["0", 2]) == [2]
    assert taken(only=host.uuids[0][:8]) == [0]
    assert taken(model="3090") == [2]
    assert taken(2, model="GeForce*") == [1, 2]
    assert taken(min_memory=f"{24570}MiB") == [2]
    cleanup.enter_context(host.stranger(1, memory=1 << 30, kind="graphics"))
    assert taken(min_memory="23.5GiB") == [2]


# The visible limit


def test_the_fence_is_named_where_it_stands_in_the_way(host, monkeypatch, untouched, cleanup) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sentence = "CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8 GPUs; 7 others are free"
    with untouched(), pytest.raises(UnsatisfiableRequestError) as never:
        safe_gpu.claim_gpus(2, timeout=None)
    assert sentence in str(never.value)
    assert "SAFE_GPU_FENCE=ignore" in str(never.value)
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]
    safe_gpu.release_gpus()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    cleanup.enter_context(host.stranger(0))
    with untouched(), pytest.raises(NotEnoughGpusError) as busy:
        safe_gpu.claim_gpus(1, timeout=0)
    assert f"{sentence} (SAFE_GPU_FENCE=ignore disregards it)." in str(busy.value)
    cleanup.enter_context(host.stranger(3))
    with pytest.raises(NotEnoughGpusError, match="6 others are free"):
        safe_gpu.claim_gpus(1, timeout=0)
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
    assert safe_gpu.claim_gpus(6, timeout=0).devices_taken == [1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "job",
    ["SLURM_JOB_ID=1", "PBS_JOBID=1.h", "LSB_JOBID=1", "SGE_TASK_ID=1", "FLUX_JOB_ID=f1", "_CONDOR_JOB_AD=/dev/null"],
)
def test_nobody_is_sent_to_the_gpus_of_other_jobs(host, monkeypatch, cleanup, job: str) -> None:
    """In a batch job the list may be the scheduler's, so no refusal advises to ignore it."""
    monkeypatch.setenv(*job.split("="))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    cleanup.enter_context(host.stranger(0))
    for number, words in ((2, "others are free: ask for its GPUs only"), (1, "7 others are free.")):
        with pytest.raises(SafeGpuError, match="CUDA_VISIBLE_DEVICES=0 limits this process to 1 of 8") as refused:
            safe_gpu.claim_gpus(number, timeout=0)
        assert words in str(refused.value)
        assert "SAFE_GPU_FENCE" not in str(refused.value)


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "0,0", "GPU-"])
def test_an_empty_fence_leaves_no_gpu(host, monkeypatch, untouched, value: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with untouched(), pytest.raises(UnsatisfiableRequestError, match=r"to 0 of 8 GPUs.*; 8 others are free"):
        safe_gpu.claim_gpus(1, timeout=None)
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(8)]


# Locks and deadlines


def test_a_crowded_host_lock_is_waited_for_longer(host, monkeypatch) -> None:
    """As long as nobody keeps it, and not for ever."""
    tries: list[int] = []
    last = 3

    locked = Host.locked

    def crowded(self: Host, *arguments: Any) -> Any:
        tries.append(1)
        if len(tries) < last:
            raise LockTimeout("the host is overloaded", overloaded=True)
        return locked(self, *arguments)

    monkeypatch.setattr(Host, "locked", crowded)
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]
    safe_gpu.release_gpus()
    last = 99
    with pytest.raises(LockTimeout):
        safe_gpu.claim_gpus(1, timeout=0)
    assert len(tries) < last


def test_the_timeout_is_one_deadline_from_the_call(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[float] = []
    deadlines: list[float] = []

    class Slow:
        def prepare(self) -> None:
            time.sleep(SHORT)
            prepared.append(time.monotonic())

        def __call__(self, device_no: int) -> None:
            return None

    def take_older_package_lock(deadline: float, logger: Any, signals: Any) -> None:
        deadlines.append(deadline)

    monkeypatch.setattr(confirmation, "older_package_counts", lambda: True)
    monkeypatch.setattr(confirmation, "take_older_package_lock", take_older_package_lock)
    called = time.monotonic()
    safe_gpu.claim_gpus(1, Slow(), timeout=60)
    assert called + 60 <= deadlines[0] <= prepared[0] - SHORT + 60


# get_free_gpus


def test_free_gpus_are_those_of_the_host_in_numeric_order(host_of, ground, cleanup, monkeypatch) -> None:
    host = host_of("big-16")
    ground.uuids = host.uuids
    everyone = [str(index) for index in range(16)]
    assert safe_gpu.get_free_gpus() == everyone
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert safe_gpu.get_free_gpus() == everyone
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    ground.hold(2)
    cleanup.enter_context(host.stranger(11))
    cleanup.enter_context(host.stranger(12, kind="graphics"))
    host.edits[host.uuids[13]] = {"processes": None}
    host.edits[host.uuids[14]] = {"lost": True}
    taken = safe_gpu.claim_gpus(1, timeout=0).devices_taken
    gone = {"2", "11", "13", "14", *map(str, taken)}
    assert safe_gpu.get_free_gpus() == [index for index in everyone if index not in gone]
