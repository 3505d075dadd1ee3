"""The scripts in tools/ that people run by hand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import safe_gpu

ROOT = Path(safe_gpu.__file__).parents[1]
TOOLS = Path(__file__).parents[1] / "tools"
ACQUISITOR = TOOLS / "gpu-acquisitor.py"
LINE = re.compile(r"(GPUOwner\w+) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[(INFO|ERROR|WARNING)\] (.*)")

pytestmark = pytest.mark.skipif(not ACQUISITOR.exists(), reason="this is not a checkout: there is no tools/ here")


class Instance:
    """A running gpu-acquisitor."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ACQUISITOR), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.steps: list[str] = []

    def until(self, step: str) -> str:
        """Read its log up to the line that begins so."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            match = LINE.fullmatch(line.rstrip("\n"))
            assert match, f"not a line of the log: {line}"
            self.steps.append(match[3])
            if match[3].startswith(step):
                return match[3]
        raise AssertionError(f"it ended without {step!r}: {self.steps}")

    def finish(self) -> int:
        assert self.process.stderr is not None
        self.steps += [match[3] for match in map(LINE.match, self.process.stderr) if match]
        return self.process.wait(60)


@pytest.fixture
def instance() -> Iterator[Any]:
    """Start instances that end with the test."""
    running: list[Instance] = []

    def start(*arguments: str) -> Instance:
        running.append(Instance(*arguments))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.wait()
        assert one.process.stderr is not None
        one.process.stderr.close()


@pytest.mark.parametrize("how", [(), ("--explicit-owner-object",)])
def test_the_second_instance_does_not_wait_for_the_first_ones_placeholder(instance: Any, how: tuple[str, ...]) -> None:
    first = instance("--backend", "simulated", "--id", "1", "--nb-gpus", "1", "--sleep", "1000", *how)
    chosen = first.until("Set CUDA_VISIBLE_DEVICES=")  # and now it sleeps, with nothing on its GPU
    second = instance("--backend", "simulated", "--id", "2", "--nb-gpus", "2", "--sleep", "0", *how)
    assert second.finish() == 0
    assert first.process.poll() is None
    names = [step.partition("=")[0] for step in second.steps]
    expected = ["acquiring lock", "lock acquired", "lock released", "Set CUDA_VISIBLE_DEVICES", "Finished"]
    assert [name for name in names if name in expected] == expected
    (mine,) = [step for step in second.steps if step.startswith("Set CUDA_VISIBLE_DEVICES=")]
    ours, theirs = (set(step.partition("=")[2].split(",")) for step in (mine, chosen))
    assert len(ours) == 2
    assert len(theirs) == 1
    assert not ours & theirs
    assert any(step.startswith("Allocated devices: [") for step in second.steps)


def test_it_says_why_it_got_nothing(instance: Any) -> None:
    greedy = instance("--backend", "simulated", "--nb-gpus", "9", "--sleep", "0")
    assert "only 8" in greedy.until("9 GPUs")
    assert greedy.finish() == 1


def test_a_missing_framework_is_named(instance: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = subprocess.run(
        [sys.executable, str(ACQUISITOR), "--sleep", "0"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "needs torch, which is not installed" in done.stderr


def test_bad_arguments() -> None:
    done = subprocess.run(
        [sys.executable, str(ACQUISITOR), "--backend", "abacus"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "abacus" in done.stderr


def bench(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOLS / name), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.mark.parametrize(
    ("name", "arguments", "lines"),
    [
        (
            "bench_claim.py",
            ("import", "claim", "crowd", "run", "--repeat=1"),
            ["import safe_gpu", "claim and release", "8 processes at once", "safe-gpu run -- true"],
        ),
        (
            "bench_waiting.py",
            ("handover", "waiters", "memory", "--processes=10", "--waiters=3", "--seconds=0.1"),
            ["hand-over, 10 for 8: median", "3 waiters arrive at once", "memory of a waiter, its share"],
        ),
    ],
)
def test_benchmarks_print_a_table_against_rivals(name: str, arguments: tuple[str, ...], lines: list[str]) -> None:
    done = bench(name, *arguments)
    assert done.returncode == 0, done.stderr
    for line in lines:
        assert re.search(rf"^{re.escape(line)}.* \d+\.\d\d ", done.stdout, re.MULTILINE), done.stdout
    assert "rival: " in done.stdout
    assert "of at most" in done.stdout


@pytest.mark.parametrize("name", ["bench_claim.py", "bench_waiting.py"])
def test_an_unknown_benchmark_is_refused(name: str) -> None:
    done = bench(name, "everything")
    assert done.returncode == 2
    assert "'everything'" in done.stderr
