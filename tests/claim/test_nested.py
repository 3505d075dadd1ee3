"""Inside a claim: claims of ranks and children, who is kept out, and workers that find their GPU, or have lost it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.forks import in_fork

import safe_gpu
from safe_gpu import GPUOwner, NotEnoughGpusError, UnsatisfiableRequestError, WrongDeviceError
from safe_gpu.claim.worker import check_expected_gpu
from safe_gpu.errors import HolderLostError

CLAIM = """
import sys, safe_gpu
owner = safe_gpu.claim_gpus({nb_gpus}, {placeholder}, affinity=None, timeout=None)
print(*owner.devices_taken, flush=True)
sys.stdin.readline()
"""


def rank(nb_gpus: int = 1, placeholder: str = "None") -> str:
    return CLAIM.format(nb_gpus=nb_gpus, placeholder=placeholder)


def claim(nb_gpus: int = 1, **options: Any) -> GPUOwner:
    return safe_gpu.claim_gpus(nb_gpus, safe_gpu.NoPlaceholder(), affinity=None, **options)


def ends_well(started: subprocess.Popen[str]) -> str:
    out, err = started.communicate("\n", timeout=60)
    assert started.returncode == 0, err
    return out


def inside(token: str, monkeypatch: pytest.MonkeyPatch, devices: str | None = None) -> None:
    """Make this process one that was started inside the claim with that token."""
    monkeypatch.setenv("SAFE_GPU_SCOPE", token)
    if devices is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")


@pytest.fixture
def holding(command, ground):
    """``holding(2)`` runs a command that holds GPUs; returns the process and its token."""

    def start(nb_gpus: int) -> tuple[subprocess.Popen[str], str]:
        words = ("run", "-n", nb_gpus, "--", "sh", "-c", "echo $SAFE_GPU_SCOPE; read x")
        started = command.start(*words, stdin=subprocess.PIPE)
        return started, started.stdout.readline().strip()

    return start


def test_ranks_under_run_get_a_gpu_each(command, ground) -> None:
    ground.hold(1, 4, 5, 6, 7)
    launcher = 'exec 3<&0; for rank in 0 1 2; do "$0" -c "$1" <&3 & done; wait'
    words = ("run", "-n", 3, "--", "sh", "-c", launcher, sys.executable, rank())
    started = command.start(*words, stdin=subprocess.PIPE)
    assert sorted(started.stdout.readline() for _ in range(3)) == ["0\n", "2\n", "3\n"]
    assert (ground.claimed(), ground.claimed(inside=True)) == (list(range(8)), [0, 2, 3])
    ends_well(started)
    assert (ground.claimed(), ground.claimed(inside=True)) == ([1, 4, 5, 6, 7], [])


def test_no_more_than_the_claim_around_has(holding, ground, monkeypatch: pytest.MonkeyPatch) -> None:
    _, token = holding(2)
    inside(token, monkeypatch)
    monkeypatch.setenv("SAFE_GPU_FENCE", "ignore")
    with pytest.raises(UnsatisfiableRequestError, match=r"claim_gpus\(3\) runs inside the claim of .* holds 2 GPUs"):
        claim(3)
    with pytest.raises(UnsatisfiableRequestError, match="0 of its 2"):
        claim(1, only=7)
    with pytest.raises(UnsatisfiableRequestError, match="delegate=True is not possible inside another claim"):
        claim(1, delegate=True)
    with claim(2) as owner:
        assert owner.devices_taken == [0, 1]
        assert ground.claimed() == [0, 1]


def test_more_than_the_claim_around_holds(command, ground) -> None:
    """It names the one that is to be larger, and not its variables: to lift that limit leads nowhere."""
    python = (sys.executable, "-c", "import safe_gpu; safe_gpu.claim_gpus(2)")
    larger = (command.path, "run", "-n", 3, "--", "true")
    in_shell = command.run("run", "--", "sh", "-c", 'echo $$; "$@"; exit', "sh", *python)
    unlimited = command.run("run", "--", "sh", "-c", 'echo $$; SAFE_GPU_FENCE=ignore exec "$@"', "sh", *larger)
    with claim(1, delegate=True):
        delegated = command.run(*larger[1:])
    for done, holder, asked, number, this in (
        (in_shell, in_shell.stdout.strip(), "claim_gpus(2) runs", 2, "claim_gpus"),
        (unlimited, unlimited.stdout.strip(), "-n 3 is", 3, "this one"),
        (delegated, os.getpid(), "-n 3 is", 3, "this one"),
    ):
        there = f"ask for {number} there (safe-gpu run -n {number}, or claim_gpus({number}, delegate=True))"
        said = f"{asked} inside the claim of process {holder}, which holds 1 GPU: {there}, or leave {this} out\n"
        assert done.stderr.endswith(said)


def test_the_claim_around_ends_while_one_inside_waits(holding, ground, child, command, monkeypatch) -> None:
    """It waits on as anybody else, and its place counts among all from then on."""
    started, token = holding(1)
    inside(token, monkeypatch, "0")
    first = child(rank())
    assert first.hear() == "0"
    waiter = command.start("run", "--", "echo", "mine")
    assert "for 1 GPU" in waiter.stderr.readline()
    ends_well(started)
    assert waiter.poll() is None
    first.tell()
    out, err = waiter.communicate(timeout=60)
    assert (out, waiter.returncode) == ("mine\n", 0)
    assert err.count("names no living claim") == 1


def test_a_third_level_is_told_so_at_once(command, ground) -> None:
    line = [command.path, "run", "-n", 1, "--", sys.executable, "-c", rank()]
    done = command.run("run", "-n", 2, "--", *line)
    assert done.returncode == 1
    assert "this process itself holds GPU 0: claims inside claims go one level deep" in done.stderr


def test_nobody_takes_a_gpu_that_an_orphaned_claim_inside_holds(holding, ground, child, command, monkeypatch) -> None:
    started, token = holding(2)
    with monkeypatch.context() as patch:
        inside(token, patch)
        inner = child(rank(1, "safe_gpu.NoPlaceholder()"), says="0")
    started.kill()
    started.wait(60)
    assert ground.claimed() == []
    assert safe_gpu.get_free_gpus() == ["1", "2", "3", "4", "5", "6", "7"]
    with claim(7) as owner:
        assert owner.devices_taken == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(NotEnoughGpusError, match=rf"GPU 0 .*claimed by process {inner.pid} "):
        claim(8, timeout=0)
    waiter = command.start("run", "-n", 8, "--", "echo", "all")
    assert "for 8 GPUs (7 free); " in waiter.stderr.readline()
    inner.tell()
    assert waiter.communicate(timeout=60)[0] == "all\n"


def test_those_who_wait_inside_and_outside_do_not_meet(holding, ground, child, command, monkeypatch) -> None:
    _, token = holding(2)
    everything = command.start("run", "-n", 8, "--", "true")  # waits outside, first of all
    assert "for 8 GPUs (6 free); GPU 0,1: " in everything.stderr.readline()
    with monkeypatch.context() as patch:
        inside(token, patch, "0,1")
        first = child(rank(2))
        assert first.hear() == "0 1"  # and did not queue behind it
        second = command.start("run", "--", "echo", "second")
        assert "for 1 GPU (0 of 2 free); GPU 0,1: " in second.stderr.readline()
        third = command.start("run", "-n", 2, "--", "echo", "third")
        assert f"(pid {second.pid}, wants 1 GPU, " in third.stderr.readline()
    assert len(ground.tickets()) == 3
    everything.terminate()
    everything.wait(60)
    with claim(6, timeout=0) as owner:  # outside nobody is ahead now
        assert owner.devices_taken == [2, 3, 4, 5, 6, 7]
    first.tell()
    assert second.communicate(timeout=60)[0] == "second\n"
    assert third.communicate(timeout=60)[0] == "third\n"


# Workers that are told their GPU (SAFE_GPU_EXPECT)


@pytest.fixture
def worker() -> Iterator[pytest.MonkeyPatch]:
    """Inside a delegating claim of GPU 0 and 1 it sets variables of a worker for GPU 1; so far they are right."""
    with claim(2, delegate=True) as owner, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        patch.setenv("SAFE_GPU_EXPECT", owner.gpus[1].uuid)
        yield patch
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # where a test released the claim, the patch has put that back


@pytest.mark.parametrize("verb", ["run", "bind"])
def test_the_command_runs_on_the_gpu_that_was_meant_or_not_at_all(worker, command, verb: str) -> None:
    done = command.run(verb, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES ${SAFE_GPU_EXPECT-unset}")
    assert (done.returncode, done.stdout) == (0, "1 unset\n"), done.stderr
    worker.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = command.run(verb, "--", "echo", "started")
    assert (done.returncode, done.stdout, "CUDA_VISIBLE_DEVICES=0 it sees GPU-" in done.stderr) == (70, "", True)
    worker.setenv("CUDA_VISIBLE_DEVICES", "1")
    worker.setenv("SAFE_GPU_SCOPE", "of another claim")
    done = command.run(verb, "--", "echo", "started")
    assert (done.returncode, done.stdout, "is no longer held by its claim" in done.stderr) == (70, "", True)


def test_other_gpus_than_the_expected_one(worker: pytest.MonkeyPatch) -> None:
    for visible, seen in (
        ("0,1", "CUDA_VISIBLE_DEVICES=0,1 it sees GPU-"),
        ("", "CUDA_VISIBLE_DEVICES= it sees 0 GPUs"),
        (None, "without CUDA_VISIBLE_DEVICES it sees 8 GPUs"),
    ):
        worker.delenv("CUDA_VISIBLE_DEVICES") if visible is None else worker.setenv("CUDA_VISIBLE_DEVICES", visible)
        with pytest.raises(WrongDeviceError, match=f"{os.environ['SAFE_GPU_EXPECT']}.*{seen}"):
            check_expected_gpu()
    worker.setenv("CUDA_VISIBLE_DEVICES", "1")
    safe_gpu.release_gpus()
    with pytest.raises(HolderLostError, match="is no longer held"):
        check_expected_gpu()


def test_without_the_variable_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safe_gpu.claim.worker.opened_driver", None)
    check_expected_gpu()
    monkeypatch.setenv("SAFE_GPU_EXPECT", "")
    check_expected_gpu()


def test_two_workers_of_one_gpu_share_it_under_bind(worker: pytest.MonkeyPatch, command) -> None:
    """``run`` claims the GPU for its command alone; ``bind`` claims nothing."""
    first = command.start("bind", "--", "sh", "-c", "echo started; cat")
    assert first.stdout.readline() == "started\n"
    assert command.run("bind", "--", "printenv", "CUDA_VISIBLE_DEVICES").stdout == "1\n"
    assert command.run("run", "--timeout", 0, "--", "printenv", "CUDA_VISIBLE_DEVICES").stdout == "1\n"
    first.communicate("", timeout=60)


# A GPU that is lost after a claim shifts CUDA's numbers


SHIFT = "CUDA_VISIBLE_DEVICES=1 now means GPU 2, which this claim does not hold, since GPU 0 is lost"


def test_bind_in_python_notices_it_and_makes_no_state_directory(host: Any) -> None:
    def work() -> list[bool]:
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        safe_gpu.bind()
        made = os.path.exists(os.environ["SAFE_GPU_DIR"])
        claim(1)
        before = str(safe_gpu.bind())
        host.edits[host.uuids[0]] = {"lost": True}
        return [made, SHIFT in before, SHIFT in str(safe_gpu.bind())]

    assert in_fork(work) == [False, False, True]


@pytest.mark.skipif(not os.path.exists("/sys/devices/system/cpu/cpu0/topology"), reason="needs /sys")
def test_status_and_bind_notice_it(fake_gpus: Any, command: Any) -> None:
    fake_gpus.set(4)
    looks = "safe-gpu status --json 2>&1; safe-gpu bind -- echo bound 2>&1; "
    script = f"export COLUMNS=300; safe-gpu status; echo up; read x; safe-gpu status; {looks}"
    started = command.start("run", "--only", "1", "--", "sh", "-c", script, stdin=subprocess.PIPE, env=fake_gpus.env)
    before = list(iter(started.stdout.readline, "up\n"))
    fake_gpus.change(0, lost=1)
    out, _ = started.communicate("\n", timeout=60)
    assert (SHIFT in "".join(before), f"warning: {SHIFT}" in out, out.count(SHIFT)) == (False, True, 3)
    assert out.endswith("bound\n")
