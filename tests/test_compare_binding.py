"""tools/compare_binding.py on a simulated host: both kinds of runs by turns, their medians, and their pages by node."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from safe_gpu.affinity.placement import PlacementReport, ProcessPlacement, ThreadPlacement

TOOLS = Path(__file__).parents[1] / "tools"

pytestmark = pytest.mark.skipif(not TOOLS.exists(), reason="this is not a checkout: there is no tools/ here")
MASK = os.sched_getaffinity(0)
needs_two_cpus = pytest.mark.skipif(
    len(MASK) < 2 or 0 not in MASK, reason="mode single binds to CPU 0, which must be one of several here"
)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import compare_binding

    return compare_binding


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "compare_binding.py"), *arguments]
    environment = {**os.environ, "SAFE_GPU_DRIVER": "simulated:p4d"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


CPUS = "import os, sys; open(sys.argv[1], 'a').write('run '); print('CPUs:', len(os.sched_getaffinity(0)))"


@needs_two_cpus
def test_only_one_kind_of_runs_is_bound(tmp_path: Path) -> None:
    command = (sys.executable, "-c", CPUS, str(tmp_path / "log"))
    done = compare("--runs", "2", "--affinity", "single", "--figure", "CPUs: (.*)", "--", *command)
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


def placed(memory: dict[int, int], gpu_nodes: set[int], mask: set[int]) -> ProcessPlacement:
    thread = ThreadPlacement(1, "", 0, 0, frozenset(mask), frozenset())
    return ProcessPlacement(1, 0, "", (thread,), memory=memory, gpu_nodes=frozenset(gpu_nodes))


def test_medians_pages_and_the_verdict(tool: Any) -> None:
    """Pages are those of the look that shows most. Of two ranks one has its GPU on node 0, the other on node 1."""
    arm = tool.Arm([], figures=[3.0, 1.0, 2.0])
    ranks = placed({0: 6 << 20, 1: 2 << 20}, {0}, {1}), placed({0: 4 << 20, 1: 8 << 20}, {1}, {2})
    arm.look(PlacementReport(ranks))
    arm.look(PlacementReport(ranks[:1]))
    assert arm.line(" s") == "median 2 s (1 to 3); pages: node 0 10 MiB, node 1 10 MiB; remote 30.0%"
    arms = {name: tool.Arm([], figures=[figure]) for name, figure in ((tool.UNBOUND, 12.4), (tool.BOUND, 10.0))}
    assert tool.verdict(arms, False)[2:] == ["bound / not bound: 1.24 times as fast"]
    assert tool.verdict(arms, True)[2:] == ["bound / not bound: 0.81 of the figure"]
    for arm in arms.values():
        arm.look(PlacementReport(ranks[:1]))
    assert tool.verdict(arms, True)[3] == "nothing is compared: both kinds of runs may use the same CPUs (1)"


def test_what_cannot_be_compared() -> None:
    for arguments, code, says in (
        ("", 2, "a command after --"),
        ("--runs 0 -- true", 2, "--runs from 1 up"),
        ("--runs 1 -- false", 1, "a run ended with 1"),
        ("--runs 1 --figure x:(.) -- true", 1, "a run printed nothing that matches 'x:(.)'"),
        ("-n 9 --runs 1 -- true", 1, "9 GPUs"),
    ):
        done = compare(*arguments.split())
        assert (done.returncode, "Traceback" in done.stderr) == (code, False)
        assert says in done.stderr
