"""The tests that need a real GPU, on machines without one: they are collected with little, and pass on fake GPUs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.real import long

NEEDS_MORE = "tests/runtimes/test_cuda.py"  # than the fakes have: it is collected, and not run

ROOT = Path(__file__).parents[2]

# What the extra `test` has besides pytest and its timeouts: a host with a GPU may lack it.
BLOCK = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("hypothesis", "jsonschema"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Finder())
"""


@long
@pytest.mark.timeout(600)
def test_they_need_little_and_pass_on_fake_gpus(fake_gpus: Any, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(BLOCK)
    fake_gpus.set(2)
    environment = {name: value for name, value in fake_gpus.env.items() if name != "SAFE_GPU_DRIVER"}
    environment["PYTHONPATH"] += f":{tmp_path}"
    options = ("-p", "block", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-v", "-rs", "-m", "gpu")
    command = [sys.executable, "-m", "pytest", *options, "--deselect", NEEDS_MORE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"^(tests/[\w/]+\.py)::.* PASSED", done.stdout, re.MULTILINE)
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"^(pytestmark = .*|@)pytest\.mark\.gpu\b", path.read_text(), re.MULTILINE)
    ]
    assert len(marked) >= 3
    assert sorted({*passed, NEEDS_MORE}) == marked
    assert len(passed) >= 15, done.stdout
    assert "no GPU" not in done.stdout
