"""Inside a claim: a worker finds its GPU (SAFE_GPU_EXPECT), or ``run`` and ``bind`` refuse to start it; and
a GPU that is lost is noticed."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu
from safe_gpu import GPUOwner, NoPlaceholder, WrongDeviceError
from safe_gpu.affinity.binding import leave
from safe_gpu.claim.worker import check_expected_gpu
from safe_gpu.errors import HolderLostError


@pytest.fixture
def held() -> Iterator[GPUOwner]:
    """A delegating claim of GPU 0 and 1. The environment is that of a worker for GPU 1."""
    with GPUOwner(2, NoPlaceholder(), affinity=None, delegate=True) as owner:
        yield owner
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # where a test released it, ``worker`` has put that back


@pytest.fixture
def worker(held: GPUOwner) -> Iterator[pytest.MonkeyPatch]:
    """Sets variables of the worker, for as long as the claim lives; so far they are right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        patch.setenv("SAFE_GPU_EXPECT", held.gpus[1].uuid)
        yield patch


@pytest.mark.parametrize("verb", ["run", "bind"])
def test_the_command_runs_on_the_gpu_that_was_meant_or_not_at_all(worker, held: GPUOwner, command, verb: str) -> None:
    done = command.run(verb, "--", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES ${SAFE_GPU_EXPECT-unset}")
    assert (done.returncode, done.stdout) == (0, "1 unset\n"), done.stderr
    worker.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = command.run(verb, "--", "echo", "started")
    assert (done.returncode, done.stdout, "CUDA_VISIBLE_DEVICES=0 it sees GPU-" in done.stderr) == (70, "", True)
    held.release_gpus()
    worker.setenv("CUDA_VISIBLE_DEVICES", "1")
    done = command.run(verb, "--", "echo", "started")
    assert (done.returncode, done.stdout, "is no longer held by its claim" in done.stderr) == (70, "", True)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("0", "CUDA_VISIBLE_DEVICES=0 it sees GPU-"),
        ("0,1", "CUDA_VISIBLE_DEVICES=0,1 it sees GPU-"),
        ("", "CUDA_VISIBLE_DEVICES= it sees 0 GPUs"),
        (None, "without CUDA_VISIBLE_DEVICES it sees 8 GPUs"),
    ],
)
def test_other_gpus_than_the_expected_one(worker: pytest.MonkeyPatch, visible: str | None, seen: str) -> None:
    worker.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        worker.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(WrongDeviceError, match=seen) as caught:
        check_expected_gpu()
    assert os.environ["SAFE_GPU_EXPECT"] in str(caught.value)


def test_a_gpu_that_another_claim_holds_does_not_count(worker: pytest.MonkeyPatch, held: GPUOwner) -> None:
    worker.setenv("SAFE_GPU_SCOPE", "0123456789abcdef")
    with pytest.raises(HolderLostError, match="is no longer held"):
        check_expected_gpu()
    assert "SAFE_GPU_EXPECT" in os.environ


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


@pytest.fixture
def shell(fake_gpus: Any, command: Any) -> Any:
    """A shell that has claimed GPU 1 by ``run`` and reads its commands from a pipe."""
    fake_gpus.set(4)
    process = command.start("run", "--only", "1", "--", "sh", stdin=subprocess.PIPE, env=fake_gpus.env)

    def ask(line: str, lost: int | None = None) -> list[str]:
        if lost is not None:
            fake_gpus.change(lost, lost=1)
        process.stdin.write(f"{line} 2>&1; echo DONE $?\n")
        process.stdin.flush()
        lines = []
        while not lines or not lines[-1].startswith("DONE"):
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        return lines

    assert ask("echo $CUDA_VISIBLE_DEVICES") == ["1\n", "DONE 0\n"]  # it has claimed
    return ask


@pytest.mark.skipif(not os.path.exists("/sys/devices/system/cpu/cpu0/topology"), reason="needs /sys")
def test_status_and_bind_notice_it(shell: Any, fake_gpus: Any, command: Any) -> None:
    assert "means" not in "".join(shell("COLUMNS=200 safe-gpu status"))
    *lines, done = shell("COLUMNS=300 safe-gpu status", lost=0)
    assert f"warning: {SHIFT}" in "".join(lines)
    assert done == "DONE 0\n"
    said, brace, rest = "".join(shell("safe-gpu status --json")[:-1]).partition("{")
    assert SHIFT in said
    assert json.loads(brace + rest)["schema"] == 2
    assert "means" not in "".join(shell(f"CUDA_VISIBLE_DEVICES={fake_gpus.uuids[1]} safe-gpu status"))
    *lines, bound, _ = shell("safe-gpu bind -- echo bound")
    assert (SHIFT in "".join(lines), bound) == (True, "bound\n")
    outside = command.run("status", env={**fake_gpus.env, "CUDA_VISIBLE_DEVICES": "1"})
    assert "means" not in outside.stdout + outside.stderr


@pytest.fixture
def unbound() -> Iterator[None]:
    """Undo the binding of this process after the test."""
    yield
    leave()


def test_bind_in_python_notices_it(host: Any, unbound: None) -> None:
    safe_gpu.claim_gpus(1, only=1, affinity=None, timeout=0)
    assert SHIFT not in str(safe_gpu.bind())
    host.edits[host.uuids[0]] = {"lost": True}
    assert SHIFT in str(safe_gpu.bind())


def test_bind_makes_no_state_directory(host: Any, unbound: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    safe_gpu.bind()
    assert not Path(os.environ["SAFE_GPU_DIR"]).exists()
