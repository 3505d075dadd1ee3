"""Processes that are killed or interrupted at a system call leave nothing in anybody's way: a sample of all points."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from support.real import REQUIRED

TOOL = Path(__file__).parents[2] / "tools" / "crash_points.py"

pytestmark = [
    pytest.mark.skipif(not TOOL.exists(), reason="this is not a checkout: there is no tools/ here"),
    pytest.mark.timeout(900),
]


def crash_points(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(done.stdout.strip())
    return done


def test_some_points() -> None:
    """CRASH_SEED and CRASH_SAMPLE choose others, and more."""
    seed = os.environ.get("CRASH_SEED") or str(random.SystemRandom().randrange(10**6))
    done = crash_points("--sample", os.environ.get("CRASH_SAMPLE", "50" if REQUIRED else "20"), "--seed", seed)
    print(done.stdout)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
    assert f"seed {seed}" in done.stdout
    assert ", 0 with violations" in done.stdout
