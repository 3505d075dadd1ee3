"""The scripts in tools/ that people run by hand."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.real import long

import safe_gpu

ROOT = Path(safe_gpu.__file__).parents[1]
TOOLS = Path(__file__).parents[1] / "tools"
ACQUISITOR = TOOLS / "gpu-acquisitor.py"
LINE = re.compile(r"(GPUOwner\w+) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[(INFO|ERROR|WARNING)\] (.*)")

pytestmark = pytest.mark.skipif(not ACQUISITOR.exists(), reason="this is not a checkout: there is no tools/ here")


@pytest.fixture(autouse=True)
def found_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=110)


class Instance:
    """A running gpu-acquisitor."""

    def __init__(self, *arguments: str) -> None:
        words = [sys.executable, "-u", str(ACQUISITOR), "--backend", "simulated", *arguments]
        self.process: Any = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.steps: list[str] = []

    def until(self, step: str) -> str:
        """Read its log up to the line that begins so."""
        for line in self.process.stderr:
            match = LINE.fullmatch(line.rstrip("\n"))
            assert match, f"not a line of the log: {line}"
            self.steps.append(match[3])
            if match[3].startswith(step):
                return match[3]
        raise AssertionError(f"it ended without {step!r}: {self.steps}")

    def finish(self) -> int:
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
        one.process.stderr.close()


def test_the_second_instance_does_not_wait_for_the_first_ones_placeholder(instance: Any) -> None:
    first = instance("--id", "1", "--nb-gpus", "1", "--sleep", "1000")
    chosen = first.until("Set CUDA_VISIBLE_DEVICES=")  # and now it sleeps, with nothing on its GPU
    second = instance("--id", "2", "--nb-gpus", "2", "--sleep", "0")
    assert second.finish() == 0
    assert first.process.poll() is None
    names = [step.partition("=")[0] for step in second.steps]
    expected = ["acquiring lock", "lock acquired", "lock released", "Set CUDA_VISIBLE_DEVICES", "Finished"]
    assert [name for name in names if name in expected] == expected
    (mine,) = [step for step in second.steps if step.startswith("Set CUDA_VISIBLE_DEVICES=")]
    ours, theirs = (set(step.partition("=")[2].split(",")) for step in (mine, chosen))
    assert (len(ours), len(theirs), len(ours & theirs)) == (2, 1, 0)
    assert any(step.startswith("Allocated devices: [") for step in second.steps)
    assert "now claims run side by side" in second.steps[-2]


def test_it_says_why_it_got_nothing(instance: Any) -> None:
    greedy = instance("--nb-gpus", "9", "--sleep", "0")
    assert "only 8" in greedy.until("9 GPUs")
    assert greedy.finish() == 1


def test_a_python_without_the_package_is_told_which_to_use() -> None:
    done = python("-I", "-S", str(ACQUISITOR), "--help")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert ". .venv/bin/activate" in done.stderr


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(str(TOOLS / "bench.py"), *arguments)


def test_driver_calls_are_counted() -> None:
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("needs a C compiler, for the fake NVML")
    done = bench("calls", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    for name, most in (("in a first claim", 100), ("in a claim again", 64), ("once the GPUs are held", 20)):
        calls = re.findall(rf"^NVML {name} .* (\d+)\.00 of at most {most} calls: met$", done.stdout, re.MULTILINE)
        assert calls, done.stdout
        assert all(0 < int(number) <= most for number in calls)


@long
def test_all_that_has_a_budget_stands_in_one_table() -> None:
    done = bench("--quick")
    assert done.returncode == 0, done.stderr
    number = r"[+-]?\d+\.\d\d"
    row = rf"^(\S.*\S) +{number} +(?:-|{number})  {number} of at most (.*): (?:met|MISSED)"
    assert {*re.findall(row, done.stdout, re.MULTILINE)} >= {
        ("import safe_gpu (ms)", "+25 ms"), ("claim and release (ms)", "4.5 times"),
        ("claim and release, by itself (ms)", "3 ms"), ("affinity='node' on top of that (ms)", "2 ms"),
        ("safe-gpu run -- true (ms)", "+15 ms"), ("8 processes at once (ms)", "4.5 times"),
        ("hand-over, 10 for 8: median (ms)", "20 ms"), ("hand-over, 10 for 8: worst (ms)", "300 ms"),
        ("3 waiters arrive at once (s)", "3 s"), ("3 waiters, share of a core (%)", "2 %"),
        ("memory of a waiter (MiB)", "+15 MiB"),
    }, done.stdout  # fmt: skip
