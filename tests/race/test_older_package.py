"""Claims of this package and of safe-gpu 2.0.0, the real one, on one host of fake GPUs."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.real import long, unavailable

HERE = Path(__file__).parent
FAKES = HERE.parent / "fakes"
LOCK_DIRECTORY = Path("/tmp/safe_gpu")


@pytest.fixture(scope="module")
def older_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the older package in it."""
    target = tmp_path_factory.mktemp("older")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command = [*pip, "--retries=1", "--timeout=10", f"--target={target}", "safe-gpu==2.0.0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    except subprocess.TimeoutExpired:
        unavailable("needs safe-gpu 2.0.0, which could not be installed in 100 s")
    if done.returncode:
        unavailable(f"needs safe-gpu 2.0.0, which could not be installed: {done.stderr.strip()[-200:]}")
    return target


@pytest.fixture
def private_lock() -> Iterator[list[str]]:
    """A command prefix: what it runs sees an empty directory where the older package has its lock."""
    unshare = shutil.which("unshare")
    if unshare is None:
        unavailable("needs unshare(1)")
    made = not LOCK_DIRECTORY.exists()
    LOCK_DIRECTORY.mkdir(exist_ok=True)
    mount = f'mount -t tmpfs -o mode=0777 none {LOCK_DIRECTORY} && exec "$@"'
    prefix = [unshare, "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "sh", "-c", mount, "sh"]
    try:
        if subprocess.run([*prefix, "true"], capture_output=True, timeout=30).returncode:
            unavailable("needs a mount namespace, which this user may not make")
        yield prefix
    finally:
        if made and not any(LOCK_DIRECTORY.iterdir()):
            LOCK_DIRECTORY.rmdir()


@pytest.mark.parametrize(
    "scenario", ["side_by_side", *(pytest.param(scenario, marks=long) for scenario in ("kept_out", "rush"))]
)
def test_old_and_new_claims(scenario: str, older_package: Path, private_lock: list[str], fake_gpus: Any) -> None:
    program = fake_gpus.directory / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKES / "nvidia_smi.py"}" "$@"\n')
    program.chmod(0o755)
    running = subprocess.Popen(
        [*private_lock, sys.executable, str(HERE / "old_and_new.py"), scenario, str(older_package)],
        env={**fake_gpus.env, "PATH": f"{program.parent}:{os.environ['PATH']}", "SAFE_GPU_LEGACY_LOCK": "auto"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = running.communicate(timeout=100)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # whoever still holds a GPU
    assert running.returncode == 0, said
    assert said.endswith("as it should be\n")
