"""``safe-gpu run -- dragon program.py``: what Dragon 0.14 gets wrong in a claim is told before."""

from pathlib import Path

import pytest

from safe_gpu.cli.advice import warning_about

PROGRAM = "from dragon.native.machine import System\nPool(policy=System().gpu_policies(), processes_per_policy=4)\n"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment that has a ``dragon``, and a program beside it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dragon").touch()
    (tmp_path / "pool.py").write_text(PROGRAM)
    (tmp_path / "other.py").write_text("held.policies()\n")
    return tmp_path


@pytest.mark.parametrize(
    ("version", "command", "warned"),
    [
        ("0.14.1", "dragon -s pool.py", True),
        ("0.14.1", "nice -n 5 dragon -w ssh -t tcp pool.py --epochs 3", True),
        ("0.14.1", "dragon -s other.py", False),
        ("0.14.1", "dragon -s no-such-file.py", False),
        ("0.14.1", "python pool.py", False),
        ("0.15.0", "dragon -s pool.py", False),
        ("", "dragon -s pool.py", False),
    ],
)
def test_one_policy_for_each_gpu(
    environment: Path, monkeypatch: pytest.MonkeyPatch, version: str, command: str, warned: bool
) -> None:
    monkeypatch.chdir(environment)
    dragon = environment / "bin" / "dragon"
    dragon.chmod(0o755)
    monkeypatch.setenv("PATH", str(dragon.parent))
    if version:
        (environment / "lib" / "python3.11" / "site-packages" / f"dragonhpc-{version}.dist-info").mkdir(parents=True)
    text = warning_about(command.split(), str(dragon), "/tmp/safe-gpu")
    assert ("held.policies()" in text) == warned == bool(text)


def test_run_warns(environment: Path, command: object, monkeypatch: pytest.MonkeyPatch) -> None:
    dragon = environment / "bin" / "dragon"
    dragon.write_text("#!/bin/sh\necho $CUDA_VISIBLE_DEVICES\n")
    dragon.chmod(0o755)
    (environment / "lib" / "python3.11" / "site-packages" / "dragonhpc-0.14.1.dist-info").mkdir(parents=True)
    done = command.run("run", "-n", "2", "--only", "1-2", "--", dragon, environment / "pool.py")  # type: ignore[attr-defined]
    assert done.stdout == "1,2\n"
    assert "warning: System().gpu_policies() of Dragon 0.14" in done.stderr
