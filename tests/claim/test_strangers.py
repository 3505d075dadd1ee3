"""Processes that do not know of safe_gpu and come at the worst moment; drivers that show late, little or nothing."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from support.forks import forked

import safe_gpu
from safe_gpu.claim import view as host_view
from safe_gpu.errors import GpuContendedError, NoDriverError, NotEnoughGpusError, UnsatisfiableRequestError
from safe_gpu.gpus.devices import ProcessKind
from safe_gpu.host import procfs

HIDDEN = 999_999_999


class Holding:
    """A placeholder that runs ``come(device_no)``, and holds the GPU as ``pid`` (0: it does not show at all)."""

    def __init__(self, host: Any, come: Callable[[int], object] = lambda number: None, pid: int | None = None) -> None:
        self.host = host
        self.come = come
        self.pid = pid

    def __call__(self, device_no: int) -> Any:
        self.come(device_no)
        if self.pid != 0:
            return self.host.occupy(self.host.visible()[device_no], pid=self.pid)
        return None

    def release(self, context: Any) -> None:
        if context is not None:
            context.close()


# Between the first and the second poll


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({"processes": None, "process_error": "it timed out"}, "process list failed: it timed out"),
        ({"lost": True}, "lost"),
        ({"mig_enabled": True}, "MIG mode is on"),
        ({"memory_used": 60 << 30}, "in use by no process"),
    ],
)
def test_a_gpu_that_goes_bad_before_the_second_poll_is_given_back(
    host: Any, shown: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    host.on_poll = lambda number: number == 2 and host.edits.update({host.uuids[0]: shown})
    with caplog.at_level("INFO", logger="safe_gpu"):
        owner = safe_gpu.claim_gpus(2, timeout=0)
    assert owner.devices_taken == [2, 3]  # 0 and 1 were the first choice
    assert reason in caplog.text
    assert host.events.count("poll") == 2, "the whole host, before another choice"
    assert host.events.count("usage") == 3, "0 and 1, then 2 and 3 twice"
    named_by_uuid = os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(gpu.uuid for gpu in owner.gpus)
    assert named_by_uuid == ("lost" in shown), "CUDA's numbers mean others then"


def test_where_the_first_poll_is_old_the_second_asks_about_the_whole_host(host, monkeypatch) -> None:
    """After a wait, a GPU that is not this claim's may be lost, and CUDA's numbers mean others then."""
    monkeypatch.setattr(host_view, "_RECENT", -1.0)
    host.on_poll = lambda number: number == 2 and host.edits.update({host.uuids[7]: {"lost": True}})
    owner = safe_gpu.claim_gpus(1, timeout=0)
    assert [event for event in host.events if event in ("poll", "usage")] == ["poll", "poll", "usage"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == owner.gpus[0].uuid


# Between the second poll and the last


def test_a_stranger_beside_our_placeholder_is_named_and_everything_given_back(host, cleanup, untouched) -> None:
    placeholder = Holding(host, lambda number: number == 1 and cleanup.enter_context(host.stranger(1)))
    with untouched():
        with pytest.raises(GpuContendedError, match=f"process {host.stranger_pid} ") as caught:
            safe_gpu.claim_gpus(2, placeholder, timeout=0)
        cleanup.close()
    assert caught.value.uuid == host.uuids[1]
    assert [process.pid for process in caught.value.processes] == [host.stranger_pid]
    assert caught.value.nb_gpus == 2
    assert len(caught.value.verdicts) == 8


@pytest.mark.parametrize(
    ("before", "late"), [((), (3 << 30,)), ((600 << 20,), (600 << 20,))], ids=["one", "the second small one"]
)
@pytest.mark.parametrize(("poll", "error"), [(1, NotEnoughGpusError), (2, NotEnoughGpusError), (3, GpuContendedError)])
def test_a_renderer_at_every_poll(host, cleanup, untouched, poll, error, before, late) -> None:
    def come(pid: int, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            cleanup.enter_context(host.stranger(0, pid=pid, memory=size, kind=ProcessKind.GRAPHICS))

    with untouched():
        come(HIDDEN, before)
        host.on_poll = lambda number: number == poll and come(HIDDEN - 1, late)
        with pytest.raises(error, match=str(HIDDEN - 1)) as caught:
            safe_gpu.claim_gpus(1, timeout=0, only=0)
        assert caught.value.verdicts[0].state == "busy"
        assert "0" not in safe_gpu.get_free_gpus()
        cleanup.close()


def test_a_process_that_only_draws_is_no_stranger_until_it_computes(host: Any, cleanup: ExitStack, child: Any) -> None:
    other = child("listen()")
    cleanup.enter_context(host.stranger(0, kind=ProcessKind.GRAPHICS))
    placeholder = Holding(host, lambda number: cleanup.enter_context(host.stranger(0, pid=other.pid, kind="graphics")))
    safe_gpu.claim_gpus(1, placeholder, timeout=0, only=0)
    safe_gpu.release_gpus()
    placeholder.come = lambda number: cleanup.enter_context(host.stranger(0))
    with pytest.raises(GpuContendedError, match=f"process {host.stranger_pid} "):
        safe_gpu.claim_gpus(1, placeholder, timeout=0, only=0)


def test_the_mps_server_that_our_placeholder_starts_is_no_stranger(host, cleanup, eventually) -> None:
    server = cleanup.enter_context(subprocess.Popen(["/usr/bin/nvidia-cuda-mps-server", "60"], executable="/bin/sleep"))
    cleanup.callback(server.kill)
    # Within exec(2) descriptors are closed, for which Popen waits, before the command line is replaced.
    eventually(lambda: (procfs.command_of(server.pid) or "").startswith("/usr/bin/nvidia-cuda-mps-server"))

    def start(number: int) -> None:
        cleanup.enter_context(host.stranger(number, pid=server.pid))

    owner = safe_gpu.claim_gpus(2, Holding(host, start), timeout=0)
    assert owner.devices_taken == [0, 1]
    safe_gpu.release_gpus()
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(8)]


# Containers that show host pids


def test_a_context_that_a_framework_keeps_is_ours_in_the_next_claim_too(host: Any, cleanup: ExitStack) -> None:
    """One process that does not resolve is ours."""

    class Keeping(Holding):
        kept: Any = None

        def __call__(self, device_no: int) -> Any:
            if self.kept is None:
                self.kept = super().__call__(device_no)
                cleanup.callback(self.kept.close)

        def release(self, context: Any) -> None:
            pass

    placeholder = Keeping(host, pid=HIDDEN)
    for _ in range(2):
        owner = safe_gpu.claim_gpus(1, placeholder, timeout=0, only=4)
        assert owner.devices_taken == [4]
        safe_gpu.release_gpus()


def test_what_a_failed_claim_took_for_ours_is_forgotten(host: Any, cleanup: ExitStack) -> None:
    def come(number: int) -> None:
        if number == 0:
            cleanup.enter_context(host.stranger(0, pid=HIDDEN))
        else:
            cleanup.enter_context(host.stranger(1, pid=HIDDEN - 1))

    with pytest.raises(GpuContendedError):
        safe_gpu.claim_gpus(2, Holding(host, come, pid=0), timeout=0, only="0,1")
    with pytest.raises(NotEnoughGpusError, match=str(HIDDEN)):
        safe_gpu.claim_gpus(1, timeout=0, only=0)


def test_two_that_do_not_resolve_are_one_too_many(host: Any, cleanup: ExitStack) -> None:
    placeholder = Holding(host, lambda number: cleanup.enter_context(host.stranger(0, pid=HIDDEN - 1)), pid=HIDDEN)
    with pytest.raises(GpuContendedError) as caught:
        safe_gpu.claim_gpus(1, placeholder, timeout=0)
    assert {process.pid for process in caught.value.processes} == {HIDDEN, HIDDEN - 1}


# Drivers that lag, or die


def test_the_older_package_is_kept_out_until_the_driver_shows_our_placeholder(host: Any, spies: Any) -> None:
    own: list[Any] = []
    host.on_poll = lambda number: number == 6 and own.append(host.occupy(host.uuids[0]))
    safe_gpu.claim_gpus(1, Holding(host, pid=0), timeout=0)
    events = [event for event in host.events if event in ("poll", "usage", "legacy release")]
    assert events == ["poll"] + ["usage"] * 5 + ["legacy release"]
    own[0].close()


def test_a_gpu_that_is_lost_under_the_placeholder_is_no_gpu(host: Any, untouched: Callable[[], Any]) -> None:
    host.on_poll = lambda number: number == 3 and host.edits.update({host.uuids[0]: {"lost": True}})
    with untouched(), pytest.raises(NotEnoughGpusError, match="lost GPU 0") as caught:
        safe_gpu.claim_gpus(1, timeout=0)
    assert caught.value.verdicts[0].state == "unusable"


def test_a_process_list_that_fails_in_the_last_poll_gives_nothing_to_object_to(host: Any) -> None:
    host.on_poll = lambda number: number == 3 and host.edits.update({host.uuids[0]: {"processes": None}})
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0]


@pytest.mark.parametrize("last", [1, 2, 3, None], ids=lambda last: f"poll {last}" if last else "under a waiter")
def test_a_driver_that_dies_between_polls(host, ground, untouched, last: int | None) -> None:
    if last is None:
        ground.hold(*range(8))

    def die(number: int) -> None:
        if number == (last or 2):
            raise NoDriverError("the driver is gone", driver=host.name)

    host.on_poll = die
    with untouched(), pytest.raises(NoDriverError, match="the driver is gone"):
        safe_gpu.claim_gpus(2, timeout=60 if last else 1)  # a waiter polls at its deadline


def test_a_driver_that_can_never_list_processes_is_told_at_once(host: Any, untouched: Callable[[], Any]) -> None:
    host.edits = {uuid: {"processes": None, "processes_supported": False} for uuid in host.uuids}
    with untouched(), pytest.raises(UnsatisfiableRequestError, match=r"cannot list processes.*SAFE_GPU_DRIVER="):
        safe_gpu.claim_gpus(1, timeout=None)


# Drivers that list numbers of another PID namespace, no processes, or no memory: real processes on fake libraries


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


# Numbers of another PID namespace


def test_a_claim_that_is_listed_under_the_number_of_a_process_here(fake_gpus: Any) -> None:
    fake_gpus.devices("nvidiactl")
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


# Lists and memory that the driver can never tell


def test_gpus_without_process_lists_are_claimed_where_that_is_allowed(fake_gpus: Any, older_lock: None) -> None:
    fake_gpus.set(2, compute_error=NOT_SUPPORTED, mps_error=NOT_SUPPORTED, memory_error=NOT_SUPPORTED)
    code = "recheck._SHOWING = 1e9\nout['taken'] = claimed()"
    kind, text, _ = run(fake_gpus, code)["taken"]
    assert (kind, "SAFE_GPU_PROCESS_LIST=optional" in text) == ("UnsatisfiableRequestError", True)
    code += "\nout['free'] = safe_gpu.get_free_gpus()\nout['memory'] = claimed(min_memory='1GiB', timeout=None)"
    out = run(fake_gpus, code, SAFE_GPU_PROCESS_LIST="optional")
    assert (out["taken"], out["free"], len(out["warnings"])) == ([0], ["0", "1"], 1)
    assert "does not tell its memory" in out["memory"][1]
