"""tools/interleave.py finds what was broken on purpose, and a schedule that it prints shows the same again."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.real import long

TOOL = Path(__file__).parents[2] / "tools" / "interleave.py"

pytestmark = [
    pytest.mark.skipif(not TOOL.exists(), reason="this is not a checkout: there is no tools/ here"),
    pytest.mark.timeout(300),
]


_TWICE = "GPU 0 is booked twice"


def interleave(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), "--jobs", "1", *words], capture_output=True, text=True)


@long
@pytest.mark.parametrize(
    ("broken", "scene", "begin", "fault"),
    [
        ("no second listing", "unlocked", "", _TWICE),
        ("lower stays", "unlocked-again", "A B C2 A7", _TWICE),
        ("names come again", "unlocked-again", "A B C2", _TWICE),
        ("not locked", "apart", "", _TWICE),
        ("locked after its name", "unlocked", "A8", _TWICE),
        ("no doors", "directories-2", "", _TWICE),
        ("door too early", "directories-2", "", _TWICE),
        ("parts not asked", "shares-whole-directories", "", _TWICE),
        ("share without the door", "shares-whole-directories", "A3", _TWICE),
        ("no door of the token", "nested-directories", "A A%3", _TWICE),
        ("old poll", "queue-stranger", "A B C D C D C D C A", "D has GPU [0] before C, whose ticket is 1"),
        ("no queue", "queue", "A B C B C B", "C has GPU [0] before B, whose ticket is 1"),
        ("closed read once", "unlocked-drain", "", "which was drained and held by nobody"),
    ],
)
def test_a_broken_build_is_caught_and_the_schedule_repeated(broken: str, scene: str, begin: str, fault: str) -> None:
    done = interleave("--scene", scene, "--break", broken, "--begin", begin)
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
