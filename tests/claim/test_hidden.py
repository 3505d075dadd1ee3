"""Claims where the driver lists threads, numbers of another PID namespace, no processes, or no memory."""

import os
import subprocess
import sys
from typing import Any

import pytest
from support.forks import forked

import safe_gpu
from safe_gpu.errors import NotEnoughGpusError
from safe_gpu.gpus.devices import ProcessKind

MIB = 1 << 20
NOT_SUPPORTED = 3

PRELUDE = """
import logging
from safe_gpu.coordination import older_package as legacy
legacy.LOCK_FILE = os.environ["FAKE_GPU_DIR"] + "/older package/lock"
out = {"warnings": []}
class Kept(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            out["warnings"].append(record.getMessage())
logging.getLogger("safe_gpu").addHandler(Kept())
def claimed(number=1, *arguments, **options):
    taken = claim(number, *arguments, **options)
    safe_gpu.release_gpus()
    return taken
"""


def run(gpus: Any, code: str, **environment: str) -> Any:
    """What ``code`` leaves in ``out``."""
    return forked(gpus, PRELUDE + code, **environment)


@pytest.fixture
def older_lock(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock file of the older package, so that claims show themselves before others look."""
    monkeypatch.delenv("SAFE_GPU_LEGACY_LOCK")
    (fake_gpus.directory / "older package").mkdir()
    (fake_gpus.directory / "older package" / "lock").touch()


# Threads


def test_a_claim_from_another_thread_where_the_driver_lists_threads(fake_gpus: Any) -> None:
    fake_gpus.options(thread_ids=1)
    code = """
worker = threading.Thread(target=lambda: out.update(taken=claimed(2)))
worker.start()
worker.join()
"""
    assert run(fake_gpus, code) == {"taken": [0, 1], "warnings": []}


def test_a_stranger_who_is_listed_by_a_thread_is_named_by_its_process(fake_gpus: Any) -> None:
    code = (
        "import threading,sys; t = threading.Thread(target=sys.stdin.read); t.start(); print(t.native_id, flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        fake_gpus.process(fake_gpus.uuids[0], int(stranger.stdout.readline()))
        kind, text, _ = run(fake_gpus, "out['taken'] = claimed(only=0)")["taken"]
    assert (kind, f"process {stranger.pid} (" in text) == ("NotEnoughGpusError", True)


# Numbers of another PID namespace


def test_a_claim_that_is_listed_under_the_number_of_a_process_here(fake_gpus: Any) -> None:
    fake_gpus.devices("nvidiactl")
    fake_gpus.options(listed_as=os.getppid())
    code = "claimed(); out['taken'] = claimed()"
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as bystander:
        fake_gpus.options(listed_as=bystander.pid)
        assert run(fake_gpus, code) == {"taken": [0], "warnings": []}
        (fake_gpus.devices() / "nvidiactl").unlink()
        assert run(fake_gpus, code)["taken"][0] == "GpuContendedError", "there the number is that process's"


# Our own context is not listed


def test_where_nobody_is_listed_the_older_package_is_not_kept_waiting(fake_gpus: Any, older_lock: None) -> None:
    fake_gpus.options(hidden=1)
    code = "recheck._SHOWING = 1e9\nout['taken'] = claimed(2)"  # a wait would end this test by its time limit
    out = run(fake_gpus, code)
    assert out["taken"] == [0, 1]
    (warning,) = out["warnings"]
    assert warning.startswith("the driver does not list this process on GPU 0,1, so that others")


def test_a_driver_that_lists_a_context_late_is_waited_for(fake_gpus: Any, older_lock: None) -> None:
    fake_gpus.options(lag_ms=300)
    code = "recheck._SHOWING = 1e9\nout['taken'] = claimed()"
    assert run(fake_gpus, code) == {"taken": [0], "warnings": []}


def test_a_placeholder_that_shows_nothing_is_told_of_after_the_wait(fake_gpus: Any, older_lock: None) -> None:
    code = "recheck._SHOWING = 0.05\nout['taken'] = claimed(1, lambda device_no: None)"
    out = run(fake_gpus, code)
    assert out["taken"] == [0]
    (warning,) = out["warnings"]
    assert "GPU 0" in warning
    assert "<lambda> probably put nothing there" in warning


def test_a_context_of_our_own_that_is_not_listed_does_not_keep_us_out(fake_gpus: Any) -> None:
    """A framework keeps its context after the release; its memory is in use by no listed process."""
    fake_gpus.options(hidden=1)
    code = """
from safe_gpu.runtimes.cuda import CUDA
kept = []
class Keeping(safe_gpu.CudaPlaceholder):
    def __call__(self, device_no):
        kept.append(CUDA.hold(device_no))
        return super().__call__(device_no)
out["first"] = claimed(1, Keeping(), only=3)
out["second"] = claimed(1, only=3)
kept[0].release()
out["third"] = claimed(1, only=3)
"""
    out = run(fake_gpus, code)
    assert [out["first"], out["second"], out["third"]] == [[3]] * 3
    fake_gpus.change(3, used=300 * MIB)
    assert run(fake_gpus, "out['taken'] = claimed(1, only=3)")["taken"][0] == "NotEnoughGpusError"


# Outer claims


def test_a_claim_inside_one_whose_processes_are_not_listed(fake_gpus: Any) -> None:
    fake_gpus.options(hidden=1)
    code = """
import subprocess
with safe_gpu.GPUOwner(2, delegate=True, timeout=0, affinity=None) as outer:
    inside = "import safe_gpu; print(safe_gpu.claim_gpus(1, timeout=0, affinity=None).devices_taken)"
    child = subprocess.run([sys.executable, "-c", inside], capture_output=True, text=True)
    out["inside"] = child.stdout.strip() or child.stderr
    del os.environ["SAFE_GPU_SCOPE"], os.environ["CUDA_VISIBLE_DEVICES"]
    child = subprocess.run([sys.executable, "-c", inside], capture_output=True, text=True)
    out["outside"] = child.stdout.strip() or child.stderr
"""
    out = run(fake_gpus, code)
    assert (out["inside"], out["outside"]) == ("[0]", "[2]")


def test_the_memory_of_a_stranger_of_another_container_is_noticed(fake_gpus: Any) -> None:
    fake_gpus.change(0, used=600 * MIB)
    assert run(fake_gpus, "out['taken'] = claimed()")["taken"] == [1]
    assert run(fake_gpus, "out['taken'] = claimed()", SAFE_GPU_UNEXPLAINED_MEMORY="700MiB")["taken"] == [0]
    kind, text, _ = run(fake_gpus, "out['taken'] = claimed()", SAFE_GPU_UNEXPLAINED_MEMORY="some")["taken"]
    assert (kind, "SAFE_GPU_UNEXPLAINED_MEMORY" in text) == ("UnsatisfiableRequestError", True)


# Lists and memory that the driver can never tell


def test_gpus_without_process_lists_are_claimed_where_that_is_allowed(fake_gpus: Any, older_lock: None) -> None:
    fake_gpus.set(2, compute_error=NOT_SUPPORTED, mps_error=NOT_SUPPORTED, memory_error=NOT_SUPPORTED)
    code = "recheck._SHOWING = 1e9\nout['taken'] = claimed()"
    kind, text, _ = run(fake_gpus, code)["taken"]
    assert (kind, "SAFE_GPU_PROCESS_LIST=optional" in text) == ("UnsatisfiableRequestError", True)
    out = run(fake_gpus, code, SAFE_GPU_PROCESS_LIST="optional")
    assert out["taken"] == [0]
    assert len(out["warnings"]) == 1
    code = "out['free'] = safe_gpu.get_free_gpus()\nout['claim'] = claimed(min_memory='1GiB', timeout=None)"
    out = run(fake_gpus, code, SAFE_GPU_PROCESS_LIST="optional")
    assert out["free"] == ["0", "1"]
    assert out["claim"][0] == "UnsatisfiableRequestError"
    assert "does not tell its memory" in out["claim"][1]


# MPS servers


def test_an_idle_mps_server_of_another_user_is_no_stranger(host: Any, cleanup: Any) -> None:
    """hidepid=2 hides its name. It is on every GPU that its clients may use, and its clients are on one."""
    nameless = 999_999_999
    cleanup.enter_context(host.stranger(0, pid=nameless, memory=30 * MIB))
    with pytest.raises(NotEnoughGpusError, match=str(nameless)):
        safe_gpu.claim_gpus(1, timeout=0, only=0)
    cleanup.enter_context(host.stranger(1, pid=nameless - 1, kind=ProcessKind.MPS))
    assert safe_gpu.claim_gpus(1, timeout=0, only=0).devices_taken == [0]
    safe_gpu.release_gpus()
    with pytest.raises(NotEnoughGpusError, match=str(nameless - 1)):
        safe_gpu.claim_gpus(1, timeout=0, only=1)
