"""The tests that need a real GPU, on machines without one: they are collected with little, and pass on fake GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


def run_pytest(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_they_are_collected_with_pytest_and_the_package_alone(tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(BLOCK)
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    found = run_pytest("-p", "block", "-q", "--collect-only", "-m", "gpu", PYTHONPATH=path)
    files = dict.fromkeys(re.findall(r"^(tests/[\w/]+\.py)::", found, re.MULTILINE))
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if re.search(r"^(pytestmark = .*|@)pytest\.mark\.gpu\b", path.read_text(), re.MULTILINE)
    ]
    assert len(marked) >= 5
    assert sorted(files) == marked


@pytest.mark.timeout(600)
def test_they_pass_on_fake_gpus(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus.set(2)
    environment = {name: value for name, value in fake_gpus.env.items() if name != "SAFE_GPU_DRIVER"}
    monkeypatch.delenv("SAFE_GPU_DRIVER")
    out = run_pytest("-q", "-rs", "-m", "gpu", "tests/gpu", **environment)
    passed = re.search(r"(\d+) passed", out)
    assert passed, out
    assert int(passed[1]) >= 13, out
    assert "no GPU" not in out
