"""Claims in users' own programs: copies of the owner, closed descriptors, frozen apps, notebooks, workers, upgrades;
what they write into the history, and random sequences of them."""

import copy
import ctypes
import json
import logging
import logging.handlers
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import api
from support.claims import claim, try_claim
from support.forks import json_from_child
from support.gpus import PACKAGE_ROOT
from support.guard import is_locked
from support.real import long
from support.vendor_hosts import HipHost

import safe_gpu


def test_an_owner_is_neither_copied_nor_pickled(dgx: Any) -> None:
    with claim(2) as owner:
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"owner\.devices_taken or owner\.gpus.*release_gpus\(\)"):
                duplicate([owner] if duplicate is copy.deepcopy else owner)
            assert duplicate([owner.devices_taken, owner.gpus])
        assert owner.devices_taken == [0, 1]


@pytest.mark.parametrize("placeholder", [safe_gpu.NoPlaceholder, lambda: None])
def test_a_release_leaves_files_alone_that_have_its_old_numbers(dgx, tmp_path, placeholder) -> None:
    """As a daemon closes all descriptors, and opens files of its own under the same numbers."""

    def daemon() -> list[object]:
        before = os.listdir("/proc/self/fd")
        owner = safe_gpu.GPUOwner(2, placeholder(), affinity=None, timeout=0)
        new = (int(fd) for fd in os.listdir("/proc/self/fd") if fd not in before)
        taken = [fd for fd in new if os.path.exists(f"/proc/self/fd/{fd}")]  # not the one that listed them
        (tmp_path / "own").write_text("kept")
        own = os.open(tmp_path / "own", os.O_RDWR)
        for fd in taken:
            os.dup2(own, fd)
        child = os.fork()
        if child == 0:
            owner.release_gpus()
            os._exit(sum(not os.path.exists(f"/proc/self/fd/{fd}") for fd in taken))
        lost_in_child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        owner.release_gpus()
        left = all(os.path.exists(f"/proc/self/fd/{fd}") for fd in taken)
        return [len(taken) > 2, lost_in_child, left, (tmp_path / "own").read_text()]

    assert json_from_child(daemon) == [True, 0, True, "kept"]


@pytest.mark.parametrize("app", ["frozen", "embedding", "python"])
def test_an_app_that_contains_python_is_not_started_again(app: str, monkeypatch, tmp_path: Path) -> None:
    """One whose name is an interpreter's cannot be told from one: it is started once, and then not again."""
    program, trace = tmp_path / f"{app}-app", tmp_path / "started"
    program.write_text(f'#!/bin/sh\necho once >> {trace}\nexec "{sys.executable}" "{tmp_path}/main.py"\n')
    program.chmod(0o755)
    (tmp_path / "main.py").write_text(f"""
import sys; sys.executable = {str(program)!r}
from safe_gpu.runtimes.cuda import CUDA
len(open({str(trace)!r}).readlines()) < 9 and CUDA.visible_in_child()
""")
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE_ROOT))
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(sys, "frozen", app == "frozen", raising=False)
    if app == "embedding":
        monkeypatch.setattr(sys, "base_exec_prefix", str(tmp_path))
    with pytest.raises(safe_gpu.NoDriverError) as refusal:
        api.CUDA.visible_in_child()
    if app == "python":
        assert trace.read_text() == "once\n"
    else:
        assert f"{program} is a program that contains Python" in str(refusal.value)
        assert not trace.exists()


def test_the_same_request_keeps_its_gpus_and_another_one_does_not(dgx: Any) -> None:
    owner = safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), timeout=0, model="A100")
    for again in ({}, {"timeout": 5, "affinity": None}, {"min_memory": None, "only": ()}):
        assert safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), model="A100", **again) is owner is safe_gpu.gpu_owner
    for other in ({"nb_gpus": 3}, {"model": None}, {"delegate": True}, {"visible_as": "uuid"}):
        held = r"holds GPU 0,1 by another request: release_gpus\(\) first"
        with pytest.raises(safe_gpu.AlreadyClaimedError, match=held) as caught:
            safe_gpu.ensure_gpus(**{"nb_gpus": 2, "model": "A100", **other})
        assert caught.value.devices == (0, 1)
    with pytest.raises(safe_gpu.AlreadyClaimedError, match=r"or call ensure_gpus\(\)"):
        claim(1)
    assert owner.devices_taken == [0, 1]
    safe_gpu.release_gpus()
    with claim(1, model="A100") as claimed:
        assert safe_gpu.ensure_gpus(model="A100") is claimed


class Threads:
    """Threads that call ensure_gpus, and what came of it, by name; the first one claims until ``go_on`` is set."""

    def __init__(self) -> None:
        self.claiming, self.go_on = threading.Event(), threading.Event()
        self.fails = False
        self.came: dict[str, Any] = {}
        self.threads: list[threading.Thread] = []

    def placeholder(self, device_no: int) -> object:
        """Holds nothing; the first one takes its time, and may fail."""
        if self.claiming.is_set():
            return object()
        self.claiming.set()
        assert self.go_on.wait(60)
        if self.fails:
            raise ValueError("no memory")
        return object()

    def start(self, name: str, nb_gpus: int, *, waits: bool = True, **options: Any) -> None:
        """Start one, and come back when it waits for another thread."""
        logger = logging.Logger(name, logging.INFO)
        waiting = logging.handlers.QueueHandler(SimpleQueue())
        logger.addHandler(waiting)

        def work() -> None:
            try:
                self.came[name] = safe_gpu.ensure_gpus(nb_gpus, self.placeholder, logger, affinity=None, **options)
            except safe_gpu.SafeGpuError as err:
                self.came[name] = err

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        if waits:
            assert "another thread of this process" in waiting.queue.get(timeout=60).getMessage()

    def end(self) -> dict[str, Any]:
        self.go_on.set()
        for thread in self.threads:
            thread.join(60)
        return self.came


@pytest.fixture
def threads(dgx: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    """Of these the first one claims two GPUs."""
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")  # CUDA_VISIBLE_DEVICES is that of the first one
    started = Threads()
    started.start("first", 2, waits=False, timeout=0)
    assert started.claiming.wait(60)
    yield started
    started.end()


def test_threads_that_want_the_same_gpus_wait_for_each_other(threads: Threads) -> None:
    for name in ("second", "third"):
        threads.start(name, 2, timeout=60)
    came = threads.end()
    assert came["first"].devices_taken == [0, 1]
    assert came["second"] is came["third"] is came["first"] is safe_gpu.gpu_owner


def test_a_thread_that_wants_others_is_refused(threads: Threads) -> None:
    threads.start("second", 3, timeout=None)
    came = threads.end()
    assert isinstance(came["second"], safe_gpu.AlreadyClaimedError)
    assert came["second"].devices == (0, 1)


def test_a_thread_claims_itself_where_the_first_one_fails(threads: Threads) -> None:
    threads.fails = True
    threads.start("second", 2, timeout=60)
    came = threads.end()
    assert isinstance(came["first"], safe_gpu.PlaceholderError)
    assert came["second"].devices_taken == [0, 1]


def test_a_thread_waits_no_longer_than_its_timeout(threads: Threads) -> None:
    """Of which what is left counts for its own claim."""
    with pytest.raises(safe_gpu.ClaimTimeout, match="another thread of this process has been claiming GPUs for 0 s"):
        safe_gpu.ensure_gpus(2, threads.placeholder, affinity=None, timeout=0.05)
    assert threads.end()["first"].devices_taken == [0, 1]


def test_a_release_leaves_a_claim_alone_that_another_thread_is_still_making(threads: Threads) -> None:
    """That thread would use GPUs that it believes to hold."""
    safe_gpu.release_gpus()
    assert threads.end()["first"].devices_taken == [0, 1]
    safe_gpu.release_gpus()
    assert len(safe_gpu.get_free_gpus()) == 8


def test_a_forked_child_does_not_wait_for_threads_of_its_parent(threads: Threads) -> None:
    def ensure() -> list[int]:
        return safe_gpu.ensure_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0).devices_taken

    assert json_from_child(ensure) == [2]


def test_a_placeholder_that_asks_for_the_same_gpus_is_refused(dgx: Any) -> None:
    def placeholder(device_no: int) -> None:
        safe_gpu.ensure_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=None)

    with pytest.raises(safe_gpu.AlreadyClaimedError):
        safe_gpu.ensure_gpus(1, placeholder, affinity=None, timeout=0)
    with safe_gpu.ensure_gpus(1, safe_gpu.NoPlaceholder(), affinity=None, timeout=0) as owner:
        assert owner.devices_taken == [0]


def test_a_claim_of_no_gpu_hides_all(dgx: Any) -> None:
    with safe_gpu.claim_gpus(0) as owner:
        assert (os.environ["CUDA_VISIBLE_DEVICES"], owner.devices_taken, owner.placeholders) == ("", [], [])
        assert safe_gpu.ensure_gpus(0) is owner
        with pytest.raises(safe_gpu.AlreadyClaimedError, match="has claimed 0 GPUs"):
            claim(1)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


RANKS = """
import os, subprocess, sys, safe_gpu
{}
    safe_gpu.claim_gpus(2, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
print("rank", os.environ.get("LOCAL_RANK", "0"), "on", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
if "LOCAL_RANK" not in os.environ:
    sys.exit(subprocess.run([sys.executable, *sys.argv], env={{**os.environ, "LOCAL_RANK": "1"}}).returncode)
"""


def test_a_second_rank_is_told_the_line_that_works(dgx: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"

    def run(condition: str) -> subprocess.CompletedProcess[str]:
        script.write_text(RANKS.format(condition))
        return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)

    line = 'if "LOCAL_RANK" not in os.environ:'
    refused = run("if True:")
    assert f"claim once for all: `{line} safe_gpu.claim_gpus(...)`" in refused.stderr
    assert run(line).stdout == "rank 0 on 0,1\nrank 1 on 0,1\n"


def test_a_notebook_is_named(child: Any, tmp_path: Path) -> None:
    (tmp_path / "ipykernel_launcher.py").write_text(
        "import safe_gpu; safe_gpu.claim_gpus(8, safe_gpu.NoPlaceholder(), affinity=None); print('has'); input()"
    )
    environment = {"PYTHONPATH": f"{PACKAGE_ROOT}:{tmp_path}", "JPY_SESSION_NAME": "/home/anna/train.ipynb"}
    code = "import os; os.execv(sys.executable, [sys.executable, '-m', 'ipykernel_launcher', '-f', 'kernel.json'])"
    child(code, "has", env=environment)
    with pytest.raises(safe_gpu.NotEnoughGpusError, match=r"-m ipykernel_launcher train\.ipynb\)"):
        claim(1)


WORKER = """
import multiprocessing, safe_gpu
safe_gpu.claim_gpus({}, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
"""


@pytest.mark.parametrize(("nb_gpus", "fence"), [(8, ""), (1, ""), (1, "ignore")])
def test_a_worker_that_imports_the_claim_is_told_where_to_put_it(
    dgx: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nb_gpus: int, fence: str
) -> None:
    """It gets none, or, where it disregards what its parent has left it, another one, with a warning."""
    monkeypatch.setenv("SAFE_GPU_FENCE", fence)
    (script := tmp_path / "script.py").write_text(WORKER.format(nb_gpus))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    said = 'put the claim under `if __name__ == "__main__":`'
    assert (said in done.stderr, "delegate" in done.stderr) == (True, False)


def test_a_holder_and_waiters_while_the_package_is_replaced(tmp_path: Path, command: Any) -> None:
    """The files of the new version cannot even be imported, so that none of it gets into these processes."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE_ROOT / "safe_gpu", tmp_path / "safe_gpu", ignore=ignored)

    def run(timeout: str, script: str) -> subprocess.Popen[str]:
        line = ["run", "--only", 0, "-t", timeout, "--", "sh", "-c", script]
        return command.start(*line, stdin=subprocess.PIPE, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})

    holder = run("inf", "echo held; read line")
    assert holder.stdout.readline() == "held\n"
    patient, hasty = run("inf", "echo got"), run("3s", "")
    told = [waiter.stderr.readline() for waiter in (patient, hasty)]
    assert "waiting " in told[0]
    for path in (tmp_path / "safe_gpu").rglob("*.py"):
        path.write_text("raise ImportError('the new version')")
    shutil.rmtree(tmp_path / "safe_gpu" / "__pycache__", ignore_errors=True)
    assert "1 GPU asked for, 0 free after" in told[1] + hasty.communicate(timeout=60)[1]
    assert (holder.communicate("\n", timeout=60), holder.returncode) == (("", ""), 0)
    assert (patient.communicate(timeout=60)[0], patient.returncode) == ("got\n", 0)


WAITER = """
import logging, safe_gpu
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
def broken(device_no):
    raise ValueError("no memory")
try:
    safe_gpu.claim_gpus(1, broken, only=0, timeout=None)
except safe_gpu.PlaceholderError as err:
    say("failed", err)
owner = safe_gpu.claim_gpus(1, only=0, timeout=None)
say("got", *(name for name in sys.modules if name.startswith("safe_gpu.")))
owner.release_gpus()
say("released")
"""


def hear_until(child: Any, beginning: str) -> str:
    """The next line of a child that begins so."""
    while True:
        line = child.hear()
        if line.startswith(beginning):
            return str(line)


VENDORS = {
    "nvidia": {"safe_gpu.drivers.nvml", "safe_gpu.drivers.nvidia_smi", "safe_gpu.runtimes.cuda"},
    "amd": {"safe_gpu.drivers.kfd", "safe_gpu.runtimes.hip", "safe_gpu.topology.kfd_topology"},
    "intel": {"safe_gpu.drivers.intel"},
    "simulated": {"safe_gpu.drivers.simulated"},
}
"""Vendor -> the modules that are for its GPUs alone."""


@pytest.fixture
def hosts(fake_gpus: Any, tmp_path: Path, build_library: Any) -> dict[str, dict[str, str]]:
    """Driver -> the environment in which it is the driver of this host."""
    smi = {"SAFE_GPU_DRIVER": "nvidia-smi"}
    return {
        "nvml": fake_gpus.env,
        "nvidia-smi": {**fake_gpus.env, **smi},
        "kfd": HipHost(tmp_path / "amd", build_library("hip.c", "libamdhip64.so"), count=1).env,
        "simulated": {"SAFE_GPU_DRIVER": "simulated:dgx-a100"},
        "simulated AMD": {"SAFE_GPU_DRIVER": "simulated:mi250x"},
    }


@pytest.mark.parametrize(
    ("driver", "vendor"),
    [
        ("nvml", "nvidia"),
        ("kfd", "amd"),
        pytest.param("nvidia-smi", "nvidia", marks=long),
        pytest.param("simulated", "simulated", marks=long),
        pytest.param("simulated AMD", "simulated", marks=long),
    ],
)
def test_a_waiter_has_all_that_its_claim_needs_and_no_other_vendor(
    hosts: Any, fake_nvidia_smi: Any, child: Any, tmp_path: Path, driver: str, vendor: str
) -> None:
    """The directory of the package is removed while it waits, as an upgrade of the Debian package does.

    Its claim fails, as it should, and the next one does not."""
    fake_nvidia_smi({})
    package = tmp_path / "package"
    shutil.copytree(PACKAGE_ROOT / "safe_gpu", package / "safe_gpu")
    here = {**hosts[driver], "PATH": os.environ["PATH"]}
    hold = "import safe_gpu; safe_gpu.claim_gpus(1, safe_gpu.NoPlaceholder(), only=0); say('holds'); listen()"
    holder = child(hold, says="holds", env=here)
    waiter = child(WAITER, env={**here, "PYTHONPATH": str(package)}, cwd=tmp_path)
    hear_until(waiter, "waiting for 1 GPU")
    shutil.rmtree(package)
    holder.kill()
    assert "broken could not hold" in hear_until(waiter, "failed ")
    loaded = set(hear_until(waiter, "got ").split())
    for name, modules in VENDORS.items():
        assert name == vendor or not loaded & modules
    hear_until(waiter, "released")
    waiter.finish()


# Programs that close descriptors which they did not open


def close_all_new(before: set[str]) -> None:
    """As a program does that becomes a daemon."""
    for name in set(os.listdir("/proc/self/fd")) - before:
        with suppress(OSError):  # the one that listed them
            os.close(int(name))


def test_a_claim_whose_descriptors_were_closed_is_noticed(dgx: Any) -> None:
    """Others can have the GPUs. After a release the process can claim again."""

    def daemon() -> tuple[list[str], list[int]]:
        before = set(os.listdir("/proc/self/fd"))
        owner = safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
        assert safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), affinity=None, timeout=0) is owner
        close_all_new(before)
        errors = []
        for notice in (lambda: safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), affinity=None), safe_gpu.bind):
            with pytest.raises(api.HolderLostError) as caught:
                notice()
            errors.append(str(caught.value))
        errors += safe_gpu.bind(strict=False).threads.refused
        safe_gpu.release_gpus()
        again = safe_gpu.ensure_gpus(2, safe_gpu.NoPlaceholder(), affinity=None, timeout=0)
        return errors, again.devices_taken

    errors, taken = json_from_child(daemon)
    assert (len(errors), len(set(errors)), taken) == (3, 1, [0, 1])
    assert "no longer holds GPU 0,1, which it claimed" in errors[0]
    assert "call release_gpus(), and claim again" in errors[0]


@pytest.mark.parametrize("closed", ["claims/", "socket:"])
def test_one_that_lost_its_entry_or_a_door_alone_too(dgx: Any, closed: str) -> None:
    def lose() -> str:
        before = os.listdir("/proc/self/fd")
        with claim(1):
            for name in os.listdir("/proc/self/fd"):
                with suppress(OSError):
                    if closed in os.readlink(f"/proc/self/fd/{name}") and name not in before:
                        os.close(int(name))
            with pytest.raises(api.HolderLostError):
                safe_gpu.bind()
        return "noticed"

    assert json_from_child(lose) == "noticed"


def test_a_forked_child_binds_by_the_claim_of_its_parent(dgx: Any) -> None:
    """It has no doors."""
    with claim(1):
        assert json_from_child(lambda: len(safe_gpu.bind().cpus) > 0)


def test_a_child_that_c_code_forks_removes_the_entry_of_its_own_claim(dgx: Any, state_dir: Path) -> None:
    """Python runs no hook in it."""

    def fork_in_c() -> int:
        child = ctypes.PyDLL(None).fork()
        if child == 0:
            claim(1).release_gpus()
            os._exit(len(os.listdir(state_dir / "claims")))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert json_from_child(fork_in_c) == 0


# What claims write into the history, whatever way they end


def past() -> list[api.PastClaim]:
    claims, warnings = api.claims_between(0, time.time() + 1)
    assert warnings == []
    return claims


def lines(state_dir: Path) -> list[dict[str, Any]]:
    text = "".join(file.read_text() for file in sorted((state_dir / api.history.NAME).glob("*.jsonl")))
    return [json.loads(line) for line in text.splitlines()]


def test_a_claim_is_told_by_its_entry_and_written_when_it_is_released(state_dir: Path, dgx: Any) -> None:
    with claim(2, hold_for=60):
        (running,) = past()
        assert lines(state_dir) == []
        assert (running.running, running.labels) == (True, ("0", "1"))
    first, end = lines(state_dir)
    assert (first["uid"], first["gpus"]) == (os.geteuid(), dgx.uuids[:2])
    assert (first["until"], first["waited"] >= 0) == (pytest.approx(first["claim"][1] + 60, abs=0.01), True)
    assert end == {"v": 1, "claim": first["claim"], "ended": end["ended"]}
    (known,) = past()
    assert (known.running, known.seen, known.ended) == (False, end["ended"], end["ended"])


def test_a_claim_that_was_killed_ended_between_last_seen_and_found_dead(state_dir: Path, command, eventually) -> None:
    """And the history has names only, though entries may have the whole command by their user's wish."""
    words = ("run", "-n", 2, "--", "sh", "-c", "echo up; read x", "hunter2")
    started = command.start(*words, stdin=subprocess.PIPE, env={"SAFE_GPU_RECORD_COMMAND": "full"})
    assert started.stdout.readline() == "up\n"
    assert any("hunter2" in file.read_text() for file in (state_dir / "claims").iterdir())
    before = time.time()
    assert command.run("status").returncode == 0
    assert [one.running for one in past()] == [True]
    started.kill()
    started.wait(60)
    killed = time.time()
    assert [one.ended is not None for one in past()] == [True]  # by its entry
    with claim(2):
        (dead, mine) = past()
        assert len(os.listdir(state_dir / "claims")) == 1
    assert (dead.command, dead.gpus, dead.running) == ("sh", mine.gpus, False)
    assert before - 1 < dead.seen < killed + 1 < (dead.ended or 0.0) + 2
    assert [one["claim"][0] for one in lines(state_dir) if "ended" in one] == [started.pid, os.getpid()]
    assert "hunter2" not in json.dumps(lines(state_dir))


def test_a_claim_that_is_refused_tells_of_the_dead_that_it_has_removed(state_dir: Path, command: Any) -> None:
    words = ("run", "--", "sh", "-c", "echo up; read x")
    killed, other = (command.start(*words, stdin=subprocess.PIPE) for _ in range(2))
    assert [one.stdout.readline() for one in (killed, other)] == ["up\n", "up\n"]
    killed.kill()
    killed.wait(60)
    assert try_claim(8) is None
    assert len(os.listdir(state_dir / "claims")) == 1
    assert [one["claim"][0] for one in lines(state_dir) if "ended" in one] == [killed.pid]


def test_a_claim_that_withdraws_is_not_told_though_an_earlier_attempt_stood(state_dir, host, dgx, monkeypatch) -> None:
    """A stranger comes before the second poll of the first attempt, and the GPU is drained while the second is made."""
    make_entry, taken = api.Claim.make_entry, []

    def make_entry_and_drain(one: api.Claim, *arguments: Any, **more: Any) -> None:
        make_entry(one, *arguments, **more)
        taken.append(one.file)
        if len(taken) == 2:
            (state_dir / "closed").write_text(f"{host.uuids[0]} - - - a fan is broken\n")

    def disturb(number: int) -> None:
        if number == 2:
            strangers.append(host.stranger(0))
        elif strangers:
            strangers.pop().close()
        if len(taken) == 2:
            (state_dir / "closed").unlink(missing_ok=True)

    strangers: list[Any] = []
    monkeypatch.setattr(api.Claim, "make_entry", make_entry_and_drain)
    host.on_poll = disturb
    with claim(1, only=0, timeout=60):
        assert len(taken) == 3
    told = [one["claim"] for one in lines(state_dir) if "gpus" in one]
    assert len(told) == 2, "the first, which stood, and the third"


def test_nothing_of_it_is_done_under_host_lock(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []

    def spy(*arguments: Any) -> bool:
        locked.append(is_locked(state_dir / "host.lock"))
        return True

    monkeypatch.setattr("safe_gpu.claim.claim.append", spy)
    assert (try_claim(1), locked) == ((0,), [False])


def test_a_history_that_cannot_be_written_costs_its_lines_and_no_claim(state_dir: Path) -> None:
    state_dir.mkdir()
    state_dir.chmod(0o1777)
    (state_dir / api.history.NAME).touch()
    assert try_claim(1) == (0,)
    (state_dir / api.history.NAME).unlink()
    assert past() == []
    assert (try_claim(1), len(past())) == ((0,), 1)


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_that_jumps_does_not_change_how_long_a_claim_lasted(state_dir, monkeypatch, jump: float) -> None:
    clock, began = time.time, time.monotonic()
    with claim():
        monkeypatch.setattr(time, "time", lambda: clock() + jump)
    lasted = time.monotonic() - began
    end = lines(state_dir)[-1]
    assert 0 <= end["ended"] - end["claim"][1] <= lasted + 1e-3


# Random sequences of claims, releases, kills and strangers, against a model of who must hold what


PLAYER = """
import json, os, safe_gpu
while line := listen():
    options = json.loads(line)
    try:
        if options:
            options["placeholder_fn"] = safe_gpu.NoPlaceholder() if options.pop("bare") else None
            answer = safe_gpu.GPUOwner(timeout=0, affinity=None, **options).devices_taken
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, answer))
        else:
            answer = safe_gpu.release_gpus()
            assert not {"CUDA_VISIBLE_DEVICES", "SAFE_GPU_SCOPE"} & set(os.environ)
    except safe_gpu.SafeGpuError as err:
        answer = type(err).__name__
        assert "CUDA_VISIBLE_DEVICES" not in os.environ or answer == "AlreadyClaimedError"
    say(json.dumps(answer))
"""
players, gpus = st.integers(0, 3), st.integers(0, 7)
numbers, subsets, yes_or_no = st.integers(1, 9), st.lists(gpus, unique=True), st.booleans()
wishes = st.fixed_dictionaries({"nb_gpus": numbers, "only": subsets, "bare": yes_or_no, "delegate": yes_or_no})
orders = st.one_of(
    st.tuples(st.just("claim"), players, wishes),
    st.tuples(st.sampled_from(["release", "kill"]), players),
    st.tuples(st.just("come_or_go"), gpus),
)


class World:
    """Claims of some processes, and the model of who must hold what, side by side."""

    def __init__(self, start: Callable[[], Any], stranger_pid: int) -> None:
        self.start = start
        self.players = [start() for _ in range(4)]
        self.host = api.SimulatedDriver("dgx-a100")
        self.stranger_pid = stranger_pid
        self.held: dict[int, set[int]] = {}
        self.strangers: dict[int, api.SimulatedContext] = {}

    @property
    def free(self) -> set[int]:
        return set(range(8)).difference(self.strangers, *self.held.values())

    def ask(self, player: int, wish: dict[str, Any]) -> Any:
        self.players[player].tell(json.dumps(wish))
        return json.loads(self.players[player].hear())

    def claim(self, player: int, wish: dict[str, Any]) -> None:
        answer, number = self.ask(player, wish), wish["nb_gpus"]
        allowed = set(wish["only"] or range(8))
        if player in self.held:
            assert answer == "AlreadyClaimedError"
        elif number > len(allowed):
            assert answer == "UnsatisfiableRequestError"
        elif number > len(allowed & self.free):
            assert answer == "NotEnoughGpusError"
        else:
            assert len(set(answer) & allowed & self.free) == len(answer) == number
            self.held[player] = set(answer)

    def release(self, player: int) -> None:
        if self.held.pop(player, None):
            assert self.ask(player, {}) is None

    def kill(self, player: int) -> None:
        if self.held.pop(player, None):  # starting another one takes time
            self.players[player].kill()
            self.players[player] = self.start()

    def come_or_go(self, gpu: int) -> None:
        if gpu in self.strangers:
            self.strangers.pop(gpu).close()
        elif gpu in self.free:
            self.strangers[gpu] = self.host.occupy(self.host.idle.gpus[gpu].uuid, pid=self.stranger_pid)

    def check(self) -> None:
        assert safe_gpu.get_free_gpus() == [str(index) for index in sorted(self.free)]

    def clear(self) -> None:
        for player in list(self.held):
            self.release(player)
        for gpu in list(self.strangers):
            self.come_or_go(gpu)


@long
def test_whatever_happens_in_whatever_order(child: Any, stranger_pid: int) -> None:
    world = World(lambda: child(PLAYER), stranger_pid)

    @settings(max_examples=40, suppress_health_check=list(HealthCheck))
    @given(st.lists(orders, max_size=25))
    def check(story: list[tuple[Any, ...]]) -> None:
        try:
            for name, *arguments in story:
                getattr(world, name)(*arguments)
                world.check()
        finally:
            world.clear()
        world.check()

    check()
