"""Who is refused, when, and in which words; deadlines that are passed down."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu.claim import attempt as look
from safe_gpu.claim import claim as verification
from safe_gpu.claim import free as inquiry
from safe_gpu.claim import options as terms
from safe_gpu.coordination import holders as survey
from safe_gpu.coordination import legacy
from safe_gpu.errors import ClaimTimeout, LockTimeout, NotEnoughGpusError, UnsatisfiableRequestError

SHORT = 0.05


@pytest.fixture
def stuck_lock() -> Any:
    """host.lock, held by this process through a descriptor of its own."""
    state = Path(os.environ["SAFE_GPU_DIR"])
    state.mkdir()
    state.chmod(0o1777)
    fd = os.open(state / "host.lock", os.O_RDWR | os.O_CREAT, 0o666)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield fd
    os.close(fd)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """host.lock is waited for a moment only."""
    for module in (terms, inquiry, survey):
        monkeypatch.setattr(module, "MINIMUM_PATIENCE", SHORT)


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
    assert lines[0] == "6 GPUs asked for, 5 free: wait for them (timeout=), or ask for fewer."
    assert lines[1].startswith(f"  GPU 0-2 (NVIDIA A100-SXM4-80GB): process {host.stranger_pid} ")
    assert lines[2:] == ["  GPU 3-7 (NVIDIA A100-SXM4-80GB): free"]


def test_too_few_until_the_deadline(host: Any, leases: Any, untouched: Callable[[], Any]) -> None:
    leases.hold(*host.uuids[:3])
    with untouched(), pytest.raises(ClaimTimeout) as caught:
        safe_gpu.claim_gpus(6, timeout=SHORT)
    assert isinstance(caught.value, NotEnoughGpusError)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.timeout == SHORT
    assert caught.value.verdicts[0].state == "claimed"
    assert "wait longer" in str(caught.value)


def test_behind_a_waiter_a_claim_that_does_not_wait_is_told_of_it(
    host: Any, child: Any, leases: Any, untouched: Callable[[], Any], eventually: Any
) -> None:
    leases.hold(host.uuids[0])
    threads = threading.active_count()
    waiter = child("import safe_gpu\nsafe_gpu.claim_gpus(8, timeout=None)")
    queue = Path(os.environ["SAFE_GPU_DIR"]) / "queue"
    eventually(lambda: (queue / "1.ticket").exists() and (queue / "1.ticket").stat().st_size > 0)
    for timeout, kind in ((0, NotEnoughGpusError), (SHORT, ClaimTimeout)):
        with pytest.raises(NotEnoughGpusError, match=rf"behind \S+ \(pid {waiter.process.pid}, wants 8 GPUs") as caught:
            safe_gpu.claim_gpus(1, timeout=timeout)
        assert type(caught.value) is kind

    def a_thread_sleeps() -> bool:  # on a loaded machine the deadline may pass before there is one
        with pytest.raises(ClaimTimeout):
            safe_gpu.claim_gpus(1, timeout=SHORT)
        return threading.active_count() == threads + 1

    # A thread that nobody can wake sleeps on that waiter's ticket; however often one tries, there is one.
    eventually(a_thread_sleeps)
    with untouched(), pytest.raises(ClaimTimeout):
        safe_gpu.claim_gpus(1, timeout=SHORT)
    waiter.kill()
    eventually(lambda: threading.active_count() == threads)


def test_a_wait_ends_when_the_leases_are_free(host: Any, leases: Any) -> None:
    leases.hold(*host.uuids)
    taken = safe_gpu.GPUOwner(8, timeout=60, _on_wait=lambda news: leases.free()).devices_taken
    assert taken == list(range(8))


def test_a_wait_ends_when_the_stranger_goes(host: Any, cleanup: ExitStack) -> None:
    stranger = cleanup.enter_context(host.stranger(4))
    assert safe_gpu.GPUOwner(8, timeout=60, _on_wait=lambda news: stranger.close()).devices_taken == list(range(8))


@pytest.mark.parametrize(
    ("number", "arguments"),
    [
        (9, {}),
        (2, {"only": "3"}),
        (8, {"exclude": 0}),
        (1, {"model": "H100"}),
        (1, {"min_memory": "81GiB"}),
        (1, {"only": "9"}),
        (1, {"exclude": "GPU-"}),
    ],
)
def test_what_this_host_can_never_do_is_not_waited_for(
    host: Any, untouched: Callable[[], Any], number: int, arguments: dict[str, Any]
) -> None:
    with untouched(), pytest.raises(UnsatisfiableRequestError):
        safe_gpu.claim_gpus(number, timeout=None, **arguments)
    assert host.polls == 1


def test_the_number_that_is_too_large_and_the_host_are_named(host: Any) -> None:
    with pytest.raises(UnsatisfiableRequestError, match="9 GPUs are asked for, but this host has only 8") as caught:
        safe_gpu.claim_gpus(9)
    assert caught.value.value == 9
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RuntimeError)


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


def test_two_mig_instances_are_refused_and_one_is_named_by_uuid(host_of: Any, untouched: Callable[[], Any]) -> None:
    host = host_of("mig-h100")
    instances = [gpu for gpu in host.idle.gpus if gpu.is_mig_instance]
    with untouched():
        with pytest.raises(UnsatisfiableRequestError, match="one MIG instance"):
            safe_gpu.claim_gpus(2, timeout=None)
        claimed = safe_gpu.claim_gpus(1, timeout=0, only="0")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == claimed.gpus[0].uuid == instances[0].uuid
        assert "CUDA_DEVICE_ORDER" not in os.environ
        assert safe_gpu.get_free_gpus() == ["0:1", "0:2", "0:3", "1"]
        safe_gpu.release_gpus()
        assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [1]  # a whole one first
        assert os.environ["CUDA_VISIBLE_DEVICES"] == host.uuids[-1]
        safe_gpu.release_gpus()


def test_visible_as_uuid(host: Any) -> None:
    claimed = safe_gpu.claim_gpus(2, timeout=0, visible_as="uuid")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in claimed.gpus)
    assert "CUDA_DEVICE_ORDER" not in os.environ


# The fence


def test_the_fence_is_named_where_it_stands_in_the_way(
    host: Any, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], Any], cleanup: ExitStack
) -> None:
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


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "0,0", "GPU-"])
def test_an_empty_fence_leaves_no_gpu(
    host: Any, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], Any], value: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with untouched(), pytest.raises(UnsatisfiableRequestError, match="to 0 of 8 GPUs; 8 others are free"):
        safe_gpu.claim_gpus(1, timeout=None)
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(8)]


def test_the_fence_follows_cudas_grammar(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, taken in (("5,2,x,1", [2, 5]), (f"{host.uuids[6]},{host.uuids[1][:12]}", [1, 6]), (" 3 ,4 ", [3, 4])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        with safe_gpu.GPUOwner(2, timeout=0) as claimed:
            assert claimed.devices_taken == taken


def test_an_ambiguous_fence_is_refused_where_cuda_cannot_be_asked(
    host_of: Any, monkeypatch: pytest.MonkeyPatch, untouched: Callable[[], Any]
) -> None:
    host_of("workstation-mixed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with untouched(), pytest.raises(UnsatisfiableRequestError, match="CUDA_VISIBLE_DEVICES=0 is ambiguous") as caught:
        safe_gpu.claim_gpus(1, timeout=None)
    assert caught.value.value == "0"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in str(caught.value)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]


# Locks and deadlines


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("timeout", [0, SHORT])
def test_a_stuck_host_lock_names_its_holder(
    host: Any, stuck_lock: int, untouched: Callable[[], Any], timeout: float
) -> None:
    with untouched(), pytest.raises(LockTimeout, match=rf"host\.lock is held by process {os.getpid()} of ") as caught:
        safe_gpu.claim_gpus(1, timeout=timeout)
    assert caught.value.pid == os.getpid()
    assert caught.value.user
    assert caught.value.path == os.path.join(os.environ["SAFE_GPU_DIR"], "host.lock")
    with pytest.raises(LockTimeout):
        safe_gpu.get_free_gpus()


@pytest.mark.usefixtures("impatient")
def test_a_crowd_at_the_end_of_a_wait_is_no_lock_timeout(
    host: Any, leases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases.hold(*host.uuids)
    held = look.HostLock
    deadlines: list[float] = []

    class Recording(held):  # type: ignore[misc, valid-type]
        def __init__(self, deadline: float) -> None:
            deadlines.append(deadline - time.monotonic())
            super().__init__(deadline)

    monkeypatch.setattr(look, "HostLock", Recording)
    with pytest.raises(ClaimTimeout):
        safe_gpu.claim_gpus(1, timeout=2 * SHORT)
    assert min(deadlines) > SHORT / 2


def test_the_timeout_is_one_deadline_from_the_call(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[float] = []
    deadlines: list[float] = []

    class Slow:
        def prepare(self) -> None:
            time.sleep(SHORT)
            prepared.append(time.monotonic())

        def __call__(self, device_no: int) -> None:
            return None

    def take_legacy_lock(deadline: float, logger: Any, signals: Any) -> None:
        deadlines.append(deadline)

    monkeypatch.setattr(verification, "take_legacy_lock", take_legacy_lock)
    called = time.monotonic()
    safe_gpu.claim_gpus(1, Slow(), timeout=60)
    assert called + 60 <= deadlines[0] <= prepared[0] - SHORT + 60


def test_the_older_packages_lock_is_waited_for_to_the_deadline(
    host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: Any, untouched: Callable[[], Any]
) -> None:
    lock = tmp_path / "gpu-lock"
    lock.touch()
    monkeypatch.setattr(legacy, "LOCK_FILE", str(lock))
    older = child(
        f"import fcntl\nfile = open({str(lock)!r}, 'r+')\nfcntl.lockf(file, fcntl.LOCK_EX)\nsay('ok')\nlisten()"
    )
    older.hear()
    for timeout in (0, SHORT):  # a thread stays behind in the kernel's queue, once it has waited
        with nullcontext() if timeout else untouched(), pytest.raises(LockTimeout, match="older safe-gpu") as caught:
            safe_gpu.claim_gpus(2, timeout=timeout)
        assert caught.value.pid == older.pid
    older.tell()
    assert safe_gpu.claim_gpus(2, timeout=60).devices_taken == [0, 1]


def test_without_the_older_package_its_lock_is_not_made(
    host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "there" / "gpu-lock"
    monkeypatch.setattr(legacy, "LOCK_FILE", str(lock))
    safe_gpu.claim_gpus(1, timeout=0)
    safe_gpu.release_gpus()
    assert not lock.parent.exists()
    monkeypatch.setenv("SAFE_GPU_LEGACY_LOCK", "always")
    safe_gpu.claim_gpus(1, timeout=0)
    assert lock.exists()


def test_ours_pass_side_by_side_while_the_older_package_waits(
    host: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: Any
) -> None:
    lock = tmp_path / "gpu-lock"
    lock.touch()
    monkeypatch.setattr(legacy, "LOCK_FILE", str(lock))
    monkeypatch.setattr(verification, "_SHOWING", 60.0)
    probe = (
        f"import fcntl\nfile = open({str(lock)!r}, 'r+')\nlisten()\n"
        "for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):\n"
        "    try:\n        fcntl.lockf(file, how | fcntl.LOCK_NB)\n        say('free')\n"
        "    except BlockingIOError:\n        say('held')\n"
    )
    other = child(probe)
    answers: list[str] = []

    class Placeholder:
        def __call__(self, device_no: int) -> Any:
            other.tell()
            answers.extend([other.hear(), other.hear()])
            return host.occupy(host.visible()[device_no])

        def release(self, thing: Any) -> None:
            thing.close()

    safe_gpu.claim_gpus(1, Placeholder(), timeout=0)
    assert answers == ["free", "held"]  # shared with another of ours, closed to the older package
    late = child(probe)
    late.tell()
    assert [late.hear(), late.hear()] == ["free", "free"]


# get_free_gpus


def test_free_gpus_are_those_of_the_host_in_numeric_order(
    host_of: Any, leases: Any, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of("big-16")
    everyone = [str(index) for index in range(16)]
    assert safe_gpu.get_free_gpus() == everyone
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert safe_gpu.get_free_gpus() == everyone
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    leases.hold(host.uuids[2])
    cleanup.enter_context(host.stranger(11))
    cleanup.enter_context(host.stranger(12, kind="graphics"))
    host.edits[host.uuids[13]] = {"processes": None}
    host.edits[host.uuids[14]] = {"lost": True}
    taken = safe_gpu.claim_gpus(1, timeout=0).devices_taken
    gone = {"2", "11", "13", "14", *map(str, taken)}
    assert safe_gpu.get_free_gpus() == [index for index in everyone if index not in gone]
