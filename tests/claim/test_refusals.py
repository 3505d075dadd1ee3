"""Who is refused, when, and in which words; nonsense and hosts in trouble, which leave nothing behind."""

import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.claim import checks as confirmation
from safe_gpu.coordination.host_lock import Host
from safe_gpu.drivers.presets import preset
from safe_gpu.errors import (
    ClaimTimeout,
    GPUAffinityError,
    LockTimeout,
    NotEnoughGpusError,
    PlaceholderError,
    SafeGpuError,
    UnsatisfiableRequestError,
)
from safe_gpu.runtimes.placeholders import Base

SHORT = 0.05


# Too few are free


def test_too_few_free_now_and_until_the_deadline(host: Any, cleanup: ExitStack, untouched: Callable[[], Any]) -> None:
    for number in range(3):
        cleanup.enter_context(host.stranger(number))
    with untouched(), pytest.raises(NotEnoughGpusError) as caught:
        safe_gpu.claim_gpus(6, timeout=0)
    assert (type(caught.value), caught.value.nb_gpus) == (NotEnoughGpusError, 6)
    assert isinstance(caught.value, RuntimeError)
    lines = str(caught.value).splitlines()
    longer = 'timeout="1h", or timeout=None to wait without limit'
    assert lines[0] == f"6 GPUs asked for, 5 free: wait for them ({longer}), or ask for fewer."
    assert lines[1].startswith(f"  GPU 0-2 (NVIDIA A100-SXM4-80GB): process {host.stranger_pid} ")
    assert lines[2:] == ["  GPU 3-7 (NVIDIA A100-SXM4-80GB): free"]
    with untouched(), pytest.raises(ClaimTimeout, match="wait longer") as late:
        safe_gpu.claim_gpus(6, timeout=SHORT)
    assert isinstance(late.value, NotEnoughGpusError)
    assert isinstance(late.value, TimeoutError)
    assert (late.value.timeout, late.value.verdicts[0].state) == (SHORT, "busy")


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


@pytest.mark.parametrize("job", ["SLURM_JOB_ID=1", "_CONDOR_JOB_AD=/dev/null"])
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


@pytest.mark.parametrize("value", ["", "0,0"])
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    ground.hold(2)
    cleanup.enter_context(host.stranger(11))
    cleanup.enter_context(host.stranger(12, kind="graphics"))
    host.edits = {host.uuids[13]: {"processes": None}, host.uuids[14]: {"lost": True}}
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [3]
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(16) if index not in (2, 3, 11, 13, 14)]


# Nonsense in arguments: one of each kind, through a whole claim; the messages are a table in tests/cli/test_mistakes.py


class OfFramework(Base):
    """A framework that finds no GPU."""

    _module = "math"

    def _allocate(self, device_no: int) -> Any:
        raise RuntimeError("No CUDA GPUs are available")


REFUSED = UnsatisfiableRequestError
ARGUMENTS: list[tuple[dict[str, Any], type[SafeGpuError], str]] = [
    ({"nb_gpus": "job"}, REFUSED, "SAFE_GPU_NB_GPUS"),
    ({"nb_gpus": 10**30}, REFUSED, "only 8"),
    ({"timeout": float("nan")}, REFUSED, "timeout=nan"),
    ({"affinity": 3}, GPUAffinityError, "node"),
    ({"model": "H100"}, REFUSED, "A100"),
    ({"nb_gpus": 2, "only": "3"}, REFUSED, "only 1 of the 8"),
    ({"debug_sleep": -1}, REFUSED, "debug_sleep=-1"),
    ({"only": "GPU-"}, REFUSED, preset("dgx-a100").gpus[0].uuid),
    ({"logger": "print"}, REFUSED, "logger='print'"),
    ({"placeholder_fn": safe_gpu.PytorchPlaceholder}, PlaceholderError, "PytorchPlaceholder()"),
]


def test_a_framework_is_told_that_the_gpus_are_simulated(host: Any) -> None:
    with pytest.raises(PlaceholderError, match="those of simulated:dgx-a100 are simulated: "):
        safe_gpu.claim_gpus(placeholder_fn=OfFramework())


@pytest.mark.parametrize(("arguments", "kind", "part"), ARGUMENTS, ids=lambda value: str(value)[:40])
def test_arguments_that_make_no_sense(
    host, arguments: dict[str, Any], kind: type[SafeGpuError], part: str, untouched
) -> None:
    with untouched():
        # For ever, unless the argument says otherwise: what makes no sense is not waited for.
        with pytest.raises(SafeGpuError, match=re.escape(part)) as caught:
            safe_gpu.claim_gpus(**{"timeout": None, **arguments})
        assert type(caught.value) is kind, caught.value
    assert host.polls <= 1
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists(), "no lock was needed to see that"
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]


# A host in trouble


def test_a_disk_quota_that_ends_in_the_middle_of_an_entry(host: Any, child: Any) -> None:
    # Any user can play that: no file may grow beyond ten bytes.
    code = """
import os, resource, signal, safe_gpu
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    safe_gpu.claim_gpus(2, timeout=None)
except safe_gpu.StateDirError as err:
    say(err)
say(os.environ.get("CUDA_VISIBLE_DEVICES"))
listen()
"""
    process = child(code)
    assert re.search(r"claims/\..*free some space", process.hear())
    assert process.hear() == "None"
    assert len(safe_gpu.get_free_gpus()) == 8


def test_no_descriptors_left(host: Any, child: Any) -> None:
    code = """
import os, resource, safe_gpu
safe_gpu.claim_gpus(1, timeout=0)
safe_gpu.release_gpus()
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
before, results = os.listdir("/proc/self/fd"), []
for room in range(3, 45):
    resource.setrlimit(resource.RLIMIT_NOFILE, (room, hard))
    try:
        results.append(len(safe_gpu.claim_gpus(8, timeout=0).devices_taken))
        safe_gpu.release_gpus()
    except Exception as err:
        results.append(type(err).__name__)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir("/proc/self/fd") == before, (room, os.listdir("/proc/self/fd"))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
say(*results)
"""
    results = child(code).hear().split()
    assert results[-1] == "8"
    assert "StateDirError" in results
