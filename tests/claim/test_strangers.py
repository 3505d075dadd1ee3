"""Processes that do not know of safe_gpu and come at the worst moment; drivers that show late, little or nothing; and
GPUs on which a claim failed, which are noted, taken last, and forgiven once a placeholder works there."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.forks import out_of_child
from support.state import write_for_all

import safe_gpu
from safe_gpu import PlaceholderError

HIDDEN = 999_999_999


class Holding:
    """A placeholder that runs ``come(device_no)``, and holds the GPU as ``pid`` (0: it does not show at all)."""

    def __init__(self, host: Any, come: Callable[[int], object] = lambda number: None, pid: int | None = None) -> None:
        self.host = host
        self.come = come
        self.pid = pid

    def __call__(self, device_no: int) -> Any:
        self.come(device_no)
        return None if self.pid == 0 else self.host.occupy(self.host.visible()[device_no], pid=self.pid)

    def release(self, context: Any) -> None:
        if context is not None:
            context.close()


# Between the first and the second poll


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({"processes": None, "process_error": "it timed out"}, "process list failed: it timed out"),
        ({"lost": True}, "lost"),
        ({"memory_used": 60 << 30}, "in use by no process"),
    ],
)
def test_a_gpu_that_goes_bad_before_the_second_poll_is_given_back(host, shown, reason: str, caplog) -> None:
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
    monkeypatch.setattr("safe_gpu.claim.polls.RECENT", -1.0)
    host.on_poll = lambda number: number == 2 and host.edits.update({host.uuids[7]: {"lost": True}})
    owner = safe_gpu.claim_gpus(1, timeout=0)
    assert [event for event in host.events if event in ("poll", "usage")] == ["poll", "poll", "usage"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == owner.gpus[0].uuid


def test_where_the_driver_shows_the_same_gpus_the_second_asks_about_those_of_the_claim(host, monkeypatch) -> None:
    monkeypatch.setattr("safe_gpu.claim.polls.RECENT", -1.0)
    monkeypatch.setattr(host, "shows_same", lambda snapshot: True)
    safe_gpu.claim_gpus(1, timeout=0)
    assert [event for event in host.events if event in ("poll", "usage")] == ["poll", "usage", "usage"]


# Between the second poll and the last


def test_a_stranger_beside_our_placeholder_is_named_and_everything_given_back(host, cleanup, untouched) -> None:
    placeholder = Holding(host, lambda number: number == 1 and cleanup.enter_context(host.stranger(1)))
    with untouched():
        with pytest.raises(api.GpuContendedError, match=f"process {host.stranger_pid} ") as caught:
            safe_gpu.claim_gpus(2, placeholder, timeout=0)
        cleanup.close()
    assert (caught.value.uuid, caught.value.processes[0].pid) == (host.uuids[1], host.stranger_pid)


@pytest.mark.parametrize(("before", "late"), [((), (3 << 30,)), ((600 << 20,), (600 << 20,))])
@pytest.mark.parametrize(
    ("poll", "error"), [(1, api.NotEnoughGpusError), (2, api.NotEnoughGpusError), (3, api.GpuContendedError)]
)
def test_a_renderer_at_every_poll(host, cleanup, untouched, poll, error, before, late) -> None:
    def come(pid: int, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            cleanup.enter_context(host.stranger(0, pid=pid, memory=size, kind=api.ProcessKind.GRAPHICS))

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
    cleanup.enter_context(host.stranger(0, kind=api.ProcessKind.GRAPHICS))
    placeholder = Holding(host, lambda number: cleanup.enter_context(host.stranger(0, pid=other.pid, kind="graphics")))
    with safe_gpu.claim_gpus(1, placeholder, timeout=0, only=0):
        pass
    placeholder.come = lambda number: cleanup.enter_context(host.stranger(0))
    with pytest.raises(api.GpuContendedError, match=f"process {host.stranger_pid} "):
        safe_gpu.claim_gpus(1, placeholder, timeout=0, only=0)


def test_the_mps_server_that_our_placeholder_starts_is_no_stranger(host, cleanup, eventually) -> None:
    server = cleanup.enter_context(subprocess.Popen(["/usr/bin/nvidia-cuda-mps-server", "60"], executable="/bin/sleep"))
    cleanup.callback(server.kill)
    # Within exec(2) descriptors are closed, for which Popen waits, before the command line is replaced.
    eventually(lambda: (api.procfs.command_of(server.pid) or "").startswith("/usr/bin/nvidia-cuda-mps-server"))

    placeholder = Holding(host, lambda number: cleanup.enter_context(host.stranger(number, pid=server.pid)))
    with safe_gpu.claim_gpus(2, placeholder, timeout=0) as owner:
        assert owner.devices_taken == [0, 1]
    assert safe_gpu.get_free_gpus() == [str(index) for index in range(8)]


def test_a_context_that_a_framework_keeps_is_ours_in_the_next_claim_too(host: Any, cleanup: ExitStack) -> None:
    """One process that does not resolve is ours."""
    placeholder = Holding(host, pid=HIDDEN)
    placeholder.release = lambda context: cleanup.callback(context.close)  # type: ignore[method-assign]
    for _ in range(2):
        with safe_gpu.claim_gpus(1, placeholder, timeout=0, only=4) as owner:
            assert owner.devices_taken == [4]


def test_what_a_failed_claim_took_for_ours_is_forgotten(host: Any, cleanup: ExitStack) -> None:
    placeholder = Holding(host, lambda n: cleanup.enter_context(host.stranger(n, pid=HIDDEN - n)), pid=0)
    with pytest.raises(api.GpuContendedError):
        safe_gpu.claim_gpus(2, placeholder, timeout=0, only="0,1")
    with pytest.raises(api.NotEnoughGpusError, match=str(HIDDEN)):
        safe_gpu.claim_gpus(1, timeout=0, only=0)


def test_two_that_do_not_resolve_are_one_too_many(host: Any, cleanup: ExitStack) -> None:
    placeholder = Holding(host, lambda number: cleanup.enter_context(host.stranger(0, pid=HIDDEN - 1)), pid=HIDDEN)
    with pytest.raises(api.GpuContendedError) as caught:
        safe_gpu.claim_gpus(1, placeholder, timeout=0)
    assert {process.pid for process in caught.value.processes} == {HIDDEN, HIDDEN - 1}


def test_the_older_package_is_kept_out_until_the_driver_shows_our_placeholder(host: Any, spies: Any) -> None:
    own: list[Any] = []
    host.on_poll = lambda number: number == 6 and own.append(host.occupy(host.uuids[0]))
    safe_gpu.claim_gpus(1, Holding(host, pid=0), timeout=0)
    events = [event for event in host.events if event in ("poll", "usage", "legacy release")]
    assert events == ["poll"] + ["usage"] * 5 + ["legacy release"]
    own[0].close()


def test_a_gpu_is_lost_under_the_placeholder_or_its_process_list_fails(host: Any, untouched: Callable[[], Any]) -> None:
    host.on_poll = lambda number: number == 3 and host.edits.update({host.uuids[0]: {"lost": True}})
    with untouched(), pytest.raises(api.NotEnoughGpusError, match="lost GPU 0") as caught:
        safe_gpu.claim_gpus(1, timeout=0)
    assert caught.value.verdicts[0].state == "unusable"
    host.polls, host.edits = 0, {}
    host.on_poll = lambda number: number == 3 and host.edits.update({host.uuids[0]: {"processes": None}})
    assert safe_gpu.claim_gpus(1, timeout=0).devices_taken == [0], "nothing to object to"


@pytest.mark.parametrize("last", [1, 2, 3, None], ids=lambda last: f"poll {last}" if last else "under a waiter")
def test_a_driver_that_dies_between_polls(host, dgx, untouched, last: int | None) -> None:
    if last is None:
        dgx.hold(*range(8))

    def die(number: int) -> None:
        if number == last or (last is None and number > 1):
            raise api.NoDriverError("the driver is gone", driver=host.name)

    host.on_poll = die
    with untouched(), pytest.raises(api.NoDriverError, match="the driver is gone"):
        safe_gpu.claim_gpus(2, timeout=60 if last else 1)  # a waiter polls at its deadline


# Drivers that list numbers of another PID namespace, no processes, or no memory: real processes on fake libraries


PRELUDE = """
import logging
from safe_gpu.coordination import older_package as legacy
legacy.LOCK_FILE = os.environ["FAKE_GPU_DIR"] + "/older package/lock"
out = {"warnings": []}
def keep(record):
    if record.levelno >= logging.WARNING:
        out["warnings"].append(record.getMessage())
logging.getLogger("safe_gpu").addFilter(keep)
def claimed(number=1, *arguments, **options):
    taken = claim(number, *arguments, **options)
    safe_gpu.release_gpus()
    return taken
"""


def run(gpus: Any, code: str, **environment: str) -> Any:
    """What ``code`` leaves in ``out``."""
    return out_of_child(gpus, PRELUDE + code, **environment)


@pytest.fixture
def older_lock(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock file of the older package, so that claims show themselves before others look."""
    monkeypatch.delenv("SAFE_GPU_LEGACY_LOCK")
    (fake_gpus.directory / "older package").mkdir()
    (fake_gpus.directory / "older package" / "lock").touch()


def test_a_claim_that_is_listed_under_the_number_of_a_process_here(fake_gpus: Any) -> None:
    fake_gpus.devices("nvidiactl")
    code = "claimed(); out['taken'] = claimed()"
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as bystander:
        fake_gpus.options(listed_as=bystander.pid)
        assert run(fake_gpus, code) == {"taken": [0], "warnings": []}
        (fake_gpus.devices() / "nvidiactl").unlink()
        assert run(fake_gpus, code)["taken"][0] == "GpuContendedError", "there the number is that process's"


@pytest.mark.parametrize(
    ("options", "patience", "arguments", "warning"),
    [
        ({"hidden": 1}, 1e9, "", "the driver does not list this process on GPU 0, so that others"),
        ({"lag_ms": 300}, 1e9, "", None),
        ({}, 0.05, "1, lambda device_no: None", ".*GPU 0.*<lambda> probably put nothing there"),
    ],
)
def test_how_long_the_older_package_is_kept_out(fake_gpus, older_lock, options, patience, arguments, warning) -> None:
    """Not where nobody is listed, and not for ever where a placeholder shows nothing."""
    fake_gpus.options(**options)
    out = run(fake_gpus, f"recheck.SHOWING = {patience}\nout['taken'] = claimed({arguments})")
    assert (out["taken"], len(out["warnings"])) == ([0], warning is not None)
    assert warning is None or re.match(warning, out["warnings"][0])


def test_a_context_of_our_own_that_is_not_listed_does_not_keep_us_out(fake_gpus: Any) -> None:
    """A framework keeps its context after the release; its memory is in use by no listed process."""
    fake_gpus.options(hidden=1)
    code = """
from safe_gpu.runtimes.cuda import CUDA
kept = []
out["taken"] = [claimed(1, lambda device_no: kept.append(CUDA.hold(device_no)), only=3), claimed(1, only=3)]
kept[0].release()
out["taken"].append(claimed(1, only=3))
"""
    assert run(fake_gpus, code)["taken"] == [[3]] * 3
    fake_gpus.change(3, used=300 << 20)
    assert run(fake_gpus, "out['taken'] = claimed(1, only=3)")["taken"][0] == "NotEnoughGpusError"


def test_a_claim_inside_one_whose_processes_are_not_listed(fake_gpus: Any) -> None:
    fake_gpus.options(hidden=1)
    code = """
import subprocess
with safe_gpu.GPUOwner(2, delegate=True, timeout=0, affinity=None) as outer:
    inside = "import safe_gpu; print(safe_gpu.claim_gpus(1, timeout=0, affinity=None).devices_taken)"
    out["inside"] = subprocess.check_output([sys.executable, "-c", inside], text=True)
    del os.environ["SAFE_GPU_SCOPE"], os.environ["CUDA_VISIBLE_DEVICES"]
    out["outside"] = subprocess.check_output([sys.executable, "-c", inside], text=True)
"""
    out = run(fake_gpus, code)
    assert (out["inside"], out["outside"]) == ("[0]\n", "[2]\n")


def test_gpus_without_process_lists_are_claimed_where_that_is_allowed(fake_gpus: Any, older_lock: None) -> None:
    fake_gpus.set(2, compute_error=3, mps_error=3, memory_error=3)  # not supported
    code = "recheck.SHOWING = 1e9\nout['taken'] = claimed(timeout=None)"
    kind, text, _ = run(fake_gpus, code)["taken"]
    assert (kind, "cannot list processes" in text) == ("UnsatisfiableRequestError", True)
    assert "SAFE_GPU_PROCESS_LIST=optional" in text
    code += "\nout['free'] = safe_gpu.get_free_gpus()"
    out = run(fake_gpus, code, SAFE_GPU_PROCESS_LIST="optional")
    assert (out["taken"], out["free"], len(out["warnings"])) == ([0], ["0", "1"], 1)


# GPUs on which a claim failed


ECC = "CUDA_ERROR_ECC_UNCORRECTABLE"


def notes() -> list[str]:
    """UUIDs of the GPUs with a note."""
    return sorted(path.stem for path in Path(os.environ["SAFE_GPU_DIR"], "faults").glob("[!.]*"))


def claim(number: int = 1, **options: Any) -> safe_gpu.GPUOwner:
    return safe_gpu.claim_gpus(number, **{"timeout": 0, "affinity": None, **options})


def damage(host: Any, uuid: str) -> None:
    """Let a simulated GPU refuse contexts."""
    host.occupy(uuid).close()  # makes the directory
    write_for_all(Path(host.tree.path, f"{uuid}.bad"), f"{ECC}: uncorrectable ECC error encountered")


def test_a_claim_that_gets_a_bad_gpu_fails_and_the_next_takes_another(host, caplog: pytest.LogCaptureFixture) -> None:
    damage(host, host.uuids[0])
    with pytest.raises(PlaceholderError, match=rf"{ECC}.* GPU 0 is taken last for a day: start a new ") as caught:
        claim(2)
    assert (caught.value.device_no, caught.value.uuid, notes()) == (0, host.uuids[0], [host.uuids[0]])
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert "Failed to acquire placeholder on GPU 0" in caplog.text
    assert (claim(7).devices_taken, notes()) == ([1, 2, 3, 4, 5, 6, 7], [host.uuids[0]])


def test_the_trouble_of_a_framework_is_no_fault_of_the_gpu(host: Any, untouched: Any) -> None:
    def failing(device_no: int) -> None:
        raise RuntimeError("out of memory")

    with untouched(), pytest.raises(PlaceholderError) as caught:
        claim(placeholder_fn=failing)
    assert (caught.value.uuid, "taken last" in str(caught.value), notes()) == (host.uuids[0], False, [])


@pytest.mark.parametrize(("placeholder", "forgiven"), [(None, True), (safe_gpu.NoPlaceholder(), False)])
def test_a_noted_gpu_is_forgiven_where_a_placeholder_works(host, dgx, placeholder, forgiven: bool) -> None:
    api.write_fault(os.environ["SAFE_GPU_DIR"], host.uuids[0], api.GpuFault(time.time(), ECC))
    dgx.hold(*range(1, 8))
    assert claim(placeholder_fn=placeholder).devices_taken == [0]
    assert notes() == ([] if forgiven else [host.uuids[0]])


def test_a_note_that_cannot_be_written_costs_nothing(host: Any, caplog: pytest.LogCaptureFixture) -> None:
    claim()
    safe_gpu.release_gpus()
    Path(os.environ["SAFE_GPU_DIR"], "faults", f"{host.uuids[0]}.{os.geteuid()}").mkdir(parents=True)
    damage(host, host.uuids[0])
    with pytest.raises(PlaceholderError, match=ECC):
        claim()
    assert "the note that a GPU failed cannot be changed" in caplog.text


def test_a_hidden_process_on_an_exclusive_gpu_makes_it_the_last_choice(fake_gpus: Any, stranger_pid: int) -> None:
    fake_gpus.set(8, mode=3)
    fake_gpus.process(fake_gpus.uuids[0], stranger_pid, 8 << 20, kind="graphics")  # not among those that are asked for
    assert out_of_child(fake_gpus, "out = claim(1, CudaPlaceholder())")[0] == "PlaceholderError"
    assert out_of_child(fake_gpus, "out = claim(1, CudaPlaceholder())") == [1]


@pytest.mark.parametrize(("trouble", "number", "noted"), [("bad", 1, [0]), ("bad_init", 1, [0]), ("bad_init", 4, [0])])
def test_a_broken_gpu_is_blamed_also_where_cuda_does_not_say_which_it_is(fake_gpus, trouble, number, noted) -> None:
    fake_gpus.change(0, **{trouble: 214})
    name, message, _ = out_of_child(fake_gpus, f"out = claim({number})")
    assert (name, "(214)" in message) == ("PlaceholderError", True)
    assert notes() == [fake_gpus.uuids[index] for index in noted]
    assert not noted or out_of_child(fake_gpus, "out = claim(7)") == [1, 2, 3, 4, 5, 6, 7]
