"""tools/interleave.py finds what was broken on purpose, and a schedule that it prints shows the same again."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "interleave.py"

pytestmark = [
    pytest.mark.skipif(not TOOL.exists(), reason="this is not a checkout: there is no tools/ here"),
    pytest.mark.timeout(300),
]


def interleave(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), "--jobs", "1", *words], capture_output=True, text=True)


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


def test_a_schedule_is_always_the_same() -> None:
    first, second = (interleave("--scene", "queue", "--replay", "A B C A!") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout.replace(" ", "") == second.stdout.replace(" ", "") != ""
    for part in ("claims", "queue"):  # the steps by which others see an entry
        for call in ("list", "rename", "ask shared", "unlink", "unlock"):
            assert re.search(rf" {call} 1/{part}\b", first.stdout), f"{call} {part}"
