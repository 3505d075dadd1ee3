"""An upgrade under load: holders hold, and waiters wait, claim or fail as if nobody had replaced the package."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(sys.modules["safe_gpu"].__file__ or "").parent
NUMBER = 3


def test_holders_and_waiters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any) -> None:
    """The files of the new version cannot even be imported, so that none of it gets into these processes."""
    shutil.copytree(PACKAGE, tmp_path / "safe_gpu", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("SAFE_GPU_DRIVER", "simulated:big-16")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started: list[subprocess.Popen[str]] = []

    def run(script: str, name: str) -> None:
        command = [sys.executable, "-m", "safe_gpu", "run", "--only", f"0-{NUMBER - 1}"]
        command += ["--", "sh", "-c", script]
        with (tmp_path / name).open("w") as log:
            started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True))

    def said(name: str, words: str) -> bool:
        return words in (tmp_path / name).read_text()

    try:
        for number in range(NUMBER):
            run("echo held; read line; echo $CUDA_VISIBLE_DEVICES", f"holder{number}")
        eventually(lambda: all(said(f"holder{number}", "held") for number in range(NUMBER)))
        for number in range(NUMBER):
            run("echo got $CUDA_VISIBLE_DEVICES", f"waiter{number}")
        eventually(lambda: all(said(f"waiter{number}", "waiting ") for number in range(NUMBER)))
        for path in (tmp_path / "safe_gpu").rglob("*.py"):
            path.write_text("raise ImportError('the new version')")
        shutil.rmtree(tmp_path / "safe_gpu" / "__pycache__", ignore_errors=True)
        for one in started[:NUMBER]:
            one.communicate("\n", timeout=100)
        assert [one.wait(100) for one in started] == [0] * 2 * NUMBER
    finally:
        for one in started:
            one.kill()
            one.communicate()
    held = [(tmp_path / f"holder{number}").read_text().split()[-1] for number in range(NUMBER)]
    assert sorted(map(int, held)) == list(range(NUMBER))
    assert all(said(f"waiter{number}", "got ") for number in range(NUMBER))


def test_a_refusal_after_the_upgrade(child: Any, ground: Any) -> None:
    code = """
import time
from safe_gpu import ClaimTimeout, GPUOwner, NoPlaceholder
class New:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("safe_gpu"):
            raise ModuleNotFoundError(name)
genuine = time.sleep
def sleep(seconds):
    sys.meta_path.insert(0, New())
    genuine(seconds)
time.sleep = sleep
try:
    GPUOwner(1, NoPlaceholder(), timeout=0.3)
except ClaimTimeout as err:
    say(str(err).splitlines()[0])
"""
    ground.hold(*range(8))
    assert "1 GPU asked for, 0 free after" in child(code).hear()
