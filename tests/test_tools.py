"""The scripts in tools/ that people run by hand."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import api
from support.real import long

import safe_gpu

ROOT = Path(safe_gpu.__file__).parents[1]
TOOLS = Path(__file__).parents[1] / "tools"
ACQUISITOR, BENCH, COMPARE = (TOOLS / name for name in ("gpu-acquisitor.py", "bench.py", "compare_binding.py"))
LINE = re.compile(r"(GPUOwner\w+) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} \[(INFO|ERROR|WARNING)\] (.*)")

pytestmark = pytest.mark.skipif(not ACQUISITOR.exists(), reason="this is not a checkout: there is no tools/ here")


@pytest.fixture(autouse=True)
def found_in_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
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


@long
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
    done = python("-I", "-S", ACQUISITOR, "--help")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert ". .venv/bin/activate" in done.stderr


@long
def test_driver_calls_are_counted() -> None:
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("needs a C compiler, for the fake NVML")
    done = python(BENCH, "calls", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("NVML in a first claim", "NVML in a claim again", "NVML once the GPUs are held", "a first claim"):
        assert re.search(rf"^{name}.* \d+\.00", done.stdout, re.MULTILINE), done.stdout


@long
def test_all_that_has_a_budget_stands_in_one_table() -> None:
    done = python(BENCH, "--quick")
    assert done.returncode == 0, done.stderr
    number = r"[+-]?\d+\.\d\d"
    row = rf"^(\S.*\S) +{number} +(?:-|{number})  {number} of at most \S.*: (?:met|MISSED)"
    assert {*re.findall(row, done.stdout, re.MULTILINE)} >= {
        "import safe_gpu (ms)", "claim and release (ms)", "claim and release, by itself (ms)",
        "affinity='node' on top of that (ms)", "safe-gpu run -- true (ms)", "8 processes at once (ms)",
        "hand-over, 10 for 8: median (ms)", "hand-over, 10 for 8: worst (ms)", "3 waiters arrive at once (s)",
        "3 waiters, share of a core (%)", "memory of a waiter (MiB)",
    }, done.stdout  # fmt: skip


@long
def test_a_herd_of_jobs_is_measured_step_by_step() -> None:
    if not (shutil.which("gcc") or shutil.which("cc")):
        pytest.skip("needs a C compiler, for the fake NVML")
    done = python(BENCH, "herd", "--jobs", "9", "--job-seconds", "0.1", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    names = re.findall(r"^(.+?) +-?\d+\.\d\d +(?:-|\d+\.\d\d)", done.stdout, re.MULTILINE)
    assert names == [
        "a job: the interpreter (ms of CPU)", "a job: filelock (ms of CPU)", "a job: pynvml (ms of CPU)",
        "a job: safe_gpu (ms of CPU)", "9 jobs at once: GPUs are used (%)",
    ], done.stdout  # fmt: skip


# compare_binding.py on a simulated host: both kinds of runs by turns, their medians, and their pages by node

MASK = os.sched_getaffinity(0)
needs_two_cpus = pytest.mark.skipif(
    len(MASK) < 2 or 0 not in MASK, reason="mode single binds to CPU 0, which must be one of several here"
)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import compare_binding

    return compare_binding


CPUS = "import os, sys; open(sys.argv[1], 'a').write('run '); print('CPUs:', len(os.sched_getaffinity(0)))"


@long
@needs_two_cpus
def test_only_one_kind_of_runs_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:p4d")
    command = (sys.executable, "-c", CPUS, str(tmp_path / "log"))
    words = ("--runs", "2", "--every", "1000", "--affinity", "single", "--figure", "CPUs: (.*)")
    done = python(COMPARE, *words, "--", *command)
    assert done.returncode == 0, done.stderr
    every = len(MASK)
    unbound, bound, ratio = done.stdout.splitlines()
    assert unbound.startswith(f"not bound: median {every} ({every} to {every}); pages were not seen")
    assert bound.startswith("bound:     median 1 (1 to 1); ")
    assert ratio == f"bound / not bound: {1 / every:.2f} of the figure"
    order = re.findall(r"run (\d) of 2, (.*):", done.stderr)
    assert order == [("1", "not bound"), ("1", "bound"), ("2", "bound"), ("2", "not bound")]
    assert (tmp_path / "log").read_text() == "run " * 4


def test_a_run_is_looked_at_while_it_lasts(tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one ends when it has been."""
    seen, look = tmp_path / "seen", tool.safe_gpu.placement
    monkeypatch.setattr(tool.safe_gpu, "placement", lambda pid: (look(pid), seen.touch())[0])
    arm = tool.Arm(["env"])
    code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    arm.run([sys.executable, "-c", code, str(seen)], 0.01, None)
    assert (len(arm.figures), arm.masks) == (1, {frozenset(MASK)})
    assert arm.pages.total() > 1 << 20


def placed(memory: dict[int, int], gpu_nodes: set[int], mask: set[int]) -> api.ProcessPlacement:
    thread = api.ThreadPlacement(1, "", 0, 0, frozenset(mask), frozenset())
    return api.ProcessPlacement(1, 0, "", (thread,), memory=memory, gpu_nodes=frozenset(gpu_nodes))


def test_medians_pages_and_the_verdict(tool: Any) -> None:
    """Pages are those of the look that shows most. Of two ranks one has its GPU on node 0, the other on node 1."""
    arm = tool.Arm([], figures=[3.0, 1.0, 2.0])
    ranks = placed({0: 6 << 20, 1: 2 << 20}, {0}, {1}), placed({0: 4 << 20, 1: 8 << 20}, {1}, {2})
    arm.look(api.PlacementReport(ranks))
    arm.look(api.PlacementReport(ranks[:1]))
    assert arm.line(" s") == "median 2 s (1 to 3); pages: node 0 10 MiB, node 1 10 MiB; remote 30.0%"
    arms = {name: tool.Arm([], figures=[figure]) for name, figure in ((tool.UNBOUND, 12.4), (tool.BOUND, 10.0))}
    assert tool.verdict(arms, False)[2:] == ["bound / not bound: 1.24 times as fast"]
    assert tool.verdict(arms, True)[2:] == ["bound / not bound: 0.81 of the figure"]
    for arm in arms.values():
        arm.look(api.PlacementReport(ranks[:1]))
    assert tool.verdict(arms, True)[3] == "nothing is compared: both kinds of runs may use the same CPUs (1)"


@long
def test_what_cannot_be_compared() -> None:
    for arguments, code, says in (
        ("--runs 1 -- false", 1, "a run ended with 1"),
        ("--runs 1 --figure x:(.) -- true", 1, "a run printed nothing that matches 'x:(.)'"),
        ("-n 9 --runs 1 -- true", 1, "9 GPUs"),
    ):
        done = python(COMPARE, *arguments.split())
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)
        assert says in done.stderr
