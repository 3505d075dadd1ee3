"""The tools that try points and orders: a sample of all crash points, and schedules that show a fault again."""

import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.real import REQUIRED, long

TOOLS = Path(__file__).parents[2] / "tools"

pytestmark = [
    pytest.mark.skipif(not TOOLS.exists(), reason="this is not a checkout: there is no tools/ here"),
    pytest.mark.timeout(900),
]


def run(tool: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOLS / tool), *words], capture_output=True, text=True)


def interleave(*words: str) -> subprocess.CompletedProcess[str]:
    return run("interleave.py", "--jobs", "1", *words)


def test_some_crash_points() -> None:
    """Processes that are killed or interrupted at a system call leave nothing in anybody's way.

    CRASH_SEED and CRASH_SAMPLE choose other points, and more.
    """
    seed = os.environ.get("CRASH_SEED") or str(random.SystemRandom().randrange(10**6))
    sample = os.environ.get("CRASH_SAMPLE", "50" if REQUIRED else "5")
    done = run("crash_points.py", "--sample", sample, "--seed", seed)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
    assert f"seed {seed}" in done.stdout
    assert ", 0 with violations" in done.stdout


@long
def test_the_schedule_of_a_fault_shows_it_again() -> None:
    scene, broken, fault = "unlocked", "no second listing", "GPU 0 is booked twice"
    done = interleave("--scene", scene, "--break", broken)
    assert done.returncode == 1, done.stdout + done.stderr
    assert fault in done.stdout
    command = re.search(r"tools/interleave.py (--scene .*)", done.stdout)
    assert command is not None
    again = interleave(*shlex.split(command[1]), "--break", broken)
    assert again.returncode == 1, again.stdout + again.stderr
    assert fault in again.stdout
    intact = interleave(*shlex.split(command[1])).returncode
    assert intact in (0, 2), "the schedule is harmless, or there is no such one, where nothing is broken"


@long
def test_a_schedule_is_always_the_same() -> None:
    first, second = (interleave("--scene", "queue", "--replay", "A B C A!") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.replace(" ", "") == second.stdout.replace(" ", "") != ""
    for part in ("claims", "queue"):  # the steps by which others see an entry
        for call in ("list", "rename", "ask exclusive", "unlink", "unlock"):
            assert re.search(rf" {call} 1/{part}\b", first.stdout), f"{call} {part}"
